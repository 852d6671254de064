"""Paths without a checkpoint, and damaged or hostile ones: refused before any array is read or code run."""

import pickle
import re
import shutil
import sys
from textwrap import dedent

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from orbax.checkpoint import v1 as ocp

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd._src.checkpoint.storage import possible_sizes, record
from flax_spmd.checkpoint import Changes
from tests.checkpoint import damage
from tests.checkpoint.damage import signed
from tests.checkpoint.states import LAYOUTS

LAYOUT = LAYOUTS['two_by_four']()
CHANGED = 'Fix: restore another checkpoint; this one was changed after it was written.'


def state():
  w = spmd.LogicallyPartitioned(jnp.arange(32.0).reshape(8, 4), ('embed', 'mlp'))
  return {'w': w, 'b': jnp.ones(4)}


@pytest.fixture(scope='module')
def there(tmp_path_factory):
  folder = tmp_path_factory.mktemp('there')
  for name, pack in (('plain', 0), ('packed', 1 << 10)):
    checkpoint.save(folder / name, {**LAYOUT.shard(state()), 'n': 3}, layout=LAYOUT, pack=pack)
  ocp.save(folder / 'foreign', {'w': np.ones(8, np.float32), 'b': np.ones(4, np.float32)})
  return folder


@pytest.fixture
def changed(there, tmp_path):
  """Copies a checkpoint and edits its manifest, or another JSON file of the copy."""

  def change(edit, name='plain', file=None):
    path = tmp_path / 'a'
    shutil.copytree(there / name, path)
    if file is None:
      damage.edit_manifest(path, edit)
    else:
      damage.edit_json(damage.generation_of(path) / file, edit)
    return path

  return change


@pytest.fixture
def text_of(monkeypatch):
  def fail(*_, **__):
    raise AssertionError('arrays were read')

  def get(path, kind=errors.CheckpointDamagedError, target=None, **kwargs):
    monkeypatch.setattr(ocp, 'load', fail)
    monkeypatch.setattr(pickle, 'loads', fail)
    kwargs = kwargs or ({'layout': LAYOUT} if target is None else {})
    with pytest.raises(kind) as caught:
      checkpoint.restore(path, target, **kwargs)
    assert isinstance(caught.value, errors.FlaxSpmdError)
    text = str(caught.value)
    assert len(text.splitlines()) <= 40 and len(text) < 20_000
    return text

  return get


# -- no checkpoint


def test_paths_without_a_checkpoint(tmp_path, text_of):
  fix = 'Fix: pass the path that was given to flax_spmd.checkpoint.save.'
  empty = tmp_path / 'empty'
  empty.mkdir()
  assert text_of(empty, FileNotFoundError) == (
    f'There is no checkpoint at {empty} (a folder without a checkpoint).\n{fix}'
  )
  full = tmp_path / 'full'
  (full / 'sub').mkdir(parents=True)
  (full / 'notes.txt').write_text('hello')
  assert text_of(full, FileNotFoundError) == (
    f'There is no checkpoint at {full} (a folder without a checkpoint).\n{fix}'
  )
  assert text_of(full / 'notes.txt') == (
    f'The file {full / "notes.txt"} is not a checkpoint of flax.training.checkpoints: '
    'unpack(b) received extra data.\n'
    'Fix: pass the folder of a checkpoint, or a file that save_checkpoint wrote.'
  )


@pytest.mark.parametrize(
  'content', [b'\x82\x01\x02\xa11\x03', b'\x91' * 1000 + b'\x01'], ids=['keys', 'depth']
)
def test_a_flax_file_that_is_no_tree(content, tmp_path, text_of):
  """In msgpack: a number and a string as keys of one dict; a thousand lists, each in another one."""
  file = tmp_path / 'checkpoint_1'
  file.write_bytes(content)
  assert text_of(file).startswith(f'The file {file} is not a checkpoint of flax.training.checkpoints: ')


