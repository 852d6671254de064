"""Transfers between processes: arrays sent from one process's rank to another's.

A process can copy arrays between its own devices only. Between processes a transfer is a collective of
the two ranks: a `ppermute` over the stage axis of their joint mesh, which both processes run. Both run
the transfers between them in the same order, so they cannot deadlock.

XLA's CPU client allows 32 unfinished programs per device. A dispatch beyond them waits, and holds a thread
for each of the program's devices in this process. There are only as many threads as devices (or cores, if
there are more), so the programs that it waits for may never get one. Therefore a transfer between CPUs
ends before the next dispatch. There, programs of several devices run one after the other anyway.

JAX itself copies between processes where `jax_cross_host_transfer_socket_address` is set: the sender goes on at once,
and nothing is copied to rows and back. XLA numbers these copies in each process, and finds the two ends by their
number. So every process of the job takes part in all of them, in the order of the call list.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.data.words import array_of
from flax_spmd._src.pipeline.run.rank_watch import TransferProgress, Wait
from flax_spmd._src.pipeline.run.submeshes import is_local, processes_of, submesh


class ProcessTransfer:
  """A transfer of arrays from one rank to another, of another process. Both processes call it.

  Args:
    mesh, axis: the whole mesh, and its stage axis.
    source, target: the two ranks.
    avals: shapes and dtypes of the arrays.
    specs: specs of the arrays, the same on both ranks.
    progress: where a transfer that runs is recorded.
    text: ranks and arrays, for errors.
  """

  def __init__(
    self,
    mesh: Mesh,
    axis: str,
    source: int,
    target: int,
    avals: Sequence[Any],
    specs: Sequence[PartitionSpec],
    progress: TransferProgress,
    text: str,
  ):
    joint = submesh(mesh, axis, [source, target])
    source_mesh, target_mesh = (submesh(mesh, axis, [rank]) for rank in (source, target))
    self._target_mesh = target_mesh
    self._sends, self._receives = is_local(source_mesh), is_local(target_mesh)
    other = target if self._sends else source
    self._wait = _wait(other, target_mesh if self._sends else source_mesh, text)
    self._progress = progress
    self._blocks = joint.devices.flat[0].platform == 'cpu'
    self._dtypes = tuple(aval.dtype for aval in avals)
    self._avals = [
      jax.eval_shape(array_of, jax.ShapeDtypeStruct(aval.shape, aval.dtype)) for aval in avals
    ]
    # An array of both ranks has a row per rank, in a new first dimension over the stage axis.
    self._joint = [NamedSharding(joint, PartitionSpec(axis, *spec)) for spec in specs]
    self._source_row = [NamedSharding(source_mesh, PartitionSpec(None, *spec)) for spec in specs]
    self._target_row = [NamedSharding(target_mesh, PartitionSpec(None, *spec)) for spec in specs]
    self._target = [NamedSharding(target_mesh, spec) for spec in specs]
    self._permute = _permutation(joint, axis, tuple(sharding.spec for sharding in self._joint))

  def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
    """Runs the transfer; returns the arrays in the receiving process, nothing in the sending one."""
    with self._progress.waiting(self._wait):
      return self._run(arrays)

  def _run(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    shards: list[list[jax.Array]] = [[] for _ in self._avals]
    if self._sends:
      for each, row in zip(shards, _adding_row(tuple(self._source_row))(list(arrays))):
        each += _shards(row)
    if self._receives:
      for each, row in zip(shards, self._zero_rows):
        each += _shards(row)
    joined = [
      jax.make_array_from_single_device_arrays((2, *aval.shape), sharding, each)
      for aval, sharding, each in zip(self._avals, self._joint, shards)
    ]
    permuted = self._permute(joined)
    if self._blocks:
      jax.block_until_ready(permuted)
    return self._received(permuted) if self._receives else []

  @functools.cached_property
  def _zero_rows(self) -> list[jax.Array]:
    """The target's part of the operands of `ppermute`, which it discards."""
    shapes = [(1, *aval.shape) for aval in self._avals]
    dtypes = [aval.dtype for aval in self._avals]
    make = jax.jit(
      lambda: [jnp.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes)],
      out_shardings=self._target_row,
    )
    return make()

  def _received(self, permuted: Sequence[jax.Array]) -> list[jax.Array]:
    """The target's row of each array, as an array of the target's devices."""
    rows = []
    devices = list(self._target_mesh.devices.flat)
    for array, sharding, aval in zip(permuted, self._target_row, self._avals):
      shards = {shard.device: shard.data for shard in array.addressable_shards}
      own = [shards[device] for device in devices if device in shards]
      rows.append(jax.make_array_from_single_device_arrays((1, *aval.shape), sharding, own))
    return _removing_row(tuple(self._target), self._dtypes)(rows)


