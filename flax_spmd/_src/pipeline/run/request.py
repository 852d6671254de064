"""Settings of a pipeline, and requests: the structure of a call's arguments. Programs depend on both."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.active_layout import InForce
from flax_spmd._src.jit.arguments import Arguments
from flax_spmd._src.jit.batch_leaves import axes_of_batches
from flax_spmd._src.jit.foreign_meshes import STAGES_MESH
from flax_spmd._src.jit.jit_options import CompileOptions
from flax_spmd._src.jit.trace_scope import trace_scope
from flax_spmd._src.mesh import MeshLike, axis_sizes
from flax_spmd._src.pipeline.run.submeshes import processes_of, submesh
from flax_spmd._src.pipeline.schedules.schedule import Schedule
from flax_spmd._src.rules.table import Rules


class PipelineOptions(CompileOptions, total=False):
  """The options of `Layout.pipeline_jit`, for type checkers."""

  axis: str
  schedule: Schedule | None
  stages: int | None
  threads: bool
  timeout: float
  host_after: int | None
  constrain_batch: bool


@dataclasses.dataclass(frozen=True)
class Setting:
  """The settings of a pipeline: the arguments of `Layout.pipeline_jit`, which documents those not listed here.

  Attributes:
    name: the pipeline, in errors.
    mesh, rules: the layout.
    arguments: the function's parameters, static and not.
    reported: the kinds of warnings already issued.
  """

  name: str
  mesh: MeshLike
  rules: Rules
  arguments: Arguments
  axis: str
  schedule: Schedule | None
  threads: bool
  stages: int | None
  timeout: float
  host_after: int | None
  constrain_batch: bool
  reported: set[str] = dataclasses.field(default_factory=set, compare=False)

  @functools.cached_property
  def sizes(self) -> dict[str, int]:
    """Size per mesh axis."""
    return axis_sizes(self.mesh)

  @functools.cached_property
  def batch_axes(self) -> tuple[str, ...]:
    """The mesh axes that examples on no mesh are sharded over."""
    return axes_of_batches(self.mesh, self.rules) if self.constrain_batch else ()

  @functools.cached_property
  def processes(self) -> tuple[int, ...]:
    """The processes that own devices of the mesh, in order; this one for an abstract mesh."""
    if not isinstance(self.mesh, Mesh):
      return (jax.process_index(),)
    return tuple(sorted(processes_of(self.mesh)))

  @functools.cached_property
  def ranks(self) -> list[MeshLike]:
    """The mesh of each rank."""
    return [submesh(self.mesh, self.axis, [rank]) for rank in range(self.sizes[self.axis])]

  @contextlib.contextmanager
  def trace_scope(self, mesh: AbstractMesh) -> Iterator[None]:
    """The block in which a user's function is traced for the mesh of any rank, whose devices have only a platform."""
    placed, in_force = self.mesh, InForce(mesh, self.rules, whole=self.mesh)
    devices = (
      compat.target_devices(placed.devices.flat[0].platform)
      if isinstance(placed, Mesh)
      else contextlib.nullcontext()
    )
    with trace_scope(in_force, STAGES_MESH), devices:
      yield


@dataclasses.dataclass(frozen=True)
class Request:
  """The arguments of a call, as far as programs depend on them.

  Attributes:
    args, kwargs: the arguments, by position where possible.
    treedef: tree structure of the arguments that are not static.
    avals, specs: shape, dtype and spec of each leaf.
    static: the static arguments.
  """

  args: tuple
  kwargs: dict[str, Any]
  treedef: Any
  avals: list[jax.ShapeDtypeStruct]
  specs: list[PartitionSpec]
  static: Any

  @property
  def key(self) -> Any:
    """The cache key of the compiled programs."""
    return self.treedef, tuple(self.avals), tuple(self.specs), self.static


def aval_of(leaf: Any) -> jax.ShapeDtypeStruct:
  """Shape, dtype and weak type of an array, a number or a `ShapeDtypeStruct`."""
  aval: Any = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
  return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(aval.weak_type))
