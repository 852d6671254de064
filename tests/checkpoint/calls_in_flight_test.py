"""Checkpoint calls in daemon threads at the end of a program: it waits for those that have begun, and no other begins."""

import os
import subprocess
import sys
from textwrap import dedent

import numpy as np
import pytest

import flax_spmd as spmd
from flax_spmd import checkpoint

STARTS_NO_THREADS = (3, 12) <= sys.version_info < (3, 12, 2)  # as a program ends; the last call may fail
LAYOUT = spmd.Layout({'data': 1})
COUNTS = """
  import atexit, os, sys, threading, time
  counts = []
  @atexit.register  # runs after the hooks of the package, which are registered later
  def look():
    before = len(counts)
    time.sleep(0.1)
    print(before == len(counts) > 0, *ended)
  from flax_spmd._src.checkpoint.storage.calls_in_flight import in_flight
  ended, started = [], threading.Barrier(3)
  def again_and_again():
    started.wait()
    while True:
      with in_flight():
        counts.append(1)
      time.sleep(0)
  def once():
    with in_flight():
      started.wait()
      time.sleep(0.5)
      with in_flight():  # within one that has begun
        ended.append('once')
  threading.Thread(target=again_and_again, daemon=True).start()
  threading.Thread(target=once, daemon=True).start()
  @atexit.register
  def in_the_main_thread():
    with in_flight():
      ended.append('hook')
  started.wait()
  while not counts: time.sleep(0.01)
"""
DAEMONS = {
  'follow': """
    read = checkpoint.Manager(root, layout, read_only=True)
    def call():
      for _ in read.follow(every=0.001): pass
  """,
  'save': """
    def call():
      for number in range(2, 10**6): checkpoint.save(f'{root}/{number}', state, layout)
  """,
  'restore': """
    def call():
      while True: checkpoint.restore(f'{root}/1', layout=layout)
  """,
}


def run(code, *arguments):
  environment = os.environ | {'JAX_PLATFORMS': 'cpu'}
  command = [sys.executable, '-c', dedent(code), *map(str, arguments)]
  return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_the_end_of_a_program_waits_for_calls_that_have_begun_and_lets_no_other_begin():
  done = run(COUNTS)
  assert (done.returncode, done.stdout, done.stderr) == (0, 'True once hook\n', '')


@pytest.mark.slow
@pytest.mark.parametrize('call', DAEMONS)
def test_calls_in_daemon_threads_do_not_abort_the_end_of_a_program(tmp_path, call):
  start = """
    import sys, threading, time
    import numpy as np
    import flax_spmd as spmd
    from flax_spmd import checkpoint
    root, layout, state = sys.argv[1], spmd.Layout({'data': 1}), {'w': np.ones(1 << 18, np.float32)}
    with checkpoint.Manager(root, layout, every=1) as manager: manager.save(1, state)
  """
  end = """
    threading.Thread(target=call, daemon=True).start()
    time.sleep(0.3)
  """
  for number in range(3):
    done = run(dedent(start) + dedent(DAEMONS[call]) + dedent(end), tmp_path / str(number))
    assert 'Fatal Python error' not in done.stderr
    assert STARTS_NO_THREADS or (done.returncode, done.stderr) == (0, '')
    saved = [each for each in (tmp_path / str(number)).iterdir() if each.name.isdigit()]
    for each in sorted(saved, key=lambda path: int(path.name))[: -1 if STARTS_NO_THREADS else None]:
      np.testing.assert_array_equal(checkpoint.restore(each, layout=LAYOUT)['w'], np.ones(1 << 18))
