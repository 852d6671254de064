"""What `compare` says of 13 layouts of a transformer, against what can be worked out by hand.

The model is `layout_model.py`'s: 4 scanned layers, 512 wide, 8 heads of 64, MLP 2048, vocabulary 4096,
16 sequences of 256, bf16 compute, f32 parameters, adamw. Each layout is compiled by the compilers of
8 H100s, of 8 v5e chips and of the CPU; what is not installed is left out, and said. No device is needed.

    python benchmarks/layouts.py                            # the table, the checks, and what comparing costs
    python benchmarks/layouts.py --targets h100:8 v5e:2x4   # the table for some targets only
    python benchmarks/layouts.py --large                    # four layouts of a LLaMA of 70B, for 64 and 256 chips

Matrix products, what FSDP gathers and scatters, and what tensor parallelism adds up, have to equal what
the formulas below say: exactly, as these are counts. The exit code is 1 if one of them does not, or if
comparing takes longer or more memory than it may.
"""

import os

os.environ['JAX_PLATFORMS'] = 'cpu'

import argparse
import functools
import json
import math
import re
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import layout_model
from harness import versions
from layout_model import LLAMA_70B, Config

import flax_spmd as spmd
from flax_spmd.errors import TargetDeviceError
from flax_spmd.explore import Comparison, Outcome, compare, parse
from flax_spmd.explore.compiling import check_compiler

MIB, GIB = 2**20, 2**30
TARGETS = 'h100:8', 'v5e:2x4', 'cpu:8'
MODEL = Config()
DEVICES = 8


class Case(NamedTuple):
  """A layout; `copies` says of products, by expressions, how many devices compute the same.

  Mostly none do. Where the rules say nothing, or two names want the same axis, that is the compiler's
  choice, and was read off its programs: with it the counts come out right to the last FLOP.
  """

  mesh: dict[str, int]
  rules: dict[str, Any]
  copies: dict[str, int] = {}  # noqa: RUF012

  @property
  def layout(self) -> spmd.Layout:
    return spmd.Layout(spmd.abstract_mesh(self.mesh), layout_model.table(self.rules))

  @property
  def flops(self) -> float:
    """Of the matrix products of a step, on one device."""
    return sum(work * self._copies(name) for name, work in MODEL.products.items()) / DEVICES

  def _copies(self, product: str) -> int:
    return next((copies for text, copies in self.copies.items() if re.match(text, product)), 1)


TENSOR = dict.fromkeys(('heads', 'mlp', 'vocab'), 'tensor')
BOTH = {'batch': 'fsdp', 'embed': 'fsdp', **TENSOR}
CASES = {
  'DP': Case({'data': 8}, {'batch': 'data'}),
  'FSDP': Case({'fsdp': 8}, {'batch': 'fsdp', 'embed': 'fsdp'}),
  'HSDP': Case({'data': 2, 'fsdp': 4}, {'batch': ('data', 'fsdp'), 'embed': 'fsdp'}),
  'TP8': Case({'tensor': 8}, TENSOR),
  'FSDP4 x TP2': Case({'fsdp': 4, 'tensor': 2}, BOTH),
  'FSDP2 x TP4': Case({'fsdp': 2, 'tensor': 4}, BOTH),
  'DP2 x TP4': Case({'data': 2, 'tensor': 4}, {'batch': 'data', **TENSOR}),
  'FSDP4 x TP2 + sequence': Case({'fsdp': 4, 'tensor': 2}, {**BOTH, 'length': 'tensor'}),
  '2D weights': Case(
    {'x': 4, 'y': 2},
    {
      'batch': 'x',
      'embed': 'y',
      'heads': 'y',
      'mlp': 'x',
      'act_mlp': 'y',
      'act_heads': 'y',
      'vocab': 'y',
    },
    {'(out|down) forward|up inputs': 2},  # embed and what it meets both want y; the compiler gathers
  ),
  'FSDP + context': Case(
    {'fsdp': 4, 'context': 2},
    {'batch': 'fsdp', 'embed': ('fsdp', 'context'), 'length': 'context', 'query': 'context'},
    {'[kv] forward': 2},  # keys and values are whole on each device of a context
  ),
  "activations' embed sharded (bad)": Case(
    {'model': 8}, {'embed': 'model', 'act_embed': 'model'}, {'scores': 8}
  ),
  'batch replicated (bad)': Case(
    {'data': 8},
    {'embed': 'data'},
    {
      'scores': 8,
      'logits|.* weights|[qkv] inputs': 1,
      '.*': 8,
    },  # but where embed is a result's dimension
  ),
  'vocab only (bad)': Case(
    {'data': 4, 'model': 2}, {'batch': 'data', 'vocab': 'model'}, {'logits': 1, '.*': 2}
  ),
}
SHOWN = ('all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all')


