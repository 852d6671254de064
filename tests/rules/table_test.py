"""Rules as values, and the decisions that they resolve to."""

import pickle

import flax.linen as nn
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd._src.rules.decisions import Skipped, axis_names

TABLE = (('batch', 'data'), ('heads', 'model'), ('mlp', 'model'), ('mlp', 'data'), ('embed', None))


def test_a_table_is_a_value():
  rules = spmd.Rules(*TABLE)
  assert rules == spmd.Rules(TABLE) == spmd.Rules.of(list(map(list, TABLE)))
  assert hash(rules) == hash(spmd.Rules(TABLE))
  assert rules != spmd.Rules(*TABLE, unmatched='error')
  assert rules == TABLE
  assert tuple(rules) == rules.clauses == TABLE
  assert len(rules) == 5
  assert repr(spmd.Rules(('a', 'x'), conflict='error')) == "Rules(('a', 'x'), conflict='error')"
  assert pickle.loads(pickle.dumps(rules)) == rules


def test_tables_add_in_order_and_keep_the_policies_of_the_table():
  strict = spmd.Rules(('a', 'x'), unmatched='error')
  assert (strict + (('b', 'y'),)).clauses == (('a', 'x'), ('b', 'y'))
  assert ((('b', 'y'),) + strict).clauses == (('b', 'y'), ('a', 'x'))
  assert (strict + (('b', 'y'),)).policies.unmatched == 'error'
  assert spmd.Rules(strict, (('b', 'y'), ('c', None)), ('d', 'z')).clauses == (
    ('a', 'x'),
    ('b', 'y'),
    ('c', None),
    ('d', 'z'),
  )


def test_of_keeps_the_table_it_is_given():
  rules = spmd.Rules(*TABLE)
  assert spmd.Rules.of(rules) is rules
  assert spmd.Rules.of(rules, conflict='error').policies.conflict == 'error'


def test_decisions_say_which_rule_and_who_was_skipped():
  resolution = spmd.Rules(*TABLE).resolve(('mlp', 'heads', 'embed', 'other', None))
  assert resolution.spec == P('data', 'model', None, None, None)
  mlp, heads, embed, other, nothing = resolution.decisions
  assert (mlp.rule, mlp.axes, mlp.skipped) == (3, 'data', (Skipped(2, 'taken', ('model',)),))
  assert (heads.rule, heads.axes, heads.skipped) == (1, 'model', ())
  assert (embed.rule, embed.axes) == (4, None)
  assert (other.rule, other.axes, other.skipped) == (None, None, ())
  assert (nothing.rule, nothing.name) == (None, None)
  assert resolution.problems == ()


def test_a_rule_after_the_deciding_one_is_skipped_as_decided():
  decision = spmd.Rules(('a', None), ('a', 'x')).resolve(('a',)).decisions[0]
  assert decision.skipped == (Skipped(1, 'decided', ('x',)),)


def test_sizes_that_do_not_divide():
  table = (('v', 'model'), ('v', 'data'))
  sizes = {'data': 2, 'model': 4}
  strict, following, replicating = (
    spmd.Rules(*table, indivisible=policy).resolve(('v',), (6,), sizes)
    for policy in ('error', 'next', 'replicate')
  )
  assert len(strict.problems) == 1
  assert following.spec == P('data')
  assert following.decisions[0].skipped == (Skipped(0, 'indivisible', ('model',)),)
  assert replicating.spec == P(None)
  assert replicating.decisions[0].rule == 0
  assert not following.problems + replicating.problems


def test_axes_that_a_mesh_lacks():
  rules = spmd.Rules(('a', ('pod', 'data')), ('b', 'pod'), ('b', 'model'), missing_axis='drop')
  resolution = rules.resolve(('a', 'b'), None, {'data': 2, 'model': 4})
  assert resolution.spec == P('data', 'model')
  assert resolution.decisions[1].skipped == (Skipped(1, 'missing', ('pod',)),)


def test_axis_names_of_an_entry():
  assert axis_names(None) == axis_names(()) == axis_names(P.UNCONSTRAINED) == ()
  assert axis_names('x') == ('x',)
  assert axis_names(('x', ('y',))) == ('x', 'y')


NAMES = st.lists(st.sampled_from(['a', 'b', 'c', 'd', None]), max_size=4).filter(
  lambda names: len([n for n in names if n]) == len({n for n in names if n})
)
AXES = st.sampled_from([None, 'x', 'y', 'z', ('x', 'y'), ('z', 'y'), ('x', 'y', 'z'), ()])
TABLES = st.lists(st.tuples(st.sampled_from(['a', 'b', 'c', 'd']), AXES), max_size=8)


