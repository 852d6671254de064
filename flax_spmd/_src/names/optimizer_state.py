"""Optimizer state: the axis names of arrays that an optimizer derives from parameters.

Optax maps over parameters inside their boxes. Its state arrays (Adafactor's factored moments, L-BFGS's
history, SM3's lists) therefore carry the names of their parameter, even where their shape differs. This
module infers the names that fit, in two steps, and only where they are certain.

*The parameter* has the same names, and its path is repeated below a field of the optimizer's state:
`params/layers/wi` for `opt_state/0/v_row/layers/wi`. Where names are in boxes, the state has its parameter's; where
they are in a collection beside the parameters, the state has none, and gets them by its path (`find_bare_states`).

*The dimensions* follow from the two shapes:

    shape of the state array                          inferred names
    the parameter's                                   the parameter's
    one element                                       none: replicated
    the parameter's, with dimensions dropped or 1     those of the dimensions that are left
    the parameter's after additional dimensions       None for each of these, then the parameter's
    any other, or one with two readings               none: replicated, and reported by `Layout.check`
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.tree_util import GetAttrKey, KeyPath, SequenceKey

from flax_spmd._src.rules.decisions import padded
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
    unnamed: number of dimensions for which it has no name; below 0 if it has too many names. None if that is
      not a number: the names are a bare string, or the box is around several arrays.
    below: for a parameter, the number of its last keys that are its path among the parameters, if known.
  """

  path: KeyPath
  static: Any
  shape: Shape | None
  unnamed: int | None
  below: int | None = None

  @property
  def fits(self) -> bool:
    """Whether it has no more names than dimensions."""
    return self.unnamed is not None and self.unnamed >= 0


