"""Sharding constraints on values inside a program.

    y = with_logical_constraint(y, ('batch', 'hidden'))   # logical names, by the rules in force
    y = constrain(y, PartitionSpec('data', 'model'))      # mesh axes

All constraints are emitted by `constrain`, according to the types of the mesh axes:

* Auto: `with_sharding_constraint`, for the compiler's partitioner;
* Explicit: `reshard`, which changes the value's type;
* Manual (inside `shard_map`): nothing, since the program is written per shard.

The mesh is the argument, or the mesh of the layout in force, or JAX's current mesh. Rules without any mesh
are an error: the constraint would silently have no effect.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax.linen.spmd import RulesFallback as RulesFallback
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.active_layout import in_force, mesh_in_force, report_names
from flax_spmd._src.constraint_log import no_rule, report_constraint
from flax_spmd._src.cycles import check_no_cycles
from flax_spmd._src.jax_constraints import fitted, only_axes
from flax_spmd._src.mesh import MeshLike, axis_sizes, axis_types, check_mesh, current_mesh
from flax_spmd._src.public import public
from flax_spmd._src.rules.decisions import UNCONSTRAINED, Resolution, aligned
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.text import shown, value_text
from flax_spmd.errors import (
  LayoutError,
  MeshError,
  UnmatchedNameError,
  did_you_mean,
  raise_problems,
)


@public('flax_spmd')
def constrain(
  x: jax.Array, spec: PartitionSpec | Sequence[Any], mesh: MeshLike | None = None
) -> jax.Array:
  """Constrains the sharding of an array to a spec of mesh axes.

  Args:
    x: an array of any shape and dtype. A traced value is constrained; a concrete array is resharded.
    spec: mesh axes per dimension (a PartitionSpec or a tuple). May have fewer entries than `x` has
      dimensions. UNCONSTRAINED leaves a dimension to the compiler.
    mesh: default: the mesh of the layout in force, or else JAX's current mesh.

  Returns:
    `x`, with the same value.

  Raises:
    MeshError: there is no mesh.
    MeshAxisError: `spec` uses an axis that the mesh lacks.
    LayoutError: `spec` has more entries than `x` has dimensions, or uses an axis twice.

  Example:
    >>> x = jax.jit(lambda x: constrain(x, PartitionSpec('data'), make_mesh({'data': 8})))(jnp.ones(8))
    >>> x.sharding.spec
    P('data',)
  """
  if isinstance(spec, (str, bytes)) or not isinstance(spec, (PartitionSpec, Sequence)):
    raise LayoutError(
      f'{_location()}: the spec is {shown(value_text(spec))}.\n'
      "Fix: write a PartitionSpec with mesh axes or None for each dimension, such as PartitionSpec('data', None)."
    )
  spec = aligned(PartitionSpec(*spec), np.ndim(x))
  target = mesh_for_constraints(mesh)
  if target is None:
    raise MeshError(_NO_MESH.format(constraint=f'the constraint {spec}'))
  return constrain_on(target, x, spec)


@public('flax_spmd')
def with_logical_constraint(
  x: Any,
  logical_axis_resources: Any,
  rules: Any = None,
  mesh: MeshLike | None = None,
  fallback: RulesFallback = RulesFallback.AXIS_IS_UNSHARDED,
) -> Any:
  """Constrains the shardings of arrays by the logical names of their dimensions.

  Args:
    x: an array or a tree of arrays.
    logical_axis_resources: logical names per dimension (a tuple or a PartitionSpec; may be shorter than
      the rank), or a tree of them that is a prefix of `x`. None: no constraint.
    rules: a rule table; default: the rules in force. An empty table: no constraint.
    mesh: default: the mesh of the layout in force, or else JAX's current mesh.
    fallback: behaviour for a name that no rule matches: replicate the dimension, raise, or skip the whole
      constraint.

  Returns:
    `x`, with the same values.

  Raises:
    MeshError: there are rules, but no mesh.
    UnmatchedNameError: no rule matches a name, and `fallback` or the table's policy forbids that.
    LayoutError: there are more names than dimensions, or a name is repeated.

  Example:
    >>> layout = Layout({'data': 2, 'model': 4}, (('batch', 'data'), ('hidden', 'model')))
    >>> y = layout.jit(lambda x: with_logical_constraint(x, ('batch', 'hidden')))(jnp.ones((8, 8)))
    >>> y.sharding.spec
    P('data', 'model')
  """
  if not isinstance(fallback, RulesFallback):
    raise LayoutError(
      f'{_location()}: the fallback is {shown(value_text(fallback))}.\n'
      'Fix: pass a member of RulesFallback, such as RulesFallback.RAISE_ERROR.'
    )
  table = in_force(tracing=_any_traced(x)).rules if rules is None else Rules.of(rules)
  strict = fallback is RulesFallback.RAISE_ERROR
  if logical_axis_resources is None:
    return x
  if not table.pairs and not strict:
    names = (
      logical_axis_resources if _is_names(logical_axis_resources) else value_text(logical_axis_resources)
    )
    report_constraint(names, None, getattr(x, 'shape', ()), 'there are no rules for names')
    return x
  one = functools.partial(_constrain_by_names, rules=table, mesh=mesh, fallback=fallback)
  check_no_cycles(logical_axis_resources)
  given, treedef = jax.tree.flatten(logical_axis_resources, is_leaf=_is_names)
  try:
    subtrees = treedef.flatten_up_to(x)
  except ValueError as error:
    raise LayoutError(
      f'{_location()}: the logical names {value_text(logical_axis_resources)} are not a prefix of the tree: {shown(error)}\n'
      "Fix: write one array's names as a tuple, such as ('batch', None), or a tree of such tuples."
    ) from None
  return jax.tree.unflatten(
    treedef,
    [
      jax.tree.map(functools.partial(one, names), subtree)
      for names, subtree in zip(given, subtrees, strict=True)
    ],
  )


def constrain_on(
  target: MeshLike,
  x: Any,
  spec: PartitionSpec,
  names: Any = None,
  unmatched: Sequence[str] = (),
  by: str = 'flax_spmd',
) -> Any:
  """`constrain` on a certain mesh, for a spec that logical `names` resolve to; `unmatched` ones have no rule."""
  spec = fitted(spec, x.shape, target)
  if not isinstance(x, Tracer):
    return _reshard_concrete(x, spec, target)
  manual = _manual_axes(target)
  all_manual = manual.issuperset(target.axis_names)
  report_constraint(names, spec, x.shape, _IN_SHARD_MAP if all_manual else '', unmatched, by)
  if manual:
    spec = only_axes(spec, lambda axis: axis not in manual)
    target = current_mesh() or target
  target = _in_current_types(target)
  types = axis_types(target)
  explicit = {axis for axis, type_ in types.items() if type_ is AxisType.Explicit}
  if explicit:
    x = _reshard(x, spec, target, explicit)
    spec = only_axes(spec, lambda axis: axis not in explicit)
  if all(axis in manual or axis in explicit for axis in types):
    return x
  return jax.lax.with_sharding_constraint(x, NamedSharding(target, spec))


def resolve_for_constraint(
  rules: Rules, names: Sequence[Any], shape: Sequence[int], mesh: MeshLike
) -> Resolution:
  """Resolves the names of a value inside a program, to a spec.

  XLA pads uneven shards of such a value. So an indivisible size is not an error (a batch of one at `init`,
  say), unless the table has its own `indivisible` policy. Explicit axes do not support uneven shards.
  """
  report_names(names)
  uneven_is_fine = rules.policies.indivisible == 'error'
  if uneven_is_fine and AxisType.Explicit in mesh.axis_types:
    rules, uneven_is_fine = rules.replace(indivisible='replicate'), False
  return rules.resolve(names, None if uneven_is_fine else shape, axis_sizes(mesh))


def mesh_for_constraints(mesh: MeshLike | None = None) -> MeshLike | None:
  """The mesh of a constraint: the argument, the mesh of the layout in force, or JAX's current mesh.

  A mesh that was set inside the layout's block wins, even if only its devices differ.
  """
  if mesh is None:
    return mesh_in_force()
  check_mesh(mesh)
  return mesh


def _constrain_by_names(names, x, *, rules: Rules, mesh: MeshLike | None, fallback: RulesFallback):
  if names is None:
    return x
  if isinstance(names, str):
    raise LayoutError(
      f'{_location()}: the logical names are the bare string {value_text(names)}, which would be read letter by letter.\n'
      f'Fix: write them as a tuple, ({value_text(names)},).'
    )
  if not _is_names(names):
    raise LayoutError(
      f'{_location()}: the logical names are {value_text(names)}.\n'
      "Fix: write a tuple with a name or None for each dimension, such as ('batch', None)."
    )
  if not hasattr(x, 'shape'):
    raise LayoutError(
      f'{_location()}: {value_text(x)} is no array.\nFix: pass the array first, and then its logical names.'
    )
  if len(names) > len(x.shape):
    raise LayoutError(
      f'{_location()}: {len(names)} logical names {tuple(names)!r} for an array of rank {len(x.shape)}, '
      f'shape {tuple(x.shape)}.\nFix: pass at most one name per dimension.'
    )
  if not rules.pairs and not any(isinstance(name, str | tuple) for name in names):
    return x  # with RAISE_ERROR, and nothing to raise
  target = mesh_for_constraints(mesh)
  if target is None:
    raise MeshError(_NO_MESH.format(constraint=f'the logical names {tuple(names)!r}'))
  resolution = resolve_for_constraint(rules, names, x.shape, target)
  raise_problems([problem.at(_location()) for problem in resolution.problems])
  open_names = [d.name for d in resolution.decisions if d.rule is None and isinstance(d.name, str)]
  if open_names and fallback is RulesFallback.NO_CONSTRAINT:
    report_constraint(names, None, x.shape, no_rule(open_names), open_names)
    return x
  if open_names and fallback is RulesFallback.RAISE_ERROR:
    raise UnmatchedNameError(
      f'{_location()}: logical names {tuple(names)!r}: no rule for {", ".join(map(repr, open_names))}.'
      + did_you_mean(open_names[0], rules.by_name)
      + f'\nFix: correct the name, or add a rule for it; ({value_text(open_names[0])}, None) replicates it.'
    )
  return constrain_on(target, x, resolution.spec, names, open_names)


def _location() -> str:
  """The location of a constraint, for messages: the Linen module that is running, if any."""
  module = compat.current_module()
  return f'constraint in {module}' if module else 'constraint'


def _manual_axes(mesh: MeshLike) -> set[str]:
  """The axes of an enclosing `shard_map`."""
  current = current_mesh()
  if current is None or current.axis_names != mesh.axis_names:
    return set()
  return {axis for axis, type_ in axis_types(current).items() if type_ is AxisType.Manual}


def _in_current_types(mesh: MeshLike) -> MeshLike:
  """JAX's current mesh in the place of one with Explicit axes, in a block that runs over Auto ones (`jax.sharding.auto_axes`)."""
  current = current_mesh()
  if (
    current is None
    or AxisType.Explicit not in mesh.axis_types
    or AxisType.Explicit in current.axis_types
  ):
    return mesh
  return current if axis_sizes(current) == axis_sizes(mesh) else mesh


