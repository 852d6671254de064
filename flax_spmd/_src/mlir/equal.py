"""Equal operations: a number for each operation of a program; equal ones compute the same.

The numbers are found before anything is replaced: a factor of a product is no longer known where a negation stands for
it (`inline.drop_uniform`). An operation that replaces another one takes its number over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxlib.mlir import ir

from flax_spmd._src.mlir.functions import WITH_BLOCKS

_EQUAL = 'equal'  # the attribute
_KEPT_APART = (  # of which XLA computes each
  'chlo.scan',
  *(f'stablehlo.{kind}' for kind in ('optimization_barrier', 'custom_call', 'rng', 'case', 'if')),
)


def number_equal(main: Any) -> None:
  """Numbers the operations of a function, in an attribute; those without one are equal to no other."""
  _Numbering().block(main.regions[0].blocks[0], -1)


def take_number(op: Any, replaced: Any | None) -> None:
  """Gives an operation the number of the one that it replaces; removes its own if there is none."""
  if replaced is not None and _EQUAL in replaced.attributes:
    op.attributes[_EQUAL] = replaced.attributes[_EQUAL]
  elif _EQUAL in op.attributes:
    del op.attributes[_EQUAL]


def pop_number(op: Any) -> int | None:
  """The number of an operation, which loses it; None if it is equal to no other."""
  if _EQUAL not in op.attributes:
    return None
  number = ir.IntegerAttr(op.attributes[_EQUAL]).value
  del op.attributes[_EQUAL]
  return number


class _Numbering:
  def __init__(self) -> None:
    self._numbers: dict[tuple, int] = {}
    self._values: dict[Any, tuple[int, int]] = {}  # equal for equal values
    self._type = ir.IntegerType.get_signless(64)

  def block(self, block: Any, start: int, is_marked: bool = True) -> tuple[int, ...]:
    """The numbers of a block's operations.

    Args:
      block: the block.
      start: a number; equal for blocks whose arguments are equal.
      is_marked: whether the operations are given their numbers.
    """
    self._values |= {value: (start, position) for position, value in enumerate(block.arguments)}
    return tuple(self._op(view.operation, is_marked) for view in block.operations)

  def _op(self, op: Any, is_marked: bool) -> int:
    about = op.name, tuple(self._values[value] for value in op.operands), _attributes(op)
    has_blocks = op.name.partition('.')[2] in WITH_BLOCKS
    inside = tuple(
      self.block(block, self._number((*about, region)), is_marked and has_blocks)
      for region, each in enumerate(op.regions)
      for block in each.blocks
    )
    is_apart = op.name in _KEPT_APART
    number = self._number((op,) if is_apart else (*about, tuple(_types(op)), inside))
    self._values |= {value: (number, position) for position, value in enumerate(op.results)}
    if is_marked and not is_apart:
      op.attributes[_EQUAL] = ir.IntegerAttr.get(self._type, number)
    return number

  def _number(self, about: tuple) -> int:
    return self._numbers.setdefault(about, len(self._numbers))


def _attributes(op: Any) -> tuple[Any, ...]:
  """The attributes of an operation; its text, if the bindings do not have them, such as complex constants."""
  try:
    return tuple((name, op.attributes[name]) for name in op.attributes)
  except TypeError:
    return (str(op),)


def _types(op: Any) -> Iterator[Any]:
  return (result.type for result in op.results)
