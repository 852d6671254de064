"""Damaged or hostile HEAD and MANIFEST files: an error that names them, whatever they hold."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd._src.checkpoint.storage.head_lease import HeadLease
from flax_spmd._src.checkpoint.storage.killed_saves import Intent
from tests.checkpoint import damage
from tests.checkpoint.states import LAYOUTS, assert_equal

LAYOUT = LAYOUTS['two_by_four']()
CHANGED = 'Fix: restore another checkpoint; this one was changed after it was written.'


def state(number=0):
  w = spmd.LogicallyPartitioned(jnp.arange(32.0).reshape(8, 4) + number, ('embed', 'mlp'))
  return LAYOUT.shard({'w': w, 'b': jnp.ones(4)}) | {'n': 3}


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  folder = tmp_path_factory.mktemp('written')
  checkpoint.save(folder / 'a', state(), LAYOUT)
  checkpoint.save(folder / 'b', state(1), LAYOUT)
  return folder


@pytest.fixture
def path(written, tmp_path):
  shutil.copytree(written / 'b', tmp_path / 'b')
  return shutil.copytree(written / 'a', tmp_path / 'a')


def error_of(path, call=checkpoint.restore, kind=errors.CheckpointDamagedError, **options):
  with pytest.raises(kind) as caught:
    call(path, **options)
  assert type(caught.value) is kind and len(str(caught.value)) < 2000
  return str(caught.value)


def reasons(path, file):
  """The reason that every way to open a checkpoint gives."""
  texts = {
    error_of(path, call)
    for call in (checkpoint.restore, checkpoint.show, checkpoint.verify, checkpoint.preflight)
  }
  texts |= {error_of(path, lambda path: checkpoint.diff(path.parent / 'b', path))}
  (text,) = texts
  (listed,) = (entry for entry in checkpoint.ls(path.parent) if entry.path == str(path))
  assert listed.error == text
  start, end = f'Checkpoint {path} cannot be read, because of {file}: ', f'.\n{CHANGED}'
  assert text.startswith(start) and text.endswith(end)
  return text[len(start) : -len(end)]


# -- HEAD


@pytest.mark.parametrize(
  ('data', 'reason'),
  [
    (b'', 'Expecting value: line 1 column 1 (char 0)'),
    (b'\0' * 200, 'Expecting value: line 1 column 1 (char 0)'),
    (b'{"format": 2', "Expecting ',' delimiter: line 1 column 13 (char 12)"),
    (b'\xff\xfe\xff', None),
    (b'null', 'it is not a JSON object'),
    (b'[2]', 'it is not a JSON object'),
    (b'"HEAD"', 'it is not a JSON object'),
    (b'{}', "'format' is missing"),
    (b'[' * 200_000, 'it is nested too deeply'),
    (b'{"format": 2, "generation": ' + b'9' * 5000 + b'}', None),
  ],
)
def test_a_malformed_head(path, data, reason):
  (path / 'HEAD').write_bytes(data)
  found = reasons(path, 'HEAD')
  assert found == (reason or found)


LEASE = {'holder': ['host', 'boot/1', 7, '1'], 'token': 'ab', 'beat': 0}


@pytest.mark.parametrize(
  ('field', 'value', 'reason'),
  [
    ('format', None, 'its format is not a number'),
    ('format', '2', 'its format is not a number'),
    ('format', 2.0, 'its format is not a number'),
    ('format', True, 'its format is not a number'),
    ('format', 1, 'its format is not a number'),
    ('format', -3, 'its format is not a number'),
    ('generation', 7, 'its generation is 7'),
    ('generation', True, 'its generation is True'),
    ('generation', [], 'its generation is []'),
    ('generation', '', "its generation is ''"),
    ('generation', 'gen-', "its generation is 'gen-'"),
    ('generation', 'state', "its generation is 'state'"),
    ('generation', '../b', "its generation is '../b'"),
    ('generation', '/etc', "its generation is '/etc'"),
    ('generation', 'gen-000001-0123abcd/..', "its generation is 'gen-000001-0123abcd/..'"),
    ('generation', 'gen-000001-0123abcd\0', "its generation is 'gen-000001-0123abcd\\x00'"),
    ('generation', 'gen-000001-0123abcd\n', "its generation is 'gen-000001-0123abcd\\n'"),
    ('generation', 'x' * 10**6, "its generation is '" + 'x' * 181),
    ('manifest', None, 'its manifest is None'),
    ('manifest', 5, 'its manifest is 5'),
    ('epoch', None, 'its epoch is None'),
    ('epoch', True, 'its epoch is True'),
    ('epoch', 1.5, 'its epoch is 1.5'),
    ('epoch', -1, 'its epoch is -1'),
    ('epoch', 10**30, f'its epoch is {10**30}'),
    ('writer', 3, None),
    ('writer', ['host', 'boot', '7', '1'], None),
    ('lease', 3, 'its lease is 3'),
    ('lease', [], 'its lease is []'),
    ('lease', {}, "'holder' is missing"),
    ('lease', {**LEASE, 'holder': None}, None),
    ('lease', {**LEASE, 'holder': ['host']}, None),
    ('lease', {**LEASE, 'holder': [1, 2, 3, 4]}, None),
    ('lease', {**LEASE, 'holder': ['host', 'boot', '7', '1']}, None),
    ('lease', {**LEASE, 'token': 3}, 'its lease has no token, or no number of beats'),
    ('lease', {**LEASE, 'beat': '3'}, 'its lease has no token, or no number of beats'),
  ],
)
def test_wrong_types_in_every_field_of_a_head(path, field, value, reason):
  damage.edit_head(path, lambda head: head.update({field: value}))
  found = reasons(path, 'HEAD')
  assert found == (reason or found)


@pytest.mark.parametrize('field', ['format', 'generation', 'manifest', 'epoch', 'lease'])
def test_missing_fields_of_a_head(path, field):
  damage.edit_head(path, lambda head: head.pop(field))
  assert reasons(path, 'HEAD') == f"'{field}' is missing"


@pytest.mark.parametrize('options', [{}, {'overwrite': False}])
def test_a_damaged_head_is_not_replaced_unasked(path, options):
  (path / 'HEAD').write_bytes(b'{')
  assert error_of(path, checkpoint.save, state=state(), layout=LAYOUT, **options).startswith(
    f'Checkpoint {path} cannot be read, because of HEAD: '
  )


def test_a_damaged_head_is_replaced_when_asked(path):
  old = damage.generation_of(path)
  (path / 'HEAD').write_bytes(b'{')
  checkpoint.save(path, state(2), LAYOUT, overwrite=True)
  assert_equal(checkpoint.restore(path), spmd.unbox(state(2)))
  new = damage.generation_of(path)
  assert not old.exists() and old.name < new.name  # epochs go on
  assert sorted(child.name for child in path.iterdir()) == ['HEAD', new.name]


def test_the_contents_of_a_damaged_head_stay_until_the_new_ones_are_saved(path, monkeypatch):
  old = damage.generation_of(path)
  (path / 'HEAD').write_bytes(b'{')
  with monkeypatch.context() as patched, pytest.raises(errors.CheckpointError, match='failed: full'):
    patched.setattr('orbax.checkpoint.v1.save_async', lambda *_: (_ for _ in ()).throw(OSError('full')))
    checkpoint.save(path, state(2), LAYOUT, overwrite=True)
  assert_equal(checkpoint.restore(old), spmd.unbox(state()))


def killed(path, monkeypatch):
  """Saves to a path until the commit, as a process does that is killed then."""

  def stopped(*arguments, **options):
    raise errors.CheckpointError('killed')

  with monkeypatch.context() as patched:
    patched.setattr(HeadLease, 'commit', stopped)
    patched.setattr(HeadLease, 'release', stopped)
    with pytest.raises(errors.CheckpointError, match='killed'):
      checkpoint.save(path, state(2), LAYOUT, overwrite=True)


@pytest.mark.parametrize('fault', ['lost', 'damaged'])
def test_killed_saves_leave_the_contents_of_a_lost_head(path, monkeypatch, fault):
  """Those of the next saves, too, until one is committed. Saves beside it remove nothing."""
  old = damage.generation_of(path)
  (path / 'HEAD').unlink() if fault == 'lost' else (path / 'HEAD').write_bytes(b'{')
  for _ in range(3):
    killed(path, monkeypatch)
    checkpoint.save(path.parent / 'beside', state(3), LAYOUT, overwrite=True)
    assert_equal(checkpoint.restore(old), spmd.unbox(state()))
  checkpoint.save(path, state(4), LAYOUT, overwrite=True)
  assert_equal(checkpoint.restore(path), spmd.unbox(state(4)))
  assert sorted(child.name for child in path.iterdir()) == ['HEAD', damage.generation_of(path).name]


def test_a_mark_is_no_reason_to_remove_the_contents_of_a_lost_head(path, monkeypatch):
  """A save that was killed just after its commit has left a mark."""
  shutil.rmtree(path)
  with monkeypatch.context() as patched:
    patched.setattr(Intent, 'remove', Intent.leave)
    checkpoint.save(path, state(), LAYOUT)
  old = damage.generation_of(path)
  (path / 'HEAD').unlink()
  checkpoint.save(path.parent / 'beside', state(3), LAYOUT)
  assert_equal(checkpoint.restore(old), spmd.unbox(state()))
  assert not any((path.parent / '.flax_spmd').glob('*'))


# -- the generation and its manifest


def test_a_generation_that_is_missing(path):
  shutil.rmtree(damage.generation_of(path))
  assert reasons(path, 'MANIFEST') == 'it is missing'


def test_a_manifest_that_is_missing(path):
  (damage.generation_of(path) / 'MANIFEST').unlink()
  assert reasons(path, 'MANIFEST') == 'it is missing'


def test_a_manifest_of_another_generation(path):
  other = damage.generation_of(path.parent / 'b') / 'MANIFEST'
  shutil.copy(other, damage.generation_of(path) / 'MANIFEST')
  assert reasons(path, 'MANIFEST') == 'its digest is not the one in HEAD'


def test_a_head_of_another_checkpoint(path):
  shutil.copy(path.parent / 'b' / 'HEAD', path / 'HEAD')
  assert reasons(path, 'MANIFEST') == 'it is missing'


@pytest.mark.parametrize('place', [0, 40, -1])
def test_one_changed_byte_of_a_manifest(path, place):
  file = damage.generation_of(path) / 'MANIFEST'
  content = bytearray(file.read_bytes())
  content[place] ^= 1
  file.write_bytes(content)
  assert reasons(path, 'MANIFEST') == 'its digest is not the one in HEAD'


@pytest.mark.parametrize(
  'data', [b'', b'{', b'null', b'[]', b'7', b'\xff\xfe', b'{}', b'[' * 200_000, b'{"files": {}}']
)
def test_a_malformed_manifest(path, data):
  damage.write_manifest(path, data)
  assert reasons(path, 'MANIFEST')


@pytest.mark.parametrize('field', ['flax_spmd', 'files', 'metadata', 'saved'])
@pytest.mark.parametrize('value', [None, 1.5, 'text', [1], {'a': 1}, {'a': [1]}, {'a': ['1', 'x']}])
def test_wrong_types_in_every_field_of_a_manifest(path, field, value):
  if field == 'metadata' and isinstance(value, dict):
    pytest.skip('any object is valid')
  damage.edit_manifest(path, lambda manifest: manifest.update({field: value}))
  text = error_of(path)
  assert text.endswith(CHANGED)
  assert (
    'The record of checkpoint' if field == 'flax_spmd' else 'because of MANIFEST: its '
  ) in text.replace('a file', 'its file')


@pytest.mark.parametrize('field', ['flax_spmd', 'files', 'metadata', 'saved'])
def test_missing_fields_of_a_manifest(path, field):
  damage.edit_manifest(path, lambda manifest: manifest.pop(field))
  assert reasons(path, 'MANIFEST') == f"'{field}' is missing"


def test_a_head_that_is_far_too_large(path):
  """It is not read to its end."""
  with open(path / 'HEAD', 'r+b') as file:
    file.truncate(1 << 40)
  assert error_of(path) == (
    f'{path}/HEAD has more than 1,048,576 bytes, as no such file of a checkpoint has.\n{CHANGED}'
  )


@pytest.mark.parametrize('file', ['HEAD', 'MANIFEST'])
def test_a_folder_in_place_of_a_file(path, file):
  at = path / file if file == 'HEAD' else damage.generation_of(path) / file
  at.unlink()
  at.mkdir()
  assert str(at) in error_of(path, kind=errors.CheckpointError)


# -- anything

VALUES = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
  lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
  max_leaves=4,
)


@st.composite
def edits(draw, steps=5):
  """An edit of a JSON value: some value in it is replaced or removed."""
  choices = [draw(st.integers(0, 100)) for _ in range(steps)]
  value, remove = draw(VALUES), draw(st.booleans())

  def edit(content):
    for choice in choices:
      keys = list(content) if isinstance(content, dict) else range(len(content))
      key = list(keys)[choice % len(keys)]
      inner = content[key]
      if not isinstance(inner, (dict, list)) or not inner or choice % 7 == 0:
        break
      content = inner
    if remove:
      del content[key]
    else:
      content[key] = value

  return edit


def restored_or_refused(path):
  """A checkpoint is restored as it was saved, or an error of this package is raised."""
  for call in (checkpoint.show, checkpoint.restore):
    try:
      result = call(path)
    except errors.CheckpointError as error:
      assert '\nFix: ' in str(error)
      return
  assert_equal(result, spmd.unbox(state()))


@pytest.fixture(scope='module')
def damaged(written):
  """Changes a copy of a checkpoint, which is the same one each time."""
  path = shutil.copytree(written / 'a', written / 'damaged')
  before = {file: file.read_bytes() for file in (path / 'HEAD', damage.generation_of(path) / 'MANIFEST')}

  def restore(change, *arguments):
    for file, content in before.items():
      file.write_bytes(content)
    change(path, *arguments)
    restored_or_refused(path)

  return restore


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=40) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_head(damaged, data):
  damaged(lambda path: (path / 'HEAD').write_bytes(data))


@settings(max_examples=60, deadline=None)
@given(edits())
def test_any_change_of_a_head(damaged, edit):
  damaged(damage.edit_head, edit)


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=40) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_manifest(damaged, data):
  damaged(damage.write_manifest, data)


@settings(max_examples=60, deadline=None)
@given(edits())
def test_any_change_of_a_manifest(damaged, edit):
  """Also with the right digest in HEAD, as whoever writes it on purpose can have."""
  damaged(damage.edit_manifest, edit)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_change_of_a_record_with_right_digests(damaged, data):
  """The record may then describe another state, which is what its author meant: no bare error is raised."""
  edit = damage.signed(data.draw(edits()))

  def changed(path):
    damage.edit_manifest(path, edit)
    try:
      checkpoint.restore(path)
    except errors.FlaxSpmdError as error:
      assert '\nFix: ' in str(error)
    path.joinpath('HEAD').write_bytes(b'')  # nothing more to compare

  damaged(changed)


def test_numpy_values_are_compared():
  """The comparison of this module notices one changed value."""
  with pytest.raises(AssertionError):
    assert_equal({'w': np.ones(3)}, {'w': np.array([1.0, 1.0, 2.0])})
