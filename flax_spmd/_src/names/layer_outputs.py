"""Layer outputs: constraints on the results of Flax's layers, by the names of their arrays.

    outputs = LayerOutputs(tables)
    y = outputs.of_nnx(layer, '__call__', (x,), y)   # ('batch', 'length', 'mlp') for a kernel ('embed', 'mlp')

The last dimensions of a result are those of the layer's array, and have its names. The first dimension is the batch if
it comes from that of the model's arguments; a single one between them is the length. Others stay open. A result without
the batch stays as it is: one in a `vmap` over examples, or an embedding of positions.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import flax.linen as nn
import jax
from jax.core import Tracer
from jax.sharding import AxisType

from flax_spmd._src import compat
from flax_spmd._src.active_layout import in_force, report_names
from flax_spmd._src.constraints import mesh_for_constraints, with_logical_constraint
from flax_spmd._src.context_values import assigned
from flax_spmd._src.flax_layers import Output, layer_outputs
from flax_spmd._src.mesh import axis_sizes, axis_types
from flax_spmd._src.names.batch_lineage import BatchLineage
from flax_spmd._src.names.box_trees import static_of
from flax_spmd._src.names.boxes import Static
from flax_spmd._src.names.layer_table import Layer, LayerTable, fitted, table_of_flax
from flax_spmd._src.names.nnx_variables import static_of_variable
from flax_spmd._src.rules.decisions import UNCONSTRAINED
from flax_spmd._src.rules.table import Rules

# part of the key of JAX's caches: whether a model of Linen is mapped over examples
_trace_key = jax.make_user_context(False)
BATCH_OF_LAYER = '_batch_of_layer'  # the name of the batch of such a result on a mesh of names
_active: ContextVar[LayerOutputs | None] = ContextVar('flax_spmd_layer_outputs', default=None)


class LayerOutputs:
  """Constraints on the results of layers, in one call of a function.

  Args:
    tables: the user's table and that of Flax's layers, for Linen.

  Attributes:
    running: the modules of Linen whose methods are running, the outermost first.
    has_run: whether a model, or a layer of NNX, has run.
  """

  def __init__(self, tables: Sequence[LayerTable]):
    self._tables, self._lineage = tables, BatchLineage()
    self.running: list[nn.Module] = []
    self.has_run = False

  @contextlib.contextmanager
  def in_model(self, args: Any) -> Iterator[None]:
    """The block in which an outermost module of Linen runs; its arguments have the batch in dimension 0."""
    arrays = _arrays(args)
    is_mapped = any(map(compat.is_mapped, arrays))
    self.has_run = True
    for each in () if is_mapped else arrays:
      if each is arrays[0] or _is_batch_beside(each, arrays[0]):
        self._lineage.start(each)
    with _trace_key(is_mapped):
      yield

  def begin(self, args: Any, again: bool = False) -> None:
    """Takes the first array of some arguments for a batch, where no model has begun, such as in the body of a loop.

    Args:
      args: arguments of a method of Linen, or of a layer.
      again: whether another batch may begin. Models begin with a lookup; positions that they count are no batch.
    """
    for first in _arrays(args)[:1]:
      if self._lineage.may_start(first, again):
        self._lineage.start(first)

  def of_linen(self, method: str, args: Any, result: Any) -> Any:
    """The result of a method of the innermost module, constrained if it is a layer's."""
    module = self.running[-1]
    output = _output_of(type(module), method, 'flax.linen')
    if output is None or compat.is_lifted_type(type(module)) or module.scope is None:
      return result
    static, array = static_of(module.scope.get_variable('params', output.array))
    if array is None or not self._has_batch(output, method, args, result):
      return result
    static = (
      static or _names_of_author(module, output.array, array) or self._names(module, output.array, array)
    )
    return _constrained(result, output, module, array, static)

  def of_nnx(self, layer: Any, method: str, args: Any, result: Any) -> Any:
    """The result of a method of a layer of NNX, constrained."""
    self.has_run = True
    output = _output_of(type(layer), method, 'flax.nnx')
    variable = output and getattr(layer, output.array, None)
    if output is None or variable is None or not self._has_batch(output, method, args, result):
      return result
    static, array = static_of_variable(variable)
    if static is None:
      found = (
        table.find_type(layer, output.array) for table in (self._tables[0], table_of_flax('flax.nnx'))
      )
      static = _static(next((names for _, names in filter(None, found)), None))
    elif isinstance(static.names, tuple) and len(static.names) > array.ndim:  # in the body of nnx.scan
      stacks = {name for _, name in self._tables[0].stacks}
      static = _static(tuple(name for name in static.names if name not in stacks)[-array.ndim :])
    return _constrained(result, output, layer, array, static)

  def _has_batch(self, output: Output, method: str, args: Any, result: Any) -> bool:
    """Whether dimension 0 of a layer's result is the batch."""
    if compat.is_mapped(result) or not isinstance(result, Tracer):
      return False
    self.begin(args, again=(output.array, method) == ('embedding', '__call__'))
    return self._lineage.has_batch(result)

  def _names(self, module: nn.Module, name: str, array: Any) -> Static | None:
    """The names of a parameter of a module, by the tables."""
    path = module.path
    outer = {each.path: each for each in self.running if path[: len(each.path)] == each.path}
    layers = [
      Layer.of(outer[each], '/'.join((*path[len(each) :], name)), self._tables)
      for each in sorted(outer, key=len)
    ]
    return _static(fitted(self._tables, '/'.join(('params', *path, name)), layers, array.ndim)[0])


