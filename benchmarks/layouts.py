"""`compare` against formulas: counts and memory of 13 layouts of a transformer, and the cost of a comparison.

The model is that of `layout_model.py`: 4 scanned layers, width 512, 8 heads of 64, MLP 2048, vocabulary
4096, 16 sequences of 256, bf16 compute, f32 parameters, adamw. Each layout is compiled for 8 H100s, for 8
v5e chips and for the CPU; targets without an installed compiler are reported and left out. No device is
needed.

    python benchmarks/layouts.py                            # the tables, and the cost of a comparison
    python benchmarks/layouts.py --targets h100:8 v5e:2x4   # the table for some targets only
    python benchmarks/layouts.py --large                    # four layouts of a 70B LLaMA, for 64 and 256 chips

FLOPs and the collectives of FSDP and tensor parallelism have to equal the formulas below exactly, since they
are counts. The exit code is 1 if one differs, or if a comparison exceeds its limits of time or memory.
"""

import os

os.environ['JAX_PLATFORMS'] = 'cpu'

import functools
import math
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import layout_model
import optax
from harness import Figure, Target, at_most, cpu_seconds, equal, exact
from layout_model import LLAMA_70B, Config
from reporting import Report, Table, parser

import flax_spmd as spmd
from flax_spmd._src.compare.compilation import check_compiler
from flax_spmd.errors import TargetDeviceError
from flax_spmd.explore import Comparison, Outcome, TrainStep, compare, parse_target

MIB, GIB = 2**20, 2**30
TARGETS = 'h100:8', 'v5e:2x4', 'cpu:8'
LARGE_TARGETS = 'h100:64', 'v5e:16x16'
MODEL = Config()
DEVICES = 8


class Case(NamedTuple):
  """A layout, and the products that several devices compute redundantly.

  Attributes:
    mesh: size per mesh axis.
    rules: mesh axis per logical name.
    copies: number of devices that compute the same product, by regular expressions for products. It is 1
      for most. Where no rule applies, or two names compete for an axis, the compiler chooses; these numbers
      are from its programs, and with them the FLOPs match exactly.
  """

  mesh: dict[str, int]
  rules: dict[str, Any]
  copies: dict[str, int] = {}  # noqa: RUF012

  @property
  def layout(self) -> spmd.Layout:
    return spmd.Layout(spmd.abstract_mesh(self.mesh), layout_model.table(self.rules))

  @property
  def flops(self) -> float:
    """FLOPs of the matrix products of a step, on one device."""
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
    {
      '(out|down) forward|up inputs': 2
    },  # embed and the other dimension compete for y; the compiler gathers
  ),
  'FSDP + context': Case(
    {'fsdp': 4, 'context': 2},
    {'batch': 'fsdp', 'embed': ('fsdp', 'context'), 'length': 'context', 'query': 'context'},
    {'[kv] forward': 2},  # keys and values are replicated over the context
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
    },  # except where embed is a dimension of the result
  ),
  'vocab only (bad)': Case(
    {'data': 4, 'model': 2}, {'batch': 'data', 'vocab': 'model'}, {'logits': 1, '.*': 2}
  ),
}
SHOWN = ('all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all')


def theory() -> dict[str, dict[str, float]]:
  """Bytes that each device sends with FSDP and tensor parallelism, by kind of collective.

  A ring of n devices sends (n - 1) / n of an array's bytes to gather or scatter it, and twice that to reduce
  it.
  """
  c, share = MODEL, (DEVICES - 1) / DEVICES
  layers = c.layers * c.embed * (4 * c.heads * c.head + 2 * c.mlp)
  logits, between = c.embed * c.vocab, c.tokens * c.embed
  return {
    'FSDP': {
      # Weights in bf16: those of the layers forward and backward, that of the logits once.
      # The embedding is not gathered: the tokens (int32) are.
      'all-gather': 2 * share * (2 * layers + logits) + 4 * share * c.tokens,
      'reduce-scatter': 2 * share * (layers + logits),  # gradients in bf16
      'all-to-all': 2 * 2 * share * between / DEVICES,  # the embeddings, and their gradient
    },
    'TP8': {
      # Activations in bf16: after attention and MLP, forward and backward; embeddings; the logits' input.
      # Per token in f32, over the vocabulary: the largest logit, the sum, the label's logit.
      'all-reduce': 2 * share * (2 * between * (4 * c.layers + 2) + 4 * c.tokens * 3),
    },
  }


