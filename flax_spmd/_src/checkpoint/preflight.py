"""Preflight: plans a restore, and reports everything that prevents it, before any array is read."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from flax_spmd._src.checkpoint.matching.allowed_changes import (
  Changes,
  check_selection,
  is_selected,
  may_be_missing,
  may_be_unused,
  renamed,
)
from flax_spmd._src.checkpoint.matching.differences import differences
from flax_spmd._src.checkpoint.matching.matcher import match
from flax_spmd._src.checkpoint.matching.routes import Route, Side, grows
from flax_spmd._src.checkpoint.storage.possible_sizes import impossible
from flax_spmd._src.checkpoint.storage.readers import CheckpointReader
from flax_spmd._src.checkpoint.storage.record import LeafRecord, device_dtype, leaf_count
from flax_spmd._src.checkpoint.targets import RestoreTarget
from flax_spmd._src.notebook_html import preformatted
from flax_spmd._src.public import public
from flax_spmd._src.reshard.array_transfer import shard_bytes
from flax_spmd._src.source_lines import warn
from flax_spmd._src.text import plural, size_text, value_text
from flax_spmd.errors import CheckpointDamagedError, CheckpointMismatchError, Problem, raise_problems

_LINES = 40
_SHOWN = 5


@public('flax_spmd.checkpoint')
class Preflight(NamedTuple):
  """The plan of a restore; print it for a summary, or for the problems.

  Attributes:
    path: path of the checkpoint.
    routes: for each target leaf, the saved leaves it is restored from and their conversion.
    problems: differences and shortages that prevent the restore.
    notes: optimizer states restored from another path, random keys that change between typed keys and their
      numbers, and leaves or names that are no longer sharded.
    bytes_read: bytes to read from storage, by all processes together.
    bytes_per_device: bytes of the restored state on the fullest device.
    temporary_bytes: further bytes per device during conversions, at most.
    replicated: whether a state that was sharded when saved will be replicated on every device.

  Example:
    >>> layout = Layout({'data': 8}, (('embed', 'data'),))
    >>> w = layout.shard(LogicallyPartitioned(np.ones((8, 16), 'float32'), ('embed', 'mlp')))
    >>> checkpoint.save(tmp / 'step_7', {'w': w}, layout=layout)
    >>> print(checkpoint.preflight(tmp / 'step_7', {'w': w}))
    Checkpoint ...step_7 matches: reads 1 leaf (512 B); needs 64 B per device.
  """

  path: Any
  routes: dict[str, Route]
  problems: list[Problem]
  notes: list[str]
  bytes_read: int
  bytes_per_device: int
  temporary_bytes: int
  replicated: bool

  def __str__(self) -> str:
    if self.problems:
      return mismatch_text(self.path, self.problems)
    kept = sum(route.step == 'keep' for route in self.routes.values())
    converted = sum(route.step not in ('same', 'keep') for route in self.routes.values())
    parts = [f'reads {leaf_count(len(self.routes) - kept)} ({size_text(self.bytes_read)})']
    parts += [f'converts {converted} of them'] if converted else []
    parts += [f'keeps {plural(kept, "value")} of the target'] if kept else []
    needs = f'needs {size_text(self.bytes_per_device)} per device'
    if self.temporary_bytes:
      needs += f', and {size_text(self.temporary_bytes)} more during conversion'
    return '\n'.join([f'Checkpoint {self.path} matches: {", ".join(parts)}; {needs}.', *self.notes])

  def _repr_html_(self) -> str:
    return preformatted(self)

  def check(self) -> None:
    """Raises if there are problems; warns if a sharded state would be replicated.

    Raises:
      CheckpointDamagedError: neither the files nor this process could hold the arrays.
      CheckpointMismatchError: lists every other problem, on at most 40 lines.
    """
    raise_problems([problem for problem in self.problems if problem.kind is CheckpointDamagedError])
    if self.problems:
      raise CheckpointMismatchError(mismatch_text(self.path, self.problems))
    if self.replicated:
      warn(
        f'Every device will hold all {size_text(self.bytes_per_device)} of {self.path}, which was sharded '
        'when it was saved: the target shards nothing. If this is not intended, check the rules with '
        'layout.check(...).'
      )


def plan_restore(
  reader: CheckpointReader,
  target: RestoreTarget,
  changes: Changes,
  limit: int | None = None,
  lost: Collection[str] = (),
) -> Preflight:
  """Compares a checkpoint's record with a target; reads no arrays.

  Args:
    reader: checkpoint to restore.
    target: leaves to restore.
    changes: differences that are allowed.
    limit: bytes that one device may hold; default: its free memory, where the device reports it.
    lost: saved leaves that are left out.
  """
  saved = saved_side(reader, changes)
  saved = saved._replace(leaves={path: leaf for path, leaf in saved.leaves.items() if path not in lost})
  matched = match(saved, target.side, changes)
  routes = dict(matched.routes)
  problems = _impossible(reader, target.values, matched.routes, lost)
  problems += differences(saved, target.side, matched, changes)
  kept = [path for path in matched.missing if may_be_missing(changes, path)]
  routes.update((path, Route((), 'keep')) for path in kept)
  grown = [path for path, route in matched.routes.items() if grows(route, saved.leaves)]
  problems += [
    Problem(
      f'{path}: {text}, but the target is abstract: {target.side.leaves[path]}.',
      'pass a target with values, such as the result of layout.init.',
    )
    for paths, text in (
      (kept, 'missing= keeps its value'),
      (grown, 'resized= keeps the rest of its values'),
    )
    for path in paths
    if isinstance(target.values[path], jax.ShapeDtypeStruct)
  ]
  problems += _too_wide(target.values, target.side.leaves)
  sources = {source for route in matched.routes.values() for source in route.sources}
  per_leaf = {path: _bytes_on_device(value) for path, value in target.values.items()}
  per_device = _on_fullest(target.values, per_leaf)
  temporary = max((_temporary_bytes(r, saved.leaves) for r in matched.routes.values()), default=0)
  problems += _too_large(target.values, per_leaf, per_device + temporary, limit)
  total = sum(leaf.bytes for leaf in target.side.leaves.values())
  return Preflight(
    reader.path,
    {path: routes[path] for path in target.values if path in routes},
    problems,
    [f'{to}: restored from {at}, a state of the same kind.' for to, at in matched.moved.items()]
    + _keys(saved, target, matched.routes)
    + _replicated(saved, target, matched.routes)
    + _no_longer_sharded(saved, target),
    sum(saved.leaves[path].bytes for path in sources),
    per_device,
    temporary,
    per_device >= total > 0
    and any(map(_was_sharded, saved.leaves.values()))
    and _could_shard(target.values),
  )


def check_parts(reader: CheckpointReader, changes: Changes, paths: Iterable[str]) -> None:
  """Checks the parts of a Composite checkpoint that the restore is of; all of them, unless `changes` leaves some out.

  Args:
    reader: checkpoint to restore.
    changes: differences that are allowed.
    paths: paths of the target, if there is one.

  Raises:
    CheckpointDamagedError: a part cannot be read (lists all of them).
  """
  paths = list(paths)
  problems = [
    Problem(reason, _OTHER_PARTS.format(part=part), CheckpointDamagedError)
    for part, reason in reader.record.unreadable.items()
    if _is_requested(part, changes, paths)
  ]
  raise_problems(problems)


_OTHER_PARTS = (
  'restore another checkpoint; or the other parts of this one, without {part}, with Changes(only=...) or '
  'Changes(unused="^{part}/") and a target.'
)


def _is_requested(part: str, changes: Changes, paths: Sequence[str]) -> bool:
  """Whether leaves of a part are to be restored, as far as that can be known without them."""
  names = renamed(changes, part)
  if changes.only is not None:
    return any(f'{changes.only}/'.startswith(f'{name}/') or is_selected(changes, name) for name in names)
  has_targets = any(path == name or path.startswith(f'{name}/') for path in paths for name in names)
  return has_targets or not may_be_unused(changes, f'{part}/')


def saved_side(reader: CheckpointReader, changes: Changes) -> Side:
  """The checkpoint's side of the match: all of its leaves, or the part to restore."""
  kinds = reader.record.kinds
  leaves = {
    path: leaf._replace(names=None) if leaf.on_mesh else leaf
    for path, leaf in reader.record.leaves.items()
  }
  if changes.only is not None:
    check_selection(changes, leaves)
    leaves = {
      path: leaf
      for path, leaf in leaves.items()
      if any(is_selected(changes, new) for new in renamed(changes, path))
    }
  return Side(leaves, kinds)


