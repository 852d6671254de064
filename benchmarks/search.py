"""Accuracy and cost of the search: estimates against compilers and published step times, and the time of a search.

The model is that of `layout_model.py` with 8 layers, for 64 H100s. Seven questions:

- How far are estimated bytes on the wire and memory from compiled ones, and how good are the layouts that the
  estimates rank first? A new random sample of candidates is estimated and compiled. It is drawn as in a
  search: from the starting points, by random changes. The seed is printed. Compiled programs are cached in
  `FLAX_SPMD_CACHE`, so that the same sample is quick the second time.
- Does the estimate agree with the TPU compiler on whether a candidate fits into the memory of 64 TPUs?
- How long does a search over at least 1,000 candidates take, including compilation?
- The same for the steps in `strangers/`, each written in another way, on four targets: wire, memory, FLOPs, the
  verdict on whether it fits, and the ranking, by model. `--layouts` is the number of layouts for each model and target.
- How much memory do the activations of 16 functions take, in two dtypes (`activations.py`)? And random layers with
  norms, biases, dropout and convolutions (`random_blocks.py`)? `--blocks` is their number.
- The same for as many random transformers, with their losses, optimizers and layouts (`random_transformers.py`).
- How many published step times are in the brackets that are fitted to the others? See `published_steps.py`.

    python benchmarks/search.py                        # all; needs the wheels of `flax-spmd[cuda]`
    python benchmarks/search.py --sample 60 --seed 5   # another sample
    python benchmarks/search.py --only search
    python benchmarks/search.py --only strangers --layouts 8 --seed 5   # minutes for each layout
    python benchmarks/search.py --only strangers --models t5,gqa --targets h100:8
    python benchmarks/search.py --only activations --blocks 40 --seed 5   # minutes
    python benchmarks/search.py --only transformers --blocks 40 --seed 5   # minutes
    python benchmarks/search.py --only fits            # needs the wheels of `flax-spmd[tpu]`
    python benchmarks/search.py --only published       # seconds each; needs cuDNN, for its attention

No device is needed. The exit code is 1 if a target is missed.
"""

import os

os.environ['JAX_PLATFORMS'] = 'cpu'

import argparse
import functools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from typing import Any

import activations
import layout_model
import published_steps
import random_blocks
import random_transformers
import strange_steps
import strangers
from harness import Figure, at_least, at_most, cpu_seconds, exact
from layout_model import Config
from reporting import Report, Table, parser
from samples import Pair, Sample, drawn_for, estimates, regret, sample

import flax_spmd as spmd
from flax_spmd._src.compare.compilation import check_compiler
from flax_spmd._src.search.trials import expected_seconds
from flax_spmd.errors import TargetDeviceError
from flax_spmd.explore import TrainStep, compare, parse_target

TARGET = 'h100:64'
MODEL = Config(
  layers=8, embed=2048, heads=16, head=128, mlp=8192, vocab=32768, batch=128, length=1024, remat=True
)
CREATE = functools.partial(layout_model.create, MODEL)
BATCH = layout_model.batch(MODEL)
CORES = 2
TPU, LARGER, FITS = 'v5e:8x8', MODEL._replace(batch=1024), 12  # candidates


# -- the sample


def sample_of_model(count: int, seed: int) -> Sample:
  """The sample of the model for 64 H100s."""
  drawn = sample(TrainStep(layout_model.step, CREATE, BATCH), TARGET, count, seed, CORES)
  log(f'{count} candidates, seed {seed}; {1 / drawn.seconds:.1f} estimates per second and core')
  for name, error in drawn.failed:
    log(f'not compiled: {name}: {error}')
  return drawn


def sample_figures(pairs: Sequence[Pair], rate: float) -> list[Figure]:
  plain = [pair for pair in pairs if not pair.doubted]
  wire = sorted(abs(pair.wire) for pair in plain)
  memory = sorted(abs(pair.memory) for pair in plain)
  return [
    exact(
      'sample: wire bytes, median deviation, not in doubt', statistics.median(wire), '%', at_most(5)
    ),
    exact('sample: memory, median deviation, not in doubt', statistics.median(memory), '%', at_most(8)),
    exact(
      'sample: memory, 95th percentile, not in doubt',
      memory[int(0.95 * (len(memory) - 1))],
      '%',
      at_most(15),
    ),
    exact('sample: top-1 regret', regret(pairs, 1), '%', at_most(2)),
    exact('sample: top-3 regret', regret(pairs, 3), '%', at_most(1)),
    exact('sample: estimates, per second and core', rate, '1/s', at_least(15)),
  ]


