"""Source lines: the user's own line in a call stack.

    /x/flax/linen/linear.py:31      Flax's matrix product
    /x/model.py:7                   the Dense in the model: the user's line
    /x/train.py:50                  the call of the model

The user's line is the innermost one outside installed packages and outside this one. If the whole program
is installed, it is the innermost line outside the frameworks.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from jax.extend import source_info_util

_INSTALLED = re.compile(r'[/\\](?:lib[/\\]python\d|site-packages|dist-packages)|^<frozen ')
_FRAMEWORKS = re.compile(r'[/\\](?:jax|jaxlib|flax|optax|flax_spmd)[/\\]|^<frozen ')
_CELL = re.compile(r'[/\\]ipykernel_\d+[/\\]\d+\.py$|(^<|[/\\])ipython-input-')
_STACK = 200  # frames
_LOCATION = re.compile(r'"([^"]*)":(\d+):\d+')
_FRAME = re.compile(r'(.*?):(\d+)(?::\d+)? \(.*\)$')
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def user_frame(files: Sequence[str]) -> int:
  """The index of the user's file on a stack, innermost first; 0 if there is no such file.

  Example:
    >>> user_frame(['/x/site-packages/flax/linen/linear.py', '/x/model.py', '/x/train.py'])
    1
  """
  own = (i for i, file in enumerate(files) if not _INSTALLED.search(file) and not _is_package(file))
  installed = (i for i, file in enumerate(files) if not _FRAMEWORKS.search(file))
  return next(own, next(installed, 0))


def line_text(file: str, line: int) -> str:
  r"""`file.py:line`, without folders (Windows paths included); `cell:line` for a notebook cell.

  Example:
    >>> line_text('/home/me/model.py', 31), line_text(r'C:\me\model.py', 31)
    ('model.py:31', 'model.py:31')
    >>> line_text('/tmp/ipykernel_4711/1895.py', 7)
    'cell:7'
  """
  name = 'cell' if _CELL.search(file) else re.split(r'[/\\]', file)[-1]
  return f'{name}:{line}'


def source_line(source: Any) -> str:
  """`file.py:line` of the user's frame in JAX's source info, or 'an unknown line'."""
  text = '' if source is None else source_info_util.summarize(source, num_frames=_STACK)
  frames = [match for match in map(_FRAME.match, reversed(text.splitlines())) if match]
  if not frames:
    return UNKNOWN_LINE
  user = frames[user_frame([match[1] for match in frames])]
  return UNKNOWN_LINE if _is_package(user[1]) else line_text(user[1], int(user[2]))


@functools.lru_cache(4096)
def line_of_location(location: str) -> str:
  """`file.py:line` of the user's frame in the text of an MLIR location, whose frames are innermost first; or ''."""
  frames = _LOCATION.findall(location)
  if not frames:
    return ''
  file, line = frames[user_frame([file for file, _ in frames])]
  return line_text(file, int(line))


UNKNOWN_LINE = 'an unknown line'


def warn(text: str) -> None:
  """Warns (UserWarning) of the line that called this package, however deep in it this is called."""
  frame, level = sys._getframe(1), 2
  while frame.f_back is not None and _is_package(frame.f_code.co_filename):
    frame, level = frame.f_back, level + 1
  warnings.warn(text, stacklevel=level)


def _is_package(file: str) -> bool:
  """Whether a file belongs to this package; its demo counts as user code."""
  inside = file.startswith(_PACKAGE + os.sep)
  return inside and not file.startswith(os.path.join(_PACKAGE, 'demo') + os.sep)
