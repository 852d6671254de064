"""Activations: the memory of a block of two products, by the function between them, for `search.py --only activations`.

Six layers `x + f(norm(x) @ up) @ down`, under data parallelism. Which results of `f` a compiler stores for the backward
pass depends on their cost, and decides most of the memory.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from harness import Figure, at_most, exact

import flax_spmd as spmd
from flax_spmd.explore import Estimator, TrainStep, compare, parse_target

TARGET = 'h100:8'
LAYERS, ROWS, WIDTH = 6, 65536, 512
LAYOUT = spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'),))


class Activation(NamedTuple):
  """A function between the products, with a bias before it or not, and the share that a dropout keeps after it."""

  name: str
  function: Callable[[jax.Array], jax.Array]
  bias: bool = False
  kept: float = 1.0


ACTIVATIONS = (
  Activation('relu', jax.nn.relu),
  Activation('relu, bias', jax.nn.relu, bias=True),
  Activation('relu, dropout', jax.nn.relu, kept=0.9),
  Activation('relu squared', lambda x: jax.nn.relu(x) ** 2),
  Activation('leaky relu', jax.nn.leaky_relu),
  Activation('gelu', jax.nn.gelu),
  Activation('gelu, dropout', jax.nn.gelu, kept=0.9),
  Activation('exact gelu', functools.partial(jax.nn.gelu, approximate=False)),
  Activation('exact gelu, bias', functools.partial(jax.nn.gelu, approximate=False), bias=True),
  Activation('silu', jax.nn.silu),
  Activation('silu, dropout', jax.nn.silu, kept=0.9),
  Activation('elu', jax.nn.elu),
  Activation('softplus', jax.nn.softplus),
  Activation('mish', jax.nn.mish),
  Activation('sigmoid', jax.nn.sigmoid),
  Activation('x + sin(x)^2', lambda x: x + jnp.sin(x) ** 2),
)


def train_step(activation: Activation, dtype: str) -> TrainStep:
  """A step of SGD, with the products in `dtype`."""

  def create():
    up, down = jnp.ones((WIDTH, 4 * WIDTH)), jnp.ones((4 * WIDTH, WIDTH))
    return [(up, jnp.ones(4 * WIDTH), down) for _ in range(LAYERS)]

  def loss(weights, x):
    for number, (up, bias, down) in enumerate(weights):
      y = x.astype(jnp.float32)
      y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-6)
      y = y.astype(dtype) @ up.astype(dtype)
      y = activation.function(y + bias.astype(dtype) if activation.bias else y)
      if activation.kept < 1:
        key = jax.random.fold_in(jax.random.key(0), number)
        y = jnp.where(jax.random.bernoulli(key, activation.kept, y.shape), y / activation.kept, 0)
      x = x + y @ down.astype(dtype)
    return jnp.sum(x.astype(jnp.float32) ** 2)

  def step(weights, x):
    value, gradients = jax.value_and_grad(loss)(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

  return TrainStep(step, create, jax.ShapeDtypeStruct((ROWS, WIDTH), dtype))


def figures() -> list[Figure]:
  """Errors of the estimated temporaries, in percent of the compiled ones."""
  target, errors = parse_target(TARGET), {}
  for activation in ACTIVATIONS:
    for dtype in ('bfloat16', 'float32'):
      train = train_step(activation, dtype)
      estimated = Estimator(train).estimate(LAYOUT, target).memory.temporaries
      compiled = compare(train, {'data parallel': LAYOUT}, TARGET)['data parallel'].memory.temporaries
      errors[f'{activation.name}, {dtype}'] = 100 * (estimated / compiled - 1)
  worst = max(errors.values(), key=abs)
  return [
    *(exact(f'temporaries: {name}', error, '%') for name, error in errors.items()),
    exact('temporaries: the largest error', abs(worst), '%', at_most(12)),
    exact('temporaries: the furthest below', -min(errors.values()), '%', at_most(12)),
  ]
