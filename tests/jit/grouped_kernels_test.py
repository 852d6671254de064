"""Convolutions of several groups that XLA may compute wrongly as they are sharded: `layout.jit` and `compare` name each."""

import random
import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd._src.jit.grouped_kernels import SHARDED_GROUPS
from flax_spmd.pipeline import OneFOneB, accumulate, stage_end
from tests.jit.convolutions import program_of

LAYOUT = spmd.Layout({'data': 4, 'model': 2}, (('batch', 'data'), ('mlp', 'model')))
NUMBERS = np.random.default_rng(0)
TOKENS = NUMBERS.normal(size=(8, 16, 32)).astype(np.float32)


class ShortConvolution(nn.Module):
  """The depthwise convolution over time of Griffin, Hyena and Mamba; its arrays are constrained on request."""

  constrained: bool = False

  @nn.compact
  def __call__(self, x):
    names = ('batch', None, 'mlp' if self.constrained else None)
    x = spmd.with_logical_constraint(x, names)
    y = nn.Conv(32, (3,), padding='CAUSAL', feature_group_count=32)(x)
    return jnp.mean(spmd.with_logical_constraint(y, names) ** 2)


def gradients(constrained, layout=None):
  model = ShortConvolution(constrained)
  params = model.init(jax.random.key(0), TOKENS)

  def loss_gradient(params, x):
    return jax.grad(model.apply)(params, x)

  found = (jax.jit if layout is None else layout.jit)(loss_gradient)(params, TOKENS)
  return jax.tree.leaves(found)[1]


COPIES_ADDED = (
  '{}: XLA may return multiples of the right values for these gradients of grouped kernels, which are '
  'summed over a part of the mesh:\n'
  "  32 groups, (8, 18, 32) with dim 0 over 'data' at grouped_kernels_test.py:LINE\n"
  'Fix: shard the batch over all axes of the mesh, or the features over the remaining ones, by '
  'with_logical_constraint(x, (batch name, *[None] * spatial dimensions, feature name)) for the input and the '
  'result of the layer.'
)


def test_a_gradient_to_which_xla_adds_copies_is_named():
  with pytest.warns(UserWarning) as caught:
    found = gradients(constrained=False, layout=LAYOUT)
  [text] = [str(one.message) for one in caught]
  assert re.sub(r':\d+\n', ':LINE\n', text) == COPIES_ADDED.format('loss_gradient')
  np.testing.assert_allclose(
    found, 2 * gradients(constrained=False), rtol=1e-4
  )  # if XLA has mended this, it can go


