"""Random blocks: the memory of layers with norms, biases, dropout and convolutions, for `search.py --only activations`.

Layers `x + down(drop(f(norm(up(norm(x)) + bias)))) + bias`, whose parts are drawn: either norm may be missing, and so
may the biases, the dropouts and the residual. Two thirds are of matrix products, the others of convolutions. Each is
estimated and compiled under data parallelism. An estimate that is not in doubt may deviate by 12 % of the peak.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from activations import ACTIVATIONS, LAYOUT, TARGET
from harness import Figure, at_least, at_most, exact
from reporting import Table
from samples import off

from flax_spmd.explore import Estimator, Outcome, TrainStep, compare, parse_target

LAYERS, ROWS, WIDTH, WIDER = 4, 65536, 512, 4
IMAGES, SIDE, CHANNELS = 64, 32, 128  # of the convolutions
GROUPS = 8
NORMS = ('layer', 'RMS', 'batch', 'group')
FUNCTIONS = {one.name: one.function for one in ACTIVATIONS if not one.bias and one.kept == 1}


class RandomBlock(NamedTuple):
  """A layer.

  Attributes:
    function: name of the function between the products.
    dtype: dtype of the products.
    before: norm of the layer's input, or ''.
    between: norm of the first product's result, or ''.
    biases: whether the first and the second product have a bias.
    kept: shares that the dropouts after the function and after the second product keep.
    residual: whether the input is added to the result.
    window: side of the convolutions' windows; 0 for matrix products.
  """

  function: str
  dtype: str
  before: str = ''
  between: str = ''
  biases: tuple[bool, bool] = (False, False)
  kept: tuple[float, float] = (1.0, 1.0)
  residual: bool = True
  window: int = 0

  def __str__(self) -> str:
    parts = [
      self.before and f'{self.before} norm',
      f'{self.window}x{self.window}' if self.window else 'product',
      self.biases[0] and 'bias',
      self.between and f'{self.between} norm',
      self.function,
      self.kept[0] < 1 and 'dropout',
      self.biases[1] and 'second bias',
      self.kept[1] < 1 and 'second dropout',
      self.residual and 'residual',
      self.dtype,
    ]
    return ', '.join(part for part in parts if part)


def drawn(count: int, seed: int) -> list[RandomBlock]:
  rng = random.Random(seed)
  return [
    RandomBlock(
      rng.choice(list(FUNCTIONS)),
      rng.choice(['bfloat16', 'float32']),
      rng.choice(['', *NORMS]),
      rng.choice(['', '', *NORMS]),
      (rng.random() < 0.5, rng.random() < 0.5),
      (rng.choice([1.0, 1.0, 0.9]), rng.choice([1.0, 1.0, 0.9])),
      rng.random() < 0.75,
      rng.choice([0, 0, 0, 0, 1, 3]),
    )
    for _ in range(count)
  ]


def train_step(block: RandomBlock) -> TrainStep:
  """A step of SGD."""
  width = CHANNELS if block.window else WIDTH
  wide = WIDER * width
  window = (block.window,) * 2 if block.window else ()

  def create() -> Any:
    return [
      {
        'up': jnp.ones((*window, width, wide)),
        'down': jnp.ones((*window, wide, width)),
        'biases': (jnp.ones(wide), jnp.ones(width)),
        'norms': (jnp.ones((2, width)), jnp.ones((2, wide))),
      }
      for _ in range(LAYERS)
    ]

  def loss(weights: Any, x: jax.Array) -> jax.Array:
    for number, one in enumerate(weights):
      y = _layer(block, one, x, number)
      x = x + y if block.residual else y
    return jnp.mean(x.astype(jnp.float32) ** 2)

  def step(weights: Any, x: jax.Array) -> Any:
    value, gradients = jax.value_and_grad(loss)(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

  shape = (IMAGES, SIDE, SIDE, width) if block.window else (ROWS, width)
  return TrainStep(step, create, jax.ShapeDtypeStruct(shape, block.dtype))


def _layer(block: RandomBlock, weights: Any, x: jax.Array, number: int) -> jax.Array:
  y = _norm(block.before, x, weights['norms'][0])
  y = _product(y, weights['up'])
  y = y + weights['biases'][0].astype(y.dtype) if block.biases[0] else y
  y = FUNCTIONS[block.function](_norm(block.between, y, weights['norms'][1]))
  y = _product(_dropped(y, block.kept[0], 2 * number), weights['down'])
  y = y + weights['biases'][1].astype(y.dtype) if block.biases[1] else y
  return _dropped(y, block.kept[1], 2 * number + 1)


def _product(x: jax.Array, weights: jax.Array) -> jax.Array:
  weights = weights.astype(x.dtype)
  if weights.ndim == 2:
    return x @ weights
  return jax.lax.conv_general_dilated(
    x, weights, (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
  )


def _dropped(x: jax.Array, kept: float, number: int) -> jax.Array:
  if kept == 1:
    return x
  key = jax.random.fold_in(jax.random.key(0), number)
  return jnp.where(jax.random.bernoulli(key, kept, x.shape), x / kept, 0)


def _norm(kind: str, x: jax.Array, weights: jax.Array) -> jax.Array:
  """As Flax's norms: in float32, with the variance from the mean of squares."""
  if not kind:
    return x
  y = x.astype(jnp.float32)
  if kind == 'group':
    y = y.reshape(*y.shape[:-1], GROUPS, -1)
  dims: Sequence[int] = {
    'batch': tuple(range(y.ndim - 1)),
    'group': (*range(1, y.ndim - 2), y.ndim - 1),
  }.get(kind, (-1,))
  mean = 0 if kind == 'RMS' else y.mean(dims, keepdims=True)
  variance = jnp.maximum(0, (y * y).mean(dims, keepdims=True) - mean * mean)
  if kind == 'group':
    y = ((y - mean) * jax.lax.rsqrt(variance + 1e-6)).reshape(x.shape) * weights[0]
  else:
    y = (y - mean) * (jax.lax.rsqrt(variance + 1e-6) * weights[0])
  return (y if kind == 'RMS' else y + weights[1]).astype(x.dtype)


