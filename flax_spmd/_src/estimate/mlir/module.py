"""Modules: a lowered step that is prepared once, and propagated under any layout.

Calls are put in where they stand, and Shardy's import passes are run. What the step computes is then read into
a plain `Graph`. From there on every layout costs one copy of the module, whose shardings are replaced, and one
run of Shardy's propagation, which says how every value in between lies.

The passes are those that XLA itself runs before it partitions a program (openxla/shardy, `import_pipeline.cc`
and `propagation_pipeline.cc`), without the one that drops mesh axes of size 1: here they are the names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxlib.mlir import ir, passmanager

from flax_spmd._src.compat import mlir_context
from flax_spmd._src.estimate.graph import Dims, Graph, whole
from flax_spmd._src.estimate.mlir.inline import drop_uniform, inline_all, make_plain
from flax_spmd._src.estimate.mlir.read_graph import Reader, main_of, walk
from flax_spmd._src.estimate.mlir.shardings import Asked, Named, Reading, attribute, braced, slots_of

_PREPARE = (
  'builtin.module(symbol-dce,cse,sdy-lift-inlined-meshes,sdy-constant-or-scalar-splitter,'
  'sdy-add-data-flow-edges,sdy-apply-sharding-constraints)'
)
_PROPAGATE = 'builtin.module(sdy-user-priority-propagate)'


class Module:
  """A lowered step, prepared.

  How activations lie is propagated first, by Shardy's priorities, and how parameters do afterwards. XLA's own
  propagation has no such order, but visits operations in another one than these bindings do, and where both
  want a say in a value (in what a scan keeps for its backward pass) activations are what it comes to first.

  Args:
    code: of the lowered step, MLIR bytecode.
    parameters: the names of parameters' dimensions.

  Attributes:
    graph: what it computes.

  Raises:
    EstimatorError: it has parts that cannot be estimated, such as `shard_map`.
  """

  graph: Graph

  def __init__(self, code: bytes, parameters: frozenset[str]):
    self._parameters = parameters
    self._context = mlir_context()
    with self._context, ir.Location.unknown():
      self._module = ir.Module.parse(code)
      inline_all(self._module)
      make_plain(self._module.operation)
      drop_uniform(self._module.operation)
      passmanager.PassManager.parse(_PREPARE).run(self._module.operation)
      self._propagate = passmanager.PassManager.parse(_PROPAGATE)
      self._propagate.enable_verifier(False)  # a sixth of the time, to see that Shardy is right
      reader = Reader()
      self.graph = reader.graph(main_of(self._module.operation))
      self._results, self._loops = reader.results, reader.loops
      self._slots = list(slots_of(main_of(self._module.operation)))

  @property
  def names(self) -> set[tuple[Named, tuple[int, ...]]]:
    """The shardings that the step asks for by names, with the shapes of what they are asked of."""
    return {one for slot in self._slots for one in slot.shardings}

  def propagated(
    self,
    sizes: Mapping[str, int],
    arguments: Sequence[Dims],
    results: Sequence[Dims | None],
    asked: Asked,
  ) -> list[Dims]:
    """How every value lies under a layout.

    Args:
      sizes: size per mesh axis, in order.
      arguments: how each argument of the step lies.
      results: how each result has to lie; None where the compiler may choose.
      asked: what a sharding by names means under the layout; None for nothing.

    Returns:
      Mesh axes per dimension, by the number of the value.
    """
    with self._context, ir.Location.unknown():
      copy = self._module.operation.clone()
      main = main_of(copy)
      _set_mesh(copy, sizes)
      _set_ends(main, arguments, results)
      ops = list(walk(main))
      attributes: dict[Any, Any] = {}
      for slot in self._slots:
        key = slot.shardings, slot.per_value
        if key not in attributes:
          attributes[key] = attribute(slot, asked, self._parameters)
        ops[slot.op].attributes[slot.attribute] = attributes[key]
      self._propagate.run(copy)
      return self._read(ops, arguments)

  def _read(self, ops: list[Any], arguments: Sequence[Dims]) -> list[Dims]:
    """The shardings that propagation has left at the operations."""
    found: list[Dims] = [whole(len(value.shape)) for value in self.graph.values]
    for number, dims in zip(self.graph.main.arguments, arguments, strict=True):
      found[number] = dims
    read = Reading()
    for op, results in zip(ops, self._results, strict=True):
      attributes = op.attributes
      if 'sdy.sharding' in attributes:
        for number, dims in zip(results, read.of(attributes['sdy.sharding'])):
          found[number] = dims
      elif results and op.name.startswith('sdy.') and 'sharding' in attributes:
        found[results[0]] = read.of(attributes['sharding'])[0]
    for loop, bodies in self._loops:
      for body in bodies:
        for result, argument in zip(loop, body):
          found[argument] = found[result]
    return found


def _set_mesh(module: Any, sizes: Mapping[str, int]) -> None:
  mesh = next(
    view.operation
    for view in module.regions[0].blocks[0].operations
    if view.operation.name == 'sdy.mesh'
  )
  axes = ', '.join(f'"{axis}"={size}' for axis, size in sizes.items())
  mesh.attributes['mesh'] = ir.Attribute.parse(f'#sdy.mesh<[{axes}]>')


def _set_ends(main: Any, arguments: Sequence[Dims], results: Sequence[Dims | None]) -> None:
  """Puts shardings at the arguments and results of a function."""
  for name, ends in (('arg_attrs', arguments), ('res_attrs', results)):
    texts = (
      '{}'
      if dims is None
      else f'{{sdy.sharding = #sdy.sharding<@mesh, [{", ".join(map(braced, dims))}]>}}'
      for dims in ends
    )
    main.attributes[name] = ir.Attribute.parse(f'[{", ".join(texts)}]')