def theory() -> dict[str, dict[str, float]]:
  """What FSDP and tensor parallelism send, in bytes for each device, by kind.

  A ring of n sends (n - 1) / n of an array's bytes to gather or to scatter it, and twice that to add it up.
  """
  c, share = MODEL, (DEVICES - 1) / DEVICES
  layers = c.layers * c.embed * (4 * c.heads * c.head + 2 * c.mlp)
  logits, between = c.embed * c.vocab, c.tokens * c.embed
  return {
    'FSDP': {
      # Weights in bf16: the layers' forward and backward, the logits' once, kept until it is used again.
      # The embedding stays where it is: tokens (int32) go to it.
      'all-gather': 2 * share * (2 * layers + logits) + 4 * share * c.tokens,
      'reduce-scatter': 2 * share * (layers + logits),  # gradients in bf16
      'all-to-all': 2 * 2 * share * between / DEVICES,  # what is looked up, and its gradient
    },
    'TP8': {
      # Activations in bf16: after attention and MLP, forward and backward; embeddings; the logits' input.
      # And of each token in f32, over the vocabulary: the largest logit, the sum, the logit that is wanted.
      'all-reduce': 2 * share * (2 * between * (4 * c.layers + 2) + 4 * c.tokens * 3),
    },
  }


# -- memory, by what the backward pass keeps


def expected_memory(layout: spmd.Layout, outcome: Outcome) -> float:
  """The arguments, what JAX says that the backward pass needs, and the gradients of the layers.

  Each array is split as its names say. The gradients of all layers are there at the end of the backward
  loop; the others come and go. It knows nothing of what a compiler computes again, or keeps for longer.
  """
  memory = outcome.memory
  kept = sum(_on_device(layout, array) for array in _residuals())
  rows = outcome.program.rows
  gradients = sum(row.bytes_per_device for row in rows if row.path.startswith('params/blocks'))
  return memory.parameters + memory.optimizer + memory.rest + memory.batch + kept + gradients


@functools.cache
def _residuals() -> list[jax.ShapeDtypeStruct]:
  state = jax.eval_shape(functools.partial(layout_model.create, MODEL))

  def backward(params, tokens):
    return jax.vjp(functools.partial(layout_model.loss_of, state.apply_fn, tokens), params)[1]

  return jax.tree.leaves(jax.eval_shape(backward, state.params, layout_model.batch(MODEL)))


def _on_device(layout: spmd.Layout, array: jax.ShapeDtypeStruct) -> int:
  spec = spmd.logical_to_mesh_axes(_names(array), layout.rules)
  shape = jax.sharding.NamedSharding(layout.mesh, spec).shard_shape(array.shape)
  return math.prod(shape) * array.dtype.itemsize


def _names(array: jax.ShapeDtypeStruct) -> tuple[str | None, ...]:
  """The names of what the backward pass keeps, by its shape: no two dimensions of one array are alike."""
  c, shape = MODEL, array.shape
  stacked = ('layers',) if shape[0] == c.layers else ()
  rest = shape[len(stacked) :]
  if rest[0] != c.batch:  # a weight, or a norm's
    sizes = {c.embed: 'embed', c.mlp: 'mlp', c.vocab: 'vocab', c.heads: 'heads'}
    return (*stacked, *(sizes.get(size) if len(rest) > 1 else None for size in rest))
  sizes = {c.embed: 'act_embed', c.mlp: 'act_mlp', c.vocab: 'act_vocab', c.heads: 'act_heads'}
  between = array.dtype == 'float32' and rest[-1] == c.embed  # what the norms get
  queries = 'length' if between else 'query'
  names = [sizes.get(size) or (queries if size == c.length else None) for size in rest[1:]]
  if names.count('query') == 2:
    names[-1] = 'key'
  return (*stacked, 'batch', *names)


# -- tables and checks


class Check(NamedTuple):
  """What has to be so."""

  text: str
  met: bool


def compared(target: str) -> Comparison:
  """The cases on a target."""
  create = functools.partial(layout_model.create, MODEL)
  layouts = {name: case.layout for name, case in CASES.items()}
  return compare(layout_model.step, create, layout_model.batch(MODEL), layouts, target, jobs=1)


