"""Routes: how each wanted leaf is made of saved ones, and what a leaf is after a step of a route."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from flax_spmd._src.checkpoint.storage.record import Leaf

Step = Literal['same', 'keep', 'stack', 'unstack', 'move']


class Side(NamedTuple):
  """One side of a restore: leaves by path, and the class of each state of an optimizer by path."""

  leaves: Mapping[str, Leaf]
  kinds: Mapping[str, str]


class Route(NamedTuple):
  """How a wanted leaf is made.

  Attributes:
    sources: the saved paths; none: the target's own value stays.
    step: what is done with them.
    axis: for `stack` and `unstack`, the stacked dimension.
    number: for `unstack`, which part of the stacked leaf it is.
    order: for `move`, the saved dimension of each wanted one.
  """

  sources: tuple[str, ...]
  step: Step = 'same'
  axis: int = 0
  number: int = 0
  order: tuple[int, ...] = ()


def without(axes: tuple[Any, ...], axis: int) -> tuple[Any, ...]:
  """Sizes or names without those of one dimension."""
  return axes[:axis] + axes[axis + 1 :]


def after(leaf: Leaf, route: Route, layers: int) -> Leaf:
  """What a saved leaf is after a route's step, for the first of its sources."""
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