class BlockPair(NamedTuple):
  """The estimated and the compiled outcome of a block."""

  block: RandomBlock
  estimated: Outcome
  compiled: Outcome

  @property
  def error(self) -> float:
    """Error of the estimated peak, in percent."""
    return off(self.estimated.memory.peak, self.compiled.memory.peak)


def measured(blocks: Sequence[RandomBlock], log: Callable[[str], None]) -> list[BlockPair]:
  target, pairs = parse_target(TARGET), []
  for block in blocks:
    train = train_step(block)
    estimated = Estimator(train).estimate(LAYOUT, target)
    compiled = compare(train, {'data parallel': LAYOUT}, TARGET)['data parallel']
    if compiled.error:
      log(f'not compiled, {compiled.error}: {block}')
      continue
    pairs.append(BlockPair(block, estimated, compiled))
    log(f'{pairs[-1].error:+.1f} %{" in doubt" if estimated.doubts else ""}: {block}')
  return pairs


def figures(pairs: Sequence[BlockPair]) -> list[Figure]:
  plain = [pair.error for pair in pairs if not pair.estimated.doubts]
  return [
    exact('random blocks', len(pairs), '', at_least(1)),
    exact('random blocks: in doubt', 100 * (1 - len(plain) / max(1, len(pairs))), '%', at_most(20)),
    exact(
      'random blocks: not in doubt, but off by more than 12 %',
      sum(abs(one) > 12 for one in plain),
      '',
      at_most(0),
    ),
    exact('random blocks: not in doubt, the furthest below', -min([0, *plain]), '%', at_most(12)),
  ]


def table(pairs: Sequence[BlockPair], seed: int) -> Table:
  """The blocks, the furthest below first."""
  rows = [
    [f'{pair.error:+.1f}', 'yes' if pair.estimated.doubts else '', str(pair.block)]
    for pair in sorted(pairs, key=lambda pair: pair.error)
  ]
  return Table(f'Random blocks of seed {seed}', ['memory off, %', 'in doubt', 'block'], rows)
