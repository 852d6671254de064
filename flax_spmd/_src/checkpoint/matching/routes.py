"""Routes: how each target leaf is computed from saved leaves.

A route is one conversion of its operands, which are saved leaves, or leaves with a route of their own. The kernel of
the queries of all layers, from the fused projections of each layer:

    stack of [part 0 of [rearranged 'layers/0/qkv'], part 0 of [rearranged 'layers/1/qkv'], ...]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from flax_spmd._src.checkpoint.matching.arrangements import Rearrangement
from flax_spmd._src.checkpoint.storage.record import (
  LeafRecord,
  is_key,
  key_implementation,
  raw_keys,
  typed_keys,
)

Step = Literal['same', 'keep', 'stack', 'unstack', 'move', 'rearrange', 'resize', 'keys']


class Side(NamedTuple):
  """One side of a restore: the checkpoint, or its target.

  Attributes:
    leaves: record of each leaf, by path.
    kinds: class name of each optimizer state, by path.
  """

  leaves: Mapping[str, LeafRecord]
  kinds: Mapping[str, str]


class Route(NamedTuple):
  """How one target leaf is computed.

  Attributes:
    sources: saved paths; empty for a leaf that keeps the target's value.
    step: conversion applied to the operands.
    axis: stacked dimension, for `stack` and `unstack`.
    layer: index along the stacked dimension, for `unstack`.
    order: saved dimension of each target dimension, for `move`.
    rearrangement: for `rearrange`.
    shape: shape of the result, for `resize`: the part that both sides have is that of the operand.
    dtype: dtype of the result, for `keys`: random keys change between typed keys and their numbers.
    parts: routes of the operands; empty if these are the sources themselves.
  """

  sources: tuple[str, ...]
  step: Step = 'same'
  axis: int = 0
  layer: int = 0
  order: tuple[int, ...] = ()
  rearrangement: Rearrangement | None = None
  shape: tuple[int, ...] = ()
  dtype: str = ''
  parts: tuple[Route, ...] = ()

  @property
  def operands(self) -> tuple[Route, ...]:
    """The routes of the operands."""
    return self.parts or tuple(Route((source,)) for source in self.sources)

  @property
  def is_source(self) -> bool:
    """Whether this is a saved leaf itself."""
    return self.step == 'same' and not self.parts


def converted(parts: Sequence[Route], step: Step, **options: Any) -> Route:
  """The route of a conversion of operands with these routes."""
  sources = tuple(source for part in parts for source in part.sources)
  plain = all(part.is_source for part in parts)
  return Route(sources, step, parts=() if plain else tuple(parts), **options)


def nodes(route: Route) -> Iterator[Route]:
  """A route, and those of its operands, and so on."""
  yield route
  for part in route.parts:
    yield from nodes(part)


def record_of(route: Route, saved: Mapping[str, LeafRecord]) -> LeafRecord:
  """The record of a converted leaf.

  Args:
    route: its route.
    saved: record of each saved leaf, by path.
  """
  if route.is_source:
    return saved[route.sources[0]]
  return after(record_of(route.operands[0], saved), route, len(route.operands))


def evaluated(route: Route, leaf: Callable[[str], Any], xp: Any, own: Any = None) -> Any:
  """The leaf that a route computes.

  Args:
    route: its route.
    leaf: function from a saved path to the array.
    xp: numpy, or jax.numpy.
    own: the target's own value, which a leaf that grows keeps in part.
  """
  if route.is_source:
    return leaf(route.sources[0])
  operands = [evaluated(operand, leaf, xp) for operand in route.operands]
  if route.step == 'stack':
    return xp.stack(operands, route.axis)
  if route.step == 'unstack':
    return operands[0][(slice(None),) * route.axis + (route.layer,)]
  if route.rearrangement is not None:
    return route.rearrangement.apply(operands[0])
  if route.step == 'resize':
    return _resized(operands[0], route.shape, xp, own)
  if route.step == 'keys':
    return _keys(operands[0], route.dtype)
  return xp.transpose(operands[0], route.order) if route.step == 'move' else operands[0]


def _resized(x: Any, shape: tuple[int, ...], xp: Any, own: Any) -> Any:
  both = tuple(slice(min(sizes)) for sizes in zip(x.shape, shape, strict=True))
  if x[both].shape == shape:
    return x[both]
  if xp is not np:
    return own.at[both].set(x[both].astype(own.dtype))
  result = np.array(own)
  result[both] = x[both]
  return result


def grows(route: Route, saved: Mapping[str, LeafRecord]) -> bool:
  """Whether a leaf keeps some of the target's own values beside those of the checkpoint."""
  if route.step != 'resize':
    return False
  sizes = zip(record_of(route.operands[0], saved).shape, route.shape, strict=True)
  return any(new > old for old, new in sizes)


def _keys(x: Any, dtype: str) -> Any:
  """Typed keys from their numbers, or numbers from typed keys. No bits change."""
  if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
    return jax.random.key_data(x)
  return jax.random.wrap_key_data(x, impl=key_implementation(dtype))


def with_keys(route: Route, leaf: LeafRecord, target: LeafRecord) -> Route:
  """The route, with a conversion of random keys if one side has typed keys and the other their numbers.

  The numbers of a key do not name their implementation, so the target decides.

  Args:
    route: route to extend.
    leaf: record of its result.
    target: record of the target leaf.
  """
  to_typed = is_key(target) and typed_keys(leaf, target.dtype) is not None
  to_raw = is_key(leaf) and target.dtype == 'uint32' and raw_keys(leaf).shape == target.shape
  return converted([route], 'keys', dtype=target.dtype) if to_typed or to_raw else route


def without(axes: tuple[Any, ...], axis: int) -> tuple[Any, ...]:
  """Sizes or names without the entry of one dimension."""
  return axes[:axis] + axes[axis + 1 :]


def with_entry(axes: tuple[Any, ...], axis: int, entry: Any) -> tuple[Any, ...]:
  """Sizes or names with that of a further dimension."""
  return (*axes[:axis], entry, *axes[axis:])


def after(leaf: LeafRecord, route: Route, layers: int) -> LeafRecord:
  """The record of a converted leaf.

  Args:
    leaf: first operand of the route.
    route: conversion to apply.
    layers: number of operands.
  """
  shape, names = leaf.shape, leaf.names
  if route.step == 'unstack':
    return leaf._replace(
      shape=without(shape, route.axis), names=None if names is None else without(names, route.axis)
    )
  if route.step == 'stack':
    return leaf._replace(
      shape=with_entry(shape, route.axis, layers),
      names=None if names is None else with_entry(names, route.axis, None),
    )
  if route.step == 'move':
    return leaf._replace(
      shape=tuple(shape[d] for d in route.order),
      names=None if names is None else tuple(names[d] for d in route.order),
    )
  if route.step == 'resize':
    return leaf._replace(shape=route.shape)
  if route.rearrangement is not None:
    return leaf._replace(shape=route.rearrangement.shape, names=route.rearrangement.names(leaf.names))
  if route.step == 'keys':
    return raw_keys(leaf) if is_key(leaf) else typed_keys(leaf, route.dtype) or leaf
  return leaf
