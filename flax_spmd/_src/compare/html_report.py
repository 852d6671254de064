"""HTML report of a comparison: a self-contained file without external resources.

Tables can be sorted and filtered; charts are SVG. All text from the model or its compiler is escaped.
"""

from __future__ import annotations

import importlib.resources
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding

from flax_spmd._src.compare.chart_labels import free_place
from flax_spmd._src.compare.costs import coverage, peak, slow_loops
from flax_spmd._src.compare.html import bars, byte_cell, legend, safe, section, svg, table
from flax_spmd._src.compare.outcome import Memory, Outcome
from flax_spmd._src.draw.drawing import draw
from flax_spmd._src.pipeline.schedules.timeline import Timeline
from flax_spmd._src.plan.folding import FoldedRow, fold_rows
from flax_spmd._src.plan.rows import Row
from flax_spmd._src.text import size_text, time_text

if TYPE_CHECKING:
  from flax_spmd._src.compare.comparison import Comparison

_MAX_DRAWINGS = 12  # arrays of each layout whose shards are drawn
_MAX_DRAWING_SIZE = 60_000  # characters of SVG per layout; drawings of many devices are large
_MAX_TASKS = 2000  # tasks in a timeline
_MAX_LIVE = 30  # temporary arrays of each layout
_MAX_COLLECTIVES = 2000  # rows in the table of collectives, the largest of each layout


def page(comparison: Comparison, *, title: str = '', first: Sequence[str] = ()) -> str:
  """The report as HTML text.

  Args:
    comparison: the comparison.
    title: heading of the page.
    first: HTML elements before the table of layouts.
  """
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
    section('Collectives', _collectives(done)),
    section('Temporary arrays at the peak', _live(done)),
    *(_arrays(outcome) for outcome in done),
  ]
  head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{safe(title)}</title><style>{style}</style>'
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
    f'from {safe(chip.source)}. {safe(coverage(chip))}</p>'
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
  state = memory.parameters + memory.optimizer + memory.rest
  cells = [*first, byte_cell(memory.peak), (state, memory.text(state))]
  if counts is None or cost is None:
    return [*cells, *[''] * 6, outcome.source]
  wire = sum(counts.by_axis().values())
  times = [(seconds, time_text(seconds)) for seconds in (cost.low, cost.high)]
  return [
    *cells,
    byte_cell(memory.temporaries),
    (counts.flops, f'{counts.flops:.3g}'),
    byte_cell(wire),
    *times,
    cost.bound,
    outcome.source,
  ]


def _failures(comparison: Comparison) -> Iterable[str]:
  for outcome in comparison:
    lines = [outcome.error] if outcome.error else []
    lines += [f'A rough estimate: {text}' for text in outcome.doubts]
    if outcome.counts and outcome.cost:
      lines += slow_loops(outcome.counts, outcome.cost, comparison.target.chip)
    lines += [
      f'Compiler warning: {text}' for text in (outcome.compiled.warnings if outcome.compiled else [])
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
      byte_cell(one.bytes),
      byte_cell(one.wire),
      one.dtype,
      one.source or one.op,
    ]
    for outcome in outcomes
    for one in (outcome.counts.collectives if outcome.counts else ())[
      : _MAX_COLLECTIVES // max(1, len(outcomes))
    ]
  ]
  return table(titles, rows, 'collectives') if rows else ''


def _live(outcomes: Sequence[Outcome]) -> str:
  rows = [
    [
      outcome.name,
      one.array,
      (one.number, str(one.number)),
      byte_cell(one.bytes),
      one.source or one.op,
    ]
    for outcome in outcomes
    for one in outcome.live[:_MAX_LIVE]
  ]
  titles = ('layout', 'array on a device', 'number', 'bytes', 'from')
  return table(titles, rows, 'temporary arrays') if rows else ''


def _arrays(outcome: Outcome) -> str:
  """The arrays of a layout's state, with drawings of the largest ones."""
  if outcome.program is None:
    return ''
  rows = outcome.program.rows
  titles = ('path', 'array', 'spec', 'on a device', 'copies')
  listed = table(titles, map(_array_row, fold_rows(rows)), f'arrays of {outcome.name}')
  drawings = ''.join(_drawings(outcome, rows))
  rules = ''.join(f'<li><code>{safe(repr(rule))}</code></li>' for rule in outcome.layout.rules.clauses)
  return (
    f'<details><summary>The state under {safe(outcome.name)}: {len(rows)} arrays</summary>'
    f'<h3>Rules</h3><ol start="0">{rules}</ol>{listed}{drawings}</details>'
  )


