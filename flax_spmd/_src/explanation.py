"""Explanations: the sharding of every array of a tree under a layout, its bytes, and the rules behind it.

    explanation = explain(layout, state)
    print(explanation)                       # a table, totals and findings
    print(explanation.why('params/wi'))      # one array: every dimension, and the rules that were skipped
    print(explanation.draw('params/wi'))     # the slice on each device
    explanation.records(), explanation.to_json()

An explanation prints the decisions recorded by the planner, so it supports abstract trees, and abstract
meshes of any size.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from flax_spmd._src.draw.drawing import Drawing, draw
from flax_spmd._src.layout import Layout
from flax_spmd._src.mesh import axis_sizes
from flax_spmd._src.plan.findings import Findings, find
from flax_spmd._src.plan.planner import planner_for
from flax_spmd._src.plan.rows import Row
from flax_spmd._src.public_module import set_module
from flax_spmd._src.rules.decisions import Decision, RuleId, Skipped, axis_names, rule_text
from flax_spmd._src.text import size_text
from flax_spmd.errors import LayoutError, did_you_mean

if TYPE_CHECKING:
  from rich.console import Group


class Total(NamedTuple):
  """Totals of the arrays of one collection, or of one mesh axis.

  Attributes:
    arrays: number of arrays.
    bytes: total size, each array counted once.
    bytes_per_device: bytes of their shards on one device.
    replicated_bytes: bytes of all copies but the first, over all devices.
  """

  arrays: int
  bytes: int
  bytes_per_device: int
  replicated_bytes: int

  @classmethod
  def of(cls, rows: Sequence[Row]) -> Total:
    """The totals of some rows."""
    return cls(
      len(rows),
      sum(row.bytes for row in rows),
      sum(row.bytes_per_device for row in rows),
      sum(row.replicated_bytes for row in rows),
    )


@set_module('flax_spmd')
class Explanation(NamedTuple):
  """The sharding of every array of a tree, with reasons: `str` returns a table, `rich` prints it in colour.

  Attributes:
    layout: the layout.
    rows: one row per array, in tree order.
    findings: likely mistakes.

  Example:
    >>> layout = Layout({'data': 2, 'model': 4}, (('mlp', 'model'),))
    >>> explanation = explain(layout, {'w': LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'mlp'))})
    >>> explanation.bytes, explanation.bytes_per_device
    (512, 128)
    >>> print(explanation.why('w'))
    w: float32[8,16] as P(None, 'model'), 128 B per device
      dim 0, 'embed' (8): replicated, no rule decided
      dim 1, 'mlp' (16): model, by rule 0 ('mlp', 'model')
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

  @property
  def by_collection(self) -> dict[str, Total]:
    """Totals for each first key of the tree: `params`, `opt_state`, ..."""
    names = dict.fromkeys(row.path.split('/')[0] for row in self.rows)
    return {
      name: Total.of([row for row in self.rows if row.path.split('/')[0] == name]) for name in names
    }

  @property
  def by_axis(self) -> dict[str, Total]:
    """Totals for each mesh axis, of the arrays that are sharded over it."""
    over = [(set(axis_names(tuple(row.spec))), row) for row in self.rows]
    return {
      axis: Total.of([row for axes, row in over if axis in axes])
      for axis in axis_sizes(self.layout.mesh)
    }

  def row(self, path: str) -> Row:
    """The row of one array.

    Raises:
      LayoutError: there is no array at this path.
    """
    for row in self.rows:
      if row.path == path:
        return row
    known = [row.path for row in self.rows]
    raise LayoutError(
      f'There is no array {path!r} in this tree of {len(known)} arrays.{did_you_mean(path, known)}\n'
      'Fix: pass a path from the table.'
    )

  def why(self, path: str) -> str:
    """The reasons for the sharding of one array: the rule of every dimension, and the rules skipped.

    Args:
      path: the tree path of the array, as in the table.

    Raises:
      LayoutError: there is no array at this path.
    """
    row = self.row(path)
    lines = [f'{row.path}: {_array(row)} as {row.spec}, {size_text(row.bytes_per_device)} per device']
    if row.owner is not None:
      lines.append(f'  decided as a whole by {self._rule(row.owner)}')
    for decision in row.decisions:
      lines.append(f'  dim {decision.dim}, {_dim_text(decision, row)}: {self._decided(decision)}')
      lines += [f'    {self._skipped(skip)}' for skip in decision.skipped]
    if not row.decisions:
      lines.append('  replicated: it has no names, and no rule applies to it')
    lines += [f'  {self._skipped(skip)}' for skip in row.skipped]
    if row.inference is not None:
      lines.append(
        f'  names inferred from {row.inference.parameter or "a parameter outside this tree"}: {row.inference.how}'
      )
    return '\n'.join(lines)

  def draw(self, path: str) -> Drawing:
    """A drawing of the slice of one array on each device."""
    row = self.row(path)
    return draw(jax.ShapeDtypeStruct(row.shape, row.dtype), NamedSharding(self.layout.mesh, row.spec))

  def records(self) -> list[dict[str, Any]]:
    """One flat dict per array, for `pandas.DataFrame` or `polars.DataFrame`.

    Example:
      >>> explain(Layout({'data': 8}), {'w': jnp.ones((8, 16))}).records()[0]['bytes_per_device']
      512
    """
    return [
      {
        'path': row.path,
        'shape': row.shape,
        'dtype': str(row.dtype),
        'names': row.names,
        'spec': str(row.spec),
        'rules': tuple(None if d.rule is None else rule_text(d.rule) for d in row.decisions),
        'bytes': row.bytes,
        'bytes_per_device': row.bytes_per_device,
        'copies': row.copies,
        'replicated_bytes': row.replicated_bytes,
      }
      for row in self.rows
    ]

  def to_json(self) -> str:
    """The explanation as one JSON object: mesh, rules, arrays with their decisions, totals, findings."""
    described = {
      'mesh': axis_sizes(self.layout.mesh),
      'rules': [repr(clause) for clause in self.layout.rules],
      'arrays': [
        {
          **record,
          'spec': [list(axis_names(entry)) for entry in row.spec],
          'decisions': [self._decision_record(decision) for decision in row.decisions],
          'skipped': [self._skip_record(skip) for skip in row.skipped],
          'owner': None if row.owner is None else rule_text(row.owner),
        }
        for record, row in zip(self.records(), self.rows, strict=True)
      ],
      'by_collection': {name: total._asdict() for name, total in self.by_collection.items()},
      'by_axis': {name: total._asdict() for name, total in self.by_axis.items()},
      'findings': [finding._asdict() for finding in self.findings],
    }
    return json.dumps(described, default=str)

  def _decision_record(self, decision: Decision) -> dict[str, Any]:
    return {
      'dim': decision.dim,
      'name': decision.name if isinstance(decision.name, str) else None,
      'axes': list(axis_names(decision.axes)),
      'rule': None if decision.rule is None else rule_text(decision.rule),
      'skipped': [self._skip_record(skip) for skip in decision.skipped],
    }

  def _skip_record(self, skip: Skipped) -> dict[str, Any]:
    return {'rule': rule_text(skip.rule), 'reason': skip.reason, 'axes': list(skip.axes)}

  def _rule(self, rule: RuleId) -> str:
    return f'rule {rule_text(rule)} {self.layout.rules.at(rule)!r}'

  def _decided(self, decision: Decision) -> str:
    axes = ' x '.join(axis_names(decision.axes)) or 'replicated'
    if decision.rule is not None:
      return f'{axes}, by {self._rule(decision.rule)}'
    return f'{axes}, from the box' if axis_names(decision.axes) else f'{axes}, no rule decided'

  def _skipped(self, skip: Skipped) -> str:
    axes = ', '.join(map(repr, skip.axes))
    reasons = {
      'decided': 'decided already',
      'taken': f'{axes} taken by another dimension',
      'indivisible': f'not divisible by {axes} ({self._parts(skip.axes)})',
      'missing': f'the mesh has no axis {axes}',
    }
    return f'{self._rule(skip.rule)} skipped: {reasons.get(skip.reason, skip.reason)}'

  def _parts(self, axes: Sequence[str]) -> int:
    sizes = axis_sizes(self.layout.mesh)
    return math.prod(sizes.get(axis, 1) for axis in axes)

  def __rich__(self) -> Group:
    from rich.console import Group  # 20 ms to import
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for name in ('path', 'array', 'sharded over (rule)'):
      table.add_column(name, overflow='fold')
    table.add_column('per device', justify='right')
    for row in self.rows:
      cells = [row.path, _array(row), _layout(row), size_text(row.bytes_per_device)]
      table.add_row(*map(Text, cells))
    return Group(Text(repr(self.layout)), table, Text(self._summary()))

  def __str__(self) -> str:
    from rich.console import Console

    file = io.StringIO()
    console = Console(file=file, width=140, color_system=None, force_jupyter=False)
    console.print(self)
    return '\n'.join(line.rstrip() for line in file.getvalue().splitlines())

  def _summary(self) -> str:
    lines = [_total('', Total.of(self.rows))]
    collections = self.by_collection
    if len(collections) > 1 and not all(map(str.isdecimal, collections)):  # not for a list of layers
      lines += [_total(f'{name}: ', total) for name, total in collections.items()]
    lines += [_total(f'over {axis!r}: ', total) for axis, total in self.by_axis.items() if total.arrays]
    return '\n'.join([*lines, *(f'- {finding.text}' for finding in self.findings)])


