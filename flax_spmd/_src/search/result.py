"""Search results: the best layout of a search, and the outcomes that it was chosen from.

    result = spmd.search(train_step, 'h100:64')
    print(result)                     # the winner, the effects of its rules, runners-up, the Pareto front
    result.to_toml('layout.toml')

A result can also be written as JSON, or as an HTML page.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flax_spmd._src.compare.comparison import Comparison
from flax_spmd._src.compare.costs import coverage
from flax_spmd._src.compare.hardware import Target
from flax_spmd._src.compare.outcome import ESTIMATED, PARTITIONED, Outcome, record
from flax_spmd._src.layout import Layout
from flax_spmd._src.notebook_html import collapsed_page, preformatted, written_page
from flax_spmd._src.pipeline.schedules.schedule import Schedule
from flax_spmd._src.plan.findings import NO_RULE
from flax_spmd._src.public import public
from flax_spmd._src.search.estimate_check import EstimateCheck
from flax_spmd._src.search.html_report import page, signed_size
from flax_spmd._src.search.trials import expected_seconds
from flax_spmd._src.text import size_text, time_text
from flax_spmd._src.text_table import plain_text

if TYPE_CHECKING:
  from rich.console import RenderableType

# The median error of a published step's time that is predicted by another of its model and chip. A smaller difference of
# two times is none.
NOISE = 0.02
_UNCHECKED = 'Unchecked: no estimate was compared with a compiled program.'


@public('flax_spmd.explore')
class RuleEffect(NamedTuple):
  """The effect of a rule: the estimated change when it is removed from the best layout.

  Attributes:
    rule: the removed clause.
    memory: change of the peak memory of a device, in bytes.
    time: relative change of the step time; 0.04 is 4 %.
    error: why the layout fails without the rule, or None.

  Example:
    >>> print(explore.RuleEffect(('mlp', 'model'), 3 * 2**30, 0.04))
    without ('mlp', 'model'): +3 GiB, +4 %
  """

  rule: Any
  memory: int
  time: float
  error: str | None = None

  def __str__(self) -> str:
    if self.error:
      return f'without {self.rule!r}: {self.error.splitlines()[0]}'
    return f'without {self.rule!r}: {signed_size(self.memory)}, {100 * self.time:+.3g} %'


@public('flax_spmd.explore')
class SearchResult:
  """The result of a search; printing it shows the best layout and its alternatives.

  Attributes:
    target: the hardware.
    memory: bytes available to the step on each device.
    best: outcome of the best layout.
    choices: arguments of the step under which the best layout was found.
    schedule: schedule of the best layout if it is a pipeline, for `layout.pipeline_jit`; else None.
    outcomes: compiled outcomes, best first; the best estimates if nothing was compiled.
    estimates: every estimated outcome.
    ties: names of the outcomes that are as fast as the best one, within 2 %; the best one is not among them.
    presets: name of the preset, by the names of outcomes that are presets.
    pareto: estimates that fit and that no other estimate beats in both time and memory, fastest first.
    effects: effect of each rule of the best layout.
    notes: remarks on the search, such as an interruption.
    check: the estimates beside compiled layouts, by which they are corrected; None if nothing was compiled.

  Example:
    >>> create = lambda: {'w': LogicallyPartitioned(jnp.ones((64, 256)), ('embed', 'mlp'))}
    >>> step = lambda state, x: (state, jnp.sum(x @ state['w'].unbox()))
    >>> train_step = explore.TrainStep(step, create, jax.ShapeDtypeStruct((32, 64), jnp.float32))
    >>> result = search(train_step, 'cpu:8', candidates=20, top=0, pin={'batch': 'data'})

    >>> result.layout.mesh.size, result.best.fits
    (8, True)
    >>> result.to_toml(tmp / 'layout.toml')
    >>> Layout.from_toml((tmp / 'layout.toml').read_text()).rules == result.layout.rules
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
    effects: Sequence[RuleEffect],
    notes: Sequence[str],
    schedule: Schedule | None = None,
    check: EstimateCheck | None = None,
  ):
    self.target, self.memory, self.choices, self.presets = target, memory, choices, presets
    self.outcomes, self.estimates = list(outcomes), list(estimates)
    self.effects, self.notes, self.schedule = list(effects), list(notes), schedule
    self.check = check
    self.best = self.outcomes[0]
    ranks = ranks_of(self.outcomes)
    self.ties = [one.name for one, rank in zip(self.outcomes[1:], ranks[1:]) if rank == ranks[0]]
    fitting = [one for one in self.estimates if one.cost and one.memory and one.memory.peak <= memory]
    self.pareto = pareto_front(fitting)

  @property
  def layout(self) -> Layout:
    """The best layout, on an abstract mesh. Read its TOML for a layout on real devices."""
    return self.best.layout

  @property
  def comparison(self) -> Comparison:
    """The outcomes as a comparison, on devices with the memory of the budget."""
    chip = self.target.chip._replace(memory=self.memory)
    return Comparison(self.target._replace(chip=chip), self.outcomes)

  @property
  def toml(self) -> str:
    """The best layout as TOML, with a comment on its origin."""
    cost, memory = self.best.cost, self.best.memory
    times = f'{time_text(cost.low)} to {time_text(cost.high)}' if cost else '?'
    lines = [
      f'# flax_spmd.search for {self.target.text}: best of {len(self.estimates)} candidates',
      f'# {self.best.source}: {memory.text(memory.peak) if memory else "?"} per device, {times} per step',
      *(f'# call the step with {name}={value!r}' for name, value in self.choices.items()),
    ]
    if self.schedule is not None:
      stages = self.schedule.stages
      lines.append(f'# pipeline: layout.pipeline_jit(step, schedule={self.schedule!r}, stages={stages})')
    return '\n'.join([*lines, self.layout.to_toml()])

  def to_toml(self, path: str | os.PathLike[str]) -> None:
    """Writes the best layout as TOML, which `Layout.from_toml` reads."""
    Path(path).write_text(self.toml, encoding='utf-8')

  def record(self) -> dict[str, Any]:
    """The result as JSON types. Estimates have their name, memory, time, doubts and error only."""
    return {
      'target': self.target.text,
      'memory': self.memory,
      'layout': self.layout.to_toml(),
      'choices': self.choices,
      'schedule': None if self.schedule is None else repr(self.schedule),
      'best': self.best.name,
      'ties': self.ties,
      'outcomes': [record(one) | {'preset': self.presets.get(one.name)} for one in self.outcomes],
      'effects': [one._asdict() | {'rule': repr(one.rule)} for one in self.effects],
      'pareto': [one.name for one in self.pareto],
      'estimates': [
        {
          'name': one.name,
          'memory': one.memory and one.memory.peak,
          'host': one.memory and one.memory.host,
          'seconds': one.cost and [one.cost.low, one.cost.high],
          'batch': one.batch,
          'doubts': list(one.doubts),
          'error': one.error,
        }
        for one in self.estimates
      ],
      'notes': self.notes,
      'check': self.check and self.check.record(),
    }

  def to_json(self) -> str:
    """The result as JSON, in bytes per device and seconds per step."""
    return json.dumps(self.record(), indent=2, default=repr)

  def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
    """An HTML page with the result and a full comparison of its outcomes.

    Args:
      path: file to write; None: only the text is returned.
    """
    return written_page(page(self), path)

  def _repr_html_(self) -> str:
    return preformatted(self) + collapsed_page('report', page(self))

  def __rich__(self) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    return Group(*(part if not isinstance(part, str) else Text(part) for part in self._parts()))

  def _parts(self) -> Iterator[Any]:
    yield self.title
    yield from self.remarks
    yield ''
    yield self.toml
    if self.best.pipeline:
      yield '\n'.join([*self.best.pipeline.lines(self.memory), ''])
    if self.effects:
      yield '\n'.join(['Effect of each rule (estimated):', *(f'  {one}' for one in self.effects), ''])
    yield self._table('Layouts, best first', self.outcomes)
    yield ''
    yield self._table('Time against memory', self.pareto)
    yield coverage(self.target.chip)

  @property
  def title(self) -> str:
    """The target, the number of candidates and the memory budget, in one line."""
    title = (
      f'{self.target.text}: best of {len(self.estimates)} candidates within '
      f'{size_text(self.memory)} per device.'
    )
    sizes = {one.batch for one in self.estimates}
    return f'{title} Ranked by time per element of the batch.' if len(sizes) > 1 else title

  @property
  def remarks(self) -> list[str]:
    """The check of the estimates in one line, or that there is none, the findings of the best layout, and the notes.

    A search leaves names without rules on purpose, so that is no finding.
    """
    estimated = any(one.source in (ESTIMATED, PARTITIONED) for one in self.estimates)
    unchecked = [_UNCHECKED] if estimated else []
    equal = (
      f'As fast as the best, within {100 * NOISE:.0f} %: {"; ".join(self.ties)}.' if self.ties else ''
    )
    checked = [str(self.check)] if self.check else unchecked
    program = self.best.program
    suspicious = [each for each in program.findings if NO_RULE not in each] if program else []
    findings = [f'The best layout: {each}' for each in suspicious]
    return [*checked, *([equal] if equal else []), *findings, *self.notes]

  def _table(self, title: str, outcomes: Sequence[Outcome]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, header_style='bold', title=title, title_justify='left')
    for column in ('rank', 'memory', 'time', 'source', 'layout'):
      table.add_column(column, overflow='fold')
    for rank, one in zip(ranks_of(outcomes), outcomes, strict=True):
      preset = self.presets.get(one.name)
      name = f'{one.name} (preset {preset})' if preset else one.name
      memory, time = _figures(one)
      if one.memory and not one.fits:
        memory += f', {size_text(one.memory.peak - self.memory)} over the budget'
      table.add_row(rank, memory, time, one.source + (', rough' if one.doubts else ''), name)
    return table

  def __str__(self) -> str:
    return plain_text(self, 160)


