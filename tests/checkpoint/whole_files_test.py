"""Files that are read as a whole: those of EasyLM, and of numpy, as big_vision writes them."""

import io
import pickle
import zipfile

import jax
import ml_dtypes
import msgpack
import numpy as np
import pytest
from flax import serialization, traverse_util
from flax.training.train_state import TrainState
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from tests.checkpoint.others import assert_bits, flat_of
from tests.checkpoint.states import OPTIMIZERS

LAYOUT = spmd.Layout({'data': 2, 'model': 4}, [('kernel', P('data', 'model'))])
NAMES = st.text('abcDEF_0123456789', min_size=1, max_size=5)
DTYPES = st.sampled_from([np.float32, np.int8, np.bool_, np.float16, ml_dtypes.bfloat16])
ARRAYS = st.builds(
  lambda shape, dtype: np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype),
  st.lists(st.integers(1, 4), max_size=3).map(tuple),
  DTYPES,
)
TREES = st.dictionaries(
  NAMES,
  st.recursive(ARRAYS, lambda nodes: st.dictionaries(NAMES, nodes, min_size=1, max_size=3)),
  min_size=1,
).filter(lambda tree: len(jax.tree.leaves(tree)) > 1)


def easylm(tree):
  """As `StreamingCheckpointer.save_checkpoint` of EasyLM."""
  packer = msgpack.Packer()
  flat = traverse_util.flatten_dict(serialization.to_state_dict(tree))
  return b''.join(
    packer.pack((keys, serialization.to_bytes(np.asarray(leaf)))) for keys, leaf in flat.items()
  )


def big_vision(tree):
  """As `save_checkpoint` of big_vision."""
  file = io.BytesIO()
  np.savez(file, **{'/'.join(keys): leaf for keys, leaf in traverse_util.flatten_dict(tree).items()})
  return file.getvalue()


WRITERS = {'streaming_params': easylm, 'checkpoint.npz': big_vision}


@pytest.mark.parametrize('name', WRITERS)
@given(tree=TREES)
def test_any_tree_and_no_part_of_one(name, tree, tmp_path_factory):
  file = tmp_path_factory.mktemp('file') / name
  content = WRITERS[name](tree)
  file.write_bytes(content)
  assert_bits(flat_of(checkpoint.restore(file, layout=LAYOUT)), flat_of(tree))
  file.write_bytes(content[:-1])
  with pytest.raises(errors.CheckpointDamagedError):
    checkpoint.restore(file, layout=LAYOUT)


def test_a_train_state_of_easylm(tmp_path):
  params = {'kernel': np.ones((8, 8), np.float32), 'bias': np.arange(8, dtype=ml_dtypes.bfloat16)}
  create = lambda: TrainState.create(apply_fn=len, params=params, tx=OPTIMIZERS['adamw'])
  state = jax.tree.map(lambda leaf: np.asarray(jax.numpy.asarray(leaf)) + 1, create())
  file = tmp_path / 'streaming_train_state_100'
  file.write_bytes(easylm(state))
  restored = checkpoint.restore(file, LAYOUT.abstract(create))
  assert restored.params['kernel'].sharding.spec == P('data', 'model')
  assert all(map(np.array_equal, jax.tree.leaves(restored), jax.tree.leaves(state)))


def test_a_file_of_easylm_that_is_cut(tmp_path):
  file = tmp_path / 'streaming_params'
  content = easylm({'a': np.ones(4), 'b': np.ones(4), 'c': np.ones(4)})
  file.write_bytes(content[:-1])
  with pytest.raises(errors.CheckpointDamagedError) as caught:
    checkpoint.restore(file, layout=LAYOUT)
  size = len(content)
  assert str(caught.value) == (
    f'The file {file} is not a checkpoint of flax.training.checkpoints: the leaf at byte '
    f'{size // 3 * 2} is incomplete.\nFix: pass the folder of a checkpoint, or a file that save_checkpoint wrote.'
  )


