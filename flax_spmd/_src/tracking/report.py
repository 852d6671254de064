"""Reports: the figures, the table, the text and the HTML of a value that describes a layout, for a tracker of experiments.

    report = report_of(explore.compare(train_step, layouts, 'h100:64'))
    report.figures   # {'fsdp/memory': 33285996544.0, 'fsdp/wire': ..., 'fsdp/seconds_low': ..., ...}

`trackers` writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from flax_spmd._src.compare.comparison import Comparison
from flax_spmd._src.compare.outcome import Outcome
from flax_spmd._src.explanation import Explanation, Total
from flax_spmd._src.jit.program_explanation import ProgramExplanation
from flax_spmd._src.search.result import SearchResult
from flax_spmd.errors import LayoutError

Described: TypeAlias = Explanation | ProgramExplanation | Comparison | SearchResult


class Report(NamedTuple):
  """The parts of a value that trackers show.

  Attributes:
    figures: numbers by name, in bytes per device and seconds.
    rows: the table, one flat dict per array or layout; all have the same keys.
    text: the text that `print` shows.
    html: the HTML that a notebook shows.
  """

  figures: dict[str, float]
  rows: list[dict[str, Any]]
  text: str
  html: str


def report_of(value: Described) -> Report:
  """The report of an explanation, a comparison or the result of a search.

  Raises:
    LayoutError: it is something else.
  """
  if isinstance(value, Explanation):
    total = Total.of(value.rows)._asdict()
    figures = {name: float(number) for name, number in total.items()}
    return _report(value, figures | {'findings': len(value.findings)}, value.records())
  if isinstance(value, ProgramExplanation):
    figures = {
      'wire': value.sent,
      'collectives': len(value.collectives),
      'findings': len(value.findings),
    }
    return _report(value, figures, value.records())
  if isinstance(value, (Comparison, SearchResult)):
    named = {
      f'{one.name}/{name}': number for one in value.outcomes for name, number in _figures(one).items()
    }
    return _report(value, named, [_row(one) for one in value.outcomes])
  raise LayoutError(
    f'A {type(value).__name__} has no report.\nFix: pass the result of explain, layout.jit(f).explain(...), '
    'explore.compare or explore.search.'
  )


def _report(value: Any, figures: dict[str, float], rows: Sequence[dict[str, Any]]) -> Report:
  return Report(
    {name: float(number) for name, number in figures.items()},
    list(rows),
    str(value),
    value._repr_html_(),
  )


def _figures(outcome: Outcome) -> dict[str, float]:
  """The figures of a layout that are known, for one device and one step."""
  memory, counts, cost = outcome.memory, outcome.counts, outcome.cost
  found: dict[str, float] = {'fits': outcome.fits}
  if memory is not None:
    found |= {'memory': memory.peak, 'host_memory': memory.host}
  if counts is not None:
    found |= {'wire': sum(one.wire for one in counts.collectives), 'flops': counts.flops}
  if cost is not None:
    found |= {'seconds_low': cost.low, 'seconds_high': cost.high}
  return found


_NUMBERS = 'memory', 'host_memory', 'wire', 'flops', 'seconds_low', 'seconds_high'


def _row(outcome: Outcome) -> dict[str, Any]:
  figures = _figures(outcome)
  return {
    'layout': outcome.name,
    'mesh': str(outcome.mesh),
    'fits': outcome.fits,
    **{name: figures.get(name) for name in _NUMBERS},
    'source': outcome.source,
    'error': outcome.error,
  }
