"""Saving: a state, sharded as it is, and the record of what it is, at a path or not at all."""

from __future__ import annotations

import os
from typing import Any

from orbax.checkpoint import v1 as ocp

from flax_spmd._src.checkpoint.storage import async_save as pending
from flax_spmd._src.checkpoint.storage.async_save import Saving
from flax_spmd._src.checkpoint.storage.byte_progress import Bar
from flax_spmd._src.checkpoint.storage.contents import Contents, contents_of
from flax_spmd._src.checkpoint.storage.folders import as_path
from flax_spmd._src.checkpoint.storage.orbax_context import context
from flax_spmd._src.checkpoint.storage.readers import OrbaxSource
from flax_spmd._src.checkpoint.storage.verification import check_same
from flax_spmd._src.layout import Layout
from flax_spmd._src.public_module import set_module


@set_module('flax_spmd.checkpoint')
def save(
  path: str | os.PathLike[str],
  state: Any,
  *,
  layout: Layout,
  overwrite: bool = False,
  where: str | None = None,
  compress: bool = False,
  pack: int = 0,
  memory: int | None = None,
  show: bool = False,
) -> None:
  """Writes a state, sharded as it is, together with its names and its layout.

  In a program of several processes, every process calls this.

  Args:
    path: a folder that does not exist yet.
    state: any tree of arrays and numbers, boxed or not. The names of a state without boxes are
      those that `layout` planned it by.
    layout: the layout that the state lives under.
    overwrite: whether a checkpoint at `path` is replaced. It stays until the new one is whole and
      has been read back and verified.
    where: a regular expression; only leaves whose path it is found in are saved.
    compress: whether data are compressed (zstd). Trained parameters hardly shrink, and it takes
      longer than writing them; worth it for storage that is slow or charged for.
    pack: arrays of up to this many bytes are stored together, which is much faster where there are
      thousands of them. Plain Orbax then does not see the state's structure.
    memory: bytes that may be on their way to storage at once; default: no limit.
    show: whether a progress bar is shown, on the first process.

  Raises:
    CheckpointExistsError: there is something at `path`; it is left alone.
    CheckpointBusyError: somebody else is writing there.
    CheckpointError: the state has abstract leaves, or leaves that are neither array nor number; or
      an earlier `save_async` has failed; or what was written could not be verified.

  Example:
    >>> layout = Layout({'data': 2, 'model': 4}, (('mlp', 'model'),))
    >>> w = layout.shard(LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'mlp')))
    >>> checkpoint.save(tmp / 'step_1', {'w': w}, layout=layout)
    >>> other = Layout({'data': 8}, (('embed', 'data'),))
    >>> restored = checkpoint.restore(tmp / 'step_1', other.abstract(lambda: {'w': w}))
    >>> restored['w'].value.sharding.spec
    P('data', None)
  """
  saving = save_async(
    path,
    state,
    layout=layout,
    overwrite=overwrite,
    where=where,
    compress=compress,
    pack=pack,
    memory=memory,
    show=show,
  )
  saving.result()


@set_module('flax_spmd.checkpoint')
def save_async(
  path: str | os.PathLike[str],
  state: Any,
  *,
  layout: Layout,
  overwrite: bool = False,
  where: str | None = None,
  compress: bool = False,
  pack: int = 0,
  memory: int | None = None,
  show: bool = False,
) -> Saving:
  """`save`, in the background: returns as soon as the state may change.

  One save runs at a time; a second one waits for the first. If a save fails, its error is raised by
  `result`, or else by the next call of `save`, `save_async` or `restore`, or else at the end of the
  program, which then exits with 1. Call `result` of the last save before the program ends: from Python
  3.12 on, what is not written by then cannot be.

  Returns:
    What is under way; its `result()` waits for it.

  Example:
    >>> layout = Layout({'data': 8})
    >>> saving = checkpoint.save_async(tmp / 'step_2', layout.shard({'w': np.ones(8)}), layout=layout)
    >>> saving.result()
    >>> saving.done()
    True
  """
  pending.finish()
  contents = contents_of(state, layout, where, pack)
  held = pending.claim(as_path(path), overwrite)
  bar = Bar(show, f'save {held.path.name}', contents.record.bytes, 'written')
  try:
    contents = contents.summed()
    with context(compress=compress, memory=memory, largest=contents.record.largest):
      response = ocp.save_async(held.new, contents.tree, custom_metadata=contents.metadata)
  except BaseException:
    bar.close()
    held.release()
    raise
  return pending.start(response, held, bar, _check(held.new, contents) if overwrite else _no_check)


def _check(new: Any, contents: Contents) -> Any:
  """Reads back what was written, with the shardings that it has; what else it holds is let go of."""
  record = contents.record
  places = {path: getattr(leaf, 'sharding', None) for path, leaf in contents.leaves.items()}
  return lambda: check_same(OrbaxSource(new, record), places)


def _no_check() -> None:
  pass
