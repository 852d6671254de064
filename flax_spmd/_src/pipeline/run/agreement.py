"""Agreement between processes: the text of a pipeline, compared before anything is compiled.

Each process compiles the programs of its own ranks only. So nothing in JAX notices that two processes have
other schedules, which wait for each other's transfers, or other learning rates, which are part of the programs.

The text has a line per setting, argument, task and operation. It is equal for equal pipelines: it has no
addresses, no source lines and no order of sets. The digests of the texts are exchanged, and the texts only
if they differ.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.data.common_values import CommonPiece, value_parts, value_problems
from flax_spmd._src.data.digests import digests
from flax_spmd._src.data.words import array_of
from flax_spmd._src.multihost import CALLS, TIMEOUT, differing_parts, named, ranges, text_problems
from flax_spmd._src.pipeline.argument_checks import argument_text, named_arguments
from flax_spmd._src.pipeline.cut import equations as eq
from flax_spmd._src.pipeline.cut.equations import Constant, Equation, Value
from flax_spmd._src.pipeline.run.call_list import Call, CallList, StageProgram
from flax_spmd._src.pipeline.run.call_text import send_text
from flax_spmd._src.pipeline.run.request import Request, Setting
from flax_spmd._src.pipeline.schedules.schedule import Schedule
from flax_spmd._src.rules.table import layout_lines
from flax_spmd._src.text import without_addresses
from flax_spmd.errors import PipelineError, raise_problems

_SAME_ARRAYS = 'close over equal arrays on every process, or pass them as arguments.'
_SAME_ARGUMENTS = 'pass the same batch and state on every process; layout.local_to_global joins the batches of several processes.'
_SHOWN = 4  # elements of an array that a line shows as they are


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
  yield f'jaxlib {compat.jaxlib_version()}, jax_threefry_partitionable {compat.threefry_partitionable()}'
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


def program_lines(call_list: CallList) -> Iterator[str]:
  """The operations of each program."""
  numbers: dict[Value, int] = {}
  for program in _programs(call_list):
    yield f'program {program.name} of rank {program.rank}: {_names(program.inputs, numbers)}'
    for number, one in enumerate(program.equations):
      yield f'operation {number} of {program.name}: {_equation_text(one, numbers)}'
    yield f'results of {program.name}: {_names(program.outputs, numbers)}'


def closed_over(call_list: CallList) -> list[tuple[str, Any]]:
  """The closed-over arrays of the programs, with a name each."""
  constants = dict.fromkeys(
    (program.name, value)
    for program in _programs(call_list)
    for value in program.inputs
    if isinstance(value, Constant)
  )
  return [
    (f'closed-over array {number} of {name} ({value.aval.str_short()})', value.array)
    for number, (name, value) in enumerate(constants)
    if getattr(value.array, 'is_fully_addressable', True)
  ]


def _programs(call_list: CallList) -> list[StageProgram]:
  return list(dict.fromkeys(one.program for one in call_list.calls if isinstance(one, Call)))


def _names(values: Iterable[Value], numbers: dict[Value, int]) -> str:
  return ', '.join(
    f'%{numbers.setdefault(value, len(numbers))} {value.aval.str_short()}' for value in values
  )


def _equation_text(equation: Equation, numbers: dict[Value, int]) -> str:
  """An operation: its name, parameters, operands and results."""
  operands = ', '.join(
    _names([atom], numbers) if isinstance(atom, Value) else _literal_text(atom)
    for atom in equation.inputs
  )
  params = _params_text(equation.params)
  return f'{equation.name}{params} {operands} -> {_names(equation.outputs, numbers)}'


def _params_text(params: Mapping[str, Any]) -> str:
  """The parameters that have a value, in brackets; not the number of a mark, which counts the marks before."""
  skipped = {'number'} if 'direction' in params else ()
  texts = [
    f'{key}={_param_text(value)}'
    for key, value in params.items()
    if value is not None and key not in skipped
  ]
  return f'[{", ".join(texts)}]' if texts else ''


def _param_text(param: Any) -> str:
  """A parameter, without addresses and with sets in order."""
  if compat.is_jaxpr(param):
    return _jaxpr_text(param)
  if isinstance(param, (list, tuple)):
    return f'({", ".join(map(_param_text, param))})'
  if isinstance(param, (set, frozenset)):
    return f'{{{", ".join(sorted(map(_param_text, param)))}}}'
  if isinstance(param, Mapping):
    return (
      f'{{{", ".join(f"{_param_text(key)}: {_param_text(value)}" for key, value in param.items())}}}'
    )
  if isinstance(param, (np.ndarray, jax.Array)):
    return _array_text(param)
  if callable(param):
    return getattr(param, '__qualname__', type(param).__qualname__)
  text = without_addresses(repr(param))
  return ' '.join(sorted(re.findall(r'[\w.]+', text))) if '{' in text else text  # may have a set inside


def _jaxpr_text(jaxpr: Any) -> str:
  """A jaxpr within a parameter, in one line."""
  inputs = [Value(variable.aval) for variable in compat.jaxpr_parts(jaxpr).inputs]
  equations, outputs = eq.flatten(jaxpr, inputs, lambda _: False)
  read = dict.fromkeys([*eq.free_values(equations), *outputs])
  constants = [value for value in read if isinstance(value, Constant)]
  numbers: dict[Value, int] = {}
  head = f'{_names(inputs, numbers)}; {_names(constants, numbers)} = '
  head += ', '.join(_array_text(one.array) for one in constants)
  operations = '; '.join(_equation_text(one, numbers) for one in equations)
  return f'{{{head}: {operations}: {_names(outputs, numbers)}}}'


def _literal_text(literal: Any) -> str:
  return f'{_array_text(literal.val)} {literal.aval.str_short()}'


def _array_text(value: Any) -> str:
  """A number, a small array, or the digest of a large one."""
  if not getattr(value, 'is_fully_addressable', True):
    return str(jax.typeof(value))
  array = np.asarray(array_of(value))
  if array.size > _SHOWN:
    return f'digest {digests([array])[0]}'
  texts = list(map(str, array.flat))  # the shortest that are exact
  return ' '.join(texts) if array.ndim else texts[0]
