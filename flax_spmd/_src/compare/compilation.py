"""Compiling: programs sent to their targets' compilers, several at once, and what came out kept on disk.

Programs are compiled in other processes (`worker`). What came out of each is kept under a digest of the
program, the target, and the versions of everything that had a part in it, so that asking again costs
nothing. A crash of a compiler, and a program that does not fit, are results with a reason.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from flax_spmd._src.compare.compile_worker import BEGIN
from flax_spmd._src.compare.hardware import Target, compiler_environment
from flax_spmd._src.compare.lowering import Program
from flax_spmd._src.compat import jaxlib_version
from flax_spmd._src.hlo.counts import Collective, Counts, count
from flax_spmd._src.public_module import set_module
from flax_spmd.errors import TargetDeviceError

_FORMAT = 1
_TIMEOUT = 1800  # seconds
_LARGEST_CPU = 512  # devices that the CPU's compiler can be asked for
_TELLING = ('Involuntary full rematerialization', 'rematerializ', 'SPMD', 'spmd_partitioner', 'fallback')
_WHEELS = {
  'tpu': ('libtpu', 'tpu', ('libtpu',)),
  'cuda': ('jax_cuda12_plugin', 'cuda', ('jax-cuda12-plugin', 'jax-cuda12-pjrt')),
}


class Compiled(NamedTuple):
  """What a compiler made of a program.

  Attributes:
    counts: what the program does; None if it was not compiled.
    memory: the compiler's account: bytes of arguments, results, shared, temporaries, peak.
    error: why it was not compiled, or None.
    used: bytes of memory that it would have needed, where the compiler said so.
    warnings: what the compiler said that deserves a look.
    seconds, cpu_seconds, rss: what compiling took.
    cached: whether it was kept from an earlier time.
    hlo: the file with the optimised program, compressed; None if it could not be kept.
  """

  counts: Counts | None
  memory: dict[str, int]
  error: str | None
  used: int | None
  warnings: list[str]
  seconds: float
  cpu_seconds: float
  rss: int
  cached: bool
  hlo: Path | None


class Lot(NamedTuple):
  """Programs that one process compiles one after another: its start takes longer than a small program.

  Attributes:
    programs: what `lower` made.
    target: what for.
  """

  programs: Sequence[Program]
  target: Target


def compile_lots(
  lots: Sequence[Lot],
  *,
  hardware: str | os.PathLike[str] | None = None,
  jobs: int | None = None,
  done: Callable[[int, list[Compiled]], None] = lambda number, compiled: None,
) -> list[list[Compiled]]:
  """Compiles lots of programs, as many lots at once as there are cores.

  Args:
    lots: each with its target.
    hardware: the file with chips of one's own that the targets are from.
    jobs: how many at once; default: half of the cores.
    done: called with each lot's results as they come.

  Raises:
    TargetDeviceError: there is no compiler for a target here, or it is too large for it.
  """
  for target in {lot.target.text: lot.target for lot in lots}.values():
    check_compiler(target)

  def one(pair: tuple[int, Lot]) -> list[Compiled]:
    compiled = _compiled(pair[1], hardware)
    done(pair[0], compiled)
    return compiled

  with ThreadPoolExecutor(jobs or max(1, (os.cpu_count() or 2) // 2)) as pool:
    return list(pool.map(one, enumerate(lots)))


def check_compiler(target: Target) -> None:
  """Raises unless a program can be compiled for a target here.

  Raises:
    TargetDeviceError: a wheel is missing, or is made for another jax, or the target is too large.
  """
  platform = target.chip.platform
  if platform == 'cpu' and target.devices > _LARGEST_CPU:
    raise TargetDeviceError(
      f"The CPU's compiler takes up to {_LARGEST_CPU} devices, {target.text} has {target.devices}.\n"
      "Fix: compare on a target such as 'h100:1024', which needs no GPU."
    )
  if platform not in _WHEELS:
    return
  module, extra, wheels = _WHEELS[platform]
  if importlib.util.find_spec(module) is None:
    raise TargetDeviceError(
      f'There is no compiler for {target.text} here: the wheel {wheels[0]} is not installed.\n'
      f"Fix: pip install 'flax-spmd[{extra}]'"
    )
  jax_version = jaxlib_version()
  for wheel in wheels if platform == 'cuda' else ():
    found = importlib.metadata.version(wheel)
    if found.split('.')[:2] != jax_version.split('.')[:2]:
      raise TargetDeviceError(
        f'The compiler for {target.text}, {wheel} {found}, is made for another jax than jax {jax_version}.\n'
        f"Fix: pip install '{wheel}=={'.'.join(jax_version.split('.')[:3])}'"
      )
  if platform == 'cuda' and not _has_ptxas():
    raise TargetDeviceError(
      f'There is no compiler for {target.text} here: ptxas, which {wheels[0]} calls, is not installed.\n'
      'Fix: pip install nvidia-cuda-nvcc-cu12'
    )


def _has_ptxas() -> bool:
  """Whether XLA will find NVIDIA's assembler, without which it compiles nothing for a GPU."""
  if shutil.which('ptxas') or _version('nvidia-cuda-nvcc-cu12'):
    return True
  told = re.findall(r'--xla_gpu_cuda_data_dir=(\S+)', os.environ.get('XLA_FLAGS', ''))
  return any(
    (Path(folder) / 'bin' / 'ptxas').exists() for folder in (*told, '/usr/local/cuda', '/opt/cuda')
  )


