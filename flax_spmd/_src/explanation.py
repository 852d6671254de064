"""Explanations: the sharding of every array of a tree under a layout, its bytes, and the rules behind it.

    explanation = explain(layout, state)
    print(explanation)                       # a table of equal arrays, totals and findings
    print(explanation.why('params/wi'))      # one array: every dimension, and the rules that were skipped
    print(explanation.draw('params/wi'))     # the slice on each device
    explanation.records(), explanation.to_json()

An explanation prints the decisions recorded by the planner, so it supports abstract trees, and abstract
meshes of any size. An array that exists is compared with its plan: rows show its own sharding, and a
deviation is a finding.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from flax_spmd._src.draw.drawing import Drawing, draw
from flax_spmd._src.mesh import axis_sizes
from flax_spmd._src.notebook_html import bullets, collapsed, plain_table, safe
from flax_spmd._src.plan.deviations import sharding_text
from flax_spmd._src.plan.findings import Findings, find
from flax_spmd._src.plan.folding import FoldedRow, fold_rows
from flax_spmd._src.plan.planner import planner_for
from flax_spmd._src.plan.rows import Row
from flax_spmd._src.public import public
from flax_spmd._src.rules.decisions import Decision, RuleId, Skipped, axis_names, rule_text
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.text import array_text, plural, size_text, value_text
from flax_spmd._src.text_table import TextTable, plain_text
from flax_spmd.errors import LayoutError, did_you_mean

if TYPE_CHECKING:
  from rich.console import Group

  from flax_spmd._src.layout import Layout


class Total(NamedTuple):
  """Totals of the arrays of one collection, or of one mesh axis.

  Attributes:
    arrays: number of arrays.
    bytes: total size, each array counted once.
    bytes_per_device: bytes of their shards in the memory of one device.
    replicated_bytes: bytes of all copies but the first, over all devices.
    host_bytes_per_device: bytes of the shards for one device that are in the memory of its host.
  """

  arrays: int
  bytes: int
  bytes_per_device: int
  replicated_bytes: int
  host_bytes_per_device: int = 0

  @classmethod
  def of(cls, rows: Sequence[Row]) -> Total:
    """The totals of some rows."""
    return cls(
      len(rows),
      sum(row.bytes for row in rows),
      sum(row.bytes_per_device for row in rows if row.memory is None),
      sum(row.replicated_bytes for row in rows),
      sum(row.bytes_per_device for row in rows if row.memory is not None),
    )


@public('flax_spmd')
class Explanation(NamedTuple):
  """The sharding of every array of a tree, with reasons: `str` returns a table, `rich` prints it in colour.

  The table shows the layers of a model, and an optimizer's copies of a parameter, as one row with their
  number and the sum of their bytes.

  Attributes:
    layout: the layout.
    rows: one row per array, in tree order.
    findings: likely mistakes, and arrays that are not sharded as planned.

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
    """Bytes in the memory of one device."""
    return Total.of(self.rows).bytes_per_device

  @property
  def host_bytes_per_device(self) -> int:
    """Bytes of the shards for one device that are in the memory of its host."""
    return Total.of(self.rows).host_bytes_per_device

  @property
  def folded(self) -> tuple[FoldedRow, ...]:
    """The rows of the table: arrays that differ in layer numbers only, and an optimizer's copies, as one.

    Each has a `path` and `copies` (patterns as in a shell), a `count`, `rows`, `bytes` and `bytes_per_device`.

    Example:
      >>> w = jax.ShapeDtypeStruct((8, 16), jnp.float32)
      >>> [fold] = explain(Layout({'data': 8}), [{'w': w}, {'w': w}, {'w': w}]).folded
      >>> fold.path, fold.count, fold.bytes
      ('{0..2}/w', 3, 1536)
    """
    return fold_rows(self.rows)

  @property
  def by_collection(self) -> dict[str, Total]:
    """Totals for each first key of the tree: `params`, `opt_state`, ..."""
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in self.rows:
      rows[row.path.partition('/')[0]].append(row)
    return {name: Total.of(found) for name, found in rows.items()}

  @property
  def by_axis(self) -> dict[str, Total]:
    """Totals for each mesh axis, of the arrays that are sharded over it."""
    rows: dict[str, list[Row]] = {axis: [] for axis in axis_sizes(self.layout.mesh)}
    by_spec: dict[PartitionSpec, list[Row]] = defaultdict(list)
    for row in self.rows:
      by_spec[row.spec].append(row)
    for spec, found in by_spec.items():
      for axis in set(axis_names(tuple(spec))):
        rows[axis] += found
    return {axis: Total.of(found) for axis, found in rows.items()}

  def row(self, path: str) -> Row:
    """The row of one array.

    Args:
      path: the tree path of the array; or a pattern in the table, for the first of its arrays.

    Raises:
      LayoutError: there is no array at this path.
    """
    for row in self.rows:
      if row.path == path:
        return row
    for fold in self.folded if '{' in str(path) else ():
      if fold.path == path:
        return fold.row
    known = [row.path for row in self.rows]
    raise LayoutError(
      f'There is no array {value_text(path)} in this tree of {len(known)} arrays.{did_you_mean(path, known)}\n'
      'Fix: pass a path from the table.'
    )

  def why(self, path: str) -> str:
    """The reasons for the sharding of one array: the rule of every dimension, and the rules skipped.

    Args:
      path: the tree path of the array, or a pattern in the table.

    Raises:
      LayoutError: there is no array at this path.
    """
    row = self.row(path)
    lines = [
      f'{row.path}: {array_text(row.dtype, row.shape)} as {row.spec}{_memory_text(row)}, '
      f'{size_text(row.bytes_per_device)} per device'
    ]
    if row.deviation is not None:
      lines.append(f'  not as planned: {row.deviation.text}')
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
        'memory': row.memory or 'device',
        'stored': None if row.stored is None else sharding_text(row.stored, self.layout.mesh),
        'rules': tuple(_rule_texts(decision) or None for decision in row.decisions),
        'bytes': row.bytes,
        'bytes_per_device': row.bytes_per_device,
        'copies': row.copies,
        'replicated_bytes': row.replicated_bytes,
      }
      for row in self.rows
    ]

  def to_json(self) -> str:
    """The explanation as one JSON object: mesh, rules, arrays with their decisions, folds, totals, findings."""
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
          'deviation': None if row.deviation is None else row.deviation.kind,
        }
        for record, row in zip(self.records(), self.rows, strict=True)
      ],
      'folded': [
        {
          'path': fold.path,
          'copies': fold.copies,
          'count': fold.count,
          'first': fold.row.path,
          'bytes': fold.bytes,
          'bytes_per_device': fold.bytes_per_device,
        }
        for fold in self.folded
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
      'further': None if decision.further is None else rule_text(decision.further),
      'skipped': [self._skip_record(skip) for skip in decision.skipped],
    }

  def _skip_record(self, skip: Skipped) -> dict[str, Any]:
    return {'rule': rule_text(skip.rule), 'reason': skip.reason, 'axes': list(skip.axes)}

  def _rule(self, rule: RuleId) -> str:
    return f'rule {rule_text(rule)} {self.layout.rules.at(rule)!r}'

  def _decided(self, decision: Decision) -> str:
    axes = ' x '.join(axis_names(decision.axes)) or 'replicated'
    rules = [rule for rule in (decision.rule, decision.further) if rule is not None]
    if rules:
      return f'{axes}, by {" and ".join(map(self._rule, rules))}'
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
    from rich.text import Text

    cells = [
      (fold.name, _arrays(fold), _layout(fold), size_text(fold.bytes_per_device)) for fold in self.folded
    ]
    table: Any = TextTable(_TITLES, cells)
    return Group(Text(repr(self.layout)), table, Text(self._summary()))

  def _repr_html_(self) -> str:
    rows = [
      (_html_name(fold), *map(safe, (_arrays(fold), _layout(fold), size_text(fold.bytes_per_device))))
      for fold in self.folded
    ]
    totals = '<br>'.join(map(safe, self._totals()))
    return (
      f'{collapsed("layout", self.layout._repr_html_())}{plain_table(_TITLES, rows)}<p>{totals}</p>'
      f'{bullets(finding.text for finding in self.findings)}'
    )

  def __str__(self) -> str:
    return plain_text(self)

  def _totals(self) -> list[str]:
    lines = [_total('', Total.of(self.rows))]
    collections = self.by_collection
    if len(collections) > 1 and len(collections) == len(
      {_NUMBERS.sub('', name) for name in collections}
    ):
      lines += [_total(f'{name}: ', total) for name, total in collections.items()]
    lines += [_total(f'over {axis!r}: ', total) for axis, total in self.by_axis.items() if total.arrays]
    return lines

  def _summary(self) -> str:
    return '\n'.join([*self._totals(), *(f'- {finding.text}' for finding in self.findings)])