def infer(
  names: Sequence[Any], full: Shape | None, shape: Shape, field: str, parameter: str
) -> Inference:
  """Infers the names of a state array from its parameter.

  Args:
    names: the parameter's names; None for the dimensions after the last.
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
  names = padded(names, 0 if full is None else len(full))
  if shape == full:
    return Inference(names, 'same', parameter)
  if math.prod(shape) == 1:
    return Inference((None,) * len(shape), 'single', parameter)
  readings = set() if full is None else set(_readings(names, full, shape, field))
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
  parameters = {
    i: unit
    for i, unit in units.items()
    if unit.fits or (unit.unnamed is not None and not below_a_field(unit.path))
  }
  by_tail = _by_tail(parameters, keys)
  parameter_of = {}
  for i, unit in units.items():
    if unit.unnamed != 0 or below_a_field(unit.path):
      parameter = _find_parameter(i, units, keys, by_tail)
      if parameter is not None:
        parameter_of[i] = parameter
  return parameter_of


def find_bare_states(units: Mapping[int, Unit], bare: Set[int]) -> dict[int, int]:
  """Finds the parameter of every array without names that repeats the path of one.

  It is state of an optimizer, of any shape, if its path goes through a field of that state. Elsewhere, as in a plain
  dictionary of moments or averages, it must have the shape of the parameter, whose names must be in a collection: a
  function that maps over boxes returns boxes. An array is left out if it repeats more of the path of a parameter
  without names, or the paths of several parameters with different names.

  Args:
    units: the arrays of a tree, by their index in it.
    bare: the indices of those without names that may be state.

  Returns:
    The index of the parameter, by index of the state.
  """
  named = {i: unit for i, unit in units.items() if unit.static is not None}
  searched = {
    **{i: unit._replace(static=None, unnamed=0) for i, unit in named.items()},
    **{i: units[i]._replace(static=None, unnamed=None) for i in bare},
  }
  keys = {i: tuple(map(key_value, unit.path)) for i, unit in units.items()}
  present, by_tail = set(keys.values()), _by_tail({i: searched[i] for i in named}, keys)
  found = {
    i: _certain_parameter(i, parameter, units, keys, by_tail)
    for i, parameter in find_parameters(searched).items()
    if i in bare and not _repeats_a_longer_path(keys[i], keys[parameter], present)
  }
  return {
    i: parameter
    for i, parameter in found.items()
    if parameter is not None and _is_bare_state(units[i], units[parameter])
  }


def field_of(path: KeyPath) -> str:
  """The innermost field on a path: `v_row` in `opt_state/0/v_row/wi`."""
  return next((entry.name for entry in reversed(path) if isinstance(entry, GetAttrKey)), '')


def below_a_field(path: KeyPath) -> bool:
  """Whether a path goes through a field after its first key, as `opt_state/0/mu/wi` does."""
  return GetAttrKey in map(type, path[1:])


def are_optimizer_state(tree: Any, is_unit: Callable[[Any], bool]) -> list[bool]:
  """Whether each unit of a tree is part of an Optax state, in tree order.

  Args:
    tree: any tree.
    is_unit: whether a node is a box.
  """
  nodes = jax.tree.leaves(tree, is_leaf=lambda node: _is_optax_type(type(node)) or is_unit(node))
  states = [_is_optax_type(type(node)) for node in nodes]
  if not any(states):
    return states
  counts = [
    len(jax.tree.leaves(node, is_leaf=is_unit)) if state else 1 for node, state in zip(nodes, states)
  ]
  return [state for state, count in zip(states, counts) for _ in range(count)]


_STATES = ('State', 'ApplyEvery')  # ends of the names of Optax's types


class OptaxState:
  """Base class of nodes that stand for a state of Optax in a tree."""


@functools.cache
def optax_fields() -> list[frozenset[str]]:
  """The fields of each state of Optax, which NNX imports, and this package does not."""
  modules = [sys.modules.get('optax'), sys.modules.get('optax.contrib')]
  kinds = [kind for module in modules if module is not None for kind in vars(module).values()]
  return [
    frozenset(kind._fields)
    for kind in kinds
    if isinstance(kind, type) and kind.__name__.endswith(_STATES) and hasattr(kind, '_fields')
  ]


@functools.lru_cache(maxsize=1024)
def _is_optax_type(kind: type) -> bool:
  """Whether nodes of a type are states of Optax; `LookaheadParams` are not."""
  if issubclass(kind, OptaxState):
    return True
  return kind.__module__.split('.')[0] == 'optax' and kind.__name__.endswith(_STATES)


class _Parameters:
  """Parameters that share the last keys which their state may repeat; a state looks for the nearest of them.

  Those that differ only in where they are in the tree are alike: one of them answers for all at one distance. So a
  search takes as long among the parameters of a hundred models as among those of one.

  Args:
    tail: number of the last keys that they share.
  """

  def __init__(self, tail: int, units: Mapping[int, Unit], keys: Mapping[int, Any]):
    self._tail, self._units, self._keys = tail, units, keys
    self._members: list[int] = []

  def append(self, parameter: int) -> None:
    """Adds a parameter. They come in the order of the tree, all before the first search."""
    self._members.append(parameter)

  @functools.cached_property
  def _alike(self) -> dict[Any, dict[Any, list[int]]]:
    """For each kind of parameters that are alike, these by every start of their paths; see `_likeness`."""
    kinds: dict[Any, dict[Any, list[int]]] = defaultdict(lambda: defaultdict(list))
    for i in self._members:
      keys = self._keys[i]
      starts = kinds[_likeness(self._units[i], keys, self._tail)]
      for length in range(len(keys) + 1):
        starts[keys[:length]].append(i)
    return kinds

  def below(self, start: Any) -> Iterator[int]:
    """The parameters whose paths begin with certain keys; a single one without looking at its path."""
    if len(self._members) == 1:
      yield from self._members
      return
    for starts in self._alike.values():
      yield from starts.get(start, ())

  def nearest(self, path, i: int, is_state_of: Callable[[int], bool]) -> int | None:
    """The nearest parameter of those that a unit may be state of; of equally near ones the first in the tree.

    Args:
      path: keys of the unit, or of the list or dataclass that it is a part of.
      i: index of the unit, which is not its own parameter.
      is_state_of: whether it can be state of a parameter with another key before the tail. The answer is the same for
        all that are alike and share equally many first keys with the path.
    """
    here = _before(path, self._tail)
    if len(self._members) == 1:  # the usual case, in which an index would cost more than it saves
      [only] = self._members
      other_tail = _before(self._keys[only], self._tail) != here
      return only if only != i and other_tail and is_state_of(only) else None
    found = [
      candidate
      for (before, *_), starts in self._alike.items()
      if before != here  # otherwise the tail is longer
      if (candidate := self._nearest_alike(starts, path, i, is_state_of)) is not None
    ]
    return max(sorted(found), key=lambda other: _nearness(path, self._keys[other]), default=None)

  def _nearest_alike(self, starts, path, i: int, is_state_of: Callable[[int], bool]) -> int | None:
    before = _before(path, self._tail)
    for shared in range(len(path), -1, -1):
      for other in starts.get(path[:shared], ()):
        keys = self._keys[other]
        if other == i or _shared_keys(path, keys) != shared or _before(keys, self._tail) == before:
          continue  # itself, or nearer than that, or the tail is longer
        if is_state_of(other):
          return other
        break
    return None


def _before(keys, tail: int) -> Any:
  """The key before the last ones of a path; empty if there is none."""
  return keys[-tail - 1 : -tail]


def _likeness(parameter: Unit, keys, tail: int) -> Any:
  """What `_is_state_of` reads of a parameter, except for its first keys, and the key before its tail if not the first."""
  root = frozenset(entry for entry in _root(parameter, keys) if isinstance(entry, GetAttrKey))
  before = _before(keys, tail) if tail != len(keys) - 1 else None
  return (
    before,
    len(keys),
    'params' in keys[:2],
    root,
    parameter.shape,
    parameter.unnamed,
    parameter.below,
  )


def _by_tail(parameters: Mapping[int, Unit], keys: Mapping[int, Any]) -> dict[Any, _Parameters]:
  """The parameters by their names and the last keys that their state may repeat.

  Also by the key before the fewest of these and the rest: with one optimizer for each model, `params/actor/w` has
  `opt_states/actor/0/mu/w`.
  """
  by_tail: dict[Any, _Parameters] = {}

  def add(i: int, tail: int, *key: Any) -> None:
    key = (parameters[i].static, *key)
    if key not in by_tail:
      by_tail[key] = _Parameters(tail, parameters, keys)
    by_tail[key].append(i)

  for i, unit in parameters.items():
    length = 0
    for length in _tail_lengths(keys[i], unit.below):
      add(i, length, keys[i][-length:])
    if length > 1:
      add(i, length - 1, keys[i][-length], keys[i][1 - length :])
  return by_tail


def _tail_lengths(keys: Sequence[Any], below: int | None) -> Sequence[int]:
  """How many of a parameter's last keys its state may repeat: all, all but the root, or all below `params`."""
  shortest = len(keys) - (2 if 'params' in keys[1:2] else 1) if below is None else below
  return range(len(keys), max(shortest, 1) - 1, -1)


