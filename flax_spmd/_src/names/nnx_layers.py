"""NNX layers: names in the metadata of the variables of modules that have none.

A module keeps the types of its layers, so it is named after it is created. The dimensions that `nnx.vmap` has added are
those that a single layer, by its fields, has not; the first ones, where that is open.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flax_spmd._src import compat, flax_layers
from flax_spmd._src.names.boxes import LogicallyPartitioned
from flax_spmd._src.names.layer_table import Layer, LayerTable, NameOrigin, fitted
from flax_spmd._src.names.linen_layers import LayerBox
from flax_spmd._src.names.nnx_variables import is_optimizer, one_level, static_of_variable
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
    if id(node) in seen or is_optimizer(node):
      return
    seen.add(id(node))
    if compat.is_variable_type(type(node)):
      yield from _named(node, keys, around, tables)
      return
    inside = (*around, (len(keys), node)) if compat.is_nnx_module_type(type(node)) else around
    for entry, child in one_level(node):
      yield from visit(child, (*keys, str(key_value(entry))), inside)

  return visit(node, keys, ())


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
  named, origin = LayerBox(compat.variable_value(variable), *fields).named(tables)
  if isinstance(named, LogicallyPartitioned):
    variable.set_metadata(out_sharding=named.names, linen_meta_type=LogicallyPartitioned)
  return origin
