"""Time and memory of saving and restoring, compared with plain Orbax on the same state.

Each operation on the large state runs in its own process, in random order. Memory is the peak resident size
during the operation (VmHWM, reset before it) minus the resident size before it, in sizes of the state. Each
process first saves and restores a tiny state, so that imports and thread pools are not counted. These arms
read files from the page cache.

Close ratios are of pairs: two operations that take turns in one process, the one right after the other, in an order
that alternates, each after the same preparation. After every 11 pairs the interval of the ratio is looked at; while it
contains the target and a minute is not over, there are more pairs, at most 44. Before each operation, memory of its size is touched and freed: a
virtual machine may have given it back to its host, which takes seconds to provide it again, to whichever comes first.
Pairs are measured on the disk, and on a file system in memory, where a sync is free and our own work remains. The pair
"cold" reads from the disk: the page cache drops the files before.

The state is a TrainState of adamw filled with random numbers, as after some steps of training: a new state
is two thirds zeros, which compress to nothing. The numbers repeat after 16 MB, further apart than compression looks. It is saved on 2 x 4 devices and restored on 4 x 2. The
defaults are measured: checksums are computed and compared, and Orbax compresses.

Each round uses new small leaves, because an array caches its host copy.
"""

import os

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'

import functools
import gc
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from harness import WALL, Figure, Target, at_most, exact, measure, ratio, summary
from orbax.checkpoint import v1 as ocp
from reporting import report

import flax_spmd as spmd
from flax_spmd import checkpoint
from flax_spmd._src.checkpoint.storage.removed_folders import settle
from flax_spmd._src.data.checksums import checksums
from flax_spmd.checkpoint import Changes

LAYERS, EMBED, MLP, VOCAB = 6, 1024, 4096, 8192  # 0.7 GB with adamw
ROUNDS = int(os.environ.get('ROUNDS', '5'))
PAIR_ROUNDS = int(os.environ.get('PAIR_ROUNDS', '11'))
MOST_PAIR_ROUNDS, PAIR_SECONDS = 4 * PAIR_ROUNDS, 60  # while a ratio is undecided
BLOCK = 1 << 22  # random numbers of the state
SMALL_LEAVES, SMALL_SIZE, SMALL_ROUNDS = 2000, 1024, 3
MANY_LEAVES = 5000
PACK = 1 << 16
RESULT = 'result: '  # begins the line that a process prints for the parent
MEMORY = Path('/dev/shm')  # a file system in memory
RULES = (('vocab', 'model'), ('embed', 'data'), ('mlp', 'model'))


# -- the state


def create(stacked: bool) -> TrainState:
  """A boxed TrainState, with stacked layers, as from `nn.scan`, or single ones."""

  def box(names: tuple[str, ...], *shape: int) -> Any:
    return spmd.LogicallyPartitioned(jnp.zeros(shape), names)

  def layer(names: tuple[str, ...] = (), shape: tuple[int, ...] = ()) -> Any:
    return {
      'wi': box((*names, 'embed', 'mlp'), *shape, EMBED, MLP),
      'wo': box((*names, 'mlp', 'embed'), *shape, MLP, EMBED),
      'scale': box((*names, 'embed'), *shape, EMBED),
    }

  params = {'embedding': box(('vocab', 'embed'), VOCAB, EMBED)}
  if stacked:
    params['layers'] = layer(('layers',), (LAYERS,))
  else:
    params |= {f'layers_{i}': layer() for i in range(LAYERS)}
  return TrainState.create(apply_fn=None, params=params, tx=OPTIMIZER)


OPTIMIZER = optax.adamw(1e-3)


def layout(data: int = 2, model: int = 4) -> spmd.Layout:
  return spmd.Layout({'data': data, 'model': model}, RULES)


def abstract_state(under: spmd.Layout, stacked: bool = True) -> Any:
  return under.abstract(functools.partial(create, stacked))


