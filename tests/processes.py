"""Processes: one Python source run in several processes, joined by `jax.distributed`.

results = run_processes('report(jax.process_index())', processes=2, devices=4)
[result.value for result in results]   # [0, 1]

The processes run on emulated CPU devices and communicate through gloo. The source has `jax`, `np` and
`report` in scope, and can import `tests` and `flax_spmd`; `report` takes a JSON value. The stderr of a process
that had to be killed ends with the Python stacks of its threads.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
MARK = 'reported: '

MAIN = f"""
import faulthandler, json, os, runpy, signal, sys, traceback

faulthandler.register(signal.SIGUSR1)

try:
  import jax
  import numpy as np

  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.distributed.initialize(
    coordinator_address='127.0.0.1:' + sys.argv[2],
    num_processes=int(sys.argv[3]),
    process_id=int(sys.argv[4]),
    cluster_detection_method='deactivate',
    initialization_timeout=60,
    heartbeat_timeout_seconds=int(sys.argv[5]),
  )
  scope = dict(jax=jax, np=np, report=lambda value: print({MARK!r} + json.dumps(value), flush=True))
  runpy.run_path(sys.argv[1], init_globals=scope)
except BaseException:
  traceback.print_exc()
  sys.stderr.flush()
  os._exit(1)  # an orderly exit would wait for the others, which wait for this one
"""


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
    """The last value that it reported."""
    return self.reported[-1] if self.reported else None


def run_processes(
  source: str,
  processes: int,
  devices: int,
  timeout: float = 120,
  grace: float = 10,
  check: bool = True,
  heartbeat: int = 100,
  flags: str = '--xla_backend_optimization_level=0',
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

  Returns:
    One result per process, in order.

  Raises:
    AssertionError: with `check`, if a process failed; the message holds the output of all processes.
  """
  with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    (folder / 'main.py').write_text(MAIN)
    (folder / 'source.py').write_text(source)
    with _started(folder, processes, heartbeat, _environment(devices, flags)) as children:
      _wait(children, timeout, grace)
    results = [_result(folder, number, child) for number, child in enumerate(children)]
  failed = [result.process for result in results if result.returncode]
  if check and failed:
    raise AssertionError(f'processes {failed} failed\n' + '\n'.join(map(_written, results)))
  return results


@contextmanager
def _started(
  folder: Path, processes: int, heartbeat: int, environment: dict[str, str]
) -> Iterator[list[subprocess.Popen]]:
  """The running processes; kills them at the end."""
  port = str(_free_port())
  with ExitStack() as stack:
    children = []
    for number in range(processes):
      command = [sys.executable, folder / 'main.py', folder / 'source.py', port, str(processes)]
      child = subprocess.Popen(
        [*command, str(number), str(heartbeat)],
        stdin=subprocess.DEVNULL,
        stdout=stack.enter_context(open(folder / f'{number}.out', 'w')),
        stderr=stack.enter_context(open(folder / f'{number}.err', 'w')),
        env=environment,
        cwd=folder,
      )
      stack.callback(_end, child)
      children.append(child)
    yield children


def _environment(devices: int, flags: str) -> dict[str, str]:
  return {
    **os.environ,
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices} {flags}',
    'PYTHONPATH': str(ROOT),
    'PYTHONWARNINGS': 'error',
  }


def _wait(children: list[subprocess.Popen], timeout: float, grace: float) -> None:
  """Waits until all have ended or time is up; after a failure, only for the grace period."""
  deadline = time.monotonic() + timeout
  while None in [child.poll() for child in children] and time.monotonic() < deadline:
    if any(child.returncode for child in children):
      deadline = min(deadline, time.monotonic() + grace)
    time.sleep(0.05)
  _write_stacks([child for child in children if child.poll() is None])


def _write_stacks(children: list[subprocess.Popen]) -> None:
  """Lets the processes write the stacks of their threads to stderr, even if they hang outside Python."""
  for child in children:
    child.send_signal(signal.SIGUSR1)
  if children:
    time.sleep(0.5)


def _end(child: subprocess.Popen) -> None:
  child.kill()  # no effect on a process that has ended
  child.wait()


def _result(folder: Path, number: int, child: subprocess.Popen) -> Result:
  stdout, stderr = ((folder / f'{number}.{end}').read_text(errors='replace') for end in ('out', 'err'))
  reported = [json.loads(line[len(MARK) :]) for line in stdout.splitlines() if line.startswith(MARK)]
  return Result(number, child.returncode, stdout, stderr, reported)


def _written(result: Result) -> str:
  return f'--- process {result.process}: {result.returncode}\n{result.stdout}\n{result.stderr}'


def _free_port() -> int:
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    return free.getsockname()[1]