def _arrays(args: Any) -> list[Any]:
  """The arrays with dimensions in the positional and keyword arguments of a method, which may be any objects."""
  positional, keywords = args
  leaves = itertools.chain.from_iterable(
    map(_leaves, (*positional, *(keywords[name] for name in sorted(keywords))))
  )
  return [leaf for leaf in leaves if getattr(leaf, 'ndim', 0)]


def _leaves(argument: Any) -> list[Any]:
  """The leaves of an argument; none of one that JAX cannot flatten, such as a dictionary whose keys have no order."""
  try:
    return jax.tree.leaves(argument)
  except (TypeError, ValueError):
    return []


def _is_batch_beside(array: Any, first: Any) -> bool:
  """Whether an argument of a model has the batch of the first one; lists, such as one of positions, have not."""
  return array.ndim > 1 and array.shape[0] == first.shape[0]


def _constrained(result: Any, output: Output, layer: Any, array: Any, static: Static | None) -> Any:
  """A result that begins with the batch, with its constraint, if its names are known and the rules have one for it."""
  positions = output.dimensions(layer, array.ndim)
  if static is None or positions is None or not static.logical or static.rules is not None:
    return result
  names, first = static.names, result.ndim - len(positions)
  is_result = first > 0 and result.shape[first:] == tuple(array.shape[each] for each in positions)
  if not is_result or not isinstance(names, tuple) or len(names) != array.ndim:
    return result
  last = tuple(names[each] for each in positions)
  between = ('length',) if first == 2 and output.is_sequence else (UNCONSTRAINED,) * (first - 1)
  return _with_constraint(result, ('batch', *between, *last), static.or_axes)


def _with_constraint(result: Any, names: tuple[Any, ...], or_axes: bool) -> Any:
  """A result constrained by names, where the rules and the mesh in force allow that."""
  report_names((BATCH_OF_LAYER, *names[1:]))
  rules, mesh = in_force(tracing=True).rules, mesh_for_constraints()
  if mesh is None or AxisType.Explicit in axis_types(mesh).values():
    return result
  plain = [name for name in names if isinstance(name, str)]
  is_unclear = len({*plain}) < len(plain) or (
    or_axes and any(name in axis_sizes(mesh) for name in plain if name not in rules.by_name)
  )
  if is_unclear or not all(
    name is None or name is UNCONSTRAINED or isinstance(name, str) for name in names
  ):
    return result
  if BATCH_OF_LAYER in rules.by_name:  # an estimate finds the rules of each layout
    return with_logical_constraint(result, (BATCH_OF_LAYER, *names[1:]), rules)
  found = names_and_rules(names, rules)
  return result if found is None else with_logical_constraint(result, *found)


def names_and_rules(names: tuple[Any, ...], rules: Rules) -> tuple[tuple[Any, ...], Rules] | None:
  """The names and rules of a constraint on a layer's result; None if it has none under these rules.

  Args:
    names: the names of its dimensions, the first of which is `batch`.
    rules: those of the layout.
  """
  if 'batch' not in rules.by_name:
    return None
  dropped = {name for name in names if isinstance(name, str) and name not in rules.by_name}
  if rules.policies.unmatched != 'error':
    dropped &= {'length'}
  # the other names are for arrays, which have no batch: it has its axes, whatever the order of the rules
  rules = tuple(pair for pair in rules.pairs if pair[0] == 'batch') + rules
  if rules.policies.conflict == 'error':
    rules = rules.replace(conflict='skip')
  return tuple(None if name in dropped else name for name in names), rules


def _static(names: Any) -> Static | None:
  return None if names is None else Static(names, True)


def _names_of_author(module: nn.Module, name: str, array: Any) -> Static | None:
  """The names that the initializer of a parameter gives, if it has names to give: those of a wrapped initializer."""
  initializer: Any = getattr(module, f'{name}_init', None)
  if not hasattr(initializer, '__wrapped__'):
    return None
  box = jax.eval_shape(lambda key: initializer(key, array.shape, array.dtype), jax.random.key(0))
  return static_of(box)[0]


def _output_of(cls: type, method: str, library: str) -> Output | None:
  """The description of a method of a layer; None for another method or type."""
  outputs = _outputs(library)
  return next((found for base in cls.__mro__ if (found := outputs.get((base, method)))), None)


_outputs = functools.cache(layer_outputs)


@functools.cache
def _nnx_detours() -> Any:
  return compat.detours(_outputs('flax.nnx'), _called)


def _called(method: str, original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
  """Calls a method of a layer of NNX, in the place of the method."""
  result, outputs = original(layer, *args, **kwargs), _active.get()
  return result if outputs is None else outputs.of_nnx(layer, method, (args, kwargs), result)


def _fingerprint(original: Callable[..., Any], module: nn.Module) -> Any:
  """The fingerprint of a module under `nn.jit`, with its place in the model, where results have names by their place."""
  outputs = _active.get()
  return original(module), outputs and (*map(type, outputs.running), *module.path)


_linen_detour = compat.module_fingerprint_detour(_fingerprint)


@contextlib.contextmanager
def outputs_constrained(outputs: LayerOutputs) -> Iterator[None]:
  """A block in which the results of layers are constrained, in this task."""
  detours = [_linen_detour, *([_nnx_detours()] if compat.has_nnx() else [])]
  with assigned(_active, outputs), contextlib.ExitStack() as opened:
    for each in detours:
      opened.enter_context(each.opened())
    yield