def _figures(outcome: Outcome) -> tuple[str, str]:
  """Memory and time, as text."""
  if outcome.memory is None or outcome.cost is None:
    return '', 'not compiled'
  cost = outcome.cost
  return outcome.memory.text(outcome.memory.peak), f'{time_text(cost.low)} to {time_text(cost.high)}'


def ranks_of(outcomes: Sequence[Outcome]) -> list[str]:
  """The ranks of outcomes in their order: `1=` for several that are as fast as the first of them; '' without a time."""
  ranks: list[str] = []
  group: list[int] = []
  for index, one in enumerate([*outcomes, None]):
    first = outcomes[group[0]] if group else None
    if one and first and one.fits == first.fits and _is_tie(first, one):
      group.append(index)
      continue
    text = f'{group[0] + 1}{"=" if len(group) > 1 else ""}' if first and first.cost else ''
    ranks += [text] * len(group)
    group = [index]
  return ranks


def _is_tie(first: Outcome, other: Outcome) -> bool:
  """Whether two outcomes are equally fast."""
  one, two = expected_seconds(first), expected_seconds(other)
  return abs(two - one) < NOISE * one if one < float('inf') else first.cost is other.cost is None


def pareto_front(outcomes: Sequence[Outcome]) -> list[Outcome]:
  """The outcomes that no other one beats in both time and memory, fastest first."""
  front: list[Outcome] = []
  peak = lambda one: one.memory.peak if one.memory else 0
  timed = (one for one in outcomes if one.cost)
  for one in sorted(timed, key=lambda one: (expected_seconds(one), peak(one), one.source == ESTIMATED)):
    if not front or peak(one) < peak(front[-1]):
      front.append(one)
  return front
