"""Comparison: the outcomes of several layouts as a table, JSON or HTML, and their differences."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flax_spmd._src.compare.costs import Cost, coverage, slow_loops
from flax_spmd._src.compare.hardware import Target
from flax_spmd._src.compare.html_report import page
from flax_spmd._src.compare.outcome import Memory, Outcome, collective_text, record
from flax_spmd._src.hlo.counts import Collective, Counts
from flax_spmd._src.notebook_html import (
  collapsed,
  collapsed_page,
  plain_table,
  preformatted,
  safe,
  written_page,
)
from flax_spmd._src.public import public
from flax_spmd._src.text import size_text, time_text, value_text
from flax_spmd._src.text_table import plain_text
from flax_spmd.errors import TargetDeviceError, did_you_mean

if TYPE_CHECKING:
  from rich.console import RenderableType

_SHOWN = 3  # lines of each kind per layout
_PROXY = 'The CPU compiler is a poor proxy: it has no reduce-scatter, sends bf16 as f32, and allocates memory differently.'


@public('flax_spmd.explore')
class Comparison:
  """The outcomes of several layouts on a target; printing it shows a table.

  Attributes:
    target: the hardware.
    outcomes: outcome of each layout, in the order of the call.

  Example:
    >>> from flax_spmd.explore import Estimator
    >>> from flax_spmd.explore import Comparison, parse_target
    >>> create = lambda: {'w': LogicallyPartitioned(jnp.ones((64, 256)), ('embed', 'mlp'))}
    >>> step = lambda state, x: (state, jnp.sum(x @ state['w'].unbox()))
    >>> train_step = explore.TrainStep(step, create, jax.ShapeDtypeStruct((32, 64), jnp.float32))
    >>> estimator = Estimator(train_step)
    >>> data = Layout(abstract_mesh({'data': 8}), (('batch', 'data'),))
    >>> tensor = Layout(abstract_mesh({'model': 8}), (('mlp', 'model'),))
    >>> target = parse_target('h100:8')
    >>> comparison = Comparison(target, [  # of estimates; `compare` returns a comparison of compiled steps
    ...   estimator.estimate(data, target, partition=False)._replace(name='data'),
    ...   estimator.estimate(tensor, target, partition=False)._replace(name='tensor'),
    ... ])
    >>> [outcome.name for outcome in comparison], comparison.source
    (['data', 'tensor'], 'estimated')
    >>> comparison.diff('data', 'tensor')[0]
    'tensor needs 49 KiB less: memory on a device'
  """

  def __init__(self, target: Target, outcomes: list[Outcome]):
    self.target = target
    source = f'compiled:{target.chip.name}'
    self.outcomes = [
      outcome._replace(source=outcome.source or source) if outcome.counts else outcome
      for outcome in outcomes
    ]

  def __getitem__(self, name: str) -> Outcome:
    names = [outcome.name for outcome in self.outcomes]
    if name not in names:
      raise TargetDeviceError(
        f'The comparison has no layout {value_text(name)}.{did_you_mean(name, names)}\n'
        f'Fix: use one of {", ".join(names)}.'
      )
    return self.outcomes[names.index(name)]

  def __iter__(self) -> Iterator[Outcome]:
    return iter(self.outcomes)

  @property
  def source(self) -> str:
    """The origin of the figures, such as `compiled:h100`; all origins if layouts differ."""
    sources = dict.fromkeys(outcome.source for outcome in self.outcomes if outcome.source)
    return ', '.join(sources) or f'compiled:{self.target.chip.name}'

  @property
  def note(self) -> str:
    """A caveat about the figures of this target's compiler, or ''."""
    return _PROXY if self.target.chip.platform == 'cpu' else ''

  @property
  def best(self) -> Outcome | None:
    """The fastest layout that fits, by its expected time; None if none fits."""
    return min(
      (o for o in self.outcomes if o.fits and o.cost), key=lambda o: _expected(o.cost), default=None
    )

  def diff(self, one: str, other: str) -> list[str]:
    """The differences of a layout from another one: memory, bytes on the wire in descending order, FLOPs.

    Args:
      one: name of the layout to start from.
      other: name of the layout whose differences are listed.

    Returns:
      Lines such as `tensor moves 3.1 GiB less over data: no all-gather (model.py:31)`.
    """
    a, b = self[one], self[other]
    if a.counts is None or b.counts is None or a.memory is None or b.memory is None:
      return [f'{outcome.name}: {outcome.error}' for outcome in (a, b) if outcome.error]
    lines = [_difference(other, a.memory.peak, b.memory.peak, 'memory on a device')]
    lines += [
      _difference(other, x, y, field)
      for field, x, y in zip(Memory._fields, a.memory, b.memory, strict=True)
      if field != 'peak'
    ]
    lines += _wire_differences(other, a.counts, b.counts)
    if a.counts.flops != b.counts.flops:
      lines.append(f'{other} computes {b.counts.flops / max(a.counts.flops, 1):.3g} times the FLOPs')
    return [line for line in lines if line]

  def record(self) -> dict[str, Any]:
    """The comparison as JSON values."""
    return {
      'target': self.target.text,
      'source': self.source,
      'chip': self.target.chip._asdict(),
      'layouts': [record(outcome) for outcome in self.outcomes],
    }

  def to_json(self) -> str:
    """The comparison as JSON text, with bytes and seconds per device and step."""
    return json.dumps(self.record(), indent=2)

  def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
    """A self-contained HTML report with tables and charts.

    Args:
      path: file to write; None: only the text is returned.
    """
    return written_page(page(self), path)

  def __repr__(self) -> str:
    names = ', '.join(outcome.name for outcome in self.outcomes)
    return f'<comparison of {names} on {self.target.text}>'

  def _repr_html_(self) -> str:
    cells = [tuple(map(safe, self._cells(outcome))) for outcome in self.outcomes]
    rows = [(*row, *[''] * (len(_TITLES) - len(row))) for row in cells]
    details = preformatted('\n'.join(self._details()))
    return (
      f'<p>{safe(self._title())}</p>{plain_table(_TITLES, rows)}{collapsed("collectives and findings", details)}'
      f'{collapsed_page("report", page(self))}'
    )

  def __rich__(self) -> RenderableType:
    from rich.console import Group

    notes = filter(None, [self.note, coverage(self.target.chip)])
    return Group(self._title(), self._table(), *self._details(), *notes)

  def _title(self) -> str:
    chip = self.target.chip
    return (
      f'{self.target.text}: {self.target.devices} devices with {size_text(chip.memory)} each; figures per '
      f'device and step; memory, FLOPs and bytes {self.source}, times estimated.'
    )

  def _table(self) -> RenderableType:
    from rich.table import Table

    several = ['from'] if ', ' in self.source else []  # a single source is in the title
    table = Table(box=None, header_style='bold')
    for title in (*_TITLES, *several):
      table.add_column(title, overflow='fold')
    for outcome in self.outcomes:
      table.add_row(*self._cells(outcome), *([outcome.source] if several else []))
    return table

  def _cells(self, outcome: Outcome) -> list[str]:
    memory, counts, cost = outcome.memory, outcome.counts, outcome.cost
    if memory is None:
      return [outcome.name, 'no', '', '', '', '', '', '', 'not compiled, see below']
    over = memory.peak - self.target.chip.memory
    fits = 'yes' if outcome.fits else f'no, {size_text(over)} over' if over > 0 else 'no'
    state = memory.text(memory.parameters + memory.optimizer + memory.rest)
    cells = [outcome.name, fits, size_text(memory.peak), state]
    if counts is None or cost is None:
      return [*cells, '', '', '', '', 'not compiled, see below']
    wires = [f'{"+".join(axes) or "?"} {size_text(wire)}' for axes, wire in counts.by_axis().items()]
    return [
      *cells,
      size_text(memory.temporaries),
      f'{counts.flops:.3g}',
      ', '.join(wires) or '-',
      f'{time_text(cost.low)} to {time_text(cost.high)}',
      cost.bound,
    ]

  def _details(self) -> Iterator[str]:
    """Below the table, per layout: the largest collectives, arrays if it does not fit, errors, warnings and findings."""
    for outcome in self.outcomes:
      lines = [
        f'  {collective_text(one)}'
        for one in (outcome.counts.collectives if outcome.counts else ())[:_SHOWN]
      ]
      if outcome.counts and outcome.cost:
        lines += [f'  {line}' for line in slow_loops(outcome.counts, outcome.cost, self.target.chip)]
      if not outcome.fits:
        lines += [f'  in memory at the peak: {one}' for one in outcome.live[:_SHOWN]]
      if outcome.error:
        lines += [f'  {line}' for line in outcome.error.splitlines()[:6]]
      if outcome.pipeline:
        lines += [f'  {line}' for line in outcome.pipeline.lines(self.target.chip.memory)]
      lines += [f'  a rough estimate: {text}' for text in outcome.doubts[:_SHOWN]]
      if outcome.compiled:
        lines += [f'  compiler warning: {text}' for text in outcome.compiled.warnings[:_SHOWN]]
      if outcome.counts and outcome.counts.opaque:
        lines.append(
          f'  not counted: {", ".join(f"{name} x {times}" for name, times in outcome.counts.opaque)}'
        )
      if outcome.program:
        lines += [f'  {finding}' for finding in outcome.program.findings[:_SHOWN]]
      if lines:
        yield '\n'.join([f'{outcome.name}:', *lines])

  def __str__(self) -> str:
    return plain_text(self, 180)


