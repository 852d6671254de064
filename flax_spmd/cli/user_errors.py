"""User errors: exceptions of the user's own code, with the part of their traceback that is in it."""

from __future__ import annotations

import itertools
import sys
import sysconfig
import traceback
from pathlib import Path

_LIBRARIES = {Path(sysconfig.get_path(name)) for name in ('stdlib', 'platstdlib', 'purelib', 'platlib')}
_PACKAGE = Path(__file__).parent.parent


def user_error_text(error: Exception, module: str | None) -> str | None:
  """The text of an exception that the user's code has raised, directly or in a library that it calls.

  Args:
    error: the exception.
    module: name of the user's module.

  Returns:
    The frames in the user's files, and the exception; None if there are none, so that the fault is not the user's.
  """
  described = traceback.TracebackException.from_exception(error)
  inside = itertools.dropwhile(lambda frame: not _is_ours(frame.filename), described.stack)
  described.stack = traceback.StackSummary.from_list(
    [frame for frame in inside if _is_users(frame.filename, _root(module))]
  )
  if not described.stack and not isinstance(error, SyntaxError):
    return None
  notes = getattr(described, '__notes__', None) or []
  described.__notes__ = [note for note in notes if 'JAX_TRACEBACK_FILTERING' not in note]
  return ''.join(described.format(chain=False))


def _root(module: str | None) -> Path | None:
  """The folder of an installed package that has the user's module."""
  file = getattr(sys.modules.get((module or '').partition('.')[0]), '__file__', None)
  return Path(file).parent if file and Path(file).name == '__init__.py' else None


def _is_ours(file: str) -> bool:
  return _PACKAGE in Path(file).parents


def _is_users(file: str, root: Path | None) -> bool:
  folders = Path(file).parents
  if file.startswith('<') or _is_ours(file):
    return False
  return root in folders or not _LIBRARIES.intersection(folders)