@pytest.mark.parametrize(
  ('constrained', 'layout'),
  [(True, LAYOUT), (False, LAYOUT.replace(rules=(('batch', ('data', 'model')),)))],
  ids=['features', 'batch'],
)
def test_the_fixes_give_the_right_gradient_without_a_warning(constrained, layout):
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    found = gradients(constrained, layout)
  np.testing.assert_allclose(found, gradients(constrained), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('largest', [np.inf, 1.0])
def test_a_pipeline_names_it_where_each_microbatch_needs_the_gradient(largest):
  """To clip it, say. Otherwise the parts of devices are summed after the loop, and the gradient is right."""
  layout = LAYOUT.replace(mesh=spmd.make_mesh({'stage': 2, 'data': 2, 'model': 2}))
  model, batch = ShortConvolution(), np.stack([TOKENS, 2 * TOKENS])
  params = {'first': jnp.eye(32), 'second': model.init(jax.random.key(0), TOKENS)}

  def step(params, batch):
    def loss(params, x):
      return model.apply(params['second'], stage_end(x @ params['first']))

    def of_microbatch(x):
      grads = jax.grad(loss)(params, x)
      return (
        grads if largest == np.inf else jax.tree.map(lambda g: jnp.clip(g, -largest, largest), grads)
      )

    return accumulate(of_microbatch, batch, OneFOneB(2))

  pipelined = layout.pipeline_jit(step)
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    kernel = jax.tree.leaves(pipelined(params, batch)['second'])[1]
    pipelined.lower(params, batch).compile()
  factor = 1 if largest == np.inf else 2  # if XLA has mended this, it can go
  texts = [re.sub(r':\d+\n', ':LINE\n', str(one.message)) for one in caught]
  assert texts == [COPIES_ADDED.format('pipeline_jit of step')] * (factor - 1)
  expected = jax.tree.leaves(jax.jit(step)(params, batch)['second'])[1]
  np.testing.assert_allclose(kernel, factor * expected, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures('forked_compilers')
def test_compare_lists_it():
  model = ShortConvolution()

  def step(params, x):
    return jax.tree.map(lambda p, g: p - g, params, jax.grad(model.apply)(params, x))

  train = spmd.explore.TrainStep(
    step, model.init, jax.ShapeDtypeStruct(TOKENS.shape, TOKENS.dtype), args=(jax.random.key(0), TOKENS)
  )
  [outcome] = spmd.compare(train, {'both': LAYOUT}, 'cpu:8')
  assert any('gradients of grouped kernels' in finding for finding in outcome.program.findings)


@pytest.mark.parametrize(
  ('kind', 'window', 'groups', 'array'),
  [
    ('result', 1, 4, "(8, 16, 16, 16) with dim 3 over 'data'"),
    ('kernel', 3, 2, "(3, 3, 8, 16) with dim 3 over 'data'"),  # fewer groups than shards
  ],
)
def test_sharded_features_of_groups_are_named_before_the_program_is_compiled(
  kind, window, groups, array
):
  kernel = window, window, 16 // groups, 16
  program, args = program_of(kind, (8, 16, 16, 16), kernel, 1, groups, NUMBERS)
  with pytest.warns(UserWarning) as caught:
    LAYOUT.jit(program, in_rules=(P(), P(None, None, None, 'data'))).lower(*args)
  [text] = [str(one.message) for one in caught]
  assert re.sub(r':\d+\n', ':LINE\n', text) == (
    f'of_{kind}: XLA may return wrong values for these grouped convolutions, or end the process, as their '
    f'features are sharded:\n  {groups} groups, {array} at convolutions.py:LINE\n'
    'Fix: keep the features whole, by with_logical_constraint(x, (batch name, *[None] * (spatial dimensions + 1))) '
    'for the input and the result of the layer, and its kernel replicated.'
  )


def drawn_spec(chance, axes):
  entries = [()] * 4
  for axis in axes:
    if chance.random() < 0.7:
      entries[chance.choice([0, 0, 1, 3, 3])] += (axis,)
  return P(*entries)


def drawn_program(chance):
  (size, stride), groups = chance.choice([(4, 4), (3, 1), (1, 1), (2, 2)]), chance.choice([2, 4, 8, 16])
  kind, features = chance.choice(['result', 'kernel', 'kernel', 'images']), chance.choice([16, 32])
  kernel = size, size, 16 // groups, features
  return program_of(kind, (8, 16, 16, 16), kernel, stride, groups, NUMBERS)


@pytest.mark.slow
@pytest.mark.parametrize(
  'part', [0, *(pytest.param(part, marks=pytest.mark.exhaustive) for part in range(1, 10))]
)
def test_every_random_grouped_convolution_that_xla_computes_wrongly_is_named(part):
  """A program whose groups XLA cannot divide may end the process, so it is not run."""
  chance, wrong = random.Random(part), 0
  for _ in range(60):
    sizes = chance.choice([{'data': 2, 'model': 4}, {'data': 2, 'model': 2, 'seq': 2}, {'data': 8}])
    layout = spmd.Layout(sizes, ())
    program, args = drawn_program(chance)
    of_args, of_result = [drawn_spec(chance, sizes) for _ in args], drawn_spec(chance, sizes)
    try:
      sharded = [jax.device_put(x, NamedSharding(layout.mesh, s)) for x, s in zip(args, of_args)]
      NamedSharding(layout.mesh, of_result).shard_shape(jax.eval_shape(program, *args).shape)
    except ValueError:
      continue  # a size that the axes do not divide
    step = layout.jit(program, out_rules=of_result)
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter('always')
      step.lower(*sharded)
      texts = ' '.join(str(one.message) for one in caught)
      if SHARDED_GROUPS in texts:
        continue
      found = step(*sharded)
    if not np.array_equal(found, jax.jit(program)(*args)):
      wrong += 1
      assert 'XLA may return multiples' in texts, (sizes, of_args, of_result)
  assert wrong