def test_archives_of_others(tmp_path):
  """As `torch.save` writes them; objects of Python are never loaded."""
  file = tmp_path / 'pytorch_model.bin'
  with zipfile.ZipFile(file, 'w') as archive:
    archive.writestr('archive/data.pkl', pickle.dumps({'w': 1}))
  objects = tmp_path / 'objects.npz'
  np.savez(objects, w=np.array([{}], object))
  for path, reason in (
    (file, 'archive/data.pkl is no array'),
    (objects, 'Object arrays cannot be loaded when allow_pickle=False'),
  ):
    with pytest.raises(errors.CheckpointDamagedError) as caught:
      checkpoint.restore(path, layout=LAYOUT)
    assert str(caught.value) == (
      f'The file {path} is not an archive of arrays of numpy: {reason}.\n'
      'Fix: pass a file of numpy.savez; a file of PyTorch can be converted to safetensors.'
    )


def test_what_is_no_array(tmp_path):
  """Texts are left out by those who ask for it; names of modules are none of arrays."""
  file = tmp_path / 'a.npz'
  np.savez(file, w=np.arange(4, dtype='>f4'), name=np.array('vit'))
  restored = checkpoint.restore(file, layout=LAYOUT, changes=checkpoint.Changes(unused='name'))
  assert_bits(restored, {'w': np.arange(4, dtype=np.float32)})
  with pytest.raises(errors.CheckpointMismatchError) as mismatch:
    checkpoint.restore(file, layout=LAYOUT)
  assert str(mismatch.value) == (
    f'Checkpoint {file} does not match the target:\nname: a Python str, which no target has.\n'
    "Fix: to leave it out, pass Changes(unused='regex')."
  )
  np.savez(file, **{'a': np.ones(2), 'a/b': np.ones(2)})
  with pytest.raises(errors.CheckpointDamagedError, match=r'numpy: a/b is below another array\.'):
    checkpoint.restore(file, layout=LAYOUT)


@pytest.mark.parametrize('texts', [['ab', 'cde'], [b'ab', b'cde']])
def test_an_array_of_texts_in_a_file_of_flax(tmp_path, texts):
  """The file was called one that Flax had not written."""
  file = tmp_path / 'a.msgpack'
  file.write_bytes(serialization.to_bytes({'w': np.ones(4), 'names': np.array(texts)}))
  with pytest.raises(errors.CheckpointDamagedError) as caught:
    checkpoint.show(file)
  assert str(caught.value) == (
    f'The file {file} has an array of texts, which Flax writes but cannot read.\n'
    'Fix: save the state again without arrays of texts.'
  )


def test_a_complex_number_of_python_fits_nothing(tmp_path):
  file = tmp_path / 'a.msgpack'
  file.write_bytes(serialization.to_bytes({'phase': 1j, 'w': np.ones(2, np.float32)}))
  with pytest.raises(errors.CheckpointMismatchError) as caught:
    checkpoint.restore(file, {'phase': np.complex64(0), 'w': np.ones(2, np.float32)})
  text = 'phase: a Python complex in the checkpoint, complex64[] in the target.'
  assert str(caught.value).splitlines()[1] == text


def test_one_leaf_of_easylm(tmp_path):
  (tmp_path / 'streaming_params').write_bytes(easylm({'w': np.ones(4, np.float32)}))
  assert_bits(
    checkpoint.restore(tmp_path / 'streaming_params', layout=LAYOUT), {'w': np.ones(4, np.float32)}
  )


def test_a_folder_with_such_a_file_names_it(tmp_path):
  """As `FlaxAutoModel.save_pretrained` leaves it."""
  (tmp_path / 'flax_model.msgpack').write_bytes(serialization.to_bytes({'w': np.ones(4)}))
  (tmp_path / 'config.json').write_text('{}')
  with pytest.raises(errors.CheckpointNotFoundError) as caught:
    checkpoint.restore(tmp_path, layout=LAYOUT)
  assert str(caught.value) == (
    f'There is no checkpoint at {tmp_path}; it holds flax_model.msgpack.\n'
    f'Fix: pass the path of a checkpoint, such as {tmp_path / "flax_model.msgpack"}.'
  )
