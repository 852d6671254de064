"""HTML page of a search: the result, followed by a comparison of its outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from flax_spmd._src.compare import html_report as comparison_report
from flax_spmd._src.compare.chart_labels import free_place, size_unit, ticks
from flax_spmd._src.compare.html import safe, section, svg, table
from flax_spmd._src.compare.outcome import Outcome
from flax_spmd._src.search.trials import expected_seconds
from flax_spmd._src.text import size_text, time_text

if TYPE_CHECKING:
  from flax_spmd._src.search.result import RuleEffect, SearchResult

_LEFT, _TOP, _WIDTH, _HEIGHT = 80, 24, 640, 300  # pixels of the scatter plot


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
  """A dot per estimate, a number for each on the Pareto front, a line at the memory budget, and a list of the numbers.

  A budget of three times the largest estimate or more is left out.
  """
  known = [one for one in result.estimates if one.cost and one.memory]
  fastest = min((expected_seconds(one) for one in known), default=0.0)
  shown = [
    one for one in known if expected_seconds(one) <= 4 * fastest and _peak(one) <= 2 * result.memory
  ]
  if not shown:
    return ''
  largest = max(map(_peak, shown))
  far = result.memory > 3 * largest  # then the budget would press all dots to the left
  plane = _Plane(
    1.05 * largest if far else max(largest, result.memory), max(map(expected_seconds, shown))
  )
  names = {one.name for one in result.pareto}
  front = sorted((one for one in shown if one.name in names), key=_peak)
  others = [one for one in shown if one.name not in names]
  limit = plane.x(result.memory)
  line = f'<line x1="{limit:.1f}" x2="{limit:.1f}" y1="{_TOP}" y2="{_TOP + _HEIGHT}" class="limit"/>'
  shapes = [
    *plane.axes(),
    *([] if far else [line]),
    *(_dot(one, plane, 2, ' opacity="0.4"') for one in others),
    *(_dot(one, plane, 5) for one in front),
    *_numbers(front, plane),
  ]
  listed = ''.join(f'<li>{safe(_described(one))}</li>' for one in front)
  return svg(_LEFT + _WIDTH + 60, _TOP + _HEIGHT + 44, shapes) + f'<ol>{listed}</ol>'


class _Plane(NamedTuple):
  """The plane of memory (to the right) and time (upwards), from 0.

  Attributes:
    memory: bytes at the right end.
    seconds: seconds at the upper end.
  """

  memory: float
  seconds: float

  def x(self, memory: float) -> float:
    return _LEFT + memory / max(self.memory, 1) * _WIDTH

  def y(self, seconds: float) -> float:
    return _TOP + _HEIGHT - seconds / max(self.seconds, 1e-30) * _HEIGHT

  def axes(self) -> Iterable[str]:
    """Ticks with their values, and the titles of both axes."""
    low = _TOP + _HEIGHT
    for value in ticks(self.memory, size_unit(self.memory)):
      x = self.x(value)
      yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{low}" class="grid"/>'
      yield f'<text x="{x:.1f}" y="{low + 16}" text-anchor="middle">{size_text(value)}</text>'
    for value in ticks(self.seconds):
      y = self.y(value)
      yield f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
      text = time_text(value) if value else '0'
      yield f'<text x="{_LEFT - 6}" y="{y:.1f}" text-anchor="end" dominant-baseline="central">{text}</text>'
    yield f'<text x="{_LEFT + _WIDTH / 2}" y="{low + 36}" text-anchor="middle">memory per device</text>'
    yield f'<text x="{_LEFT}" y="14">time per step</text>'


def _dot(one: Outcome, plane: _Plane, radius: int, faint: str = '') -> str:
  left, top = plane.x(_peak(one)), plane.y(expected_seconds(one))
  title = f'<title>{safe(_described(one))}</title>'
  return f'<circle cx="{left:.1f}" cy="{top:.1f}" r="{radius}"{faint}>{title}</circle>'


def _numbers(front: Sequence[Outcome], plane: _Plane) -> Iterable[str]:
  """Numbers beside the dots, above each other where dots are close."""
  taken: list[tuple[float, float]] = []
  for number, one in enumerate(front, 1):
    left = plane.x(_peak(one)) + 7
    top = free_place(left, plane.y(expected_seconds(one)) - 5, f'{number}', taken, -14)
    yield f'<text x="{left:.1f}" y="{top:.1f}">{number}</text>'


def _described(one: Outcome) -> str:
  memory = one.memory.text(one.memory.peak) if one.memory else '?'
  return f'{one.name}: {memory}, {time_text(expected_seconds(one))}'


def _peak(outcome: Outcome) -> int:
  return outcome.memory.peak if outcome.memory else 0
