"""Compilation: programs compiled in worker processes, with results cached on disk.

Each worker (`compile_worker`) runs the target's own compiler. A result is cached under a digest of the
program, the target and all versions involved, so a repeated compilation is free. A compiler crash and a
program that does not fit are results with an error text.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from flax_spmd._src.compare.compile_worker import BEGIN
from flax_spmd._src.compare.hardware import Target, compiler_environment, user_flags
from flax_spmd._src.compare.lowering import LoweredStep
from flax_spmd._src.hlo.counts import Collective, CountedLoop, Counts, count_module
from flax_spmd._src.hlo.live_arrays import LiveArray, live_arrays
from flax_spmd._src.hlo.parser import parse
from flax_spmd._src.hlo.work import Product
from flax_spmd._src.public import public
from flax_spmd._src.source_lines import warn
from flax_spmd._src.versions import installed_version
from flax_spmd.errors import TargetDeviceError

_FORMAT = 8
_TIMEOUT = 1800  # seconds
_LARGEST_CPU = 512  # devices; the CPU's compiler supports no more
_WARNING_WORDS = (
  'Involuntary full rematerialization',
  'rematerializ',
  'SPMD',
  'spmd_partitioner',
  'fallback',
)
_WHEELS = {  # by platform: the wheels of which any one set has its compiler; the extra installs the first
  'tpu': (('libtpu',),),
  'cuda': tuple((f'jax-{cuda}-plugin', f'jax-{cuda}-pjrt') for cuda in ('cuda12', 'cuda13')),
}


class CompileResult(NamedTuple):
  """The result of compiling one program.

  Attributes:
    counts: work of the program; None if it was not compiled.
    memory: the compiler's memory analysis: bytes of arguments, results, shared, temporaries, peak.
    error: reason why it was not compiled, or None.
    used: bytes of memory that a program needs that did not fit, if reported by the compiler.
    warnings: relevant warnings of the compiler.
    seconds: wall time of the compilation.
    cpu_seconds: CPU time of the compilation.
    rss: peak memory of the worker process, in bytes.
    cached: whether the result comes from the cache.
    hlo: path of the compressed optimised HLO; None if it could not be cached.
    live: temporary arrays that are in memory at the peak, largest first.
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
  live: tuple[LiveArray, ...] = ()


class CompileJob(NamedTuple):
  """Programs that one worker process compiles in turn, since its start takes longer than a small program.

  Attributes:
    programs: lowered programs.
    target: hardware to compile for.
  """

  programs: Sequence[LoweredStep]
  target: Target


def compile_jobs(
  jobs: Sequence[CompileJob],
  *,
  hardware: str | os.PathLike[str] | None = None,
  parallel: int,
  done: Callable[[int, list[CompileResult]], None] = lambda number, results: None,
) -> list[list[CompileResult]]:
  """Runs compile jobs in parallel.

  Args:
    jobs: the jobs, each with its target.
    hardware: TOML file that describes the targets' chips, if they are not built in.
    parallel: number of jobs that run in parallel.
    done: callback with the index and the results of each finished job.

  Raises:
    TargetDeviceError: a target's compiler is not installed, or does not support that many devices.
  """
  for target in {job.target.text: job.target for job in jobs}.values():
    check_compiler(target)

  def run(numbered: tuple[int, CompileJob]) -> list[CompileResult]:
    results = _compile(numbered[1], hardware)
    done(numbered[0], results)
    return results

  with ThreadPoolExecutor(parallel) as pool:
    return list(pool.map(run, enumerate(jobs)))


