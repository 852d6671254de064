"""Bindings: jaxlib's MLIR, and nothing else of it anywhere in this package.

A lowered step is prepared once: calls are put in where they stand, and Shardy's import passes are run. What
it computes is then read into a plain `Graph`. From there on every layout costs one copy of the module, whose
shardings are replaced, and one run of Shardy's propagation, which says how every value in between lies.

The passes are those that XLA itself runs before it partitions a program (openxla/shardy, `import_pipeline.cc`
and `propagation_pipeline.cc`), without the one that drops mesh axes of size 1: here they are the names.

jaxlib's bindings change between versions; `check` says whether these are known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax._src.interpreters.mlir import make_ir_context
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import sdy

from flax_spmd.compat import jaxlib_version
from flax_spmd.errors import EstimatorError
from flax_spmd.estimate.graph import Axes, Block, Dims, Graph, Op, Value, whole

_KNOWN = (0, 10), (0, 12)  # the oldest and the newest jaxlib whose bindings were tried
_PREPARE = (
  'builtin.module(symbol-dce,cse,sdy-lift-inlined-meshes,sdy-constant-or-scalar-splitter,'
  'sdy-add-data-flow-edges,sdy-apply-sharding-constraints)'
)
_PROPAGATE = 'builtin.module(sdy-user-priority-propagate)'
_EDGE = 'sdy.data_flow_edge'
_OPAQUE = {'sdy.manual_computation': 'shard_map'}
_WITH_BLOCKS = ('while', 'case', 'if')
_LISTED = re.compile(r'(\w+) = (?:\[([\d, ]*)\]|(\d+))')
_CONVOLUTION = re.compile(r'\[([^\]]*)\]x\[([^\]]*)\]->\[([^\]]*)\]')
_SCALAR = re.compile(r'dense<(-?\d+)> : tensor<\w+>')
_PLACE = re.compile(r'"([^"]*)":(\d+):\d+')

# Axes per dimension as they are asked for; None where a dimension is open.
Wanted: TypeAlias = Sequence[Axes | None]


def check() -> None:
  """Raises unless jaxlib is of a version whose bindings are known.

  Raises:
    EstimatorError: it is older or newer.
  """
  major, minor = map(int, jaxlib_version().split('.')[:2])
  if not _KNOWN[0] <= (major, minor) <= _KNOWN[1]:
    raise EstimatorError(
      f'The estimator knows the MLIR bindings of jaxlib {_KNOWN[0][0]}.{_KNOWN[0][1]} to '
      f'{_KNOWN[1][0]}.{_KNOWN[1][1]}, this is jaxlib {jaxlib_version()}.\n'
      'Fix: use one of these, or go without estimates: every layout is then compiled, which takes seconds '
      'for each in place of a fraction of one.'
    )


class Named(NamedTuple):
  """A sharding of the lowered step: the name of each dimension (or None), and whether it is closed."""

  names: tuple[str | None, ...]
  closed: tuple[bool, ...]


# What a sharding by names means for an array of a shape; None for nothing.
Asked: TypeAlias = Callable[[Named, tuple[int, ...]], Wanted | None]


class _Slot(NamedTuple):
  """Where a sharding stands in the module: at which operation, as which attribute, of what."""

  op: int
  attribute: str
  shardings: tuple[tuple[Named, tuple[int, ...]], ...]
  per_value: bool


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
    self._context = make_ir_context()
    with self._context, ir.Location.unknown():
      self._module = ir.Module.parse(code)
      _inline_all(self._module)
      passmanager.PassManager.parse(_PREPARE).run(self._module.operation)
      self._propagate = passmanager.PassManager.parse(_PROPAGATE)
      reader = _Reader()
      self.graph = reader.graph(_main(self._module.operation))
      self._results, self._loops = reader.results, reader.loops
      self._slots = list(_slots(_main(self._module.operation)))

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
      main = _main(copy)
      _set_mesh(copy, sizes)
      _set_ends(main, arguments, results)
      ops = list(_walk(main))
      attributes: dict[Any, Any] = {}
      for slot in self._slots:
        key = slot.shardings, slot.per_value
        if key not in attributes:
          attributes[key] = _attribute(slot, asked, self._parameters)
        ops[slot.op].attributes[slot.attribute] = attributes[key]
      self._propagate.run(copy)
      return self._read(ops, arguments)

  def _read(self, ops: list[Any], arguments: Sequence[Dims]) -> list[Dims]:
    """The shardings that propagation has left at the operations."""
    found: list[Dims] = [whole(len(value.shape)) for value in self.graph.values]
    for number, dims in zip(self.graph.main.arguments, arguments, strict=True):
      found[number] = dims
    read = _Reading()
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


class _Reading(dict[Any, tuple[Dims, ...]]):
  """The shardings of attributes, each of which is read once."""

  def of(self, attribute: Any) -> tuple[Dims, ...]:
    if attribute not in self:
      try:
        listed = sdy.TensorShardingPerValueAttr(attribute).shardings
      except ValueError:
        listed = [attribute]
      self[attribute] = tuple(map(_dims, listed))
    return self[attribute]


def _dims(attribute: Any) -> Dims:
  sharding = sdy.TensorShardingAttr(attribute)
  return tuple(
    tuple(_axis(axis) for axis in sdy.DimensionShardingAttr(dimension).axes)
    for dimension in sharding.dimension_shardings
  )


def _axis(attribute: Any) -> str:
  axis = sdy.AxisRefAttr(attribute)
  if axis.sub_axis_info is None:
    return axis.name
  part = sdy.SubAxisInfoAttr(axis.sub_axis_info)
  return f'{axis.name}[{part.size}/{part.pre_size * part.size}]'


# -- reading a module


class _Reader:
  """Reads a prepared module into a graph, and notes whose results each operation's shardings are."""

  def __init__(self):
    self.values: list[Value] = []
    self.numbers: dict[Any, int] = {}
    self.results: list[tuple[int, ...]] = []
    self.loops: list[tuple[tuple[int, ...], list[tuple[int, ...]]]] = []

  def graph(self, main: Any) -> Graph:
    block = self._block(main.regions[0].blocks[0])
    return Graph(tuple(self.values), block)

  def _block(self, block: Any) -> Block:
    arguments = tuple(map(self._number, block.arguments))
    ops = []
    for view in block.operations:
      op = view.operation
      if op.name in ('func.return', 'stablehlo.return', 'sdy.return'):
        self.results.append(())
        return Block(arguments, tuple(ops), tuple(self.numbers[value] for value in op.operands))
      read = self._op(op)
      if read is not None:
        ops.append(read)
    return Block(arguments, tuple(ops), ())

  def _op(self, op: Any) -> Op | None:
    if op.name in _OPAQUE:
      raise EstimatorError(
        f'The step has {_OPAQUE[op.name]} in it, of which nothing can be estimated.\n'
        'Fix: compare layouts that you choose, with spmd.compare; it compiles each.'
      )
    if op.name == _EDGE:  # the same value, seen from where it is used
      self.numbers[op.results[0]] = self.numbers[op.operands[0]]
      self.results.append((self.numbers[op.operands[0]],))
      return None
    operands = tuple(self.numbers[value] for value in op.operands)
    results = tuple(map(self._number, op.results))
    self.results.append(results)
    kind = op.name.partition('.')[2]
    blocks: tuple[Block, ...] = ()
    if kind in _WITH_BLOCKS:
      blocks = tuple(self._block(region.blocks[0]) for region in op.regions)
      self.loops.append((results, [block.arguments for block in blocks]))
    return Op(kind, operands, results, _details(op), blocks, _source(op))

  def _number(self, value: Any) -> int:
    kind = value.type
    try:
      ranked = ir.RankedTensorType(kind)
      self.values.append(Value(tuple(ranked.shape), str(ranked.element_type)))
    except ValueError:
      self.values.append(Value((), 'token'))
    self.numbers[value] = len(self.values) - 1
    return len(self.values) - 1