def filled(abstract: Any) -> Any:
  """Random numbers with the given shapes, dtypes and shardings."""
  generator = np.random.default_rng(0)
  block = generator.standard_normal(BLOCK, np.float32) / 50

  def fill(leaf: Any) -> Any:
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      return jax.device_put(np.full(leaf.shape, 3, leaf.dtype), leaf.sharding)
    return jax.device_put(
      np.resize(np.roll(block, generator.integers(BLOCK)), leaf.shape), leaf.sharding
    )

  return jax.block_until_ready(jax.tree.map(fill, abstract))


@functools.cache
def _saved_values() -> Any:
  """The numbers of the state to save, as numpy arrays."""
  return jax.tree.map(np.asarray, filled(abstract_state(layout())))


def new_state() -> Any:
  """The state to save, in new arrays."""
  shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(layout()))
  values = jax.tree.map(np.copy, _saved_values())
  return jax.block_until_ready(jax.device_put(values, shardings))


def bytes_of(tree: Any) -> int:
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


# -- the operations


def orbax_save(folder: Path) -> Callable[[], Any]:
  state = new_state()
  return lambda: ocp.save(folder / 'new', state)


def our_save(folder: Path) -> Callable[[], Any]:
  state = new_state()
  return lambda: checkpoint.save(folder / 'new', state, layout=layout())


def our_save_not_durable(folder: Path) -> Callable[[], Any]:
  state = new_state()
  return lambda: checkpoint.save(folder / 'new', state, layout=layout(), durable=False)


def raw_write(folder: Path) -> Callable[[], Any]:
  """Writes the same bytes to one file, and has the disk confirm it."""
  arrays = [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(new_state())]
  (folder / 'new').mkdir()

  def save() -> None:
    with open(folder / 'new' / 'raw', 'wb', buffering=0) as file:
      for array in arrays:
        data = memoryview(array).cast('B') if array.ndim else array.tobytes()
        while data:
          data = data[file.write(data) :]
      os.fsync(file.fileno())

  return save


def our_compressed_save(folder: Path) -> Callable[[], Any]:
  state = new_state()
  return lambda: checkpoint.save(folder / 'new', state, layout=layout(), compress=True)


def our_save_beside(folder: Path) -> Callable[[], Any]:
  """Saves to a new path, after the preparation of `our_overwrite`."""
  state = _saved_before(folder / 'new' / 'first')
  return lambda: checkpoint.save(folder / 'new' / 'second', state, layout=layout())


def our_overwrite(folder: Path) -> Callable[[], Any]:
  """Replaces a state of the same size."""
  state = _saved_before(folder / 'new' / 'first')
  return lambda: checkpoint.save(folder / 'new' / 'first', state, layout=layout(), overwrite=True)


def _saved_before(path: Path) -> Any:
  """A state, after a save of it. A save soon after another takes longer."""
  state = new_state()
  checkpoint.save(path, state, layout=layout())
  os.sync()
  return state


def our_save_returns(folder: Path) -> Callable[[], Any]:
  state = new_state()
  return lambda: checkpoint.save_async(folder / 'new', state, layout=layout())


def orbax_save_returns(folder: Path) -> Callable[[], Any]:
  state = new_state()
  return lambda: ocp.save_async(folder / 'new', state)


def sums(folder: Path) -> Callable[[], Any]:
  leaves = jax.tree.leaves(new_state())
  return lambda: checksums(leaves)


def orbax_restore(folder: Path) -> Callable[[], Any]:
  target = abstract_state(layout(4, 2))
  return lambda: ocp.load(folder / 'orbax', target)


def our_restore(folder: Path) -> Callable[[], Any]:
  target = abstract_state(layout(4, 2))
  return lambda: checkpoint.restore(folder / 'ours', target)


def our_restore_unverified(folder: Path) -> Callable[[], Any]:
  target = abstract_state(layout(4, 2))
  return lambda: checkpoint.restore(folder / 'ours', target, verify=False)


