"""Grouped kernels: convolutions of several groups that XLA may compute wrongly as they are sharded.

    x = nn.Conv(64, (3,), feature_group_count=64)(x)   # the batch over 'data', on a mesh with another axis

XLA's partitioner adds up the gradient of the kernel over all devices, copies included, so it is a multiple of its value,
with plain `jax.jit` too. An optimizer such as Adam hides the factor. Features that are sharded too, so that no device has
a copy, are safe.

    jax.vmap(jax.grad(loss), (None, 0))(kernel, images)    # a gradient for each example

The gradient of a kernel by example is a depthwise convolution: each example is a group, of one input feature. XLA shards
its result as its input, dimension by dimension. Where the features are another dimension of the result than of the input,
as in NHWC, the values are wrong. So they are with groups of several features, where the window is of size 1 or covers the
whole input, as with the kernel of a 1 x 1 convolution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from flax_spmd._src import compat
from flax_spmd._src.source_lines import UNKNOWN_LINE, line_of_location

GROUPED_SUMS = (
  'XLA may return multiples of the right values for these gradients of grouped kernels, which are summed over a part '
  'of the mesh'
)
COVER_THE_MESH = (
  'shard the batch over all axes of the mesh, or the features over the remaining ones, by '
  'with_logical_constraint(x, (batch name, *[None] * spatial dimensions, feature name)) for the input and the '
  'result of the layer.'
)
SHARDED_GROUPS = 'XLA may return wrong values for these grouped convolutions, or end the process, as their features are sharded'
KEEP_GROUPS = (
  'keep the features whole, by with_logical_constraint(x, (batch name, *[None] * (spatial dimensions + 1))) for the '
  'input and the result of the layer, and its kernel replicated.'
)
MOVED_GROUPS = (
  'XLA may return wrong values for these grouped convolutions, whose sharded features are another dimension of the result '
  'than of the input, such as gradients of kernels by example, jax.vmap(jax.grad(...))'
)
COMPUTE_BY_DEVICE = (
  "compute them inside jax.shard_map(..., check_vma=False) over the batch's mesh axes, or with features before the "
  'spatial dimensions (NCHW).'
)


def has_groups(jaxpr: Any) -> bool:
  """Whether results of a program need convolutions of several groups."""
  return compat.needs_primitive(jaxpr, 'conv_general_dilated', _is_grouped)


def _is_grouped(equation: Any) -> bool:
  return max(equation.params['feature_group_count'], equation.params['batch_group_count']) > 1


def grouped_sums(convolutions: Iterable[compat.Convolution], devices: int) -> list[str]:
  """The gradients of grouped kernels to which XLA may add copies, a line for each.

  Args:
    convolutions: those of lowered programs.
    devices: number of devices of the mesh, or of a stage.
  """
  found = (each for each in convolutions if _adds_copies(each, devices))
  return list(
    dict.fromkeys(_line(each, each.input, (each.input.feature, *each.input.spatial)) for each in found)
  )


def sharded_groups(convolutions: Iterable[compat.Convolution]) -> list[str]:
  """The grouped convolutions whose features are sharded as XLA does not handle, a line for each."""
  found = (each for each in convolutions if _splits_groups(each))
  return list(dict.fromkeys(_line(each, *_features(each)) for each in found))


def moved_groups(convolutions: Iterable[compat.Convolution]) -> list[str]:
  """The grouped convolutions whose sharded features are elsewhere in the result, a line for each."""
  found = (each for each in convolutions if _moves_groups(each))
  return list(dict.fromkeys(_line(each, *_features(each)) for each in found))


def _features(convolution: compat.Convolution) -> tuple[compat.ConvolutionArray, tuple[int, ...]]:
  """The first array of a convolution whose groups are sharded, and their dimension."""
  _, images, kernel, result, *_ = convolution
  of_images = images.other if convolution.batch_groups > 1 else images.feature
  dims = ((result, result.feature), (kernel, kernel.other), (images, of_images))
  array, dim = next(each for each in dims if each[0].shards[each[1]] > 1)
  return array, (dim,)


def _adds_copies(convolution: compat.Convolution, devices: int) -> bool:
  """Whether XLA may add up copies of a kernel's gradient.

  This rule, that of `_splits_groups`, and that of `sharded_windows` find all of the 63 that XLA computed wrongly of 452
  random grouped convolutions.
  """
  images, gradient = convolution.input, convolution.kernel
  summed, of_sum = _summed(images), _summed(gradient)
  features, of_features = images.shards[images.other], gradient.shards[gradient.other]
  if convolution.batch_groups == 1 or summed == 1:
    return False
  has_copies = math.prod(images.shards) < devices or of_features < features
  return has_copies and (of_sum > 1 or of_features > features)


def _splits_groups(convolution: compat.Convolution) -> bool:
  """Whether XLA may take the features of other groups, or end the process with a failed check.

  It does the first where the convolution is a product at each position, and the second in gradients of kernels whose
  groups have fewer parts than the features.
  """
  _, images, kernel, result, *_ = convolution
  groups = _groups(convolution)
  if groups == 1 or (convolution.batch_groups == 1 and images.feature != result.feature):
    return False  # without groups, or one for `_moves_groups`
  if convolution.batch_groups > 1 and any(groups % each.shards[each.other] for each in (images, kernel)):
    return True
  return _is_product(convolution) and result.shards[result.feature] > 1


def _moves_groups(convolution: compat.Convolution) -> bool:
  """Whether XLA may shard the groups of a result by a dimension of its input.

  Of 387 random grouped convolutions and gradients by example, this rule names the 16 that XLA computed wrongly and the
  other rules did not name, and 36 right ones.
  """
  _, images, kernel, result, *_ = convolution
  if convolution.feature_groups == 1 or images.feature == result.feature:
    return False
  is_depthwise = kernel.shape[kernel.feature] == 1
  is_sharded = (
    images.shards[images.feature] > 1
    or max(result.shards[result.feature], kernel.shards[kernel.other]) > 1
  )
  return is_sharded and (is_depthwise or _is_product(convolution))


def _is_product(convolution: compat.Convolution) -> bool:
  """Whether each position of a result is a product: of one position of the kernel, or with the whole of it."""
  _, _, kernel, result, *_ = convolution
  spatial = zip(kernel.spatial, result.spatial, strict=True)
  return all(1 in (kernel.shape[over], result.shape[to]) for over, to in spatial)


def _groups(convolution: compat.Convolution) -> int:
  return max(convolution.feature_groups, convolution.batch_groups)


def _summed(array: compat.ConvolutionArray) -> int:
  """The number of shards over the dimensions that are summed over, in a gradient of a kernel."""
  return math.prod(array.shards[dim] for dim in (array.feature, *array.spatial))


def _line(convolution: compat.Convolution, array: compat.ConvolutionArray, dims: tuple[int, ...]) -> str:
  """The groups, the shape and the sharding of an array of a convolution, and its source line."""
  line = line_of_location(convolution.location) or UNKNOWN_LINE
  sharded = (dim for dim in dims if array.shards[dim] > 1)
  axes = ', '.join(f'dim {dim} over {" x ".join(map(repr, array.axes[dim]))}' for dim in sharded)
  return f'{_groups(convolution)} groups, {array.shape}{f" with {axes}" if axes else ""} at {line}'
