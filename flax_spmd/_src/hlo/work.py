"""Work: FLOPs and memory traffic of a program, of its products one by one, and its number of kernels."""

from __future__ import annotations

from typing import NamedTuple


class Product(NamedTuple):
  """Equal matrix products, convolutions or kernels with products.

  Attributes:
    flops: FLOPs of one run.
    hbm_bytes: bytes that one run reads from and writes to the device's main memory.
    runs: number of runs in a step.
  """

  flops: float
  hbm_bytes: float
  runs: float


class Work:
  """Running totals.

  Attributes:
    flops: FLOPs of products.
    hbm_bytes: bytes read from and written to the device's main memory.
    kernels: number of runs of operations that write to it.
  """

  def __init__(self) -> None:
    self.flops = self.hbm_bytes = self.kernels = 0.0
    self._runs: dict[tuple[float, float], float] = {}

  def add(self, flops: float, hbm_bytes: float, runs: float) -> None:
    """Adds the runs of one operation, each with its FLOPs and its traffic in bytes."""
    self.flops += runs * flops
    self.hbm_bytes += runs * hbm_bytes
    if hbm_bytes:
      self.kernels += runs
    if flops:
      self._runs[flops, hbm_bytes] = self._runs.get((flops, hbm_bytes), 0.0) + runs

  def extend(self, other: Work, runs: float = 1) -> None:
    """Adds the runs of a part of the program."""
    self.flops += runs * other.flops
    self.hbm_bytes += runs * other.hbm_bytes
    self.kernels += runs * other.kernels
    for key, times in other._runs.items():
      self._runs[key] = self._runs.get(key, 0.0) + runs * times

  @property
  def products(self) -> tuple[Product, ...]:
    """The products, in the order in which they were added."""
    return tuple(Product(*key, runs) for key, runs in self._runs.items() if runs)
