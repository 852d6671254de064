"""Generations: what is in a path's folder, who may replace it, and what readers and dead processes leave."""

import ctypes
import json
import os
import shutil
import threading
import time

import jax
import numpy as np
import orbax.checkpoint
import pytest
from orbax.checkpoint import v1 as ocp

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd._src.checkpoint.storage import head_lease, liveness
from flax_spmd._src.checkpoint.storage.disk_store import DiskStore
from flax_spmd._src.checkpoint.storage.process_identity import this_process
from tests.checkpoint import damage
from tests.processes import run_process

LAYOUT = spmd.Layout({'data': 8}, (('rows', 'data'),))


def save(path, number, **options):
  """Saves a state that is known by its number."""
  checkpoint.save(path, state_of(number), LAYOUT, **options)


def state_of(number):
  return {'w': np.full((16, 4), number, np.float32), 'number': number}


def number_of(path):
  """The number of the state at a path, all of which is verified; None if there is none."""
  try:
    restored = checkpoint.restore(path, layout=LAYOUT)
  except errors.CheckpointNotFoundError:
    return None
  np.testing.assert_array_equal(restored['w'], state_of(restored['number'])['w'])
  return restored['number']


def names_in(folder):
  return sorted(child.name for child in folder.iterdir() if child.name != '.flax_spmd.lock')


def contents(folder):
  """The contents of every file below a folder."""
  files = [file for file in folder.rglob('*') if file.is_file() and file.name != '.flax_spmd.lock']
  return {file.relative_to(folder): file.read_bytes() for file in files}


def generations(path):
  return [name for name in names_in(path) if name.startswith('gen-')]


def elsewhere(source):
  """Runs source code in another process; returns its exit code."""
  prelude = """
from orbax.checkpoint import v1 as ocp
from flax_spmd import checkpoint
from tests.checkpoint.generations_test import LAYOUT, number_of, save, state_of
"""
  return run_process(prelude + source, check=False).returncode


@pytest.fixture
def during_read(monkeypatch):
  """Calls a function while a restore reads its arrays."""

  def patch(call):
    load = ocp.load

    def late(*args, **kwargs):
      monkeypatch.setattr(ocp, 'load', load)
      call()
      return load(*args, **kwargs)

    monkeypatch.setattr(ocp, 'load', late)

  return patch


# -- what there is


def test_the_folder_of_a_checkpoint(tmp_path):
  save(tmp_path / 'a', 1)
  (generation,) = generations(tmp_path / 'a')
  assert names_in(tmp_path) == ['a']
  assert names_in(tmp_path / 'a') == ['HEAD', generation]
  head = damage.head_of(tmp_path / 'a')
  assert (head['format'], head['generation'], head['epoch'], head['lease']) == (2, generation, 1, None)
  manifest = json.loads((tmp_path / 'a' / generation / 'MANIFEST').read_text())
  there = {
    str(file.relative_to(tmp_path / 'a' / generation)): file.stat().st_size
    for file in (tmp_path / 'a' / generation).rglob('*')
    if file.is_file() and file.name != 'MANIFEST'
  }
  assert {name: size for name, (size, _) in manifest['files'].items()} == there


def test_an_overwrite_makes_another_generation_and_removes_the_old_one(tmp_path):
  for number in (1, 2, 3):
    save(tmp_path / 'a', number, overwrite=number > 1)
    assert number_of(tmp_path / 'a') == number
    assert len(generations(tmp_path / 'a')) == 1
  assert generations(tmp_path / 'a')[0].startswith('gen-000003-')
  assert names_in(tmp_path) == ['a']


def test_names_that_begin_alike_are_kept(tmp_path):
  names = ['step_9', 'step_9.x', 'step_9.orbax', 'step_90', '.step_9', 'step_9-gen']
  for number, name in enumerate(names):
    save(tmp_path / name, number)
  save(tmp_path / 'step_9', 7, overwrite=True)
  assert [number_of(tmp_path / name) for name in names] == [7, 1, 2, 3, 4, 5]
  shutil.rmtree(tmp_path / 'step_9')
  assert [number_of(tmp_path / name) for name in names] == [None, 1, 2, 3, 4, 5]
  assert names_in(tmp_path) == sorted(names[1:])


