"""Other processes on this machine, quickly: forked from one that has imported everything and used nothing."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

_PARENT = """
import json, os, sys, traceback
import numpy as np
import jax
import jax.numpy as jnp
import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from orbax.checkpoint import v1 as ocp

def report(value):
  print('report ' + json.dumps(value), flush=True)

for line in sys.stdin:
  child = os.fork()
  if not child:
    code = 0
    try:
      exec(json.loads(line), globals())
    except BaseException:
      traceback.print_exc()
      code = 1
    os._exit(code)
  print('exit', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Ended(NamedTuple):
  """How a process has ended.

  Attributes:
    code: its exit code; the negative number of a signal that killed it.
    reported: the values that it reported.
  """

  code: int
  reported: list[Any]


@contextmanager
def forked_processes():
  """A function that runs source code in a new process, and waits for its end.

  The code sees `spmd`, `checkpoint`, `errors`, `ocp`, `jax`, `jnp` and `np`; `report(value)` returns a value.
  """
  environment = {
    **os.environ,
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': '--xla_force_host_platform_device_count=8',
    'PYTHONPATH': str(Path(__file__).parents[2]),
  }
  with subprocess.Popen(
    [sys.executable, '-W', 'ignore::RuntimeWarning', '-c', _PARENT],
    env=environment,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  ) as parent:

    def run(source):
      parent.stdin.write(json.dumps(dedent(source)) + '\n')
      parent.stdin.flush()
      reported = []
      for line in parent.stdout:
        kind, _, rest = line.partition(' ')
        if kind == 'exit':
          return Ended(int(rest), reported)
        if kind == 'report':
          reported.append(json.loads(rest))
      raise AssertionError('the parent of the other processes has ended')

    yield run
