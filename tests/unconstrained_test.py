"""UNCONSTRAINED in rules, boxes and placements: replicated in memory, the compiler's choice in a program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import checkpoint, explore

U = P.UNCONSTRAINED
SIZES = {'data': 2, 'model': 4}
RULES = {
  'a name': (('embed', U), ('hidden', 'model')),
  'a path': (('w$', P(U, 'model')),),
  'a function': (lambda leaf: P(U, 'model'),),
  'a table': (('w$', spmd.Rules(('embed', U), ('hidden', 'model'))),),
}


def boxed():
  return {'w': spmd.LogicallyPartitioned(jnp.ones((16, 16)), ('embed', 'hidden'))}


@pytest.mark.parametrize('kind', RULES)
def test_a_stored_array_is_replicated_where_it_is_unconstrained(kind, tmp_path):
  layout = spmd.Layout(SIZES, RULES[kind])
  stored = NamedSharding(layout.mesh, P(None, 'model'))
  assert layout.spec(boxed()) == {'w': P(None, 'model')}
  assert spmd.explain(layout, boxed()).rows[0].spec == P(None, 'model')
  assert spmd.explain(layout, boxed()).bytes_per_device == 16 * 16 * 4 // 4
  assert 'dim 0' in spmd.explain(layout, boxed()).why('w')
  state = layout.init(boxed)
  for made in (state, layout.shard(boxed()), layout.jit(boxed)(), layout.abstract(boxed)):
    assert made['w'].value.sharding == stored
  step = layout.jit(lambda state: jax.tree.map(lambda x: 2 * x, state))
  assert step(state)['w'].value.sharding == stored
  if kind != 'a function':  # has no text form
    checkpoint.save(tmp_path / 'saved', state, layout=layout)
    restored = checkpoint.restore(tmp_path / 'saved', layout.abstract(boxed))
    assert restored['w'].value.sharding == stored


@pytest.mark.parametrize('kind', RULES)
def test_fsdp_shards_a_dimension_that_is_unconstrained(kind):
  if kind == 'a table':
    rules = (('w$', spmd.Rules(('embed', U), ('hidden', 'model'), spmd.fsdp('data', min_size=1))),)
  else:
    rules = (*RULES[kind], spmd.fsdp('data', min_size=1))
  assert spmd.Layout(SIZES, rules).spec(boxed()) == {'w': P('data', 'model')}


def test_names_and_specs_of_a_placement():
  layout = spmd.Layout(SIZES, RULES['a name'])
  placements = [('embed', 'hidden'), P(U, 'model'), NamedSharding(layout.mesh, P(U, 'model'))]
  for placement in (*placements, spmd.Rules(('.*', P(U, 'model')))):
    assert layout.shard(np.ones((8, 8)), placement).sharding.spec == P(None, 'model')
    made = layout.jit(lambda: jnp.ones((8, 8)), out_rules=placement)()
    assert made.sharding.spec == P(None, 'model')
    assert layout.jit(lambda x: x, in_rules=(placement,))(np.ones((8, 8))).shape == (8, 8)
  for placement in placements:
    assert layout.local_to_global(np.ones((8, 8)), placement).sharding.spec == P(None, 'model')


@pytest.mark.parametrize(
  'box',
  [
    spmd.Partitioned(jnp.ones((8, 8)), (U, 'model')),
    spmd.LogicallyPartitioned(jnp.ones((8, 8)), (U, 'hidden')),
  ],
)
def test_names_of_a_box(box):
  layout = spmd.Layout(SIZES, RULES['a name'])
  assert layout.spec({'w': box}) == {'w': P(None, 'model')}
  assert layout.init(lambda: {'w': box})['w'].value.sharding.spec == P(None, 'model')
  filled = layout.replace(rules=(*layout.rules, spmd.fsdp('data', min_size=1)))
  assert filled.spec({'w': box}) == {'w': P('data', 'model')}


def constrained(layout, constrain):
  """The sharding that a constraint gives to a value that is sharded over 'data' along its rows."""
  x = layout.shard(np.ones((8, 8)), P('data'))
  return layout.jit(lambda x: constrain(x + 1))(x).sharding.spec


def test_a_constraint_leaves_the_dimension_to_the_compiler():
  """It keeps the sharding of its rows, which None would remove."""
  rules = (('embed', U), ('length', None), ('hidden', 'model'), ('@x', P(U, 'model')))
  layout = spmd.Layout(SIZES, rules)
  open_rows = [
    lambda x: spmd.with_logical_constraint(x, ('embed', 'hidden')),
    lambda x: spmd.with_sharding_constraint(x, ('embed', 'hidden')),
    lambda x: spmd.with_sharding_constraint(x, P(U, 'model')),
    lambda x: spmd.with_sharding_constraint(x, spmd.Rules(('.*', P(U, 'model')))),
    lambda x: spmd.with_sharding_annotation(x, 'x'),
    lambda x: spmd.constrain(x, P(U, 'model')),
    lambda x: spmd.unbox(spmd.LogicallyPartitioned(x, ('embed', 'hidden'))),
  ]
  assert [constrained(layout, each) for each in open_rows] == [P('data', 'model')] * len(open_rows)
  closed = constrained(layout, lambda x: spmd.with_logical_constraint(x, ('length', 'hidden')))
  assert closed == P(None, 'model')


def test_the_text_of_a_layout():
  layout = spmd.Layout(spmd.abstract_mesh(SIZES), (('embed', U), ('w$', P(U, 'model'))))
  assert spmd.Layout.from_toml(layout.to_toml(), mesh=layout.mesh) == layout
  assert '["embed", "?"]' in layout.to_toml()


def test_compare_and_estimate():
  """The outcome is that of the layout without the rule: in memory, both replicate the dimension."""

  def step(state, x):
    hidden = spmd.with_logical_constraint(x @ state['w'].unbox(), ('batch', 'hidden'))
    return jax.tree.map(lambda w: w - 0.1, state), jnp.sum(hidden**2)

  train_step = explore.TrainStep(step, boxed, jax.ShapeDtypeStruct((8, 16), jnp.float32))
  rules = (('batch', 'data'), ('hidden', 'model'))
  layouts = {
    'open': spmd.Layout(spmd.abstract_mesh(SIZES), (('embed', U), *rules)),
    'plain': spmd.Layout(spmd.abstract_mesh(SIZES), rules),
  }
  result = explore.compare(train_step, layouts, 'cpu:8')
  first, second = result.outcomes
  assert first.error is None and first.counts == second.counts
  estimator = explore.Estimator(train_step)
  target = explore.parse_target('h100:8')
  estimates = [estimator.estimate(layout, target).counts for layout in layouts.values()]
  assert estimates[0] == estimates[1]
