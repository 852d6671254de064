"""Safetensors that lie: every claim of a header or an index is checked before anything is read."""

import json
import os
import struct
import time
from textwrap import dedent

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save_file

import flax_spmd as spmd
from flax_spmd import checkpoint, errors

W = {'dtype': 'F32', 'shape': [2, 2], 'data_offsets': [0, 16]}
LAYOUT = spmd.Layout({'data': 8})
FIX = 'Fix: copy or download it again; it is incomplete, or was changed after it was written.'


def write(path, header, data=b'\0' * 16):
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  path.write_bytes(struct.pack('<Q', len(text)) + text + data)


def refused(path, error=errors.CheckpointDamagedError):
  with pytest.raises(error) as caught:
    checkpoint.show(path)
  return str(caught.value)


HEADERS = {
  'overlap': (
    {'a': W, 'b': {**W, 'data_offsets': [8, 24]}, 'c': {**W, 'shape': [], 'data_offsets': [24, 28]}},
    b'\0' * 28,
    "'b' and 'a' overlap, from byte 8 of the data.",
  ),
  'one inside another': (
    {'a': {**W, 'shape': [4, 2], 'data_offsets': [0, 32]}, 'b': {**W, 'data_offsets': [8, 24]}},
    b'\0' * 32,
    "'b' and 'a' overlap, from byte 8 of the data.",
  ),
  'out of the file': (
    {'a': W},
    b'\0' * 15,
    "'a': its data end at byte 16, and the file has 15 of data.",
  ),
  'backwards': (
    {'a': {**W, 'data_offsets': [16, 0]}},
    b'',
    "'a': its data_offsets [16, 0] run backwards.",
  ),
  'before the data': (
    {'a': {**W, 'data_offsets': [-16, 0]}},
    b'',
    "'a': its data_offsets [-16, 0] are not two positions.",
  ),
  'another size': (
    {'a': {**W, 'shape': [2, 3]}},
    b'\0' * 16,
    "'a': F32[2, 3] has 24 bytes, and its data_offsets 16.",
  ),
  'a hole': (
    {'a': W, 'b': {**W, 'data_offsets': [20, 36]}},
    b'\0' * 40,
    'bytes 16 to 20 of the data belong to no tensor.\nbytes 36 to 40 of the data belong to no tensor.',
  ),
  'an unknown dtype': ({'a': {**W, 'dtype': 'F12'}}, b'', "'a': its dtype 'F12' is unknown."),
  'a dtype that is a list': ({'a': {**W, 'dtype': ['F32']}}, b'', "'a': its dtype ['F32'] is unknown."),
  'a packed dtype': (
    {'a': {**W, 'dtype': 'F4'}},
    b'',
    "'a': arrays of F4 share bytes, which is not supported.",
  ),
  'a negative size': (
    {'a': {**W, 'shape': [-2, -2]}},
    b'\0' * 16,
    "'a': its shape [-2, -2] is not a list of sizes.",
  ),
  'a fractional size': (
    {'a': {**W, 'shape': [4.0]}},
    b'',
    "'a': its shape [4.0] is not a list of sizes.",
  ),
  'a truth value as size': (
    {'a': {**W, 'shape': [True]}},
    b'',
    "'a': its shape [True] is not a list of sizes.",
  ),
  '2 EiB': (
    {'a': {**W, 'shape': [2**59], 'data_offsets': [0, 2**61]}},
    b'',
    "'a': its data end at byte 2,305,843,009,213,693,952, and the file has 0 of data.",
  ),
  '4 EiB': ({'a': {**W, 'shape': [2**60]}}, b'', "'a': its shape [1152921504606846976] is too large."),
  'an enormous empty array': (
    {'a': {**W, 'shape': [0, 2**62], 'data_offsets': [0, 0]}},
    b'',
    "'a': its shape [0, 4611686018427387904] is too large.",
  ),
  'three offsets': (
    {'a': {**W, 'data_offsets': [0, 8, 16]}},
    b'',
    "'a': its data_offsets [0, 8, 16] are not two positions.",
  ),
  'no fields': ({'a': {'dtype': 'F32'}}, b'', "'a': it has no shape and no data_offsets."),
  'no object': ({'a': 3}, b'', "'a': it is not an object."),
  'metadata': ({'__metadata__': {'a': 1}}, b'', '__metadata__: it is not an object of strings.'),
  'an empty name': ({'a..b': W}, b'\0' * 16, "'a..b' is not safe as a path."),
  'a name that leads out': (
    {'../a': {**W, 'dtype': 'F12'}},
    b'\0' * 16,
    "'../a' is not safe as a path.\n'../a': its dtype 'F12' is unknown.",
  ),
  'half a character': (
    b'{"\\ud800": {}}',
    b'',
    "'\\ud800' is not safe as a path.\n'\\ud800': it has no dtype and no shape and no data_offsets.",
  ),
  'two names, one path': (
    {'a.b': W, 'a/b': {**W, 'data_offsets': [16, 32]}},
    b'\0' * 32,
    "'a.b' and 'a/b' have one path, a/b.",
  ),
  'a name twice': (
    b'{"a": 1, "a": 2}',
    b'',
    "its header is not a JSON object: it has 'a' twice.",
  ),
  'a list': (b'[]', b'', 'its header is not a JSON object: it does not begin with {.'),
  'no JSON': (
    b'{"a"',
    b'',
    "its header is not a JSON object: Expecting ':' delimiter: line 1 column 5 (char 4).",
  ),
  'no text': (
    b'{\xff}',
    b'',
    "its header is not a JSON object: 'utf-8' codec can't decode byte 0xff in position 1: invalid start byte.",
  ),
  'too deep': (
    b'{"a": ' + b'[' * 200_000,
    b'',
    'its header is not a JSON object: it is nested too deeply.',
  ),
}


