"""Are estimates what the compiler says, and what does a search cost?

The model is `layout_model.py`'s with 8 layers, for 64 H100s. Four questions:

- A fresh random sample of candidates is estimated and compiled: by how much do bytes on the wire and memory
  differ, and how good are those that the estimates would have chosen? The sample is drawn as a search goes:
  from its starting points, by random changes. Its seed is printed; another one is another sample. What is
  compiled is kept where `FLAX_SPMD_CACHE` says, so that the same sample is quick the second time.
- Whether a candidate fits into a device's memory: does an estimate say of 64 TPUs what their compiler says?
- A search over at least 1,000 candidates, compiles included.
- Do the time brackets of Llama 2 70B contain the two step times that others have published?

    python benchmarks/search.py                        # all; needs the wheels of `flax-spmd[cuda]`
    python benchmarks/search.py --sample 60 --seed 5   # another sample
    python benchmarks/search.py --only search
    python benchmarks/search.py --only fits            # wants those of `flax-spmd[tpu]`
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
  """Candidates as a search meets them: starting points, each with some random changes."""
  rng, starts = random.Random(seed), [start.candidate for start in starting_points(space, 10**6)]
  drawn: dict[Candidate, None] = {}
  while len(drawn) < count:
    candidate = rng.choice(starts)
    for _ in range(rng.randint(0, CHANGES)):
      candidate = rng.choice(rng.choice([*filter(None, space.coordinates(candidate))]))
    drawn[candidate] = None
  return list(drawn)


class Pair(NamedTuple):
  """A candidate as it was estimated and as it was compiled."""

  name: str
  estimated: Outcome
  compiled: Outcome

  @property
  def wire(self) -> float:
    """How far off the estimate is, of bytes on the wire."""
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
  """In percent; of what is less than a MiB, nothing."""
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
  """The pairs, and how many estimates a second of one core makes."""
  aim = parse_target(TARGET)
  estimator, facts, drawn = drawn_for(TARGET, BATCH, count, seed)
  begin = time.process_time()
  estimated = {text_of(one, facts.batch): _estimated(estimator, one, facts, aim) for one in drawn}
  rate = len(drawn) / (time.process_time() - begin)
  say(f'{len(drawn)} candidates, seed {seed}; {rate:.1f} estimates per second and core')
  usable = {name: one for name, one in estimated.items() if one is not None}
  layouts = {name: one.layout for name, one in usable.items()}
  compiled = compare(TrainStep(layout_model.step, CREATE, BATCH), layouts, TARGET, jobs=CORES)
  failed = [one for one in compiled if one.counts is None]
  for one in failed:
    say(f'not compiled: {one.name}: {one.error}')
  pairs = [Pair(name, one, compiled[name]) for name, one in usable.items()]
  return [pair for pair in pairs if pair.compiled.counts is not None], rate


def _estimated(estimator: Estimator, candidate: Candidate, facts: ModelFacts, aim) -> Outcome | None:
  try:
    return estimator.estimate(layout_of(candidate, facts.batch), aim)
  except LayoutError:
    return None


def regret(pairs: Sequence[Pair], top: int) -> float:
  """By how many percent the best of the first few, by estimate, is slower than the best of all."""
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
  """The sample, the fastest first as compiled."""
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


# -- what fits


def fitting(seed: int) -> tuple[list[Figure], Table]:
  """Of candidates about half of which fit: what the estimate says, and what the TPU's own compiler does."""
  aim, batch = parse_target(TPU), layout_model.batch(LARGER)
  estimator, facts, drawn = drawn_for(TPU, batch, FITS, seed)
  found = {text_of(one, facts.batch): _estimated(estimator, one, facts, aim) for one in drawn}
  usable = {name: one for name, one in found.items() if one is not None}
  layouts = {name: one.layout for name, one in usable.items()}
  compiled = compare(TrainStep(layout_model.step, CREATE, batch), layouts, TPU, jobs=CORES)
  told = {
    one.name: one for one in compiled if one.memory is not None
  }  # what it could not compile is no verdict
  wrong = [name for name, one in told.items() if one.fits != usable[name].fits]
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
    for name, one in told.items()
  ]
  head = ['fits, estimated', 'compiled', 'GiB, estimated', 'compiled', 'in doubt', 'candidate']
  made = [
    exact('fits: candidates with a verdict of the compiler', len(told), '', at_least(FITS // 2)),
    exact('fits: of them, those that fit', sum(one.fits for one in told.values()), ''),
    exact('fits: of all, estimates that say otherwise', len(wrong), ''),
    exact('fits: and are not in doubt', len(clear), '', at_most(0)),
  ]
  return made, Table(f'{TPU}, {LARGER.batch} sequences: seed {seed}', head, rows)


# -- the search


def searched() -> tuple[list[Figure], dict[str, Any]]:
  """A search over a thousand candidates, from nothing."""
  begin, cpu = time.perf_counter(), cpu_seconds()
  train_step = TrainStep(layout_model.step, CREATE, BATCH)
  result = spmd.search(train_step, TARGET, candidates=1000, jobs=CORES)
  wall, spent = time.perf_counter() - begin, cpu_seconds() - cpu
  say(f'{result}\n\n{wall:.0f} s, {spent:.0f} CPU-s')
  presets = [mean_seconds(one) for one in result.outcomes if one.name in result.presets]
  made = [
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
  return made, {'wall': wall, 'cpu': spent, 'best': result.best.name, 'layout': result.toml}


# -- published step times

# Seconds of a step: 7.908 s, of NVIDIA's for Llama 2 70B; 900 tokens a second and chip with 4 sequences of 4096 on
# each, of MaxText's. Both FSDP; the efficiencies in hardware.toml are from these two.
PUBLISHED = {('h100:64', 128): 7.908, ('v6e:16x16', 1024): 4 * 4096 / 900}


def published() -> list[Figure]:
  """The brackets that published step times should lie in."""
  found: list[Figure] = []
  for (text, sequences), known in PUBLISHED.items():
    aim, model = parse_target(text), LLAMA_70B._replace(vocab=32000, batch=sequences)
    create = functools.partial(layout_model.create, model)
    train_step = TrainStep(layout_model.step, create, layout_model.batch(model))
    estimator = Estimator(train_step, platform=aim.chip.platform)
    rules = layout_model.table({'batch': 'fsdp', 'embed': 'fsdp'})
    cost = estimator.estimate(spmd.Layout(spmd.abstract_mesh({'fsdp': aim.devices}), rules), aim).cost
    what = f'Llama 2 70B, {text}, {known:.1f} s published'
    found += [
      exact(f'{what}: low end of the bracket', cost.low, 's', at_most(known)),
      exact(f'{what}: its high end', cost.high, 's', at_least(known)),
    ]
  return found


def say(text: str) -> None:
  """What is told on the way."""
  print(text, file=sys.stderr, flush=True)


def _is_here(target: str) -> bool:
  """Whether its compiler is; says why not."""
  try:
    check_compiler(parse_target(target))
  except TargetDeviceError as error:
    say(f'{target} is left out: {error}')
    return False
  return True


def main() -> int:
  options = parser('search')
  options.add_argument('--sample', type=int, default=48, help='candidates (default 48)')
  options.add_argument('--seed', type=int, default=None, help='of the sample; default: a new one')
  options.add_argument('--only', choices=('sample', 'fits', 'search', 'published'))
  asked = options.parse_args()
  here = {target for target in (TARGET, TPU) if _is_here(target)}
  with tempfile.TemporaryDirectory() as folder:
    os.environ.setdefault('FLAX_SPMD_CACHE', f'{folder}/sample')
    report = _all(asked, here, folder)
  report.publish(asked.json)
  return 1 if report.missed else 0


def _all(asked: argparse.Namespace, here: Collection[str], fresh: str) -> Report:
  """What was asked for, as far as there are compilers for it."""
  made: list[Figure] = []
  tables: list[Table] = []
  details: dict[str, Any] = {}
  if asked.only in (None, 'published'):
    made += published()
  if asked.only in (None, 'sample') and TARGET in here:
    seed = random.SystemRandom().randrange(10**6) if asked.seed is None else asked.seed
    pairs, rate = sample(asked.sample, seed)
    made += sample_figures(pairs, rate)
    tables.append(sample_table(pairs, seed))
    details['sample'] = {'seed': seed, 'pairs': [pair.record() for pair in pairs]}
  if asked.only in (None, 'fits') and TPU in here:
    figures, table = fitting(
      random.SystemRandom().randrange(10**6) if asked.seed is None else asked.seed
    )
    made += figures
    tables.append(table)
  if asked.only in (None, 'search') and TARGET in here:
    os.environ['FLAX_SPMD_CACHE'] = f'{fresh}/search'  # whatever was compiled before
    figures, details['search'] = searched()
    made += figures
  return Report(f'search_{asked.only}' if asked.only else 'search', made, tables, details)


if __name__ == '__main__':
  sys.exit(main())
