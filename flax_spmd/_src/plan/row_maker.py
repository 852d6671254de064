"""Row maker: rows from the resolutions of arrays, and from the arrays themselves.

A tree of a hundred thousand arrays has few kinds of them. Everything in a row that follows from the kind is
computed once for each kind; the array itself adds its path and its own sharding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from flax_spmd._src.mesh import MeshLike, axis_sizes
from flax_spmd._src.names.boxes import Static
from flax_spmd._src.names.optimizer_state import Inference, Shape
from flax_spmd._src.names.tree_names import names_of
from flax_spmd._src.plan.deviations import Deviation, deviation_of, stored_sharding
from flax_spmd._src.plan.rows import Row
from flax_spmd._src.rules.decisions import Resolution, axis_names


class RowMaker:
  """Makes the rows of one tree.

  Args:
    mesh: the mesh of the plan.
    sharding_of: function that returns the sharding of a spec on that mesh.
  """

  def __init__(self, mesh: MeshLike, sharding_of: Callable[[PartitionSpec], NamedSharding]):
    self._mesh, self._sizes, self._sharding_of = mesh, axis_sizes(mesh), sharding_of
    self._planned: dict[Any, tuple[Resolution, tuple[Any, ...]]] = {}
    self._deviations: dict[Any, Deviation | None] = {}
    self._stored: dict[type, bool | None] = {}
    self._dtypes: dict[Any, Any] = {}

  def row(
    self,
    path: str,
    field: str | None,
    static: Static | None,
    shape: Shape,
    inference: Inference | None,
    resolution: Resolution,
    leaf: Any,
    memory: str | None,
  ) -> Row:
    """The row of one array.

    Args:
      path: its tree path.
      field: path of the optimizer's field that holds it, if any.
      static: the static part of its box, if it has one.
      shape: its shape.
      inference: how its names were inferred, if they were.
      resolution: its resolution. The same object stands for arrays with equal names and shapes.
      leaf: the array: on devices, on the host, abstract, or a number.
      memory: its planned memory; None: that of the device.
    """
    exists = self._is_stored(leaf)
    dtype = self._dtype(leaf, exists)
    kind = id(resolution), dtype
    known = self._planned.get(kind)
    if known is None:  # with the resolution, so that its id stays unique
      columns = self._of_kind(static, shape, inference, resolution, dtype)
      known = self._planned[kind] = resolution, columns
    stored = None if exists is None else stored_sharding(leaf, exists)
    deviation = None
    if stored is not None and not resolution.problems:
      deviation = self._deviation(resolution.spec, stored, len(shape), exists, memory)
    return Row._make((path, *known[1], field, stored, deviation, memory))

  def _of_kind(
    self, static: Static | None, shape, inference: Inference | None, resolution: Resolution, dtype
  ) -> tuple[Any, ...]:
    """The columns of a row that its resolution and dtype determine, `shape` to `unnamed`."""
    sizes, spec = self._sizes, resolution.spec
    names = None if static is None else names_of(static, shape) if inference is None else inference.names
    return (
      shape,
      dtype,
      names,
      static is not None and static.logical,
      spec,
      resolution.decisions,
      resolution.owner,
      resolution.skipped,
      math.prod(shape) * dtype.itemsize,
      _bytes_per_device(spec, shape, dtype, sizes),
      self._mesh.size // math.prod(map(sizes.__getitem__, axis_names(tuple(spec)))),
      inference,
      0 if static is None or names is None or inference is not None else len(names) - len(static.names),
    )

  def _is_stored(self, leaf: Any) -> bool | None:
    """Whether it is an array on devices; None if it is traced. Cached by type: every leaf is looked at."""
    kind = type(leaf)
    if kind not in self._stored:
      self._stored[kind] = None if isinstance(leaf, Tracer) else isinstance(leaf, jax.Array)
    return self._stored[kind]

  def _dtype(self, leaf: Any, exists: bool | None) -> Any:
    """The dtype on a device: an array's own, otherwise the one in which JAX will store the leaf."""
    dtype = getattr(leaf, 'dtype', None)
    if exists is not False:
      return dtype
    if dtype is None:
      dtype = np.asarray(leaf).dtype
    on_device = self._dtypes.get(dtype)
    if on_device is None:
      extended = jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
      on_device = dtype if extended else jax.dtypes.canonicalize_dtype(dtype)
      self._dtypes[dtype] = on_device
    return on_device

  def _deviation(
    self, spec: PartitionSpec, stored: Sharding, ndim: int, exists: Any, memory: str | None
  ) -> Any:
    key = id(stored), id(spec), ndim, exists, memory  # rows keep both objects alive
    if key not in self._deviations:
      planned = self._sharding_of(spec)
      planned = planned if memory is None else planned.with_memory_kind(memory)
      self._deviations[key] = deviation_of(planned, stored, ndim, exists)
    return self._deviations[key]


def _bytes_per_device(spec: PartitionSpec, shape, dtype, sizes: Mapping[str, int]) -> int:
  """Bytes of the largest shard; sizes that do not divide are rounded up."""
  entries = tuple(spec) + (None,) * len(shape)
  shard = [
    -(-size // math.prod(sizes.get(axis, 1) for axis in axis_names(entry)))
    for size, entry in zip(shape, entries, strict=False)
  ]
  return math.prod(shard) * dtype.itemsize
