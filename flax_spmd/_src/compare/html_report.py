"""The page of a comparison: one HTML file that needs no server, no network and no device.

Tables sort by a click on a heading and filter by typing; pictures are SVG. Everything that comes from
the model or its compiler is escaped.
"""

from __future__ import annotations

import importlib.resources
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding

from flax_spmd._src.compare.costs import peak
from flax_spmd._src.compare.html import _bars, _bytes, _legend, safe, section, svg, table
from flax_spmd._src.compare.outcome import Memory, Outcome
from flax_spmd._src.draw.drawing import draw
from flax_spmd._src.pipeline.schedules.timeline import Timeline
from flax_spmd._src.plan.rows import Row
from flax_spmd._src.text import size_text, time_text

if TYPE_CHECKING:
  from flax_spmd._src.compare.comparison import Comparison

_DRAWN = 12  # arrays of each layout whose pieces are drawn
_DRAWINGS = 60_000  # characters of all drawings of a layout: those of many devices are large
_TASKS = 2000  # of a timeline at most
_LEAST = 2000  # collectives in the table at most, the largest of each layout


def page(comparison: Comparison, *, title: str = '', first: Sequence[str] = ()) -> str:
  """The page as text; `first` is what stands before the table of layouts."""
  style = importlib.resources.files('flax_spmd._src.compare').joinpath('report.css').read_text()
  script = importlib.resources.files('flax_spmd._src.compare').joinpath('report.js').read_text()
  title = title or f'Layouts on {comparison.target.text}'
  done = [outcome for outcome in comparison if outcome.memory is not None]
  body = [
    f'<h1>{safe(title)}</h1>',
    *_paragraphs(comparison),
    *first,
    _summary(comparison),
    *_failures(comparison),
    section('Memory of a device', _memory_bars(comparison, done)),
    section('Stages', ''.join(_timeline(o, comparison.target.chip.memory) for o in done)),
    section('Time of a step', _time_bars([o for o in done if o.cost])),
    section('Roofline', _roofline(comparison, [o for o in done if o.counts])),
    section('What is communicated', _collectives(done)),
    *(_arrays(outcome) for outcome in done),
  ]
  head = f'<meta charset="utf-8"><title>{safe(title)}</title><style>{style}</style>'
  parts = [
    '<!doctype html>',
    f'<html lang="en"><head>{head}</head><body>',
    *body,
    f'<script>{script}</script>',
  ]
  return '\n'.join([*parts, '</body></html>', ''])


def _paragraphs(comparison: Comparison) -> Iterable[str]:
  chip = comparison.target.chip
  yield (
    f'<p>{comparison.target.devices} devices, {size_text(chip.memory)} each. Figures are per device and per '
    f'step. Memory, FLOPs and bytes: <b>{safe(comparison.source)}</b>. Times: <b>estimated</b> from these and '
    f'from {safe(chip.source)}; at best everything overlaps, at worst nothing does.</p>'
  )
  if comparison.note:
    yield f'<p class="warning">{safe(comparison.note)}</p>'


# -- tables


def _summary(comparison: Comparison) -> str:
  titles = (
    'layout',
    'mesh',
    'fits',
    'memory',
    'state',
    'temporaries',
    'FLOPs',
    'on the wire',
    'at best',
    'at worst',
    'bound by',
    'from',
  )
  return section('Layouts', table(titles, map(_summary_row, comparison), 'layouts'))


def _summary_row(outcome: Outcome) -> list[Any]:
  mesh = ' x '.join(f'{axis} {size}' for axis, size in outcome.mesh.items())
  first = [outcome.name, mesh, 'yes' if outcome.fits else 'no']
  memory, counts, cost = outcome.memory, outcome.counts, outcome.cost
  if memory is None:
    return [*first, *[''] * 9]
  cells = [*first, _bytes(memory.peak), _bytes(memory.parameters + memory.optimizer + memory.rest)]
  if counts is None or cost is None:
    return [*cells, *[''] * 6, outcome.source]
  wire = sum(counts.by_axis().values())
  times = [(seconds, time_text(seconds)) for seconds in (cost.low, cost.high)]
  return [
    *cells,
    _bytes(memory.temporaries),
    (counts.flops, f'{counts.flops:.3g}'),
    _bytes(wire),
    *times,
    cost.bound,
    outcome.source,
  ]