def test_an_unfinished_step(there, tmp_path, text_of):
  unfinished = tmp_path / 'run' / '3.orbax-checkpoint-tmp-17'
  shutil.copytree(there / 'foreign', unfinished)
  fix = 'Fix: pass the path that was given to flax_spmd.checkpoint.save.'
  assert text_of(tmp_path / 'run', FileNotFoundError) == (
    f'There is no checkpoint at {tmp_path / "run"}; the save of 3.orbax-checkpoint-tmp-17 is unfinished.\n{fix}'
  )
  assert text_of(unfinished, FileNotFoundError) == (
    f'There is no checkpoint at {unfinished} (an unfinished save).\n{fix}'
  )


@pytest.mark.parametrize('file', ['_METADATA', 'manifest.ocdbt', 'd'])
def test_missing_parts(there, tmp_path, file):
  path = tmp_path / 'a'
  shutil.copytree(there / 'plain', path)
  gone = damage.generation_of(path) / 'state' / file
  shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
  with pytest.raises(errors.CheckpointDamagedError) as caught:
    checkpoint.restore(path, layout=LAYOUT)
  first, damaged, fix = str(caught.value).splitlines()
  assert first == f'Checkpoint {path} is damaged in 1 file:'  # no array needs it
  assert damaged.startswith(gone.relative_to(path).as_posix()) and damaged.endswith(': it is missing')
  assert fix.startswith('Fix: restore another checkpoint')


def is_whole(call):
  try:
    return bool(call())
  except errors.CheckpointError as error:
    assert 'Fix: ' in str(error)
    return False


def test_folders_in_the_place_of_files(there, tmp_path):
  for number, whole in enumerate(
    sorted(each for each in (there / 'plain').rglob('*') if each.is_file())
  ):
    path = tmp_path / str(number)
    shutil.copytree(there / 'plain', path)
    file = path / whole.relative_to(there / 'plain')
    file.unlink()
    file.mkdir()
    assert not is_whole(lambda: checkpoint.verify(path) == []), file  # noqa: B023
    assert not is_whole(lambda: checkpoint.restore(path, layout=LAYOUT)), file  # noqa: B023


# -- wrong records


def put(value, *keys):
  def edit(content):
    for key in keys[:-1]:
      content = content[key]
    content[keys[-1]] = value

  return edit


def test_a_wrong_digest(changed, text_of):
  path = changed(put([9, 4], 'flax_spmd', 'leaves', 2, 'shape'))
  assert text_of(path) == (
    f'The record of checkpoint {path} is damaged: its digest does not match its content.\n{CHANGED}'
  )


@pytest.mark.parametrize('value', [None, 0, 'x', [], {}, {'format': 1}, {'digest': 'x'}])
def test_a_record_of_another_type(changed, text_of, value):
  text = text_of(changed(put(value, 'flax_spmd')))
  assert text.startswith('The record of checkpoint ') and text.endswith(CHANGED)


