"""Constraints on whole trees inside a program: by rules, and by a name that the rules know.

    grads = with_sharding_constraint(grads, fsdp('data'))        # here and now
    weights = with_sharding_annotation(weights, 'weights')       # as the rule ('@weights', ...) says

The second form says in the model only *what* a value is. Where it lies is the rule table's business, so
the same model runs under any layout, and where a table has no rule for it, nothing happens.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, Sharding

from flax_spmd._src.active_layout import in_force
from flax_spmd._src.constraints import constrain, mesh_for_constraints, with_logical_constraint
from flax_spmd._src.mesh import axis_sizes
from flax_spmd._src.names.box_trees import is_axis_metadata, static_of
from flax_spmd._src.public_module import set_module
from flax_spmd._src.rules.array_resolver import resolver_of
from flax_spmd._src.rules.clauses import Leaf
from flax_spmd._src.rules.decisions import Resolution
from flax_spmd._src.rules.placements import is_names, parts
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import MeshError, UnmatchedNameError, did_you_mean, raise_problems

_met: ContextVar[dict[str, bool] | None] = ContextVar('flax_spmd_annotations_met', default=None)


@set_module('flax_spmd')
def with_sharding_constraint(x: Any, places: Any) -> Any:
  """Lays the arrays of a tree over the mesh in force, inside a program.

  Args:
    x: arrays, or a tree of them, boxed or not.
    places: logical names (a tuple), a PartitionSpec of mesh axes, a sharding, a rule table (`Rules`,
      `fsdp(...)`, a policy), None for no constraint; or a tree of these that is a prefix of `x`.

  Returns:
    `x`, with the same values.

  Raises:
    MeshError: there is no mesh.
    LayoutError, MeshAxisError, RulesError: places that do not fit the tree or its arrays.

  Example:
    >>> layout = Layout({'data': 8})
    >>> halve = layout.jit(lambda grads: with_sharding_constraint(grads, fsdp('data', min_size=1)))
    >>> halve({'w': jnp.ones((4, 16))})['w'].sharding.spec
    P(None, 'data')
  """
  described, treedef = parts(x, places)
  return treedef.unflatten([_constrain_part(part, place) for _, place, part in described])


@set_module('flax_spmd')
def with_sharding_annotation(x: Any, name: str) -> Any:
  """Names a value inside a program, for the rule `('@name', ...)` of the table in force.

  Args:
    x: an array, or a tree of them.
    name: the annotation, without `@`. A table that has no rule for it leaves the value alone; one
      that has rules for other annotations warns, for it may be a typo.

  Returns:
    `x`, with the same values.

  Raises:
    UnmatchedNameError: no rule for it, and the table says `unmatched='error'`.
    LayoutError, MeshAxisError: the rule does not fit an array; names all that do not.

  Example:
    >>> layout = Layout({'data': 8}, (('@activations', PartitionSpec('data')),))
    >>> layout.jit(lambda x: with_sharding_annotation(2 * x, 'activations'))(jnp.ones((16, 4))).sharding.spec
    P('data',)
  """
  rules = in_force(tracing=True).rules
  known = name in rules.annotations
  met = _met.get()
  if met is not None:
    met[name] = known
  if not known:
    _report_unknown(name, rules)
    return x
  resolver, mesh = resolver_of(rules), mesh_for_constraints()
  if mesh is None:
    raise MeshError(_NO_MESH.format(what=f'the annotation {name!r}'))
  sizes = axis_sizes(mesh)
  return _constrain_leaves(
    x, mesh, lambda leaf: resolver.resolve_annotated(name, leaf, sizes), f'@{name}'
  )


@contextlib.contextmanager
def reporting(fn: Callable[..., Any], reported: set[str]) -> Iterator[None]:
  """Warns of rules for annotations that a function does not make, if it makes any at all.

  Says so once; what a later trace meets again may be cached by JAX, and is not met.
  """
  met: dict[str, bool] = {}
  token = _met.set(met)
  try:
    yield
  finally:
    _met.reset(token)
  rules = in_force().rules
  unused = [
    f'{index} {rules.clauses[index]!r}' for name, index in rules.annotations.items() if name not in met
  ]
  first = 'annotations' not in reported
  reported.add('annotations')
  if met and unused and first:
    warnings.warn(
      f'{getattr(fn, "__qualname__", fn)}: rules for annotations that it does not make: '
      f'{", ".join(unused)}. It makes {", ".join(map(repr, sorted(met)))}.',
      stacklevel=2,
    )


def _report_unknown(name: str, rules: Rules) -> None:
  text = f'annotation {name!r}: no rule for it in the table.' + did_you_mean(name, rules.annotations)
  if rules.policies.unmatched == 'error':
    raise UnmatchedNameError(
      f"{text}\nFix: correct the name, or add a rule ('@{name}', PartitionSpec())."
    )
  if rules.annotations:
    warnings.warn(f'{text} The value is left to the compiler.', stacklevel=3)


def _constrain_part(part: Any, place: Any) -> Any:
  if place is None:
    return part
  if is_names(place):
    return jax.tree.map(lambda leaf: with_logical_constraint(leaf, place), part)
  if isinstance(place, Sharding):
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, place), part)
  if isinstance(place, PartitionSpec):
    return jax.tree.map(lambda leaf: constrain(leaf, place) if jnp.ndim(leaf) else leaf, part)
  rules, mesh = Rules.of(place), mesh_for_constraints()
  if mesh is None:
    raise MeshError(_NO_MESH.format(what=f'the constraint {place!r}'))
  rules.check_axes(axis_sizes(mesh))
  resolver, sizes = resolver_of(rules), axis_sizes(mesh)
  return _constrain_leaves(part, mesh, lambda leaf: resolver.resolve(leaf, sizes), 'constraint')


def _constrain_leaves(tree: Any, mesh: Any, resolve: Callable[[Leaf], Resolution], what: str) -> Any:
  """Constrains every array of a tree as its resolution says; what is wrong is raised at once."""
  described, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_axis_metadata)
  problems, laid = [], []
  for path, unit in described:
    static, value = static_of(unit)
    where = path_string(path)
    names = static.names if static is not None and static.logical else None
    found = [resolve(Leaf(where, leaf.shape, leaf.dtype, names)) for leaf in jax.tree.leaves(value)]
    at = what if not path else f'{what}, {where}'
    problems += [problem.at(at) for resolution in found for problem in resolution.problems]
    laid.append((unit, found))
  raise_problems(problems)
  return treedef.unflatten([_laid(unit, found, mesh) for unit, found in laid])


def _laid(unit: Any, found: list[Resolution], mesh: Any) -> Any:
  leaves, treedef = jax.tree.flatten(unit)
  return treedef.unflatten(
    constrain(leaf, resolution.spec, mesh) for leaf, resolution in zip(leaves, found, strict=True)
  )


_NO_MESH = (
  'There is no mesh to lay {what} over.\n'
  'Fix: run it under `with layout:` or through `layout.jit`, or under `with jax.set_mesh(mesh):`.'
)
