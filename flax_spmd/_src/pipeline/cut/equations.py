"""Equations: a jaxpr as a flat list of equations that can be cut, copied and reassembled.

Jaxprs nest, differ between versions of JAX and own their variables. Here a program is a plain list of
`Equation` objects between `Value` objects. A value has a shape and an identity only. Its producer and
its readers follow from the list, so any part of the list is a program too: `free_values` are its inputs.

    equations, outputs = flatten(jaxpr, inputs, opens)      # calls that `opens` accepts are inlined
    results = run(equations, {value: array, ...}, outputs)
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, Primitive
from jax.sharding import AxisType, NamedSharding

from flax_spmd._src import compat
from flax_spmd._src.jit.constrained_results import names_axes
from flax_spmd._src.source_lines import UNKNOWN_LINE as UNKNOWN_LINE
from flax_spmd._src.source_lines import source_line as source_line


class Value:
  """An input or output of an equation."""

  __slots__ = ('aval',)

  def __init__(self, aval: Any):
    self.aval = aval

  @property
  def bytes(self) -> int:
    """Its size in bytes."""
    return math.prod(self.aval.shape) * self.aval.dtype.itemsize


class Constant(Value):
  """An array that the program closes over."""

  __slots__ = ('array',)

  def __init__(self, array: Any):
    super().__init__(jax.typeof(array))
    self.array = array


Atom: TypeAlias = Value | Literal
Reader = TypeVar('Reader')


@dataclasses.dataclass(eq=False, slots=True)
class Equation:
  """One operation.

  Attributes:
    primitive, params: the JAX primitive and its parameters.
    inputs: values and literals.
    outputs: values.
    context: the JAX settings that it was traced under.
    source: JAX's source info, a stack of the user's program.
    has_effects: whether it has side effects.
  """

  primitive: Primitive
  params: Mapping[str, Any]
  inputs: list[Atom]
  outputs: list[Value]
  context: Any = None
  source: Any = None
  has_effects: bool = False

  @property
  def name(self) -> str:
    """Its primitive's name."""
    return self.primitive.name

  @property
  def values(self) -> list[Value]:
    """The inputs that are values, not literals."""
    return [atom for atom in self.inputs if isinstance(atom, Value)]

  @property
  def source_line(self) -> str:
    """The line of the user's program that it comes from."""
    return source_line(self.source)

  def renamed(self, names: Mapping[Value, Atom]) -> Equation:
    """The same operation, with other names for some of its values; itself if it has none of them."""
    if names.keys().isdisjoint((*self.values, *self.outputs)):
      return self
    inputs, outputs = ([lookup(names, atom) for atom in each] for each in (self.inputs, self.outputs))
    return self.on(inputs, cast(list[Value], outputs))

  def on(self, inputs: list[Atom], outputs: list[Value]) -> Equation:
    """The same operation, on other values."""
    return Equation(
      self.primitive, self.params, inputs, outputs, self.context, self.source, self.has_effects
    )


def lookup(known: Mapping[Value, Atom], atom: Atom) -> Atom:
  """The replacement of an atom, followed to its end; the atom itself if it has none."""
  while isinstance(atom, Value) and atom in known:
    atom = known[atom]
  return atom


def flatten(
  jaxpr: Any, inputs: Sequence[Atom], opens: Callable[[Any], bool]
) -> tuple[list[Equation], list[Value]]:
  """The equations of a jaxpr on given inputs, and its outputs.

  Args:
    jaxpr: a jaxpr, closed or not.
    inputs: an atom for each of its inputs.
    opens: returns whether to inline a call. A `reshard` without effect is left out.
  """
  equations: list[Equation] = []
  outputs = _flatten(jaxpr, inputs, opens, equations)
  return equations, [_named(atom) for atom in outputs]


def resolved(known: Mapping[Value, Atom], values: Iterable[Value]) -> list[Value]:
  """The replacements of values. A literal becomes a `Constant`, which has an identity."""
  return [_named(lookup(known, value)) for value in values]


def _named(atom: Atom) -> Value:
  if isinstance(atom, Value):
    return atom
  number = _number(atom)  # a Python number has a weak type
  return Constant(
    jnp.asarray(number, None if type(number) in (bool, int, float, complex) else abstract(atom).dtype)
  )


def _flatten(jaxpr, inputs, opens, equations) -> list[Atom]:
  inner = compat.jaxpr_parts(jaxpr)
  known: dict[Any, Atom] = dict(zip(inner.inputs, inputs, strict=True))
  known.update((variable, Constant(array)) for variable, array in zip(inner.constants, inner.arrays))

  def read(atoms: Iterable[Any]) -> list[Atom]:
    return [_literal(atom) if isinstance(atom, Literal) else known[atom] for atom in atoms]

  for equation in inner.equations:
    arguments = read(equation.invars)
    if equation.primitive.name in compat.CALLS and opens(equation):
      inside, params = next(compat.jaxprs_in(equation.params)), equation.params
      arguments = _placed(arguments, params.get('in_shardings', ()), equations)
      outputs = _flatten(inside, arguments, opens, equations)
      outputs = _placed(outputs, params.get('out_shardings', ()), equations)
    elif equation.primitive.name == 'reshard' and not names_axes(equation):
      outputs = arguments
    else:
      outputs = [Value(variable.aval) for variable in equation.outvars]
      equations.append(
        Equation(
          equation.primitive,
          equation.params,
          arguments,
          outputs,
          equation.ctx,
          equation.source_info,
          bool(equation.effects),
        )
      )
    known.update(zip(equation.outvars, outputs, strict=True))
  return read(inner.outputs)


