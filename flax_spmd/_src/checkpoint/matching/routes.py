"""Routes: how each target leaf is computed from saved leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from flax_spmd._src.checkpoint.storage.record import LeafRecord, is_key, raw_keys, typed_keys

Step = Literal['same', 'keep', 'stack', 'unstack', 'move']


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
    step: conversion applied to the sources.
    axis: stacked dimension, for `stack` and `unstack`.
    layer: index along the stacked dimension, for `unstack`.
    order: saved dimension of each target dimension, for `move`.
    keys: the target's dtype, if random keys change between typed keys and their numbers: `key<fry>`, `uint32`.
  """

  sources: tuple[str, ...]
  step: Step = 'same'
  axis: int = 0
  layer: int = 0
  order: tuple[int, ...] = ()
  keys: str | None = None


def without(axes: tuple[Any, ...], axis: int) -> tuple[Any, ...]:
  """Sizes or names without the entry of one dimension."""
  return axes[:axis] + axes[axis + 1 :]


def after(leaf: LeafRecord, route: Route, layers: int) -> LeafRecord:
  """The record of a converted leaf.

  Args:
    leaf: first source of the route.
    route: conversion to apply.
    layers: number of sources.
  """
  leaf = _after_step(leaf, route, layers)
  if route.keys is None:
    return leaf
  return raw_keys(leaf) if is_key(leaf) else typed_keys(leaf, route.keys) or leaf


def with_keys(route: Route, leaf: LeafRecord, target: LeafRecord) -> Route:
  """The route, with a conversion of random keys if one side has typed keys and the other their numbers.

  The numbers of a key do not name their implementation, so the target decides.

  Args:
    route: route without a conversion of keys.
    leaf: record after the route's step.
    target: record of the target leaf.
  """
  to_typed = is_key(target) and typed_keys(leaf, target.dtype) is not None
  to_raw = is_key(leaf) and target.dtype == 'uint32' and raw_keys(leaf).shape == target.shape
  return route._replace(keys=target.dtype) if to_typed or to_raw else route


def _after_step(leaf: LeafRecord, route: Route, layers: int) -> LeafRecord:
  shape, names = leaf.shape, leaf.names
  if route.step == 'unstack':
    return leaf._replace(
      shape=without(shape, route.axis), names=None if names is None else without(names, route.axis)
    )
  if route.step == 'stack':
    return leaf._replace(
      shape=(*shape[: route.axis], layers, *shape[route.axis :]),
      names=None if names is None else (*names[: route.axis], None, *names[route.axis :]),
    )
  if route.step == 'move':
    return leaf._replace(
      shape=tuple(shape[d] for d in route.order),
      names=None if names is None else tuple(names[d] for d in route.order),
    )
  return leaf
