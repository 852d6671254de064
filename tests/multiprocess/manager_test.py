"""The manager in a job of several processes: data iterators, resuming, and resuming with fewer processes."""

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
