"""Split products: XLA for GPUs splits the contracted dimension of a product that would leave most of the chip idle.

The parts are stored in float32, and added afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_PARTS = tuple(2**power for power in range(12))
# XLA's model of costs for an H100, from its `splitk_rewriter.cc`. All of 105 products that were compiled by jax 0.12
# have these parts.
_CORES = 132
_TILE = 128  # rows, and columns
_FLOP = 100.0  # costs
_BYTE = 0.194136  # that a product reads or writes
_SUMMED_BYTE = 193.1384
_SUM = 4.36e7
PART_ITEMSIZE = 4  # bytes of an element of a part


def parts(
  batch: int, rows: int, columns: int, contracted: int, itemsizes: Sequence[float] = (4, 4, 4)
) -> int:
  """The number of parts that a product on one device is computed in; 1 if it is not split.

  Args:
    batch, rows, columns, contracted: elements of these dimensions.
    itemsizes: bytes of an element of the two operands and of the result.

  Example:
    >>> parts(1, 256, 256, 8192), parts(1, 1024, 4096, 8192)
    (32, 1)
  """
  left, right, result = itemsizes
  size = batch * rows * columns
  tile = min(rows, _TILE) * min(columns, _TILE)
  tiles = batch * math.ceil(rows / _TILE) * math.ceil(columns / _TILE)
  at_once = _CORES * _TILE**2 / tile
  read = batch * contracted * (rows * left + columns * right)

  def cost(number: int) -> float:
    flops = 2 * tile * math.ceil(contracted / number) * max(1.0, number * tiles / at_once)
    written = size * (number * PART_ITEMSIZE if number > 1 else result)
    product = max(_FLOP * flops, _BYTE * (read + written))
    return product + (_SUM + _SUMMED_BYTE * (written + size * result) if number > 1 else 0.0)

  return min(_PARTS, key=cost)
