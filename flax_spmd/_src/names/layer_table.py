"""Layer tables: the names of arrays by the type of their layer, or by their path.

    {'mlp/wi/kernel$': ('embed', 'mlp'), nn.Dense: {'kernel': ('in', 'out')}, '/blocks/': 'layers'}

An entry for a type has the paths of arrays below a module of that type, so it may be for a block of several layers. Of
several entries for an array, the first whose expression matches its path has priority, then that of the outermost
module, then that of the most derived type.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import flax.linen as nn

from flax_spmd._src import compat
from flax_spmd._src.flax_layers import layer_names
from flax_spmd._src.rules.path_patterns import problem_of, searcher
from flax_spmd._src.text import value_text
from flax_spmd.errors import LayoutError, Problem, did_you_mean, raise_problems


class Layer(NamedTuple):
  """A module that an array is in, with everything that tables have for the array by the module's type.

  Attributes:
    cls: the type of the module.
    below: path of the array below the module.
    found: for each table the key and the names of its entry, or None.
  """

  cls: type
  below: str
  found: tuple[Any, ...]

  @classmethod
  def of(cls, module: Any, below: str, tables: Sequence[LayerTable]) -> Self:
    """The layer for an array below a module."""
    return cls(type(module), below, tuple(table.find_type(module, below) for table in tables))


@dataclass(frozen=True)
class NameOrigin:
  """The array that a box was made for, and the entry that names it.

  Attributes:
    path: path of the array, from the top module.
    layers: the modules that it is in, the outermost first.
    key: the expression of the entry, or its type with the path below; None for one of Flax's layers.
    stacked: name of the dimensions that transformations add.
    problem: the reason why the names do not fit.
  """

  path: str
  layers: tuple[Layer, ...]
  key: Any
  stacked: str | None
  problem: Problem | None = None


@dataclass(frozen=True)
class LayerTable:
  """The entries of a table, checked; hashable.

  Attributes:
    paths: expressions and names.
    stacks: expressions and the name of the dimensions that transformations add.
    types: types and their names, by path below a module of the type.
  """

  paths: tuple[tuple[str, Any], ...] = ()
  stacks: tuple[tuple[str, str], ...] = ()
  types: tuple[tuple[type, tuple[tuple[str, Any], ...]], ...] = ()

  @classmethod
  def of(cls, written: Any) -> Self:
    """The table in a dictionary or in a sequence of pairs.

    Raises:
      LayoutError: an entry is invalid, or a key occurs twice (lists all of them).
    """
    pairs: Any = list(written.items()) if isinstance(written, Mapping) else written
    if not isinstance(pairs, (list, tuple)) or any(
      type(pair) is not tuple or len(pair) != 2 for pair in pairs
    ):
      raise LayoutError(
        f'{value_text(written)} is not a table of names.\n'
        'Fix: give a dictionary or a sequence of pairs: from types of Flax modules, or expressions for paths, to names.'
      )
    raise_problems(list(_problems(pairs)))
    return cls(
      tuple((key, value) for key, value in pairs if isinstance(key, str) and not isinstance(value, str)),
      tuple((key, value) for key, value in pairs if isinstance(value, str)),
      tuple((key, tuple(value.items())) for key, value in pairs if isinstance(key, type)),
    )

  def stacked(self, path: str) -> str | None:
    """The name of the dimensions that transformations add to an array."""
    return next((name for pattern, name in self.stacks if searcher(pattern)(path)), None)

  def find(self, path: str, layers: Sequence[Layer], index: int) -> tuple[Any, Any] | None:
    """The key and the names of the entry for an array, in this table, which is number `index` of those of the layers."""
    return self.find_path(path) or next(
      (each.found[index] for each in layers if each.found[index]), None
    )

  def find_path(self, path: str) -> tuple[Any, Any] | None:
    """The first expression that matches the path of an array, and its names; None without one."""
    return next((each for each in self.paths if searcher(each[0])(path)), None)

  def find_type(self, module: Any, below: str) -> tuple[Any, Any] | None:
    """The key and the names of the entry for an array below a module of some type; None without one."""
    types = dict(self.types)
    for cls in type(module).__mro__:
      for name, names in types.get(cls, ()):
        if name == below:
          if callable(names):
            names = names(module)
            raise_problems(list(_name_problems(f'{cls.__name__}, {name!r}: its function', names)))
          return (cls, name), names
    return None

  def idle(self, origins: Sequence[NameOrigin], paths: Iterable[str]) -> Iterator[Problem]:
    """The problem of every entry that names nothing. An entry for a type that a model lacks is none.

    Args:
      origins: those of all arrays that have names.
      paths: the paths of all arrays of the result, also of those with names of their own.
    """
    known = list(dict.fromkeys([*(origin.path for origin in origins), *paths]))
    for pattern, names in (*self.paths, *self.stacks):
      if not any(map(searcher(pattern), known)):
        yield Problem(
          f'{value_text(pattern)}: {value_text(names)} names nothing, as no array has such a path.{did_you_mean(pattern, known)}',
          'correct the expression, or leave the entry out; an entry for a type may be for arrays that a model lacks.',
        )
    used = {origin.key for origin in origins}
    for cls, entry in self.types:
      layers = {layer for origin in origins for layer in origin.layers}
      ends = {layer.below for layer in layers if issubclass(layer.cls, cls)}
      unused = [name for name, _ in entry if (cls, name) not in used and name not in ends]
      meant = [did_you_mean(name, ends.difference(dict(entry))) for name in unused]
      for name, near in zip(unused, meant, strict=True):
        if ends and (near or len(unused) == len(entry)):
          yield Problem(
            f'{cls.__name__}, {value_text(name)}: names nothing, as no such layer has that array.{near}',
            'correct the path below the layer, or leave the entry out.',
          )


@functools.cache
def table_of_flax(library: str) -> LayerTable:
  """The table of the layers of `flax.linen` or `flax.nnx`, by its name."""
  return LayerTable.of(layer_names(library))


def _problems(pairs: Sequence[tuple[Any, Any]]) -> Iterator[Problem]:
  """The problems of a table's form."""
  seen: set[Any] = set()  # of keys of the two kinds
  for key, value in pairs:
    shown = key.__name__ if isinstance(key, type) else repr(key)
    hashable = key if isinstance(key, (str, type)) else None
    if hashable in seen:
      yield Problem(f'{shown} is in the table twice.', 'join the two entries.')
    if isinstance(key, str):
      yield from filter(None, [problem_of(f'Entry {key!r}', key)])
      yield from [] if isinstance(value, str) else _name_problems(shown, value)
    elif not _is_layer_type(key):
      yield Problem(
        f'{shown} is neither a path expression nor a type of Flax modules.',
        'use a class that derives from flax.linen.Module or flax.nnx.Module, or an expression for paths.',
      )
    elif compat.is_lifted_type(key):
      yield Problem(
        f'{shown} is a transformed class, which the modules inside do not have.',
        f'use the class that was transformed, {key.__mro__[1].__name__}.',
      )
    elif not isinstance(value, Mapping):
      yield Problem(
        f'{shown}: its entry is {value_text(value)}, a {type(value).__name__}.',
        "give a dictionary from paths of arrays below the layer to names: {'kernel': ('in', 'out')}.",
      )
    else:
      for name, names in value.items():
        yield from [] if callable(names) else _name_problems(f'{shown}, {name!r}', names)
    seen |= {hashable} - {None}


