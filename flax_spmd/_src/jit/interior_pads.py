"""Interior pads: paddings between elements that XLA computes wrongly where only the result is sharded.

    loss = jnp.sum(with_logical_constraint(x[:, ::2], ('batch', None, 'embed')) * weights)     # x: 'seq' over an axis

The gradient of a strided slice is such a padding. Where the slice is whole, and `x` is sharded along the dimension, XLA's
partitioner makes shards of a wrong size, with plain `jax.jit` too. Most such programs do not compile; if the sizes happen to
agree, the values are wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flax_spmd._src import compat
from flax_spmd._src.source_lines import UNKNOWN_LINE, line_of_location

INTERIOR_PADS = (
  'XLA returns wrong values for these paddings between elements, or fails with other shapes, as the result alone is sharded; '
  'the gradient of a strided slice, x[:, ::2], is one'
)
SHARD_ALIKE = (
  'constrain the slice with the names of the sliced array, or slice by a reshape: '
  'x.reshape(batch, length // 2, 2, embed)[:, :, 0].'
)


def has_interior_pads(jaxpr: Any) -> bool:
  """Whether results of a program need paddings between elements."""
  return compat.needs_primitive(
    jaxpr, 'pad', lambda equation: any(each[2] for each in equation.params['padding_config'])
  )


def interior_pads(pads: Iterable[compat.PropagatedPad]) -> list[str]:
  """The paddings of lowered programs that XLA computes wrongly, a line for each."""
  lines = ((pad, _dims(pad)) for pad in pads)
  return list(dict.fromkeys(_line(pad, dims) for pad, dims in lines if dims))


def _dims(pad: compat.PropagatedPad) -> list[int]:
  """The dimensions that are padded between elements, and sharded in the result alone.

  XLA moves an axis that shards another dimension of the operand. Of 800 random paddings, this rule names 115, of which XLA
  computed 39 wrongly and failed on 74; the others were right.
  """
  used = {axis for axes in pad.operand.axes for axis in axes}
  return [
    dim
    for dim, (between, axes) in enumerate(zip(pad.interior, pad.result.axes, strict=True))
    if between and axes and pad.operand.shards[dim] == 1 and used.isdisjoint(axes)
  ]


def _line(pad: compat.PropagatedPad, dims: list[int]) -> str:
  """The shapes, the sharding and the source line of a padding."""
  axes = ', '.join(f'dim {dim} over {" x ".join(map(repr, pad.result.axes[dim]))}' for dim in dims)
  line = line_of_location(pad.location) or UNKNOWN_LINE
  return f'{pad.operand.shape} to {pad.result.shape} with {axes} at {line}'
