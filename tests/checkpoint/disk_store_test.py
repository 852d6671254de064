"""Stores on disk: durable or an error, also of folders; killed writers, locks, read-only mounts."""

import errno
import os
import shutil
import signal
import stat
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

import flax_spmd as spmd
from flax_spmd import checkpoint
from flax_spmd._src.checkpoint.storage.store import ANY, FileRecord, open_store
from flax_spmd.errors import (
  CheckpointBusyError,
  CheckpointDamagedError,
  CheckpointError,
  CheckpointNotFoundError,
  CheckpointReadOnlyError,
)
from tests.processes import run_process

FSYNC = os.fsync


class Fsync:
  """`os.fsync` with a log of the paths, and errors for some of them."""

  def __init__(self, errors=None, kind=None):
    self.errors, self.kind, self.paths = errors or {}, kind, []

  def __call__(self, descriptor):
    path = os.readlink(f'/proc/self/fd/{descriptor}')
    self.paths.append(path)
    is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
    for part, code in self.errors.items():
      if part in Path(path).name and self.kind in (None, 'folder' if is_folder else 'file'):
        raise OSError(code, os.strerror(code))
    FSYNC(descriptor)


def fill(folder):
  (folder / 'd' / '0').mkdir(parents=True)
  (folder / 'd' / '0' / 'x').write_bytes(b'12345')
  (folder / 'meta').write_bytes(b'1')


def test_sync_reaches_every_file_and_folder_and_those_above(tmp_path, monkeypatch):
  fill(tmp_path / 'run' / 'gen-1')
  monkeypatch.setattr(os, 'fsync', fsync := Fsync())
  open_store(tmp_path / 'run').sync('gen-1')
  below = {tmp_path / 'run' / 'gen-1' / name for name in ('', 'd', 'd/0', 'd/0/x', 'meta')}
  assert below | {tmp_path / 'run', tmp_path, tmp_path.parent} <= set(map(Path, fsync.paths))
  assert len(fsync.paths) == len(set(fsync.paths))


def test_write_makes_new_folders_durable_once(tmp_path, monkeypatch):
  monkeypatch.setattr(os, 'fsync', fsync := Fsync())
  store = open_store(tmp_path / 'a' / 'b')
  store.write('c/HEAD', b'1')
  assert {tmp_path / 'a' / 'b' / 'c', tmp_path / 'a' / 'b', tmp_path / 'a', tmp_path} <= set(
    map(Path, fsync.paths)
  )
  fsync.paths.clear()
  store.write('c/HEAD', b'2')
  assert len(fsync.paths) == 2  # the file and its folder


def test_a_folder_that_is_made_again_is_made_durable_again(tmp_path, monkeypatch):
  store = open_store(tmp_path)
  store.write('a/b/HEAD', b'1')
  shutil.rmtree(tmp_path / 'a')
  monkeypatch.setattr(os, 'fsync', fsync := Fsync())
  store.write('a/b/HEAD', b'1')
  assert {tmp_path / 'a' / 'b', tmp_path / 'a', tmp_path} <= set(map(Path, fsync.paths))


@pytest.mark.parametrize('code', ['EIO', 'ENOSPC', 'EDQUOT', 'EROFS'])
@pytest.mark.parametrize('name', ['x', 'meta', '0', 'gen-1', 'run'])
def test_every_error_of_sync_is_raised(tmp_path, monkeypatch, code, name):
  run = tmp_path / 'run'
  fill(run / 'gen-1')
  monkeypatch.setattr(os, 'fsync', Fsync({name: getattr(errno, code)}))
  with pytest.raises(CheckpointError, match=f'/{name}: .*{code}') as caught:
    open_store(run).sync('gen-1')
  assert isinstance(caught.value, CheckpointReadOnlyError) == (code == 'EROFS')


def test_text_of_an_error(tmp_path, monkeypatch):
  monkeypatch.setattr(os, 'fsync', Fsync({'meta': errno.EIO}))
  fill(tmp_path / 'gen-1')
  with pytest.raises(CheckpointError) as caught:
    open_store(tmp_path).sync('gen-1')
  assert (
    str(caught.value)
    == dedent(f"""\
    Cannot write {tmp_path}/gen-1/meta: Input/output error (EIO).
    Fix: check the disk, whose driver reports the cause in the system log; use another one until then.""")
  )


@pytest.mark.parametrize('code', ['EIO', 'ENOSPC'])
def test_a_write_that_fails_keeps_the_old_content(tmp_path, monkeypatch, code):
  store = open_store(tmp_path)
  store.write('HEAD', b'old')
  monkeypatch.setattr(os, 'fsync', Fsync({'HEAD': getattr(errno, code)}))
  with pytest.raises(CheckpointError, match=code):
    store.write('HEAD', b'new')
  assert store.read('HEAD')[0] == b'old'
  assert not list(tmp_path.glob('*.part'))


