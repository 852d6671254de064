"""Equations: a traced program as a flat list that can be cut, copied and put together again.

JAX's jaxprs nest, differ between versions and own their variables. Here an equation is an object, and a
value is an object too, which knows its shape and nothing else: who makes it and who uses it is told by
the list that it is in.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import Literal, Primitive

from flax_spmd._src import compat
from flax_spmd._src.source_lines import line_text, users


class Value:
  """Something that an equation makes or uses."""

  __slots__ = ('aval',)

  def __init__(self, aval: Any):
    self.aval = aval

  @property
  def bytes(self) -> int:
    """Its size."""
    return math.prod(self.aval.shape) * self.aval.dtype.itemsize


class Constant(Value):
  """An array that the program closes over."""

  __slots__ = ('array',)

  def __init__(self, array: Any):
    super().__init__(jax.typeof(array))
    self.array = array


Atom: TypeAlias = Value | Literal


@dataclasses.dataclass(eq=False, slots=True)
class Equation:
  """One operation.

  Attributes:
    primitive, params: what it does.
    inputs: values and literals.
    outputs: values.
    context: the settings that it was traced under.
    source: where in the user's program it comes from.
  """

  primitive: Primitive
  params: Mapping[str, Any]
  inputs: list[Atom]
  outputs: list[Value]
  context: Any = None
  source: Any = None

  @property
  def name(self) -> str:
    """Its primitive's name."""
    return self.primitive.name

  @property
  def values(self) -> Iterator[Value]:
    """Its inputs that are values."""
    return (atom for atom in self.inputs if isinstance(atom, Value))

  @property
  def has_effects(self) -> bool:
    """Whether it does something beside making its outputs."""
    return any(map(has_effects, self.jaxprs)) or self.name in _EFFECTS

  @property
  def jaxprs(self) -> Iterator[Any]:
    """The programs inside of it."""
    return compat.jaxprs_in(self.params)

  @property
  def place(self) -> str:
    """The line of the user's program that it comes from."""
    return place_of(self.source)

  def replaced(self, known: Mapping[Value, Atom]) -> Equation:
    """The same, on other inputs where they are known."""
    return dataclasses.replace(self, inputs=[lookup(known, atom) for atom in self.inputs])


_STACK = 200  # frames that are looked at
_FRAME = re.compile(r'(.*?):(\d+)(?::\d+)? \(.*\)$')


def place_of(source: Any) -> str:
  """`file.py:line` of the user's line on a stack that JAX has kept, as far as there is one."""
  text = '' if source is None else source_info_util.summarize(source, num_frames=_STACK)
  frames = [found for found in map(_FRAME.match, reversed(text.splitlines())) if found]
  if not frames:
    return 'an unknown place'
  user = frames[users([found[1] for found in frames])]
  return line_text(user[1], int(user[2]))


_EFFECTS = frozenset({'debug_callback', 'debug_print', 'io_callback'})
JITS = frozenset({'jit', 'pjit', 'closed_call', 'core_call'})
"""Calls that mean what their insides mean."""
REMATS = frozenset({'checkpoint', 'remat', 'remat2'})
CUSTOM = frozenset({'custom_jvp_call', 'custom_vjp_call'})
_INSIDE = dict.fromkeys(('jit', 'pjit', *REMATS), 'jaxpr') | dict.fromkeys(
  ('closed_call', 'core_call', *CUSTOM), 'call_jaxpr'
)


def lookup(known: Mapping[Value, Atom], atom: Atom) -> Atom:
  """What an atom stands for, as far as that is known."""
  while isinstance(atom, Value) and atom in known:
    atom = known[atom]
  return atom


def is_call(equation: Any) -> bool:
  """Whether an equation of a jaxpr can be replaced by what is inside."""
  return equation.primitive.name in _INSIDE


def flatten(
  jaxpr: Any, inputs: Sequence[Atom], opens: Callable[[Any], bool]
) -> tuple[list[Equation], list[Value]]:
  """The equations of a jaxpr on given inputs, and its outputs.

  Args:
    jaxpr: of any version of JAX.
    inputs: an atom for each of its inputs.
    opens: whether a call is replaced by its equations.
  """
  equations: list[Equation] = []
  outputs = _flatten(jaxpr, inputs, opens, equations)
  return equations, [_named(atom) for atom in outputs]


def resolved(known: Mapping[Value, Atom], values: Iterable[Value]) -> list[Value]:
  """What values stand for, as values: a literal is a constant, which has an identity."""
  return [_named(lookup(known, value)) for value in values]


def _named(atom: Atom) -> Value:
  if isinstance(atom, Value):
    return atom
  number = _number(atom)  # of weak type if it is one of Python's
  return Constant(
    jnp.asarray(number, None if type(number) in (bool, int, float, complex) else abstract(atom).dtype)
  )