def _details(op: Any) -> dict[str, Any]:
  """Attributes as numbers: lists of dimensions by their names, a scalar's value, a call's target."""
  found: dict[str, Any] = {}
  for name in op.attributes:
    text = str(op.attributes[name]) if name not in ('value', 'sdy.sharding', 'sharding') else ''
    if text.startswith('array<'):
      found[name] = tuple(map(int, re.findall(r'-?\d+', text.partition(':')[2])))
    elif convolution := _CONVOLUTION.search(text):
      found[name] = tuple(tuple(part.split(', ')) for part in convolution.groups())
    elif listed := _LISTED.findall(text):
      found |= {key: tuple(map(int, re.findall(r'\d+', many or one))) for key, many, one in listed}
    elif text[:1].isdigit():
      found[name] = int(text.partition(' ')[0])
    elif text.startswith('"'):
      found[name] = text.strip('"')
  if op.name in ('stablehlo.constant', 'sdy.constant') and not op.results[0].type.rank:
    scalar = _SCALAR.match(str(op.attributes['value']))
    found['value'] = int(scalar[1]) if scalar else None
  if op.name == 'stablehlo.compare':
    found['direction'] = str(op.attributes['comparison_direction']).rpartition(' ')[2].rstrip('>')
  return found


def _source(op: Any) -> str:
  """The innermost place in a file that an operation comes from."""
  found = _PLACE.search(str(op.location))
  return f'{found[1].rpartition("/")[2]}:{found[2]}' if found else ''


