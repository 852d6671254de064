"""The page of a search: the answer, and below it the page of a comparison of what was compiled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from flax_spmd._src.compare import html_report as pages
from flax_spmd._src.compare.html import safe, section, svg, table
from flax_spmd._src.compare.outcome import Outcome
from flax_spmd._src.search.trials import seconds
from flax_spmd._src.text import size_text, time_text

if TYPE_CHECKING:
  from flax_spmd._src.search.result import Found

_WIDE, _TALL = 640, 300


def page(found: Found) -> str:
  """The page as text."""
  first = [
    f'<p>{safe(found.title)}</p>',
    *(f'<p class="warning">{safe(note)}</p>' for note in found.notes),
    section('The layout', f'<pre>{safe(found.toml)}</pre>'),
    section('What each rule buys', _buys(found)),
    section('Time against memory', _cloud(found)),
  ]
  return pages.page(found.comparison, title=f'Search for {found.target.text}', first=first)


def _buys(found: Found) -> str:
  rows = [
    [
      repr(buy.rule),
      (buy.memory, f'{"-" if buy.memory < 0 else "+"}{size_text(abs(buy.memory))}'),
      (buy.time, f'{100 * buy.time:+.3g} %'),
      buy.error or '',
    ]
    for buy in found.buys
  ]
  return table(('without', 'memory', 'time', ''), rows, 'rules') if rows else ''


def _cloud(found: Found) -> str:
  """A dot for each estimate, larger ones for those that nothing beats, and the budget."""
  known = [one for one in found.estimates if one.cost and one.memory]
  fastest = min((seconds(one) for one in known), default=0.0)
  shown = [one for one in known if seconds(one) <= 4 * fastest and _peak(one) <= 2 * found.memory]
  if not shown:
    return ''
  slowest, most = max(map(seconds, shown)), max(found.memory, *map(_peak, shown))
  at = lambda one: (60 + _peak(one) / most * _WIDE, _TALL - 20 - seconds(one) / slowest * (_TALL - 40))
  limit = 60 + found.memory / most * _WIDE
  shapes = [f'<line x1="{limit:.1f}" x2="{limit:.1f}" y1="0" y2="{_TALL - 20}" class="limit"/>']
  shapes += _dots(shown, found.pareto, at)
  shapes.append(
    f'<text x="60" y="{_TALL}">memory of a device, to {size_text(most)}; up: time of a step, to '
    f'{time_text(slowest)}</text>'
  )
  return svg(_WIDE + 120, _TALL + 10, shapes)


def _dots(shown: Sequence[Outcome], best: Sequence[Outcome], at) -> Iterable[str]:
  names = {one.name for one in best}
  for one in shown:
    left, top = at(one)
    radius, faint = (5, '') if one.name in names else (2, ' opacity="0.4"')
    told = f'{one.name}: {size_text(_peak(one))}, {time_text(seconds(one))}'
    yield f'<circle cx="{left:.1f}" cy="{top:.1f}" r="{radius}"{faint}><title>{safe(told)}</title></circle>'


def _peak(outcome: Outcome) -> int:
  return outcome.memory.peak if outcome.memory else 0
