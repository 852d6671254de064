"""Prepared modules: a lowered step that is prepared once, and propagated under any layout.

Preparation inlines all calls, runs Shardy's import passes and reads the program into a plain `Graph`. After that
a layout costs one copy of the module with its shardings replaced, and one run of Shardy's propagation, which
assigns a sharding to every value.

The passes are those that XLA runs before it partitions a program (openxla/shardy, `import_pipeline.cc` and
`propagation_pipeline.cc`), without the one that drops mesh axes of size 1: those are the logical names.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from jaxlib.mlir import ir, passmanager

from flax_spmd._src.compat import SLICES_ANY_ROWS_FIRST, mlir_context
from flax_spmd._src.estimate.graph import Graph, GraphValue, Op, Spec, replicated
from flax_spmd._src.estimate.mlir.read_graph import GraphReader
from flax_spmd._src.estimate.mlir.shardings import (
  Constraint,
  Resolve,
  ShardingSlot,
  SpecReader,
  attribute,
  dimension_text,
  slots_of,
)
from flax_spmd._src.estimate.mlir.single_operation import (
  SingleOperation,
  SingleOperationBuilder,
  bytecode,
  reshard_program,
)
from flax_spmd._src.mlir.equal import number_equal
from flax_spmd._src.mlir.functions import main_of, walk
from flax_spmd._src.mlir.simplification import (
  inline,
  merge_unary,
  order_by_operands,
  simplify,
  slice_before_reshapes,
)
from flax_spmd.errors import EstimatorError

_PREPARE = (
  'builtin.module(symbol-dce,sdy-lift-inlined-meshes,sdy-constant-or-scalar-splitter,'
  'sdy-add-data-flow-edges,sdy-apply-sharding-constraints,'
  'func.func(sdy-populate-op-sharding-rules))'
)
_DONATION = ('tf.aliasing_output', 'jax.buffer_donor')
_Program = TypeVar('_Program')
_ERASED = (
  'Shardy erases operations of the step, so their shardings cannot be read.\n'
  'Fix: choose the layouts, and compile them with spmd.compare.'
)
_PROPAGATE = 'builtin.module(sdy-user-priority-propagate)'


class PreparedModule:
  """A lowered step, prepared for propagation.

  Where shardings meet that do not fit together, the first one wins. So XLA's order of operations is that of the
  propagation, while the graph has the order of the program, which is closer to that of execution.

  Args:
    code: MLIR bytecode of the lowered step.
    platform: platform that it is lowered for: 'cuda', 'tpu' or 'cpu'.

  Attributes:
    graph: the program as plain values.
    constraints: the logical shardings in the step, each with the shape of its array, in order.

  Raises:
    EstimatorError: the step contains operations that cannot be estimated, such as `shard_map`, or that Shardy erases.
  """

  graph: Graph
  constraints: tuple[Constraint, ...]

  def __init__(self, code: bytes, platform: str):
    self._code = code
    self._context = mlir_context()
    with self._context, ir.Location.unknown():
      self._module = ir.Module.parse(code)
      functions = [view.operation for view in self._module.body.operations]
      given = [slot for one in functions for slot in slots_of(one)]
      inline(self._module.operation)
      if platform != 'cpu':
        slice_before_reshapes(self._module.operation, SLICES_ANY_ROWS_FIRST)
      number_equal(main_of(self._module.operation))
      simplify(self._module.operation)
      passmanager.PassManager.parse(_PREPARE).run(self._module.operation)
      self._propagation = passmanager.PassManager.parse(_PROPAGATE)
      self._propagation.enable_verifier(False)  # it takes a sixth of the time
      self._check_kept()
      main = main_of(self._module.operation)
      reader = GraphReader()
      self.graph = reader.graph(main)
      self._loops = reader.loops
      self._alike = merge_unary(walk(main), reader.numbers)
      order_by_operands(main.regions[0].blocks[0])
      self._numbers = reader.numbers
      self._results = [tuple(reader.numbers[value] for value in op.results) for op in walk(main)]
      self._makers = {number: op for op, numbers in zip(walk(main), self._results) for number in numbers}
      self._replicated: list[Spec] = [replicated(len(value.shape)) for value in self.graph.values]
      self._slots = list(slots_of(main))
      slots = (*self._slots, *given)
      self.constraints = tuple(dict.fromkeys(one for slot in slots for one in slot.shardings))

  def _check_kept(self) -> None:
    """Raises if propagation erases operations: reading these afterwards would end the process."""
    copy = self._module.operation.clone()
    before = [op.name for op in walk(main_of(copy))]
    self._propagation.run(copy)
    if [op.name for op in walk(main_of(copy))] != before:
      raise EstimatorError(_ERASED)

  def single_operation(
    self, op: Op, specs: Sequence[Spec], sizes: Mapping[str, int], computed: Collection[int]
  ) -> SingleOperation | None:
    """An operation as a program of its own; None if the module no longer has it as it is, or for invalid shardings.

    Args:
      op: operation of `graph`, without blocks.
      specs: sharding of each value, from `propagate`.
      sizes: size per mesh axis.
      computed: values that every device can compute by itself.
    """
    shapes = [self.graph.values[value].shape for value in op.operands]
    builder = SingleOperationBuilder(self._makers, self._numbers, specs, computed)
    return self._built(lambda: builder.build(op, shapes, sizes))

  def resharding(
    self, value: GraphValue, before: Spec, after: Spec, sizes: Mapping[str, int]
  ) -> bytes | None:
    """The program that reshards an array, with the arguments of `reshard_program`; None for invalid shardings."""
    return self._built(lambda: reshard_program(value, before, after, sizes))

  def _built(self, build: Callable[[], _Program]) -> _Program | None:
    """A program that is built in the module's context; None if it is invalid, as with both an axis and a part of it."""
    with self._context, ir.Location.unknown():
      try:
        return build()
      except ir.MLIRError:
        return None

  def propagate(
    self,
    sizes: Mapping[str, int],
    arguments: Sequence[Spec],
    results: Sequence[Spec | None],
    resolve: Resolve,
  ) -> list[Spec]:
    """The sharding of every value under a layout.

    Args:
      sizes: size per mesh axis, in order.
      arguments: sharding of each argument of the step.
      results: sharding that each result needs; None where the compiler may choose.
      resolve: function from a logical sharding and a shape to mesh axes; None constrains nothing.

    Returns:
      Mesh axes per dimension of each value of `graph`.
    """
    with self._context, ir.Location.unknown():
      copy = self._module.operation.clone()
      ops = _set_shardings(copy, self._slots, sizes, arguments, results, resolve)
      self._propagation.run(copy)
      return self._read(ops, arguments)

  def program(
    self,
    sizes: Mapping[str, int],
    arguments: Sequence[Spec],
    results: Sequence[Spec | None],
    resolve: Resolve,
  ) -> bytes:
    """The step under a layout as MLIR bytecode, without any preparation. The arguments are those of `propagate`."""
    with self._context, ir.Location.unknown():
      copy = self._whole.operation.clone()
      main = main_of(copy)
      donations = _donations(main)
      _set_mesh(copy, sizes)
      _set_signature(main, arguments, results)
      for view in copy.regions[0].blocks[0].operations:
        _set_slots(list(walk(view.operation)), list(slots_of(view.operation)), resolve)
      _add_to_arguments(main, donations)
      devices = math.prod(sizes.values())
      copy.attributes['mhlo.num_partitions'] = ir.IntegerAttr.get(
        ir.IntegerType.get_signless(32), devices
      )
      return bytecode(copy)

  @functools.cached_property
  def _whole(self) -> Any:
    """The lowered step."""
    return ir.Module.parse(self._code)

  def _read(self, ops: list[Any], arguments: Sequence[Spec]) -> list[Spec]:
    """The shardings that propagation has assigned."""
    specs = self._replicated.copy()
    for value, spec in zip(self.graph.main.arguments, arguments, strict=True):
      specs[value] = spec
    reader = SpecReader()
    for op, results in zip(ops, self._results, strict=True):
      attributes = op.attributes
      if 'sdy.sharding' in attributes:
        for value, spec in zip(results, reader.read(attributes['sdy.sharding'])):
          specs[value] = spec
      elif results and op.name.startswith('sdy.') and 'sharding' in attributes:
        specs[results[0]] = reader.read(attributes['sharding'])[0]
    for value, operand in self._alike:
      specs[value] = specs[operand]
    for loop, bodies in self._loops:
      for body in bodies:
        for result, argument in zip(loop, body):
          specs[argument] = specs[result]
    return specs


