"""Split products: those whose contracted dimension XLA for GPUs splits, so that more of the chip computes.

The parts are stored in the dtype of the sum, and added. XLA chooses the number of parts by the costs of a product in
tiles, with constants that are fitted to measurements: `splitk_rewriter.cc` of openxla/xla.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

_PARTS = (1, 2, 4, 8, 16, 32, 64, 128)
_TILE = 212  # rows and columns of a tile
_STEP = 442  # bytes of the contracted dimension that are read at once
_MORE_FLOPS = 4.73313  # per element, besides those of the product
_HBM, _CACHED, _IS_CACHED = (
  2842.3,
  1846.31,
  2.19872,
)  # FLOPs per byte; caches that hold the tiles of a wave
_LAUNCH, _SUM = 2.74228e9, 677.076  # FLOPs of the sum's launch, and per byte
_CORES, _CACHE = 132, 50 * 2**20  # an H100's


class ProductSize(NamedTuple):
  """The sizes of a product on one device.

  Attributes:
    batch, rows, columns, contracted: elements of these dimensions.
    operands: bytes per element of each operand, before conversions.
    result: bytes per element of the result.
    total: bytes per element of the sum.
  """

  batch: int
  rows: int
  columns: int
  contracted: int
  operands: tuple[int, int]
  result: int
  total: int


@functools.lru_cache(2**14)
def parts(size: ProductSize) -> int:
  """The number of parts that a product is computed in; 1 if it is not split.

  Example:
    >>> parts(ProductSize(1, 256, 256, 65536, (2, 2), 2, 4)), parts(ProductSize(1, 4096, 4096, 4096, (2, 2), 2, 4))
    (32, 1)
  """
  return min(_PARTS, key=lambda number: _cost(size, number))


def _cost(size: ProductSize, number: int) -> float:
  contracted = math.ceil(size.contracted / number)
  tiles = size.batch * number * math.ceil(size.rows / _TILE) * math.ceil(size.columns / _TILE)
  steps = math.ceil(contracted * max(size.operands) / _STEP)
  flops = (2 + _MORE_FLOPS) * _TILE**2 * steps * _STEP * size.total
  written = _TILE**2 * (size.total if number > 1 else size.result)
  moved = _TILE * contracted * sum(size.operands) + written
  moved *= _CACHED if moved * _CORES < _IS_CACHED * _CACHE else _HBM
  cost = max(flops, moved) * math.ceil(tiles / _CORES)
  if number == 1:
    return cost
  elements = size.batch * size.rows * size.columns
  return cost + _LAUNCH + _SUM * elements * (number * size.total + size.result)
