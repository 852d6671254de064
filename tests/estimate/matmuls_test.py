"""Products: weights that give up mesh axes, against compiled programs."""

import jax
import jax.numpy as jnp
import pytest

import flax_spmd as spmd
from flax_spmd.explore import Estimator, TrainStep, compare, parse_target

EMBED, MLP, BATCH = 64, 256, 1024


def unused(mesh, batch, embed, mlp=None):
  rules = {'batch': batch, 'embed': embed, 'mlp': mlp, 'act_mlp': mlp, 'act_embed': None}
  return spmd.Layout(spmd.abstract_mesh(mesh), tuple(rules.items()))


@pytest.mark.parametrize(
  ('one', 'is_doubtful'),
  [
    (unused({'data': 2, 'model': 4}, 'data', 'data'), True),
    (unused({'data': 2, 'other': 2, 'model': 2}, ('data', 'other'), 'data'), True),
    (unused({'data': 4, 'model': 2}, 'data', 'data'), False),
    (unused({'data': 2, 'other': 2, 'model': 2}, ('data', 'other'), ('data', 'other')), False),
    (unused({'data': 2, 'model': 4}, 'data', 'data', 'model'), False),
  ],
  ids=['more unused', 'as many unused', 'fewer unused', 'fewer than both', 'none unused'],
)
def test_weights_whose_shards_can_move_to_unused_axes_are_in_doubt(one, is_doubtful):
  """The compiler moves them there if the unused axes have as many devices as those that the weight gives up."""

  def make():
    shapes = {'up': (EMBED, MLP), 'down': (MLP, EMBED)}
    names = {'up': ('embed', 'mlp'), 'down': ('mlp', 'embed')}
    return {key: spmd.LogicallyPartitioned(jnp.ones(shapes[key]), names[key]) for key in shapes}

  def loss(state, x):
    up, down = state['up'].unbox(), state['down'].unbox()
    hidden = spmd.with_logical_constraint(jnp.tanh(x @ up), ('batch', 'act_mlp'))
    return jnp.sum(jnp.tanh(spmd.with_logical_constraint(hidden @ down, ('batch', 'act_embed'))) ** 2)

  def descend(state, x):
    value, slopes = jax.value_and_grad(loss)(state, x)
    return jax.tree.map(lambda w, slope: w - 0.1 * slope, state, slopes), value

  train_step = TrainStep(descend, make, jax.ShapeDtypeStruct((BATCH, EMBED), jnp.float32))
  estimated = Estimator(train_step, platform='cpu').estimate(one, parse_target('cpu:8'))
  counts = compare(train_step, {'one': one}, 'cpu:8')['one'].counts
  assert any('shards can move to unused mesh axes' in doubt for doubt in estimated.doubts) == is_doubtful
  is_exact = estimated.counts.by_kind() == pytest.approx(counts.by_kind(), rel=0.01)
  assert is_exact != is_doubtful
