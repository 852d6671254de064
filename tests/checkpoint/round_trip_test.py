"""Any tree of arrays survives a save and a restore under any layouts; and is flattened as by JAX."""

import shutil
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import flax_spmd as spmd
from flax_spmd import checkpoint
from flax_spmd._src.checkpoint.storage import skeleton
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import CheckpointError
from tests.checkpoint.states import assert_equal
from tests.strategies import Data, Pair, Struct, Word, trees_of_all_nodes

DTYPES = [
  'float32',
  'bfloat16',
  'float16',
  'float8_e4m3fn',
  'int8',
  'uint8',
  'int32',
  'uint32',
  'bool',
  'complex64',
  'int4',
]
LAYOUTS = [
  spmd.Layout({'x': 2, 'y': 4}, (('a', 'x'), ('b', 'y'))),
  spmd.Layout({'x': 8}, (('b', 'x'),)),
  spmd.Layout(spmd.make_mesh({'x': 2}, devices=jax.devices()[2:4]), (('a', 'x'),)),
  spmd.Layout({'x': 4, 'y': 2}, (('a', ('x', 'y')),)),
]
SIZES = {'a': st.sampled_from([8, 16]), 'b': st.sampled_from([8, 24]), None: st.sampled_from([1, 3, 0])}


@st.composite
def arrays(draw):
  """An array, boxed or not, with a rank of at most 3; of any dtype, with any bits."""
  names = draw(st.lists(st.sampled_from(['a', 'b', None]), max_size=3).filter(_no_repeats))
  shape = tuple(draw(SIZES[name]) for name in names)
  dtype = draw(st.sampled_from(DTYPES))
  seed = draw(st.integers(0, 2**32 - 1))
  value = _random(shape, dtype, seed)
  return spmd.LogicallyPartitioned(value, tuple(names)) if draw(st.booleans()) and names else value


def _no_repeats(names):
  return all(names.count(name) == 1 for name in names if name)


def _random(shape, dtype, seed):
  raw = np.random.default_rng(seed).integers(0, 256, (*shape, jnp.dtype(dtype).itemsize), np.uint8)
  if dtype in ('bool', 'int4'):
    return jnp.asarray(
      raw[..., 0] % 2 if dtype == 'bool' else raw[..., 0].astype(int) % 16 - 8, jnp.dtype(dtype)
    )
  bits = np.ascontiguousarray(raw).view(jnp.dtype(dtype))[..., 0]
  return bits


_numbers = st.sampled_from([0, 3, -(2**40), True, 0.5, float('inf')])
_keys = st.integers(0, 9).map(jax.random.key)
_names = st.sampled_from(['w', 'params', '0', 'a-b', 'ü'])


def nodes(child):
  return st.one_of(
    st.dictionaries(_names, child, max_size=3),
    st.lists(child, max_size=3),
    st.lists(child, max_size=2).map(tuple),
    *(st.builds(kind, child, child) for kind in (Pair, Struct, Data)),
  )


states = st.recursive(
  arrays() | _numbers | _keys | st.sampled_from([None, {}, ()]), nodes, max_leaves=6
).filter(lambda tree: bool(jax.tree.leaves(tree)))


def check(state, saved_by, restored_by, pack, with_target, boxed):
  folder = tempfile.mkdtemp()
  try:
    placed = jax.tree.map(
      lambda x, s: jax.device_put(x, s) if hasattr(x, 'dtype') else x, state, sharding(saved_by, state)
    )
    checkpoint.save(f'{folder}/a', placed, layout=saved_by, pack=pack)
    if with_target:
      target = abstract(restored_by, state if boxed else spmd.unbox(state, apply_constraint=False))
      restored = checkpoint.restore(f'{folder}/a', target)
      assert jax.tree.structure(restored) == jax.tree.structure(target)
      for leaf, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True):
        if hasattr(expected, 'sharding'):
          assert leaf.sharding.is_equivalent_to(expected.sharding, leaf.ndim)
        else:
          assert type(leaf) is type(expected)
      assert_equal(state, restored)
    else:
      restored = checkpoint.restore(f'{folder}/a', layout=restored_by, boxed=boxed)
      one, two = (by_path(tree) for tree in (state, restored))
      assert set(one) == set(two)
      assert_equal([one[path] for path in one], [two[path] for path in one])
  finally:
    shutil.rmtree(folder)


