"""Split products: XLA for GPUs splits the contracted dimension of a product that would leave most of the chip idle.

The parts are stored in float32, and added afterwards.
"""

from __future__ import annotations

import math

_PARTS = (1, 2, 4, 8, 16, 32, 64, 128)
# Fitted to 117 products that were compiled for H100s by the compilers of jax 0.10.2 and 0.12, which agree: 99 have exactly
# these parts, and no other has more than twice or less than half of them.
_TILE = 64, 128  # rows and columns
_TILES = (
  (2**15, 396),
  (math.inf, 528),
)  # contracted elements up to which all parts have at most so many tiles
_SUM, _ELEMENT = 45.0, 3.2e-4  # costs of the sum, and of each of its elements, in contracted elements


def parts(batch: int, rows: int, columns: int, contracted: int) -> int:
  """The number of parts that a product on one device is computed in; 1 if it is not split.

  Args:
    batch, rows, columns, contracted: elements of these dimensions.

  Example:
    >>> parts(1, 256, 256, 8192), parts(1, 1024, 4096, 8192)
    (16, 1)
  """
  tiles = batch * math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1])
  most = next(most for longest, most in _TILES if contracted <= longest)
  possible = [number for number in _PARTS if number == 1 or number * tiles <= most]
  sums = {number: _SUM + _ELEMENT * number * batch * rows * columns for number in possible[1:]}
  return min(possible, key=lambda number: contracted / number + sums.get(number, 0.0))
