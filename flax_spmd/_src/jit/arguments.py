"""Arguments of a jitted function: static and dynamic ones, and the placement of each dynamic one.

arguments = Arguments.of(fn, {'static_argnums': 2})
arguments.dynamic(args, kwargs)           # the traced arguments
arguments.placed(in_rules, dynamic)       # each of them with its placement
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import DictKey, KeyPath

from flax_spmd._src import compat
from flax_spmd._src.cycles import outermost_modules
from flax_spmd._src.jit.tree_constraints import with_sharding_constraint
from flax_spmd._src.mesh import MeshLike, placed_sharding
from flax_spmd._src.names.nnx_variables import check_functional
from flax_spmd._src.rules.placements import PlacedPart, is_placement
from flax_spmd._src.text import shown, value_text
from flax_spmd._src.tree_paths import key_value, path_string
from flax_spmd.errors import ArgumentTypeError, LayoutError, Problem, did_you_mean, raise_problems


class Arguments(NamedTuple):
  """The static arguments of a function, by position and by name.

  Attributes:
    positions: positions of the static arguments.
    names: their names, for calls with keyword arguments.
    function_signature: the function's signature; None for a builtin without one.
  """

  positions: frozenset[int]
  names: frozenset[str]
  function_signature: inspect.Signature | None

  @classmethod
  def of(cls, fn: Callable[..., Any], options: Mapping[str, Any]) -> Arguments:
    """The arguments of `fn` under options of `jax.jit` (`static_argnums`, `static_argnames`).

    Raises:
      LayoutError: an option, also one for donated arguments, is for a parameter that `fn` does not have.
    """
    numbers = options.get('static_argnums')
    names = options.get('static_argnames')
    numbers, names = set(_each(numbers, (int, np.integer))), set(_each(names, str))
    try:
      signature = inspect.signature(fn)
      parameters = [p.name for p in signature.parameters.values() if p.kind in _BY_POSITION]
    except (TypeError, ValueError):  # builtins without a signature
      signature, parameters = None, []
    if signature is not None:
      raise_problems(list(_option_problems(fn, signature, options)))
    numbers = {number % len(parameters) if parameters and number < 0 else number for number in numbers}
    numbers |= {parameters.index(name) for name in names if name in parameters}
    names |= {parameters[number] for number in numbers if number < len(parameters)}
    return cls(frozenset(numbers), frozenset(names), signature)

  def dynamic(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The dynamic arguments: those that JAX traces."""
    by_position = tuple(value for i, value in enumerate(args) if i not in self.positions)
    return by_position, {name: value for name, value in kwargs.items() if name not in self.names}

  def filled(
    self, dynamic, args: Sequence[Any], kwargs: Mapping[str, Any]
  ) -> tuple[tuple, dict[str, Any]]:
    """The arguments, with the dynamic ones replaced by `dynamic`."""
    values, named = iter(dynamic[0]), dynamic[1]
    args = tuple(value if i in self.positions else next(values) for i, value in enumerate(args))
    return args, {**kwargs, **named}

  def by_position(self, args, kwargs) -> tuple[tuple, dict[str, Any]]:
    """The same arguments, passed by position as far as the function allows."""
    if not kwargs or self.function_signature is None:
      return args, kwargs
    bound = self.function_signature.bind(*args, **kwargs)
    return bound.args, bound.kwargs

  def dynamic_names(self) -> list[str]:
    """The names of the dynamic parameters, in order."""
    return [
      name
      for i, name in enumerate(self._parameters())
      if i not in self.positions and name not in self.names
    ]

  def named_path(self, path: KeyPath) -> KeyPath:
    """The path of a leaf of the dynamic arguments, a pair `(args, kwargs)`, from its parameter: `argument batch/x`."""
    among, argument = map(key_value, path[:2])
    return (*(self._name_path if among else self._position_path)(argument), *path[2:])

  def _name_path(self, name: str) -> KeyPath:
    return (DictKey(f'argument {name}'),)

  def _position_path(self, position: int) -> KeyPath:
    """The path of a positional argument: of its parameter, with a position in it for one of `*args`."""
    names, parameters = self.dynamic_names(), self._parameters()
    for i, name in enumerate(names[: position + 1]):
      if parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
        return *self._name_path(name), DictKey(position - i)
    return self._name_path(names[position] if position < len(names) else str(position))

  def _parameters(self) -> Mapping[str, inspect.Parameter]:
    return {} if self.function_signature is None else self.function_signature.parameters

  def placed(self, placements: Any, dynamic: tuple[tuple, dict[str, Any]]) -> list[PlacedPart]:
    """Each dynamic argument with its placement, in the order of their leaves.

    Args:
      placements: one for all arguments, a tuple, or a dict by parameter name.
      dynamic: the arguments.

    Raises:
      LayoutError: there are more placements than arguments, or placements for unknown parameters.
    """
    args, kwargs = dynamic
    by_position, by_name = self._spread(placements, dynamic)
    return [
      *(PlacedPart(self._position_path(i), by_position[i], arg) for i, arg in enumerate(args)),
      *(PlacedPart(self._name_path(name), by_name[name], kwargs[name]) for name in sorted(kwargs)),
    ]

  def _spread(
    self, placements: Any, dynamic: tuple[tuple, dict[str, Any]]
  ) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The placement of each argument by position and by name."""
    args, kwargs = dynamic
    if isinstance(placements, str):
      raise LayoutError(
        f'The bare string {value_text(placements)} is no placement.\n'
        f'Fix: write logical names as a tuple, ({value_text(placements)}, None), or give one placement per argument.'
      )
    if is_placement(placements) and not _is_one_per_argument(placements):
      return (placements,) * len(args), dict.fromkeys(kwargs, placements)
    names = self.dynamic_names()
    if isinstance(placements, Mapping):
      self._check_names(placements, names)
      by_name, by_position = placements, [placements.get(name) for name in names]
    elif not isinstance(placements, (tuple, list)):
      raise LayoutError(
        f'{shown(placements)} is no placement.\n'
        'Fix: give one placement for all arguments, a tuple with one per argument, or a dict by parameter name.'
      )
    else:
      self._check_count(placements, max(len(names), len(args)))
      by_name, by_position = dict(zip(names, placements, strict=False)), list(placements)
    rest = by_position[-1] if by_position and self._is_variadic(len(names)) else None
    filled = (*by_position, *(rest,) * len(args))
    return filled[: len(args)], {name: by_name.get(name) for name in kwargs}

  def by_argument(
    self, values: Any, dynamic: tuple[tuple, dict[str, Any]]
  ) -> tuple[tuple, dict[str, Any]]:
    """One value per dynamic argument, from one for all, one per argument in order, or a dict by parameter name.

    Raises:
      LayoutError: there is no value for an argument, or a value without an argument.
    """
    args, kwargs = dynamic
    if not isinstance(values, (tuple, list, Mapping)):
      return (values,) * len(args), dict.fromkeys(kwargs, values)
    names = [*self.dynamic_names(), *map(str, range(len(self.dynamic_names()), len(args)))]
    if not isinstance(values, Mapping):
      values = dict(zip(names, values, strict=False)) if len(values) <= len(names) else {}
    passed = [*names[: len(args)], *kwargs]
    missing = [name for name in passed if name not in values]
    unknown = [name for name in values if name not in passed]
    if missing or unknown:
      raise LayoutError(
        f'in_axes has entries for {_listed(list(values)) or "other arguments"}, but the call passes {_listed(passed)}.\n'
        'Fix: give one entry per argument, in the order of the parameters or as a dict by parameter name.'
      )
    return tuple(values[name] for name in passed[: len(args)]), {name: values[name] for name in kwargs}

  def _is_variadic(self, count: int) -> bool:
    """Whether the last of `count` parameters is `*args`; its placement then applies to each argument."""
    known = list(self._parameters().values())
    return bool(known) and len(known) == count and known[-1].kind is inspect.Parameter.VAR_POSITIONAL

  def _check_names(self, placements: Mapping[str, Any], names: Sequence[str]) -> None:
    unknown = [name for name in placements if name not in names]
    if unknown:
      raise LayoutError(
        f'There are placements for {_listed(unknown)}, but the dynamic parameters are '
        f'{_listed(names)}.{did_you_mean(str(unknown[0]), names)}\n'
        'Fix: correct the name; to pass a tree of placements for one argument, put it into a tuple, '
        '({...},).'
      )

  def _check_count(self, placements: Sequence[Any], count: int) -> None:
    if len(placements) > count:
      raise LayoutError(
        f'There are {len(placements)} placements for {count} dynamic argument{"" if count == 1 else "s"}.\n'
        'Fix: pass one placement per argument; None keeps the sharding that an argument has.'
      )

  def constrained(self, fn: Callable[..., Any], placements: Any) -> Callable[..., Any]:
    """`fn` with sharding constraints on its dynamic arguments."""

    @functools.wraps(fn)
    def on_entry(*args, **kwargs):
      dynamic = self.dynamic(args, kwargs)
      placed = self.placed(placements, dynamic)
      check_functional([part.tree for part in placed if part.placement is not None], 'in_constraints')
      values = [with_sharding_constraint(part.tree, part.placement) for part in placed]
      count = len(dynamic[0])
      named = dict(zip(sorted(dynamic[1]), values[count:], strict=True))
      args, kwargs = self.filled((values[:count], named), args, kwargs)
      return fn(*args, **kwargs)

    return on_entry

  def signature(self, args: Sequence[Any], kwargs: Mapping[str, Any], mesh: MeshLike) -> Any:
    """A cache key with everything that the structure and shardings of a result on a mesh can depend on."""
    leaves, treedef = jax.tree.flatten(self.dynamic(args, kwargs))
    described = tuple([_leaf_signature(leaf, mesh) for leaf in leaves])
    wide = getattr(jax.config, 'jax_enable_x64')  # noqa: B009, not in the types of every version
    return treedef, described, len(args), self.statics(args, kwargs), wide

  def structure(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The part of the signature that costs little: the structure of the arguments, and the static ones."""
    return jax.tree.structure(self.dynamic(args, kwargs)), self.statics(args, kwargs)

  def with_static_objects(self, args, kwargs) -> tuple[Any, Any]:
    """The arguments, with every object that JAX cannot trace as part of their structure: it is static.

    Raises:
      LayoutError: objects that are not hashable either (lists all of them).
    """
    dynamic = self.dynamic(args, kwargs)
    leaves, treedef = jax.tree.flatten(dynamic)
    if all(map(_has_traceable_instances, set(map(type, leaves)))) or all(map(is_traceable, leaves)):
      return args, kwargs
    self._check_static_objects(dynamic)
    return self.filled(jax.tree.unflatten(treedef, map(_as_static, leaves)), args, kwargs)

  def without_static_objects(self, args, kwargs) -> tuple[Any, Any]:
    """The arguments, with the objects themselves in place of those that `with_static_objects` made."""
    return jax.tree.map(
      lambda leaf: leaf.value if isinstance(leaf, _StaticObject) else leaf,
      (args, kwargs),
      is_leaf=lambda node: isinstance(node, _StaticObject),
    )

  def _check_static_objects(self, dynamic: tuple[tuple, dict[str, Any]]) -> None:
    problems = [
      Problem(
        f'{path_string(self.named_path(path))} is a {type(leaf).__name__}, which is neither an array nor hashable.',
        'pass it as arrays, or as a hashable object (a tuple, a frozen dataclass), which is then static.',
      )
      for path, leaf in jax.tree_util.tree_leaves_with_path(dynamic)
      if not is_traceable(leaf) and not is_hashable(leaf)
    ]
    raise_problems(problems)

  def statics(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], ...]:
    """The static arguments: position or name, type, and value.

    Raises:
      ArgumentTypeError: an argument is not hashable.
    """
    static = tuple((i, type(value), value) for i, value in enumerate(args) if i in self.positions)
    static += tuple(
      (name, type(value), value) for name, value in sorted(kwargs.items()) if name in self.names
    )
    _check_hashable(static)
    return static


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _leaf_signature(leaf: Any, mesh: MeshLike) -> Any:
  shape = getattr(leaf, 'shape', None)
  if shape is None:
    return type(leaf)
  return shape, leaf.dtype, getattr(leaf, 'weak_type', False), placed_sharding(leaf, mesh)


