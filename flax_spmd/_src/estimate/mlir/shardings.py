"""Shardy attributes: read as mesh axes per dimension, and written from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from flax_spmd._src.estimate.graph import Axes, Spec
from flax_spmd._src.mlir.functions import walk

# Mesh axes per dimension, as a constraint demands them; None leaves a dimension open.
ConstraintSpec: TypeAlias = Sequence[Axes | None]


class LogicalSharding(NamedTuple):
  """A sharding in the lowered step: the logical name (or None) of each dimension, and whether it is closed."""

  names: tuple[str | None, ...]
  closed: tuple[bool, ...]


# A logical sharding, and the shape of its array.
Constraint: TypeAlias = tuple[LogicalSharding, tuple[int, ...]]

# Resolves a logical sharding of an array of a shape; None constrains nothing.
Resolve: TypeAlias = Callable[[LogicalSharding, tuple[int, ...]], ConstraintSpec | None]


class ShardingSlot(NamedTuple):
  """A position of a logical sharding in the module.

  Attributes:
    op: index of the operation, in the order of `walk`.
    attribute: name of the attribute.
    shardings: logical sharding and shape of each result.
    per_value: whether the attribute has one sharding per result.
  """

  op: int
  attribute: str
  shardings: tuple[Constraint, ...]
  per_value: bool


class SpecReader:
  """Reads sharding attributes; equal attributes are read once."""

  def __init__(self):
    self._specs: dict[Any, tuple[Spec, ...]] = {}

  def read(self, attribute: Any) -> tuple[Spec, ...]:
    """The shardings in an attribute: one, or one per value."""
    if attribute not in self._specs:
      self._specs[attribute] = tuple(map(_spec, _listed(attribute)[0]))
    return self._specs[attribute]


def _listed(attribute: Any) -> tuple[Sequence[Any], bool]:
  """The shardings in an attribute, and whether it has one per value."""
  try:
    return sdy.TensorShardingPerValueAttr(attribute).shardings, True
  except ValueError:
    return [attribute], False


def _spec(attribute: Any) -> Spec:
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


def slots_of(main: Any) -> Iterator[ShardingSlot]:
  """The positions of all logical shardings in a function."""
  for index, op in enumerate(walk(main)):
    for name in ('sdy.sharding', 'sharding'):
      if name in op.attributes:
        listed, per_value = _listed(op.attributes[name])
        shapes = [tuple(ir.RankedTensorType(value.type).shape) for value in op.results]
        yield ShardingSlot(index, name, tuple(zip(map(_logical, listed), shapes)), per_value)


def _logical(attribute: Any) -> LogicalSharding:
  listed = sdy.TensorShardingAttr(attribute).dimension_shardings
  dimensions = [sdy.DimensionShardingAttr(dimension) for dimension in listed]
  names = (next((_axis(axis) for axis in one.axes), None) for one in dimensions)
  return LogicalSharding(tuple(names), tuple(one.is_closed for one in dimensions))


def attribute(slot: ShardingSlot, resolve: Resolve) -> Any:
  """The attribute of a slot under a layout."""
  texts = [_text(resolve(logical, shape), logical, len(shape)) for logical, shape in slot.shardings]
  inner = ', '.join(f'<@mesh, [{text}]>' for text in texts)
  kind = f'#sdy.sharding_per_value<[{inner}]>' if slot.per_value else f'#sdy.sharding{inner}'
  return ir.Attribute.parse(kind)


def _text(spec: ConstraintSpec | None, logical: LogicalSharding, rank: int) -> str:
  if spec is None:
    return ', '.join(['{?}'] * rank)
  return ', '.join(
    '{?}' if axes is None else dimension_text(axes, closed) for axes, closed in zip(spec, logical.closed)
  )


def dimension_text(axes: Axes, closed: bool = True) -> str:
  """The sharding of a dimension in Shardy's syntax, such as `{"data", ?}`; `"data":(2)4` is a part of an axis."""
  listed = ', '.join([*map(_axis_text, axes), *([] if closed else ['?'])])
  return f'{{{listed}}}'


def _axis_text(axis: str) -> str:
  name, _, part = axis.partition('[')
  if not part:
    return f'"{name}"'
  size, whole = map(int, part.rstrip(']').split('/'))
  return f'"{name}":({whole // size}){size}'
