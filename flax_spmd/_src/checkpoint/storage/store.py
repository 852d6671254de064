"""Stores: small files with conditional writes, and folders that are listed past every cache.

A store holds a folder on disk or a prefix of a bucket. What is promised is the same on all of them:

    tag = store.write('HEAD', b'1', expected=None)      # only if there is none; else None
    content, tag = store.read('HEAD')
    store.write('HEAD', b'2', expected=tag)             # only if nobody has written since; else None

A write that returns is durable, and readers see the old content or the new. A tag stands for one content,
so whoever writes contents that never repeat can tell from the tag that nobody has written since.
"""

from __future__ import annotations

import os
import re
import urllib.parse
from typing import Any, Final, NamedTuple, NewType, Protocol

from etils import epath

from flax_spmd._src.text import shown, value_text
from flax_spmd.errors import CheckpointDamagedError, CheckpointError

Tag = NewType('Tag', str)
ANY: Final = Tag('any')  # the condition of a write that has none
LARGEST = 512 << 20  # bytes of a small file: a manifest of two million arrays
_LONGEST_PATH = 4096  # characters; Linux and buckets take no more
_SCHEME = re.compile(r'(gs|s3|file|[a-z][a-z0-9+.-]+(?=:/|:\Z)):', re.IGNORECASE)
_FIX = "Fix: pass a folder, or a URL that begins with 'gs://', 's3://' or 'file://'."


class FileRecord(NamedTuple):
  """A file of a generation.

  Attributes:
    size: in bytes.
    checksum: of its contents, see `Store.digest`; '' if it is not known.
  """

  size: int
  checksum: str


class Store(Protocol):
  """A folder on disk or in a bucket. Names are relative to it, with '/' between their parts.

  Every method raises CheckpointError for what the storage refuses, and the subclass CheckpointReadOnlyError
  for a write where nothing may be written.

  Attributes:
    root: absolute path of the folder; a URL in a bucket.
  """

  root: epath.Path

  def read(self, name: str, limit: int = LARGEST) -> tuple[bytes, Tag] | None:
    """The content of a file and its tag; None if there is no such file.

    Raises:
      CheckpointDamagedError: it has more than `limit` bytes. A bucket's file is read before it is found out.
    """
    ...

  def write(
    self, name: str, data: bytes, *, expected: Tag | None = ANY, durable: bool = True
  ) -> Tag | None:
    """Writes a small file, with the folders above it, in one step.

    Args:
      name: name of the file.
      data: its content.
      expected: the tag that the file must have; None: there must be no file; `ANY`: no condition.
      durable: whether it survives a power cut when this returns. If not, a power cut leaves the old file or
        the new one.

    Returns:
      The new tag; None if the condition did not hold.
    """
    ...

  def remove_if(self, name: str, expected: Tag) -> bool:
    """Removes a file that still has this tag, and the folder above it if that is empty then.

    Returns:
      Whether it is removed. A store that cannot check and remove in one step keeps the file.
    """
    ...

  def children(self, folder: str = '') -> list[str]:
    """The sorted names of files and folders directly in a folder; none if there is no such folder."""
    ...

  def files(self, folder: str = '', *, like: str = '') -> dict[str, FileRecord]:
    """Every file in a folder and below, by its path relative to the folder, from one list.

    Args:
      folder: name of the folder.
      like: a recorded checksum, if these are only compared with such; see `digest`.

    Returns:
      Sizes, and the checksums that the list has: those of the server.
    """
    ...

  def digest(self, name: str, like: str = '') -> str:
    """A checksum of the content of a file, after the name of its algorithm: `crc32c:1c291ca3`.

    Args:
      name: name of the file.
      like: a checksum to compare with, whose algorithm is used; '': whichever costs the store least.
    """
    ...

  def remove(self, folder_or_file: str, *, is_file: bool = False) -> None:
    """Removes a file, or a folder with everything below. There need not be one; none is there afterwards.

    The root itself is refused: it may be a whole bucket.

    Args:
      folder_or_file: its name.
      is_file: whether it is known to be no folder. A bucket then lists nothing.
    """
    ...

  def sync(self, folder_or_file: str = '') -> None:
    """Makes a file, or every file and folder below a folder, durable, whoever wrote it; and the folders above."""
    ...


def path_text(path: Any) -> str:
  """A path in the text of a message, whatever a caller has passed for it."""
  return os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else value_text(path)


