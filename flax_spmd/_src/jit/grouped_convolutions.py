"""Grouped convolutions: those that XLA computes wrongly where it shards their groups.

    jax.vmap(jax.grad(loss), (None, 0))(kernel, images)    # a gradient for each example

The gradient of a kernel by example is a depthwise convolution: each example is a group, of one input feature. XLA's
partitioner shards its result as its operand, dimension by dimension. Where the features are another dimension of the
result than of the operand, as in NHWC, the values are wrong, with plain `jax.jit` too. So they have been with groups of
several features, where the window is of size 1 or covers the whole input, as with the kernel of a 1 x 1 convolution.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flax_spmd._src import compat
from flax_spmd._src.mesh import MeshLike, axis_sizes
from flax_spmd._src.source_lines import source_line, warn


def warn_of_grouped_convolutions(name: str, jaxpr: Any, mesh: MeshLike, reported: set[str]) -> None:
  """Warns once of the convolutions of a program that XLA computes wrongly if it shards their groups.

  Args:
    name: the function.
    jaxpr: its program; programs inside it are looked into, blocks of `shard_map` are not: they are not partitioned.
    mesh: the mesh of the layout.
    reported: the kinds of warnings already issued.

  Warns:
    UserWarning: lists every such convolution, with a fix.
  """
  lines = [] if 'convolutions' in reported else list(dict.fromkeys(_texts(jaxpr, mesh)))
  if lines:
    reported.add('convolutions')
    warn(
      f'{name}: XLA returns wrong values for these convolutions where it shards their groups over devices:\n'
      + '\n'.join(lines)
      + '\nGradients of kernels by example, jax.vmap(jax.grad(...)), are such convolutions.\n'
      "Fix: compute them inside jax.shard_map(..., check_vma=False) over the batch's mesh axes, or with features "
      'before the spatial dimensions (NCHW).'
    )


def _texts(jaxpr: Any, mesh: MeshLike) -> Iterator[str]:
  """The lines of the warning."""
  for equation in compat.equations_in(jaxpr, lambda one: one.primitive.name != 'shard_map'):
    if equation.primitive.name == 'conv_general_dilated' and _is_affected(equation, mesh):
      groups = equation.params['feature_group_count']
      yield f'  {groups} groups at {source_line(equation.source_info)}'


def _is_affected(equation: Any, mesh: MeshLike) -> bool:
  """Whether a convolution has its features elsewhere in the result, groups that an axis divides, and is partitioned so.

  It is if it is depthwise, or a product at each position.
  """
  groups, dimensions = (equation.params[key] for key in ('feature_group_count', 'dimension_numbers'))
  if dimensions.lhs_spec[1] == dimensions.out_spec[1]:
    return False
  kernel, result = equation.invars[1].aval.shape, equation.outvars[0].aval.shape
  spatial = zip(dimensions.rhs_spec[2:], dimensions.out_spec[2:])
  is_product = all(kernel[over] == 1 or result[to] == 1 for over, to in spatial)
  if kernel[dimensions.rhs_spec[1]] > 1 and not is_product:
    return False
  return groups > 1 and any(size > 1 and groups % size == 0 for size in axis_sizes(mesh).values())