def _name_problems(subject: str, names: Any) -> Iterator[Problem]:
  plain = type(names) is tuple and all(name is None or isinstance(name, str) for name in names)
  if names is not None and not plain:
    yield Problem(
      f'{subject}: {value_text(names)} is not a tuple of names.',
      'give a tuple of logical names, or None for an array without names.',
    )


def _is_layer_type(key: Any) -> bool:
  return isinstance(key, type) and (issubclass(key, nn.Module) or compat.is_nnx_module_type(key))


def fitted(
  tables: Sequence[LayerTable], path: str, layers: Sequence[Layer], rank: int
) -> tuple[Any, NameOrigin]:
  """The names of an array by the first table that has an entry for it, one for each dimension, and their origin.

  Args:
    tables: the user's table and that of Flax's layers.
    path: path of the array.
    layers: the modules that it is in, the outermost first.
    rank: the array's rank.

  Returns:
    The names are None without an entry. Too many are a problem of the origin; for one of Flax's layers, another number
    than the rank is no entry.
  """
  stacked = tables[0].stacked(path)
  own, of_flax = (table.find(path, layers, i) for i, table in enumerate(tables))
  if own is None:
    names = of_flax[1] if of_flax and of_flax[1] and len(of_flax[1]) == rank else None
    return names, NameOrigin(path, tuple(layers), None, stacked)
  key, names = own
  problem = None
  if names is not None and len(names) > rank:
    kind = f', a {layers[-1].cls.__name__}' if layers else ''
    shown = repr(key) if isinstance(key, str) else f'{key[0].__name__}, {key[1]!r}'
    problem = Problem(
      f'{path}{kind}: entry {shown} has {len(names)} names {value_text(names)}, but the array has rank {rank}.',
      'give at most one name for each dimension of a single layer; an entry with one str names those of nn.scan and vmap.',
    )
    names = None
  padded = None if names is None else (*names, *[None] * (rank - len(names)))
  return padded, NameOrigin(path, tuple(layers), key, stacked, problem)