def _impossible(
  reader: CheckpointReader, values: Mapping[str, Any], routes: Mapping[str, Route], lost: Collection[str]
) -> list[Problem]:
  """The problem of saved leaves with impossible sizes. All packed leaves are read together."""
  shardings = {
    source: getattr(values[path], 'sharding', None)
    for path, route in routes.items()
    for source in route.sources
  }
  leaves = {
    path: leaf
    for path, leaf in reader.record.leaves.items()
    if (leaf.packed is not None or path in shardings) and path not in lost
  }
  return impossible(reader.path, leaves, shardings)


def _too_wide(values: Mapping[str, Any], leaves: Mapping[str, LeafRecord]) -> list[Problem]:
  """Problems of target arrays of 64 bits, which JAX cannot make unless they are enabled."""
  made = {dtype: device_dtype(dtype) for dtype in {leaf.dtype for leaf in leaves.values()}}
  return [
    Problem(
      f'{path}: {leaf} in the target, but JAX makes arrays of {made[leaf.dtype]} of it.',
      'call jax.config.update("jax_enable_x64", True), or restore into numpy arrays, or pass '
      f'Changes(dtypes={{{value_text(leaf.dtype)}: {value_text(made[leaf.dtype])}}}) and a target of the narrower dtype.',
    )
    for path, leaf in leaves.items()
    if made[leaf.dtype] != leaf.dtype and getattr(values[path], 'sharding', None) is not None
  ]


def _bytes_on_device(value: Any) -> int:
  sharding = getattr(value, 'sharding', None)
  return 0 if sharding is None else shard_bytes(sharding, tuple(value.shape), value.dtype)