def put_after(folder: Path) -> Callable[[], Any]:
  """Restores to one device, as without shardings, then reshards to all devices."""
  target = abstract_state(layout(4, 2))
  alone = spmd.Layout(spmd.make_mesh({'data': 1, 'model': 1}, devices=jax.devices()[:1]), RULES)
  first, shardings = abstract_state(alone), jax.tree.map(lambda leaf: leaf.sharding, target)
  return lambda: jax.device_put(ocp.load(folder / 'orbax', first), shardings)


def stacked_to_single(folder: Path) -> Callable[[], Any]:
  target = abstract_state(layout(4, 2), stacked=False)
  return lambda: checkpoint.restore(
    folder / 'ours', target, changes=Changes(stacks={'layers': 'layers_{}'})
  )


def single_to_stacked(folder: Path) -> Callable[[], Any]:
  target = abstract_state(layout(4, 2))
  return lambda: checkpoint.restore(
    folder / 'single', target, changes=Changes(stacks={'layers': 'layers_{}'})
  )


def _operations(*functions: Callable[[Path], Callable[[], Any]]) -> dict[str, Any]:
  return {function.__name__: function for function in functions}


OPERATIONS = _operations(
  orbax_save,
  our_save,
  our_compressed_save,
  orbax_save_returns,
  our_save_returns,
  sums,
  orbax_restore,
  our_restore,
  put_after,
  stacked_to_single,
  single_to_stacked,
)


class Pair(NamedTuple):
  """Two operations, and the target of the ratio of their times."""

  operation: Callable[[Path], Callable[[], Any]]
  base: Callable[[Path], Callable[[], Any]]
  target: Target


PAIRS = {
  'durable': Pair(our_save, raw_write, at_most(1.15)),
  'not_durable': Pair(our_save_not_durable, orbax_save, at_most(0.9)),
  'overwrite': Pair(our_overwrite, our_save_beside, at_most(1.1)),
  'verified': Pair(our_restore, our_restore_unverified, at_most(1.3)),
  'cold': Pair(our_restore, our_restore_unverified, at_most(1.3)),
  'beside_orbax': Pair(our_restore, orbax_restore, at_most(1.1)),
}


def operate(name: str, folder: Path) -> None:
  """Runs an operation, in its own process, and prints its time in seconds and memory in bytes."""
  _touch(folder)
  call = OPERATIONS[name](folder)
  gc.collect()
  before = _resident('VmRSS')
  Path('/proc/self/clear_refs').write_text('5')  # resets VmHWM
  result, seconds = _timed(call)
  peak = _resident('VmHWM')
  equal = _equal(result) if name in ('our_restore', 'stacked_to_single', 'single_to_stacked') else None
  if hasattr(result, 'result'):
    result.result()
  print(RESULT + json.dumps({'seconds': seconds, 'bytes': peak - before, 'equal': equal}))


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
  start = time.perf_counter()
  result = call()
  if not isinstance(result, list) and not hasattr(result, 'result'):  # of checksums; of saves that go on
    jax.block_until_ready(result)
  return result, time.perf_counter() - start


def compare(pair: str, folder: Path) -> None:
  """Runs the operations of a pair, in one process, and prints the seconds of each in every round."""
  _touch(folder)
  _round(pair, 0, folder)  # not counted
  rounds: list[dict[str, float]] = []
  end = time.monotonic() + PAIR_SECONDS

  def is_open() -> bool:
    return time.monotonic() < end and _ratio_of('', pair, rounds).verdict == 'undecided'

  while not rounds or (len(rounds) < MOST_PAIR_ROUNDS and is_open()):
    rounds += [_round(pair, len(rounds) + number, folder) for number in range(PAIR_ROUNDS)]
  print(RESULT + json.dumps(rounds))


def _round(pair: str, number: int, folder: Path) -> dict[str, float]:
  """The seconds of both operations of a pair, whose order alternates."""
  operations = (PAIRS[pair].operation, PAIRS[pair].base)[:: 1 - number % 2 * 2]
  return {each.__name__: _once(pair, each, folder) for each in operations}


