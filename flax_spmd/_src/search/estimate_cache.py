"""Kept: what was estimated, in a file, so that a search that is killed goes on where it was.

One line of JSON for each estimate, added as it is made; a line that was cut off is left out. The file is
found by what the program does (`explore.programs`) and by its target. Its first line says which versions
made it: a file of others is begun anew.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from flax_spmd._src import estimate
from flax_spmd._src.compare import costs
from flax_spmd._src.compare.compilation import cache_folder
from flax_spmd._src.compare.costs import Cost
from flax_spmd._src.compare.hardware import Target
from flax_spmd._src.compare.outcome import Memory, Outcome
from flax_spmd._src.compat import jaxlib_version
from flax_spmd._src.hlo.collectives import Collective
from flax_spmd._src.hlo.counts import Counts
from flax_spmd._src.layout import Layout

FORMAT = 1


class Kept(NamedTuple):
  """The estimates of a program on a target.

  Attributes:
    file: where they are.
    known: by the layouts' digests.
    rebuilt: the versions that made a file which was thrown away, or ''.
  """

  file: Path
  known: dict[str, dict[str, Any]]
  rebuilt: str = ''

  def get(self, name: str, layout: Layout) -> Outcome | None:
    """What was estimated of a layout, if it was."""
    content = self.known.get(_digest(layout))
    return None if content is None else _outcome(name, layout, content)

  def add(self, outcome: Outcome) -> None:
    """Adds a line; without room for it, says so once and goes on."""
    key = _digest(outcome.layout)
    self.known[key] = _content(outcome)
    _append(self.file, {'layout': key, **self.known[key]})


def open_kept(identity: str, target: Target, fresh: bool = False) -> Kept:
  """What was kept of a program on a target; an empty file, if nothing was.

  Args:
    identity: a digest of the program.
    target: the hardware.
    fresh: whether what is there is thrown away.
  """
  key = hashlib.sha256(repr([identity, target]).encode()).hexdigest()[:40]
  file = cache_folder() / f'{key}.search.jsonl'
  versions = {'jaxlib': jaxlib_version(), 'flax-spmd': _own_version()}
  head = {'format': FORMAT, **versions, 'estimator': _estimator()}
  lines = [] if fresh else _lines(file)
  if lines and lines[0] == head:
    return Kept(file, {line['layout']: line for line in lines[1:] if 'layout' in line})
  _begin(file, head)
  return Kept(file, {}, _versions(lines[0]) if lines else '')


def _lines(file: Path) -> list[dict[str, Any]]:
  """The lines that can be read; the last one may have been cut off."""
  try:
    text = file.read_text(errors='replace')
  except OSError:
    return []
  found = []
  for line in text.splitlines():
    try:
      found.append(json.loads(line))
    except ValueError:
      found.append({})
  return [line if isinstance(line, dict) else {} for line in found]


def _begin(file: Path, head: dict[str, Any]) -> None:
  try:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(head) + '\n')
  except OSError as error:
    _complain(file, error)


def _append(file: Path, line: dict[str, Any]) -> None:
  """A line of its own, even after one that was cut off."""
  try:
    with open(file, 'a+b') as stream:
      stream.seek(0, os.SEEK_END)
      if stream.tell():
        stream.seek(-1, os.SEEK_END)
        whole = stream.read(1) == b'\n'
        stream.write(b'' if whole else b'\n')
      stream.write(json.dumps(line).encode() + b'\n')
  except OSError as error:
    _complain(file, error)


def _complain(file: Path, error: OSError) -> None:
  warnings.warn(
    f'Estimates cannot be kept in {file.parent}: {error.strerror}. Set FLAX_SPMD_CACHE to another folder.',
    stacklevel=4,
  )


def _versions(head: dict[str, Any]) -> str:
  names = {'jaxlib': head.get('jaxlib'), 'flax-spmd': head.get('flax-spmd')}
  return (
    ', '.join(f'{name} {version}' for name, version in names.items() if version) or 'nobody knows what'
  )


@functools.cache
def _estimator() -> str:
  """A digest of what makes the estimates: a version number says little while one works on it."""
  files = [*Path(estimate.__path__[0]).rglob('*.py'), Path(costs.__file__)]
  return hashlib.sha256(b''.join(file.read_bytes() for file in sorted(files))).hexdigest()[:16]


def _own_version() -> str:
  try:
    return importlib.metadata.version('flax-spmd')
  except importlib.metadata.PackageNotFoundError:
    return ''


def _digest(layout: Layout) -> str:
  return hashlib.sha256(repr(layout).encode()).hexdigest()[:24]


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
  """As it was; None for a line that is none."""
  try:
    memory, counts, cost = content['memory'], content['counts'], content['cost']
    links = {tuple(axes): seconds for axes, seconds in content['links'] or ()}
    listed = tuple(_collective(one) for one in content['collectives'] or ())
    return Outcome(
      name,
      layout,
      memory and Memory(*memory),
      counts and Counts(*map(_tuples, counts))._replace(collectives=listed),
      cost and Cost(*cost)._replace(links=links),
      content['fits'],
      content['error'],
      None,
      None,
      content['source'],
      tuple(content['doubts']),
    )
  except (KeyError, TypeError, ValueError):
    return None


def _collective(fields: list[Any]) -> Collective:
  kind, axes, *rest = fields
  return Collective(kind, tuple(axes), *rest)


def _tuples(value: Any) -> Any:
  return tuple(map(_tuples, value)) if isinstance(value, list) else value