def _compiled(lot: Lot, hardware: str | os.PathLike[str] | None) -> list[Compiled]:
  keys = [_key(program, lot.target) for program in lot.programs]
  kept = {key: _read(key) for key in keys}
  new = {key: program for key, program in zip(keys, lot.programs) if kept[key] is None}
  if new:
    with tempfile.TemporaryDirectory(prefix='flax_spmd_') as folder:
      folders = [Path(folder) / str(number) for number in range(len(new))]
      results = _run(list(new.values()), lot.target, hardware, folders)
      for (key, program), result, place in zip(new.items(), results, folders, strict=True):
        kept[key] = _counted(key, program, result, place / 'hlo.txt')
  return [_compiled_of(kept[key] or {}, key, cached=key not in new) for key in keys]


def _counted(key: str, program: Program, result: dict[str, Any], hlo: Path) -> dict[str, Any]:
  """What the worker said, and what its program does; it is kept."""
  if hlo.exists():
    text = hlo.read_text()
    result['counts'] = _counts_json(count(text, program.mesh))
    _keep_hlo(key, text)
  if {'counts', 'used', 'memory'} & result.keys():  # what else went wrong may not be the program's fault
    _keep(key, result)
  return result


def _run(
  programs: Sequence[Program],
  target: Target,
  hardware: str | os.PathLike[str] | None,
  folders: Sequence[Path],
) -> list[dict[str, Any]]:
  """Runs a worker in folders. Its crash is a result, and another one goes on after that program."""
  own = os.path.abspath(hardware) if hardware is not None else None
  for program, folder in zip(programs, folders, strict=True):
    folder.mkdir()
    (folder / 'program.mlir').write_bytes(program.code)
    request = {'target': target.text, 'hardware': own, 'mesh': program.mesh}
    (folder / 'request.json').write_text(json.dumps(request))
  results: list[dict[str, Any]] = []
  while left := folders[len(results) :]:
    said, why = _worker(left, target)
    while left and (left[0] / 'result.json').exists():
      found = json.loads((left[0] / 'result.json').read_text())
      results.append(found | {'warnings': _warnings(said, left[0])})
      left = left[1:]
    if left:
      results.append({'error': why})
  return results


def _worker(folders: Sequence[Path], target: Target) -> tuple[str, str]:
  """What a worker says, and why it ended if it did so early."""
  command = [sys.executable, '-m', 'flax_spmd._src.compare.compile_worker', *map(str, folders)]
  environment = os.environ | compiler_environment(target)
  time = _TIMEOUT * len(folders)
  try:
    ended = subprocess.run(
      command, env=environment, capture_output=True, text=True, errors='replace', timeout=time
    )
  except subprocess.TimeoutExpired:
    return '', f'the compiler had not ended after {time} s'
  return ended.stderr, _crash(ended)


