"""Automatic stages: models without stage ends are cut into balanced stages, with unchanged results."""

import itertools
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import flax.linen as nn
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

import flax_spmd as spmd
from flax_spmd._src.pipeline.cut.auto_stages import FLOPS_PER_BYTE, choose, cost
from flax_spmd._src.pipeline.cut.equations import Value, traced
from flax_spmd.errors import PipelineError
from flax_spmd.pipeline import Interleaved1F1B, Mean, OneFOneB, accumulate, stage_end

LAYOUT = spmd.Layout({'stage': 4, 'data': 2}, (('batch', 'data'),))
X = np.random.default_rng(0).standard_normal((4, 8, 16)).astype(np.float32)


class Block(nn.Module):
  width: int

  @nn.compact
  def __call__(self, x):
    y = nn.Dense(self.width, name='up')(x)
    return x + nn.Dense(x.shape[-1], name='down')(nn.gelu(y))


class Model(nn.Module):
  widths: tuple[int, ...]
  block: type[nn.Module] = Block
  marked: bool = False

  @nn.compact
  def __call__(self, x):
    for number, width in enumerate(self.widths):
      x = self.block(width, name=f'block_{number}')(x)
      x = stage_end(x) if self.marked else x
    return x


FOUR = OneFOneB(4)


def step_of(model, schedule=FOUR):
  def step(params, batch):
    def loss(params, x):
      return jnp.mean((model.apply({'params': params}, x) - jnp.sin(x)) ** 2)

    value, grads = accumulate(lambda x: jax.value_and_grad(loss)(params, x), batch, schedule, Mean)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

  return step


def params_of(model):
  return model.init(jax.random.key(0), X[0])['params']


def ranks_of(params):
  """The ranks of each block."""
  ranks = {
    jax.tree_util.keystr(path, simple=True, separator='/'): min(d.id for d in leaf.devices()) // 2
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  }
  return [
    sorted({rank for path, rank in ranks.items() if path.startswith(f'{name}/')}) for name in params
  ]


@pytest.mark.parametrize(
  'block',
  [
    nn.remat(nn.jit(Block)),
    *(
      pytest.param(one, marks=pytest.mark.exhaustive) for one in (Block, nn.remat(Block), nn.jit(Block))
    ),
  ],
)
def test_equal_blocks_are_divided_equally(block):
  """Results equal those of the uncut model, in training and in inference."""
  model = Model((32,) * 8, block)
  params = params_of(model)
  trained, loss = LAYOUT.pipeline_jit(step_of(model), stages=4)(params, X)
  expected, expected_loss = jax.jit(step_of(model))(params, X)
  assert ranks_of(trained) == [[0], [0], [1], [1], [2], [2], [3], [3]]
  np.testing.assert_allclose(loss, expected_loss, atol=1e-6)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), trained, expected)

  def apply(params, x):
    return model.apply({'params': params}, x)

  inference = LAYOUT.pipeline_jit(apply, stages=4)
  np.testing.assert_allclose(inference(params, X[0]), jax.jit(apply)(params, X[0]), atol=1e-6)


class EncoderDecoder(nn.Module):
  """A decoder whose first layers, up to `alone`, use nothing of the encoder."""

  encoder: int
  decoder: int
  alone: int = 0

  @nn.compact
  def __call__(self, x):
    encoded, x = x, jnp.cos(x)
    for number in range(self.encoder):
      encoded = Block(32, name=f'encoder_{number}')(encoded)
    for number in range(self.decoder):
      x = Block(32, name=f'decoder_{number}')(x)
      if number >= self.alone:
        x = x + nn.Dense(16, name=f'cross_{number}')(encoded)
    return x


