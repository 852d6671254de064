"""Gradients that each microbatch sends to another rank: one warning with their stages, and none where sums stay on their ranks."""

import re
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import flax_spmd as spmd
from flax_spmd.pipeline import Mean, OneFOneB, ZeroBubbleH1, accumulate, stage_end
from tests.pipeline.cases import LAYOUT, STAGES, assert_same, normal, weight

PARAMS = [{'w': weight(number, 32, 32), 'b': normal(number, 32)} for number in range(STAGES)]
BATCH = normal(9, 6, 4, 32)


def global_norm(tree):
  return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


def step_of(change, after=lambda grads: grads, schedule=OneFOneB(STAGES)):  # noqa: B008
  """A step that changes the gradients of each microbatch, and then their mean."""

  def step(params, batch):
    def of_microbatch(x):
      def loss(params):
        h = skip = x
        for number, layer in enumerate(params):
          h = stage_end(jnp.tanh(h @ layer['w'] + layer['b'][None]) + (skip if number == 2 else 0))
          skip = h if number == 0 else skip
        return jnp.mean(h**2)

      value, grads = jax.value_and_grad(loss)(params)
      return value, change(grads), global_norm(grads)

    value, grads, norm = accumulate(of_microbatch, batch, schedule, Mean)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, after(grads)), value, norm

  return step


def clipped(grads):
  scale = jnp.minimum(1, 0.01 / global_norm(grads))
  return jax.tree.map(lambda g: g * scale, grads)  # clips


def clipped_by_optax(grads):
  return optax.clip_by_global_norm(0.01).update(grads, optax.EmptyState())[0]


@pytest.mark.parametrize('schedule', [OneFOneB(STAGES), ZeroBubbleH1(STAGES)], ids=str)
def test_a_global_norm_in_each_microbatch(schedule):
  step = step_of(clipped, schedule=schedule)
  pipelined = LAYOUT.pipeline_jit(step)
  with pytest.warns(UserWarning) as caught:
    pipelined.lower(PARAMS, BATCH)
  [text] = [str(one.message) for one in caught]
  at = f'sent_gradients_test.py:{clipped.__code__.co_firstlineno + 2}'
  assert text == (
    'pipeline_jit of step: gradients of several stages are combined in each microbatch. They are sent to one rank, '
    'which also keeps their sums and the weights:\n'
    f'  1 array of stage 1, 4 KiB, sent from rank 1 to rank 0 for {at}\n'
    f'  1 array of stage 2, 4 KiB, sent from rank 2 to rank 0 for {at}\n'
    f'  1 array of stage 3, 4 KiB, sent from rank 3 to rank 0 for {at}\n'
    'Fix: combine them after accumulate, where sums stay on their ranks: let it return the gradients, and clip their '
    'mean by its global norm.'
  )
  assert caught[0].filename == __file__
  with warnings.catch_warnings(action='error'):
    result = pipelined(PARAMS, BATCH)  # once
  assert_same(result, jax.jit(step)(PARAMS, BATCH))


def test_clipping_by_optax():
  with pytest.warns(UserWarning, match='are combined in each microbatch') as caught:
    LAYOUT.pipeline_jit(step_of(clipped_by_optax)).lower(PARAMS, BATCH)
  assert re.findall(r'of stage (\d)', str(caught[0].message)) == ['1', '2', '3']


def by_array(grads):
  return jax.tree.map(lambda g: g * jnp.minimum(1, 0.01 / jnp.linalg.norm(g)), grads)


@pytest.mark.parametrize('schedule', [OneFOneB(STAGES), ZeroBubbleH1(STAGES)], ids=str)
@pytest.mark.parametrize(('change', 'after'), [(by_array, clipped), (lambda g: g, clipped_by_optax)])
@pytest.mark.filterwarnings('error')
def test_sums_that_stay_on_their_ranks(change, after, schedule):
  """Norms of each array, and a skip connection whose gradient another rank needs."""
  step = step_of(change, after, schedule)
  new, *_ = result = LAYOUT.pipeline_jit(step)(PARAMS, BATCH)
  assert_same(result, jax.jit(step)(PARAMS, BATCH))
  for rank, layer in enumerate(new):
    assert {device.id // 2 for device in layer['w'].devices()} == {rank}


CHANGES = {
  'a constraint': lambda w: spmd.with_logical_constraint(w, ('words', 'embed')),
  'a cast': lambda w: w.astype('bfloat16').astype('float32'),
  'a factor': lambda w: w / 3 * 2,
  'a transpose': lambda w: (2 * w.T).reshape(2, -1).reshape(w.T.shape).T,
}


@pytest.mark.parametrize('tied', ['before', 'after', 'both'])
@pytest.mark.parametrize('change', CHANGES)
@pytest.mark.filterwarnings('error')
def test_a_tied_weight_that_is_changed_before_its_stages_read_it(change, tied):
  """So is the sum of its gradients, and each stage changes its own term."""
  layout = spmd.Layout({'stage': 2, 'data': 2, 'model': 2}, (('batch', 'data'), ('embed', 'model')))

  def step(params, batch):
    def loss(params, x):
      w = params['w'] if tied == 'after' else CHANGES[change](params['w'])
      return jnp.mean((stage_end(jnp.tanh(x @ w)) @ params['w2'] @ w) ** 2) + jnp.sum(w**2)

    def of_microbatch(x):
      grads = jax.grad(loss)(params, x)
      return grads if tied == 'before' else grads | {'w': CHANGES[change](grads['w'])}

    return accumulate(of_microbatch, batch, OneFOneB(2))

  params = {'w': weight(0, 32, 32), 'w2': weight(1, 32, 32)}
  pipelined = layout.pipeline_jit(step)
  sent = [
    line for line in pipelined.lower(params, BATCH).as_text().splitlines() if 'rank 1 -> rank 0' in line
  ]
  assert sent[-1].count('[') > sent[0].count('[') == 1, sent  # the sum of the second stage's terms, once
  tolerance = 1e-2 if change == 'a cast' else 1e-5
  assert_same(pipelined(params, BATCH), jax.jit(step)(params, BATCH), tolerance)
