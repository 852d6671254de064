"""Preflight: what a restore would do, and everything that stands in its way, before a byte is read."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from flax_spmd._src.checkpoint.matching.allowed_changes import Conversion
from flax_spmd._src.checkpoint.matching.differences import differences
from flax_spmd._src.checkpoint.matching.matcher import match
from flax_spmd._src.checkpoint.matching.routes import Route, Side
from flax_spmd._src.checkpoint.storage.readers import Source
from flax_spmd._src.checkpoint.storage.record import Leaf
from flax_spmd._src.checkpoint.targets import Target
from flax_spmd._src.public_module import set_module
from flax_spmd._src.text import size_text
from flax_spmd.errors import CheckpointMismatchError, Problem

_LINES = 40
_SHOWN = 5


@set_module('flax_spmd.checkpoint')
class Preflight(NamedTuple):
  """What a restore would do; printing it says it.

  Attributes:
    path: of the checkpoint.
    routes: where each wanted leaf comes from.
    problems: what stands in the way.
    notes: what is done that was not asked for, because it is clear what is meant.
    bytes_read: what is read from storage, by all processes together.
    bytes_per_device: what the fullest device holds at the end.
    bytes_at_once: what a device needs besides, for a while, where leaves are converted.
    replicated: whether all of it lies on every device, though it did not when it was saved.

  Example:
    >>> layout = Layout({'data': 8}, (('embed', 'data'),))
    >>> w = layout.shard(LogicallyPartitioned(np.ones((8, 16), 'float32'), ('embed', 'mlp')))
    >>> checkpoint.save(tmp / 'looked_at', {'w': w}, layout=layout)
    >>> print(checkpoint.preflight(tmp / 'looked_at', {'w': w}))
    The checkpoint ...looked_at fits: 1 leaves are read.
    512 B are read; 64 B are needed on a device.
  """

  path: Any
  routes: dict[str, Route]
  problems: list[Problem]
  notes: list[str]
  bytes_read: int
  bytes_per_device: int
  bytes_at_once: int
  replicated: bool

  def __str__(self) -> str:
    if self.problems:
      return mismatch_text(self.path, self.problems)
    own = sum(route.step == 'keep' for route in self.routes.values())
    changed = sum(route.step not in ('same', 'keep') for route in self.routes.values())
    parts = [f'{len(self.routes) - own} leaves are read']
    parts += [f'{changed} of them converted'] if changed else []
    parts += [f'{own} keep their values'] if own else []
    lines = [
      f'The checkpoint {self.path} fits: {", ".join(parts)}.',
      f'{size_text(self.bytes_read)} are read; {size_text(self.bytes_per_device)} are needed on a device'
      + (f', and {size_text(self.bytes_at_once)} more for a while.' if self.bytes_at_once else '.'),
    ]
    return '\n'.join(lines + self.notes)

  def check(self) -> None:
    """Raises if anything stands in the way; warns if everything would be replicated.

    Raises:
      CheckpointMismatchError: lists every difference, on at most 40 lines.
    """
    if self.problems:
      raise CheckpointMismatchError(mismatch_text(self.path, self.problems))
    if self.replicated:
      warnings.warn(
        f'Every device will hold all {size_text(self.bytes_per_device)} of {self.path}, which was sharded '
        'when it was saved: the target shards nothing. If that is not meant, look at its rules with '
        'layout.check(...).',
        stacklevel=3,
      )


def preflight(
  source: Source, target: Target, conversion: Conversion, limit: int | None = None
) -> Preflight:
  """Compares a checkpoint with what is wanted; reads none of its arrays.

  Args:
    source: the checkpoint.
    target: what is wanted.
    conversion: what may differ.
    limit: bytes that a device may hold; default: what is free, where the device tells.
  """
  saved = _saved(source, conversion)
  matched = match(saved, target.side, conversion)
  routes = dict(matched.routes)
  problems = differences(saved, target.side, matched, conversion)
  kept = [path for path in matched.lacking if conversion.keeps(path)]
  routes.update((path, Route((), 'keep')) for path in kept)
  problems += [
    Problem(
      f'{path}: its own value is to stay, but the target has only its shape, {target.side.leaves[path]}.',
      'pass a state with values as the target, as layout.init makes.',
    )
    for path in kept
    if isinstance(target.values[path], jax.ShapeDtypeStruct)
  ]
  sources = {source for route in matched.routes.values() for source in route.sources}
  per_leaf = {path: _bytes_on_device(value) for path, value in target.values.items()}
  per_device = _on_fullest(target.values, per_leaf)
  at_once = max((_while_converted(r, saved.leaves) for r in matched.routes.values()), default=0)
  problems += _too_large(target.values, per_leaf, per_device + at_once, limit)
  total = sum(leaf.bytes for leaf in target.side.leaves.values())
  return Preflight(
    source.path,
    {path: routes[path] for path in target.values if path in routes},
    problems,
    [f'{to}: taken from {at}, the same kind of state.' for to, at in matched.moved.items()]
    + _replicated(saved, target, matched.routes)
    + _no_longer_sharded(saved, target),
    sum(saved.leaves[path].bytes for path in sources),
    per_device,
    at_once,
    per_device >= total > 0
    and any(map(_was_sharded, saved.leaves.values()))
    and _could_shard(target.values),
  )


def _saved(source: Source, conversion: Conversion) -> Side:
  """What of a checkpoint is to be matched: all of it, or the part that is wanted."""
  kinds = source.record.kinds
  leaves = {
    path: leaf._replace(names=None) if leaf.on_mesh else leaf
    for path, leaf in source.record.leaves.items()
  }
  if conversion.only is not None:
    conversion.check_part(leaves)
    leaves = {path: leaf for path, leaf in leaves.items() if conversion.wants(conversion.renamed(path))}
  return Side(leaves, kinds)


def _bytes_on_device(value: Any) -> int:
  sharding = getattr(value, 'sharding', None)
  return 0 if sharding is None else _piece_bytes(sharding, tuple(value.shape), value.dtype)


def _on_fullest(values: Mapping[str, Any], per_leaf: Mapping[str, int]) -> int:
  """The bytes on the device that gets the most: the stages of a pipeline have different devices."""
  groups: dict[Any, list[Any]] = {}
  for path, size in per_leaf.items():
    sharding = getattr(values[path], 'sharding', None)
    group = groups.setdefault(getattr(sharding, 'mesh', sharding), [sharding, 0])
    group[1] += size
  if len(groups) == 1:
    return sum(per_leaf.values())
  by_device: dict[Any, int] = {}
  for sharding, size in groups.values():
    for device in () if sharding is None else sharding.device_set:
      by_device[device] = by_device.get(device, 0) + size
  return max(by_device.values(), default=0)


@functools.lru_cache(maxsize=1024)
def _piece_bytes(sharding: Any, shape: tuple[int, ...], dtype: Any) -> int:
  return math.prod(sharding.shard_shape(shape)) * dtype.itemsize


def _while_converted(route: Route, saved: Mapping[str, Leaf]) -> int:
  """A bound for what lies on a device besides the result: the leaves as they were saved."""
  return 0 if route.step == 'same' else sum(saved[source].bytes for source in route.sources)


def _too_large(
  values: Mapping[str, Any], per_leaf: Mapping[str, int], needed: int, limit: int | None
) -> list[Problem]:
  free = _free_bytes(values) if limit is None else limit
  if free is None or needed <= free:
    return []
  largest = sorted(per_leaf, key=lambda path: per_leaf[path], reverse=True)[:_SHOWN]
  listed = ', '.join(f'{path} {size_text(per_leaf[path])}' for path in largest)
  text = f'The restore needs {size_text(needed)} on a device, {size_text(free)} are free there; the largest: {listed}.'
  return [Problem(text, 'use a mesh of more devices, or rules that shard more of these.')]


def _free_bytes(values: Mapping[str, Any]) -> int | None:
  """What is free on the fullest device; None where devices do not say it, as those of the host."""
  devices = {
    device
    for value in values.values()
    for device in getattr(getattr(value, 'sharding', None), 'addressable_devices', ())
  }
  stats = [device.memory_stats() for device in devices if device.platform != 'cpu']
  free = [s['bytes_limit'] - s.get('bytes_in_use', 0) for s in stats if s and 'bytes_limit' in s]
  return min(free, default=None)


def _was_sharded(leaf: Leaf) -> bool:
  return leaf.spec is not None and any(axis is not None for axis in leaf.spec)


def _replicated(saved: Side, target: Target, routes: Mapping[str, Route]) -> list[str]:
  """What lies whole on each of several devices, though parts of it did when it was saved."""
  paths = [
    path
    for path, route in routes.items()
    if any(_was_sharded(saved.leaves[at]) for at in route.sources) and _is_whole(target.values[path])
  ]
  more = f' and {len(paths) - _SHOWN} more' if len(paths) > _SHOWN else ''
  return [f'Sharded when saved, now whole on every device: {", ".join(paths[:_SHOWN])}{more}.'] * bool(
    paths
  )


def _no_longer_sharded(saved: Side, target: Target) -> list[str]:
  """Names that were sharded in some leaf when it was saved, and are in none now, as by a rule that is mistyped."""
  before = {
    name
    for leaf in saved.leaves.values()
    for name, axis in zip(leaf.names or (), leaf.spec or (), strict=False)
    if name is not None and axis is not None
  }
  now: set[Any] = set()
  there: set[Any] = set()
  for leaf in target.side.leaves.values() if before else ():
    there.update(leaf.names or ())
    now.update(
      name for name, axis in zip(leaf.names or (), leaf.spec or (), strict=False) if axis is not None
    )
  lost = sorted(str(name) for name in before & there - now)
  return [f'Sharded when saved, now in no leaf: the name {name!r}.' for name in lost]


def _is_whole(value: Any) -> bool:
  sharding = getattr(value, 'sharding', None)
  return sharding is not None and _has_whole(sharding, tuple(value.shape))


@functools.lru_cache(maxsize=1024)
def _has_whole(sharding: Any, shape: tuple[int, ...]) -> bool:
  """Whether each of several devices has all of an array."""
  return len(sharding.device_set) > 1 and sharding.shard_shape(shape) == shape


def _could_shard(values: Mapping[str, Any]) -> bool:
  """Whether the target has several devices, or took the first one because nobody said which."""
  found = [sharding for value in values.values() if (sharding := getattr(value, 'sharding', None))]
  named = [sharding for sharding in found if isinstance(sharding, jax.sharding.NamedSharding)]
  if named:
    return any(sharding.mesh.size > 1 for sharding in named)
  return bool(found) and jax.device_count() > 1


def mismatch_text(path: Any, problems: Sequence[Problem]) -> str:
  """All differences, or the first ones and how many more there are; the fixes at the end."""
  fixes = list(dict.fromkeys(f'Fix: {problem.fix}' for problem in problems))
  texts = [problem.text for problem in problems]
  room = max(_LINES - 1 - len(fixes), 10)
  if len(texts) > room:
    texts = [*texts[: room - 1], f'and {len(texts) - room + 1} more differences.']
  return '\n'.join([f'The checkpoint {path} does not fit the target:', *texts, *fixes][:_LINES])