HUGE = 2**60
WRONG = [
  (('format',), 0, 'its format is not a number'),
  (('format',), True, 'its format is not a number'),
  (('format',), '1', 'its format is not a number'),
  (('tree',), 'text', 'its tree contains a value of type str'),
  (('tree',), 1.5, 'its tree contains a value of type float'),
  (('tree',), True, 'its tree contains a value of type bool'),
  (('tree',), {'w': -1}, 'its tree contains a value of type int'),
  (('tree',), {'b': 0, 'n': 1}, 'its tree does not match its leaves'),
  (('tree',), {'b': 0, 'n': 1, 'w': 1}, 'its tree does not match its leaves'),
  (('tree',), {'b': 0, 'n': 1, 'w': 7}, '2 is missing'),
  (('tree',), {'b': 0, 'n': 1, 'w': HUGE}, '2 is missing'),
  (('tree',), {'a/b': 0, 'a': {'b': 1}, 'w': 2}, 'its tree does not match its leaves'),
  (('tree',), {'b': 0, 'n': 1, '..': 2}, "it has a leaf named '..'"),
  (('tree',), {'b': 0, 'n': 1, '../../etc/passwd': 2}, "it has a leaf named '../../etc/passwd'"),
  (('tree',), {'b': 0, 'n': 1, '/etc/passwd': 2}, "it has a leaf named '/etc/passwd'"),
  (('tree',), {'b': 0, 'n': 1, 'x\\..\\y': 2}, "it has a leaf named 'x\\\\..\\\\y'"),
  (('tree',), {'b': 0, 'n': 1, 'w\0': 2}, "it has a leaf named 'w\\x00'"),
  (('leaves',), {}, 'its leaves are not a list'),
  (('leaves',), 'abc', 'its leaves are not a list'),
  (('leaves',), None, 'its leaves are not a list'),
  (('leaves', 2), 3, 'a leaf is not an object with the known fields'),
  (('leaves', 2), {}, "'shape' is missing"),
  (('leaves', 2, 'more'), 1, 'a leaf is not an object with the known fields'),
  (('leaves', 2, 'shape'), None, 'a leaf has the shape None'),
  (('leaves', 2, 'shape'), '84', "a leaf has the shape '84'"),
  (('leaves', 2, 'shape'), [8, 4.0], 'a leaf has the shape [8, 4.0]'),
  (('leaves', 2, 'shape'), [8, True], 'a leaf has the shape [8, True]'),
  (('leaves', 2, 'shape'), [-8, 4], 'a leaf has the shape [-8, 4]'),
  (('leaves', 2, 'shape'), [HUGE, 4], f'a leaf has the shape [{HUGE}, 4]'),
  (('leaves', 2, 'dtype'), 4, 'a dtype is not a string'),
  (('leaves', 2, 'dtype'), ['f'], 'a dtype is not a string'),
  (('leaves', 2, 'dtype'), 'object', "'object' is not an array dtype"),
  (('leaves', 2, 'dtype'), 'str', "'str' is not an array dtype"),
  (('leaves', 2, 'dtype'), 'f4,i8', "'f4,i8' is not an array dtype"),
  (('leaves', 2, 'dtype'), 'python.str', "'python.str' is not an array dtype"),
  (('leaves', 2, 'dtype'), 'float31', "data type 'float31' not understood"),
  (('leaves', 2, 'names'), 'ab', 'names or a spec are not a list of the right length'),
  (('leaves', 2, 'names'), ['a'], 'names or a spec are not a list of the right length'),
  (('leaves', 2, 'names'), ['a', 3], 'a dimension has the name 3'),
  (('leaves', 2, 'names'), ['a', [['b']]], "a dimension has the name [['b']]"),
  (('leaves', 2, 'spec'), {'a': 1}, 'names or a spec are not a list of the right length'),
  (('leaves', 2, 'spec'), [1], 'a dimension has the name 1'),
  (('leaves', 2, 'checksum'), 7, 'a leaf has the checksum 7'),
  (('leaves', 2, 'checksum'), 'crc64:00', "a leaf has the checksum 'crc64:00'"),
  (('leaves', 2, 'value'), 7, 'a leaf of dtype float32 has the value 7'),
  (('leaves', 2, 'on_mesh'), 'yes', "on_mesh is 'yes'"),
  (('leaves', 1, 'value'), None, 'a leaf of dtype python.int has the value None'),
  (('leaves', 1, 'value'), '3', "a leaf of dtype python.int has the value '3'"),
  (('leaves', 1, 'value'), True, 'a leaf of dtype python.int has the value True'),
  (('leaves', 1, 'shape'), [3], 'a leaf of dtype python.int has the shape [3]'),
  (('leaves', 2, 'packed'), 3, 'a leaf of dtype float32 is packed at 3'),
  (('leaves', 2, 'packed'), ['../../a', 0], "'../../a' is not an array dtype"),
  (('leaves', 1, 'packed'), ['int8', 0], "a leaf of dtype python.int is packed at ['int8', 0]"),
  (('leaves', 2, 'packed'), ['float32', '0'], "a leaf of dtype float32 is packed at ['float32', '0']"),
  (('kinds',), [], 'its kinds are not strings'),
  (('kinds',), {'a': 3}, 'its kinds are not strings'),
  (('layout',), 3, 'its layout is not a string'),
]


