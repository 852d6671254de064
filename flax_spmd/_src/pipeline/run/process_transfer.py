"""Between processes: what one process's stages send to another's.

A process can copy arrays between its own devices only. To another one they go by a collective operation
of the two ranks: `ppermute` over the stage axis of their joint mesh, which both processes run. Each of
them sees the transfers between them in the same order, so none waits for what the other does later.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_spmd._src.pipeline.run.submeshes import submesh
from flax_spmd.errors import PipelineError


def processes_of(mesh: Mesh) -> set[int]:
  """The processes whose devices a mesh has."""
  return {device.process_index for device in mesh.devices.flat}


def is_here(mesh: Mesh) -> bool:
  """Whether this process has devices of a mesh."""
  return jax.process_index() in processes_of(mesh)


class Crossing:
  """Sends arrays from one rank to another that is another process's; called by both.

  Args:
    mesh, axis: the whole mesh, and the axis of the stages.
    source, target: the two ranks.
    avals: shapes and dtypes.
    specs: how they lie on either rank.

  Raises:
    PipelineError: there are typed keys among them.
  """

  def __init__(
    self,
    mesh: Mesh,
    axis: str,
    source: int,
    target: int,
    avals: Sequence[Any],
    specs: Sequence[PartitionSpec],
  ):
    if any(jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) for aval in avals):
      raise PipelineError(
        f'A typed PRNG key goes from rank {source} to rank {target}, which is another process.\n'
        'Fix: let every stage derive its key from the batch or an argument, or use raw keys '
        '(jax.random.key_data).'
      )
    joint = submesh(mesh, axis, [source, target])
    here, there = (submesh(mesh, axis, [rank]) for rank in (source, target))
    self._gives, self._takes = is_here(here), is_here(there)
    self._avals = list(avals)
    self._lie = [NamedSharding(joint, PartitionSpec(axis, *spec)) for spec in specs]
    self._from = [NamedSharding(here, PartitionSpec(None, *spec)) for spec in specs]
    self._to = [NamedSharding(there, spec) for spec in specs]
    self._blank = [NamedSharding(there, PartitionSpec(None, *spec)) for spec in specs]
    self._move = _mover(joint, axis, tuple(sharding.spec for sharding in self._lie))

  def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
    """What arrives, if it arrives here; nothing where it only leaves."""
    rows: list[list[jax.Array]] = [[] for _ in self._avals]
    if self._gives:
      for row, array in zip(rows, _raised(arrays, self._from)):
        row += _shards(array)
    if self._takes:
      for row, array in zip(rows, self._blanks):
        row += _shards(array)
    joined = [
      jax.make_array_from_single_device_arrays((2, *aval.shape), sharding, row)
      for aval, sharding, row in zip(self._avals, self._lie, rows)
    ]
    moved = self._move(joined)
    return _lowered(moved, self._blank, self._to, self._avals) if self._takes else []

  @functools.cached_property
  def _blanks(self) -> list[jax.Array]:
    """What the target gives for what it gets."""
    forms = [(1, *aval.shape) for aval in self._avals]
    dtypes = [aval.dtype for aval in self._avals]
    make = jax.jit(
      lambda: [jnp.zeros(form, dtype) for form, dtype in zip(forms, dtypes)], out_shardings=self._blank
    )
    return make()


@functools.lru_cache(maxsize=256)
def _mover(mesh: Mesh, axis: str, specs: tuple[PartitionSpec, ...]) -> Any:
  """A program that moves arrays from the first of two ranks to the second."""

  def move(arrays):
    return [lax.ppermute(array, axis, [(0, 1)]) for array in arrays]

  specs_ = list(specs)
  return jax.jit(jax.shard_map(move, mesh=mesh, in_specs=(specs_,), out_specs=specs_))


def _shards(array: jax.Array) -> list[jax.Array]:
  return [shard.data for shard in array.addressable_shards]


def _raised(arrays: Sequence[jax.Array], shardings: Sequence[NamedSharding]) -> Sequence[jax.Array]:
  """Arrays with a first dimension of one."""
  return _raising(tuple(shardings))(list(arrays))


@functools.lru_cache(maxsize=256)
def _raising(shardings: tuple[NamedSharding, ...]) -> Any:
  return jax.jit(lambda arrays: [array[None] for array in arrays], out_shardings=list(shardings))


def _lowered(moved, blank, target, avals) -> list[jax.Array]:
  """The second row of what was moved, without its first dimension."""
  rows = []
  for array, sharding, aval in zip(moved, blank, avals):
    parts = {shard.device: shard.data for shard in array.addressable_shards}
    here = [parts[device] for device in sharding.mesh.devices.flat if device in parts]
    rows.append(jax.make_array_from_single_device_arrays((1, *aval.shape), sharding, here))
  return _lowering(tuple(target))(rows)


@functools.lru_cache(maxsize=256)
def _lowering(shardings: tuple[NamedSharding, ...]) -> Any:
  return jax.jit(lambda rows: [row[0] for row in rows], out_shardings=list(shardings))
