"""Offline: the programs of a pipeline for devices that are not here, and how everything would lie.

    step = layout.pipeline_jit(train_step)                 # the layout's mesh may be abstract
    plan = step.lower(state, batch).offline('cuda')        # lowered for GPUs; nothing is compiled

How the results of a program lie is the compiler's choice, and the next program starts from it. That choice
is Shardy's, whose passes are a part of JAX: so it can be asked for alone, in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jax.sharding import NamedSharding, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.pipeline.cut.equations import Value
from flax_spmd._src.pipeline.run.call_list import Linked, Place, Unit
from flax_spmd._src.pipeline.run.lowering import Prepared, Preparer
from flax_spmd._src.pipeline.run.memory import Footprint


class Offline(NamedTuple):
  """A pipeline that can be compiled somewhere else.

  Attributes:
    linked: the calls and sends, in order.
    programs: per unit, what would be compiled.
    results: per unit, how its results lie.
    sharding: how a place lies, on the mesh of its rank.
    arguments: those of the step, in the order of their leaves.
    ranks: how many there are.
  """

  linked: Linked
  programs: Mapping[Unit, Prepared]
  results: Mapping[Unit, Sequence[PartitionSpec]]
  sharding: Callable[[Place], NamedSharding]
  arguments: Sequence[Value]
  ranks: int

  @property
  def footprint(self) -> Footprint:
    """What is in memory."""
    return Footprint(self.linked, self.sharding, self.arguments, self.ranks)


def plan(linked: Linked, preparer: Preparer, platform: str, arguments: Sequence[Value]) -> Offline:
  """Lowers the units of a step, each after those whose results it needs.

  Args:
    linked: the step.
    preparer: lowers them; it is told how their results lie.
    platform: what for.
    arguments: those of the step.
  """
  programs = {}
  for unit, call in preparer.first.items():
    programs[unit] = preparer.prepared(call, platform)
    preparer.results[unit] = [
      _spec(entries[: len(value.aval.shape)])
      for entries, value in zip(compat.result_places(programs[unit].lowered), unit.outputs, strict=True)
    ]
  return Offline(linked, programs, preparer.results, preparer.sharding, arguments, len(preparer.meshes))


def _spec(entries: Sequence[tuple[str, ...]]) -> PartitionSpec:
  """As a compiled program has it: one axis is no tuple, and what is open at the end is left out."""
  spec = [each[0] if len(each) == 1 else each or None for each in entries]
  while spec and spec[-1] is None:
    spec.pop()
  return PartitionSpec(*spec)
