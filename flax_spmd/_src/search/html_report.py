"""HTML page of a search: the result, followed by a comparison of its outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from flax_spmd._src.compare import html_report as comparison_report
from flax_spmd._src.compare.html import safe, section, svg, table
from flax_spmd._src.compare.outcome import Outcome
from flax_spmd._src.search.trials import mean_seconds
from flax_spmd._src.text import size_text, time_text

if TYPE_CHECKING:
  from flax_spmd._src.search.result import RuleEffect, SearchResult

_WIDTH, _HEIGHT = 640, 300  # pixels of the scatter plot


def page(result: SearchResult) -> str:
  """The page as HTML text."""
  first = [
    f'<p>{safe(result.title)}</p>',
    *(f'<p class="warning">{safe(note)}</p>' for note in result.remarks),
    section('Layout', f'<pre>{safe(result.toml)}</pre>'),
    section('Effect of each rule', _effects(result.effects)),
    section('Time against memory', _scatter(result)),
  ]
  title = f'Search for {result.target.text}'
  return comparison_report.page(result.comparison, title=title, first=first)


def _effects(effects: Sequence[RuleEffect]) -> str:
  rows = [
    [
      repr(effect.rule),
      (effect.memory, signed_size(effect.memory)),
      (effect.time, f'{100 * effect.time:+.3g} %'),
      effect.error or '',
    ]
    for effect in effects
  ]
  return table(('without', 'memory', 'time', ''), rows, 'rules') if rows else ''


def signed_size(change: int) -> str:
  """A change of a size in bytes, with its sign.

  Example:
    >>> signed_size(-3 * 2**20)
    '-3 MiB'
  """
  return f'{"-" if change < 0 else "+"}{size_text(abs(change))}'


def _scatter(result: SearchResult) -> str:
  """A dot per estimate, larger on the Pareto front, and a line at the memory budget."""
  known = [one for one in result.estimates if one.cost and one.memory]
  fastest = min((mean_seconds(one) for one in known), default=0.0)
  shown = [one for one in known if mean_seconds(one) <= 4 * fastest and _peak(one) <= 2 * result.memory]
  if not shown:
    return ''
  slowest, largest = max(map(mean_seconds, shown)), max(result.memory, *map(_peak, shown))
  at = lambda one: (
    60 + _peak(one) / largest * _WIDTH,
    _HEIGHT - 20 - mean_seconds(one) / slowest * (_HEIGHT - 40),
  )
  limit = 60 + result.memory / largest * _WIDTH
  shapes = [f'<line x1="{limit:.1f}" x2="{limit:.1f}" y1="0" y2="{_HEIGHT - 20}" class="limit"/>']
  shapes += _dots(shown, result.pareto, at)
  shapes.append(
    f'<text x="60" y="{_HEIGHT}">x: memory per device, up to {size_text(largest)}; '
    f'y: time per step, up to {time_text(slowest)}</text>'
  )
  return svg(_WIDTH + 120, _HEIGHT + 10, shapes)


def _dots(shown: Sequence[Outcome], best: Sequence[Outcome], at) -> Iterable[str]:
  names = {one.name for one in best}
  for one in shown:
    left, top = at(one)
    radius, faint = (5, '') if one.name in names else (2, ' opacity="0.4"')
    text = f'{one.name}: {size_text(_peak(one))}, {time_text(mean_seconds(one))}'
    yield f'<circle cx="{left:.1f}" cy="{top:.1f}" r="{radius}"{faint}><title>{safe(text)}</title></circle>'


def _peak(outcome: Outcome) -> int:
  return outcome.memory.peak if outcome.memory else 0
