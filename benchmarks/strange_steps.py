"""Estimates of the steps in `strangers/`, against the compilers: errors by model, and the operations with the largest.

    samples = measured(MODELS, TARGETS, layouts=2, seed=5, jobs=1, log=print)
    figures(samples), by_model(samples), worst_operations(samples)

The models have none of the memory of a chip filled on purpose. So the verdict on whether a layout fits is taken at a
budget: the median of the compiled peaks of a model on a target.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from harness import Figure, at_least, at_most, exact
from reporting import Table
from samples import Pair, Sample, regret, sample
from strangers import train_step

from flax_spmd.explore import Outcome

TARGETS = ('h100:8', 'h100:64', 'v5e:4x4', 'v6e:2x4')
CLOSE = 0.1  # to the budget: a verdict may be wrong
SHOWN = 40  # operations

Samples = Mapping[tuple[str, str], Sample]


class Fault(NamedTuple):
  """The traffic of one line of a model, as estimated and as compiled, for one layout.

  Attributes:
    model: the model.
    target: the target.
    layout: the layout.
    doubted: whether the estimate is in doubt.
    line: the line of the model.
    kinds: kinds of collectives, estimated and compiled.
    wire: bytes on the wire, estimated and compiled.
  """

  model: str
  target: str
  layout: str
  doubted: bool
  line: str
  kinds: tuple[str, str]
  wire: tuple[float, float]

  @property
  def size(self) -> float:
    return abs(self.wire[0] - self.wire[1])


def measured(
  models: Sequence[str],
  targets: Sequence[str],
  layouts: int,
  seed: int,
  jobs: int,
  log: Callable[[str], None],
) -> Samples:
  """A sample of each model on each target; one that cannot be estimated is a sample of its error."""
  samples: dict[tuple[str, str], Sample] = {}
  for model in models:
    for target in targets:
      try:
        one = sample(train_step(model), target, layouts, f'{seed} {model} {target}', jobs)
      except Exception as error:  # the benchmark goes on: it is a result
        one = Sample([], [], [('', f'{type(error).__name__}: {error}')], 1.0, 1.0)
      samples[model, target] = one
      for pair in one.pairs:
        doubt = ', in doubt' if pair.doubted else ''
        log(
          f'{model} {target}: wire {pair.wire:+.1f} %, memory {pair.memory:+.1f} %, FLOPs {pair.flops:+.1f} %, '
          f'time {pair.time:+.1f} %{doubt}: {pair.name}'
        )
      for name, error in one.failed:
        log(f'{model} {target}: failed: {name}: {error}')
  return samples


def figures(samples: Samples) -> list[Figure]:
  """The figures over all models; NaN, and no verdict, where no layout of the samples counts for one."""
  pairs = _pairs(samples)
  quick = [pair for one in samples.values() for pair in one.quick]
  plain = [pair for pair in pairs if not pair.doubted]
  counted = sum(len(one.pairs) + len(one.failed) for one in samples.values())
  rated = [one for one in samples.values() if one.pairs]
  rate = len(rated) / (sum(one.seconds for one in rated) or math.inf)
  partitioned_rate = len(rated) / (sum(one.partitioned_seconds for one in rated) or math.inf)
  wrong, verdicts = _verdicts(samples)
  tops = [[regret(one.pairs, top) for one in rated if len(one.pairs) > top] for top in (1, 3)]
  label = 'strangers, not in doubt'
  return [
    exact(f'{label}: wire bytes, median deviation', _median(plain, 'wire'), '%', at_most(5)),
    exact(f'{label}: wire bytes, 95th percentile', _high(plain, 'wire'), '%', at_most(15)),
    exact(f'{label}: memory, median deviation', _median(plain, 'memory'), '%', at_most(5)),
    exact(f'{label}: memory, 95th percentile', _high(plain, 'memory'), '%', at_most(12)),
    exact(f'{label}: memory, furthest below', _below(plain), '%', at_most(12)),
    exact(f'{label}: FLOPs, median deviation', _median(plain, 'flops'), '%', at_most(1)),
    exact(f'{label}: time, median deviation', _median(plain, 'time'), '%'),
    exact('strangers: candidates', counted, ''),
    exact('strangers: neither estimated nor compiled', counted - len(pairs), '', at_most(0)),
    exact('strangers: compiled and not in doubt', len(plain), ''),
    exact('strangers: in doubt', _doubted(pairs), '%', at_most(20)),
    exact('strangers, not partitioned: wire bytes, largest deviation', _high(quick, 'wire', 1.0), '%'),
    exact('strangers, not partitioned: memory, largest deviation', _high(quick, 'memory', 1.0), '%'),
    exact('strangers, not partitioned: memory, furthest below', _below(quick), '%'),
    exact('strangers: verdicts on whether it fits', verdicts, ''),
    exact('strangers: of them, wrong', wrong if verdicts else math.nan, '', at_most(0)),
    exact('strangers: top-1 regret, worst model', max(tops[0], default=math.nan), '%', at_most(2)),
    exact('strangers: top-3 regret, worst model', max(tops[1], default=math.nan), '%', at_most(0.5)),
    exact('strangers: whole steps partitioned, per second and core', partitioned_rate, '1/s'),
    exact('strangers: estimates without it, per second and core', rate, '1/s', at_least(20)),
  ]


def _pairs(samples: Samples) -> list[Pair]:
  return [pair for one in samples.values() for pair in one.pairs]


def _errors(pairs: Sequence[Pair], part: str) -> list[float]:
  return sorted(abs(getattr(pair, part)) for pair in pairs)


def _median(pairs: Sequence[Pair], part: str) -> float:
  return statistics.median(_errors(pairs, part)) if pairs else math.nan


def _high(pairs: Sequence[Pair], part: str, share: float = 0.95) -> float:
  """The error that a share of the pairs does not exceed."""
  return _errors(pairs, part)[round(share * (len(pairs) - 1))] if pairs else math.nan


def _below(pairs: Sequence[Pair]) -> float:
  return max((-pair.memory for pair in pairs), default=math.nan)


def _doubted(pairs: Sequence[Pair]) -> float:
  """The share in doubt, in percent."""
  return 100 * sum(pair.doubted for pair in pairs) / len(pairs) if pairs else math.nan


def _verdicts(samples: Samples) -> tuple[int, int]:
  """Wrong verdicts and all, on layouts that are not in doubt and not close to the budget."""
  wrong = verdicts = 0
  for one in samples.values():
    budget = statistics.median([pair.compiled.memory.peak for pair in one.pairs] or [1])
    for pair in one.pairs:
      peak = pair.compiled.memory.peak
      if pair.doubted or abs(peak / budget - 1) <= CLOSE:
        continue
      verdicts += 1
      wrong += (peak <= budget) != (pair.estimated.memory.peak <= budget)
  return wrong, verdicts


def by_model(samples: Samples) -> Table:
  """The errors of each model over all targets."""
  rows = []
  for model in dict.fromkeys(model for model, _ in samples):
    mine = {key: one for key, one in samples.items() if key[0] == model}
    pairs = _pairs(mine)
    plain = [pair for pair in pairs if not pair.doubted]
    failed = sum(len(one.failed) for one in mine.values())
    parts = [f'{_median(plain, part):.1f}, {_high(plain, part):.1f}' for part in ('wire', 'memory')]
    regrets = [regret(one.pairs, 1) for one in mine.values() if len(one.pairs) > 1]
    seconds = [one.seconds for one in mine.values() if one.pairs]
    row = [
      model,
      *parts,
      f'{_below(plain):.1f}',
      f'{_median(plain, "flops"):.1f}',
      f'{_median(plain, "time"):.1f}',
      f'{len(pairs) - len(plain)} of {len(pairs)}',
      str(failed or ''),
      f'{max(regrets, default=math.nan):.1f}',
      f'{len(seconds) / sum(seconds) if seconds else 0:.0f}',
    ]
    rows.append([cell.replace('nan, nan', '-').replace('nan', '-') for cell in row])
  head = ['model', 'wire: median, 95 %', 'memory', 'furthest below', 'FLOPs', 'time', 'in doubt']
  title = (
    f'Errors in percent, of layouts not in doubt, on {", ".join(dict.fromkeys(t for _, t in samples))}'
  )
  return Table(title, [*head, 'failed', 'top-1 regret', 'estimates/s'], rows)


def worst_layouts(samples: Samples) -> Table:
  """The layouts with the largest errors that are not in doubt."""
  named = [(key, pair) for key, one in samples.items() for pair in one.pairs if not pair.doubted]
  named.sort(key=lambda item: -max(abs(item[1].wire), abs(item[1].memory)))
  rows = [
    [*key, f'{pair.wire:+.1f}', f'{pair.memory:+.1f}', f'{pair.time:+.1f}', pair.name]
    for key, pair in named[:SHOWN]
  ]
  head = ['model', 'target', 'wire off, %', 'memory off, %', 'time off, %', 'candidate']
  return Table('Layouts with the largest errors, not in doubt', head, rows)


def worst_operations(samples: Samples) -> Table:
  """The lines of the models with the largest differences on the wire, where the whole step is not partitioned."""
  faults = [
    fault for key, one in samples.items() for pair in one.quick for fault in faults_of(*key, pair)
  ]
  largest: dict[tuple[str, str], Fault] = {}
  for fault in sorted(faults, key=lambda fault: -fault.size):
    largest.setdefault((fault.model, fault.line), fault)
  rows = [
    [
      fault.model,
      fault.line,
      *(f'{size / 2**20:,.0f} {kinds}' for size, kinds in zip(fault.wire, fault.kinds)),
      'yes' if fault.doubted else '',
      fault.target,
      fault.layout,
    ]
    for fault in [*largest.values()][:SHOWN]
  ]
  head = ['model', 'line', 'estimated, MiB', 'compiled, MiB', 'in doubt', 'target', 'candidate']
  return Table(
    'Operations with the largest differences on the wire, whole step not partitioned, the worst layout of each',
    head,
    rows,
  )


def faults_of(model: str, target: str, pair: Pair) -> list[Fault]:
  """The traffic of each line of a model. Combined collectives are counted at the line of one of their parts."""
  sides = by_line(pair.estimated), by_line(pair.compiled)
  return [
    Fault(
      model,
      target,
      pair.name,
      pair.doubted,
      line,
      tuple('+'.join(side.get(line, {})) or '-' for side in sides),
      tuple(sum(side.get(line, {}).values()) for side in sides),
    )
    for line in {**sides[0], **sides[1]}
  ]


def by_line(outcome: Outcome) -> dict[str, dict[str, float]]:
  """Bytes on the wire by line and kind of collective."""
  lines: dict[str, dict[str, float]] = {}
  for one in outcome.counts.collectives:
    kinds = lines.setdefault(one.source or '?', {})
    kinds[one.kind] = kinds.get(one.kind, 0.0) + one.wire
  return lines


def details(samples: Samples, seed: int) -> dict[str, Any]:
  """The samples as JSON."""
  return {
    'seed': seed,
    'samples': {
      f'{model} {target}': {
        'pairs': [pair.record() for pair in one.pairs],
        'failed': one.failed,
      }
      for (model, target), one in samples.items()
    },
  }
