"""Layer stacks without a target: the leaves of a checkpoint after stacking or unstacking its layers.

A restore without a target aims at these leaves. Only the record shows which dimension of a stacked leaf is the
stacked one: the dimension named like the module, or else the first. All leaves of a module have to agree on
it, or the caller chooses it.
"""

from __future__ import annotations

from collections.abc import Mapping

from flax_spmd._src.checkpoint.matching.allowed_changes import LayerStack
from flax_spmd._src.checkpoint.matching.optimizer_states import ParameterIndex
from flax_spmd._src.checkpoint.matching.routes import Side, with_entry, without
from flax_spmd._src.checkpoint.storage.record import LeafRecord
from flax_spmd._src.text import value_text
from flax_spmd.errors import CheckpointError, problems_text


def restacked(
  leaves: Mapping[str, LeafRecord], kinds: Mapping[str, str], stack: LayerStack
) -> dict[str, LeafRecord]:
  """The leaves after stacking the single layers of one stack, and unstacking its stacked modules.

  Args:
    leaves: record of each leaf, by path.
    kinds: class name of each optimizer state, by path.
    stack: stack to convert.

  Raises:
    CheckpointError: the leaves of a module disagree on the stacked dimension, or lack the given one.
  """
  index = ParameterIndex(Side(leaves, kinds))
  counts = _single_counts(leaves, stack)
  _check_given_axis(leaves, stack, index)
  if stack.labels is not None:
    counts = {path: count for path, count in counts.items() if count == len(stack.labels)}
  sizes = _sizes(leaves, stack, index)
  result: dict[str, LeafRecord] = {}
  for path, leaf in leaves.items():
    single, parts = stack.number(path), stack.split(path)
    if single is not None and single[0] in counts:
      result[single[0]] = _stacked(leaf, counts[single[0]], stack, index.is_placeholder(path))
    elif parts is not None and parts[0] + stack.stacked in sizes:
      size = sizes[parts[0] + stack.stacked]
      one = leaf if index.is_placeholder(path) else _unstacked(leaf, stack)
      result.update((stack.single_path(path, number), one) for number in range(size))
    else:
      result[path] = leaf
  return result


def _check_given_axis(
  leaves: Mapping[str, LeafRecord], stack: LayerStack, index: ParameterIndex
) -> None:
  """Raises unless all leaves of the stack have the dimension that the caller gives, if any."""
  ranks = {
    path: len(leaf.shape) + (stack.number(path) is not None)
    for path, leaf in leaves.items()
    if (stack.number(path) or (leaf.shape and stack.split(path))) and not index.is_placeholder(path)
  }
  problems = [
    stack.axis_problem(path, rank) for path, rank in ranks.items() if stack.given_axis(rank) is None
  ]
  if stack.axis is not None and problems:
    raise CheckpointError(problems_text(problems))


def _single_counts(leaves: Mapping[str, LeafRecord], stack: LayerStack) -> dict[str, int]:
  """The number of single layers that have a leaf, by its path in the stacked module."""
  counts: dict[str, int] = {}
  for path in leaves:
    single = stack.number(path)
    if single is not None:
      counts[single[0]] = counts.get(single[0], 0) + 1
  return counts


def _sizes(leaves: Mapping[str, LeafRecord], stack: LayerStack, index: ParameterIndex) -> dict[str, int]:
  """The number of layers of each stacked module."""
  sizes: dict[str, dict[int, str]] = {}
  names: dict[str, dict[str, str]] = {}
  for path, leaf in leaves.items():
    parts = stack.split(path)
    if parts is None or stack.number(path) or not leaf.shape or index.is_placeholder(path):
      continue
    module, axis = parts[0] + stack.stacked, _axis(leaf, stack)
    sizes.setdefault(module, {}).setdefault(leaf.shape[axis], path)
    if leaf.names is not None and leaf.names[axis] is not None:
      names.setdefault(module, {}).setdefault(str(leaf.names[axis]), path)
  for by_value in (*sizes.values(), *names.values()):
    if len(by_value) > 1:
      listed = ', '.join(f'{value} in {path}' for value, path in by_value.items())
      raise CheckpointError(
        f'The leaves of {stack.stacked} disagree on the stacked dimension: {listed}.\n'
        f'Fix: choose it, Changes(stacks={{{value_text(stack.stacked)}: ({value_text(stack.single)}, 0)}}).'
      )
  result = {module: next(iter(by_value)) for module, by_value in sizes.items()}
  for module, size in result.items() if stack.labels else ():
    if size != len(stack.labels or ()):
      raise CheckpointError(
        f'The leaves of {module} hold {size} parts, and stacks names {len(stack.labels or ())}: {stack.text}.\n'
        'Fix: name as many parts as the stacked dimension has, or choose another dimension.'
      )
  return result


def _axis(leaf: LeafRecord, stack: LayerStack) -> int:
  """The stacked dimension of a leaf."""
  if stack.axis is not None:
    return stack.given_axis(len(leaf.shape)) or 0
  return stack.axis_by_names(leaf.names)


def _unstacked(leaf: LeafRecord, stack: LayerStack) -> LeafRecord:
  axis = _axis(leaf, stack) if leaf.shape else 0
  names = None if leaf.names is None else without(leaf.names, axis)
  return leaf._replace(shape=without(leaf.shape, axis), names=names)


def _stacked(leaf: LeafRecord, count: int, stack: LayerStack, is_placeholder: bool) -> LeafRecord:
  if is_placeholder:
    return leaf
  axis = stack.given_axis(len(leaf.shape) + 1) or 0
  names = None if leaf.names is None else with_entry(leaf.names, axis, stack.name)
  return leaf._replace(shape=with_entry(leaf.shape, axis, count), names=names, value=None)
