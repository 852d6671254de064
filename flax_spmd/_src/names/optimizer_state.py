"""Optimizer state: what an array is that carries its parameter's names and another shape.

Optax maps over parameters inside their boxes, so whatever an optimizer keeps (Adafactor's factored
moments, L-BFGS's history, SM3's lists) ends up under the parameter's names. Two questions are answered
here, both from what is certain and no more:

*Which parameter is it?* The one with the same names whose path the array's path repeats, below a field
of some optimizer: `params/layers/wi` for `opt_state/0/v_row/layers/wi`.

*Which of its dimensions are left?*

    the parameter's shape                      the parameter's names
    a scalar, or one element                   no names: replicated
    the shape with dimensions left out or 1    the names of those that remain
    the shape with dimensions before it        None for those, then the names
    anything else, or two readings             no names: replicated, and reported
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from jax.tree_util import GetAttrKey, KeyPath

from flax_spmd._src.tree_paths import key_value

Shape: TypeAlias = tuple[int, ...]
How: TypeAlias = Literal['same', 'single', 'subset', 'stacked', 'ambiguous', 'unrelated']


class Guess(NamedTuple):
  """What an array of optimizer state was taken for.

  `names` are its names, or None where nothing is certain; `parameter` is the parameter's path, or None
  if the parameter is not in the tree.
  """

  names: tuple[Any, ...] | None
  how: How
  parameter: str | None


class Unit(NamedTuple):
  """A box or bare leaf of a tree: its place, what its names are equal by, and its array's shape.

  `fits` says whether there is one name per dimension; `shape` is None for a box around several arrays.
  """

  path: KeyPath
  names: Hashable
  shape: Shape | None
  fits: bool


def guess(names: Sequence[Any], full: Shape | None, shape: Shape, field: str, parameter: str) -> Guess:
  """What a state array of `shape` is to its parameter of shape `full` with these names.

  Args:
    names: the parameter's names.
    full: the parameter's shape; None if it is no array, of which nothing follows.
    shape: the state array's shape.
    field: the field of the optimizer's state that holds the array; some say which of two equal
      dimensions they keep.
    parameter: the parameter's path, for reports.

  Example:
    >>> guess(('embed', 'mlp'), (16, 32), (32,), 'v_col', 'params/wi').names
    ('mlp',)
    >>> guess(('embed', 'mlp'), (16, 32), (8, 16, 32), 'updates_memory', 'params/wi').names
    (None, 'embed', 'mlp')
  """
  if shape == full:
    return Guess(tuple(names), 'same', parameter)
  if math.prod(shape) == 1:
    return Guess((None,) * len(shape), 'single', parameter)
  readings = set() if full is None else set(_reshaped(tuple(names), full, shape, field))
  if len(readings) == 1:
    left, how = readings.pop()
    return Guess(left, how, parameter)
  return Guess(None, 'ambiguous' if readings else 'unrelated', parameter)


def guess_alone(shape: Shape) -> Guess:
  """What a state array is whose parameter is not in the tree: one element, or nothing certain."""
  if math.prod(shape) == 1:
    return Guess((None,) * len(shape), 'single', None)
  return Guess(None, 'unrelated', None)


def owners(units: Mapping[int, Unit]) -> dict[int, int]:
  """The parameter that each unit of optimizer state belongs to; other units are left out.

  Args:
    units: by index in the tree.
  """
  keys = {i: tuple(map(key_value, unit.path)) for i, unit in units.items()}
  by_end: dict[Any, list[int]] = defaultdict(list)
  for i, unit in units.items():
    if unit.fits:
      for length in _tail_lengths(keys[i]):
        by_end[unit.names, keys[i][-length:]].append(i)
  found = {}
  for i, unit in units.items():
    if not unit.fits or below_a_field(unit.path):
      owner = _owner(i, units, keys, by_end)
      if owner is not None:
        found[i] = owner
  return found


def field_of(path: KeyPath) -> str:
  """The innermost field of the optimizer's state on a path: `v_row`."""
  return next((entry.name for entry in reversed(path) if isinstance(entry, GetAttrKey)), '')


def below_a_field(path: KeyPath) -> bool:
  """Whether there is a field below the tree's top, as in `opt_state/0/mu/...`."""
  return GetAttrKey in map(type, path[1:])


def inside_optax(tree: Any, path: KeyPath) -> bool:
  """Whether a path goes through the state of an optimizer of Optax."""
  node = tree
  for entry in path:
    if isinstance(node, tuple) and type(node).__module__.split('.')[0] == 'optax':
      return True
    node = getattr(node, entry.name) if isinstance(entry, GetAttrKey) else node[key_value(entry)]
  return False


def _tail_lengths(keys: Sequence[Any]) -> Sequence[int]:
  """How much of a parameter's path its state can repeat: all but its root, or a collection more."""
  shortest = len(keys) - (2 if 'params' in keys[:2] else 1)
  return range(len(keys), max(shortest, 1) - 1, -1)


def _owner(i: int, units: Mapping[int, Unit], keys, by_end) -> int | None:
  """The unit whose path the path of unit `i` repeats the most of, the nearest in the tree first."""
  path = keys[i]
  for length in range(len(path), 0, -1):
    candidates = [
      other
      for other in by_end.get((units[i].names, path[-length:]), ())
      if other != i and _is_state_of(units[i], path, keys[other], length)
    ]
    if candidates:
      return max(candidates, key=lambda other: (_common(path, keys[other]), -len(keys[other])))
  return None


def _is_state_of(unit: Unit, path, parameter, length: int) -> bool:
  """Whether a unit can be state of the parameter whose last `length` keys its path repeats.

  Where the two paths part there has to be an optimizer: a field that is not the first key, or, for
  custom optimizers that keep plain dictionaries, names that do not fit.
  """
  common = _common(path, parameter)
  if path[-length - 1 : -length] == parameter[-length - 1 : -length]:  # they repeat more than that
    return False
  if len(parameter) - common - length < (1 if common else 0):
    return False
  between = unit.path[common : len(path) - length]
  return not unit.fits or any(isinstance(entry, GetAttrKey) for entry in between[1:])


def _common(a: Sequence[Any], b: Sequence[Any]) -> int:
  """How many keys two paths begin with alike."""
  return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _reshaped(
  names: tuple[Any, ...], full: Shape, shape: Shape, field: str
) -> Iterator[tuple[tuple[Any, ...], How]]:
  """The names under every way to read `shape` as a reshaped `full`."""
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
  """The ways to get `shape` by leaving dimensions out; the field's own way if it has one."""
  ways = [
    kept
    for kept in itertools.combinations(range(len(full)), len(shape))
    if tuple(full[dim] for dim in kept) == shape
  ]
  own = _OWN_WAY.get(field)
  if own is not None and len(ways) > 1 and own(full) in ways:
    return [own(full)]
  return ways


def _without(rank_from_largest: int) -> Callable[[Shape], tuple[int, ...]]:
  """Adafactor factors the two largest dimensions: rows lose the largest, columns the second.

  Source: `optax.scale_by_factored_rms`, after arXiv:1804.04235, section 4. Its sort is numpy's, which
  does not keep equal sizes in order, so it has to be numpy's here.
  """

  def kept(full: Shape) -> tuple[int, ...]:
    left_out = int(np.argsort(full)[-1 - rank_from_largest])
    return tuple(dim for dim in range(len(full)) if dim != left_out)

  return kept


_OWN_WAY = {'v_row': _without(0), 'v_col': _without(1)}
