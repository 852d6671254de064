"""Linen layers: boxes around the variables that modules create, with the modules that each is in.

    with nn.intercept_methods(LinenLayers(tables)):
      variables = model.init(key, x)   # a LayerBox around every array
    names, origin = variables['params']['wi']['kernel'].named(tables)

After a method of a module has run, the variables below the module are boxed in its scope. So `nn.scan`, `nn.vmap`,
`nn.remat` and shared modules treat them like those of an annotated model, and add dimensions to the boxes. A box has only
what does not depend on the place of the modules, since `nn.jit` uses the trace of one module for another one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import flax.linen as nn
import jax
import numpy as np
from flax.core import meta

from flax_spmd._src.names.boxes import PARTITION_NAME, LogicallyPartitioned
from flax_spmd._src.names.layer_outputs import LayerOutputs
from flax_spmd._src.names.layer_table import Layer, LayerTable, NameOrigin, fitted

# boxes within these would be in the names of their own variables
_READS_PATHS = (nn.WeightNorm, nn.SpectralNorm)


class AddedAxis(NamedTuple):
  """A dimension that a transformation has added; `name` is empty if the transformation has none for it."""

  name: tuple[Any, ...]

  def name_or(self, stacked: str | None) -> Any:
    """The transformation's name for the dimension, or else that of the table."""
    return self.name[0] if self.name else stacked


class LayerBox(meta.AxisMetadata[Any]):
  """A variable, and the modules that it is in.

  It stands in for the array where a module reads its variables directly: `self.variables['params'][...].T`.

  Args:
    value: the array.
    collection: the collection that the variable is in.
    dimensions: each dimension's position in the array of a single layer, or the axis that has added it.
    layers: the modules, the innermost first.
  """

  def __init__(
    self,
    value: Any,
    collection: str,
    dimensions: tuple[int | AddedAxis, ...],
    layers: tuple[Layer, ...] = (),
  ):
    self.value, self.collection, self.dimensions, self.layers = value, collection, dimensions, layers

  def unbox(self) -> Any:
    """The array."""
    return self.value

  def replace_boxed(self, val: Any) -> Self:
    """The box around another array."""
    return type(self)(val, self.collection, self.dimensions, self.layers)

  def add_axis(self, index: int, params: Mapping[Any, Any]) -> Self:
    """The box of stacked arrays."""
    added = AddedAxis((params[PARTITION_NAME],) if PARTITION_NAME in params else ())
    at = index % (len(self.dimensions) + 1)
    return self._with((*self.dimensions[:at], added, *self.dimensions[at:]), self.layers)

  def remove_axis(self, index: int, params: Mapping[Any, Any]) -> Self:
    """The box of one of the stacked arrays."""
    dimensions = list(self.dimensions)
    del dimensions[index]
    return self._with(tuple(dimensions), self.layers)

  def inside(self, layer: Layer) -> Self:
    """The box with one more module that it is in."""
    known = any((each.cls, each.below) == (layer.cls, layer.below) for each in self.layers)
    return self if known else self._with(self.dimensions, (*self.layers, layer))

  def named(self, tables: Sequence[LayerTable]) -> tuple[Any, NameOrigin]:
    """The array with its names in a box of the user's kind, or the array without names; and the origin of the names."""
    outwards = sorted(self.layers, key=lambda layer: layer.below.count('/'), reverse=True)
    path = f'{self.collection}/{outwards[0].below}'
    rank = sum(not isinstance(each, AddedAxis) for each in self.dimensions)
    names, origin = fitted(tables, path, outwards, rank)
    if names is None:
      return self.value, origin
    full = tuple(
      each.name_or(origin.stacked) if isinstance(each, AddedAxis) else names[each]
      for each in self.dimensions
    )
    return LogicallyPartitioned(self.value, full), origin

  def _with(self, dimensions: tuple[int | AddedAxis, ...], layers: tuple[Layer, ...]) -> Self:
    return type(self)(self.value, self.collection, dimensions, layers)

  def __getattr__(self, name: str) -> Any:
    if name.startswith('__') or name == 'value':
      raise AttributeError(name)
    return getattr(self.value, name)

  def __jax_array__(self) -> Any:
    return self.value


def _of_array(name: str) -> Callable[..., Any]:
  """A special method of boxes that is the array's."""

  def method(box: LayerBox, *args: Any) -> Any:
    plain = (each.value if isinstance(each, LayerBox) else each for each in args)
    return getattr(box.value, name)(*plain)

  return method


_BINARY = 'add', 'sub', 'mul', 'matmul', 'truediv', 'floordiv', 'mod', 'pow', 'and', 'or', 'xor'
_OTHER = 'neg', 'pos', 'abs', 'invert', 'lt', 'le', 'gt', 'ge', 'eq', 'ne', 'getitem', 'iter', 'len'
for _name in (*_BINARY, *(f'r{each}' for each in _BINARY), *_OTHER):
  setattr(LayerBox, f'__{_name}__', _of_array(f'__{_name}__'))  # Python finds these in the type only


jax.tree_util.register_pytree_with_keys(
  LayerBox,
  lambda box: (
    ((jax.tree_util.GetAttrKey('value'), box.value),),
    (box.collection, box.dimensions, box.layers),
  ),
  lambda static, children: LayerBox(next(iter(children)), *static),
)


