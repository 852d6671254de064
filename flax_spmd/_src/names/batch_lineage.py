"""Batch lineage: the values of a trace whose dimension 0 is the batch, by the operations that they come from.

    lineage = BatchLineage()
    lineage.start(tokens)      # dimension 0 of a model's argument is the batch
    lineage.has_batch(y)       # whether dimension 0 of y comes from it

A dimension that only has the size of the batch, such as a length or a number of positions, does not come from it.
"""

from __future__ import annotations

import weakref
from typing import Any

from flax_spmd._src import compat
from flax_spmd._src.operand_dimensions import operand_dimensions, walk


class BatchLineage:
  """The batches of the traces in one call of a function."""

  def __init__(self) -> None:
    self._known: dict[Any, bool] = {}  # whether a dimension of a variable is a batch of some size
    self._traces: weakref.WeakSet[Any] = weakref.WeakSet()
    self._constants: set[tuple[int, ...]] = set()

  def start(self, value: Any) -> None:
    """Makes dimension 0 of a value a batch."""
    staged = compat.staged(value)
    self._known = {key: known for key, known in self._known.items() if known}
    if staged is None:  # a trace has a copy of it, as a constant
      self._constants.add(tuple(value.shape))
    else:
      self._traces.add(compat.trace_of(staged))
      self._known[staged.val, 0, value.shape[0]] = True

  def may_start(self, value: Any, again: bool) -> bool:
    """Whether a value may be a batch: in a trace that has none, or if `again`, in one that has another.

    It is an argument or a constant of the trace, or comes from one or from random numbers. One in a `vmap` is none.
    """
    staged = compat.staged(value)
    if staged is None or value.ndim < 2 or self.has_batch(value):
      return False
    is_first = compat.trace_of(staged) not in self._traces
    return (is_first or again) and not compat.is_in_vmap(staged) and _has_origin(staged)

  def has_batch(self, value: Any) -> bool:
    """Whether dimension 0 of a value is a batch."""
    staged = compat.staged(value)
    if staged is None or not value.ndim:
      return staged is None and tuple(value.shape) in self._constants
    size, passed = value.shape[0], []

    def before(node: Any) -> Any:
      key = (node[0].val, node[1], size)
      return () if self._known.get(key) is False else _operands(node)

    for tracer, dim in walk((staged, 0), _key, before):
      key = tracer.val, dim, size
      is_constant = dim == 0 and tracer.parent is None and tuple(tracer.aval.shape) in self._constants
      if self._known.get(key) or is_constant:
        self._known[staged.val, 0, size] = True
        return True
      passed.append(key)
    self._known |= dict.fromkeys(passed, False)
    return False


def _has_origin(tracer: Any) -> bool:
  """Whether dimension 0 of a value comes from an argument or a constant of its trace, or is of random numbers."""
  nodes = (each for each, _ in walk((tracer, 0), _key, _operands))
  return any(each.parent is None or each.parent.primitive.name == 'random_bits' for each in nodes)


def _key(node: tuple[Any, int]) -> tuple[Any, int]:
  return node[0].val, node[1]


def _operands(node: tuple[Any, int]) -> list[tuple[Any, int]]:
  """The operands of a tracer, with the dimensions that its own comes from."""
  tracer, dim = node
  equation = tracer.parent
  if equation is None:
    return []
  index = next(number for number, each in enumerate(equation.outvars) if each is tracer.val)
  found = operand_dimensions(equation, index, dim)
  return [
    (equation.invars[i], each) for i, each in found if compat.staged(equation.invars[i]) is not None
  ]
