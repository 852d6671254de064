"""The manager: saving at intervals, keeping checkpoints, resuming, and faults."""

import json
import os
import shutil
import signal
from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as v0
import pytest
from orbax.checkpoint import v1 as ocp

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from tests.processes import run_process


@pytest.fixture(scope='module')
def layout():
  return spmd.Layout({'data': 8}, (('embed', 'data'),))


def create():
  return {'w': spmd.LogicallyPartitioned(jnp.zeros(8), ('embed',)), 'key': jax.random.key(3)}


def stepped(state):
  return {
    'w': jax.tree.map(lambda x: x + 1, state['w']),
    'key': jax.random.split(state['key'])[0],
  }


class Batches:
  """An iterator with a state, like those of Grain."""

  def __init__(self):
    self.number = 0

  def __next__(self):
    self.number += 1
    return self.number

  def get_state(self):
    return {'number': self.number}

  def set_state(self, state):
    self.number = state['number']


class Bytes(Batches):
  def get_state(self):
    return bytes([0, 255, self.number])

  def set_state(self, state):
    assert state[:2] == b'\x00\xff'
    self.number = state[2]


class Iterable(Batches):
  def __iter__(self):
    return self


def train(manager, steps, data, create=create):
  start, state = manager.resume(create, data=data)
  for step in range(start, steps):
    next(data)
    state = stepped(state)
    manager.save(step + 1, state, data=data)
    if manager.preempted:
      break
  return start, state


def as_of_earlier_versions(path, changed=lambda stored: {}):
  """Rewrites a step in the format of earlier versions: Orbax's files, with the record in their metadata."""
  (generation,) = path.glob('gen-*')
  manifest = json.loads((generation / 'MANIFEST').read_text())
  (generation / 'MANIFEST').unlink()
  for child in generation.iterdir():
    child.rename(path / child.name)
  generation.rmdir()
  (path / 'HEAD').unlink()
  metadata = path / '_CHECKPOINT_METADATA'
  content = json.loads(metadata.read_text())
  stored = {'flax_spmd': manifest['flax_spmd']} | manifest['metadata']
  content['custom_metadata'] = stored | changed(stored)
  metadata.write_text(json.dumps(content))


def test_every_and_keep(layout, tmp_path):
  with checkpoint.Manager(tmp_path / 'run', layout, every=2, keep=2) as manager:
    assert manager.steps == []
    data, (_, state) = Batches(), manager.resume(create)
    taken = [manager.save(step, state, data=data) for step in range(1, 8)]
  assert taken == [False, True, False, True, False, True, False]
  with checkpoint.Manager(tmp_path / 'run', layout) as manager:
    assert manager.steps == [4, 6]


@pytest.mark.parametrize('kind', [Batches, Bytes])
def test_a_resumed_run_equals_an_uninterrupted_one(layout, tmp_path, kind):
  with checkpoint.Manager(tmp_path / 'one', layout, every=3) as manager:
    start, whole = train(manager, 8, kind())
  assert start == 0
  with checkpoint.Manager(tmp_path / 'two', layout, every=3) as manager:
    train(manager, 5, kind())
  data = kind()
  with checkpoint.Manager(tmp_path / 'two', layout, every=3) as manager:
    start, state = train(manager, 8, data)
  assert (start, data.number) == (3, 8)
  np.testing.assert_array_equal(state['w'].value, whole['w'].value)
  np.testing.assert_array_equal(*(jax.random.key_data(s['key']) for s in (state, whole)))


def test_resumed_under_another_layout_and_without_boxes(layout, tmp_path):
  with checkpoint.Manager(tmp_path / 'run', layout, every=1) as manager:
    train(manager, 2, Batches())
  other = spmd.Layout({'x': 2, 'y': 4}, (('embed', 'y'),))
  with checkpoint.Manager(tmp_path / 'run', other) as manager:
    step, state = manager.resume(create, boxed=False)
    assert step == 2
    assert state['w'].sharding.spec == jax.sharding.PartitionSpec('y')
    record = manager.restore(step=1)
    assert record.step == 1
    np.testing.assert_array_equal(record.state['w'], np.ones(8))
    with pytest.raises(errors.CheckpointMismatchError, match='v: in the target'):
      manager.restore({'v': state['w']}, step=1)


def test_a_checkpoint_of_the_manager_can_be_restored_directly(layout, tmp_path):
  with checkpoint.Manager(tmp_path / 'run', layout, every=1) as manager:
    train(manager, 1, Batches())
  restored = checkpoint.restore(tmp_path / 'run' / '1', layout.abstract(create))
  np.testing.assert_array_equal(restored['w'].value, np.ones(8))
  assert [shown.path for shown in checkpoint.ls(tmp_path / 'run')] == [str(tmp_path / 'run' / '1')]
  assert checkpoint.verify(tmp_path / 'run' / '1') == []


