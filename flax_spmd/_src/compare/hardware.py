"""Hardware: what chips can do, and targets, which are so many of them in one job.

    parse('h100:64')      # 64 GPUs, 8 to a node
    parse('v5e:16x16')    # 256 chips of a torus

The figures stand in `hardware.toml` beside this file, each chip with its sources.
"""

from __future__ import annotations

import functools
import importlib.resources
import math
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from flax_spmd._src.public_module import set_module
from flax_spmd.errors import TargetDeviceError, did_you_mean


@set_module('flax_spmd.explore')
class Chip(NamedTuple):
  """A kind of chip; `hardware.toml` says what the fields mean.

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


@set_module('flax_spmd.explore')
class Target(NamedTuple):
  """So many chips in one job.

  Attributes:
    text: as it was asked for, in full.
    chip: of which kind.
    topology: of TPUs, chips along each axis of the torus; of others, nodes and chips per node.

  Example:
    >>> target = parse('h100:16')
    >>> target.text, target.chip.name, target.topology, target.devices
    ('h100:16', 'h100', (2, 8), 16)
  """

  text: str
  chip: Chip
  topology: tuple[int, ...]

  @property
  def devices(self) -> int:
    """How many chips there are."""
    return math.prod(self.topology)


@set_module('flax_spmd.explore')
def chips(file: str | os.PathLike[str] | None = None) -> dict[str, Chip]:
  """The chips that are known, and those of a file of one's own, which count first.

  Raises:
    TargetDeviceError: the file cannot be read, or a chip in it lacks something; names the line or entry.

  Example:
    >>> 'h100' in chips(), 'v5e' in chips()
    (True, True)
  """
  # A file of one's own is read each time: it may have been edited.
  return _known() | ({} if file is None else _read(_text(file), os.fspath(file)))


@functools.cache
def _known() -> dict[str, Chip]:
  text = importlib.resources.files('flax_spmd._src.compare').joinpath('hardware.toml').read_text()
  return _read(text, 'hardware.toml')


def _text(file: str | os.PathLike[str]) -> str:
  try:
    return Path(file).read_text()
  except OSError as error:
    raise TargetDeviceError(
      f'{file} cannot be read: {error.strerror}.\nFix: pass a TOML file.'
    ) from error


def _read(text: str, where: str) -> dict[str, Chip]:
  try:
    tables = tomllib.loads(text)
  except tomllib.TOMLDecodeError as error:
    raise TargetDeviceError(f'{where} is no TOML: {error}.\nFix: mend that line.') from error
  return {name: _chip(name, table, where) for name, table in tables.items()}


def _chip(name: str, table: Any, where: str) -> Chip:
  needed = [field for field in Chip._fields if field not in ('name', *Chip._field_defaults)]
  lacking = [field for field in needed if field not in table] if isinstance(table, dict) else needed
  unknown = [field for field in table if field not in Chip._fields] if isinstance(table, dict) else []
  if lacking or unknown:
    wrong = [
      *(f'{field} is missing' for field in lacking),
      *(f'{field} is unknown' for field in unknown),
    ]
    raise TargetDeviceError(
      f'{where}, [{name}]: {", ".join(wrong)}.\n'
      f'Fix: give a chip {", ".join(needed)}, as flax_spmd/_src/compare/hardware.toml does.'
    )
  return Chip(name=name, **table)


@set_module('flax_spmd.explore')
def parse(text: str, file: str | os.PathLike[str] | None = None) -> Target:
  """A target: `'cpu:8'`, `'v5e:4x4'`, `'h100:8'`, `'h100:8x8'` (nodes x GPUs), or `'here'`.

  Args:
    text: kind and number of chips.
    file: a TOML file with chips of one's own.

  Raises:
    TargetDeviceError: no such chip (close ones are named), or no such number of them.

  Example:
    >>> parse('h100:64').topology, parse('v5e:4x4').devices
    ((8, 8), 16)
  """
  if text == 'here':
    return _here(file)
  name, _, size = text.partition(':')
  known = chips(file)
  if name not in known:
    raise TargetDeviceError(
      f'There is no target {text!r}.{did_you_mean(name, known)}\n'
      f'Fix: use one of {", ".join(known)}, as in {_example(known, name)!r}, or describe it in a TOML file.'
    )
  chip = known[name]
  if not re.fullmatch(r'[1-9]\d*(x[1-9]\d*)*', size):
    raise TargetDeviceError(
      f'The target {text!r} does not say how many chips there are.\nFix: write {_example(known, name)!r}.'
    )
  return Target(text, chip, _topology(chip, [int(part) for part in size.split('x')], text))


def _example(known: Mapping[str, Chip], name: str) -> str:
  torus = known[name].torus if name in known else 0
  return f'{name}:{"x".join(["4"] * torus)}' if torus else f'{name if name in known else "h100"}:8'


def _topology(chip: Chip, sizes: list[int], text: str) -> tuple[int, ...]:
  if chip.torus:
    if len(sizes) != chip.torus:
      raise TargetDeviceError(
        f'{text!r}: {chip.name} has a torus of {chip.torus} axes.\n'
        f'Fix: give the chips along each, such as {chip.name}:{"x".join(["4"] * chip.torus)}.'
      )
    return tuple(sizes)
  if len(sizes) == 2:
    return sizes[0], sizes[1]
  if len(sizes) > 2 or (sizes[0] > chip.per_node and sizes[0] % chip.per_node):
    raise TargetDeviceError(
      f'{text!r}: {chip.name} has {chip.per_node} chips to a node.\n'
      f'Fix: give a multiple of that, or nodes and chips to a node, such as {chip.name}:2x{chip.per_node}.'
    )
  nodes = max(1, sizes[0] // chip.per_node)
  return nodes, sizes[0] // nodes


def share(target: Target, parts: int) -> Target:
  """An equal part of a target: what one rank of a pipeline has.

  Args:
    target: the whole.
    parts: into how many it is divided; they divide its devices.

  Example:
    >>> [share(parse(text), 4).text for text in ('h100:64', 'h100:8', 'v5e:4x4')]
    ['h100:2x8', 'h100:1x2', 'v5e:2x2']
  """
  chip, devices = target.chip, target.devices // parts
  if not chip.torus:
    in_node = math.gcd(devices, target.topology[-1])
    sizes = [devices // in_node, in_node]
  else:
    sizes = list(target.topology)
    while (
      math.prod(sizes) > devices
    ):  # the longest side that can be divided, by the least that divides it
      left = math.prod(sizes) // devices
      sides = [(size, -place) for place, size in enumerate(sizes) if math.gcd(size, left) > 1]
      place = -max(sides)[1]
      common = math.gcd(sizes[place], left)
      sizes[place] //= next(number for number in range(2, common + 1) if common % number == 0)
  return Target(f'{chip.name}:{"x".join(map(str, sizes))}', chip, tuple(sizes))


def _here(file: str | os.PathLike[str] | None) -> Target:
  """The devices at hand; of the chip that their name says, or the nearest that is known."""
  device, count = jax.devices()[0], jax.device_count()
  kind = device.device_kind.lower().replace(' ', '')
  names = {'v5lite': 'v5e', 'v5e': 'v5e', 'v6lite': 'v6e', 'v5': 'v5p', 'v4': 'v4'}
  known = chips(file)
  matched = next((known[name] for name in known if name in kind and name != 'cpu'), None)
  matched = matched or next((known[names[text]] for text in names if text in kind), known['cpu'])
  sizes = 'x'.join(['1'] * (matched.torus - 1) + [str(count)])
  return parse(f'{matched.name}:{sizes}', file)


# -- what XLA wants to know of a GPU


def gpu_description(chip: Chip) -> str:
  """XLA's description of a GPU, as the text of its GpuTargetConfigProto."""
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


