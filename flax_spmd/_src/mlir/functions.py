"""The main function of a lowered program, and its operations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

WITH_BLOCKS = ('while', 'case', 'if')  # kinds of operations


def walk(op: Any) -> Iterator[Any]:
  """All operations of a function in order, each before those in its regions, as in `GraphReader`."""
  for region in op.regions:
    for block in region.blocks:
      for view in block.operations:
        inner = view.operation
        yield inner
        if inner.name.partition('.')[2] in WITH_BLOCKS:
          yield from walk(inner)


def main_of(module: Any) -> Any:
  """The function `main` of a module."""
  return next(
    view.operation
    for view in module.regions[0].blocks[0].operations
    if view.operation.name == 'func.func' and str(view.operation.attributes['sym_name']) == '"main"'
  )
