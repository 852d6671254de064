"""Asked: what a pipeline is made with, and what it is called with. Programs depend on these two."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.jit.arguments import Arguments
from flax_spmd._src.mesh import MeshLike, axis_sizes
from flax_spmd._src.pipeline.run.submeshes import submesh
from flax_spmd._src.pipeline.schedules.schedule import Schedule
from flax_spmd._src.rules.table import Rules


@dataclasses.dataclass(frozen=True)
class Setting:
  """What a pipeline is made with.

  Attributes:
    mesh, rules: the layout.
    axis: the mesh axis that stages are laid over.
    schedule: used where `accumulate` is given none.
    arguments: those of the function.
    threads: whether each rank has a thread of its own.
    stages: how many stages a model without stage ends is cut into; None: it has them.
  """

  mesh: MeshLike
  rules: Rules
  axis: str
  schedule: Schedule | None
  arguments: Arguments
  threads: bool
  stages: int | None

  @functools.cached_property
  def sizes(self) -> dict[str, int]:
    """Size per mesh axis."""
    return axis_sizes(self.mesh)

  @functools.cached_property
  def ranks(self) -> list[MeshLike]:
    """Per rank, its devices."""
    return [submesh(self.mesh, self.axis, [rank]) for rank in range(self.sizes[self.axis])]


@dataclasses.dataclass(frozen=True)
class Request:
  """What a pipeline is called with.

  Attributes:
    args, kwargs: the arguments, by position where they can be.
    treedef: the form of those that are not static.
    avals, specs: what their leaves are, and how these lie.
    static: the others.
  """

  args: tuple
  kwargs: dict[str, Any]
  treedef: Any
  avals: list[Any]
  specs: list[PartitionSpec]
  static: Any

  @property
  def key(self) -> Any:
    """What programs depend on."""
    return self.treedef, tuple(self.avals), tuple(self.specs), self.static


def aval_of(leaf: Any) -> Any:
  """Shape, dtype and weak type of an array, a number or what stands for one."""
  if isinstance(leaf, jax.ShapeDtypeStruct):
    return compat.aval_of(leaf.shape, leaf.dtype, bool(leaf.weak_type))
  aval = jax.typeof(leaf)
  return compat.aval_of(aval.shape, aval.dtype, aval.weak_type)
