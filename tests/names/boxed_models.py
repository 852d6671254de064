"""Boxes, models with boxed parameters, and short forms of `init`, `apply` and `grad` for the tests beside this file."""

import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import flax_spmd as spmd

KEY = jax.random.key(0)
X = jnp.linspace(0.0, 1.0, 16).reshape(2, 8)
RULES = (('embed', None), ('mlp', 'model'), ('heads', 'model'), ('kv', None), ('layers', None))


NORMAL = nn.initializers.normal()
LAYERS = {nn.PARTITION_NAME: 'layers'}


def named(names, init=NORMAL, lib=spmd, **options):
  return lib.with_logical_partitioning(init, names, **options)


def box(names=('embed', 'mlp'), shape=(8, 16), cls=spmd.LogicallyPartitioned, **options):
  return cls(jnp.asarray(np.arange(np.prod(shape), dtype=np.float32).reshape(shape)), names, **options)


def names_of(tree):
  """A tree with the names of each box in its place, and None for a bare leaf."""
  return jax.tree.map(
    lambda leaf: leaf.names if spmd.is_axis_metadata(leaf) else None, tree, is_leaf=spmd.is_axis_metadata
  )


def assert_same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def init(model, *args):
  """`model.init`, in one compilation."""
  return jax.jit(model.init)(KEY, *args)


def abstract(model, *args):
  """`model.init`, without running it."""
  return jax.eval_shape(model.init, KEY, *args)


def apply(model, variables, *args, **options):
  return jax.jit(lambda variables, *args: model.apply(variables, *args, **options))(variables, *args)


def gradients(model, variables, *args):
  """Gradients of the sum of the model's output, abstract."""
  return jax.eval_shape(
    jax.grad(lambda v: jnp.sum(jax.tree.leaves(model.apply(v, *args))[0])), variables
  )


class Block(nn.Module):
  """One square layer for `nn.scan`; `lib` provides the boxes."""

  lib: types.ModuleType = spmd

  @nn.compact
  def __call__(self, x, _=None):
    w = self.param('w', named(('embed', 'mlp'), lib=self.lib), (x.shape[-1], x.shape[-1]))
    return jnp.tanh(x @ w), None


class Stack(nn.Module):
  """Three blocks, scanned over `axis` under the name `layer`."""

  axis: int = 0
  layer: str | None = 'layers'
  lib: types.ModuleType = spmd

  @nn.compact
  def __call__(self, x):
    scanned = nn.scan(
      Block,
      variable_axes={'params': self.axis},
      split_rngs={'params': True},
      length=3,
      metadata_params={} if self.layer is None else {nn.PARTITION_NAME: self.layer},
    )
    return scanned(self.lib, name='blocks')(x, None)[0]
