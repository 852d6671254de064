"""Translations: the tables of EasyLM, big_vision and Praxis, against restatements of what these libraries do with them."""

import math
import re
import textwrap
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import translate
from flax_spmd._src.names.unit_paths import leaves_with_paths

MESH = spmd.abstract_mesh({'data': 2, 'model': 4})
SIZES = {'data': 2, 'model': 4}
PATTERNS = ['.*', 'params/.*', 'a/w', '.*w', 'w', '^params', 'params/(a|b)/w', 'w$']


def entries(spec):
  """A spec without the None at its end."""
  return tuple(spec)[: max((i + 1 for i, entry in enumerate(spec) if entry is not None), default=0)]


def specs(layout, tree):
  return [entries(sharding.spec) for sharding in jax.tree.leaves(layout.sharding(tree))]


@st.composite
def trees(draw):
  shapes = st.lists(st.sampled_from([1, 4, 8, 24, 64]), max_size=3).map(tuple)
  dtypes = st.sampled_from([jnp.float32, jnp.bfloat16, jnp.int32])

  def array():
    return jax.ShapeDtypeStruct(draw(shapes), draw(dtypes))

  return {'params': {'a': {'w': array(), 'b': array()}, 'b': {'w': array()}, 'w': array()}, 'n': array()}


SPECS = st.sampled_from(
  [P(), P(None), P('data'), P(None, 'model'), P('data', 'model'), P(('data', 'model'))]
)


@given(trees(), st.lists(st.tuples(st.sampled_from(PATTERNS), SPECS), min_size=1, max_size=4))
def test_easylm_the_first_expression_that_is_found_decides(tree, table):
  expected, unmatched = [], []
  for path, leaf in leaves_with_paths(tree):
    matches = [spec for pattern, spec in table if re.search(pattern, path)]
    one = math.prod(leaf.shape) == 1
    expected.append(() if one or not matches else entries(matches[0]))
    if not one and not matches:
      unmatched.append(path)
  layout = spmd.Layout(MESH, translate.from_easylm(table), indivisible='replicate')
  too_long = any(
    len(spec) > len(leaf.shape)
    for (path, leaf) in leaves_with_paths(tree)
    for spec in [next((spec for pattern, spec in table if re.search(pattern, path)), P())]
    if math.prod(leaf.shape) > 1
  )
  if unmatched or too_long:
    with pytest.raises(spmd.errors.FlaxSpmdError) as error:
      layout.spec(tree)
    assert all(f'{path}: no rule applies' in str(error.value) for path in unmatched)
  else:
    found = specs(layout, tree)
    assert all(
      a == b or not divides(b, leaf)
      for a, b, leaf in zip(found, expected, jax.tree.leaves(tree), strict=True)
    )


def divides(spec, leaf):
  axes = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
  return all(
    size % math.prod(SIZES[a] for a in each) == 0 for each, size in zip(axes, leaf.shape, strict=False)
  )


def test_easylm_optimizer_state_and_what_no_expression_matches():
  params = {'attention': {'wq': {'kernel': jnp.ones((8, 8))}}, 'norm': {'kernel': jnp.ones(8)}}
  state = jax.eval_shape(lambda: TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3)))
  table = [('attention/(wq|wk|wv)/kernel', P('data', 'model')), ('.*', P(None))]
  sharded = spmd.Layout(MESH, translate.from_easylm(table)).spec(state)
  assert sharded.opt_state[0].mu['attention']['wq']['kernel'] == P('data', 'model')
  assert sharded.step == P()
  with pytest.raises(spmd.errors.UnmatchedNameError) as error:
    spmd.Layout(MESH, translate.from_easylm(table[:1])).spec(params)
  assert str(error.value) == (
    'norm/kernel: no rule applies to this array of shape (8,), which has no names.\n'
    "Fix: add a rule for this path; ('.*', PartitionSpec()) at the end replicates the rest."
  )


def test_easylm_an_empty_table_is_an_error():
  with pytest.raises(spmd.errors.RulesError) as error:
    translate.from_easylm([])
  assert str(error.value) == (
    'The table of EasyLM is empty, so it matches no array.\n'
    'Fix: pass the pairs that get_partition_rules() of the model returns.'
  )


@pytest.mark.parametrize('pair', [('wq', None), ('wq', ('data', 'model')), 'wq', 5, (5, P())])
def test_easylm_pairs_without_a_spec(pair):
  with pytest.raises(spmd.errors.RulesError) as error:
    translate.from_easylm([('wo', P('data')), pair])
  assert str(error.value) == (
    f'Pair 1 is {pair!r}.\nFix: write pairs of a path regex and a PartitionSpec.'
  )