def _warnings(said: str, folder: Path) -> list[str]:
  """What the compiler said of one program: what comes after the line with its folder's name."""
  own = said.partition(f'{BEGIN}{folder}\n')[2].partition(BEGIN)[0]
  lines = [line.strip() for line in own.splitlines() if any(word in line for word in _TELLING)]
  return list(dict.fromkeys(map(_message, lines)))[:20]


def _crash(ended: subprocess.CompletedProcess[str]) -> str:
  number = -ended.returncode
  name = signal.Signals(number).name if 0 < number < 65 else f'code {ended.returncode}'
  why = ' (out of the memory of this machine?)' if name == 'SIGKILL' else ''
  last = ended.stderr.strip().splitlines()[-3:]
  return f'the compiler ended with {name}{why}: ' + ' | '.join(last)[-600:]


def _message(line: str) -> str:
  """A line of the log, without its time and place."""
  return line.partition('] ')[2] or line


# -- what is kept


def cache_folder() -> Path:
  """Where everything is kept: `FLAX_SPMD_CACHE`, or the user's cache."""
  set_by_user = os.environ.get('FLAX_SPMD_CACHE')
  return Path(
    set_by_user or Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'flax_spmd'
  )


def _key(program: Program, target: Target) -> str:
  versions = [jaxlib_version(), *map(_version, ('libtpu', 'jax-cuda12-plugin', 'flax-spmd'))]
  about = [_FORMAT, program.identity, target, list(program.mesh.items()), versions]
  return hashlib.sha256(repr(about).encode()).hexdigest()[:40]


def _version(name: str) -> str | None:
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return None


def _read(key: str) -> dict[str, Any] | None:
  """What was kept; None for nothing, and for what cannot be read any more."""
  try:
    content = json.loads((cache_folder() / f'{key}.json').read_text())
    _compiled_of(content, key, cached=True)
    return content
  except (OSError, ValueError, KeyError, TypeError, AttributeError):
    return None


def _keep(key: str, result: dict[str, Any]) -> None:
  _write(cache_folder() / f'{key}.json', json.dumps(result).encode())


def _keep_hlo(key: str, text: str) -> None:
  _write(cache_folder() / f'{key}.hlo.gz', gzip.compress(text.encode(), 5))


def _write(file: Path, content: bytes) -> None:
  """Writes a file whole or not at all; without room for it, says so and goes on."""
  try:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as temporary:
      temporary.write(content)
    os.replace(temporary.name, file)
  except OSError as error:
    warnings.warn(
      f'What was compiled cannot be kept in {file.parent}: {error.strerror}. Set FLAX_SPMD_CACHE to another folder.',
      stacklevel=2,
    )


@set_module('flax_spmd.explore')
def clear_cache() -> None:
  """Forgets everything that was compiled.

  Example:
    >>> import os, unittest.mock
    >>> with unittest.mock.patch.dict(os.environ, FLAX_SPMD_CACHE=str(tmp / 'cache')):
    ...   clear_cache()
  """
  shutil.rmtree(cache_folder(), ignore_errors=True)


def _counts_json(counts: Counts) -> dict[str, Any]:
  return counts._asdict() | {'collectives': [one._asdict() for one in counts.collectives]}


def _compiled_of(content: dict[str, Any], key: str, cached: bool) -> Compiled:
  counts = content.get('counts')
  if counts is not None:
    listed = tuple(Collective(**one | {'axes': tuple(one['axes'])}) for one in counts['collectives'])
    pairs = {name: tuple(map(tuple, counts[name])) for name in ('opaque', 'loops')}
    counts = Counts(**counts | pairs | {'collectives': listed})
  hlo = cache_folder() / f'{key}.hlo.gz'
  return Compiled(
    counts,
    content.get('memory', {}),
    content.get('error'),
    content.get('used'),
    content.get('warnings', []),
    content.get('seconds', 0.0),
    content.get('cpu_seconds', 0.0),
    content.get('rss', 0),
    cached,
    hlo if hlo.exists() else None,
  )
