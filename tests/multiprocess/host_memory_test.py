"""Arrays in the memory of the host in a job of two processes: steps, values in common, checkpoints."""

import pytest

from tests.processes import run_processes

TRAINED = """
import jax, jax.numpy as jnp
import flax_spmd as spmd
from flax_spmd import checkpoint, fsdp, host

def create():
  return {'params': {'w': jnp.arange(64.).reshape(8, 8) / 64}, 'opt_state': {'m': jnp.zeros((8, 8))}}

def step(state, x):
  loss, grads = jax.value_and_grad(lambda params: jnp.mean((x @ params['w']) ** 2))(state['params'])
  m = 0.9 * state['opt_state']['m'] + grads['w']
  return {'params': {'w': state['params']['w'] - 0.1 * m}, 'opt_state': {'m': m}}, loss

def trained(path, *rules):
  layout = spmd.Layout({'data': 4}, (*rules, ('batch', 'data'), fsdp('data', min_size=1)))
  state, jitted, losses = layout.init(create), layout.jit(step, donate_argnums=0), []
  x = layout.local_to_global(np.ones((8, 8), np.float32), ('batch', None))
  for _ in range(3):
    state, loss = jitted(state, x)
    losses.append(float(loss))
  layout.check_processes(state, values=True)
  checkpoint.save(path, state, layout=layout)
  restored = checkpoint.restore(path, layout.plan(create))
  kinds = [each['opt_state']['m'].sharding.memory_kind for each in (state, restored)]
  return kinds, [losses, layout.gather(restored)['opt_state']['m'].tolist()]

kinds, values = trained(ROOT + '/device')
hosted, same = trained(ROOT + '/host', ('^opt_state/', host(fsdp('data', min_size=1))))
report([kinds, hosted, values == same])
"""


@pytest.mark.slow
def test_a_step_and_a_checkpoint_of_two_processes(tmp_path):
  for result in run_processes(TRAINED.replace('ROOT', repr(str(tmp_path))), processes=2, devices=2):
    assert result.value == [2 * ['device'], 2 * ['pinned_host'], True]