def _once(pair: str, operation: Callable[[Path], Callable[[], Any]], folder: Path) -> float:
  shutil.rmtree(folder / 'new', ignore_errors=True)
  call = operation(folder)
  os.sync()
  settle()
  gc.collect()
  if pair == 'cold':
    for file in (folder / 'ours').rglob('*'):
      _drop_from_cache(file)
  np.ones(bytes_of(abstract_state(layout())) // 4, np.float64)  # twice the state
  _, seconds = _timed(call)
  return seconds


def _drop_from_cache(file: Path) -> None:
  if file.is_file():
    descriptor = os.open(file, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def _touch(folder: Path) -> None:
  tiny, under = {'w': jnp.ones(8)}, layout()
  path = folder / f'tiny_{os.getpid()}'
  checkpoint.save(path, tiny, layout=under)
  checkpoint.restore(path, under.abstract(lambda: tiny))
  shutil.rmtree(path)


def _resident(field: str) -> int:
  for line in Path('/proc/self/status').read_text().splitlines():
    if line.startswith(field):
      return 1024 * int(line.split()[1])
  raise RuntimeError(field)


def _equal(restored: Any) -> bool:
  """Whether a state equals the saved one, with single or stacked layers."""
  stacked = 'layers' in restored.params
  expected = filled(abstract_state(layout(4, 2)))
  if not stacked:
    expected = _single(expected)
  pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True)
  return all(np.array_equal(one, two) for one, two in pairs)


def _single(state: Any) -> Any:
  """The same state with single layers, as numpy arrays."""

  def unstacked(params: Any) -> Any:
    params = dict(params)
    stack = params.pop('layers')
    for i in range(LAYERS):
      params[f'layers_{i}'] = jax.tree.map(lambda x, i=i: np.asarray(x)[i], spmd.unbox(stack))
    return spmd.unbox(params)

  adam = state.opt_state[0]
  moved = adam._replace(mu=unstacked(adam.mu), nu=unstacked(adam.nu))
  return state.replace(params=unstacked(state.params), opt_state=(moved, *state.opt_state[1:]))


# -- the figures


class Measured(NamedTuple):
  """Measurements of one process."""

  seconds: float
  bytes: int
  equal: bool | None


def figures() -> list[Figure]:
  with tempfile.TemporaryDirectory(prefix='flax_spmd_bench_') as temporary:
    folder = Path(temporary)
    return [*_large_figures(folder), *_small_figures(folder), _many_figure(folder)]


def _large_figures(folder: Path) -> list[Figure]:
  size = bytes_of(abstract_state(layout()))
  _in_process('--operation', 'prepare', folder)
  rounds = _rounds(folder)
  seconds = [{name: measured.seconds for name, measured in one.items()} for one in rounds]
  pairs = {pair: _in_process('--pair', pair, folder) for pair in PAIRS}

  def memory(text: str, name: str, limit: float | None = None) -> Figure:
    samples = [one[name].bytes / size for one in rounds]
    return summary(text, samples, 'x state', None if limit is None else at_most(limit))

  def timed(text: str, name: str, pair: str | None = None) -> Figure:
    return summary(text, [one[name] for one in (pairs[pair] if pair else seconds)], 's')

  equal = [one[name].equal for one in rounds for name in one if one[name].equal is not None]
  return [
    exact('size of the state', size / 1e9, 'GB'),
    timed('write and fsync of the raw bytes', 'raw_write', 'durable'),
    timed('save, Orbax', 'orbax_save'),
    timed('save', 'our_save'),
    timed('save, not durable', 'our_save_not_durable', 'not_durable'),
    timed('save, compressed', 'our_compressed_save'),
    timed('save beside a checkpoint of the same state', 'our_save_beside', 'overwrite'),
    timed('overwrite', 'our_overwrite', 'overwrite'),
    ratio('save over Orbax', seconds, 'our_save', 'orbax_save'),
    _ratio_of('save over the raw bytes', 'durable', pairs['durable']),
    _ratio_of('save, not durable, over Orbax', 'not_durable', pairs['not_durable']),
    _ratio_of('overwrite over a save beside it', 'overwrite', pairs['overwrite']),
    memory('save, Orbax, memory', 'orbax_save'),
    memory('save, memory', 'our_save', 0.1),
    ratio('checksums, part of a save', seconds, 'sums', 'our_save', at_most(0.25)),
    timed('save_async returns, Orbax', 'orbax_save_returns'),
    timed('save_async returns', 'our_save_returns'),
    ratio(
      'save_async returns, over Orbax', seconds, 'our_save_returns', 'orbax_save_returns', at_most(1.5)
    ),
    timed('restore, Orbax', 'orbax_restore'),
    timed('restore', 'our_restore'),
    timed('restore, from a cold cache', 'our_restore', 'cold'),
    _ratio_of('restore over one without checksums', 'verified', pairs['verified']),
    _ratio_of('restore over one without checksums, from a cold cache', 'cold', pairs['cold']),
    *_in_memory_figures(),
    _ratio_of('restore over Orbax', 'beside_orbax', pairs['beside_orbax']),
    ratio('restore over restore and device_put', seconds, 'our_restore', 'put_after', at_most(0.56)),
    memory('restore, Orbax, memory', 'orbax_restore'),
    memory('restore, memory', 'our_restore', 1.4),
    memory('restore and device_put, memory', 'put_after'),
    timed('stacked to single', 'stacked_to_single'),
    timed('single to stacked', 'single_to_stacked'),
    memory('stacked to single, memory', 'stacked_to_single', 2.2),
    memory('single to stacked, memory', 'single_to_stacked', 2.2),
    exact('restored or converted, not bit-equal', equal.count(False), f'of {len(equal)}', at_most(0)),
  ]


def _ratio_of(name: str, pair: str, rounds: list[dict[str, float]]) -> Figure:
  """The ratio of a pair, of its first operation over its second."""
  operation, base, target = PAIRS[pair]
  return ratio(name, rounds, operation.__name__, base.__name__, target)


def _in_memory_figures() -> list[Figure]:
  """Pairs on a file system in memory; none where there is none that holds the state a few times."""
  free = shutil.disk_usage(MEMORY).free if MEMORY.is_dir() else 0
  if free < 8 * bytes_of(abstract_state(layout())):
    return []
  with tempfile.TemporaryDirectory(prefix='flax_spmd_bench_', dir=MEMORY) as temporary:
    folder = Path(temporary)
    _in_process('--operation', 'prepare', folder)
    overwrite, verified = (_in_process('--pair', pair, folder) for pair in ('overwrite', 'verified'))
  return [
    _ratio_of('overwrite over a save beside it, in memory', 'overwrite', overwrite),
    _ratio_of('restore over one without checksums, in memory', 'verified', verified),
  ]


def _rounds(folder: Path) -> list[dict[str, Measured]]:
  order = random.Random(0)
  rounds = []
  for _ in range(ROUNDS):
    names = order.sample(list(OPERATIONS), len(OPERATIONS))
    rounds.append({name: Measured(**_in_process('--operation', name, folder)) for name in names})
  return rounds


def _in_process(kind: str, name: str, folder: Path) -> Any:
  """The result that a process of this script prints."""
  shutil.rmtree(folder / 'new', ignore_errors=True)
  os.sync()
  command = [sys.executable, __file__, kind, name, str(folder)]
  run = subprocess.run(command, capture_output=True, text=True)
  results = [line for line in run.stdout.splitlines() if line.startswith(RESULT)]
  if not results:
    raise RuntimeError(f'{name} failed:\n{run.stderr}')
  return json.loads(results[0].removeprefix(RESULT))


def prepare(folder: Path) -> None:
  """Saves the checkpoints to restore."""
  state = filled(abstract_state(layout()))
  ocp.save(folder / 'orbax', state)
  checkpoint.save(folder / 'ours', state, layout=layout())
  single = layout().shard(_boxed(_single(state)))
  checkpoint.save(folder / 'single', single, layout=layout())
  print(RESULT + json.dumps({'seconds': 0, 'bytes': 0, 'equal': None}))


def _boxed(values: Any) -> Any:
  """A boxed state of single layers, from its values."""
  return jax.tree.structure(abstract_state(layout(), stacked=False)).unflatten(jax.tree.leaves(values))


def _small_figures(folder: Path) -> list[Figure]:
  under = spmd.Layout({'data': 8}, (('embed', 'data'),))
  new = _new_names(folder)
  arms = {
    'Orbax': lambda: ocp.save(next(new), next(states)),
    'packed': lambda: checkpoint.save(next(new), next(states), layout=under, pack=PACK),
  }
  states = _new_states(under, (SMALL_ROUNDS + 1) * len(arms))
  saves = measure(arms, rounds=SMALL_ROUNDS, warm_up=1, clock=WALL)
  state = next(_new_states(under, 1))
  target = under.abstract(lambda: state)
  paths = {name: folder / f'small_{name}' for name in arms}
  ocp.save(paths['Orbax'], state)
  checkpoint.save(paths['packed'], state, layout=under, pack=PACK)
  wait = jax.block_until_ready
  reads = measure(
    {
      'Orbax': lambda: wait(ocp.load(paths['Orbax'], target)),
      'packed': lambda: wait(checkpoint.restore(paths['packed'], target)),
    },
    rounds=SMALL_ROUNDS,
    warm_up=1,
    clock=WALL,
  )
  flights = measure(
    {'preflight': lambda: checkpoint.preflight(paths['packed'], target)}, rounds=11, clock=WALL
  )
  return [
    summary('2,000 leaves, save, Orbax', [one['Orbax'] for one in saves], 's'),
    summary('2,000 leaves, save, packed', [one['packed'] for one in saves], 's'),
    ratio('2,000 leaves, save, packed over Orbax', saves, 'packed', 'Orbax', at_most(0.05)),
    summary('2,000 leaves, restore, Orbax', [one['Orbax'] for one in reads], 's'),
    summary('2,000 leaves, restore, packed', [one['packed'] for one in reads], 's'),
    ratio('2,000 leaves, restore, packed over Orbax', reads, 'packed', 'Orbax'),
    summary('2,000 leaves, preflight', [one['preflight'] for one in flights], 's', at_most(0.1)),
  ]


def _many_figure(folder: Path) -> Figure:
  under = spmd.Layout({'data': 8}, (('embed', 'data'),))
  new = _new_names(folder / 'many')
  states = _new_states(under, 2 * (SMALL_ROUNDS + 1), MANY_LEAVES)
  arms = {
    'Orbax': lambda: ocp.save(next(new), next(states)),
    'packed': lambda: checkpoint.save(next(new), next(states), layout=under, pack=PACK),
  }
  saves = measure(arms, rounds=SMALL_ROUNDS, warm_up=1, clock=WALL)
  return ratio('5,000 leaves, save, packed over Orbax', saves, 'packed', 'Orbax', at_most(0.1))


def _new_states(under: spmd.Layout, count: int, leaves: int = SMALL_LEAVES):
  """New small sharded arrays for each call, without cached host copies."""
  batches = [
    under.shard(
      {
        f'leaf_{i:04}': spmd.LogicallyPartitioned(np.full(SMALL_SIZE, i, np.float32), ('embed',))
        for i in range(leaves)
      }
    )
    for _ in range(count)
  ]
  return iter(jax.block_until_ready(batches))


def _new_names(folder: Path):
  number = 0
  while True:
    number += 1
    yield folder / f'saved_{number}'


if __name__ == '__main__':
  if sys.argv[1:2] == ['--operation']:
    name, folder = sys.argv[2], Path(sys.argv[3])
    prepare(folder) if name == 'prepare' else operate(name, folder)
  elif sys.argv[1:2] == ['--pair']:
    compare(sys.argv[2], Path(sys.argv[3]))
  else:
    report('checkpoint', figures)