def _reshard(x, spec: PartitionSpec, mesh: MeshLike, explicit: set[str]):
  """Changes the type of `x` over its Explicit axes. Axes of size 1 have no effect, and are omitted."""
  sizes = axis_sizes(mesh)
  now = tuple(jax.typeof(x).sharding.spec) + (None,) * len(x.shape)
  filled = PartitionSpec(*(now[dim] if axes is UNCONSTRAINED else axes for dim, axes in enumerate(spec)))
  target = only_axes(filled, lambda axis: axis in explicit and sizes[axis] > 1)
  return jax.sharding.reshard(x, NamedSharding(mesh, target))


def _reshard_concrete(x, spec: PartitionSpec, mesh: MeshLike | None):
  """Transfers a concrete array to its sharding; returns it unchanged if only an abstract mesh is known."""
  if not isinstance(mesh, Mesh):
    mesh = compat.concrete_mesh()
    if mesh is None:
      return x
  return jax.device_put(
    x, NamedSharding(mesh, PartitionSpec(*(None if e is UNCONSTRAINED else e for e in spec)))
  )


def _any_traced(x: Any) -> bool:
  return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(x))


def _is_names(x: Any) -> bool:
  """Whether this is one array's names. As in Flax, a tuple that contains tuples is a tree of names."""
  if x is None or isinstance(x, PartitionSpec):
    return True
  return isinstance(x, tuple) and all(e is None or e is UNCONSTRAINED or isinstance(e, str) for e in x)


_IN_SHARD_MAP = 'a program under shard_map is written per shard'
_NO_MESH = (
  'There is no mesh for {constraint}. (A bare `with mesh:` does not set one: JAX ignores it here.)\n'
  'Fix: run it under `with layout:` or through `layout.jit`, under `with jax.set_mesh(mesh):`, or '
  'pass mesh=.'
)
