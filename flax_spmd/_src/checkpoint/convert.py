"""Conversion: rewrites a checkpoint as another one, without the model's code.

Arrays are stored whole, independent of the layout, so a checkpoint needs no conversion to be restored under
another layout. `convert` changes the rest: layers stacked or single, dtypes, paths, the part that is kept, and
the recorded layout.
"""

from __future__ import annotations

import math
import os

import jax

from flax_spmd._src.checkpoint.matching.allowed_changes import NO_CHANGES, Changes, check_without_target
from flax_spmd._src.checkpoint.restore import restore
from flax_spmd._src.checkpoint.save import save
from flax_spmd._src.checkpoint.storage.readers import open_checkpoint
from flax_spmd._src.layout import Layout
from flax_spmd._src.mesh import abstract_mesh, axis_sizes, make_mesh
from flax_spmd._src.public import public
from flax_spmd._src.rules import toml_format


@public('flax_spmd.checkpoint')
def convert(
  path: str | os.PathLike[str],
  to: str | os.PathLike[str],
  *,
  changes: Changes = NO_CHANGES,
  layout: Layout | None = None,
  compress: bool = False,
  pack: int = 0,
  show: bool = False,
) -> None:
  """Restores a checkpoint by its own record, and saves the result with changes.

  It runs on the available devices, which hold the whole state. The new checkpoint has checksums, even if
  the old one has none.

  Args:
    path: checkpoint to convert.
    to: path of the new checkpoint.
    changes: `renames`, `rearranged`, `stacks`, `dtypes` and `only` to apply. Layers are stacked along the first dimension,
      unless `stacks` gives another one.
    layout: layout to record in the new checkpoint; its mesh may be abstract. Default: the recorded layout,
      or everything replicated if there is none.
    compress, pack, show: see `save`.

  Raises:
    CheckpointError: see `restore` and `save`; or `changes` has entries that need a target.

  Example:
    >>> layout = Layout({'data': 8}, (('embed', 'data'),))
    >>> w = layout.shard(LogicallyPartitioned(np.ones((2, 8), 'float32'), ('layers', 'embed')))
    >>> checkpoint.save(tmp / 'scanned', {'blocks': {'w': w}}, layout=layout)
    >>> single = checkpoint.Changes(stacks={'blocks': 'blocks_{}'})
    >>> checkpoint.convert(tmp / 'scanned', tmp / 'single', changes=single)
    >>> list(checkpoint.show(tmp / 'single').record.leaves)
    ['blocks_0/w', 'blocks_1/w']
  """
  check_without_target(changes, 'convert', 'renames', 'rearranged', 'stacks', 'dtypes', 'only')
  layout = layout or recorded_layout(path)
  tree = restore(path, changes=changes, layout=_on_available_devices(layout), boxed=True, show=show)
  for name in reversed(changes.only.split('/') if changes.only else ()):
    tree = {name: tree}  # a part keeps its path
  save(to, tree, layout=layout, compress=compress, pack=pack, show=show)


@public('flax_spmd.checkpoint')
def recorded_layout(path: str | os.PathLike[str]) -> Layout:
  """The layout that a checkpoint was saved under, on an abstract mesh.

  A checkpoint without a recorded layout gets one without rules, on one device.

  Args:
    path: checkpoint to read.

  Example:
    >>> layout = Layout({'data': 8}, (('embed', 'data'),))
    >>> checkpoint.save(tmp / 'recorded', layout.shard({'w': np.ones(8)}), layout=layout)
    >>> checkpoint.recorded_layout(tmp / 'recorded').rules
    Rules(('embed', 'data'))
  """
  text = open_checkpoint(path).record.layout
  if text is None:
    return Layout(abstract_mesh({'devices': 1}), ())
  parsed = toml_format.read(text)
  return Layout(abstract_mesh(parsed.axes, axis_types=parsed.types), parsed.rules, strict=parsed.strict)


def _on_available_devices(layout: Layout) -> Layout:
  """The layout on this job's devices; on a single one if it needs more than there are."""
  sizes = axis_sizes(layout.mesh)
  if layout.mesh.size > jax.device_count():
    sizes = dict.fromkeys(sizes, 1)
  devices = jax.devices()[: math.prod(sizes.values())]
  return layout.replace(mesh=make_mesh(sizes, devices=devices))
