"""Writes checkpoints with an old version of Orbax and Flax: `python write_orbax.py FOLDER`; the states are in `state.npz`.

Zarr3 without the chunks that are zero, and leaves that are aggregated in a msgpack file, alone or beside arrays.
"""

import os

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'

import pathlib
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.training import checkpoints
from jax.sharding import Mesh, NamedSharding, PartitionSpec

FOLDER = pathlib.Path(sys.argv[1]).absolute()
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ('x', 'y'))
GENERATOR = np.random.default_rng(0)


def array(*shape, dtype='float32', spec=()):
  value = GENERATOR.standard_normal(shape).astype(dtype)
  return jax.device_put(value, NamedSharding(MESH, PartitionSpec(*spec)))


def state():
  half_zero = np.zeros((16, 4), np.float32)
  half_zero[:8] = GENERATOR.standard_normal((8, 4))
  return {
    'params': {'w': array(8, 4, spec=('x', 'y')), 'b': array(4, dtype=jax.numpy.bfloat16)},
    'zeros': array(8, 4, spec=('x', 'y')) * 0,
    'half': jax.device_put(half_zero, NamedSharding(MESH, PartitionSpec('x'))),
    'list': [array(3), {'step': jax.numpy.int32(7), 'zero': jax.numpy.int32(0), 'number': 3}],
    'empty': {},
    'none': None,
  }


def names(path):
  return '/'.join(str(getattr(key, 'key', getattr(key, 'idx', None))) for key in path)


def by_tree(path, tree, aggregate=None, **options):
  arguments = jax.tree.map(
    lambda leaf: ocp.SaveArgs(aggregate=bool(aggregate) and np.ndim(leaf) < 2), tree
  )
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
    checkpointer.save(path, tree, save_args=arguments)


def main():
  tree = state()
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  for ocdbt in (True, False):
    kind = 'ocdbt' if ocdbt else 'files'
    by_tree(FOLDER / f'zarr3_{kind}', tree, use_ocdbt=ocdbt, use_zarr3=True)
    by_tree(FOLDER / f'aggregated_{kind}', tree, aggregate=True, use_ocdbt=ocdbt)
  checkpoints.save_checkpoint(FOLDER / 'flax_host', jax.device_get(tree), step=2)
  checkpoints.save_checkpoint(FOLDER / 'flax_sharded', tree, step=2)
  with ocp.CheckpointManager(FOLDER / 'run', ocp.PyTreeCheckpointer()) as manager:
    manager.save(
      4,
      jax.device_get(tree),
      save_kwargs={'save_args': jax.tree.map(lambda _: ocp.SaveArgs(aggregate=True), tree)},
    )
  flat = {names(path): np.asarray(leaf) for path, leaf in leaves}
  np.savez(FOLDER / 'state.npz', **flat)


if __name__ == '__main__':
  main()
