"""A table of rules for paths that applies to nothing, and layouts that shard nothing."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd

MESH = {'data': 2, 'model': 4}
TABLE = spmd.Rules(
  ('batch', 'data'), ('dense/kernl$', P('data')), ('^opt/', spmd.Rules(('kernl', P('model'))))
)


def create():
  return {'params': {'dense': {'kernel': jnp.ones((8, 8)), 'bias': jnp.ones(8)}}, 'step': jnp.zeros(())}


def test_a_table_of_paths_that_matches_no_array_of_a_state_is_an_error():
  layout = spmd.Layout(MESH, TABLE)
  for verb in (layout.plan, layout.init, layout.abstract):
    with pytest.raises(spmd.errors.RulesError) as error:
      verb(create)
    assert str(error.value) == (
      f"rule 1 ('dense/kernl$', {P('data')!r}) matched no array. Closest path: 'dense/kernel'.\n"
      f"rule 2.0 ('kernl', {P('model')!r}) matched no array. Closest path: 'kernel'.\n"
      'Fix: no array of this state is sharded. Write expressions that its paths contain, such as '
      "'params/dense/bias'; ('.*', PartitionSpec()) at the end of the table replicates what no expression matches."
    )


@pytest.mark.parametrize(
  'mesh, rules',
  [
    (MESH, (*TABLE.clauses, ('.*', P()))),
    (MESH, (*TABLE.clauses, spmd.fsdp('data', min_size=1))),
    (MESH, (*TABLE.clauses, ('bias$', P()))),
    (MESH, (('kernl', P()),)),
    (MESH, spmd.presets.zero1()),
    ({'data': 1, 'model': 1}, TABLE),
  ],
)
def test_a_state_that_a_rule_applies_to_or_that_nothing_can_shard_is_planned(mesh, rules):
  assert spmd.Layout(mesh, rules).abstract(create)['step'].sharding.is_fully_replicated


def test_a_batch_that_no_path_rule_matches_is_placed():
  assert spmd.Layout(MESH, TABLE).shard({'x': jnp.ones((8, 8))})['x'].sharding.is_fully_replicated


def test_a_layout_that_shards_no_array_of_a_state_is_a_finding():
  rules = (('batch', 'data'), ('mlp', 'model'))
  params = {'w': jnp.ones((32, 64)), 'b': jnp.ones(64)}
  state = jax.eval_shape(lambda: TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3)))
  [finding] = spmd.Layout(MESH, rules).check(state).of('nothing sharded')
  assert finding.text == (
    'no array is sharded: each of 8 devices holds all 6, 24.8 KiB. No array has names.'
  )
  assert not finding.suspicious
  assert spmd.Layout(MESH, rules, unmatched='error').check(state).suspicious == (
    finding._replace(suspicious=True),
  )
  named = spmd.with_names(params, {'w': ('embed', None)})
  [finding] = spmd.Layout(MESH, (*rules, ('embed', None))).check(named).of('nothing sharded')
  assert finding.text == 'no array is sharded: each of 8 devices holds all 2, 8.25 KiB.'


@pytest.mark.parametrize(
  'mesh, rules, tree',
  [
    ({'data': 1}, (('batch', 'data'),), {'w': jnp.ones((8, 8))}),
    (MESH, (spmd.fsdp('data', min_size=1),), {'w': jnp.ones((8, 8))}),
    (MESH, (spmd.fsdp('data'),), {'w': jnp.ones((8, 8))}),  # an idle rule, which is the reason
    (MESH, (), {'w': spmd.LogicallyPartitioned(jnp.ones(8), ('embed',))}),  # a name without a rule
    (MESH, (), {'step': jnp.zeros(())}),
  ],
)
def test_no_such_finding_where_an_array_is_sharded_or_another_finding_is_the_reason(mesh, rules, tree):
  assert not spmd.Layout(mesh, rules).check(tree).of('nothing sharded')
