"""Processes: one Python source run in several processes, joined by `jax.distributed`, or in one of its own.

results = run_processes('report(jax.process_index())', processes=2, devices=4)
[result.value for result in results]   # [0, 1]
run_process('report(len(jax.devices()))').value   # 8

The processes run on emulated CPU devices; several communicate through gloo. The source has `jax`, `np` and
`report` in scope, and can import `tests` and `flax_spmd`; `report` takes a JSON value. The stderr of a process
that had to be killed ends with the Python stacks of its threads. `process_parent` starts them.
"""

import atexit
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
# Test programs are small and compiled once: optimising them would take most of the time, and before JAX 0.11 the
# emitters of fusions two fifths of it.
QUICKLY_COMPILED = '--xla_backend_optimization_level=0'
if tuple(map(int, version('jax').split('.')[:2])) < (0, 11):
  QUICKLY_COMPILED += ' --xla_cpu_use_fusion_emitters=false'
MARK = 'reported: '
JAX_COPIES = """
import socket
with socket.socket() as free:
  free.bind(('127.0.0.1', 0))
  jax.config.update('jax_cross_host_transfer_socket_address', '127.0.0.1:%d' % free.getsockname()[1])
"""
"""Source that lets JAX itself copy arrays between processes; before the first use of JAX."""

_PYTHON = sys.executable
_parent: Any = None
_one_at_a_time = threading.Lock()


class Result(NamedTuple):
  """The result of one process.

  Attributes:
    process: index of the process.
    returncode: exit status; negative if it was killed.
    stdout, stderr: its whole output.
    reported: the values that it passed to `report`, in order.
  """

  process: int
  returncode: int
  stdout: str
  stderr: str
  reported: list[Any]

  @property
  def value(self) -> Any:
    """The last value that it reported; without one, an `AssertionError` with its whole output is raised."""
    assert self.reported, f'nothing was reported\n{_written(self)}'
    return self.reported[-1]


def run_processes(
  source: str,
  processes: int,
  devices: int,
  timeout: float = 600,
  grace: float = 10,
  check: bool = True,
  heartbeat: int = 100,
  flags: str = QUICKLY_COMPILED,
  joined: bool = True,
) -> list[Result]:
  """Runs `source` in `processes` processes with `devices` emulated devices each.

  Args:
    source: Python source code.
    processes: number of processes.
    devices: number of devices per process.
    timeout: seconds until all of them are killed.
    grace: seconds until the others are killed after one process has failed; they may wait for it.
    check: whether a process that fails or is killed fails the test.
    heartbeat: seconds of silence after which JAX takes a process for dead and ends the others.
    flags: further flags of XLA; by default those that compile fast.
    joined: whether `jax.distributed` joins them.

  Returns:
    One result per process, in order.

  Raises:
    AssertionError: with `check`, if a process failed; the message holds all output, that of those that failed first.
  """
  how = {
    'port': _free_port(),
    'processes': processes,
    'timeout': timeout,
    'grace': grace,
    'heartbeat': heartbeat,
    'joined': joined,
  }
  devices_flag = f'--xla_force_host_platform_device_count={devices}'
  results = _run(source, os.environ | {'XLA_FLAGS': f'{devices_flag} {flags}'}, how)
  failed = [result.process for result in results if result.returncode]
  if check and failed:
    # Some reports of tests cut long messages.
    failed_first = sorted(results, key=lambda result: result.returncode == 0)
    raise AssertionError(f'processes {failed} failed\n' + '\n'.join(map(_written, failed_first)))
  return results


def run_process(source: str, check: bool = True) -> Result:
  """Runs `source` in one process with 8 devices; without `check`, it may fail or be killed."""
  [result] = run_processes(source, processes=1, devices=8, joined=False, check=check)
  return result


def run_module(
  command: Sequence[str], *, env: Mapping[str, str], timeout: float, **options: Any
) -> subprocess.CompletedProcess[str]:
  """A substitute for `subprocess.run` of `python -m`, which captures the output; another Python starts as usual."""
  python, _, module, *arguments = command
  if python != _PYTHON:
    return subprocess.run(command, env=env, timeout=timeout, **options)
  source = f"""
import runpy, sys, warnings
warnings.simplefilter('default')
sys.argv[1:] = {arguments!r}
runpy.run_module({module!r}, run_name='__main__')
"""
  how = {'processes': 1, 'timeout': timeout, 'grace': 0, 'joined': False}
  [result] = _run(source, env, how)
  return subprocess.CompletedProcess(command, result.returncode, result.stdout, result.stderr)


def _run(source: str, environment: Mapping[str, str], how: dict[str, Any]) -> list[Result]:
  with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    (folder / 'source.py').write_text(source)
    own = {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)}
    codes = _returncodes(how | {'folder': temporary, 'environment': {**environment, **own}})
    return [_result(folder, number, code) for number, code in enumerate(codes)]


def _returncodes(how: dict[str, Any]) -> list[int]:
  """Exit statuses of processes that ran in this way."""
  global _parent
  with _one_at_a_time:
    if _parent is None:
      _parent = subprocess.Popen(
        [_PYTHON, '-W', 'error', '-m', 'tests.process_parent'],
        env={**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
      )
      atexit.register(_end)
    _parent.stdin.write(json.dumps(how) + '\n')
    _parent.stdin.flush()
    answer = _parent.stdout.readline()
  assert answer, 'the parent of the processes has ended'
  return json.loads(answer)


def _end() -> None:
  """Ends the parent of the processes."""
  _parent.stdin.close()
  _parent.wait()
  _parent.stdout.close()


def _result(folder: Path, number: int, code: int) -> Result:
  stdout, stderr = ((folder / f'{number}.{end}').read_text(errors='replace') for end in ('out', 'err'))
  reported = [json.loads(line[len(MARK) :]) for line in stdout.splitlines() if line.startswith(MARK)]
  return Result(number, code, stdout, stderr, reported)


def _written(result: Result) -> str:
  return f'--- process {result.process}: {result.returncode}\n{result.stdout}\n{result.stderr}'


def _free_port() -> int:
  """A free port, of those above the ports that systems give to connections."""
  while True:
    port = 61_000 + secrets.randbelow(4_500)
    with socket.socket() as free, contextlib.suppress(OSError):
      free.bind(('127.0.0.1', port))
      return port


def end_by(number: int) -> None:
  """Sends this process a signal that ends or stops it, and waits: if another thread takes it, this one could go on."""
  os.kill(os.getpid(), number)
  time.sleep(1)


@contextlib.contextmanager
def as_another_user():
  """Root may read everything, so it becomes somebody else."""
  is_root = os.geteuid() == 0
  if is_root:
    os.seteuid(65534)
  try:
    yield
  finally:
    if is_root:
      os.seteuid(0)
