"""Late fetches: arrays of the host are moved to the device when the values that they are computed with are known.

A transfer depends on nothing, so XLA for GPUs may start it with the step: then the fetched array occupies memory beside the
activations. An optimizer's state is needed with the gradients, when those are free again. So each fetch waits for the
other operands of the first operation that has some, by `jax.lax.optimization_barrier`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Var, jaxpr_as_fun

_ELEMENTWISE = (
  'abs add add_any convert_element_type copy div exp integer_pow log logistic max min mul neg pow rsqrt select_n sign '
  'sqrt square sub tanh'
)
# Their operand of the same shape is taken in place of their result, which is then fused as before.
_FUSED = frozenset(_ELEMENTWISE.split())
_CALLS = ('jit', 'pjit')


def with_late_fetches(fn: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
  """A function of the leaves of its arguments, whose fetches are late."""

  def late(leaves: list[Any]) -> Any:
    program, result = jax.make_jaxpr(fn, return_shape=True)(leaves)
    return jax.tree.unflatten(jax.tree.structure(result), jaxpr_as_fun(_scheduled(program))(*leaves))

  return late


def _scheduled(program: Any) -> Any:
  """A closed program with late fetches."""
  return program.replace(jaxpr=program.jaxpr.replace(eqns=_FetchOrder(program.jaxpr).equations()))


class _FetchOrder:
  """The equations of a program, in an order in which fetches are late.

  Equations with operands of the host alone wait, as fetches do, for the first one that has others.
  """

  def __init__(self, program: Any):
    self._program = program
    self._given = {*program.invars, *program.constvars}
    self._makers: dict[Var, Any] = {}  # of the values computed so far
    self._waiting: dict[Var, tuple[int, Any]] = {}  # of those of the host alone, with their places

  def equations(self) -> list[Any]:
    """The equations."""
    found: list[Any] = []
    for place, one in enumerate(self._program.eqns):
      if one.primitive.name in _CALLS and any(map(_is_on_host, one.invars)):
        one = one.replace(params={**one.params, 'jaxpr': _scheduled(one.params['jaxpr'])})
      operands = [value for value in one.invars if isinstance(value, Var)]
      hosted = [value for value in operands if value in self._waiting]
      if self._is_fetch(one) or (hosted and len(hosted) == len(operands) and not one.effects):
        self._waiting |= dict.fromkeys(one.outvars, (place, one))
        continue
      others = [value for value in operands if value in self._makers and _is_plain(value)]
      found += [*self._issued(hosted, [*dict.fromkeys(map(self._source, others))]), one]
      self._makers |= dict.fromkeys(one.outvars, one)
    return [*found, *self._issued([*self._waiting], [])]

  def _is_fetch(self, one: Any) -> bool:
    """Whether an equation moves an argument from the host's memory to the device's."""
    if one.primitive.name != 'device_put' or len(one.invars) != 1:
      return False
    [value] = one.invars
    is_given = isinstance(value, Var) and value in self._given and _is_plain(value)
    return is_given and _is_on_host(value) and not _is_on_host(one.outvars[0])

  def _source(self, value: Any) -> Any:
    """The value of a computed value's shape that it is elementwise computed from."""
    while (one := self._makers[value]).primitive.name in _FUSED:
      operands: list[Any] = [each for each in one.invars if isinstance(each, Var)]
      known = (each for each in operands if each in self._makers and _is_plain(each))
      alike = (each for each in known if each.aval.shape == value.aval.shape)
      source = next(alike, None)
      if source is None:
        break
      value = source
    return value

  def _issued(self, values: Collection[Var], others: Sequence[Var]) -> Iterator[Any]:
    """The waiting equations that compute some values, in order; their fetches after other values."""
    needed: dict[int, Any] = {}
    left = list(values)
    while left:
      place, one = self._waiting.get(left.pop(), (-1, None))
      if one is not None and place not in needed:
        needed[place] = one
        left += [value for value in one.invars if isinstance(value, Var)]
    ordered = [needed[place] for place in sorted(needed)]
    fetches = {one.invars[0]: one for one in ordered if others and self._is_fetch(one)}
    fresh = [Var(value.aval) for value in (*fetches, *others)]
    if fetches:
      about = next(iter(fetches.values()))
      yield _barrier().replace(
        invars=[*fetches, *others], outvars=fresh, ctx=about.ctx, source_info=about.source_info
      )
    late = {id(one): value for one, value in zip(fetches.values(), fresh)}
    for one in ordered:
      for value in one.outvars:
        self._waiting.pop(value, None)
      self._makers |= dict.fromkeys(one.outvars, one)
      yield one.replace(invars=[late[id(one)]]) if id(one) in late else one


def _is_plain(value: Any) -> bool:
  """Whether a value is an array of numbers, not of keys, and no reference."""
  dtype = getattr(value.aval, 'dtype', None)
  is_array = isinstance(value.aval, ShapedArray)
  return is_array and not jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


def _is_on_host(value: Any) -> bool:
  return getattr(value.aval, 'memory_space', None) is jax.memory.Space.Host


@functools.cache
def _barrier() -> Any:
  """An equation of a barrier, in the context of its first caller."""
  return jax.make_jaxpr(jax.lax.optimization_barrier)(0.0).eqns[0]
