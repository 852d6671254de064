"""The options of `Layout.jit`, for type checkers: `Layout.jit` documents them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypedDict


class CompileOptions(TypedDict, total=False):
  """The options that `jit` and `pipeline_jit` have in common."""

  in_rules: Any
  out_rules: Any
  donate_argnums: int | Sequence[int] | None
  donate_argnames: str | Iterable[str] | None
  static_argnums: int | Sequence[int] | None
  static_argnames: str | Iterable[str] | None


class JitOptions(CompileOptions, total=False):
  """The options of `jit`."""

  in_constraints: Any
  axis_name: str | None
  in_axes: Any
  out_axes: Any
  constrain_batch: bool
  keep_unused: bool
  inline: bool
  compiler_options: dict[str, Any] | None