@given(NAMES, TABLES, st.data(), st.sampled_from(['error', 'next', 'replicate']))
def test_no_axis_twice_and_every_spec_divides(names, table, data, indivisible):
  sizes = {'x': 2, 'y': 3, 'z': 4}
  shape = tuple(data.draw(st.integers(1, 24)) for _ in names)
  resolution = spmd.Rules(*table, indivisible=indivisible).resolve(names, shape, sizes)
  used = [axis for entry in resolution.spec for axis in axis_names(entry)]
  assert len(used) == len(set(used))
  divides = all(
    size % jnp.prod(jnp.array([1] + [sizes[a] for a in axis_names(entry)])) == 0
    for size, entry in zip(shape, tuple(resolution.spec) + (None,) * len(shape), strict=False)
  )
  assert divides or (indivisible == 'error' and resolution.problems)


@given(NAMES, TABLES)
def test_every_decision_can_be_replayed(names, table):
  """The deciding rule names the dimension and gives its axes; every skipped one had a reason."""
  resolution = spmd.Rules(*table).resolve(names)
  for decision in resolution.decisions:
    if decision.rule is not None:
      assert table[decision.rule][0] == decision.name
      assert axis_names(table[decision.rule][1]) == axis_names(decision.axes)
    for skip in decision.skipped:
      assert table[skip.rule][0] == decision.name
    considered = {skip.rule for skip in decision.skipped} | {decision.rule} - {None}
    assert (
      considered == {i for i, (name, _) in enumerate(table) if name == decision.name}
      or not decision.name
    )


@pytest.mark.parametrize(
  'policy, other',
  [
    ('unmatched', 'error'),
    ('conflict', 'error'),
    ('indivisible', 'next'),
    ('missing_axis', 'drop'),
    ('short_names', 'error'),
  ],
)
def test_policies_are_shown_when_changed(policy, other):
  assert f"{policy}='{other}'" in repr(spmd.Rules(**{policy: other}))


def test_a_table_equals_flaxs_tuple_unless_its_policies_are_its_own():
  pairs = (('batch', 'data'), ('vocab', ('data', 'model')))
  rules = spmd.Rules(*pairs)
  assert rules == pairs and pairs == rules and hash(rules) == hash(pairs)
  assert rules != pairs[:1] and rules != (*pairs, ('embed', None)) and rules != list(pairs)
  assert spmd.Rules(*pairs, short_names='error') != pairs
  assert {rules: 'found'}[pairs] == 'found'


EVERY_KIND = (
  ('batch', 'data'),
  ('kernel$', P(None, 'model')),
  ('^opt_state/', spmd.Rules(('mu', P()), spmd.fsdp('data'))),
  spmd.fsdp(('data', 'model'), min_size=8),
  ('@weights', spmd.fsdp('data')),
)


def test_a_table_of_every_kind_is_a_value():
  rules = spmd.Rules(*EVERY_KIND)
  assert rules == spmd.Rules.of(list(EVERY_KIND)) == pickle.loads(pickle.dumps(rules))
  assert hash(rules) == hash(spmd.Rules(*EVERY_KIND)) and rules.clauses == EVERY_KIND
  assert repr(rules) == (
    "Rules(('batch', 'data'), ('kernel$', P(None, 'model')), ('^opt_state/', Rules(('mu', P()), "
    "fsdp('data'))), fsdp(('data', 'model'), min_size=8), ('@weights', fsdp('data')))"
  )
  assert rules.pairs == (('batch', 'data'),) and rules.annotations == {'weights': 4}
  assert eval(repr(rules), {'Rules': spmd.Rules, 'fsdp': spmd.fsdp, 'P': P}) == rules


def test_tables_of_every_kind_add():
  rules = spmd.Rules(*EVERY_KIND[:2]) + EVERY_KIND[2:]
  assert rules == spmd.Rules(*EVERY_KIND) == EVERY_KIND[:2] + spmd.Rules(*EVERY_KIND[2:])
  assert (rules + spmd.fsdp('model')).clauses[-1] == spmd.fsdp('model')


def test_flax_sees_the_logical_rules_of_a_table():
  with spmd.logical_axis_rules(EVERY_KIND):
    assert nn.get_logical_axis_rules() == spmd.get_logical_axis_rules() == (('batch', 'data'),)


def test_every_rule_has_an_id():
  rules = spmd.Rules(*EVERY_KIND)
  ids = [rule for rule, _ in rules.all_rules(annotations=True)]
  assert ids == [0, 1, (2, 0), (2, 1), 3, 4]
  assert all(rules.at(rule) == clause.written for rule, clause in rules.all_rules())
