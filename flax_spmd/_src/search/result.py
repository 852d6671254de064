"""Found: the answer of a search, which is a layout ready to use, and why it is that one.

    found = spmd.search(train_step, create_state, batch, 'h100:64')
    print(found)                     # the winner, what its rules buy, runners-up, the Pareto front
    found.to_toml('layout.toml')

As JSON and as a page too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flax_spmd._src.compare.comparison import Comparison
from flax_spmd._src.compare.hardware import Target
from flax_spmd._src.compare.outcome import Outcome, record
from flax_spmd._src.layout import Layout
from flax_spmd._src.pipeline.schedules.schedule import Schedule
from flax_spmd._src.public_module import set_module
from flax_spmd._src.search.html_report import page
from flax_spmd._src.search.trials import seconds
from flax_spmd._src.text import size_text, time_text

if TYPE_CHECKING:
  from rich.console import RenderableType


@set_module('flax_spmd.explore')
class Buy(NamedTuple):
  """What a rule of the winner is good for: what is estimated without it.

  Attributes:
    rule: the clause.
    memory: bytes more on a device (or fewer, if negative).
    time: the share by which a step is longer: 0.04 is 4 %.
    error: why the layout does not work without it, or None.

  Example:
    >>> print(Buy(('mlp', 'model'), 3 * 2**30, 0.04))
    without ('mlp', 'model'): +3 GiB, +4 %
  """

  rule: Any
  memory: int
  time: float
  error: str | None = None

  def __str__(self) -> str:
    if self.error:
      return f'without {self.rule!r}: {self.error.splitlines()[0]}'
    sign = '-' if self.memory < 0 else '+'
    return f'without {self.rule!r}: {sign}{size_text(abs(self.memory))}, {100 * self.time:+.3g} %'


@set_module('flax_spmd.explore')
class Found:
  """What a search found; printing it shows it.

  Attributes:
    target: the hardware.
    memory: bytes that a device may need.
    best: the outcome of the winner.
    choices: the arguments of the step that the winner goes with.
    schedule: if the winner is a pipeline, its schedule, for `layout.pipeline_jit`; else None.
    outcomes: of everything that was compiled, the best first; if nothing was, of the best estimates.
    estimates: of everything that was estimated.
    presets: which outcomes are those of a preset: its name, by the outcome's.
    pareto: the estimates that fit, and are not beaten in both time and memory; the fastest first.
    buys: what each rule of the winner is good for.
    notes: what has to be said of the search: that it was interrupted, or had to do without estimates.

  Example:
    >>> create = lambda: {'w': LogicallyPartitioned(jnp.ones((64, 256)), ('embed', 'mlp'))}
    >>> step = lambda state, x: (state, jnp.sum(x @ state['w'].unbox()))
    >>> batch = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    >>> found = search(step, create, batch, 'cpu:8', candidates=20, top=0, pin={'batch': 'data'})

    >>> found.layout.mesh.size, found.best.fits
    (8, True)
    >>> found.to_toml(tmp / 'layout.toml')
    >>> Layout.from_toml((tmp / 'layout.toml').read_text()).rules == found.layout.rules
    True
  """

  def __init__(
    self,
    target: Target,
    memory: int,
    outcomes: Sequence[Outcome],
    estimates: Sequence[Outcome],
    choices: dict[str, Any],
    presets: dict[str, str],
    buys: Sequence[Buy],
    notes: Sequence[str],
    schedule: Schedule | None = None,
  ):
    self.target, self.memory, self.choices, self.presets = target, memory, choices, presets
    self.outcomes, self.estimates = list(outcomes), list(estimates)
    self.buys, self.notes, self.schedule = list(buys), list(notes), schedule
    self.best = self.outcomes[0]
    self.pareto = front([one for one in self.estimates if one.memory and one.memory.peak <= memory])

  @property
  def layout(self) -> Layout:
    """The best layout, on an abstract mesh; its TOML makes a real one."""
    return self.best.layout

  @property
  def comparison(self) -> Comparison:
    """The outcomes side by side."""
    return Comparison(self.target, self.outcomes)

  @property
  def toml(self) -> str:
    """The best layout as text, with a comment that says where it is from."""
    cost, memory = self.best.cost, self.best.memory
    times = f'{time_text(cost.low)} to {time_text(cost.high)}' if cost else '?'
    lines = [
      f'# found by flax_spmd.search for {self.target.text}, of {len(self.estimates)} candidates',
      f'# {self.best.source}: {size_text(memory.peak) if memory else "?"} on a device, {times} a step',
      *(f'# the step is called with {name}={value!r}' for name, value in self.choices.items()),
    ]
    if self.schedule is not None:
      stages = self.schedule.stages
      lines.append(f'# a pipeline: layout.pipeline_jit(step, schedule={self.schedule}, stages={stages})')
    return '\n'.join([*lines, self.layout.to_toml()])

  def to_toml(self, path: str | os.PathLike[str]) -> None:
    """Writes the best layout; `Layout.from_toml` reads it."""
    Path(path).write_text(self.toml, encoding='utf-8')

  def record(self) -> dict[str, Any]:
    """All of it, as JSON has it; of estimates, memory and time only."""
    return {
      'target': self.target.text,
      'memory': self.memory,
      'layout': self.layout.to_toml(),
      'choices': self.choices,
      'schedule': None if self.schedule is None else str(self.schedule),
      'best': self.best.name,
      'outcomes': [record(one) | {'preset': self.presets.get(one.name)} for one in self.outcomes],
      'buys': [one._asdict() | {'rule': repr(one.rule)} for one in self.buys],
      'pareto': [one.name for one in self.pareto],
      'estimates': [
        {
          'name': one.name,
          'memory': one.memory and one.memory.peak,
          'seconds': one.cost and [one.cost.low, one.cost.high],
          'doubts': list(one.doubts),
          'error': one.error,
        }
        for one in self.estimates
      ],
      'notes': self.notes,
    }

  def to_json(self) -> str:
    """All of it as JSON, with bytes and seconds per device and step."""
    return json.dumps(self.record(), indent=2, default=repr)

  def to_html(self, path: str | os.PathLike[str]) -> None:
    """Writes a page with the answer, and everything that `compare` shows of what was compiled."""
    Path(path).write_text(page(self), encoding='utf-8')

  def __rich__(self) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    return Group(*(part if not isinstance(part, str) else Text(part) for part in self._parts()))

  def _parts(self) -> Iterator[Any]:
    yield self.title
    yield from self.notes
    yield ''
    yield self.toml
    if self.best.stages:
      yield '\n'.join([*self.best.stages.lines(self.memory), ''])
    if self.buys:
      yield '\n'.join(['What each rule buys, estimated:', *(f'  {buy}' for buy in self.buys), ''])
    yield self._table('Layouts, the best first', self.outcomes)
    yield ''
    yield self._table('Time against memory, estimated', self.pareto)

  @property
  def title(self) -> str:
    """What was searched, in a sentence."""
    return (
      f'{self.target.text}: of {len(self.estimates)} candidates, the best that needs at most '
      f'{size_text(self.memory)} on a device.'
    )

  def _table(self, title: str, outcomes: Sequence[Outcome]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, header_style='bold', title=title, title_justify='left')
    for column in ('memory', 'time', 'from', 'layout'):
      table.add_column(column, overflow='fold')
    for one in outcomes:
      preset = self.presets.get(one.name)
      name = f'{one.name} (preset {preset})' if preset else one.name
      table.add_row(*figures(one), one.source + (', rough' if one.doubts else ''), name)
    return table

  def __str__(self) -> str:
    from rich.console import Console

    console = Console(width=160, color_system=None, force_terminal=False)
    with console.capture() as captured:
      console.print(self, markup=False, highlight=False)
    return '\n'.join(line.rstrip() for line in captured.get().splitlines())


def figures(outcome: Outcome) -> tuple[str, str]:
  """Memory and time, as text."""
  if outcome.memory is None or outcome.cost is None:
    return '', 'not compiled'
  return (
    size_text(outcome.memory.peak),
    f'{time_text(outcome.cost.low)} to {time_text(outcome.cost.high)}',
  )


def front(outcomes: Sequence[Outcome]) -> list[Outcome]:
  """Those that no other one beats in both time and memory, the fastest first."""
  found: list[Outcome] = []
  peak = lambda one: one.memory.peak if one.memory else 0
  for one in sorted((one for one in outcomes if one.cost), key=lambda one: (seconds(one), peak(one))):
    if not found or peak(one) < peak(found[-1]):
      found.append(one)
  return found
