"""Loops: gradients that are added up in a loop's carry, and random loops against compiled programs."""

import functools

import jax
import jax.numpy as jnp
import pytest

import flax_spmd as spmd
from flax_spmd.explore import Estimator, TrainStep, parse_target

LENGTH, WIDTH, BATCH = 8, 64, 64
X = jax.ShapeDtypeStruct((LENGTH, BATCH, WIDTH), jnp.float32)
ON_BATCH = (None, 'batch', None)
DATA = spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'),))
FSDP = spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'), ('embed', 'data')))
WEIGHT = 4 * WIDTH * WIDTH * 7 / 8  # bytes that an all-gather or a reduce-scatter sends


def create():
  return {'w': spmd.LogicallyPartitioned(jnp.ones((WIDTH, WIDTH)), ('embed', 'mlp'))}


def cell(w, h, x):
  h = spmd.with_logical_constraint(jnp.tanh(h @ w + x), ('batch', None))
  return h, h


def recurrent(w, xs, unroll=1):
  return jax.lax.scan(functools.partial(cell, w), jnp.zeros(xs.shape[1:]), xs, unroll=unroll)[1]


def nested(w, xs):
  scan = lambda h, xs: jax.lax.scan(functools.partial(cell, w), h, xs)
  return jax.lax.scan(scan, jnp.zeros(xs.shape[1:]), xs.reshape(2, LENGTH // 2, *xs.shape[1:]))[1]


def train_step(model):
  def step(state, xs):
    loss, gradient = jax.value_and_grad(lambda state: jnp.sum(model(state['w'].unbox(), xs) ** 2))(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradient), loss

  return TrainStep(step, create, X, placements=ON_BATCH)


@pytest.mark.parametrize(
  ('model', 'target', 'reductions'),
  [
    (recurrent, 'h100:8', 1),
    (recurrent, 'v5e:2x4', 1),
    (recurrent, 'cpu:8', LENGTH),
    (functools.partial(recurrent, unroll=2), 'h100:8', LENGTH),
    (nested, 'h100:8', 2),  # after each inner loop
  ],
  ids=['h100', 'v5e', 'cpu', 'unrolled', 'nested'],
)
def test_the_gradient_of_a_recurrent_weight_is_reduced_as_in_compiled_programs(
  model, target, reductions
):
  estimator = Estimator(train_step(model), platform=parse_target(target).chip.platform)
  counts = estimator.estimate(DATA, parse_target(target)).counts
  assert counts.by_kind() == pytest.approx({'all-reduce': reductions * 2 * WEIGHT}, rel=0.01)


@pytest.mark.parametrize(
  ('target', 'kind', 'sent'),
  [('h100:8', 'reduce-scatter', WEIGHT), ('v5e:2x4', 'all-reduce', 2 * WEIGHT)],
)
def test_a_sharded_gradient_of_a_recurrent_weight_is_reduced_in_every_iteration(target, kind, sent):
  estimator = Estimator(train_step(recurrent), platform=parse_target(target).chip.platform)
  kinds = estimator.estimate(FSDP, parse_target(target)).counts.by_kind()
  assert kinds[kind] == pytest.approx(LENGTH * sent, rel=0.01)