@set_module('flax_spmd')
def explain(layout: Layout, tree: Any) -> Explanation:
  """Explains the sharding of every array of a tree under a layout.

  Args:
    layout: a layout over a concrete or abstract mesh.
    tree: any tree, concrete or abstract.

  Returns:
    An explanation: print it, or read its rows.

  Raises:
    LayoutError, MeshAxisError, UnmatchedNameError, ConflictError: arrays that do not fit the rules or the
      mesh. The message lists all of them.

  Example:
    >>> layout = Layout({'data': 2, 'model': 4}, (('hidden', 'model'),))
    >>> tree = {'w': LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'hidden'))}
    >>> explain(layout, tree).rows[0].bytes_per_device
    128
  """
  layout.sharding(tree)  # raises the problems of the tree; rows do not
  rows = tuple(layout.rows(tree))
  return Explanation(layout, rows, find(planner_for(layout.mesh, layout.rules), rows))


def _array(row: Row) -> str:
  return f'{row.dtype}[{",".join(map(str, row.shape))}]'


def _layout(row: Row) -> str:
  """`layers, embed, mlp → model (1)`: the name, mesh axes and rule of every dimension."""
  dimensions = ', '.join(map(_dimension, row.decisions)) or 'replicated'
  if row.skipped and not axis_names(tuple(row.spec)):
    dimensions += f' ({", ".join(f"{rule_text(skip.rule)}: {skip.reason}" for skip in row.skipped)})'
  if row.inference is None:
    return dimensions
  return (
    f'{dimensions} [{row.inference.how} of {row.inference.parameter or "a parameter outside this tree"}]'
  )


def _dimension(decision: Decision) -> str:
  axes = '+'.join(axis_names(decision.axes))
  if not isinstance(decision.name, str) or decision.name == axes:
    return (axes or '-') + (
      '' if decision.rule is None or not axes else f' ({rule_text(decision.rule)})'
    )
  if not axes:
    return decision.name
  return f'{decision.name} → {axes}' + (
    '' if decision.rule is None else f' ({rule_text(decision.rule)})'
  )


def _dim_text(decision: Decision, row: Row) -> str:
  """`'embed' (16)`, or `16` for a dimension without a name."""
  size = row.shape[decision.dim] if decision.dim < len(row.shape) else '?'
  return f'{decision.name!r} ({size})' if isinstance(decision.name, str) and row.logical else str(size)


def _total(name: str, total: Total) -> str:
  """`params: 4 arrays, 20 KiB in all, 3 KiB per device, 4 KiB in copies`."""
  count = f'{total.arrays} array{"" if total.arrays == 1 else "s"}'
  return (
    f'{name}{count}, {size_text(total.bytes)} in all, {size_text(total.bytes_per_device)} per device, '
    f'{size_text(total.replicated_bytes)} in copies'
  )