def _flatten(jaxpr, inputs, opens, equations) -> list[Atom]:
  inner = compat.opened(jaxpr)
  known: dict[Any, Atom] = dict(zip(inner.inputs, inputs, strict=True))
  known.update((variable, Constant(array)) for variable, array in zip(inner.constants, inner.arrays))

  def read(atom: Any) -> Atom:
    if not isinstance(atom, Literal):
      return known[atom]
    if np.size(atom.val) > _LARGE_LITERAL:  # an array that was closed over
      return Constant(jnp.asarray(atom.val))
    return atom

  for equation in inner.equations:
    arguments = [read(atom) for atom in equation.invars]
    if is_call(equation) and opens(equation):
      inside = equation.params[_INSIDE[equation.primitive.name]]
      outputs = _flatten(inside, arguments, opens, equations)
    else:
      outputs = [Value(variable.aval) for variable in equation.outvars]
      equations.append(
        Equation(
          equation.primitive, equation.params, arguments, outputs, equation.ctx, equation.source_info
        )
      )
    known.update(zip(equation.outvars, outputs, strict=True))
  return [read(atom) for atom in inner.outputs]


_LARGE_LITERAL = 16  # elements


def traced(
  fn: Callable[..., Any], *inputs: Atom, known: dict[Any, Any] | None = None
) -> tuple[list[Equation], list[Value]]:
  """The equations of a function of arrays that returns a list of arrays.

  With `known`, which it fills, it is traced once for each kind of inputs: what it closes over has to stay the
  same, and the settings of JAX.
  """
  kinds = tuple(map(abstract, inputs))
  known = {} if known is None else known
  if (fn, kinds) not in known:
    known[fn, kinds] = jax.make_jaxpr(fn)(*kinds)
  return flatten(known[fn, kinds], inputs, lambda _: True)


def opened(equation: Equation, opens: Callable[[Any], bool]) -> tuple[list[Equation], dict[Value, Atom]]:
  """What a call consists of, and what its outputs are now."""
  equations, outputs = flatten(equation.params[_INSIDE[equation.name]], equation.inputs, opens)
  return equations, dict(zip(equation.outputs, outputs, strict=True))


def finder(primitive: Primitive) -> Callable[[Any], bool]:
  """A function that says whether a primitive occurs in a jaxpr, at any depth."""
  known: dict[int, tuple[bool, Any]] = {}  # the jaxpr is kept, so that its id stays its own

  def occurs(jaxpr: Any) -> bool:
    if id(jaxpr) not in known:
      equations = compat.opened(jaxpr).equations
      found = any(
        equation.primitive is primitive or any(map(occurs, compat.jaxprs_in(equation.params)))
        for equation in equations
      )
      known[id(jaxpr)] = found, jaxpr
    return known[id(jaxpr)][0]

  return occurs


def found_in(jaxprs: Iterable[Any], primitive: Primitive) -> Iterator[Any]:
  """The equations of a primitive in jaxprs, at any depth."""
  for jaxpr in jaxprs:
    for equation in compat.opened(jaxpr).equations:
      if equation.primitive is primitive:
        yield equation
      yield from found_in(compat.jaxprs_in(equation.params), primitive)


def called(equation: Equation) -> str:
  """An operation with other operations in it, as users know it: `scan at model.py:7`."""
  return f'{"remat" if equation.name in REMATS else equation.name} at {equation.place}'


def has_effects(jaxpr: Any) -> bool:
  """Whether running a jaxpr does something beside making its outputs."""
  return bool(getattr(jaxpr, 'effects', ()))


def needed(equations: Sequence[Equation], outputs: Iterable[Atom]) -> list[Equation]:
  """Those equations that outputs depend on, and those that do something beside."""
  wanted = set(outputs)
  kept = []
  for equation in reversed(equations):
    if not wanted.isdisjoint(equation.outputs) or equation.has_effects:
      kept.append(equation)
      wanted.update(equation.values)
  return kept[::-1]


def free_values(equations: Iterable[Equation]) -> list[Value]:
  """The values that equations use and do not make, in the order of their first use."""
  made: set[Value] = set()
  free: dict[Value, None] = {}
  for equation in equations:
    free.update((value, None) for value in equation.values if value not in made)
    made.update(equation.outputs)
  return list(free)


def run(equations: Sequence[Equation], known: dict[Value, Any], outputs: Sequence[Atom]) -> list[Any]:
  """Evaluates equations, in a trace or outside of one; `known` has the values that they do not make."""

  def read(atom: Atom) -> Any:
    return _number(atom) if isinstance(atom, Literal) else known[atom]

  for equation in equations:
    results = compat.bind(
      equation.primitive, equation.params, equation.context, map(read, equation.inputs), equation.source
    )
    known.update(zip(equation.outputs, results, strict=True))
  return [read(atom) for atom in outputs]


def _number(literal: Literal) -> Any:
  """A literal's value: one of weak type has to be a number of Python's, or results would not be weak."""
  value = np.asarray(literal.val)
  if not abstract(literal).weak_type or value.ndim:
    return literal.val
  number = value.item()
  return number if jax.dtypes.result_type(number) == abstract(literal).dtype else literal.val


def abstract(atom: Atom) -> jax.ShapeDtypeStruct:
  """Shape and dtype of an atom."""
  aval: Any = atom.aval
  return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, 'weak_type', False))
