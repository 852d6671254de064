"""Reshards between devices of several processes: bit-equal on any of their devices, planned alike, refused elsewhere."""

from textwrap import dedent

import pytest

from tests.processes import run_processes

MOVED = """
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
import flax_spmd as spmd
from flax_spmd import LogicallyPartitioned as Box

devices, me = np.array(jax.devices()), jax.process_index()
rules = (('embed', 'data'), ('mlp', 'model'))
fsdp = spmd.Layout({'data': 8}, rules[:1])

def on(*order, shape=(1, -1)):
  return spmd.Layout(Mesh(devices[list(order)].reshape(shape), ('data', 'model')), rules)

def create():
  rng = np.random.default_rng(0)
  return {
    'w': Box(rng.normal(size=(48, 96)).astype(np.float32), ('embed', 'mlp')),
    'v': Box(np.arange(96, dtype=np.int8), ('mlp',)),
    'flags': Box(np.arange(48) % 3 == 0, ('embed',)),
    'all': np.float32(4),
  }

def made():
  keys = lambda: Box(jax.random.split(jax.random.key(3), 8), ('embed',))
  return {**fsdp.shard(create()), 'keys': fsdp.init(keys), 'own': jnp.asarray(2.0), 'number': 3}

expected = {key: getattr(leaf, 'value', leaf) for key, leaf in create().items()} | {'own': 2.0, 'number': 3}
expected['keys'] = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(3), 8)))

def wrong(path, leaf, to, dtype):
  mine = [device for device in to.mesh.devices.flat if device.process_index == me]
  value = np.asarray(expected[path])
  value = value.astype(dtype) if dtype and value.dtype.kind == 'f' else value
  same = len(leaf.addressable_shards) == len(mine)
  for shard in leaf.addressable_shards:
    data = jax.random.key_data(shard.data) if path == 'keys' else shard.data
    same &= bool((np.asarray(data) == value[shard.index]).all())
  return not same or leaf.sharding.mesh != to.mesh

targets = {
  'tensor': on(*range(8), shape=(2, 4)),
  'turned': on(*reversed(range(8)), shape=(2, 4)),
  'neighbours': on(1, 0, 3, 2, 5, 4, 7, 6),
  'second': on(4, 5, 6, 7),
  'two': on(6, 1),
}
for name, to in targets.items():
  for dtype, donate in ((None, False), ('bfloat16', True)):
    state = made()
    plan = fsdp.plan_reshard(state, to, dtype=dtype, donate=donate)
    after = fsdp.reshard(state, to, dtype=dtype, donate=donate)
    found = [path for path, leaf in after.items() if wrong(path, getattr(leaf, 'value', leaf), to, dtype)]
    kept = not donate and all(not leaf.is_deleted() for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array))
    report([name, {row.path: row.way for row in plan.rows}, found, donate or kept])

def error_of(layout, state, to, **options):
  try:
    layout.reshard(state, to, **options)
  except spmd.errors.FlaxSpmdError as error:
    return f'{type(error).__name__}: {error}'

w = {'w': made()['w']}
report(error_of(fsdp, w, targets['second'], limit=5_000 if me else None))
report(error_of(targets['second'], fsdp.reshard(w, targets['second']), fsdp))
"""

WAYS = {  # by target, of the arrays that are cut anew
  'tensor': {'w': 'program', 'v': 'program', 'flags': 'program', 'keys': 'host'},
  'turned': {'w': 'gathered', 'v': 'program', 'flags': 'gathered', 'keys': 'gathered'},
  'neighbours': {'w': 'program', 'v': 'program', 'flags': 'program', 'keys': 'gathered'},
  'second': {'w': 'gathered', 'v': 'host', 'flags': 'gathered', 'keys': 'gathered'},
  'two': {'w': 'gathered', 'v': 'host', 'flags': 'gathered', 'keys': 'gathered'},
}


@pytest.mark.slow
def test_a_reshard_of_two_processes():
  """Every process plans the same; an error of one process is one of both, and nothing has moved."""
  results = [result.reported for result in run_processes(MOVED, processes=2, devices=4)]
  for name, ways, wrong, is_kept in (one for each in results for one in each[:-2]):
    assert not wrong and is_kept, name
    assert {path: ways[path] for path in WAYS[name]} == WAYS[name], name
  for *_, lacking, unreachable in results:
    assert (
      lacking
      == dedent("""\
      LayoutError: The reshard needs 27 KiB on device 2048, which has 4.88 KiB for it: 2.25 KiB of the state, 4.5 KiB of the result. Largest arrays of the result: w 4.5 KiB.
      Fix: free the state on the way with donate=True; or use a mesh of more devices, rules that shard more, or a narrower dtype=.""")
    )
    assert (
      unreachable
      == dedent("""\
      LayoutError: w: it is stored as P('data', 'model') on {'data': 1, 'model': 4}, on devices of process 1, and the slices of its result are not all on those of process 0.
      Fix: reshard from the devices' memory onto devices of the same processes, or some of them; for others, save a checkpoint, and restore it under the other layout.""")
    )
