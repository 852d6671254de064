"""Reports of benchmarks: a text table for the terminal, or one JSON object, from which `render.py` fills the pages."""

import argparse
import json
import math
import os
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

from harness import Figure


class Table(NamedTuple):
  """A table of further results, which are not figures."""

  title: str
  head: Sequence[str]
  rows: Sequence[Sequence[str]]

  def __str__(self) -> str:
    return f'{self.title}\n\n{markdown(self.head, self.rows)}'


class Report(NamedTuple):
  """Results of a benchmark; `details` is further data for plots and readers of the JSON."""

  benchmark: str
  figures: Sequence[Figure]
  tables: Sequence[Table] = ()
  details: dict[str, Any] = {}  # noqa: RUF012

  @property
  def missed(self) -> list[Figure]:
    return [figure for figure in self.figures if figure.verdict == 'MISSED']

  def publish(self, as_json: bool) -> None:
    print(json.dumps(_finite(self.record()), indent=1, allow_nan=False) if as_json else self)

  def record(self) -> dict[str, Any]:
    figures = [
      {
        **figure._asdict(),
        'target': None if figure.target is None else str(figure.target),
        'verdict': figure.verdict or None,
      }
      for figure in self.figures
    ]
    return {
      'benchmark': self.benchmark,
      'versions': versions(),
      'cores': os.cpu_count(),
      'figures': figures,
      'tables': [table._asdict() for table in self.tables],
      'details': self.details,
    }

  def __str__(self) -> str:
    environment = ' '.join(f'{name} {number}' for name, number in versions().items())
    head = ['', 'median', '95 %', '10-90 %', 'unit', 'target', '']
    rows = [
      [f.name, number(f.value), span(f.interval), span(f.spread), f.unit, str(f.target or ''), f.verdict]
      for f in self.figures
    ]
    return '\n\n'.join([environment, markdown(head, rows), *map(str, self.tables)])


def report(benchmark: str, figures: Callable[[], Sequence[Figure]]) -> None:
  """Main function of a script that has only figures."""
  as_json = parser(benchmark).parse_args().json
  Report(benchmark, figures()).publish(as_json)


def parser(benchmark: str) -> argparse.ArgumentParser:
  result = argparse.ArgumentParser(prog=f'{benchmark}.py')
  result.add_argument('--json', action='store_true', help='print the result as JSON')
  return result


def versions() -> dict[str, str]:
  return {'python': platform.python_version(), 'jax': version('jax'), 'flax': version('flax')}


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """A Markdown table with aligned columns."""
  lines = [[cell.replace('|', '\\|').replace('\n', ' ') for cell in line] for line in (head, *rows)]
  widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(head))]
  padded = [' | '.join(map(str.ljust, line, widths)) for line in lines]
  padded.insert(1, ' | '.join('-' * width for width in widths))
  return '\n'.join(f'| {line} |' for line in padded)


def _finite(value: Any) -> Any:
  """The value with None for infinities and NaN, which JSON lacks."""
  if isinstance(value, dict):
    return {key: _finite(each) for key, each in value.items()}
  if isinstance(value, (list, tuple)):
    return [_finite(each) for each in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value


def number(value: float | None) -> str:
  """Three significant digits, or all digits of a large integer part; a dash for None."""
  if value is None:
    return '-'
  return f'{value:,.0f}' if abs(value) >= 100 else f'{value:.3g}'


def span(ends: Sequence[float]) -> str:
  return f'{number(ends[0])} to {number(ends[1])}'
