"""Flax's own boxes under a layout: opened like ours, in models written without this package.

    nn.DenseGeneral((4, 8), kernel_init=nn.with_partitioning(init, ('data', None, None)))   # made flat, then reshaped

Flax's box constrains its value by its names whenever a mesh is in force. That is an error for a kernel that is made
flat, and moves an array that a rule for its path has placed, in every step. While a layout is in force, `compat.py`
hands the calls to the functions of this module. The boxes themselves stay as their author made them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import flax.linen as nn
from flax.core import meta
from jax.sharding import PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.active_layout import in_force
from flax_spmd._src.names.boxes import LogicallyPartitioned, Partitioned, without_dimension


class StoredNames(tuple):
  """Names of a box that is stored by another spec than theirs; equal to a tuple, so that boxes around them are equal too.

  A box of ours has the spec in its static part. In one of Flax's, only the names get through a transformation.

  Attributes:
    stored: the spec that the box is opened with.
  """

  stored: PartitionSpec

  def __new__(cls, names: Iterable[Any], stored: PartitionSpec):
    """The names with a spec."""
    self = super().__new__(cls, names)
    self.stored = stored
    return self

  def __reduce__(self):
    return tuple, (tuple(self),)


def as_own_box(box: meta.AxisMetadata[Any]) -> Partitioned | None:
  """Our box with the content of any other; None for a type of box without names."""
  if isinstance(box, Partitioned):
    return box
  if isinstance(box, nn.Partitioned):
    return _own(box)
  spec = getattr(box, 'get_partition_spec', None)
  if spec is None or not hasattr(box, 'value'):
    return None
  return Partitioned(getattr(box, 'value'), spec())  # noqa: B009 (a box of another library)


def _own(box: nn.Partitioned[Any]) -> Partitioned:
  if isinstance(box, nn.LogicallyPartitioned):
    own = LogicallyPartitioned(box.value, box.names, box.mesh, box.rules)
  else:
    own = Partitioned(box.value, box.names, box.mesh)
  return own._opened_as(box.names.stored) if isinstance(box.names, StoredNames) else own


def _unbox(unbox: Callable[..., Any], box: nn.Partitioned[Any], apply_constraint: bool = True) -> Any:
  """Flax's `unbox`; under a layout ours."""
  if not apply_constraint or in_force().mesh is None:
    return unbox(box, apply_constraint)
  return _own(box)._constrained('flax')


def _remove_axis(
  remove_axis: Callable[..., Any], box: nn.Partitioned[Any], index: int, params: Mapping[Any, Any]
) -> nn.Partitioned[Any]:
  """Flax's `remove_axis`; under a layout, the box then has the spec with which it is to be opened."""
  inner = remove_axis(box, index, params)
  stored = None if in_force().mesh is None else _own(box)._stored_spec()
  if stored is None:
    return inner
  rest = without_dimension(stored, index, len(box.names))
  return inner.replace(names=StoredNames(inner.names, rest))


compat.handle_flax_boxes(_unbox, _remove_axis)