def test_policies_of_orbax(layout, tmp_path):
  policies = ocp.training
  with checkpoint.Manager(
    tmp_path / 'run',
    layout,
    every=policies.save_decision_policies.SpecificStepsPolicy({1, 2, 5}),
    keep=policies.preservation_policies.BestN(
      get_metric_fn=lambda metrics: metrics['loss'], n=1, reverse=True
    ),
  ) as manager:
    _, state = manager.resume(create)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 0.5), (5, 2.0)):
      manager.save(step, state, metrics={'loss': loss})
    manager.wait()
    assert manager.steps == [2]


def test_forced_and_repeated_saves(layout, tmp_path):
  with checkpoint.Manager(tmp_path / 'run', layout, every=10) as manager:
    _, state = manager.resume(create)
    assert manager.save(3, state, force=True)
    assert not manager.save(3, state, force=True)
    manager.wait()
    assert manager.steps == [3]


def test_sigterm_saves_the_current_step(layout, tmp_path):
  before = signal.getsignal(signal.SIGTERM)
  data = Batches()
  with checkpoint.Manager(tmp_path / 'run', layout, every=100) as manager:
    start, state = manager.resume(create, data=data)
    for step in range(start, 50):
      next(data)
      state = stepped(state)
      if step == 4:
        os.kill(os.getpid(), signal.SIGTERM)
      manager.save(step + 1, state, data=data)
      if manager.preempted:
        break
    assert manager.steps == [5]
  assert signal.getsignal(signal.SIGTERM) == before
  with checkpoint.Manager(tmp_path / 'run', layout) as manager:
    assert train(manager, 6, data)[0] == 5


def damage(path):
  """Flips a bit in every hundred bytes of a checkpoint's data."""
  files = [file for folder in path.rglob('d') for file in folder.iterdir()]
  assert files
  for file in files:
    content = bytearray(file.read_bytes())
    for place in range(50, len(content), 100):
      content[place] ^= 16
    file.write_bytes(content)


@pytest.mark.parametrize(
  ('options', 'name'), [({'step_prefix': 'ckpt'}, 'ckpt_7'), ({'step_format_fixed_length': 4}, '0007')]
)
def test_steps_of_orbax_under_other_names(layout, tmp_path, options, name):
  """A run that began with Orbax's manager does not begin anew unnoticed."""
  options = v0.CheckpointManagerOptions(**options)
  with v0.CheckpointManager(tmp_path / 'run', options=options) as manager:
    manager.save(7, args=v0.args.StandardSave({'w': jnp.full(8, 7.0)}))

  def zeros():
    return {'w': spmd.LogicallyPartitioned(jnp.zeros(8), ('embed',))}

  with checkpoint.Manager(tmp_path / 'run', layout) as manager:
    with pytest.warns(UserWarning) as caught:
      assert manager.resume(zeros).step == 0
    assert str(caught[0].message) == (
      f'The run in {tmp_path / "run"} begins anew: {name} in it are no steps by their names. If it should continue '
      f'from {name}, rename that to 7.'
    )
  (tmp_path / 'run' / name).rename(tmp_path / 'run' / '7')
  with checkpoint.Manager(tmp_path / 'run', layout) as manager:
    step, state = manager.resume(zeros)
  assert step == 7 and state['w'].value[0] == 7


def test_resumes_from_the_newest_undamaged_checkpoint(layout, tmp_path):
  with checkpoint.Manager(tmp_path / 'run', layout, every=1) as manager:
    train(manager, 3, Batches())
  damage(tmp_path / 'run' / '3')
  data = Batches()
  with checkpoint.Manager(tmp_path / 'run', layout) as manager:
    with pytest.warns(UserWarning, match='kept as .3.damaged; restoring the checkpoint before it'):
      step, state = manager.resume(create, data=data)
    assert (step, data.number, float(state['w'].value[0])) == (2, 2, 2.0)
    assert manager.steps == [1, 2]
    assert manager.save(3, state, force=True)
    manager.wait()
    damage(tmp_path / 'run' / '3')
    with pytest.raises(errors.CheckpointDamagedError):
      manager.restore(layout.abstract(create), step=3)
    damage(tmp_path / 'run' / '2')
    damage(tmp_path / 'run' / '1')
    with pytest.warns(UserWarning), pytest.raises(errors.CheckpointDamagedError):
      manager.resume(create)


