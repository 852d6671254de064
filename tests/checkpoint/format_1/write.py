"""Writes the checkpoints of this folder, with the last version that wrote format 1.

    git worktree add --detach /tmp/old 72012e9
    cd /tmp/old && JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8 \
      python <this file> /tmp/format_1  # and copy it here

The later versions have to read them. They are never written again.
"""

import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax_spmd._src.checkpoint.storage.folders import Claim  # noqa: F401  the writer of format 1

import flax_spmd as spmd
from flax_spmd import checkpoint

LAYOUT = spmd.Layout({'data': 2, 'model': 4}, (('embed', 'data'), ('mlp', 'model')))


def state(step):
  """A small state with names, random keys, bfloat16 and Python numbers."""
  w = (np.arange(32, dtype=np.float32) + step).reshape(8, 4)
  return {
    'params': {
      'w': spmd.LogicallyPartitioned(jnp.asarray(w), ('embed', 'mlp')),
      'b': spmd.LogicallyPartitioned(jnp.arange(4, dtype=jnp.bfloat16), ('mlp',)),
      'scale': jnp.ones((4,), jnp.int8),
    },
    'keys': jax.random.split(jax.random.key(3), 2),
    'lr': 0.25,
    'on': True,
    'step': step,
  }


def main(folder):
  """Writes all checkpoints."""
  first = state(3)
  sharded = {**first, 'params': LAYOUT.shard(first['params'])}
  for name, options in (
    ('plain', {}),
    ('packed', {'pack': 1 << 10}),
    ('compressed', {'compress': True}),
  ):
    shutil.rmtree(folder / name, ignore_errors=True)
    checkpoint.save(folder / name, sharded, layout=LAYOUT, **options)
    (folder / f'.{name}.lock').unlink(missing_ok=True)
  with checkpoint.Manager(folder / 'run', LAYOUT, every=1) as manager:
    for step in (1, 2):
      manager.save(step, {'w': jnp.full(8, float(step))}, metrics={'loss': 1.0 / step})
  for lock in folder.rglob('.*.lock'):
    lock.unlink()


if __name__ == '__main__':
  main(Path(sys.argv[1]).resolve())
