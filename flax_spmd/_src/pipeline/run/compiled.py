"""Compiled pipeline: the programs of a step, ready to run on arguments of one structure.

Like a compiled `jax.jit` function it checks its arguments before it runs. A state for it is created, or
restored, with its `input_shardings`, so that each array is on the devices of the stages that use it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from flax_spmd._src.data.unusable_leaves import check_usable
from flax_spmd._src.multihost import exchange, joint
from flax_spmd._src.pipeline.argument_checks import argument_text, differences, named_arguments
from flax_spmd._src.pipeline.run import submeshes
from flax_spmd._src.pipeline.run.agreement import check_same_arguments, check_same_order
from flax_spmd._src.pipeline.run.call_list import StageProgram
from flax_spmd._src.pipeline.run.machine import Machine
from flax_spmd._src.pipeline.run.rank_watch import RankWatch
from flax_spmd._src.pipeline.run.request import Request, Setting, aval_of
from flax_spmd._src.pipeline.run.stage_lowering import Executable
from flax_spmd._src.pipeline.run.state_init import init_on_stages
from flax_spmd._src.pipeline.schedules.tasks import Task, parse
from flax_spmd.errors import PipelineError

COMPARED_EVERY = 256  # steps; a comparison takes as long as some transfers
_LARGE = 1 << 12  # bytes; a larger argument is data


class CompiledPipeline:
  """A pipeline that can be run on arguments of one structure.

  Args:
    setting, request, result: the settings, the arguments that it was compiled for, the tree structure of the result.
    name: name of the pipeline, equal on all of its processes and unlike that of any other.
    holders: per argument, the processes that have to pass the same value.

  Attributes:
    machine: the instructions and registers that run a step.
    executables: the compiled program of each stage program.
    memory: peak memory of a device of each rank, in bytes.
    host_memory: peak of each device's copies in the memory of the host, per rank, in bytes; see `host_after`.
    times: seconds taken by `'trace'`, `'plan'` and `'compile'`.
  """

  def __init__(
    self,
    setting: Setting,
    request: Request,
    result: Any,
    name: str,
    machine: Machine,
    holders: Sequence[Collection[int]],
    executables: Mapping[StageProgram, Executable],
    memory: list[int],
    host_memory: list[int],
    times: dict[str, float],
  ):
    self._setting, self._request, self._result = setting, request, result
    self._name = name
    self._arguments = setting.arguments
    self._accepted: list[Any] = [None] * len(request.avals)  # a sharding of each leaf that fits
    self._compared: set[Any] = set()  # the leaves' numbers and shardings that processes have compared
    self._several = several = len(setting.processes) > 1
    self._watch = RankWatch(setting.name, setting.processes, setting.timeout, machine.transfers.progress)
    self._is_compared, self._holders, self._steps = not several, holders, 0
    self.machine, self.executables, self.times = machine, executables, times
    self.memory, self.host_memory = memory, host_memory

  @property
  def input_shardings(self) -> tuple[tuple, dict[str, Any]]:
    """The shardings of the arguments that are not static, each on the ranks of the stages that use it.

    Arrays with these shardings are used without a copy; restore a state with them, too. An argument that
    no stage uses gets a sharding over all ranks.
    """
    joint = functools.partial(submeshes.submesh, self._setting.mesh, self._setting.axis)
    everywhere = range(len(self._setting.ranks))
    shardings = [
      NamedSharding(joint(sorted(use.rank for use in uses) or everywhere), spec)
      for uses, spec in zip(self.machine.arguments, self._request.specs, strict=True)
    ]
    return jax.tree.unflatten(self._request.treedef, shardings)

  def init(self, create: Callable[..., Any], *args: Any, argument: int = 0, **kwargs: Any) -> Any:
    """Creates a state for the pipeline, each array on the stages that use it.

    Args:
      create: returns a state. Each rank runs only the part that its arrays need.
      *args, **kwargs: its arguments. Only arrays and numbers are traced.
      argument: position of the state among the pipeline's arguments that are not static.

    Returns:
      The state. No device ever holds an array that its stages do not use.

    Raises:
      PipelineError: `create` returns a state of other paths than the pipeline was compiled for.
      LayoutError: `create` computes something else in another process, or from other values.

    Warns:
      UserWarning: objects in the state that are no arrays differ, such as an optimizer that `create` makes anew.
    """
    shardings = self.input_shardings[0][argument]
    return init_on_stages(create, args, kwargs, shardings, self._setting)

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Runs the pipeline.

    Raises:
      PipelineError: the arguments differ from those that it was compiled for.
    """
    return self.run(self._checked(args, kwargs))

  def measure(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[Task, float]]:
    """Runs the pipeline one task at a time, and times each task.

    Returns:
      The result, and the seconds that each task took, on all processes: costs for `schedule.simulate`,
      `schedule.with_costs` and `Automatic`. A task of a fused task has its share of the time.
    """
    leaves = self._checked(args, kwargs)
    results, seconds = self._run(self.machine.measure, leaves)
    return jax.tree.unflatten(self._result, results), self._of_all_processes(seconds)

  def _of_all_processes(self, seconds: Mapping[Task, float]) -> dict[Task, float]:
    """The times of all tasks, equal on all processes, of which each has those of its own ranks."""
    text = json.dumps({str(task): time for task, time in seconds.items()})
    return {
      task: time
      for _, each in exchange('measured tasks', text, self._setting.processes)
      for one, time in json.loads(each).items()
      for task in parse(one).tasks
    }

  def run(self, leaves: Sequence[Any]) -> Any:
    """Runs the pipeline on leaves that `leaves` returned."""
    return jax.tree.unflatten(self._result, self._run(self.machine, leaves))

  def _run(self, machine: Callable[[Sequence[Any]], Any], leaves: Sequence[Any]) -> Any:
    """The results of the machine; over several processes, under the watch.

    Processes compare their pipelines unless it is that of the step before; the first time, and for new shardings of
    arguments, also the arguments; and now and then those that come from the host, such as learning rates.
    """
    if self._several and self._watch.earlier_failure is None:
      check_same_order(self._setting, self._name)
    self._steps += 1
    if not self._is_compared:
      self._compare(leaves, range(len(leaves)))
      self._compared.update(enumerate(getattr(leaf, 'sharding', None) for leaf in leaves))
      self._is_compared = True
    elif self._several and not self._steps % COMPARED_EVERY:
      self._compare(leaves, [number for number, leaf in enumerate(leaves) if _is_number(leaf)])
    check = functools.partial(self._check_kept, leaves)
    if self._several:
      return self._watch.run(lambda: machine(leaves), check)
    check()
    return machine(leaves)

  def _check_kept(self, leaves: Sequence[Any]) -> None:
    """Raises if an argument that a program reads is deleted, such as one that an earlier call has overwritten."""
    read = (leaf for leaf, uses in zip(leaves, self.machine.arguments, strict=True) if uses)
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in read):
      check_usable(named_arguments(jax.tree.unflatten(self._request.treedef, leaves)))

  def _compare(self, leaves: Sequence[Any], numbers: Sequence[int]) -> None:
    """Raises on every process if arguments differ that have to be alike; compares those with these numbers."""
    setting, named = self._setting, named_arguments(jax.tree.unflatten(self._request.treedef, leaves))
    with joint(
      'pipeline arguments',
      f'The comparison of the arguments of {setting.name}',
      setting.processes,
      PipelineError,
    ):
      self._check_kept(leaves)
      holders = [self._holders[number] for number in numbers]
      check_same_arguments(setting, [named[number] for number in numbers], holders)

  def leaves(self, args, kwargs, any_weak_type: bool = False) -> list[Any] | None:
    """The leaves of arguments; None if the pipeline was compiled for other ones."""
    if self._arguments.statics(args, kwargs) != self._request.static:
      return None
    leaves, treedef = jax.tree.flatten(self._arguments.dynamic(args, kwargs))
    if treedef != self._request.treedef:
      return None
    fits = all(self._fits(number, leaf, any_weak_type) for number, leaf in enumerate(leaves))
    return leaves if fits else None

  def _fits(self, number: int, leaf: Any, any_weak_type: bool) -> bool:
    """Whether a leaf has the shape, dtype and spec that the pipeline was compiled for."""
    aval = self._request.avals[number]
    given = leaf if isinstance(leaf, jax.Array) else aval_of(leaf)
    if given.shape != aval.shape or given.dtype != aval.dtype:
      return False
    if not any_weak_type and getattr(given, 'weak_type', False) != aval.weak_type:
      return False
    if not isinstance(leaf, jax.Array):
      return self._request.specs[number] == PartitionSpec()
    if self._accepted[number] is leaf.sharding:
      return True
    same = self._spec_of(leaf) == self._request.specs[number]
    if same:
      self._accepted[number] = leaf.sharding
      named = isinstance(leaf.sharding, NamedSharding)
      if self._several and named and (number, leaf.sharding) not in self._compared:
        self._is_compared = False
    return same

  def _spec_of(self, leaf: Any) -> PartitionSpec:
    return submeshes.spec_of(leaf, self._setting.axis, self._setting.sizes)

  def _checked(self, args, kwargs) -> list[Any]:
    args, kwargs = self._arguments.by_position(args, kwargs)
    leaves = self.leaves(args, kwargs, any_weak_type=True)  # as a compiled function of JAX
    if leaves is None:
      raise PipelineError(
        f'This pipeline was compiled for other arguments:\n{self._differences(args, kwargs)}\n'
        'Fix: call the function that pipeline_jit returned, which compiles anew.'
      )
    return leaves

  def _differences(self, args, kwargs) -> str:
    """The differences from the arguments that it was compiled for, one line per leaf."""
    request, dynamic = self._request, self._arguments.dynamic(args, kwargs)
    text = lambda aval, spec: argument_text(aval.update(weak_type=False), spec)
    old = jax.tree.unflatten(request.treedef, map(text, request.avals, request.specs))
    new = jax.tree.map(lambda leaf: text(aval_of(leaf), self._spec_of(leaf)), dynamic)
    static = (
      [(f'static {name}', repr(value)) for name, _, value in each]
      for each in (request.static, self._arguments.statics(args, kwargs))
    )
    before, after = ([*named_arguments(each), *more] for each, more in zip((old, new), static))
    return differences(before, after, 'the tree structures differ')


def _is_number(leaf: Any) -> bool:
  """Whether an argument is a number, a key or a small array that is not the result of a pipeline."""
  on_mesh = isinstance(getattr(leaf, 'sharding', None), NamedSharding)
  return not on_mesh and getattr(leaf, 'nbytes', 0) <= _LARGE
