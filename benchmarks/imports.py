"""Import time: the time that `import flax_spmd` adds to a program that already imports Flax and Optax.

Whole interpreters are started with and without the import, in pairs of random order; a figure is the median
over pairs of the difference. Two clocks: wall time, and CPU time of the process, which other work on the
machine disturbs less. The difference is small beside the noise of processes that run for more than a second,
so the import statement is also timed within the same processes. That leaves out only the shutdown of the
interpreter.

The garbage collector is off in both arms of the first figures. A full collection of the objects of JAX and
Flax takes about 70 ms, and a few allocations more or less decide which arm it falls into. Figures with the
collector on, as for users, have no target. Bytecode is cached: every arm runs once before it is timed.
"""

import os
import random
import resource
import subprocess
import sys
import time
from typing import NamedTuple

from harness import Figure, Rounds, added, at_most, summary
from reporting import report

PAIRS = 15
WITHOUT = 'import flax.linen, optax'
WITH = """
import flax.linen, optax, time
start = time.process_time()
import flax_spmd
print(time.process_time() - start)
"""
COLLECTOR_OFF = 'import gc; gc.disable(); '


def figures() -> list[Figure]:
  off, on = _pairs(COLLECTOR_OFF), _pairs('')
  return [
    added('import, collector off, wall', _of(off, 0), 'with', 'without', at_most(50), unit='ms'),
    added('import, collector off, CPU', _of(off, 1), 'with', 'without', unit='ms'),
    summary('the statement, collector off, CPU', _statements(off), 'ms'),
    added('import, collector on, wall', _of(on, 0), 'with', 'without', unit='ms'),
    added('import, collector on, CPU', _of(on, 1), 'with', 'without', unit='ms'),
    summary('the statement, collector on, CPU', _statements(on), 'ms'),
  ]


def _pairs(prelude: str):
  """Per pair, the wall and the CPU seconds of the interpreter with and without the import."""
  arms = {'without': prelude + WITHOUT, 'with': prelude + WITH}
  for code in arms.values():
    _run(code)
  order = random.Random(0)
  return [{arm: _run(arms[arm]) for arm in order.sample(list(arms), 2)} for _ in range(PAIRS)]


def _of(pairs, clock: int) -> Rounds:
  return [{arm: seconds[clock] for arm, seconds in pair.items()} for pair in pairs]


def _statements(pairs) -> list[float]:
  """CPU time of the import statement itself in each pair, in milliseconds."""
  return [1e3 * pair['with'].statement for pair in pairs]


class Process(NamedTuple):
  """Time of an interpreter, and of its last import, in seconds."""

  wall: float
  cpu: float
  statement: float


def _run(code: str) -> Process:
  environment = {k: v for k, v in os.environ.items() if k != 'PYTHONDONTWRITEBYTECODE'}
  cpu, wall = _children_cpu(), time.perf_counter()
  command = [sys.executable, '-c', code]
  output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
  return Process(time.perf_counter() - wall, _children_cpu() - cpu, float(output or 'nan'))


def _children_cpu() -> float:
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  return used.ru_utime + used.ru_stime


if __name__ == '__main__':
  report('imports', figures)
