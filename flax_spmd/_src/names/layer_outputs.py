"""Layer outputs: constraints on the results of Flax's layers, by the names of their arrays.

    outputs = LayerOutputs(tables)
    y = outputs.of_nnx(layer, '__call__', (x,), y)   # ('batch', 'length', 'mlp') for a kernel ('embed', 'mlp')

The last dimensions of a result are those of the layer's array, and have its names. The first dimension is the batch if
it has the size of the model's batch; a single one between them is the length. Others stay open. A result whose batch is
unknown stays as it is: one in a `vmap` over examples, or an embedding of positions.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from jax.core import Tracer
from jax.sharding import AxisType

from flax_spmd._src import compat
from flax_spmd._src.active_layout import in_force
from flax_spmd._src.constraints import mesh_for_constraints, with_logical_constraint
from flax_spmd._src.flax_layers import Output, linen_outputs, nnx_names, nnx_outputs
from flax_spmd._src.mesh import axis_sizes, axis_types
from flax_spmd._src.names.box_trees import static_of
from flax_spmd._src.names.boxes import Static
from flax_spmd._src.names.layer_table import Layer, LayerTable, fitted
from flax_spmd._src.names.nnx_variables import static_of_variable
from flax_spmd._src.rules.decisions import UNCONSTRAINED

# part of the key of JAX's caches: the batch of the model of Linen that is running
_trace_key = jax.make_user_context(None)
_active: ContextVar[LayerOutputs | None] = ContextVar('flax_spmd_layer_outputs', default=None)


class LayerOutputs:
  """Constraints on the results of layers, in one call of a function.

  Args:
    tables: the user's table and that of Flax's layers, for Linen.

  Attributes:
    has_run: whether a model, or a layer of NNX, has run.
  """

  def __init__(self, tables: Sequence[LayerTable]):
    self._tables = tables
    self._batch: int | None = None  # that of the model of Linen that is running
    self._starts: weakref.WeakKeyDictionary[Any, _Start] = (
      weakref.WeakKeyDictionary()
    )  # of NNX, by trace
    self.has_run = False

  @contextlib.contextmanager
  def in_model(self, args: Any) -> Iterator[None]:
    """The block in which an outermost module runs; the batch has the size of its first array."""
    first = _first_array(args)
    self.has_run = True
    before, self._batch = (
      self._batch,
      None if first is None or compat.is_mapped(first) else first.shape[0],
    )
    try:
      with _trace_key(self._batch):
        yield
    finally:
      self._batch = before

  def of_linen(self, around: Sequence[nn.Module], method: str, result: Any) -> Any:
    """The result of a method of the last of some modules, constrained if it is a layer's.

    Args:
      around: the modules whose methods are running, the outermost first.
      method: name of the method.
      result: its result.
    """
    module = around[-1]
    output = _output_of(type(module), method, linen_outputs)
    if output is None or compat.is_lifted_type(type(module)) or module.scope is None:
      return result
    static, array = static_of(module.scope.get_variable('params', output.array))
    if array is None:
      return result
    static = (
      static or _names_of_author(module, output.array, array) or self._names(around, output.array, array)
    )
    return self._constrained(result, output, module, array, static, self._batch)

  def of_nnx(self, layer: Any, method: str, args: Any, result: Any) -> Any:
    """The result of a method of a layer of NNX, constrained."""
    self.has_run = True
    output = _output_of(type(layer), method, nnx_outputs)
    first = _first_array(args)
    variable = output and getattr(layer, output.array, None)
    if output is None or first is None or compat.is_mapped(first) or variable is None:
      return result
    static, array = static_of_variable(variable)
    batch = self._batch_of_nnx(
      first, array.shape, is_embed=(output.array, method) == ('embedding', '__call__')
    )
    if static is None:
      found = (table.find_type(layer, output.array) for table in (self._tables[0], _flax_table()))
      static = _static(next((names for _, names in filter(None, found)), None))
    elif isinstance(static.names, tuple) and len(static.names) > array.ndim:  # in the body of nnx.scan
      stacks = {name for _, name in self._tables[0].stacks}
      static = _static(tuple(name for name in static.names if name not in stacks)[-array.ndim :])
    return self._constrained(result, output, layer, array, static, batch)

  def _batch_of_nnx(self, first: Any, shape: tuple[int, ...], is_embed: bool) -> int | None:
    """The size of the batch in the trace in progress: that of the first layer's argument.

    The first layer of a model that runs again is recognized by the shape of its embedding. An embedding of positions may
    have a batch of one.
    """
    trace = compat.trace_context.trace
    start = self._starts.get(trace)
    is_again = is_embed and start is not None and (start.batch == 1 or start.shape == shape)
    if first.ndim > 1 and (start is None or is_again):
      start = self._starts[trace] = _Start(first.shape[0], shape)
    return None if start is None else start.batch

  def _names(self, around: Sequence[nn.Module], name: str, array: Any) -> Static | None:
    """The names of a parameter of the last module, by the tables."""
    path = around[-1].path
    outer = {each.path: each for each in around if path[: len(each.path)] == each.path}
    layers = [
      Layer.of(outer[each], '/'.join((*path[len(each) :], name)), self._tables)
      for each in sorted(outer, key=len)
    ]
    return _static(fitted(self._tables, '/'.join(('params', *path, name)), layers, array.ndim)[0])

  def _constrained(
    self, result: Any, output: Output, layer: Any, array: Any, static: Static | None, batch: int | None
  ) -> Any:
    """A result with its constraint, if its names and its batch are known, and the rules have one for the batch."""
    positions = output.dimensions(layer, array.ndim)
    if static is None or positions is None or not isinstance(result, Tracer) or compat.is_mapped(result):
      return result
    first = result.ndim - len(positions)
    is_result = first > 0 and result.shape[first:] == tuple(array.shape[each] for each in positions)
    names = static.names
    if not is_result or result.shape[0] != batch or not static.logical or static.rules is not None:
      return result
    if not isinstance(names, tuple) or len(names) != array.ndim:
      return result
    last = tuple(names[each] for each in positions)
    between = ('length',) if first == 2 and output.is_sequence else (UNCONSTRAINED,) * (first - 1)
    return _with_constraint(result, ('batch', *between, *last), static.or_axes)


class _Start(NamedTuple):
  """The first layer of a model of NNX: the size of its batch, and the shape of its array."""

  batch: int
  shape: tuple[int, ...]


def _first_array(args: Any) -> Any:
  """The first array with dimensions in some arguments; None without one."""
  return next((leaf for leaf in jax.tree.leaves(args) if getattr(leaf, 'ndim', 0)), None)


def _with_constraint(result: Any, names: tuple[Any, ...], or_axes: bool) -> Any:
  """A result constrained by names, where the rules and the mesh in force allow that."""
  rules, mesh = in_force(tracing=True).rules, mesh_for_constraints()
  if 'batch' not in rules.by_name or mesh is None or AxisType.Explicit in axis_types(mesh).values():
    return result
  plain = [name for name in names if isinstance(name, str)]
  unmatched = [name for name in plain if name not in rules.by_name]
  is_unclear = len({*plain}) < len(plain) or (
    or_axes and any(name in axis_sizes(mesh) for name in unmatched)
  )
  if is_unclear or not all(
    name is None or name is UNCONSTRAINED or isinstance(name, str) for name in names
  ):
    return result
  dropped = unmatched if rules.policies.unmatched == 'error' else {'length'}.intersection(unmatched)
  if rules.policies.conflict == 'error':  # the names are for arrays, where the batch is in no conflict
    rules = rules.replace(conflict='skip')
  return with_logical_constraint(
    result, tuple(None if name in dropped else name for name in names), rules
  )


def _static(names: Any) -> Static | None:
  return None if names is None else Static(names, True)


def _names_of_author(module: nn.Module, name: str, array: Any) -> Static | None:
  """The names that the initializer of a parameter gives, if it has names to give: those of a wrapped initializer."""
  initializer: Any = getattr(module, f'{name}_init', None)
  if not hasattr(initializer, '__wrapped__'):
    return None
  box = jax.eval_shape(lambda key: initializer(key, array.shape, array.dtype), jax.random.key(0))
  return static_of(box)[0]


def _output_of(
  cls: type, method: str, outputs: Callable[[], dict[tuple[type, str], Output]]
) -> Output | None:
  """The description of a method of a layer; None for another method or type."""
  return next((found for base in cls.__mro__ if (found := outputs().get((base, method)))), None)


@functools.cache
def _flax_table() -> LayerTable:
  return LayerTable.of(nnx_names())


@functools.cache
def _nnx_detours() -> Any:
  return compat.detours(nnx_outputs(), _called)


def _called(method: str, original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
  """Calls a method of a layer of NNX, in the place of the method."""
  result, outputs = original(layer, *args, **kwargs), _active.get()
  return result if outputs is None else outputs.of_nnx(layer, method, (args, kwargs), result)


@contextlib.contextmanager
def nnx_outputs_constrained(outputs: LayerOutputs) -> Iterator[None]:
  """A block in which the results of layers of NNX are constrained, in this task."""
  if not compat.has_nnx():
    yield
    return
  token = _active.set(outputs)
  _nnx_detours().begin()
  try:
    yield
  finally:
    _nnx_detours().end()
    _active.reset(token)
