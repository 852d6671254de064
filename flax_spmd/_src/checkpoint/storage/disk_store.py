"""DiskStore: a folder on disk whose small files are replaced in one step, and whose writes are durable."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import filelock
from etils import epath

from flax_spmd._src.checkpoint.storage.checksum import file_checksum
from flax_spmd._src.checkpoint.storage.removed_folders import remove_folder
from flax_spmd._src.checkpoint.storage.store import (
  ANY,
  LARGEST,
  FileRecord,
  Tag,
  checked,
  removable,
  too_large,
)
from flax_spmd._src.worker_threads import map_in_threads
from flax_spmd.errors import (
  CheckpointBusyError,
  CheckpointDamagedError,
  CheckpointError,
  CheckpointNotFoundError,
  CheckpointReadOnlyError,
)

LOCK_SECONDS = 30.0  # it is held for one small write
_LOCK = '.flax_spmd.lock'
_PART = '.flax_spmd.part'  # the ending of a file that is being written
_THREADS = 16  # they wait for the disk
_PAUSES = (0.0, 0.05, 0.1, 0.2, 0.4)
_CHANGING = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.EBUSY}
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}
_ABSENT = {errno.ENOENT, errno.ENOTDIR}
_REFUSED = {errno.EROFS, errno.EACCES, errno.EPERM}
_DAMAGED = {errno.EIO, errno.EUCLEAN}
# of reads that fail whatever the content
READ_FIXES = {
  errno.EACCES: 'let the owner of the files grant this process the right to read them.',
  errno.EPERM: 'let the owner of the files grant this process the right to read them.',
  errno.EMFILE: 'raise the limit of open files (ulimit -n), and repeat the call.',
  errno.ENFILE: 'raise the limit of open files of the machine, and repeat the call.',
  errno.ESTALE: 'mount the file system again, and repeat the call.',
  errno.ENOTCONN: 'mount the file system again, and repeat the call.',
  errno.ETIMEDOUT: 'check the network and the file server, and repeat the call.',
  errno.EHOSTDOWN: 'check the network and the file server, and repeat the call.',
}
_FIXES = READ_FIXES | {
  errno.EEXIST: 'check the path: a file, or a link to nothing, is in the place of a folder.',
  errno.ENOSPC: 'free space on the disk, and repeat the call.',
  errno.ENAMETOOLONG: 'shorten the path; a save needs 45 more characters in its last name, and 200 in all.',
  errno.EDQUOT: 'free space, or have the quota raised, and repeat the call.',
  errno.EFBIG: 'raise the limit of file sizes (ulimit -f), or use a file system with larger files.',
  errno.EIO: 'check the disk, whose driver reports the cause in the system log; use another one until then.',
}
_FIX = 'check the path and its file system, and repeat the call.'


class DiskStore:
  """See `Store`. A file is replaced by a rename, under a lock of the root.

  The operating system releases the lock of a process that dies. The file that such a process was writing has
  a name of its own. No method shows it, and the next write of the same name removes it.

  Args:
    root: absolute path of the folder, which need not exist.
  """

  def __init__(self, root: epath.Path):
    self.root = root
    self._durable: set[Path] = set()  # folders that are, with all above

  def read(self, name: str, limit: int = LARGEST) -> tuple[bytes, Tag] | None:
    """See `Store`."""
    with self._errors('read', name):
      content = _content(self._path(name), limit + 1)
    if content is not None and len(content) > limit:
      raise too_large(self.root, name, limit)
    return None if content is None else (content, _tag(content))

  def write(
    self, name: str, data: bytes, *, expected: Tag | None = ANY, durable: bool = True
  ) -> Tag | None:
    """See `Store`."""
    path = self._path(name)
    with self._errors('write', name):
      for pause in _PAUSES:
        time.sleep(pause)
        try:
          return self._write(path, data, expected, durable)
        except FileNotFoundError:  # another process removes the folder
          if pause == _PAUSES[-1]:
            raise

  def remove_if(self, name: str, expected: Tag) -> bool:
    """See `Store`."""
    path = self._path(name)
    with self._errors('remove', name), self._locked():
      content = _content(path)
      if content is None or _tag(content) != expected:
        return False
      path.unlink()
      with contextlib.suppress(OSError):
        path.parent.rmdir()
      return True

  def children(self, folder: str = '') -> list[str]:
    """See `Store`."""
    try:
      with self._errors('list', folder), os.scandir(self._path(folder)) as entries:
        return sorted(entry.name for entry in entries if not _is_internal(entry.name))
    except FileNotFoundError:
      return []

  def files(self, folder: str = '', *, like: str = '') -> dict[str, FileRecord]:
    """See `Store`. A disk has no checksums."""
    del like
    top = self._path(folder)
    try:
      with self._errors('list', folder):
        return {
          Path(entry.path).relative_to(top).as_posix(): FileRecord(entry.stat().st_size, '')
          for entry in _below(top)
          if not entry.is_dir(follow_symlinks=False) and not _is_internal(entry.name)
        }
    except FileNotFoundError:
      return {}

  def digest(self, name: str, like: str = '') -> str:
    """See `Store`."""
    with self._errors('read', name):
      return file_checksum(self._path(name), like)

  def remove(self, folder_or_file: str, *, is_file: bool = False) -> None:
    """See `Store`. Threads of a failed save may still write to the folder, so it tries several times."""
    del is_file
    path = Path(self.root, removable(folder_or_file, self.root))
    with self._errors('remove', folder_or_file):
      for pause in _PAUSES:
        time.sleep(pause)
        try:
          _remove(path)
          with contextlib.suppress(OSError):  # folders without files are none, as in a bucket
            if path.parent != Path(self.root):
              path.parent.rmdir()
          return
        except OSError as error:
          if error.errno not in _CHANGING or pause == _PAUSES[-1]:
            raise

  def sync(self, folder_or_file: str = '') -> None:
    """See `Store`."""
    top = self._path(folder_or_file)
    with self._errors('write', folder_or_file):
      if top.is_file():
        self._sync(top.parent, files=[top])
        return
      entries = list(_below(top))
      folders = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
      files = [Path(entry.path) for entry in entries if entry.is_file(follow_symlinks=False)]
      self._sync(top, folders, files)

  def _path(self, name: str) -> Path:
    return Path(self.root, checked(name, self.root))

  def _write(self, path: Path, data: bytes, expected: Tag | None, durable: bool) -> Tag | None:
    if not path.parent.is_dir():
      if expected not in (ANY, None):  # the file is gone, and its folder
        os.listdir(self.root)  # raises if nothing is there: the disk may have been unmounted
        return None
      self._durable.clear()
      path.parent.mkdir(parents=True, exist_ok=True)
    with _part(path, data) as part:
      is_synced = durable or path.exists()
      if is_synced:
        _sync_file(part)  # not within the lock, which a process may be stopped in
      with self._locked():
        content = _content(path)
        if expected not in (ANY, None if content is None else _tag(content)):
          return None
        if content is not None and not is_synced:
          _sync_file(part)
        _replace(path, part)
    if durable:
      self._sync(path.parent)
    return _tag(data)

  @contextlib.contextmanager
  def _locked(self) -> Iterator[None]:
    """Holds the lock of the root. On a file system without locks, filelock warns, and uses a file instead."""
    lock = filelock.FileLock(Path(self.root, _LOCK), timeout=LOCK_SECONDS, thread_local=False)
    try:
      lock.acquire(poll_interval=0.005)
    except filelock.Timeout:
      raise CheckpointBusyError(
        f'{lock.lock_file} has been locked by another process for {LOCK_SECONDS:.0f} seconds.\n'
        'Fix: end the process that holds it; if there is none, remove that file.'
      ) from None
    except NotImplementedError as error:
      raise CheckpointError(
        f'{self.root} is on a file system without locks.\n'
        'Fix: mount it with them (flock), or update filelock, which can do without.'
      ) from error
    try:
      yield
    finally:
      lock.release()

  def _sync(self, top: Path, folders: Sequence[Path] = (), files: Sequence[Path] = ()) -> None:
    """Syncs a folder, folders and files below it, and the folders above it, up to the mount or one that is durable.

    All at once: a disk makes many of them durable in the time of one.
    """
    above: list[Path] = []
    inner = Path(os.path.realpath(top))
    while inner not in self._durable and not os.path.ismount(inner):
      above.append(inner)
      inner = inner.parent
    syncs = [(_sync_file, file) for file in files]
    syncs += [(sync_folder, folder) for folder in (*folders, top)]
    syncs += [(_sync_if_readable, folder.parent) for folder in above]
    map_in_threads(lambda sync: sync[0](sync[1]), syncs, _THREADS)
    self._durable.update(above)

  @contextlib.contextmanager
  def _errors(self, verb: str, name: str) -> Iterator[None]:
    """Raises errors of the operating system as errors of the checkpoint, with path and errno."""
    try:
      yield
    except CheckpointError:
      raise
    except OSError as error:
      raise explained(error, verb, error.filename or self._path(name)) from error


def explained(error: OSError, verb: str, path: str | os.PathLike[str]) -> CheckpointError:
  """The error to raise for one of the operating system.

  Args:
    error: that error.
    verb: attempted action: 'read', 'write', 'list' or 'remove'.
    path: file or folder.
  """
  code = error.errno or 0
  text = f'Cannot {verb} {path}: {error.strerror or error} ({errno.errorcode.get(code, code)}).\nFix: '
  if verb in ('read', 'list') and code in _ABSENT:
    return CheckpointNotFoundError(f'{text}pass the path of a checkpoint.')
  if verb in ('write', 'remove') and code in _REFUSED:
    return CheckpointReadOnlyError(f'{text}pass a path that this process may write to.')
  is_damage = verb in ('read', 'list') and code in _DAMAGED
  kind = CheckpointDamagedError if is_damage else CheckpointError
  return kind(f'{text}{_FIXES.get(code, _FIX)}')


def _tag(content: bytes) -> Tag:
  return Tag(hashlib.sha256(content).hexdigest())


def _content(path: Path, most: int = -1) -> bytes | None:
  try:
    with open(path, 'rb') as file:
      return file.read(most)
  except (FileNotFoundError, NotADirectoryError):
    return None


def _is_internal(name: str) -> bool:
  return name == _LOCK or name.endswith(_PART)


@contextlib.contextmanager
def _part(path: Path, data: bytes) -> Iterator[Path]:
  """A new file beside another, with the content that is to replace it; removed if it is still there at the end."""
  part = path.with_name(f'.{path.name}.{secrets.token_hex(4)}{_PART}')
  try:
    part.write_bytes(data)
    yield part
  finally:
    with contextlib.suppress(OSError):
      part.unlink()


def _replace(path: Path, part: Path) -> None:
  """Renames a part, under the lock. The other parts go: whoever left one has died, or finds it gone and repeats the put."""
  for left in path.parent.glob(f'.{glob.escape(path.name)}.*{_PART}'):
    if left != part:
      left.unlink(missing_ok=True)
  os.replace(part, path)


def _sync(descriptor: int, path: Path) -> None:
  try:
    os.fsync(descriptor)
  except OSError as error:
    raise OSError(error.errno, error.strerror, str(path)) from error


def _sync_file(path: Path) -> None:
  with open(path, 'rb') as file:
    _sync(file.fileno(), path)


def sync_folder(path: Path) -> None:
  """Makes the names in a folder durable. Some file systems cannot, where names are as durable as they get."""
  descriptor = os.open(path, os.O_RDONLY | getattr(os, 'O_DIRECTORY', 0))
  try:
    _sync(descriptor, path)
  except OSError as error:
    if error.errno not in _NO_FOLDER_SYNC:
      raise
  finally:
    os.close(descriptor)


def _sync_if_readable(folder: Path) -> None:
  with contextlib.suppress(PermissionError):
    sync_folder(folder)


def _below(folder: Path) -> Iterator[os.DirEntry[str]]:
  """Every file and folder below a folder; links are not followed."""
  with os.scandir(folder) as entries:
    for entry in list(entries):
      yield entry
      if entry.is_dir(follow_symlinks=False):
        yield from _below(Path(entry.path))


def _remove(path: Path) -> None:
  if path.is_dir() and not path.is_symlink():
    remove_folder(path)
  else:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
      path.unlink()
