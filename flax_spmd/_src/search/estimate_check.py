"""Estimate checks: what compiled layouts say about the estimates of a search, and the factors that correct them.

    check = check_estimates([(estimated, compiled), ...])
    print(check)            # Estimates checked against 2 compiled layouts: wire -1 %, memory +4 %.
    check.factors           # {'lookups': 0.19}

Each class of operation has a factor: its compiled traffic over its estimated traffic. So do FLOPs, memory traffic and
temporaries. A factor is used only where the layouts agree on it. What no factor corrects, and what no compiled layout
contains, is flagged: estimates in which it matters are in doubt.

The stated errors are those of estimates that were corrected without the layout in question, so they hold for others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flax_spmd._src.compare.outcome import Outcome
from flax_spmd._src.estimate.doubts import particular
from flax_spmd._src.public import public
from flax_spmd._src.search.operation_classes import ClassTraffic, class_of, compared
from flax_spmd._src.text import plural

_AGREEMENT = 0.15  # largest relative distance of a layout's factor from the common one
_NEGLIGIBLE = 0.02  # share of a layout's traffic or memory
_RELEVANT = 0.05  # share of an estimate's traffic above which a flagged class puts it in doubt
_SPREAD = 2.0  # largest ratio of the factors of two layouts that have a common one
_EXACT = 0.02  # a factor this close to 1 is not shown
_SCALARS = ('flops', 'hbm', 'temporaries')
_ONE = (1.0, 1.0)
_NEVER = 'in no compiled layout of this search'

CheckedPair = tuple[Outcome, Outcome]
"""An estimate without corrections, and the compiled outcome of the same layout."""


@public('flax_spmd.explore')
class EstimateCheck(NamedTuple):
  """The comparison of a search's estimates with compiled layouts.

  Attributes:
    layouts: names of the compiled layouts, and of those that were partitioned; those whose estimate was in doubt only if all were.
    wire: relative error of the estimated bytes on the wire, before corrections, per layout.
    memory: relative error of the estimated peak memory, before corrections, per layout.
    factors: factor per class of operation, and for `temporaries`, `flops` and `hbm`; classes that need none have 1.
    flagged: reason per class that no factor corrects.
    spans: smallest and largest factor of a compiled layout, per class.
    within: largest relative errors of wire and memory after corrections; a layout is corrected by the others.

  Example:
    >>> check = explore.EstimateCheck(('data=8: batch=data',), (-0.01,), (0.04,), {'products': 1.0}, {}, {}, (0.01, 0.04))
    >>> print(check)
    Estimates checked against 1 compiled layout: wire -1 %, memory +4 %.
  """

  layouts: tuple[str, ...]
  wire: tuple[float, ...]
  memory: tuple[float, ...]
  factors: Mapping[str, float]
  flagged: Mapping[str, str]
  spans: Mapping[str, tuple[float, float]]
  within: tuple[float, float]

  def __str__(self) -> str:
    worst = (max(errors, key=abs) for errors in (self.wire, self.memory))
    wire, memory = (f'{100 * error:+.0f} %' for error in worst)
    found = f'Estimates checked against {plural(len(self.layouts), "compiled layout")}: wire {wire}, memory {memory}'
    changed = {name: factor for name, factor in self.factors.items() if abs(factor - 1) > _EXACT}
    if changed:
      factors = ', '.join(f'{name} x {factor:.2g}' for name, factor in changed.items())
      bounds = 'wire within {:.0f} %, memory within {:.0f} %'.format(*(100 * one for one in self.within))
      found += f'; corrected by {factors}: {bounds}'
    if self.flagged:
      found += '; not corrected: ' + ', '.join(f'{name} ({why})' for name, why in self.flagged.items())
    return f'{found}.'

  def doubts(self, outcome: Outcome) -> tuple[str, ...]:
    """The classes of an estimate that are flagged or in no compiled layout, as far as they matter."""
    sums = traffic(outcome)
    possible = {name: size * max(1.0, self.spans.get(name, _ONE)[1]) for name, size in sums.items()}
    relevant = {name for name, size in possible.items() if size > _RELEVANT * sum(sums.values())}
    unknown = {name: _NEVER for name in relevant if name not in self.factors}
    flagged = {
      name: reason
      for name, reason in self.flagged.items()
      if name in relevant or self.spans[name][1] == math.inf
    }
    return tuple(f'{name}: {reason}' for name, reason in sorted({**unknown, **flagged}.items()))

  def record(self) -> dict[str, Any]:
    """The check as JSON types."""
    spans = {
      name: [None if math.isinf(end) else end for end in span] for name, span in self.spans.items()
    }
    return self._asdict() | {'spans': spans}


class _Ratio(NamedTuple):
  """One quantity of one layout, as estimated and as compiled; `whole` is the compiled total that it is part of."""

  estimated: float
  compiled: float
  whole: float

  @property
  def matters(self) -> bool:
    return max(self.estimated, self.compiled) > _NEGLIGIBLE * self.whole


def check_estimates(pairs: Sequence[CheckedPair]) -> EstimateCheck | None:
  """The check of some estimates by their compiled outcomes; None without any.

  Pairs without a compiled program, such as those of layouts that do not fit, do not count. Estimates in doubt count only
  if all are: their errors are known to be large, and must not spoil the factors of the others.
  """
  compiled = [pair for pair in pairs if all(one.counts and one.memory for one in pair)]
  usable = [pair for pair in compiled if not particular(pair[0].doubts)] or compiled
  if not usable:
    return None
  ratios = [_ratios(*pair) for pair in usable]
  common = _common_factors(ratios)
  return EstimateCheck(
    tuple(pair[1].name for pair in usable),
    tuple(_relative(*map(_wire, pair)) for pair in usable),
    tuple(_relative(*map(_peak, pair)) for pair in usable),
    {name: one.factor for name, one in common.items()},
    {name: one.reason for name, one in common.items() if one.reason},
    {name: one.span for name, one in common.items()},
    _within(usable, ratios),
  )


def _ratios(estimated: Outcome, compiled: Outcome) -> dict[str, _Ratio]:
  """The quantities of one layout: the traffic of each class, and its scalars."""
  one, two = estimated.counts, compiled.counts
  classes: ClassTraffic = compared(one, two) if one and two else {}
  whole = max(1.0, sum(size for _, size in classes.values()))
  ratios = {name: _Ratio(*sizes, whole) for name, sizes in classes.items()}
  if one and two:
    ratios['flops'] = _Ratio(one.flops, two.flops, two.flops)
    ratios['hbm'] = _Ratio(one.hbm_bytes, two.hbm_bytes, two.hbm_bytes)
  if estimated.memory and compiled.memory:
    fixed = estimated.memory.peak - estimated.memory.temporaries
    peak = compiled.memory.peak
    ratios['temporaries'] = _Ratio(estimated.memory.temporaries, max(0, peak - fixed), peak)
  return ratios


class _CommonFactor(NamedTuple):
  """The factor on which layouts agree, or 1 with a reason; `span` is that of the single layouts."""

  factor: float
  reason: str
  span: tuple[float, float]


def _common_factors(layouts: Sequence[Mapping[str, _Ratio]]) -> dict[str, _CommonFactor]:
  """The factor of each quantity: traffic first, then scalars."""
  names = dict.fromkeys(name for ratios in layouts for name in ratios)
  known = {name: [ratios[name] for ratios in layouts if name in ratios] for name in names}
  common = {
    name: _common_factor(known[name]) for name in sorted(names, key=lambda name: name in _SCALARS)
  }
  return {name: one for name, one in common.items() if one}


def _common_factor(layouts: Sequence[_Ratio]) -> _CommonFactor | None:
  """The factor on which some layouts agree, or 1 with a reason; None if it hardly matters in any."""
  known = [one for one in layouts if one.matters]
  estimated, compiled = (sum(one[side] for one in known) for side in (0, 1))
  if not estimated:
    missing = any(one.compiled > _AGREEMENT * one.whole for one in known)
    return _CommonFactor(1.0, 'compiled, but not estimated', (1.0, math.inf)) if missing else None
  if not compiled:
    return _CommonFactor(1.0, 'estimated, but not compiled', (0.0, 1.0))
  factor, span = compiled / estimated, _span(known)
  errors = [abs(factor * one.estimated - one.compiled) / max(one.whole, 1.0) for one in known]
  if max(errors) > _AGREEMENT or span[1] > _SPREAD * span[0]:
    reason = f'off by x {span[0]:.2g} to x {span[1]:.2g} in the compiled layouts'
    return _CommonFactor(1.0, reason, span)
  alone = len(known) == 1 and abs(known[0].estimated - known[0].compiled) > _AGREEMENT * known[0].whole
  return _CommonFactor(factor, 'corrected by one layout alone' if alone else '', span)


def _span(known: Sequence[_Ratio]) -> tuple[float, float]:
  """The smallest and the largest factor of a layout."""
  each = [one.compiled / one.estimated for one in known if one.estimated]
  return min(each), max(each)


def _within(pairs: Sequence[CheckedPair], ratios: Sequence[Mapping[str, _Ratio]]) -> tuple[float, float]:
  """The largest errors of wire and memory, each layout corrected by the others."""
  wire, memory = [], []
  for index, (estimated, compiled) in enumerate(pairs):
    common = _common_factors([*ratios[:index], *ratios[index + 1 :]])
    factors = {name: one.factor for name, one in common.items()}
    sizes = (size * factors.get(name, 1.0) for name, size in traffic(estimated).items())
    wire.append(abs(_relative(sum(sizes), _wire(compiled))))
    memory.append(abs(_relative(corrected_peak(estimated, factors), _peak(compiled))))
  return max(wire), max(memory)


def corrected_peak(outcome: Outcome, factors: Mapping[str, float]) -> int:
  """The peak memory of an estimate, with its temporaries corrected."""
  if outcome.memory is None:
    return 0
  added = (factors.get('temporaries', 1.0) - 1) * outcome.memory.temporaries
  return int(outcome.memory.peak + added)


def traffic(outcome: Outcome) -> dict[str, float]:
  """Estimated bytes on the wire by class."""
  sums: dict[str, float] = {}
  for one in outcome.counts.collectives if outcome.counts else ():
    sums[class_of(one)] = sums.get(class_of(one), 0.0) + one.wire
  return sums


def _wire(outcome: Outcome) -> float:
  return sum(outcome.counts.by_kind().values()) if outcome.counts else 0.0


def _peak(outcome: Outcome) -> float:
  return outcome.memory.peak if outcome.memory else 0.0


def _relative(estimated: float, compiled: float) -> float:
  """The relative error; sizes below one MiB count as one MiB."""
  return max(estimated, 2**20) / max(compiled, 2**20) - 1
