"""Clauses: the kinds of rules that a table is made of, and what each one says of an array.

    ('hidden', 'model')                    a logical name, over mesh axes
    ('attn/.*kernel$', PartitionSpec(...)) a path, for arrays with or without names
    ('^opt_state/', Rules(...))            a table of its own for a part of the tree
    fsdp('data')                           one open dimension of whatever is left
    policy(leaf) -> PartitionSpec | None   any function
    ('@weights', ...)                      values annotated inside a program

In a clause, None is a decision (this dimension is replicated) and `PartitionSpec.UNCONSTRAINED` is
none: it leaves the dimension open, for `fsdp` to fill. In a box, None is a dimension without a name,
and open.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import dtypes
from jax.sharding import PartitionSpec

from flax_spmd._src.public_module import set_module
from flax_spmd._src.rules.decisions import (
  Axes,
  Decision,
  Policies,
  Reason,
  Resolution,
  Skipped,
  axis_names,
)
from flax_spmd._src.rules.mesh_axes import Source, resolve_axes
from flax_spmd.errors import Problem, RulesError


@set_module('flax_spmd')
class Leaf(NamedTuple):
  """One array of a tree, as a policy sees it.

  Attributes:
    path: its place, `params/layers/wi`.
    shape, dtype: of the whole array; `dtype` is None where it is not known.
    names: one logical name (or None) per dimension, or None for an array without names.

  Example:
    >>> by_size = lambda leaf: PartitionSpec('data') if leaf.size >= 64 else None
    >>> layout = Layout({'data': 8}, (by_size,))
    >>> layout.spec({'w': jnp.ones((16, 8)), 'b': jnp.ones(8)})
    {'b': P(), 'w': P('data', None)}
  """

  path: str
  shape: tuple[int, ...]
  dtype: Any = None
  names: Any = None

  @property
  def size(self) -> int:
    """The number of elements."""
    return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, repr=False)
class Fsdp:
  """What `fsdp(...)` returns: a clause that lays one open dimension of an array over `axes`."""

  axes: Axes
  min_size: int = 2**20
  skip: tuple[str, ...] = ('layers',)

  def __repr__(self) -> str:
    changed = [
      f'{field.name}={getattr(self, field.name)!r}'
      for field in dataclasses.fields(self)[1:]
      if getattr(self, field.name) != field.default
    ]
    return f'fsdp({", ".join([repr(self.axes), *changed])})'

  def choose(
    self, leaf: Leaf, is_open: Sequence[bool], taken: set[str], sizes: Mapping[str, int]
  ) -> int | Reason:
    """The dimension to fill: the largest open one that divides, the first of equals; or why none."""
    axes = [axis for axis in axis_names(self.axes) if axis in sizes]
    if not axes:
      return 'missing'
    if leaf.dtype is not None and not _is_floating(leaf.dtype):
      return 'not floating'
    if leaf.size < self.min_size or leaf.size <= 1:
      return 'small'
    if not taken.isdisjoint(axes):
      return 'taken'
    skipped = [name in self.skip for name in leaf.names or [None] * len(leaf.shape)]
    candidates = [
      dim for dim, (free, skip) in enumerate(zip(is_open, skipped, strict=True)) if free and not skip
    ]
    parts = math.prod(sizes[axis] for axis in axes)
    dividing = [dim for dim in candidates if leaf.shape[dim] % parts == 0]
    if not dividing:
      return 'indivisible' if candidates else 'no open dimension'
    return max(dividing, key=lambda dim: (leaf.shape[dim], -dim))


@set_module('flax_spmd')
def fsdp(axes: Axes, *, min_size: int = 2**20, skip: Sequence[str] = ('layers',)) -> Fsdp:
  """A clause that shards whatever is left: one open dimension of each large floating array.

  Open is a dimension that no other clause has decided. The largest that the mesh divides is taken,
  and of equals the first, so that every host decides alike.

  Args:
    axes: a mesh axis, or a tuple of them.
    min_size: arrays with fewer elements are left as they are: small ones cost more to gather than
      to keep.
    skip: logical names of dimensions that are never taken (those that `nn.scan` runs over).

  Raises:
    RulesError: an argument is of another kind.

  Example:
    >>> layout = Layout({'data': 2, 'model': 4}, (('heads', 'model'), fsdp('data', min_size=1024)))
    >>> layout.spec({'wq': LogicallyPartitioned(jnp.ones((512, 64)), ('embed', 'heads')), 'wi': jnp.ones((64, 256))})
    {'wi': P(None, 'data'), 'wq': P('data', 'model')}
  """
  skip = (skip,) if isinstance(skip, str) else skip
  axes = tuple(axes) if isinstance(axes, list) else axes
  of_strings = isinstance(axes, str) or (
    isinstance(axes, tuple) and axes and all(isinstance(axis, str) for axis in axes)
  )
  wrong = [
    f'{name}={value!r}'
    for name, value, right in (
      ('axes', axes, of_strings),
      ('min_size', min_size, isinstance(min_size, int)),
      ('skip', skip, isinstance(skip, (tuple, list)) and all(isinstance(name, str) for name in skip)),
    )
    if not right
  ]
  if wrong:
    raise RulesError(
      f'fsdp(...) does not take {", ".join(wrong)}.\n'
      'Fix: axes is a mesh axis or a tuple of them, min_size a number of elements, skip a tuple of names.'
    )
  return Fsdp(axes, min_size, tuple(skip))


def by_spec(
  spec: PartitionSpec, leaf: Leaf, sizes: Mapping[str, int] | None, policies: Policies, source: Source
) -> Resolution:
  """What a rule's PartitionSpec says of an array; an array of one element is always replicated.

  Entries that the spec leaves out at its end are None, as everywhere in JAX.
  """
  rank = len(leaf.shape)
  if len(spec) > rank and leaf.size != 1:
    wrong = Problem(
      f'rule {source.rule} {source.text} has {_count(len(spec))} for an array of rank {rank}, '
      f'shape {leaf.shape}.',
      f'give at most one entry per dimension, or add a rule for this path before rule {source.rule}.',
    )
    return Resolution(PartitionSpec(), (), (wrong,), source.rule)
  entries = (None,) * rank if leaf.size == 1 else (*spec, *(None,) * (rank - len(spec)))
  return _named(resolve_axes(entries, leaf.shape, sizes, policies, source), leaf.names)


def fill(
  found: Resolution, fills: Sequence[tuple[int, Fsdp]], leaf: Leaf, sizes: Mapping[str, int]
) -> Resolution:
  """The resolution with one more open dimension laid out by each `fsdp` that finds one."""
  for index, clause in fills:
    decisions = found.decisions or tuple(
      Decision(dim, None, None, None) for dim in range(len(leaf.shape))
    )
    entries = (*found.spec, *(None,) * (len(leaf.shape) - len(found.spec)))
    is_open = [decision.rule is None and entries[decision.dim] is None for decision in decisions]
    taken = set(axis_names(entries))
    choice = clause.choose(leaf, is_open, taken, sizes)
    axes = [axis for axis in axis_names(clause.axes) if axis in sizes]
    if isinstance(choice, str):
      found = found._replace(skipped=(*found.skipped, Skipped(index, choice, tuple(axes))))
      continue
    entry = clause.axes if isinstance(clause.axes, str) or len(axes) > 1 else axes[0]
    if isinstance(entry, tuple):
      entry = tuple(axes)
    found = found._replace(
      spec=PartitionSpec(*entries[:choice], entry, *entries[choice + 1 :]),
      decisions=tuple(
        decision._replace(axes=entry, rule=index) if decision.dim == choice else decision
        for decision in decisions
      ),
    )
  return found


def _named(resolution: Resolution, names: Any) -> Resolution:
  if names is None:
    return resolution
  decisions = tuple(d._replace(name=names[d.dim]) for d in resolution.decisions)
  return resolution._replace(decisions=decisions)


def _is_floating(dtype: Any) -> bool:
  return not dtypes.issubdtype(dtype, dtypes.extended) and jnp.issubdtype(dtype, jnp.inexact)


def _count(entries: int) -> str:
  return f'{entries} entr{"y" if entries == 1 else "ies"}'
