"""Accuracy and cost of the search: estimates against compilers and published step times, and the time of a search.

The model is that of `layout_model.py` with 8 layers, for 64 H100s. Four questions:

- How far are estimated bytes on the wire and memory from compiled ones, and how good are the layouts that the
  estimates rank first? A new random sample of candidates is estimated and compiled. It is drawn as in a
  search: from the starting points, by random changes. The seed is printed. Compiled programs are cached in
  `FLAX_SPMD_CACHE`, so that the same sample is quick the second time.
- Does the estimate agree with the TPU compiler on whether a candidate fits into the memory of 64 TPUs?
- How long does a search over at least 1,000 candidates take, including compilation?
- Do the time brackets of Llama 2 70B contain the two published step times?

    python benchmarks/search.py                        # all; needs the wheels of `flax-spmd[cuda]`
    python benchmarks/search.py --sample 60 --seed 5   # another sample
    python benchmarks/search.py --only search
    python benchmarks/search.py --only fits            # needs the wheels of `flax-spmd[tpu]`
    python benchmarks/search.py --only published       # a second each, and no wheel

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
from typing import Any, NamedTuple

import layout_model
from harness import Figure, at_least, at_most, cpu_seconds, exact
from layout_model import LLAMA_70B, Config
from reporting import Report, Table, parser

import flax_spmd as spmd
from flax_spmd._src.compare.compilation import check_compiler
from flax_spmd._src.search.candidate import Candidate, layout_of, text_of
from flax_spmd._src.search.model_facts import ModelFacts, facts_of
from flax_spmd._src.search.space import Space
from flax_spmd._src.search.starts import starting_points
from flax_spmd._src.search.trials import mean_seconds
from flax_spmd._src.search.user_constraints import constraints_of
from flax_spmd.errors import LayoutError, TargetDeviceError
from flax_spmd.explore import Estimator, Outcome, TrainStep, compare, parse_target

TARGET = 'h100:64'
MODEL = Config(
  layers=8, embed=2048, heads=16, head=128, mlp=8192, vocab=32768, batch=128, length=1024, remat=True
)
CREATE = functools.partial(layout_model.create, MODEL)
BATCH = layout_model.batch(MODEL)
CHANGES = 6  # at most, from a starting point to a candidate of the sample
CORES = 2
TPU, LARGER, FITS = 'v5e:8x8', MODEL._replace(batch=1024), 12  # candidates


# -- the sample


def draw(space: Space, count: int, seed: int) -> list[Candidate]:
  """Candidates as in a search: starting points, each with some random changes."""
  rng, starts = random.Random(seed), [start.candidate for start in starting_points(space, 10**6)]
  drawn: dict[Candidate, None] = {}
  while len(drawn) < count:
    candidate = rng.choice(starts)
    for _ in range(rng.randint(0, CHANGES)):
      candidate = rng.choice(rng.choice([*filter(None, space.coordinates(candidate))]))
    drawn[candidate] = None
  return list(drawn)


class Pair(NamedTuple):
  """The estimated and the compiled outcome of a candidate."""

  name: str
  estimated: Outcome
  compiled: Outcome

  @property
  def wire(self) -> float:
    """Error of the estimated bytes on the wire, in percent."""
    return _off(*(sum(one.counts.by_axis().values()) for one in self[1:]))

  @property
  def memory(self) -> float:
    return _off(*(one.memory.peak for one in self[1:]))

  @property
  def doubted(self) -> bool:
    return bool(self.estimated.doubts)

  def record(self) -> dict[str, Any]:
    figures = {
      source: {
        'wire': sum(one.counts.by_axis().values()),
        'memory': one.memory.peak,
        'flops': one.counts.flops,
        'seconds': mean_seconds(one),
      }
      for source, one in (('estimated', self.estimated), ('compiled', self.compiled))
    }
    return {'name': self.name, 'doubts': self.estimated.doubts, **figures}


def _off(estimated: float, compiled: float) -> float:
  """The error in percent; 0 for values below one MiB."""
  return 100 * (estimated / compiled - 1) if max(estimated, compiled) > 2**20 and compiled else 0.0


def drawn_for(
  target: str, batch: Any, count: int, seed: int
) -> tuple[Estimator, ModelFacts, list[Candidate]]:
  """Candidates for a target."""
  aim = parse_target(target)
  train_step = TrainStep(layout_model.step, CREATE, batch)
  estimator = Estimator(train_step, platform=aim.chip.platform)
  facts = facts_of(train_step, estimator.names, estimator.parameter_names, estimator.together)
  space = Space(facts, constraints_of(aim, facts, None, None, None, (), (), None), aim)
  return estimator, facts, draw(space, count, seed)


def sample(count: int, seed: int) -> tuple[list[Pair], float]:
  """The pairs, and the number of estimates per second and core."""
  aim = parse_target(TARGET)
  estimator, facts, drawn = drawn_for(TARGET, BATCH, count, seed)
  begin = time.process_time()
  estimated = {text_of(one, facts.batch): _estimated(estimator, one, facts, aim) for one in drawn}
  rate = len(drawn) / (time.process_time() - begin)
  log(f'{len(drawn)} candidates, seed {seed}; {rate:.1f} estimates per second and core')
  usable = {name: one for name, one in estimated.items() if one is not None}
  layouts = {name: one.layout for name, one in usable.items()}
  compiled = compare(TrainStep(layout_model.step, CREATE, BATCH), layouts, TARGET, jobs=CORES)
  failed = [one for one in compiled if one.counts is None]
  for one in failed:
    log(f'not compiled: {one.name}: {one.error}')
  pairs = [Pair(name, one, compiled[name]) for name, one in usable.items()]
  return [pair for pair in pairs if pair.compiled.counts is not None], rate


def _estimated(estimator: Estimator, candidate: Candidate, facts: ModelFacts, aim) -> Outcome | None:
  try:
    return estimator.estimate(layout_of(candidate, facts.batch), aim)
  except LayoutError:
    return None


def regret(pairs: Sequence[Pair], top: int) -> float:
  """How much slower the best of the `top` estimates is than the best of all when compiled, in percent."""
  ranked = sorted(pairs, key=lambda pair: mean_seconds(pair.estimated))
  best = min(mean_seconds(pair.compiled) for pair in pairs)
  return 100 * (min(mean_seconds(pair.compiled) for pair in ranked[:top]) / best - 1)


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
      f'{1e3 * mean_seconds(pair.estimated):.1f}',
      f'{1e3 * mean_seconds(pair.compiled):.1f}',
      f'{pair.wire:+.1f}',
      f'{pair.memory:+.1f}',
      'yes' if pair.doubted else '',
      pair.name,
    ]
    for pair in sorted(pairs, key=lambda pair: mean_seconds(pair.compiled))
  ]
  head = ['estimated, ms', 'compiled, ms', 'wire off, %', 'memory off, %', 'in doubt', 'candidate']
  return Table(f'{len(pairs)} candidates of seed {seed}, {doubted} in doubt', head, rows)


# -- memory: which candidates fit


def fitting(seed: int) -> tuple[list[Figure], Table]:
  """The estimate's and the TPU compiler's verdicts on candidates of which about half fit."""
  aim, batch = parse_target(TPU), layout_model.batch(LARGER)
  estimator, facts, drawn = drawn_for(TPU, batch, FITS, seed)
  estimates = {text_of(one, facts.batch): _estimated(estimator, one, facts, aim) for one in drawn}
  usable = {name: one for name, one in estimates.items() if one is not None}
  layouts = {name: one.layout for name, one in usable.items()}
  compiled = compare(TrainStep(layout_model.step, CREATE, batch), layouts, TPU, jobs=CORES)
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
  presets = [mean_seconds(one) for one in result.outcomes if one.name in result.presets]
  figures = [
    exact('search: candidates', len(result.estimates), '', at_least(1000)),
    exact('search: by the clock', wall, 's', at_most(300)),
    exact('search: CPU-seconds over 2 cores', spent / CORES, 's', at_most(300)),
    exact(
      'search: winner beside the best preset',
      100 * mean_seconds(result.best) / min(presets),
      '%',
      at_most(100),
    ),
  ]
  return figures, {'wall': wall, 'cpu': spent, 'best': result.best.name, 'layout': result.toml}


# -- published step times

# Seconds per step: NVIDIA's 7.908 s for Llama 2 70B, and MaxText's 900 tokens per second and chip with 4 sequences
# of 4096 per chip. Both are FSDP; the efficiencies in hardware.toml are derived from them.
PUBLISHED = {('h100:64', 128): 7.908, ('v6e:16x16', 1024): 4 * 4096 / 900}


def published() -> list[Figure]:
  """The brackets that should contain the published step times."""
  figures: list[Figure] = []
  for (text, sequences), known in PUBLISHED.items():
    aim, model = parse_target(text), LLAMA_70B._replace(vocab=32000, batch=sequences)
    create = functools.partial(layout_model.create, model)
    train_step = TrainStep(layout_model.step, create, layout_model.batch(model))
    estimator = Estimator(train_step, platform=aim.chip.platform)
    rules = layout_model.table({'batch': 'fsdp', 'embed': 'fsdp'})
    cost = estimator.estimate(spmd.Layout(spmd.abstract_mesh({'fsdp': aim.devices}), rules), aim).cost
    label = f'Llama 2 70B, {text}, {known:.1f} s published'
    figures += [
      exact(f'{label}: low end of the bracket', cost.low, 's', at_most(known)),
      exact(f'{label}: its high end', cost.high, 's', at_least(known)),
    ]
  return figures


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
    '--only', choices=('sample', 'fits', 'search', 'published'), help='run only this part'
  )
  arguments = options.parse_args()
  available = {target for target in (TARGET, TPU) if _is_available(target)}
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
  if arguments.only in (None, 'published'):
    collected += published()
  if arguments.only in (None, 'sample') and TARGET in available:
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    pairs, rate = sample(arguments.sample, seed)
    collected += sample_figures(pairs, rate)
    tables.append(sample_table(pairs, seed))
    details['sample'] = {'seed': seed, 'pairs': [pair.record() for pair in pairs]}
  if arguments.only in (None, 'fits') and TPU in available:
    figures, table = fitting(
      random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    )
    collected += figures
    tables.append(table)
  if arguments.only in (None, 'search') and TARGET in available:
    os.environ['FLAX_SPMD_CACHE'] = f'{fresh}/search'  # an empty cache
    figures, details['search'] = searched()
    collected += figures
  return Report(f'search_{arguments.only}' if arguments.only else 'search', collected, tables, details)


if __name__ == '__main__':
  sys.exit(main())
