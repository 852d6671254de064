"""Checkpoints of other libraries in several real processes: each reads its own slices only."""

from tests.checkpoint.others import extract
from tests.processes import run_processes

T5X = """
import pathlib
import numpy as np
from jax.sharding import PartitionSpec as P
import flax_spmd as spmd
from flax_spmd import checkpoint
from tests.checkpoint.others import arrays, bytes_read, flat_of

folder = pathlib.Path({folder!r}) / 'adafactor'
layout = spmd.Layout({{'model': 8}}, [('embedding$', P('model')), ('layers_[01]$', P(None, 'model'))])
before = bytes_read()
restored = flat_of(
  checkpoint.restore(folder / 'checkpoint_1', layout=layout, changes=checkpoint.Changes(only='target'))
)
read, saved = bytes_read() - before, arrays(folder)
equal = all(
  np.array_equal(shard.data, saved[f'target/{{path}}'][shard.index])
  for path, array in restored.items()
  for shard in array.addressable_shards
)
sharded = [path for path, array in restored.items() if not array.is_fully_replicated]
report([equal, sorted(sharded), read])
"""


def test_t5x_by_two_processes(tmp_path):
  folder = extract('t5x', tmp_path)
  results = run_processes(T5X.format(folder=str(folder)), processes=2, devices=4)
  sizes = {
    file.relative_to(folder): file.stat().st_size
    for file in folder.glob('adafactor/checkpoint_1/target.*/*')
  }
  is_half = lambda file: file.name != '.zarray' and 'scale' not in file.parent.name
  own = sum(size / 2 if is_half(file) else size for file, size in sizes.items())
  for equal, sharded, read in (result.value for result in results):
    assert equal and sharded == ['embedding', 'layers_0', 'layers_1']
    assert read == own
