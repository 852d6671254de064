"""Plans of whole trees: optimizer state under path rules, caching, and static data."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import errors
from tests.texts import text_of

BOTH = {'data': 2, 'model': 4}
ADAFACTOR = optax.adafactor(1e-3, min_dim_size_to_factor=8)


def on(rules, mesh=None, **policies):
  return spmd.Layout(spmd.make_mesh(mesh or {'data': 8}), rules, **policies)


def state_of(params, tx):
  return TrainState.create(apply_fn=None, params=params, tx=tx)


def test_a_problem_of_optimizer_state_alone_is_reported():
  """A table for the optimizer state does not fit the moments; the parameters are fine."""
  layout = on((('^opt_state/', spmd.Rules(('w$', P('data')))),))
  text = text_of(errors.LayoutError, layout.spec, state_of({'w': jnp.ones(6)}, optax.adam(1e-3)))
  assert [line.split(': ')[0] for line in text.splitlines()] == [
    'opt_state/0/mu/w',
    'opt_state/0/nu/w',
    'Fix',
  ]


def test_a_bias_of_the_same_size_does_not_affect_other_arrays():
  layout = on((('.', P('model')),), BOTH)
  for params in ({'kernel': jnp.ones((16, 16))}, {'kernel': jnp.ones((16, 16)), 'bias': jnp.ones(16)}):
    specs = layout.spec(state_of(params, ADAFACTOR)).opt_state
    assert (specs[0].v_row['kernel'], specs[0].v_col['kernel']) == (P('model'), P(None))


def test_a_path_rule_for_optimizer_state_applies_to_its_own_shape():
  layout = on((('v_col/', P('model')), ('v_row/', P('model'))), BOTH)
  specs = layout.spec(state_of({'kernel': jnp.ones((16, 32))}, ADAFACTOR)).opt_state[0]
  assert (specs.v_row['kernel'], specs.v_col['kernel']) == (P('model'), P('model'))
  layout = on((('_memory/', P(None, 'data', 'model')),), BOTH)
  memory = optax.scale_by_lbfgs(memory_size=4).init({'w': jnp.ones((8, 16))})
  assert P(None, 'data', 'model') in jax.tree.leaves(
    layout.spec({'w': jnp.ones((8, 16)), 'opt': memory})
  )


def test_path_rules_for_boxed_parameters_apply_to_factored_moments():
  layout = on((('kernel', P('data', 'model')),), BOTH)
  box = spmd.LogicallyPartitioned(jnp.ones((16, 32)), ('embed', 'mlp'))
  specs = layout.spec(state_of({'kernel': box}, ADAFACTOR)).opt_state[0]
  assert (specs.v_row['kernel'], specs.v_col['kernel']) == (P('data'), P('model'))


def test_zero1_with_named_parameters():
  box = spmd.LogicallyPartitioned(jax.ShapeDtypeStruct((64, 64), jnp.float32), ('embed', 'mlp'))
  specs = spmd.Layout({'data': 8}, spmd.presets.zero1(min_size=1)).spec(
    {'params': {'w': box}, 'opt_state': {'mu': {'w': box}}}
  )
  assert specs == {'params': {'w': P(None, None)}, 'opt_state': {'mu': {'w': P('data', None)}}}


class Unhashable:
  __hash__ = None

  def __eq__(self, other):
    return isinstance(other, Unhashable)


@flax.struct.dataclass
class WithStatic:
  w: Any
  static: Any = flax.struct.field(pytree_node=False)


def test_a_state_with_unhashable_static_data():
  """Its plan cannot be cached, so it is planned each time."""
  layout = spmd.Layout({'data': 2, 'model': 4}, (('embed', 'data'), ('mlp', 'model')))

  def create():
    return WithStatic(spmd.LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'mlp')), Unhashable())

  for _ in range(2):
    assert layout.spec(jax.eval_shape(create)).w == P('data', 'model')