def abstract_leaf(leaf: Any) -> Any:
  """An argument without its data, which may be deleted: shape, dtype and, if it is committed, sharding."""
  if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
    return leaf
  sharding = leaf.sharding if leaf.committed else None
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)


def is_traceable(leaf: Any) -> bool:
  """Whether JAX can trace an argument: an array, concrete or abstract, or a number."""
  if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in 'OSU':
    return False
  return not isinstance(leaf, type) and _is_traceable_type(type(leaf))


@functools.cache
def _has_traceable_instances(cls: type) -> bool:
  """Whether JAX can trace every instance of a class, so that none has to be looked at."""
  return not issubclass(cls, (np.ndarray, np.generic, type)) and _is_traceable_type(cls)


def is_array(leaf: Any) -> bool:
  """Whether an argument is an array, concrete or abstract, rather than a Python number or another object."""
  return is_traceable(leaf) and not isinstance(leaf, _NUMBERS)


_NUMBERS = (bool, int, float, complex)


@functools.cache
def _is_traceable_type(cls: type) -> bool:
  if issubclass(cls, _NUMBERS):
    return not issubclass(cls, enum.Enum)
  return hasattr(cls, '__jax_array__') or (hasattr(cls, 'shape') and hasattr(cls, 'dtype'))


class _StaticObject:
  """An object in a tree of arguments that is static: part of the tree's structure, compared by type and value."""

  __slots__ = ('value',)

  def __init__(self, value: Any):
    self.value = value

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, _StaticObject):
      return NotImplemented
    return type(self.value) is type(other.value) and self.value == other.value

  def __hash__(self) -> int:
    return hash((type(self.value), self.value))

  def __repr__(self) -> str:
    return repr(self.value)


