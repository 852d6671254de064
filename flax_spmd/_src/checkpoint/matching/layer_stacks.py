"""Restacking: what a checkpoint's leaves are when stacked ones are taken apart, or single ones stacked.

This is what a restore without a target aims at. Nothing but the record says which dimension of a leaf is
that of the layers: the one that is called like their module, or else the first. All leaves of a module
have to agree about it, or it has to be said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax_spmd._src.checkpoint.matching.allowed_changes import Stack
from flax_spmd._src.checkpoint.matching.optimizer_states import Owners
from flax_spmd._src.checkpoint.matching.routes import Side, without
from flax_spmd._src.checkpoint.storage.record import Leaf
from flax_spmd.errors import CheckpointError


def restacked(leaves: Mapping[str, Leaf], kinds: Mapping[str, str], stack: Stack) -> dict[str, Leaf]:
  """The leaves with one stack's modules taken apart or put together.

  Raises:
    CheckpointError: the leaves of a module do not agree about which dimension is that of the layers.
  """
  owners = Owners(Side(leaves, kinds))
  counts = _single_counts(leaves, stack)
  sizes = _sizes(leaves, stack, owners)
  found: dict[str, Leaf] = {}
  for path, leaf in leaves.items():
    single, parts = stack.number(path), stack.split(path)
    if single is not None:
      found[single[0]] = _stacked(leaf, counts[single[0]], stack, owners.is_placeholder(path))
    elif parts is not None and parts[0] + stack.stacked in sizes:
      size = sizes[parts[0] + stack.stacked]
      one = leaf if owners.is_placeholder(path) else _unstacked(leaf, stack)
      found.update((stack.single_path(path, number), one) for number in range(size))
    else:
      found[path] = leaf
  return found


def _single_counts(leaves: Mapping[str, Leaf], stack: Stack) -> dict[str, int]:
  """How many layers there are of each leaf of single modules, by its path in the stacked one."""
  found: dict[str, int] = {}
  for path in leaves:
    single = stack.number(path)
    if single is not None:
      found[single[0]] = found.get(single[0], 0) + 1
  return found


def _sizes(leaves: Mapping[str, Leaf], stack: Stack, owners: Owners) -> dict[str, int]:
  """How many layers each stacked module has."""
  sizes: dict[str, dict[int, str]] = {}
  names: dict[str, dict[str, str]] = {}
  for path, leaf in leaves.items():
    parts = stack.split(path)
    if parts is None or stack.number(path) or not leaf.shape or owners.is_placeholder(path):
      continue
    module, axis = parts[0] + stack.stacked, _axis(leaf, stack)
    sizes.setdefault(module, {}).setdefault(leaf.shape[axis], path)
    if leaf.names is not None and leaf.names[axis] is not None:
      names.setdefault(module, {}).setdefault(str(leaf.names[axis]), path)
  for found in (*sizes.values(), *names.values()):
    if len(found) > 1:
      listed = ', '.join(f'{what} in {path}' for what, path in found.items())
      raise CheckpointError(
        f'The leaves of {stack.stacked} do not say which dimension is that of the layers: {listed}.\n'
        f'Fix: say which, stacks={{{stack.stacked!r}: ({stack.single!r}, 0)}}.'
      )
  return {module: next(iter(found)) for module, found in sizes.items()}


def _axis(leaf: Leaf, stack: Stack) -> int:
  """The dimension of the layers in a stacked leaf."""
  if stack.axis is not None:
    return stack.axis % len(leaf.shape)
  names = leaf.names or ()
  return names.index(stack.name) if names.count(stack.name) == 1 else 0


def _unstacked(leaf: Leaf, stack: Stack) -> Leaf:
  axis = _axis(leaf, stack) if leaf.shape else 0
  names = None if leaf.names is None else without(leaf.names, axis)
  return leaf._replace(shape=without(leaf.shape, axis), names=names)


def _stacked(leaf: Leaf, count: int, stack: Stack, is_placeholder: bool) -> Leaf:
  if is_placeholder:
    return leaf
  axis = (stack.axis or 0) % (len(leaf.shape) + 1)
  names = None if leaf.names is None else _with(leaf.names, axis, stack.name)
  return leaf._replace(shape=_with(leaf.shape, axis, count), names=names, value=None)


def _with(axes: tuple[Any, ...], axis: int, entry: Any) -> tuple[Any, ...]:
  return (*axes[:axis], entry, *axes[axis:])
