"""Products that XLA may compute wrongly where their result is sharded over an axis that is summed over."""

import random
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import pipeline
from flax_spmd.explore import Pipeline, TrainStep, compare, search

pytestmark = pytest.mark.usefixtures('forked_compilers')

RULES = (
  ('batch', ('data', 'fsdp')),
  ('mlp', 'tensor'),
  ('embed', 'fsdp'),
  ('act_embed', 'tensor'),
)
LAYOUT = spmd.Layout({'data': 2, 'fsdp': 2, 'tensor': 2}, RULES)
NUMBERS = np.random.default_rng(0)
X, KERNEL = (NUMBERS.normal(size=(64, 64)).astype(np.float32) for _ in range(2))


def project(x, kernel):
  """A projection back to the model's width, whose features are sharded again."""
  return spmd.with_logical_constraint(x @ kernel, ('batch', 'act_embed'))


def placed(layout, x=X):
  return layout.shard(x, ('batch', 'mlp')), layout.shard(KERNEL, ('mlp', 'embed'))


def test_a_product_that_xla_computes_wrongly_is_named():
  with pytest.warns(UserWarning) as caught:
    found = LAYOUT.jit(project)(*placed(LAYOUT))
  [text] = [str(one.message) for one in caught]
  assert re.sub(r':\d+\n', ':LINE\n', text) == (
    'project: XLA may return the rows of other devices for these products, of which one dimension of the result is '
    'sharded over an axis that is summed over, and another over several axes:\n'
    "  (64, 64) with dim 0 over 'data' x 'fsdp', dim 1 over 'tensor' again at reused_axes_test.py:LINE\n"
    'Fix: constrain the result of the product twice, first without that axis: '
    'y = with_logical_constraint(y, (batch name, None)), and then as it is.'
  )
  assert not np.allclose(found, X @ KERNEL, atol=0.1)  # if XLA has mended this, the warning can go


def test_the_fix_of_the_warning_gives_the_right_product():
  def project_twice(x, kernel):
    y = spmd.with_logical_constraint(x @ kernel, ('batch', None))
    return spmd.with_logical_constraint(y, ('batch', 'act_embed'))

  np.testing.assert_allclose(LAYOUT.jit(project_twice)(*placed(LAYOUT)), X @ KERNEL, atol=1e-3)


@pytest.mark.parametrize(
  ('mesh', 'x'),
  [
    ({'data': 4, 'tensor': 2}, X),  # rows over one axis
    ({'data': 4, 'fsdp': 1, 'tensor': 2}, X),
    ({'data': 2, 'fsdp': 2, 'tensor': 2}, np.tile(X, (4, 1))),  # the kernel is smaller, and moves
  ],
)
def test_products_that_are_right_are_not_named(mesh, x):
  layout = LAYOUT.replace(mesh=mesh, missing_axis='drop')
  np.testing.assert_allclose(layout.jit(project)(*placed(layout, x)), x @ KERNEL, atol=1e-3)


