"""Names of the batch in constraints, by the operations that their values come from."""

import functools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import flax_spmd as spmd
from flax_spmd._src.estimate.batch_names import batch_names
from flax_spmd._src.search.model_facts import facts_of
from flax_spmd.explore import Estimator, TrainStep

BATCH, LENGTH, WIDTH = 5, 7, 11  # no other dimension has one of these sizes
NAMES = {BATCH: 'examples', LENGTH: 'length', WIDTH: 'width'}
MESH = spmd.abstract_mesh({**dict.fromkeys(NAMES.values(), 1), '_': 2})


def constrain(x):
  spec = PartitionSpec(*(NAMES.get(size) for size in x.shape))
  return lax.with_sharding_constraint(x, NamedSharding(MESH, spec))


def remat(function):
  return lambda x: jax.checkpoint(function)(x)


def scanned(function):
  return lambda x: lax.scan(lambda carry, _: (function(carry), None), x, None, length=2)[0]


def by_row(function):
  return lambda x: lax.scan(lambda carry, row: (carry, row * 2), 0.0, function(x))[1]


def repeated(function):
  return lambda x: lax.while_loop(
    lambda pair: pair[0] < 2, lambda pair: (pair[0] + 1, function(pair[1])), (0, x)
  )[1]


def chosen(function):
  return lambda x: lax.cond(x.sum() > 0, function, lambda y: y, x)


STEPS = {
  'add': lambda x: x + jnp.ones((1, 1, WIDTH)),
  'multiply': lambda x: x @ jnp.ones((WIDTH, 3)) @ jnp.ones((3, WIDTH)),
  'attend': lambda x: jnp.einsum('bqk,bkd->bqd', jnp.einsum('bqd,bkd->bqk', x, x), x),
  'merge and split': lambda x: jnp.sin(x.reshape(-1, WIDTH)).reshape(-1, LENGTH, WIDTH),
  'constrain': constrain,
  'constrain transposed': lambda x: constrain(x.T).T,
}
AROUND = {
  'plain': lambda one: one,
  'jit': jax.jit,
  'remat': remat,
  'scan': scanned,
  'scan of rows': by_row,
  'while': repeated,
  'cond': chosen,
}


@settings(max_examples=40, deadline=None)
@given(
  st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.sampled_from(sorted(AROUND))), max_size=5),
  st.booleans(),
)
def test_a_name_of_the_batch_is_that_of_its_dimension(chain, differentiated):
  def forward(tokens, table):
    x = table[tokens]
    for name, around in chain:
      x = AROUND[around](STEPS[name])(x)
    return constrain(x)

  loss = lambda table, tokens: jnp.sum(forward(tokens, table) ** 2)
  is_reversible = all(around != 'while' for _, around in chain)
  function = jax.grad(loss) if differentiated and is_reversible else loss
  arguments = jnp.ones((13, WIDTH)), jnp.zeros((BATCH, LENGTH), int)
  jaxpr = jax.make_jaxpr(function)(*arguments)
  assert batch_names(jaxpr, {(1, 0)}, {'batch'}) == {'examples'}
  assert batch_names(jaxpr, {(1, 1)}, {'batch'}) <= {'length'}
  assert batch_names(jaxpr, {(1, 0)}, {'examples', 'width'}) == frozenset()  # beside one that is known


def estimator_of(names, placements=None, shape=(8, 16)):
  def step(state, x):
    y = spmd.with_logical_constraint(x @ state['w'], names)
    return state, jnp.sum(y**2)

  create = lambda: {'w': spmd.LogicallyPartitioned(jnp.ones((16, 32)), ('embed', 'data'))}
  plain = lambda state, x: step(
    jax.tree.map(lambda box: box.unbox(), state, is_leaf=spmd.is_axis_metadata), x
  )
  return TrainStep(plain, create, jax.ShapeDtypeStruct(shape, jnp.float32), placements=placements)


@pytest.mark.parametrize(
  ('names', 'placements', 'expected'),
  [
    (('B', 'F'), None, {'batch', 'B'}),
    (('embed', 'F'), None, {'batch'}),  # a name of parameters
    (('rows', None), ('examples', None), {'examples', 'rows'}),
    ((None, 'F'), None, {'batch'}),
  ],
)
def test_the_names_of_a_step(names, placements, expected):
  train_step = estimator_of(names, placements)
  estimator = Estimator(train_step)
  assert estimator.batch_names == expected
  found = estimator.names, estimator.parameter_names, estimator.together, estimator.batch_names
  assert facts_of(train_step, {}, *found).batch == expected


def test_microbatches_are_no_names_of_the_batch():
  def step(tokens):
    parts = tokens.reshape(2, 4, 8)
    spec = functools.partial(PartitionSpec, 'microbatch', 'batch')
    return lax.with_sharding_constraint(
      parts, NamedSharding(spmd.abstract_mesh({'microbatch': 1, 'batch': 2}), spec())
    )

  jaxpr = jax.make_jaxpr(step)(jnp.ones((8, 8)))
  assert batch_names(jaxpr, {(0, 0)}, {'batch'}) == frozenset()
