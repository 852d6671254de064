"""Writes `state`, with the last version whose manifests have CRC-32s of files and mixed sums of arrays: b622871.

Later versions have to read it. It is never written again.
"""

import os
from pathlib import Path

os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'

import jax
import numpy as np

import flax_spmd as spmd
from flax_spmd import checkpoint

if __name__ == '__main__':
  layout = spmd.Layout({'data': 2, 'model': 4}, (('embed', 'data'), ('mlp', 'model')))
  w = np.arange(8192, dtype=np.float32).reshape(64, 128)
  state = {
    'w': spmd.LogicallyPartitioned(w, ('embed', 'mlp')),
    'b': np.arange(5, dtype=np.int8),
    'keys': jax.random.split(jax.random.key(3), 2),
    'step': 3,
  }
  checkpoint.save(Path(__file__).parent / 'state', layout.shard(state), layout, compress=True)
