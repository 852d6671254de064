"""Needs: what an operation is told of where it stands, and what it says that it needs.

An operation is told how its operands lie and how its result has to; it says how each operand has to lie for
that, how the result then lies by itself, and along which axes devices have parts of a sum only. The walk brings
operands there, and results from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flax_spmd._src.estimate.graph import Axes, Dims, Value
from flax_spmd._src.estimate.resharding import Move, moves, sent, summing


class Seen(NamedTuple):
  """What is known where an operation stands.

  Attributes:
    values: shapes and dtypes of operands.
    dims: how they lie.
    sent_as: their dtypes where they are moved: of a converted value, the narrower one's.
    free: which of them cost nothing to move, as every device can make them.
    result: shape and dtype of the (first) result.
    after: how it has to lie.
    sizes: size per mesh axis.
  """

  values: Sequence[Value]
  dims: Sequence[Dims]
  sent_as: Sequence[Value]
  free: Sequence[bool]
  result: Value
  after: Dims
  sizes: Mapping[str, int]


class Need(NamedTuple):
  """What an operation needs.

  Attributes:
    operands: how each has to lie; None as it does.
    natural: how the result then lies.
    parts: the axes along which devices have parts of a sum.
    flops: work on one device, of products.
  """

  operands: tuple[Dims | None, ...]
  natural: Dims
  parts: Axes = ()
  flops: float = 0.0


def collectives(found: Need, seen: Seen) -> list[Move]:
  """What brings the operands to where they are needed, and the result to where it has to be."""
  made = summing(seen.result, found.natural, found.parts, seen.after, seen.sizes)
  for value, dims, wanted, free in zip(seen.sent_as, seen.dims, found.operands, seen.free):
    if wanted is not None and not free:
      made += moves(value, dims, wanted, seen.sizes)
  return made


def wire(found: Need, seen: Seen) -> float:
  """The bytes that a device sends for it."""
  return sent(collectives(found, seen), seen.sizes)
