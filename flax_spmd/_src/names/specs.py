"""Specs: Flax's functions that turn a tree of boxes into PartitionSpecs and shardings.

    abstract  = jax.eval_shape(create_state, key, x)
    logical   = get_partition_spec(abstract)                    # P('embed', 'hidden'), ...
    specs     = logical_to_mesh(logical, rules)                 # P(None, 'model'), ...
    shardings = logical_to_mesh_sharding(logical, mesh, rules)  # NamedSharding(mesh, P(None, 'model')), ...

The results equal Flax's on well-formed trees. Optimizer state whose shape differs from its parameter's gets
the spec that its own shape allows (see `flax_spmd._src.names.optimizer_state`). A `Layout` does all of this
in one call, checks it against shapes and mesh, and explains it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.active_layout import in_force, report_names
from flax_spmd._src.cycles import check_no_cycles
from flax_spmd._src.mesh import MeshLike
from flax_spmd._src.names.box_trees import is_axis_metadata, is_unit, static_of
from flax_spmd._src.names.boxes import LogicallyPartitioned, Partitioned, Static
from flax_spmd._src.names.flax_boxes import as_own_box
from flax_spmd._src.names.nnx_variables import with_spec
from flax_spmd._src.names.tree_names import TreeNames
from flax_spmd._src.public import public
from flax_spmd._src.rules.decisions import Names
from flax_spmd._src.rules.table import Rules


@public('flax_spmd')
def get_partition_spec(tree: Any) -> Any:
  """The names of every array of a tree, as PartitionSpecs.

  Args:
    tree: any tree, concrete or abstract.

  Returns:
    A tree with a spec of names in the place of each box (logical names stay logical), `P()` for an array
    without a box, and None for a Python scalar. A box whose arrays have different names becomes a box of
    specs. A variable of NNX keeps its place, with the spec as its value.

  Example:
    >>> get_partition_spec({'w': LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'mlp')), 'n': jnp.ones(3)})
    {'n': P(), 'w': P('embed', 'mlp')}
  """
  names = TreeNames(tree)
  by_static: dict[Static | None, Any] = {
    static: PartitionSpec(*(static.names if static is not None else ()))
    for static in set(names.box_statics)
  }
  specs = [by_static[static] for static in names.box_statics]
  if None in names.shapes or names.inferred:  # Python scalars, boxes around several arrays
    specs = [_unit_spec(names, index, spec) for index, spec in enumerate(specs)]
  return jax.tree.unflatten(names.treedef, map(_in_variable, names.units, specs))


@public('flax_spmd')
def get_sharding(tree: Any, mesh: MeshLike) -> Any:
  """The sharding of every array of a tree on `mesh`.

  Logical names are resolved by the box's own rules, or else by those in force. Mesh axes stay.

  Args:
    tree: any tree, concrete or abstract.
    mesh: a mesh, concrete or abstract.

  Returns:
    A tree with a NamedSharding in the place of each box, the replicated sharding for an array without a
    box, and None for a Python scalar.

  Raises:
    UnmatchedNameError, ConflictError: as the policies of the rules demand.

  Example:
    >>> mesh = abstract_mesh({'data': 2, 'model': 4})
    >>> tree = {'w': Partitioned(jnp.ones((8, 16)), (None, 'model')), 'b': jnp.ones(16)}
    >>> {name: sharding.spec for name, sharding in get_sharding(tree, mesh).items()}
    {'b': P(), 'w': P(None, 'model')}
  """

  def resolved(unit, spec):
    if spec is None:
      return None
    box = _as_box(unit)
    if box is None:
      return NamedSharding(mesh, spec)
    names = [
      (name,) if (name,) in box.names else name for name in spec
    ]  # a spec has no tuples of one axis
    return NamedSharding(mesh, box.replace(names=names).get_sharding(mesh).spec)

  def sharding(unit, spec):
    if compat.is_variable_type(type(unit)):
      return with_spec(unit, resolved(unit, spec.get_raw_value()))
    if not is_axis_metadata(spec):
      return resolved(unit, spec)
    return unit.replace_boxed(
      jax.tree.map(lambda each: resolved(unit, each), spec.value, is_leaf=_is_spec)
    )

  return jax.tree.map(sharding, tree, get_partition_spec(tree), is_leaf=is_unit)


@public('flax_spmd')
def logical_to_mesh_axes(array_dim_names: Names | None, rules: Any = None) -> PartitionSpec | None:
  """The PartitionSpec of an array whose dimensions have these logical names.

  Args:
    array_dim_names: a name per dimension; None, UNCONSTRAINED and tuples of mesh axes pass through.
    rules: a rule table; by default the rules in force.

  Returns:
    Mesh axes per dimension; None for None.

  Raises:
    LayoutError: a name occurs twice.
    RulesError: `rules` is not a rule table.

  Example:
    >>> rules = (('batch', 'X'), ('features', 'X'), ('heads', 'Y'), ('batch', 'Z'))
    >>> logical_to_mesh_axes(('batch', 'length', 'heads', 'features'), rules)
    P('X', None, 'Y', None)
  """
  if array_dim_names is None:
    return None
  return _resolve(array_dim_names, _table(rules))


@public('flax_spmd')
def logical_to_mesh(tree: Any, rules: Any = None) -> Any:
  """`logical_to_mesh_axes` for every PartitionSpec of a tree; None stays None.

  Args:
    tree: a tree of logical PartitionSpecs, as `get_partition_spec` returns it.
    rules: a rule table; by default the rules in force.

  Example:
    >>> logical_to_mesh({'w': PartitionSpec('embed', 'mlp')}, (('mlp', 'model'),))
    {'w': P(None, 'model')}
  """
  table = _table(rules)
  return _map_specs(lambda spec: _resolve(spec, table), tree)


@public('flax_spmd')
def logical_to_mesh_sharding(tree: Any, mesh: MeshLike, rules: Any = None) -> Any:
  """`logical_to_mesh`, and the specs as NamedShardings on `mesh`.

  Args:
    tree: a tree of logical PartitionSpecs, as `get_partition_spec` returns it.
    mesh: a mesh, concrete or abstract.
    rules: a rule table; by default the rules in force.

  Example:
    >>> mesh = abstract_mesh({'data': 2, 'model': 4})
    >>> logical_to_mesh_sharding({'w': PartitionSpec('embed', 'mlp')}, mesh, (('mlp', 'model'),))['w'].spec
    P(None, 'model')
  """
  table = _table(rules)
  return _map_specs(lambda spec: NamedSharding(mesh, _resolve(spec, table) or PartitionSpec()), tree)


def _resolve(names: Names | None, table: Rules) -> PartitionSpec | None:
  report_names(names)
  return table.spec(names)


def _unit_spec(names: TreeNames, index: int, spec: PartitionSpec) -> Any:
  """A unit's spec: None for a Python scalar, one for all arrays of a box, or a box of specs."""
  if names.box_statics[index] is None:  # names beside the arrays are not in Flax's specs
    return None if names.shapes[index] is None else spec
  if index not in names.inferred:
    return spec
  specs = [PartitionSpec(*(inference.names or ())) for inference in names.inferred[index]]
  if len(set(specs)) <= 1:
    return specs[0] if specs else spec  # of a box around no array
  return jax.tree.unflatten(jax.tree.structure(names.units[index]), specs)


def _map_specs(fn: Callable[[Any], Any], tree: Any) -> Any:
  """Applies `fn` to every spec of a tree, once per object: many leaves share a few specs."""
  check_no_cycles(tree)
  specs, treedef = jax.tree.flatten(tree, is_leaf=_is_spec)
  by_id = {id(spec): spec for spec in specs}
  results = {key: fn(spec) for key, spec in by_id.items()}
  return jax.tree.unflatten(treedef, [results[id(spec)] for spec in specs])


def _table(rules: Any) -> Rules:
  return in_force().rules if rules is None else Rules.of(rules)


def _as_box(unit: Any) -> Partitioned | None:
  """The names of a box, or of a variable, as a box of ours; None for a bare leaf."""
  if not (compat.is_variable_type(type(unit)) or compat.is_bridge_box_type(type(unit))):
    return as_own_box(unit) if is_axis_metadata(unit) else None
  static, value = static_of(unit)
  return None if static is None else LogicallyPartitioned(value, static.names, rules=static.rules)


def _in_variable(unit: Any, spec: Any) -> Any:
  return with_spec(unit, spec) if compat.is_variable_type(type(unit)) else spec


def _is_spec(x: Any) -> bool:
  return isinstance(x, PartitionSpec)
