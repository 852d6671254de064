"""Fills the tables of the pages from `results/`, and draws the plots beside them.

    python benchmarks/render.py    # after a run; `run.py` calls it too

A table is written between the lines `<!-- results: boxes -->` and `<!-- end -->` of a page.
`tests/benchmarks_test.py` checks that the pages match the results.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reporting import markdown, number, span

HERE = Path(__file__).parent
RESULTS = HERE / 'results'
PAGES = HERE / 'README.md', HERE.parent / 'README.md'
BLOCK = re.compile(r'(<!-- results: (\S+) -->\n).*?(<!-- end -->)', re.DOTALL)

Record = dict[str, Any]

# The table of the README: benchmark, figure, text, and which values are better.
HEADLINES = (
  ('specs', 'layout.sharding, cold, over the pair of Flax', "time to the shardings of 10,000 boxes, over Flax's own", 'smaller'),
  ('rules', 'fsdp, cold, over Scalax', "time of `fsdp(...)` for 10,000 arrays, over Scalax's", 'smaller'),
  ('rules', 'path rule 40 of 40, cold, over Scalax', 'the same with 40 path rules', 'smaller'),
  ('placement', "shard by the layout's rules", 'time of `layout.shard`, over `jax.device_put`', 'near 1'),
  ('dispatch', 'tiny function, added per call', 'time that `layout.jit` adds to a call of `jax.jit`', 'smaller'),
  ('step', 'boxed state: lines that differ', 'lines of the compiled step that differ from one written by hand', '0'),
  ('boxes', 'jitted call, boxes of flax_spmd', 'time of a call with 990 boxes, over one without', 'near 1'),
  ('boxes', 'jitted call, boxes of Flax', "the same with Flax's boxes", 'near 1'),
  ('checkpoint', 'save over Orbax', "time to save 0.7 GB to disk with checksums, over Orbax's without", 'smaller'),
  ('checkpoint', '2,000 leaves, save, packed over Orbax', 'the same for 2,000 small arrays, packed', 'smaller'),
  ('checkpoint', 'restore over Orbax', "time to restore and verify the 0.7 GB on another mesh, over Orbax's restore", 'smaller'),
  ('pipelines', 'mid: over one device', 'time of a step in four stages, over one device', 'smaller'),
  ('pipelines', 'residuals over JaxPP', "bytes that a stage keeps for its backward, over JaxPP's published figure", 'smaller'),
  ('layouts_large', 'LLaMA 70B, integer labels, Adafactor, 4 layouts, h100:64: CPU, of all processes', 'CPU-seconds to compile a 70B model for 64 H100s under four layouts', 'smaller'),
  ('layouts_large', 'LLaMA 70B, 4 layouts, v5e:16x16: CPU, of all processes', 'the same for 256 TPUs v5e', 'smaller'),
  ('search_sample', 'sample: estimates, per second and core', 'layouts that `search` estimates, per second and core', 'larger'),
  ('search_strangers', 'strangers: in doubt', 'random layouts of models written in other ways, partitioned: in doubt', 'smaller'),
  ('search_strangers', 'strangers, not in doubt: memory, 95th percentile', 'their peak memory off the compiled one, 95th percentile', 'smaller'),
)  # fmt: skip


def records(benchmark: str) -> list[Record]:
  """The recorded results of a benchmark, oldest JAX first."""
  recorded = [json.loads(path.read_text()) for path in RESULTS.glob(f'{benchmark}-jax-*.json')]
  return sorted(recorded, key=lambda record: _ordinal(record['versions']['jax']))


def _ordinal(version: str) -> list[int]:
  return [int(part) for part in re.findall(r'\d+', version)]


def block(name: str) -> str:
  """The text for a benchmark: versions and cores, figures, plot and tables."""
  if name == 'headlines':
    return headlines()
  recorded = records(name)
  if not recorded:
    return 'No results are recorded.\n'
  parts = [ran(recorded), table(recorded)] if recorded[-1]['figures'] else [ran(recorded)]
  if (RESULTS / f'{name}.svg').exists():
    parts.append(f'![{name}: the same, drawn](results/{name}.svg)')
  parts += [_titled(one, recorded[-1]) for one in recorded[-1]['tables']]
  return '\n\n'.join(parts) + '\n'


def ran(recorded: Sequence[Record]) -> str:
  runs = [
    f'jax {one["versions"]["jax"]} with Python {one["versions"]["python"]} on {one["cores"]} cores'
    for one in recorded
  ]
  return ', '.join(runs) + '.'


def table(recorded: Sequence[Record]) -> str:
  """A row per figure and two columns per JAX version."""
  head = ['', 'unit', 'target']
  head += [text for one in recorded for text in (f'jax {one["versions"]["jax"]}', '')]
  by_name = [{figure['name']: figure for figure in one['figures']} for one in recorded]
  names = dict.fromkeys(name for figures in reversed(by_name) for name in figures)
  rows = []
  for name in names:
    known = [figures.get(name) for figures in by_name]
    any_of = next(filter(None, reversed(known)))
    cells = [cell for one in known for cell in (value_text(one), _verdict(one, any_of['target']))]
    rows.append([name, any_of['unit'], any_of['target'] or '', *cells])
  return markdown(head, rows)


def _verdict(figure: Record | None, target: str | None) -> str:
  """The verdict, or none if an older run had another target."""
  return figure['verdict'] or '' if figure and figure['target'] == target else ''


def value_text(figure: Record | None) -> str:
  """A figure with the interval of its median, if it has one."""
  if figure is None:
    return ''
  low, high = figure['interval']
  return number(figure['value']) + (f' ({span((low, high))})' if low != high else '')


def _titled(one: Record, record: Record) -> str:
  return f'**{one["title"]}**, jax {record["versions"]["jax"]}\n\n{markdown(one["head"], one["rows"])}'


def headlines() -> str:
  recorded = {name: records(name) for name, *_ in HEADLINES}
  jaxs = sorted({one['versions']['jax'] for each in recorded.values() for one in each}, key=_ordinal)
  rows = []
  for name, figure, text, better in HEADLINES:
    by_jax = {
      one['versions']['jax']: each
      for one in recorded[name]
      for each in one['figures']
      if each['name'] == figure
    }
    cells = [_short(by_jax.get(jax)) for jax in jaxs]
    rows.append([text, *cells, better])
  return markdown(['', *(f'jax {jax}' for jax in jaxs), 'better'], rows) + '\n'


def _short(figure: Record | None) -> str:
  return '' if figure is None else f'{number(figure["value"])} {figure["unit"]}'


def filled(page: str) -> str:
  """A page with every block filled from the results."""
  return BLOCK.sub(lambda match: f'{match[1]}\n{block(match[2])}\n{match[3]}', page)


def main() -> None:
  try:
    import plots
  except ModuleNotFoundError as error:
    print(f'plots are not redrawn: {error}', file=sys.stderr)
  else:
    plots.draw_all()
  for page in PAGES:
    page.write_text(filled(page.read_text()))


if __name__ == '__main__':
  main()
