"""Equal operations: merged where they are sharded alike, as XLA merges them."""

import random

import jax
import jax.numpy as jnp
import pytest

import flax_spmd as spmd
from flax_spmd._src.estimate.estimator import Estimator
from flax_spmd.explore import TrainStep
from tests.estimate.doubts import doubts_of

ROWS, WIDTH = 1024, 512
DATA = spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'),))
BATCH = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
PRODUCT = 2 * ROWS * WIDTH * WIDTH  # FLOPs


def square(product):
  return jnp.sum(product**2)


def largest(product):
  return jnp.sum(product) + jnp.max(product)


def twice(sharded, is_looped=False):
  """A step with one product twice; both are replicated, or those that are multiplied by the batch are sharded."""

  def create():
    return {'x': jnp.ones((ROWS, WIDTH)), 'w': jnp.ones((WIDTH, WIDTH))}

  def step(state, batch):
    def product():
      x = state['x'] if sharded != 'both' else batch
      if is_looped:
        return jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ state['w']), x)
      return jnp.tanh(x @ state['w'])

    one, other = product(), product()
    return state, square(one * batch if sharded else one) + largest(other)

  return TrainStep(step, create, BATCH)


@pytest.mark.parametrize(('sharded', 'products'), [('', 1), ('one', 1 + 1 / 8), ('both', 1 / 8)])
def test_equal_products_count_once_if_they_are_sharded_alike(sharded, products):
  estimated = Estimator(twice(sharded)).estimate(DATA, 'h100:8', partition=False)
  assert (estimated.counts.flops, doubts_of(estimated)) == (products * PRODUCT, ())


def test_equal_loops_count_once():
  """Until the results are used, both are alike, and so are their bodies."""
  estimated = Estimator(twice('both', is_looped=True)).estimate(DATA, 'h100:8', partition=False)
  assert (estimated.counts.flops, doubts_of(estimated)) == (3 / 8 * PRODUCT, ())


def test_equal_conditionals_count_each():
  """XLA merges none."""

  def step(state, batch):
    def either():
      return jax.lax.cond(batch[0, 0] > 0, lambda: jnp.tanh(batch @ state['w']), lambda: batch)

    return state, square(either()) + largest(either())

  train = TrainStep(step, lambda: {'w': jnp.ones((WIDTH, WIDTH))}, BATCH)
  estimated = Estimator(train).estimate(DATA, 'h100:8', partition=False)
  assert estimated.counts.flops == 2 / 8 * PRODUCT


def test_operations_with_other_numbers_are_not_equal():
  """Neither are reductions with other functions, nor loops with other bodies."""

  def step(state, batch):
    w, whole = state['w'], {'axis': 1, 'keepdims': True}
    factors = [2.5, 3.5, jnp.arange(WIDTH)[None] * 0.3, jnp.arange(WIDTH)[None] * 0.7]
    factors += [jnp.max(batch, **whole), jnp.min(batch, **whole), jnp.sum(batch, **whole)]
    loops = [lambda _, y: jnp.tanh(y), lambda _, y: jnp.sin(y)]
    arrays = [batch * factor for factor in factors]
    arrays += [jax.lax.fori_loop(0, 3, loop, batch) for loop in loops]
    return state, sum(square(jnp.tanh(array) @ w) for array in arrays)

  train = TrainStep(step, lambda: {'w': jnp.ones((WIDTH, WIDTH))}, BATCH)
  estimated = Estimator(train).estimate(DATA, 'h100:8', partition=False)
  assert estimated.counts.flops == 9 / 8 * PRODUCT


NAMES = ('batch', 'embed', 'mlp')


def random_step(draw):
  """A step with operations that occur up to three times, each result with a use of its own; and a layout."""
  kinds = ('up', 'down', 'tanh', 'multiply', 'add', 'centre', 'softmax', 'norm')
  plan, count = [], 3
  for _ in range(draw.randint(2, 5)):
    operands = [draw.randrange(count) if draw.random() < 0.5 else count - 1 for _ in range(2)]
    plan.append((draw.choice(kinds), *operands, draw.choice((1, 2, 2, 3))))
    count += plan[-1][-1]
  uses = [draw.choice(('scale', 'max', 'square', 'rows', 'named', 'turned')) for _ in range(3, count)]
  boxes = {name: tuple(draw.sample((None, *NAMES), 2)) for name in ('up', 'down', 'start', 'scale')}
  is_trained = draw.random() < 0.4

  def create():
    shapes = {'up': (WIDTH, WIDTH), 'down': (WIDTH, WIDTH)}
    return {
      name: spmd.LogicallyPartitioned(jnp.ones(shapes.get(name, (ROWS, WIDTH))), names)
      for name, names in boxes.items()
    }

  def loss(state, batch):
    plain = spmd.unbox(state)
    arrays = [batch, plain['start'], jnp.tanh(batch)]
    for kind, one, other, times in plan:
      x, y = arrays[one], arrays[other]
      functions = {
        'up': lambda x=x: x @ plain['up'],
        'down': lambda x=x: x @ plain['down'],
        'tanh': lambda x=x: jnp.tanh(x),
        'multiply': lambda x=x, y=y: x * y,
        'add': lambda x=x, y=y: x + y,
        'centre': lambda x=x: x - jnp.mean(x, 0, keepdims=True),
        'softmax': lambda x=x: jax.nn.softmax(x),
        'norm': lambda x=x: x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True)),
      }
      arrays += [functions[kind]() for _ in range(times)]
    ends = {
      'scale': lambda x: jnp.sum(x * plain['scale']),
      'max': jnp.max,
      'square': square,
      'rows': lambda x: square(jnp.sum(x, 0)),
      'named': lambda x: jnp.sum(jnp.abs(spmd.with_logical_constraint(x, ('batch', 'mlp')))),
      'turned': lambda x: jnp.max(jnp.cos(spmd.with_logical_constraint(x, ('embed', 'batch')))),
    }
    return sum(ends[use](x) for use, x in zip(uses, arrays[3:], strict=True))

  def step(state, batch):
    if not is_trained:
      return state, loss(state, batch)
    value, gradients = jax.value_and_grad(loss)(state, batch)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), value

  axes = (None, 'data', 'model', ('data', 'model'))
  rules = tuple((name, draw.choice(axes)) for name in NAMES)
  layout = spmd.Layout(spmd.abstract_mesh({'data': 4, 'model': 2}), rules)
  return TrainStep(step, create, BATCH), layout


@pytest.mark.usefixtures('gpu_compiler')
@pytest.mark.parametrize('seed', range(40))
def test_products_of_random_steps_count_as_in_xla(seed, whole_steps):
  """Unless the estimate is in doubt. An XLA of its own partitions the step."""
  train, layout = random_step(random.Random(seed))
  estimator = Estimator(train)
  exact = estimator.estimate(layout, 'h100:8')
  assert exact.source == 'partitioned'
  estimated = estimator.estimate(layout, 'h100:8', partition=False)
  assert doubts_of(estimated) or estimated.counts.flops == pytest.approx(exact.counts.flops, rel=0.01)
