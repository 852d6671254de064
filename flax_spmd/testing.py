"""Testing: golden files for the layout of a model, for the tests of your project.

    def test_layout():
      spmd.testing.assert_layout(layout, layout.abstract(create_state, key, x), 'tests/layout.txt')

The file lists every array with its shape, names, spec and bytes per device. If a change of the model, the
rules or this library changes a sharding, the test fails with a diff.
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
  """One line per array (path, dtype, shape with names, spec, bytes per device), and the total.

  Example:
    >>> layout = Layout({'model': 8}, (('mlp', 'model'),))
    >>> print(layout_text(layout, {'w': LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'mlp'))}))
    w float32[embed=8, mlp=16] P(None, 'model') 64
    64 bytes per device
    <BLANKLINE>
  """
  rows = layout.rows(tree)
  lines = [f'{row.path} {_array(row)} {row.spec} {row.bytes_per_device}' for row in rows]
  total = sum(row.bytes_per_device for row in rows)
  return '\n'.join([*lines, f'{total} bytes per device', ''])


def _array(row: Row) -> str:
  names = row.names or (None,) * len(row.shape)
  sizes = (f'{name}={size}' if name else str(size) for name, size in zip(names, row.shape, strict=False))
  return f'{row.dtype}[{", ".join(sizes)}]'


def assert_layout(layout: Layout, tree: Any, file: str | os.PathLike[str]) -> None:
  """Asserts that the layout of a tree equals a golden file.

  With the environment variable `FLAX_SPMD_UPDATE=1`, it writes the file instead. If the file is missing, it
  writes the file and fails.

  Args:
    layout: the layout.
    tree: a state, concrete or abstract.
    file: path of the golden file.

  Raises:
    AssertionError: the layout differs from the file (the message is a diff), or the file was missing.
    LayoutError, MeshAxisError, UnmatchedNameError, ConflictError: arrays that do not fit the rules or the
      mesh.

  Example:
    >>> layout = Layout({'model': 8}, (('mlp', 'model'),))
    >>> state = {'w': LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'mlp'))}
    >>> _ = (tmp / 'layout.txt').write_text(layout_text(layout, state))
    >>> assert_layout(layout, state, tmp / 'layout.txt')
  """
  layout.sharding(tree)
  actual, path = layout_text(layout, tree), Path(file)
  if os.environ.get(UPDATE) == '1':
    path.write_text(actual)
    return
  if not path.exists():
    path.write_text(actual)
    raise AssertionError(f'{path} was missing, and has been written. Fix: review and commit it.')
  expected = path.read_text()
  if actual != expected:
    lines = difflib.unified_diff(
      expected.splitlines(), actual.splitlines(), str(path), 'now', n=0, lineterm=''
    )
    raise AssertionError(
      'The layout has changed:\n'
      + '\n'.join(lines)
      + f'\nFix: if the change is intended, run the test with {UPDATE}=1.'
    )
