"""The parent of the processes of `tests.processes`: it has imported everything, and used nothing.

Starting Python and importing JAX takes seconds, so each process is forked from this one. Like a process that starts
anew, it initializes its devices, its threads and its connections itself, and ends as any program does.
"""

import contextlib
import faulthandler
import gc
import json
import os
import runpy
import signal
import sys
import time
import traceback
import warnings
from typing import Any

import flax.linen  # noqa: F401
import jax
import numpy as np
import optax  # noqa: F401
from orbax.checkpoint import v1  # noqa: F401

import flax_spmd.checkpoint
import flax_spmd.pipeline  # noqa: F401
from tests.processes import MARK

with contextlib.suppress(ImportError):  # benchmarks start processes too, without it
  import pytest  # noqa: F401


def _serve() -> None:
  """Runs what is asked for, line by line; a process that was forked returns after its part."""
  gc.freeze()  # what was imported is not collected again at the end of each process
  for line in sys.stdin:
    how = json.loads(line)
    children = []
    for number in range(how['processes']):
      with warnings.catch_warnings(action='ignore'):  # libraries have threads, which wait for work
        child = os.fork()
      if not child:
        _run(how, number)
        return
      children.append(child)
    print(json.dumps(_wait(children, how['timeout'], how['grace'])), flush=True)


def _run(how: dict[str, Any], number: int) -> None:
  """One process."""
  os.environ.clear()
  os.environ.update(how['environment'])
  os.chdir(how['folder'])
  for end, descriptor in ((os.devnull, 0), (f'{number}.out', 1), (f'{number}.err', 2)):
    os.dup2(os.open(end, os.O_RDWR | os.O_CREAT | os.O_APPEND), descriptor)
  faulthandler.enable()
  faulthandler.register(signal.SIGUSR1)
  try:
    if how['joined']:
      _join(how, number)
    scope = dict(jax=jax, np=np, report=lambda value: print(MARK + json.dumps(value), flush=True))
    runpy.run_path('source.py', init_globals=scope)
  except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)  # an orderly exit would wait for the others, which wait for this one


def _join(how: dict[str, Any], number: int) -> None:
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.distributed.initialize(
    coordinator_address=f'127.0.0.1:{how["port"]}',
    num_processes=how['processes'],
    process_id=number,
    cluster_detection_method='deactivate',
    initialization_timeout=300,
    heartbeat_timeout_seconds=how['heartbeat'],
  )


def _wait(children: list[int], timeout: float, grace: float) -> list[int]:
  """Exit statuses, after time is up for all of them, or after a failure and the grace period for the others."""
  codes: dict[int, int] = {}
  deadline = time.monotonic() + timeout
  while _still_run(children, codes) and time.monotonic() < deadline:
    if any(codes.values()):
      deadline = min(deadline, time.monotonic() + grace)
    time.sleep(0.02)
  late = _still_run(children, codes)
  for child in late:
    os.kill(child, signal.SIGUSR1)  # writes the stacks of its threads, even if it hangs outside Python
  time.sleep(0.5 if late else 0)
  for child in late:
    os.kill(child, signal.SIGKILL)
    codes[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
  return [codes[child] for child in children]


def _still_run(children: list[int], codes: dict[int, int]) -> list[int]:
  """The children that run; notes the exit statuses of the others."""
  for child in children:
    if child not in codes:
      ended, status = os.waitpid(child, os.WNOHANG)
      if ended:
        codes[child] = os.waitstatus_to_exitcode(status)
  return [child for child in children if child not in codes]


if __name__ == '__main__':
  _serve()
