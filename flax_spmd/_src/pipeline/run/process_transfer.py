"""Transfers between processes: arrays sent from one process's rank to another's.

A process can copy arrays between its own devices only. Between processes a transfer is a collective of
the two ranks: a `ppermute` over the stage axis of their joint mesh, which both processes run. The array of one
rank is a part of an array of both, as it is; that array passes for one that is replicated over the stage axis. Both
run the transfers between them in the same order, so they cannot deadlock.

XLA's CPU client allows 32 unfinished programs per device. A dispatch beyond them waits, and holds a thread
for each of the program's devices in this process. There are only as many threads as devices (or cores, if
there are more), so the programs that it waits for may never get one. Therefore a transfer between CPUs
ends before the next one begins, in a thread of its own, while the programs of the step run in another.
Elsewhere a transfer is dispatched like a program; the rank watch looks at a small array that is ready when it has ended.

JAX itself copies between processes where `jax_cross_host_transfer_socket_address` is set: the sender goes on at once,
and no array of both ranks is needed. XLA numbers these copies in each process, and finds the two ends by their
number. So every process of the job takes part in all of them, in the order of the call list.
"""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.compat import from_shards
from flax_spmd._src.data.host_values import placed
from flax_spmd._src.multihost import named
from flax_spmd._src.pipeline.cut.equations import is_key
from flax_spmd._src.pipeline.run.rank_watch import TransferProgress, Wait
from flax_spmd._src.pipeline.run.submeshes import is_local, processes_of, submesh, view
from flax_spmd.errors import PipelineError


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

  Attributes:
    mesh, axis: the whole mesh, and its stage axis.
    progress: the transfers that run.
    thread: the thread that runs those between CPUs.
  """

  def __init__(self, mesh: Mesh, axis: str):
    self.mesh, self.axis = mesh, axis
    self.progress, self.thread = TransferProgress(), TransferThread()
    self._zeros: dict[Any, jax.Array] = {}

  def zeros(self, aval: Any, sharding: NamedSharding) -> jax.Array:
    """The target's part of the operands of `ppermute`, which it discards."""
    key = aval.shape, aval.dtype, sharding
    if key not in self._zeros:
      self._zeros[key] = placed(jnp.zeros(aval.shape, aval.dtype), sharding)
    return self._zeros[key]

  def followed(
    self, wait: Wait, device: Any, dispatch: Callable[[], tuple[list[jax.Array], jax.Array]]
  ) -> list[jax.Array]:
    """The arrays of a transfer that goes on.

    Args:
      wait: the transfer.
      device: a device of this process that takes part. The time begins when it has run what precedes the step.
      dispatch: returns the arrays, and one that is ready when the transfer has ended.
    """
    if not self.progress.has_begun:
      self.progress.add(None, _arrival(jax.device_put(False, device)))
    with self.progress.waiting(wait):  # the first transfer of two ranks may block
      received, arrival = dispatch()
    self.progress.add(wait, arrival)
    return received

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

  Raises:
    PipelineError: JAX has no collectives for these CPUs.
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
    self._shared, self._avals = shared, list(avals)
    meshes = [
      submesh(shared.mesh, shared.axis, ranks) for ranks in ([source], [target], [source, target])
    ]
    source_mesh, target_mesh, joint = meshes
    self._sends, self._receives = is_local(source_mesh), is_local(target_mesh)
    other = (target, target_mesh) if self._sends else (source, source_mesh)
    self._wait = _wait(*other, text)
    self._device = joint.local_devices[0]
    self.has_to_wait = self._device.platform == 'cpu'
    if self.has_to_wait and not compat.has_cpu_collectives():
      raise PipelineError(
        f'The transfer "{text}" is between {named(sorted(processes_of(joint)))}, whose CPUs have no collectives: '
        'jax_cpu_collectives_implementation is None.\n'
        "Fix: leave it at 'gloo', its default, on every process; or set jax_cross_host_transfer_socket_address."
      )
    self._running: Future[list[jax.Array]] | None = None
    self._joint, self._target = (
      [NamedSharding(mesh, spec) for spec in specs] for mesh in (joint, target_mesh)
    )
    self._permute = _permutation(joint, shared.axis, tuple(specs))

  def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
    """Runs the transfer; returns the arrays in the receiving process unless it has to wait for them."""
    if not self.has_to_wait:
      return self._shared.followed(self._wait, self._device, lambda: self._dispatched(arrays))
    self._running = self._shared.thread.submit(functools.partial(self._run, arrays))
    return []

  def wait(self) -> list[jax.Array]:
    """Waits until the transfer has ended; returns the arrays in the receiving process."""
    running, self._running = self._running, None
    return [] if running is None else running.result()

  def _run(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    with self._shared.progress.waiting(self._wait):
      received, arrival = self._dispatched(arrays)
      jax.block_until_ready(arrival)
    return received

  def _dispatched(self, arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    """The arrays in the receiving process, and an array that is ready when the transfer has ended."""
    parts = [list(arrays)] if self._sends else []
    if self._receives:
      parts.append(list(map(self._shared.zeros, self._avals, self._target)))
    shards = [[shard.data for part in each for shard in part.addressable_shards] for each in zip(*parts)]
    permuted, arrival = self._permute(list(map(from_shards, self._avals, self._joint, shards)))
    received = zip(permuted, self._target, strict=True) if self._receives else ()
    return [cast(jax.Array, view(array, sharding)) for array, sharding in received], arrival


class CrossHostCopy:
  """A copy by JAX of arrays of one rank to another, of other processes. Every process of the job calls it.

  The receiver goes on until it reads the arrays; on a CPU it then has to `wait`, for a program in a queue could not be
  watched.

  Arguments and attributes are those of `ProcessTransfer`, with the shardings of the arrays on both ranks.
  """

  def __init__(
    self,
    shared: ProcessTransfers,
    source: int,
    avals: Sequence[Any],
    shardings: Sequence[tuple[NamedSharding, NamedSharding]],
    text: str,
  ):
    self._avals, (self._source, self._target) = list(avals), map(list, zip(*shardings))
    self._sends, self._receives = (is_local(each[0].mesh) for each in (self._source, self._target))
    self._wait, self._shared = _wait(source, self._source[0].mesh, text), shared
    self._coming: list[jax.Array] = []
    self.has_to_wait = self._receives and self._target[0].mesh.devices.flat[0].platform == 'cpu'

  def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
    """Runs the copy; returns the arrays in the receiving process, nothing in the others."""
    if not self._receives:
      jax.device_put(list(arrays) if self._sends else self._elsewhere, self._target)
      return []
    if not self.has_to_wait:
      device = self._target[0].mesh.local_devices[0]
      return self._shared.followed(self._wait, device, self._dispatched)
    with self._shared.progress.waiting(self._wait):
      self._coming = jax.device_put(self._elsewhere, self._target)
    return []

  def _dispatched(self) -> tuple[list[jax.Array], jax.Array]:
    """The arrays, and one that is ready when they have arrived."""
    coming = jax.device_put(self._elsewhere, self._target)
    return coming, _arrival(coming)

  def wait(self) -> list[jax.Array]:
    """Waits until the arrays have arrived; returns them."""
    arrays, self._coming = self._coming, []
    with self._shared.progress.waiting(self._wait):
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
  return compat.copies_across_processes() and disjoint and joined and not any(map(is_key, avals))


def _wait(rank: int, mesh: Mesh, text: str) -> Wait:
  return Wait(rank, tuple(sorted(processes_of(mesh) - {jax.process_index()})), text)


@functools.lru_cache(maxsize=256)
def _permutation(mesh: Mesh, axis: str, specs: tuple[PartitionSpec, ...]) -> Any:
  """A program that sends the shards of the first of two ranks to the second; its last result is small."""

  def move(arrays: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    return list(map(moved, arrays)), jnp.zeros((), bool)

  def moved(array: jax.Array) -> jax.Array:
    if not is_key(array):
      return lax.ppermute(array, axis, [(0, 1)])
    numbers = lax.ppermute(jax.random.key_data(array), axis, [(0, 1)])
    return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(array))

  every = list(specs)
  specs_of_results = every, PartitionSpec()
  return jax.jit(
    jax.shard_map(move, mesh=mesh, in_specs=(every,), out_specs=specs_of_results, check_vma=False)
  )


@functools.partial(jax.jit, keep_unused=True)
def _arrival(arrays: Any) -> jax.Array:
  """An array that is ready once others are, and their device has run the programs before; it outlives their donation."""
  return jnp.zeros((), bool)
