"""The worker: compiles programs for one target in a process of its own, and says what came out.

    python -m flax_spmd._src.compare.compile_worker FOLDER...

A folder has `program.mlir` and `request.json`; the worker writes `result.json` and `hlo.txt`. A process
has one backend, and a compiler that crashes takes its process with it: so neither is the caller's.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

from flax_spmd._src.compare.hardware import Target, gpu_description, parse

BEGIN = 'flax_spmd compiles '  # before each folder, on the stream that compilers write to
_FULL = re.compile(r'Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm')
_TEMPORARIES = re.compile(r'required for HLO temporaries \(([\d.]+)([KMGT])\) exceeds')
_UNITS = {'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}


def main(folder: Path) -> None:
  """Compiles what lies in a folder."""
  print(f'{BEGIN}{folder}', file=sys.stderr, flush=True)
  request = json.loads((folder / 'request.json').read_text())
  target = parse(request['target'], request['hardware'])
  try:
    result = _compile(folder, target, request['mesh'])
  except Exception as error:  # whatever a compiler says is a result
    result = {'error': _reason(error), **_needed(str(error))}
  result['rss'] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  (folder / 'result.json').write_text(json.dumps(result))


def _compile(folder: Path, target: Target, mesh: dict[str, int]) -> dict[str, Any]:
  from flax_spmd._src.compat import compile_program

  devices = _devices(target, tuple(mesh.values()))
  begin, cpu = time.perf_counter(), time.process_time()
  text, memory = compile_program((folder / 'program.mlir').read_bytes(), devices)
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
    found = topologies.get_topology_desc(platform='cuda', topology_name=target.chip.name, **options)
    return np.array(found.devices).reshape(shape)
  options = {'chip_config_name': 'megacore'} if target.chip.name in ('v4', 'v5p') else {}
  name = f'{target.chip.name}:{sizes}'
  found = topologies.get_topology_desc(platform='tpu', topology_name=name, **options)
  return mesh_utils.create_device_mesh(shape, found.devices, allow_split_physical_axes=True)


def _reason(error: Exception) -> str:
  return f'{type(error).__name__}: {str(error)[:2000]}'


def _needed(text: str) -> dict[str, Any]:
  """The bytes that a program would have needed, in all or besides its arguments, if its compiler says so."""
  found, temporaries = _FULL.search(text), _TEMPORARIES.search(text)
  if temporaries and not found:
    return {'memory': {'temporaries': _bytes(temporaries)}}
  return {'used': _bytes(found)} if found else {}


def _bytes(found: re.Match[str]) -> int:
  return int(float(found[1]) * _UNITS[found[2]])


if __name__ == '__main__':
  for each in sys.argv[1:]:
    main(Path(each))
