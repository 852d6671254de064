"""Sums over devices for GPUs: in one collective or several, scattered or not, as in compiled programs."""

import random

import jax
import jax.numpy as jnp
import pytest

import flax_spmd as spmd
from flax_spmd.explore import Estimator, TrainStep, compare

ROWS, VALUES, WIDTH = 1024, 4096, 512
PLACES = (None, 'r', 'd', ('r', 'd'), ('d', 'r'))


def convolved(weight, images):
  return jax.lax.conv_general_dilated(
    images, weight, (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
  )


# Per operation whose gradient is a sum over the batch: the function, the shape of the weight, and the batch.
SUMS = {
  'product': (lambda w, x: x @ w, (VALUES, WIDTH), jax.ShapeDtypeStruct((ROWS, VALUES), jnp.float32)),
  'reduction': (
    lambda w, x: x + w[None],
    (VALUES, WIDTH),
    jax.ShapeDtypeStruct((64, VALUES, WIDTH), jnp.float32),
  ),
  'lookup': (lambda w, rows: w[rows], (VALUES, WIDTH), jax.ShapeDtypeStruct((ROWS,), jnp.int32)),
  'convolution': (convolved, (3, 3, 256, WIDTH), jax.ShapeDtypeStruct((64, 16, 16, 256), jnp.float32)),
}


def traffic(outcome):
  """Bytes on the wire by kind of collective, without those of single numbers and of indices."""
  return {kind: wire for kind, wire in outcome.counts.by_kind().items() if wire > 2**16}


@pytest.mark.usefixtures('gpu_compiler')
@pytest.mark.parametrize('name', SUMS)
def test_gradients_are_summed_as_in_compiled_programs(name):
  """A lookup on a table that is sharded over the outer axis alone is the one case that XLA sums otherwise."""
  function, shape, batch = SUMS[name]

  def create():
    names = (*[None] * (len(shape) - 2), 'rows', 'columns')
    return {'w': spmd.LogicallyPartitioned(jnp.ones(shape), names)}

  def step(state, batch):
    loss = lambda state: jnp.sum(jnp.sin(function(state['w'].unbox(), batch)))
    value, gradient = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradient), value

  both = [
    (rows, columns) for rows in PLACES for columns in PLACES if {*(rows or ())}.isdisjoint(columns or ())
  ]
  if name == 'lookup':
    both.remove(('r', None))
  chosen = random.Random(name).sample(both, 5)
  mesh = spmd.abstract_mesh({'r': 2, 'd': 4})
  layouts = {
    str(places): spmd.Layout(mesh, (('batch', ('r', 'd')), *zip(('rows', 'columns'), places)))
    for places in chosen
  }
  train_step = TrainStep(step, create, batch)
  estimator, compiled = Estimator(train_step), compare(train_step, layouts, 'h100:8')
  for text, layout in layouts.items():
    estimated = estimator.estimate(layout, 'h100:8', partition=False)
    expected = pytest.approx(traffic(compiled[text]), rel=1e-3, abs=2**12)  # of gathered indices
    assert traffic(estimated) == expected, text
