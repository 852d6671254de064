"""States on the devices of one process, or of some, in a job of several; keys on the devices of all."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import flax_spmd as spmd
from flax_spmd import LogicallyPartitioned as Box
from tests.processes import run_processes

RULES = (('embed', 'data'),)
SEEDS = """\
argument 0 (key<fry>[]): [0, 0] in process 0, [0, 1] in process 1.
Fix: pass equal values on every process: a key of the same seed, arrays of the same file."""
TABLES = """\
the layout, line 2: no line in process 0, "rule 0 ('embed', 'data')" in process 1.
Fix: create it from the same code, arguments, files and number of devices on every process."""


def layout_of(*processes):
  devices = [device for device in jax.devices() if device.process_index in processes]
  return spmd.Layout(Mesh(np.array(devices), ('data',)), RULES)


def create(key):
  return {'w': Box(jax.random.normal(key, (8, 4)), ('embed', None))}


def sums(state):
  return [float(np.abs(shard.data).sum()) for shard in state['w'].value.addressable_shards]


def error_of(function):
  try:
    return function()
  except spmd.errors.LayoutError as error:
    return str(error)


def every_process():
  me, key = jax.process_index(), jax.random.key(0)
  if me == 1:  # alone, and not in step with the others
    own = layout_of(1)
    own.check_processes({'w': np.ones(8)}, values=True)
    assert sums(own.init(create, key)) == sums(own.plan(create, key).init()) and me == 1
  some = layout_of(0, 1)
  reported = {'part': len(sums(some.init(create, key)))}
  for _ in range(3):
    some.check_processes({'w': np.ones(2048)}, values='part')
  reported['other seed'] = error_of(lambda: len(sums(some.init(create, jax.random.key(me)))))
  reported['other rules'] = error_of(
    lambda: some.replace(rules=RULES[:me]).check_processes({'w': np.ones(8)})
  )
  every = layout_of(0, 1, 2)
  for _ in range(16):
    every.check_processes({'w': np.ones(2048)}, values='part')
  return reported


@pytest.mark.slow
def test_processes_compare_with_those_of_the_mesh_only():
  results = run_processes(
    'from tests.multiprocess import part_of_processes_test as it; report(it.every_process())',
    processes=3,
    devices=2,
    timeout=100,
  )
  first, second, third = (result.value for result in results)
  assert first == second and first['part'] == 2
  assert first['other seed'] == SEEDS
  assert first['other rules'] == TABLES
  assert third == {'part': 0, 'other seed': 0, 'other rules': None}


def key_shards():
  every = layout_of(0, 1)
  keys = jax.random.split(jax.random.key(3, impl='rbg'), 8)
  made = {
    'sharded': every.shard(Box(keys, ('embed',))).value,
    'replicated': every.replicate({'k': keys, 'x': np.ones(3)})['k'],
    'single': every.shard({'a': jax.random.key(5)})['a'],
    'planned': every.plan(lambda: {'k': Box(keys, ('embed',))}).shard({'k': keys})['k'].value,
  }
  made['again'] = every.shard(made['sharded'], ('embed',))
  whole = np.asarray(jax.random.key_data(keys))
  for name, array in made.items():
    expected = np.asarray(jax.random.key_data(jax.random.key(5))) if name == 'single' else whole
    for shard in array.addressable_shards:
      np.testing.assert_array_equal(jax.random.key_data(shard.data), expected[shard.index])
  same = made['planned'].sharding == made['sharded'].sharding
  drawn = every.jit(lambda keys: jax.vmap(jax.random.bits)(keys).sum())(made['sharded'])
  return [same, str(made['sharded'].sharding.spec), str(made['again'].sharding.spec), int(drawn)]


@pytest.mark.slow
def test_keys_are_sharded_over_processes():
  results = run_processes(
    'from tests.multiprocess import part_of_processes_test as it; report(it.key_shards())',
    processes=2,
    devices=2,
    timeout=100,
  )
  keys = jax.random.split(jax.random.key(3, impl='rbg'), 8)
  drawn = int(jax.vmap(jax.random.bits)(keys).sum())
  assert [result.value for result in results] == [[True, "P('data',)", "P('data',)", drawn]] * 2
