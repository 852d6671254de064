"""Optimizer state: the axis names of arrays that an optimizer derives from parameters.

Optax maps over parameters inside their boxes. Its state arrays (Adafactor's factored moments, L-BFGS's
history, SM3's lists) therefore carry the names of their parameter, even where their shape differs. This
module infers the names that fit, in two steps, and only where they are certain.

*The parameter* has the same names, and its path is repeated below a field of the optimizer's state:
`params/layers/wi` for `opt_state/0/v_row/layers/wi`.

*The dimensions* follow from the two shapes:

    shape of the state array                          inferred names
    the parameter's                                   the parameter's
    one element                                       none: replicated
    the parameter's, with dimensions dropped or 1     those of the dimensions that are left
    the parameter's after additional dimensions       None for each of these, then the parameter's
    any other, or one with two readings               none: replicated, and reported by `Layout.check`
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from jax.tree_util import GetAttrKey, KeyPath

from flax_spmd._src.tree_paths import key_value

Shape: TypeAlias = tuple[int, ...]
How: TypeAlias = Literal['same', 'single', 'subset', 'stacked', 'ambiguous', 'unrelated']


class Inference(NamedTuple):
  """The names inferred for an array of optimizer state, and how.

  Attributes:
    names: one name per dimension; None if they are uncertain.
    how: how the array's shape follows from its parameter's.
    parameter: the parameter's path; None if the parameter is not in the tree.
  """

  names: tuple[Any, ...] | None
  how: How
  parameter: str | None


class Unit(NamedTuple):
  """A box or bare leaf of a tree.

  Attributes:
    path: its key path.
    static: the static part of its box, by which names compare; None for a bare leaf.
    shape: shape of its array; None for a box around several arrays.
    fits: whether it has one name per dimension.
  """

  path: KeyPath
  static: Any
  shape: Shape | None
  fits: bool


def infer(
  names: Sequence[Any], full: Shape | None, shape: Shape, field: str, parameter: str
) -> Inference:
  """Infers the names of a state array from its parameter.

  Args:
    names: the parameter's names.
    full: the parameter's shape; None for a box around several arrays.
    shape: the state array's shape.
    field: the field of the optimizer's state that holds the array. Adafactor's fields imply which of
      two equal dimensions the array keeps.
    parameter: the parameter's path, for reports.

  Example:
    >>> infer(('embed', 'mlp'), (16, 32), (32,), 'v_col', 'params/wi').names
    ('mlp',)
    >>> infer(('embed', 'mlp'), (16, 32), (8, 16, 32), 'updates_memory', 'params/wi').names
    (None, 'embed', 'mlp')
  """
  if shape == full:
    return Inference(tuple(names), 'same', parameter)
  if math.prod(shape) == 1:
    return Inference((None,) * len(shape), 'single', parameter)
  readings = set() if full is None else set(_readings(tuple(names), full, shape, field))
  if len(readings) == 1:
    inferred, how = readings.pop()
    return Inference(inferred, how, parameter)
  return Inference(None, 'ambiguous' if readings else 'unrelated', parameter)


def infer_without_parameter(shape: Shape) -> Inference:
  """Infers the names of a state array whose parameter is not in the tree: certain for one element only."""
  if math.prod(shape) == 1:
    return Inference((None,) * len(shape), 'single', None)
  return Inference(None, 'unrelated', None)


def find_parameters(units: Mapping[int, Unit]) -> dict[int, int]:
  """Finds the parameter of every unit of optimizer state.

  Args:
    units: units of a tree, by their index in it.

  Returns:
    The index of the parameter, by index of the state. Parameters are left out, and so is state whose
    parameter is not among the units.
  """
  keys = {i: tuple(map(key_value, unit.path)) for i, unit in units.items()}
  by_tail: dict[Any, list[int]] = defaultdict(list)
  for i, unit in units.items():
    if unit.fits:
      for length in _tail_lengths(keys[i]):
        by_tail[unit.static, keys[i][-length:]].append(i)
  parameter_of = {}
  for i, unit in units.items():
    if not unit.fits or below_a_field(unit.path):
      parameter = _find_parameter(i, units, keys, by_tail)
      if parameter is not None:
        parameter_of[i] = parameter
  return parameter_of


def field_of(path: KeyPath) -> str:
  """The innermost field on a path: `v_row` in `opt_state/0/v_row/wi`."""
  return next((entry.name for entry in reversed(path) if isinstance(entry, GetAttrKey)), '')


def below_a_field(path: KeyPath) -> bool:
  """Whether a path goes through a field after its first key, as `opt_state/0/mu/wi` does."""
  return GetAttrKey in map(type, path[1:])


def inside_optax(tree: Any, path: KeyPath) -> bool:
  """Whether a path goes through the state of an Optax optimizer."""
  node = tree
  for entry in path:
    if isinstance(node, tuple) and type(node).__module__.split('.')[0] == 'optax':
      return True
    node = getattr(node, entry.name) if isinstance(entry, GetAttrKey) else node[key_value(entry)]
  return False


def _tail_lengths(keys: Sequence[Any]) -> Sequence[int]:
  """How many of a parameter's last keys its state may repeat: all, all but the root, or all below `params`."""
  shortest = len(keys) - (2 if 'params' in keys[:2] else 1)
  return range(len(keys), max(shortest, 1) - 1, -1)