jax.tree_util.register_pytree_node(
  _StaticObject, lambda node: ((), node), lambda node, _: _StaticObject(node.value)
)


def _as_static(leaf: Any) -> Any:
  return leaf if is_traceable(leaf) else _StaticObject(leaf)


def argument_options(**options: Any) -> dict[str, Any]:
  """Options of `jax.jit` for arguments, by position (`argnums`) or name (`argnames`), with their entries in tuples.

  Raises:
    LayoutError: an entry is neither a position nor a name (lists all of them).
  """
  kinds = {name: str if name.endswith('argnames') else (int, np.integer) for name in options}
  entries = {
    name: tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    for name, value in options.items()
    if value is not None
  }
  raise_problems(
    [
      Problem(
        f'{name} has {shown(entry)}, which is not the {"name" if kinds[name] is str else "position"} of a parameter.',
        f'pass positions as {name.partition("_")[0]}_argnums, and names as {name.partition("_")[0]}_argnames.',
      )
      for name, each in entries.items()
      for entry in each
      if not isinstance(entry, kinds[name])
    ]
  )
  return {name: entries.get(name) for name in options}


def is_hashable(value: Any) -> bool:
  try:
    hash(value)
  except TypeError:
    return False
  return True


def _check_hashable(static: Sequence[tuple[int | str, type, Any]]) -> None:
  """Raises a TypeError that names the static argument that is not hashable."""
  for where, kind, value in static:
    try:
      hash(value)
    except TypeError:
      raise ArgumentTypeError(
        f'Static argument {value_text(where)} is a {kind.__name__}, which is not hashable: {shown(value)}.\n'
        'Fix: pass a tuple, a frozen dataclass or another hashable value.'
      ) from None


