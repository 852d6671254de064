"""Slices and concatenations along a sharded dimension, against compiled programs."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from flax_spmd._src.estimate.graph import GraphValue, Op
from flax_spmd._src.estimate.halos import parts
from flax_spmd._src.estimate.operations import requirement
from flax_spmd._src.estimate.requirements import Context, collectives
from flax_spmd._src.estimate.resharding import wire_bytes
from flax_spmd._src.hlo.counts import count

COLUMNS, SIZES = 1024, {'a': 8}
SHARDED = (('a',), ())
FULL = (('a',), ('b',))


def compiled(function, *rows, sizes=SIZES):
  """The bytes that each kind of collective sends, for arrays with their dimensions over the axes of a mesh, in order."""
  auto = (jax.sharding.AxisType.Auto,) * len(sizes)
  mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=auto)
  sharding = NamedSharding(mesh, PartitionSpec(*sizes))
  kept = lambda x: jax.lax.with_sharding_constraint(x, sharding)
  step = jax.jit(lambda *x: kept(function(*map(kept, x))) + 1, out_shardings=sharding)
  arrays = [jax.ShapeDtypeStruct((size, COLUMNS), jnp.float32, sharding=sharding) for size in rows]
  return count(step.lower(*arrays).compile().as_text(), sizes).by_kind()


@st.composite
def slices(draw):
  """The size of a dimension over eight devices, and a range of it that divides."""
  size = 8 * draw(st.sampled_from((1, 2, 3, 8, 12, 16)))
  length = 8 * draw(st.integers(1, size // 8))
  start = draw(st.integers(0, size - length))
  return size, start, start + length


@given(slices())
@example((128, 64, 80)).via('parts that are far away')
@example((64, 24, 48)).via('parts of several shards')
@settings(max_examples=25, deadline=None)
def test_a_slice_sends_the_parts_that_xla_sends(case):
  size, start, end = case
  sent = sum(parts(size, end - start, 8, start)) * COLUMNS * 4
  assert compiled(lambda x: x[start:end], size).get('collective-permute', 0) == sent


@pytest.mark.parametrize('rows', [(64, 64), (64, 128)])
@pytest.mark.parametrize(
  ('spec', 'sizes'), [(SHARDED, SIZES), (FULL, {'a': 4, 'b': 2})], ids=['free', 'sharded']
)
def test_a_concatenation_moves_its_shards_to_another_dimension_and_back(rows, spec, sizes):
  values = [GraphValue((size, COLUMNS), 'f32') for size in rows]
  result = GraphValue((sum(rows), COLUMNS), 'f32')
  specs, free = [spec] * len(rows), [False] * len(rows)
  context = Context(values, specs, values, free, result, spec, sizes, 'cpu')
  required = requirement(Op('concatenate', (0, 1), (2,), {'dimension': 0}), context)
  sent = wire_bytes(collectives(required, context), sizes)
  assert compiled(lambda *x: jnp.concatenate(x), *rows, sizes=sizes) == {'all-to-all': sent}
