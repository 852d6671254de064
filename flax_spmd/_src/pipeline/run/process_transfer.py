"""Transfers between processes: arrays sent from one process's rank to another's.

A process can copy arrays between its own devices only. Between processes a transfer is a collective of
the two ranks: a `ppermute` over the stage axis of their joint mesh, which both processes run. An array of both
ranks has the rows of each in its first dimension, so the array of one rank is a part of it as it is. Both run
the transfers between them in the same order, so they cannot deadlock.

XLA's CPU client allows 32 unfinished programs per device. A dispatch beyond them waits, and holds a thread
for each of the program's devices in this process. There are only as many threads as devices (or cores, if
there are more), so the programs that it waits for may never get one. Therefore a transfer between CPUs
ends before the next one begins, in a thread of its own, while the programs of the step run in another.

JAX itself copies between processes where `jax_cross_host_transfer_socket_address` is set: the sender goes on at once,
and nothing is copied to rows and back. XLA numbers these copies in each process, and finds the two ends by their
number. So every process of the job takes part in all of them, in the order of the call list.
"""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.data.host_values import placed
from flax_spmd._src.data.words import array_of
from flax_spmd._src.pipeline.run.rank_watch import TransferProgress, Wait
from flax_spmd._src.pipeline.run.submeshes import is_local, processes_of, submesh
from flax_spmd._src.rules.decisions import axis_names


class TransferThread:
  """A thread that runs the transfers of a process one after the other, in the order in which they are given to it."""

  def __init__(self) -> None:
    self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
    self._thread: threading.Thread | None = None

  def submit(self, job: Callable[[], Any]) -> Future[Any]:
    """Runs a job after those before; if one of them failed, the result is its error."""
    if self._thread is None:
      self._thread = threading.Thread(
        target=_work, args=(self._jobs,), name='pipeline transfers', daemon=True
      )
      self._thread.start()
      weakref.finalize(self, self._jobs.put, None)
    future: Future[Any] = Future()
    self._jobs.put((compat.with_settings(job), future))
    return future


def _work(jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]) -> None:
  failure: BaseException | None = None
  while (one := jobs.get()) is not None:
    job, future = one
    try:
      if failure is not None:
        raise failure
      future.set_result(job())
    except BaseException as error:
      failure = error
      future.set_exception(error)
    del one, job, future  # and with them the arrays


