"""Saving: writes the shards of a state with a record of their names, all at once or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from etils import epath
from orbax.checkpoint import v1 as ocp

from flax_spmd._src.checkpoint.storage import async_save
from flax_spmd._src.checkpoint.storage.async_save import AsyncSave, error_elsewhere
from flax_spmd._src.checkpoint.storage.byte_progress import ByteProgress
from flax_spmd._src.checkpoint.storage.calls_in_flight import in_flight
from flax_spmd._src.checkpoint.storage.contents import (
  Contents,
  PendingRecord,
  check_bytes,
  contents_of,
  is_of_one_process,
)
from flax_spmd._src.checkpoint.storage.disk_space import space_in_errors
from flax_spmd._src.checkpoint.storage.heartbeat import Heartbeat
from flax_spmd._src.checkpoint.storage.orbax_context import align_operations, context
from flax_spmd._src.checkpoint.storage.store import as_path, path_text
from flax_spmd._src.joint_call import JointCall
from flax_spmd._src.layout import Layout
from flax_spmd._src.public import public
from flax_spmd._src.state_plan import Plan


@public('flax_spmd.checkpoint')
def save(
  path: str | os.PathLike[str],
  state: Any,
  layout: Layout | Plan,
  *,
  overwrite: bool = False,
  where: str | None = None,
  compress: bool = False,
  pack: int = 0,
  memory: int | None = None,
  durable: bool = True,
  show: bool = False,
) -> None:
  """Writes a state, with its logical names and its layout.

  Each device writes its own shards. In a job of several processes, every process calls this.

  Args:
    path: folder to create.
    state: tree of arrays and numbers, with or without boxes.
    layout: layout of the state, or its plan (`layout.plan(...)`), which has the names of a state without boxes.
    overwrite: whether to replace the checkpoint at `path`, of this package or of Orbax. It stays current until the
      new one is complete and durable, and its readers are not disturbed.
    where: regular expression; only leaves whose paths it matches are saved.
    compress: whether to compress the data (zstd). Compression takes longer than writing, and trained
      parameters hardly shrink; worthwhile for slow or metered storage.
    pack: largest size, in bytes, of arrays to store together. Much faster for thousands of small arrays;
      plain Orbax then cannot read the state's structure.
    memory: most bytes in flight to storage; default: no limit.
    durable: whether the checkpoint survives a power cut as soon as this returns. False leaves it to the
      operating system when to write to the disk, as Orbax does.
    show: whether to show a progress bar, on the first process.

  Raises:
    CheckpointExistsError: `path` exists; or, with `overwrite`, it holds files of others. It is left unchanged.
    CheckpointBusyError: another process is writing to `path`.
    LayoutError: the state is not one of the plan, or contains itself.
    CheckpointError: the state has leaves that are abstract, or neither arrays nor numbers; or an earlier
      `save_async` has failed; or the storage failed; or the processes pass different paths.

  Example:
    >>> layout = Layout({'data': 2, 'model': 4}, (('mlp', 'model'),))
    >>> w = layout.shard(LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'mlp')))
    >>> checkpoint.save(tmp / 'step_1', {'w': w}, layout)
    >>> other = Layout({'data': 8}, (('embed', 'data'),))
    >>> restored = checkpoint.restore(tmp / 'step_1', other.abstract(lambda: {'w': w}))
    >>> restored['w'].value.sharding.spec
    P('data', None)
  """
  request = SaveRequest(where, compress, pack, memory, durable, show)
  start_save(path, state, layout, request, overwrite=overwrite).result()


@public('flax_spmd.checkpoint')
def save_async(
  path: str | os.PathLike[str],
  state: Any,
  layout: Layout | Plan,
  *,
  overwrite: bool = False,
  where: str | None = None,
  compress: bool = False,
  pack: int = 0,
  memory: int | None = None,
  durable: bool = True,
  show: bool = False,
) -> AsyncSave:
  """Writes a state like `save`, in the background: returns as soon as the state may be changed or donated.

  One save runs at a time; the next one waits for it. If a save fails, `result` raises the error; otherwise
  the next call of `save`, `save_async` or `restore` does, or the program exits with code 1. Call `result`
  of the last save before the program ends: since Python 3.12, a save cannot be completed during exit.

  Args:
    path, state, layout, overwrite, where, compress, pack, memory, durable, show: see `save`.

  Returns:
    The save in progress; its `result()` waits for it.

  Example:
    >>> layout = Layout({'data': 8})
    >>> saving = checkpoint.save_async(tmp / 'step_2', layout.shard({'w': np.ones(8)}), layout)
    >>> saving.result()
    >>> saving.done()
    True
  """
  request = SaveRequest(where, compress, pack, memory, durable, show)
  return start_save(path, state, layout, request, overwrite=overwrite)


class SaveRequest(NamedTuple):
  """The arguments that all kinds of saves share; see `save`."""

  where: str | None = None
  compress: bool = False
  pack: int = 0
  memory: int | None = None
  durable: bool = True
  show: bool = False


def start_save(
  path: str | os.PathLike[str],
  state: Any,
  layout: Layout | Plan,
  request: SaveRequest,
  *,
  overwrite: bool = False,
  before: Callable[[], Mapping[str, Any]] = dict,
  after: Callable[[], object] = bool,
) -> AsyncSave:
  """Starts a save, which continues in the background. Every save is started here, those of a manager too.

  Args:
    path, state, layout, overwrite: see `save`.
    request: the other arguments of `save`.
    before: function called first; returns JSON values to store beside the record, by name. Every process
      may wait for the others in it.
    after: function called in the first process once the checkpoint is committed. No process returns before it.
  """
  with in_flight():
    call = JointCall(
      'save', f'The save to {path_text(path)}', lambda failure: error_elsewhere(path, failure)
    )
    try:
      folder = as_path(path)
      async_save.finish()
    except BaseException as error:
      call.fail(error)
      raise
    heartbeat = Heartbeat(call)

    def begun() -> AsyncSave:
      extra = before()
      check_bytes(pack=request.pack, memory=request.memory)
      contents = contents_of(state, layout, request.where, request.pack)
      with space_in_errors(folder, contents.record.bytes):
        return written(contents, extra)

    def written(contents: Contents, extra: Mapping[str, Any]) -> AsyncSave:
      size = contents.record.bytes
      claim = async_save.claim(folder, overwrite, request.durable)
      progress = ByteProgress(request.show, f'save {folder.name}', size, 'written')
      try:
        record = PendingRecord(contents)
        claim.follow()
        response = _begun_by_orbax(claim.new, contents, request)
        return async_save.start(response, claim, progress, size, heartbeat, record, extra, after)
      except BaseException:
        progress.close()
        claim.release()
        raise

    return async_save.watched(begun, folder, heartbeat)


def _begun_by_orbax(folder: epath.Path, contents: Contents, request: SaveRequest) -> Any:
  """Orbax's handle of a save that has begun."""
  align_operations()
  largest = contents.record.largest
  options = context(
    folder,
    compress=request.compress,
    memory=request.memory,
    largest=largest,
    of_stages=any(map(is_of_one_process, contents.leaves.values())),
    # XLA for CPUs changes the bits of NaNs of float8_e5m2 where it cuts a part out of a copy
    whole=any(leaf.dtype.startswith('float8') for leaf in contents.record.leaves.values()),
  )
  try:
    with options:
      return ocp.save_async(folder, contents.tree)
  except Exception as error:  # of many kinds, for a folder that cannot be made
    failure = async_save.save_error(error, folder.parent)
    raise failure from failure.__cause__