def _find_parameter(i: int, units: Mapping[int, Unit], keys, by_tail) -> int | None:
  """The unit with the longest tail that unit `i` repeats; of several, the nearest in the tree.

  The unit may be a part of a list or of a dataclass at the place of the parameter, such as SM3's vectors, or the
  moments of T5X's Adafactor.
  """
  found = _parameter_at(keys[i], i, units, keys, by_tail)
  if found is None and units[i].path and isinstance(units[i].path[-1], (SequenceKey, GetAttrKey)):
    found = _parameter_at(keys[i][:-1], i, units, keys, by_tail)
  return found


def _parameter_at(path, i: int, units: Mapping[int, Unit], keys, by_tail) -> int | None:
  static = units[i].static
  for length, before in itertools.product(range(len(path), 0, -1), (False, True)):
    if before:  # as many keys in two parts
      length -= 1
      tails = [(static, key, path[-length:]) for key in path[:-length]] if length else []
    else:
      tails = [(static, path[-length:])]
    found: _Parameters | None = next(filter(None, map(by_tail.get, tails)), None)
    if found is None:
      continue

    def is_state_of(other: int, length: int = length) -> bool:
      fits = units[other].fits or units[other].shape == units[i].shape
      return fits and _is_state_of(units[i], path, units[other], keys[other], length)

    nearest = found.nearest(path, i, is_state_of)
    if nearest is None:
      continue
    if not _has_a_nearer(path, i, _shared_keys(path, keys[nearest]), length, units, keys, by_tail):
      return nearest
  return None