# The machine code is thrown away, so it need not be good. No kernels are tried, as there is no GPU.
_QUICKLY = '--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true'
_QUICKLY_GPU = f'{_QUICKLY} --xla_gpu_disable_gpuasm_optimizations=true --xla_gpu_autotune_level=0'


def compiler_environment(target: Target) -> dict[str, str]:
  """What a process that compiles for a target has in its environment."""
  environment = {'JAX_PLATFORMS': 'cpu', 'TF_CPP_MIN_LOG_LEVEL': '1'}
  flags = os.environ.get('XLA_FLAGS', '')
  if target.chip.platform == 'cpu':
    count = f'--xla_force_host_platform_device_count={target.devices}'
    flags = f'{_without_device_count(flags)} {count} {_QUICKLY}'
  elif target.chip.platform == 'cuda':
    flags = f'{_without_device_count(flags)} {_QUICKLY_GPU}'
  else:
    environment |= {
      'TPU_SKIP_MDS_QUERY': '1',
      'TPU_WORKER_HOSTNAMES': 'localhost',
      'TPU_ACCELERATOR_TYPE': _accelerator_type(target),
      'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # it only compiles here, and may do so twice at once
    }
  return environment | {'XLA_FLAGS': flags.strip()}


def _without_device_count(flags: str) -> str:
  return re.sub(r'--xla_force_host_platform_device_count=\d+', '', flags)


def _accelerator_type(target: Target) -> str:
  """`v5litepod-16`, `v5p-32`: the newer ones count chips, v4 and v5p count cores."""
  name, count = target.chip.name, target.devices
  return {'v5e': f'v5litepod-{count}', 'v6e': f'v6e-{count}'}.get(name, f'{name}-{2 * count}')