@pytest.mark.parametrize(('keys', 'value', 'reason'), WRONG)
def test_wrong_types_in_every_field(changed, text_of, keys, value, reason):
  path = changed(signed(put(value, *keys)))
  assert text_of(path) == f'The record of checkpoint {path} is damaged: {reason}.\n{CHANGED}'


@pytest.mark.parametrize('key', ['format', 'tree', 'leaves', 'kinds', 'layout'])
def test_missing_fields(changed, text_of, key):
  path = changed(signed(lambda record: record.pop(key)))
  assert text_of(path) == f"The record of checkpoint {path} is damaged: '{key}' is missing.\n{CHANGED}"


def test_deep_nesting(changed, text_of, there, tmp_path):
  deep = 0
  for _ in range(600):
    deep = {'a': deep}
  text = text_of(changed(signed(put(deep, 'tree'))))
  assert 'is damaged: ' in text


def test_deep_nesting_in_the_metadata_of_orbax(there, tmp_path, text_of):
  path = tmp_path / 'a'
  shutil.copytree(there / 'foreign', path)
  (path / '_CHECKPOINT_METADATA').write_text(
    '{"custom_metadata": ' + '[' * 200_000 + ']' * 200_000 + '}'
  )
  assert text_of(path) == (
    f'Checkpoint {path} cannot be read, because of _CHECKPOINT_METADATA: it is nested too deeply.\n{CHANGED}'
  )


def test_a_huge_file(there, tmp_path, text_of):
  path = tmp_path / 'a'
  shutil.copytree(there / 'foreign', path)
  with open(path / '_CHECKPOINT_METADATA', 'r+') as file:
    file.truncate(600 << 20)  # sparse
  assert text_of(path) == (
    f'Checkpoint {path} cannot be read, because of _CHECKPOINT_METADATA: it has 629,145,600 bytes.\n{CHANGED}'
  )


@pytest.mark.parametrize(
  'text', ['', 'null', '[]', '{', '\0\1', '\ud800'.encode('utf-8', 'surrogatepass')]
)
def test_invalid_metadata_of_orbax(there, tmp_path, text_of, text):
  path = tmp_path / 'a'
  shutil.copytree(there / 'foreign', path)
  (path / '_CHECKPOINT_METADATA').write_bytes(text if isinstance(text, bytes) else text.encode())
  error = text_of(path)
  assert error.startswith(f'Checkpoint {path} cannot be read, because of _CHECKPOINT_METADATA: ')
  assert error.endswith(CHANGED)


@pytest.mark.parametrize(
  'layout', ['', 'x = [', '[mesh]\ndata = -3\n', '[mesh]\ndata = "a"\n', 'a' * 10_000, '[[[[[' * 1000]
)
def test_an_invalid_layout(changed, text_of, layout):
  path = changed(signed(put(layout, 'layout')))
  with pytest.raises(errors.FlaxSpmdError) as caught:
    checkpoint.restore(path)
  assert 'Fix: pass mesh=' in str(caught.value)
  assert len(str(caught.value)) < 5000


def test_a_mesh_of_billions_of_devices(changed, text_of):
  path = changed(signed(put('[mesh]\ndata = 4000000000\n', 'layout')))
  with pytest.raises(errors.FlaxSpmdError, match='Fix: pass mesh='):
    checkpoint.restore(path)


# -- arrays that differ from the record


