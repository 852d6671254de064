"""A process that dies in the middle of a step: with the option of the how-to, JAX ends the others within a minute."""

import time

import pytest

from tests.processes import run_processes

SOURCE = """
import signal, time
import jax.numpy as jnp
import flax_spmd as spmd
from tests.processes import end_by

layout = spmd.Layout({'data': 2}, (('batch', 'data'),))
x = layout.local_to_global(np.ones((4, 8), np.float32), ('batch', None))
step = layout.jit(lambda x: x / jnp.mean(x))  # waits for all processes
for number in range(1_000_000):
  if number == 20 and jax.process_index() == VICTIM:
    report(time.time())
    end_by(signal.SIGNAL)
  x = jax.block_until_ready(step(x))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
  ('signal', 'victim', 'grace'),
  [
    ('SIGKILL', 1, 150),
    ('SIGKILL', 0, 150),
    # as a host without power: its connections stay open
    pytest.param('SIGSTOP', 1, 1, marks=pytest.mark.exhaustive),
    pytest.param('SIGSTOP', 0, 1, marks=pytest.mark.exhaustive),
  ],
)
def test_a_process_that_dies_in_a_step_ends_the_others_within_a_minute(signal, victim, grace):
  source = SOURCE.replace('SIGNAL', signal).replace('VICTIM', str(victim))
  results = run_processes(source, 2, 1, grace=grace, check=False, heartbeat=30)
  ended = time.time()
  survivor = results[1 - victim]
  assert survivor.returncode not in (0, -9)  # -9: still running, and killed by this test
  assert ended - results[victim].value <= 150  # 60 on a machine that is not overloaded
  assert survivor.stderr  # its text depends on which of JAX's threads notices first