def _is_one_per_argument(placements: Any) -> bool:
  """A tuple of Nones means one placement per argument; it could also be the names of one array."""
  return isinstance(placements, (tuple, list)) and not any(
    isinstance(entry, str) for entry in placements
  )


def _option_problems(
  fn: Callable[..., Any], signature: inspect.Signature, options: Mapping[str, Any]
) -> Iterator[Problem]:
  """The problem of every name and number in options that no parameter of a function has, unless it takes any."""
  kinds = [parameter.kind for parameter in signature.parameters.values()]
  names = [name for name, kind in zip(signature.parameters, kinds, strict=True) if kind in _BY_NAME]
  count = sum(kind in _BY_POSITION for kind in kinds)
  described = f'{getattr(fn, "__name__", "the function")}{signature}'
  for option, value in options.items():
    if option.endswith('argnames') and inspect.Parameter.VAR_KEYWORD not in kinds:
      for name in _each(value, str):
        if name not in names:
          text = f'{option} has {name!r}, which is no parameter of {described}.'
          yield Problem(text + did_you_mean(name, names), 'correct the name.')
    if option.endswith('argnums') and inspect.Parameter.VAR_POSITIONAL not in kinds:
      for number in _each(value, (int, np.integer)):
        if not -count <= number < count:
          yield Problem(
            f'{option} has {number}, but {described} has {count} positional parameters.',
            'count the parameters from 0, or give the name of one.',
          )


