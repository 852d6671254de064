"""Salvage: the plan of a restore of all undamaged leaves.

Damaged leaves may be the reason that a checkpoint does not match its target: a record may have another shape than the
stored array, or lack an array. Then the restore is planned by the stored shapes, from which follows which
leaves of the target are made of damaged ones. These are left out, and the others are restored.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from flax_spmd._src.checkpoint.preflight import Preflight
from flax_spmd._src.checkpoint.storage.direct_reads import Contradiction
from flax_spmd._src.checkpoint.storage.orbax_reader import OrbaxReader
from flax_spmd._src.checkpoint.storage.possible_sizes import impossible_leaves
from flax_spmd._src.checkpoint.storage.readers import CheckpointReader
from flax_spmd._src.checkpoint.storage.record import LeafRecord
from flax_spmd._src.checkpoint.storage.verification import over_processes
from flax_spmd._src.checkpoint.targets import RestoreTarget
from flax_spmd.errors import FlaxSpmdError

_NOT_RECORDED = 'it is missing in the record'
Planned = tuple[RestoreTarget, Preflight]


class SalvagePlan(NamedTuple):
  """The plan of a salvage.

  Attributes:
    target: leaves to restore, with those that are lost.
    plan: plan for all of them.
    lost: reason for each damaged leaf that is known before any array is read.
    reader: the checkpoint, with a record that describes the stored arrays.
  """

  target: RestoreTarget
  plan: Preflight
  lost: dict[str, str]
  reader: CheckpointReader

  def without_lost(self) -> RestoreTarget:
    """The target without the leaves that are made of lost ones."""
    gone = {path for path, route in self.plan.routes.items() if set(route.sources) & self.lost.keys()}
    kept = {path: value for path, value in self.target.values.items() if path not in gone}
    leaves = {path: leaf for path, leaf in self.target.side.leaves.items() if path not in gone}
    return self.target._replace(values=kept, side=self.target.side._replace(leaves=leaves))

  def left_out(self, wanted: RestoreTarget) -> set[str]:
    """The lost leaves, and the whole ones that only leaves made of lost ones need: other layers of a stack."""
    routes = self.plan.routes
    used = {source for path in wanted.values if path in routes for source in routes[path].sources}
    return {source for route in routes.values() for source in route.sources} - used | self.lost.keys()


def salvage_plan(
  reader: CheckpointReader, target: RestoreTarget | None, planned: Callable[[CheckpointReader], Planned]
) -> SalvagePlan:
  """Plans a restore of all undamaged leaves. Every process calls this.

  Args:
    reader: the checkpoint.
    target: target of the caller, if there is one.
    planned: function from a checkpoint to the leaves to restore, and the plan.

  Raises:
    FlaxSpmdError: the restore cannot be planned, and no damage is the reason.
  """
  found: list[Planned] = []
  failure: FlaxSpmdError | None = None
  try:
    found.append(planned(reader))
  except FlaxSpmdError as error:
    failure = error
  problems = failure is not None or bool(found[0][1].problems)
  if over_processes('planned', {'problems': ''} if problems else {}):
    targets = {} if target is None else target.side.leaves
    missing = targets.keys() - found[0][1].routes.keys() if found else set[str]()
    lost, stored = _lost(reader, targets, missing)
    if lost:
      described = copy.copy(reader)
      described.record = dataclasses.replace(reader.record, leaves=stored)
      return SalvagePlan(*planned(described), lost, described)
  if failure is not None:
    raise failure
  return SalvagePlan(*found[0], {}, reader)


def _lost(
  reader: CheckpointReader, targets: Mapping[str, LeafRecord], missing: Collection[str]
) -> tuple[dict[str, str], dict[str, LeafRecord]]:
  """The reason for each leaf that cannot be read as it is recorded; and all leaves as they are stored, as far as known.

  A leaf that is nowhere, or in a packed array, is described like the target's at its path: it is left out. So are
  `missing` ones, which the target has and the record has not, if leaves do not fill a packed array.
  """
  leaves = dict(reader.record.leaves)
  contradictions: dict[str, Contradiction] = {}
  if isinstance(reader, OrbaxReader) and reader.has_own_record:
    contradictions = reader.contradictions()
    if reader.misfits():  # the names of packed leaves are in the record only
      contradictions |= {path: Contradiction(_NOT_RECORDED, None) for path in sorted(missing)}
  for path, (_, stored) in contradictions.items():
    leaf = stored or targets.get(path)
    if leaf is not None or path in leaves:
      leaves[path] = leaf or leaves[path]._replace(names=None, on_mesh=None)
  reasons = over_processes('impossible', impossible_leaves(reader.path, reader.record.leaves))
  reasons |= {path: each.reason for path, each in contradictions.items() if path not in reasons}
  others = {path: leaf for path, leaf in reader.record.leaves.items() if path not in reasons}
  reasons |= impossible_leaves(reader.path, others, together=True)
  return over_processes('lost', reasons), leaves