def table(found: Comparison) -> str:
  """Figures of each layout for one device: bytes in MiB, and what compiling took."""
  head = ['layout', 'wire', *SHOWN, 'GFLOPs', 'off', 'memory', 'by hand', 'off']
  rows = [
    [found.target.text, 'MiB', *['MiB'] * len(SHOWN), '', '%', 'MiB', 'MiB', '%', 's', 'CPU-s', 'GiB']
  ]
  for outcome in found:
    if outcome.counts is None:
      rows.append([outcome.name, outcome.error.splitlines()[0]])
      continue
    kinds, case = outcome.counts.by_kind(), CASES[outcome.name]
    hand = expected_memory(case.layout, outcome)
    rows.append(
      [
        outcome.name,
        *(
          f'{wire / MIB:.2f}' for wire in (sum(kinds.values()), *(kinds.get(kind, 0) for kind in SHOWN))
        ),
        f'{outcome.counts.flops / 1e9:.2f}',
        f'{100 * (outcome.counts.flops / case.flops - 1):.3g}',
        f'{outcome.memory.peak / MIB:.1f}',
        f'{hand / MIB:.1f}',
        f'{100 * (outcome.memory.peak / hand - 1):.1f}',
        *_cost(outcome),
      ]
    )
  return _lines([[*head, 'wall', 'CPU', 'RSS'], *rows])


def _cost(outcome: Outcome) -> list[str]:
  one = outcome.compiled
  return [f'{one.seconds:.1f}', f'{one.cpu_seconds:.1f}', f'{one.rss / GIB:.2f}']


def _lines(rows: Sequence[Sequence[str]]) -> str:
  """Cells in columns, or as a table of Markdown."""
  columns = max(map(len, rows))
  rows = [[*row, *[''] * (columns - len(row))] for row in rows]
  rows.insert(1, ['---'] * columns)
  return '\n'.join(f'| {" | ".join(row)} |' for row in rows)


def checks(found: Comparison) -> Iterator[Check]:
  """What has to be so of the cases on a target."""
  chip = found.target.chip.name
  for outcome in found:
    name, counts = f'{outcome.name}, {chip}', outcome.counts
    if counts is None:
      yield Check(f'{name}: compiled', False)
      continue
    yield Check(f'{name}: FLOPs by hand', math.isclose(counts.flops, CASES[outcome.name].flops))
    if chip != 'h100':
      continue
    for kind, wire in theory().get(outcome.name, {}).items():
      yield Check(f'{name}: {kind} by hand', counts.by_kind().get(kind) == wire)
    off = outcome.memory.peak / expected_memory(CASES[outcome.name].layout, outcome) - 1
    yield Check(f'{name}: memory within 8 % of what is known by hand', abs(off) <= 0.08)


# -- what comparing costs


class Spent(NamedTuple):
  """What a comparison took: seconds, CPU-seconds of it and its compilers, memory of the largest of them."""

  what: str
  wall: float
  cpu: float
  rss: int
  found: Comparison

  def record(self) -> dict[str, Any]:
    layouts = {
      outcome.name: {
        'fits': outcome.fits,
        'error': outcome.error,
        'memory': outcome.memory and outcome.memory.peak,
        'flops': outcome.counts and outcome.counts.flops,
        'wire': outcome.counts and sum(outcome.counts.by_axis().values()),
        'seconds': outcome.cost and [outcome.cost.low, outcome.cost.high],
      }
      for outcome in self.found
    }
    return {'what': self.what, 'wall': self.wall, 'cpu': self.cpu, 'rss': self.rss, 'layouts': layouts}

  def __str__(self) -> str:
    return f'{self.what}: {self.wall:.1f} s, {self.cpu:.1f} CPU-s, at most {self.rss / GIB:.2f} GiB'


def spent(what: str, config: Config, cases: dict[str, Case], target: str) -> Spent:
  """A comparison, timed; JAX has been started, and nothing of this model has been traced."""
  layouts = {name: case.layout for name, case in cases.items()}
  create = functools.partial(layout_model.create, config)
  jax.clear_caches()
  begin, cpu = time.perf_counter(), _cpu()
  found = compare(layout_model.step, create, layout_model.batch(config), layouts, target, jobs=1)
  rss = max([outcome.compiled.rss for outcome in found if outcome.compiled], default=0)
  return Spent(f'{what}, {target}', time.perf_counter() - begin, _cpu() - cpu, rss, found)


def _cpu() -> float:
  """CPU-seconds of this process and of those that it has waited for."""
  return sum(
    getattr(resource.getrusage(who), field)
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    for field in ('ru_utime', 'ru_stime')
  )


EIGHT_LAYERS = MODEL._replace(layers=8, batch=512)
LIMITS = {'h100:256': 10, 'v5e:16x16': 60}  # CPU-seconds


