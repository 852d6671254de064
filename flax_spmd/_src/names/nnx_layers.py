"""NNX layers: names in the metadata of the variables of modules that have none.

A module keeps the types of its layers, so it is named after it is created. Dimensions that `nnx.vmap` has added come first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from flax_spmd._src import compat
from flax_spmd._src.names.layer_table import Layer, LayerTable, Origin, fitted
from flax_spmd._src.names.nnx_variables import is_optimizer, one_level, static_of_variable
from flax_spmd._src.tree_paths import key_value


def name_variables(node: Any, keys: tuple[str, ...], tables: Sequence[LayerTable]) -> Iterator[Origin]:
  """Gives names to the variables of a module that have none, in place; returns the origin of each.

  Args:
    node: a module, or a state of one.
    keys: its path.
    tables: the user's table and that of Flax's layers.
  """
  seen: set[int] = set()

  def visit(node: Any, keys: tuple[str, ...], around: tuple[tuple[int, Any], ...]) -> Iterator[Origin]:
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
) -> Iterator[Origin]:
  static, value = static_of_variable(variable)
  shape = getattr(value, 'shape', None)
  if static is not None or shape is None:
    return
  layers = [Layer.of(module, '/'.join(keys[depth:]), tables) for depth, module in around]
  of_flax = next((layer.found[1] for layer in layers if layer.found[1]), None)
  added = 0 if of_flax is None or of_flax[1] is None else max(len(shape) - len(of_flax[1]), 0)
  names, origin = fitted(tables, '/'.join(keys), layers, len(shape) - added)
  if names is not None:
    variable.set_metadata(out_sharding=(*[origin.stacked] * added, *names))
  yield origin
