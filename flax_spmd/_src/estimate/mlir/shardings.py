"""Shardings: Shardy's attributes, as mesh axes per dimension, read and written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from flax_spmd._src.estimate.graph import Axes, Dims
from flax_spmd._src.estimate.mlir.read_graph import walk

# Axes per dimension as they are asked for; None where a dimension is open.
Wanted: TypeAlias = Sequence[Axes | None]


class Named(NamedTuple):
  """A sharding of the lowered step: the name of each dimension (or None), and whether it is closed."""

  names: tuple[str | None, ...]
  closed: tuple[bool, ...]


# What a sharding by names means for an array of a shape; None for nothing.
Asked: TypeAlias = Callable[[Named, tuple[int, ...]], Wanted | None]


class Slot(NamedTuple):
  """Where a sharding stands in the module: at which operation, as which attribute, of what."""

  op: int
  attribute: str
  shardings: tuple[tuple[Named, tuple[int, ...]], ...]
  per_value: bool


class Reading(dict[Any, tuple[Dims, ...]]):
  """The shardings of attributes, each of which is read once."""

  def of(self, attribute: Any) -> tuple[Dims, ...]:
    """The sharding of a value, or of each of several."""
    if attribute not in self:
      try:
        listed = sdy.TensorShardingPerValueAttr(attribute).shardings
      except ValueError:
        listed = [attribute]
      self[attribute] = tuple(map(_dims, listed))
    return self[attribute]


def _dims(attribute: Any) -> Dims:
  sharding = sdy.TensorShardingAttr(attribute)
  return tuple(
    tuple(_axis(axis) for axis in sdy.DimensionShardingAttr(dimension).axes)
    for dimension in sharding.dimension_shardings
  )


def _axis(attribute: Any) -> str:
  axis = sdy.AxisRefAttr(attribute)
  if axis.sub_axis_info is None:
    return axis.name
  part = sdy.SubAxisInfoAttr(axis.sub_axis_info)
  return f'{axis.name}[{part.size}/{part.pre_size * part.size}]'


def slots_of(main: Any) -> Iterator[Slot]:
  """Where shardings by names stand."""
  for number, op in enumerate(walk(main)):
    for name in ('sdy.sharding', 'sharding'):
      if name in op.attributes:
        attribute = op.attributes[name]
        try:
          listed, per_value = sdy.TensorShardingPerValueAttr(attribute).shardings, True
        except ValueError:
          listed, per_value = [attribute], False
        shapes = [tuple(ir.RankedTensorType(value.type).shape) for value in op.results]
        yield Slot(number, name, tuple(zip(map(_named, listed), shapes)), per_value)


def _named(attribute: Any) -> Named:
  listed = sdy.TensorShardingAttr(attribute).dimension_shardings
  dimensions = [sdy.DimensionShardingAttr(dimension) for dimension in listed]
  names = (next((_axis(axis) for axis in one.axes), None) for one in dimensions)
  return Named(tuple(names), tuple(one.is_closed for one in dimensions))


def attribute(slot: Slot, asked: Asked, parameters: frozenset[str]) -> Any:
  """What stands at a slot under a layout; that of parameters is propagated later."""
  texts = [
    _text(asked(named, shape), named, len(shape), parameters.issuperset(filter(None, named.names)))
    for named, shape in slot.shardings
  ]
  inner = ', '.join(f'<@mesh, [{text}]>' for text in texts)
  kind = f'#sdy.sharding_per_value<[{inner}]>' if slot.per_value else f'#sdy.sharding{inner}'
  return ir.Attribute.parse(kind)


def _text(wanted: Wanted | None, named: Named, rank: int, later: bool) -> str:
  if wanted is None:
    return ', '.join(['{?}'] * rank)
  return ', '.join(
    '{?}' if axes is None else braced(axes, closed, later) for axes, closed in zip(wanted, named.closed)
  )


def braced(axes: Axes, closed: bool = True, later: bool = True) -> str:
  """A dimension's axes as Shardy writes them: `{"data", ?}p1`."""
  listed = ', '.join([*(f'"{axis}"' for axis in axes), *([] if closed else ['?'])])
  return f'{{{listed}}}' + ('p1' if axes and later else '')
