"""Agreement between processes: the text of a pipeline, compared before anything is compiled.

Each process compiles the programs of its own ranks only, and uses the values that these read. So nothing in JAX notices
that two processes have other schedules, which wait for each other's transfers, other learning rates, which are part of
the programs, or other initial parameters.

The text has a line per setting, argument, task and operation. It is equal for equal pipelines: it has no
addresses and no source lines. The digests of the texts are exchanged, and the texts only if they differ.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.data.common_values import CommonPiece, common_shards, value_parts, value_problems
from flax_spmd._src.joint_call import JointCall
from flax_spmd._src.multihost import (
  differ,
  differing_parts,
  exchange,
  named,
  ranges,
  text_problems,
)
from flax_spmd._src.pipeline.argument_checks import argument_text, named_arguments
from flax_spmd._src.pipeline.cut.equations import Constant
from flax_spmd._src.pipeline.run.call_list import Call, CallList
from flax_spmd._src.pipeline.run.request import Request, Setting
from flax_spmd._src.pipeline.run.stage_lowering import LoweredStages
from flax_spmd._src.pipeline.schedules.schedule import Schedule
from flax_spmd._src.rules.table import layout_lines
from flax_spmd._src.text import without_addresses
from flax_spmd._src.versions import installed_version
from flax_spmd.errors import PipelineError, raise_problems

_SAME_ARRAYS = 'close over equal arrays on every process, or pass them as arguments.'
_SAME_CREATED = 'pass create equal keys and arrays on every process.'
_SAME_ARGUMENTS = 'pass the same batch and state on every process; layout.local_to_global joins the batches of several processes.'
_SAME_ORDER = 'call pipelines in the same order on every process.'
_ELEMENTS = re.compile(r'(?<=dense<)[^>]{80,}')  # of an array in a program


def check_same_pipeline(
  setting: Setting, parts: Sequence[Iterable[str]], arrays: Sequence[tuple[str, Any]]
) -> None:
  """Raises on every process of the mesh unless all have the same pipeline.

  Args:
    setting: the settings of the pipeline.
    parts: the lines of its text, in parts, read only where several processes compare: the first one that differs is
      reported.
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
  if len(members) > 1:
    texts = {str(number): '\n'.join([setting.name, *part]) for number, part in enumerate(parts)}
    pieces = [piece for name, array in arrays for piece in _pieces(name, array, members)]
    _compare('pipeline', members, texts, pieces, _SAME_ARRAYS)


def _compare(
  topic: str, members: tuple[int, ...], texts: Mapping[str, str], pieces: Iterable[CommonPiece], fix: str
) -> None:
  """Raises on every process unless texts and values are equal; reports the first text that differs, or all values."""
  differing = differing_parts(topic, {**texts, **value_parts(pieces)}, members)
  first = next((differing[name] for name in texts if name in differing), ())
  raise_problems(text_problems(first) or value_problems(differing, fix))


_latest: dict[tuple[int, ...], str] = {}
"""The pipeline whose step has begun last, by the processes of a pipeline, or those that two pipelines have in common."""


def check_same_order(setting: Setting, pipeline: str) -> None:
  """Raises on every process of the mesh unless all call this pipeline next.

  The processes compare its name where one of them has called another one before. In a step of the same pipeline as before
  there is nothing to compare, and no request. A process that repeats a step while another one changes to a second
  pipeline waits in its first transfer, and finds that the other one waits here.

  Raises:
    LayoutError: the pipelines that the processes call.
  """
  members = setting.processes
  known = {*_latest, members}
  groups = {tuple(each for each in members if each in others) for others in known}
  for group in sorted(groups):
    if len(group) > 1 and _latest.get(group) != pipeline:
      call = JointCall(f'pipeline order of {ranges(group)}', f'The change to {pipeline}', None, group)
      with call.entered():
        found = exchange('order', pipeline, group, fix=_SAME_ORDER, timeout=setting.timeout)
      raise_problems(
        differ('The next pipeline', {each: text for group, text in found for each in group}, _SAME_ORDER)
      )
      call.forget_earlier()
      _latest[group] = pipeline


def check_same_arguments(
  setting: Setting, leaves: Sequence[tuple[str, Any]], holders: Sequence[Collection[int]]
) -> None:
  """Raises on every process unless all pass the same array, or equal values.

  Arrays with a `NamedSharding` have to be on the same devices in all processes: an array on devices of one process
  is known to no other, which would wait for it. Of these, the shards that several processes have are compared.

  Args:
    setting: the settings of the pipeline.
    leaves: the arguments, with their paths.
    holders: per argument, the processes that have to pass the same value.

  Raises:
    LayoutError: the paths, devices, values or digests that differ, and the processes.
  """
  pieces = []
  for (name, leaf), each in zip(leaves, holders, strict=True):
    subject = f'argument {name} ({jax.typeof(leaf).str_short()})'
    if isinstance(getattr(leaf, 'sharding', None), NamedSharding):
      devices = _devices_text(leaf.sharding.mesh)
      pieces.append(CommonPiece(f'the devices of {subject}', (), setting.processes, devices))
      each = () if leaf.is_fully_addressable else each  # then no other process has a shard
    pieces += _pieces(subject, leaf, each)
  _compare('arguments', setting.processes, {}, pieces, _SAME_ARGUMENTS)