def test_a_process_that_is_stopped_while_it_syncs_holds_no_lock(tmp_path, monkeypatch):
  store, other = open_store(tmp_path), open_store(tmp_path)
  tag, sync, seen = store.write('HEAD', b'1'), os.fsync, []

  def during(descriptor):
    monkeypatch.setattr(os, 'fsync', sync)
    seen.append(other.write('HEAD', b'2', expected=tag))
    sync(descriptor)

  monkeypatch.setattr(os, 'fsync', during)
  assert store.write('HEAD', b'3', expected=tag) is None  # its put came second
  assert store.read('HEAD') == (b'2', *seen)
  monkeypatch.setattr(os, 'fsync', during)
  tag = seen[-1]
  assert store.write('HEAD', b'4') and store.read('HEAD')[0] == b'4'
  assert sorted(child.name for child in tmp_path.iterdir()) == ['.flax_spmd.lock', 'HEAD']


@pytest.mark.parametrize('code', ['EINVAL', 'ENOTSUP'])
def test_a_file_system_that_cannot_sync_folders(tmp_path, monkeypatch, code):
  monkeypatch.setattr(os, 'fsync', Fsync({'': getattr(errno, code)}, 'folder'))
  store = open_store(tmp_path / 'run')
  store.write('HEAD', b'1')
  store.sync()
  checkpoint.save_safetensors(tmp_path / 'run', {'w': np.ones(2)})
  monkeypatch.setattr(os, 'fsync', Fsync({'': getattr(errno, code)}, 'file'))
  with pytest.raises(CheckpointError, match=code):
    store.sync()


def test_a_full_disk(tmp_path):
  """A write of a file that is larger than the process may write: a real error of the system, in another process."""
  script = f"""
    import resource, signal
    from flax_spmd._src.checkpoint.storage.store import open_store
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = open_store({str(tmp_path)!r})
    store.write('HEAD', b'old')
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
      store.write('HEAD', b'x' * 1000)
    except Exception as error:
      resource.setrlimit(resource.RLIMIT_FSIZE, before)  # which holds for stdout too
      print(type(error).__name__, error)
    print(store.read('HEAD')[0], store.children())
  """
  assert run_process(dedent(script)).stdout.splitlines() == [
    f'CheckpointError Cannot write {tmp_path}/HEAD: File too large (EFBIG).',
    'Fix: raise the limit of file sizes (ulimit -f), or use a file system with larger files.',
    "b'old' ['HEAD']",
  ]


def test_killed_writers_leave_nothing_that_disturbs(tmp_path):
  """Killed at the rename, at each fsync, and while it holds the lock."""
  store = open_store(tmp_path)
  tag = store.write('HEAD', b'old')
  for place in ('os.replace', 'os.fsync'):
    script = f"""
      import os, signal
      from flax_spmd._src.checkpoint.storage.store import open_store
      store = open_store({str(tmp_path)!r})
      {place} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
      store.write('HEAD', b'new')
    """
    assert run_process(dedent(script), check=False).returncode == -signal.SIGKILL
    assert list(tmp_path.glob('*.part'))
    assert store.children() == ['HEAD']
    assert store.files() == {'HEAD': FileRecord(3, '')}
    tag = store.write('HEAD', b'old', expected=tag)
    assert tag is not None
    assert not list(tmp_path.glob('.*.part'))


def test_a_lock_that_is_never_released(tmp_path, monkeypatch):
  import filelock

  store = open_store(tmp_path)
  store.write('HEAD', b'1')
  monkeypatch.setattr('flax_spmd._src.checkpoint.storage.disk_store.LOCK_SECONDS', 0.1)
  with filelock.FileLock(tmp_path / '.flax_spmd.lock'), pytest.raises(CheckpointBusyError) as caught:
    store.write('HEAD', b'2')
  assert str(caught.value) == dedent(f"""\
    {tmp_path}/.flax_spmd.lock has been locked by another process for 0 seconds.
    Fix: end the process that holds it; if there is none, remove that file.""")


def test_a_file_system_without_locks(tmp_path, monkeypatch):
  """As Lustre mounted without `flock`: a lock file serves instead."""
  import fcntl

  def flock(*_):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

  monkeypatch.setattr(fcntl, 'flock', flock)
  store = open_store(tmp_path)
  with pytest.warns(UserWarning, match='SoftFileLock'):
    tag = store.write('HEAD', b'1', expected=None)
  assert store.read('HEAD') == (b'1', tag)
  assert store.children() == ['HEAD']


def test_a_folder_that_is_removed_meanwhile(tmp_path, monkeypatch):
  store = open_store(tmp_path / 'run')
  replace, calls = os.replace, []

  def removed_once(source, target):
    calls.append(target)
    if len(calls) == 1:
      open_store(tmp_path).remove('run')
    replace(source, target)

  monkeypatch.setattr(os, 'replace', removed_once)
  assert store.write('HEAD', b'1', expected=None)
  assert store.read('HEAD')[0] == b'1'


@pytest.mark.skipif(os.geteuid() == 0, reason='root may write everywhere')
def test_a_folder_without_permission(tmp_path):
  os.chmod(tmp_path, 0o500)
  with pytest.raises(CheckpointReadOnlyError):
    open_store(tmp_path).write('HEAD', b'1')


