"""Time and memory of restoring a LLaMA-named safetensors file onto eight devices, beside safetensors' own load of the same bytes.

Each operation runs in its own process, in random order, after a tiny one of its kind. The file is in the page cache.
Memory is the peak resident size during the operation minus the one before it and the arrays that it returns, in sizes
of the largest array. `safetensors` returns numpy arrays on the host, and shards nothing; with `device_put`, it does.
The changed restore transposes every weight, splits its heads and stacks the layers. Its counterpart does the same to the
loaded arrays with numpy, into contiguous memory, as devices have it. Each device gets an eighth of every matrix, but for
`rows, four copies`, which fills four times the memory.
"""

import os

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'

import gc
import json
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from harness import Figure, at_most, exact, ratio, summary
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp
from reporting import report
from safetensors.numpy import load_file, save_file

import flax_spmd as spmd
from flax_spmd import checkpoint
from flax_spmd.checkpoint import Changes

LAYERS, EMBED, HEADS, MLP, VOCAB = 3, 1536, 16, 4096, 8192
ROUNDS = int(os.environ.get('ROUNDS', '7'))
RESULT = 'result: '
FILE = 'model.safetensors'


def write(folder: Path, layers: int, embed: int, mlp: int, vocab: int) -> None:
  """A file with LLaMA's names, of float32."""
  generator = np.random.default_rng(0)
  shapes = {'model.embed_tokens.weight': (vocab, embed), 'model.norm.weight': (embed,)}
  for number in range(layers):
    layer = f'model.layers.{number}'
    shapes |= {f'{layer}.self_attn.{one}_proj.weight': (embed, embed) for one in 'qkvo'}
    shapes |= {f'{layer}.mlp.{one}_proj.weight': (mlp, embed) for one in ('gate', 'up')}
    shapes |= {
      f'{layer}.mlp.down_proj.weight': (embed, mlp),
      f'{layer}.input_layernorm.weight': (embed,),
    }
  folder.mkdir()
  save_file(
    {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}, folder / FILE
  )


def layout(*spec: Any, changed: bool = False) -> spmd.Layout:
  weights = PartitionSpec(*([None] if changed else []), *spec)
  rules = [('norm', PartitionSpec()), ('embed_tokens', PartitionSpec(*spec)), ('.*', weights)]
  return spmd.Layout({'data': 2, 'model': 4}, rules)


def restored(*spec: Any) -> Callable[[Path], Any]:
  return lambda folder: checkpoint.restore(folder, layout=layout(*spec))


def changed(folder: Path) -> Any:
  changes = Changes(
    rearranged={
      '/[qkv]_proj': f'(heads={HEADS} head) embed -> embed heads head',
      '/o_proj': f'embed (heads={HEADS} head) -> heads head embed',
      '/mlp/': 'out in -> in out',
    },
    stacks={'layers': 'layers/{}'},
  )
  return checkpoint.restore(folder, layout=layout('data', 'model', changed=True), changes=changes)


def theirs(folder: Path) -> Any:
  return load_file(folder / FILE)


def theirs_then_numpy(folder: Path) -> Any:
  """What `changed` returns, on the host: `np.stack` alone would keep the order of transposed arrays in memory."""
  layers: dict[str, list[np.ndarray]] = {}
  others = {}
  for name, array in load_file(folder / FILE).items():
    _, found, rest = name.partition('model.layers.')
    if not found:
      others[name] = array
      continue
    kind = rest.partition('.')[2]
    head = array.shape[0] // HEADS
    if kind.startswith('self_attn.o_'):
      array = array.reshape(-1, HEADS, head).transpose(1, 2, 0)
    elif kind.startswith('self_attn.'):
      array = array.reshape(HEADS, head, -1).transpose(2, 0, 1)
    layers.setdefault(kind, []).append(array.T if kind.startswith('mlp') else array)
  stacked = {kind: np.empty((len(each), *each[0].shape), each[0].dtype) for kind, each in layers.items()}
  for kind, each in layers.items():
    np.stack(each, out=stacked[kind])
  return others | stacked


def theirs_then_put(folder: Path) -> Any:
  mesh = spmd.make_mesh({'data': 2, 'model': 4})
  loaded = load_file(folder / FILE)
  specs = [PartitionSpec('data', 'model')[: x.ndim] for x in loaded.values()]
  shardings = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs]
  return jax.device_put(list(loaded.values()), shardings)


