"""Parsed JSON: the small files of a checkpoint, which anyone may have written or damaged."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from flax_spmd.errors import CheckpointDamagedError, CheckpointError


def json_object(data: bytes) -> dict[str, Any]:
  """The JSON object stored in a file.

  Raises:
    ValueError, RecursionError: it is none.
  """
  content = json.loads(data)
  expect(isinstance(content, dict), 'it is not a JSON object')
  return content


@contextlib.contextmanager
def parsing(path: Any, file: str) -> Iterator[None]:
  """Raises the errors of wrong JSON values as CheckpointDamagedError.

  Args:
    path: path of the checkpoint.
    file: name of the file that is parsed.
  """
  try:
    yield
  except CheckpointError:
    raise
  except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
    raise damaged_file(path, file, reason_of(error)) from error


def check_format(content: Any, newest: int, name: str) -> None:
  """Raises CheckpointError for what a newer version has written, whose other contents may mean anything.

  Args:
    content: JSON value with a `format`.
    newest: newest format that this version reads.
    name: beginning of the error text.
  """
  found = content.get('format') if isinstance(content, dict) else None
  if type(found) is int and found > newest:
    raise CheckpointError(
      f'{name} has format {found}, but this version reads formats up to {newest}.\n'
      'Fix: upgrade flax_spmd, or pass another path.'
    )


def damaged_file(path: Any, file: str, reason: str) -> CheckpointDamagedError:
  """The error for a file that cannot be used."""
  return CheckpointDamagedError(
    f'Checkpoint {path} cannot be read, because of {file}: {reason}.\n'
    'Fix: restore another checkpoint; this one was changed after it was written.'
  )


def unreadable(path: Any, reason: str) -> CheckpointDamagedError:
  """The error for a checkpoint whose files do not belong together, or do not read."""
  return CheckpointDamagedError(
    f'Checkpoint {path} cannot be read: {reason}.\n'
    'Fix: restore another checkpoint; files of this one are missing, or have changed since it was written.'
  )


def reason_of(error: Exception) -> str:
  """The reason of an error, for a text that names the file."""
  if isinstance(error, KeyError):
    return f'{error} is missing'
  return 'it is nested too deeply' if isinstance(error, RecursionError) else str(error)[:200]


def expect(holds: bool, reason: str) -> None:
  """Raises ValueError with a reason if something does not hold."""
  if not holds:
    raise ValueError(reason)


def is_count(content: Any) -> bool:
  """Whether a JSON value is a number of things."""
  return type(content) is int and 0 <= content < 2**53  # isinstance would accept a bool
