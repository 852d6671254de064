"""Models as pipelines: marks, shared weights, random numbers and Linen features, compared with `jax.jit`."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import flax_spmd as spmd
from flax_spmd.pipeline import (
  Add,
  Concat,
  GPipe,
  Interleaved1F1B,
  Mean,
  OneFOneB,
  accumulate,
  stage_end,
)
from tests.pipeline.cases import (
  LAYOUT,
  MICROBATCHES,
  PARAMS,
  ROWS,
  STAGES,
  TOKENS,
  WIDTH,
  WORDS,
  Block,
  Network,
  X,
  Y,
  assert_same,
  check,
  cross_entropy,
  descend,
  fitting,
  mlp,
  normal,
  optimizing,
  squared,
  training,
  weight,
)

# -- marks


def test_layers(schedule):
  check(training(squared, schedule), PARAMS, X, Y, steps=3)


def test_last_stage_without_an_end(schedule):
  def loss(params, x, y):
    return jnp.mean((mlp(params, x, STAGES - 1) - y) ** 2)

  check(training(loss, schedule), PARAMS, X, Y)


def test_more_microbatches_than_stages(schedule):
  batch = normal(1, 8, ROWS, WIDTH), normal(2, 8, ROWS, WIDTH)
  check(training(squared, schedule), PARAMS, *batch)


def test_fewer_microbatches_than_stages(schedule):
  check(training(squared, schedule), PARAMS, X[:2], Y[:2])


def test_one_microbatch(schedule):
  check(training(squared, schedule), PARAMS, X[:1], Y[:1])


def test_batch_over_data(schedule):
  batch = LAYOUT.shard((X, Y), (None, 'batch', None))
  params, _ = check(training(squared, schedule), PARAMS, *batch)
  assert [len(leaf.devices()) for leaf in jax.tree.leaves(params)] == [2] * STAGES


@pytest.mark.exhaustive
def test_linen_model(schedule):
  model = Network()
  check(training(fitting(model), schedule), model.init(jax.random.key(0), X[0]), X, Y)


@pytest.mark.exhaustive
def test_attention(schedule):
  class Attention(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
      for _ in range(STAGES):
        x = stage_end(x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x), mask=mask))
      return x

  x, y = X.reshape(MICROBATCHES, 2, 4, WIDTH), Y.reshape(MICROBATCHES, 2, 4, WIDTH)
  model, mask = Attention(), nn.make_causal_mask(jnp.ones((2, 4)))

  def loss(variables, x, y):
    return jnp.mean((model.apply(variables, x, mask) - y) ** 2)

  check(training(loss, schedule), model.init(jax.random.key(0), x[0], mask), x, y)


def test_integers_in_a_mark(schedule):
  def loss(params, x, tokens):
    for i in range(STAGES):
      x, tokens = stage_end((jnp.tanh(x @ params[f'w{i}']), tokens))
    return cross_entropy(x, tokens)

  check(training(loss, schedule), PARAMS, X, TOKENS)


def test_tree_in_a_mark(schedule):
  def loss(params, x, y):
    carry = {'h': x, 'sum': jnp.zeros(ROWS), 'nothing': None, 'depth': 0}
    for i in range(STAGES):
      h = jnp.tanh(carry['h'] @ params[f'w{i}'])
      carry = stage_end({**carry, 'h': h, 'sum': carry['sum'] + h.sum(-1), 'depth': carry['depth'] + 1})
    return jnp.mean((carry['h'] - y) ** 2) + jnp.mean(carry['sum'] ** 2) / carry['depth']

  check(training(loss, schedule), PARAMS, X, Y)


def test_parallel_branches(schedule):
  """The second stage uses nothing of the first."""

  def loss(params, x, y):
    first = stage_end(jnp.tanh(x @ params['w0']))
    second = stage_end(jnp.tanh(x @ params['w1']))
    third = stage_end(jnp.tanh((first + second) @ params['w2']))
    return jnp.mean((stage_end(jnp.tanh(third @ params['w3'])) - y) ** 2)

  check(training(loss, schedule), PARAMS, X, Y)


@jax.jit
def cached_layer(w, x):
  return stage_end(jnp.tanh(x @ w))


def cached_mlp(params, x):
  """A model whose marks have one number, as its layers are traced once."""
  for i in range(STAGES):
    x = cached_layer(params[f'w{i}'], x)
  return x


def test_a_layer_traced_before_the_step(schedule):
  """As JAX 0.12 calls it by an operation of its own."""
  layer = jax.jit(lambda w, x: stage_end(jnp.tanh(x @ w))).trace(PARAMS['w0'], X[0])

  def loss(params, x, y):
    for i in range(STAGES):
      x = layer(params[f'w{i}'], x)
    return jnp.mean((x - y) ** 2)

  check(training(loss, schedule), PARAMS, X, Y)


CALLED_TWICE = {
  'views': lambda p, other, x, y: jnp.mean((mlp(p, x) - mlp(p, y)) ** 2),
  'views without a last end': lambda p, other, x, y: jnp.mean(
    (mlp(p, x, STAGES - 1) - mlp(p, y, STAGES - 1)) ** 2
  ),
  'cached': lambda p, other, x, y: jnp.mean((cached_mlp(p, x) - cached_mlp(p, y)) ** 2),
  'reference': lambda p, other, x, y: jnp.mean(jax.nn.softplus(mlp(other, x) - mlp(p, x)) * y),
  'three calls': lambda p, other, x, y: jnp.mean(mlp(p, x) * mlp(p, y) * mlp(p, x + y)),
}


@pytest.mark.parametrize('name', CALLED_TWICE)
def test_model_called_twice(schedule, name):
  """Its calls pass through the stages together: every weight is on the rank of its layer, and only there."""
  other = jax.tree.map(lambda w: 0.9 * w, PARAMS)

  def loss(params, x, y):
    return CALLED_TWICE[name](params, other, x, y)

  params, _ = check(training(loss, schedule), PARAMS, X, Y)
  mesh = LAYOUT.mesh.devices.reshape(STAGES, -1)
  assert [params[f'w{i}'].devices() for i in range(STAGES)] == [{*each} for each in mesh]


@pytest.mark.parametrize('interleaved', [False, True])
def test_gradients_of_two_calls(schedule, interleaved):
  """The second forward is before the first backward, or after it."""

  def pulled(params, x, y):
    if not interleaved:
      return jax.value_and_grad(squared)(params, x, y)
    value, pull = jax.vjp(lambda params: squared(params, x, y), params)
    return value, pull

  def step(params, *batch):
    def both(one):
      (first, one_pull), (second, other_pull) = pulled(params, *one), pulled(params, *one[::-1])
      if interleaved:
        [one_pull], [other_pull] = one_pull(jnp.ones_like(first)), other_pull(jnp.ones_like(second))
      return first + second, jax.tree.map(jnp.add, one_pull, other_pull)

    value, grads = accumulate(both, batch, schedule, Mean)
    return descend(params, grads), value

  check(step, PARAMS, X, Y)


@pytest.mark.parametrize('cached', [False, True])
def test_two_backward_passes_of_a_forward_pass(schedule, cached):
  """As for gradients of several tasks that are combined by their signs; the marks of a jitted layer are one."""
  layer = jax.jit(lambda w, x: stage_end(jnp.tanh(x @ w)))

  def net(params, x):
    for i in range(STAGES if cached else 0):
      x = layer(params[f'w{i}'], x)
    return x if cached else mlp(params, x)

  def step(params, *batch):
    def both(one):
      x, y = one
      found, pull = jax.vjp(lambda params: net(params, x), params)
      [grads], [others] = pull(found - y), pull(jnp.sign(found - y))
      return jnp.mean((found - y) ** 2), jax.tree.map(
        lambda g, o: jnp.where(g * o > 0, g, 0), grads, others
      )

    value, grads = accumulate(both, batch, schedule, Mean)
    return descend(params, grads), value

  check(step, PARAMS, X, Y)


def test_gradients_at_weights_that_depend_on_gradients():
  """As in sharpness-aware minimisation: two pipelines, as the error for one of them advises."""
  schedule = OneFOneB(STAGES)

  def gradients(params, *batch):
    return accumulate(lambda one: jax.grad(squared)(params, *one), batch, schedule, Mean)

  def ascend(params, *batch):
    grads = gradients(params, *batch)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda w, g: w + 0.05 * g / norm, params, grads)

  def step(params, ascended, *batch):
    return descend(params, gradients(ascended, *batch))

  ascended = LAYOUT.pipeline_jit(ascend)(PARAMS, X, Y)
  result = LAYOUT.pipeline_jit(step)(PARAMS, ascended, X, Y)
  assert_same(result, jax.jit(lambda p, *b: step(p, ascend(p, *b), *b))(PARAMS, X, Y))


def test_gradients_of_two_models(schedule):
  """The ends of the second one, which has a branch more, are counted on after the first backward."""

  def branched(params, x, y):
    x = stage_end(jnp.tanh(x @ params['w0'])) + stage_end(jnp.sin(x @ params['w0']))
    for i in range(1, STAGES):
      x = stage_end(jnp.tanh(x @ params[f'w{i}']))
    return jnp.mean((x - y) ** 2)

  def step(params, *batch):
    def both(one):
      (first, grads), (second, others) = (
        jax.value_and_grad(loss)(params, *one) for loss in (squared, branched)
      )
      return first + second, jax.tree.map(jnp.add, grads, others)

    value, grads = accumulate(both, batch, schedule, Mean)
    return descend(params, grads), value

  check(step, PARAMS, X, Y)


def test_two_stages_of_a_model_called_twice():
  """Two ends, one for each call, are one end of two stages; two ends on two lines are two stages."""
  devices = jax.devices()[::4]  # with two processes, one of each
  layout = spmd.Layout(spmd.make_mesh({'stage': 2}, devices=devices), ())
  params = {f'w{i}': PARAMS[f'w{i}'] for i in range(2)}

  def net(params, x):
    return stage_end(jnp.tanh(x @ params['w0'])) @ params['w1']

  def twice(params, x, y):
    return jnp.mean((net(params, x) - net(params, y)) ** 2)

  def towers(params, x, y):
    first = stage_end(jnp.tanh(x @ params['w0']))
    second = stage_end(jnp.tanh(y @ params['w1']))
    return jnp.mean((first - second) ** 2)

  for loss in (twice, towers):
    result, _ = check(training(loss, OneFOneB(2)), params, X, Y, layout=layout)
    assert [result[f'w{i}'].devices() for i in range(2)] == [{one} for one in devices]


def test_model_called_on_its_own_result():
  """Ends one after another are stages of their own; those with shared weights are on one rank."""

  def loss(params, x, y):
    return jnp.mean((mlp(params, mlp(params, x)) - y) ** 2)

  params, _ = check(training(loss, Interleaved1F1B(STAGES, 2)), PARAMS, X, Y)
  mesh = LAYOUT.mesh.devices.reshape(STAGES, -1)
  assert [params[f'w{i}'].devices() for i in range(STAGES)] == [{*each} for each in mesh]


def test_mark_inside_jit(schedule):
  """JAX caches the trace of the block, so all four marks have the same number."""
  block = jax.jit(lambda x, w: stage_end(jnp.tanh(x @ w)))

  def loss(params, x, y):
    for i in range(STAGES):
      x = block(x, params[f'w{i}'])
    return jnp.mean((x - y) ** 2)

  check(training(loss, schedule), PARAMS, X, Y)


def test_mark_inside_nn_jit(schedule):
  model = Network(block=nn.jit(Block))
  check(training(fitting(model), schedule), model.init(jax.random.key(0), X[0]), X, Y)


def test_loss_inside_jit(schedule):
  """The whole loss is one jitted function."""
  check(training(jax.jit(squared), schedule), PARAMS, X, Y)


def test_gradient_inside_jit(schedule):
  def step(params, x, y):
    grad = jax.jit(jax.value_and_grad(squared))
    loss, grads = accumulate(jax.jit(lambda one: grad(params, *one)), (x, y), schedule, Mean)
    return jax.jit(descend)(params, grads), loss

  check(step, PARAMS, X, Y)


def test_remat_inside_a_stage(schedule):
  class Remat(nn.Module):
    @nn.compact
    def __call__(self, x):
      for _ in range(STAGES):
        x = stage_end(nn.remat(Block)(end=False)(x))
      return x

  model = Remat()
  check(training(fitting(model), schedule), model.init(jax.random.key(0), X[0]), X, Y)


def test_remat_with_a_policy(schedule):
  save = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

  def loss(params, x, y):
    for i in range(STAGES):
      layer = jax.checkpoint(lambda x, w: jnp.sin(jnp.tanh(x @ w) @ w), policy=save)
      x = stage_end(layer(x, params[f'w{i}']))
    return jnp.mean((x - y) ** 2)

  check(training(loss, schedule), PARAMS, X, Y)


@pytest.mark.exhaustive
def test_jit_and_remat_inside_a_stage(schedule):
  class Both(nn.Module):
    @nn.compact
    def __call__(self, x):
      for _ in range(STAGES):
        x = stage_end(nn.jit(nn.remat(Block))(end=False)(x))
      return x

  model = Both()
  check(training(fitting(model), schedule), model.init(jax.random.key(0), X[0]), X, Y)


# -- values that stages share


def test_tied_embedding(schedule):
  params = {**PARAMS, 'embedding': weight(9, WORDS)}

  def loss(params, tokens):
    return cross_entropy(mlp(params, params['embedding'][tokens]) @ params['embedding'].T, tokens)

  check(training(loss, schedule), params, TOKENS)


def test_large_tied_embedding(schedule):
  """Large enough that each stage gets its own sum."""
  params = {**PARAMS, 'embedding': weight(9, 64)}

  def loss(params, tokens):
    return cross_entropy(mlp(params, params['embedding'][tokens]) @ params['embedding'].T, tokens)

  check(training(loss, schedule), params, TOKENS)


@pytest.mark.parametrize('words', [WORDS, pytest.param(64, marks=pytest.mark.exhaustive)])
def test_two_tied_weights(schedule, words):
  params = {**PARAMS, 'one': weight(9, words), 'other': weight(10, words)}

  def loss(params, tokens):
    one, other = params['one'], params['other']
    h = mlp(params, one[tokens] + 2 * other[tokens])
    return cross_entropy(h @ one.T + 3 * (h @ other.T), tokens)

  check(training(loss, schedule), params, TOKENS)


def test_weight_of_three_stages(schedule):
  def loss(params, x, y):
    for i, name in enumerate(['w0', 'w1', 'w0', 'w0']):
      x = stage_end(jnp.tanh(x @ params[name] + x @ params[f'w{i}']))
    return jnp.mean((x - y) ** 2)

  check(training(loss, schedule), PARAMS, X, Y)


def test_weight_of_all_stages(schedule):
  def loss(params, x, y):
    for _ in range(STAGES):
      x = stage_end(jnp.tanh(x @ params['w0']))
    return jnp.mean((x - y) ** 2)

  check(training(loss, schedule), {'w0': PARAMS['w0']}, X, Y)


def test_scale_of_all_stages(schedule):
  """A parameter that is a number."""

  def loss(params, x, y):
    for i in range(STAGES):
      x = stage_end(jnp.tanh(params['scale'] * (x @ params[f'w{i}'])))
    return jnp.mean((x - y) ** 2)

  check(training(loss, schedule), {**PARAMS, 'scale': jnp.float32(1.2)}, X, Y)


@pytest.mark.exhaustive
def test_tied_weight_by_adam(schedule):
  tx = optax.adam(1e-2, eps=1e-3)
  params = {**PARAMS, 'embedding': weight(9, 64)}

  def loss(params, tokens):
    return cross_entropy(mlp(params, params['embedding'][tokens]) @ params['embedding'].T, tokens)

  check(optimizing(tx, schedule, loss), (params, tx.init(params)), TOKENS)


def test_masks_and_positions_of_all_stages(schedule):
  def loss(params, tokens, y):
    mask = (tokens > 4)[:, None].astype(jnp.float32)
    positions = jnp.sin(jnp.arange(ROWS))[:, None]
    x = jax.nn.one_hot(tokens, WIDTH)
    for i in range(STAGES):
      x = stage_end(jnp.tanh((x @ params[f'w{i}'] + positions) * mask))
    return jnp.mean(mask * (x - y) ** 2)

  check(training(loss, schedule), PARAMS, TOKENS, Y)


def test_positions_computed_before_the_loop(schedule):
  def step(params, tokens, y):
    positions = jnp.sin(jnp.outer(jnp.arange(ROWS), jnp.arange(WIDTH)))

    def loss(params, tokens, y):
      x = jax.nn.one_hot(tokens, WIDTH)
      for i in range(STAGES):
        x = stage_end(jnp.tanh(x @ params[f'w{i}'] + positions))
      return jnp.mean((x - y) ** 2)

    return training(loss, schedule)(params, tokens, y)

  check(step, PARAMS, TOKENS, Y)


def test_skip_connection(schedule):
  """From the first stage to the last, past two others."""

  def loss(params, x, y):
    first = stage_end(jnp.tanh(x @ params['w0']))
    h = stage_end(jnp.tanh(first @ params['w1']))
    h = stage_end(jnp.tanh(h @ params['w2']))
    return jnp.mean((stage_end(jnp.tanh((h + first) @ params['w3'])) - y) ** 2)

  check(training(loss, schedule), PARAMS, X, Y)


@pytest.mark.parametrize('source', ['input', 'encoder'])
def test_layers_on_an_earlier_value(schedule, source):
  """As those on the time of a diffusion model, or the cross-attention of decoders: their weights are in their stages."""
  embedded = jax.jit(lambda params, x: jnp.tanh(jnp.sin(x @ params['v0'])))
  params = PARAMS | {f'v{i}': weight(20 + i) for i in range(STAGES)}

  def loss(params, x, y):
    context = embedded(params, x)
    for i in range(STAGES):
      x = stage_end(jnp.tanh(x @ params[f'w{i}'] + context @ params[f'v{i}']))
      context = x if i == 0 and source == 'encoder' else context
    return jnp.mean((x - y) ** 2)

  params, _ = check(training(loss, schedule), params, X, Y)
  mesh = LAYOUT.mesh.devices.reshape(STAGES, -1)
  assert [params[f'v{i}'].devices() for i in range(STAGES)] == [{*each} for each in mesh]


def test_heads_of_inner_stages(schedule):
  """A loss of each stage, computed after the model: its head stays where its input is."""
  params = PARAMS | {f'v{i}': weight(20 + i) for i in range(STAGES)}

  def loss(params, x, y):
    inner = []
    for i in range(STAGES):
      inner.append(jnp.tanh(x @ params[f'w{i}']))
      x = stage_end(inner[-1])
    return sum(jnp.mean((each @ params[f'v{i}'] - y) ** 2) for i, each in enumerate(inner))

  params, _ = check(training(loss, schedule), params, X, Y)
  mesh = LAYOUT.mesh.devices.reshape(STAGES, -1)
  assert [params[f'v{i}'].devices() for i in range(STAGES)] == [{*each} for each in mesh]


def test_skip_connection_from_before_the_mark(schedule):
  def loss(params, x, y):
    before = jnp.tanh(x @ params['w0'])
    h = stage_end(before)
    h = stage_end(jnp.tanh(h @ params['w1']))
    h = stage_end(jnp.tanh(h @ params['w2'] + before))
    return jnp.mean((stage_end(jnp.tanh((h + before) @ params['w3'])) - y) ** 2)

  check(training(loss, schedule), PARAMS, X, Y)


def test_input_of_all_stages(schedule):
  def loss(params, x, y):
    h = x
    for i in range(STAGES):
      h = stage_end(jnp.tanh(h @ params[f'w{i}'] + x))
    return jnp.mean((h - y) ** 2)

  check(training(loss, schedule), PARAMS, X, Y)


# -- stages without parameters


def test_inner_stages_without_parameters(schedule):
  def loss(params, x, y):
    h = stage_end(jnp.tanh(x @ params['w0']))
    h = stage_end(jnp.sin(h))
    h = stage_end(jnp.tanh(h @ params['w1']))
    return jnp.mean((stage_end(jnp.cos(h)) - y) ** 2)

  check(training(loss, schedule), {'w0': PARAMS['w0'], 'w1': PARAMS['w1']}, X, Y)


def test_first_stage_without_parameters(schedule):
  def loss(params, x, y):
    h = stage_end(jnp.sin(x))
    h = stage_end(jnp.tanh(h @ params['w0']))
    h = stage_end(jnp.tanh(h @ params['w1']))
    return jnp.mean((stage_end(jnp.cos(h)) - y) ** 2)

  check(training(loss, schedule), {'w0': PARAMS['w0'], 'w1': PARAMS['w1']}, X, Y)


def test_stage_that_does_nothing(schedule):
  def loss(params, x, y):
    h = stage_end(stage_end(jnp.tanh(x @ params['w0'])))
    h = stage_end(jnp.tanh(h @ params['w1']))
    return jnp.mean((stage_end(h) - y) ** 2)

  check(training(loss, schedule), {'w0': PARAMS['w0'], 'w1': PARAMS['w1']}, X, Y)


# -- random numbers


@pytest.mark.parametrize(
  'make',
  [
    pytest.param(jax.random.key, id='typed'),
    pytest.param(jax.random.PRNGKey, id='raw', marks=pytest.mark.exhaustive),
  ],
)
def test_dropout_by_keys_of_the_batch(schedule, make):
  def loss(params, x, y, key):
    for i in range(STAGES):
      x = jnp.tanh(x @ params[f'w{i}'])
      keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.7, x.shape)
      x = stage_end(jnp.where(keep, x / 0.7, 0))
    return jnp.mean((x - y) ** 2)

  check(training(loss, schedule), PARAMS, X, Y, jax.random.split(make(3), MICROBATCHES))


@pytest.mark.parametrize(
  'make',
  [jax.random.key, pytest.param(jax.random.PRNGKey, marks=pytest.mark.exhaustive)],
  ids=['typed', 'raw'],
)
def test_dropout_by_a_key_of_the_step(schedule, make):
  model = Network(dropout=0.3)
  keys = {'params': jax.random.key(0), 'dropout': jax.random.key(1)}
  variables = model.init(keys, X[0])

  def step(state, x, y):
    variables, count = state
    key = jax.random.fold_in(make(1), count)

    def loss(variables, number, x, y):
      rngs = {'dropout': jax.random.fold_in(key, number)}
      return jnp.mean((model.apply(variables, x, rngs=rngs) - y) ** 2)

    grad = jax.value_and_grad(loss)
    batch = jnp.arange(MICROBATCHES), x, y
    value, grads = accumulate(lambda one: grad(variables, *one), batch, schedule, Mean)
    return (descend(variables, grads), count + 1), value

  check(step, (variables, jnp.int32(0)), X, Y)


@pytest.mark.parametrize('make', [jax.random.key, jax.random.PRNGKey], ids=['typed', 'raw'])
def test_key_in_the_state(schedule, make):
  def step(state, x, y):
    params, key = state
    key, own = jax.random.split(key)

    def loss(params, x, y):
      return squared(params, x + 0.1 * jax.random.normal(own, x.shape), y)

    params, value = training(loss, schedule)(params, x, y)
    return (params, key), value

  check(step, (PARAMS, make(5)), X, Y)


def test_the_same_dropout_in_every_microbatch(schedule):
  model = Network(dropout=0.3)
  variables = model.init({'params': jax.random.key(0), 'dropout': jax.random.key(1)}, X[0])

  def loss(variables, x, y):
    return jnp.mean((model.apply(variables, x, rngs={'dropout': jax.random.key(2)}) - y) ** 2)

  check(training(loss, schedule), variables, X, Y)


# -- models


def test_batch_statistics(schedule):
  class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
      for _ in range(STAGES):
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.Dense(WIDTH)(x))
        x = stage_end(nn.relu(x))
      return x

  model = Normed()
  variables = model.init(jax.random.key(0), X[0])

  def step(variables, x, y):
    def loss(params, x, y):
      result, new = model.apply({**variables, 'params': params}, x, mutable=['batch_stats'])
      return jnp.mean((result - y) ** 2), new['batch_stats']

    grad = jax.value_and_grad(loss, has_aux=True)
    (value, stats), grads = accumulate(
      lambda one: grad(variables['params'], *one), (x, y), schedule, Mean
    )
    return {'params': descend(variables['params'], grads), 'batch_stats': stats}, value

  check(step, variables, X, Y)


def test_sown_intermediates(schedule):
  class Sowing(nn.Module):
    @nn.compact
    def __call__(self, x):
      for i in range(STAGES):
        x = jnp.tanh(nn.Dense(WIDTH)(x))
        self.sow('intermediates', f'norm{i}', jnp.linalg.norm(x))
        x = stage_end(x)
      return x

  model = Sowing()
  params = model.init(jax.random.key(0), X[0])['params']

  def loss(params, x, y):
    result, sown = model.apply({'params': params}, x, mutable=['intermediates'])
    return jnp.mean((result - y) ** 2), sown

  check(training(loss, schedule, ((Mean, Concat), Mean), has_aux=True), params, X, Y)


def test_custom_vjp(schedule):
  @jax.custom_vjp
  def clipped(x):
    return jnp.tanh(x)

  clipped.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (jnp.clip(g * (1 - jnp.tanh(x) ** 2), -1, 1),))

  def loss(params, x, y):
    for i in range(STAGES):
      x = stage_end(clipped(x @ params[f'w{i}']))
    return jnp.mean((x - y) ** 2)

  check(training(loss, schedule), PARAMS, X, Y)


def test_custom_jvp(schedule):
  @jax.custom_jvp
  def act(x):
    return jnp.where(x > 0, x, 0)

  act.defjvp(
    lambda primals, tangents: (act(*primals), jnp.where(primals[0] > 0, 1.0, 0.1) * tangents[0])
  )

  def loss(params, x, y):
    for i in range(STAGES):
      x = stage_end(act(x @ params[f'w{i}']))
    return jnp.mean((x - y) ** 2)

  check(training(loss, schedule), PARAMS, X, Y)


def test_scan_inside_a_stage(schedule):
  params = {name: jnp.stack([w, w.T]) for name, w in PARAMS.items()}

  def loss(params, x, y):
    for i in range(STAGES):
      x = stage_end(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params[f'w{i}'])[0])
    return jnp.mean((x - y) ** 2)

  check(training(loss, schedule), params, X, Y)


@pytest.mark.parametrize('remat', [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_nn_scan_inside_a_stage(schedule, remat):
  class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
      return nn.tanh(nn.Dense(WIDTH)(x)), None

  class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
      layer = nn.remat(Layer, prevent_cse=False) if remat else Layer
      for _ in range(STAGES):
        scanned = nn.scan(layer, variable_axes={'params': 0}, split_rngs={'params': True}, length=2)
        x = stage_end(scanned()(x, None)[0])
      return x

  model = Scanned()
  check(training(fitting(model), schedule), model.init(jax.random.key(0), X[0]), X, Y)


def test_vmap_inside_a_stage(schedule):
  """Experts or heads in a dimension."""
  params = {name: jnp.stack([w, w.T]) for name, w in PARAMS.items()}

  def loss(params, x, y):
    for i in range(STAGES):
      x = stage_end(jnp.mean(jax.vmap(lambda w, x: jnp.tanh(x @ w), (0, None))(params[f'w{i}'], x), 0))
    return jnp.mean((x - y) ** 2)

  check(training(loss, schedule), params, X, Y)


def test_vmap_around_the_marks(schedule):
  """The model is written for one example."""

  def loss(params, x, y):
    return jnp.mean((jax.vmap(lambda one: mlp(params, one))(x) - y) ** 2)

  check(training(loss, schedule), PARAMS, X, Y)


def test_cond_inside_a_stage(schedule):
  def loss(params, x, y):
    for i in range(STAGES):
      x = stage_end(lax.cond(x.sum() > 0, jnp.tanh, jnp.sin, x @ params[f'w{i}']))
    return jnp.mean((x - y) ** 2)

  check(training(loss, schedule), PARAMS, X, Y)


def test_loop_inside_a_stage(schedule):
  def loss(params, x, y):
    for i in range(STAGES):
      x = stage_end(lax.fori_loop(0, 2, lambda _, x, w=params[f'w{i}']: jnp.tanh(x @ w), x))
    return jnp.mean((x - y) ** 2)

  check(training(loss, schedule), PARAMS, X, Y)


def test_parameters_cast_in_the_loop(schedule):
  def loss(params, x, y):
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    return jnp.mean((mlp(half, x.astype(jnp.bfloat16)).astype(jnp.float32) - y) ** 2)

  check(training(loss, schedule), PARAMS, X, Y, tolerance=2e-2)


def test_parameters_cast_before_the_loop(schedule):
  def step(params, x, y):
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    grad = jax.value_and_grad(lambda p, x, y: squared(p, x.astype(jnp.bfloat16), y).astype(jnp.float32))

    def fn(one):
      loss, grads = grad(half, *one)
      return loss, jax.tree.map(lambda g: g.astype(jnp.float32), grads)

    loss, grads = accumulate(fn, (x, y), schedule, Mean)
    return descend(params, grads), loss

  check(step, PARAMS, X, Y, tolerance=2e-2)


def test_bfloat16_parameters(schedule):
  half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), PARAMS)
  check(
    training(squared, schedule), half, X.astype(jnp.bfloat16), Y.astype(jnp.bfloat16), tolerance=5e-2
  )


def test_parameters_normalized_in_the_loop(schedule):
  """Values that depend on parameters alone and have gradients."""

  def loss(params, x, y):
    return squared(jax.tree.map(lambda w: w / jnp.linalg.norm(w, axis=0, keepdims=True), params), x, y)

  check(training(loss, schedule), PARAMS, X, Y)


def test_parameters_in_one_array(schedule):
  """Every stage takes its layer from one stacked array."""

  def loss(params, x, y):
    for i in range(STAGES):
      x = stage_end(jnp.tanh(x @ params['w'][i]))
    return jnp.mean((x - y) ** 2)

  check(training(loss, schedule), {'w': jnp.stack(list(PARAMS.values()))}, X, Y)


# -- marks outside a pipeline


def test_mark_is_the_identity():
  tree = {'x': X, 'tokens': TOKENS, 'number': 3, 'nothing': None}
  assert_same(jax.tree.map(jnp.asarray, stage_end(tree)), jax.tree.map(jnp.asarray, tree), 0)


def pairs():
  """A function with a mark, and the same without."""
  w = PARAMS['w0']
  return lambda x: jnp.sum(jnp.sin(stage_end(jnp.tanh(x @ w)))), lambda x: jnp.sum(
    jnp.sin(jnp.tanh(x @ w))
  )


TRANSFORMS = {
  'jit': jax.jit,
  'grad': jax.grad,
  'value_and_grad': jax.value_and_grad,
  'vmap': jax.vmap,
  'jvp': lambda fn: lambda x: jax.jvp(fn, (x,), (jnp.ones_like(x),)),
  'vjp': lambda fn: lambda x: jax.vjp(fn, x)[1](jnp.float32(1)),
  'linearize': lambda fn: lambda x: jax.linearize(fn, x)[1](jnp.ones_like(x)),
  'jacfwd': jax.jacfwd,
  'jacrev': jax.jacrev,
  'hessian': lambda fn: jax.hessian(lambda x: fn(x[:, None] * X[0])),
  'remat': lambda fn: jax.grad(jax.checkpoint(fn)),
  'grad of vmap': lambda fn: jax.grad(lambda x: jax.vmap(fn)(x).sum()),
  'vmap of grad': lambda fn: jax.vmap(jax.grad(fn)),
  'jit of remat': lambda fn: jax.jit(jax.grad(jax.checkpoint(fn))),
  'scan': lambda fn: (
    lambda x: lax.scan(lambda total, one: (total + fn(one[None]), fn(one[None])), 0.0, x)
  ),
  'grad of scan': lambda fn: jax.grad(
    lambda x: lax.scan(lambda total, one: (total + fn(one[None]), None), 0.0, x)[0]
  ),
  'cond': lambda fn: lambda x: lax.cond(x.sum() > 0, fn, lambda x: x.sum(), x),
  'eval_shape': lambda fn: lambda x: jnp.zeros(jax.eval_shape(fn, x).shape),
}


@pytest.mark.parametrize('name', TRANSFORMS)
def test_transforms_ignore_marks(name):
  marked, without = map(TRANSFORMS[name], pairs())
  x = {'vmap': X, 'vmap of grad': X, 'grad of vmap': X, 'hessian': jnp.linspace(0, 1, ROWS)}.get(
    name, X[0]
  )
  assert_same(marked(x), without(x), 1e-6)


@pytest.mark.parametrize('lift', [nn.jit, nn.remat], ids=['jit', 'remat'])
def test_linen_transforms_ignore_marks(lift):
  lifted, direct = Network(block=lift(Block)), Network()
  variables = direct.init(jax.random.key(0), X[0])
  loss = lambda model: lambda variables: jnp.mean(model.apply(variables, X[0]) ** 2)
  renamed = lifted.init(jax.random.key(0), X[0])
  filled = jax.tree.structure(renamed).unflatten(jax.tree.leaves(variables))
  result, expected = jax.grad(loss(lifted))(filled), jax.grad(loss(direct))(variables)
  assert_same(jax.tree.leaves(result), jax.tree.leaves(expected))


@pytest.mark.parametrize('marked', [True, False])
def test_results_of_nn_scan_that_a_loss_ignores(marked):
  """As of SigLIP's encoders, which return the activations of every layer for those who look at them."""

  class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = x + nn.Dense(WIDTH)(jnp.sin(x))
      return x, {'activations': x}

  class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
      for _ in range(STAGES):
        x = nn.scan(Layer, variable_axes={'params': 0}, split_rngs={'params': True}, length=2)()(x)
        x, _ = stage_end(x) if marked else x
      return x

  step, variables = (
    training(fitting(Scanned()), OneFOneB(STAGES)),
    Scanned().init(jax.random.key(0), X[0]),
  )
  check(step, variables, X, Y, stages=None if marked else STAGES)


def test_nn_scan_ignores_marks():
  class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
      return stage_end(nn.tanh(nn.Dense(WIDTH)(x))), None

  scanned = nn.scan(Layer, variable_axes={'params': 0}, split_rngs={'params': True}, length=3)()
  variables = scanned.init(jax.random.key(0), X[0], None)

  def direct(variables, x):
    layers = variables['params']['Dense_0']
    for i in range(3):
      x = jnp.tanh(x @ layers['kernel'][i] + layers['bias'][i][None])
    return x

  total = lambda fn: jax.jit(jax.grad(lambda variables: fn(variables).sum()))
  result = total(lambda variables: scanned.apply(variables, X[0], None)[0])(variables)
  assert_same(result, total(lambda variables: direct(variables, X[0]))(variables))


def test_accumulate_is_a_loop():
  """Outside a pipeline it equals a Python loop."""
  grad = jax.value_and_grad(squared)
  loss, grads = accumulate(lambda one: grad(PARAMS, *one), (X, Y), GPipe(STAGES), (Concat, Add))
  each = [grad(PARAMS, x, y) for x, y in zip(X, Y)]
  assert_same(loss, jnp.stack([value for value, _ in each]))
  assert_same(
    grads, functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), [one for _, one in each])
  )
