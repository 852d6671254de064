"""Rows: one array of a planned tree, its sharding, and the decisions behind it."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from flax_spmd._src.names.optimizer_state import Inference
from flax_spmd._src.rules.decisions import Decision, RuleId, Skipped


class Row(NamedTuple):
  """One array of a tree, and the decisions about it.

  Attributes:
    path: its tree path, `params/layers/wi`.
    shape: global shape.
    dtype: dtype.
    names: one name per dimension; None if it has no names.
    logical: whether these are logical names, rather than mesh axes.
    spec: its PartitionSpec.
    decisions: one per dimension with a name or a rule.
    owner: the rule that decided the whole array by its path or by a function, if any.
    skipped: the `fsdp` rules that found no dimension to shard.
    bytes: size of the whole array.
    bytes_per_device: size of the largest shard.
    copies: number of devices that hold each element.
    inference: how its names were inferred, for optimizer state whose shape differs from its parameter's.
  """

  path: str
  shape: tuple[int, ...]
  dtype: Any
  names: Any
  logical: bool
  spec: PartitionSpec
  decisions: tuple[Decision, ...]
  owner: RuleId | None
  skipped: tuple[Skipped, ...]
  bytes: int
  bytes_per_device: int
  copies: int
  inference: Inference | None

  @property
  def replicated_bytes(self) -> int:
    """Bytes of all copies but the first, over all devices."""
    return self.bytes * (self.copies - 1)
