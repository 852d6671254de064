"""Model facts: the logical names of a model and the sizes of their dimensions, known before the search.

The parameters of a model without names are grouped by path instead; each group is searched like a name.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from flax_spmd._src.compare.lowering import abstract_state
from flax_spmd._src.compare.train_step import TrainStepLike, train_step_on
from flax_spmd._src.layout import Layout
from flax_spmd._src.mesh import abstract_mesh
from flax_spmd._src.names.tree_names import leaf_parts
from flax_spmd._src.plan.rows import Row
from flax_spmd._src.search.candidate import MIN_SIZE

_MIN_SIZES = (MIN_SIZE, 2**14, 1)  # elements of the smallest array that `fsdp` shards
_MANY = 12  # paths; with more, paths that differ in numbers only form one group


class PathKind(NamedTuple):
  """Unnamed parameters that share a path pattern and are sharded alike.

  Attributes:
    pattern: regular expression of their paths.
    shapes: their distinct shapes.
  """

  pattern: str
  shapes: tuple[tuple[int, ...], ...]


class ModelFacts(NamedTuple):
  """Logical names of a model.

  Attributes:
    names: sizes of the dimensions of each logical name.
    parameters: names on dimensions of the state.
    together: pairs of names that occur on one array.
    batch: names of the dimension of examples, in the step's arguments and in activations.
    min_sizes: values of `min_size` for `fsdp` that make a difference for this model.
    paths: for a model without names, its kinds of parameters.
    batch_elements: number of elements of all arrays of the batch.
    arrays: paths of the arrays of the state.
    as_axes: logical names in boxes of mesh axes, such as those of `with_partitioning`.
  """

  names: Mapping[str, tuple[int, ...]]
  parameters: frozenset[str]
  together: frozenset[frozenset[str]]
  batch: frozenset[str]
  min_sizes: tuple[int, ...]
  paths: tuple[PathKind, ...] = ()
  batch_elements: int = 1
  arrays: tuple[str, ...] = ()
  as_axes: frozenset[str] = frozenset()

  def divides(self, name: str, shards: int) -> bool:
    """Whether every dimension with a name is divisible into this number of shards."""
    sizes = [size for size in self.names[name] if size > 1 or name in self.parameters]
    return all(size % shards == 0 for size in sizes)

  def path_divides(self, pattern: str, dim: int, shards: int) -> bool:
    """Whether a dimension of a kind of parameters is divisible into this number of shards."""
    shapes = [shape for kind in self.paths if kind.pattern == pattern for shape in kind.shapes]
    return bool(shapes) and all(shape[dim] % shards == 0 for shape in shapes)


def facts_of(
  train_step: TrainStepLike,
  axes: Mapping[str, int] = MappingProxyType({}),
  names: Mapping[str, tuple[int, ...]] | None = None,
  parameters: frozenset[str] = frozenset(),
  together: frozenset[frozenset[str]] = frozenset(),
  of_batch: frozenset[str] = frozenset(),
) -> ModelFacts:
  """Collects the facts of a model.

  Args:
    train_step: the step, whose state is traced.
    axes: mesh axes that a model may use, with their sizes.
    names, parameters, together, of_batch: attributes of an `Estimator`. Without an estimator they are read off the
      state, which leaves out names of activations.
  """
  layout = Layout(abstract_mesh(axes or {'all': 1}))
  train_step = train_step_on(layout, train_step)
  if axes or names is not None:
    state, layout, as_axes = abstract_state(train_step, layout)
  else:  # a name in a box of mesh axes may be the axis of a mesh that is not known
    state, as_axes = layout.abstract(train_step.create, *train_step.args), frozenset[str]()
  rows, parts = layout.rows(state), leaf_parts(state)
  if names is None:
    names, parameters, together = _names_of_state(rows, as_axes)
  first = _batch_names(train_step.placements) | of_batch
  leaves = jax.tree.leaves(train_step.batch)
  sizes = tuple(sorted({leaf.shape[0] for leaf in leaves if getattr(leaf, 'shape', ())}))
  known = {**names, **{name: sizes for name in first if name not in names}}
  paths = () if parameters else _path_kinds(rows, parts)
  elements = sum(math.prod(getattr(leaf, 'shape', ())) for leaf in leaves)
  return ModelFacts(
    known,
    parameters,
    together,
    frozenset(name for name in known if name in first or _is_of_batch(name, parameters)),
    _min_sizes(row for row, part in zip(rows, parts, strict=True) if part != 'opt_state'),
    paths,
    max(1, elements),
    tuple(row.path for row in rows),
    as_axes,
  )


def _names_of_state(
  rows: Sequence[Row], as_axes: frozenset[str]
) -> tuple[dict[str, tuple[int, ...]], frozenset[str], frozenset[frozenset[str]]]:
  """`names`, `parameters` and `together` of a state."""
  sizes: dict[str, set[int]] = {}
  pairs: set[frozenset[str]] = set()
  for row in rows:
    logical = [
      (name, size)
      for name, size in zip(row.names or (), row.shape)
      if isinstance(name, str) and (row.logical or name in as_axes)
    ]
    for name, size in logical:
      sizes.setdefault(name, set()).add(size)
    pairs |= {frozenset(pair) for pair in itertools.combinations([name for name, _ in logical], 2)}
  names = {name: tuple(sorted(known)) for name, known in sorted(sizes.items())}
  return names, frozenset(names), frozenset(pairs)


def _batch_names(placements: Any) -> frozenset[str]:
  """Logical names of the batch's dimension of examples: `batch` in arrays that have it, else the first."""
  if placements is None:
    return frozenset({'batch'})
  is_names = lambda node: isinstance(node, tuple) and all(isinstance(n, str | None) for n in node)
  leaves = jax.tree.leaves(placements, is_leaf=is_names)
  names = ('batch' if 'batch' in leaf else leaf[0] for leaf in leaves if is_names(leaf) and leaf)
  return frozenset(filter(None, names))


