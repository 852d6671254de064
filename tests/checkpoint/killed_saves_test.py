"""Killed saves: after a kill at any moment, a complete checkpoint can be restored.

A process is killed before or after its n-th operation on files (rename, remove, sync), so that every moment
between two operations is covered; and at random moments, while Orbax writes.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import jax.numpy as jnp
import numpy as np
import pytest

import flax_spmd as spmd
from flax_spmd import checkpoint, errors

ROOT = Path(__file__).parents[2]

VICTIM = """
  import os, pathlib, shutil, signal, sys
  import numpy as np
  import jax.numpy as jnp
  import flax_spmd as spmd
  from flax_spmd import checkpoint
  from flax_spmd._src.checkpoint.storage import folders
  path, overwrite, moment, when = sys.argv[1], sys.argv[2] == 'True', int(sys.argv[3]), sys.argv[4]
  layout = spmd.Layout({'data': 8}, (('rows', 'data'),))
  x = np.random.default_rng(2).standard_normal((512, 512), np.float32)
  state = layout.shard({'w': spmd.LogicallyPartitioned(x, ('rows', None)), 'step': jnp.int32(2)})

  seen = 0
  def fatal(call):
    def counted(*args, **kwargs):
      global seen
      seen += 1
      if seen == moment and when == 'before':
        os.kill(os.getpid(), signal.SIGKILL)
      result = call(*args, **kwargs)
      if seen == moment:
        os.kill(os.getpid(), signal.SIGKILL)
      return result
    return counted

  for module, name in ((os, 'rename'), (os, 'replace'), (shutil, 'rmtree'), (os, 'fsync')):
    setattr(module, name, fatal(getattr(module, name)))
  print('ready', flush=True)
  sys.stdin.readline()
  checkpoint.save(path, state, layout=layout, overwrite=overwrite)
  print('saved', seen, flush=True)
"""


@pytest.fixture(scope='module')
def layout():
  return spmd.Layout({'data': 8}, (('rows', 'data'),))


def values(number):
  return np.random.default_rng(number).standard_normal((512, 512), np.float32)


def state_of(layout, number):
  boxed = spmd.LogicallyPartitioned(values(number), ('rows', None))
  return layout.shard({'w': boxed, 'step': jnp.int32(number)})


def number_of(path, layout):
  """The number of the restored state, after comparing all of it; None if there is no checkpoint."""
  try:
    restored = checkpoint.restore(path, layout=layout)
  except errors.CheckpointNotFoundError:
    return None
  np.testing.assert_array_equal(restored['w'], values(int(restored['step'])))
  return int(restored['step'])


def started(path, overwrite, moment=0, when='before'):
  environment = {
    **os.environ,
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': '--xla_force_host_platform_device_count=8',
    'PYTHONPATH': str(ROOT),
  }
  return subprocess.Popen(
    [sys.executable, '-c', dedent(VICTIM), path, str(overwrite), str(moment), when],
    env=environment,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
  )


def go(process):
  assert process.stdout.readline() == 'ready\n'
  process.stdin.write('go\n')
  process.stdin.flush()


def output_of(process):
  text = process.communicate()[0].split()
  return int(text[1]) if text else None


def check_and_save_again(folder, layout, allowed):
  """Restores one of the allowed states; then saves again, which leaves no other files."""
  assert number_of(folder / 'a', layout) in allowed
  checkpoint.save(folder / 'a', state_of(layout, 3), layout=layout, overwrite=True)
  assert number_of(folder / 'a', layout) == 3
  assert {child.name for child in folder.iterdir() if not child.name.endswith('.lock')} == {'a'}


@pytest.mark.slow
@pytest.mark.parametrize('overwrite', [True, False])
def test_killed_at_every_file_operation(tmp_path, layout, overwrite):
  """A save that is not killed counts the operations; the last four, with the replacement, are tested."""
  if overwrite:
    checkpoint.save(tmp_path / 'a', state_of(layout, 1), layout=layout)
  process = started(tmp_path / 'a', overwrite)
  go(process)
  last = output_of(process)
  assert last >= 2 and number_of(tmp_path / 'a', layout) == 2
  moments = [(last - back, when) for back in range(4) for when in ('before', 'after') if last > back]
  for moment, when in moments:
    folder = tmp_path / f'{moment}_{when}'
    if overwrite:
      checkpoint.save(folder / 'a', state_of(layout, 1), layout=layout)
    process = started(folder / 'a', overwrite, moment, when)
    go(process)
    assert output_of(process) is None and process.returncode == -signal.SIGKILL
    check_and_save_again(folder, layout, (1, 2) if overwrite else (None, 2))


def test_killed_between_the_two_moves(tmp_path, layout):
  """The only moment at which the path is empty: the complete new checkpoint beside it is restored."""
  checkpoint.save(tmp_path / 'b', state_of(layout, 1), layout=layout)
  checkpoint.save(tmp_path / 'c', state_of(layout, 2), layout=layout)
  (tmp_path / 'b').rename(tmp_path / '.a.host-7-12345678.old')
  (tmp_path / 'c').rename(tmp_path / '.a.host-7-12345678.new')
  begin = time.monotonic()
  assert number_of(tmp_path / 'a', layout) == 2
  assert time.monotonic() - begin < 5
  check_and_save_again(tmp_path, layout, (2,))


def test_killed_before_the_new_checkpoint_was_complete(tmp_path, layout):
  """The folder beside the path is not a checkpoint, so the old one is restored."""
  checkpoint.save(tmp_path / 'b', state_of(layout, 1), layout=layout)
  (tmp_path / 'b').rename(tmp_path / '.a.host-7-12345678.old')
  (tmp_path / '.a.host-7-12345678.new.orbax-checkpoint-tmp').mkdir()
  check_and_save_again(tmp_path, layout, (1,))


def test_leftovers_of_a_killed_save_are_removed(tmp_path, layout):
  for name in (
    '.a.host-7-12345678.new',
    '.a.host-7-12345678.new.orbax-checkpoint-tmp',
    '.a.host-8-87654321.old',
  ):
    (tmp_path / name / 'state').mkdir(parents=True)
  (tmp_path / '.ab.host-7-12345678.new').mkdir()  # of another path
  checkpoint.save(tmp_path / 'a', state_of(layout, 1), layout=layout, overwrite=True)
  names = {child.name for child in tmp_path.iterdir()}
  assert names == {'a', '.a.lock', '.ab.host-7-12345678.new'}


@pytest.mark.slow
def test_killed_at_random_moments_of_an_overwrite(tmp_path, layout):
  rng = random.Random(0)
  for run in range(4):
    folder = tmp_path / str(run)
    checkpoint.save(folder / 'a', state_of(layout, 1), layout=layout)
    process = started(folder / 'a', True)
    go(process)
    time.sleep(rng.uniform(0, 0.3))
    process.kill()
    done = output_of(process) is not None
    check_and_save_again(folder, layout, (2,) if done else (1, 2))
