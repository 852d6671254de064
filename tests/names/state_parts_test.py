"""The parts of a state: parameters, optimizer state and the rest, however a state is written."""

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import flax_spmd as spmd
from flax_spmd._src.names.tree_names import leaf_parts
from tests.names.optax_states_test import OPTIMIZERS

TX = optax.adam(1e-2)


class Model(nn.Module):
  """With names for one array, and batch statistics."""

  @nn.compact
  def __call__(self, x):
    names = spmd.with_logical_partitioning(nn.initializers.ones, ('embed', 'mlp'))
    return nn.BatchNorm(use_running_average=False)(nn.Dense(8, kernel_init=names)(x))


class Nodes(nnx.Module):
  def __init__(self, rngs):
    self.dense, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)


@flax.struct.dataclass
class Own:
  weights: object
  moments: object
  step: object


def variables():
  return Model().init(jax.random.key(0), jnp.ones((2, 4)))


def linen(make):
  tree = variables()
  return make(tree['params'], tree.get('batch_stats'))


def nodes():
  return Nodes(nnx.Rngs(0))


STATES = {
  'TrainState': lambda: TrainState.create(apply_fn=None, params=variables()['params'], tx=TX),
  'all collections': lambda: TrainState.create(apply_fn=None, params=variables(), tx=TX),
  'own keys': lambda: linen(
    lambda params, _: {'model': params, 'optimizer': TX.init(params), 'step': 0}
  ),
  'a tuple': lambda: linen(lambda params, _: (jnp.int32(0), params, TX.init(params))),
  'own class': lambda: linen(lambda params, _: Own(params, TX.init(params), jnp.uint32(3))),
  'with statistics': lambda: linen(
    lambda params, stats: {'opt': TX.init(params), 'variables': {'params': params, 'stats': stats}}
  ),
  'with an average': lambda: linen(lambda params, _: {'params': params, 'ema_params': params}),
  'parameters alone': lambda: variables()['params'],
  'modules': lambda: (nodes(), nnx.Optimizer(nodes(), TX, wrt=nnx.Param)),
  'an nnx.State': lambda: nnx.state((nodes(), nnx.Optimizer(nodes(), TX, wrt=nnx.Param))),
  'a key and a weight': lambda: {'w': jnp.ones((4, 8)), 'key': jax.random.key(0)},
}
COUNTS = {
  'TrainState': (4, 9, 1),
  'all collections': (6, 13, 1),  # all that the TrainState has as its parameters
  'own keys': (4, 9, 1),
  'a tuple': (4, 9, 1),
  'own class': (4, 9, 1),
  'with statistics': (4, 9, 2),
  'with an average': (4, 0, 4),
  'parameters alone': (4, 0, 0),
  'modules': (4, 9, 5),  # statistics, the key and count of dropout, and the step
  'an nnx.State': (4, 9, 5),
  'a key and a weight': (1, 0, 1),
}


@pytest.mark.parametrize('name', STATES)
def test_parts_of_a_state(name):
  state = STATES[name]()
  parts = leaf_parts(state)
  assert len(parts) == len(jax.tree.leaves(state))
  assert tuple(map(parts.count, ('params', 'opt_state', ''))) == COUNTS[name]
  assert leaf_parts(jax.eval_shape(lambda: state)) == parts


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_no_optimizers_state_counts_as_parameters(name):
  params = {'dense': {'kernel': jnp.ones((8, 4)), 'bias': jnp.ones(4)}}
  parts = leaf_parts({'model': params, 'of the optimizer': OPTIMIZERS[name].init(params)})
  assert parts[:2] == ['params', 'params'] and {*parts[2:]} <= {'opt_state'}
