"""Collectives between shardings, and shardings after reshapes."""

import math
import random

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flax_spmd._src.estimate.graph import GraphValue, shard_size
from flax_spmd._src.estimate.operations import reshaped
from flax_spmd._src.estimate.resharding import (
  CollectiveOp,
  is_ambiguous,
  reduce_partial_sum,
  reshard,
  wire_bytes,
)
from flax_spmd._src.hlo.counts import count

SIZES = {'a': 2, 'b': 4, 'c': 2}
SHORT = {'a': 2, 'b': 2, 'c': 2}


@st.composite
def specs(draw):
  axes = draw(st.permutations('abc'))
  dims = [draw(st.integers(0, 3)) for _ in axes]
  return tuple(tuple(axis for axis, its_dim in zip(axes, dims) if its_dim == dim) for dim in range(3))


@given(before=specs(), after=specs())
def test_slicing_is_free_and_all_else_is_not(before, after):
  ops = reshard(GraphValue((16, 16, 16), 'f32'), before, after, SIZES)
  only_slices = all(axes == target[: len(axes)] for axes, target in zip(before, after))
  assert (not ops) == only_slices
  assert wire_bytes(ops, SIZES) >= 0
  assert {axis.partition('[')[0] for op in ops for axis in op.axes} <= set('abc')


@given(before=specs())
def test_replicating_receives_all_other_shards(before):
  value = GraphValue((16, 16, 16), 'bf16')
  ops = reshard(value, before, ((), (), ()), SIZES)
  received = sum(op.bytes * (math.prod(SIZES[axis] for axis in op.axes) - 1) for op in ops)
  assert received == pytest.approx(2 * (16**3 - shard_size(value.shape, before, SIZES)))


@given(before=specs(), after=specs())
def test_a_sum_without_partial_axes_is_only_resharded(before, after):
  value = GraphValue((16, 16, 16), 'f32')
  assert reduce_partial_sum(value, before, (), after, SIZES) == reshard(value, before, after, SIZES)


def spec(text):
  return tuple(() if one == '.' else tuple(one.split('+')) for one in text.split())


# What XLA compiles for these: the kinds, and the bytes that each device sends, in shards of the first sharding.
@pytest.mark.parametrize(
  ('before', 'after', 'kinds', 'sent'),
  [
    ('a .', '. a', 'all-to-all', 1 / 2),
    ('a+b .', '. a+b', 'all-to-all', 7 / 8),
    ('a c', 'c a', 'collective-permute', 1),
    ('a+c .', 'c+a .', 'collective-permute', 1),
    ('a+c .', 'c .', 'collective-permute all-gather', 2),
    ('c .', '. a', 'collective-permute', None),
    ('. a', 'c+a .', 'all-gather', 1),
    ('. a+b', 'a .', 'all-gather', 7),
    ('. b+a', 'a .', 'all-to-all all-gather', 7 / 2),
    ('a b', 'b .', 'all-gather all-to-all', 5 / 2),
    ('b .', '. a', 'collective-permute all-gather', None),
    ('a+c . b', '. c+a .', 'all-to-all collective-permute all-gather', 19 / 4),
    ('b . a', 'a b .', 'all-to-all all-to-all', 5 / 4),
  ],
)
def test_changes_are_made_as_xla_makes_them(before, after, kinds, sent):
  value = GraphValue((16,) * len(spec(before)), 'f32')
  ops = reshard(value, spec(before), spec(after), SIZES)
  if sent is not None:
    assert ' '.join(op.kind for op in ops) == kinds
    shard = 4 * shard_size(value.shape, spec(before), SIZES)
    assert wire_bytes(ops, SIZES) == pytest.approx(sent * shard)


def test_several_all_to_alls_to_one_dimension_are_ambiguous():
  value = GraphValue((16, 16, 16), 'f32')
  assert not is_ambiguous(reshard(value, spec('a . .'), spec('. a .'), SIZES))
  assert not is_ambiguous(reshard(value, spec('a+c . .'), spec('c . .'), SIZES))
  assert not is_ambiguous(reshard(value, spec('a+c . b'), spec('. c+a .'), SIZES))
  assert is_ambiguous(reshard(value, spec('c a b'), spec('. . a+c+b'), SIZES))


def test_a_sum_is_scattered_only_over_the_axes_that_cut_it_first():
  value = GraphValue((16, 16), 'f32')
  kinds = lambda after: [
    op.kind for op in reduce_partial_sum(value, spec('. .'), ('a',), spec(after), SIZES)
  ]
  assert kinds('a .') == kinds('a+b .') == ['reduce-scatter']
  assert kinds('b+a .') == ['all-reduce']


def compiled_reshard(before, after):
  mesh = jax.make_mesh(tuple(SHORT.values()), tuple(SHORT), axis_types=(AxisType.Auto,) * len(SHORT))
  old, new = (
    NamedSharding(mesh, PartitionSpec(*(axes or None for axes in one))) for one in (before, after)
  )
  function = jax.jit(lambda x: x + 1, in_shardings=old, out_shardings=new)
  array = jax.ShapeDtypeStruct((16, 16, 16), jnp.float32)
  return sum(count(function.lower(array).compile().as_text(), SHORT).by_kind().values())


@pytest.mark.exhaustive
def test_reshards_that_are_not_ambiguous_agree_with_compiled_ones():
  rng = random.Random(3)
  axes = lambda: {axis: rng.randrange(4) for axis in rng.sample([*SHORT], 3)}  # at 3: none
  pairs = [
    [tuple(tuple(a for a in one if one[a] == dim) for dim in range(3)) for one in (axes(), axes())]
    for _ in range(100)
  ]
  value, right, found = GraphValue((16, 16, 16), 'f32'), 0, 0
  for before, after in pairs:
    ops = reshard(value, before, after, SHORT)
    if not is_ambiguous(ops):
      found += 1
      right += wire_bytes(ops, SHORT) == pytest.approx(compiled_reshard(before, after), rel=0.02)
  assert found >= 80
  assert right >= 0.8 * found


@pytest.mark.parametrize(
  ('shape', 'spec', 'new_shape', 'result'),
  [
    ((8, 6), (('a',), ()), (48,), (('a',),)),
    ((8, 6), ((), ('a',)), (48,), ((),)),
    ((48,), (('b',),), (8, 6), (('b',), ())),
    ((4, 12), (('b',), ('a',)), (48,), (('b', 'a'),)),
    ((1, 8), ((), ('a',)), (8, 1), (('a',), ())),
    ((8, 0), (('a',), ()), (0,), ((),)),
    ((0, 8), ((), ('a',)), (4, 2, 0), ((), (), ())),
    ((1536,), (('m',),), (12, 128), (('m[4/4]',), ())),
    ((1536,), (('m',),), (4, 384), (('m[4/4]',), ('m[2/8]',))),
    ((1536,), (('m',),), (3, 512), ((), ())),
  ],
)
def test_a_reshape_keeps_the_axes_that_still_divide(shape, spec, new_shape, result):
  assert reshaped(shape, spec, new_shape, SIZES | {'m': 8}) == result


def test_the_outer_part_of_an_axis_is_gathered_from_the_whole_and_sliced_to_it():
  value, whole, outer = GraphValue((64,), 'f32'), (('m',),), (('m[4/4]',),)
  assert reshard(value, whole, outer, {'m': 8}) == [CollectiveOp('all-gather', ('m[2/8]',), 32.0)]
  assert reshard(value, outer, whole, {'m': 8}) == []
  assert reshard(value, (('m[4/4]', 'm[2/8]'),), whole, {'m': 8}) == []