@pytest.mark.parametrize('case', list(HEADERS))
def test_a_header_that_lies(case, tmp_path):
  header, data, problems = HEADERS[case]
  file = tmp_path / 'x.safetensors'
  write(file, header, data)
  assert refused(file) == f'The file {file} is not a valid safetensors file:\n{problems}\n{FIX}'


def test_lengths_of_the_header(tmp_path):
  file = tmp_path / 'x.safetensors'
  for content, problem in (
    (b'', 'it has 0 bytes, too few for a header.'),
    (b'\1\0', 'it has 2 bytes, too few for a header.'),
    (
      struct.pack('<Q', 2**63) + b'{}',
      'its header has 9,223,372,036,854,775,808 bytes, and the file 2 after the length.',
    ),
    (struct.pack('<Q', 3) + b'{}', 'its header has 3 bytes, and the file 2 after the length.'),
  ):
    file.write_bytes(content)
    assert refused(file) == f'The file {file} is not a valid safetensors file:\n{problem}\n{FIX}'
  with file.open('wb') as opened:
    opened.write(struct.pack('<Q', 100_000_001))
    opened.truncate(200_000_000)
  assert 'its header has 100,000,001 bytes; the format allows 100,000,000.' in refused(file)


def test_thirty_problems_are_listed(tmp_path):
  file = tmp_path / 'x.safetensors'
  write(file, {f't{number}': 0 for number in range(40)})
  lines = refused(file).splitlines()
  assert len(lines) == 33 and lines[-2] == 'and 10 more.'


def test_a_folder_of_checkpoints_lists_the_bad_one(tmp_path):
  write(tmp_path / 'bad.safetensors', b'[]')
  save_file({'w': np.ones(2, np.float32)}, tmp_path / 'good.safetensors')
  bad, good = checkpoint.ls(tmp_path)
  assert bad.error and not good.error


def test_a_file_that_shrinks_after_it_was_opened(tmp_path, monkeypatch):
  file = tmp_path / 'x.safetensors'
  save_file({'w': np.ones((64, 64), np.float32)}, file)
  target = {'w': np.zeros((64, 64), np.float32)}
  opened = np.empty
  cut = lambda *arguments, **options: (file.open('r+b').truncate(1000), opened(*arguments, **options))[1]
  monkeypatch.setattr(np, 'empty', cut)
  with pytest.raises(errors.CheckpointDamagedError) as caught:
    checkpoint.restore(file, target)
  assert str(caught.value) == dedent(f"""\
    Checkpoint {file} is damaged in 1 leaf:
    w: Checkpoint {file} cannot be read, because of x.safetensors: it ends at byte 1,000.
    Fix: restore another checkpoint, or the undamaged leaves of this one with salvage=True.""")


# -- the index


