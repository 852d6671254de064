"""Mesh axes checked against a mesh: each must exist, be used once per array, and divide its dimension.

    resolve_axes(('data', None), shape, sizes, policies)    the axes of a box or a rule, as a `Resolution`

An axis that does not fit is dropped or is a problem, as the policies of the table decide. A dimension that loses all
of its axes is open.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jax.sharding import PartitionSpec

from flax_spmd._src.rules.decisions import (
  UNCONSTRAINED,
  Axes,
  Decision,
  Policies,
  Resolution,
  Skipped,
  axis_names,
)
from flax_spmd._src.text import value_text
from flax_spmd.errors import (
  MeshAxisError,
  Problem,
  did_you_mean,
)


class RuleSource(NamedTuple):
  """The rule of a table that mesh axes come from: its index and its text."""

  rule: int
  text: str


def resolve_axes(
  entries: Sequence[Axes],
  shape: Sequence[int],
  sizes: Mapping[str, int] | None,
  policies: Policies,
  source: RuleSource | None = None,
  names: Iterable[str] = (),
) -> Resolution:
  """The resolution of entries that are mesh axes already: used unchanged, and checked.

  Args:
    entries: mesh axes per dimension, None or UNCONSTRAINED.
    shape: the array's shape.
    sizes: size per mesh axis; None: the mesh is unknown, and nothing is checked against it.
    policies: `missing_axis` and `indivisible` apply.
    source: the rule that has the entries; None: they are names of a box.
    names: logical names with a rule; an entry that is no axis may be one of them, misspelt.

  Example:
    >>> resolve_axes(('data', None), (6, 8), {'data': 4}, Policies(indivisible='replicate')).spec
    P(None, None)
  """
  checked = _AxesCheck(tuple(entries), sizes, policies, source, names=names)
  decisions = tuple(checked.decide(dim, shape[dim]) for dim in range(len(entries)))
  spec = PartitionSpec(*(decision.axes for decision in decisions))
  return Resolution(spec, decisions, tuple(checked.problems), None if source is None else source.rule)


class _AxesCheck:
  """Checks entries of mesh axes, dimension by dimension, and collects the problems.

  `among_names`: the entries stand among logical names, as tuples; only these are checked.
  """

  def __init__(
    self,
    entries,
    sizes,
    policies: Policies,
    source: RuleSource | None,
    *,
    names: Iterable[str] = (),
    among_names: bool = False,
  ):
    self.entries, self.names, self.among_names = entries, names, among_names
    self.sizes = sizes
    self.policies = policies
    self.source = source
    self.seen: set[str] = set()
    self.problems: list[Problem] = []

  def decide(self, dim: int, size: int) -> Decision:
    entry = self.entries[dim]
    name = None if self.source else entry
    rule = self.source.rule if self.source else None
    if not (entry is None or entry is UNCONSTRAINED or isinstance(entry, (str, tuple, list))):
      self.problems.append(self._strange(dim))
      return Decision(dim, name, None, rule)
    given = axis_names(entry)
    entry, axes = self._present(dim, entry)
    if given and not axes:  # another rule may shard the dimension
      skipped = () if rule is None else (Skipped(rule, 'missing', given),)
      return Decision(dim, name, None, None, skipped)
    self.problems += [
      self._reused(dim, axis, 'for an earlier dimension too') for axis in axes if axis in self.seen
    ]
    self.problems += [
      self._reused(dim, axis, 'twice') for axis in dict.fromkeys(axes) if axes.count(axis) > 1
    ]
    self.seen.update(axes)
    if not size % math.prod((self.sizes or {}).get(axis, 1) for axis in axes):
      return Decision(dim, name, entry, rule)
    if self.policies.indivisible == 'error':
      self.problems.append(self._indivisible(dim, axes, size))
    if rule is None:
      return Decision(dim, name, None, None)
    skipped = (Skipped(rule, 'indivisible', axes),)
    if self.policies.indivisible == 'next':  # a later rule may fill the dimension
      return Decision(dim, name, None, None, skipped)
    return Decision(dim, name, None, rule, skipped)

  def _present(self, dim: int, entry: Axes) -> tuple[Axes, tuple[str, ...]]:
    """An entry without the axes that the mesh lacks."""
    axes = axis_names(entry)
    missing = [] if self.sizes is None else [axis for axis in axes if axis not in self.sizes]
    if not missing:
      return axes if isinstance(entry, (tuple, list)) else entry, axes
    if self.policies.missing_axis == 'error':
      self.problems += [self._missing(dim, axis) for axis in dict.fromkeys(missing)]
    axes = tuple(axis for axis in axes if axis not in missing)
    return axes[0] if len(axes) == 1 else axes or None, axes

  def _source_text(self) -> str:
    if self.source is None:
      return f'names {self.entries!r}'
    return f'spec {PartitionSpec(*self.entries)} of rule {self.source.rule} {self.source.text}'

  def _strange(self, dim: int) -> Problem:
    return Problem(
      f'dim {dim} of {self._source_text()}: {value_text(self.entries[dim])} is neither a name nor mesh axes.',
      'write a name, a tuple of mesh axes, or None.',
    )

  def _missing(self, dim: int, axis: str) -> Problem:
    known = self.sizes or {}
    if self.among_names:
      fix = ', or give the dimension one logical name, and the table a rule for it.'
    elif self.source is None:
      fix = ", or, if it is a logical name, give the table a rule for it, or missing_axis='drop' to leave it open."
    else:
      fix = '.'
    return Problem(
      f'dim {dim} of {self._source_text()}: {value_text(axis)} is not an axis of the mesh, which has {tuple(known)!r}.'
      + did_you_mean(axis, [*known, *self.names]),
      f'correct the axis name{fix}',
      MeshAxisError,
    )

  def _reused(self, dim: int, axis: str, how: str) -> Problem:
    return Problem(
      f'dim {dim} of {self._source_text()}: mesh axis {value_text(axis)} is used {how}.',
      'use every mesh axis for one dimension only.',
    )

  def _indivisible(self, dim: int, axes: tuple[str, ...], size: int) -> Problem:
    sizes = self.sizes or {}
    parts = math.prod(sizes[axis] for axis in axes)
    text = f'dim {dim}: size {size} is not divisible by {_cut(axes, sizes)}'
    if self.source is None:
      return Problem(
        f'{text}.',
        f'pad it to {-(-size // parts) * parts}, name the dimension None to replicate it, or give the '
        "table indivisible='replicate'.",
      )
    return Problem(
      f'{text}, required by rule {self.source.rule} {self.source.text}.',
      f'pad it to {-(-size // parts) * parts}, add a rule for this path before rule {self.source.rule}, '
      "or give the table indivisible='next' or 'replicate'.",
    )


def _cut(axes: Sequence[str], sizes: Mapping[str, int]) -> str:
  """`mesh axis 'model' (4)`, or `mesh axes 'data' (2) x 'model' (4) = 8`."""
  which = ' x '.join(f'{axis!r} ({sizes[axis]})' for axis in axes)
  if len(axes) == 1:
    return f'mesh axis {which}'
  return f'mesh axes {which} = {math.prod(sizes[axis] for axis in axes)}'
