"""Listed folders: a folder of a bucket that is listed once, for as long as a checkpoint is read from it.

Orbax looks for each of its files by name, and for some of them several times; each look is up to three requests. The
generation that is read is pinned, and its files never change. So one list answers all of these questions, and the
contents of small files are kept until the read has ended.
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Iterator
from typing import Any

_listed: dict[str, list[ListedFolder]] = {}  # by URL; several reads of a folder may overlap
_changing = threading.Lock()


class ListedFolder:
  """A file system, as etils uses those of fsspec, whose answers about one folder come from one list.

  Args:
    files: the file system of the bucket.
    url: URL of the folder.
  """

  def __init__(self, files: Any, url: str):
    self._fsspec = files
    found = files.find(_path(url), detail=True).items()
    self._entries: dict[str, Any] = {n: entry for n, entry in found if n.startswith(f'{_path(url)}/')}
    self._children: dict[str, set[str]] = {_path(url): set()} if self._entries else {}
    for name in self._entries:
      while name != _path(url):
        parent = name.rpartition('/')[0]
        self._children.setdefault(parent, set()).add(name)
        name = parent
    self._contents: dict[str, bytes] = {}

  def __getattr__(self, name: str) -> Any:
    return getattr(self._fsspec, name)

  def exists(self, path: str) -> bool:
    """Whether there is a file or a folder."""
    return _path(path) in self._entries or self.isdir(path)

  def isdir(self, path: str) -> bool:
    """Whether there is a folder."""
    return _path(path) in self._children

  def info(self, path: str) -> dict[str, Any]:
    """The description of a file or a folder.

    Raises:
      FileNotFoundError: there is neither.
    """
    if self.isdir(path):
      return {'name': _path(path), 'size': 0, 'type': 'directory'}
    if _path(path) not in self._entries:
      raise FileNotFoundError(path)
    return self._entries[_path(path)]

  def listdir(self, path: str, detail: bool = True) -> list[Any]:
    """The files and folders directly in a folder.

    Raises:
      FileNotFoundError: there is none.
    """
    if not self.isdir(path):
      raise FileNotFoundError(path)
    names = sorted(self._children[_path(path)])
    return [self.info(name) for name in names] if detail else names

  def open(self, path: str, mode: str = 'rb') -> Any:
    """A file, read as a whole by one request."""
    if mode not in ('r', 'rb'):
      return self._fsspec.open(path, mode=mode)
    name = _path(path)
    if name not in self._contents:
      size = self.info(path)['size']
      self._contents[name] = self._fsspec.cat_file(name, start=0, end=size) if size else b''
    content = io.BytesIO(self._contents[name])
    return io.TextIOWrapper(content, encoding='utf-8') if mode == 'r' else content


@contextlib.contextmanager
def listed_once(files: Any, url: str) -> Iterator[None]:
  """A block in which `listed` has a folder and all below it. Nobody changes the folder meanwhile.

  Args:
    files: the file system of the bucket.
    url: URL of the folder.
  """
  folder, key = ListedFolder(files, url), url.rstrip('/')
  with _changing:
    _listed.setdefault(key, []).append(folder)
  try:
    yield
  finally:
    with _changing:
      _listed[key].remove(folder)
      if not _listed[key]:
        del _listed[key]


def listed(url: str) -> ListedFolder | None:
  """The listed folder that a URL is in; None if there is none."""
  if not _listed:
    return None
  with _changing:
    return next((_listed[each][-1] for each in lineage(url) if each in _listed), None)


def lineage(url: str) -> Iterator[str]:
  """A URL, and those of the folders above it up to the bucket, without slashes at their ends."""
  while '://' in (url := url.rstrip('/')):
    yield url
    url = url.rpartition('/')[0]


def _path(url: str) -> str:
  """The path of a URL, as fsspec's names have it."""
  return url.partition('://')[2].rstrip('/') if '://' in url else url.rstrip('/')
