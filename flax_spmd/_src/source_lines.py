"""Sources: which line of a call stack is the user's.

    /x/flax/linen/linear.py:31      Flax's matrix product
    /x/model.py:7                   the Dense that it belongs to: this is what one wants to know
    /x/train.py:50                  who called the model

It is the innermost line that is of no installed package and not of this one; in a program that is an
installed package itself, the innermost line of no framework.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

_INSTALLED = re.compile(r'[/\\](?:lib[/\\]python\d|site-packages|dist-packages)|^<frozen ')
_FRAMEWORKS = re.compile(r'[/\\](?:jax|jaxlib|flax|optax|flax_spmd)[/\\]|^<frozen ')
_CELL = re.compile(r'[/\\]ipykernel_\d+[/\\]\d+\.py$|(^<|[/\\])ipython-input-')
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def users(files: Sequence[str]) -> int:
  """Which of the files on a stack, innermost first, is the user's; 0 if none is.

  Example:
    >>> users(['/x/site-packages/flax/linen/linear.py', '/x/model.py', '/x/train.py'])
    1
  """
  own = (i for i, file in enumerate(files) if not _INSTALLED.search(file) and not _ours(file))
  installed = (i for i, file in enumerate(files) if not _FRAMEWORKS.search(file))
  return next(own, next(installed, 0))


def line_text(file: str, line: int) -> str:
  r"""`file.py:line`, without folders, of Windows too; `cell:line` for one of a notebook.

  Example:
    >>> line_text('/home/me/model.py', 31), line_text(r'C:\me\model.py', 31)
    ('model.py:31', 'model.py:31')
    >>> line_text('/tmp/ipykernel_4711/1895.py', 7)
    'cell:7'
  """
  name = 'cell' if _CELL.search(file) else re.split(r'[/\\]', file)[-1]
  return f'{name}:{line}'


def _ours(file: str) -> bool:
  """Whether it is this package's; its demo counts as somebody's model."""
  inside = file.startswith(_HERE + os.sep)
  return inside and not file.startswith(os.path.join(_HERE, 'demo') + os.sep)
