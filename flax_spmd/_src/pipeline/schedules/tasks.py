"""Tasks: what a schedule is made of, and what each of them waits for.

A stage works on a microbatch up to three times: forward (`fwd`), backward (`bwd`), and, where a
schedule splits the backward, the gradients of its weights (`wgrad`); `bwd` is then the gradient of its
input alone.
The text of a task is `kind_stage__microbatch`, JaxPP's:

    Task('fwd', 2, 0)                     fwd_2__0
    FusedTask((Task('fwd', 3, 0), ...))   FusedTask(fwd_3__0, bwd_3__0)

A fused task is one program: it starts when all that it needs from elsewhere is there, runs its tasks in
order, and hands on their results when the last one is done.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from typing import Literal, TypeAlias, cast, get_args

from flax_spmd._src.public_module import set_module
from flax_spmd.errors import PipelineError, did_you_mean

Kind: TypeAlias = Literal['fwd', 'bwd', 'wgrad']
KINDS: tuple[Kind, ...] = get_args(Kind)

_TASK = re.compile(r'(\w+?)_(\d+)__(\d+)')
_FUSED = re.compile(r'FusedTask\((.*)\)')
_WORD = re.compile(r'FusedTask\([^()]*\)|[^\s,]+')
_HOW = (
  'write fwd_2__0 for the forward of stage 2 and microbatch 0; bwd_2__0; wgrad_2__0; '
  'FusedTask(fwd_2__0, bwd_2__0).'
)


@set_module('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True, slots=True)
class Task:
  """One stage's work of one kind on one microbatch.

  Attributes:
    kind: 'fwd', 'bwd' or 'wgrad'.
    stage: counted from 0 at the model's input.
    microbatch: counted from 0.

  Raises:
    PipelineError: there is no such kind, or a number is negative.

  Example:
    >>> str(Task('fwd', stage=2, microbatch=0))
    'fwd_2__0'
  """

  kind: Kind
  stage: int
  microbatch: int

  def __post_init__(self):
    if self.kind not in KINDS:
      raise PipelineError(
        f'{self.kind!r} is no kind of task.{did_you_mean(self.kind, KINDS)}\nFix: {_HOW}'
      )
    if min(operator.index(self.stage), operator.index(self.microbatch)) < 0:
      raise PipelineError(f'{self} has a negative number.\nFix: count stages and microbatches from 0.')

  @property
  def tasks(self) -> tuple[Task, ...]:
    """Just itself; what a fused task consists of has the same name."""
    return (self,)

  def __str__(self) -> str:
    return f'{self.kind}_{self.stage}__{self.microbatch}'


@set_module('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True, slots=True)
class FusedTask:
  """Several tasks of one rank as one program.

  Attributes:
    tasks: in the order in which they run; at least two.

  Raises:
    PipelineError: there are fewer than two.

  Example:
    >>> str(FusedTask((Task('fwd', 3, 0), Task('bwd', 3, 0))))
    'FusedTask(fwd_3__0, bwd_3__0)'
  """

  tasks: tuple[Task, ...]

  def __post_init__(self):
    if len(self.tasks) < 2:
      raise PipelineError(f'{self} fuses nothing.\nFix: fuse two tasks or more: {_HOW}')

  def __str__(self) -> str:
    return f'FusedTask({", ".join(map(str, self.tasks))})'


Step: TypeAlias = Task | FusedTask  # what a rank runs at once
Order: TypeAlias = tuple[Step, ...]  # of one rank


def parse(text: str) -> Step:
  """A task from its text.

  Raises:
    PipelineError: it is none.

  Example:
    >>> parse('fwd_2__0')
    Task(kind='fwd', stage=2, microbatch=0)
    >>> parse('FusedTask(fwd_3__0, bwd_3__0)').tasks[1]
    Task(kind='bwd', stage=3, microbatch=0)
  """
  fused = _FUSED.fullmatch(text.strip())
  if fused:
    return FusedTask(tuple(map(_parse_one, fused[1].split(','))))
  return _parse_one(text)


def words(line: str) -> list[str]:
  """The texts of tasks that stand in a line, separated by spaces or commas."""
  return _WORD.findall(line)


def inputs(task: Task, stages: int) -> tuple[Task, ...]:
  """The tasks whose results it needs, all of its own microbatch.

  Example:
    >>> [str(one) for one in inputs(Task('bwd', 0, 5), stages=2)]
    ['fwd_0__5', 'bwd_1__5']
  """
  stage, microbatch = task.stage, task.microbatch
  if task.kind == 'wgrad':
    return (Task('bwd', stage, microbatch),)
  if task.kind == 'fwd':
    return (Task('fwd', stage - 1, microbatch),) if stage else ()
  own = Task('fwd', stage, microbatch)
  return (own, Task('bwd', stage + 1, microbatch)) if stage < stages - 1 else (own,)


def needs(task: Task, other: Task, stages: int) -> bool:
  """Whether a task needs another one's result, directly or through others."""
  if task == other or task.microbatch != other.microbatch or other.kind == 'wgrad':
    return False
  return _depth(other, stages) < _depth(task, stages)


def _depth(task: Task, stages: int) -> int:
  """Its place in the chain of a microbatch: down the stages, up again, and weights beside it."""
  down = task.stage if task.kind == 'fwd' else 2 * stages - 1 - task.stage
  return 2 * down + (task.kind == 'wgrad')


def _parse_one(text: str) -> Task:
  found = _TASK.fullmatch(text.strip())
  if not found or found[1] not in KINDS:
    guess = did_you_mean(found[1], KINDS) if found else ''
    raise PipelineError(f'{text.strip()!r} is no task.{guess}\nFix: {_HOW}')
  return Task(cast(Kind, found[1]), int(found[2]), int(found[3]))
