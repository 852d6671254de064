"""Compile worker: a process that compiles programs for one target.

    python -m flax_spmd._src.compare.compile_worker FOLDER...

Each folder contains `program.mlir` and `request.json`; the worker writes `result.json` and `hlo.txt`. It is
a separate process because JAX initialises its backends once per process, and because a compiler crash ends
the process.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

from flax_spmd._src.compare.hardware import Target, gpu_description, parse_target

BEGIN = 'flax_spmd compiles '  # precedes each folder on stderr, where compilers log
_TOTAL = re.compile(r'Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm')
_TEMPORARIES = re.compile(r'required for HLO temporaries \(([\d.]+)([KMGT])\) exceeds')
# Triton's kernels of some products have to be autotuned, for which there is no device; cuBLAS's need not.
_WITHOUT_TRITON = {'xla_gpu_enable_triton_gemm': False}
_UNITS = {'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}


def main(folder: Path) -> None:
  """Compiles the program in a folder and writes its result."""
  print(f'{BEGIN}{folder}', file=sys.stderr, flush=True)
  request = json.loads((folder / 'request.json').read_text())
  target = parse_target(request['target'], request['hardware'])
  try:
    result = _compile(folder, target, request['mesh'], request['partition_only'])
  except Exception as error:  # a compiler's error is a result too
    result = {'error': _reason(error), **memory_needed(str(error))}
  result['rss'] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  (folder / 'result.json').write_text(json.dumps(result))


def _compile(folder: Path, target: Target, mesh: dict[str, int], partition_only: bool) -> dict[str, Any]:
  from flax_spmd._src.compat import compile_program, partition_program

  devices = _devices(target, tuple(mesh.values()))
  begin, cpu = time.perf_counter(), time.process_time()
  code = (folder / 'program.mlir').read_bytes()
  memory: dict[str, int] = {}
  if partition_only:
    text = partition_program(code, devices)
  else:
    try:
      text, memory = compile_program(code, devices)
    except Exception as error:
      if target.chip.platform != 'cuda' or memory_needed(str(error)):
        raise
      text, memory = compile_program(code, devices, _WITHOUT_TRITON)
  (folder / 'hlo.txt').write_text(text)
  return {
    'memory': memory,
    'seconds': time.perf_counter() - begin,
    'cpu_seconds': time.process_time() - cpu,
  }


def _devices(target: Target, shape: tuple[int, ...]) -> Any:
  """The target's devices as an array of the mesh's shape."""
  import jax
  import numpy as np
  from jax.experimental import mesh_utils, topologies

  sizes = 'x'.join(map(str, target.topology))
  if target.chip.platform == 'cpu':
    return np.array(jax.devices()).reshape(shape)
  if target.chip.platform == 'cuda':
    options = {'target_config': gpu_description(target.chip), 'topology': f'1x{sizes}'}
    topology = topologies.get_topology_desc(platform='cuda', topology_name=target.chip.name, **options)
    return np.array(topology.devices).reshape(shape)
  options = {'chip_config_name': 'megacore'} if target.chip.name in ('v4', 'v5p') else {}
  name = f'{target.chip.name}:{sizes}'
  topology = topologies.get_topology_desc(platform='tpu', topology_name=name, **options)
  return mesh_utils.create_device_mesh(shape, topology.devices, allow_split_physical_axes=True)


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
  for each in sys.argv[1:]:
    main(Path(each))
