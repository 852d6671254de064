"""Reused axes: products that XLA may compute wrongly where the result is sharded over an axis that is summed over.

    y = x @ kernel                                             # kernel: ('mlp', 'embed') over 'tensor', 'fsdp'
    y = with_logical_constraint(y, ('batch', 'act_embed'))     # over ('data', 'fsdp'), and over 'tensor' again

XLA's partitioner handles the rest of the product on the devices of one part of the sum. If another dimension of the result
is over several axes, it loses their order: devices hold the rows of others, with plain `jax.jit` too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from flax_spmd._src import compat
from flax_spmd._src.mesh import axis_sizes
from flax_spmd._src.source_lines import UNKNOWN_LINE, line_of_location

REUSED_AXES = (
  'XLA may return the rows of other devices for these products, of which one dimension of the result is '
  'sharded over an axis that is summed over, and another over several axes'
)
SUM_FIRST = (
  'constrain the result of the product twice, first without that axis: '
  'y = with_logical_constraint(y, (batch name, None)), and then as it is.'
)


def reused_axes(products: Iterable[compat.PropagatedProduct]) -> list[str]:
  """The products of lowered programs that XLA may compute wrongly, a line for each."""
  return list(dict.fromkeys(_line(each) for each in products if _is_affected(each)))


def has_products(jaxpr: Any, mesh: Any) -> bool:
  """Whether results of a program need products, unlike those of a model's `init`, and its mesh has three axes or more."""
  axes = sum(size > 1 for size in axis_sizes(mesh).values())
  return axes > 2 and compat.needs_primitive(jaxpr, 'dot_general')


def _line(product: compat.PropagatedProduct) -> str:
  """The shape, the sharding and the source line of a product."""
  shape, axes, _ = product.result
  summed = _reused(product)
  sharded = ', '.join(
    f'dim {dim} over {" x ".join(map(repr, each))}' + ' again' * summed.issuperset(each)
    for dim, each in enumerate(axes)
    if each
  )
  return f'{shape} with {sharded} at {line_of_location(product.location) or UNKNOWN_LINE}'


def _reused(product: compat.PropagatedProduct) -> set[str]:
  """The mesh axes of a product's sum."""
  pairs = ((product.left.axes[left], product.right.axes[right]) for left, right in product.summed)
  return {axis for left, right in pairs for axis in left if axis in right}


def _is_affected(product: compat.PropagatedProduct) -> bool:
  """Whether XLA's result is doubtful.

  A dimension over several axes is safe if its operand is sharded alike and stays where it is: the other operand uses
  none of these axes, or XLA moves that one, as its shard is smaller. Of 631 random products that were drawn towards this
  case XLA computed 130 wrongly; the rule finds all of these, and 213 others. Of 4,000 with several sums, and with shardings
  drawn independently over three axes, XLA computed 35 wrongly, of which the rule finds 13, and 87 others. Most of the rest
  sum over dimensions that the operands shard over different axes. No rule is known for them that spares sound layouts.
  """
  summed = _reused(product)
  if not any(axes and summed.issuperset(axes) for axes in product.result.axes):
    return False
  return any(
    len(axes) > 1 and summed.isdisjoint(axes) and not _is_kept(product, dim)
    for dim, axes in enumerate(product.result.axes)
  )


def _is_kept(product: compat.PropagatedProduct, dim: int) -> bool:
  """Whether a dimension of the result is sharded as that of its operand, which stays where it is."""
  axes, operands, sources = product.result.axes[dim], (product.left, product.right), product.sources[dim]
  if any(at is not None and each.axes[at] != axes for each, at in zip(operands, sources, strict=True)):
    return False
  if None not in sources:
    return True
  own, other = operands if sources[0] is not None else operands[::-1]
  used = {axis for each in other.axes for axis in each}
  return used.isdisjoint(axes) or _shard_size(own) > _shard_size(other)


def _shard_size(array: compat.ProductArray) -> float:
  return math.prod(array.shape) / math.prod(array.shards)
