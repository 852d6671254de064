"""Restoring: everything is compared first, then read once, straight to where it belongs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from flax_spmd._src.checkpoint import targets
from flax_spmd._src.checkpoint.load import load
from flax_spmd._src.checkpoint.matching.allowed_changes import Conversion, Dtypes
from flax_spmd._src.checkpoint.preflight import Preflight
from flax_spmd._src.checkpoint.preflight import preflight as fly
from flax_spmd._src.checkpoint.storage import async_save as pending
from flax_spmd._src.checkpoint.storage.byte_progress import Bar
from flax_spmd._src.checkpoint.storage.readers import Source, open_source
from flax_spmd._src.checkpoint.targets import Target
from flax_spmd._src.layout import Layout
from flax_spmd._src.public_module import set_module
from flax_spmd.errors import TargetError


@set_module('flax_spmd.checkpoint')
def restore(
  path: str | os.PathLike[str],
  target: Any = None,
  *,
  layout: Layout | None = None,
  mesh: Any = None,
  rules: Any = None,
  only: str | None = None,
  renames: Mapping[str, str] | None = None,
  stacks: Mapping[str, Any] | None = None,
  axes: Mapping[str, str] | None = None,
  moved: str | Iterable[str] = (),
  dtypes: Dtypes = 'keep',
  missing: str | None = None,
  unused: str | None = None,
  boxed: bool = False,
  verify: bool = True,
  limit: int | None = None,
  memory: int | None = None,
  show: bool = False,
) -> Any:
  """Reads a checkpoint into the shapes, dtypes, shardings and boxes of `target`, or of its own record.

  Each device reads its own pieces only. Everything that differs is told before a byte is read, and
  what is read is compared with its checksums. In a program of several processes, every process calls
  this. Checkpoints of plain Orbax and of `flax.training.checkpoints` are read too; they have no
  names and no checksums.

  Args:
    path: a folder that `save` wrote.
    target: what is wanted: `layout.abstract(...)`, or a state that exists. The mesh, the rules, and
      whether there are boxes may all differ from what was saved. None: a tree of dicts and lists, as
      the checkpoint's record has it, under `layout`.
    layout: with a target, the layout that planned it, which knows the names of a state without
      boxes (one that planned exactly this target need not be given). Without a target, where everything
      goes.
    mesh, rules: in place of `layout`; what is not given is as it was saved.
    only: path of the part that is wanted, such as `'params'`. The result is that part.
    renames: regular expressions that are found in saved paths, and what they become; the first one
      that is found counts. `{'^opt_state/1/ema/': 'params/'}` makes averages the parameters.
    stacks: modules that are one stacked module on one side, as of `nn.scan`, and single ones on the
      other: `{'layers': 'layers_{}'}`; with the stacked dimension, where names and shapes do not say
      it, `{'layers': ('layers_{}', 0)}`. Optimizer state follows.
    axes: logical names that have changed but mean the same, old to new.
    moved: logical names whose dimensions may stand elsewhere, as when a scan has another axis.
    dtypes: `'keep'`; `'cast'` for floats that can be held without loss; or, for what may lose digits,
      which dtype becomes which, `{'float32': 'bfloat16'}`.
    missing: a regular expression; leaves of the target with such paths may be missing in the
      checkpoint, and keep their values.
    unused: a regular expression; saved leaves with such paths may be left out.
    boxed: without a target, whether the result has boxes around what has names.
    verify: whether what is read is compared with its checksums.
    limit: bytes that one device may hold; default: what is free, where the device tells.
    memory: bytes that may be on their way from storage at once; default: no limit.
    show: whether a progress bar is shown, on the first process.

  Returns:
    A tree like `target`, its arrays read from the checkpoint, laid out as `target` says.

  Raises:
    CheckpointNotFoundError: there is no checkpoint at `path`.
    TargetError: leaves of the target do not say where they go (lists all of them).
    CheckpointMismatchError: anything differs that is not covered by an argument (lists all of it).
    CheckpointDamagedError: the checkpoint is not as it was written (names every leaf).
    CheckpointError: a newer version wrote it; or an earlier `save_async` has failed.
    LayoutError, MeshAxisError, UnmatchedNameError, ConflictError: without a target, leaves that do
      not fit the layout.

  Warns:
    UserWarning: every device will hold everything, though it was sharded when it was saved; or, without
      a target, a logical name has no rule but is nearly one that has.

  Example:
    >>> layout = Layout({'data': 2, 'model': 4}, (('embed', 'data'), ('mlp', 'model')))
    >>> w = layout.shard(LogicallyPartitioned(np.ones((8, 16), 'float32'), ('embed', 'mlp')))
    >>> checkpoint.save(tmp / 'step_3', {'params': {'w': w}}, layout=layout)
    >>> checkpoint.restore(tmp / 'step_3', mesh=make_mesh({'data': 4, 'model': 2}))['params']['w'].sharding
    NamedSharding(mesh=Mesh('data': 4, 'model': 2, axis_types=(Auto, Auto)), spec=P('data', 'model'), memory_kind=device)
    >>> half = {'float32': 'bfloat16'}
    >>> checkpoint.restore(tmp / 'step_3', layout=layout, only='params', dtypes=half)['w'].dtype
    dtype(bfloat16)
  """
  pending.finish()
  conversion = Conversion.of(only, renames, stacks, axes, moved, dtypes, missing, unused)
  source, wanted = _opened(path, target, layout, mesh, rules, conversion, boxed)
  found = fly(source, wanted, conversion, limit)
  found.check()
  bar = Bar(show, f'restore {source.path.name}', found.bytes_read, 'read')
  try:
    leaves = load(source, wanted.values, found.routes, verify=verify, memory=memory)
  except BaseException:
    bar.close()
    raise
  bar.close(whole=True)
  return wanted.build(leaves)


@set_module('flax_spmd.checkpoint')
def preflight(
  path: str | os.PathLike[str],
  target: Any = None,
  *,
  layout: Layout | None = None,
  mesh: Any = None,
  rules: Any = None,
  only: str | None = None,
  renames: Mapping[str, str] | None = None,
  stacks: Mapping[str, Any] | None = None,
  axes: Mapping[str, str] | None = None,
  moved: str | Iterable[str] = (),
  dtypes: Dtypes = 'keep',
  missing: str | None = None,
  unused: str | None = None,
  limit: int | None = None,
) -> Preflight:
  """What `restore` would do with these arguments, and everything that stands in its way.

  Reads no arrays. Nothing that differs is raised; it is in `problems`, and printing tells all of it.

  Example:
    >>> layout = Layout({'data': 8}, (('embed', 'data'),))
    >>> w = layout.shard(LogicallyPartitioned(np.ones((8, 16), 'float32'), ('embed', 'mlp')))
    >>> checkpoint.save(tmp / 'step_4', {'w': w}, layout=layout)
    >>> found = checkpoint.preflight(tmp / 'step_4', {'v': w})
    >>> len(found.problems)
    2
    >>> found = checkpoint.preflight(tmp / 'step_4', {'v': w}, renames={'^w$': 'v'})
    >>> found.bytes_read, found.bytes_per_device
    (512, 64)
  """
  conversion = Conversion.of(only, renames, stacks, axes, moved, dtypes, missing, unused)
  source, wanted = _opened(path, target, layout, mesh, rules, conversion, False)
  return fly(source, wanted, conversion, limit)


def _opened(
  path: Any, target: Any, layout: Any, mesh: Any, rules: Any, conversion: Conversion, boxed: bool
) -> tuple[Source, Target]:
  """The checkpoint, and what is wanted of it."""
  if target is not None and (mesh is not None or rules is not None):
    raise TargetError(
      'mesh= and rules= say where everything goes without a target; here the target says it.\n'
      'Fix: leave them out, or leave the target out, or plan the target by that mesh and those rules.'
    )
  if target is not None:
    wanted = targets.of_tree(target, layout, conversion.only)
    return open_source(path), wanted
  source = open_source(path)
  under = targets.layout_of(source.record, layout, mesh, rules)
  return source, targets.of_record(source.record, under, conversion, boxed)
