"""Explain: where every array of a tree lies under a layout, how large its pieces are, and why.

    print(explain(layout, state))      # a table, and what deserves a look
    explain(layout, state).rows        # the same as data

It prints the decisions that the plan was made of and derives nothing anew, so it works on abstract
trees and on abstract meshes of any size.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, NamedTuple

from flax_spmd.layout import Layout
from flax_spmd.plan import Row
from flax_spmd.report import Findings
from flax_spmd.resolution import Decision, axis_names

if TYPE_CHECKING:
  from rich.console import Group


class Explanation(NamedTuple):
  """The layout of a tree: `str` gives a table, `rich` prints it in colour.

  Attributes:
    layout: the layout.
    rows: one per array, in tree order.
    findings: what deserves a look.
  """

  layout: Layout
  rows: tuple[Row, ...]
  findings: Findings

  @property
  def bytes(self) -> int:
    """Bytes of all arrays, each counted once."""
    return sum(row.bytes for row in self.rows)

  @property
  def bytes_per_device(self) -> int:
    """Bytes that one device holds."""
    return sum(row.bytes_per_device for row in self.rows)

  def __rich__(self) -> Group:
    from rich.console import Group  # only who prints pays for rich: 20 ms
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for name in ('path', 'array', 'laid over (rule)'):
      table.add_column(name, overflow='fold')
    table.add_column('per device', justify='right')
    for row in self.rows:
      cells = [row.path, _array(row), _layout(row), _size(row.bytes_per_device)]
      table.add_row(*map(Text, cells))
    return Group(Text(repr(self.layout)), table, Text(self._summary()))

  def __str__(self) -> str:
    from rich.console import Console

    file = io.StringIO()
    console = Console(file=file, width=140, color_system=None, force_jupyter=False)
    console.print(self)
    return '\n'.join(line.rstrip() for line in file.getvalue().splitlines())

  def _summary(self) -> str:
    count = f'{len(self.rows)} array{"" if len(self.rows) == 1 else "s"}'
    total = f'{count}, {_size(self.bytes)} in all, {_size(self.bytes_per_device)} per device'
    return '\n'.join([total, *(f'- {finding.text}' for finding in self.findings)])


def explain(layout: Layout, tree: Any) -> Explanation:
  """Where every array of `tree` lies under `layout`, and why.

  Args:
    layout: a layout, over a mesh that may be abstract.
    tree: any tree, concrete or abstract.

  Returns:
    An explanation: print it, or read its rows.

  Raises:
    LayoutError, MeshAxisError, UnmatchedNameError, ConflictError: all leaves that do not fit.

  Example:
    >>> layout = Layout({'data': 2, 'model': 4}, (('hidden', 'model'),))
    >>> tree = {'w': LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'hidden'))}
    >>> explain(layout, tree).rows[0].bytes_per_device
    128
  """
  findings = layout.check(tree)
  return Explanation(layout, tuple(layout.rows(tree)), findings)


def _array(row: Row) -> str:
  return f'{row.dtype}[{",".join(map(str, row.shape))}]'


def _layout(row: Row) -> str:
  """`layers, embed, mlp → model (1)`: every dimension, over what it lies, and by which rule."""
  dimensions = ', '.join(map(_dimension, row.decisions)) or 'replicated'
  if row.guess is None:
    return dimensions
  return f'{dimensions} [{row.guess.how} of {row.guess.parameter or "what is not here"}]'


def _dimension(decision: Decision) -> str:
  axes = '+'.join(axis_names(decision.axes))
  if not isinstance(decision.name, str) or decision.name == axes:
    return axes or '-'
  if not axes:
    return decision.name
  return f'{decision.name} → {axes}' + ('' if decision.rule is None else f' ({decision.rule})')


def _size(count: float) -> str:
  """Bytes in binary units, three significant digits.

  Example:
    >>> _size(3 * 2**20)
    '3 MiB'
  """
  for unit in ('B', 'KiB', 'MiB', 'GiB'):
    if count < 1024:
      return f'{count:.3g} {unit}'
    count /= 1024
  return f'{count:.3g} TiB'
