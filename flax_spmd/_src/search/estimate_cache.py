"""Estimate cache: the estimates of a search in a file, so that a killed search resumes.

The file has one line of JSON per estimate, appended as soon as it is made; an incomplete last line is
ignored. The file name is a digest of the program, the target and the user's flags for compilers. The first line records the versions and
a digest of the package's source that made the estimates; a file of another version is discarded.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from flax_spmd._src.compare.compilation import cache_folder, compiler_versions
from flax_spmd._src.compare.costs import Cost
from flax_spmd._src.compare.hardware import Target, user_flags
from flax_spmd._src.compare.outcome import Memory, Outcome
from flax_spmd._src.compare.partitioner import can_partition
from flax_spmd._src.hlo.collectives import Collective
from flax_spmd._src.hlo.counts import CountedLoop, Counts
from flax_spmd._src.hlo.work import Product
from flax_spmd._src.layout import Layout
from flax_spmd._src.source_lines import warn
from flax_spmd._src.versions import installed_version

FORMAT = 4
PACKAGE = Path(__file__).parents[2]  # flax_spmd


class EstimateCache(NamedTuple):
  """The cached estimates of a program on a target.

  Attributes:
    file: file of the estimates.
    lines: content of the estimates by digest of the layout and the source.
    outdated: versions that made a discarded file, or ''.
  """

  file: Path
  lines: dict[str, dict[str, Any]]
  outdated: str = ''

  def get(self, name: str, layout: Layout, source: str) -> Outcome | None:
    """The cached estimate of a layout from a source, such as `estimated`, under a new name, or None."""
    content = self.lines.get(_digest(layout, source))
    return None if content is None else _outcome(name, layout, content)

  def add(self, outcome: Outcome) -> None:
    """Appends an estimate to the file. Warns if the file cannot be written."""
    key = _digest(outcome.layout, outcome.source)
    self.lines[key] = _content(outcome)
    _append(self.file, {'layout': key, **self.lines[key]})


def open_cache(identity: str, target: Target, fresh: bool = False) -> EstimateCache:
  """Opens the cache of a program on a target, under the user's flags for compilers.

  Args:
    identity: digest of the program.
    target: the hardware.
    fresh: whether to discard cached estimates.
  """
  platform = target.chip.platform
  partitioner = can_partition(platform) and compiler_versions(platform)
  about = [identity, target, partitioner, *user_flags()]
  key = hashlib.sha256(repr(about).encode()).hexdigest()[:40]
  file = cache_folder() / f'{key}.search.jsonl'
  versions = {name: installed_version(name) for name in ('jaxlib', 'flax-spmd')}
  head = {'format': FORMAT, **versions, 'source': package_digest()}
  lines = [] if fresh else _lines(file)
  if lines and lines[0] == head:
    return EstimateCache(file, {line['layout']: line for line in lines[1:] if 'layout' in line})
  _begin(file, head)
  return EstimateCache(file, {}, _versions(lines[0]) if lines else '')


@functools.cache
def package_digest() -> str:
  """The source digest of this package, computed once per process."""
  return source_digest(PACKAGE)


def source_digest(package: Path) -> str:
  """A digest of the paths and contents of all `.py` and `.toml` files below a folder.

  Nearly every part of the package contributes to an estimate: reading names, rules, planning, lowering,
  propagation, hardware data. A digest of all parts cannot miss one that is added later.
  """
  digest = hashlib.sha256()
  files = {file.relative_to(package).as_posix(): file for file in package.rglob('*.*')}
  for path, file in sorted(files.items()):
    if file.suffix in ('.py', '.toml') and file.is_file():
      content = hashlib.sha256(file.read_bytes()).hexdigest()
      digest.update(f'{path} {content}\n'.encode())
  return digest.hexdigest()[:16]


def _lines(file: Path) -> list[dict[str, Any]]:
  """The lines of a file; an empty dict for an incomplete or damaged line."""
  try:
    text = file.read_text(errors='replace')
  except OSError:
    return []
  lines = []
  for line in text.splitlines():
    try:
      lines.append(json.loads(line))
    except ValueError:
      lines.append({})
  return [line if isinstance(line, dict) else {} for line in lines]


def _begin(file: Path, head: dict[str, Any]) -> None:
  try:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(head) + '\n')
  except OSError as error:
    _warn(file, error)


def _append(file: Path, line: dict[str, Any]) -> None:
  """Appends a line, on a new line even if the last one is incomplete."""
  try:
    with open(file, 'a+b') as stream:
      stream.seek(0, os.SEEK_END)
      if stream.tell():
        stream.seek(-1, os.SEEK_END)
        whole = stream.read(1) == b'\n'
        stream.write(b'' if whole else b'\n')
      stream.write(json.dumps(line).encode() + b'\n')
  except OSError as error:
    _warn(file, error)


def _warn(file: Path, error: OSError) -> None:
  warn(
    f'Estimates cannot be cached in {file.parent}: {error.strerror}. '
    'Set FLAX_SPMD_CACHE to another folder.'
  )


def _versions(head: dict[str, Any]) -> str:
  names = {'jaxlib': head.get('jaxlib'), 'flax-spmd': head.get('flax-spmd')}
  return ', '.join(f'{name} {version}' for name, version in names.items() if version) or 'unknown'


def _digest(layout: Layout, source: str) -> str:
  return hashlib.sha256(repr((layout, source)).encode()).hexdigest()[:24]


def _content(outcome: Outcome) -> dict[str, Any]:
  counts, cost = outcome.counts, outcome.cost
  return {
    'memory': outcome.memory,
    'counts': counts and counts._replace(collectives=()),
    'collectives': counts and counts.collectives,
    'cost': cost and [*cost._replace(links={})],
    'links': cost and [[axes, seconds] for axes, seconds in cost.links.items()],
    'fits': outcome.fits,
    'error': outcome.error,
    'source': outcome.source,
    'doubts': outcome.doubts,
  }


def _outcome(name: str, layout: Layout, content: dict[str, Any]) -> Outcome | None:
  """The outcome of a line; None for a damaged line."""
  try:
    memory, counts, cost = content['memory'], content['counts'], content['cost']
    links = {tuple(axes): seconds for axes, seconds in content['links'] or ()}
    collectives = tuple(_collective(fields) for fields in content['collectives'] or ())
    return Outcome(
      name=name,
      layout=layout,
      memory=memory and Memory(*memory),
      counts=counts and _counts(counts)._replace(collectives=collectives),
      cost=cost and Cost(*cost)._replace(links=links),
      fits=content['fits'],
      error=content['error'],
      program=None,
      compiled=None,
      source=content['source'],
      doubts=tuple(content['doubts']),
    )
  except (KeyError, TypeError, ValueError):
    return None


def _counts(fields: list[Any]) -> Counts:
  counts = Counts(*map(_tuples, fields))
  loops = tuple(CountedLoop(*one) for one in counts.loops)
  return counts._replace(loops=loops, products=tuple(Product(*one) for one in counts.products))


def _collective(fields: list[Any]) -> Collective:
  kind, axes, *rest = fields
  return Collective(kind, tuple(axes), *rest)


def _tuples(value: Any) -> Any:
  return tuple(map(_tuples, value)) if isinstance(value, list) else value