def _find_parameter(i: int, units: Mapping[int, Unit], keys, by_tail) -> int | None:
  """The unit with the longest tail that unit `i` repeats; of several, the nearest in the tree."""
  path = keys[i]
  for length in range(len(path), 0, -1):
    candidates = [
      other
      for other in by_tail.get((units[i].static, path[-length:]), ())
      if other != i and _is_state_of(units[i], path, keys[other], length)
    ]
    if candidates:
      return max(candidates, key=lambda other: (_shared_keys(path, keys[other]), -len(keys[other])))
  return None


def _is_state_of(unit: Unit, path, parameter, length: int) -> bool:
  """Whether a unit can be state of the parameter whose last `length` keys it repeats.

  The paths have to part at an optimizer: at a field that is not the first key. Custom optimizers may keep
  plain dictionaries; there, names that do not fit are enough.
  """
  shared = _shared_keys(path, parameter)
  if path[-length - 1 : -length] == parameter[-length - 1 : -length]:  # the tail is longer
    return False
  if len(parameter) - shared - length < (1 if shared else 0):
    return False
  between = unit.path[shared : len(path) - length]
  return not unit.fits or any(isinstance(entry, GetAttrKey) for entry in between[1:])


def _shared_keys(a: Sequence[Any], b: Sequence[Any]) -> int:
  """How many keys two paths share at the start."""
  return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _readings(
  names: tuple[Any, ...], full: Shape, shape: Shape, field: str
) -> Iterator[tuple[tuple[Any, ...], How]]:
  """The names of `shape`, for every way in which it can follow from `full`."""
  if len(shape) == len(full):
    if all(size in (whole, 1) for size, whole in zip(shape, full, strict=True)):
      triples = zip(names, shape, full, strict=True)
      yield tuple(name if size == whole else None for name, size, whole in triples), 'subset'
  elif len(shape) < len(full):
    for kept in _kept_dimensions(full, shape, field):
      yield tuple(names[dim] for dim in kept), 'subset'
  elif shape[len(shape) - len(full) :] == full:
    yield (None,) * (len(shape) - len(full)) + names, 'stacked'


def _kept_dimensions(full: Shape, shape: Shape, field: str) -> list[tuple[int, ...]]:
  """The dimensions of `full` that `shape` may have kept; a field with a rule of its own decides a tie."""
  choices = [
    kept
    for kept in itertools.combinations(range(len(full)), len(shape))
    if tuple(full[dim] for dim in kept) == shape
  ]
  kept_by_field = _KEPT_BY_FIELD.get(field)
  if kept_by_field is not None and len(choices) > 1 and kept_by_field(full) in choices:
    return [kept_by_field(full)]
  return choices


def _all_but(rank_from_largest: int) -> Callable[[Shape], tuple[int, ...]]:
  """The dimensions that Adafactor keeps: rows drop the largest one, columns the second largest.

  Source: `optax.scale_by_factored_rms`, after arXiv:1804.04235, section 4. It sorts with numpy's unstable
  sort, so equal sizes need the same sort here.
  """

  def kept(full: Shape) -> tuple[int, ...]:
    dropped = int(np.argsort(full)[-1 - rank_from_largest])
    return tuple(dim for dim in range(len(full)) if dim != dropped)

  return kept


_KEPT_BY_FIELD = {'v_row': _all_but(0), 'v_col': _all_but(1)}