def indexed(folder, weight_map):
  save_file({'a': np.ones(2, np.float32)}, folder / 'x.safetensors')
  index = folder / 'model.safetensors.index.json'
  index.write_bytes(weight_map if isinstance(weight_map, bytes) else json.dumps(weight_map).encode())
  return index


INDICES = {
  'a missing file': (
    {'weight_map': {'a': 'x.safetensors', 'b': 'y.safetensors'}},
    'y.safetensors does not exist.',
  ),
  'a missing tensor': (
    {'weight_map': {'a': 'x.safetensors', 'b': 'x.safetensors', 'c.d': 'x.safetensors'}},
    "'b' is not in x.safetensors.\n'c.d' is not in x.safetensors.",
  ),
  'a file elsewhere': (
    {'weight_map': {'a': '../x.safetensors', 'b': '/x.safetensors', 'c': 3, 'd': 'x\n.safetensors'}},
    "'a' is in '../x.safetensors', which is not the name of a safetensors file.\n"
    "'b' is in '/x.safetensors', which is not the name of a safetensors file.\n"
    "'c' is in 3, which is not the name of a safetensors file.\n"
    "'d' is in 'x\\n.safetensors', which is not the name of a safetensors file.",
  ),
  'another file': (
    {'weight_map': {'a': 'config.json'}},
    "'a' is in 'config.json', which is not the name of a safetensors file.",
  ),
  'no map': ({}, 'it cannot be read: it has no object "weight_map".'),
  'a list': ([], 'it cannot be read: it has no object "weight_map".'),
  'a tensor twice': (
    b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
    "it cannot be read: it has 'a' twice.",
  ),
  'no JSON': (
    b'{',
    'it cannot be read: Expecting property name enclosed in double quotes: line 1 column 2 (char 1).',
  ),
  'too deep': (b'[' * 200_000, 'it cannot be read: it is nested too deeply.'),
}


@pytest.mark.parametrize('case', list(INDICES))
def test_an_index_that_lies(case, tmp_path):
  content, problems = INDICES[case]
  index = indexed(tmp_path, content)
  assert refused(tmp_path) == (
    f'The index {index} does not describe a checkpoint:\n{problems}\n'
    'Fix: copy or download the checkpoint again, the index and every file that it names.'
  )


def test_a_tensor_that_a_large_index_names_twice(tmp_path):
  """It took time with the square of the number of tensors: minutes here."""
  names = [f'"model.layers.{number}": "x.safetensors"' for number in range(100_000)]
  index = indexed(tmp_path, f'{{"weight_map": {{{", ".join([*names, names[-1]])}}}}}'.encode())
  begin = time.monotonic()
  assert refused(tmp_path) == (
    f"The index {index} does not describe a checkpoint:\nit cannot be read: it has 'model.layers.99999' twice.\n"
    'Fix: copy or download the checkpoint again, the index and every file that it names.'
  )
  assert time.monotonic() - begin < 20


def test_names_of_two_files_with_one_path(tmp_path):
  save_file({'a/b': np.ones(2, np.float32)}, tmp_path / 'y.safetensors')
  save_file({'a.b': np.ones(2, np.float32)}, tmp_path / 'z.safetensors')
  index = tmp_path / 'model.safetensors.index.json'
  index.write_text(json.dumps({'weight_map': {'a/b': 'y.safetensors', 'a.b': 'z.safetensors'}}))
  assert "'a/b' and 'a.b' have one path, a/b." in refused(tmp_path)


def test_a_leaf_at_the_path_of_a_node(tmp_path):
  save_file({'a': np.ones(8, np.float32), 'a.b': np.zeros(8, np.float32)}, tmp_path / 'x.safetensors')
  with pytest.raises(errors.CheckpointError) as caught:
    checkpoint.restore(tmp_path, layout=LAYOUT)
  assert str(caught.value) == dedent("""\
    a is a leaf, and a/b is below it.
    Fix: rename one, with Changes(renames={'old': 'new'}).""")
  changes = checkpoint.Changes(renames={'^a$': 'c'})
  state = checkpoint.restore(tmp_path, layout=LAYOUT, changes=changes)
  assert np.array_equal(state['c'], np.ones(8)) and np.array_equal(state['a']['b'], np.zeros(8))


# -- anything

