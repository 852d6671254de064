"""The options of `Layout.pipeline_jit`, for type checkers: `Layout.pipeline_jit` documents them."""

from __future__ import annotations

from flax_spmd._src.jit.jit_options import CompileOptions
from flax_spmd._src.pipeline.schedules.schedule import Schedule


class PipelineOptions(CompileOptions, total=False):
  """The options of `pipeline_jit`."""

  axis: str
  schedule: Schedule | None
  stages: int | None
  threads: bool
  timeout: float
  host_after: int | None