class ProcessTransfers:
  """What the transfers of a pipeline between processes share.

  Args:
    mesh, axis: the whole mesh, and its stage axis.

  Attributes:
    mesh, axis: see above.
    progress: the transfers that run.
    thread: the thread that runs those between CPUs.
  """

  def __init__(self, mesh: Mesh, axis: str):
    self.mesh, self.axis = mesh, axis
    self.progress, self.thread = TransferProgress(), TransferThread()
    self._zeros: dict[Any, jax.Array] = {}

  def zeros(self, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> jax.Array:
    """The target's part of the operands of `ppermute`, which it discards."""
    key = shape, dtype, sharding
    if key not in self._zeros:
      self._zeros[key] = placed(np.zeros(shape, dtype), sharding)
    return self._zeros[key]

  def of_argument(self, leaf: Any, sharding: Any, rank: int) -> ProcessTransfer | None:
    """The transfer of an argument to a rank from another process's; None where this process needs none.

    An array without a mesh is on a device of each process that passes it, so all of them have it.
    """
    given = getattr(leaf, 'sharding', None)
    if not isinstance(given, NamedSharding) or given.device_set >= sharding.device_set:
      return None
    for source in range(self.mesh.shape[self.axis]):
      mesh = submesh(self.mesh, self.axis, [source])
      if given.device_set >= set(mesh.devices.flat):
        several = len(processes_of(mesh) | processes_of(sharding.mesh)) > 1
        if not several or not (is_local(mesh) or is_local(sharding.mesh)):
          return None
        text = f'rank {source} -> rank {rank}: an argument, {jax.typeof(leaf).str_short()}'
        return ProcessTransfer(self, source, rank, [leaf], [sharding.spec], text)
    return None


class ProcessTransfer:
  """A transfer of arrays from one rank to another, of another process. Both processes call it.

  Args:
    shared: what the transfers of the pipeline share.
    source, target: the two ranks.
    avals: shapes and dtypes of the arrays.
    specs: specs of the arrays, the same on both ranks.
    text: ranks and arrays, for errors.

  Attributes:
    has_to_wait: whether the arrays are those that `wait` returns.
  """

  def __init__(
    self,
    shared: ProcessTransfers,
    source: int,
    target: int,
    avals: Sequence[Any],
    specs: Sequence[PartitionSpec],
    text: str,
  ):
    self._shared, mesh, axis = shared, shared.mesh, shared.axis
    joint = submesh(mesh, axis, [source, target])
    source_mesh, target_mesh = (submesh(mesh, axis, [rank]) for rank in (source, target))
    self._target_mesh = target_mesh
    self._sends, self._receives = is_local(source_mesh), is_local(target_mesh)
    other = target if self._sends else source
    self._wait = _wait(other, target_mesh if self._sends else source_mesh, text)
    self.has_to_wait = joint.devices.flat[0].platform == 'cpu'
    self._running: Future[list[jax.Array]] | None = None
    self._forms = tuple((aval.shape, aval.dtype) for aval in avals)
    self._as_rows = not all(shape and not _is_key(dtype) for shape, dtype in self._forms)
    self._rows = jax.eval_shape(_rows, [jax.ShapeDtypeStruct(*form) for form in self._forms])
    self._joint = [NamedSharding(joint, _of_both(axis, spec)) for spec in specs]
    self._source = [NamedSharding(source_mesh, spec) for spec in specs]
    self._target = [NamedSharding(target_mesh, spec) for spec in specs]
    self._permute = _permutation(joint, axis, tuple(sharding.spec for sharding in self._joint))

  def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
    """Runs the transfer; returns the arrays in the receiving process unless it has to wait for them."""
    run = functools.partial(self._run, arrays)
    if not self.has_to_wait:
      return run()
    self._running = self._shared.thread.submit(run)
    return []

  def wait(self) -> list[jax.Array]:
    """Waits until the transfer has ended; returns the arrays in the receiving process."""
    running, self._running = self._running, None
    return [] if running is None else running.result()

  def _run(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    with self._shared.progress.waiting(self._wait):
      shards: list[list[jax.Array]] = [[] for _ in self._rows]
      if self._sends:
        rows = _to_rows(tuple(self._source))(list(arrays)) if self._as_rows else arrays
        for each, row in zip(shards, rows, strict=True):
          each += _shards(row)
      if self._receives:
        for each, row, sharding in zip(shards, self._rows, self._target):
          each += _shards(self._shared.zeros(row.shape, row.dtype, sharding))
      joined = [
        jax.make_array_from_single_device_arrays(_doubled(row.shape), sharding, each)
        for row, sharding, each in zip(self._rows, self._joint, shards)
      ]
      permuted = self._permute(joined)
      if self.has_to_wait:
        jax.block_until_ready(permuted)
      return self._received(permuted) if self._receives else []

  def _received(self, permuted: Sequence[jax.Array]) -> list[jax.Array]:
    """The target's rows of each array, as an array of the target's devices."""
    received = []
    devices = list(self._target_mesh.devices.flat)
    for array, sharding, row in zip(permuted, self._target, self._rows):
      shards = {shard.device: shard.data for shard in array.addressable_shards}
      own = [shards[device] for device in devices if device in shards]
      received.append(jax.make_array_from_single_device_arrays(row.shape, sharding, own))
    return self._original(received)

  def _original(self, rows: list[jax.Array]) -> list[jax.Array]:
    """Arrays as they were sent, from their rows."""
    return _from_rows(tuple(self._target), self._forms)(rows) if self._as_rows else rows


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
    has_to_wait: whether the arrays are those that `wait` returns.
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
    self._coming: list[jax.Array] = []
    self.has_to_wait = self._receives and self._target[0].mesh.devices.flat[0].platform == 'cpu'

  def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
    """Runs the copy; returns the arrays in the receiving process, nothing in the others."""
    if not self._receives:
      jax.device_put(list(arrays) if self._sends else self._elsewhere, self._target)
      return []
    with self._progress.waiting(self._wait):
      coming = jax.device_put(self._elsewhere, self._target)
    if not self.has_to_wait:
      return coming
    self._coming = coming
    return []

  def wait(self) -> list[jax.Array]:
    """Waits until the arrays have arrived; returns them."""
    arrays, self._coming = self._coming, []
    with self._progress.waiting(self._wait):
      return jax.block_until_ready(arrays)

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


def _is_key(dtype: Any) -> bool:
  return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _of_both(axis: str, spec: PartitionSpec) -> PartitionSpec:
  """The spec of an array with the rows of both ranks."""
  first, *others = spec or (None,)
  return PartitionSpec((axis, *axis_names(first)), *others)


def _doubled(shape: tuple[int, ...]) -> tuple[int, ...]:
  return 2 * shape[0], *shape[1:]


def _rows(arrays: Sequence[jax.Array]) -> list[jax.Array]:
  """Arrays in a form that has rows: keys as numbers, scalars as vectors."""
  return [jnp.atleast_1d(array_of(array)) for array in arrays]


@functools.lru_cache(maxsize=256)
def _to_rows(shardings: tuple[NamedSharding, ...]) -> Any:
  return jax.jit(_rows, out_shardings=list(shardings))


@functools.lru_cache(maxsize=256)
def _from_rows(
  shardings: tuple[NamedSharding, ...], forms: tuple[tuple[tuple[int, ...], Any], ...]
) -> Any:
  """A program from the results of `_rows` to arrays of these shapes and dtypes."""

  def original(row: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if _is_key(dtype):
      return jax.random.wrap_key_data(row, impl=jax.random.key_impl(jnp.empty((), dtype)))
    return row.reshape(shape)

  return jax.jit(
    lambda rows: [original(row, *form) for row, form in zip(rows, forms, strict=True)],
    out_shardings=list(shardings),
  )