def check_same_state(
  setting: Setting, arrays: Sequence[tuple[str, Any]], programs: Iterable[tuple[str, Any]]
) -> None:
  """Raises LayoutError on every process unless all create a state by the same programs from equal arrays.

  Args:
    setting: the settings of the pipeline.
    arrays: the arguments of the function that creates it, with their paths.
    programs: the lowered programs, with a name each.
  """
  members = setting.processes
  lines = [line for name, lowered in programs for line in _operations(name, lowered)]
  text = '\n'.join([f'the state of {setting.name}', *lines])
  pieces = [
    piece
    for name, array in arrays
    for piece in _pieces(f'argument {name} of create ({jax.typeof(array).str_short()})', array, members)
  ]
  _compare('state', members, {'text': text}, pieces, _SAME_CREATED)


def _pieces(name: str, array: Any, holders: Iterable[int]) -> Iterator[CommonPiece]:
  """What this process has of an array in common with others, of those that have to have the same value."""
  if getattr(array, 'is_fully_addressable', True):
    whole = CommonPiece(name, (), tuple(sorted(holders)), array)
    yield from [whole] if len(whole.holders) > 1 and jax.process_index() in whole.holders else ()
    return
  for shard in common_shards(array.sharding, array.shape):
    common = tuple(sorted({*shard.holders} & {*holders}))
    if len(common) > 1 and jax.process_index() in common:
      yield CommonPiece(name, shard.bounds, common, array.addressable_data(shard.position))


@functools.lru_cache(maxsize=256)
def _devices_text(mesh: Mesh) -> str:
  return ranges(sorted(device.id for device in mesh.devices.flat))


def setting_lines(setting: Setting, schedule: Schedule | None, microbatches: int) -> Iterator[str]:
  """The layout, the devices of each rank, the schedule and the microbatches."""
  yield ', '.join(f'{name} {installed_version(name)}' for name in ('flax-spmd', 'jax', 'jaxlib'))
  yield f'jax_threefry_partitionable {compat.threefry_partitionable()}'
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
  for (name, text), gone in zip(
    named_arguments(jax.tree.unflatten(request.treedef, texts)), donated, strict=True
  ):
    yield f'argument {name}: {text}{", donated" if gone else ""}'
  for number, spec in enumerate(planned):
    if spec is not None:
      yield f'result {number}: {spec}'


def task_lines(call_list: CallList) -> Iterator[str]:
  """The tasks of each rank, and all transfers, in order: measured costs decide about it, too."""
  counts: dict[int | None, int] = defaultdict(int)
  for one in call_list.calls:
    rank = one.program.rank if isinstance(one, Call) else None
    kind, of = ('transfer', '') if rank is None else ('task', f' of rank {rank}')
    yield f'{kind} {counts[rank]}{of}: {one}'
    counts[rank] += 1


def program_lines(stages: LoweredStages) -> Iterator[str]:
  """The operations of all programs as JAX lowered them, then their signatures; large arrays as digests."""
  with compat.shardy():
    lines = [
      line
      for program, stage in stages.lower()
      for line in _operations(f'{program.name} of rank {program.rank}', stage.lowered)
    ]
  yield from sorted(lines, key=lambda line: 'func.func' in line)


def _operations(name: str, lowered: Any) -> Iterator[str]:
  """The lines of a lowered program, each after its name."""
  for line in lowered.as_text().splitlines():
    text = _ELEMENTS.sub(lambda elements: f'digest {_text_digest(elements[0])}', line.strip())
    yield f'{name}: {text}'


def callback_lines(jaxpr: Any) -> Iterator[str]:
  """The Python functions whose results a program uses: their names, and digests of their bytecode.

  Functions that return nothing, such as those of `jax.debug.callback`, may differ.
  """
  for number, (primitive, function) in enumerate(compat.callbacks_in(jaxpr)):
    while isinstance(function, functools.partial):
      function = function.func
    function = getattr(function, '__func__', function)
    name = getattr(function, '__qualname__', type(function).__qualname__)
    code = getattr(function, '__code__', None)
    digest = '' if code is None else f', bytecode {_text_digest(_code_text(code))}'
    yield f'{primitive} {number}: {name}{digest}'


def _code_text(code: CodeType) -> str:
  """The bytecode of a function and of the functions in it, with their names and constants."""
  constants = [
    _code_text(one)
    if isinstance(one, CodeType)
    else repr(sorted(map(repr, one)) if isinstance(one, frozenset) else one)
    for one in code.co_consts
  ]
  return f'{code.co_code.hex()} {code.co_names} {constants}'


def _text_digest(text: str) -> str:
  return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


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
  ]
