"""Hardware: chips, and targets that consist of a number of them.

    parse_target('h100:64')      # 64 GPUs, 8 per node
    parse_target('v5e:16x16')    # a torus of 256 chips

`hardware.toml` has the figures of each chip, with their sources.
"""

from __future__ import annotations

import functools
import importlib.resources
import itertools
import math
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from flax_spmd._src.mesh import within_slice
from flax_spmd._src.public import public
from flax_spmd._src.text import plural, value_text
from flax_spmd.errors import TargetDeviceError, did_you_mean

_SPREAD = (0.8, 1.3)  # of chips without published step times


@public('flax_spmd.explore')
class Chip(NamedTuple):
  """A kind of chip. Its figures are those of one device.

  Attributes:
    name: name in targets, such as `h100`.
    platform: `tpu`, `cuda`, `rocm` or `cpu`.
    memory: bytes that a program can use.
    bandwidth: bytes per second to and from the memory.
    link: bytes per second that a chip sends: on a TPU along one axis of its torus (both ways around the
      ring), on a GPU to the others of its node.
    network: bytes per second that a chip sends to other nodes (GPU) or slices (TPU).
    per_node: number of devices in a node. Of `gb200` and `gb300` a rack is one node, with one NVLink domain.
    efficiency: share of the peak that the products of a step reach, those of attention included.
    hop: seconds until the first byte of a transfer arrives.
    flops: dense peak FLOP/s per dtype of the operands.
    source: sources of the figures.
    torus: number of axes of a TPU's torus; 0 for other chips.
    compiler: entry of `gpus.toml` that describes a GPU to XLA. Default: `name`. `'none'`: nothing compiles for the chip
      without one, so it has estimates only.
    cores: devices of a chip: 2 of `tpu7x`, whose halves are devices of their own.
    host: bytes per second from the host's memory, and as many to it. Default: that of PCIe 3.0 x16.
    pace: measured over expected time of steps; `calibrate` sets it.
    spread: ends of time brackets, as factors on the expected time.

  Example:
    >>> h100 = chips()['h100']
    >>> h100.memory // 2**30, h100.per_node  # GiB, GPUs
    (79, 8)
  """

  name: str
  platform: str
  memory: int
  bandwidth: float
  link: float
  network: float
  per_node: int
  efficiency: float
  hop: float
  flops: Mapping[str, float]
  source: str
  torus: int = 0
  compiler: str | None = None
  cores: int = 1
  host: float = 1.6e10
  pace: float = 1.0
  spread: tuple[float, ...] = _SPREAD


@public('flax_spmd.explore')
class Target(NamedTuple):
  """A number of chips that run one job.

  Attributes:
    text: text that the target was parsed from.
    chip: kind of chip.
    topology: for TPUs, chips along each axis of a slice's torus; otherwise (nodes, chips per node).
    slices: number of such slices of TPUs, which a network connects; 1 for other chips.

  Example:
    >>> target = parse_target('h100:16')
    >>> target.text, target.chip.name, target.topology, target.devices
    ('h100:16', 'h100', (2, 8), 16)
    >>> target = parse_target('2xv5e:4x4')
    >>> target.slices, target.devices, target.per_node
    (2, 32, 16)
  """

  text: str
  chip: Chip
  topology: tuple[int, ...]
  slices: int = 1

  @property
  def devices(self) -> int:
    """Number of devices: of chips, times the devices of a chip."""
    return self.slices * math.prod(self.topology) * self.chip.cores

  @property
  def per_node(self) -> int:
    """Number of devices with fast links to each other: those of a slice of TPUs, or of a node."""
    return self.devices // self.slices if self.chip.torus else self.topology[-1]


@public('flax_spmd.explore')
def chips(file: str | os.PathLike[str] | None = None) -> dict[str, Chip]:
  """The built-in chips by name, and those in a file, which take precedence.

  Args:
    file: TOML file with further chips, of the same form as `hardware.toml`.

  Raises:
    TargetDeviceError: the file cannot be read, or an entry has missing or unknown fields; names the line or
      entry.

  Example:
    >>> 'h100' in chips(), 'v5e' in chips()
    (True, True)
  """
  # The user's file is read each time, since it can change.
  return _known() | ({} if file is None else _read(_read_text(file), os.fspath(file)))


@functools.cache
def _known() -> dict[str, Chip]:
  text = importlib.resources.files('flax_spmd._src.compare').joinpath('hardware.toml').read_text()
  return _read(text, 'hardware.toml')


