"""The options of `restore`, for type checkers: `restore` documents them."""

from __future__ import annotations

from typing import Any, TypedDict

from flax_spmd._src.checkpoint.matching.allowed_changes import Changes
from flax_spmd._src.layout import Layout


class RestoreOptions(TypedDict, total=False):
  """The options of a restore into a target."""

  changes: Changes
  verify: bool
  limit: int | None
  memory: int | None
  show: bool


class RecordRestoreOptions(RestoreOptions, total=False):
  """The options of a restore without a target."""

  layout: Layout | None
  mesh: Any
  rules: Any
  boxed: bool
