"""Module types: the shardings that the results of Linen modules have as types, on a mesh with Explicit axes.

    with nn.intercept_methods(ModuleTypes()):
      logits = model.apply(variables, x)   # nn.Dense contracts a sharded dimension

On Explicit axes a sharding is part of a value's type, and JAX refuses an operation whose result could have several, such
as a product over a sharded dimension. The innermost module around it then runs over Auto axes, where the compiler
partitions. Each dimension of its result has the axes of the dimensions that it comes from: those of the arguments first,
then those of the module's variables, which the table has sharded. An axis is used once, for the first of them.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Container, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import flax.linen as nn
import jax
from jax.core import Tracer
from jax.sharding import AxisType, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.context_values import assigned
from flax_spmd._src.mesh import MeshLike, axis_types, current_mesh
from flax_spmd._src.operand_dimensions import operand_dimensions, walk
from flax_spmd._src.rules.decisions import axis_names
from flax_spmd._src.unbound_axes import place_of
from flax_spmd.errors import LayoutError

_outer_mesh: ContextVar[Any] = ContextVar(
  'flax_spmd_outer_mesh', default=None
)  # of a block over Auto axes
_modules: ContextVar[Any] = ContextVar(
  'flax_spmd_module_types', default=None
)  # `ModuleTypes` of a trace
_LIFTED = object()  # instead of it in a transformation in such a block


@contextlib.contextmanager
def explicit_types(mesh: MeshLike) -> Iterator[None]:
  """A block in which a function is traced: if the mesh has Explicit axes, the modules of Linen find their types.

  Raises:
    LayoutError: an operation outside of a module has no type.
  """
  explicit = _explicit(mesh)
  if not explicit:
    yield
    return
  modules = ModuleTypes()
  try:
    with assigned(_modules, modules), _scopes.opened(), nn.intercept_methods(modules):
      yield
  except compat.UNTYPED as error:
    if isinstance(error, LayoutError) or error is modules.raised or not compat.is_untyped(error):
      raise
    axes = ', '.join(map(repr, explicit))
    raise LayoutError(_UNTYPED.format(place=place_of(error), axes=axes, error=error)) from error


class ModuleTypes:
  """An interceptor of the methods of Linen modules, and of transformations outside of them, in one trace.

  Attributes:
    raised: the last error that a module raised over Auto axes too, so not for the lack of a type.
  """

  def __init__(self) -> None:
    self._running: list[Any] = []  # modules and transformations
    self.raised: Exception | None = None

  def __call__(self, method: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
    """Runs a method of a module, over Auto axes if JAX finds no types for its operations."""
    module = context.module
    if module.scope is None or any(each is module for each in self._running):
      return method(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
      with _attributes_of_setup(module):
        return method(*args, **kwargs)

    return self._run(module, (run, run), module.scope, module, args, kwargs)

  def lifted(self, call: Callable[..., Any], over_auto: Callable[..., Any]) -> Callable[..., Any]:
    """A transformation, such as `nn.scan`, whose module is the outermost: it has no method around it.

    Args:
      call: the transformed function, of scopes and arguments.
      over_auto: the same over Auto axes.
    """
    if self._running:
      return call

    def attempted(scopes: Any, *args: Any, **kwargs: Any) -> Any:
      both = (functools.partial(each, scopes) for each in (call, over_auto))
      return self._run(call, both, jax.tree.leaves(scopes)[0], None, args, kwargs)

    return attempted

  def _run(self, running: Any, attempts: Any, scope: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """Runs the first of two attempts, and the second over Auto axes if JAX finds no types for operations of the first."""
    run, over_auto = attempts
    mesh = current_mesh()
    if mesh is None or not _explicit(mesh):
      return run(*args, **kwargs)
    rewind = compat.rewind_point(scope, module)
    self._running.append(running)
    try:
      return self._attempted(run, over_auto, rewind, args, kwargs)
    finally:
      self._running.pop()

  def _attempted(self, run: Any, over_auto: Any, rewind: Any, args: Any, kwargs: Any) -> Any:
    try:
      return run(*args, **kwargs)
    except compat.UNTYPED as error:
      if not compat.is_untyped(error, or_doubtful=True):
        raise
      untyped = error
    rewind()
    try:
      return over_auto_axes(over_auto, args, kwargs)
    except Exception as error:
      if compat.needs_explicit(error):
        raise untyped from error
      self.raised = error
      raise


def over_auto_axes(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
  """The result of a function that runs over Auto axes; types come from the arguments, and variables that it reads."""
  outer: Any = current_mesh()
  with jax.sharding.use_abstract_mesh(
    outer.update_axis_types(dict.fromkeys(_explicit(outer), AxisType.Auto))
  ):
    args, kwargs = jax.tree.map(_untyped, (args, kwargs))
    given = {
      id(staged.val)
      for leaf in jax.tree.leaves((args, kwargs))
      if (staged := compat.staged(compat.unmapped(leaf)[0])) is not None
    }
    with assigned(_outer_mesh, outer):
      result = fn(*args, **kwargs)
    specs = [_spec_of(leaf, given, outer) for leaf in jax.tree.leaves(result)]
  return _typed(result, specs)


@contextlib.contextmanager
def _attributes_of_setup(module: nn.Module) -> Iterator[None]:
  """A block in which the arrays that `setup` has made attributes of a module have types over JAX's current mesh."""
  mesh = current_mesh()
  is_explicit = mesh is not None and bool(_explicit(mesh))
  before = {name: value for name, value in vars(module).items() if _differs(value, is_explicit)}
  for name, value in before.items():
    specs = [_spec_of(leaf, set(), mesh) for leaf in jax.tree.leaves(value)]
    object.__setattr__(
      module, name, _typed(value, specs) if is_explicit else jax.tree.map(_untyped, value)
    )
  try:
    yield
  finally:
    for name, value in before.items():
      object.__setattr__(module, name, value)