@pytest.mark.parametrize(
  ('encoder', 'decoder', 'alone', 'stages'),
  [
    pytest.param(*case, stages, marks=[pytest.mark.exhaustive] * ((number + stages // 2) % 2))
    for number, case in enumerate([(4, 4, 0), (5, 4, 1), (3, 6, 0), (2, 6, 2)])
    for stages in (2, 4)
  ],
)
def test_stages_of_an_encoder_and_a_decoder(encoder, decoder, alone, stages):
  """No end between the encoder and its first reader leaves the encoder behind: no weight is on two ranks."""
  model = EncoderDecoder(encoder, decoder, alone)
  params = params_of(model)
  layout = spmd.Layout({'stage': stages, 'data': 8 // stages}, (('batch', 'data'),))
  schedule = OneFOneB(stages)
  trained, _ = layout.pipeline_jit(step_of(model, schedule), stages=stages)(params, X)
  held = np.zeros(8)
  for leaf in jax.tree.leaves(trained):
    for device in leaf.devices():
      held[device.id] += leaf.nbytes
  whole = sum(leaf.nbytes for leaf in jax.tree.leaves(trained))
  assert sum(held[:: 8 // stages]) == whole
  assert max(held) < 1.4 * whole / stages
  expected, _ = jax.jit(step_of(model))(params, X)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), trained, expected)


class Attention(nn.Module):
  @nn.compact
  def __call__(self, x):
    query, key, value = (nn.Dense(16, name=name)(x) for name in ('query', 'key', 'value'))
    scores = nn.softmax(query[:, :, None] * key[:, None])
    return x + nn.Dense(16, name='out')(jnp.einsum('bij,bj->bi', scores, value))


def test_no_stage_ends_between_queries_and_keys():
  """The two middle cuts of three layers of attention, by cost, are after the keys; those weights would be on two ranks."""

  class Layers(nn.Module):
    @nn.compact
    def __call__(self, x):
      for number in range(3):
        x = Attention(name=f'layer_{number}')(x)
      return x

  model = Layers()
  params = params_of(model)
  layout = spmd.Layout({'stage': 2, 'data': 4}, (('batch', 'data'),))
  trained, _ = layout.pipeline_jit(step_of(model, OneFOneB(2)), stages=2)(params, X)
  assert {len(leaf.devices()) for leaf in jax.tree.leaves(trained)} == {4}


def test_a_residual_beside_the_end_is_sent_once():
  """A stage ends within a branch: the sum up to there is sent, and not the terms that it is computed from."""
  params = {f'w{number}': np.eye(16, dtype=np.float32) for number in range(6)}

  def step(params, batch):
    def loss(params, x):
      for number in range(6):
        hidden = jnp.tanh(x @ params[f'w{number}'])
        x = x + (stage_end(hidden) if number == 3 else hidden)
      return jnp.mean(x**2)

    return accumulate(lambda x: jax.grad(loss)(params, x), batch, OneFOneB(2))

  layout = spmd.Layout({'stage': 2, 'data': 4}, (('batch', 'data'),))
  lowered = layout.pipeline_jit(step).lower(params, X)
  sends = [line for line in lowered.as_text().splitlines() if line.startswith('rank 0 -> rank 1')]
  assert [line.count('float32[8,16]') for line in sends if 'microbatch 0' in line] == [2]


def test_a_warning_of_unequal_stages():
  """All layers are in one scan: the numbers are right, and one stage has all the work."""

  class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
      return Block(32)(x), None

  class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.Dense(16)(nn.Dense(16)(nn.Dense(16)(x)))
      layers = nn.scan(Layer, variable_axes={'params': 0}, split_rngs={'params': True}, length=32)
      return layers()(x, None)[0]

  step = LAYOUT.pipeline_jit(step_of(Scanned()), stages=4)
  line = Scanned.__call__.__wrapped__.__code__.co_firstlineno + 4
  params = jax.eval_shape(lambda: params_of(Scanned()))
  with pytest.warns(UserWarning) as warnings:
    step.lower(params, X)
  [warning] = [str(each.message) for each in warnings]
  first, *rest = warning.split('stage 3 has ')
  assert first == 'pipeline_jit of step: '
  assert re.sub(r'[0-9]+%', 'N%', ''.join(rest)) == (
    'N% of the cost of 4 stages, since a stage may end only after a Linen module that is called outside scans, '
    f'branches and nn.remat. Its largest operation is scan at auto_stages_test.py:{line}, with N%.\n'
    'Fix: loop over the layers in Python, with nn.remat and nn.scan around one layer or a few; or use fewer stages.'
  )
  step.lower(params, X[:2])  # warns once


def test_no_stages_of_a_model_that_is_recomputed_as_a_whole():
  model = Model((32,) * 8)

  def step(params, batch):
    def loss(params, x):
      return jnp.mean(model.apply({'params': params}, x) ** 2)

    return accumulate(lambda x: jax.grad(jax.checkpoint(loss))(params, x), batch, FOUR)

  with pytest.raises(PipelineError) as error:
    LAYOUT.pipeline_jit(step, stages=4).lower(params_of(model), X)
  assert str(error.value) == (
    'stages=4, but the model has 0 points where a stage may end: after each Linen module that is called '
    'outside scans, branches and nn.remat, and of whose results no gradients of gradients or derivatives in '
    'forward mode are taken.\nFix: end stages by flax_spmd.pipeline.stage_end.'
  )


@pytest.mark.parametrize(
  ('calls', 'block'), [('views', Block), ('losses', Block), ('reference', nn.remat(Block))]
)
def test_calls_of_a_model_share_the_stages(calls, block):
  """Two views in one loss, two losses with gradients of their own, or a model and one that is not trained."""
  model = Model((32,) * 8, block)
  params = params_of(model)

  reference = jax.tree.map(lambda w: 0.9 * w, params)

  def apart(params, x, y):
    other = reference if calls == 'reference' else params
    return jnp.mean((model.apply({'params': params}, x) - model.apply({'params': other}, y)) ** 2)

  def alone(params, x, y):
    return jnp.mean((model.apply({'params': params}, x) - jnp.sin(y)) ** 2)

  def step(params, batch):
    def gradients(x):
      views = x, jnp.cos(x)
      if calls != 'losses':
        return jax.grad(apart)(params, *views)
      return jax.tree.map(
        jnp.add, jax.grad(alone)(params, *views), jax.grad(alone)(params, *views[::-1])
      )

    grads = accumulate(gradients, batch, OneFOneB(4), Mean)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)

  trained = LAYOUT.pipeline_jit(step, stages=4)(params, X)
  assert ranks_of(trained) == [[0], [0], [1], [1], [2], [2], [3], [3]]
  expected = jax.jit(step)(params, X)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), trained, expected)
  inference = LAYOUT.pipeline_jit(apart, stages=4)
  np.testing.assert_allclose(inference(params, X[0], X[1]), apart(params, X[0], X[1]), rtol=1e-5)


@pytest.mark.parametrize(
  'block', [Block, pytest.param(nn.remat(nn.jit(Block)), marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize('frozen', ['teacher', 'first layers'])
def test_a_frozen_model_is_cut_too(frozen, block):
  """Its modules have no backward pass, and two stages get what the gradients of two others cost."""
  student, teacher = Model((32,) * 4, block), Model((32,) * 12, block)

  def step(params, batch):
    student_params, teacher_params = params

    def loss(student_params, x):
      wanted = teacher.apply({'params': teacher_params}, x)
      x = x if frozen == 'teacher' else lax.stop_gradient(wanted)
      return jnp.mean((student.apply({'params': student_params}, x) - jnp.sin(wanted)) ** 2)

    value, grads = accumulate(lambda x: jax.value_and_grad(loss)(student_params, x), batch, FOUR, Mean)
    return (jax.tree.map(lambda w, g: w - 0.1 * g, student_params, grads), teacher_params), value

  params = params_of(student), params_of(teacher)
  found = LAYOUT.pipeline_jit(step, stages=4)(params, X)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-5), found, jax.jit(step)(params, X)
  )
  ranks = [{*itertools.chain(*ranks_of(each))} for each in found[0]]
  assert ranks == [{2, 3}, {0, 1}]


def test_a_stage_has_few_large_blocks_or_many_small_ones():
  model = Model((256, 64, 64, 64, 64, 256, 256), nn.remat(Block))
  trained, _ = LAYOUT.pipeline_jit(step_of(model), stages=4)(params_of(model), X)
  assert ranks_of(trained) == [[0], [1], [1], [1], [1], [2], [3]]


def test_models_of_other_threads_have_no_stage_ends():
  """Two pipelines are traced at once, and the first is done first; a model meanwhile and one afterwards are as before."""
  model = Model((32,) * 4, nn.remat(Block))
  params = params_of(model)
  started, overlapped, done = (threading.Event() for _ in range(3))

  def apply(params, x):
    return model.apply({'params': params}, x)

  def program(number):
    return str(jax.make_jaxpr(lambda params, x: apply(params, x + number))(params, X[0]))

  def first(params, x):
    started.set()
    assert overlapped.wait(60)
    return apply(params, x)

  def second(params, x):
    overlapped.set()
    assert done.wait(60)
    return apply(params, x)

  with ThreadPoolExecutor(2) as pool:
    one = pool.submit(LAYOUT.pipeline_jit(first, stages=4).lower, params, X[0])
    assert started.wait(60)
    meanwhile = program(1.0)
    two = pool.submit(LAYOUT.pipeline_jit(second, stages=4).lower, params, X[0])
    one.result()
    done.set()
    two.result()
  assert 'may_end' not in meanwhile + program(2.0)


def test_explicit_stage_ends_take_precedence():
  model = Model((256, 16, 16, 16), marked=True)
  trained, _ = LAYOUT.pipeline_jit(step_of(model), stages=4)(params_of(model), X)
  assert ranks_of(trained) == [[0], [1], [2], [3]]


def scanned(take, params, batch):
  """Sums of losses and gradients by `lax.scan`."""

  def one_pass(total, x):
    return jax.tree.map(jnp.add, total, take(params, x)), None

  return lax.scan(one_pass, (0.0, jax.tree.map(jnp.zeros_like, params)), batch)[0]


def counted(take, params, batch):
  """The same by `lax.fori_loop`, which takes the rows of a microbatch itself."""

  def one_pass(number, total):
    return jax.tree.map(jnp.add, total, take(params, lax.dynamic_index_in_dim(batch, number, 0, False)))

  return lax.fori_loop(0, len(batch), one_pass, (0.0, jax.tree.map(jnp.zeros_like, params)))


@pytest.mark.parametrize('loop', [scanned, counted])
def test_loops_without_accumulate(loop):
  model = Model((64,) * 4)

  def step(params, batch):
    def loss(params, x):
      return jnp.mean((model.apply({'params': params}, x) - jnp.sin(x)) ** 2)

    value, grads = loop(jax.value_and_grad(loss), params, batch)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

  params = params_of(model)
  new, value = LAYOUT.pipeline_jit(step, stages=4, schedule=OneFOneB(4))(params, X)
  expected, expected_value = jax.jit(step)(params, X)
  assert ranks_of(new) == [[0], [1], [2], [3]]
  np.testing.assert_allclose(value, expected_value, rtol=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-5), new, expected)


def accumulated(loss, params, batch):
  return accumulate(lambda x: loss(params, x), batch, OneFOneB(4), Mean)  # of which gradients are taken


def averaged(loss, params, batch):
  return jnp.mean(lax.map(lambda x: loss(params, x), batch))  # of which gradients are taken


@pytest.mark.parametrize('remat', [False, True])
@pytest.mark.parametrize('total', [accumulated, averaged])
def test_gradients_of_the_loop(total, remat):
  """The backward pass would be no pipeline: a loop of one stage over the activations of all microbatches."""
  model = Model((32,) * 4, nn.remat(Block) if remat else Block)

  def loss(params, x):  # of integers, through which no gradients flow
    return jnp.mean(model.apply({'params': params}, jnp.sin(x)) ** 2)

  def step(params, batch):
    return jax.grad(lambda params: total(loss, params, batch))(params)

  with pytest.raises(PipelineError) as error:
    LAYOUT.pipeline_jit(step, stages=4, schedule=OneFOneB(4))(params_of(model), X.astype(int))
  lines = Path(__file__).read_text().splitlines()
  [first, other] = [
    n for n, line in enumerate(lines, 1) if line.endswith('# of which gradients are taken')
  ]
  assert str(error.value) == (
    f'Gradients are taken of the microbatch loop at auto_stages_test.py:{first if total is accumulated else other}, '
    'and a pipeline takes them inside the loop.\n'
    'Fix: pass accumulate a function that takes gradients: jax.value_and_grad(loss).'
  )


def test_more_stages_than_possible_ends():
  model = Model((32, 32), nn.remat(Block))
  with pytest.raises(PipelineError) as error:
    LAYOUT.pipeline_jit(step_of(model, Interleaved1F1B(4, 2)), stages=8)(params_of(model), X)
  assert str(error.value) == (
    'stages=8, but the model has 3 points where a stage may end: after each Linen module that is called '
    'outside scans, branches and nn.remat, and of whose results no gradients of gradients or derivatives in '
    'forward mode are taken.\n'
    'Fix: use 4 stages or fewer, or end stages by flax_spmd.pipeline.stage_end.'
  )


def slopes_by_gradients(apply, x):
  return jax.grad(lambda x: jnp.sum(apply(x)))(x)


def slopes_in_forward_mode(apply, x):
  return jax.jvp(apply, (x,), (jnp.ones_like(x),))[1]


@pytest.mark.parametrize('slopes', [slopes_by_gradients, slopes_in_forward_mode])
def test_a_critic_whose_slopes_are_in_the_loss_is_not_cut(slopes):
  """As in a GAN with a gradient penalty: its generator is cut, and the passes of its critic are in the last stage."""
  generator, critic = Model((64,) * 3), Model((16,))

  def loss(params, x):
    def judged(x):
      return critic.apply({'params': params['critic']}, x)

    made = generator.apply({'params': params['generator']}, x)
    return jnp.mean(judged(made) ** 2 + slopes(judged, made) ** 2)

  def step(params, batch):
    value, grads = accumulate(lambda x: jax.value_and_grad(loss)(params, x), batch, OneFOneB(4), Mean)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

  params = {'generator': params_of(generator), 'critic': params_of(critic)}
  result, expected = LAYOUT.pipeline_jit(step, stages=4)(params, X), jax.jit(step)(params, X)
  assert ranks_of(result[0]['generator']) == [[0], [1], [2]]
  assert ranks_of(result[0]['critic']) == [[3]]
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-5), result, expected)


