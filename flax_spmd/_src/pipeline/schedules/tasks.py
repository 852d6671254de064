"""Tasks: the units of work of a schedule, and the tasks that each one depends on.

A stage works on a microbatch up to three times: forward (`fwd`), backward (`bwd`) and, in schedules that
split the backward, weight gradient (`wgrad`); `bwd` is then the gradient of the stage's input only.
The text of a task is `kind_stage__microbatch`, as in JaxPP:

    Task('fwd', 2, 0)                     fwd_2__0
    FusedTask((Task('fwd', 3, 0), ...))   FusedTask(fwd_3__0, bwd_3__0)

A fused task is one program: it starts when its inputs from other programs have arrived, runs its tasks
in order, and releases their results when the last one ends.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from typing import Literal, TypeAlias, cast, get_args

from flax_spmd._src.public import public
from flax_spmd.errors import PipelineError, did_you_mean

Kind: TypeAlias = Literal['fwd', 'bwd', 'wgrad']
KINDS: tuple[Kind, ...] = get_args(Kind)

_TASK = re.compile(r'(\w+?)_(\d+)__(\d+)')
_FUSED = re.compile(r'FusedTask\((.*)\)')
_SYNTAX = (
  'write fwd_2__0 for the forward of stage 2 and microbatch 0; bwd_2__0; wgrad_2__0; '
  'FusedTask(fwd_2__0, bwd_2__0).'
)


@public('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True, slots=True)
class Task:
  """The work of one kind that one stage does on one microbatch.

  Attributes:
    kind: 'fwd', 'bwd' or 'wgrad'.
    stage: index of the stage, from 0 at the model's input.
    microbatch: index of the microbatch, from 0.

  Raises:
    PipelineError: an unknown kind or a negative index.

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
        f'{self.kind!r} is not a kind of task.{did_you_mean(self.kind, KINDS)}\nFix: {_SYNTAX}'
      )
    if min(operator.index(self.stage), operator.index(self.microbatch)) < 0:
      raise PipelineError(f'{self} has a negative index.\nFix: count stages and microbatches from 0.')

  @property
  def tasks(self) -> tuple[Task, ...]:
    """The task itself, in a tuple; the counterpart of `FusedTask.tasks`."""
    return (self,)

  def __str__(self) -> str:
    return f'{self.kind}_{self.stage}__{self.microbatch}'


@public('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True, slots=True)
class FusedTask:
  """Several tasks of one rank as one program.

  Attributes:
    tasks: two or more tasks, in execution order.

  Raises:
    PipelineError: fewer than two tasks.

  Example:
    >>> str(FusedTask((Task('fwd', 3, 0), Task('bwd', 3, 0))))
    'FusedTask(fwd_3__0, bwd_3__0)'
  """

  tasks: tuple[Task, ...]

  def __post_init__(self):
    if len(self.tasks) < 2:
      raise PipelineError(
        f'{self} has fewer than two tasks.\nFix: fuse two or more, or use the task itself: {_SYNTAX}'
      )

  def __str__(self) -> str:
    return f'FusedTask({", ".join(map(str, self.tasks))})'


Step: TypeAlias = Task | FusedTask  # one program
Order: TypeAlias = tuple[Step, ...]  # the programs of one rank


def parse(text: str) -> Step:
  """A task from its text; raises PipelineError for another text.

  Example:
    >>> parse('FusedTask(fwd_3__0, bwd_3__0)').tasks[1]
    Task(kind='bwd', stage=3, microbatch=0)
  """
  fused = _FUSED.fullmatch(text.strip())
  if fused:
    return FusedTask(tuple(map(_parse_one, fused[1].split(','))))
  return _parse_one(text)


def inputs(task: Task, stages: int) -> tuple[Task, ...]:
  """The tasks whose results a task takes, all of the same microbatch.

  Example:
    >>> [str(one) for one in inputs(Task('bwd', 0, 5), stages=2)]
    ['fwd_0__5', 'bwd_1__5']
  """
  stage, microbatch = task.stage, task.microbatch
  if task.kind == 'wgrad':
    return (Task('bwd', stage, microbatch),)
  if task.kind == 'fwd':
    return (Task('fwd', stage - 1, microbatch),) if stage else ()
  forward = Task('fwd', stage, microbatch)
  return (forward, Task('bwd', stage + 1, microbatch)) if stage < stages - 1 else (forward,)


def depends_on(task: Task, other: Task, stages: int) -> bool:
  """Whether a task depends on another one, directly or transitively."""
  if task == other or task.microbatch != other.microbatch or other.kind == 'wgrad':
    return False
  return _depth(other, stages) < _depth(task, stages)


def _depth(task: Task, stages: int) -> int:
  """The position in a microbatch's chain of dependencies: forwards, then backwards with their wgrads."""
  position = task.stage if task.kind == 'fwd' else 2 * stages - 1 - task.stage
  return 2 * position + (task.kind == 'wgrad')


def _parse_one(text: str) -> Task:
  match = _TASK.fullmatch(text.strip())
  if not match or match[1] not in KINDS:
    hint = did_you_mean(match[1], KINDS) if match else ''
    raise PipelineError(f'{text.strip()!r} is not a task.{hint}\nFix: {_SYNTAX}')
  return Task(cast(Kind, match[1]), int(match[2]), int(match[3]))
