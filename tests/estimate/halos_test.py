"""Slices and concatenations along a sharded dimension, against compiled programs."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from flax_spmd._src.estimate.graph import GraphValue, Op
from flax_spmd._src.estimate.halos import parts
from flax_spmd._src.estimate.operations import requirement
from flax_spmd._src.estimate.requirements import Context, collectives
from flax_spmd._src.estimate.resharding import wire_bytes
from flax_spmd._src.hlo.counts import count

COLUMNS, SIZES = 1024, {'a': 8}
SHARDED = (('a',), ())


def compiled(function, *rows):
  """The bytes that each kind of collective sends, for arrays with rows over eight devices."""
  mesh = jax.make_mesh((8,), ('a',), axis_types=(jax.sharding.AxisType.Auto,))
  sharding = NamedSharding(mesh, PartitionSpec('a'))
  kept = lambda x: jax.lax.with_sharding_constraint(x, sharding)
  step = jax.jit(lambda *x: kept(function(*map(kept, x))) + 1, out_shardings=sharding)
  arrays = [jax.ShapeDtypeStruct((size, COLUMNS), jnp.float32, sharding=sharding) for size in rows]
  return count(step.lower(*arrays).compile().as_text(), SIZES).by_kind()


@pytest.mark.parametrize(
  ('size', 'start', 'end'), [(128, 64, 80), (64, 40, 48), (256, 160, 192), (64, 0, 56), (64, 8, 64)]
)
def test_a_slice_sends_the_parts_that_xla_sends(size, start, end):
  sent = sum(parts(size, end - start, 8, start)) * COLUMNS * 4
  assert compiled(lambda x: x[start:end], size).get('collective-permute', 0) == sent


@pytest.mark.parametrize('rows', [(64, 64), (64, 128)])
def test_a_concatenation_moves_its_shards_to_another_dimension_and_back(rows):
  values = [GraphValue((size, COLUMNS), 'f32') for size in rows]
  result = GraphValue((sum(rows), COLUMNS), 'f32')
  specs, free = [SHARDED] * len(rows), [False] * len(rows)
  context = Context(values, specs, values, free, result, SHARDED, SIZES, 'cpu')
  required = requirement(Op('concatenate', (0, 1), (2,), {'dimension': 0}), context)
  sent = wire_bytes(collectives(required, context), SIZES)
  assert compiled(lambda *x: jnp.concatenate(x), *rows) == {'all-to-all': sent}
