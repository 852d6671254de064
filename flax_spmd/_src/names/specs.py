"""Specs: from a tree of boxes to trees of PartitionSpecs and shardings, with Flax's functions.

    abstract = jax.eval_shape(create_state, key, x)
    logical  = get_partition_spec(abstract)                   # P('embed', 'hidden'), ...
    specs    = logical_to_mesh(logical, rules)                # P(None, 'model'), ...
    places   = logical_to_mesh_sharding(logical, mesh, rules) # NamedSharding(mesh, P(None, 'model')), ...

Same results as Flax's on well-formed trees; optimizer state that is not shaped like its parameter
gets the spec that its own shape allows (see `flax_spmd.optimizer_state`). A `Layout` does all of this in one
go, checks it against shapes and mesh, and explains it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from flax_spmd._src.active_layout import in_force
from flax_spmd._src.mesh import MeshLike
from flax_spmd._src.names.box_trees import is_axis_metadata, own
from flax_spmd._src.names.boxes import Static
from flax_spmd._src.names.tree_names import Reading, read
from flax_spmd._src.public_module import set_module
from flax_spmd._src.rules.decisions import Names
from flax_spmd._src.rules.table import Rules


@set_module('flax_spmd')
def get_partition_spec(tree: Any) -> Any:
  """The names of every array of a tree, as PartitionSpecs in the place of boxes and arrays.

  Args:
    tree: any tree, concrete or abstract.

  Returns:
    A tree in which a box is its spec (of names: logical ones stay logical), an array without a box
    is `P()`, and a Python scalar is None. A box whose arrays go different ways stays a box, of specs.

  Example:
    >>> get_partition_spec({'w': LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'mlp')), 'n': jnp.ones(3)})
    {'n': P(), 'w': P('embed', 'mlp')}
  """
  reading = read(tree)
  by_static: dict[Static | None, Any] = {
    static: PartitionSpec(*(static.names if static is not None else ()))
    for static in set(reading.statics)
  }
  specs = [by_static[static] for static in reading.statics]
  if None in reading.shapes or reading.guesses:  # Python scalars, boxes around several arrays
    specs = [_spec(reading, index, spec) for index, spec in enumerate(specs)]
  return reading.treedef.unflatten(specs)


@set_module('flax_spmd')
def get_sharding(tree: Any, mesh: MeshLike) -> Any:
  """The sharding of every array of a tree on `mesh`.

  Logical names are resolved through the box's rules or those in force, mesh axes taken as they are.

  Args:
    tree: any tree, concrete or abstract.
    mesh: a mesh, concrete or abstract.

  Returns:
    A tree in which a box is its NamedSharding, an array without a box is replicated, and a Python
    scalar is None.

  Raises:
    UnmatchedNameError, ConflictError: as the policies of the rules in force say.

  Example:
    >>> mesh = abstract_mesh({'data': 2, 'model': 4})
    >>> tree = {'w': Partitioned(jnp.ones((8, 16)), (None, 'model')), 'b': jnp.ones(16)}
    >>> {name: sharding.spec for name, sharding in get_sharding(tree, mesh).items()}
    {'b': P(), 'w': P(None, 'model')}
  """

  def one(leaf, spec):
    if spec is None:
      return None
    box = own(leaf) if is_axis_metadata(leaf) else None
    where = spec if box is None else box.replace(names=spec).get_sharding(mesh).spec
    return NamedSharding(mesh, where)

  def unit(leaf, spec):
    if not is_axis_metadata(spec):
      return one(leaf, spec)
    return leaf.replace_boxed(jax.tree.map(lambda each: one(leaf, each), spec.value, is_leaf=_is_spec))

  return jax.tree.map(unit, tree, get_partition_spec(tree), is_leaf=is_axis_metadata)


@set_module('flax_spmd')
def logical_to_mesh_axes(array_dim_names: Names | None, rules: Any = None) -> PartitionSpec | None:
  """The PartitionSpec of an array whose dimensions have these logical names.

  Args:
    array_dim_names: a name per dimension; None, UNCONSTRAINED and tuples of mesh axes pass through.
    rules: a rule table; default: the rules in force.

  Returns:
    Mesh axes per dimension; None for None.

  Raises:
    LayoutError: a name occurs twice.
    RulesError: `rules` is no table.

  Example:
    >>> rules = (('batch', 'X'), ('features', 'X'), ('heads', 'Y'), ('batch', 'Z'))
    >>> logical_to_mesh_axes(('batch', 'length', 'heads', 'features'), rules)
    P('X', None, 'Y', None)
  """
  if array_dim_names is None:
    return None
  return _table(rules).spec(array_dim_names)


@set_module('flax_spmd')
def logical_to_mesh(tree: Any, rules: Any = None) -> Any:
  """`logical_to_mesh_axes` for every PartitionSpec of a tree; everything else is None.

  Args:
    tree: a tree of logical PartitionSpecs, as `get_partition_spec` returns it.
    rules: a rule table; default: the rules in force.

  Example:
    >>> logical_to_mesh({'w': PartitionSpec('embed', 'mlp')}, (('mlp', 'model'),))
    {'w': P(None, 'model')}
  """
  return _map_specs(_table(rules).spec, tree)


@set_module('flax_spmd')
def logical_to_mesh_sharding(tree: Any, mesh: MeshLike, rules: Any = None) -> Any:
  """`logical_to_mesh`, and the specs as NamedShardings on `mesh`.

  Args:
    tree: a tree of logical PartitionSpecs, as `get_partition_spec` returns it.
    mesh: a mesh, concrete or abstract.
    rules: a rule table; default: the rules in force.

  Example:
    >>> mesh = abstract_mesh({'data': 2, 'model': 4})
    >>> logical_to_mesh_sharding({'w': PartitionSpec('embed', 'mlp')}, mesh, (('mlp', 'model'),))['w'].spec
    P(None, 'model')
  """
  table = _table(rules)
  return _map_specs(lambda spec: NamedSharding(mesh, table.spec(spec) or PartitionSpec()), tree)


def _spec(reading: Reading, index: int, spec: PartitionSpec) -> Any:
  """A unit's spec: None for what is no array, one for all the arrays of a box, or a box of specs."""
  if reading.statics[index] is None and reading.shapes[index] is None:
    return None
  if index not in reading.guesses:
    return spec
  specs = [PartitionSpec(*(guess.names or ())) for guess in reading.guesses[index]]
  if len(set(specs)) <= 1:
    return specs[0] if specs else PartitionSpec()
  return jax.tree.structure(reading.units[index]).unflatten(specs)


def _map_specs(fn: Callable[[Any], Any], tree: Any) -> Any:
  """`fn` of every spec of a tree; called once for each object, since few specs stand in many places."""
  specs, treedef = jax.tree.flatten(tree, is_leaf=_is_spec)
  by_id = {id(spec): spec for spec in specs}
  found = {key: fn(spec) for key, spec in by_id.items()}
  return treedef.unflatten([found[id(spec)] for spec in specs])


def _table(rules: Any) -> Rules:
  return in_force().rules if rules is None else Rules.of(rules)


def _is_spec(x: Any) -> bool:
  return isinstance(x, PartitionSpec)
