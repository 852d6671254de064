"""Agreement between processes: the text of a pipeline, compared before anything is compiled.

Each process compiles the programs of its own ranks only. So nothing in JAX notices that two processes have
other schedules, which wait for each other's transfers, or other learning rates, which are part of the programs.

The text has a line per setting, argument, task and operation. It is equal for equal pipelines: it has no
addresses and no source lines. The digests of the texts are exchanged, and the texts only if they differ.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.data.common_values import CommonPiece, value_parts, value_problems
from flax_spmd._src.multihost import CALLS, TIMEOUT, differing_parts, named, ranges, text_problems
from flax_spmd._src.pipeline.argument_checks import argument_text, named_arguments
from flax_spmd._src.pipeline.cut.equations import Constant
from flax_spmd._src.pipeline.run.call_list import Call, CallList
from flax_spmd._src.pipeline.run.call_text import send_text
from flax_spmd._src.pipeline.run.request import Request, Setting
from flax_spmd._src.pipeline.run.stage_lowering import LoweredStages
from flax_spmd._src.pipeline.schedules.schedule import Schedule
from flax_spmd._src.rules.table import layout_lines
from flax_spmd._src.text import without_addresses
from flax_spmd.errors import PipelineError, raise_problems

_SAME_ARRAYS = 'close over equal arrays on every process, or pass them as arguments.'
_SAME_ARGUMENTS = 'pass the same batch and state on every process; layout.local_to_global joins the batches of several processes.'
_ELEMENTS = re.compile(r'(?<=dense<)[^>]{80,}')  # of an array in a program


def check_same_pipeline(
  setting: Setting, parts: Sequence[Iterable[str]], arrays: Sequence[tuple[str, Any]]
) -> None:
  """Raises on every process of the mesh unless all have the same pipeline.

  Args:
    setting: the settings of the pipeline.
    parts: the lines of its text, in parts: the first one that differs is reported.
    arrays: the closed-over arrays, with their names.

  Raises:
    LayoutError: pipelines or arrays differ (the message has the first lines that do, and the processes).
    PipelineError: this process has no devices of the mesh.
  """
  members = setting.processes
  if jax.process_index() not in members:
    raise PipelineError(
      f'Process {jax.process_index()} compiles {setting.name}, and its mesh has devices of '
      f'{named(members)} only.\nFix: call it on these processes only.'
    )
  if len(members) == 1:
    return
  texts = {str(number): '\n'.join([setting.name, *part]) for number, part in enumerate(parts)}
  pieces = [CommonPiece(name, (), members, array) for name, array in arrays]
  differing = differing_parts('pipeline', members, texts | value_parts(pieces), CALLS, TIMEOUT)
  first = next((differing[name] for name in texts if name in differing), ())
  raise_problems(text_problems(first) or value_problems(differing, _SAME_ARRAYS))


def check_same_arguments(
  setting: Setting, leaves: Sequence[tuple[str, Any]], users: Sequence[Iterable[int]]
) -> None:
  """Raises on every process unless all pass the same array, or those that use an argument equal values for it.

  Arrays with a `NamedSharding` have to be on the same devices in all processes: an array on devices of one process
  is known to no other, which would wait for it. The values of other ones are compared, unless one process uses them.

  Args:
    setting: the settings of the pipeline.
    leaves: the arguments, with their paths.
    users: per argument, the processes whose ranks use it.

  Raises:
    LayoutError: the paths, devices, values or digests that differ, and the processes.
  """
  pieces = []
  for (name, leaf), each in zip(leaves, map(set, users), strict=True):
    subject = f'argument {name} ({jax.typeof(leaf).str_short()})'
    if isinstance(getattr(leaf, 'sharding', None), NamedSharding):
      devices = _devices_text(leaf.sharding.mesh)
      pieces.append(CommonPiece(f'the devices of {subject}', (), setting.processes, devices))
    elif len(each) > 1 and jax.process_index() in each and getattr(leaf, 'is_fully_addressable', True):
      pieces.append(CommonPiece(subject, (), tuple(sorted(each)), leaf))
  differing = differing_parts('arguments', setting.processes, value_parts(pieces), CALLS, TIMEOUT)
  raise_problems(value_problems(differing, _SAME_ARGUMENTS))


@functools.lru_cache(maxsize=256)
def _devices_text(mesh: Mesh) -> str:
  return ranges(sorted(device.id for device in mesh.devices.flat))


def setting_lines(setting: Setting, schedule: Schedule | None, microbatches: int) -> Iterator[str]:
  """The layout, the devices of each rank, the schedule and the microbatches."""
  yield f'jaxlib {importlib.metadata.version("jaxlib")}, jax_threefry_partitionable {compat.threefry_partitionable()}'
  yield f'jax_cross_host_transfer_socket_address {"set" if compat.copies_across_processes() else "not set"}'
  yield from layout_lines(setting.mesh, setting.rules)
  for rank, mesh in enumerate(setting.ranks):
    devices = [device.id for device in mesh.devices.flat] if isinstance(mesh, Mesh) else []
    yield f'rank {rank} of axis {setting.axis}: devices {devices}'
  yield f'schedule {without_addresses(repr(schedule))}'
  yield f'microbatches {microbatches}'


def argument_lines(
  request: Request, donated: Sequence[bool], planned: Sequence[PartitionSpec | None]
) -> Iterator[str]:
  """The arguments and the specs of the results."""
  texts = map(argument_text, request.avals, request.specs)
  for (name, text), gone in zip(named_arguments(request.treedef.unflatten(texts)), donated, strict=True):
    yield f'argument {name}: {text}{", donated" if gone else ""}'
  for number, spec in enumerate(planned):
    if spec is not None:
      yield f'result {number}: {spec}'


def task_lines(call_list: CallList) -> Iterator[str]:
  """The tasks of each rank, and all transfers, in order: measured costs decide about it, too."""
  counts: dict[int | None, int] = defaultdict(int)
  for one in call_list.calls:
    rank = one.program.rank if isinstance(one, Call) else None
    if isinstance(one, Call):
      yield f'task {counts[rank]} of rank {rank}: {one}'
    else:
      yield f'transfer {counts[rank]}: {send_text(one)}'
    counts[rank] += 1


def program_lines(stages: LoweredStages) -> list[str]:
  """The operations of all programs as JAX lowered them, then their signatures; large arrays as digests."""
  with compat.shardy():
    lines = [
      f'{program.name} of rank {program.rank}: {_ELEMENTS.sub(_digest, line.strip())}'
      for program, stage in stages.lower()
      for line in stage.lowered.as_text().splitlines()
    ]
  return sorted(lines, key=lambda line: 'func.func' in line)


def _digest(elements: re.Match[str]) -> str:
  return f'digest {hashlib.blake2b(elements[0].encode(), digest_size=8).hexdigest()}'


def closed_over(call_list: CallList) -> list[tuple[str, Any]]:
  """The closed-over arrays of the programs, with a name each."""
  constants = dict.fromkeys(
    (program.name, value)
    for program in call_list.first_calls
    for value in program.inputs
    if isinstance(value, Constant)
  )
  return [
    (f'closed-over array {number} of {name} ({value.aval.str_short()})', value.array)
    for number, (name, value) in enumerate(constants)
    if getattr(value.array, 'is_fully_addressable', True)
  ]
