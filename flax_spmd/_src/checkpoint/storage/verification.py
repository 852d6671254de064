"""Verification: compares a checkpoint's arrays and files with the checksums in its record."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from flax_spmd._src.checkpoint.storage.contents import PACKED
from flax_spmd._src.checkpoint.storage.direct_reads import CHANGED
from flax_spmd._src.checkpoint.storage.file_damage import file_damage
from flax_spmd._src.checkpoint.storage.host_shards import is_elsewhere
from flax_spmd._src.checkpoint.storage.orbax_reader import OrbaxReader
from flax_spmd._src.checkpoint.storage.possible_sizes import impossible_leaves
from flax_spmd._src.checkpoint.storage.readers import CheckpointReader
from flax_spmd._src.checkpoint.storage.record import LeafRecord, dtype_of, leaf_count
from flax_spmd._src.checkpoint.storage.safetensors_reader import Arranged, SafetensorsReader
from flax_spmd._src.data.checksums import PendingChecksums, own_checksums
from flax_spmd._src.multihost import exchange, processes_of
from flax_spmd._src.text import plural
from flax_spmd.errors import CheckpointDamagedError, CheckpointError

GROUP_BYTES = 1 << 30  # read and compared at a time
_SHOWN = 30
_NO_CHECKSUM = 'its checksum is missing'


class Damage(NamedTuple):
  """The damage of a checkpoint.

  Attributes:
    leaves: reason for each damaged leaf, by path.
    files: reason for each damaged file, by path below the checkpoint.
  """

  leaves: dict[str, str]
  files: dict[str, str]

  @property
  def names(self) -> list[str]:
    """The damaged leaves, then the damaged files."""
    return [*self.leaves, *self.files]

  def error(self, checkpoint: Any) -> CheckpointDamagedError:
    """The error that names all of it.

    Args:
      checkpoint: path of the checkpoint.
    """
    counts = [leaf_count(len(self.leaves))] if self.leaves else []
    counts += [plural(len(self.files), 'file')] if self.files else []
    lines = [f'{name}: {reason}' for name, reason in (self.leaves | self.files).items()]
    more = len(lines) - _SHOWN
    return CheckpointDamagedError(
      '\n'.join(
        [
          f'Checkpoint {checkpoint} is damaged in {" and ".join(counts)}:',
          *lines[:_SHOWN],
          *([f'and {more} more'] if more > 0 else []),
          'Fix: restore another checkpoint, or the undamaged leaves of this one with salvage=True.',
        ]
      )
    )


class _LeafCheck:
  """The comparison of leaves that have been read with their records. Every process makes one.

  Args:
    reader, requests, verify: see `read_verified`. Of leaves without a sharding, and of those on devices of one process,
      each process compares its own copy.
    leaves: leaves that have been read, by path.
  """

  def __init__(
    self, reader: CheckpointReader, requests: Mapping[str, Any], leaves: Mapping[str, Any], verify: bool
  ):
    records = reader.record.leaves
    self._wrong = {
      path: f'{leaf.dtype}{list(leaf.shape)} is stored in its place'
      for path, leaf in leaves.items()
      if hasattr(leaf, 'shape')
      and tuple(leaf.shape) != records[path].shape  # Orbax returns numpy arrays as they are stored
    }
    self._leaves = leaves
    alike = [path for path in leaves if path not in self._wrong] if verify else []
    self._recorded = {path: text for path in alike if (text := records[path].checksum) is not None}
    if any(leaf.checksum for leaf in records.values()):  # else another library wrote it
      self._wrong |= {path: _NO_CHECKSUM for path in alike if path not in self._recorded}
    is_whole = {path: _is_of_one_process(requests[path].sharding) for path in self._recorded}
    self._whole = [path for path in is_whole if is_whole[path]]
    self._here = [path for path in self._whole if not is_elsewhere(requests[path].sharding)]
    self._shared = [path for path in is_whole if not is_whole[path]]
    self._of_here = self._pending(self._here, None)
    self._of_shared = self._pending(self._shared, 'sums')

  def _pending(self, paths: Sequence[str], topic: str | None) -> PendingChecksums:
    likes = [self._recorded[path] for path in paths]
    return PendingChecksums([self._leaves[path] for path in paths], topic, likes)

  def result(self) -> tuple[dict[str, Any], dict[str, str]]:
    """The leaves that are as recorded, and the reason for each other one. Every process calls this."""
    changed = self._changed(self._here, self._of_here)
    changed = over_processes('whole', changed) if self._whole else changed
    wrong = self._wrong | changed | self._changed(self._shared, self._of_shared)
    return {path: leaf for path, leaf in self._leaves.items() if path not in wrong}, wrong

  def _changed(self, paths: Sequence[str], pending: PendingChecksums) -> dict[str, str]:
    totals = zip(paths, pending.complete(), strict=True)
    return {path: CHANGED for path, total in totals if total != self._recorded[path]}


@functools.lru_cache(maxsize=1024)
def _is_of_one_process(sharding: Any) -> bool:
  """Whether a process that has any of an array has all of it."""
  return sharding is None or len(processes_of([sharding])) == 1


def read_verified(
  reader: CheckpointReader,
  requests: Mapping[str, Any],
  *,
  verify: bool = True,
  memory: int | None = None,
  lost: Collection[str] = (),
) -> tuple[dict[str, Any], Damage]:
  """Reads leaves, and everything that is wrong with them. Every process calls this.

  If all leaves are requested, every file is compared with its checksum; otherwise those that describe the
  arrays are. The processes of a job share the files.

  Args:
    reader: checkpoint to read.
    requests: see `CheckpointReader.read`.
    verify: whether to compare checksums.
    memory: most bytes in flight from storage.
    lost: leaves that are not requested since they are known to be damaged.

  Returns:
    The undamaged leaves by path, and the damage that is found.
  """
  records = reader.record.leaves
  everything = all(path in requests or path in lost or leaf.is_number for path, leaf in records.items())
  with ThreadPoolExecutor(1) as thread:
    files = thread.submit(_file_damage, reader, everything, jax.process_count()) if verify else None
    whole, damage = _whole_and_damage(reader, requests, memory, verify, everything)
  wrong = files.result() if files is not None else {}
  return whole, damage._replace(files=damage.files | over_processes('files', wrong))


def read_arranged(
  reader: SafetensorsReader, requests: Mapping[str, Arranged], memory: int | None
) -> dict[str, Any]:
  """Reads arrays that are made of saved ones; none of them if any process cannot. Every process calls this."""
  failure: dict[str, str] = {}
  results: dict[str, Any] = {}
  try:
    results = reader.read_arranged(requests, memory) if requests else {}
  except CheckpointDamagedError as error:
    failure = {'reason': str(error)}
  return {} if over_processes('arranged', failure) else results


def _whole_and_damage(
  reader: CheckpointReader,
  requests: Mapping[str, Any],
  memory: int | None,
  verify: bool,
  everything: bool,
) -> tuple[dict[str, Any], Damage]:
  """The leaves that are whole, and the damage of the others.

  A leaf that Orbax cannot read, or reads with another content, is read again without Orbax's description. Format 1
  has no checksums of files; there, the whole folder is reported for what Orbax cannot read.

  Args:
    reader, requests, memory, verify: see `read_verified`.
    everything: whether arrays that the record lacks are damage, too. Orbax then refuses the record.
  """
  leaves, lost, wrong = _read_and_compared(reader, requests, memory, verify)
  if not (isinstance(reader, OrbaxReader) and reader.has_own_record and (lost or wrong)):
    return leaves, Damage(lost | wrong, {})
  files = {} if reader.files else dict.fromkeys([reader.folder.name], next(iter(lost.values()), CHANGED))
  unrecorded = reader.unrecorded() if everything and lost else {}
  found, lost = reader.read_directly({path: requests[path] for path in lost | wrong}, memory)
  lost |= {path: each.reason for path, each in unrecorded.items()}
  lost = over_processes('directly', lost)
  found = {path: leaf for path, leaf in found.items() if path not in lost}
  found, wrong = _LeafCheck(reader, requests, found, verify).result()
  lost |= over_processes('misfits', _of_misfits(reader, requests, verify, everything))
  return {p: leaf for p, leaf in (leaves | found).items() if p not in lost}, Damage(lost | wrong, files)


def _read_and_compared(
  reader: CheckpointReader, requests: Mapping[str, Any], memory: int | None, verify: bool
) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
  """The leaves that are as recorded; the reasons for those that cannot be read, and for those that differ."""
  leaves, lost = _read_what_can_be(reader, requests, memory)
  _check_width(reader, leaves)
  whole, wrong = _LeafCheck(reader, requests, leaves, verify).result()
  return whole, lost, wrong


def _of_misfits(
  reader: OrbaxReader, requests: Mapping[str, Any], verify: bool, everything: bool
) -> dict[str, str]:
  """The damage of packed arrays that their leaves do not fill, beside that of leaves whose checksum differs.

  Without a comparison of checksums, all leaves of such an array are uncertain. If all are whole, another is missing.
  """
  records = reader.record.leaves
  reason = 'its leaves do not fill the packed array that they are in'
  found: dict[str, str] = {}
  for name in sorted(reader.misfits()):
    inside = [path for path, leaf in records.items() if leaf.packed and leaf.packed[0] == name]
    if not verify:
      found |= {path: reason for path in inside if path in requests}
    elif everything and not reader.contradictions().keys() & set(inside):
      found[f'{PACKED}/{name}'] = 'the leaves of the record do not fill it'
  return found


def wrong_numbers(reader: CheckpointReader, paths: Iterable[str]) -> dict[str, str]:
  """The reason for each Python number of another checksum. Their values are in the record itself.

  Args:
    reader: checkpoint that is read.
    paths: paths of leaves; arrays are skipped.
  """
  records = reader.record.leaves
  numbers = [path for path in paths if records[path].value is not None and records[path].checksum]
  recorded = [records[path].checksum or '' for path in numbers]
  totals = own_checksums([records[path].value for path in numbers], recorded)
  return {p: CHANGED for p, one, two in zip(numbers, totals, recorded, strict=True) if one != two}


def _check_width(reader: CheckpointReader, leaves: Mapping[str, Any]) -> None:
  """Raises if arrays of 64 bits were narrowed: `jax.enable_x64` applies to one thread, and others read."""
  records = reader.record.leaves
  narrow = [
    f'{path}: {records[path].dtype} became {leaf.dtype}.'
    for path, leaf in leaves.items()
    if records[path].dtype.endswith('64') and str(leaf.dtype) == records[path].dtype[:-2] + '32'
  ]
  if narrow:
    raise CheckpointError(
      f'Checkpoint {reader.path} was read with 64 bits disabled:\n'
      + '\n'.join(narrow)
      + '\nFix: enable them for all threads, with jax.config.update("jax_enable_x64", True).'
    )


def _file_damage(reader: CheckpointReader, contents: bool, parts: int) -> dict[str, str]:
  if not isinstance(reader, OrbaxReader):
    return {}
  part = jax.process_index() if parts > 1 else 0
  wrong = file_damage(reader.folder, reader.files, contents=contents, part=part, parts=parts)
  return {f'{reader.folder.name}/{name}': text for name, text in wrong.items()}


def _read_what_can_be(
  reader: CheckpointReader, requests: Mapping[str, Any], memory: int | None
) -> tuple[dict[str, Any], dict[str, str]]:
  """The leaves that every process can read, and the reasons for the others. It halves what fails."""
  failure: dict[str, str] = {}
  leaves: dict[str, Any] = {}
  try:
    leaves = reader.read(requests, memory)
  except CheckpointDamagedError as error:
    failure = {'reason': str(error).partition('\n')[0]}
  failure = over_processes('read', failure)
  if not failure:
    return leaves, {}
  del leaves
  paths = list(requests)
  if isinstance(reader, OrbaxReader) and reader.has_own_record:
    return {}, dict.fromkeys(paths, failure['reason'])  # each can be read on its own, without Orbax
  if len(paths) == 1:
    return {}, {paths[0]: failure['reason'].partition(' cannot be read: ')[2] or failure['reason']}
  whole: dict[str, Any] = {}
  unread: dict[str, str] = {}
  for half in (paths[: len(paths) // 2], paths[len(paths) // 2 :]):
    read, failed = _read_what_can_be(reader, {path: requests[path] for path in half}, memory)
    whole |= read
    unread |= failed
  return whole, unread


def over_processes(topic: str, texts: dict[str, str]) -> dict[str, str]:
  """The texts of all processes, by name."""
  if jax.process_count() == 1:
    return texts
  together: dict[str, str] = {}
  for _, received in exchange(f'verified {topic}', json.dumps(texts)):
    together |= json.loads(received)
  return dict(sorted(together.items()))


def verify(reader: CheckpointReader) -> Damage:
  """The damage of a whole checkpoint, read about 1 GiB at a time. Every process calls this, and reads all of it."""
  lost = over_processes('impossible', impossible_leaves(reader.path, reader.record.leaves))
  possible = {path: leaf for path, leaf in reader.record.leaves.items() if path not in lost}
  damage = Damage(lost | wrong_numbers(reader, possible), _file_damage(reader, True, 1))
  for group in groups(possible, GROUP_BYTES):
    requests = {
      path: jax.ShapeDtypeStruct(leaf.shape, dtype_of(leaf.dtype)) for path, leaf in group.items()
    }
    _, found = _whole_and_damage(reader, requests, None, verify=True, everything=True)
    damage.leaves.update(found.leaves)
    damage.files.update(found.files)
  return damage


def groups(leaves: Mapping[str, LeafRecord], most: int) -> Iterator[dict[str, LeafRecord]]:
  """Splits leaves into groups that end where they exceed a number of bytes; Python numbers are skipped.

  All packed leaves are in the first group, since the arrays that they are in are read as a whole.
  """
  group: dict[str, LeafRecord] = {}
  size = 0
  for path, leaf in sorted(leaves.items(), key=lambda each: each[1].packed is None):
    if leaf.is_number:
      continue
    if size > most and leaf.packed is None:
      yield group
      group, size = {}, 0
    group[path] = leaf
    size += leaf.bytes
  if group:
    yield group
