"""Activation moves: the finding that a step moves activations because its parameters are sharded over the batch's axes.

FSDP should move parameters: gathered once for the forward pass and once for the backward pass, and their gradients
scattered. Where nothing in the step keeps the batch sharded, the compiler may shard activations as the parameters
are. It then moves activations at every layer, which are larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax_spmd._src.hlo.counts import Counts
from flax_spmd._src.jit.batch_leaves import is_decided_by_author
from flax_spmd._src.names.nnx_variables import arrays_of
from flax_spmd._src.names.tree_names import TreeNames
from flax_spmd._src.plan.rows import Row
from flax_spmd._src.rules.decisions import axis_names
from flax_spmd._src.text import size_text

_SUSPICIOUS = 6  # times the bytes of the parameters; FSDP with remat needs 3


def unconstrained_axes(state: Any, batch: Any, jaxpr: Any) -> tuple[str, ...]:
  """The mesh axes that shard both the state and the batch of a step that constrains no activation.

  Args:
    state, batch: the arguments, abstract and with shardings.
    jaxpr: the step, as traced.
  """
  is_named = any(TreeNames(state).statics)
  if is_decided_by_author(jaxpr, is_named, [array.shape for array in arrays_of(state)]):
    return ()
  of_state = _axes(state)
  return tuple(axis for axis in _axes(batch) if axis in of_state)


def activation_moves(axes: Sequence[str], rows: Sequence[Row], counts: Counts) -> list[str]:
  """The finding, with its fix, if a compiled step sends far more than its parameters; else nothing.

  Args:
    axes: the result of `unconstrained_axes`.
    rows: the arrays of the state.
    counts: the work of the compiled step.
  """
  sent = sum(one.wire for one in counts.collectives if set(axes).intersection(one.axes))
  held = sum(row.bytes for row in rows if row.field is None)
  if not held or sent <= _SUSPICIOUS * held:
    return []
  return [
    f'activations move: {size_text(sent)} on the wire over {"+".join(axes)}, {sent / held:.0f} times '
    f'the {size_text(held)} of the parameters, which are sharded over it as the batch is. '
    "Fix: constrain the batch in each block of the model, x = with_logical_constraint(x, ('batch',))."
  ]


def _axes(tree: Any) -> list[str]:
  """The mesh axes that the arrays of a tree are sharded over."""
  specs = [array.sharding.spec for array in arrays_of(tree)]
  return list(dict.fromkeys(axis for spec in specs for entry in spec for axis in axis_names(entry)))
