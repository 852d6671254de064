"""Peak memory per rank, and the error if a rank has less."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_spmd as spmd
from flax_spmd._src.pipeline.run import memory as footprint
from flax_spmd.errors import PipelineError
from flax_spmd.pipeline import GPipe, Mean, OneFOneB, accumulate, stage_end

WIDTH, ROWS, MICROBATCHES = 64, 128, 8
KIB = 1024
LAYOUT = spmd.Layout(
  jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(4, 1), ('stage', 'data')), (('batch', 'data'),)
)
PARAMS = {str(number): np.eye(WIDTH, dtype=np.float32) for number in range(4)}
X = np.ones((MICROBATCHES, ROWS, WIDTH), np.float32)


def compiled(schedule, **options):
  def loss(params, x):
    for number in range(4):
      x = stage_end(jnp.sin(x @ params[str(number)]))
    return jnp.mean(x)

  def step(params, x):
    grads = accumulate(lambda x: jax.grad(loss)(params, x), x, schedule, Mean)
    return jax.tree.map(lambda w, g: w - g, params, grads)

  return LAYOUT.pipeline_jit(step, **options).compile(PARAMS, X)


def test_fewer_live_activations_need_less_memory():
  """A rank holds its weight, the sum of its gradients, and its live activations."""
  gpipe, one_f_one_b = compiled(GPipe(4)).memory, compiled(OneFOneB(4)).memory
  activation, weight = ROWS * WIDTH * 4, WIDTH * WIDTH * 4
  each = 2 * activation  # the input and the product
  saved = [each * (MICROBATCHES - peak) for peak in OneFOneB(4).validate(MICROBATCHES).peaks]
  for rank in (1, 2):  # the first rank has the batch, the last one the loss
    assert gpipe[rank] >= MICROBATCHES * each + 2 * weight
    assert gpipe[rank] - one_f_one_b[rank] == pytest.approx(saved[rank], abs=activation)
  assert one_f_one_b[1] > one_f_one_b[2]


def test_donated_arguments_are_not_counted_twice():
  plain, donated = compiled(OneFOneB(4)).memory, compiled(OneFOneB(4), donate_argnums=0).memory
  assert all(less <= more for less, more in zip(donated, plain, strict=True))


def rank_of(limit):
  """A rank of two devices with different memory limits; None: devices without memory statistics."""
  stats = [None, None] if limit is None else [{'bytes_limit': limit}, {'bytes_limit': 2 * limit}]
  return SimpleNamespace(
    local_devices=[SimpleNamespace(memory_stats=lambda one=one: one) for one in stats]
  )


def test_stages_larger_than_device_memory():
  ranks = [rank_of(80 * KIB * KIB), rank_of(None), rank_of(10 * KIB), rank_of(20 * KIB)]
  footprint.check([KIB, KIB, KIB, KIB], ranks)
  with pytest.raises(PipelineError) as error:
    footprint.check([96 * KIB * KIB, 96 * KIB * KIB, 11 * KIB, 20 * KIB], ranks)
  assert str(error.value) == (
    'Stages do not fit their devices:\n'
    '  rank 0: 96 MiB on a device that has 80 MiB\n'
    '  rank 2: 11 KiB on a device that has 10 KiB\n'
    'Fix: use more stages, rules that shard more within a stage, nn.remat in the blocks, smaller '
    'microbatches, a schedule that keeps fewer of them (schedule.simulate(n).peaks), or host_after=.'
  )