def sample_table(pairs: Sequence[Pair], seed: int) -> Table:
  """The sample, by compiled time, fastest first."""
  doubted = sum(pair.doubted for pair in pairs)
  rows = [
    [
      f'{1e3 * expected_seconds(pair.estimated):.1f}',
      f'{1e3 * expected_seconds(pair.compiled):.1f}',
      f'{pair.wire:+.1f}',
      f'{pair.memory:+.1f}',
      'yes' if pair.doubted else '',
      pair.name,
    ]
    for pair in sorted(pairs, key=lambda pair: expected_seconds(pair.compiled))
  ]
  head = ['estimated, ms', 'compiled, ms', 'wire off, %', 'memory off, %', 'in doubt', 'candidate']
  return Table(f'{len(pairs)} candidates of seed {seed}, {doubted} in doubt', head, rows)


# -- memory: which candidates fit


def fitting(seed: int) -> tuple[list[Figure], Table]:
  """The estimate's and the TPU compiler's verdicts on candidates of which about half fit."""
  train_step = TrainStep(layout_model.step, CREATE, layout_model.batch(LARGER))
  estimated = estimates(*drawn_for(train_step, TPU, FITS, seed), TPU)
  usable = {name: one for name, one in estimated.items() if one.memory}
  layouts = {name: one.layout for name, one in usable.items()}
  compiled = compare(train_step, layouts, TPU, jobs=CORES)
  # without a program there is no verdict
  verdicts = {one.name: one for one in compiled if one.memory is not None}
  wrong = [name for name, one in verdicts.items() if one.fits != usable[name].fits]
  clear = [name for name in wrong if not usable[name].doubts]
  rows = [
    [
      'yes' if usable[name].fits else 'no',
      'yes' if one.fits else 'no',
      f'{usable[name].memory.peak / 2**30:.1f}',
      f'{one.memory.peak / 2**30:.1f}',
      'yes' if usable[name].doubts else '',
      name,
    ]
    for name, one in verdicts.items()
  ]
  head = ['fits, estimated', 'compiled', 'GiB, estimated', 'compiled', 'in doubt', 'candidate']
  figures = [
    exact('fits: candidates with a verdict of the compiler', len(verdicts), '', at_least(FITS // 2)),
    exact('fits: of them, those that fit', sum(one.fits for one in verdicts.values()), ''),
    exact('fits: of all, estimates that say otherwise', len(wrong), ''),
    exact('fits: and are not in doubt', len(clear), '', at_most(0)),
  ]
  return figures, Table(f'{TPU}, {LARGER.batch} sequences: seed {seed}', head, rows)


# -- the search


def searched() -> tuple[list[Figure], dict[str, Any]]:
  """A search over a thousand candidates, without a cache."""
  begin, cpu = time.perf_counter(), cpu_seconds()
  train_step = TrainStep(layout_model.step, CREATE, BATCH)
  result = spmd.search(train_step, TARGET, candidates=1000, jobs=CORES)
  wall, spent = time.perf_counter() - begin, cpu_seconds() - cpu
  log(f'{result}\n\n{wall:.0f} s, {spent:.0f} CPU-s')
  presets = [expected_seconds(one) for one in result.outcomes if one.name in result.presets]
  figures = [
    exact('search: candidates', len(result.estimates), '', at_least(1000)),
    exact('search: by the clock', wall, 's', at_most(300)),
    exact('search: CPU-seconds over 2 cores', spent / CORES, 's', at_most(300)),
    exact(
      'search: winner beside the best preset',
      100 * expected_seconds(result.best) / min(presets),
      '%',
      at_most(100),
    ),
  ]
  return figures, {'wall': wall, 'cpu': spent, 'best': result.best.name, 'layout': result.toml}


def log(text: str) -> None:
  """Prints progress to stderr."""
  print(text, file=sys.stderr, flush=True)


def _is_available(target: str) -> bool:
  """Whether the target's compiler is installed; prints the reason if not."""
  try:
    check_compiler(parse_target(target))
  except TargetDeviceError as error:
    log(f'{target} is left out: {error}')
    return False
  return True


def main() -> int:
  options = parser('search')
  options.add_argument(
    '--sample', type=int, default=48, help='number of candidates in the sample (default 48)'
  )
  options.add_argument(
    '--seed', type=int, default=None, help='random seed of the sample (default: a new one)'
  )
  options.add_argument(
    '--only',
    choices=('activations', 'sample', 'fits', 'strangers', 'search', 'published', 'transformers'),
    help='run only this part',
  )
  options.add_argument(
    '--layouts', type=int, default=2, help='layouts of each of the strangers on each target (default 2)'
  )
  options.add_argument(
    '--blocks', type=int, default=24, help='random layers, and random transformers (default 24)'
  )
  options.add_argument('--models', default=','.join(strangers.MODELS), help='which of the strangers')
  options.add_argument('--targets', default=','.join(strange_steps.TARGETS), help='their targets')
  options.add_argument(
    '--jobs', type=int, default=CORES, help=f'compilers in parallel (default {CORES})'
  )
  arguments = options.parse_args()
  asked = arguments.targets.split(',')
  available = {
    target
    for target in dict.fromkeys((TARGET, TPU, activations.TARGET, *asked))
    if _is_available(target)
  }
  with tempfile.TemporaryDirectory() as folder:
    os.environ.setdefault('FLAX_SPMD_CACHE', f'{folder}/sample')
    report = _all(arguments, available, folder)
  report.publish(arguments.json)
  return 1 if report.missed else 0


def _all(arguments: argparse.Namespace, available: Collection[str], fresh: str) -> Report:
  """The requested parts whose compilers are installed."""
  collected: list[Figure] = []
  tables: list[Table] = []
  details: dict[str, Any] = {}
  if arguments.only in (None, 'published') and TARGET in available:
    steps = published_steps.published()
    collected += published_steps.figures(steps)
    tables.append(published_steps.table(steps))
    details['published'] = published_steps.details(steps)
  seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
  if arguments.only in (None, 'sample') and TARGET in available:
    drawn = sample_of_model(arguments.sample, seed)
    pairs = drawn.pairs
    collected += sample_figures(pairs, 1 / drawn.seconds)
    tables.append(sample_table(pairs, seed))
    details['sample'] = {'seed': seed, 'pairs': [pair.record() for pair in pairs]}
  if arguments.only in (None, 'fits') and TPU in available:
    figures, table = fitting(seed)
    collected += figures
    tables.append(table)
  targets = [target for target in arguments.targets.split(',') if target in available]
  if arguments.only in (None, 'strangers') and targets:
    models = arguments.models.split(',')
    log(f'strangers, seed {seed}')
    samples = strange_steps.measured(models, targets, arguments.layouts, seed, arguments.jobs, log)
    collected += strange_steps.figures(samples)
    tables += [strange_steps.by_model(samples), strange_steps.worst_layouts(samples)]
    tables.append(strange_steps.worst_operations(samples))
    details['strangers'] = strange_steps.details(samples, seed)
  if arguments.only in (None, 'activations') and activations.TARGET in available:
    collected += activations.figures()
    log(f'random blocks, seed {seed}')
    blocks = random_blocks.measured(random_blocks.drawn(arguments.blocks, seed), log)
    collected += random_blocks.figures(blocks)
    tables.append(random_blocks.table(blocks, seed))
  if arguments.only in (None, 'transformers') and random_transformers.TARGET in available:
    log(f'random transformers, seed {seed}')
    cases = random_transformers.measured(random_transformers.drawn(arguments.blocks, seed), log)
    collected += random_transformers.figures(cases)
    tables.append(random_transformers.table(cases, seed))
  if arguments.only in (None, 'search') and TARGET in available:
    os.environ['FLAX_SPMD_CACHE'] = f'{fresh}/search'  # an empty cache
    figures, details['search'] = searched()
    collected += figures
  return Report(f'search_{arguments.only}' if arguments.only else 'search', collected, tables, details)


if __name__ == '__main__':
  sys.exit(main())
