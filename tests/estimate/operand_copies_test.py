"""Copies of operands of products: estimates against figures that XLA compiled for eight H100s."""

import jax
import jax.numpy as jnp
import optax
import pytest

import flax_spmd as spmd
from flax_spmd.explore import Estimator, TrainStep, parse_target
from tests.estimate.doubts import doubts_of

LAYOUT = spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'),))
TOKENS, WIDTH = 16384, 1024


def estimate(loss, create, batch):
  def step(weights, x):
    value, gradients = jax.value_and_grad(loss)(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

  return Estimator(TrainStep(step, create, batch)).estimate(LAYOUT, parse_target('h100:8'))


@pytest.mark.parametrize(('vocab', 'compiled'), [(16384, 320.0), (32765, 576.0), (61437, 1248.0)])
def test_logits_by_a_transposed_embedding(vocab, compiled):
  """The embedding is read as it is; where the sum over an odd vocabulary is split, both operands are padded."""

  def loss(weights, tokens):
    x = jax.nn.relu(weights['table'][tokens] @ weights['up']) @ weights['down']
    logits = x @ weights['table'].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

  def create():
    shapes = {'table': (vocab, WIDTH), 'up': (WIDTH, 4 * WIDTH), 'down': (4 * WIDTH, WIDTH)}
    return {name: jnp.ones(shape) for name, shape in shapes.items()}

  found = estimate(loss, create, jax.ShapeDtypeStruct((TOKENS,), jnp.int32))
  assert found.memory.temporaries / 2**20 == pytest.approx(compiled, rel=0.06)


def test_a_lookup_that_counts_along_its_declared_batch():
  """The labels of a contrastive loss, each of which is its own row."""

  def loss(weight, x):
    logits = (x @ weight) @ x.T
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(x))).mean()

  found = estimate(loss, lambda: jnp.ones((256, 256)), jax.ShapeDtypeStruct((2048, 256), jnp.float32))
  assert sum(found.counts.by_axis().values()) == 2_293_767
  assert not doubts_of(found)


def test_products_of_a_batch_read_a_transposed_operand_as_it_is():
  """A matrix of dot products for each example, as of the features of a recommender."""

  def loss(weight, x):
    y = jnp.tanh(x * weight)
    return jnp.sum((y @ jnp.swapaxes(y, 1, 2)) ** 2)

  found = estimate(
    loss, lambda: jnp.ones((1, 1, 128)), jax.ShapeDtypeStruct((32768, 32, 128), jnp.float32)
  )
  assert found.memory.temporaries / 2**20 == pytest.approx(144.0, rel=0.01)


def test_the_gradient_of_two_products_is_added_in_the_place_of_the_first():
  """The kernel of the second product adds the first one to it."""

  def loss(weights, x):
    y = jnp.tanh(x @ weights[0])
    return sum(jnp.sum(jnp.sin(y @ weight)) for weight in weights[1:])

  create = lambda: [jnp.ones((WIDTH, WIDTH)) for _ in range(3)]
  found = estimate(loss, create, jax.ShapeDtypeStruct((8 * TOKENS, WIDTH), jnp.float32))
  assert found.memory.temporaries / 2**20 == pytest.approx(264.0, rel=0.01)
