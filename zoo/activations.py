"""Bytes on the wire of Flax's lm1b and of nanodo, which shard parameters over the axis of the batch and constrain no activation.

    python zoo/activations.py    # with the packages of the environment `linen`, on eight emulated devices

Each is compiled as it is, and with its batch constrained, as `layout.jit` does by default.
"""

import os

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'

import jax
import numpy as np
from jax.sharding import PartitionSpec
from peers import flax_examples, nanodo

import flax_spmd as spmd

TOKENS = np.random.default_rng(0).integers(1, 64, (128, 128)).astype('int32')
FSDP = {'data': 1, 'fsdp': 8, 'tensor': 1}
CASES = (
  (
    flax_examples,
    flax_examples.lm1b,
    {'emb_dim': 256, 'num_heads': 8, 'num_layers': 4, 'qkv_dim': 256, 'mlp_dim': 1024, 'max_len': 128},
    FSDP,
    PartitionSpec(('data', 'fsdp')),
  ),
  (
    nanodo,
    nanodo.nanodo,
    {'D': 256, 'H': 8, 'L': 128, 'N': 4, 'F': 1024},
    {'data': 8},
    PartitionSpec('data'),
  ),
)


def main() -> None:
  print('| model | parameters, MiB | wire as it is, MiB | with its batch constrained, MiB |')
  print('|---|---|---|---|')
  for module, make, sizes, mesh, rows in CASES:
    module.SIZES.update(sizes)
    module.TOKENS = TOKENS
    case = make()
    layout = spmd.Layout(mesh, case.rules, **case.policies)
    state = layout.init(case.create, *case.args)
    batch = layout.shard(case.batch, rows)
    wire = [
      sum(
        each.collective.wire
        for each in layout.jit(case.step, constrain_batch=constrains).explain(state, batch).collectives
      )
      for constrains in (False, True)
    ]
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
    print(f'| {make.__name__} |', ' | '.join(f'{size / 2**20:.1f}' for size in (held, *wire)), '|')


if __name__ == '__main__':
  main()
