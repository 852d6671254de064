"""Restoring: compares a checkpoint with its target, then reads each array once, into its final sharding."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, Unpack, overload

from jax.sharding import NamedSharding

from flax_spmd._src.checkpoint import targets
from flax_spmd._src.checkpoint.load import load
from flax_spmd._src.checkpoint.matching.allowed_changes import (
  NO_CHANGES,
  Changes,
  check_is_changes,
)
from flax_spmd._src.checkpoint.preflight import Preflight, check_parts, plan_restore
from flax_spmd._src.checkpoint.salvage import SalvagePlan, salvage_plan
from flax_spmd._src.checkpoint.storage import async_save
from flax_spmd._src.checkpoint.storage.byte_progress import ByteProgress
from flax_spmd._src.checkpoint.storage.contents import check_bytes
from flax_spmd._src.checkpoint.storage.readers import (
  CheckpointReader,
  open_checkpoint,
  reader_of,
)
from flax_spmd._src.checkpoint.storage.source import Source, read_whole
from flax_spmd._src.checkpoint.storage.store import as_path, path_text
from flax_spmd._src.checkpoint.storage.verification import Damage
from flax_spmd._src.checkpoint.targets import RestoreTarget
from flax_spmd._src.layout import Layout
from flax_spmd._src.multihost import joint
from flax_spmd._src.plan.placement_shardings import check_concrete
from flax_spmd._src.public import public
from flax_spmd._src.state_plan import Plan, State
from flax_spmd._src.text import shown, value_text
from flax_spmd.errors import TargetError

if TYPE_CHECKING:
  from flax_spmd._src.checkpoint.restore_options import RecordRestoreOptions, RestoreOptions


Result = TypeVar('Result')
Folder = str | os.PathLike[str]


@public('flax_spmd.checkpoint')
class SalvagedState(NamedTuple, Generic[State]):
  """The undamaged part of a damaged checkpoint, as returned by `restore(..., salvage=True)`.

  Attributes:
    state: tree with the structure of the target; a damaged leaf is the target's own.
    damaged: reason for each damaged leaf, by its path in the checkpoint.
    files: reason for each damaged file, by its path below the checkpoint.

  Example:
    >>> layout = Layout({'data': 8})
    >>> checkpoint.save(tmp / 'whole', layout.shard({'w': np.ones(8)}), layout)
    >>> salvaged = checkpoint.restore(tmp / 'whole', salvage=True)
    >>> salvaged.damaged, salvaged.state['w'].shape
    ({}, (8,))
  """

  state: State
  damaged: dict[str, str]
  files: dict[str, str]


@overload
def restore(
  path: Folder, target: None = None, *, salvage: Literal[True], **options: Unpack[RecordRestoreOptions]
) -> SalvagedState[Any]: ...
@overload
def restore(
  path: Folder, target: Plan[State], *, salvage: Literal[True], **options: Unpack[RestoreOptions]
) -> SalvagedState[State]: ...
@overload
def restore(
  path: Folder, target: State, *, salvage: Literal[True], **options: Unpack[RestoreOptions]
) -> SalvagedState[State]: ...
@overload
def restore(path: Folder, target: None = None, **options: Unpack[RecordRestoreOptions]) -> Any: ...
@overload
def restore(path: Folder, target: Plan[State], **options: Unpack[RestoreOptions]) -> State: ...
@overload
def restore(path: Folder, target: State, **options: Unpack[RestoreOptions]) -> State: ...


@public('flax_spmd.checkpoint')
def restore(
  path: str | os.PathLike[str],
  target: Any = None,
  *,
  changes: Changes = NO_CHANGES,
  layout: Layout | None = None,
  mesh: Any = None,
  rules: Any = None,
  boxed: bool = False,
  verify: bool = True,
  salvage: bool = False,
  limit: int | None = None,
  memory: int | None = None,
  show: bool = False,
) -> Any:
  """Restores a checkpoint with the shapes, dtypes, shardings and boxes of a target.

  Each device reads only its own shards. All differences from the target are reported before any array is
  read, and the arrays are verified against their checksums. In a job of several processes, every process
  calls this. Checkpoints of plain Orbax, of `flax.training.checkpoints`, of EasyLM, of numpy (npz) and of Hugging Face
  (`safetensors`) can be restored too; they have no names and no checksums.

  Args:
    path: folder written by `save`, or a folder or file of another format.
    target: state to restore into: `layout.plan(...)`, `layout.abstract(...)`, or an existing state. Mesh, rules and
      boxes may differ from those of the saved state. A state without boxes has no names; its plan has them. Default:
      a tree of dicts and lists, from the checkpoint's own record.
    changes: differences between checkpoint and target to allow.
    layout: layout of the result. Only without a target.
    mesh, rules: mesh and rules of the result, in place of `layout`; default: the recorded ones. Only
      without a target.
    boxed: whether to box leaves that have names. Only without a target.
    verify: whether to compare checksums: of the arrays that are read and of the files that describe them, and
      of all files if the whole checkpoint is read.
    salvage: whether to return the undamaged part of a damaged checkpoint, as a `SalvagedState`, instead of
      raising `CheckpointDamagedError`.
    limit: bytes that one device may hold; default: its free memory, where the device reports it.
    memory: most bytes in flight from storage; default: an eighth of the state, at least 64 MiB.
    show: whether to show a progress bar, on the first process.

  Returns:
    A tree with the structure of `target`, and arrays with its shapes, dtypes, weak types and shardings.

  Raises:
    CheckpointNotFoundError: there is no checkpoint at `path`.
    TargetError: leaves of the target have no shape, dtype or sharding (lists all of them).
    MeshError: a mesh of the target, the layout, or `mesh` is abstract.
    CheckpointMismatchError: checkpoint and target differ in ways that `changes` does not allow, or the
      result does not fit into memory (lists all problems).
    CheckpointDamagedError: the checkpoint has changed since it was written (lists the damaged leaves and files).
    CheckpointError: a newer version wrote the checkpoint; or an earlier `save_async` has failed.
    LayoutError, MeshAxisError, UnmatchedNameError, ConflictError: without a target, the layout cannot shard
      a leaf.

  Warns:
    UserWarning: a state that was sharded when saved will be replicated on every device; or, without a
      target, a logical name has no rule but nearly matches one.

  Example:
    >>> layout = Layout({'data': 2, 'model': 4}, (('embed', 'data'), ('mlp', 'model')))
    >>> w = layout.shard(LogicallyPartitioned(np.ones((8, 16), 'float32'), ('embed', 'mlp')))
    >>> checkpoint.save(tmp / 'step_3', {'params': {'w': w}}, layout=layout)
    >>> checkpoint.restore(tmp / 'step_3', mesh=make_mesh({'data': 4, 'model': 2}))['params']['w'].sharding
    NamedSharding(mesh=Mesh('data': 4, 'model': 2, axis_types=(Auto, Auto)), spec=P('data', 'model'), memory_kind=device)
    >>> half = checkpoint.Changes(only='params', dtypes={'float32': 'bfloat16'})
    >>> checkpoint.restore(tmp / 'step_3', layout=layout, changes=half)['w'].dtype
    dtype(bfloat16)
  """
  request = RestoreRequest(changes, layout, mesh, rules, boxed, verify, salvage, limit, memory, show)
  return restore_with(lambda source: None, path, target, request)[0]


class RestoreRequest(NamedTuple):
  """The arguments of a restore beside its path and its target; see `restore`."""

  changes: Changes = NO_CHANGES
  layout: Layout | None = None
  mesh: Any = None
  rules: Any = None
  boxed: bool = False
  verify: bool = True
  salvage: bool = False
  limit: int | None = None
  memory: int | None = None
  show: bool = False


def restore_with(
  also: Callable[[Source | None], Result],
  path: str | os.PathLike[str],
  target: Any,
  request: RestoreRequest,
) -> tuple[Any, Result]:
  """Restores a checkpoint, and reads something else of the same generation.

  Args:
    also: function of the generation, or of None if the path has none.
    path, target: see `restore`.
    request: the other arguments of `restore`.
  """
  with joint('restore', f'The restore of {path_text(path)}'):
    async_save.finish()
    changes, limit = request.changes, request.limit
    check_bytes(limit=limit, memory=request.memory)
    _check_arguments(target, request)

    def read(source: Source | None) -> tuple[Any, Result]:
      reader = reader_of(path, source)
      prepared = _prepared(target, request, reader)
      check_parts(reader, changes, prepared.values if prepared else ())

      def planned(reader: CheckpointReader) -> tuple[RestoreTarget, Preflight]:
        each = prepared or _of_record(reader, request)
        return each, plan_restore(reader, each, changes, limit)

      full = (
        salvage_plan(reader, prepared, planned)
        if request.salvage
        else SalvagePlan(*planned(reader), {}, reader)
      )
      wanted, plan = full.without_lost(), full.plan
      if full.lost:
        plan = plan_restore(full.reader, wanted, changes, limit, full.left_out(wanted))
      plan.check()
      other = also(source)
      found, damage = _loaded(reader, wanted, plan, request, full.lost)
      leaves = full.target.values | dict(zip(wanted.values, found, strict=True))
      state = full.target.build(list(leaves.values()))
      return (SalvagedState(state, damage.leaves, damage.files) if request.salvage else state), other

    return read_whole(as_path(path), read)


def _loaded(
  reader: CheckpointReader,
  target: RestoreTarget,
  plan: Preflight,
  request: RestoreRequest,
  lost: Mapping[str, str],
) -> tuple[list[Any], Damage]:
  """The leaves of a restore, with a progress bar."""
  progress = ByteProgress(request.show, f'restore {reader.path.name}', plan.bytes_read, 'read')
  verify, memory, salvage = request.verify, request.memory, request.salvage
  try:
    result = load(
      reader, target.values, plan.routes, verify=verify, memory=memory, salvage=salvage, lost=lost
    )
  except BaseException:
    progress.close()
    raise
  progress.close(complete=True)
  return result


@public('flax_spmd.checkpoint')
def preflight(
  path: str | os.PathLike[str],
  target: Any = None,
  *,
  changes: Changes = NO_CHANGES,
  layout: Layout | None = None,
  mesh: Any = None,
  rules: Any = None,
  limit: int | None = None,
) -> Preflight:
  """Plans a restore without reading any array.

  Problems are returned in the result, not raised.

  Args:
    path, target, changes, layout, mesh, rules, limit: see `restore`.

  Raises:
    CheckpointError: the checkpoint cannot be opened, or the target is unusable, as for `restore`.
    MeshError: a mesh is abstract, as for `restore`.

  Example:
    >>> layout = Layout({'data': 8}, (('embed', 'data'),))
    >>> w = layout.shard(LogicallyPartitioned(np.ones((8, 16), 'float32'), ('embed', 'mlp')))
    >>> checkpoint.save(tmp / 'step_4', {'w': w}, layout=layout)
    >>> plan = checkpoint.preflight(tmp / 'step_4', {'v': w})
    >>> len(plan.problems)
    2
    >>> changes = checkpoint.Changes(renames={'^w$': 'v'})
    >>> plan = checkpoint.preflight(tmp / 'step_4', {'v': w}, changes=changes)
    >>> plan.bytes_read, plan.bytes_per_device
    (512, 64)
  """
  check_bytes(limit=limit)
  request = RestoreRequest(changes, layout, mesh, rules)
  _check_arguments(target, request)
  reader = open_checkpoint(path)
  prepared = _prepared(target, request, reader)
  check_parts(reader, changes, prepared.values if prepared else ())
  return plan_restore(reader, prepared or _of_record(reader, request), changes, limit)


def _check_arguments(target: Any, request: RestoreRequest) -> None:
  """Raises for arguments that no checkpoint could fit."""
  changes, layout, mesh, rules, *_ = request
  check_is_changes(changes)
  if not isinstance(layout, Layout | None):
    raise TargetError(
      f'layout={shown(value_text(layout))} is no layout.\n'
      'Fix: pass a Layout; a mesh is passed as mesh=, a table as rules=, and a plan as the target.'
    )
  if target is not None and not layout is mesh is rules is None:
    raise TargetError(
      'layout=, mesh= and rules= are for a restore without a target; a target has its own shardings.\n'
      'Fix: leave them out, leave the target out, or plan the target with that layout.'
    )


def _prepared(target: Any, request: RestoreRequest, reader: CheckpointReader) -> RestoreTarget | None:
  """The restore target of a tree; None without a tree."""
  if target is None:
    return None
  return _on_devices(targets.of_tree(target, request.changes, reader.record.leaves))


def _of_record(reader: CheckpointReader, request: RestoreRequest) -> RestoreTarget:
  """The restore target of a checkpoint's own record."""
  layout = targets.layout_of(reader.record, request.layout, request.mesh, request.rules)
  return _on_devices(targets.of_record(reader.record, layout, request.changes, request.boxed))


def _on_devices(target: RestoreTarget) -> RestoreTarget:
  """The target, whose meshes have devices.

  Raises:
    MeshError: one is abstract.
  """
  shardings = {getattr(value, 'sharding', None) for value in target.values.values()}
  for mesh in {each.mesh for each in shardings if isinstance(each, NamedSharding)}:
    check_concrete(mesh)
  return target