def _each(value: Any, kind: Any) -> Sequence[Any]:
  """The entries of an option that may be a single one, or None."""
  return () if value is None else (value,) if isinstance(value, kind) else tuple(value)


def _listed(names: Sequence[str]) -> str:
  return ', '.join(map(repr, names))


def check_no_others(function: Callable[..., Any], others: Mapping[str, Any]) -> None:
  """Checks that a method of a layout is given no options but its own.

  Raises:
    ArgumentTypeError: names the other options, and for shardings of `jax.jit` the method's own options.
  """
  if not others:
    return
  known = [name for name in inspect.signature(function).parameters if name not in ('self', 'others')]
  method, lines, fixes = f'layout.{function.__name__}', [], []
  for name in others:
    own = _OPTIONS_OF_JAX.get(name)
    lines.append(f'{method} has no option {name!r}.{"" if own else did_you_mean(name, known)}')
    fixes.append(
      f'pass {own}, which accepts shardings too.' if own else 'correct the name, or leave it out.'
    )
  raise ArgumentTypeError('\n'.join([*lines, *(f'Fix: {fix}' for fix in dict.fromkeys(fixes))]))


_OPTIONS_OF_JAX = {'in_shardings': 'in_rules', 'out_shardings': 'out_rules'}


def closed_over(
  fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
  """`fn` as a function of its arrays and NNX modules by name, closed over all other arguments; and these.

  Their names are parameters and paths, as errors name them. The structure of arguments, which JAX could not compare if
  it has such metadata as lists, is no argument.
  """
  named = {f'argument {number}': value for number, value in enumerate(args)}
  named |= {f'argument {name}': value for name, value in kwargs.items()}
  outermost_modules(named)  # raises for what JAX would follow to the end of the stack
  paths, treedef = jax.tree.flatten_with_path(
    (tuple(args), dict(kwargs)), is_leaf=lambda node: compat.is_nnx_module_type(type(node))
  )
  arguments, numbers = Arguments.of(fn, {}), {}
  for number, (path, leaf) in enumerate(paths):
    if compat.is_nnx_module_type(type(leaf)) or is_array(leaf):
      name = path_string(arguments.named_path(path)).removeprefix('argument ')
      numbers[f'{name} ({number})' if name in numbers else name] = number

  @functools.wraps(fn, updated=())
  def of_arrays(**arrays):
    leaves = [leaf for _, leaf in paths]
    for name, array in arrays.items():
      leaves[numbers[name]] = array
    args, kwargs = jax.tree.unflatten(treedef, leaves)
    return fn(*args, **kwargs)

  cast(Any, of_arrays).__signature__ = inspect.signature(of_arrays, follow_wrapped=False)
  return of_arrays, {name: paths[number][1] for name, number in numbers.items()}