@pytest.mark.parametrize('overwrite', [False, True])
def test_files_of_others_are_never_removed(tmp_path, overwrite):
  """A folder that holds no checkpoint, with names that resemble ours and Orbax's."""
  names = [
    'checkpoint',
    'd',
    'data',
    'gen-1',
    'gen-images',
    'manifest.ocdbt',
    'pin-a-gen-b',
    'pin-board.txt',
  ]
  for name in names:
    (tmp_path / 'run' / name).mkdir(parents=True)
    (tmp_path / 'run' / name / 'file').write_text('mine')
  before = contents(tmp_path)
  with pytest.raises(errors.CheckpointExistsError) as caught:
    save(tmp_path / 'run', 1, overwrite=overwrite)
  assert str(caught.value) == (
    f'{tmp_path / "run"} holds files that belong to no checkpoint: checkpoint, d, data, gen-1, gen-images and 3 more.\n'
    'Fix: save to another path, or move them away.'
  )
  assert contents(tmp_path) == before


def test_files_beside_a_checkpoint_of_orbax(tmp_path):
  """It is replaced alone, and not with somebody's notes beside it."""
  ocp.save(tmp_path / 'a', {'w': np.zeros(8)})
  (tmp_path / 'a' / 'notes').mkdir()
  (tmp_path / 'a' / 'notes' / 'today.txt').write_text('mine')
  before = contents(tmp_path)
  with pytest.raises(errors.CheckpointExistsError, match='belong to no checkpoint: notes\\.\n'):
    save(tmp_path / 'a', 1, overwrite=True)
  assert contents(tmp_path) == before
  shutil.rmtree(tmp_path / 'a' / 'notes')
  save(tmp_path / 'a', 1, overwrite=True)
  assert names_in(tmp_path / 'a') == ['HEAD', *generations(tmp_path / 'a')]


@pytest.mark.parametrize('use_ocdbt', [True, False])
def test_folders_beside_a_tree_of_orbax(tmp_path, use_ocdbt):
  """Somebody's folders, which resemble parts of a checkpoint, are not taken for parts of it."""
  path = tmp_path / 'a'
  orbax.checkpoint.PyTreeCheckpointer(use_ocdbt=use_ocdbt).save(path, {'w': np.zeros(8)})
  for name, file in (
    ('best', '_METADATA'),
    ('checkpoint', '1'),
    ('images', '.zarray'),
    ('labels', 'zarr.json'),
  ):
    (path / name).mkdir()
    (path / name / file).write_text('mine')
  before = contents(tmp_path)
  with pytest.raises(errors.CheckpointExistsError, match=': best, checkpoint, images, labels\\.\n'):
    save(path, 1, overwrite=True)
  assert contents(tmp_path) == before


def test_a_checkpoint_inside_one_of_orbax(tmp_path):
  ocp.save(tmp_path / 'a', {'w': np.zeros(8)})
  orbax.checkpoint.PyTreeCheckpointer().save(tmp_path / 'a' / 'best', {'w': np.zeros(8)})
  before = contents(tmp_path)
  with pytest.raises(errors.CheckpointExistsError, match=': best\\.\n'):
    save(tmp_path / 'a', 1, overwrite=True)
  assert contents(tmp_path) == before


@pytest.mark.parametrize('kind', ['composite', 'standard', 'strings', 'zarr'])
def test_checkpoints_that_orbax_wrote_are_replaced(tmp_path, kind):
  path, tree = tmp_path / 'a', {'w': np.zeros(8), 'b': {'c': np.zeros(2)}}
  if kind == 'standard':
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
      checkpointer.save(path, tree)
  elif kind == 'strings':
    orbax.checkpoint.PyTreeCheckpointer().save(path, tree | {'name': 'a'})
  elif kind == 'zarr':
    orbax.checkpoint.PyTreeCheckpointer(use_ocdbt=False).save(path, tree)
  else:
    args = orbax.checkpoint.args
    with orbax.checkpoint.Checkpointer(orbax.checkpoint.CompositeCheckpointHandler()) as checkpointer:
      checkpointer.save(
        path, args=args.Composite(state=args.StandardSave(tree), meta=args.JsonSave({'a': 1}))
      )
  save(path, 1, overwrite=True)
  assert names_in(path) == ['HEAD', *generations(path)]


