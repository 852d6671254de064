"""Offline lowering: a pipeline's programs, and the sharding of every buffer, for devices you don't have.

    step = layout.pipeline_jit(train_step)                 # the layout's mesh may be abstract
    plan = step.lower(state, batch).offline('cuda')        # lowered for GPUs; nothing is compiled

The compiler chooses the shardings of a program's results, and the next program depends on them. Shardy
makes the choice, and its passes ship with JAX: they run alone in milliseconds, without a compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jax.sharding import NamedSharding, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.pipeline.cut.equations import Value
from flax_spmd._src.pipeline.run.call_list import Buffer, CallList, StageProgram
from flax_spmd._src.pipeline.run.memory import Footprint
from flax_spmd._src.pipeline.run.stage_lowering import LoweredStage, StageLowerer


class Offline(NamedTuple):
  """A lowered pipeline, ready to compile on another machine.

  Attributes:
    call_list: the calls and sends, in order.
    programs: each program, lowered.
    results: specs of the results of each program.
    sharding: returns the sharding of a buffer, on the mesh of its rank.
    arguments: arguments of the step, in the order of their leaves.
    ranks: number of ranks.
  """

  call_list: CallList
  programs: Mapping[StageProgram, LoweredStage]
  results: Mapping[StageProgram, Sequence[PartitionSpec]]
  sharding: Callable[[Buffer], NamedSharding]
  arguments: Sequence[Value]
  ranks: int

  @property
  def footprint(self) -> Footprint:
    """The memory of its buffers."""
    return Footprint(self.call_list, self.sharding, self.arguments, self.ranks)


def plan(
  call_list: CallList, lowerer: StageLowerer, platform: str, arguments: Sequence[Value]
) -> Offline:
  """Lowers the programs of a step, each after those whose results it reads.

  Args:
    call_list: the step.
    lowerer: lowers the programs; receives the specs of their results.
    platform: platform to lower for, as JAX names it.
    arguments: arguments of the step.
  """
  programs = {}
  for program, call in lowerer.first.items():
    programs[program] = lowerer.lower(call, platform)
    lowerer.results[program] = [
      _spec(entries[: len(value.aval.shape)])
      for entries, value in zip(
        compat.result_axes(programs[program].lowered), program.outputs, strict=True
      )
    ]
  return Offline(call_list, programs, lowerer.results, lowerer.sharding, arguments, len(lowerer.meshes))


def _spec(entries: Sequence[tuple[str, ...]]) -> PartitionSpec:
  """A spec as compiled programs have it: no tuples of one axis, no trailing None entries."""
  spec = [each[0] if len(each) == 1 else each or None for each in entries]
  while spec and spec[-1] is None:
    spec.pop()
  return PartitionSpec(*spec)
