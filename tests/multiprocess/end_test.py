"""The end of processes whose threads call JAX until then."""

import pytest

from tests.processes import run_process, run_processes

SOURCE = """
import threading, time
from flax_spmd._src import joint_call, periodic_calls, whereabouts
whereabouts._EVERY = 0.0
jax.devices()
joint_call.answer_others()
def ask():
  made.append(whereabouts.stored('a key') is None)
made, stopped = [], threading.Event()
for number in range(4):
  periodic_calls.start_periodic_calls(ask, 0.0, f'asks {number}', stopped)
time.sleep(0.2)
report(bool(made) and all(made))
"""


@pytest.mark.slow
def test_threads_that_call_jax_do_not_abort_the_end_of_a_process():
  for _ in range(4):
    assert all(result.value for result in run_processes(SOURCE, processes=4, devices=1))


LOOKING = """
import time
import jax.numpy as jnp
from flax_spmd._src.pipeline.run import rank_watch
x, square = jnp.ones((300, 300)), jax.jit(lambda x: x @ x)
square(x)
end = time.monotonic() + 1
def look():
  while time.monotonic() < end:
    square(x).block_until_ready()
threads = [rank_watch._DaemonThread('pipeline watch', look) for _ in range(2)]
report(all(thread.is_alive() for thread in threads))
"""


def test_a_look_at_the_ranks_of_a_pipeline_does_not_abort_the_end_of_a_process():
  assert run_process(LOOKING).value
