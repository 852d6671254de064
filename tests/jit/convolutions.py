"""Convolutions in NHWC for tests of what XLA computes wrongly: with groups, and as programs with their gradients."""

import jax
import jax.numpy as jnp
import numpy as np


def convolved(images, kernel, stride, groups=1):
  order = ('NHWC', 'HWIO', 'NHWC')
  strides = (stride, stride)
  return jax.lax.conv_general_dilated(
    images, kernel, strides, 'SAME', dimension_numbers=order, feature_group_count=groups
  )


def program_of(kind, images_shape, kernel_shape, stride, groups, numbers):
  """A convolution ('result'), or its gradient to the 'kernel' or to the 'images', and its two arguments, unsharded."""
  images, kernel = jnp.zeros(images_shape), jnp.zeros(kernel_shape)

  def of_result(images, kernel):
    return convolved(images, kernel, stride, groups)

  def of_images(kernel, result):
    return jax.vjp(lambda images: of_result(images, kernel), images)[1](result)[0]

  def of_kernel(images, result):
    return jax.vjp(lambda kernel: of_result(images, kernel), kernel)[1](result)[0]

  result = jax.eval_shape(of_result, images, kernel)
  program, args = {
    'result': (of_result, (images, kernel)),
    'kernel': (of_kernel, (images, result)),
    'images': (of_images, (kernel, result)),
  }[kind]
  return program, [numbers.integers(-3, 4, each.shape).astype(np.float32) for each in args]