def _is_of_batch(name: str, parameters: frozenset[str]) -> bool:
  """Whether activations have a name for the batch, such as `act_batch` or `activation_batch`."""
  return 'batch' in name.split('_') and name not in parameters


def _min_sizes(rows: Iterable[Row]) -> tuple[int, ...]:
  """Up to two values of `min_size`, each of which shards another set of arrays."""
  elements = [math.prod(row.shape) for row in rows]
  by_count: dict[int, int] = {}
  for min_size in _MIN_SIZES:
    count = sum(size >= min_size for size in elements)
    if count:
      by_count.setdefault(count, min_size)
  return tuple(by_count.values())[:2] or (MIN_SIZE,)


def _path_kinds(rows: Sequence[Row], parts: Sequence[str]) -> tuple[PathKind, ...]:
  """Kinds of parameters with two or more dimensions."""
  copies = {
    tail
    for row, part in zip(rows, parts, strict=True)
    if part == 'opt_state'
    for tail in _tails(row.path)
  }
  paths = {
    _shared_tail(row.path, copies): row.shape
    for row, part in zip(rows, parts, strict=True)
    if part == 'params' and len(row.shape) > 1
  }
  loose = len(paths) > _MANY
  kinds: dict[tuple[str, int], set[tuple[int, ...]]] = {}
  for path, shape in paths.items():
    text = re.escape(path).replace(r'\-', '-')
    text = re.sub(r'\d+', r'\\d+', text) if loose else text
    kinds.setdefault((text, len(shape)), set()).add(tuple(shape))
  patterns = [text for text, _ in kinds]
  return tuple(
    PathKind(f'(^|/){text}$', tuple(sorted(shapes)))
    for (text, _), shapes in sorted(kinds.items())
    if patterns.count(text) == 1
  )


def _shared_tail(path: str, copies: Container[str]) -> str:
  """The end of a parameter's path that its copies in the optimizer state have too: all of it below `params`, if that is a key."""
  _, key, below = f'/{path}'.partition('/params/')
  return below if key else next((tail for tail in _tails(path) if tail in copies), path)


def _tails(path: str) -> list[str]:
  """The ends of a path, from the longest."""
  keys = path.split('/')
  return ['/'.join(keys[first:]) for first in range(len(keys))]