def by_path(tree):
  flat = skeleton.flatten(spmd.unbox(tree, apply_constraint=False))
  return dict(zip(skeleton.paths(flat.skeleton), flat.leaves, strict=True))


def sharding(layout, state):
  shardings = jax.tree.leaves(layout.sharding(state))
  return jax.tree.structure(state).unflatten(shardings)


def abstract(layout, state):
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) if hasattr(x, 'dtype') else x,
    state,
    sharding(layout, state),
  )


CASES = st.tuples(
  states,
  st.sampled_from(LAYOUTS),
  st.sampled_from(LAYOUTS),
  st.sampled_from([0, 200, 1 << 20]),
  st.booleans(),
  st.booleans(),
)


@settings(max_examples=30)
@given(CASES)
@pytest.mark.filterwarnings('ignore:Every device will hold all')
def test_any_tree_survives(case):
  check(*case)


@pytest.mark.exhaustive
@given(CASES)
@pytest.mark.filterwarnings('ignore:Every device will hold all')
def test_any_tree_survives_long(case):
  check(*case)


@pytest.mark.parametrize(
  ('tree', 'text'),
  [
    (
      {Word('ab'): 1, 'b': 2},
      'Two keys at (root) are equal as text.\nFix: give them names that differ as text.',
    ),
    (
      {'x': {Word('ab'): 1, 'b': 2}},
      'Two keys at x are equal as text.\nFix: give them names that differ as text.',
    ),
    (
      {'': Pair(1, 2)},
      "'/first' is not safe as a file path.\n"
      "'/second' is not safe as a file path.\n"
      'Fix: use no empty keys, no "/", "." or "\\" in the keys of the state, and no null or half characters.',
    ),
    (
      {'a\ud800': 1},
      "'a\\ud800' is not safe as a file path.\n"
      'Fix: use no empty keys, no "/", "." or "\\" in the keys of the state, and no null or half characters.',
    ),
    (
      {'a.b': 1, 'a': {'b': 2}},
      'a.b and a/b would be one file.\n'
      'Fix: use no empty keys, no "/", "." or "\\" in the keys of the state, and no null or half characters.',
    ),
    (
      {'high': 2**64 - 1, 'low': -(2**63), 'n': 2**64, 'm': -(2**63) - 1},
      'm is an integer of more than 64 bits.\n'
      'n is an integer of more than 64 bits.\n'
      'Fix: split it into numbers of 64 bits.',
    ),
  ],
)
def test_states_that_cannot_be_saved(tmp_path, tree, text):
  with pytest.raises(CheckpointError) as caught:
    checkpoint.save(tmp_path / 'a', tree, layout=LAYOUTS[0])
  assert str(caught.value) == text


@given(trees_of_all_nodes())
def test_trees_are_flattened_as_by_jax(tree):
  tree = spmd.unbox(tree, apply_constraint=False)
  try:
    flat = skeleton.flatten(tree)
  except CheckpointError:  # as test_states_that_cannot_be_saved has it
    assume(False)
    return
  with_paths = jax.tree_util.tree_leaves_with_path(tree)
  assert len(flat.leaves) == len(with_paths)
  assert all(ours is theirs for ours, (_, theirs) in zip(flat.leaves, with_paths, strict=True))
  assert [path or skeleton.ROOT for path in skeleton.paths(flat.skeleton)] == [
    path_string(path) for path, _ in with_paths
  ]
  again = skeleton.unflatten(flat.skeleton, lambda number: number)
  assert again == flat.skeleton
  pruned = skeleton.unflatten(flat.skeleton, {n: n // 2 for n in range(0, len(with_paths), 2)}.get)
  assert skeleton.paths(pruned) == skeleton.paths(flat.skeleton)[::2]
