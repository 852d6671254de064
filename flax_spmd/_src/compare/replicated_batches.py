"""Replicated batches: the finding that constraints of a step replicate the batch, as no rule matches its name there.

A model may call the batch's dimension `act_batch`. Under a table for `batch` only, its constraints gather every
activation, as in Flax, and each device computes the whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from flax_spmd._src.constraint_log import ConstraintRequest
from flax_spmd._src.rules.decisions import axis_names
from flax_spmd._src.text import plural


def replicated_batches(requests: Sequence[ConstraintRequest], batch: Any) -> list[str]:
  """The finding, with its fix, or nothing.

  Args:
    requests: the constraints of a step.
    batch: its batch, abstract and with shardings.
  """
  axes = {
    leaf.shape[0]: axis_names(leaf.sharding.spec[0])
    for leaf in jax.tree.leaves(batch)
    if leaf.shape and axis_names(leaf.sharding.spec[0] if leaf.sharding.spec else None)
  }
  found: dict[tuple[str, str | tuple[str, ...]], list[ConstraintRequest]] = {}
  for one in requests:
    name = one.names[0] if isinstance(one.names, tuple) and one.names else None
    if name in one.unmatched and one.shape and one.shape[0] in axes and not one.dropped:
      over = axes[one.shape[0]]
      found.setdefault((name, over[0] if len(over) == 1 else over), []).append(one)
  return [
    f'constraints replicate the batch, which is sharded over {"+".join(axis_names(over))}: no rule for {name!r} in '
    f'{plural(len({one.source for one in same}), "constraint")}, such as {same[0].names} at {same[0].source}. '
    f'Fix: add the rule ({name!r}, {over!r}).'
    for (name, over), same in found.items()
  ]
