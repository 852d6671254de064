"""Deferred sums: gradients under data parallelism, added up over the devices of a stage once, after the loop.

A gradient of a weight is a sum over examples. Where these are sharded, each microbatch would end in an all-reduce of all
gradients. So the loop carries *parts* of a sum instead, one for each shard of the examples: `f32[4,64,32]` in place of
`f32[64,32]`, sharded over the first dimension. A device has as many bytes of it as before. The parts are added after the
loop. XLA does the same for a loop that it sees as a whole; here it sees one task at a time.

A value has parts if linear operations alone compute it, from sums over examples:

* a product, reduction or scattered sum over examples is computed for each shard of them;
* a transpose, cast, sum or other linear operation, also a call or conditional of such operations, for each part; a summand
  that is the same in each run, such as that of a penalty on weights, is added to one part;
* a call (`jit`, remat) or `scan`, whose body is written anew, for the results that have parts inside.

Parts add up to the value whatever is sharded. Where the examples are decides only what pays.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.operand_dimensions import operand_dimensions, walk
from flax_spmd._src.pipeline.cut import equations as eq
from flax_spmd._src.pipeline.cut.batch_rows import examples
from flax_spmd._src.pipeline.cut.equations import Atom, Constant, Equation, Value
from flax_spmd._src.pipeline.cut.microbatch_loop import StepParts, is_small
from flax_spmd._src.rules.decisions import UNCONSTRAINED, axis_names

Axes: TypeAlias = tuple[str, ...]


def defer_sums(
  step: StepParts, specs: Mapping[Value, PartitionSpec], axes: Axes, mesh: AbstractMesh
) -> dict[int, PartitionSpec]:
  """Lets the loop of a step carry parts of sums over examples, where a device needs no more memory for them.

  Args:
    step: the step; its loop, and the equations around it, are changed.
    specs: the known specs of the final values of the loop.
    axes: the mesh axes of the examples, which divide them.
    mesh: the mesh of a stage.

  Returns:
    The specs of the sums in parts, by their number among the values that the loop carries.
  """
  loop, body = step.loop, step.loop.body
  rows = {value: frozenset({0}) for value, array in body.rows.items() if examples([array])}
  carried = {number: number for number in range(len(body.carried))}
  program = _Program(body.equations, body.carried, body.results, carried)
  program.find(rows, {axis: mesh.shape[axis] for axis in axes})
  parts, deferred, possible = _Parts(axes, mesh), dict[int, PartitionSpec](), dict[int, Axes]()
  for number, final in enumerate(loop.finals):
    taken = {axis for entry in specs.get(final) or () for axis in axis_names(entry)}
    over = tuple(axis for axis in axes if axis not in taken and mesh.shape[axis] > 1)
    if final in specs and over:
      possible[number] = over
  for number, over in possible.items():
    values = program.has_parts.get(number, [])
    joint = [other for other, result in enumerate(program.results) if result in values]
    if joint and all(possible.get(other) == over for other in joint):
      parts.choose(program, number, over)
      deferred[number] = PartitionSpec(over, *specs[loop.finals[number]])
  if not deferred:
    return {}
  loop.whole = {number: body.carried[number] for number in deferred}
  body.equations, body.carried, results = parts.written(program)
  body.updated = results[: len(carried)]
  whole_starts = [loop.starts[number] for number in deferred]
  made = {value: one for one in step.before for value in one.outputs}
  zero = [_is_zero(start, made) for start in whole_starts]
  widened, starts = eq.traced(
    lambda *starts: list(map(parts.start, starts, loop.whole.values(), zero)), *whole_starts
  )
  sums = [Value(body.updated[number].aval) for number in deferred]
  added, totals = eq.traced(lambda *sums: [lax.reduce_sum(each, [0]) for each in sums], *sums)
  names = {total: loop.finals[number] for number, total in zip(deferred, totals, strict=True)}
  step.before += widened
  step.after[:0] = [one.renamed(names) for one in added]
  for number, start, final in zip(deferred, starts, sums, strict=True):
    loop.starts[number], loop.finals[number] = start, final
  return deferred


class _Program:
  """A program, and its values that can have parts.

  Args:
    equations, inputs, results: the program.
    carried: the numbers of the results that are inputs of the next run, with the numbers of these inputs.

  Attributes:
    examples: the dimensions of values that have examples.
    sources: for each value that can have parts, the operands that need parts, too.
    split: for each sum over examples, the dimensions that are split, by the number of the operand; None for an operand that
      is the same in each run, which is added to one part.
    calls: the program of each call and scan.
    has_parts: for each result that can have parts, all values that then have parts, also inputs and other results.
  """

  def __init__(
    self,
    equations: list[Equation],
    inputs: list[Value],
    results: list[Value],
    carried: Mapping[int, int],
  ):
    self.equations, self.inputs, self.results, self.carried = equations, inputs, results, carried
    self.calls: dict[Equation, _Program] = {}
    self.producer = {value: one for one in equations for value in one.outputs}
    self._uses = Counter(value for one in equations for value in one.values)
    self._uses.update(results)

  def find(self, known: Mapping[Value, frozenset[int]], axes: Mapping[str, int]) -> None:
    """Finds the values that can have parts.

    Args:
      known: the dimensions of inputs that have examples.
      axes: the mesh axes of the examples, with their sizes.
    """
    pairs = [(self.inputs[at], self.results[number]) for number, at in self.carried.items()]
    self.examples: dict[Value, frozenset[int]] = dict(known)
    self.split: dict[Value, Mapping[int, int | None]] = {}
    self.has_parts: dict[int, list[Value]] = {}
    while True:  # a carried value has examples if it gets them in a run
      for one in self.equations:
        self._follow(one, axes)
      new = {old: self._dims(value) | self._dims(old) for old, value in pairs}
      if all(self._dims(old) == dims for old, dims in new.items()):
        break
      self.examples |= new
    self._find_sources([], axes)
    for number, result in enumerate(self.results):
      found = self._joint(result)
      if any(value not in self.inputs and not self.sources[value] for value in found):
        self.has_parts[number] = found

  def linear_in(self, given: list[Value], results: list[Value], axes: Mapping[str, int]) -> list[Value]:
    """The inputs, of some and those that are carried, in which results are linear, jointly, and zero if they are."""
    self.examples, self.split = {}, {}
    self._find_sources(given, axes)
    are_linear = all(self._joint(result) or _is_zero(result, self.producer) for result in results)
    adds_others = any(self.split.values())
    return (
      [value for value in self.inputs if self._joint(value)] if are_linear and not adds_others else []
    )

  def _find_sources(self, given: list[Value], axes: Mapping[str, int]) -> None:
    """Finds the values that can have parts if some inputs and all carried ones have, and which have them jointly."""
    pairs = [(self.inputs[at], self.results[number]) for number, at in self.carried.items()]
    self.sources: dict[Value, list[Value]] = {
      value: [] for value in (*given, *(old for old, _ in pairs))
    }
    self._beside: dict[Value, list[Value]] = defaultdict(list)
    self._used_parts = Counter(self.results)
    for pair in pairs:
      self._link(pair)
    for one in self.equations:
      self._find(one, axes)

  def _link(self, values: Sequence[Value]) -> None:
    """Notes that all of some values have parts, or none."""
    for value in values:
      self._beside[values[0]].append(value)
      self._beside[value].append(values[0])

  def _joint(self, value: Value) -> list[Value]:
    """A value, and all others that have parts if it has; none if one of them is read as a whole."""
    found = [*walk(value, id, self._beside.__getitem__)]
    whole = (each not in self.sources or self._used_parts[each] != self._uses[each] for each in found)
    return [] if any(whole) else found

  def _dims(self, atom: Atom) -> frozenset[int]:
    return self.examples.get(atom, frozenset()) if isinstance(atom, Value) else frozenset()

  def _follow(self, one: Equation, axes: Mapping[str, int]) -> None:
    """Follows the examples through an operation."""
    operands = list(map(self._dims, one.inputs))
    if not any(operands):
      return
    inner, rows = self.calls.get(one) or _opened(one), _first_row(one)
    if inner is None:
      node: Any = SimpleNamespace(
        primitive=one.primitive, params=one.params, invars=one.inputs, outvars=one.outputs
      )
      for number, value in enumerate(one.outputs):
        self.examples[value] = frozenset(
          dim
          for dim in range(len(value.aval.shape))
          if any(each in operands[at] for at, each in operand_dimensions(node, number, dim))
        )
      return
    self.calls[one] = inner
    for at in range(rows, len(operands)):
      operands[at] = frozenset(dim - 1 for dim in operands[at] if dim)
    inner.find(dict(zip(inner.inputs, operands, strict=True)), axes)
    for number, (value, result) in enumerate(zip(one.outputs, inner.results, strict=True)):
      is_row = one.name == 'scan' and number not in inner.carried
      self.examples[value] = frozenset(dim + is_row for dim in inner._dims(result))

  def _find(self, one: Equation, axes: Mapping[str, int]) -> None:
    """Finds whether the results of an operation can have parts."""
    inner = self.calls.get(one)
    if inner is not None:
      for number, found in inner.has_parts.items():
        self.sources[one.outputs[number]] = []
        joint = (value for value, result in zip(one.outputs, inner.results) if result in found)
        self._link([one.outputs[number], *joint])
      if inner.has_parts:
        return
    split = next(self._sums_over_examples(one, math.prod(axes.values())), None)
    if split is not None:
      self.split[one.outputs[0]], self.sources[one.outputs[0]] = split, []
      return
    for joint in self._linear_in(one, axes):
      numbers = [number for number in joint if not _is_zero(one.inputs[number], self.producer)]
      fixed = dict.fromkeys(number for number in numbers if self._is_fixed(one.inputs[number]))
      operands: list[Any] = [one.inputs[number] for number in numbers if number not in fixed]
      if operands and all(isinstance(atom, Value) and atom in self.sources for atom in operands):
        self.sources |= dict.fromkeys(one.outputs, operands)
        self.split[one.outputs[0]] = fixed
        self._used_parts.update(operands)
        self._link([*operands, *filter(self._uses.__getitem__, one.outputs)])
        self.calls.pop(one, None)
        return

  def _is_fixed(self, atom: Atom) -> bool:
    """Whether it is the same in each run."""
    return isinstance(atom, Value) and atom not in self.producer and atom not in self.inputs

  def _sums_over_examples(self, one: Equation, parts: int) -> Iterator[dict[int, int]]:
    """The dimensions of operands that have examples, over which an operation sums."""
    avals: list[Any] = [atom.aval for atom in one.inputs]
    for dimensions in self._summed(one):
      sizes = {avals[at].shape[dim] for at, dim in dimensions.items()}
      has_examples = any(dim in self._dims(one.inputs[at]) for at, dim in dimensions.items())
      if has_examples and len(sizes) == 1 and not sizes.pop() % parts:
        yield dimensions

  def _summed(self, one: Equation) -> Iterator[dict[int, int]]:
    """The dimensions of operands that an operation sums over together."""
    if one.name == 'dot_general':
      (left, right), _ = one.params['dimension_numbers']
      yield from ({0: a, 1: b} for a, b in zip(left, right, strict=True))
    elif one.name == 'reduce_sum':
      yield from ({0: axis} for axis in one.params['axes'])
    elif one.name == 'conv_general_dilated' and one.params['feature_group_count'] == 1:
      numbers = one.params['dimension_numbers']
      yield {0: numbers.lhs_spec[1], 1: numbers.rhs_spec[1]}
    elif one.name in _SCATTERED_SUMS and _is_zero(one.inputs[0], self.producer):
      numbers, updates = one.params['dimension_numbers'], eq.abstract(one.inputs[2])
      if not numbers.operand_batching_dims:
        scattered = (dim for dim in range(updates.ndim) if dim not in numbers.update_window_dims)
        yield from ({1: at, 2: dim} for at, dim in enumerate(scattered))

  def _linear_in(self, one: Equation, axes: Mapping[str, int]) -> Sequence[tuple[int, ...]]:
    """The choices of operands in which an operation is linear, jointly, and zero if they are. Those that are zero need no parts.

    A constraint that shards a value over axes of the examples is none: it has no room for parts.
    """
    if one.name in ('add', 'add_any', 'sub', 'pad', 'dynamic_update_slice'):
      return [(0, 1)]
    if one.name in ('mul', 'dot_general'):
      return [(0,), (1,)]
    if one.name in _LINEAR or (one.name == 'div' and eq.is_inexact(one.outputs[0])):
      return [(0,)]
    if one.name in _SCATTERED_SUMS or (
      one.name == 'scatter' and (one.params['unique_indices'] or _is_zero(one.inputs[2], self.producer))
    ):
      return [(0, 2)]
    if one.name == 'gather':
      return [(0,)] if one.params['fill_value'] in (None, 0) and eq.is_inexact(one.outputs[0]) else []
    if one.name == 'reduce_precision':
      return [(0,)] if one.params['mantissa_bits'] >= 7 and one.params['exponent_bits'] >= 5 else []
    if one.name in ('complex', 'concatenate', 'optimization_barrier', 'select_n', 'stack'):
      return [tuple(range(one.name == 'select_n', len(one.inputs)))]
    if one.name == 'convert_element_type':
      return [(0,)] if eq.is_inexact(one.inputs[0]) and eq.is_inexact(one.outputs[0]) else []
    if one.name == 'sharding_constraint':
      spec = getattr(one.params['sharding'], 'spec', axes)
      return [] if any(axis in axes for entry in spec for axis in axis_names(entry)) else [(0,)]
    return self._linear_call(one, axes)

  def _linear_call(self, one: Equation, axes: Mapping[str, int]) -> Sequence[tuple[int, ...]]:
    """The operands in which the used results of a call, scan or conditional are linear."""
    is_given = [isinstance(atom, Value) and atom in self.sources for atom in one.inputs]
    if not any(is_given):
      return []
    first = int(one.name == 'cond')
    joint = set[tuple[int, ...]]()
    for inner in _programs(one):
      used = [result for value, result in zip(one.outputs, inner.results) if self._uses[value]]
      given = [value for value, each in zip(inner.inputs, is_given[first:], strict=True) if each]
      found = inner.linear_in(given, used, axes)
      joint.add(tuple(number + first for number, value in enumerate(inner.inputs) if value in found))
    return [*joint] if len(joint) == 1 else []

  def is_row(self, value: Value) -> bool:
    """Whether a value is stacked by a scan: its parts are then in dimension 1."""
    one = self.producer.get(value)
    if one is None or one.name != 'scan':
      return False
    return one.outputs.index(value) not in self.calls[one].carried


def _opened(one: Equation) -> _Program | None:
  """The program of a call or scan that can be written anew."""
  inner = None if one.name == 'cond' else next(_programs(one), None)
  passes = inner is not None and not {*inner.results}.isdisjoint(inner.inputs)
  return None if one.name != 'scan' and passes else inner


def _programs(one: Equation) -> Iterator[_Program]:
  """The program of a call or scan, or those of the branches of a conditional."""
  if one.name not in {'scan', 'cond', *compat.JITS, *compat.REMATS}:
    return
  if any(hasattr(each, 'spec') for key in _SHARDINGS for each in one.params.get(key, ())):
    return
  constants, carried = compat.scan_counts(one.params) if one.name == 'scan' else (0, 0)
  for jaxpr in compat.jaxprs_in(one.params):
    inputs = [Value(variable.aval) for variable in compat.jaxpr_parts(jaxpr).inputs]
    equations, results = eq.flatten(jaxpr, inputs, is_small)
    yield _Program(equations, inputs, results, {number: constants + number for number in range(carried)})


def _is_zero(atom: Atom, producer: Mapping[Value, Equation]) -> bool:
  """Whether a value is zero, by its first operation."""
  if isinstance(atom, Literal):
    return bool(np.all(atom.val == 0))
  one = producer.get(atom)
  return one is not None and one.name == 'broadcast_in_dim' and _is_zero(one.inputs[0], producer)


def _first_row(one: Equation) -> int:
  """The number of the first operand whose rows a scan takes; that after the last one for other operations."""
  return sum(compat.scan_counts(one.params)) if one.name == 'scan' else len(one.inputs)


_SHARDINGS = ('in_shardings', 'out_shardings')
_SCATTERED_SUMS = frozenset({'scatter-add', 'scatter_add'})
_NAMES = (
  'broadcast_in_dim conj copy cumsum dynamic_slice expand_dims imag neg real reduce_sum reduce_window_sum '
  'reshape rev slice split squeeze transpose unstack'
)
_LINEAR = frozenset(_NAMES.split())
"""Operations that are linear in their first operand."""


class _Parts:
  """Writes programs whose values have parts.

  Args:
    axes: the mesh axes of the examples, from the outermost.
    mesh: the mesh of a stage.
  """

  def __init__(self, axes: Axes, mesh: AbstractMesh):
    self._axes, self._mesh = axes, mesh
    self._over: dict[Value, Axes] = {}

  def choose(self, program: _Program, number: int, over: Axes) -> None:
    """Gives a result parts, one for each device along mesh axes."""
    for value in program.has_parts[number]:
      self._over[value] = over
      one = program.producer.get(value)
      if one in program.calls:
        self.choose(program.calls[one], one.outputs.index(value), over)

  def written(self, program: _Program) -> tuple[list[Equation], list[Value], list[Value]]:
    """The equations, inputs and results of a program with the chosen parts."""
    names = {value: Value(self._aval(value)) for value in program.inputs if value in self._over}
    equations: list[Equation] = []
    last: list[Equation] = []
    for one in program.equations:
      if not self._has_parts(one):
        equations.append(one)
      elif one in program.calls:
        call, outputs = eq.traced(self._call(one, program.calls[one]), *one.inputs, opens=False)
        pairs = list(zip(one.outputs, outputs, strict=True))
        names |= {old: new for old, new in pairs if old in self._over}
        whole = {new: old for old, new in pairs if old not in self._over}
        equations += [each.renamed(whole) for each in call]
      else:
        last.append(one)
    chosen = [value for value in program.results if value in self._over]
    read = dict.fromkeys((*eq.free_values(last), *filter(names.__contains__, chosen)))

    def parts(*arrays: Any) -> list[Any]:
      known = dict(zip(read, arrays, strict=True))
      self._add_parts(program, known)
      return [known[value] for value in chosen]

    new, outputs = eq.traced(parts, *[names.get(value, value) for value in read], opens=False)
    names |= zip(chosen, outputs, strict=True)
    inputs, results = (
      [names.get(value, value) for value in each] for each in (program.inputs, program.results)
    )
    return [*equations, *new], inputs, results

  def _has_parts(self, one: Equation) -> bool:
    return not self._over.keys().isdisjoint(one.outputs)

  def widened(self, array: Any, over: Axes) -> Any:
    """Parts that add up to an array: itself and zeros."""
    array = lax.broadcast(array, [self._count(over)])
    is_first = lax.broadcasted_iota(np.int32, array.shape, 0) == 0
    return lax.select(is_first, array, lax.full_like(array, 0))

  def start(self, array: Any, carried: Value, is_zero: bool = False) -> Any:
    """The first value of an input that is carried in parts."""
    if is_zero:
      return lax.full((self._count(self._over[carried]), *array.shape), 0, carried.aval.dtype)
    return self.widened(jnp.asarray(array, carried.aval.dtype), self._over[carried])

  def _count(self, over: Axes) -> int:
    return math.prod(self._mesh.shape[axis] for axis in over)

  def _aval(self, value: Value) -> Any:
    return value.aval.update(shape=(self._count(self._over[value]), *value.aval.shape))

  def _add_parts(self, program: _Program, known: dict[Value, Any]) -> None:
    """Computes the parts of results.

    Args:
      program: the program.
      known: the arrays of values. Results are added.
    """
    for over in dict.fromkeys(self._over[value] for value in program.results if value in self._over):
      results = [value for value in program.results if self._over.get(value) == over]
      shards: dict[tuple[Any, int | None], Value] = {}
      equations: list[Equation] = []
      for one in program.equations:
        if one not in program.calls and over in map(self._over.get, one.outputs):
          inputs = list(one.inputs)
          for at, dim in program.split.get(one.outputs[0], {}).items():
            inputs[at] = shards.setdefault((inputs[at], dim), Value(inputs[at].aval))
          equations.append(one.on(inputs, one.outputs))
      read = [value for value in (*eq.free_values(equations), *results) if value in known]
      whole = {value: known[value] for value in read if value not in self._over}
      parts = {
        shard: self.widened(known[value], over) if dim is None else self._shards(known[value], dim, over)
        for (value, dim), shard in shards.items()
      }
      parts |= {value: known[value] for value in read if value in self._over}
      places = [int(program.is_row(value)) for value in parts]

      def run(arrays: Sequence[Any]) -> list[Any]:
        given = dict(zip(parts, arrays, strict=True))  # noqa: B023
        return eq.run(equations, whole | given, results)  # noqa: B023

      name = compat.GroupAxisName('part')  # convolutions of parts are in a `shard_map`
      mapped = jax.vmap(run, [places], axis_size=self._count(over), axis_name=name, spmd_axis_name=over)
      with compat.without_mesh(), jax.sharding.use_abstract_mesh(self._mesh):
        found = mapped([*parts.values()])
      known |= zip(results, found, strict=True)

  def _constrained(self, value: Value, array: Any) -> Any:
    """A result of a call; if it has parts, they are sharded. A result of the loop has its spec from `defer_sums`."""
    if value not in self._over:
      return array
    spec = PartitionSpec(self._over[value], *[UNCONSTRAINED] * (array.ndim - 1))
    return lax.with_sharding_constraint(array, NamedSharding(self._mesh, spec))

  def _shards(self, array: Any, dim: int, over: Axes) -> Any:
    """An array with the shards of a dimension over mesh axes in a new first dimension."""
    sizes = [self._mesh.shape[axis] for axis in self._axes]
    rest = array.shape[dim] // math.prod(sizes)
    array = lax.reshape(array, (*array.shape[:dim], *sizes, rest, *array.shape[dim + 1 :]))
    chosen = [dim + number for number, axis in enumerate(self._axes) if axis in over]
    others = [number for number in range(array.ndim) if number not in chosen]
    array = lax.transpose(array, (*chosen, *others))
    array = lax.collapse(array, dim + len(chosen), dim + len(sizes) + 1)
    return lax.collapse(array, 0, len(chosen))

  def _call(self, one: Equation, inner: _Program) -> Callable[..., list[Any]]:
    """A call or scan with parts among its results, as a function of its operands."""

    def body(*arrays: Any) -> list[Any]:
      values = {*inner.results}.union(*(each.values for each in inner.equations))
      known: dict[Value, Any] = {value: value.array for value in values if isinstance(value, Constant)}
      known |= zip(inner.inputs, arrays, strict=True)
      for each in inner.equations:
        if not self._has_parts(each):
          eq.run([each], known, [])
        elif each in inner.calls:
          operands = eq.run([], known, each.inputs)
          known |= zip(each.outputs, self._call(each, inner.calls[each])(*operands), strict=True)
      self._add_parts(inner, known)
      return [self._constrained(value, known[value]) for value in inner.results]

    def call(*operands: Any) -> list[Any]:
      given: list[Any] = list(operands)
      for at in inner.carried.values():
        if inner.inputs[at] in self._over:
          given[at] = self.start(given[at], inner.inputs[at])
      if one.name in compat.JITS:
        body.__name__ = str(one.params.get('name', one.name))
        return jax.jit(body)(*given)
      rows = _first_row(one)
      avals = [jax.typeof(array) for array in given]
      avals[rows:] = [aval.update(shape=aval.shape[1:]) for aval in avals[rows:]]
      program = jax.make_jaxpr(body)(*avals)
      [(key, old)] = [(key, value) for key, value in one.params.items() if compat.is_jaxpr(value)]
      program = program if hasattr(old, 'jaxpr') else getattr(program, 'jaxpr', program)
      return compat.bind(one.primitive, {**one.params, key: program}, one.context, given, one.source)

    return call