def _placed(atoms: list[Atom], shardings: Iterable[Any], equations: list[Equation]) -> list[Atom]:
  """The operands or results of a call that is inlined, constrained to the shardings that the user gave them."""
  placed = atoms.copy()
  for number, (atom, sharding) in enumerate(zip(atoms, shardings)):
    is_chosen = isinstance(sharding, NamedSharding) and AxisType.Explicit not in sharding.mesh.axis_types
    if is_chosen and isinstance(atom, Value):
      constraint, [placed[number]] = traced(lambda x: lax.with_sharding_constraint(x, sharding), atom)  # noqa: B023
      equations += constraint
  return placed


def _literal(literal: Literal) -> Atom:
  large = np.size(literal.val) > _LARGE_LITERAL  # a closed-over array
  return Constant(jnp.asarray(literal.val)) if large else literal


_LARGE_LITERAL = 16  # elements


def traced(
  fn: Callable[..., Any], *inputs: Atom, opens: bool = True, known: dict[Any, Any] | None = None
) -> tuple[list[Equation], list[Value]]:
  """The equations of a function of arrays, and its results.

  Args:
    fn: the function.
    *inputs: its arguments.
    opens: whether to inline its calls.
    known: a cache of traces, one per function and input types. The function's closure and JAX's settings
      must not change while it is in use.
  """
  avals = tuple(map(abstract, inputs))
  known = {} if known is None else known
  if (fn, avals) not in known:
    known[fn, avals] = jax.make_jaxpr(fn)(*avals)
  return flatten(known[fn, avals], inputs, lambda _: opens)


def opened(equation: Equation, opens: Callable[[Any], bool]) -> tuple[list[Equation], dict[Value, Atom]]:
  """The equations inside a call, and the replacements of its outputs."""
  equations, outputs = flatten(next(compat.jaxprs_in(equation.params)), equation.inputs, opens)
  return equations, dict(zip(equation.outputs, outputs, strict=True))


def operation_text(equation: Equation) -> str:
  """An operation for an error message: `scan at model.py:7`."""
  return f'{"remat" if equation.name in compat.REMATS else equation.name} at {equation.source_line}'


def needed(equations: Sequence[Equation], outputs: Iterable[Atom]) -> list[Equation]:
  """The equations that outputs depend on, and those with side effects; dead code is left out."""
  live = set(outputs)
  kept = []
  for equation in reversed(equations):
    if not live.isdisjoint(equation.outputs) or equation.has_effects:
      kept.append(equation)
      live.update(equation.values)
  return kept[::-1]


def readers(read: Iterable[tuple[Reader, Iterable[Value]]]) -> dict[Value, list[Reader]]:
  """The readers of each value, from what each of them reads."""
  found: dict[Value, list[Reader]] = defaultdict(list)
  for reader, values in read:
    for value in values:
      found[value].append(reader)
  return found


def free_values(equations: Iterable[Equation]) -> list[Value]:
  """The values that equations read but do not compute, in the order of their first use."""
  computed: set[Value] = set()
  free: dict[Value, None] = {}
  for equation in equations:
    for atom in equation.inputs:
      if isinstance(atom, Value) and atom not in computed:
        free[atom] = None
    computed.update(equation.outputs)
  return list(free)


def run(equations: Sequence[Equation], known: dict[Value, Any], outputs: Sequence[Atom]) -> list[Any]:
  """Evaluates equations, inside a trace or outside; `known` has the arrays of their free values."""

  def read(atom: Atom) -> Any:
    return _number(atom) if isinstance(atom, Literal) else known[atom]

  for equation in equations:
    results = compat.bind(
      equation.primitive, equation.params, equation.context, map(read, equation.inputs), equation.source
    )
    known.update(zip(equation.outputs, results, strict=True))
  return [read(atom) for atom in outputs]


def _number(literal: Literal) -> Any:
  """A literal's value; a Python number if weakly typed, since an array would give strong results."""
  value = np.asarray(literal.val)
  if not abstract(literal).weak_type or value.ndim:
    return literal.val
  number = value.item()
  return number if jax.dtypes.result_type(number) == abstract(literal).dtype else literal.val


def is_key(aval: Any) -> bool:
  """Whether an array is one of random keys."""
  return jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)


def abstract(atom: Atom) -> jax.ShapeDtypeStruct:
  """Shape, dtype and weak type of an atom."""
  aval: Any = atom.aval
  return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, 'weak_type', False))


def is_inexact(atom: Atom) -> bool:
  """Whether it has real or complex numbers of 16 bits or more, to which others are rounded with a small error."""
  dtype = abstract(atom).dtype
  return jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize > 1
