"""URLs that no store has: every function refuses them, and none makes a local folder of them, such as `./s3:/bucket`."""

import itertools
import os
from pathlib import Path

import jax.numpy as jnp
import pytest
from etils import epath
from orbax.checkpoint import v1 as ocp

import flax_spmd as spmd
from flax_spmd import checkpoint
from flax_spmd._src.checkpoint.storage.orbax_context import context
from flax_spmd._src.checkpoint.storage.store import open_store
from flax_spmd.errors import CheckpointError

LAYOUT = spmd.Layout({'data': 8})
SCHEMES = ('s3', 'S3', 'gs', 'file', 's3a', 'hdfs', 'abfs', 'az', 'http', 'memory', 'dbfs')
ENDINGS = (':/b/run', ':/b', ':///', ':////b/run', '://b/../run', '://')
STORES = ('s3', 'S3', 'gs')
URLS = [
  *(f'{scheme}{end}' for scheme, end in itertools.product(SCHEMES, ENDINGS) if scheme != 'file'),
  *(f'{scheme}://b/run' for scheme in SCHEMES if scheme not in (*STORES, 'file')),
  *(f'{scheme}:{rest}' for scheme in (*STORES, 'file') for rest in ('', 'b', 'b/run')),
]
WRITERS = {
  'save': lambda path: checkpoint.save(path, {'w': jnp.ones(8)}, LAYOUT),
  'save_async': lambda path: checkpoint.save_async(path, {'w': jnp.ones(8)}, LAYOUT),
  'Manager': lambda path: checkpoint.Manager(path, LAYOUT),
  'save_safetensors': lambda path: checkpoint.save_safetensors(path, {'w': jnp.ones(8)}),
  'save_program': lambda path: checkpoint.save_program(path, LAYOUT.jit(jnp.sum), jnp.ones(8)),
}
READERS = {
  'restore': checkpoint.restore,
  'preflight': checkpoint.preflight,
  'load_program': checkpoint.load_program,
  'show': checkpoint.show,
  'ls': checkpoint.ls,
  'verify': checkpoint.verify,
}


@pytest.mark.parametrize('name', [*WRITERS, *READERS])
def test_no_function_takes_one_for_a_folder(name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  function = {**WRITERS, **READERS}[name]
  for url, kind in itertools.product(URLS, (str, Path, os.fsencode)):
    with pytest.raises(CheckpointError, match='Fix: '):
      function(kind(url))
  assert not list(tmp_path.iterdir())


def test_no_writer_of_orbax_takes_one_for_a_folder(s3, tmp_path, monkeypatch):
  """Orbax by itself writes a part of such a checkpoint before it refuses the rest."""
  monkeypatch.chdir(tmp_path)
  open_store(f'{s3.bucket}/run')
  for url in (f'{s3.bucket}/runs', 's3://another', f'{s3.bucket}/run-2'):
    with pytest.raises(ValueError, match='Orbax has no storage for '), context():
      ocp.save(epath.Path(f'{url}/gen-1'), {'w': jnp.ones(8)})
  assert not list(tmp_path.iterdir())
