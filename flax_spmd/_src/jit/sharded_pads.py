"""Sharded pads: paddings that XLA may compute wrongly where only the result is sharded.

    loss = jnp.sum(with_logical_constraint(x[:, ::2], ('batch', None, 'embed')) * weights)     # x: 'seq' over an axis

The gradient of a strided slice has padding between its elements, and that of a padding, or of a shift by one, removes some
at an end. Where the operand is whole along the dimension, and the result is sharded, XLA's partitioner makes shards of a
wrong size or at a wrong place, with plain `jax.jit` too. Some such programs do not compile; the values of others are wrong.
So are gradients of `jax.lax.associative_scan` over a sharded dimension, if the result is constrained to be whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flax_spmd._src import compat
from flax_spmd._src.source_lines import UNKNOWN_LINE, line_of_location

SHARDED_PADS = (
  'XLA may return wrong values for these paddings, or fail with other shapes: they are between elements or remove some, and the '
  'result alone is sharded, as in gradients of x[:, ::2], of jnp.pad and of associative scans'
)
SHARD_ALIKE = 'shard operand and result alike: constrain the result of the slice, the padding or the scan with the names of its array.'


def has_pads(jaxpr: Any) -> bool:
  """Whether results of a program need paddings between elements, or such that remove some."""
  return compat.needs_primitive(
    jaxpr,
    'pad',
    lambda equation: any(
      low < 0 or high < 0 or interior for low, high, interior in equation.params['padding_config']
    ),
  )


def sharded_pads(pads: Iterable[compat.PropagatedPad]) -> list[str]:
  """The paddings of lowered programs that XLA may compute wrongly, a line for each."""
  lines = ((pad, _dims(pad)) for pad in pads)
  return list(dict.fromkeys(_line(pad, dims) for pad, dims in lines if dims))


def _dims(pad: compat.PropagatedPad) -> list[int]:
  """The dimensions that are padded so, and sharded in the result alone.

  XLA moves an axis that shards another dimension of the operand. Of 1,150 random paddings, this rule names all that XLA
  computed wrongly (90) or failed on (112), and 100 right ones, nearly all of which remove elements.
  """
  used = {axis for axes in pad.operand.axes for axis in axes}
  return [
    dim
    for dim, axes in enumerate(pad.result.axes)
    if pad.interior[dim] or min(pad.low[dim], pad.high[dim]) < 0
    if axes and pad.operand.shards[dim] == 1 and used.isdisjoint(axes)
  ]


def _line(pad: compat.PropagatedPad, dims: list[int]) -> str:
  """The shapes, the sharding and the source line of a padding."""
  axes = ', '.join(f'dim {dim} over {" x ".join(map(repr, pad.result.axes[dim]))}' for dim in dims)
  line = line_of_location(pad.location) or UNKNOWN_LINE
  return f'{pad.operand.shape} to {pad.result.shape} with {axes} at {line}'