def _differs(value: Any, is_explicit: bool) -> bool:
  """Whether any array of an attribute has a type over other axes than Explicit ones, or the reverse."""
  arrays = [leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, Tracer)]
  return any(_is_typed(leaf) != is_explicit for leaf in arrays if _mesh_of_type(leaf).axis_names)


def _explicit(mesh: MeshLike) -> list[str]:
  return [axis for axis, kind in axis_types(mesh).items() if kind is AxisType.Explicit]


def _untyped(leaf: Any) -> Any:
  """An array of a type over Explicit axes, over Auto ones instead."""
  return jax.sharding.reshard(leaf, PartitionSpec()) if _is_typed(leaf) else leaf


def _is_typed(leaf: Any) -> bool:
  return isinstance(leaf, jax.Array) and AxisType.Explicit in _mesh_of_type(leaf).axis_types


def _mesh_of_type(value: Any) -> MeshLike:
  """The mesh that the type of an array is over; it may be empty."""
  return jax.typeof(value).sharding.mesh


def _typed(tree: Any, specs: Sequence[PartitionSpec | None]) -> Any:
  leaves, treedef = jax.tree.flatten(tree)
  return jax.tree.unflatten(
    treedef,
    [
      leaf if spec is None else jax.sharding.reshard(leaf, spec)
      for leaf, spec in zip(leaves, specs, strict=True)
    ],
  )


def _spec_of(value: Any, given: set[int], mesh: Any) -> PartitionSpec | None:
  """The axes of each dimension of a result; None for one that is no array of the program.

  Args:
    value: the result.
    given: ids of the variables of the program that are arguments.
    mesh: the mesh with Explicit axes.
  """
  inner, dims, mapped = compat.unmapped(value)
  staged = compat.staged(inner)
  if staged is None:
    return PartitionSpec() if isinstance(value, Tracer) else None
  origins = [_origin(staged, dim, given) for dim in dims]
  explicit, entries = _explicit(mesh), [None] * value.ndim
  used = {axis for dim in mapped for axis in axis_names(_origin(staged, dim, given)[1])}
  for dim in sorted(range(value.ndim), key=lambda dim: origins[dim][0]):
    axes = [axis for axis in axis_names(origins[dim][1]) if axis in explicit and axis not in used]
    while value.shape[dim] % math.prod(mesh.shape[axis] for axis in axes):
      axes.pop()
    used.update(axes)
    entries[dim] = tuple(axes) or None
  return PartitionSpec(*entries)