def _walk(op: Any) -> Iterator[Any]:
  """All operations of a function in order; that with regions before what is in them, as `_Reader` has them."""
  for region in op.regions:
    for block in region.blocks:
      for view in block.operations:
        inner = view.operation
        yield inner
        if inner.name.partition('.')[2] in _WITH_BLOCKS:
          yield from _walk(inner)


def _main(module: Any) -> Any:
  return next(
    view.operation
    for view in module.regions[0].blocks[0].operations
    if view.operation.name == 'func.func' and str(view.operation.attributes['sym_name']) == '"main"'
  )


# -- shardings


def _slots(main: Any) -> Iterator[_Slot]:
  """Where shardings by names stand."""
  for number, op in enumerate(_walk(main)):
    for name in ('sdy.sharding', 'sharding'):
      if name in op.attributes:
        attribute = op.attributes[name]
        try:
          listed, per_value = sdy.TensorShardingPerValueAttr(attribute).shardings, True
        except ValueError:
          listed, per_value = [attribute], False
        shapes = [tuple(ir.RankedTensorType(value.type).shape) for value in op.results]
        yield _Slot(number, name, tuple(zip(map(_named, listed), shapes)), per_value)


def _named(attribute: Any) -> Named:
  listed = sdy.TensorShardingAttr(attribute).dimension_shardings
  dimensions = [sdy.DimensionShardingAttr(dimension) for dimension in listed]
  names = (next((_axis(axis) for axis in one.axes), None) for one in dimensions)
  return Named(tuple(names), tuple(one.is_closed for one in dimensions))


def _attribute(slot: _Slot, asked: Asked, parameters: frozenset[str]) -> Any:
  texts = [
    _text(asked(named, shape), named, len(shape), parameters.issuperset(filter(None, named.names)))
    for named, shape in slot.shardings
  ]
  inner = ', '.join(f'<@mesh, [{text}]>' for text in texts)
  kind = f'#sdy.sharding_per_value<[{inner}]>' if slot.per_value else f'#sdy.sharding{inner}'
  return ir.Attribute.parse(kind)


def _text(wanted: Wanted | None, named: Named, rank: int, later: bool) -> str:
  if wanted is None:
    return ', '.join(['{?}'] * rank)
  return ', '.join(
    '{?}' if axes is None else _braced(axes, closed, later) for axes, closed in zip(wanted, named.closed)
  )


def _braced(axes: Axes, closed: bool = True, later: bool = True) -> str:
  listed = ', '.join([*(f'"{axis}"' for axis in axes), *([] if closed else ['?'])])
  return f'{{{listed}}}' + ('p1' if axes and later else '')


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
      else f'{{sdy.sharding = #sdy.sharding<@mesh, [{", ".join(map(_braced, dims))}]>}}'
      for dims in ends
    )
    main.attributes[name] = ir.Attribute.parse(f'[{", ".join(texts)}]')


# -- calls


def _inline_all(module: Any) -> None:
  """Puts what functions compute where they are called, and drops them."""
  functions = {
    str(view.operation.attributes['sym_name']).strip('"'): view.operation
    for view in module.body.operations
    if view.operation.name == 'func.func'
  }
  done: set[str] = set()

  def inline(name: str) -> None:
    if name in done:
      return
    done.add(name)
    for call in [op for op in _every(functions[name]) if op.name == 'func.call']:
      callee = str(call.attributes['callee']).removeprefix('@').strip('"')
      inline(callee)
      _inline(call, functions[callee].regions[0].blocks[0])

  inline('main')
  for name, function in functions.items():
    if name != 'main':
      function.erase()


def _every(op: Any) -> Iterator[Any]:
  for region in op.regions:
    for block in region.blocks:
      for view in list(block.operations):
        yield view.operation
        yield from _every(view.operation)


def _inline(call: Any, block: Any) -> None:
  """Replaces a call by copies of what is in its function's block."""
  now = dict(zip(block.arguments, call.operands))
  before = ir.InsertionPoint(call)
  for view in block.operations:
    op = view.operation
    if op.name == 'func.return':
      for result, value in zip(call.results, op.operands):
        result.replace_all_uses_with(now.get(value, value))
      break
    copy = op.clone(before)
    _replace(copy, now)
    now |= dict(zip(op.results, copy.results))
  call.erase()


def _replace(op: Any, now: Mapping[Any, Any]) -> None:
  for index, value in enumerate(op.operands):
    if value in now:
      op.operands[index] = now[value]
  for inner in _every(op):
    for index, value in enumerate(inner.operands):
      if value in now:
        inner.operands[index] = now[value]