def inference_of(model):
  return lambda params, x: model.apply({'params': params}, x)


def first_of(variables):
  return jax.tree.leaves(variables)[0]


def mapped_inference_of(model):
  return lambda params, batch: lax.map(lambda x: inference_of(model)(params, x), batch)


def gradient_of(model):
  return jax.grad(lambda params, x: jnp.sum(inference_of(model)(params, x)))


@pytest.mark.parametrize(
  ('call', 'stages', 'text'),
  [
    (
      step_of,
      8,
      'stages=8, but OneFOneB(ranks=4) has 4 stages.\nFix: pass stages=4, or a schedule of 8 stages.',
    ),
    (
      step_of,
      5,
      'stages=5, but OneFOneB(ranks=4) has 4 stages.\nFix: pass stages=4, or a schedule of 5 stages.',
    ),
    (
      inference_of,
      6,
      "stages=6, but the mesh axis 'stage' has size 4.\n"
      'Fix: pass stages=4, or a multiple for several stages on each rank.',
    ),
    (
      gradient_of,
      4,
      'Gradients are taken outside a microbatch loop.\nFix: take them inside flax_spmd.pipeline.accumulate, '
      'with microbatches=1 to keep the batch whole.',
    ),
    (
      mapped_inference_of,
      4,
      'All modules after which a stage may end are inside operations that cannot be cut:\n'
      f'  scan at auto_stages_test.py:{mapped_inference_of.__code__.co_firstlineno + 1}\n'
      'Fix: call the model outside of them. A loop over microbatches is flax_spmd.pipeline.accumulate, with gradients or '
      'without; one over steps or tokens is a Python loop around the function.',
    ),
    (step_of, 0, 'pipeline_jit: stages is 0.\nFix: pass a positive integer.'),
    (
      lambda model: step_of(
        SimpleNamespace(apply=lambda variables, x: x * jnp.sum(first_of(variables)))
      ),
      4,
      'stages=4, but the model has 0 points where a stage may end: after each Linen module that is called '
      'outside scans, branches and nn.remat, and of whose results no gradients of gradients or derivatives in '
      'forward mode are taken.\nFix: end stages by flax_spmd.pipeline.stage_end.',
    ),
  ],
)
def test_errors_name_no_stage_ends_of_a_model_without(call, stages, text):
  model = Model((32,) * 8)
  with pytest.raises(PipelineError) as error:
    LAYOUT.pipeline_jit(call(model), stages=stages)(params_of(model), X)
  assert str(error.value) == text


