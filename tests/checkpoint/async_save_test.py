"""Saves in the background: their errors, changes of the state meanwhile, and the order of saves and restores."""

import errno
import multiprocessing
import os
import resource
import subprocess
import sys
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd._src.checkpoint.storage import async_save, generations
from tests.processes import run_process

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope='module')
def layout():
  return spmd.Layout({'data': 2, 'model': 4}, (('rows', 'data'), ('columns', 'model')))


@pytest.fixture(autouse=True)
def nothing_under_way():
  yield
  with suppress(errors.CheckpointError):
    async_save.finish()


def state_of(layout, number, side=256):
  x = np.random.default_rng(number).standard_normal((side, side), np.float32)
  return layout.shard(
    {'w': spmd.LogicallyPartitioned(x, ('rows', 'columns')), 'step': jnp.int32(number)}
  )


def number_of(path, layout, side=256):
  """The number of the state at a path, after comparing all of it."""
  restored = checkpoint.restore(path, layout=layout)
  number = int(restored['step'])
  np.testing.assert_array_equal(restored['w'], spmd.unbox(state_of(layout, number, side))['w'])
  return number


@contextmanager
def no_room():
  """Limits files to 64 KiB."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def wait_until_done(saving):
  """Waits without asking for the result, which would raise the error."""
  end = time.monotonic() + 300
  while not saving.done():
    assert time.monotonic() < end
    time.sleep(0.01)


def failed_save(path, layout, **options):
  """A save in the background that has failed, with an error that was not raised yet."""
  with no_room():
    saving = checkpoint.save_async(path, state_of(layout, 2), layout=layout, **options)
    wait_until_done(saving)
  return saving


def names_in(folder):
  return {child.name for child in folder.iterdir() if child.name != '.flax_spmd.lock'}


FAILED = 'The save to .* failed: .*\nFix: see the error above; the path keeps its previous contents.'
pytestmark = pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')


def test_an_error_raised_by_result_is_not_raised_again(tmp_path, layout):
  saving = failed_save(tmp_path / 'a', layout)
  assert saving.done()
  for _ in range(2):  # by every call of result
    with pytest.raises(errors.CheckpointError, match=FAILED):
      saving.result()
  checkpoint.save(tmp_path / 'b', state_of(layout, 1), layout=layout)  # and by nothing else
  assert names_in(tmp_path) == {'b'}


@pytest.mark.parametrize('call', ['save', 'save_async', 'restore'])
def test_an_error_is_raised_by_the_next_call(tmp_path, layout, call):
  checkpoint.save(tmp_path / 'before', state_of(layout, 1), layout=layout)
  failed_save(tmp_path / 'a', layout)
  calls = {
    'save': lambda: checkpoint.save(tmp_path / 'b', state_of(layout, 3), layout=layout),
    'save_async': lambda: checkpoint.save_async(
      tmp_path / 'b', state_of(layout, 3), layout=layout
    ).result(),
    'restore': lambda: checkpoint.restore(tmp_path / 'before', layout=layout),
  }
  with pytest.raises(errors.CheckpointError, match=f'{tmp_path / "a"} failed'):
    calls[call]()
  calls[call]()


def test_a_failed_overwrite_keeps_the_old_checkpoint(tmp_path, layout):
  checkpoint.save(tmp_path / 'a', state_of(layout, 1), layout=layout)
  with pytest.raises(errors.CheckpointError, match=FAILED):
    failed_save(tmp_path / 'a', layout, overwrite=True).result()
  assert number_of(tmp_path / 'a', layout) == 1
  assert names_in(tmp_path) == {'a'}


def test_the_lock_is_free_again_after_an_error(tmp_path, layout):
  with pytest.raises(errors.CheckpointError, match=FAILED):
    failed_save(tmp_path / 'a', layout).result()
  checkpoint.save(tmp_path / 'a', state_of(layout, 3), layout=layout)
  assert number_of(tmp_path / 'a', layout) == 3


def test_an_error_before_anything_is_written_frees_the_lock(tmp_path, layout, monkeypatch):
  def broken(*args, **kwargs):
    raise OSError('no such storage')

  with monkeypatch.context() as patched:
    patched.setattr('orbax.checkpoint.v1.save_async', broken)
    with pytest.raises(errors.CheckpointError, match=r'a failed: no such storage\.\nFix: '):
      checkpoint.save_async(tmp_path / 'a', state_of(layout, 1), layout=layout)
  checkpoint.save(tmp_path / 'a', state_of(layout, 2), layout=layout)
  assert names_in(tmp_path) == {'a'}


@pytest.mark.parametrize('name', ['flax_spmd call', 'flax_spmd save', 'flax_spmd lease'])
def test_a_thread_that_cannot_start_frees_the_path(tmp_path, layout, monkeypatch, name):
  """The one that computes checksums, the one that commits, and the one that renews the lease."""
  start = threading.Thread.start

  def refused(thread):
    if thread.name.startswith(name):
      raise RuntimeError("can't start new thread")
    start(thread)

  checkpoint.save(tmp_path / 'a', state_of(layout, 1), layout=layout)
  with monkeypatch.context() as patched:
    patched.setattr(threading.Thread, 'start', refused)
    for path, overwrite in ((tmp_path / 'a', True), (tmp_path / 'b', False)):
      with pytest.raises(errors.CheckpointError) as caught:
        checkpoint.save_async(path, state_of(layout, 2), layout=layout, overwrite=overwrite)
      assert str(caught.value) == (
        f"The save to {path} failed: can't start new thread.\n"
        'Fix: see the error above; the path keeps its previous contents.'
      )
      assert isinstance(caught.value.__cause__, RuntimeError)
  assert number_of(tmp_path / 'a', layout) == 1
  assert checkpoint.ls(tmp_path)[0].path == str(tmp_path / 'a')
  for path, overwrite in ((tmp_path / 'a', True), (tmp_path / 'b', False)):
    checkpoint.save(path, state_of(layout, 3), layout=layout, overwrite=overwrite)
  assert names_in(tmp_path) == {'a', 'b'}


def test_a_time_out_of_the_storage(layout, tmp_path, monkeypatch):
  """It is an error of the save, not of the wait for it."""

  class TimedOut:
    def result(self, timeout=None):
      raise TimeoutError(errno.ETIMEDOUT, 'Connection timed out')

  monkeypatch.setattr('orbax.checkpoint.v1.save_async', lambda *args, **kwargs: TimedOut())
  saving = checkpoint.save_async(tmp_path / 'a', state_of(layout, 1), layout)
  with pytest.raises(errors.CheckpointError) as caught:
    saving.result(timeout=30)
  assert str(caught.value) == (
    f'The save to {tmp_path / "a"} failed: [Errno {errno.ETIMEDOUT}] Connection timed out.\n'
    'Fix: see the error above; the path keeps its previous contents.'
  )


@contextmanager
def held_up(monkeypatch):
  """Saves that do not end before the event is set."""
  go_on, wait_for = threading.Event(), async_save.wait_for

  def delayed(*args):
    assert go_on.wait(300)
    wait_for(*args)

  with monkeypatch.context() as patched:
    patched.setattr(async_save, 'wait_for', delayed)
    try:
      yield go_on
    finally:
      go_on.set()


def test_a_second_save_waits_for_the_first(tmp_path, layout, monkeypatch):
  with held_up(monkeypatch) as go_on:
    first = checkpoint.save_async(tmp_path / 'a', state_of(layout, 1), layout=layout)
    with pytest.raises(TimeoutError, match=f'The save to {tmp_path / "a"} is still in progress'):
      first.result(timeout=0.01)
    assert not first.done() and checkpoint.ls(tmp_path) == []
    threading.Timer(0.3, go_on.set).start()
    second = checkpoint.save_async(tmp_path / 'b', state_of(layout, 2), layout=layout)
    assert first.done()
    second.result()
  assert (number_of(tmp_path / 'a', layout), number_of(tmp_path / 'b', layout)) == (1, 2)


def test_a_wait_that_is_interrupted_is_made_by_the_next_call(tmp_path, layout, monkeypatch):
  """As by Ctrl-C in a notebook."""

  def interrupted(saving, timeout=None):
    raise KeyboardInterrupt

  with held_up(monkeypatch) as go_on:
    first = checkpoint.save_async(tmp_path / 'a', state_of(layout, 1), layout=layout)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
      patched.setattr(async_save.AsyncSave, 'result', interrupted)
      checkpoint.save(tmp_path / 'b', state_of(layout, 2), layout=layout)
    threading.Timer(0.2, go_on.set).start()
    assert number_of(tmp_path / 'a', layout) == 1 and first.done()


def test_a_restore_waits_for_the_save(tmp_path, layout, monkeypatch):
  with held_up(monkeypatch) as go_on:
    checkpoint.save_async(tmp_path / 'a', state_of(layout, 1), layout=layout)
    threading.Timer(0.3, go_on.set).start()
    assert number_of(tmp_path / 'a', layout) == 1


@pytest.mark.filterwarnings('ignore:.*fork:')
def test_a_forked_process_ends_during_the_save(tmp_path, layout, monkeypatch):
  """As the workers of a data loader do. The threads that save are in the other process."""
  with held_up(monkeypatch):
    saving = checkpoint.save_async(tmp_path / 'a', state_of(layout, 1), layout)
    worker = multiprocessing.get_context('fork').Process(target=int)
    worker.start()
    worker.join(60)
    ended = worker.exitcode
    worker.kill()
  saving.result()
  assert ended == 0 and number_of(tmp_path / 'a', layout) == 1


def test_an_error_after_a_timeout_is_still_raised(tmp_path, layout, monkeypatch):
  with held_up(monkeypatch) as go_on, no_room():
    saving = checkpoint.save_async(tmp_path / 'a', state_of(layout, 1), layout=layout)
    with pytest.raises(TimeoutError):
      saving.result(timeout=0.01)
    go_on.set()
    wait_until_done(saving)
  with pytest.raises(errors.CheckpointError, match=FAILED):
    checkpoint.save(tmp_path / 'b', state_of(layout, 2), layout=layout)


def test_a_path_is_busy_during_a_save(tmp_path, layout, monkeypatch):
  code = f"""
    import flax_spmd as spmd
    from flax_spmd import checkpoint
    try:
      checkpoint.save({str(tmp_path / 'a')!r}, {{'w': 1}}, spmd.Layout({{'data': 8}}), overwrite=True)
    except Exception as error:
      print(type(error).__name__, error)
  """
  with held_up(monkeypatch):
    saving = checkpoint.save_async(tmp_path / 'a', state_of(layout, 1), layout=layout)
    output = run_process(dedent(code)).stdout
  saving.result()
  assert output.startswith(f'CheckpointBusyError Checkpoint {tmp_path / "a"} is being written')
  assert f'process {os.getpid()} on ' in output
  assert number_of(tmp_path / 'a', layout) == 1


@pytest.mark.parametrize('pack', [0, 1 << 20])
def test_the_state_may_be_donated_during_the_save(tmp_path, layout, pack):
  state = state_of(layout, 1, side=1024)
  step = layout.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
  step(state_of(layout, 2, side=1024))  # compiled before
  saving = checkpoint.save_async(tmp_path / 'a', state, layout=layout, pack=pack)
  for _ in range(5):
    state = step(state)
  jax.block_until_ready(state)
  saving.result()
  assert number_of(tmp_path / 'a', layout, side=1024) == 1


def test_the_state_may_be_deleted_during_the_save(tmp_path, layout):
  state = state_of(layout, 1, side=1024)
  saving = checkpoint.save_async(tmp_path / 'a', state, layout=layout)
  for leaf in jax.tree.leaves(state):
    leaf.delete()
  junk = [jnp.full((1024, 1024), i) for i in range(8)]  # reuses the memory if it was freed
  saving.result()
  del junk
  assert number_of(tmp_path / 'a', layout, side=1024) == 1


def test_numpy_leaves_may_be_changed_during_the_save(tmp_path, layout):
  x = np.arange(1 << 20, dtype=np.float32)
  saving = checkpoint.save_async(tmp_path / 'a', {'x': x}, layout=layout)
  x[:] = -1
  saving.result()
  np.testing.assert_array_equal(
    checkpoint.restore(tmp_path / 'a', {'x': x})['x'], np.arange(1 << 20, dtype=np.float32)
  )


# -- at the end of a program


def run(code, *args):
  environment = {
    **os.environ,
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': '--xla_force_host_platform_device_count=8',
    'PYTHONPATH': str(ROOT),
  }
  command = [sys.executable, '-c', dedent(code), *map(str, args)]
  return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


PROGRAM = """
  import resource, sys, time
  import jax.numpy as jnp
  import flax_spmd as spmd
  from flax_spmd import checkpoint, errors
  layout = spmd.Layout({'data': 8}, (('rows', 'data'),))
  state = layout.shard({'w': spmd.LogicallyPartitioned(jnp.ones((512, 512)), ('rows', None))})
