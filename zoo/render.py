"""Fills the table of `docs/works_with.md` from `results.json`.

python zoo/render.py    # after a run; `run.py` calls it too
"""

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / 'results.json'
PAGE = HERE.parent / 'docs' / 'works_with.md'
BLOCK = re.compile(r'(<!-- zoo: (\w+) -->\n).*?(<!-- end -->)', re.DOTALL)
NOT_TRIED = 'not tried'
AS_OWN = 'as in their own way on this mesh, not as on one device'
PASSED = {'ok', AS_OWN}
HEAD = (
  'model',
  'from',
  'init',
  'step',
  'own partitioner',
  'restore',
  'compare',
  'pipeline',
  'beside the three lines',
)


def recorded() -> dict[str, Any]:
  """The recorded rows, by model."""
  return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def filled(page: str) -> str:
  """The page with every block filled from the results."""
  return BLOCK.sub(lambda match: f'{match[1]}\n{_BLOCKS[match[2]]()}\n\n{match[3]}', page)


def annotated() -> str:
  return _table({name: row for name, row in recorded().items() if row['annotated']})


def plain() -> str:
  return _table({name: row for name, row in recorded().items() if not row['annotated']})


def failures() -> str:
  lines = [
    f'- **{name}**, {check}: {_escaped(result)}'
    for name, row in recorded().items()
    for check, result in row['checks'].items()
    if result not in {*PASSED, NOT_TRIED}
  ]
  return '\n'.join(lines) or 'None.'


def count() -> str:
  rows = recorded().values()
  silent = sum('silently' in row['checks']['shardings'] for row in rows)
  whole = sum(set(row['checks'].values()) <= {*PASSED, NOT_TRIED} for row in rows)
  pipelines = [row['checks']['pipeline'] for row in rows if row['checks']['pipeline'] != NOT_TRIED]
  packages = len({row['package'] for row in rows})
  return (
    f'{len(rows)} cases from {packages} packages and repositories, '
    f'{sum(bool(row["annotated"]) for row in rows)} of them annotated by their authors; '
    f'{whole} pass every check that was tried, {silent} are silently sharded other than by their own partitioner. '
    f'{len(pipelines)} were tried as pipelines, and {sum(one in PASSED for one in pipelines)} of them pass. '
    f'Run with {" and with ".join(sorted({_versions(row) for row in rows}))}.'
  )


def _versions(row: dict[str, Any]) -> str:
  return (
    f'jax {row["versions"]["jax"]}, flax {row["versions"]["flax"]}, Python {row["versions"]["python"]}'
  )


_BLOCKS = {'annotated': annotated, 'plain': plain, 'failures': failures, 'count': count}


def _table(rows: dict[str, Any]) -> str:
  lines = [HEAD, tuple('---' for _ in HEAD), *(_cells(name, row) for name, row in rows.items())]
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def _cells(name: str, row: dict[str, Any]) -> tuple[str, ...]:
  results = row['checks']
  own = _mark(results['shardings']) if row['annotated'] else '–'
  marks = [_mark(results[check]) for check in ('init', 'steps')]
  rest = [_mark(results[check]) for check in ('restore', 'compare', 'pipeline')]
  title = f'{name} ({row["annotated"]})' if row['annotated'] else name
  return title, f'{row["package"]} {row["version"]}', *marks, own, *rest, row['changes'] or '–'


def _mark(result: str) -> str:
  return {'ok': 'equal', AS_OWN: 'as their own way', NOT_TRIED: '–'}.get(result, 'fails')


def _escaped(text: str) -> str:
  return '`' + text.replace('`', "'") + '`'


def main() -> None:
  PAGE.write_text(filled(PAGE.read_text()))


if __name__ == '__main__':
  main()
