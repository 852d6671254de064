"""Random pipelines over two processes, compared with `jax.jit` in float64; devices of ranks and arguments vary, too.

FLAX_SPMD_SEEDS=5000:5100 pytest -m "" tests/multiprocess/pipeline_random_models_test.py     # seeds of your own
"""

import os

import pytest

from tests.processes import JAX_COPIES, run_processes
from tests.versions import ON_NEW_JAX

FIRST, _, LAST = os.environ.get('FLAX_SPMD_SEEDS', '0:60').partition(':')
EACH = 20
"""Seeds that run one after the other in the same processes."""
SOURCE = """
import jax.numpy as jnp
import flax_spmd as spmd
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.pipeline.cases import plain
from tests.pipeline.random_models import random_case

def placed(array, layout, rng):  # an argument, in one of the forms that users have
  flat = np.ravel(layout.mesh.devices)
  forms = [
    lambda: array if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else np.asarray(array),
    lambda: jax.random.clone(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else jnp.array(array),
    lambda: jax.device_put(array, jax.local_devices()[2]),
    lambda: spread(array, NamedSharding(layout.mesh, PartitionSpec())),
    lambda: spread(array, NamedSharding(Mesh(flat[rng.permutation(len(flat))], 'other'), PartitionSpec())),
    lambda: spread(array, NamedSharding(Mesh(np.array(jax.devices()), 'all'), PartitionSpec())),
  ]
  return forms[rng.integers(len(forms))]()

def spread(array, sharding):
  if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
    return jax.make_array_from_callback(array.shape, sharding, lambda index: np.asarray(array)[index])
  return jax.random.wrap_key_data(spread(jax.random.key_data(array), sharding))

def check(seed):
  rng = np.random.default_rng([seed, 1])
  devices = jax.devices()
  orders = [
    [devices[number] for number in rng.permutation(len(devices))],
    [device for pair in zip(devices[:4], devices[4:]) for device in pair],
    [device for pair in zip(devices[4:], devices[:4]) for device in pair],
  ]
  case = random_case(seed, orders[rng.integers(3)])
  if all(device.process_index != jax.process_index() for device in case.layout.mesh.devices.flat):
    return
  step, pipelined = jax.jit(case.step), case.layout.pipeline_jit(case.step, **case.options)
  expected = case.state
  actual, batch, key = jax.tree.map(
    lambda leaf: placed(leaf, case.layout, rng), (case.state, case.batch, case.key))
  for _ in range(2):
    expected, beside = step(expected, case.batch, case.key)
    actual, other = pipelined(actual, batch, key)
    pairs = zip(
      jax.tree_util.tree_leaves_with_path((actual, other)), jax.tree.leaves((expected, beside)), strict=True)
    for (path, one), whole in pairs:
      assert (one.shape, one.dtype) == (whole.shape, whole.dtype), path
      for shard in one.addressable_shards:
        np.testing.assert_allclose(plain(shard.data), plain(whole)[shard.index], 1e-9, 1e-9, err_msg=str(path))

for seed in range(@first@, @last@):
  with jax.enable_x64(True):
    check(seed)
  report(seed)
"""


@pytest.mark.parametrize('copies', ['gloo', pytest.param('JAX', marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
  ('first', 'last'),
  [
    pytest.param(8, 10, marks=ON_NEW_JAX),
    *(
      pytest.param(first, min(first + EACH, int(LAST)), marks=pytest.mark.exhaustive)
      for first in range(int(FIRST), int(LAST), EACH)
    ),
  ],
)
def test_equals_jit(first, last, copies):
  source = SOURCE.replace('@first@', str(first)).replace('@last@', str(last))
  setting = JAX_COPIES if copies == 'JAX' else ''
  for result in run_processes(setting + source, processes=2, devices=4, timeout=300):
    assert result.reported == list(range(first, last))
