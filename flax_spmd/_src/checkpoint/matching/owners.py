"""Owners: the parameter that each leaf of an optimizer's state is of."""

from __future__ import annotations

import math
from collections.abc import Iterator

from flax_spmd._src.checkpoint.matching.optimizer_states import places
from flax_spmd._src.checkpoint.matching.routes import Side


class Owners:
  """The parameter that each leaf of an optimizer is of: the one whose path ends alike."""

  def __init__(self, side: Side):
    self._leaves = side.leaves
    self._places = places(side.leaves, side.kinds)
    self._by_tail: dict[str, str] = {}
    for path in side.leaves:
      if path not in self._places:
        for tail in _tails(path):
          self._by_tail.setdefault(tail, path)

  def of(self, path: str) -> str:
    """The path of a leaf's parameter; its own if it is none's."""
    if path not in self._places:
      return path
    return next((self._by_tail[tail] for tail in _tails(path) if tail in self._by_tail), path)

  def is_placeholder(self, path: str) -> bool:
    """Whether a leaf only stands in for what an optimizer does not keep of a parameter: one element."""
    leaf = self._leaves[path]
    return (
      path in self._places
      and math.prod(leaf.shape) == 1
      and leaf.shape != self._leaves[self.of(path)].shape
    )


def _tails(path: str) -> Iterator[str]:
  """`a/b/c`, `b/c`, `c`."""
  yield path
  while '/' in path:
    path = path.partition('/')[2]
    yield path