# -- memory, from the residuals of the backward pass


def expected_memory(layout: spmd.Layout, outcome: Outcome) -> float:
  """Bytes of the arguments, the residuals of JAX's backward pass, and the gradients of the layers.

  Each array is sharded by its names. The gradients of all layers are alive at the end of the backward loop;
  the others are short-lived. Recomputation and longer lifetimes by the compiler are not included.
  """
  memory = outcome.memory
  residuals = sum(_on_device(layout, array) for array in _residuals())
  rows = outcome.program.rows
  gradients = sum(row.bytes_per_device for row in rows if row.path.startswith('params/blocks'))
  return memory.parameters + memory.optimizer + memory.rest + memory.batch + residuals + gradients


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
  """The axis names of a residual, from its shape: the sizes within an array differ."""
  c, shape = MODEL, array.shape
  stacked = ('layers',) if shape[0] == c.layers else ()
  rest = shape[len(stacked) :]
  if rest[0] != c.batch:  # a weight, or a norm's
    sizes = {c.embed: 'embed', c.mlp: 'mlp', c.vocab: 'vocab', c.heads: 'heads'}
    return (*stacked, *(sizes.get(size) if len(rest) > 1 else None for size in rest))
  sizes = {c.embed: 'act_embed', c.mlp: 'act_mlp', c.vocab: 'act_vocab', c.heads: 'act_heads'}
  between = array.dtype == 'float32' and rest[-1] == c.embed  # inputs of the norms
  queries = 'length' if between else 'query'
  names = [sizes.get(size) or (queries if size == c.length else None) for size in rest[1:]]
  if names.count('query') == 2:
    names[-1] = 'key'
  return (*stacked, 'batch', *names)


# -- counts beside the formulas


def compared(target: str) -> Comparison:
  """The cases on a target."""
  layouts = {name: case.layout for name, case in CASES.items()}
  return compare(train_step(MODEL), layouts, target, jobs=1)


def train_step(config: Config) -> TrainStep:
  """The model's step at a size."""
  create = functools.partial(layout_model.create, config)
  return TrainStep(layout_model.step, create, layout_model.batch(config))


def adafactor_step(config: Config) -> TrainStep:
  """The same with integer labels, as most steps have them, and Adafactor."""
  create = functools.partial(layout_model.create, config, optimizer=optax.adafactor)
  step = functools.partial(
    layout_model.step, cross_entropy=optax.softmax_cross_entropy_with_integer_labels
  )
  return TrainStep(step, create, layout_model.batch(config))


def table(comparison: Comparison) -> Table:
  """A row per layout, for one device and step."""
  head = ['layout', 'on the wire, MiB', *(f'{kind}s' for kind in SHOWN), 'GFLOPs', 'by hand']
  head += ['memory, MiB', 'by hand', 'off, %', 'wall, s', 'CPU-s', 'GiB']
  title = f'{comparison.target.text}: memory, bytes on the wire and FLOPs of a device and step; time and memory to compile'
  return Table(title, head, [_row(outcome, len(head)) for outcome in comparison])


def _row(outcome: Outcome, columns: int) -> list[str]:
  if outcome.counts is None or outcome.memory is None:
    return [outcome.name, str(outcome.error).splitlines()[0], *[''] * (columns - 2)]
  kinds, case, one = outcome.counts.by_kind(), CASES[outcome.name], outcome.compiled
  sent = (sum(kinds.values()), *(kinds.get(kind, 0) for kind in SHOWN))
  peak, hand = outcome.memory.peak, expected_memory(case.layout, outcome)
  return [
    outcome.name,
    *(f'{wire / MIB:.2f}' for wire in sent),
    f'{outcome.counts.flops / 1e9:.2f}',
    f'{case.flops / 1e9:.2f}',
    f'{peak / MIB:.1f}',
    f'{hand / MIB:.1f}',
    f'{100 * (peak / hand - 1):+.1f}',
    f'{one.seconds:.1f}',
    f'{one.cpu_seconds:.1f}',
    f'{one.rss / GIB:.2f}',
  ]