def test_no_tables():
  for read in (translate.from_easylm, lambda table: translate.from_big_vision(table, SIZES)):
    with pytest.raises(spmd.errors.RulesError, match=r'Pair 0 is 5\.'):
      read(5)


TACTICS = {
  'replicate': lambda spec, leaf: spec,
  'fsdp(axis="data", min_size_to_shard_mb=0)': lambda spec, leaf: filled(spec, leaf, 'data', 0),
  'fsdp("model", 0.0001)': lambda spec, leaf: filled(spec, leaf, 'model', 0.0001),
  'fsdp(axis=["data", "model"])': lambda spec, leaf: filled(spec, leaf, ('data', 'model'), 4),
  'shard_dim("model", -1, ignore_ndim_error=True)': lambda spec, leaf: at_last(spec, 'model'),
}


def filled(spec, leaf, axis, megabytes):
  """The largest dimension that is open and that the axis divides; of equal ones the last of numpy's order."""
  parts = math.prod(SIZES[each] for each in ((axis,) if isinstance(axis, str) else axis))
  if math.prod(leaf.shape) * leaf.dtype.itemsize <= megabytes * 2**20:
    return spec
  for dim in reversed(np.argsort(leaf.shape).tolist()):
    if spec[dim] is None and leaf.shape[dim] % parts == 0:
      return [*spec[:dim], axis, *spec[dim + 1 :]]
  return spec


def at_last(spec, axis):
  return [*spec[:-1], axis] if len(spec) > 1 else spec


@given(
  trees(),
  st.lists(
    st.tuples(st.sampled_from(PATTERNS), st.sampled_from(sorted(TACTICS))), min_size=1, max_size=4
  ),
)
def test_big_vision_the_first_expression_that_matches_the_whole_path_decides(tree, strategy):
  layout = spmd.Layout(MESH, translate.from_big_vision(strategy, SIZES), indivisible='replicate')
  for (path, leaf), found in zip(leaves_with_paths(tree), specs(layout, tree), strict=True):
    tactic = next((tactic for pattern, tactic in strategy if re.fullmatch(pattern, path)), 'replicate')
    expected = entries(TACTICS[tactic]([None] * len(leaf.shape), leaf))
    assert found == expected or not divides(expected, leaf)


def test_big_vision_the_parts_of_a_tactic_apply_one_after_the_other():
  tree = {
    'w': spmd.LogicallyPartitioned(jax.ShapeDtypeStruct((64, 64, 8), jnp.float32), ('a', None, 'b'))
  }
  strategy = [('w', 'logical_partitioning|fsdp("data", 0)')]
  rules = translate.from_big_vision(strategy, MESH, [('b', 'model')])
  assert spmd.Layout(MESH, rules).spec(tree)['w'] == P(None, 'data', 'model')
  assert repr(rules.clauses[0]) == "big_vision('w', 'logical_partitioning|fsdp(\"data\", 0)')"


def test_big_vision_errors():
  strategy = [('.*', 'fsdp'), ('(', 'replicate'), ('a', 'zero(1)'), 'b', ('c', 'fsdp("data", size=1)')]
  with pytest.raises(spmd.errors.RulesError) as error:
    translate.from_big_vision(strategy, SIZES)
  assert str(error.value) == textwrap.dedent("""\
    Pair 0 ('.*', 'fsdp') has a tactic that is none of big_vision.
    Pair 1 ('(', 'replicate') has an invalid expression: missing ), unterminated subpattern at position 0.
    Pair 2 ('a', 'zero(1)') has a tactic that is none of big_vision.
    Pair 3 is 'b'.
    Pair 4 ('c', 'fsdp("data", size=1)') has a tactic that is none of big_vision.
    Fix: write replicate, fsdp(axis="..."), shard_dim("axis", dim) or logical_partitioning, joined by |.
    Fix: correct the expression.
    Fix: write pairs of a path regex and a tactic.""")
  with pytest.raises(spmd.errors.MeshAxisError) as error:
    translate.from_big_vision([('.*', 'fsdp("fsdp")')], SIZES)
  assert str(error.value) == (
    "Pair 0 big_vision('.*', 'fsdp(\"fsdp\")') has axis 'fsdp', which the mesh {'data': 2, 'model': 4} lacks.\n"
    'Fix: pass the mesh that the strategy is written for.'
  )


