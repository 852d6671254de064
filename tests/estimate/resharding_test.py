"""Collectives between shardings, and shardings after reshapes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flax_spmd._src.estimate.graph import GraphValue, shard_size
from flax_spmd._src.estimate.operations import reshaped
from flax_spmd._src.estimate.resharding import is_ambiguous, reduce_partial_sum, reshard, wire_bytes

SIZES = {'a': 2, 'b': 4, 'c': 2}


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
  assert {axis for op in ops for axis in op.axes} <= set('abc')


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


def test_two_changes_together_are_ambiguous():
  value = GraphValue((16, 16), 'f32')
  assert not is_ambiguous(reshard(value, (('a',), ()), ((), ('a',)), SIZES))
  assert is_ambiguous(reshard(value, (('a',), ('b',)), (('b',), ('a',)), SIZES))
  assert is_ambiguous(reshard(value, (('a', 'b'), ()), (('b', 'a'), ()), SIZES))


@pytest.mark.parametrize(
  ('shape', 'spec', 'new_shape', 'result'),
  [
    ((8, 6), (('a',), ()), (48,), (('a',),)),
    ((8, 6), ((), ('a',)), (48,), ((),)),
    ((48,), (('b',),), (8, 6), (('b',), ())),
    ((4, 12), (('b',), ('a',)), (48,), (('b', 'a'),)),
    ((1, 8), ((), ('a',)), (8, 1), (('a',), ())),
  ],
)
def test_a_reshape_keeps_the_axes_that_still_divide(shape, spec, new_shape, result):
  assert reshaped(shape, spec, new_shape, SIZES) == result