def test_a_half_deleted_newest_step(layout, tmp_path):
  with checkpoint.Manager(tmp_path / 'run', layout, every=1) as manager:
    train(manager, 2, Batches())
  next((tmp_path / 'run' / '2').glob('gen-*/state/manifest.ocdbt')).unlink()
  with checkpoint.Manager(tmp_path / 'run', layout) as manager:
    with pytest.warns(UserWarning, match='run/2 is damaged in 1 file'):
      assert manager.resume(create).step == 1


def test_two_managers(layout, tmp_path):
  with checkpoint.Manager(tmp_path / 'run', layout):
    with pytest.raises(errors.CheckpointBusyError) as caught:
      checkpoint.Manager(tmp_path / 'run', layout)
  assert str(caught.value) == dedent(f"""\
    Another manager has {tmp_path / 'run'} open.
    Fix: close it, wait for the other job, use another folder, or pass read_only=True.""")
  checkpoint.Manager(tmp_path / 'run', layout).close()


@pytest.mark.parametrize(
  ('arguments', 'text'),
  [
    ({'every': 0}, 'every=0 is not positive.\nFix: pass 1 or more, or a policy of Orbax.'),
    ({'keep': -1}, 'keep=-1 is not positive.\nFix: pass 1 or more, or a policy of Orbax.'),
    (
      {'layout': 3},
      '3 is neither a Layout nor a Plan.\nFix: pass the layout or the plan of the states.',
    ),
  ],
)
def test_bad_arguments(layout, tmp_path, arguments, text):
  with pytest.raises(errors.CheckpointError) as caught:
    checkpoint.Manager(tmp_path / 'run', **{'layout': layout} | arguments)
  assert str(caught.value) == text


def test_a_step_that_is_no_number(layout, tmp_path):
  with checkpoint.Manager(tmp_path / 'run', layout, every=1) as manager:
    _, state = manager.resume(create)
    with pytest.raises(errors.CheckpointError) as caught:
      manager.save(-1, state)
    assert manager.steps == []
  assert str(caught.value) == 'step=-1 is not a number of steps.\nFix: pass an integer, 0 or more.'


def test_steps_that_are_arrays(layout, tmp_path):
  """As `state.step` of a TrainState."""
  steps = [np.int64(1), jnp.asarray(2), layout.shard({'step': jnp.asarray(3)})['step'], np.asarray(4)]
  with checkpoint.Manager(tmp_path / 'run', layout, every=np.int64(1), keep=np.int32(3)) as manager:
    _, state = manager.resume(create)
    assert [manager.save(step, state) for step in steps] == [True] * 4
    assert not manager.save(steps[-1], state)
    manager.wait()
    assert manager.steps == [2, 3, 4]
    assert manager.restore(state, step=steps[1]).step == 2


def test_a_step_that_someone_removes_is_not_counted(layout, tmp_path):
  with checkpoint.Manager(tmp_path / 'run', layout, every=1, keep=2) as manager:
    _, state = manager.resume(create)
    for step in (1, 2, 3):
      manager.save(step, state)
    manager.wait()
    shutil.rmtree(tmp_path / 'run' / '3')
    manager.save(4, state)
    manager.wait()
    assert manager.steps == [2, 4]


def test_a_closed_manager(layout, tmp_path):
  with checkpoint.Manager(tmp_path / 'run', layout) as manager:
    _, state = manager.resume(create)
  with pytest.raises(errors.CheckpointError, match='is closed'):
    manager.save(1, state)


def test_nothing_to_restore(layout, tmp_path):
  with checkpoint.Manager(tmp_path / 'run', layout) as manager:
    with pytest.raises(errors.CheckpointNotFoundError) as caught:
      manager.restore()
  assert str(caught.value) == dedent(f"""\
    There are no checkpoints in {tmp_path / 'run'} yet.
    Fix: call resume, which creates a state if there are none.""")


def test_data_iterators_without_a_saved_or_valid_state(layout, tmp_path):
  class Odd(Batches):
    def get_state(self):
      return object()

  with checkpoint.Manager(tmp_path / 'run', layout, every=1) as manager:
    _, state = manager.resume(create)
    with pytest.raises(errors.CheckpointError) as caught:
      manager.save(1, state, data=Odd())
    assert str(caught.value) == dedent("""\
      The state of the data iterator cannot be saved: Object of type object is not JSON serializable.
      Fix: let get_state return bytes or a JSON value.""")
    manager.save(1, state)
    with pytest.raises(errors.CheckpointError) as caught:
      manager.resume(create, data=Batches())
  assert str(caught.value) == dedent(f"""\
    Checkpoint {tmp_path / 'run' / '1'} has no position of a data iterator.
    Fix: pass data= to every save; or leave it out here, and set the iterator yourself.""")