def _failures(comparison: Comparison) -> Iterable[str]:
  for outcome in comparison:
    lines = [outcome.error] if outcome.error else []
    lines += [f'A rough estimate: {text}' for text in outcome.doubts]
    lines += [
      f'The compiler says: {text}' for text in (outcome.compiled.warnings if outcome.compiled else [])
    ]
    lines += outcome.program.findings if outcome.program else []
    if outcome.counts and outcome.counts.opaque:
      lines.append(
        'Not counted: ' + ', '.join(f'{name} x {times}' for name, times in outcome.counts.opaque)
      )
    if lines:
      items = ''.join(f'<li><pre>{safe(line)}</pre></li>' for line in lines)
      yield f'<section class="warning"><h3>{safe(outcome.name)}</h3><ul>{items}</ul></section>'


def _collectives(outcomes: Sequence[Outcome]) -> str:
  titles = ('layout', 'kind', 'axes', 'group', 'times', 'bytes each', 'on the wire', 'dtype', 'from')
  rows = [
    [
      outcome.name,
      one.kind,
      '+'.join(one.axes) or '?',
      (one.group, str(one.group)),
      (one.times, str(one.times)),
      _bytes(one.bytes),
      _bytes(one.wire),
      one.dtype,
      one.source or one.op,
    ]
    for outcome in outcomes
    for one in (outcome.counts.collectives if outcome.counts else ())[: _LEAST // max(1, len(outcomes))]
  ]
  return table(titles, rows, 'collectives') if rows else ''


def _arrays(outcome: Outcome) -> str:
  """The arrays of a layout's state, with drawings of the largest of each kind."""
  if outcome.program is None:
    return ''
  rows = outcome.program.rows
  titles = ('path', 'array', 'spec', 'on a device', 'copies')
  listed = table(titles, map(_array_row, rows), f'arrays of {outcome.name}')
  drawings = ''.join(_drawings(outcome, rows))
  rules = ''.join(f'<li><code>{safe(repr(rule))}</code></li>' for rule in outcome.layout.rules.clauses)
  return (
    f'<details><summary>The state under {safe(outcome.name)}: {len(rows)} arrays</summary>'
    f'<h3>Rules</h3><ol start="0">{rules}</ol>{listed}{drawings}</details>'
  )


def _array_row(row: Row) -> list[Any]:
  names = row.names or (None,) * len(row.shape)
  sizes = (f'{name}={size}' if name else str(size) for name, size in zip(names, row.shape, strict=False))
  array = f'{row.dtype}[{", ".join(sizes)}]'
  return [row.path, array, str(row.spec), _bytes(row.bytes_per_device), (row.copies, str(row.copies))]


def _to_draw(rows: Sequence[Row]) -> list[Row]:
  """The largest array of each shape and spec."""
  largest: dict[Any, Row] = {}
  for row in sorted(rows, key=lambda row: -row.bytes):
    largest.setdefault((row.shape, tuple(row.spec)), row)
  return [row for row in largest.values() if row.shape][:_DRAWN]


def _drawings(outcome: Outcome, rows: Sequence[Row]) -> Iterable[str]:
  """The first always, and others as long as there is room for them."""
  room = _DRAWINGS
  for number, row in enumerate(_to_draw(rows)):
    drawing = _drawing(outcome, row)
    room -= len(drawing)
    if number and room < 0:
      return
    yield drawing


def _drawing(outcome: Outcome, row: Row) -> str:
  mesh = outcome.program.layout.mesh if outcome.program else outcome.layout.mesh
  picture = draw(jax.ShapeDtypeStruct(row.shape, row.dtype), NamedSharding(mesh, row.spec))
  return f'<figure><figcaption>{safe(row.path)}</figcaption>{picture.svg}</figure>'


# -- pictures


def _memory_bars(comparison: Comparison, outcomes: Sequence[Outcome]) -> str:
  kinds = Memory._fields[:-1]
  rows = []
  for name, memory in (pair for outcome in outcomes for pair in _memories(outcome)):
    parts = [
      (kind, value, f'{kind}: {size_text(value)}') for kind, value in zip(kinds, memory, strict=False)
    ]
    rows.append((name, parts, size_text(memory.peak)))
  if not rows:
    return ''
  most = max(*(sum(part[1] for part in parts) for _, parts, _ in rows), 0.0)
  limit = comparison.target.chip.memory
  most = max(most, limit) if most > limit / 3 else most
  return _legend(kinds) + _bars(rows, most, limit)


def _memories(outcome: Outcome) -> Iterable[tuple[str, Memory]]:
  """What a device holds; of a pipeline, one of each rank."""
  if outcome.stages is None:
    return [(outcome.name, outcome.memory or Memory(0, 0, 0, 0, 0, 0))]
  return [(f'{outcome.name}, {rank}', one.memory) for rank, one in enumerate(outcome.stages.ranks)]


def _timeline(outcome: Outcome, limit: int) -> str:
  """A pipeline's ranks over time, if it is not too long to be looked at."""
  stages = outcome.stages
  if stages is None:
    return ''
  words = ''.join(f'<li>{safe(line)}</li>' for line in stages.lines(limit)[1:])
  long = sum(map(len, stages.low.runs)) > _TASKS
  picture = '' if long else f'<p>In milliseconds, if all overlaps:</p>{Timeline(stages.low).svg}'
  return f'<figure><figcaption>{safe(outcome.name)}</figcaption><ul>{words}</ul>{picture}</figure>'


def _time_bars(outcomes: Sequence[Outcome]) -> str:
  rows = []
  for outcome in outcomes:
    cost = outcome.cost
    if cost is None:
      continue
    links = sum(cost.links.values())
    parts = [
      (kind, seconds, f'{kind}: {time_text(seconds)}')
      for kind, seconds in (('compute', cost.compute), ('memory', cost.memory), ('links', links))
    ]
    rows.append((outcome.name, parts, f'{time_text(cost.low)} to {time_text(cost.high)}'))
  if not rows:
    return ''
  most = max(sum(part[1] for part in parts) for _, parts, _ in rows)
  return _legend(('compute', 'memory', 'links')) + _bars(rows, most, None)


def _roofline(comparison: Comparison, outcomes: Sequence[Outcome]) -> str:
  """FLOPs for each byte of HBM and for each byte on the wire, and what the chip can keep up with."""
  chip = comparison.target.chip
  dtypes = {outcome.program.dtype for outcome in outcomes if outcome.program} or {'bf16'}
  ridge = max(peak(chip, dtype) for dtype in dtypes) * chip.efficiency
  rows = [
    [
      outcome.name,
      _ratio(outcome.counts.flops, outcome.counts.hbm_bytes),
      _ratio(outcome.counts.flops, sum(outcome.counts.by_axis().values())),
    ]
    for outcome in outcomes
    if outcome.counts
  ]
  if not rows:
    return ''
  need = (
    f'{ridge / chip.bandwidth:.3g} FLOPs for a byte of HBM, {ridge / chip.link:.3g} for one on a link'
  )
  ratios = table(('layout', 'FLOPs / byte of HBM', 'FLOPs / byte on the wire'), rows, 'roofline')
  busy = f'With {" and ".join(sorted(dtypes))}, a {chip.name} is kept busy by {need}.'
  return f'<p>{safe(busy)}</p>{ratios}{_roof(comparison, outcomes, ridge)}'


def _ratio(flops: float, count: float) -> tuple[float, str]:
  return (flops / count, f'{flops / count:.3g}') if count else (float('inf'), '-')


def _roof(comparison: Comparison, outcomes: Sequence[Outcome], reachable: float) -> str:
  """Reachable FLOP/s over FLOPs per byte of HBM, both logarithmic, with a dot for each layout."""
  bandwidth = comparison.target.chip.bandwidth
  dots = [
    (outcome.name, math.log10(max(outcome.counts.flops / max(outcome.counts.hbm_bytes, 1), 1e-3)))
    for outcome in outcomes
    if outcome.counts
  ]
  ridge = math.log10(reachable / bandwidth)
  low, high = min(ridge, *(x for _, x in dots)) - 0.5, max(ridge, *(x for _, x in dots)) + 0.5
  wide, tall = 560, 220

  def at(x: float) -> tuple[float, float]:
    y = min(x, ridge) - ridge
    return 60 + (x - low) / (high - low) * wide, 30 - y * tall / max(ridge - low, 1e-9) * 0.8

  points = ' '.join(f'{x:.1f},{y:.1f}' for x, y in map(at, (low, ridge, high)))
  shapes = [f'<polyline points="{points}" class="roof"/>']
  for name, x in dots:
    left, top = at(x)
    shapes.append(f'<circle cx="{left:.1f}" cy="{top:.1f}" r="5"><title>{safe(name)}</title></circle>')
    shapes.append(f'<text x="{left + 8:.1f}" y="{top + 14:.1f}">{safe(name)}</text>')
  shapes.append(
    f'<text x="60" y="{tall + 20}">FLOPs per byte of HBM, logarithmic: 10^{low:.1f} to 10^{high:.1f}</text>'
  )
  return svg(wide + 200, tall + 30, shapes)
