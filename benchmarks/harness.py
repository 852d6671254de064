"""Measuring side by side: every figure is a comparison made within one run.

The machines that these scripts run on are shared, and drift by tens of percent within minutes. So the
arms of a comparison take turns, in an order that is shuffled every round; a figure is the median over
rounds of what one round says (this arm's time over that arm's), and its spread the 10th and the 90th
percentile of the same. A verdict is about the median, so it asks for the median's own 95 % interval,
by order statistics: where a target lies inside it, the run has not decided, and says so. The garbage
collector runs between rounds, never within one, and leaves alone what was there before (`gc.freeze`),
which would otherwise take most of the run.

    rounds = measure({'ours': run_ours, 'plain': run_plain}, rounds=41)
    report('boxes', [ratio('flatten + unflatten, ours', rounds, 'ours', 'plain', at_most(2.5))])

Two clocks: `THREAD` counts the CPU time of the calling thread, and so neither waiting nor JAX's own
threads: it is for what happens before a program runs. `WALL` is for whole steps.
"""

import argparse
import gc
import json
import math
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

THREAD = time.thread_time
WALL = time.perf_counter

Arms = Mapping[str, Callable[[], Any]]
Rounds = Sequence[Mapping[str, float]]


class Target(NamedTuple):
  """What a figure should be: at most `limit`, or `limit` itself, give or take `slack`."""

  limit: float
  slack: float | None = None

  def verdict(self, low: float, high: float) -> str:
    """'met' or 'MISSED' if the whole interval of the median says so, else 'undecided'."""
    lowest = -math.inf if self.slack is None else self.limit - self.slack
    highest = self.limit + (self.slack or 0)
    if lowest <= low and high <= highest:
      return 'met'
    return 'MISSED' if high < lowest or low > highest else 'undecided'

  def __str__(self) -> str:
    return f'<= {self.limit:g}' if self.slack is None else f'{self.limit:.2f} +- {self.slack:g}'


def at_most(limit: float) -> Target:
  return Target(limit)


def equal(limit: float, slack: float = 0.05) -> Target:
  return Target(limit, slack)


class Figure(NamedTuple):
  """A median over rounds, its 95 % interval, and the 10th and the 90th percentile of the rounds."""

  name: str
  value: float
  interval: tuple[float, float]
  spread: tuple[float, float]
  unit: str
  target: Target | None = None

  @property
  def verdict(self) -> str:
    return '' if self.target is None else self.target.verdict(*self.interval)


def measure(
  arms: Arms,
  *,
  rounds: int,
  calls: int = 1,
  warm_up: int = 2,
  clock: Callable[[], float] = THREAD,
) -> list[dict[str, float]]:
  """Seconds per call of every arm, in each round; an arm makes `calls` calls in a row."""
  for call in arms.values():
    for _ in range(warm_up):
      call()
  order = random.Random(0)
  gc.freeze()
  gc.disable()
  try:
    return [_round(arms, order, calls, clock) for _ in range(rounds)]
  finally:
    gc.enable()
    gc.unfreeze()


def _round(arms: Arms, order: random.Random, calls: int, clock) -> dict[str, float]:
  gc.collect()
  names = order.sample(list(arms), len(arms))
  return {name: _time(arms[name], calls, clock) for name in names}


def _time(call: Callable[[], Any], calls: int, clock) -> float:
  start = clock()
  for _ in range(calls):
    call()
  return (clock() - start) / calls


def ratio(name: str, rounds: Rounds, arm: str, base: str, target: Target | None = None) -> Figure:
  """How many times as long as `base` the arm takes."""
  return summary(name, [times[arm] / times[base] for times in rounds], 'x', target)


def added(
  name: str, rounds: Rounds, arm: str, base: str, target: Target | None = None, *, unit: str = 'us'
) -> Figure:
  """How much longer than `base` the arm takes."""
  scale = _PER_SECOND[unit]
  return summary(name, [scale * (times[arm] - times[base]) for times in rounds], unit, target)


def per_item(name: str, rounds: Rounds, arm: str, items: int, target: Target | None = None) -> Figure:
  """Microseconds that the arm takes for each of its items."""
  return summary(name, [1e6 * times[arm] / items for times in rounds], 'us a leaf', target)


def summary(name: str, samples: Sequence[float], unit: str, target: Target | None = None) -> Figure:
  """The figure that samples, one a round, amount to."""
  tenths = statistics.quantiles(samples, n=10, method='inclusive')
  middle = statistics.median(samples)
  return Figure(name, middle, _interval(samples), (tenths[0], tenths[-1]), unit, target)


def exact(name: str, value: float, unit: str, target: Target | None = None) -> Figure:
  """A figure that does not vary."""
  return Figure(name, value, (value, value), (value, value), unit, target)


def _interval(samples: Sequence[float]) -> tuple[float, float]:
  """The median's 95 % interval: the samples about 0.98 sqrt(n) ranks to each side (binomial)."""
  ranked, reach = sorted(samples), 0.98 * math.sqrt(len(samples))
  first = max(0, math.floor(len(ranked) / 2 - reach) - 1)
  return ranked[first], ranked[-1 - first]


_PER_SECOND = {'us': 1e6, 'ms': 1e3}


def report(benchmark: str, figures: Callable[[], Sequence[Figure]]) -> None:
  """The script's main: measures, then prints a table or, with `--json`, one JSON object."""
  parser = argparse.ArgumentParser(prog=f'{benchmark}.py')
  parser.add_argument('--json', action='store_true', help='print one JSON object')
  as_json = parser.parse_args().json
  found = figures()
  print(_json(benchmark, found) if as_json else _table(found))


def versions() -> dict[str, str]:
  return {'python': platform.python_version(), 'jax': version('jax'), 'flax': version('flax')}


def _json(benchmark: str, figures: Sequence[Figure]) -> str:
  rows = [
    {
      **figure._asdict(),
      'target': None if figure.target is None else str(figure.target),
      'verdict': figure.verdict or None,
    }
    for figure in figures
  ]
  return json.dumps({'benchmark': benchmark, 'versions': versions(), 'figures': rows}, indent=2)


def _table(figures: Sequence[Figure]) -> str:
  rows = [('', 'median', '95 % of it', '10-90 %', 'unit', 'target', '')]
  rows += [
    (
      f.name,
      f'{f.value:.2f}',
      _span(f.interval),
      _span(f.spread),
      f.unit,
      str(f.target or ''),
      f.verdict,
    )
    for f in figures
  ]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  said = ' '.join(f'{name} {number}' for name, number in versions().items())
  return '\n'.join([said, *(_line(row, widths) for row in rows)])


def _span(ends: tuple[float, float]) -> str:
  return f'{ends[0]:.2f} to {ends[1]:.2f}'


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
  cells = [
    cell.rjust(width) if column in (1, 2, 3) else cell.ljust(width)
    for column, (cell, width) in enumerate(zip(row, widths, strict=True))
  ]
  return '  '.join(cells).rstrip()