def test_data_iterators_of_another_number_of_processes(layout, tmp_path):
  with checkpoint.Manager(tmp_path / 'run', layout, every=1) as manager:
    train(manager, 1, Batches())
  as_of_earlier_versions(
    tmp_path / 'run' / '1',
    lambda stored: {
      'flax_spmd_data': 2 * stored['flax_spmd_data'],
      'flax_spmd_data_rows': ['rows 0-1/2', 'rows 1/2-1'],
    },
  )
  with checkpoint.Manager(tmp_path / 'run', layout) as manager:
    with pytest.raises(errors.CheckpointError) as caught:
      manager.resume(create, data=Batches())
  assert (
    str(caught.value)
    == dedent(f"""\
    The number of processes differs: checkpoint {tmp_path / 'run' / '1'} has data iterator positions for 2, this job has 1, which read other parts of the data.
    Fix: pass data_from=, a function from the list of their positions to the one of this process; lambda states: states[0] where a position counts global batches.""")
  )
  received = []

  def first(states):
    received.append(states)
    return states[0]

  with checkpoint.Manager(tmp_path / 'run', layout) as manager:
    moved, trained = Batches(), Batches()
    assert manager.resume(create, data=moved, data_from=first).step == 1
  next(trained)
  assert moved.get_state() == trained.get_state() and received == [2 * [moved.get_state()]]


def test_an_unwritable_folder(layout, tmp_path):
  with checkpoint.Manager(tmp_path / 'run', layout, every=1) as manager:
    _, state = manager.resume(create)
    (tmp_path / 'run').rename(tmp_path / 'gone')
    (tmp_path / 'run').write_text('in the way')
    with pytest.raises(errors.CheckpointNotFoundError, match='was removed, moved or unmounted'):
      manager.save(1, state)
    (tmp_path / 'run').unlink()
    (tmp_path / 'gone').rename(tmp_path / 'run')
    assert manager.save(2, state)


@pytest.mark.slow
def test_sigterm_between_two_processes_of_a_run(tmp_path):
  """A real process gets SIGTERM and saves; the next one resumes from there."""
  code = dedent("""
    import os, signal
    import jax.numpy as jnp
    import flax_spmd as spmd
    layout = spmd.Layout({'data': 8})
    with spmd.checkpoint.Manager(ROOT, layout, every=1000) as manager:
      start, state = manager.resume(lambda: {'n': jnp.zeros(8)})
      report([start, float(state['n'][0])])
      for step in range(start, start + 500):
        state = {'n': state['n'] + 1}
        if step - start == 7: os.kill(os.getpid(), signal.SIGTERM)
        manager.save(step + 1, state)
        if manager.preempted: break
  """).replace('ROOT', repr(str(tmp_path / 'run')))
  assert [run_process(code).value for _ in range(2)] == [[0, 0.0], [8, 8.0]]


@pytest.mark.parametrize('saved', ['the iterator', 'its prefetch', 'the prefetch of its prefetch'])
@pytest.mark.parametrize('resumed', ['before', 'while it reads'])
def test_prefetched_batches_are_all_trained_on_once(layout, tmp_path, saved, resumed):
  seen = []
  for steps in (3, 6):
    source = Iterable()
    first = spmd.prefetch(source, lambda batch: batch)
    batches = spmd.prefetch(first, lambda batch: batch) if 'of its' in saved else first
    data = source if saved == 'the iterator' else batches
    with checkpoint.Manager(tmp_path / 'run', layout, every=1) as manager:
      if resumed == 'while it reads' and steps == 6:
        next(batches)
      start, state = manager.resume(create, data=data)
      for number, batch in zip(range(start, steps), batches, strict=False):
        seen.append(batch)
        state = stepped(state)
        manager.save(number + 1, state, data=data)
    batches.close()
  assert seen == [1, 2, 3, 4, 5, 6]


def test_the_position_after_the_loop(layout, tmp_path):
  source = Iterable()
  with checkpoint.Manager(tmp_path / 'run', layout) as manager:
    _, state = manager.resume(create, data=source)
    for _ in zip(range(3), spmd.prefetch(source, lambda batch: batch), strict=False):
      state = stepped(state)
    manager.save(3, state, data=source, force=True)
  with checkpoint.Manager(tmp_path / 'run', layout) as manager:
    again = Iterable()
    manager.resume(create, data=again)
  assert next(again) == 4


def test_data_without_a_position(tmp_path):
  layout = spmd.Layout({'data': 8})
  with checkpoint.Manager(tmp_path, layout, every=1) as manager:
    with pytest.raises(errors.CheckpointError) as caught:
      manager.save(1, {'w': jnp.ones(8)}, data=[1, 2])
  assert str(caught.value) == (
    'data is a list, without a position to save.\n'
    'Fix: pass an iterator with get_state and set_state, as those of Grain, or leave data out.'
  )