def _has_a_nearer(
  path, i: int, shared: int, length: int, units: Mapping[int, Unit], keys, by_tail
) -> bool:
  """Whether a parameter of a shorter tail is in the same model as a unit, of which a found one is not."""
  tails = (by_tail.get((units[i].static, path[-shorter:])) for shorter in range(length - 1, 0, -1))
  return any(
    other != i and _shared_keys(path, keys[other]) > shared
    for parameters in tails
    if parameters is not None
    for other in parameters.below(path[: shared + 1])
  )


def _nearness(path, parameter) -> tuple[int, int]:
  """How near a parameter is to its state, by their paths."""
  return _shared_keys(path, parameter), -len(parameter)


def _is_state_of(unit: Unit, path, parameter: Unit, keys, length: int) -> bool:
  """Whether a unit can be state of the parameter whose last `length` keys it repeats.

  The paths have to part at an optimizer: at a field that is not the first key, and not one above the parameter, as
  `params` is for the parameters of two models. Custom optimizers may keep plain dictionaries; there, too many names
  are enough, and so is a stack of arrays of the parameter's shape.
  """
  shared = _shared_keys(path, keys)
  if len(keys) - shared - length < (1 if shared else 0):
    return False
  between = unit.path[shared : len(path) - length]
  root = _root(parameter, keys)
  if not unit.fits or any(isinstance(entry, GetAttrKey) and entry not in root for entry in between[1:]):
    return True
  apart = GetAttrKey in map(type, between) or ('params' in keys[:2] and 'params' not in path[:2])
  return apart and _is_stack_of(unit, parameter)


def _root(parameter: Unit, keys) -> KeyPath:
  """The start of a parameter's path that its state never repeats."""
  return parameter.path[: len(keys) - _tail_lengths(keys, parameter.below)[-1]]


def _is_stack_of(unit: Unit, parameter: Unit) -> bool:
  """Whether a unit has names for fewer of its dimensions than the parameter, and ends with its shape."""
  if unit.unnamed is None or parameter.unnamed is None or unit.unnamed <= parameter.unnamed:
    return False
  full, shape = parameter.shape, unit.shape
  return full is not None and shape is not None and shape[len(shape) - len(full) :] == full


def _is_bare_state(unit: Unit, parameter: Unit) -> bool:
  """Whether an array without names that repeats a parameter's path is state of it; see `find_bare_states`."""
  shared = _shared_keys(unit.path, parameter.path)
  if below_a_field(unit.path[shared:]):
    return True
  return parameter.below is not None and unit.shape == parameter.shape


def _repeats_a_longer_path(state, parameter, present: Set[Any]) -> bool:
  """Whether the tree has, beside a parameter, an array of which a state repeats more keys."""
  state, length = _repeated(state, parameter)
  root = parameter[: len(parameter) - length]
  longer = ((*root, *state[-more:]) for more in range(length + 1, len(state) + 1))
  return any(path in present and path != state for path in longer)


def _certain_parameter(i: int, parameter: int, units: Mapping[int, Unit], keys, by_tail) -> int | None:
  """The parameter of a state among all that are as near; None if these have different names."""
  state, length = _repeated(keys[i], keys[parameter])
  nearness = _nearness(state, keys[parameter])
  tails = by_tail.get((None, state[-length:]))
  near = tails.below(state[: nearness[0]]) if tails is not None else ()
  nearest = sorted(other for other in near if _nearness(state, keys[other]) == nearness)
  if parameter not in nearest:  # found by the name of its model
    return parameter
  shaped = [other for other in nearest if units[other].shape == units[i].shape] or nearest
  return shaped[0] if len({units[other].static for other in shaped}) == 1 else None


def _repeated(state, parameter) -> tuple[Any, int]:
  """The path of a state, up to the part of a list or dataclass, and how many last keys of the parameter it repeats."""
  length = _shared_keys(state[::-1], parameter[::-1])
  return (state, length) if length else (state[:-1], _shared_keys(state[-2::-1], parameter[::-1]))


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
