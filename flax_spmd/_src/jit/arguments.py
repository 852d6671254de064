"""Arguments of a function under jit: which are static, and which place is meant for which.

arguments = Arguments.of(fn, {'static_argnums': 2})
arguments.dynamic(args, kwargs)           # those that are traced
arguments.spread(in_rules, dynamic)       # a place for each of them
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from flax_spmd._src.jit.tree_constraints import with_sharding_constraint
from flax_spmd._src.rules.placements import is_place
from flax_spmd.errors import LayoutError, did_you_mean


class Arguments(NamedTuple):
  """Which arguments are static, by position and by name, however they were declared and passed."""

  positions: frozenset[int]
  names: frozenset[str]
  described: inspect.Signature | None

  @classmethod
  def of(cls, fn: Callable[..., Any], options: Mapping[str, Any]) -> Arguments:
    """Those of `fn` under these options of `jax.jit`."""
    numbers = options.get('static_argnums')
    names = options.get('static_argnames')
    numbers = {numbers} if isinstance(numbers, int) else set(numbers or ())
    names = {names} if isinstance(names, str) else set(names or ())
    try:
      described = inspect.signature(fn)
      parameters = [p.name for p in described.parameters.values() if p.kind in _BY_POSITION]
    except (TypeError, ValueError):  # builtins without a signature
      described, parameters = None, []
    numbers = {number % len(parameters) if parameters and number < 0 else number for number in numbers}
    numbers |= {parameters.index(name) for name in names if name in parameters}
    names |= {parameters[number] for number in numbers if number < len(parameters)}
    return cls(frozenset(numbers), frozenset(names), described)

  def dynamic(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments that are not static."""
    by_position = tuple(value for i, value in enumerate(args) if i not in self.positions)
    return by_position, {name: value for name, value in kwargs.items() if name not in self.names}

  def filled(
    self, dynamic, args: Sequence[Any], kwargs: Mapping[str, Any]
  ) -> tuple[tuple, dict[str, Any]]:
    """The arguments with those that are not static replaced by `dynamic`."""
    values, named = iter(dynamic[0]), dynamic[1]
    args = tuple(value if i in self.positions else next(values) for i, value in enumerate(args))
    return args, {**kwargs, **named}

  def by_position(self, args, kwargs) -> tuple[tuple, dict[str, Any]]:
    """The same arguments, by position as far as the function allows."""
    if not kwargs or self.described is None:
      return args, kwargs
    bound = self.described.bind(*args, **kwargs)
    return bound.args, bound.kwargs

  def _parameters(self) -> list[str]:
    """The names of the parameters that are not static, in order."""
    known = {} if self.described is None else self.described.parameters
    return [name for i, name in enumerate(known) if i not in self.positions and name not in self.names]

  def spread(self, places: Any, dynamic: tuple[tuple, dict[str, Any]]) -> tuple[tuple, dict[str, Any]]:
    """A place for each argument that is not static, from one for all, a tuple or a dict by parameter.

    Raises:
      LayoutError: places for more arguments than there are, or for parameters that do not exist.
    """
    args, kwargs = dynamic
    if is_place(places) and not _is_for_each(places):
      return (places,) * len(args), dict.fromkeys(kwargs, places)
    names = self._parameters()
    if isinstance(places, Mapping):
      self._check_names(places, names)
      by_name, by_position = places, [places.get(name) for name in names]
    else:
      self._check_count(places, max(len(names), len(args)))
      by_name, by_position = dict(zip(names, places, strict=False)), list(places)
    rest = by_position[-1] if by_position and self._takes_any_number(len(names)) else None
    filled = (*by_position, *(rest,) * len(args))
    return filled[: len(args)], {name: by_name.get(name) for name in kwargs}

  def _takes_any_number(self, count: int) -> bool:
    """Whether the last of this many parameters is `*args`, each of which has its place."""
    known = [] if self.described is None else list(self.described.parameters.values())
    return bool(known) and len(known) == count and known[-1].kind is inspect.Parameter.VAR_POSITIONAL

  def _check_names(self, places: Mapping[str, Any], names: Sequence[str]) -> None:
    unknown = [name for name in places if name not in names]
    if unknown:
      raise LayoutError(
        f'There are places for {_named(unknown)}, but the parameters that are not static are '
        f'{_named(names)}.{did_you_mean(str(unknown[0]), names)}\nFix: correct the name; a tree of places '
        'for one argument stands in a tuple, ({...},).'
      )

  def _check_count(self, places: Sequence[Any], count: int) -> None:
    if len(places) > count:
      raise LayoutError(
        f'There are {len(places)} places for {count} argument{"" if count == 1 else "s"} that '
        f'{"is" if count == 1 else "are"} not static.\n'
        'Fix: give one place per argument, None for one that may lie anywhere.'
      )

  def constrained(self, fn: Callable[..., Any], places: Any) -> Callable[..., Any]:
    """`fn` with its arguments constrained on entry."""

    @functools.wraps(fn)
    def on_entry(*args, **kwargs):
      dynamic = self.dynamic(args, kwargs)
      dynamic = with_sharding_constraint(dynamic, self.spread(places, dynamic))
      args, kwargs = self.filled(dynamic, args, kwargs)
      return fn(*args, **kwargs)

    return on_entry

  def signature(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What the structure and the shardings of a result can depend on."""
    leaves, treedef = jax.tree.flatten(self.dynamic(args, kwargs))
    return treedef, tuple(map(_leaf_signature, leaves)), len(args), self.statics(args, kwargs)

  def statics(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], ...]:
    """The static arguments, with their places and types.

    Raises:
      TypeError: one has no hash.
    """
    static = tuple((i, type(value), value) for i, value in enumerate(args) if i in self.positions)
    static += tuple(
      (name, type(value), value) for name, value in sorted(kwargs.items()) if name in self.names
    )
    _check_hashable(static)
    return static


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _leaf_signature(leaf: Any) -> Any:
  shape = getattr(leaf, 'shape', None)
  return type(leaf) if shape is None else (shape, leaf.dtype)


def _check_hashable(static: Sequence[tuple[int | str, type, Any]]) -> None:
  """Raises a TypeError that names the static argument which has no hash."""
  for where, kind, value in static:
    try:
      hash(value)
    except TypeError:
      raise TypeError(
        f'Static argument {where!r} is a {kind.__name__}, which has no hash: {value!r}.\n'
        'Fix: pass a tuple, a frozen dataclass or another hashable value.'
      ) from None


def _is_for_each(places: Any) -> bool:
  """A tuple of nothing but Nones is one for each argument, and no array's names."""
  return isinstance(places, (tuple, list)) and not any(isinstance(entry, str) for entry in places)


def _named(names: Sequence[str]) -> str:
  return ', '.join(map(repr, names))


def closed_over(
  fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[[list[Any]], Any], list[Any]]:
  """`fn` as a function of its arrays and numbers only; everything else is closed over."""
  leaves, treedef = jax.tree.flatten((args, kwargs))
  is_array = [hasattr(leaf, 'dtype') or isinstance(leaf, (bool, int, float, complex)) for leaf in leaves]
  arrays = [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]

  @functools.wraps(fn)
  def of_arrays(arrays):
    given = iter(arrays)
    filled = [next(given) if array else leaf for leaf, array in zip(leaves, is_array, strict=True)]
    args, kwargs = treedef.unflatten(filled)
    return fn(*args, **kwargs)

  return of_arrays, arrays