def test_a_read_only_mount():
  """`/proc` is one that every machine has: nobody may make files there."""
  with pytest.raises(CheckpointError, match=r'Cannot write /proc/flax'):
    open_store('/proc/flax_spmd').write('HEAD', b'1')
  assert open_store('/proc/flax_spmd').read('HEAD') is None


def test_what_is_not_a_folder(tmp_path):
  (tmp_path / 'file').write_bytes(b'1')
  store = open_store(tmp_path / 'file')
  assert store.read('HEAD') is None
  assert store.children() == []
  assert store.children('x') == []
  store.remove('x')
  with pytest.raises(CheckpointError, match=r'ENOTDIR|EEXIST'):
    store.write('HEAD', b'1')


def test_absent_files(tmp_path):
  store = open_store(tmp_path)
  with pytest.raises(CheckpointNotFoundError) as caught:
    store.digest('x')
  assert str(caught.value) == dedent(f"""\
    Cannot read {tmp_path}/x: No such file or directory (ENOENT).
    Fix: pass the path of a checkpoint.""")


@pytest.mark.parametrize('name', ['../x', '/x', 'a//b', 'a/../b', '.', 'a/', 'x\0y'])
def test_names_that_lead_out(tmp_path, name):
  store = open_store(tmp_path)
  for call in (store.read, store.remove, store.children, store.files, store.digest, store.sync):
    with pytest.raises(CheckpointDamagedError, match='leads out'):
      call(name)
  with pytest.raises(CheckpointDamagedError, match='leads out'):
    store.write(name, b'', expected=ANY)


@pytest.mark.parametrize(
  ('path', 'root'),
  [
    ('file:///a/b c', '/a/b c'),
    ('file:///a/b%20c', '/a/b c'),
    ('file://localhost/a/../b', '/b'),
    ('/a/b/', '/a/b'),
    (Path('a'), f'{os.getcwd()}/a'),
    ('gs', f'{os.getcwd()}/gs'),
  ],
)
def test_paths(path, root):
  assert os.fspath(open_store(path).root) == root


@pytest.mark.parametrize(
  ('path', 'text'),
  [
    (
      Path('gs://bucket/x'),
      """\
      gs:/bucket/x begins as a URL does, without the two slashes after gs: (pathlib.Path leaves one or none).
      Fix: pass the URL as a string, or as an etils.epath.Path; for a folder of this name, pass ./gs:/bucket/x.""",
    ),
    (
      'hdfs://host/x',
      """\
      hdfs://host/x is a URL of a kind that checkpoints are not stored under.
      Fix: pass a folder, or a URL that begins with 'gs://', 's3://' or 'file://'.""",
    ),
    (
      'file://host/x',
      """\
      file://host/x is a URL of a kind that checkpoints are not stored under.
      Fix: pass a folder, or a URL that begins with 'gs://', 's3://' or 'file://'.""",
    ),
    (
      'gs:///x',
      """\
      gs:///x names no bucket.
      Fix: pass gs://<bucket>/<path>.""",
    ),
    *(
      (
        path,
        f"""\
        {path} contains "." or "..", which some clients of buckets follow and some take for a name.
        Fix: pass the path without it.""",
      )
      for path in ('s3://b/x/../y', 'gs://b/./y', 'gs://b/y/..')
    ),
    *(
      (
        f'file:///x{end}',
        f"""\
        file:///x{end} has a part after "?" or "#", which a path does not have.
        Fix: write "?" as %3F and "#" as %23 in a file:// URL, or pass the path itself.""",
      )
      for end in ('#2', '?2')
    ),
    *(
      (
        path,
        f"""\
        {path!r} is not a path.
        Fix: pass a folder, or a URL that begins with 'gs://', 's3://' or 'file://'.""",
      )
      for path in (None, 3, ['x'])
    ),
    (
      'x\0y',
      """\
      The path contains a null character.
      Fix: pass a folder, or a URL that begins with 'gs://', 's3://' or 'file://'.""",
    ),
  ],
)
def test_paths_of_no_store(path, text):
  with pytest.raises(CheckpointError) as caught:
    open_store(path)
  assert str(caught.value) == dedent(text)


def test_an_unknown_checksum(tmp_path):
  store = open_store(tmp_path)
  store.write('x', b'123')
  with pytest.raises(CheckpointError) as caught:
    store.digest('x', like='sha9:00')
  assert str(caught.value) == dedent("""\
    The checksum 'sha9:00' is of an unknown kind; known: crc32c, md5, crc32.
    Fix: update flax-spmd, if a newer version wrote the checkpoint; otherwise restore another one.""")


def test_a_name_that_is_too_long(tmp_path):
  name = 'y' * 250
  with pytest.raises(CheckpointError) as caught:
    open_store(tmp_path).write(name, b'1')
  text = str(caught.value)
  assert (
    text.startswith(f'Cannot write {tmp_path}/.{name}') and 'File name too long (ENAMETOOLONG)' in text
  )
  assert text.endswith(
    'Fix: shorten the path; a save needs 45 more characters in its last name, and 200 in all.'
  )
  layout = spmd.Layout({'data': 8})
  checkpoint.save(tmp_path / ('y' * 210), {'w': np.ones(8)}, layout)
