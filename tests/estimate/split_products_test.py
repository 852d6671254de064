"""Products that XLA for GPUs computes in parts."""

import jax
import jax.numpy as jnp
import pytest

import flax_spmd as spmd
from flax_spmd._src.estimate.split_products import parts
from flax_spmd.explore import Estimator, TrainStep, compare

# Batch, rows, columns, contracted elements, and the parts in programs that were compiled for H100s.
COMPILED = [
  (1, 256, 128, 1024, 16),
  (1, 2048, 2048, 8192, 1),
  (1, 128, 768, 256, 4),
  (1, 64, 1024, 8192, 16),
  (1, 512, 64, 2048, 16),
  (16, 512, 128, 8192, 2),
  (4, 1024, 384, 1024, 1),
  (1, 384, 1024, 2048, 4),
  (16, 64, 512, 8192, 4),
  (1, 256, 512, 8192, 16),
  (1, 512, 384, 16384, 16),
  (1, 768, 2048, 16384, 2),
  (4, 384, 512, 16384, 4),
  (1, 1024, 1024, 16384, 2),
  (8, 64, 64, 4096, 16),
  (1, 256, 256, 65536, 32),
]


@pytest.mark.parametrize(('batch', 'rows', 'columns', 'contracted', 'compiled'), COMPILED)
def test_parts_are_those_of_compiled_programs_within_a_factor_of_two(
  batch, rows, columns, contracted, compiled
):
  assert compiled / 2 <= parts(batch, rows, columns, contracted) <= 2 * compiled


def test_most_parts_are_exactly_those_of_compiled_programs():
  assert sum(parts(*sizes) == compiled for *sizes, compiled in COMPILED) >= 0.75 * len(COMPILED)


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
