"""Converting: a checkpoint made into another one, without the code of the model.

Data lie on disk as whole arrays, whatever layout they were saved under, so that a checkpoint need not be
converted to be restored under another one. What is converted is the rest: stacked layers and single
ones, dtypes, names of leaves, what is in it, and the layout that it is restored under by default.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import jax

from flax_spmd._src.checkpoint.matching.allowed_changes import Dtypes
from flax_spmd._src.checkpoint.restore import restore
from flax_spmd._src.checkpoint.save import save
from flax_spmd._src.checkpoint.storage.readers import open_source
from flax_spmd._src.layout import Layout
from flax_spmd._src.mesh import abstract_mesh, axis_sizes, make_mesh
from flax_spmd._src.public_module import set_module
from flax_spmd._src.rules import toml_format as toml


@set_module('flax_spmd.checkpoint')
def convert(
  path: str | os.PathLike[str],
  to: str | os.PathLike[str],
  *,
  layout: Layout | None = None,
  only: str | None = None,
  renames: Mapping[str, str] | None = None,
  stacks: Mapping[str, Any] | None = None,
  dtypes: Dtypes = 'keep',
  compress: bool = False,
  pack: int = 0,
  show: bool = False,
) -> None:
  """Restores a checkpoint as its record says, and saves it as something else.

  Runs on the devices at hand, which hold all of it at once. Its result has checksums, also if what it
  was made of had none.

  Args:
    path, to: from where to where.
    layout: the layout of the result; its mesh may be abstract. Default: the recorded one, or where
      nothing is recorded, that everything is replicated.
    only, renames, stacks, dtypes: as of `restore`; a stack without a dimension is along the first.
    compress, pack, show: as of `save`.

  Raises:
    CheckpointError: as `restore` and `save`.

  Example:
    >>> layout = Layout({'data': 8}, (('embed', 'data'),))
    >>> w = layout.shard(LogicallyPartitioned(np.ones((2, 8), 'float32'), ('layers', 'embed')))
    >>> checkpoint.save(tmp / 'scanned', {'blocks': {'w': w}}, layout=layout)
    >>> checkpoint.convert(tmp / 'scanned', tmp / 'single', stacks={'blocks': 'blocks_{}'})
    >>> list(checkpoint.show(tmp / 'single').record.leaves)
    ['blocks_0/w', 'blocks_1/w']
  """
  layout = layout or recorded_layout(path)
  state = restore(
    path,
    layout=_here(layout),
    only=only,
    renames=renames,
    stacks=stacks,
    dtypes=dtypes,
    boxed=True,
    show=show,
  )
  tree = state
  for name in reversed(only.strip('/').split('/') if only else ()):
    tree = {name: tree}  # a part keeps its place
  save(to, tree, layout=layout, compress=compress, pack=pack, show=show)


@set_module('flax_spmd.checkpoint')
def recorded_layout(path: str | os.PathLike[str]) -> Layout:
  """The layout that a checkpoint was saved under, on an abstract mesh; where none is recorded, without rules.

  Example:
    >>> layout = Layout({'data': 8}, (('embed', 'data'),))
    >>> checkpoint.save(tmp / 'recorded', layout.shard({'w': np.ones(8)}), layout=layout)
    >>> checkpoint.recorded_layout(tmp / 'recorded').rules
    Rules(('embed', 'data'))
  """
  text = open_source(path).record.layout
  if text is None:
    return Layout(abstract_mesh({'devices': 1}), ())
  parsed = toml.read(text)
  return Layout(abstract_mesh(parsed.axes, axis_types=parsed.types), parsed.rules)


def _here(layout: Layout) -> Layout:
  """The layout on the devices at hand: as it is if there are enough, else with all on one device."""
  sizes = axis_sizes(layout.mesh)
  if layout.mesh.size > jax.device_count():
    sizes = dict.fromkeys(sizes, 1)
  devices = jax.devices()[: math.prod(sizes.values())]
  return layout.replace(mesh=make_mesh(sizes, devices=devices))