class CrossHostCopy:
  """A copy by JAX of arrays of one rank to another, of other processes. Every process of the job calls it.

  The receiver goes on until it reads the arrays; on a CPU it then has to `wait`, for a program in a queue could not be
  watched.

  Args:
    source: the rank that sends.
    avals: shapes and dtypes of the arrays.
    shardings: shardings of the arrays, on both ranks.
    progress: where a transfer that runs is recorded.
    text: ranks and arrays, for errors.

  Attributes:
    has_to_wait: whether this process waits for the arrays before it reads them.
  """

  def __init__(
    self,
    source: int,
    avals: Sequence[Any],
    shardings: Sequence[tuple[NamedSharding, NamedSharding]],
    progress: TransferProgress,
    text: str,
  ):
    self._avals, (self._source, self._target) = list(avals), map(list, zip(*shardings))
    self._sends, self._receives = (is_local(each[0].mesh) for each in (self._source, self._target))
    self._wait, self._progress = _wait(source, self._source[0].mesh, text), progress
    self.has_to_wait = self._receives and self._target[0].mesh.devices.flat[0].platform == 'cpu'

  def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
    """Runs the copy; returns the arrays in the receiving process, nothing in the others."""
    if not self._receives:
      jax.device_put(list(arrays) if self._sends else self._elsewhere, self._target)
      return []
    with self._progress.waiting(self._wait):
      return jax.device_put(self._elsewhere, self._target)

  def wait(self, *arrays: jax.Array) -> list[jax.Array]:
    """Waits until the arrays that a call returned have arrived."""
    with self._progress.waiting(self._wait):
      jax.block_until_ready(arrays)
    return []

  @functools.cached_property
  def _elsewhere(self) -> list[jax.Array]:
    """The source's arrays, as a process sees them that has none of their shards."""
    return [
      jax.make_array_from_single_device_arrays(aval.shape, sharding, [], dtype=aval.dtype)
      for aval, sharding in zip(self._avals, self._source, strict=True)
    ]


def is_copied_by_jax(mesh: Mesh, source: Mesh, target: Mesh, avals: Sequence[Any]) -> bool:
  """Whether JAX can copy arrays between two ranks: they share no process, and all processes of the job have a rank."""
  disjoint = processes_of(source).isdisjoint(processes_of(target))
  joined = len(processes_of(mesh)) == jax.process_count()
  return (
    compat.copies_across_processes()
    and disjoint
    and joined
    and not any(_is_key(aval.dtype) for aval in avals)
  )


def _wait(rank: int, mesh: Mesh, text: str) -> Wait:
  return Wait(rank, tuple(sorted(processes_of(mesh) - {jax.process_index()})), text)


@functools.lru_cache(maxsize=256)
def _permutation(mesh: Mesh, axis: str, specs: tuple[PartitionSpec, ...]) -> Any:
  """A program that sends the rows of the first of two ranks to the second."""

  def move(arrays):
    return [lax.ppermute(array, axis, [(0, 1)]) for array in arrays]

  specs_ = list(specs)
  return jax.jit(jax.shard_map(move, mesh=mesh, in_specs=(specs_,), out_specs=specs_))


def _shards(array: jax.Array) -> list[jax.Array]:
  return [shard.data for shard in array.addressable_shards]


def _received_as(dtype: Any, array: Any) -> Any:
  if not _is_key(dtype):
    return array
  return jax.random.wrap_key_data(array, impl=jax.random.key_impl(jnp.empty((), dtype)))


def _is_key(dtype: Any) -> bool:
  return jnp.issubdtype(dtype, jax.dtypes.prng_key)


@functools.lru_cache(maxsize=256)
def _adding_row(shardings: tuple[NamedSharding, ...]) -> Any:
  """A program that adds a first dimension of size 1."""
  return jax.jit(
    lambda arrays: [array_of(array)[None] for array in arrays], out_shardings=list(shardings)
  )


@functools.lru_cache(maxsize=256)
def _removing_row(shardings: tuple[NamedSharding, ...], dtypes: tuple[Any, ...]) -> Any:
  """A program that removes a first dimension of size 1; its results have these dtypes."""

  def remove(rows):
    return [_received_as(dtype, row[0]) for row, dtype in zip(rows, dtypes, strict=True)]

  return jax.jit(remove, out_shardings=list(shardings))