class LinenLayers:
  """Interceptor of the methods of Linen modules: boxes the variables that they create, and constrains their results.

  Variables that a call of `apply` gets stay as they are.

  Args:
    tables: the tables whose entries the boxes have.

  Attributes:
    outputs: the constraints of results.
    origins: those of the variables that calls of `apply` have created.
    created: boxes, without values, of the variables that calls of `init` have created, returned or not.
    has_initialized: whether there was a call of `init`.
  """

  def __init__(self, tables: Sequence[LayerTable]):
    self._tables, self.outputs = tables, LayerOutputs(tables)
    self._given: frozenset[str] = frozenset()  # the collections that `apply` gets
    self._reading_paths = 0  # number of running methods that read the paths of variables
    self.origins: list[NameOrigin] = []
    self.created: list[LayerBox] = []
    self.has_initialized = False

  def __call__(
    self, method: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
  ) -> Any:
    """Runs a method; then boxes the variables below its module, or constrains its result."""
    module = context.module
    if module.scope is None:  # a method that calls `init` or `apply` of its own module
      return method(*args, **kwargs)
    is_init = module.is_initializing()
    is_outermost = not self.outputs.running
    if is_outermost:
      self._given = frozenset(() if is_init else module.variables)
      self.has_initialized |= is_init
    self.outputs.running.append(module)
    try:
      if is_init:
        result = self._ran(method, args, kwargs, module)
        if is_outermost:
          self.created += _boxes_of(module.variables)
        return result
      if not is_outermost:
        self.outputs.begin((args, kwargs))
      with self.outputs.in_model((args, kwargs)) if is_outermost else contextlib.nullcontext():
        result = self._ran(method, args, kwargs, module)
        if is_outermost:
          _put_below(module, self._finished)
        return self.outputs.of_linen(context.method_name, (args, kwargs), result)
    finally:
      self.outputs.running.pop()

  def _ran(self, method: Callable[..., Any], args: Any, kwargs: Any, module: nn.Module) -> Any:
    """The result of a method, with boxes around the variables that it has created."""
    reads_paths = isinstance(module, _READS_PATHS)
    if reads_paths:
      _put_below(module, lambda collection, variables: _unboxed(variables))
    self._reading_paths += reads_paths
    try:
      result = method(*args, **kwargs)
    finally:
      self._reading_paths -= reads_paths
    if not self._reading_paths:
      _put_below(module, functools.partial(self._box_collection, module))
    return result

  def _finished(self, collection: str, variables: Any) -> Any:
    """The variables that a call of `apply` has created, with their names."""
    if collection in self._given:
      return {}
    flat, treedef = jax.tree.flatten(variables, is_leaf=lambda node: isinstance(node, LayerBox))
    named = [each.named(self._tables) if isinstance(each, LayerBox) else (each, None) for each in flat]
    self.origins += [origin for _, origin in named if origin is not None]
    return jax.tree.unflatten(treedef, [value for value, _ in named])

  def _box_collection(self, module: nn.Module, collection: str, variables: Any) -> dict[str, Any]:
    """A collection of a module's variables with boxes."""
    if collection in self._given:
      return {}
    others = module.variables.get(f'{collection}_axes', {})  # names as in T5X
    held = self._held_outside(module, collection)
    return {
      name: self._boxed(node, collection, (name,), module, others)
      for name, node in variables.items()
      if name not in held
    }

  def _held_outside(self, module: nn.Module, collection: str) -> Any:
    """The variables of a module that a running method of it had before a lifted function began, such as a loop.

    Their boxes would change what a loop carries. The outer method boxes them at its end.
    """
    alike = (each for each in self.outputs.running[:-1] if each.path == module.path)
    outer = next((each for each in alike if each.scope is not module.scope), None)
    return () if outer is None else outer.variables.get(collection, {})

  def _boxed(self, node: Any, collection: str, keys: tuple[str, ...], module: Any, others: Any) -> Any:
    """A part of a module's variables with boxes; arrays with names of their own stay as they are."""
    if isinstance(node, Mapping):
      others = others.get(keys[-1], {}) if isinstance(others, Mapping) else {}
      return {
        key: self._boxed(each, collection, (*keys, key), module, others) for key, each in node.items()
      }
    if isinstance(node, (list, tuple)):
      each = [self._boxed(each, collection, (*keys, str(i)), module, {}) for i, each in enumerate(node)]
      return type(node)(*each) if hasattr(node, '_fields') else type(node)(each)
    if isinstance(node, LayerBox):
      return node.inside(Layer.of(module, '/'.join(keys), self._tables))
    if not _is_array(node) or f'{keys[-1]}_axes' in others:
      return node
    box = LayerBox(node, collection, tuple(range(len(node.shape))))
    return box.inside(Layer.of(module, '/'.join(keys), self._tables))


def _put_below(module: nn.Module, change: Callable[[str, Any], Mapping[str, Any]]) -> None:
  """Changes the variables below a module, in the collections that may change."""
  scope: Any = module.scope
  for collection, variables in module.variables.items():
    if scope.is_mutable_collection(collection):
      for name, new in change(collection, variables).items():
        if new is not variables[name]:
          scope.put_variable(collection, name, new)


def _unboxed(variables: Any) -> Any:
  """Variables without the boxes of this module."""
  is_box = lambda node: isinstance(node, LayerBox)
  return jax.tree.map(lambda node: node.value if is_box(node) else node, variables, is_leaf=is_box)


def _boxes_of(variables: Any) -> list[LayerBox]:
  """The boxes of variables, without values."""
  nodes = jax.tree.leaves(variables, is_leaf=lambda node: isinstance(node, LayerBox))
  return [node.replace_boxed(None) for node in nodes if isinstance(node, LayerBox)]


def _is_array(value: Any) -> bool:
  return isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))