def as_path(path: str | os.PathLike[str]) -> epath.Path:
  """The absolute form of a path: a URL of a bucket as it is, of a `file://` URL the path.

  Raises:
    CheckpointError: the URL is of another kind, or names no bucket, or lost a slash in `pathlib`, or has a query, or dots; or the path is
      none, or is empty, or too long, or begins with ~.
  """
  if not isinstance(path, (str, bytes, os.PathLike)):
    raise CheckpointError(f'{shown(value_text(path))} is not a path.\n{_FIX}')
  text = os.fsdecode(path)
  if not text or '\0' in text:
    raise CheckpointError(f'The path {"contains a null character" if text else "is empty"}.\n{_FIX}')
  if len(text) > _LONGEST_PATH:
    raise CheckpointError(f'The path has {len(text):,} characters: {value_text(text)}.\n{_FIX}')
  match = _SCHEME.match(text)
  if match is None:
    if os.path.expanduser(text) != text:
      raise CheckpointError(
        f'{text} is a folder named {text.partition(os.sep)[0]} below {os.getcwd()}: only a shell takes it for the home '
        'folder.\n'
        f'Fix: pass {os.path.expanduser(text)}, or .{os.sep}{text} if you mean the former.'
      )
    return epath.Path(os.path.abspath(text))
  url, scheme = urllib.parse.urlsplit(text), match[1].lower()
  if scheme == 'file' and (url.query or url.fragment):
    raise CheckpointError(
      f'{text} has a part after "?" or "#", which a path does not have.\n'
      'Fix: write "?" as %3F and "#" as %23 in a file:// URL, or pass the path itself.'
    )
  if scheme == 'file' and url.netloc in ('', 'localhost') and url.path.startswith('/'):
    return epath.Path(os.path.abspath(urllib.parse.unquote(url.path)))
  if '://' not in text:
    raise CheckpointError(
      f'{text} begins as a URL does, without the two slashes after {match[0]} (pathlib.Path leaves one or none).\n'
      f'Fix: pass the URL as a string, or as an etils.epath.Path; for a folder of this name, pass .{os.sep}{text}.'
    )
  if scheme not in ('gs', 's3'):
    raise CheckpointError(f'{text} is a URL of a kind that checkpoints are not stored under.\n{_FIX}')
  if not url.netloc:
    raise CheckpointError(f'{text} names no bucket.\nFix: pass {scheme}://<bucket>/<path>.')
  if {'.', '..'} & set(text.split('/')):
    raise CheckpointError(
      f'{text} contains "." or "..", which some clients of buckets follow and some take for a name.\n'
      'Fix: pass the path without it.'
    )
  return epath.Path(f'{scheme}://{text[match.end() + 2 :].rstrip("/")}')


def open_store(path: str | os.PathLike[str]) -> Store:
  """The store of a path; nothing is read or written yet.

  Raises:
    CheckpointError: the path is not one that checkpoints are stored under; see `as_path`.
  """
  root = as_path(path)
  if '://' in str(root):
    from flax_spmd._src.checkpoint.storage.object_store import ObjectStore

    return ObjectStore(root)
  from flax_spmd._src.checkpoint.storage.disk_store import DiskStore

  return DiskStore(root)


def checked(name: str, root: epath.Path) -> str:
  """A name that leads to a file or folder below the root. Names may come from a damaged or hostile file.

  Raises:
    CheckpointDamagedError: it leads out of the root.
  """
  if name and ('\0' in name or {'', '.', '..'} & set(name.split('/'))):
    raise CheckpointDamagedError(
      f'Checkpoint {root} names a file {value_text(name)}, which leads out of its folder.\n'
      'Fix: restore another checkpoint; this one has been changed since it was written.'
    )
  return name


def removable(name: str, root: epath.Path) -> str:
  """A name, as `checked`, that is not the root's own.

  Raises:
    CheckpointError: it is.
  """
  if not name:
    raise CheckpointError(
      f'{root} is not removed as a whole.\nFix: remove the files in it, by their names.'
    )
  return checked(name, root)


def too_large(root: epath.Path, name: str, limit: int) -> CheckpointDamagedError:
  """The error for a file of more than `limit` bytes."""
  return CheckpointDamagedError(
    f'{root / name} has more than {limit:,} bytes, as no such file of a checkpoint has.\n'
    'Fix: restore another checkpoint; this one was changed after it was written.'
  )
