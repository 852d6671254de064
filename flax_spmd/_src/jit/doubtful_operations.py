"""Doubtful operations: those that XLA may compute wrongly as they are sharded, in the programs of a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flax_spmd._src import compat
from flax_spmd._src.jit.reused_axes import has_products, warn_of_reused_axes
from flax_spmd._src.jit.sharded_windows import has_windows, warn_of_sharded_windows
from flax_spmd._src.mesh import axis_sizes


def warn_of_doubtful_operations(
  name: str, jaxpr: Any, lower: Callable[[], Iterable[Any]], mesh: Any, reported: set[str]
) -> None:
  """Warns once per kind of the operations of a function that XLA may compute wrongly.

  Args:
    name: the function.
    jaxpr: its program.
    lower: returns its lowered programs; not called for a program without such operations.
    mesh: the mesh of the layout, or of a stage.
    reported: the kinds of warnings already issued.

  Warns:
    UserWarning: lists every such operation, with a fix.
  """
  windows, products = has_windows(jaxpr, mesh), has_products(jaxpr, mesh)
  if not (windows or products):
    return
  found = [compat.propagated_operations(lowered, axis_sizes(mesh)) for lowered in lower()]
  if windows:
    convolutions = [one for operations in found for one in operations.convolutions]
    warn_of_sharded_windows(name, convolutions, mesh.size, reported)
  if products:
    warn_of_reused_axes(name, [one for operations in found for one in operations.products], reported)