@public('flax_spmd')
def explain(layout: Layout, tree: Any) -> Explanation:
  """Explains the sharding of every array of a tree under a layout.

  Args:
    layout: a layout over a concrete or abstract mesh.
    tree: any tree, concrete or abstract. The sharding of an array that exists, or of an abstract one, is
      compared with its plan.

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
  if not isinstance(getattr(layout, 'rules', None), Rules):
    raise LayoutError(
      f'The first argument of explain is of type {type(layout).__name__}, not a Layout.\nFix: write explain(layout, tree).'
    )
  return explain_plan(layout, tree)


def explain_plan(layout: Layout, planned: Any, stored: Any = None) -> Explanation:
  """Explains the plan of a tree with names, and compares arrays that exist with it.

  Args:
    layout: the layout.
    planned: the tree with its names, concrete or abstract.
    stored: a tree with as many leaves in the same order, such as the state without boxes; None: the
      leaves of `planned`.

  Raises:
    LayoutError: the trees differ in the number of leaves. Others as `explain`.
  """
  counts = [jax.tree.structure(tree).num_leaves for tree in (planned, stored) if stored is not None]
  if len(set(counts)) > 1:
    raise LayoutError(
      f'The plan is of {plural(counts[0], "array")}, the state has {counts[1]}.\n'
      'Fix: pass a state of the planned structure.'
    )
  planner = planner_for(layout.mesh, layout.rules)
  every = planner.checked_rows(planned, stored)
  rows = tuple(row for row in every if row.dtype != object)  # of what a module holds beside its arrays
  return Explanation(layout, rows, find(planner, rows))


_TITLES = ('path', 'array', 'sharded over (rule)', 'per device')


def _html_name(fold: FoldedRow) -> str:
  """The path of a row; the paths of all its arrays if a click unfolds them."""
  if fold.count == 1:
    return safe(fold.name)
  return collapsed(fold.name, '<br>'.join(safe(row.path) for row in fold.rows))


def _arrays(fold: FoldedRow) -> str:
  """`float32[8,16]`, or `96 x float32[8,16]`."""
  array = array_text(fold.row.dtype, fold.row.shape)
  return array if fold.count == 1 else f'{fold.count} x {array}'


_NUMBERS = re.compile('[0-9]+')  # names that differ in numbers only are layers, not collections


def _layout(fold: FoldedRow) -> str:
  """`layers, embed, mlp → model (1)`: the name, mesh axes and rule of every dimension."""
  row = fold.row
  text = (', '.join(map(_dimension, row.decisions)) or 'replicated') + _memory_text(row)
  if row.skipped and not axis_names(tuple(row.spec)):
    text += f' ({", ".join(f"{rule_text(skip.rule)}: {skip.reason}" for skip in row.skipped)})'
  if row.inference is not None:
    parameter = row.inference.parameter or 'a parameter outside this tree'
    text += f' [{row.inference.how} of {parameter if fold.count == 1 else "their parameters"}]'
  return text if row.deviation is None else f'{text} [{row.deviation.text}]'


def _memory_text(row: Row) -> str:
  return '' if row.memory is None else f' in {row.memory}'


def _dimension(decision: Decision) -> str:
  axes, rules = '+'.join(axis_names(decision.axes)), _rule_texts(decision)
  by = f' ({rules})' if rules and axes else ''
  if not isinstance(decision.name, str) or decision.name == axes:
    return (axes or '-') + by
  return f'{decision.name} → {axes}{by}' if axes else decision.name


def _rule_texts(decision: Decision) -> str:
  """`1`, or `1+3` for a dimension to which rule 3 added axes; '' if no rule decided."""
  rules = [rule for rule in (decision.rule, decision.further) if rule is not None]
  return '+'.join(map(rule_text, rules))


def _dim_text(decision: Decision, row: Row) -> str:
  """`'embed' (16)`, or `16` for a dimension without a name, or with the name of its mesh axis."""
  size = row.shape[decision.dim] if decision.dim < len(row.shape) else '?'
  is_name = isinstance(decision.name, str) and (row.logical or decision.name != decision.axes)
  return f'{decision.name!r} ({size})' if is_name else str(size)


def _total(name: str, total: Total) -> str:
  """`params: 4 arrays, 20 KiB in all, 3 KiB per device, 4 KiB in copies`."""
  count = f'{total.arrays} array{"" if total.arrays == 1 else "s"}'
  host = f' and {size_text(total.host_bytes_per_device)} in host memory'
  return (
    f'{name}{count}, {size_text(total.bytes)} in all, {size_text(total.bytes_per_device)}'
    f'{host if total.host_bytes_per_device else ""} per device, {size_text(total.replicated_bytes)} in copies'
  )