def test_a_checkpoint_of_orbax_that_has_lost_its_record_is_replaced(tmp_path):
  """A manager saves such a step again; in a bucket, it cannot move the damaged one away."""
  ocp.save(tmp_path / 'a', {'w': np.zeros(8)})
  (tmp_path / 'a' / '_CHECKPOINT_METADATA').unlink()
  (tmp_path / 'a' / 'orbax.checkpoint').unlink()
  save(tmp_path / 'a', 1, overwrite=True)
  assert names_in(tmp_path / 'a') == ['HEAD', *generations(tmp_path / 'a')]


def test_an_empty_folder(tmp_path):
  (tmp_path / 'a').mkdir()
  save(tmp_path / 'a', 1)
  assert number_of(tmp_path / 'a') == 1


def test_the_root_of_the_disk():
  with pytest.raises(errors.CheckpointError) as caught:
    save('/', 1, overwrite=True)
  assert str(caught.value) == '/ is a whole disk.\nFix: save to a path in it, such as /checkpoint.'


def test_a_file_at_the_path(tmp_path):
  (tmp_path / 'a').write_text('mine')
  for overwrite in (False, True):
    with pytest.raises(errors.CheckpointExistsError) as caught:
      save(tmp_path / 'a', 1, overwrite=overwrite)
    assert str(caught.value) == (
      f'{tmp_path / "a"} exists already.\nFix: save to another path, or remove it first.'
    )
  assert (tmp_path / 'a').read_text() == 'mine'


@pytest.mark.parametrize('name', ['a[b]', 'a*', '[run]/1', 'a?'])
def test_a_path_that_orbax_takes_for_a_pattern(tmp_path, name):
  with pytest.raises(errors.CheckpointError) as caught:
    save(tmp_path / name, 1)
  found = next(character for character in '*?[' if character in name)
  assert str(caught.value) == (
    f'{tmp_path / name} contains {found}, which Orbax takes for a pattern of file names.\n'
    'Fix: save to a path without *, ? and [.'
  )
  assert not (tmp_path / name).exists()


def test_a_path_that_tensorstore_takes_for_another(tmp_path):
  with pytest.raises(errors.CheckpointError) as caught:
    save(tmp_path / 'a\\b', 1)
  assert str(caught.value) == (
    f'{tmp_path}/a\\b contains \\, which TensorStore takes for the end of a folder.\n'
    'Fix: save to a path without \\.'
  )
  assert not any(tmp_path.iterdir())