"""


def test_a_program_whose_save_failed_ends_with_1(tmp_path):
  code = f"""{PROGRAM}
  resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
  saving = checkpoint.save_async(sys.argv[1], state, layout=layout)
  while not saving.done(): time.sleep(0.01)
  print('the program goes on')
  """
  done = run(code, tmp_path / 'a')
  assert done.returncode == 1, done.stderr
  assert done.stdout == 'the program goes on\n'
  assert f'CheckpointError: The save to {tmp_path / "a"} failed: ' in done.stderr


def test_a_program_that_caught_the_error_ends_with_0(tmp_path):
  code = f"""{PROGRAM}
  resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
  saving = checkpoint.save_async(sys.argv[1], state, layout=layout)
  try:
    saving.result()
  except errors.CheckpointError:
    print('caught')
  """
  done = run(code, tmp_path / 'a')
  assert (done.returncode, done.stdout) == (0, 'caught\n'), done.stderr


@pytest.mark.parametrize('place', ['PendingRecord.complete', 'Claim._file_records'])
def test_a_program_that_ends_during_the_commit(tmp_path, monkeypatch, place):
  def no_thread(*arguments):
    raise RuntimeError("can't create new thread at interpreter shutdown")

  holders = {'PendingRecord': async_save.PendingRecord, 'Claim': generations.Claim}
  holder, name = place.split('.')
  monkeypatch.setattr(holders[holder], name, no_thread)
  layout = spmd.Layout({'data': 8})
  with pytest.raises(errors.CheckpointError) as caught:
    checkpoint.save(tmp_path / 'a', {'w': jnp.ones(8)}, layout=layout)
  assert str(caught.value) == (
    f'The program ended before {tmp_path / "a"} was saved.\n'
    'Fix: call result() of the last save before the program ends; the path keeps its previous contents.'
  )
  assert "can't create new thread" not in ''.join(traceback.format_exception(caught.value))
  monkeypatch.undo()
  checkpoint.save(tmp_path / 'a', {'w': jnp.ones(8)}, layout=layout)


def test_a_program_that_ends_during_a_save_completes_it_or_reports_the_error(tmp_path):
  """Since Python 3.12, Orbax cannot start threads while a program ends."""
  code = f"""{PROGRAM}
  checkpoint.save_async(sys.argv[1], state, layout=layout)
  """
  done = run(code, tmp_path / 'a')
  assert (done.returncode == 0) == (tmp_path / 'a').exists(), done.stderr
  if done.returncode:
    assert done.returncode == 1
    assert f'The program ended before {tmp_path / "a"} was saved.' in done.stderr
    assert 'Fix: call result() of the last save before the program ends' in done.stderr
    assert sys.version_info >= (3, 12)


def test_a_program_that_ends_once_the_arrays_are_written_completes_the_save(tmp_path):
  """No thread can be started then, since Python 3.12."""
  code = f"""{PROGRAM}
  import threading
  from flax_spmd._src.checkpoint.storage import async_save
  commit = async_save.commit
  def late(*arguments):
    committing.set()
    while not threading._SHUTTING_DOWN: time.sleep(0.01)
    commit(*arguments)
  committing, async_save.commit = threading.Event(), late
  checkpoint.save_async(sys.argv[1], state, layout=layout)
  committing.wait()
  """
  done = run(code, tmp_path / 'a')
  assert (done.returncode, done.stderr) == (0, '')
  assert (np.asarray(checkpoint.restore(tmp_path / 'a')['w']) == np.ones((512, 512))).all()