def test_a_product_in_a_loop_over_layers_is_named():
  kernels = np.stack([KERNEL, KERNEL])

  def layers(x, kernels):
    return jax.lax.scan(lambda x, kernel: (project(x, kernel), None), x, kernels)[0]

  arguments = LAYOUT.shard(X, ('batch', 'mlp')), LAYOUT.shard(kernels, (None, 'mlp', 'embed'))
  with pytest.warns(UserWarning, match="dim 1 over 'tensor' again at reused_axes_test.py"):
    LAYOUT.jit(layers)(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize('is_batched', [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_no_wrong_product_is_silent(is_batched):
  """Of random products, those that XLA computes wrongly are named."""
  draw = random.Random(int(is_batched))
  shapes, formula = ((16, 8, 32), (32, 64)), 'blk,kn->bln'
  if is_batched:
    shapes, formula = ((8, 16, 16), (8, 16, 16)), 'blk,bkn->bln'
  x, y = (NUMBERS.normal(size=shape).astype(np.float32) for shape in shapes)
  right, wrong = np.einsum(formula, x, y), 0

  def spec(dims, summed=None):
    entries = [[] for _ in range(dims)]
    for axis in draw.sample(['data', 'fsdp'], 2):
      at = draw.randrange(dims + 1)
      if at not in (dims, summed):
        entries[at].append(axis)
    entries[draw.randrange(dims) if summed is None else summed].append('tensor')
    return P(*[tuple(entry) or None for entry in entries])

  for _ in range(200):
    specs, to = (spec(3, 2), spec(y.ndim, y.ndim - 2)), spec(3)
    arguments = (
      jax.device_put(each, NamedSharding(LAYOUT.mesh, one))
      for each, one in zip((x, y), specs, strict=True)
    )
    step = LAYOUT.jit(lambda x, y, to=to: spmd.constrain(jnp.einsum(formula, x, y), to))
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter('always')
      found = step(*arguments)
    if not np.allclose(found, right, atol=1e-2):
      wrong += 1
      assert any('rows of other devices' in str(one.message) for one in caught), (specs, to)
  assert wrong > 5


@pytest.mark.slow
@pytest.mark.parametrize(
  'part', [0, *(pytest.param(part, marks=pytest.mark.exhaustive) for part in range(1, 6))]
)
def test_no_wrong_gradient_of_a_recurrent_network_is_silent(part):
  """XLA simplifies a loop before it propagates shardings, which decides how its cotangents are sharded."""
  draw, wrong = random.Random(part), 0
  inputs, kernel, weights = (
    NUMBERS.normal(size=shape).astype(np.float32) for shape in ((8, 8, 16), (16, 16), (8, 16))
  )

  for _ in range(30):
    outer, inner, other = draw.sample(['data', 'fsdp', 'tensor'], 3)
    transposed = draw.random() < 0.5

    def loss(kernel, inputs, transposed=transposed):
      def cell(state, x):
        return jnp.tanh(state @ (kernel.T if transposed else kernel) * 0.3 + x), None

      return jnp.sum(jax.lax.scan(cell, inputs[0], inputs)[0] * weights)

    of_kernel = P(*draw.sample([inner, draw.choice([other, None])], 2))
    of_inputs = P(None, (outer, inner), draw.choice([other, None]))
    gradients = jax.grad(loss, (0, 1))
    arguments = [
      jax.device_put(each, NamedSharding(LAYOUT.mesh, spec))
      for each, spec in ((kernel, of_kernel), (inputs, of_inputs))
    ]
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter('always')
      found = LAYOUT.jit(gradients)(*arguments)
    right = jax.jit(gradients)(kernel, inputs)
    if not all(np.allclose(one, two, rtol=1e-3, atol=1e-3) for one, two in zip(found, right)):
      wrong += 1
      texts = [str(one.message) for one in caught]
      assert any('rows of other devices' in text for text in texts), (of_kernel, of_inputs, transposed)
  assert wrong > 2


def train_step():
  """A step with a product that XLA computes wrongly under `RULES`."""

  def create():
    return spmd.LogicallyPartitioned(jnp.ones((64, 64)), ('mlp', 'embed'))

  def step(kernel, x):
    return kernel, jnp.sum(project(x, kernel.unbox()))

  return TrainStep(
    step, create, jax.ShapeDtypeStruct((64, 64), jnp.float32), placements=('batch', 'mlp')
  )


FINDING = (
  'XLA may return the rows of other devices for these products, of which one dimension of the result is '
  'sharded over an axis that is summed over, and another over several axes: '
  "(64, 64) with dim 0 over 'data' x 'fsdp', dim 1 over 'tensor' again at reused_axes_test.py:LINE. "
  'Fix: constrain the result of the product twice, first without that axis: '
  'y = with_logical_constraint(y, (batch name, None)), and then as it is.'
)


def test_compare_reports_such_products():
  mesh = spmd.abstract_mesh({'data': 2, 'fsdp': 2, 'tensor': 2})
  rows = {'doubtful': spmd.Layout(mesh, RULES), 'right': spmd.Layout(mesh, RULES[:3])}
  doubtful, right = compare(train_step(), rows, 'cpu:8')
  assert [re.sub(r':\d+\.', ':LINE.', each) for each in doubtful.program.findings] == [FINDING]
  assert right.program.findings == []


def test_a_search_reports_them_of_its_best_layout():
  mesh, pins = {'data': 2, 'fsdp': 2, 'tensor': 2}, dict(RULES)
  result = search(train_step(), 'cpu:8', mesh=mesh, pin=pins, candidates=5, top=1)
  assert any(
    re.sub(r':\d+\.', ':LINE.', each) == f'The best layout: {FINDING}' for each in result.remarks
  )


def test_compare_reports_those_of_the_stages_of_a_pipeline():
  def create():
    return [spmd.LogicallyPartitioned(jnp.ones((64, 64)), ('mlp', 'embed')) for _ in range(2)]

  def loss(kernels, x):
    hidden = pipeline.stage_end(jnp.tanh(x @ kernels[0].unbox()))
    hidden = spmd.with_logical_constraint(hidden, ('batch', 'mlp'))
    return jnp.sum(project(hidden, kernels[1].unbox()) ** 2)

  def step(kernels, x):
    of_microbatch = lambda x: jax.value_and_grad(loss)(kernels, x)
    value, gradients = pipeline.accumulate(of_microbatch, x, microbatches=2)
    return jax.tree.map(lambda kernel, gradient: kernel - gradient, kernels, gradients), value

  train = TrainStep(
    step, create, jax.ShapeDtypeStruct((128, 64), jnp.float32), placements=('batch', 'mlp')
  )
  mesh = spmd.abstract_mesh({'stage': 2, 'data': 2, 'fsdp': 2, 'tensor': 2})
  row = Pipeline(spmd.Layout(mesh, RULES), pipeline.GPipe(ranks=2))
  [outcome] = compare(train, {'staged': row}, 'cpu:16')
  [finding] = outcome.program.findings
  assert finding.startswith(FINDING.partition(': ')[0])