def _on_fullest(values: Mapping[str, Any], per_leaf: Mapping[str, int]) -> int:
  """Bytes on the fullest device. The stages of a pipeline are on different devices."""
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


def _temporary_bytes(route: Route, saved: Mapping[str, LeafRecord]) -> int:
  """An upper bound of a conversion's bytes per device besides its result: its sources, unsharded."""
  return 0 if route.step == 'same' else sum(saved[source].bytes for source in route.sources)


def _too_large(
  values: Mapping[str, Any], per_leaf: Mapping[str, int], needed: int, limit: int | None
) -> list[Problem]:
  free = _free_bytes(values) if limit is None else limit
  if free is None or needed <= free:
    return []
  largest = sorted(per_leaf, key=lambda path: per_leaf[path], reverse=True)[:_SHOWN]
  listed = ', '.join(f'{path} {size_text(per_leaf[path])}' for path in largest)
  text = (
    f'The restore needs {size_text(needed)} per device, but only {size_text(free)} is free. '
    f'Largest leaves: {listed}.'
  )
  return [Problem(text, 'use a mesh of more devices, or rules that shard more of these leaves.')]


def _free_bytes(values: Mapping[str, Any]) -> int | None:
  """Free bytes on the fullest device; None if no device reports them, as on CPUs."""
  devices = {
    device
    for value in values.values()
    for device in getattr(getattr(value, 'sharding', None), 'addressable_devices', ())
  }
  stats = [device.memory_stats() for device in devices if device.platform != 'cpu']
  free = [s['bytes_limit'] - s.get('bytes_in_use', 0) for s in stats if s and 'bytes_limit' in s]
  return min(free, default=None)


def _was_sharded(leaf: LeafRecord) -> bool:
  return leaf.spec is not None and any(axis is not None for axis in leaf.spec)


def _keys(saved: Side, target: RestoreTarget, routes: Mapping[str, Route]) -> list[str]:
  """Notes on random keys that change between typed keys and their numbers."""
  return [
    f'{path}: {saved.leaves[route.sources[0]]} in the checkpoint, restored as {target.side.leaves[path]} with the '
    'same bits.'
    for path, route in routes.items()
    if route.step == 'keys'
  ]


def _replicated(saved: Side, target: RestoreTarget, routes: Mapping[str, Route]) -> list[str]:
  """A note on leaves that were sharded when saved, and are now replicated."""
  paths = [
    path
    for path, route in routes.items()
    if any(_was_sharded(saved.leaves[at]) for at in route.sources)
    and _is_replicated(target.values[path])
  ]
  more = f' and {len(paths) - _SHOWN} more' if len(paths) > _SHOWN else ''
  text = f'Sharded when saved, now replicated: {", ".join(paths[:_SHOWN])}{more}.'
  return [text] if paths else []


def _no_longer_sharded(saved: Side, target: RestoreTarget) -> list[str]:
  """Notes on names that were sharded when saved and now are nowhere, as after a typo in a rule."""
  before = {
    name
    for leaf in saved.leaves.values()
    for name, axis in zip(leaf.names or (), leaf.spec or (), strict=False)
    if name is not None and axis is not None
  }
  now: set[Any] = set()
  present: set[Any] = set()
  for leaf in target.side.leaves.values() if before else ():
    present.update(leaf.names or ())
    now.update(
      name for name, axis in zip(leaf.names or (), leaf.spec or (), strict=False) if axis is not None
    )
  lost = sorted(str(name) for name in before & present - now)
  return [f'Sharded when saved, now in no leaf: the name {name!r}.' for name in lost]


def _is_replicated(value: Any) -> bool:
  sharding = getattr(value, 'sharding', None)
  return sharding is not None and _holds_whole(sharding, tuple(value.shape))


@functools.lru_cache(maxsize=1024)
def _holds_whole(sharding: Any, shape: tuple[int, ...]) -> bool:
  """Whether each of several devices holds the whole array."""
  return len(sharding.device_set) > 1 and sharding.shard_shape(shape) == shape


def _could_shard(values: Mapping[str, Any]) -> bool:
  """Whether the target has several devices, or is on the default device by omission."""
  shardings = [sharding for value in values.values() if (sharding := getattr(value, 'sharding', None))]
  named = [sharding for sharding in shardings if isinstance(sharding, jax.sharding.NamedSharding)]
  if named:
    return any(sharding.mesh.size > 1 for sharding in named)
  return bool(shardings) and jax.device_count() > 1


def mismatch_text(path: Any, problems: Sequence[Problem]) -> str:
  """The error text of a mismatch: the problems, as many as fit on 40 lines, and the fixes at the end."""
  fixes = list(dict.fromkeys(f'Fix: {problem.fix}' for problem in problems))
  texts = [problem.text for problem in problems]
  room = max(_LINES - 1 - len(fixes), 10)
  if len(texts) > room:
    more = len(texts) - room + 1
    texts = [*texts[: room - 1], f'and {plural(more, "more difference")}.']
  return '\n'.join([f'Checkpoint {path} does not match the target:', *texts, *fixes][:_LINES])
