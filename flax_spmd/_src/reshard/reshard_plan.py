"""Reshard plans: the transfers of a state to another layout, their bytes on the wire, and the peak of each device.

    plan = layout.plan_reshard(state, serving, dtype='bfloat16')
    print(plan)                                  # a table, and totals
    plan.wire_bytes, plan.peak_bytes, plan.problems

Arrays move one after the other. With `donate`, each is freed when its result is complete. Those that become smaller
come first, and free their memory for the others.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from flax_spmd._src.data.unusable_leaves import unusable
from flax_spmd._src.mesh import describe
from flax_spmd._src.multihost import joint, named, processes_of
from flax_spmd._src.notebook_html import plain_table, preformatted, safe
from flax_spmd._src.public import public
from flax_spmd._src.reshard.array_transfer import (
  ArrayTransfer,
  can_cross,
  crosses,
  dtype_of,
  transfer_of,
)
from flax_spmd._src.source_lines import warn
from flax_spmd._src.text import plural, size_text, value_text
from flax_spmd._src.text_table import TextTable, plain_text
from flax_spmd.errors import LayoutError, Problem, raise_problems

_SHARE = 32  # a program may take this part of the larger side
_LEAST = 2**22  # or this many bytes
_SHOWN = 5


class ReshardRow(NamedTuple):
  """The transfer of one array.

  Attributes:
    path: its tree path.
    shape: global shape.
    before, after: its sharding and dtype now, and as the result, as text.
    way: 'stays', 'copied' (whole shards, from device to device), 'program' (collectives), 'host', or 'gathered' (the
      host's, with shards of other processes).
    wire_bytes: bytes that leave a device, or the host, for another.
    bytes_per_device: bytes of a shard of the result.
  """

  path: str
  shape: tuple[int, ...]
  before: str
  after: str
  way: str
  wire_bytes: int
  bytes_per_device: int


@public('flax_spmd')
@dataclasses.dataclass(frozen=True, repr=False)
class ReshardPlan:
  """The plan of a reshard, made by `Layout.plan_reshard`; print it for a table.

  Attributes:
    rows: one row per array, in the order of the transfers: path, shape, shardings, way, bytes.
    wire_bytes: bytes that leave a device, or the host, for another, all arrays together.
    source_bytes, target_bytes: bytes of the state and of the result, by device.
    peak_bytes: most bytes of state, result and temporary memory at one time, by device.
    chunk: most bytes of temporary memory that a program may take on a device.
    donate: whether the arrays of the state are freed on the way.
    problems: reasons for which `reshard` raises; nothing has moved then.
    replicated: whether a state without names that is sharded now will be replicated on every device.

  Example:
    >>> layout, serving = Layout({'data': 8}, (('embed', 'data'),)), Layout({'model': 8}, (('mlp', 'model'),))
    >>> state = layout.shard({'w': LogicallyPartitioned(np.ones((8, 16), 'float32'), ('embed', 'mlp'))})
    >>> plan = layout.plan_reshard(state, serving, dtype='bfloat16')
    >>> plan.rows[0].way, plan.problems, max(plan.target_bytes.values())
    ('program', [], 32)
  """

  rows: tuple[ReshardRow, ...]
  wire_bytes: int
  source_bytes: dict[Any, int]
  target_bytes: dict[Any, int]
  peak_bytes: dict[Any, int]
  chunk: int
  donate: bool
  problems: list[Problem]
  replicated: bool
  _processes: tuple[int, ...]
  _jobs: tuple[tuple[int, ArrayTransfer], ...]

  def __repr__(self) -> str:
    return f'<plan of a reshard of {plural(len(self.rows), "array")}>'

  def check(self) -> None:
    """Raises if there are problems; warns if `replicated`.

    Raises:
      LayoutError: lists all of them.
    """
    raise_problems(self.problems)
    if self.replicated:
      warn(
        f'Every device will hold all {size_text(max(self.target_bytes.values()))} of the state, which is sharded now: '
        'its arrays have no names, and no rule of the other layout shards them. To shard them by their names, pass the '
        'plan of the state, to=other.plan(create, ...).'
      )

  def run(self, leaves: Sequence[Any]) -> list[jax.Array]:
    """The arrays of the state, in the order of its leaves, as their results. Checks the plan first.

    Raises:
      LayoutError: there are problems, here or in another process; or an array is abstract (lists all of them).
    """
    with joint('reshard', 'The reshard', self._processes, LayoutError):
      self.check()
      self._check_values(leaves)
    return self._moved(leaves)

  def _check_values(self, leaves: Sequence[Any]) -> None:
    raise_problems(
      [
        Problem(
          f'{row.path}: it is abstract, and has no values.',
          'reshard arrays; plan_reshard plans abstract ones.',
        )
        for row, (number, _) in zip(self.rows, self._jobs, strict=True)
        if isinstance(leaves[number], jax.ShapeDtypeStruct)
      ]
    )

  def _moved(self, leaves: Sequence[Any]) -> list[jax.Array]:
    results: list[Any] = [None] * len(leaves)
    made: dict[Any, jax.Array] = {}
    freed = _freed(leaves, self._jobs) if self.donate else [()] * len(leaves)
    for (number, transfer), unused in zip(self._jobs, freed, strict=True):
      key = id(leaves[number]), transfer.target, str(transfer.after)
      if key not in made:
        made[key] = jax.block_until_ready(transfer.run(leaves[number], keep=not self.donate))
      results[number] = made[key]
      for each in unused:
        if isinstance(leaves[each], jax.Array):
          leaves[each].delete()
    return results

  def _repr_html_(self) -> str:
    rows = (tuple(map(safe, cells)) for cells in _cells(self.rows))
    return plain_table(_TITLES, rows) + preformatted('\n'.join(self._totals()))

  def __str__(self) -> str:
    table: Any = TextTable(_TITLES, _cells(self.rows))
    return '\n'.join([plain_text(table), *self._totals()])

  def _totals(self) -> Iterator[str]:
    most = max(self.peak_bytes, key=lambda device: self.peak_bytes[device], default=None)
    yield f'{size_text(self.wire_bytes)} on the wire.'
    if most is not None:
      source, target = self.source_bytes.get(most, 0), self.target_bytes.get(most, 0)
      kept = 'freed on the way' if self.donate else 'kept'
      yield (
        f'Peak of {size_text(self.peak_bytes[most])} on device {most.id}: state {size_text(source)} ({kept}), '
        f'result {size_text(target)}.'
      )
    yield from (f'- {problem.text}' for problem in self.problems)


_TITLES = ('array', 'from', 'to', 'way', 'on the wire', 'per device')
_NUMBERS = re.compile(r'\d+')


def _cells(rows: Sequence[ReshardRow]) -> list[tuple[str, ...]]:
  """The cells of the table; arrays whose paths differ in numbers only are one row."""
  equal: dict[Any, list[ReshardRow]] = defaultdict(list)
  for row in rows:
    equal[_NUMBERS.sub('*', row.path), *row[1:5]].append(row)
  return [
    (
      f'{path if len(found) > 1 else found[0].path}{list(found[0].shape)}'
      + (f' ({len(found)} arrays)' if len(found) > 1 else ''),
      *found[0][2:5],
      size_text(sum(row.wire_bytes for row in found)),
      size_text(sum(row.bytes_per_device for row in found)),
    )
    for (path, *_), found in equal.items()
  ]


def cast_dtype(leaf: Any, dtype: Any) -> Any:
  """The dtype of a leaf as a result: `dtype`, if there is one and the leaf has floating-point numbers."""
  own = dtype_of(leaf)
  if dtype is None or not jnp.issubdtype(own, jnp.floating):
    return own
  try:
    jnp.dtype(dtype)
  except TypeError:
    raise LayoutError(
      f'dtype={value_text(dtype)} is not a dtype.\nFix: pass a floating-point dtype, such as bfloat16.'
    ) from None
  if not jnp.issubdtype(dtype, jnp.floating):
    raise LayoutError(
      f'dtype={value_text(jnp.dtype(dtype).name)} has no floating-point numbers, which the arrays have.\n'
      'Fix: pass a floating-point dtype, such as bfloat16; quantize the state in a function of its own.'
    )
  return jnp.dtype(dtype)


def check_limit(limit: Any) -> None:
  """Raises `LayoutError` for a limit that is no number of bytes."""
  if limit is not None and not limit >= 0:
    raise LayoutError(
      f'limit={value_text(limit)} is not a number of bytes.\nFix: pass 0 or more, such as limit=8 * 2**30.'
    )


def check_leaves(paths: Sequence[str], leaves: Sequence[Any], mesh: Any) -> None:
  """Raises `LayoutError` for leaves that no reshard can move, and for arrays on no device of the layout's mesh."""
  found = (_problem_of(path, leaf, mesh) for path, leaf in zip(paths, leaves, strict=True))
  raise_problems([problem for problem in found if problem])


def _problem_of(path: str, leaf: Any, mesh: Any) -> Problem | None:
  if isinstance(leaf, Tracer):
    return Problem(
      f'{path}: it is a value in a function that JAX traces.',
      'call reshard outside of jitted functions; inside, use with_sharding_constraint.',
    )
  if not isinstance(leaf, jax.ShapeDtypeStruct) and (problem := unusable(path, leaf)):
    return problem
  if isinstance(getattr(getattr(leaf, 'sharding', None), 'mesh', None), AbstractMesh):
    return Problem(
      f'{path}: its mesh {describe(leaf.sharding.mesh)} is abstract: there are no devices that hold it.',
      'plan the state on a layout over a concrete mesh.',
    )
  if isinstance(leaf, jax.Array) and _is_elsewhere(leaf, mesh):
    return Problem(
      f'{path}: it is stored as {_text(leaf.sharding)}, on no device of the layout on {describe(mesh)}.',
      'call reshard of the layout that the state has; the one that it is to have is `to`.',
    )
  return None


def _is_elsewhere(array: jax.Array, mesh: Any) -> bool:
  devices = set(mesh.devices.flat) if isinstance(mesh, Mesh) else array.sharding.device_set
  return array.committed and not devices & array.sharding.device_set


def check_dtypes(paths: Sequence[str], dtypes: Sequence[Any], planned: Sequence[Any]) -> None:
  """Raises `LayoutError` for arrays whose results are not of the planned dtype."""
  raise_problems(
    [
      Problem(
        f'{path}: {ours} as the result, but {theirs} in the plan.',
        'pass the dtype= of the plan, or plan the state in its own dtype.',
      )
      for path, ours, theirs in zip(paths, dtypes, planned, strict=True)
      if ours != theirs
    ]
  )


def plan_transfers(
  paths: Sequence[str],
  leaves: Sequence[Any],
  targets: Sequence[NamedSharding],
  dtypes: Sequence[Any],
  *,
  donate: bool,
  limit: int | None,
  has_names: bool,
) -> ReshardPlan:
  """The plan of a reshard. Compiles the programs of the transfers; moves nothing.

  Args:
    paths: path of each leaf of the state, for texts.
    leaves: the leaves of the state.
    targets, dtypes: the shardings and dtypes of the result.
    donate: whether to free the arrays on the way.
    limit: bytes that one device may hold; default: its free memory, where the device reports it.
    has_names: whether the state, or its plan, has names.

  Raises:
    MeshError, LayoutError: see `Layout.reshard`.
  """
  source = _held(leaves)
  shared = [leaf for leaf, target in zip(leaves, targets, strict=True) if not _is_own(leaf, target)]
  larger = max(max(_held(shared).values(), default=0), _largest(leaves, targets, dtypes))
  chunk = max(larger // _SHARE, _LEAST)
  transfers = [
    transfer_of(leaf, target, dtype, chunk)
    for leaf, target, dtype in zip(leaves, targets, dtypes, strict=True)
  ]
  jobs = sorted(enumerate(transfers), key=lambda job: _order(job[1], donate))
  peak, target = _peaks(source, leaves, jobs, donate)
  rows = tuple(_row(paths[number], transfer) for number, transfer in jobs)
  plan = ReshardPlan(
    rows,
    sum(row.wire_bytes for row in rows),
    source,
    target,
    peak,
    chunk,
    donate,
    [],
    not has_names and _becomes_replicated(leaves, targets),
    _members(leaves, targets),
    tuple(jobs),
  )
  problems = [*_unreachable(paths, leaves, targets), *_too_large(plan, limit)]
  return dataclasses.replace(plan, problems=problems)


def _is_own(leaf: Any, target: Any) -> bool:
  """Whether an array is one of this process alone, with the same values in others, which hold the result too."""
  source = getattr(leaf, 'sharding', None)
  return source is not None and source.is_fully_addressable and crosses(source, target)


def _members(leaves: Sequence[Any], targets: Sequence[Any]) -> tuple[int, ...]:
  """The processes that run a reshard together; this one alone if no others have devices of state or result."""
  sources = [getattr(leaf, 'sharding', None) for leaf in leaves if getattr(leaf, 'committed', True)]
  found = processes_of([*filter(None, sources), *targets])
  me = jax.process_index()
  return found if me in found else (me,)


def _unreachable(paths: Any, leaves: Any, targets: Any) -> list[Problem]:
  """Arrays of several processes whose slices cannot reach the processes of their results."""
  found = []
  for path, leaf, target in zip(paths, leaves, targets, strict=True):
    source = getattr(leaf, 'sharding', None)
    if crosses(source, target) and not can_cross(source, target, jnp.shape(leaf)):
      owners, wanted = (processes_of([one]) for one in (source, target))
      without = (
        named(set(wanted) - set(owners)) if set(wanted) - set(owners) else 'the processes of its result'
      )
      where = f'it is stored as {_text(source)}, on devices of {named(owners)}'
      text = f'{path}: {where}, and the slices of its result are not all on those of {without}.'
      found.append(Problem(text, _ELSEWHERE))
  return found


_ELSEWHERE = (
  "reshard from the devices' memory onto devices of the same processes, or some of them; for others, save a checkpoint, and "
  'restore it under the other layout.'
)


def _held(leaves: Sequence[Any]) -> dict[Any, int]:
  """Bytes of the distinct arrays of a state, by device."""
  held: dict[Any, int] = defaultdict(int)
  for leaf in {id(leaf): leaf for leaf in leaves}.values():
    sharding = getattr(leaf, 'sharding', None)
    if sharding is not None:
      whole = ArrayTransfer('stays', sharding, sharding, leaf.shape, leaf.dtype, leaf.dtype, None, 0)
      for device, size in whole.held().items():
        held[device] += size
  return dict(held)


def _largest(leaves: Sequence[Any], targets: Sequence[Any], dtypes: Sequence[Any]) -> int:
  """Bytes of the results on the fullest device."""
  made = [
    jax.ShapeDtypeStruct(jnp.shape(leaf), dtype, sharding=target)
    for leaf, target, dtype in zip(leaves, targets, dtypes, strict=True)
  ]
  return max(_held(made).values(), default=0)


def _becomes_replicated(leaves: Sequence[Any], targets: Sequence[NamedSharding]) -> bool:
  """Whether arrays are sharded now, and none is afterwards, on several devices."""

  def shards(leaf: Any, sharding: Any) -> bool:
    return sharding is not None and sharding.shard_shape(jnp.shape(leaf)) != jnp.shape(leaf)

  pairs = list(zip(leaves, targets, strict=True))
  return (
    any(target.num_devices > 1 for target in targets)
    and any(shards(leaf, getattr(leaf, 'sharding', None)) for leaf, _ in pairs)
    and not any(shards(leaf, target) for leaf, target in pairs)
  )


def _order(transfer: ArrayTransfer, donate: bool) -> tuple[int, int]:
  """The place of a transfer: those that free more than they take first, by what they take; then by what they free."""
  held, made = (max(each.values(), default=0) for each in (transfer.held(), transfer.made()))
  needed = made + max(transfer.staged().values(), default=0)
  return (0, needed) if donate and held >= made else (1, -held)


def _peaks(
  source: dict[Any, int], leaves: Sequence[Any], jobs: Sequence[tuple[int, ArrayTransfer]], donate: bool
) -> tuple[dict[Any, int], dict[Any, int]]:
  """The most bytes on each device at one time, and those of the results."""
  now, peak = defaultdict(int, source), defaultdict(int, source)
  target: dict[Any, int] = defaultdict(int)
  done: set[Any] = set()
  freed = _freed(leaves, jobs) if donate else [()] * len(leaves)
  transfers = dict(jobs)
  for (number, transfer), unused in zip(jobs, freed, strict=True):
    key = id(leaves[number]), transfer.target, str(transfer.after)
    reused = donate and transfer.way == 'stays'
    for device, size in () if key in done else transfer.made().items():
      target[device] += size
      now[device] += 0 if reused else size
    staged = {} if key in done else transfer.staged()
    for device in {*transfer.made(), *staged}:
      peak[device] = max(peak[device], now[device] + staged.get(device, 0))
    done.add(key)
    for each in unused:
      for device, size in transfers[each].held().items():
        now[device] -= size
  return dict(peak), dict(target)


def _freed(leaves: Sequence[Any], jobs: Sequence[tuple[int, ArrayTransfer]]) -> list[tuple[int, ...]]:
  """For each transfer, the leaves that are freed after it: no later one reads their memory, and no result has it."""
  memory = [_memory_of(leaf) for leaf in leaves]
  left = Counter(each for held in memory for each in held)
  kept = {each for number, transfer in jobs if transfer.way == 'stays' for each in memory[number]}
  waiting: dict[int, int] = {}
  freed = []
  for number, _ in jobs:
    left.subtract(memory[number])
    if not kept & memory[number]:
      waiting[id(leaves[number])] = number
    unused = [key for key, each in waiting.items() if not any(left[one] for one in memory[each])]
    freed.append(tuple(waiting.pop(key) for key in unused))
  return freed


def _memory_of(leaf: Any) -> frozenset[Any]:
  """The buffers of a leaf: arrays that JAX has made of one another may share some. Other leaves have their own."""
  is_plain = isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
  if not is_plain or not leaf.size:
    return frozenset([id(leaf)])
  return frozenset(
    (shard.device.id, shard.data.sharding.memory_kind, shard.data.unsafe_buffer_pointer())
    for shard in leaf.addressable_shards
  )


def _row(path: str, transfer: ArrayTransfer) -> ReshardRow:
  source = 'the host' if transfer.source is None else _text(transfer.source)
  made = max(transfer.made().values(), default=0)
  return ReshardRow(
    path,
    transfer.shape,
    f'{transfer.before} {source}',
    f'{transfer.after} {_text(transfer.target)}',
    transfer.way,
    transfer.wire,
    made,
  )


def _text(sharding: Any) -> str:
  memory = '' if sharding.memory_kind in (None, 'device') else f' in {sharding.memory_kind}'
  if isinstance(sharding, NamedSharding):
    return f'{sharding.spec} on {describe(sharding.mesh)}{memory}'
  return f'{plural(len(sharding.device_set), "device")}{memory}'


def _too_large(plan: ReshardPlan, limit: int | None) -> list[Problem]:
  """The problem of the device that lacks the most memory, if any does."""
  lacking = {}
  for device, peak in plan.peak_bytes.items():
    room = limit if limit is not None else _room(device, plan.source_bytes.get(device, 0))
    if room is not None and peak > room:
      lacking[device] = peak - room, room
  if not lacking:
    return []
  device = max(lacking, key=lambda each: lacking[each])
  source, target = (size.get(device, 0) for size in (plan.source_bytes, plan.target_bytes))
  largest = sorted(plan.rows, key=lambda row: -row.bytes_per_device)[:_SHOWN]
  listed = ', '.join(f'{row.path} {size_text(row.bytes_per_device)}' for row in largest)
  text = (
    f'The reshard needs {size_text(plan.peak_bytes[device])} on device {device.id}, which has '
    f'{size_text(lacking[device][1])} for it: {size_text(source)} of the state, {size_text(target)} of the result. '
    f'Largest arrays of the result: {listed}.'
  )
  freed = '' if plan.donate else 'free the state on the way with donate=True; or '
  return [
    Problem(text, f'{freed}use a mesh of more devices, rules that shard more, or a narrower dtype=.')
  ]


def _room(device: Any, source: int) -> int | None:
  """The bytes that a device has for state and result; None if it does not report them, as CPUs, or to another process."""
  is_other = device.platform == 'cpu' or device.process_index != jax.process_index()
  stats = None if is_other else device.memory_stats()
  if not stats or 'bytes_limit' not in stats:
    return None
  return stats['bytes_limit'] - stats.get('bytes_in_use', 0) + source
