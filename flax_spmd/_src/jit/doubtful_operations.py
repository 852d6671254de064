"""Doubtful operations: those that XLA may compute wrongly as they are sharded, in the programs of a function."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

from flax_spmd._src import compat
from flax_spmd._src.jit.grouped_kernels import (
  COMPUTE_BY_DEVICE,
  COVER_THE_MESH,
  GROUPED_SUMS,
  KEEP_GROUPS,
  MOVED_GROUPS,
  SHARDED_GROUPS,
  grouped_sums,
  has_groups,
  moved_groups,
  sharded_groups,
)
from flax_spmd._src.jit.reused_axes import REUSED_AXES, SUM_FIRST, has_products, reused_axes
from flax_spmd._src.jit.sharded_pads import SHARD_ALIKE, SHARDED_PADS, has_pads, sharded_pads
from flax_spmd._src.jit.sharded_windows import (
  KEEP_WHOLE,
  SHARDED_WINDOWS,
  has_windows,
  sharded_windows,
)
from flax_spmd._src.mesh import axis_sizes
from flax_spmd._src.source_lines import warn


class DoubtfulOperations(NamedTuple):
  """The operations of a function that XLA may compute wrongly for one reason.

  Attributes:
    reason: the possible fault, and its condition.
    lines: shape, sharding and source line of each.
    fix: the change that avoids it.
  """

  reason: str
  lines: list[str]
  fix: str


def doubtful_operations(
  jaxpr: Any, lower: Callable[[], Iterable[Any]], mesh: Any, known: Container[str] = ()
) -> list[DoubtfulOperations]:
  """The operations of a function that XLA may compute wrongly, by reason.

  Args:
    jaxpr: its program.
    lower: returns its lowered programs; not called for a program without such operations.
    mesh: the mesh of the layout, or of a stage.
    known: the reasons that are not looked for.
  """
  windows = SHARDED_WINDOWS not in known and has_windows(jaxpr, mesh)
  products = REUSED_AXES not in known and has_products(jaxpr, mesh)
  grouped = {GROUPED_SUMS, SHARDED_GROUPS, MOVED_GROUPS}
  groups = any(reason not in known for reason in grouped) and has_groups(jaxpr)
  pads = SHARDED_PADS not in known and has_pads(jaxpr)
  if not (windows or products or groups or pads):
    return []
  programs = [compat.propagated_operations(lowered, axis_sizes(mesh)) for lowered in lower()]
  convolutions = [one for each in programs for one in each.convolutions]
  found = []
  if groups:
    found.append(DoubtfulOperations(GROUPED_SUMS, grouped_sums(convolutions, mesh.size), COVER_THE_MESH))
    found.append(DoubtfulOperations(SHARDED_GROUPS, sharded_groups(convolutions), KEEP_GROUPS))
    found.append(DoubtfulOperations(MOVED_GROUPS, moved_groups(convolutions), COMPUTE_BY_DEVICE))
  if windows:
    lines = sharded_windows(convolutions, mesh.size)
    found.append(DoubtfulOperations(SHARDED_WINDOWS, lines, KEEP_WHOLE))
  if products:
    lines = reused_axes(one for each in programs for one in each.products)
    found.append(DoubtfulOperations(REUSED_AXES, lines, SUM_FIRST))
  if pads:
    lines = sharded_pads(one for each in programs for one in each.pads)
    found.append(DoubtfulOperations(SHARDED_PADS, lines, SHARD_ALIKE))
  return [each for each in found if each.lines and each.reason not in known]


def warn_of_doubtful_operations(
  name: str, jaxpr: Any, lower: Callable[[], Iterable[Any]], mesh: Any, reported: set[str]
) -> None:
  """Warns once per reason of the operations of a function that XLA may compute wrongly.

  Args:
    name: the function.
    jaxpr, lower, mesh: as for `doubtful_operations`.
    reported: the kinds of warnings already issued.

  Warns:
    UserWarning: lists every such operation, with a fix.
  """
  for each in doubtful_operations(jaxpr, lower, mesh, reported):
    reported.add(each.reason)
    lines = ''.join(f'\n  {line}' for line in each.lines)
    warn(f'{name}: {each.reason}:{lines}\nFix: {each.fix}')