def _expected(cost: Cost | None) -> float:
  return cost.expected if cost else float('inf')


def _difference(name: str, one: float, other: float, part: str) -> str:
  """`tensor needs 3 GiB less: parameters`, or '' if it is at most 1%."""
  if abs(other - one) <= 0.01 * max(abs(one), abs(other)):
    return ''
  return f'{name} needs {size_text(abs(other - one))} {"less" if other < one else "more"}: {part}'


def _wire_differences(name: str, one: Counts, other: Counts) -> list[str]:
  """The differences in bytes on the wire by kind and axes, with the line of the largest collective."""
  groups: dict[tuple[str, tuple[str, ...]], list[float]] = {}
  largest: dict[tuple[str, tuple[str, ...]], Collective] = {}
  for side, counts in enumerate((one, other)):
    for collective in counts.collectives:
      key = collective.kind, collective.axes
      groups.setdefault(key, [0.0, 0.0])[side] += collective.wire
      if key not in largest or collective.wire > largest[key].wire:
        largest[key] = collective
  changes = sorted(groups.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
  return [
    f'{name} moves {size_text(abs(after - before))} {"less" if after < before else "more"} over '
    f'{"+".join(axes) or "?"}: {_change(kind, before, after)} ({largest[kind, axes].source or largest[kind, axes].op})'
    for (kind, axes), (before, after) in changes
    if abs(after - before) > 0.01 * max(before, after)
  ]


def _change(kind: str, before: float, after: float) -> str:
  if not after:
    return f'no {kind}'
  return f'{kind}, {size_text(after)} instead of {size_text(before)}' if before else f'{kind}'


_TITLES = (
  'layout',
  'fits',
  'memory',
  'state',
  'temporaries',
  'FLOPs',
  'on the wire',
  'time',
  'bound by',
)
