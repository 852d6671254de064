"""The manager in a job of several processes: data iterators, resuming, and resuming with fewer processes."""

import time

import pytest

from flax_spmd import checkpoint, errors
from tests.processes import run_processes

RUN = """
import warnings
import jax, jax.numpy as jnp
import flax_spmd as spmd
from flax_spmd import checkpoint

class Batches:
  def __init__(self): self.number = 100 * jax.process_index()
  def __next__(self): self.number += 1; return self.number
  def get_state(self): return {{'number': self.number}}
  def set_state(self, state): self.number = state['number']

layout = spmd.Layout({{'data': 4}}, (('embed', 'data'),))
create = lambda: {{'w': spmd.LogicallyPartitioned(jnp.zeros(8), ('embed',))}}
add = layout.jit(lambda state: jax.tree.map(lambda x: x + 1, state))
data = Batches()
with checkpoint.Manager({root!r}, layout, every=2, keep=2) as manager:
  start, state = manager.resume(create, data=data)
  begin = data.number
  for step in range(start, {steps}):
    next(data)
    state = add(state)
    manager.save(step + 1, state, data=data)
  manager.wait()
  report([start, begin, data.number, manager.steps, float(layout.gather(state)['w'].value[0])])
"""


@pytest.mark.slow
def test_a_resumed_run_of_two_processes(tmp_path):
  root = str(tmp_path / 'run')
  first = run_processes(RUN.format(root=root, steps=5), processes=2, devices=2)
  assert [result.value for result in first] == [
    [0, 0, 5, [2, 4], 5.0],
    [0, 100, 105, [2, 4], 5.0],
  ]
  second = run_processes(RUN.format(root=root, steps=6), processes=2, devices=2)
  assert [result.value for result in second] == [
    [4, 4, 6, [4, 6], 6.0],
    [4, 104, 106, [4, 6], 6.0],
  ]
  assert checkpoint.verify(tmp_path / 'run' / '6') == []
  one = run_processes(
    RUN.format(root=root, steps=6).replace('(create, data=data)', '(create)'), processes=1, devices=4
  )
  assert one[0].value == [6, 0, 0, [4, 6], 6.0]
  with pytest.raises(AssertionError, match='has data iterator positions for 2, this job has 1'):
    run_processes(RUN.format(root=root, steps=6), processes=1, devices=4)


@pytest.mark.slow
def test_a_second_job_is_refused_on_every_process(tmp_path):
  import flax_spmd as spmd

  layout = spmd.Layout({'data': 8})
  with checkpoint.Manager(tmp_path / 'run', layout):
    source = """
import flax_spmd as spmd
from flax_spmd import checkpoint, errors
try:
  checkpoint.Manager(ROOT, spmd.Layout({'data': 4}))
except errors.CheckpointBusyError as error:
  report(str(error).splitlines()[0])
""".replace('ROOT', repr(str(tmp_path / 'run')))
    reported = [result.value for result in run_processes(source, processes=2, devices=2)]
  assert reported == [f'Another manager has {tmp_path / "run"} open.'] * 2
  assert issubclass(errors.CheckpointBusyError, errors.CheckpointError)


FOLLOW = """
import jax.numpy as jnp
import flax_spmd as spmd
from flax_spmd import checkpoint, errors

layout = spmd.Layout({'data': 4})
with checkpoint.Manager(ROOT, layout, read_only=True) as manager:
  followed = []
  for step in manager.follow(timeout=1, every=0.1):
    restored = manager.restore(step=step)
    followed.append([restored.step, float(layout.gather(restored.state)['w'][0])])
  report(followed)
  try:
    manager.save(9, {'w': jnp.zeros(8)})
  except errors.CheckpointError as error:
    report(str(error).splitlines()[0])
"""


@pytest.mark.slow
def test_an_evaluation_job_of_two_processes_follows_beside_the_writer(tmp_path):
  import jax.numpy as jnp

  import flax_spmd as spmd

  with checkpoint.Manager(tmp_path, spmd.Layout({'data': 8}), every=1) as manager:
    for step in (1, 2, 3):
      manager.save(step, {'w': jnp.full(8, float(step))})
    manager.wait()
    results = run_processes(FOLLOW.replace('ROOT', repr(str(tmp_path))), processes=2, devices=2)
  refused = f'The manager of {tmp_path} cannot save: it was opened with read_only=True.'
  assert [result.reported for result in results] == 2 * [[[[3, 3.0], [2, 2.0], [1, 1.0]], refused]]


DIES = """
import os, signal, time
import jax.numpy as jnp
import flax_spmd as spmd
from flax_spmd import checkpoint
from flax_spmd._src.checkpoint import manager as manager_module, save as save_module
from flax_spmd._src.checkpoint.steps import data_positions, step_folder
from flax_spmd._src.checkpoint.storage import async_save

layout = spmd.Layout({'data': 4})
state = lambda step: layout.shard({'w': jnp.full(8, float(step))})

def die(*args, **kwargs):
  os.kill(os.getpid(), signal.SIGKILL)

PHASES = {
  'before the claim': (data_positions, 'positions_metadata'),
  'before the write': (save_module, 'contents_of'),
  'at the start of the write': (save_module.ocp, 'save_async'),
  'during the write': (async_save, 'wait_for'),
  'at the commit': (async_save, 'commit'),
  'in the removal': (step_folder, 'remove_checkpoint'),
}
manager = checkpoint.Manager(ROOT, layout, every=1, keep=1)
manager.save(1, state(1))
manager.wait()
if jax.process_index() == VICTIM:
  setattr(*PHASES[PHASE], die)
begin = time.monotonic()
report(time.time())
try:
  manager.save(2, state(2))
  manager.wait()
except spmd.errors.CheckpointError as error:
  report([type(error).__name__, str(error), time.monotonic() - begin])
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
  ('phase', 'victim'),
  [
    pytest.param('before the claim', 1, marks=pytest.mark.exhaustive),
    pytest.param('before the write', 1, marks=pytest.mark.exhaustive),
    pytest.param('at the start of the write', 1, marks=pytest.mark.exhaustive),
    pytest.param('during the write', 1, marks=pytest.mark.exhaustive),
    pytest.param('at the commit', 1, marks=pytest.mark.exhaustive),
    ('in the removal', 0),
    pytest.param('before the write', 0, marks=pytest.mark.exhaustive),
  ],
)
def test_a_process_that_dies_is_known_within_15_seconds(tmp_path, phase, victim):
  source = DIES.replace('ROOT', repr(str(tmp_path))).replace('PHASES[PHASE]', f'PHASES[{phase!r}]')
  results = run_processes(
    source.replace('VICTIM', str(victim)), processes=2, devices=2, check=False, grace=150
  )
  ended = time.time()
  survivor = results[1 - victim]
  if victim == 1:
    kind, text, seconds = survivor.value
    assert kind == 'CheckpointError' and seconds <= 150  # 15 on a machine that is not overloaded
    assert text.startswith(
      f'Process 1 sent no heartbeat for 12 s while {tmp_path / "2"} was being saved. '
    )
  else:  # the coordination service has died with it, and JAX may end the other process itself
    assert ended - survivor.reported[0] <= 150 and len(survivor.reported) + survivor.returncode != 1
  import flax_spmd as spmd

  with checkpoint.Manager(tmp_path, spmd.Layout({'data': 8})) as manager:
    restored = manager.restore()
    committed = phase in ('in the removal', 'at the commit')
    assert restored.step in ([1, 2] if committed else [1])
    assert float(restored.state['w'][0]) == restored.step