def _origin(tracer: Any, dim: int, given: set[int]) -> tuple[int, Any]:
  """The axes that a dimension has by the first of a constraint, an argument and a variable; with the number of which."""
  nodes = walk((tracer, dim), lambda node: (node[0].val, node[1]), _operands)
  found = [source for node in nodes if (source := _source(*node, given))]
  kind = min((kind for kind, _ in found), default=_VARIABLE)
  return kind, next((axes for each, axes in found if each == kind and axes), None)


_CONSTRAINT, _ARGUMENT, _VARIABLE = range(3)


def _operands(node: tuple[Any, int]) -> list[tuple[Any, int]]:
  """The operands of a value, with the dimensions that its own comes from; none for one whose axes are known."""
  tracer, dim = node
  equation = tracer.parent
  if equation is None or _source(tracer, dim, ()):
    return []
  index = next(number for number, each in enumerate(equation.outvars) if each is tracer.val)
  found = operand_dimensions(equation, index, dim)
  return [
    (equation.invars[i], each) for i, each in found if compat.staged(equation.invars[i]) is not None
  ]


def _source(tracer: Any, dim: int, given: Container[int]) -> tuple[int, Any] | None:
  """The axes of a dimension where it gets them. A constraint on a variable, such as that of its box, is the variable's."""
  equation = tracer.parent
  if equation is None:
    return None
  if _has_type(equation):
    kind = _ARGUMENT if id(tracer.val) in given else _VARIABLE
    return kind, equation.invars[0].aval.sharding.spec[dim]
  is_constraint = equation.primitive.name == 'sharding_constraint'
  if is_constraint and dim not in equation.params['unconstrained_dims']:
    kind = _CONSTRAINT if _is_computed(tracer, given) else _VARIABLE
    return kind, (*equation.params['sharding'].spec, *[None] * (dim + 1))[dim]
  return None


def _has_type(equation: Any) -> bool:
  """Whether an equation takes a value of a type over Explicit axes into a block over Auto ones."""
  if equation.primitive.name != 'reshard':
    return False
  return AxisType.Explicit in equation.invars[0].aval.sharding.mesh.axis_types


def _is_computed(tracer: Any, given: Container[int]) -> bool:
  """Whether a value is computed from an argument."""

  def operands(node: Any) -> list[Any]:
    if node.parent is None or _has_type(node.parent):
      return []
    return [each for each in node.parent.invars if compat.staged(each) is not None]

  return any(id(node.val) in given for node in walk(tracer, lambda node: node.val, operands))


def _called(name: str, original: Callable[..., Any], first: Any, /, *args: Any, **kwargs: Any) -> Any:
  """A call of a function of Linen about variables: in a block over Auto axes, with variables of that block."""
  outer = _outer_mesh.get()
  over_auto = functools.partial(original, functools.partial(_lifted, first), *args, **kwargs)
  if outer is None or current_mesh() == outer:
    result, modules = original(first, *args, **kwargs), _modules.get()
    return modules.lifted(result, over_auto()) if name == 'pack' and modules else result
  if name == 'get_variable':
    return jax.tree.map(_untyped, original(first, *args, **kwargs))
  if name == 'as_jax_rng':
    return original(jax.tree.map(_untyped, first))
  if name == 'pack':
    return over_auto()
  if outer is _LIFTED:
    return original(first, *args, **kwargs)
  collection, variable, value = args
  specs = [_spec_of(leaf, set(), outer) for leaf in jax.tree.leaves(value)]
  with jax.sharding.use_abstract_mesh(outer):
    return original(first, collection, variable, _typed(value, specs))


def _lifted(
  fn: Callable[..., Any], scopes: Any, repack: Any, variables: Any, keys: Any, *args: Any, **kwargs: Any
) -> Any:
  """The function of a transformation, such as `nn.scan`, whose variables are over Auto axes, as all else in it."""
  with assigned(_outer_mesh, _LIFTED):
    return fn(scopes, repack, *jax.tree.map(_untyped, (variables, keys)), *args, **kwargs)


_scopes = compat.scope_detours(_called)

_UNTYPED = (
  'Over the Explicit axes {axes}, JAX finds no sharding for an operation of {place}: {error}\n'
  'Fix: pass out_sharding= to the operation, constrain its operands before it (flax_spmd.with_logical_constraint), or '
  'make these axes Auto (make_mesh, axis_types=).'
)