def _set_shardings(
  module: Any,
  slots: Sequence[ShardingSlot],
  sizes: Mapping[str, int],
  arguments: Sequence[Spec],
  results: Sequence[Spec | None],
  resolve: Resolve,
) -> list[Any]:
  """Replaces the logical shardings of a module; returns its operations in the order of `walk`."""
  main = main_of(module)
  _set_mesh(module, sizes)
  _set_signature(main, arguments, results)
  ops = list(walk(main))
  _set_slots(ops, slots, resolve)
  return ops


def _set_slots(ops: Sequence[Any], slots: Sequence[ShardingSlot], resolve: Resolve) -> None:
  """Replaces the logical shardings of a function, whose operations are in the order of `walk`."""
  attributes: dict[Any, Any] = {}
  for slot in slots:
    key = slot.shardings, slot.per_value
    if key not in attributes:
      attributes[key] = attribute(slot, resolve)
    ops[slot.op].attributes[slot.attribute] = attributes[key]


def _set_mesh(module: Any, sizes: Mapping[str, int]) -> None:
  mesh = next(
    view.operation
    for view in module.regions[0].blocks[0].operations
    if view.operation.name == 'sdy.mesh'
  )
  axes = ', '.join(f'"{axis}"={size}' for axis, size in sizes.items())
  mesh.attributes['mesh'] = ir.Attribute.parse(f'#sdy.mesh<[{axes}]>')


def _set_signature(main: Any, arguments: Sequence[Spec], results: Sequence[Spec | None]) -> None:
  """Sets the shardings of a function's arguments and results."""
  for name, specs in (('arg_attrs', arguments), ('res_attrs', results)):
    texts = (
      '{}' if spec is None else f'{{sdy.sharding = #sdy.sharding<@mesh, [{_dims_text(spec)}]>}}'
      for spec in specs
    )
    main.attributes[name] = ir.Attribute.parse(f'[{", ".join(texts)}]')


def _donations(main: Any) -> list[list[str]]:
  """The attributes by which JAX donates each argument of a function."""
  arguments = main.attributes.get('arg_attrs', ())
  return [[f'{one.name} = {one.attr}' for one in each if one.name in _DONATION] for each in arguments]


def _add_to_arguments(main: Any, added: Sequence[Sequence[str]]) -> None:
  """Adds attributes to the arguments of a function."""
  texts = (
    ', '.join([*(f'{one.name} = {one.attr}' for one in each), *more])
    for each, more in zip(main.attributes['arg_attrs'], added)
  )
  main.attributes['arg_attrs'] = ir.Attribute.parse(f'[{", ".join(f"{{{text}}}" for text in texts)}]')


def _dims_text(spec: Spec) -> str:
  return ', '.join(map(dimension_text, spec))
