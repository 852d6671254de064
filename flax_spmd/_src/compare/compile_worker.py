"""Compile worker: a process that compiles programs for one target.

    python -m flax_spmd._src.compare.compile_worker FOLDER...

Each folder contains `program.mlir` and `request.json`; the worker writes `result.json` and `hlo.txt`. It is
a separate process because JAX initialises its backends once per process, and because a compiler crash ends
the process. Each program is compiled in a fork, which ends before the compiler generates code.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from flax_spmd._src.compare.hardware import Target, gpu_description, parse_target
from flax_spmd._src.hlo.buffer_assignment import Dump, read_dump
from flax_spmd._src.mesh import make_mesh

BEGIN = 'flax_spmd compiles '  # precedes each folder on stderr, where compilers log
ASSIGNED = '*after_optimizations.hlo.pb'  # written by XLA once it has assigned buffers
_CHECKED = '*after_buffer_assignment.hlo.pb'  # written by the compiler for TPUs, for programs that fit
_HBM = 0  # number of a TPU's memory space
_POLL = 0.02  # seconds
_TOTAL = re.compile(r'Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm')
_TEMPORARIES = re.compile(r'required for HLO temporaries \(([\d.]+)([KMGT])\) exceeds')
# XLA's pass that chooses among kernels, for which there is no device. It fails for some products, and takes long for others.
_AUTOTUNING = ('config-assigner', 'autotuner')  # the second is its name in JAX 0.10
_DISABLED = re.compile(r'--xla_disable_hlo_passes=(\S+)')
_PER_SLICE = 100_000  # numbers of devices of a slice; those of the first begin with it
_TRANSFER = re.compile(
  r'(_xla_megascale_target=)(?:"\{(?P<slices>[\d,:]+)\}x\{(?P<inside>[\d,:]+)\}"|(?P<groups>\{\{[\d,>{}-]*\}\}))'
)
_UNKNOWN_TRANSFER = re.compile(r'_xla_megascale_target=(?!\{\{).{0,80}')
_NUMBER = re.compile(r'\d+')
_UNITS = {'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}


def main(folders: Sequence[Path]) -> None:
  """Compiles the programs in folders, each in a fork of this process, and writes their results.

  A fork ends once the compiler has assigned buffers: code is not generated, which takes most of a compilation.
  """
  import flax_spmd._src.compat  # noqa: F401  # once, for all forks

  for folder in folders:
    print(f'{BEGIN}{folder}', file=sys.stderr, flush=True)
    fork = multiprocessing.get_context('fork').Process(target=_write_result, args=(folder,))
    fork.start()
    fork.join()
    if (code := fork.exitcode or 0) < 0:
      os.kill(os.getpid(), -code)
    if code:
      sys.exit(code)


def _write_result(folder: Path) -> None:
  request = json.loads((folder / 'request.json').read_text())
  target = parse_target(request['target'], request['hardware'])
  try:
    result = compile_program(folder, target, tuple(request['mesh'].values()))
  except Exception as error:  # a compiler's error is a result too
    result = {'error': _reason(error), **memory_needed(str(error))}
  result['rss'] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  (folder / 'result.json').write_text(json.dumps(result))


def compile_program(folder: Path, target: Target, shape: tuple[int, ...]) -> dict[str, Any]:
  """Compiles `program.mlir` of a folder for a mesh of some shape, and writes `hlo.txt`; returns the rest of the result.

  The compiler may still run when this returns, and only ends with the process.
  """
  from flax_spmd._src.compat import hlo_text

  devices = devices_of(target, shape)
  begin, cpu = time.perf_counter(), time.process_time()
  code = (folder / 'program.mlir').read_bytes()
  flags = without_passes() if target.chip.platform == 'cuda' else {}
  found = _assigned(folder / 'dump', target, code, devices, flags)
  text = hlo_text(found.module, devices.size // target.slices)
  (folder / 'hlo.txt').write_text(text if target.slices == 1 else with_positions(text, devices))
  return {
    'memory': found.memory,
    'live': found.live,
    'seconds': time.perf_counter() - begin,
    'cpu_seconds': time.process_time() - cpu,
  }


def _assigned(folder: Path, target: Target, code: bytes, devices: Any, flags: dict[str, Any]) -> Dump:
  """The optimised module and its memory, once the compiler has assigned buffers; it is left running."""
  from flax_spmd._src.compat import dump_program

  compiling: Future[None] = Future()

  def compile_it() -> None:
    try:
      compiling.set_result(dump_program(code, devices, folder, flags))
    except Exception as error:
      compiling.set_exception(error)

  threading.Thread(target=compile_it, daemon=True).start()
  tpu = target.chip.platform == 'tpu'
  while True:
    ended = wait([compiling], _POLL).done
    if ended or not tpu or any(folder.glob(_CHECKED)):
      for file in folder.glob(ASSIGNED):
        if found := read_dump(file.read_bytes(), _HBM if tpu else None):
          return found
    if ended:
      compiling.result()
      raise RuntimeError('the compiler ended without a buffer assignment')


def without_passes(*names: str) -> dict[str, Any]:
  """Flags of XLA for GPUs, by which it neither autotunes nor runs passes of some names, nor those that the user excludes."""
  of_user = _DISABLED.findall(os.environ.get('XLA_FLAGS', ''))[-1:]
  return {'xla_disable_hlo_passes': ','.join([*of_user, *_AUTOTUNING, *names])}


def devices_of(target: Target, shape: tuple[int, ...]) -> Any:
  """The target's devices as an array of the mesh's shape."""
  import jax
  import numpy as np
  from jax.experimental import topologies

  sizes = 'x'.join(map(str, target.topology))
  if target.chip.platform == 'cpu':
    return np.array(jax.devices()).reshape(shape)
  if target.chip.platform == 'cuda':
    options = {'target_config': gpu_description(target.chip), 'topology': f'1x{sizes}'}
    topology = topologies.get_topology_desc(platform='cuda', topology_name=target.chip.name, **options)
    return np.array(topology.devices).reshape(shape)
  options: dict[str, Any] = {'chip_config_name': 'megacore'} if target.chip.name in ('v4', 'v5p') else {}
  options |= {'num_slices': target.slices} if target.slices > 1 else {}
  # that of 2 x 2 chips is assumed by JAX before 0.12 for a part of a host, too
  options['chips_per_host_bounds'] = chips_per_host(target.topology)
  name = f'{target.chip.name}:{sizes}'
  topology = topologies.get_topology_desc(platform='tpu', topology_name=name, **options)
  axes = {f'axis {number}': size for number, size in enumerate(shape)}
  return make_mesh(axes, devices=topology.devices, split_physical_axes=True).devices


def chips_per_host(torus: Sequence[int]) -> list[int]:
  """The chips of a TPU host along three axes: 2 x 2 x 1, or 1 where the torus has 1."""
  return [*(min(2, size) for size in torus[:2]), 1]


def with_positions(text: str, devices: Any) -> str:
  """The text of a program for several slices of TPUs, with transfers between them as groups of positions in the mesh.

  The compiler has the numbers of its devices there, as groups, as pairs, or as a product of slices and devices within them.

  Raises:
    ValueError: another notation, as of another version of the compiler.
  """
  positions = {device.id: number for number, device in enumerate(devices.flat)}

  def written(match: re.Match[str]) -> str:
    if match['groups']:
      return match[1] + _NUMBER.sub(
        lambda one: str(positions[int(one[0])]), match['groups'].replace('->', ',')
      )
    slices, inside = (_numbers_in(match[part]) for part in ('slices', 'inside'))
    groups = ([positions[one * _PER_SLICE + index] for one in slices] for index in inside)
    return match[1] + '{' + ','.join('{' + ','.join(map(str, group)) + '}' for group in groups) + '}'

  text = _TRANSFER.sub(written, text)
  if unknown := _UNKNOWN_TRANSFER.search(text):
    raise ValueError(
      f'the devices of a transfer between slices are written in an unknown way: {unknown[0]}'
    )
  return text


def _numbers_in(text: str) -> list[int]:
  """The numbers of `1,2` or `0:3`, whose ends are both included."""
  ends = (part.partition(':') for part in text.split(','))
  return [number for first, _, last in ends for number in range(int(first), int(last or first) + 1)]


def _reason(error: Exception) -> str:
  return f'{type(error).__name__}: {str(error)[:2000]}'


def memory_needed(text: str) -> dict[str, Any]:
  """The bytes that a program would need, in total or for temporaries, from the compiler's error."""
  total, temporaries = _TOTAL.search(text), _TEMPORARIES.search(text)
  if temporaries and not total:
    return {'memory': {'temporaries': _bytes(temporaries)}}
  return {'used': _bytes(total)} if total else {}


def _bytes(match: re.Match[str]) -> int:
  return int(float(match[1]) * _UNITS[match[2]])


if __name__ == '__main__':
  main([Path(each) for each in sys.argv[1:]])
