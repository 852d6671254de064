"""Folding: patterns that stand for their arrays and no others, and rows that differ in nothing else."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd._src.plan.folding import fold_rows

LAYOUT = spmd.Layout({'data': 2, 'model': 4}, (('embed', 'data'), ('mlp', 'model')))
SHAPES = [(8,), (8, 8), (16, 8)]


def leaf(shape=(8,)):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def paths_of(pattern):
  """All paths that a pattern stands for, written independently of the code that makes patterns."""
  start = pattern.find('{')
  if start < 0:
    return [pattern]
  end = next(
    end
    for end in range(start, len(pattern))
    if pattern[start : end + 1].count('{') == pattern[start : end + 1].count('}')
  )
  inside, depth, parts = pattern[start + 1 : end], 0, ['']
  for character in inside:
    depth += (character == '{') - (character == '}')
    if character == ',' and not depth:
      parts.append('')
    else:
      parts[-1] += character
  choices = []
  for part in parts:
    run = re.fullmatch(r'(\d+)\.\.(\d+)', part)
    if run:
      width = len(run[1])
      choices += [f'{number:0{width}}' for number in range(int(run[1]), int(run[2]) + 1)]
    else:
      choices += paths_of(part)
  return [pattern[:start] + one + rest for one in choices for rest in paths_of(pattern[end + 1 :])]


KEYS = st.sampled_from(
  ['w', 'b', 'layers_0', 'layers_1', 'layers_2', 'layers_10', 'layers_03', '0', '7', 'a1b2']
)
PARAMS = st.recursive(
  st.sampled_from(SHAPES).map(leaf),
  lambda inner: (
    st.dictionaries(KEYS, inner, min_size=1, max_size=5) | st.lists(inner, min_size=1, max_size=4)
  ),
  max_leaves=25,
)


def adam_state(params):
  create = lambda params: TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
  return jax.eval_shape(create, params)


@given(PARAMS, st.sampled_from(['params', 'state', 'states']))
@example({'layers_0': {'0': leaf(), '7': leaf()}, 'layers_1': {'7': leaf()}}, 'params')
def test_every_array_is_in_one_fold_whose_pattern_stands_for_it(params, kind):
  tree = {'params': lambda: params, 'state': lambda: adam_state(params)}.get(
    kind, lambda: [adam_state(params)] * 2
  )()
  rows = LAYOUT.rows(tree)
  folds = fold_rows(rows)
  assert sorted(row.path for fold in folds for row in fold.rows) == sorted(row.path for row in rows)
  for fold in folds:
    patterns = filter(None, (fold.path, fold.copies))
    paths = itertools.chain.from_iterable(map(paths_of, patterns))
    assert sorted(paths) == sorted(row.path for row in fold.rows)
    assert len({(row.shape, row.dtype, row.spec, row.decisions) for row in fold.rows}) == 1
    assert (fold.count, fold.bytes) == (len(fold.rows), sum(row.bytes for row in fold.rows))
    assert fold.bytes_per_device == sum(row.bytes_per_device for row in fold.rows)
  first = [min(rows.index(row) for row in fold.rows) for fold in folds]
  assert first == sorted(first)


def folded(tree, layout=LAYOUT):
  folds = fold_rows(layout.rows(tree))
  return [' and '.join(filter(None, (fold.path, fold.copies))) for fold in folds]


@pytest.mark.parametrize(
  'names, pattern',
  [
    (['layers_0', 'layers_1'], 'layers_{0,1}'),
    (['layers_0', 'layers_1', 'layers_2'], 'layers_{0..2}'),
    (['layers_0', 'layers_2', 'layers_4', 'layers_5', 'layers_6'], 'layers_{0,2,4..6}'),
    (['b08', 'b09', 'b10', 'b11'], 'b{08..11}'),
    (['b8', 'b9', 'b10'], 'b{8..10}'),
  ],
)
def test_numbers(names, pattern):
  assert folded({name: leaf() for name in names}) == [pattern]


def test_numbers_that_are_no_product_are_several_rows():
  tree = {'e0': {'h0': leaf(), 'h1': leaf()}, 'e1': {'h0': leaf(), 'h1': leaf()}, 'e2': {'h0': leaf()}}
  assert folded(tree) == ['e{0,1}/h{0,1}', 'e2/h0']


def test_a_layer_that_differs_is_a_row_of_its_own():
  box = spmd.LogicallyPartitioned
  tree = {f'layers_{i}': box(leaf((8, 16)), ('embed', 'mlp')) for i in range(32)}
  rest = 'layers_{0..4,6..31}'
  assert folded(tree) == ['layers_{0..31}']
  assert folded(tree | {'layers_5': box(leaf((8, 32)), ('embed', 'mlp'))}) == [rest, 'layers_5']
  assert folded(tree | {'layers_5': box(leaf((8, 16)), ('mlp', 'embed'))}) == [rest, 'layers_5']
  half = box(jax.ShapeDtypeStruct((8, 16), jnp.bfloat16), ('embed', 'mlp'))
  assert folded(tree | {'layers_5': half}) == [rest, 'layers_5']
  by_path = LAYOUT.replace(rules=(('layers_5', P()), *LAYOUT.rules))
  assert folded(tree, by_path) == [rest, 'layers_5']


def test_a_layer_that_is_stored_elsewhere_is_a_row_of_its_own():
  state = LAYOUT.shard({f'layers_{i}': np.ones((8, 16)) for i in range(4)})
  assert folded(state) == ['layers_{0..3}']
  state['layers_2'] = LAYOUT.shard(state['layers_2'], P('data'))
  assert folded(state) == ['layers_{0,1,3}', 'layers_2']
  assert folded(state | {'layers_2': np.ones((8, 16))}) == ['layers_{0,1,3}', 'layers_2']


def test_spellings_of_the_planned_sharding_are_equal():
  state = LAYOUT.shard({f'layers_{i}': np.ones((8, 16)) for i in range(2)})
  state['layers_1'] = LAYOUT.shard(state['layers_1'], P(None, None))
  assert folded(state) == ['layers_{0,1}']


def test_copies_that_are_sharded_otherwise_are_a_row_of_their_own():
  state = adam_state({'wi': leaf((64, 64)), 'wo': leaf((64, 32))})
  zero1 = LAYOUT.replace(rules=spmd.presets.zero1(min_size=1))
  assert folded(state, zero1) == [
    'step',
    'params/wi',
    'params/wo',
    'opt_state/0/count',
    'opt_state/0/{mu,nu}/wi',
    'opt_state/0/{mu,nu}/wo',
  ]


def test_copies_beside_parameters_at_the_root():
  params = {'w': leaf((8, 16))}
  tree = params | {'optimizer': jax.eval_shape(optax.adam(1e-3).init, params)}
  assert folded(tree) == ['optimizer/0/count', 'w and optimizer/0/{mu,nu}/w']


def test_equal_arrays_of_other_names_are_not_copies():
  assert folded({'encoder': {'w': leaf()}, 'decoder': {'w': leaf()}}) == ['decoder/w', 'encoder/w']


def test_copies_of_two_possible_parameters_join_neither():
  tree = {'params': {'w': leaf()}, 'slow': {'w': leaf()}}
  tree['opt'] = jax.eval_shape(optax.adam(1e-3).init, tree['params'])
  assert folded(tree) == ['opt/0/count', 'opt/0/{mu,nu}/w', 'params/w', 'slow/w']


def test_paths_with_one_text_are_kept_apart():
  rows = LAYOUT.rows({'a': {'0': leaf()}, 'a/0': leaf(), 'a/1': leaf()})
  assert sum(fold.count for fold in fold_rows(rows)) == 3


def test_factored_moments_fold_over_layers():
  params = {
    f'layers_{i}': spmd.LogicallyPartitioned(jnp.ones((16, 32)), ('embed', 'mlp')) for i in range(3)
  }
  tx = optax.adafactor(1e-3, min_dim_size_to_factor=8)
  state = jax.eval_shape(lambda: TrainState.create(apply_fn=None, params=params, tx=tx))
  assert {'opt_state/0/v_row/layers_{0..2}', 'opt_state/0/v_col/layers_{0..2}'} <= set(folded(state))
  table = str(spmd.explain(LAYOUT, state))
  assert 'embed → data (0) [subset of their parameters]' in table


def test_patterns_of_the_reader_above():
  assert paths_of('{,o/{08..10,x}/}w') == ['w', 'o/08/w', 'o/09/w', 'o/10/w', 'o/x/w']
