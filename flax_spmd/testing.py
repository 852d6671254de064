"""Testing: a model's layout pinned in its own project's tests.

    def test_layout():
      spmd.testing.assert_layout(layout, layout.abstract(create_state, key, x), 'tests/layout.txt')

The file lists every array with its shape, names and spec, and the bytes that a device holds. A change of
the model, the rules or this library that moves an array shows as a line of a diff.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

from flax_spmd._src.layout import Layout
from flax_spmd._src.plan.rows import Row

UPDATE = 'FLAX_SPMD_UPDATE'


def layout_text(layout: Layout, tree: Any) -> str:
  """A line per array: path, dtype and shape with names, spec, bytes on a device; and the total.

  Example:
    >>> layout = Layout({'model': 8}, (('mlp', 'model'),))
    >>> print(layout_text(layout, {'w': LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'mlp'))}))
    w float32[embed=8, mlp=16] P(None, 'model') 64
    64 bytes on a device
    <BLANKLINE>
  """
  rows = layout.rows(tree)
  lines = [f'{row.path} {_array(row)} {row.spec} {row.bytes_per_device}' for row in rows]
  total = sum(row.bytes_per_device for row in rows)
  return '\n'.join([*lines, f'{total} bytes on a device', ''])


def _array(row: Row) -> str:
  names = row.names or (None,) * len(row.shape)
  sizes = (f'{name}={size}' if name else str(size) for name, size in zip(names, row.shape, strict=False))
  return f'{row.dtype}[{", ".join(sizes)}]'


def assert_layout(layout: Layout, tree: Any, file: str | os.PathLike[str]) -> None:
  """Raises unless every array of a tree lies as a file says.

  With the environment variable `FLAX_SPMD_UPDATE=1`, the file is written instead; the test that does
  not find its file writes it, and fails.

  Args:
    layout: the layout.
    tree: a state, abstract or not.
    file: the golden file.

  Raises:
    AssertionError: something lies otherwise; the message is a diff.
    LayoutError, MeshAxisError, UnmatchedNameError, ConflictError: names that do not fit.

  Example:
    >>> layout = Layout({'model': 8}, (('mlp', 'model'),))
    >>> state = {'w': LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'mlp'))}
    >>> _ = (tmp / 'layout.txt').write_text(layout_text(layout, state))
    >>> assert_layout(layout, state, tmp / 'layout.txt')
  """
  layout.sharding(tree)
  found, path = layout_text(layout, tree), Path(file)
  if os.environ.get(UPDATE) == '1':
    path.write_text(found)
    return
  if not path.exists():
    path.write_text(found)
    raise AssertionError(f'There was no {path}; it has been written. Fix: look at it, and commit it.')
  expected = path.read_text()
  if found != expected:
    lines = difflib.unified_diff(
      expected.splitlines(), found.splitlines(), str(path), 'now', n=0, lineterm=''
    )
    raise AssertionError(
      'The layout is another one:\n'
      + '\n'.join(lines)
      + f'\nFix: if that is meant, run the test with {UPDATE}=1.'
    )
