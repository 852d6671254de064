"""Side-by-side measurement: every figure is a comparison within one run.

The machines are shared, and drift by tens of percent within minutes. So the arms of a comparison take
turns, in an order that is shuffled every round. A figure is the median over rounds of one ratio per round
(this arm's time over that arm's); its spread is the 10th and the 90th percentile. A verdict is about the
median, and uses the 95 % confidence interval of the median, from order statistics: a target inside that
interval is undecided. The garbage collector runs between rounds, never within one. It ignores older
objects (`gc.freeze`), whose collection would take most of the run.

    rounds = measure({'ours': run_ours, 'plain': run_plain}, rounds=41)
    figure = ratio('flatten + unflatten, ours', rounds, 'ours', 'plain', at_most(2.5))
    print(figure.value, figure.interval, figure.verdict)

Two clocks: `THREAD` counts the CPU time of the calling thread, without waiting and without JAX's threads,
for the work before a program runs. `WALL` is for whole steps.
"""

import gc
import math
import random
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

THREAD = time.thread_time
WALL = time.perf_counter

Arms = Mapping[str, Callable[[], Any]]
Rounds = Sequence[Mapping[str, float]]


class Target(NamedTuple):
  """The range of values to reach: from `low` to `high`, both included."""

  low: float
  high: float

  def verdict(self, low: float, high: float) -> str:
    """'met' or 'MISSED' if the median's whole interval is inside or outside the range, else 'undecided'."""
    if self.low <= low and high <= self.high:
      return 'met'
    return 'MISSED' if high < self.low or low > self.high else 'undecided'

  def __str__(self) -> str:
    if self.low == -math.inf:
      return f'<= {self.high:g}'
    if self.high == math.inf:
      return f'>= {self.low:g}'
    middle, slack = (self.low + self.high) / 2, (self.high - self.low) / 2
    if not slack:
      return f'= {middle:g}'
    return f'{middle:.2f} +- {slack:.2g}'


def at_most(limit: float) -> Target:
  return Target(-math.inf, limit)


def at_least(limit: float) -> Target:
  return Target(limit, math.inf)


def equal(limit: float, slack: float = 0.05) -> Target:
  return Target(limit - slack, limit + slack)


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
  """Seconds per call of every arm in each round; an arm is called `calls` times in a row."""
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
  """Time of the arm over that of `base`."""
  return summary(name, [times[arm] / times[base] for times in rounds], 'x', target)


def added(
  name: str, rounds: Rounds, arm: str, base: str, target: Target | None = None, *, unit: str = 'us'
) -> Figure:
  """Time of the arm minus that of `base`."""
  scale = _PER_SECOND[unit]
  return summary(name, [scale * (times[arm] - times[base]) for times in rounds], unit, target)


def per_item(name: str, rounds: Rounds, arm: str, items: int, target: Target | None = None) -> Figure:
  """Time of the arm per item, in microseconds."""
  return summary(name, [1e6 * times[arm] / items for times in rounds], 'us a leaf', target)


def summary(name: str, samples: Sequence[float], unit: str, target: Target | None = None) -> Figure:
  """The figure of some samples, one per round."""
  tenths = statistics.quantiles(samples, n=10, method='inclusive')
  middle = statistics.median(samples)
  return Figure(name, middle, _interval(samples), (tenths[0], tenths[-1]), unit, target)


def exact(name: str, value: float, unit: str, target: Target | None = None) -> Figure:
  """A counted figure, or one measured once."""
  return Figure(name, value, (value, value), (value, value), unit, target)


def cpu_seconds() -> float:
  """CPU time of this process and its finished children."""
  usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
  return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _interval(samples: Sequence[float]) -> tuple[float, float]:
  """The median's 95 % interval: the samples about 0.98 sqrt(n) ranks to each side (binomial)."""
  ranked, reach = sorted(samples), 0.98 * math.sqrt(len(samples))
  first = max(0, math.floor(len(ranked) / 2 - reach) - 1)
  return ranked[first], ranked[-1 - first]


_PER_SECOND = {'us': 1e6, 'ms': 1e3}