def by_orbax(*spec: Any) -> Callable[[Path], Any]:
  def load(folder: Path) -> Any:
    from orbax.checkpoint.experimental.v1._src.context.options import CheckpointLayout

    mesh = spmd.make_mesh({'data': 2, 'model': 4})
    leaves = checkpoint.show(folder).record.leaves
    target = {
      path.replace('/', '.'): jax.ShapeDtypeStruct(
        leaf.shape,
        leaf.dtype,
        sharding=NamedSharding(mesh, PartitionSpec(*(spec if len(leaf.shape) == 2 else ()))),
      )
      for path, leaf in leaves.items()
    }
    with ocp.Context(checkpoint_layout=CheckpointLayout.SAFETENSORS):
      return ocp.load(folder / FILE, target)

  return load


OPERATIONS = {
  'safetensors': theirs,
  'safetensors, changed by numpy': theirs_then_numpy,
  'safetensors, device_put': theirs_then_put,
  'rows': restored(('data', 'model')),
  'columns': restored(None, ('data', 'model')),
  'both': restored('data', 'model'),
  'rows, four copies': restored('data'),
  'changed': changed,
  'Orbax, both': by_orbax('data', 'model'),
  'Orbax, columns': by_orbax(None, 'model'),
}


# -- one operation, in its own process


def operate(name: str, folder: Path) -> None:
  """Runs an operation and prints its time in seconds and memory in bytes."""
  warnings.simplefilter('ignore')
  OPERATIONS[name](folder / 'tiny')
  gc.collect()
  before = _resident('VmRSS')
  Path('/proc/self/clear_refs').write_text('5')  # resets VmHWM
  start = time.perf_counter()
  result = OPERATIONS[name](folder / 'large')
  jax.block_until_ready([leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, jax.Array)])
  seconds, peak = time.perf_counter() - start, _resident('VmHWM')
  held = sum(
    sum(shard.data.nbytes for shard in leaf.addressable_shards)
    if isinstance(leaf, jax.Array)
    else leaf.nbytes
    for leaf in jax.tree.leaves(result)
  )
  print(RESULT + json.dumps([seconds, peak - before - held]))


def _resident(field: str) -> int:
  for line in Path('/proc/self/status').read_text().splitlines():
    if line.startswith(field):
      return 1024 * int(line.split()[1])
  raise RuntimeError(field)


# -- the figures


class Run(NamedTuple):
  """The measurements of one process."""

  seconds: float
  bytes: int


def figures() -> list[Figure]:
  with tempfile.TemporaryDirectory(prefix='flax_spmd_bench_') as temporary:
    folder = Path(temporary)
    write(folder / 'tiny', 1, 64, 128, 64)
    write(folder / 'large', LAYERS, EMBED, MLP, VOCAB)
    size = (folder / 'large' / FILE).stat().st_size
    order = random.Random(0)
    rounds = [
      {name: _in_process(name, folder) for name in order.sample(list(OPERATIONS), len(OPERATIONS))}
      for _ in range(ROUNDS)
    ]
  return [exact('size of the file', size / 1e9, 'GB'), *_times(rounds), *_memory(rounds)]


def _in_process(name: str, folder: Path) -> Run:
  command = [sys.executable, __file__, '--operation', name, str(folder)]
  done = subprocess.run(command, capture_output=True, text=True)
  results = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
  if not results:
    raise RuntimeError(f'{name} failed:\n{done.stderr}')
  return Run(*json.loads(results[0].removeprefix(RESULT)))


def _times(rounds: list[dict[str, Run]]) -> list[Figure]:
  seconds = [{name: run.seconds for name, run in one.items()} for one in rounds]
  limits = {'rows': at_most(1.3), 'columns': at_most(1.3), 'both': at_most(1.3)}
  base = 'safetensors'
  return [
    summary('load by safetensors', [one[base] for one in seconds], 's'),
    *(
      ratio(f'{name}, over safetensors', seconds, name, base, limits.get(name))
      for name in OPERATIONS
      if name != base
    ),
    ratio(
      'changed, over safetensors and numpy',
      seconds,
      'changed',
      'safetensors, changed by numpy',
      at_most(1.3),
    ),
  ]


def _memory(rounds: list[dict[str, Run]]) -> list[Figure]:
  largest = 4 * max(VOCAB, MLP) * EMBED
  sizes = dict.fromkeys(OPERATIONS, largest) | {'changed': 4 * LAYERS * MLP * EMBED}
  limits = dict.fromkeys(('rows', 'columns', 'both', 'changed'), at_most(2))
  return [
    summary(
      f'{name}, memory',
      [max(one[name].bytes, 0) / sizes[name] for one in rounds],
      'x largest',
      limits.get(name),
    )
    for name in OPERATIONS
  ]


if __name__ == '__main__':
  if sys.argv[1:2] == ['--operation']:
    operate(sys.argv[2], Path(sys.argv[3]))
  else:
    report('hugging_face', figures)