def count_figures(comparison: Comparison) -> list[Figure]:
  """The number of layouts that differ from the formulas. Those of bytes and memory are for H100s only."""
  target = comparison.target.text
  usable = [one for one in comparison if one.counts is not None and one.memory is not None]
  flops = [one for one in usable if not math.isclose(one.counts.flops, CASES[one.name].flops)]
  figures = [
    exact(
      f'{target}: layouts that were not compiled', len(comparison.outcomes) - len(usable), '', at_most(0)
    ),
    exact(f'{target}: layouts with other FLOPs than by hand', len(flops), '', at_most(0)),
  ]
  if comparison.target.chip.name != 'h100':
    return figures
  sums = [
    (one.counts.by_kind().get(kind), wire)
    for one in usable
    for kind, wire in theory().get(one.name, {}).items()
  ]
  off = [one.memory.peak / expected_memory(CASES[one.name].layout, one) - 1 for one in usable]
  return [
    *figures,
    exact(f'{target}: sums of bytes known by hand', len(sums), '', equal(4, 0)),
    exact(f'{target}: of them, others than by hand', sum(a != b for a, b in sums), '', at_most(0)),
    exact(
      f'{target}: memory, furthest from by hand',
      100 * max(map(abs, off), default=math.inf),
      '%',
      at_most(8),
    ),
  ]


# -- the cost of a comparison


class TimedComparison(NamedTuple):
  """The cost of a comparison.

  Attributes:
    title: name of the comparison.
    wall: wall time in seconds.
    cpu: CPU time in seconds, of all processes.
    rss: peak memory of the largest compiler, in bytes.
    comparison: the comparison.
  """

  title: str
  wall: float
  cpu: float
  rss: int
  comparison: Comparison

  def __str__(self) -> str:
    return f'{self.title}: {self.wall:.1f} s, {self.cpu:.1f} CPU-s, at most {self.rss / GIB:.2f} GiB'


def timed(title: str, step: TrainStep, cases: dict[str, Case], target: str) -> TimedComparison:
  """Times a comparison, with JAX initialised and nothing of this model traced yet."""
  layouts = {name: case.layout for name, case in cases.items()}
  jax.clear_caches()
  begin, cpu = time.perf_counter(), cpu_seconds()
  comparison = compare(step, layouts, target, jobs=1)
  rss = max([outcome.compiled.rss for outcome in comparison if outcome.compiled], default=0)
  return TimedComparison(
    f'{title}, {target}', time.perf_counter() - begin, cpu_seconds() - cpu, rss, comparison
  )


EIGHT_LAYERS = MODEL._replace(layers=8, batch=512)
LIMITS = {'h100:256': 10, 'v5e:16x16': 60}  # CPU-seconds


def speed(chips: set[str]) -> list[Figure]:
  """An 8-layer model for 256 chips, without and with the cache, and the report of 1,000 parameters."""
  figures: list[Figure] = []
  for target, limit in LIMITS.items():
    if target.split(':')[0] not in chips:
      continue
    case = {'FSDP x TP': Case({'fsdp': 32, 'tensor': 8}, BOTH)}
    first = timed('8 layers', train_step(EIGHT_LAYERS), case, target)
    times = [timed('8 layers', train_step(EIGHT_LAYERS), case, target).wall for _ in range(3)]
    figures += [
      exact(f'{first.title}: wall', first.wall, 's'),
      exact(f'{first.title}: CPU, of all processes', first.cpu, 's', at_most(limit)),
      exact(f'{first.title}: memory of the compiler', first.rss / 1e9, 'GB', at_most(2.5)),
      exact(f'{first.title}: again, from the cache, wall', min(times), 's', at_most(1)),
    ]
    if target == 'h100:256' and first.comparison.outcomes[0].program is not None:
      figures += _page_figures(first.comparison)
  return figures


