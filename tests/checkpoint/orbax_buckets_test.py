"""Orbax in buckets: saves and loads on gs:// and s3://, by several processes too, past every cache."""

import importlib.metadata
from textwrap import dedent

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

from flax_spmd._src.checkpoint.storage.orbax_context import context
from flax_spmd._src.checkpoint.storage.store import open_store
from tests.processes import run_process, run_processes


def tree_of(mesh, number=0):
  generator = np.random.default_rng(number)
  shardings = {'w': P('data', 'model'), 'b': P('model'), 'replicated': P()}
  shapes = {'w': (64, 32), 'b': (16,), 'replicated': (3, 5)}
  return {
    name: jax.device_put(
      generator.standard_normal(shapes[name]).astype(jnp.bfloat16), NamedSharding(mesh, spec)
    )
    for name, spec in shardings.items()
  }


def abstract(tree):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def assert_same(tree, other):
  jax.tree.map(np.testing.assert_array_equal, tree, other)
  assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding == y.sharding, tree, other))


@pytest.mark.parametrize('memory', [None, 10_000])
def test_save_and_load(server, mesh, memory):
  path, tree = epath.Path(f'{server.bucket}/run/gen-1'), tree_of(mesh)
  with context(path, memory=memory, largest=4096):
    ocp.save(path, tree)
  with context(path, memory=memory, largest=4096):
    assert_same(tree, ocp.load(path, abstract(tree)))
  files = open_store(path).files()
  assert {'commit_success.txt', 'state/manifest.ocdbt'} <= set(files)
  assert open_store(path.parent).children() == ['gen-1']


def test_save_in_the_background(server, mesh):
  """The block has ended when Orbax's threads write."""
  path, tree = epath.Path(f'{server.bucket}/run/gen-1'), tree_of(mesh)
  with context(path):
    saving = ocp.save_async(path, tree)
  saving.result()
  with context(path):
    assert_same(tree, ocp.load(path, abstract(tree)))


def test_what_others_write_is_seen(server, mesh):
  """This process looked before, and nothing was there."""
  path, tree = epath.Path(f'{server.bucket}/run/gen-1'), tree_of(mesh)
  store = open_store(path.parent)
  assert not path.exists()
  assert store.children() == []
  with context(path):
    assert not ocp.is_orbax_checkpoint(path)
    ocp.save(path, tree)
  copies = {name: (path / name).read_bytes() for name in store.files('gen-1')}
  assert not (path.parent / 'gen-2').exists()
  for name, content in copies.items():
    server.put(f'{server.bucket}/run/gen-2/{name}', content)
  with context(path):
    assert ocp.is_orbax_checkpoint(path.parent / 'gen-2')
    assert_same(tree, ocp.load(path.parent / 'gen-2', abstract(tree)))
  assert sorted(child.name for child in path.parent.iterdir()) == ['gen-1', 'gen-2']


def test_a_damaged_checkpoint_is_not_loaded(server, mesh):
  path, tree = epath.Path(f'{server.bucket}/run/gen-1'), tree_of(mesh)
  with context(path):
    ocp.save(path, tree)
  open_store(path).remove('state/d')
  with context(path), pytest.raises(ValueError):
    ocp.load(path, abstract(tree))


PROCESSES = """
from etils import epath
from orbax.checkpoint import v1 as ocp
from flax_spmd._src.checkpoint.storage.orbax_context import context
from flax_spmd._src.checkpoint.storage.store import open_store
import flax_spmd as spmd
from tests.checkpoint.orbax_buckets_test import abstract

path = epath.Path({url!r})
mesh = spmd.make_mesh({{'data': 2, 'model': 4}})
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data', 'model'))
values = np.arange(64 * 32, dtype='float32').reshape(64, 32)
tree = {{'w': jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])}}
open_store(path.parent).children()
with context(path):
  ocp.save(path, tree)
with context(path):
  back = ocp.load(path, abstract(tree))
report(all((shard.data == values[shard.index]).all() for shard in back['w'].addressable_shards))
"""


@pytest.mark.slow
def test_two_processes_save_and_load(server, mesh):
  url = f'{server.bucket}/run/gen-1'
  results = run_processes(PROCESSES.format(url=url), processes=2, devices=4)
  assert [result.value for result in results] == [True, True]
  w = jax.ShapeDtypeStruct((64, 32), np.float32, sharding=NamedSharding(mesh, P('model')))
  with context(url):
    back = ocp.load(epath.Path(url), {'w': w})
  np.testing.assert_array_equal(back['w'], np.arange(64 * 32, dtype=np.float32).reshape(64, 32))
  processes = [name for name in open_store(url).children('state') if name.startswith('ocdbt.process')]
  assert processes == ['ocdbt.process_0', 'ocdbt.process_1']


def test_paths_of_others_are_as_before(s3):
  """fsspec remembers lists where this library was not asked; `urls_test.py` has Orbax."""
  open_store(f'{s3.bucket}/run').write('x', b'1')
  files = epath.backend.fsspec_backend.fs
  assert files(f'{s3.bucket}/runs').dircache.use_listings_cache
  assert not files(f'{s3.bucket}/run/x').dircache.use_listings_cache
  assert fsspec.filesystem('s3').dircache.use_listings_cache


def test_with_tensorflow_installed(server, monkeypatch):
  """etils would then take TensorFlow's file systems, of which that of S3 is not installed with it."""
  monkeypatch.setattr('etils.epath.gpath._is_tf_installed', lambda: True)
  root = open_store(f'{server.bucket}/run').root
  (root / 'x').write_text('1')
  assert [child.name for child in root.iterdir()] == ['x']


def test_an_orbax_of_another_structure():
  script = """
    from orbax.checkpoint._src.serialization import tensorstore_utils
    from flax_spmd._src.checkpoint.storage.store import open_store
    {change}
    try:
      open_store('s3://bucket/run')
    except Exception as error:
      print(type(error).__name__, error)
  """
  versions = [f'{name} {importlib.metadata.version(name)}' for name in ('orbax-checkpoint', 'etils')]
  for change in (
    'del tensorstore_utils._use_gcs_driver',
    'tensorstore_utils._build_ocdbt_kvstore_tspec = lambda **_: dict(base=None)',
  ):
    code = dedent(script).format(change=change)
    assert run_process(code).stdout.splitlines() == [
      f'CheckpointError s3://bucket/run cannot be reached with {" and ".join(versions)}: their structure has changed.',
      'Fix: pip install orbax-checkpoint==0.12.8 etils==1.15.0',
    ]
