"""Resized dimensions: the part of a leaf that a checkpoint and its target both have.

A model grows or shrinks: more layers in a scan, a larger vocabulary. The names of dimensions show which ones may have
another size. An unnamed dimension follows a named one of the same module, or scan, that changes between the same sizes: the
vocabulary in the bias of a head, say.
"""

from __future__ import annotations

from collections.abc import Mapping

from flax_spmd._src.checkpoint.matching.allowed_changes import Changes, renamed_axes
from flax_spmd._src.checkpoint.matching.moved_axes import parent, scanned_folders
from flax_spmd._src.checkpoint.matching.optimizer_states import ParameterIndex
from flax_spmd._src.checkpoint.matching.routes import Route, Side, converted, record_of
from flax_spmd._src.checkpoint.storage.record import LeafRecord, is_key

Resized = set[
  tuple[tuple[int, int], str | None]
]  # a dimension's sizes in checkpoint and target, and its name


def resized_leaves(
  routes: Mapping[str, Route | None], saved: Side, target: Side, changes: Changes
) -> dict[str, Route]:
  """Routes for the leaves whose dimensions may have another size.

  Args:
    routes: routes of the target leaves, by path.
    saved: leaves of the checkpoint.
    target: leaves of the target.
    changes: differences that are allowed.
  """
  if not changes.resized:
    return {}
  index = ParameterIndex(target)
  found = {
    path: resized
    for path, route in routes.items()
    if route and (resized := _resized(record_of(route, saved.leaves), target.leaves[path], changes))
  }
  named = [path for path, each in found.items() if all(name in changes.resized for _, name in each)]
  modules = {f'{parent(index.parameter_of(path))}/'.removeprefix('/') for path in named}
  sizes = {
    folder: {
      pair for path in named if index.parameter_of(path).startswith(folder) for pair, _ in found[path]
    }
    for folder in {*modules, *scanned_folders(named, target, index)}
  }

  def may_be_resized(path: str, resized: Resized) -> bool:
    beside = [some for folder, some in sizes.items() if index.parameter_of(path).startswith(folder)]
    return all(
      name in changes.resized or (name is None and any(pair in some for some in beside))
      for pair, name in resized
    )

  return {
    path: converted([route], 'resize', shape=target.leaves[path].shape)
    for path, route in routes.items()
    if route and path in found and may_be_resized(path, found[path])
  }


def _resized(old: LeafRecord, new: LeafRecord, changes: Changes) -> Resized:
  """The dimensions of different sizes; none if the leaves differ in another way."""
  rank = len(new.shape)
  if len(old.shape) != rank or is_key(old) or is_key(new):
    return set()
  names = [
    each if each and len(each) == rank else (None,) * rank
    for each in (renamed_axes(changes, old.names), new.names)
  ]
  dimensions = zip(old.shape, new.shape, *names, strict=True)
  return {((a, b), one if two is None else two) for a, b, one, two in dimensions if a != b}
