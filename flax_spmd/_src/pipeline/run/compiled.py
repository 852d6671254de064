"""Compiled: a pipeline that can be run, for arguments of one form."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from flax_spmd._src.pipeline.argument_checks import differences, named_arguments, said_of
from flax_spmd._src.pipeline.run import submeshes
from flax_spmd._src.pipeline.run.call_list import Unit
from flax_spmd._src.pipeline.run.compilation import Executable
from flax_spmd._src.pipeline.run.machine import Machine
from flax_spmd._src.pipeline.run.request import Request, Setting, aval_of
from flax_spmd._src.pipeline.run.state_init import born
from flax_spmd._src.pipeline.schedules.tasks import Task
from flax_spmd._src.text import few
from flax_spmd.errors import PipelineError


class Compiled:
  """A pipeline that can be run on arguments of one form.

  Args:
    setting: what it is made with.
    request: what it was compiled for.
    result: the form of what it returns.
    machine: runs it.
    executables, memory, times: the attributes.

  Attributes:
    executables: per unit, its program.
    memory: per rank, the most bytes that a device of it holds at once.
    times: how many seconds tracing, planning and compiling took.
  """

  def __init__(
    self,
    setting: Setting,
    request: Request,
    result: Any,
    machine: Machine,
    executables: Mapping[Unit, Executable],
    memory: list[int],
    times: dict[str, float],
  ):
    self._setting, self._request, self._result = setting, request, result
    self._machine, self._arguments = machine, setting.arguments
    self._seen: list[Any] = [None] * len(request.avals)
    self.executables, self.memory, self.times = executables, memory, times

  @property
  def input_shardings(self) -> tuple[tuple, dict[str, Any]]:
    """Where the arguments that are not static are used: on the ranks of the stages that use them.

    Arrays that lie so are taken as they are. It is where a restored state should go, too. What nobody
    uses may lie anywhere; it is said to be on all ranks.
    """
    joint = functools.partial(submeshes.submesh, self._setting.mesh, self._setting.axis)
    everywhere = range(len(self._setting.ranks))
    shardings = [
      NamedSharding(joint(sorted(use.rank for use in uses) or everywhere), spec)
      for uses, spec in zip(self._machine.arguments, self._request.specs, strict=True)
    ]
    return self._request.treedef.unflatten(shardings)

  def init(self, create: Callable[..., Any], *args: Any, argument: int = 0, **kwargs: Any) -> Any:
    """Makes the state that the pipeline takes, each array on the stages that use it.

    Args:
      create: makes a state; each rank runs what its arrays need of it.
      *args, **kwargs: its arguments; what is neither array nor number is passed on as it is.
      argument: which argument of the pipeline the state is, of those that are not static.

    Returns:
      The state; no device ever holds what it does not use.

    Raises:
      PipelineError: `create` makes something else than the pipeline was compiled for.
    """
    wanted = self.input_shardings[0][argument]
    return born(create, args, kwargs, wanted, self._setting.rules)

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Runs it.

    Raises:
      PipelineError: it was compiled for arguments of another form.
    """
    return self.run(self._checked(args, kwargs))

  def measure(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[Task, float]]:
    """Runs it one task after another, so that each can be timed.

    Returns:
      The result, and the seconds that each task took: costs for `schedule.simulate` and `schedule.draw`.
    """
    results, seconds = self._machine.measured(self._checked(args, kwargs))
    return self._result.unflatten(results), seconds

  def run(self, leaves: Sequence[Any]) -> Any:
    """Runs it on arguments' leaves that were found to fit."""
    return self._result.unflatten(self._machine(leaves))

  def leaves(self, args, kwargs) -> list[Any] | None:
    """The leaves of arguments, if it was compiled for such."""
    if self._arguments.statics(args, kwargs) != self._request.static:
      return None
    leaves, treedef = jax.tree.flatten(self._arguments.dynamic(args, kwargs))
    if treedef != self._request.treedef:
      return None
    fits = all(map(self._fits, range(len(leaves)), leaves))
    return leaves if fits else None

  def _fits(self, number: int, leaf: Any) -> bool:
    """Whether an argument has the form, and lies as it was expected."""
    aval = self._request.avals[number]
    if not isinstance(leaf, jax.Array):
      return aval_of(leaf) == aval and self._request.specs[number] == PartitionSpec()
    if (
      leaf.shape != aval.shape
      or leaf.dtype != aval.dtype
      or getattr(leaf, 'weak_type', False) != aval.weak_type
    ):
      return False
    if self._seen[number] is leaf.sharding:
      return True
    same = self._spec_of(leaf) == self._request.specs[number]
    if same:
      self._seen[number] = leaf.sharding
    return same

  def _spec_of(self, leaf: Any) -> PartitionSpec:
    return submeshes.spec_of(leaf, self._setting.axis, self._setting.sizes)

  def _checked(self, args, kwargs) -> list[Any]:
    args, kwargs = self._arguments.by_position(args, kwargs)
    leaves = self.leaves(args, kwargs)
    if leaves is None:
      raise PipelineError(
        f'This pipeline was compiled for other arguments:\n{self._differences(args, kwargs)}\n'
        'Fix: call the function that pipeline_jit returned, which compiles anew.'
      )
    return leaves

  def _differences(self, args, kwargs) -> str:
    """How arguments differ from those that it was compiled for, a line for each leaf."""
    request, dynamic = self._request, self._arguments.dynamic(args, kwargs)
    old = request.treedef.unflatten(map(said_of, request.avals, request.specs))
    new = jax.tree.map(lambda leaf: said_of(aval_of(leaf), self._spec_of(leaf)), dynamic)
    static = (
      [(f'static {name}', repr(value)) for name, _, value in each]
      for each in (request.static, self._arguments.statics(args, kwargs))
    )
    both = ([*named_arguments(each), *more] for each, more in zip((old, new), static))
    return few(differences(*both) or ['  they are in containers of other kinds'])