@pytest.mark.parametrize('shape', [[16, 4], [4, 4], [4, 8], [32]])
def test_a_shape_that_differs_from_the_file(changed, shape):
  def edit(record):
    record['leaves'][2].update(shape=shape, names=None, spec=None)

  path = changed(signed(edit))
  with pytest.raises(errors.CheckpointDamagedError):
    checkpoint.restore(path, layout=LAYOUT)
  numpy = {'w': np.zeros(shape, np.float32), 'b': np.zeros(4, np.float32), 'n': 0}
  with pytest.raises(errors.CheckpointError):
    checkpoint.restore(path, numpy)


def test_a_dtype_that_differs_from_the_file(changed):
  path = changed(signed(put('int32', 'leaves', 2, 'dtype')))
  with pytest.raises(errors.CheckpointDamagedError):
    checkpoint.restore(path, layout=LAYOUT)


def test_packed_leaves_longer_than_the_file(changed):
  path = changed(signed(put([HUGE // 2], 'leaves', 0, 'shape')), 'packed')
  with pytest.raises(errors.CheckpointError):
    checkpoint.restore(path, layout=LAYOUT, limit=1 << 20)


# -- names in Orbax's own metadata


@pytest.mark.parametrize(
  'name', ['..', '../../etc/passwd', '/etc/passwd', 'a/../../b', 'x\\..\\y', "'/../"]
)
@pytest.mark.parametrize('field', ['name', 'key'])
def test_names_that_lead_out_of_the_folder(changed, text_of, name, field):
  def edit(content):
    tree = content['tree_metadata']
    if field == 'name':
      tree[str((name,))] = tree.pop("('w',)")
    else:
      tree["('w',)"]['key_metadata'][0]['key'] = name

  path = changed(edit, 'foreign', 'state/_METADATA')
  with pytest.raises(
    errors.CheckpointDamagedError, match=r'(?s)which leads out of its folder\.\n.*Fix: '
  ):
    checkpoint.restore(path, layout=LAYOUT)
  shutil.rmtree(path)
  path = changed(edit, 'plain', 'state/_METADATA')  # the record has the names
  with pytest.raises(
    errors.CheckpointDamagedError, match=r'is damaged in 1 file:\n.*/state/_METADATA: '
  ):
    checkpoint.restore(path, layout=LAYOUT)
  assert checkpoint.restore(path, layout=LAYOUT, salvage=True).damaged == {}


@pytest.mark.parametrize('value', [None, 3, [], {'x': 1}, {"('w',)": None}])
def test_orbax_metadata_of_wrong_types(changed, value):
  for name in ('plain', 'foreign'):
    path = changed(put(value, 'tree_metadata'), name, 'state/_METADATA')
    with pytest.raises(errors.CheckpointError):
      checkpoint.restore(path, layout=LAYOUT)
    shutil.rmtree(path)


# -- memory


def test_too_little_memory_is_reported_before_reading(there, text_of):
  path = there / 'plain'
  text = text_of(path, errors.CheckpointMismatchError, layout=LAYOUT, limit=20)
  assert text == dedent(f"""\
    Checkpoint {path} does not match the target:
    The restore needs 32 B per device, but only 20 B is free. Largest leaves: b 16 B, w 16 B, n 0 B.
    Fix: use a mesh of more devices, or rules that shard more of these leaves.""")


# -- many differences


def many(count, prefix):
  return {f'{prefix}{n}': {'w': np.ones(4, np.float32)} for n in range(count)}


@pytest.fixture(scope='module')
def large(tmp_path_factory):
  path = tmp_path_factory.mktemp('large') / 'a'
  checkpoint.save(path, many(2000, 'layer_'), layout=LAYOUT, pack=1 << 10)
  return path


def calls(f):
  """Number of function calls: a measure of time that is the same on every machine."""
  count = 0

  def profile(frame, event, argument):
    nonlocal count
    count += event in ('call', 'c_call')

  sys.setprofile(profile)
  try:
    f()
  finally:
    sys.setprofile(None)
  return count


def test_two_thousand_differences_are_reported_on_forty_lines(large, text_of):
  fix = {**many(2000, 'block_'), **many(5, 'layer_')}
  text = text_of(large, errors.CheckpointMismatchError, fix)
  lines = text.splitlines()
  assert len(lines) <= 40 and lines[-2] == f'and {2000 + 1995 - len(lines) + 3} more differences.'
  shapes = {name: {'w': np.ones(5, np.float32)} for name in many(2000, 'layer_')}
  assert (
    'and 1963 more differences.' in text_of(large, errors.CheckpointMismatchError, shapes).splitlines()
  )


@pytest.mark.parametrize(
  'changes', [Changes(), Changes(stacks={'layer': 'layer_{}'}), Changes(moved='layers')]
)
def test_preflight_is_linear_in_the_number_of_leaves(large, tmp_path, changes):
  """Four times the leaves take about four times as many calls, not sixteen times."""
  small = tmp_path / 'a'
  checkpoint.save(small, many(500, 'layer_'), layout=LAYOUT, pack=1 << 10)
  counts = [
    calls(lambda p=p, n=n: checkpoint.preflight(p, many(n, 'layer_'), changes=changes))
    for p, n in ((small, 500), (large, 2000))
  ]
  assert counts[1] < 5 * counts[0]


# -- impossible sizes


def resized(shape):
  """A record with another shape of b and a right digest."""

  def edit(content):
    leaf = content['leaves'][0]
    leaf['shape'], leaf['names'], leaf['spec'] = shape, None, None
    for other in content['leaves'][1:]:
      if 'packed' in other:
        other['packed'][1] += np.prod(shape, dtype=object) - 4

  return signed(edit)


@pytest.mark.parametrize('name', ['plain', 'packed'])
@pytest.mark.parametrize('shape', [[2**59], [2**40, 2**40, 2**40]])
def test_shapes_that_nothing_could_hold(changed, name, shape):
  path = changed(resized(shape), name)
  target = {**LAYOUT.abstract(state), 'n': 3}
  calls = [
    lambda: checkpoint.restore(path, layout=LAYOUT),
    lambda: checkpoint.restore(path, target),
  ]
  texts = []
  for call in calls:
    with pytest.raises(errors.CheckpointDamagedError) as caught:
      call()
    texts.append(str(caught.value))
  listed = ','.join(map(str, shape))
  size = '2 EiB' if len(shape) == 1 else '4.61e+18 EiB'
  for text in texts:
    lines = text.splitlines()
    assert re.fullmatch(
      rf'The arrays of checkpoint {re.escape(str(path))} would take {re.escape(size)} in this process, '
      r'which can hold [\d.]+ [GT]iB; the files have [\d.]+ KiB together\.',
      lines[0],
    )
    assert lines[1] == f'b: float32[{listed}] takes {size}.'
    assert (
      lines[-1]
      == 'Fix: restore another checkpoint; the shapes of this one were changed after it was written.'
    )
  plan = checkpoint.preflight(path, layout=LAYOUT)
  assert str(path) in plan.problems[0].text
  assert checkpoint.show(path).record.leaves['b'].shape == tuple(shape)


@pytest.mark.parametrize('name', ['plain', 'packed'])
@pytest.mark.parametrize('shape', [[2**59], [2**40, 2**40, 2**40]])
def test_salvage_without_an_array_that_nothing_could_hold(changed, there, name, shape):
  """Only that array is lost; packed ones that the record moves behind it are, too."""
  path = changed(resized(shape), name)
  target = {**LAYOUT.abstract(state), 'n': 3}
  whole = checkpoint.restore(there / name, layout=LAYOUT)
  verified = checkpoint.verify(path)
  for salvaged in (
    checkpoint.restore(path, layout=LAYOUT, salvage=True),
    checkpoint.restore(path, target, salvage=True),
  ):
    reason = salvaged.damaged['b']
    assert re.fullmatch(
      r'float32\[[\d,]+\] takes [\d.e+]+ EiB, more than files and process could hold', reason
    )
    assert [*salvaged.damaged, *salvaged.files] == verified
    if name == 'plain':
      assert verified == ['b']
    for leaf in salvaged.state.keys() - salvaged.damaged.keys():
      got = salvaged.state[leaf]
      np.testing.assert_array_equal(getattr(got, 'value', got), whole[leaf])
    assert len(salvaged.damaged) < len(whole)


def test_sizes_beside_a_file_that_another_reader_removes(changed):
  path = changed(resized([2**59]))
  (path / 'pin-1').symlink_to('removed')  # is listed, and is not there
  assert checkpoint.verify(path) == ['b']


def test_salvage_of_a_stack_without_one_of_its_layers(tmp_path):
  """The other layers are read for nothing else, and are no difference."""
  layers = {f'layer_{i}': {'a': np.full(4, i), 'w': np.ones(5)} for i in range(3)}
  checkpoint.save(tmp_path / 'a', layers, LAYOUT)
  damage.edit_manifest(
    tmp_path / 'a', signed(lambda record: record['leaves'][2].update(shape=[2**59], spec=None))
  )
  target = {'layer': {'a': np.full((3, 4), 7), 'w': np.zeros((3, 5))}}
  stacks = Changes(stacks={'layer': 'layer_{}'})
  salvaged = checkpoint.restore(tmp_path / 'a', target, changes=stacks, salvage=True)
  assert list(salvaged.damaged) == ['layer_1/a']
  assert (salvaged.state['layer']['a'] == 7).all() and (salvaged.state['layer']['w'] == 1).all()


def test_salvage_of_arrays_that_nothing_could_hold_together(tmp_path, monkeypatch):
  """One is impossible by itself, two are together, and the fourth is as it was stored."""
  monkeypatch.setattr(possible_sizes, '_memory', lambda: 1 << 40)
  checkpoint.save(tmp_path / 'a', {name: np.ones(4, np.float32) for name in 'abcd'}, LAYOUT)
  for number, size in enumerate((2**59, 3 * 2**36, 3 * 2**36)):
    damage.edit_manifest(
      tmp_path / 'a',
      signed(lambda record, n=number, s=size: record['leaves'][n].update(shape=[s], spec=None)),
    )
  assert checkpoint.preflight(tmp_path / 'a', layout=LAYOUT).problems
  with pytest.raises(errors.CheckpointDamagedError) as caught:
    checkpoint.restore(tmp_path / 'a', layout=LAYOUT)
  assert [line.split(':')[0] for line in str(caught.value).splitlines()[1:4]] == ['a', 'b', 'c']
  salvaged = checkpoint.restore(tmp_path / 'a', layout=LAYOUT, salvage=True)
  assert list(salvaged.damaged) == ['a', 'b', 'c']
  np.testing.assert_array_equal(salvaged.state['d'], np.ones(4))


def test_arrays_of_others_that_nothing_could_hold_together():
  """Without a record of ours, shapes are all that is known: the largest leaves are lost, until the rest is possible."""
  sizes = {'a': 3 * 2**37, 'b': 3 * 2**37, 'c': 2**20, 'd': 2**60}
  leaves = {name: record.LeafRecord((size,), 'int8') for name, size in sizes.items()}
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(possible_sizes, '_memory', lambda: 1 << 39)
    found = possible_sizes.impossible_leaves(epath.Path('nowhere'), leaves, together=True)
    assert list(found) == ['d', 'a'] and found['a'].endswith(' could hold with the others')
    assert list(possible_sizes.impossible_leaves(epath.Path('nowhere'), leaves)) == ['d']


def test_zeros_that_compress_well_are_no_damage(tmp_path):
  """Orbax with compression stores 64 MiB of zeros in a few KiB."""
  zeros = {'w': np.zeros((4096, 4096), np.float32)}
  ocp.save(tmp_path / 'a', zeros)
  assert sum(file.stat().st_size for file in (tmp_path / 'a').rglob('*') if file.is_file()) < 64 << 10
  assert not checkpoint.restore(tmp_path / 'a', zeros)['w'].any()
