"""Facts: what a search knows of a model before it tries anything.

Which names there are, what sizes their dimensions have, which of them meet on one array. A model whose
parameters have no names is searched by the paths of its arrays: each kind of path stands for a name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from flax_spmd._src.layout import Layout
from flax_spmd._src.mesh import abstract_mesh
from flax_spmd._src.plan.rows import Row
from flax_spmd._src.search.candidate import MIN_SIZE

_LEASTS = (MIN_SIZE, 2**14, 1)  # elements of the smallest array that `fsdp` may take
_MANY = 12  # paths, before those that differ in numbers are taken together


class PathKind(NamedTuple):
  """Arrays of parameters without names that are laid alike: their paths, and the shapes that they have."""

  pattern: str
  shapes: tuple[tuple[int, ...], ...]


class Facts(NamedTuple):
  """A model, as far as its names go.

  Attributes:
    names: each name, and the sizes of its dimensions.
    parameters: the names that dimensions of the state have.
    together: pairs of names that stand on one array.
    batch: the names of the batch.
    leasts: the sizes from which `fsdp` may take arrays, that make a difference here.
    paths: of a model whose state has no names, its kinds of arrays.
  """

  names: Mapping[str, tuple[int, ...]]
  parameters: frozenset[str]
  together: frozenset[frozenset[str]]
  batch: frozenset[str]
  leasts: tuple[int, ...]
  paths: tuple[PathKind, ...] = ()

  def divides(self, name: str, pieces: int) -> bool:
    """Whether all dimensions of a name can be cut into so many pieces."""
    sizes = [size for size in self.names[name] if size > 1 or name in self.parameters]
    return all(size % pieces == 0 for size in sizes)

  def path_divides(self, pattern: str, dim: int, pieces: int) -> bool:
    """The same of a dimension of a kind of arrays."""
    kind = next(kind for kind in self.paths if kind.pattern == pattern)
    return all(shape[dim] % pieces == 0 for shape in kind.shapes)


def facts_of(
  create: Callable[..., Any],
  args: Sequence[Any],
  places: Any,
  batch: Any,
  names: Mapping[str, tuple[int, ...]] | None = None,
  parameters: frozenset[str] = frozenset(),
  together: frozenset[frozenset[str]] = frozenset(),
) -> Facts:
  """What is known of a model.

  Args:
    create, args: make its state.
    places: where the batch goes, as of `search`.
    batch: the batch.
    names, parameters, together: as an estimator knows them; without one, they are read off the state.
  """
  layout = Layout(abstract_mesh({'all': 1}))
  rows = layout.rows(layout.abstract(create, *args))
  if names is None:
    names, parameters, together = _read(rows)
  first = _batch_names(places)
  sizes = tuple(sorted({leaf.shape[0] for leaf in jax.tree.leaves(batch) if getattr(leaf, 'shape', ())}))
  known = {**names, **{name: sizes for name in first if name not in names}}
  paths = () if parameters else _kinds(rows)
  return Facts(known, parameters, together, first & known.keys(), _leasts(rows), paths)


def _read(rows: Sequence[Row]) -> tuple[dict[str, tuple[int, ...]], frozenset[str], frozenset]:
  """The names of a state; those of activations only are not known here."""
  sizes: dict[str, set[int]] = {}
  pairs: set[frozenset[str]] = set()
  for row in rows:
    logical = [
      (name, size)
      for name, size in zip(row.names or (), row.shape)
      if isinstance(name, str) and row.logical
    ]
    for name, size in logical:
      sizes.setdefault(name, set()).add(size)
    pairs |= {frozenset(pair) for pair in itertools.combinations([name for name, _ in logical], 2)}
  names = {name: tuple(sorted(found)) for name, found in sorted(sizes.items())}
  return names, frozenset(names), frozenset(pairs)


def _batch_names(places: Any) -> frozenset[str]:
  """The names of first dimensions of the batch."""
  if places is None:
    return frozenset({'batch'})
  is_names = lambda node: isinstance(node, tuple) and all(isinstance(n, str | None) for n in node)
  leaves = jax.tree.leaves(places, is_leaf=is_names)
  return frozenset(leaf[0] for leaf in leaves if is_names(leaf) and leaf and isinstance(leaf[0], str))


def _leasts(rows: Iterable[Row]) -> tuple[int, ...]:
  """Of the sizes to begin with, those that take other arrays than the ones before, at most two."""
  elements = [_count(row.shape) for row in rows if not row.path.startswith('opt_state/')]
  found: dict[int, int] = {}
  for least in _LEASTS:
    taken = sum(count >= least for count in elements)
    if taken:
      found.setdefault(taken, least)
  return tuple(found.values())[:2] or (MIN_SIZE,)


def _kinds(rows: Iterable[Row]) -> tuple[PathKind, ...]:
  """Kinds of matrices (and what has more dimensions) of the parameters."""
  paths = {
    row.path.partition('params/')[2]: row.shape
    for row in rows
    if len(row.shape) > 1 and 'params/' in row.path and 'opt_state' not in row.path
  }
  loose = len(paths) > _MANY
  kinds: dict[tuple[str, int], set[tuple[int, ...]]] = {}
  for path, shape in paths.items():
    text = re.escape(path).replace(r'\-', '-')
    text = re.sub(r'\d+', r'\\d+', text) if loose else text
    kinds.setdefault((text, len(shape)), set()).add(tuple(shape))
  many = [text for text, _ in kinds]
  return tuple(
    PathKind(f'(^|/){text}$', tuple(sorted(shapes)))
    for (text, _), shapes in sorted(kinds.items())
    if many.count(text) == 1
  )


def _count(shape: Sequence[int]) -> int:
  found = 1
  for size in shape:
    found *= size
  return found