VALUES = st.recursive(
  st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=4)),
  lambda inner: st.one_of(
    st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
  ),
  max_leaves=6,
)
TENSORS = st.fixed_dictionaries(
  {
    'dtype': st.one_of(st.sampled_from(['F32', 'I8', 'BF16', 'F8_E4M3', 'F4', 'BOOL']), VALUES),
    'shape': st.one_of(st.lists(st.integers(0, 4), max_size=3), VALUES),
    'data_offsets': st.one_of(st.lists(st.integers(0, 40), min_size=2, max_size=2), VALUES),
  }
)
NAMES = st.one_of(st.sampled_from(['a', 'b', 'a.b', 'a/b', '..', '__metadata__']), st.text(max_size=4))


def accepted(path):
  """The arrays of a file that is read without an error of this package; None if it is refused."""
  try:
    record = checkpoint.show(path).record
    target = {name: np.empty(leaf.shape, jnp.dtype(leaf.dtype)) for name, leaf in record.leaves.items()}
    return checkpoint.restore(path, target) if target else {}
  except errors.CheckpointError as error:
    assert '\nFix: ' in str(error)
    return None


def theirs(path):
  """The bytes of each array as safetensors' own library reads them; None if it refuses."""
  try:
    tensors = deserialize(path.read_bytes())
  except SafetensorError:
    return None
  return {name.replace('.', '/'): bytes(tensor['data']) for name, tensor in tensors}


def assert_as_theirs(path):
  ours, expected = accepted(path), theirs(path)
  if ours is not None:
    assert {name: array.tobytes() for name, array in ours.items()} == expected


@given(
  header=st.one_of(st.dictionaries(NAMES, st.one_of(TENSORS, VALUES), max_size=3), VALUES),
  data=st.binary(max_size=40),
)
@example(header={'a': W}, data=b'\1' * 16)
@example(header={'a': W, 'b': {'dtype': 'I8', 'shape': [4], 'data_offsets': [16, 20]}}, data=b'\1' * 20)
def test_any_header_is_read_rightly_or_refused(header, data, tmp_path_factory):
  folder = tmp_path_factory.mktemp('any')
  write(folder / 'x.safetensors', header, data)
  assert_as_theirs(folder / 'x.safetensors')


@given(position=st.integers(0, 140), byte=st.integers(0, 255), length=st.integers(0, 200))
def test_a_damaged_byte_or_a_cut_is_read_rightly_or_refused(position, byte, length, tmp_path_factory):
  file = tmp_path_factory.mktemp('any') / 'x.safetensors'
  save_file({'a.w': np.arange(6, dtype=np.float32), 'b': np.ones(3, np.int8)}, file)
  content = bytearray(file.read_bytes())
  content[position % len(content)] = byte
  file.write_bytes(content[: max(length, 1)] if length < 100 else content)
  assert_as_theirs(file)


@given(content=VALUES)
def test_any_index_is_refused(content, tmp_path_factory):
  folder = tmp_path_factory.mktemp('any')
  indexed(folder, {'weight_map': content})
  assert accepted(folder) in (None, {})


@pytest.mark.parametrize('sharded', [True, False])
def test_a_file_that_is_written_to_during_a_restore(sharded, tmp_path, monkeypatch):
  """It has no checksums, so nothing else tells the old arrays from the new ones."""
  file = tmp_path / 'a.safetensors'
  save_file({'w': np.zeros(8, np.float32)}, file)
  read = os.preadv

  def other_writer(*arguments):
    file.write_bytes(file.read_bytes()[:-32] + np.ones(8, np.float32).tobytes())
    return read(*arguments)

  monkeypatch.setattr(os, 'preadv', other_writer)
  target = LAYOUT.abstract(lambda: {'w': jnp.zeros(8)}) if sharded else {'w': np.zeros(8, np.float32)}
  with pytest.raises(errors.CheckpointDamagedError) as caught:
    checkpoint.restore(file, target)
  assert str(caught.value) == dedent(f"""\
    Checkpoint {file} is damaged in 1 leaf:
    w: Checkpoint {file} cannot be read, because of a.safetensors: it has been written to.
    Fix: restore another checkpoint, or the undamaged leaves of this one with salvage=True.""")
  monkeypatch.undo()
  assert np.array_equal(checkpoint.restore(file, target)['w'], np.ones(8))