def checked_jobs(jobs: int | None) -> int:
  """The number of compilers that run in parallel; by default half of the CPU's cores.

  Raises:
    TargetDeviceError: it is less than 1.
  """
  if jobs is not None and jobs < 1:
    raise TargetDeviceError(
      f'jobs={jobs} is not a number of compilers.\nFix: pass 1 or more, or leave it out.'
    )
  return jobs or max(1, (os.cpu_count() or 2) // 2)


def check_compiler(target: Target) -> None:
  """Raises unless this machine can compile for a target.

  Raises:
    TargetDeviceError: a wheel is missing or belongs to another jax version, nothing compiles for the chip, or the
      target has too many devices.
  """
  platform = target.chip.platform
  if target.chip.compiler == 'none':
    raise TargetDeviceError(
      f'Nothing compiles for {target.text} without a {target.chip.name}, so there are estimates only.\n'
      'Fix: use search(..., top=0) or Estimator, or a target with a compiler, such as h100:8.'
    )
  if platform == 'cpu' and target.devices > _LARGEST_CPU:
    raise TargetDeviceError(
      f"The CPU's compiler supports up to {_LARGEST_CPU} devices, but {target.text} has {target.devices}.\n"
      "Fix: compare on a target such as 'h100:1024', which needs no GPU."
    )
  if platform not in _WHEELS:
    return
  wheels = _wheels(platform)
  if not wheels:
    raise TargetDeviceError(
      f'There is no compiler for {target.text} on this machine: the wheel {_WHEELS[platform][0][0]} is not installed.\n'
      f"Fix: pip install 'flax-spmd[{platform}]'"
    )
  jax_version = installed_version('jaxlib')
  for wheel in wheels if platform == 'cuda' else ():
    version = installed_version(wheel)
    if version.split('.')[:2] != jax_version.split('.')[:2]:
      raise TargetDeviceError(
        f'The compiler for {target.text}, {wheel} {version}, does not match jax {jax_version}.\n'
        f"Fix: pip install '{wheel}=={'.'.join(jax_version.split('.')[:3])}'"
      )


def has_wheel(platform: str) -> bool:
  """Whether the wheel with a platform's compiler is installed: for 'cuda' or 'tpu'."""
  return bool(_wheels(platform))


def compiler_versions(platform: str) -> dict[str, str]:
  """The versions of the wheels with a platform's compiler: for 'cuda' or 'tpu'; empty if none is installed."""
  return {wheel: installed_version(wheel) for wheel in _wheels(platform)}


def _wheels(platform: str) -> tuple[str, ...]:
  """The wheels with a platform's compiler that are installed; empty if there are none."""
  modules = {wheels: wheels[0].replace('-', '_') for wheels in _WHEELS[platform]}
  return next((wheels for wheels, name in modules.items() if importlib.util.find_spec(name)), ())


def _compile(job: CompileJob, hardware: str | os.PathLike[str] | None) -> list[CompileResult]:
  keys = [cache_key(program, job.target) for program in job.programs]
  contents = {key: _read(key) for key in keys}
  new = {key: program for key, program in zip(keys, job.programs) if contents[key] is None}
  if new:
    with tempfile.TemporaryDirectory(prefix='flax_spmd_') as root:
      folders = [Path(root) / str(number) for number in range(len(new))]
      reports = run_workers(job._replace(programs=list(new.values())), hardware, folders)
      for (key, program), report, folder in zip(new.items(), reports, folders, strict=True):
        contents[key] = _counted(key, program, report, folder / 'hlo.txt')
  return [_compile_result(contents[key] or {}, key, cached=key not in new) for key in keys]


def _counted(key: str, program: LoweredStep, report: dict[str, Any], hlo: Path) -> dict[str, Any]:
  """A worker's report with the counts of its program; both are cached."""
  if hlo.exists():
    text = hlo.read_text()
    module = parse(text)
    report['counts'] = _counts_json(count_module(module, program.mesh))
    report['live'] = live_arrays(report.get('live', ()), module)
    _cache_hlo(key, text)
  if {'counts', 'used', 'memory'} & report.keys():  # other errors may not be the program's fault
    _cache(key, report)
  return report


def run_workers(
  job: CompileJob, hardware: str | os.PathLike[str] | None, folders: Sequence[Path]
) -> list[dict[str, Any]]:
  """Runs a job in worker processes and returns their reports.

  If a worker crashes, the crash is the report of its current program, and a new worker compiles the rest.

  Args:
    job: the programs and their target.
    hardware: TOML file that describes the target's chip, if it is not built in.
    folders: folder to create for each program.
  """
  target = job.target
  absolute = os.path.abspath(hardware) if hardware is not None else None
  for program, folder in zip(job.programs, folders, strict=True):
    folder.mkdir()
    (folder / 'program.mlir').write_bytes(program.code)
    request = {'target': target.text, 'hardware': absolute, 'mesh': program.mesh}
    (folder / 'request.json').write_text(json.dumps(request))
  reports: list[dict[str, Any]] = []
  while left := folders[len(reports) :]:
    log, crash = _run_worker(left, target)
    while left and (left[0] / 'result.json').exists():
      report = json.loads((left[0] / 'result.json').read_text())
      reports.append(report | {'warnings': warnings_in(log, left[0])})
      left = left[1:]
    if left:
      reports.append({'error': crash})
  return reports


def _run_worker(folders: Sequence[Path], target: Target) -> tuple[str, str]:
  """A worker's log, and the reason why it ended in case it did so early."""
  command = [sys.executable, '-m', 'flax_spmd._src.compare.compile_worker', *map(str, folders)]
  environment = os.environ | compiler_environment(target)
  time = _TIMEOUT * len(folders)
  try:
    ended = subprocess.run(
      command, env=environment, capture_output=True, text=True, errors='replace', timeout=time
    )
  except subprocess.TimeoutExpired:
    return '', f'the compiler did not finish within {time} s'
  return ended.stderr, _crash(ended)


def warnings_in(log: str, folder: Path) -> list[str]:
  """The relevant warnings about one program: those after the log's line with its folder."""
  section = log.partition(f'{BEGIN}{folder}\n')[2].partition(BEGIN)[0]
  lines = [line.strip() for line in section.splitlines() if any(word in line for word in _WARNING_WORDS)]
  return list(dict.fromkeys(map(_message, lines)))[:20]


def _crash(ended: subprocess.CompletedProcess[str]) -> str:
  number = -ended.returncode
  name = signal.Signals(number).name if 0 < number < 65 else f'code {ended.returncode}'
  why = ' (is this machine out of memory?)' if name == 'SIGKILL' else ''
  last = ended.stderr.strip().splitlines()[-3:]
  return f'the compiler ended with {name}{why}: ' + ' | '.join(last)[-600:]


def _message(line: str) -> str:
  """A line of the log without its timestamp and source location."""
  return line.partition('] ')[2] or line


# -- cache


def cache_folder() -> Path:
  """The cache folder: `FLAX_SPMD_CACHE`, or `flax_spmd` in the user's cache."""
  set_by_user = os.environ.get('FLAX_SPMD_CACHE')
  return Path(
    set_by_user or Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'flax_spmd'
  )


def cache_key(program: LoweredStep, target: Target) -> str:
  """A digest of a program, its target, the user's flags and all versions involved."""
  versions = [*map(installed_version, ('jaxlib', 'flax-spmd')), *map(compiler_versions, _WHEELS)]
  chip = target.chip._replace(efficiency=1.0, pace=1.0, spread=())  # figures of times, not of programs
  about = [_FORMAT, program.identity, target._replace(chip=chip), list(program.mesh.items()), versions]
  about += user_flags()
  return hashlib.sha256(repr(about).encode()).hexdigest()[:40]


def _read(key: str) -> dict[str, Any] | None:
  """A cached report; None if there is no readable one."""
  try:
    content = json.loads((cache_folder() / f'{key}.json').read_text())
    _compile_result(content, key, cached=True)
    return content
  except (OSError, ValueError, KeyError, TypeError, AttributeError):
    return None


def peak_of(memory: Mapping[str, int], target: Target) -> int:
  """The peak memory of a compiled program in bytes, from the compiler's memory analysis."""
  if target.chip.platform == 'tpu' and memory['peak']:
    return memory['peak']  # on TPU, arguments and temporaries do not add up to it
  return memory['arguments'] + memory['results'] - memory['shared'] + memory['temporaries']


def _cache(key: str, report: dict[str, Any]) -> None:
  _write(cache_folder() / f'{key}.json', json.dumps(report).encode())


def _cache_hlo(key: str, text: str) -> None:
  _write(cache_folder() / f'{key}.hlo.gz', gzip.compress(text.encode(), 5))


def _write(file: Path, content: bytes) -> None:
  """Writes a file atomically. If that fails, warns and continues."""
  try:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as temporary:
      temporary.write(content)
    os.replace(temporary.name, file)
  except OSError as error:
    warn(
      f'The compiled result cannot be cached in {file.parent}: {error.strerror}. '
      'Set FLAX_SPMD_CACHE to another folder.'
    )


@public('flax_spmd.explore')
def clear_cache() -> None:
  """Deletes all cached compilation results.

  Example:
    >>> import os, unittest.mock
    >>> with unittest.mock.patch.dict(os.environ, FLAX_SPMD_CACHE=str(tmp / 'cache')):
    ...   clear_cache()
  """
  shutil.rmtree(cache_folder(), ignore_errors=True)


def _counts_json(counts: Counts) -> dict[str, Any]:
  return counts._asdict() | {'collectives': [one._asdict() for one in counts.collectives]}


def _compile_result(content: dict[str, Any], key: str, cached: bool) -> CompileResult:
  counts = content.get('counts')
  if counts is not None:
    listed = tuple(Collective(**one | {'axes': tuple(one['axes'])}) for one in counts['collectives'])
    opaque = tuple(map(tuple, counts['opaque']))
    loops = tuple(CountedLoop(*one) for one in counts['loops'])
    products = tuple(Product(*one) for one in counts['products'])
    counts = counts | {'collectives': listed, 'opaque': opaque, 'loops': loops, 'products': products}
    counts = Counts(**counts)
  hlo = cache_folder() / f'{key}.hlo.gz'
  return CompileResult(
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
    tuple(LiveArray(*one) for one in content.get('live', ())),
  )
