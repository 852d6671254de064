"""Rows: one array of a planned tree, its sharding, and the decisions behind it."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from flax_spmd._src.names.optimizer_state import Guess
from flax_spmd._src.rules.decisions import Decision, RuleId, Skipped


class Row(NamedTuple):
  """One array of a tree and what was decided about it.

  Attributes:
    path: its place in the tree, `params/layers/wi`.
    shape, dtype: of the whole array.
    names: its names (None: it has none).
    logical: whether these are logical names, rather than mesh axes.
    spec: where it goes.
    decisions: one per dimension that something is known about.
    owner: the rule that took the array as a whole, by its path or by a policy, if one did.
    skipped: the `fsdp` rules that found no dimension to fill.
    bytes: of the whole array.
    bytes_per_device: of the piece that one device holds.
    copies: on how many devices each element lies.
    guess: for optimizer state that is not shaped like its parameter, what it was taken for.
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
  guess: Guess | None

  @property
  def replicated_bytes(self) -> int:
    """Bytes, over all devices, that are there more than once."""
    return self.bytes * (self.copies - 1)
