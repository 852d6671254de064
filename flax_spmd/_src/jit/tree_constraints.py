"""Sharding constraints for whole trees inside a program: by placements, or by an annotation.

    grads = with_sharding_constraint(grads, fsdp('data'))        # explicit
    weights = with_sharding_annotation(weights, 'weights')       # by the rule ('@weights', ...)

An annotation names a value in the model; the rule table decides its sharding. So one model runs under any
layout, and an annotation without a rule has no effect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, Sharding

from flax_spmd._src.active_layout import in_force, report_names
from flax_spmd._src.constraint_log import report_constraint
from flax_spmd._src.constraints import constrain, mesh_for_constraints, with_logical_constraint
from flax_spmd._src.context_values import assigned
from flax_spmd._src.mesh import axis_sizes
from flax_spmd._src.names.box_trees import is_unit, static_of
from flax_spmd._src.public import public
from flax_spmd._src.rules.array_resolver import resolver_of
from flax_spmd._src.rules.clauses import Leaf
from flax_spmd._src.rules.decisions import Resolution
from flax_spmd._src.rules.placements import axes_for_names, is_names, parts
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.source_lines import warn
from flax_spmd._src.text import value_text
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import LayoutError, MeshError, UnmatchedNameError, did_you_mean, raise_problems

# The annotations of the trace in progress, and whether each has a rule.
_annotations: ContextVar[dict[str, bool] | None] = ContextVar('flax_spmd_annotations', default=None)


@public('flax_spmd')
def with_sharding_constraint(x: Any, placements: Any) -> Any:
  """Constrains the shardings of a tree of arrays inside a program, on the mesh in force.

  Args:
    x: an array or a tree of arrays, boxed or not.
    placements: logical names (a tuple), a PartitionSpec of mesh axes, a sharding, a rule table (`Rules`,
      `fsdp(...)`, a function), or None for no constraint; or a tree of these that is a prefix of `x`.

  Returns:
    `x`, with the same values.

  Raises:
    MeshError: there is no mesh.
    LayoutError, MeshAxisError, RulesError: a placement does not fit the tree or its arrays.

  Example:
    >>> layout = Layout({'data': 8})
    >>> halve = layout.jit(lambda grads: with_sharding_constraint(grads, fsdp('data', min_size=1)))
    >>> halve({'w': jnp.ones((4, 16))})['w'].sharding.spec
    P(None, 'data')
  """
  described, treedef = parts(x, placements)
  return jax.tree.unflatten(
    treedef, [_constrain_part(part, placement) for _, placement, part in described]
  )


@public('flax_spmd', unchecked=['name'])
def with_sharding_annotation(x: Any, name: str) -> Any:
  """Annotates a value inside a program; the rule `('@name', ...)` in force constrains its sharding.

  Args:
    x: an array or a tree of arrays.
    name: the annotation, without `@`. Without a rule for it, the value is not constrained.

  Returns:
    `x`, with the same values.

  Warns:
    UserWarning: the table has rules for other annotations, but not for this one.

  Raises:
    UnmatchedNameError: there is no rule for the annotation, and the policy is `unmatched='error'`.
    LayoutError, MeshAxisError: the rule does not fit an array (the message lists all such arrays), or `name` is none.

  Example:
    >>> layout = Layout({'data': 8}, (('@activations', PartitionSpec('data')),))
    >>> layout.jit(lambda x: with_sharding_annotation(2 * x, 'activations'))(jnp.ones((16, 4))).sharding.spec
    P('data',)
  """
  if not isinstance(name, str):
    raise LayoutError(
      f'A {type(name).__name__} is not the name of an annotation.\n'
      "Fix: write with_sharding_annotation(x, name), such as with_sharding_annotation(x, 'weights')."
    )
  rules = in_force(tracing=True).rules
  known = name in rules.annotations
  annotations = _annotations.get()
  if annotations is not None:
    annotations[name] = known
  if not known:
    _report_unknown(name, rules)
    for leaf in jax.tree.leaves(x):
      report_constraint(f'@{name}', None, jnp.shape(leaf), 'there is no rule for this annotation')
    return x
  resolver, mesh = resolver_of(rules), mesh_for_constraints()
  if mesh is None:
    raise MeshError(_NO_MESH.format(constraint=f'the annotation {value_text(name)}'))
  sizes = axis_sizes(mesh)
  return _constrain_leaves(
    x, mesh, lambda leaf, axes: resolver.resolve_annotated(name, leaf, sizes, axes=axes), f'@{name}'
  )


@contextlib.contextmanager
def warn_of_unused_annotations(fn: Callable[..., Any], reported: set[str]) -> Iterator[None]:
  """Warns of annotation rules that match no annotation of a function, if it makes any annotations.

  Only the first trace warns: JAX may cache inner functions, whose annotations a later trace then misses.
  """
  annotations: dict[str, bool] = {}
  with assigned(_annotations, annotations):
    yield
  rules = in_force().rules
  unused = [
    f'{index} {rules.clauses[index]!r}'
    for name, index in rules.annotations.items()
    if name not in annotations
  ]
  first = 'annotations' not in reported
  reported.add('annotations')
  if annotations and unused and first:
    warn(
      f'{getattr(fn, "__qualname__", fn)}: rules for annotations that it does not make: '
      f'{", ".join(unused)}. It makes {", ".join(map(repr, sorted(annotations)))}.'
    )


def _report_unknown(name: str, rules: Rules) -> None:
  text = f'annotation {name!r}: the table has no rule for it.' + did_you_mean(name, rules.annotations)
  if rules.policies.unmatched == 'error':
    raise UnmatchedNameError(
      f"{text}\nFix: correct the name, or add a rule ('@{name}', PartitionSpec())."
    )
  if rules.annotations:
    warn(f'{text} The value is not constrained.')


def _constrain_part(part: Any, placement: Any) -> Any:
  if placement is None:
    return part
  if is_names(placement):
    mesh, rules = mesh_for_constraints(), in_force(tracing=True).rules
    sizes = {} if mesh is None else axis_sizes(mesh)
    raise_problems([each.at('constraint') for each in axes_for_names(placement, sizes, rules)])
    return jax.tree.map(lambda leaf: with_logical_constraint(leaf, placement), part)
  if isinstance(placement, Sharding):
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, placement), part)
  if isinstance(placement, PartitionSpec):
    return jax.tree.map(lambda leaf: constrain(leaf, placement) if jnp.ndim(leaf) else leaf, part)
  rules, mesh = Rules.of(placement), mesh_for_constraints()
  if mesh is None:
    raise MeshError(_NO_MESH.format(constraint=f'the constraint {value_text(placement)}'))
  rules.check_axes(axis_sizes(mesh))
  resolver, sizes = resolver_of(rules), axis_sizes(mesh)
  return _constrain_leaves(
    part,
    mesh,
    lambda leaf, axes: resolver.resolve(leaf._replace(names=None) if axes else leaf, sizes),
    'constraint',
  )


def _constrain_leaves(
  tree: Any, mesh: Any, resolve: Callable[[Leaf, bool], Resolution], kind: str
) -> Any:
  """Constrains every array of a tree to its resolved spec; raises the problems of all arrays together."""
  units, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_unit)
  problems, resolved = [], []
  for path, unit in units:
    static, value = static_of(unit)
    where = path_string(path)
    axes = static is not None and not static.logical
    names = None if static is None else static.names
    report_names(None if axes else names)
    resolutions = [
      resolve(Leaf(where, leaf.shape, leaf.dtype, names), axes) for leaf in jax.tree.leaves(value)
    ]
    at = kind if not path else f'{kind}, {where}'
    problems += [problem.at(at) for resolution in resolutions for problem in resolution.problems]
    resolved.append((unit, resolutions))
  raise_problems(problems)
  return jax.tree.unflatten(
    treedef, [_constrain_unit(unit, resolutions, mesh) for unit, resolutions in resolved]
  )


def _constrain_unit(unit: Any, resolutions: list[Resolution], mesh: Any) -> Any:
  leaves, treedef = jax.tree.flatten(unit)
  return jax.tree.unflatten(
    treedef,
    [
      constrain(leaf, resolution.spec, mesh)
      for leaf, resolution in zip(leaves, resolutions, strict=True)
    ],
  )


_NO_MESH = (
  'There is no mesh for {constraint}.\n'
  'Fix: run it under `with layout:` or through `layout.jit`, or under `with jax.set_mesh(mesh):`.'
)
