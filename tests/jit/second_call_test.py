"""Whether a second call compiles again: the explanation's prediction against JAX's own log of compilations."""

import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd.errors import LayoutError

layout = spmd.Layout({'data': 2, 'model': 4}, (('batch', 'data'), ('hidden', 'model')))
WEIGHTS = np.ones((8, 16), np.float32)

PASSED = {
  'host': lambda layout: WEIGHTS,
  'one device': lambda layout: jnp.asarray(WEIGHTS),
  'rows': lambda layout: layout.shard(WEIGHTS, P('data')),
  'rows spelled out': lambda layout: layout.shard(WEIGHTS, P('data', None)),
  'columns': lambda layout: layout.shard(WEIGHTS, P(None, 'model')),
  'box of rows': lambda layout: spmd.LogicallyPartitioned(
    layout.shard(WEIGHTS, P('data')), ('batch', None)
  ),
  'box of columns': lambda layout: spmd.LogicallyPartitioned(
    layout.shard(WEIGHTS, P('data')), (None, 'hidden')
  ),
  'half precision': lambda layout: layout.shard(WEIGHTS.astype(jnp.bfloat16), P('data')),
}
MESHES = {'eight devices': layout.mesh, 'one device': {'data': 1, 'model': 1}}
PLACEMENTS = {
  'none': {},
  'rows in': {'in_rules': P('data')},
  'rows out': {'out_rules': P('data')},
  'columns out': {'out_rules': P(None, 'model')},
}


def grow(w):
  return jax.tree.map(lambda w: w + jnp.ones((), jnp.float32), w)


def compilations(caplog, call):
  """The result of a call, and the number of programs that JAX compiled for it."""
  caplog.clear()
  with jax.log_compiles(True), caplog.at_level(logging.WARNING):
    result = jax.block_until_ready(call())
  return result, sum('Finished XLA compilation of jit(grow)' in text for text in caplog.messages)


CASES = [
  case
  for case in itertools.product(MESHES, PASSED, PLACEMENTS)
  if case != ('eight devices', 'columns', 'rows in')  # in_rules refuse it
]


@pytest.mark.parametrize(('mesh', 'passed', 'placed'), CASES)
def test_prediction(mesh, passed, placed, caplog):
  on_mesh = layout.replace(mesh=MESHES[mesh])
  w, jitted = PASSED[passed](on_mesh), on_mesh.jit(grow, **PLACEMENTS[placed])
  again = jitted.explain(w).second_call
  assert again.fed_back == (('result', 'argument 0'),)
  result, first = compilations(caplog, lambda: jitted(w))
  assert first == 1
  if again.refused:
    with pytest.raises(LayoutError):
      jitted(result)
    return
  _, second = compilations(caplog, lambda: jitted(result))
  assert again.compiles == bool(second)


def test_a_result_that_in_rules_refuse_as_argument():
  w = layout.shard(WEIGHTS, P('data'))
  explanation = layout.jit(grow, in_rules=P('data'), out_rules=P(None, 'model')).explain(w)
  assert explanation.findings == (
    "the second call is an error: argument 0 has to be P('data',) by in_rules, result is P(None, 'model')",
  )
  assert str(explanation.second_call) == 'second call, with result as argument 0: an error'


def test_which_results_are_fed_back():
  def step(params, counts, x, lr):
    return {'params': params, 'loss': lr, 'counts': counts}, x.T

  params = {'w': layout.replicate(WEIGHTS)}
  counts = layout.replicate([np.ones(3), np.ones(3)])
  again = layout.jit(step).explain(params, counts, layout.replicate(np.ones((2, 3))), 0.1).second_call
  assert again.fed_back == ()
  assert str(again) == 'second call: no result has the form of an argument'

  def flat(params, counts, x, lr):
    return params, {'w': params['w'] * 2}, lr, counts

  again = layout.jit(flat).explain(params, counts, layout.replicate(np.ones((2, 3))), 0.1).second_call
  assert again.fed_back == (('result 0', 'argument 0'), ('result 3', 'argument 1'))
  assert str(again) == (
    'second call, with result 0 as argument 0, result 3 as argument 1: no compilation'
  )


def test_each_reason():
  def change(w, b, n):
    return w.T, b.astype(jnp.bfloat16), n + np.ones(3, np.float32)

  w = layout.shard(np.ones((8, 8), np.float32), P('data'))
  b = layout.replicate(np.ones(4, np.float32))
  n = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=layout.sharding(np.ones(3), P()), weak_type=True)
  explanation = layout.jit(change, out_rules=(P(None, 'data'), P(), P())).explain(w, b, n)
  assert explanation.second_call.changes == (
    "argument 0 is passed as P('data',), result 0 is P(None, 'data')",
    'argument 1 is float32, result 1 is bfloat16',
    'argument 2 has a weak dtype, result 2 a strong one',
  )
  assert explanation.findings == tuple(
    f'compiles again: {change}' for change in explanation.second_call.changes
  )