sizes = st.lists(st.integers(0, 20), min_size=1, max_size=9)


@hypothesis.given(costs=sizes, sent=sizes, stages=st.integers(1, 5))
def test_chosen_stages_are_optimal(costs, sent, stages):
  """Against all choices: the largest stage is within 2 % of the smallest possible, with the least data sent."""
  hypothesis.assume(stages <= len(costs))
  sent = (sent * len(costs))[: len(costs)]

  def largest(ends):
    return max(
      sum(costs[a:b]) for a, b in itertools.pairwise([0, *(end + 1 for end in ends), len(costs)])
    )

  every = list(itertools.combinations(range(len(costs) - 1), stages - 1))
  chosen = sorted(choose(costs, sent, stages))
  best = min(map(largest, every))
  assert tuple(chosen) in every
  assert largest(chosen) <= best * 1.02
  allowed = [sum(sent[end] for end in ends) for ends in every if largest(ends) <= best * 1.02]
  assert sum(sent[end] for end in chosen) == min(allowed)


def test_costs_of_matrix_products_and_lookups():
  def of(fn, *shapes):
    values = [Value(jax.typeof(jnp.zeros(shape))) for shape in shapes]
    return sum(map(cost, traced(fn, *values)[0]))

  large = 4096
  product = of(lambda a, b: [a @ b], (large, large), (large, large))
  assert product == 2 * large**3  # compute-bound
  assert of(lambda a, b: [a @ b], (1, 8), (8, 8)) == FLOPS_PER_BYTE * 4 * (8 + 64 + 8)  # memory-bound
  assert of(lambda a: [jnp.sin(a) + a], (8, 8)) == 0  # fused into a neighbour
  table = of(lambda a: [a[jnp.array([0, 5])]], (large, 8))
  assert table == FLOPS_PER_BYTE * 2 * 4 * 2 * 8  # the rows read and written
  looped = of(lambda a, b: [jax.lax.scan(lambda c, _: (c @ b, None), a, length=3)[0]], (8, 8), (8, 8))
  assert looped == 3 * of(lambda a, b: [a @ b], (8, 8), (8, 8))
  image = of(
    lambda x, k: [jax.lax.conv_general_dilated(x, k, (1, 1), 'SAME')], (1, 64, 99, 99), (64, 64, 9, 9)
  )
  assert image == 2 * 99 * 99 * 64 * 64 * 81
