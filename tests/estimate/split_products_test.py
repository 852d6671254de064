"""Products that XLA for GPUs computes in parts."""

import jax
import jax.numpy as jnp
import pytest

import flax_spmd as spmd
from flax_spmd._src.estimate.split_products import parts
from flax_spmd.explore import Estimator, TrainStep, compare

# Batch, rows, columns, contracted elements, bytes of an element, and the parts in programs that were compiled for H100s.
COMPILED = [
  (1, 256, 128, 1024, 4, 16),
  (1, 128, 768, 256, 4, 4),
  (1, 384, 768, 512, 4, 2),
  (1, 512, 64, 2048, 4, 16),
  (1, 384, 1024, 2048, 4, 4),
  (1, 1024, 768, 2048, 4, 2),
  (16, 64, 512, 8192, 2, 4),
  (1, 256, 256, 4096, 4, 16),
  (4, 384, 384, 2048, 2, 4),
  (1, 768, 384, 4096, 2, 8),
  (1, 512, 128, 16384, 4, 32),
  (1, 512, 128, 512, 4, 8),
  (1, 256, 512, 8192, 2, 16),
  (1, 512, 1024, 1024, 2, 4),
  (4, 512, 128, 1024, 4, 4),
  (1, 1024, 64, 512, 4, 4),
  (1, 1024, 384, 8192, 2, 8),
  (16, 64, 1024, 8192, 2, 2),
  (1, 1024, 64, 8192, 2, 16),
  (1, 384, 64, 1024, 4, 8),
  (1, 1024, 512, 4096, 2, 4),
  (1, 1024, 384, 1024, 4, 4),
  (4, 64, 2048, 1024, 4, 1),
  (16, 512, 128, 8192, 2, 2),
  (4, 1024, 384, 1024, 2, 1),
  (4, 768, 1024, 1024, 4, 1),
  (4, 256, 256, 16384, 4, 8),
  (4, 512, 256, 256, 4, 1),
  (4, 384, 768, 256, 4, 1),
  (16, 1024, 384, 2048, 4, 1),
  (4, 384, 512, 16384, 2, 4),
  (4, 128, 1024, 256, 4, 1),
  (4, 128, 512, 1024, 2, 4),
  (1, 2048, 2048, 8192, 2, 1),
  (1, 768, 2048, 4096, 4, 1),
  (1, 384, 768, 16384, 4, 8),
  (1, 2048, 768, 4096, 2, 2),
  (1, 2048, 512, 4096, 4, 2),
  (1, 2048, 4096, 16384, 2, 1),
  (1, 768, 1024, 50304, 2, 4),
]


@pytest.mark.parametrize(('batch', 'rows', 'columns', 'contracted', 'itemsize', 'compiled'), COMPILED)
def test_parts_are_those_of_compiled_programs(batch, rows, columns, contracted, itemsize, compiled):
  assert parts(batch, rows, columns, contracted, (itemsize,) * 3) == compiled


@pytest.mark.usefixtures('gpu_compiler')
@pytest.mark.parametrize('width', [512, 1024])
def test_the_parts_are_in_memory(width):
  """Those of the gradient of a weight, which is the sum over 8192 rows of each device."""

  def step(state, x):
    loss = lambda state: jnp.sum((x @ state['w']) * x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, jax.grad(loss)(state)), 0.0

  create = lambda: {'w': jnp.ones((width, width))}
  train = TrainStep(step, create, jax.ShapeDtypeStruct((2**16, width), jnp.float32))
  layout = spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'),))
  [compiled] = compare(train, {'data': layout}, 'h100:8')
  memory = Estimator(train).estimate(layout, 'h100:8').memory
  assert parts(1, width, width, 8192) * width**2 * 4 > memory.temporaries / 2
  assert memory.temporaries == pytest.approx(compiled.memory.temporaries, rel=0.1)