def test_a_home_folder_that_no_shell_has_found(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('HOME', '/home/me')
  for call in (lambda: save('~/a', 1), lambda: checkpoint.restore('~/a')):
    with pytest.raises(errors.CheckpointError) as caught:
      call()
    assert str(caught.value) == (
      f'~/a is a folder named ~ below {tmp_path}: only a shell takes it for the home folder.\n'
      'Fix: pass /home/me/a, or ./~/a if you mean the former.'
    )
  with pytest.raises(errors.CheckpointError, match=r'\A~root/a is a folder named ~root below '):
    save('~root/a', 1)
  save('./~/a', 1)
  assert number_of(tmp_path / '~' / 'a') == 1


def test_an_empty_path(tmp_path, monkeypatch):
  """Of an unset variable, say: it would be the current folder."""
  monkeypatch.chdir(tmp_path)
  with pytest.raises(
    errors.CheckpointError, match=r'\AThe path is empty\.\nFix: pass a folder, or a URL'
  ):
    save('', 1)
  assert not any(tmp_path.iterdir())


def test_a_link_to_nothing(tmp_path):
  (tmp_path / 'a').symlink_to(tmp_path / 'b')
  with pytest.raises(errors.CheckpointError) as caught:
    save(tmp_path / 'a', 1)
  assert str(caught.value) == (
    f'Cannot write {tmp_path / "a"}: File exists (EEXIST).\n'
    'Fix: check the path: a file, or a link to nothing, is in the place of a folder.'
  )


def test_a_path_of_bytes(tmp_path):
  save(os.fsencode(tmp_path / 'a'), 1)
  assert number_of(os.fsencode(tmp_path / 'a')) == 1


def test_a_copy_of_a_generation_under_another_name(tmp_path):
  """It is no plain checkpoint of Orbax: its arrays and files are compared with their checksums."""
  save(tmp_path / 'a', 1)
  copy = tmp_path / 'exported'
  shutil.copytree(damage.generation_of(tmp_path / 'a'), copy)
  assert number_of(copy) == 1 and checkpoint.verify(copy) == []
  file = max((f for f in copy.rglob('*') if f.is_file()), key=lambda file: file.stat().st_size)
  content = bytearray(file.read_bytes())
  content[len(content) // 2] ^= 1
  file.write_bytes(content)
  assert checkpoint.verify(copy)
  with pytest.raises(errors.CheckpointDamagedError):
    number_of(copy)
  save(copy, 2, overwrite=True)
  assert number_of(copy) == 2


def test_a_manifest_of_somebody_else(tmp_path):
  ocp.save(tmp_path / 'plain', {'w': jax.numpy.ones(8)})
  (tmp_path / 'plain' / 'MANIFEST').write_text('{"files": []}')
  assert checkpoint.restore(tmp_path / 'plain', layout=LAYOUT)['w'].shape == (8,)


def test_deleted_stays_deleted(tmp_path):
  save(tmp_path / 'b', 1)
  shutil.copytree(tmp_path / 'b', tmp_path / '.b.host-1-0a0b0c0d.old')  # the former format kept one here
  shutil.copytree(damage.generation_of(tmp_path / 'b'), tmp_path / '.b.host-1-0a0b0c0d.new')
  shutil.rmtree(tmp_path / 'b')
  assert number_of(tmp_path / 'b') is None
  save(tmp_path / 'b', 2)
  assert number_of(tmp_path / 'b') == 2
  (tmp_path / 'b' / 'HEAD').unlink()
  with pytest.raises(errors.CheckpointDamagedError, match='has lost its HEAD'):
    number_of(tmp_path / 'b')
  with pytest.raises(errors.CheckpointExistsError):
    save(tmp_path / 'b', 3)
  save(tmp_path / 'b', 3, overwrite=True)
  assert number_of(tmp_path / 'b') == 3
  assert len(list((tmp_path / 'b').glob('gen-*'))) == 1


def test_a_moved_and_a_copied_checkpoint(tmp_path):
  save(tmp_path / 'a', 1)
  shutil.copytree(tmp_path / 'a', tmp_path / 'copy')
  (tmp_path / 'a').rename(tmp_path / 'moved')
  save(tmp_path / 'copy', 2, overwrite=True)
  assert [number_of(tmp_path / name) for name in ('a', 'copy', 'moved')] == [None, 2, 1]


# -- a generation by its own path


def test_a_generation_as_a_path(tmp_path):
  save(tmp_path / 'a', 1)
  folder = checkpoint.show(tmp_path / 'a').folder
  assert folder == str(damage.generation_of(tmp_path / 'a'))
  assert number_of(folder) == 1
  assert checkpoint.verify(folder) == [] == checkpoint.diff(folder, tmp_path / 'a')
  assert checkpoint.show(folder).folder == folder
  np.testing.assert_array_equal(ocp.load(folder)['w'], state_of(1)['w'])


@pytest.mark.parametrize('below', ['', 'state', 'state/new', 'new'])
@pytest.mark.parametrize('overwrite', [False, True])
def test_a_generation_is_never_saved_to(root, overwrite, below):
  save(f'{root}/a', 1)
  folder = checkpoint.show(f'{root}/a').folder
  path = f'{folder}/{below}'.rstrip('/')
  with pytest.raises(errors.CheckpointError) as caught:
    save(path, 2, overwrite=overwrite)
  assert str(caught.value) == (
    f'{path} is {"in " if below else ""}the current contents of a checkpoint, which no save may change.\n'
    f'Fix: save to {root}/a, or to another path.'
  )
  assert number_of(f'{root}/a') == 1
  assert checkpoint.verify(f'{root}/a') == []


def test_folders_for_other_libraries(tmp_path):
  ocp.save(tmp_path / 'plain', {'w': np.ones(3)})
  assert checkpoint.show(tmp_path / 'plain').folder == str(tmp_path / 'plain')
  (tmp_path / 'bad').mkdir()
  (tmp_path / 'bad' / 'HEAD').write_text('{')
  (bad, _) = checkpoint.ls(tmp_path)
  assert bad.error and bad.folder is None


# -- readers


def test_a_reader_keeps_its_generation(tmp_path, during_read):
  path = tmp_path / 'a'
  save(path, 1)
  seen = []

  def overwrite():
    seen.append(names_in(path))
    for number in (2, 3):
      assert elsewhere(f'save({str(path)!r}, {number}, overwrite=True)') == 0
    seen.append(generations(path))

  during_read(overwrite)
  assert number_of(path) == 1
  assert [name.partition('-')[0] for name in seen[0]] == ['HEAD', 'gen', 'pin']
  assert len(seen[1]) == 2  # the pinned one and the current one
  assert number_of(path) == 3
  assert not [name for name in names_in(path) if name.startswith('pin-')]
  save(path, 4, overwrite=True)
  assert (number_of(path), len(generations(path))) == (4, 1)


def test_a_reader_in_the_same_process_keeps_its_generation(tmp_path, during_read):
  path = tmp_path / 'a'
  save(path, 1)
  during_read(lambda: save(path, 2, overwrite=True))
  assert number_of(path) == 1
  assert number_of(path) == 2


def test_a_reader_of_a_generation_by_its_path_keeps_it(tmp_path, during_read):
  path = tmp_path / 'a'
  save(path, 1)
  folder = damage.generation_of(path)
  during_read(lambda: save(path, 2, overwrite=True))
  assert number_of(folder) == 1
  assert (number_of(path), len(generations(path))) == (2, 2)
  save(path, 3, overwrite=True)
  assert names_in(path) == ['HEAD', *generations(path)] and not folder.exists()


def test_a_copy_of_a_generation_has_no_pins(tmp_path, during_read):
  save(tmp_path / 'a', 1)
  folder = damage.generation_of(tmp_path / 'a')
  shutil.copytree(folder, tmp_path / 'copies' / folder.name)
  seen = []
  during_read(lambda: seen.extend(names_in(tmp_path / 'copies')))
  assert number_of(tmp_path / 'copies' / folder.name) == 1
  assert seen == [folder.name]


KILLED_READER = """
import os, signal
ocp.load = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
checkpoint.restore({path!r}, layout=LAYOUT)
"""


def test_the_pin_of_a_killed_reader_is_removed_by_the_next_save(tmp_path):
  path = tmp_path / 'a'
  save(path, 1)
  assert elsewhere(KILLED_READER.format(path=str(path))) == -9
  assert len([name for name in names_in(path) if name.startswith('pin-')]) == 1
  save(path, 2, overwrite=True)
  assert names_in(path) == ['HEAD', *generations(path)] and len(generations(path)) == 1


FOREIGN = ['other-host', '00000000-0000-0000-0000-000000000000/4026531836', 4711, '1']


def put_foreign_pin(path):
  """A pin of a reader on another machine."""
  pin = path / f'pin-0123456789abcdef-{damage.head_of(path)["generation"]}'
  pin.write_text(json.dumps({'holder': FOREIGN, 'beat': 0}))
  return pin


class Clock:
  """The clock by which leases and pins run out: it stands still except while somebody sleeps."""

  def __init__(self):
    self.now, self.meanwhile = 0.0, lambda: None

  def monotonic(self):
    return self.now

  def sleep(self, seconds):
    self.now += seconds
    self.meanwhile()


@pytest.fixture
def clock(monkeypatch):
  monkeypatch.setattr(liveness, 'time', Clock())
  return liveness.time


def test_the_pin_of_a_reader_elsewhere_holds_while_it_is_renewed(tmp_path, clock):
  path = tmp_path / 'a'
  save(path, 1)
  pin, pinned = put_foreign_pin(path), damage.generation_of(path)
  for beat in range(1, 3):
    save(path, 1 + beat, overwrite=True)
    assert pinned.exists()
    clock.sleep(liveness.LEASE + 1)
    pin.write_text(json.dumps({'holder': FOREIGN, 'beat': beat}))
  save(path, 4, overwrite=True)
  assert pinned.exists()
  clock.sleep(liveness.LEASE - 1)
  save(path, 5, overwrite=True)
  assert pinned.exists()
  clock.sleep(2)  # and now without a renewal
  save(path, 6, overwrite=True)
  assert not pinned.exists() and not pin.exists() and len(generations(path)) == 1


@pytest.mark.parametrize('content', [b'', bytes(64)])
def test_a_pin_that_a_power_cut_left_empty(tmp_path, content):
  path = tmp_path / 'a'
  save(path, 1)
  put_foreign_pin(path).write_bytes(content)
  save(path, 2, overwrite=True)
  assert number_of(path) == 2 and names_in(path) == ['HEAD', *generations(path)]


# -- writers on other machines


def put_foreign_lease(path, beat=0):
  """A lease of a writer on another machine."""
  lease = {'holder': FOREIGN, 'token': '0123456789abcdef', 'beat': beat}
  damage.edit_head(path, lambda head: head.update(lease=lease, epoch=head['epoch'] + 1))


def dead_writers_generation(path):
  folder = path / 'gen-000002-00000000.orbax-checkpoint-tmp'
  folder.mkdir()
  (folder / 'half').write_text('half')
  return folder


def test_a_living_writer_elsewhere(tmp_path, clock):
  path = tmp_path / 'a'
  save(path, 1)
  put_foreign_lease(path)

  def beat():
    if clock.now > liveness.LEASE - liveness.BEAT:  # its only renewal, and a late one
      damage.edit_head(path, lambda head: head['lease'].update(beat=1))

  clock.meanwhile = beat
  with pytest.raises(errors.CheckpointBusyError) as caught:
    save(path, 2, overwrite=True)
  assert str(caught.value) == (
    f'Checkpoint {path} is being written, by process 4711 on other-host.\n'
    'Fix: wait for it, or save to another path.'
  )
  assert number_of(path) == 1  # a reader need not wait


def test_a_dead_writer_elsewhere(tmp_path, clock):
  """It is known within 20 seconds."""
  path = tmp_path / 'a'
  save(path, 1)
  put_foreign_lease(path)
  left = dead_writers_generation(path)
  assert number_of(path) == 1 and clock.now == 0
  save(path, 2, overwrite=True)
  assert liveness.LEASE == 15 and liveness.LEASE <= clock.now < 20
  assert number_of(path) == 2 and not left.exists() and len(generations(path)) == 1


def test_a_dead_writer_here_is_known_at_once(tmp_path, clock):
  path = tmp_path / 'a'
  save(path, 1)
  killed = elsewhere(f"""
import os, signal
ocp.save_async = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
save({str(path)!r}, 2, overwrite=True)
""")
  assert killed == -9
  assert damage.head_of(path)['lease']['holder'][2] != os.getpid()
  save(path, 3, overwrite=True)
  assert clock.now == 0 and number_of(path) == 3


def test_a_clock_that_jumps(tmp_path, monkeypatch):
  """Neither a lease nor a pin depends on the time of day."""
  path = tmp_path / 'a'
  save(path, 1)
  for jump in (-1e9, 1e9):
    monkeypatch.setattr(time, 'time', lambda jump=jump: 1.8e9 + jump)
    monkeypatch.setattr(time, 'time_ns', lambda jump=jump: int((1.8e9 + jump) * 1e9))
    save(path, 2, overwrite=True)
    assert number_of(path) == 2 and len(generations(path)) == 1


def test_a_writer_that_was_taken_for_dead(tmp_path, monkeypatch, clock):
  """It fails as busy, and the path keeps what its successor has saved."""
  path = tmp_path / 'a'
  save(path, 1)
  begun = ocp.save_async

  def slow(*args, **kwargs):
    monkeypatch.setattr(ocp, 'save_async', begun)
    response = begun(*args, **kwargs)
    put_foreign_lease(path)  # the successor
    return response

  monkeypatch.setattr(ocp, 'save_async', slow)
  with pytest.raises(errors.CheckpointBusyError) as caught:
    save(path, 2, overwrite=True)
  assert str(caught.value) == (
    f'Checkpoint {path} was taken over by process 4711 on other-host, since this process was suspended, or cut '
    'off from the storage, for a while.\nFix: end this job, or save to another path.'
  )
  assert number_of(path) == 1
  assert damage.head_of(path)['lease']['holder'] == FOREIGN
  save(path, 3, overwrite=True)
  assert number_of(path) == 3 and len(generations(path)) == 1


def test_a_commit_whose_answer_is_lost(tmp_path, monkeypatch):
  """A renewal that waits for the commit does not take its head for one of another process."""
  path = tmp_path / 'a'
  save(path, 1)
  write, read = DiskStore.write, DiskStore.read

  def lost(store, name, data, **options):
    written = write(store, name, data, **options)
    if name == 'a/HEAD' and json.loads(data)['lease'] is None:
      monkeypatch.setattr(DiskStore, 'write', write)
      monkeypatch.setattr(DiskStore, 'read', slow)
      time.sleep(0.2)  # a renewal is due
      raise errors.CheckpointError('no answer')
    return written

  def slow(store, name, **options):
    time.sleep(0.2)
    return read(store, name, **options)

  monkeypatch.setattr(head_lease, 'BEAT', 0.05)
  monkeypatch.setattr(DiskStore, 'write', lost)
  save(path, 2, overwrite=True)
  monkeypatch.setattr(DiskStore, 'read', read)
  assert number_of(path) == 2 and len(generations(path)) == 1


# -- saves to new paths that were killed


def intent(folder, name, holder=FOREIGN):
  """The mark of a save that another process has begun."""
  (folder / '.flax_spmd').mkdir(exist_ok=True)
  file = folder / '.flax_spmd' / f'{name}-0123456789abcdef'
  file.write_text(json.dumps({'name': name, 'holder': holder}))
  return file


def test_a_save_elsewhere_to_a_new_path(tmp_path, clock):
  """The saves beside it leave it alone while it lives, and remove it once it has been silent."""
  path = tmp_path / 'new'
  save(path, 1)
  intent(tmp_path, 'new')
  damage.edit_head(path, lambda head: head.update(generation=None, manifest=None))
  put_foreign_lease(path)
  save(tmp_path / 'beside', 1)
  assert names_in(tmp_path) == ['.flax_spmd', 'beside', 'new']
  clock.sleep(liveness.LEASE + 1)
  save(tmp_path / 'beside', 2, overwrite=True)
  assert names_in(tmp_path) == ['beside']


def test_a_mark_that_its_writer_could_not_remove(tmp_path):
  """The save was complete."""
  save(tmp_path / 'done', 1)
  intent(tmp_path, 'done')
  save(tmp_path / 'beside', 2)
  assert names_in(tmp_path) == ['beside', 'done'] and number_of(tmp_path / 'done') == 1


@pytest.mark.parametrize('name', ['..', '../other', '/', '', '.', 'a/../..', 'mine', 'HEAD\0'])
def test_a_hostile_mark_removes_nothing(tmp_path, name):
  folder = tmp_path / 'folder'
  for mine in (tmp_path / 'other', folder / 'mine'):
    mine.mkdir(parents=True)
    (mine / 'file').write_text('mine')
  dead = this_process()._replace(pid=2**30)
  intent(folder, 'x', dead).write_text(json.dumps({'name': name, 'holder': dead}))
  save(folder / 'a', 1)
  assert (tmp_path / 'other' / 'file').read_text() == (folder / 'mine' / 'file').read_text() == 'mine'
  assert number_of(folder / 'a') == 1


@pytest.mark.parametrize('content', [b'', b'{', b'null', b'[]', b'{"name": "a"}'])
def test_a_damaged_mark(tmp_path, content):
  intent(tmp_path, 'x').write_bytes(content)
  save(tmp_path / 'a', 1)
  assert names_in(tmp_path) == ['a']


# -- where nothing can be written


@pytest.fixture
def read_only(tmp_path):
  """Makes a folder read-only: for root, by a mount."""
  undo = []

  def mount(folder):
    if os.geteuid() != 0:
      writable = [file for file in (folder, *folder.rglob('*')) if file.is_dir()]
      for file in writable:
        file.chmod(0o500)
      undo.append(lambda: [file.chmod(0o700) for file in writable])
      return
    libc = ctypes.CDLL(None, use_errno=True)
    name = os.fsencode(folder)
    bind, remount, readonly = 0x1000, 0x20, 0x1
    if libc.mount(name, name, None, bind, None) or libc.mount(
      name, name, None, bind | remount | readonly, None
    ):
      pytest.skip(f'this machine allows no mounts: {os.strerror(ctypes.get_errno())}')
    undo.append(lambda: libc.umount2(name, 2))

  yield mount
  for call in undo:
    call()


def test_a_read_only_folder(tmp_path, read_only):
  folder = tmp_path / 'folder'
  save(folder / 'a', 1)
  before = sorted(folder.rglob('*'))
  read_only(folder)
  assert number_of(folder / 'a') == 1
  assert checkpoint.verify(folder / 'a') == []
  assert [summary.error for summary in checkpoint.ls(folder)] == [None]
  for name, options in (('a', {'overwrite': True}), ('b', {})):
    with pytest.raises(errors.CheckpointReadOnlyError) as caught:
      save(folder / name, 2, **options)
    text = str(caught.value)
    assert str(folder) in text and text.endswith('Fix: pass a path that this process may write to.')
  assert sorted(folder.rglob('*')) == before


def test_a_read_without_pins_is_repeated(tmp_path, monkeypatch, during_read):
  """Where a reader may write no pins, a save may remove what it reads: it then reads the next one."""
  path = tmp_path / 'a'
  save(path, 1)

  def refuse(*_, **__):
    raise errors.CheckpointReadOnlyError('read-only')

  monkeypatch.setattr(DiskStore, 'write', refuse)  # of this process
  during_read(lambda: elsewhere(f'save({str(path)!r}, 2, overwrite=True)'))
  assert number_of(path) == 2


# -- many at once


@pytest.mark.slow
def test_reads_while_another_process_overwrites(tmp_path):
  """Every read is whole, and none fails."""
  path = tmp_path / 'a'
  save(path, 0)
  enough, numbers, codes = tmp_path / 'enough', [], []
  source = f"""
import os
number = 0
while not os.path.exists({str(enough)!r}):
  number += 1
  save({str(path)!r}, number, overwrite=True)
"""
  thread = threading.Thread(target=lambda: codes.append(elsewhere(source)))
  thread.start()
  while thread.is_alive():
    numbers.append(number_of(path))
    if len(set(numbers)) > 3:
      enough.touch()
  assert codes == [0]
  assert numbers == sorted(numbers) and number_of(path) >= numbers[-1] >= 3


def test_the_state_survives_every_layout_of_the_writer(tmp_path):
  """Generations do not depend on the devices of the writer."""
  for number, devices in enumerate((8, 4, 1)):
    layout = spmd.Layout(
      spmd.make_mesh({'data': devices}, devices=jax.devices()[:devices]), (('rows', 'data'),)
    )
    checkpoint.save(tmp_path / 'a', state_of(number), layout, overwrite=True)
    assert number_of(tmp_path / 'a') == number
