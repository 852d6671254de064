"""Sharded windows: convolutions that XLA may compute wrongly where a spatial dimension is sharded over a part of the mesh.

    tokens = patches(images).reshape(batch, height * width, embed)      # a ViT's
    tokens = with_logical_constraint(tokens, ('batch', 'seq', 'embed'))  # 'seq' over one of two mesh axes

XLA's partitioner adds up the results of all devices, copies included, so a kernel's gradient is a multiple of its value,
with plain `jax.jit` too. It does so in about a third of random such convolutions. An operand that is sharded over the
whole mesh is safe, so a mesh of one axis is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from flax_spmd._src import compat
from flax_spmd._src.mesh import axis_sizes
from flax_spmd._src.source_lines import UNKNOWN_LINE, line_of_location

SHARDED_WINDOWS = (
  'XLA may return multiples of the right values for these convolutions, of which a spatial dimension '
  'is sharded and arrays are in several copies'
)
KEEP_WHOLE = (
  'keep the spatial dimensions whole, by '
  'with_logical_constraint(x, (batch name, *[None] * spatial dimensions, feature name)) for the input and the '
  'result of the layer; or shard batch and spatial dimensions over all axes of the mesh.'
)


def sharded_windows(convolutions: Iterable[compat.Convolution], devices: int) -> list[str]:
  """The convolutions of lowered programs that XLA may compute wrongly, a line for each of their arrays that is sharded so.

  Args:
    convolutions: those of the programs.
    devices: number of devices of the mesh, or of a stage.
  """
  return list(dict.fromkeys(line for each in convolutions for line in _lines(each, devices)))


def has_windows(jaxpr: Any, mesh: Any) -> bool:
  """Whether results of a program need convolutions, unlike those of a model's `init`, and its mesh has several axes."""
  axes = sum(size > 1 for size in axis_sizes(mesh).values())
  return axes > 1 and compat.needs_primitive(jaxpr, 'conv_general_dilated')


def _lines(convolution: compat.Convolution, devices: int) -> Iterator[str]:
  """The shape, the sharding and the source line of each array of a convolution that is sharded so."""
  for array in _affected(convolution, devices):
    line = line_of_location(convolution.location) or UNKNOWN_LINE
    sharded = (dim for dim in array.spatial if array.shards[dim] > 1)
    axes = ', '.join(f'dim {dim} over {" x ".join(map(repr, array.axes[dim]))}' for dim in sharded)
    yield f'{array.shape} with {axes} at {line}'


def _affected(convolution: compat.Convolution, devices: int) -> list[compat.ConvolutionArray]:
  """The arrays of a convolution whose spatial dimensions are sharded so that XLA's result is doubtful.

  XLA handles two cases: a kernel that moves over positions (a layer, or the gradient of its input), and a sum over
  positions (the gradient of a kernel). Convolutions of one position without strides are products, which are safe. Of
  the others, those are safe whose two large arrays are sharded alike, and over all devices: then no device adds up a
  copy. The rule follows from 1,332 random convolutions, of which XLA computed 165 wrongly; it finds all of these.
  """
  first, second, result = convolution[1:4]
  sharded = [
    each for each in convolution[1:4] if math.prod(each.shards[dim] for dim in each.spatial) > 1
  ]
  if _positions(second) < _positions(result):
    is_product = _positions(second) == 1 and _sizes(first) == _sizes(result)
    is_aligned = _axes(first) == _axes(result) and second not in sharded
    counted = {id(first): math.prod(first.shards)}
  else:  # a sum over positions, such as the gradient of a kernel
    summed = [(each.feature, *each.spatial) for each in (first, second)]
    is_whole = _sizes(first) == _sizes(second) and not (first in sharded and second in sharded)
    is_product = _positions(result) == 1 and is_whole
    is_aligned = _axes(first, first.feature) == _axes(second, second.feature) and result not in sharded
    counted = {
      id(each): math.prod(each.shards[dim] for dim in dims)
      for each, dims in zip((first, second), summed)
    }
  if is_product:
    return []
  return [each for each in sharded if not is_aligned or counted.get(id(each), devices) < devices]


def _sizes(array: compat.ConvolutionArray) -> list[int]:
  return [array.shape[dim] for dim in array.spatial]


def _positions(array: compat.ConvolutionArray) -> int:
  return math.prod(_sizes(array))


def _axes(array: compat.ConvolutionArray, *more: int) -> list[tuple[str, ...]]:
  """The mesh axes of the spatial dimensions, and of others."""
  return [array.axes[dim] for dim in (*array.spatial, *more)]
