"""NNX layers: names in the metadata of the variables of modules that have none.

A module keeps the types of its layers, so it is named after it is created. The dimensions that `nnx.vmap` has added are
those that a single layer, by its fields, has not; the first ones, where that is open.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flax_spmd._src import compat, flax_layers
from flax_spmd._src.cycles import one_level
from flax_spmd._src.names.boxes import LogicallyPartitioned
from flax_spmd._src.names.layer_table import Layer, LayerTable, NameOrigin, fitted
from flax_spmd._src.names.linen_layers import LayerBox
from flax_spmd._src.names.nnx_variables import is_optimizer, static_of_variable
from flax_spmd._src.tree_paths import key_value


def name_variables(
  node: Any, keys: tuple[str, ...], tables: Sequence[LayerTable]
) -> Iterator[NameOrigin]:
  """Gives names to the variables of a module that have none, in place; returns the origin of each.

  Args:
    node: a module, or a state of one.
    keys: its path.
    tables: the user's table and that of Flax's layers.
  """
  seen: set[int] = set()

  def visit(
    node: Any, keys: tuple[str, ...], around: tuple[tuple[int, Any], ...]
  ) -> Iterator[NameOrigin]:
    if id(node) in seen:
      return
    seen.add(id(node))
    if compat.is_variable_type(type(node)):
      yield from _named(node, keys, around, tables)
      return
    inside = (*around, (len(keys), node)) if compat.is_nnx_module_type(type(node)) else around
    for entry, child in one_level(node):
      if not _is_state(node, entry):
        yield from visit(child, (*keys, str(key_value(entry))), inside)

  return visit(node, keys, ())


def name_optimizer_state(nodes: Iterable[tuple[tuple[str, ...], Any]]) -> None:
  """Gives the state of optimizers that has no names those of its parameters, as an optimizer of named ones would have.

  An optimizer that is created together with its model has copied the metadata of parameters without names. Its paths end
  as those of the parameters do. Of several alike, the nearest in the tree is the parameter.

  Args:
    nodes: the modules and variables of a result, with their paths; parameters have names.
  """
  found: dict[bool, list[tuple[tuple[str, ...], Any]]] = {False: [], True: []}
  seen: set[int] = set()

  def visit(node: Any, keys: tuple[str, ...], is_state: bool) -> None:
    if id(node) in seen:
      return
    seen.add(id(node))
    if compat.is_variable_type(type(node)):
      found[is_state].append((keys, node))
      return
    for entry, child in one_level(node):
      visit(child, (*keys, str(key_value(entry))), is_state or _is_state(node, entry))

  for keys, node in nodes:
    visit(node, keys, False)
  parameters = [(keys, each, static_of_variable(each)[0]) for keys, each in found[False]]
  by_name: dict[str, list[Any]] = {}
  for parameter in parameters:
    by_name.setdefault(parameter[0][-1] if parameter[0] else '', []).append(parameter)
  for keys, variable in found[True]:
    static, value = static_of_variable(variable)
    if static is None and getattr(value, 'ndim', 0):
      names = _names_of_nearest(keys, by_name.get(keys[-1], ()))
      if names is not None:
        variable.set_metadata(out_sharding=names)


def _is_state(node: Any, entry: Any) -> bool:
  """Whether a child of a node is the state of an optimizer; an `nnx.ModelAndOptimizer` has its model beside it."""
  return is_optimizer(node) and key_value(entry) == 'opt_state'


def _names_of_nearest(keys: tuple[str, ...], parameters: Iterable[Any]) -> Any:
  """The names of the parameter of an array of optimizer state; None if it has none, or several parameters differ."""

  def nearness(path: tuple[str, ...]) -> tuple[int, int]:
    return _common(reversed(keys), reversed(path)), _common(keys, path)

  scored = [(nearness(path), static) for path, _, static in parameters]
  best = max((score for score, _ in scored), default=None)
  names = {None if static is None else static.names for score, static in scored if score == best}
  return names.pop() if len(names) == 1 else None


def _common(one: Iterable[str], other: Iterable[str]) -> int:
  """The number of entries at the beginning that are equal."""
  pairs = zip(one, other, strict=False)
  return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _named(
  variable: Any,
  keys: tuple[str, ...],
  around: tuple[tuple[int, Any], ...],
  tables: Sequence[LayerTable],
) -> Iterator[NameOrigin]:
  metadata = compat.variable_metadata(variable)
  if metadata.get('linen_meta_type') is LayerBox:
    yield _named_by_box(variable, metadata, tables)
    return
  static, value = static_of_variable(variable)
  shape = getattr(value, 'shape', None)
  if static is not None or shape is None:
    return
  path = '/'.join(keys)
  layers = [Layer.of(module, '/'.join(keys[depth:]), tables) for depth, module in around]
  added = _added(shape, around[-1][1] if around else None, path, layers, tables)
  names, origin = fitted(tables, path, layers, len(shape) - len(added))
  if names is not None:
    rest = iter(names)
    full = tuple(origin.stacked if axis in added else next(rest) for axis in range(len(shape)))
    variable.set_metadata(out_sharding=full)
  yield origin


def _added(
  shape: tuple[int, ...], module: Any, path: str, layers: Sequence[Layer], tables: Sequence[LayerTable]
) -> tuple[int, ...]:
  """The dimensions that `nnx.vmap` has added to an array.

  Args:
    shape: the array's shape.
    module: the innermost module that it is in.
    path, layers, tables: as for `fitted`.
  """
  own, of_flax = (table.find(path, layers, i) for i, table in enumerate(tables))
  if of_flax and of_flax[1]:
    count = max(len(shape) - len(of_flax[1]), 0)
  elif own and own[1] and tables[0].stacked(path):
    return tuple(range(len(shape) - len(own[1])))
  else:
    return ()
  if not layers[-1].found[1]:
    return tuple(range(count))
  single = flax_layers.nnx_shape(module, layers[-1].below)
  axes = list(itertools.combinations(range(len(shape)), count))
  left = ([size for axis, size in enumerate(shape) if axis not in each] for each in axes)
  return next((each for each, sizes in zip(axes, left, strict=True) if sizes == list(single)), axes[0])


def _named_by_box(
  variable: Any, metadata: Mapping[str, Any], tables: Sequence[LayerTable]
) -> NameOrigin:
  """Gives names to a variable of a Linen module that `nnx.bridge` has made of a box."""
  fields = [metadata[name] for name in ('collection', 'dimensions', 'layers')]
  named, origin = LayerBox(variable.get_raw_value(), *fields).named(tables)
  if isinstance(named, LogicallyPartitioned):
    variable.set_metadata(out_sharding=named.names, linen_meta_type=LogicallyPartitioned)
  return origin