def _page_figures(comparison: Comparison) -> list[Figure]:
  [outcome] = comparison
  rows = outcome.program.rows
  many = [row._replace(path=f'{row.path}/{n}') for n in range(-(-1000 // len(rows))) for row in rows]
  longer = outcome._replace(program=outcome.program._replace(rows=many[:1000]))
  with tempfile.TemporaryDirectory() as folder:
    file, begin = Path(folder) / 'page.html', time.perf_counter()
    Comparison(comparison.target, [longer]).to_html(file)
    took, size = time.perf_counter() - begin, file.stat().st_size
  return [
    exact('page of 1,000 parameters', took, 's', at_most(1)),
    exact('page of 1,000 parameters: size', size / 1000, 'kB', at_most(300)),
  ]


ADAFACTOR = 'LLaMA 70B, integer labels, Adafactor, 4 layouts'
A_LAYOUT = 12  # CPU-seconds of its comparison


def large(target: str) -> Iterator[TimedComparison]:
  """Four layouts of a 70B LLaMA; two sequences of 4096 tokens per GPU, one per TPU. On GPUs also with Adafactor."""
  count = parse_target(target).devices
  config = LLAMA_70B._replace(batch=max(128, count))
  tensor = {'fsdp': count // 8, 'tensor': 8}
  cases = {
    'FSDP': Case({'fsdp': count}, CASES['FSDP'].rules),
    'HSDP': Case({'data': 2, 'fsdp': count // 2}, CASES['HSDP'].rules),
    'FSDP x TP8': Case(tensor, BOTH),
    'FSDP x TP8 + sequence': Case(tensor, {**BOTH, 'length': 'tensor'}),
  }
  yield timed('LLaMA 70B, 4 layouts', train_step(config), cases, target)
  if parse_target(target).chip.platform == 'cuda':
    yield timed(ADAFACTOR, adafactor_step(config), cases, target)


def large_table(took: TimedComparison) -> Table:
  rows = [
    [
      outcome.name,
      f'{outcome.memory.peak / GIB:.1f}' if outcome.memory else str(outcome.error).splitlines()[0],
      'yes' if outcome.fits else 'no',
      f'{sum(outcome.counts.by_axis().values()) / GIB:.0f}' if outcome.counts else '',
      f'{outcome.cost.low:.1f} to {outcome.cost.high:.1f}' if outcome.cost else '',
    ]
    for outcome in took.comparison
  ]
  return Table(str(took), ['layout', 'memory, GiB', 'fits', 'on the wire, GiB', 'time, s'], rows)


def main() -> int:
  options = parser('layouts')
  options.add_argument(
    '--targets', nargs='*', help='targets of the table (default: all three; with --large, its two)'
  )
  options.add_argument(
    '--large', action='store_true', help='compare layouts of a 70B LLaMA for h100:64 and v5e:16x16'
  )
  arguments = options.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    os.environ.setdefault('FLAX_SPMD_CACHE', folder)
    if arguments.large:
      report = _large(arguments.targets or LARGE_TARGETS)
    else:
      report = _small(arguments.targets or TARGETS, folder)
  report.publish(arguments.json)
  return 1 if report.missed else 0


def _small(targets: Sequence[str], fresh: str) -> Report:
  comparison = [compared(target) for target in _available(targets)]
  os.environ['FLAX_SPMD_CACHE'] = fresh  # an empty cache
  figures = [figure for one in comparison for figure in count_figures(one)]
  figures += speed({one.target.chip.name for one in comparison})
  details = {
    'wire': {
      one.target.text: {each.name: each.counts.by_kind() for each in one if each.counts}
      for one in comparison
    }
  }
  return Report('layouts', figures, [table(one) for one in comparison], details)


def _large(targets: Sequence[str]) -> Report:
  took = [one for target in _available(targets) for one in large(target)]
  figures = [
    figure
    for one in took
    for figure in (
      exact(f'{one.title}: wall', one.wall, 's'),
      exact(f'{one.title}: CPU, of all processes', one.cpu, 's', _limit_of(one)),
      exact(
        f'{one.title}: compiled',
        sum(each.memory is not None for each in one.comparison),
        '',
        equal(4, 0),
      ),
    )
  ]
  return Report('layouts_large', figures, [large_table(one) for one in took])


def _limit_of(took: TimedComparison) -> Target | None:
  is_limited = took.title.startswith(ADAFACTOR)
  return at_most(A_LAYOUT * len(took.comparison.outcomes)) if is_limited else None


def _available(targets: Sequence[str]) -> Iterator[str]:
  """The targets whose compilers are installed."""
  for target in targets:
    try:
      check_compiler(parse_target(target))
      yield target
    except TargetDeviceError as error:
      print(f'{target} is left out: {error}', file=sys.stderr)


if __name__ == '__main__':
  sys.exit(main())
