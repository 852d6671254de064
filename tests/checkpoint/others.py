"""Checkpoints that other libraries wrote, from the archives in `written_by_others`."""

import pathlib
import tarfile

import jax
import ml_dtypes
import numpy as np
import tensorstore

FOLDER = pathlib.Path(__file__).with_name('written_by_others')


def extract(name, to):
  with tarfile.open(FOLDER / f'{name}.tar.xz') as archive:
    archive.extractall(to, filter='data')
  return to


def arrays(folder):
  """The arrays that were saved, by path."""
  with np.load(folder / 'state.npz') as content:
    return {path: content[path] for path in content.files}


def tree_of(flat):
  """Nested dicts of arrays by path, without the lists that checkpoints may have."""
  tree = {}
  for path, array in flat.items():
    *folders, name = path.split('/')
    node = tree
    for folder in folders:
      node = node.setdefault(folder, {})
    node[name] = array
  return tree


def flat_of(tree):
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  name = lambda key: str(getattr(key, 'key', getattr(key, 'idx', getattr(key, 'name', None))))
  return {'/'.join(map(name, keys)): leaf for keys, leaf in leaves}


def assert_bits(restored, saved):
  """Every leaf has the bits that were saved; typed keys those of their numbers."""
  assert set(restored) == set(saved)
  for path, leaf in restored.items():
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
    assert (array.shape, array.dtype) == (saved[path].shape, saved[path].dtype), path
    assert array.tobytes() == saved[path].tobytes(), path


def bfloat16(array):
  return array.astype(ml_dtypes.bfloat16)


def bytes_read():
  """Bytes that TensorStore has read from files in this process."""
  metrics = tensorstore.experimental_collect_matching_metrics('/tensorstore/kvstore/file/bytes_read')
  return sum(value['value'] for metric in metrics for value in metric['values'])
