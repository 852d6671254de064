"""Batch constraints: a traced step whose intermediate values keep the batch sharded.

Where parameters are sharded over the axis of the batch (FSDP) and nothing in a step is constrained, the compiler may
shard activations as the parameters are, and move them at every layer. Constraints on the batch dimensions of products
prevent that: the compiler then gathers parameters.

    step = with_batch_constraints(step, BatchLeaves((8, 9), ('data',)), mesh)   # a function of a list of leaves

The batch dimensions follow from another trace, with twice the batch: they have twice the size. So no operation
needs a rule, and the model may be of any library. That trace fails where a step has the size of its batch from
elsewhere, as a constant. Then the batch dimensions are those of that size, if no other argument has a dimension of
it. Where neither holds, the step stays as it is. All other dimensions stay open. Constraints never change values.

The trace also shows which constraints are those of activations: of values that grow with the batch. A step with one
stays as it is.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import Var, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.jit.batch_leaves import BatchLeaves, shards
from flax_spmd._src.jit.constrained_results import names_axes
from flax_spmd._src.mesh import MeshLike
from flax_spmd._src.rules.decisions import UNCONSTRAINED

_CONSTRAINED = frozenset(
  (
    'dot_general',
    'conv_general_dilated',
    'gather',
    'scatter',
    'scatter-add',
    'scatter_add',
    'reduce_window_max',
    'select_and_scatter_add',
  )
)  # others follow their operands
# the programs of others, such as kernels, are not XLA's
_CALLS = compat.CALLS | {'scan', 'while', 'cond'}


class _Unlike(Exception):
  """Raised where two traces of one function have different operations."""


# by the user's function and the types of its arguments, while several layouts are tried
_larger_programs: contextvars.ContextVar[dict[Any, Any] | None] = contextvars.ContextVar(
  'larger programs', default=None
)


@contextlib.contextmanager
def shared_larger_programs() -> Iterator[None]:
  """Traces a function for twice its batch once in the block, not under each layout."""
  token = _larger_programs.set({} if (outer := _larger_programs.get()) is None else outer)
  try:
    yield
  finally:
    _larger_programs.reset(token)


def with_batch_constraints(
  fn: Callable[[list[Any]], Any],
  batch: BatchLeaves,
  mesh: MeshLike,
  of_user: Any = None,
  restore: Callable[[list[Any]], Any] = lambda leaves: None,
) -> Callable[[list[Any]], Any]:
  """A function with its batch dimensions constrained.

  Args:
    fn: function of a list of arrays, all of which are traced.
    batch: the positions of the batch in that list, and its mesh axes.
    mesh: mesh of the constraints.
    of_user: the user's function that `fn` calls, under every layout the same; None if `fn` is not to be traced less often.
    restore: called with the arrays after a trace for twice the batch.
  """

  def constrained(leaves: list[Any]) -> Any:
    if batch.is_throughout:
      return throughout(leaves)
    program, result = jax.make_jaxpr(fn, return_shape=True)(leaves)
    # a call of the function would trace it again: to JAX, a constrained array is of another type
    leaves = [
      _sharded(leaf, batch, mesh) if at in batch.leaves else leaf for at, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(jax.tree.structure(result), jaxpr_as_fun(program)(*leaves))

  def throughout(leaves: list[Any]) -> Any:
    shared = _larger_programs.get() if of_user is not None else None
    known = {} if shared is None else shared
    types = tuple((one.shape, one.dtype) for one in leaves)
    key = id(of_user), batch.leaves, batch.dimension, types  # a function need not be hashable
    is_of_another = key in known
    if not is_of_another:
      known[key] = of_user, _larger(fn, batch, leaves)  # so that no other function has its id
      with contextlib.suppress(Exception):
        restore(leaves)
    larger = known[key][1]
    size = _own_size(batch, leaves) if larger is None else None
    if larger is None:
      del known[key]  # the next layout may have one
      if size is None:
        return fn(leaves)
    program, result = jax.make_jaxpr(fn, return_shape=True)(leaves)
    try:
      program = _Writer(batch, mesh, size).rewritten(program, program if larger is None else larger)
    except _Unlike:
      if is_of_another:  # a step that depends on the mesh, say
        del known[key]
        return throughout(leaves)
    return jax.tree.unflatten(jax.tree.structure(result), jaxpr_as_fun(program)(*leaves))

  return constrained


def _sharded(leaf: Any, batch: BatchLeaves, mesh: MeshLike) -> Any:
  """An array of a batch, constrained along dimension 0."""
  spec = PartitionSpec(batch.axes, *[UNCONSTRAINED] * (leaf.ndim - 1))
  return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))


def _larger(fn: Callable[[list[Any]], Any], batch: BatchLeaves, leaves: Sequence[Any]) -> Any:
  """The program of a function for twice the batch; None if there is none."""
  doubled: list[Any] = list(leaves)
  for position in batch.leaves:
    shape = list(leaves[position].shape)
    shape[batch.dimension] *= 2
    doubled[position] = jax.ShapeDtypeStruct(shape, leaves[position].dtype)
  try:
    return jax.make_jaxpr(fn)(doubled)
  except (
    Exception
  ):  # whatever the step raises for another batch, such as one beside a cache of the old size
    return None


def _own_size(batch: BatchLeaves, leaves: Sequence[Any]) -> int | None:
  """The size of the batch; None if another argument has a dimension of that size."""
  size = leaves[batch.leaves[0]].shape[batch.dimension]
  others = (leaf for position, leaf in enumerate(leaves) if position not in batch.leaves)
  return None if any(size in leaf.shape for leaf in others) else size


class _Writer:
  """Writes constraints into a program.

  Args:
    batch: the mesh axes of the batch.
    mesh: mesh of the constraints.
    size: size of the batch, if dimensions of that size are the batch; None: those that grow with it.
  """

  def __init__(self, batch: BatchLeaves, mesh: MeshLike, size: int | None = None):
    self._axes, self._mesh, self._size = batch.axes, mesh, size
    self._is_named = batch.is_named
    self._shards = shards(mesh, batch.axes)
    self._written: dict[tuple[int, int], Any] = {}
    self._constraint = functools.cache(self._new_constraint)

  def rewritten(self, program: Any, larger: Any) -> Any:
    """A program with its constraints.

    JAX lowers equal programs once if they are one object, so each is written once.

    Args:
      program: the program, closed or not.
      larger: the same program for twice the batch.

    Raises:
      _Unlike: their operations differ.
    """
    key = id(program), id(larger)
    if key not in self._written:
      inner = getattr(program, 'jaxpr', None)
      if inner is None:
        self._written[key] = self._with_constraints(program, larger)
      else:
        self._written[key] = program.replace(jaxpr=self._with_constraints(inner, larger.jaxpr))
    return self._written[key]

  def _with_constraints(self, program: Any, larger: Any) -> Any:
    if len(program.eqns) != len(larger.eqns):
      raise _Unlike
    pairs = zip(program.eqns, larger.eqns, strict=True)
    return program.replace(eqns=[new for pair in pairs for new in self._equations(*pair)])

  def _equations(self, one: Any, larger: Any) -> Iterator[Any]:
    """An equation, and the constraints of its results."""
    name = one.primitive.name
    if name != larger.primitive.name or (self._is_named and self._constrains_batch(one, larger)):
      raise _Unlike
    if name in _CALLS:
      params = {key: self._param(value, larger.params[key]) for key, value in one.params.items()}
      yield one.replace(params=params)
      return
    constrained = name in _CONSTRAINED and not compat.is_on_host(one)
    dimension = self._batch_dimension(one, larger) if constrained else None
    if dimension is None:
      yield one
      return
    [result] = one.outvars
    free = Var(result.aval)
    yield one.replace(outvars=[free])
    constraint = self._constraint(result.aval.shape, result.aval.dtype, dimension)
    yield constraint.replace(invars=[free], outvars=[result], source_info=one.source_info)

  def _constrains_batch(self, one: Any, larger: Any) -> bool:
    """Whether an operation constrains a value that grows with the batch."""
    shapes = zip(one.invars, larger.invars, strict=True) if names_axes(one) else ()
    return any(
      value.aval.shape != other.aval.shape if self._size is None else self._size in value.aval.shape
      for value, other in shapes
    )

  def _batch_dimension(self, one: Any, larger: Any) -> int | None:
    """The first dimension of an operation's result that is of the batch; None if it does not divide.

    Raises:
      _Unlike: the results have different numbers of dimensions.
    """
    shape, shape_of_larger = one.outvars[0].aval.shape, larger.outvars[0].aval.shape
    if len(shape) != len(shape_of_larger):
      raise _Unlike
    sizes = zip(shape, shape_of_larger, strict=True)
    of_batch = (
      dimension
      for dimension, (size, other) in enumerate(sizes)
      if (other == 2 * size > 0 if self._size is None else size == self._size)
    )
    first = next(of_batch, None)
    return None if first is None or shape[first] % self._shards else first

  def _param(self, value: Any, larger: Any) -> Any:
    """A parameter of an equation, rewritten if it is a program or several."""
    if compat.is_jaxpr(value):
      return self.rewritten(value, larger)
    if isinstance(value, tuple) and value and all(map(compat.is_jaxpr, value)):
      if len(value) != len(larger):
        raise _Unlike
      return tuple(map(self.rewritten, value, larger))
    return value

  def _new_constraint(self, shape: tuple[int, ...], dtype: Any, dimension: int) -> Any:
    """The equation of a constraint that is open in all dimensions but one."""
    entries: list[Any] = [UNCONSTRAINED] * len(shape)
    entries[dimension] = self._axes
    sharding = NamedSharding(self._mesh, PartitionSpec(*entries))
    traced = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))(
      jax.ShapeDtypeStruct(shape, dtype)
    )
    return traced.eqns[0]