def _array_row(fold: FoldedRow) -> list[Any]:
  row = fold.row
  names = row.names or (None,) * len(row.shape)
  sizes = (f'{name}={size}' if name else str(size) for name, size in zip(names, row.shape, strict=False))
  array = f'{f"{fold.count} x " if fold.count > 1 else ""}{row.dtype}[{", ".join(sizes)}]'
  per_device, copies = byte_cell(fold.bytes_per_device), (row.copies, str(row.copies))
  return [fold.name, array, str(row.spec), per_device, copies]


def _to_draw(rows: Sequence[Row]) -> list[Row]:
  """The largest array of each shape and spec."""
  largest: dict[Any, Row] = {}
  for row in sorted(rows, key=lambda row: -row.bytes):
    largest.setdefault((row.shape, tuple(row.spec)), row)
  return [row for row in largest.values() if row.shape][:_MAX_DRAWINGS]


def _drawings(outcome: Outcome, rows: Sequence[Row]) -> Iterable[str]:
  """Drawings up to the size limit, but at least one."""
  room = _MAX_DRAWING_SIZE
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
  kinds = Memory._fields[: Memory._fields.index('peak')]  # the parts of the peak
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
  return legend(kinds) + bars(rows, most, limit)


def _memories(outcome: Outcome) -> Iterable[tuple[str, Memory]]:
  """Name and memory of each bar: one per layout, or one per rank of a pipeline."""
  if outcome.pipeline is None:
    return [(outcome.name, outcome.memory or Memory(0, 0, 0, 0, 0, 0))]
  return [(f'{outcome.name}, {rank}', one.memory) for rank, one in enumerate(outcome.pipeline.ranks)]


def _timeline(outcome: Outcome, limit: int) -> str:
  """The ranks of a pipeline, with a timeline unless it has too many tasks."""
  pipeline = outcome.pipeline
  if pipeline is None:
    return ''
  items = ''.join(f'<li>{safe(line)}</li>' for line in pipeline.lines(limit)[1:])
  long = sum(map(len, pipeline.low.steps)) > _MAX_TASKS
  picture = (
    '' if long else f'<p>In milliseconds, if everything overlaps:</p>{Timeline(pipeline.low).svg}'
  )
  return f'<figure><figcaption>{safe(outcome.name)}</figcaption><ul>{items}</ul>{picture}</figure>'


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
  return legend(('compute', 'memory', 'links')) + bars(rows, most, None)


def _roofline(comparison: Comparison, outcomes: Sequence[Outcome]) -> str:
  """FLOPs per byte of HBM traffic and per byte on the wire, compared with the chip's ratios."""
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
    f'{ridge / chip.bandwidth:.3g} FLOPs per byte of HBM and {ridge / chip.link:.3g} per byte on a link'
  )
  ratios = table(('layout', 'FLOPs / byte of HBM', 'FLOPs / byte on the wire'), rows, 'roofline')
  bound = f'In {" and ".join(sorted(dtypes))}, a step on {chip.name} is compute-bound above {need}.'
  return f'<p>{safe(bound)}</p>{ratios}{_roof(comparison, outcomes, ridge)}'


def _ratio(flops: float, count: float) -> tuple[float, str]:
  return (flops / count, f'{flops / count:.3g}') if count else (float('inf'), '-')


def _powers(low: float, high: float, at: Callable[[float], float], bottom: float) -> Iterable[str]:
  """Grid lines of a logarithmic axis at the powers of ten, their values, and the title of the axis."""
  for power in range(math.ceil(low), math.floor(high) + 1):
    x = at(power)
    yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="14" y2="{bottom:.1f}" class="grid"/>'
    yield f'<text x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{10.0**power:,.16g}</text>'
  yield f'<text x="{at((low + high) / 2):.1f}" y="{bottom + 36:.1f}" text-anchor="middle">FLOPs per byte of HBM</text>'


def _roof(comparison: Comparison, outcomes: Sequence[Outcome], reachable: float) -> str:
  """Reachable FLOP/s over FLOPs per byte of HBM, both logarithmic, with a dot per layout."""
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
  shapes = [
    *_powers(low, high, lambda x: at(x)[0], tall + 4),
    f'<polyline points="{points}" class="roof"/>',
  ]
  taken: list[tuple[float, float]] = []
  for number, (name, x) in enumerate(dots, 1):
    left, top = at(x)
    shapes.append(f'<circle cx="{left:.1f}" cy="{top:.1f}" r="5"><title>{safe(name)}</title></circle>')
    height = free_place(left + 4, top + 18, f'{number}', taken, 14)
    shapes.append(f'<text x="{left + 4:.1f}" y="{height:.1f}">{number}</text>')
  listed = ''.join(f'<li>{safe(name)}</li>' for name, _ in dots)
  return f'{svg(wide + 100, tall + 50, shapes)}<ol>{listed}</ol>'
