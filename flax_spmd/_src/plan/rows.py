"""Rows: one array of a planned tree, its sharding, the decisions behind it, and the array's own sharding."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax.sharding import PartitionSpec, Sharding

from flax_spmd._src.names.optimizer_state import Inference
from flax_spmd._src.plan.deviations import Deviation
from flax_spmd._src.rules.decisions import Decision, RuleId, Skipped


class Row(NamedTuple):
  """One array of a tree, and the decisions about it.

  Attributes:
    path: its tree path, `params/layers/wi`.
    shape: global shape.
    dtype: dtype on a device: without 64-bit types, JAX stores float64 as float32.
    names: one name per dimension (more only where these decide nothing); None if it has no names.
    logical: whether these are logical names, rather than mesh axes.
    spec: its planned PartitionSpec.
    decisions: one per dimension with a name or a rule.
    owner: the rule that decided the whole array by its path or by a function, if any.
    skipped: the `fsdp` and `optimizer_over` rules that found no dimension to shard.
    bytes: size of the whole array.
    bytes_per_device: size of the largest shard.
    copies: number of devices that hold each element.
    inference: how its names were inferred, for optimizer state whose shape differs from its parameter's.
    unnamed: number of its last dimensions that are not named by its box; their names are None.
    field: path of the optimizer's field that holds it, `opt_state/0/mu`; None if it is in none.
    stored: its own sharding; None for a host array, for an array that is not committed to devices, and
      for an abstract array without a sharding.
    deviation: the difference between its planned and its own sharding, if there is one.
    memory: its planned memory, such as 'pinned_host'; None: that of the device.
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
  unnamed: int
  field: str | None
  stored: Sharding | None
  deviation: Deviation | None
  memory: str | None

  @property
  def replicated_bytes(self) -> int:
    """Bytes of all copies but the first, over all devices."""
    return self.bytes * (self.copies - 1)