def speed(chips: set[str]) -> Iterator[tuple[str, Check]]:
  """An 8-layer model for 256 chips, for the first time and again, and the page about 1,000 parameters."""
  for target, limit in LIMITS.items():
    if target.split(':')[0] not in chips:
      continue
    case = {'FSDP x TP': Case({'fsdp': 32, 'tensor': 8}, BOTH)}
    first = spent('8 layers', EIGHT_LAYERS, case, target)
    yield str(first), Check(f'{first.what}: at most {limit} CPU-s', first.cpu <= limit)
    yield '', Check(f'{first.what}: less than 2.5 GB', first.rss < 2.5e9)
    times = [spent('8 layers, again', EIGHT_LAYERS, case, target) for _ in range(3)]
    again = min(times, key=lambda one: one.wall)
    yield str(again), Check(f'{again.what}: less than a second', again.wall < 1)
    if target == 'h100:256':
      yield from _page(first.found)


def _page(found: Comparison) -> Iterator[tuple[str, Check]]:
  [outcome] = found
  rows = outcome.program.rows
  many = [row._replace(path=f'{row.path}/{n}') for n in range(-(-1000 // len(rows))) for row in rows][
    :1000
  ]
  comparison = Comparison(found.target, [outcome._replace(program=outcome.program._replace(rows=many))])
  with tempfile.TemporaryDirectory() as folder:
    file, begin = Path(folder) / 'page.html', time.perf_counter()
    comparison.to_html(file)
    took, size = time.perf_counter() - begin, file.stat().st_size
  yield (
    f'page of 1,000 parameters: {took:.2f} s, {size / 1000:.0f} kB',
    Check('page of 1,000 parameters: less than a second, less than 300 kB', took < 1 and size < 300_000),
  )


def large(target: str) -> Spent:
  """Four layouts of a LLaMA of 70B parameters; two sequences of 4096 tokens to a GPU, one to a TPU."""
  count = parse(target).devices
  config = LLAMA_70B._replace(batch=max(128, count))
  tensor = {'fsdp': count // 8, 'tensor': 8}
  cases = {
    'FSDP': Case({'fsdp': count}, CASES['FSDP'].rules),
    'HSDP': Case({'data': 2, 'fsdp': count // 2}, CASES['HSDP'].rules),
    'FSDP x TP8': Case(tensor, BOTH),
    'FSDP x TP8 + sequence': Case(tensor, {**BOTH, 'length': 'tensor'}),
  }
  return spent('LLaMA 70B, 4 layouts', config, cases, target)


def main() -> int:
  parser = argparse.ArgumentParser(prog='layouts.py')
  parser.add_argument('--targets', nargs='*', default=TARGETS, help='for the table; default: all three')
  parser.add_argument('--large', action='store_true', help='the LLaMA of 70B, on h100:64 and v5e:16x16')
  parser.add_argument('--json', action='store_true', help='print one JSON object')
  options = parser.parse_args()
  say = functools.partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)
  with tempfile.TemporaryDirectory() as folder:
    os.environ.setdefault('FLAX_SPMD_CACHE', folder)
    record, wrong = _large(say) if options.large else _small(options.targets, folder, say)
  if options.json:
    print(json.dumps({'benchmark': 'layouts', 'versions': versions(), **record}, indent=2))
  for check in wrong:
    say(f'WRONG {check.text}')
  return 1 if wrong else 0


def _small(targets: Sequence[str], fresh: str, say) -> tuple[dict[str, Any], list[Check]]:
  found, made = [], []
  for target in _here(targets, say):
    found.append(compared(target))
    say(table(found[-1]), end='\n\n')
    made += checks(found[-1])
  os.environ['FLAX_SPMD_CACHE'] = fresh  # whatever was compiled before
  for text, check in speed({one.target.chip.name for one in found}):
    say(text, end='\n' if text else '')
    made.append(check)
  wrong = [check for check in made if not check.met]
  say(f'{len(made) - len(wrong)} of {len(made)} checks are met')
  record = {'comparisons': [one.record() for one in found], 'checks': [one._asdict() for one in made]}
  return record, wrong


def _large(say) -> tuple[dict[str, Any], list[Check]]:
  took = []
  for target in _here(('h100:64', 'v5e:16x16'), say):
    took.append(large(target))
    say(f'{took[-1].found}\n\n{took[-1]}\n')
  wrong = [
    Check(f'{one.what}, {outcome.name}: compiled', False)
    for one in took
    for outcome in one.found
    if outcome.memory is None
  ]
  return {'large': [one.record() for one in took]}, wrong


def _here(targets: Sequence[str], say) -> Iterator[str]:
  """The targets that can be compiled for."""
  for target in targets:
    try:
      check_compiler(parse(target))
      yield target
    except TargetDeviceError as error:
      say(f'{target} is left out: {error}')


if __name__ == '__main__':
  sys.exit(main())