def _read_text(file: str | os.PathLike[str]) -> str:
  try:
    return Path(file).read_text()
  except (OSError, UnicodeDecodeError) as error:
    reason = error.strerror if isinstance(error, OSError) else error
    raise TargetDeviceError(f'{file} cannot be read: {reason}.\nFix: pass a TOML file.') from error


def _read(text: str, where: str) -> dict[str, Chip]:
  try:
    tables = tomllib.loads(text)
  except tomllib.TOMLDecodeError as error:
    raise TargetDeviceError(f'{where} is not valid TOML: {error}.\nFix: correct that line.') from error
  return {name: _chip(name, table, where) for name, table in tables.items()}


def _chip(name: str, table: Any, where: str) -> Chip:
  required = [field for field in Chip._fields if field not in ('name', *Chip._field_defaults)]
  missing = [field for field in required if field not in table] if isinstance(table, dict) else required
  unknown = [field for field in table if field not in Chip._fields] if isinstance(table, dict) else []
  if missing or unknown:
    problems = [
      *(f'{field} is missing' for field in missing),
      *(f'{field} is unknown' for field in unknown),
    ]
    raise TargetDeviceError(
      f'{where}, [{name}]: {", ".join(problems)}.\n'
      f'Fix: give each chip {", ".join(required)}, as flax_spmd/_src/compare/hardware.toml does.'
    )
  chip = Chip(name=name, **table)
  spread = tuple(chip.spread)
  if len(spread) != 2 or not 0 < spread[0] <= spread[1] or chip.pace <= 0:
    raise TargetDeviceError(
      f'{where}, [{name}]: spread = {list(spread)} and pace = {chip.pace} are no bracket.\n'
      'Fix: give spread two factors, the lower one first, and pace one, all larger than 0.'
    )
  return chip._replace(spread=spread)


@public('flax_spmd.explore', unchecked=['text'])
def parse_target(text: str, file: str | os.PathLike[str] | None = None) -> Target:
  """Parses a target: `'cpu:8'`, `'v5e:4x4'`, `'2xv5e:4x4'` (slices), `'h100:8'`, `'h100:8x8'` (nodes x GPUs), or `'here'`.

  Args:
    text: kind and number of chips; `'here'` means the available devices. Slices and nodes are along the first axes of a mesh.
    file: TOML file with further chips.

  Raises:
    TargetDeviceError: the chip is unknown (a similar name is suggested), or has no such topology.

  Example:
    >>> parse_target('h100:64').topology, parse_target('v5e:4x4').devices
    ((8, 8), 16)
    >>> parse_target('tpu7x:2x2x1').devices  # two of each chip
    8
  """
  if text == 'here':
    return _available(file)
  name, _, size = str(text).partition(':')
  known, slices = chips(file), 1
  if name not in known and (several := re.fullmatch(r'([1-9]\d*)x(.+)', name)):
    slices, name = int(several[1]), several[2]
  if name not in known:
    raise TargetDeviceError(
      f'There is no target {value_text(text)}.{did_you_mean(name, known)}\n'
      f'Fix: use one of {", ".join(known)}, as in {_example(known, name)!r}, or describe the chip in a TOML file.'
    )
  chip = known[name]
  if not re.fullmatch(r'[1-9]\d*(x[1-9]\d*)*', size):
    raise TargetDeviceError(
      f'The target {value_text(text)} has no number of chips.\nFix: write, for example, {_example(known, name)!r}'
      + (f', or {f"2x{_example(known, name)}"!r} for two slices.' if chip.torus else '.')
    )
  if slices > 1 and not chip.torus:
    raise TargetDeviceError(
      f'{value_text(text)}: only TPUs have slices, and {name} has nodes.\n'
      f'Fix: give nodes and chips per node, such as {name}:{slices}x{size.rpartition("x")[2]}.'
    )
  return Target(text, chip, _topology(chip, [int(part) for part in size.split('x')], text), slices)


def _example(known: Mapping[str, Chip], name: str) -> str:
  torus = known[name].torus if name in known else 0
  return f'{name}:{"x".join(["4"] * torus)}' if torus else f'{name if name in known else "h100"}:8'