@pytest.mark.parametrize(
  'tactic',
  [
    'fsdp(axis=3)',
    'fsdp(axis=[])',
    'fsdp("data", "4")',
    'shard_dim("data", "0")',
    'shard_dim("data", 0.5)',
    'shard_dim("data", True)',
    'shard_dim("data", 0, "no")',
  ],
)
def test_big_vision_arguments_of_wrong_kinds(tactic):
  with pytest.raises(spmd.errors.RulesError) as error:
    translate.from_big_vision([('.*', tactic)], SIZES)
  assert str(error.value).startswith(
    f"Pair 0 ('.*', {tactic!r}) has a tactic that is none of big_vision."
  )


@pytest.mark.parametrize(
  'tactic, text',
  [
    (
      'shard_dim("data", 2)',
      'shards dimension 2 of an array of shape (8, 8).\n'
      'Fix: choose a dimension that the array has, or pass ignore_ndim_error=True.',
    ),
    (
      'shard_dim("data", 0)|shard_dim("model", 0)',
      'shards dimension 0 twice.\nFix: shard every dimension once.',
    ),
    (
      'shard_dim("data", 0)|replicate',
      "replicates an array that it has sharded as P('data', None).\nFix: remove replicate, or the parts before it.",
    ),
  ],
)
def test_big_vision_a_tactic_that_does_not_fit_an_array(tactic, text):
  layout = spmd.Layout(MESH, translate.from_big_vision([('w', tactic)], SIZES))
  with pytest.raises(spmd.errors.RulesError) as error:
    layout.spec({'w': jnp.ones((8, 8))})
  assert str(error.value) == f"w: big_vision('w', {tactic!r}) {text}"


def weight(mapping, **more):
  return types.SimpleNamespace(tensor_split_dims_mapping=mapping, **more)


def test_praxis_mappings_are_indices_names_or_lists_of_these():
  axes = ('replica', 'data', 'mdl')
  weights = {
    'params': {
      'emb': {'w': weight([2, -1])},
      'ffn': {'w': weight(['data', ['replica', 'mdl']]), 'b': weight(None)},
      'stack': {'w': weight([-1, 1], full_split_dims_mapping=(-1, -1, 1))},
    }
  }
  layout = spmd.Layout(
    spmd.abstract_mesh({'replica': 1, 'data': 2, 'mdl': 4}), translate.from_praxis(weights, axes)
  )
  params = {
    'emb': {'w': jnp.ones((8, 8))},
    'ffn': {'w': jnp.ones((8, 8)), 'b': jnp.ones(8)},
    'stack': {'w': jnp.ones((3, 8, 8))},
  }
  state = {'params': params, 'opt_state': jax.eval_shape(optax.adam(1e-3).init, {'params': params})}
  expected = {
    'emb': {'w': P('mdl', None)},
    'ffn': {'w': P('data', ('replica', 'mdl')), 'b': P(None)},
    'stack': {'w': P(None, None, 'data')},
  }
  assert layout.spec(state)['params'] == expected
  assert layout.spec(state)['opt_state'][0].mu == {'params': expected}


def test_praxis_errors():
  with pytest.raises(spmd.errors.RulesError) as error:
    translate.from_praxis({'a': weight([3, 'tensor']), 'b': weight([0])}, ('data', 'mdl'))
  assert str(error.value) == textwrap.dedent("""\
    a: its split_dims_mapping [3, 'tensor'] has 3, which is no mesh axis of ('data', 'mdl').
    a: its split_dims_mapping [3, 'tensor'] has 'tensor', which is no mesh axis of ('data', 'mdl').
    Fix: pass the axes of the mesh that the model is written for, in their order.""")
  with pytest.raises(spmd.errors.RulesError) as error:
    translate.from_praxis({'a': jnp.ones(3)}, ('data',))
  assert str(error.value) == (
    'The tree has no weight with a tensor_split_dims_mapping.\n'
    'Fix: pass the WeightHParams of a model, as layer.abstract_init_with_metadata(...) returns them.'
  )


def test_praxis_weights_whose_paths_end_alike_have_their_own_rules():
  def weight(*mapping):
    return types.SimpleNamespace(tensor_split_dims_mapping=list(mapping))

  rules = translate.from_praxis({'w': weight(0, -1), 'x': {'w': weight(-1, 0)}}, ('data',))
  w = jnp.ones((8, 8))
  assert spmd.Layout(MESH, rules).spec({'params': {'w': w, 'x': {'w': w}}}) == {
    'params': {'w': P('data', None), 'x': {'w': P(None, 'data')}}
  }


def test_a_big_vision_tactic_leaves_python_numbers_replicated():
  rules = translate.from_big_vision([('.*', 'fsdp(axis="data", min_size_to_shard_mb=0)')], SIZES)
  assert spmd.Layout(MESH, rules).spec({'step': 0, 'w': jnp.ones((8, 4))}) == {
    'step': P(),
    'w': P('data', None),
  }