def _topology(chip: Chip, sizes: list[int], text: str) -> tuple[int, ...]:
  if chip.torus:
    if len(sizes) != chip.torus:
      raise TargetDeviceError(
        f'{value_text(text)}: the torus of {chip.name} has {chip.torus} axes.\n'
        f'Fix: give the number of chips along each axis, such as {chip.name}:{_torus(math.prod(sizes), chip.torus)}.'
      )
    if not _has_whole_hosts(sizes):
      even = [size if size == 1 else size + size % 2 for size in sizes[:2]]
      raise TargetDeviceError(
        f'{value_text(text)}: a host of {chip.name} has 2x2 chips, and its hosts make no torus of {_text(sizes)}.\n'
        f'Fix: give the first two axes even numbers of chips, or 1, such as {chip.name}:{_text([*even, *sizes[2:]])}.'
      )
    return tuple(sizes)
  if len(sizes) == 2:
    return sizes[0], sizes[1]
  if len(sizes) > 2 or (sizes[0] > chip.per_node and sizes[0] % chip.per_node):
    raise TargetDeviceError(
      f'{value_text(text)}: {chip.name} has {chip.per_node} chips per node.\n'
      f'Fix: give a multiple of that, or nodes and chips per node, such as {chip.name}:2x{chip.per_node}.'
    )
  nodes = max(1, sizes[0] // chip.per_node)
  return nodes, sizes[0] // nodes


def _has_whole_hosts(sizes: Sequence[int]) -> bool:
  """Whether hosts of 2 x 2 chips make a torus; the compiler for TPUs accepts no other, and 1 in the place of 2."""
  return all(size == 1 or size % 2 == 0 for size in sizes[:2])


def _torus(chips: int, axes: int) -> str:
  """The sizes of a torus with at least a number of chips, as equal as they can be."""
  found = [sizes for sizes in _factors(chips, axes) if _has_whole_hosts(sizes)]
  return (
    _text(min(found, key=lambda sizes: (max(sizes), -min(sizes)))) if found else _torus(chips + 1, axes)
  )


def _factors(number: int, count: int, least: int = 1) -> Iterator[tuple[int, ...]]:
  """The products of ascending factors that are equal to a number."""
  if count == 1:
    yield (number,)
  while count > 1 and least**count <= number:
    if number % least == 0:
      yield from ((least, *others) for others in _factors(number // least, count - 1, least))
    least += 1


def _text(sizes: Iterable[int]) -> str:
  return 'x'.join(map(str, sizes))


def share(target: Target, parts: int) -> Target:
  """An equal share of a target, such as the devices of one rank of a pipeline.

  Args:
    target: the whole target.
    parts: number of shares; divides the number of devices.

  Raises:
    TargetDeviceError: such a share of a torus is none that a program can be compiled for.

  Example:
    >>> [share(parse_target(text), 4).text for text in ('h100:64', 'h100:8', 'v5e:4x4', '8xv5e:4x4')]
    ['h100:2x8', 'h100:1x2', 'v5e:2x2', '2xv5e:4x4']
  """
  chip, devices = target.chip, target.devices // parts
  if devices % target.per_node == 0 and chip.torus:
    return _torus_of(chip, target.topology, devices // target.per_node)
  if not chip.torus:
    in_node = math.gcd(devices, target.topology[-1])
    sizes = [devices // in_node, in_node]
  else:
    sides = ([n for n in range(1, size + 1) if size % n == 0] for size in target.topology)
    found = [one for one in itertools.product(*sides) if math.prod(one) * chip.cores == devices]
    if not any(map(_has_whole_hosts, found)):
      raise TargetDeviceError(
        f'{target.text}: {parts} shares of {plural(devices, "device")} are no torus of whole {"hosts" if found else "chips"}.\n'
        'Fix: use another number of ranks, or another torus.'
      )
    sizes = min(filter(_has_whole_hosts, found), key=lambda one: (sorted(one, reverse=True), one))
    return _torus_of(chip, sizes)
  return Target(f'{chip.name}:{_text(sizes)}', chip, tuple(sizes))


def _torus_of(chip: Chip, sizes: tuple[int, ...], slices: int = 1) -> Target:
  return Target(f'{f"{slices}x" * (slices > 1)}{chip.name}:{_text(sizes)}', chip, sizes, slices)


def check_mesh(sizes: Mapping[str, int], target: Target) -> None:
  """Raises unless a target has the devices of a mesh, and its slices are parts of the first axes.

  Args:
    sizes: size per mesh axis, in order.
    target: the hardware.

  Raises:
    TargetDeviceError: the mesh has another number of devices, or an axis would have parts of slices.
  """
  devices = math.prod(sizes.values())
  if devices != target.devices:
    raise TargetDeviceError(
      f'The mesh {dict(sizes)} has {devices} devices, the target {target.text} {target.devices}.\n'
      f'Fix: give the layout a mesh of {target.devices} devices.'
    )
  if problem := slices_problem(sizes, target):
    raise TargetDeviceError('\nFix: '.join(problem))


def slices_problem(sizes: Mapping[str, int], target: Target) -> tuple[str, str] | None:
  """The problem and the fix for a mesh with parts of slices along an axis, or None."""
  if within_slice([*sizes.values()], target.slices) is not None:
    return None
  return (
    f'The first axes of the mesh {dict(sizes)} do not divide into the {target.slices} slices of {target.text}.',
    f'list an axis first whose size is a multiple of {target.slices}, or axes whose sizes have that product.',
  )


def _available(file: str | os.PathLike[str] | None) -> Target:
  """The available devices, with the chip that matches their device kind, or else `cpu`."""
  device, count = jax.devices()[0], jax.device_count()
  kind = device.device_kind.lower().replace(' ', '')
  names = {'v5lite': 'v5e', 'v5e': 'v5e', 'v6lite': 'v6e', 'v5': 'v5p', 'v4': 'v4'}
  known = chips(file)
  names_in_kind = [name for name in known if name in kind and name != 'cpu']
  matched = known[max(names_in_kind, key=len)] if names_in_kind else None  # a GB200 is no B200
  matched = matched or next((known[names[text]] for text in names if text in kind), known['cpu'])
  sizes = 'x'.join(['1'] * (matched.torus - 1) + [str(max(1, count // matched.cores))])
  return parse_target(f'{matched.name}:{sizes}', file)


# -- compilers


def gpu_description(chip: Chip) -> str:
  """The text of XLA's GpuTargetConfigProto for a GPU."""
  text = importlib.resources.files('flax_spmd._src.compare').joinpath('gpus.toml').read_text()
  gpu = tomllib.loads(text)[chip.compiler or chip.name]
  major, minor = gpu['capability']
  info = {
    'threads_per_block_limit': 1024,
    'threads_per_warp': 32,
    'shared_memory_per_block': 49152,
    'shared_memory_per_core': gpu['shared_per_core'],
    'threads_per_core_limit': 2048,
    'core_count': gpu['cores'],
    'fpus_per_core': gpu['fpus_per_core'],
    'block_dim_limit_x': 2147483647,
    'block_dim_limit_y': 65535,
    'block_dim_limit_z': 65535,
    'memory_bandwidth': int(chip.bandwidth),
    'l2_cache_size': gpu['l2'],
    'clock_rate_ghz': gpu['clock_ghz'],
    'device_memory_size': chip.memory,
    'shared_memory_per_block_optin': gpu['shared_per_block'],
    'registers_per_core_limit': 65536,
    'registers_per_block_limit': 65536,
  }
  fields = ' '.join(f'{name}: {value}' for name, value in info.items())
  return (
    f'gpu_device_info {{ {fields} cuda_compute_capability {{ major: {major} minor: {minor} }} }}\n'
    'platform_name: "CUDA"\n'
    'dnn_version_info { major: 9 minor: 7 }\n'
    'runtime_version { major: 12 minor: 8 patch: 0 }\n'
    f'device_description_str: "{gpu["description"]}"'
  )


_WITHOUT_GPU = '--xla_gpu_autotune_level=0'  # kernels cannot be autotuned


def compiler_environment(target: Target) -> dict[str, str]:
  """The environment variables of a process that compiles for a target."""
  environment = {'JAX_PLATFORMS': 'cpu', 'TF_CPP_MIN_LOG_LEVEL': '1'}
  flags = os.environ.get('XLA_FLAGS', '')
  if target.chip.platform == 'cpu':
    count = f'--xla_force_host_platform_device_count={target.devices}'
    flags = f'{_without_device_count(flags)} {count}'
  elif target.chip.platform == 'cuda':
    flags = f'{_without_device_count(flags)} {_WITHOUT_GPU}'
  else:
    environment |= {
      'TPU_SKIP_MDS_QUERY': '1',
      'TPU_WORKER_HOSTNAMES': 'localhost',
      'TPU_ACCELERATOR_TYPE': _accelerator_type(target),
      'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # it only compiles, and several processes do so in parallel
    }
  return environment | {'XLA_FLAGS': flags.strip()}


def user_flags() -> tuple[str, ...]:
  """The flags that the user sets for compilers, in order: under others they compile other programs."""
  flags = _without_device_count(os.environ.get('XLA_FLAGS', ''))
  return *flags.split(), *os.environ.get('LIBTPU_INIT_ARGS', '').split()


def _without_device_count(flags: str) -> str:
  return re.sub(r'--xla_force_host_platform_device_count=\d+', '', flags)


def _accelerator_type(target: Target) -> str:
  """The accelerator type, such as `v5litepod-16` or `v5p-32`: v5e and v6e count chips, the others cores."""
  name, count = target.chip.name, math.prod(target.topology)
  return {'v5e': f'v5litepod-{count}', 'v6e': f'v6e-{count}'}.get(name, f'{name}-{2 * count}')
