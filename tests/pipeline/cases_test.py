"""Cases: what a train step can have in it, as a pipeline and not; plain `jax.jit` is the oracle.

A test says one thing that models and steps do. Every step runs several times in a row, by a schedule whose
backwards are whole and by one that has the gradients of weights apart.
"""

import functools

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from jax import lax
from jax.sharding import PartitionSpec

import flax_spmd as spmd
from flax_spmd.pipeline import (
  Add,
  Concat,
  GPipe,
  Interleaved1F1B,
  Max,
  Mean,
  OneFOneB,
  ZeroBubbleH1,
  accumulate,
  stage_end,
)
from tests.versions import ON_NEW_JAX, ON_OLD_JAX

STAGES = MICROBATCHES = 4
ROWS, WIDTH, WORDS = 8, 16, 11
LAYOUT = spmd.Layout({'stage': STAGES, 'data': 2}, (('batch', 'data'),))


def normal(number, *shape):
  return jax.random.normal(jax.random.key(number), shape)


def weight(number, rows=WIDTH, columns=WIDTH):
  return normal(number, rows, columns) / np.sqrt(rows)


PARAMS = {f'w{i}': weight(i) for i in range(STAGES)}
X = normal(100, MICROBATCHES, ROWS, WIDTH)
Y = jnp.sin(3 * X)
TOKENS = jax.random.randint(jax.random.key(101), (MICROBATCHES, ROWS), 0, WORDS)


@pytest.fixture(
  params=[
    pytest.param(OneFOneB(STAGES), id='1f1b', marks=ON_OLD_JAX),
    pytest.param(ZeroBubbleH1(STAGES), id='zero_bubble', marks=ON_NEW_JAX),
  ]
)
def schedule(request):
  return request.param


# -- what is compared


def plain(leaf):
  """A leaf as numpy can compare it."""
  leaf = jnp.asarray(leaf)
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    leaf = jax.random.key_data(leaf)
  return np.asarray(leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf)


def weak(leaf):
  return getattr(leaf, 'weak_type', False)  # keys have none


def assert_same(found, expected, tolerance=1e-5):
  """Two trees have one structure, one type in each place, and the same numbers up to a tolerance."""
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True)
  for (path, leaf), wanted in pairs:
    where = jax.tree_util.keystr(path)
    assert isinstance(leaf, jax.Array), where
    assert jax.typeof(leaf).str_short() == jax.typeof(wanted).str_short(), where
    assert weak(leaf) == weak(wanted), where
    np.testing.assert_allclose(plain(leaf), plain(wanted), tolerance, tolerance, err_msg=where)


def check_each(step, state, calls, layout=LAYOUT, tolerance=1e-5, **options):
  """A step from a state and others to a new state and others, called several times in a row.

  Returns the last results.
  """
  statics = {name: value for name, value in options.items() if name.startswith('static')}
  one_by_one, pipelined = jax.jit(step, **statics), layout.pipeline_jit(step, **options)
  expected, found = (state,), (state,)
  for args in calls:
    expected, found = one_by_one(expected[0], *args), pipelined(found[0], *args)
    assert_same(found, expected, tolerance)
  return found


def check(step, state, *args, steps=2, **options):
  return check_each(step, state, [args] * steps, **options)


def check_once(fn, *args, layout=LAYOUT, tolerance=1e-5, **options):
  """A function of anything, called twice with the same; its results."""
  expected, pipelined = jax.jit(fn)(*args), layout.pipeline_jit(fn, **options)
  for _ in range(2):
    found = pipelined(*args)
    assert_same(found, expected, tolerance)
  return found


# -- what is trained


def descend(params, grads, rate=0.1):
  return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def mlp(params, x, ends=STAGES):
  """A layer per stage; the last stage's end can be left out."""
  for i in range(STAGES):
    x = jnp.tanh(x @ params[f'w{i}'])
    x = stage_end(x) if i < ends else x
  return x


def squared(params, x, y):
  return jnp.mean((mlp(params, x) - y) ** 2)


def cross_entropy(logits, labels):
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def training(loss, schedule, op=Mean, has_aux=False):
  """A step of gradient descent on `loss(params, *microbatch)`."""

  def step(params, *batch):
    grad = jax.value_and_grad(loss, has_aux=has_aux)
    value, grads = accumulate(lambda one: grad(params, *one), batch, schedule, op)
    return descend(params, grads), value

  return step


def optimizing(tx, schedule, loss=squared):
  """A step of an optimizer on a state of parameters and its own."""

  def step(state, *batch):
    params, memory = state
    grad = jax.value_and_grad(loss)
    value, grads = accumulate(lambda one: grad(params, *one), batch, schedule, Mean)
    updates, memory = tx.update(grads, memory, params)
    return (optax.apply_updates(params, updates), memory), value

  return step


class Block(nn.Module):
  """A stage of a residual network."""

  dropout: float = 0.0
  end: bool = True

  @nn.compact
  def __call__(self, x):
    hidden = nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))
    hidden = nn.Dropout(self.dropout, deterministic=not self.dropout)(hidden)
    x = x + nn.Dense(WIDTH)(hidden)
    return stage_end(x) if self.end else x


class Network(nn.Module):
  """A block per stage."""

  block: type[nn.Module] = Block
  dropout: float = 0.0

  @nn.compact
  def __call__(self, x):
    for _ in range(STAGES):
      x = self.block(dropout=self.dropout)(x)
    return x


def fitting(model):
  """The loss of a Linen model without rngs."""
  return lambda variables, x, y: jnp.mean((model.apply(variables, x) - y) ** 2)


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
  """The second stage needs nothing of the first."""

  def loss(params, x, y):
    first = stage_end(jnp.tanh(x @ params['w0']))
    second = stage_end(jnp.tanh(x @ params['w1']))
    third = stage_end(jnp.tanh((first + second) @ params['w2']))
    return jnp.mean((stage_end(jnp.tanh(third @ params['w3'])) - y) ** 2)

  check(training(loss, schedule), PARAMS, X, Y)


def test_mark_inside_jit(schedule):
  """The trace of the block is kept: all four marks have one number."""
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


# -- what stages share


def test_tied_embedding(schedule):
  params = {**PARAMS, 'embedding': weight(9, WORDS)}

  def loss(params, tokens):
    return cross_entropy(mlp(params, params['embedding'][tokens]) @ params['embedding'].T, tokens)

  check(training(loss, schedule), params, TOKENS)


def test_large_tied_embedding(schedule):
  """Large enough for every stage to have a sum of its own."""
  params = {**PARAMS, 'embedding': weight(9, 64)}

  def loss(params, tokens):
    return cross_entropy(mlp(params, params['embedding'][tokens]) @ params['embedding'].T, tokens)

  check(training(loss, schedule), params, TOKENS)


@pytest.mark.parametrize('words', [WORDS, 64])
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


# -- results beside the loss


def test_auxiliary_losses(schedule):
  """Every stage adds to the loss, as experts do to balance their load."""

  def loss(params, x, y):
    balance = 0.0
    for i in range(STAGES):
      x = jnp.tanh(x @ params[f'w{i}'])
      balance += 0.1 * jnp.mean(x**4)
      x = stage_end(x)
    return jnp.mean((x - y) ** 2) + balance

  check(training(loss, schedule), PARAMS, X, Y)


def test_auxiliary_losses_through_the_marks(schedule):
  def loss(params, x, y):
    balance = jnp.float32(0)
    for i in range(STAGES):
      x = jnp.tanh(x @ params[f'w{i}'])
      x, balance = stage_end((x, balance + 0.1 * jnp.mean(x**4)))
    return jnp.mean((x - y) ** 2) + balance

  check(training(loss, schedule), PARAMS, X, Y)


def test_weight_decay_in_the_loss(schedule):
  """The loss itself has every stage's parameters in it."""

  def loss(params, x, y):
    return squared(params, x, y) + 0.1 * sum(jnp.sum(w**2) for w in jax.tree.leaves(params))

  check(training(loss, schedule), PARAMS, X, Y)


def test_metrics_of_inner_stages(schedule):
  def loss(params, x, y):
    sizes = []
    for i in range(STAGES):
      x = stage_end(jnp.tanh(x @ params[f'w{i}']))
      sizes.append(jnp.mean(x**2))
    return jnp.mean((x - y) ** 2), sizes

  check(training(loss, schedule, ((Add, Concat), Add), has_aux=True), PARAMS, X, Y)


def test_has_aux_by_each_op(schedule):
  def loss(params, x, y):
    found = mlp(params, x)
    aux = {'found': found, 'rows': len(x), 'largest': jnp.max(jnp.abs(found)), 'mean': found.mean()}
    return jnp.mean((found - y) ** 2), aux

  ops = ((Mean, {'found': Concat, 'rows': Add, 'largest': Max, 'mean': Mean}), Mean)
  _, (_, aux) = check(training(loss, schedule, ops, has_aux=True), PARAMS, X, Y)
  assert aux['found'].shape == (MICROBATCHES * ROWS, WIDTH)
  assert aux['rows'] == MICROBATCHES * ROWS


def test_gradients_of_inputs(schedule):
  def step(params, x, y):
    grad = jax.value_and_grad(squared, argnums=(0, 1))
    loss, (grads, inputs) = accumulate(
      lambda one: grad(params, *one), (x, y), schedule, (Mean, (Mean, Concat))
    )
    return descend(params, grads), loss, inputs

  check(step, PARAMS, X, Y)


def test_constant_of_each_microbatch(schedule):
  def step(params, x, y):
    def fn(one):
      return *jax.value_and_grad(squared)(params, *one), jnp.float32(1), jnp.arange(3)

    losses, grads, count, same = accumulate(fn, (x, y), schedule, (Concat, Add, Add, Concat))
    return descend(params, grads), losses, count, same

  _, losses, count, same = check(step, PARAMS, X, Y)
  assert losses.shape == (MICROBATCHES,)
  assert count == MICROBATCHES
  assert same.tolist() == [0, 1, 2] * MICROBATCHES


def test_microbatch_as_a_result(schedule):
  def step(params, x, y):
    grad = jax.value_and_grad(squared)
    fn = lambda one: (grad(params, *one), one[0], one[0].sum())
    (loss, grads), inputs, total = accumulate(fn, (x, y), schedule, (Mean, Concat, Add))
    return descend(params, grads), loss, inputs, total

  check(step, PARAMS, X, Y)


# -- random numbers


@pytest.mark.parametrize('make', [jax.random.key, jax.random.PRNGKey], ids=['typed', 'raw'])
def test_dropout_by_keys_of_the_batch(schedule, make):
  def loss(params, x, y, key):
    for i in range(STAGES):
      x = jnp.tanh(x @ params[f'w{i}'])
      keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.7, x.shape)
      x = stage_end(jnp.where(keep, x / 0.7, 0))
    return jnp.mean((x - y) ** 2)

  check(training(loss, schedule), PARAMS, X, Y, jax.random.split(make(3), MICROBATCHES))


@pytest.mark.parametrize('make', [jax.random.key, jax.random.PRNGKey], ids=['typed', 'raw'])
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
      found, new = model.apply({**variables, 'params': params}, x, mutable=['batch_stats'])
      return jnp.mean((found - y) ** 2), new['batch_stats']

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
    found, sown = model.apply({'params': params}, x, mutable=['intermediates'])
    return jnp.mean((found - y) ** 2), sown

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


@pytest.mark.parametrize('remat', [False, True])
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
  """Experts, or heads, over a dimension of their own."""
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
  """What depends on parameters alone, and has a gradient."""

  def loss(params, x, y):
    return squared(jax.tree.map(lambda w: w / jnp.linalg.norm(w, axis=0, keepdims=True), params), x, y)

  check(training(loss, schedule), PARAMS, X, Y)


def test_parameters_in_one_array(schedule):
  """A stack of layers, of which every stage takes its own."""

  def loss(params, x, y):
    for i in range(STAGES):
      x = stage_end(jnp.tanh(x @ params['w'][i]))
    return jnp.mean((x - y) ** 2)

  check(training(loss, schedule), {'w': jnp.stack(list(PARAMS.values()))}, X, Y)


# -- frozen and closed-over


def test_stop_gradient(schedule):
  def loss(params, x, y):
    return squared({**params, 'w1': lax.stop_gradient(params['w1'])}, x, y)

  params, _ = check(training(loss, schedule), PARAMS, X, Y)
  assert_same(params['w1'], PARAMS['w1'])


def test_stop_gradient_between_stages(schedule):
  def loss(params, x, y):
    h = stage_end(jnp.tanh(x @ params['w0']))
    h = stage_end(lax.stop_gradient(jnp.tanh(h @ params['w1'])))
    h = stage_end(jnp.tanh(h @ params['w2']))
    return jnp.mean((stage_end(jnp.tanh(h @ params['w3'])) - y) ** 2)

  check(training(loss, schedule), PARAMS, X, Y)


def test_gradients_of_some_parameters(schedule):
  """Adapters: the others are no arguments of the loss."""

  def step(state, x, y):
    trained, frozen = state
    grad = jax.value_and_grad(lambda trained, x, y: squared({**frozen, **trained}, x, y))
    loss, grads = accumulate(lambda one: grad(trained, *one), (x, y), schedule, Mean)
    return (descend(trained, grads), frozen), loss

  trained = {name: PARAMS[name] for name in ('w0', 'w2')}
  frozen = {name: PARAMS[name] for name in ('w1', 'w3')}
  check(step, (trained, frozen), X, Y)


def test_unused_parameters_and_arrays_passed_through(schedule):
  def step(state, x, y):
    params, kept = state
    params, loss = training(squared, schedule)(params, x, y)
    return (params, kept), loss

  check(step, ({**PARAMS, 'unused': weight(30, 3, 3)}, jnp.arange(3)), X, Y)


@pytest.mark.parametrize('frozen', ['masked', 'multi_transform'])
def test_optimizer_of_some_parameters(schedule, frozen):
  labels = {'w0': 'train', 'w1': 'freeze', 'w2': 'train', 'w3': 'freeze'}
  adam = optax.adam(1e-2, eps=1e-3)
  if frozen == 'masked':
    tx = optax.chain(
      adam, optax.masked(optax.set_to_zero(), jax.tree.map(lambda label: label == 'freeze', labels))
    )
  else:
    tx = optax.multi_transform({'train': adam, 'freeze': optax.set_to_zero()}, labels)
  (params, _), _ = check(optimizing(tx, schedule), (PARAMS, tx.init(PARAMS)), X, Y)
  assert_same(params['w1'], PARAMS['w1'])


@pytest.mark.parametrize('rows', [1, WIDTH, 100 * WIDTH], ids=['small', 'square', 'large'])
@pytest.mark.parametrize('kind', [np.asarray, jnp.asarray], ids=['numpy', 'jax'])
def test_closed_over_arrays(schedule, rows, kind):
  """Small ones are literals of the program, others its constants; the first and last stages use them."""
  closed = kind(np.random.default_rng(0).normal(size=(rows, WIDTH)).astype(np.float32) / rows)

  def loss(params, x, y):
    return jnp.mean((mlp(params, x + closed.sum(0, keepdims=True)) * closed[:1] - y) ** 2)

  check(training(loss, schedule), PARAMS, X, Y)


def test_closed_over_array_after_the_loop(schedule):
  rates = jnp.linspace(0.1, 0.2, WIDTH)[None]

  def step(params, x, y):
    loss, grads = accumulate(
      lambda one: jax.value_and_grad(squared)(params, *one), (x, y), schedule, Mean
    )
    return jax.tree.map(lambda p, g: p - rates * g, params, grads), loss, rates

  check(step, PARAMS, X, Y)


def test_closed_over_parameters(schedule):
  """Nothing of the model is an argument."""

  def step(count, x, y):
    loss, grads = accumulate(
      lambda one: jax.value_and_grad(squared)(PARAMS, *one), (x, y), schedule, Mean
    )
    return count + 1, loss, grads

  check(step, jnp.int32(0), X, Y)


# -- updates


def test_loss_scaling(schedule):
  """A scale used in the loop and after it, and a flag of all gradients."""

  def step(state, x, y):
    params, scale = state
    grad = jax.value_and_grad(lambda params, x, y: scale * squared(params, x, y))
    loss, grads = accumulate(lambda one: grad(params, *one), (x, y), schedule, Mean)
    grads = jax.tree.map(lambda g: g / scale, grads)
    finite = jnp.all(jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
    new = jax.tree.map(lambda new, old: jnp.where(finite, new, old), descend(params, grads), params)
    return (new, jnp.where(finite, scale * 2, scale / 2)), loss / scale

  state = PARAMS, jnp.float32(8)
  check_each(step, state, [(X, Y), (X.at[0, 0, 0].set(np.nan), Y), (X, Y)])


def test_learning_rate_schedule(schedule):
  tx = optax.sgd(optax.warmup_cosine_decay_schedule(0.01, 0.1, 2, 10), momentum=0.9)
  check(optimizing(tx, schedule), (PARAMS, tx.init(PARAMS)), X, Y, steps=3)


def test_injected_hyperparameters(schedule):
  tx = optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(0.1, 0.0, 10))
  check(optimizing(tx, schedule), (PARAMS, tx.init(PARAMS)), X, Y)


def test_moving_average(schedule):
  def step(state, x, y):
    params, average = state
    params, loss = training(squared, schedule)(params, x, y)
    return (params, optax.incremental_update(params, average, 0.1)), loss

  check(step, (PARAMS, jax.tree.map(jnp.zeros_like, PARAMS)), X, Y)


OPTIMIZERS = {
  'sgd': optax.sgd(0.1),
  'momentum': optax.sgd(0.1, momentum=0.9, nesterov=True),
  'adam': optax.adam(1e-2, eps=1e-3),
  'adamw': optax.adamw(1e-2, eps=1e-3),
  'clipped': optax.chain(optax.clip_by_global_norm(0.01), optax.adam(1e-2, eps=1e-3)),
  'adafactor': optax.adafactor(1e-2, min_dim_size_to_factor=8),
  'lamb': optax.lamb(1e-2, eps=1e-3),
  'lion': optax.lion(1e-3),
  'MultiSteps': optax.MultiSteps(optax.adam(1e-2, eps=1e-3), every_k_schedule=2),
  'clipped MultiSteps': optax.MultiSteps(
    optax.chain(optax.clip_by_global_norm(0.01), optax.adam(1e-2, eps=1e-3)), every_k_schedule=2
  ),
}


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_optimizer(schedule, name):
  tx = OPTIMIZERS[name]
  check(optimizing(tx, schedule), (PARAMS, tx.init(PARAMS)), X, Y, steps=3)


@pytest.mark.parametrize('name', ['adam', 'clipped'])
def test_apply_if_finite(schedule, name):
  tx = optax.apply_if_finite(OPTIMIZERS[name], max_consecutive_errors=3)
  calls = [(X, Y), (X.at[1, 0, 0].set(np.inf), Y), (X, Y)]

  def step(state, x, y):
    state, loss = optimizing(tx, schedule)(state, x, y)
    return state, jnp.nan_to_num(loss)

  check_each(step, (PARAMS, tx.init(PARAMS)), calls)


def test_update_by_sums_over_all_stages(schedule):
  """Written by hand: every stage's parameters are updated by numbers of all of them."""

  def step(params, x, y):
    loss, grads = accumulate(
      lambda one: jax.value_and_grad(squared)(params, *one), (x, y), schedule, Mean
    )
    size = sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))
    along = sum(jnp.vdot(p, g) for p, g in zip(jax.tree.leaves(params), jax.tree.leaves(grads)))
    rate = 0.1 / (1 + jnp.sqrt(size)) + 0.01 * jnp.tanh(along)
    new = descend(params, grads, rate)
    moved = sum(jnp.sum(jnp.abs(n - p)) for n, p in zip(jax.tree.leaves(new), jax.tree.leaves(params)))
    return new, loss, {'size': size, 'along': along, 'moved': moved}

  check(step, PARAMS, X, Y)


def test_gradient_norms_of_stages(schedule):
  def step(params, x, y):
    loss, grads = accumulate(
      lambda one: jax.value_and_grad(squared)(params, *one), (x, y), schedule, Mean
    )
    norms = jnp.stack([jnp.linalg.norm(g) for g in jax.tree.leaves(grads)])
    return descend(params, grads), loss, norms, jnp.linalg.norm(norms)

  check(step, PARAMS, X, Y)


@pytest.mark.exhaustive
def test_train_state(schedule):
  model = Network()
  state = train_state.TrainState.create(
    apply_fn=model.apply,
    params=model.init(jax.random.key(0), X[0])['params'],
    tx=OPTIMIZERS['clipped'],
  )

  def step(state, x, y):
    def loss(params, x, y):
      return jnp.mean((state.apply_fn({'params': params}, x) - y) ** 2)

    value, grads = accumulate(
      lambda one: jax.value_and_grad(loss)(state.params, *one), (x, y), schedule, Mean
    )
    return state.apply_gradients(grads=grads), value

  state, _ = check(step, state, X, Y)
  assert state.step == 2


def test_frozen_dict(schedule):
  step = training(squared, schedule)
  check(step, flax.core.freeze(PARAMS), X, Y)


# -- layouts


class Named(nn.Module):
  """A network whose parameters and activations have names."""

  @nn.compact
  def __call__(self, x):
    for _ in range(STAGES):
      x = spmd.with_logical_constraint(x, ('batch', 'embed'))
      x = x + self.dense('mlp', 'embed', nn.tanh(self.dense('embed', 'mlp', x)))
      x = stage_end(spmd.with_logical_constraint(x, ('batch', 'embed')))
    return x

  def dense(self, rows, columns, x):
    boxed = functools.partial(spmd.with_logical_partitioning, names=(rows, columns))
    layer = nn.Dense(
      WIDTH,
      kernel_init=boxed(nn.initializers.lecun_normal()),
      bias_init=spmd.with_logical_partitioning(nn.initializers.zeros, (columns,)),
    )
    return layer(x)


RULES = {
  'batch over data': (('batch', 'data'),),
  'mlp over data': (('mlp', 'data'),),
  'both over data': (('batch', 'data'), ('mlp', 'data')),
  'fsdp': (('batch', 'data'), spmd.fsdp('data')),
}


def named_state(tx):
  model = Named()

  def init(key, x):
    variables = model.init(key, x)
    return train_state.TrainState.create(apply_fn=model.apply, params=variables['params'], tx=tx)

  return init


def named_step(schedule):
  def step(state, x, y):
    def loss(params, x, y):
      return jnp.mean((state.apply_fn({'params': params}, x) - y) ** 2)

    value, grads = accumulate(
      lambda one: jax.value_and_grad(loss)(state.params, *one), (x, y), schedule, Mean
    )
    return state.apply_gradients(grads=grads), value

  return step


@pytest.mark.exhaustive
@pytest.mark.parametrize('boxed', [True, False], ids=['boxed', 'unboxed'])
@pytest.mark.parametrize('rules', RULES)
def test_layouts(schedule, rules, boxed):
  layout = spmd.Layout({'stage': STAGES, 'data': 2}, RULES[rules])
  init, key = named_state(OPTIMIZERS['clipped']), jax.random.key(0)
  state = layout.init(init, key, X[0], boxed=boxed)
  batch = layout.shard((X, Y), (None, 'batch', None))
  step = named_step(schedule)
  pipelined, one_by_one = layout.pipeline_jit(step), jax.jit(step)
  expected = jax.jit(init)(key, X[0])
  expected = expected if boxed else spmd.unbox(expected)
  before = [leaf.sharding.spec for leaf in jax.tree.leaves(state.params)]
  for _ in range(2):
    (state, loss), (expected, wanted) = pipelined(state, *batch), one_by_one(expected, X, Y)
    assert_same((state, loss), (expected, wanted))
  for leaf, spec in zip(jax.tree.leaves(state.params), before, strict=True):
    assert leaf.sharding.is_equivalent_to(
      jax.sharding.NamedSharding(leaf.sharding.mesh, spec), leaf.ndim
    )
    assert len(leaf.devices()) == 2


@pytest.mark.exhaustive
def test_layouts_compile_once(schedule):
  """The second call finds the state where the first has put it."""
  layout = spmd.Layout({'stage': STAGES, 'data': 2}, RULES['both over data'])
  state = layout.init(named_state(OPTIMIZERS['adam']), jax.random.key(0), X[0])
  traces = []

  def step(state, x, y):
    traces.append(None)
    return named_step(schedule)(state, x, y)

  pipelined = layout.pipeline_jit(step)
  for _ in range(3):
    state, _ = pipelined(state, *layout.shard((X, Y), (None, 'batch', None)))
  assert len(traces) == 1


@pytest.mark.exhaustive
def test_layouts_donated(schedule):
  layout = spmd.Layout({'stage': STAGES, 'data': 2}, RULES['both over data'])
  init, key = named_state(OPTIMIZERS['adam']), jax.random.key(0)
  state, expected = layout.init(init, key, X[0]), jax.jit(init)(key, X[0])
  step = named_step(schedule)
  pipelined, one_by_one = layout.pipeline_jit(step, donate_argnums=0), jax.jit(step)
  for _ in range(3):
    state, loss = pipelined(state, *layout.shard((X, Y), (None, 'batch', None)))
    expected, wanted = one_by_one(expected, X, Y)
    assert_same((state, loss), (expected, wanted))


def test_in_and_out_rules(schedule):
  layout = spmd.Layout({'stage': STAGES, 'data': 2}, (('batch', 'data'),))
  rows = PartitionSpec('data', None)
  pipelined = layout.pipeline_jit(
    training(squared, schedule),
    in_rules=(rows, (None, 'batch', None), (None, 'batch', None)),
    out_rules=(rows, None),
  )
  params, batch = layout.shard(PARAMS, rows), layout.shard((X, Y), (None, 'batch', None))
  expected = PARAMS
  for _ in range(2):
    (params, loss), (expected, wanted) = (
      pipelined(params, *batch),
      jax.jit(training(squared, schedule))(expected, X, Y),
    )
    assert_same((params, loss), (expected, wanted))
  assert {str(leaf.sharding.spec) for leaf in params.values()} <= {str(rows), str(PartitionSpec('data'))}


# -- effects


def test_debug_callback(schedule):
  seen = []

  def loss(params, x, y):
    for i in range(STAGES):
      x = jnp.tanh(x @ params[f'w{i}'])
      jax.debug.callback(lambda stage, size: seen.append((int(stage), float(size))), i, x.sum())
      x = stage_end(x)
    return jnp.mean((x - y) ** 2)

  step = training(loss, schedule)
  found = LAYOUT.pipeline_jit(step)(PARAMS, X, Y)
  jax.effects_barrier()
  pipelined, seen[:] = sorted(seen), []
  assert_same(found, jax.jit(step)(PARAMS, X, Y))
  jax.effects_barrier()
  assert len(seen) == STAGES * MICROBATCHES
  np.testing.assert_allclose(pipelined, sorted(seen), 1e-4, 1e-4)


def test_debug_print(schedule, capfd):
  def loss(params, x, y):
    found = mlp(params, x)
    jax.debug.print('rows {}', found.shape[0])
    jax.debug.print('first {:.3f}', found[0, 0])
    return jnp.mean((found - y) ** 2)

  check(training(loss, schedule), PARAMS, X, Y)
  jax.effects_barrier()
  lines = capfd.readouterr().out.splitlines()
  assert lines.count(f'rows {ROWS}') == 4 * MICROBATCHES  # two steps, twice
  assert sum(line.startswith('first') for line in lines) == 4 * MICROBATCHES


def test_debug_print_after_the_loop(schedule, capfd):
  def step(params, x, y):
    params, loss = training(squared, schedule)(params, x, y)
    jax.debug.print('loss {:.3f}', loss)
    return params, loss

  check(step, PARAMS, X, Y)
  jax.effects_barrier()
  lines = capfd.readouterr().out.splitlines()
  assert len(lines) == 4
  assert sorted(lines[:2]) == sorted(lines[2:]) or lines[0] == lines[1]


# -- ops


@pytest.mark.parametrize('op', [Add, Mean, Max, Add(), Mean(), Max()], ids=repr)
def test_ops_on_gradients(schedule, op):
  check(training(squared, schedule, op), PARAMS, X, Y)


def test_ops_on_integers(schedule):
  def loss(params, x, tokens):
    logits = mlp(params, x)
    aux = {'right': jnp.sum(jnp.argmax(logits, -1) == tokens), 'longest': jnp.max(tokens)}
    return cross_entropy(logits, tokens), aux

  ops = ((Mean, {'right': Add, 'longest': Max}), Mean)
  _, (_, aux) = check(training(loss, schedule, ops, has_aux=True), PARAMS, X, TOKENS)
  assert aux['longest'] == TOKENS.max()


@pytest.mark.parametrize('axis', [0, 1, -1])
def test_concat(schedule, axis):
  def loss(params, x, y):
    found = mlp(params, x)
    return jnp.mean((found - y) ** 2), found

  ops = ((Concat, Concat(axis)), Mean)
  _, (losses, found) = check(training(loss, schedule, ops, has_aux=True), PARAMS, X, Y)
  assert losses.shape == (MICROBATCHES,)
  assert found.shape == ((32, WIDTH) if axis == 0 else (ROWS, 64))


@pytest.mark.parametrize('axis', [0, 1])
def test_concat_of_an_inner_stage(schedule, axis):
  def loss(params, x, y):
    h = stage_end(jnp.tanh(x @ params['w0']))
    inner = h = stage_end(jnp.tanh(h @ params['w1']))
    h = stage_end(jnp.tanh(h @ params['w2']))
    return jnp.mean((stage_end(jnp.tanh(h @ params['w3'])) - y) ** 2), inner

  check(training(loss, schedule, ((Mean, Concat(axis)), Mean), has_aux=True), PARAMS, X, Y)


@pytest.mark.exhaustive
def test_whole_batch(schedule):
  """The batch has no dimension of microbatches; the result is that of the whole."""

  def step(params, x, y):
    grad = jax.value_and_grad(squared)
    loss, grads = accumulate(
      lambda one: grad(params, *one), (x, y), schedule, Mean, microbatches=MICROBATCHES
    )
    return descend(params, grads), loss

  x, y = X.reshape(-1, WIDTH), Y.reshape(-1, WIDTH)
  params, loss = check(step, PARAMS, x, y, steps=1)
  expected, grads = jax.value_and_grad(squared)(PARAMS, x, y)
  assert_same((params, loss), (descend(PARAMS, grads), expected))
  check(step, PARAMS, *LAYOUT.shard((x, y), ('batch', None)))


def test_examples_come_back_in_order():
  """They are dealt out in turn; `Concat` undoes it, along any axis."""
  x = jnp.arange(24.0).reshape(12, 2)
  same, turned = accumulate(lambda x: (x, x.T), x, op=(Concat, Concat(axis=1)), microbatches=3)
  np.testing.assert_array_equal(same, x)
  np.testing.assert_array_equal(turned, x.T)


def test_examples_stay_on_their_devices(schedule):
  """A batch that is divided over the devices of a stage is not moved between them to be split."""

  def step(params, x, y):
    grad = jax.value_and_grad(squared)
    loss, _ = accumulate(
      lambda one: grad(params, *one), (x, y), schedule, Mean, microbatches=MICROBATCHES
    )
    return loss

  batch = LAYOUT.shard((X.reshape(-1, WIDTH), Y.reshape(-1, WIDTH)), ('batch', None))
  compiled = LAYOUT.pipeline_jit(step).compile(PARAMS, *batch)
  starts = [one for unit, one in compiled.executables.items() if unit.name.startswith('start')]
  assert any(any('data' in spec for spec in one.specs) for one in starts)
  for one in starts:
    text = one.compiled.as_text()
    assert not any(kind in text for kind in ('all-gather', 'all-to-all', 'collective-permute'))


def test_schedule_of_pipeline_jit(schedule):
  check(training(squared, None), PARAMS, X, Y, schedule=schedule)


# -- functions without gradients


def test_prediction():
  model = Network()
  check_once(model.apply, model.init(jax.random.key(0), X[0]), X[0])


def test_prediction_with_results_of_inner_stages():
  def predict(params, x):
    hidden = []
    for i in range(STAGES):
      x = stage_end(jnp.tanh(x @ params[f'w{i}']))
      hidden.append(x)
    return x.argmax(-1), hidden, {'norm': sum(jnp.linalg.norm(each) for each in hidden)}

  check_once(predict, PARAMS, X[0])


def test_prediction_by_a_schedule():
  """The schedule says where the eight stages are."""
  params = {f'w{i}': weight(i) for i in range(8)}

  def predict(params, x):
    for i in range(8):
      x = stage_end(jnp.tanh(x @ params[f'w{i}']))
    return x

  check_once(predict, params, X[0], schedule=Interleaved1F1B(STAGES, chunks=2))


def test_evaluation_without_a_loop():
  def evaluate(params, x, y):
    found = mlp(params, x)
    return {'loss': jnp.mean((found - y) ** 2), 'found': found, 'right': jnp.sum(found * y > 0)}

  check_once(evaluate, PARAMS, *LAYOUT.shard((X[0], Y[0]), ('batch', None)))


def test_evaluation_without_an_end():
  check_once(lambda params, x: mlp(params, x, STAGES - 1), PARAMS, X[0])


def test_evaluation_in_a_loop(schedule):
  def evaluate(params, x, y):
    def fn(one):
      found = mlp(params, one[0])
      return {
        'loss': jnp.mean((found - one[1]) ** 2),
        'found': found,
        'right': jnp.sum(found * one[1] > 0),
      }

    ops = {'loss': Mean, 'found': Concat, 'right': Add}
    return accumulate(fn, (x, y), schedule, ops)

  check_once(evaluate, PARAMS, X, Y)


def test_dropout_without_a_loop():
  model = Network(dropout=0.3)
  variables = model.init({'params': jax.random.key(0), 'dropout': jax.random.key(1)}, X[0])
  check_once(
    lambda v, x, key: model.apply(v, x, rngs={'dropout': key}), variables, X[0], jax.random.key(2)
  )


def test_prediction_of_an_early_stage():
  """The stages after it have nothing to do."""

  def predict(params, x):
    early = stage_end(jnp.tanh(x @ params['w0']))
    stage_end(stage_end(stage_end(early @ params['w1'])))
    return early.sum()

  check_once(predict, PARAMS, X[0])


# -- calls


def copied(tree):
  return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), tree)


@pytest.mark.parametrize('name', ['sgd', 'clipped', 'MultiSteps'])
def test_donated(schedule, name):
  tx = OPTIMIZERS[name]
  step = optimizing(tx, schedule)
  pipelined, one_by_one = LAYOUT.pipeline_jit(step, donate_argnums=0), jax.jit(step)
  expected = PARAMS, tx.init(PARAMS)
  found = copied(expected)
  for number in range(3):
    old = found
    found, loss = pipelined(found, X, Y)
    expected, wanted = one_by_one(expected, X, Y)
    assert_same((found, loss), (expected, wanted))
    if number:  # where the first call has put it
      assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old[0]))
  assert not any(leaf.is_deleted() for leaf in (X, Y))


def test_donated_by_name(schedule):
  step = training(squared, schedule)
  named = lambda state, x, y: step(state, x, y)
  pipelined = LAYOUT.pipeline_jit(named, donate_argnames='state')
  expected, found = PARAMS, copied(PARAMS)
  for _ in range(3):
    found, loss = pipelined(state=found, x=X, y=Y)
    expected, wanted = jax.jit(named)(expected, X, Y)
    assert_same((found, loss), (expected, wanted))


def test_donated_and_passed_through(schedule):
  """What is returned as it came cannot be overwritten."""

  def step(state, x, y):
    params, _, kept = state
    new, loss = training(squared, schedule)(params, x, y)
    return (new, params, kept), loss

  pipelined = LAYOUT.pipeline_jit(step, donate_argnums=0)
  expected = PARAMS, jax.tree.map(jnp.zeros_like, PARAMS), jnp.arange(3)
  found = copied(expected)
  for _ in range(3):
    found, loss = pipelined(found, X, Y)
    expected, wanted = jax.jit(step)(expected, X, Y)
    assert_same((found, loss), (expected, wanted))


def test_donated_and_tied(schedule):
  params = {**PARAMS, 'embedding': weight(9, 64)}

  def loss(params, tokens):
    return cross_entropy(mlp(params, params['embedding'][tokens]) @ params['embedding'].T, tokens)

  step = training(loss, schedule)
  pipelined, expected, found = LAYOUT.pipeline_jit(step, donate_argnums=0), params, copied(params)
  for _ in range(3):
    found, loss_found = pipelined(found, TOKENS)
    expected, wanted = jax.jit(step)(expected, TOKENS)
    assert_same((found, loss_found), (expected, wanted))


def test_nothing_else_is_donated(schedule):
  """A state that is kept is the same after a step."""
  step = optimizing(OPTIMIZERS['adam'], schedule)
  pipelined = LAYOUT.pipeline_jit(step)
  first, _ = pipelined((PARAMS, OPTIMIZERS['adam'].init(PARAMS)), X, Y)
  before = jax.tree.map(np.array, first)
  again = [pipelined(first, X, Y) for _ in range(2)]
  assert_same(first, jax.tree.map(jnp.asarray, before))
  assert_same(again[1], again[0], 0)


def test_static_arguments(schedule):
  def step(params, x, y, power, *, name='loss'):
    loss = lambda params, x, y: jnp.mean(jnp.abs(mlp(params, x) - y) ** power)
    params, value = training(loss, schedule)(params, x, y)
    return params, {name: value}

  options = dict(static_argnums=3, static_argnames='name')
  one_by_one, pipelined = jax.jit(step, **options), LAYOUT.pipeline_jit(step, **options)
  for power, name in [(2, 'loss'), (3, 'loss'), (2, 'other'), (2, 'loss')]:
    assert_same(pipelined(PARAMS, X, Y, power, name=name), one_by_one(PARAMS, X, Y, power, name=name))
  assert_same(pipelined(PARAMS, X, Y, power=3), one_by_one(PARAMS, X, Y, power=3))


@pytest.mark.exhaustive
def test_keyword_arguments(schedule):
  def step(params, *, batch, rate=0.1, offset=None):
    loss, grads = accumulate(
      lambda one: jax.value_and_grad(squared)(params, *one), batch, schedule, Mean
    )
    return descend(params, grads, rate), loss if offset is None else loss + offset

  one_by_one, pipelined = jax.jit(step), LAYOUT.pipeline_jit(step)
  for kwargs in [{}, {'rate': 0.2}, {'rate': jnp.float32(0.2)}, {'offset': 3}, {}]:
    kwargs = {'batch': (X, Y), **kwargs}
    assert_same(pipelined(PARAMS, **kwargs), one_by_one(PARAMS, **kwargs))


def test_python_numbers(schedule):
  def step(params, x, y, rate):
    loss, grads = accumulate(
      lambda one: jax.value_and_grad(squared)(params, *one), (x, y), schedule, Mean
    )
    return descend(params, grads, rate), loss, rate, 2 * rate

  check_each(step, PARAMS, [(X, Y, 0.1), (X, Y, 0.2), (X, Y, 1)])


def test_results_of_every_kind(schedule):
  """Arguments, constants, numbers, None, and one value twice."""

  def step(params, x, y):
    new, loss = training(squared, schedule)(params, x, y)
    rest = {'old': params, 'x': x, 'number': 3, 'pi': 3.14, 'array': jnp.arange(3), 'numpy': np.ones(2)}
    return new, loss, loss, new['w0'], None, rest, x.shape[0], jnp.sum(x)

  check(step, PARAMS, X, Y)


def test_numpy_arguments(schedule):
  params, x, y = jax.tree.map(np.asarray, (PARAMS, X, Y))

  def step(params, x, y):
    new, loss = training(squared, schedule)(params, x, y)
    return new, loss, x

  check(step, params, x, y)


def test_arguments_on_other_devices(schedule):
  last = jax.device_put((X, Y), jax.devices()[-1])
  step = training(squared, schedule)
  found = LAYOUT.pipeline_jit(step)(jax.device_put(PARAMS, jax.devices()[3]), *last)
  assert_same(found, jax.jit(step)(PARAMS, X, Y))


def test_shapes_change(schedule):
  """Other shapes are compiled anew, and those that were there before are found again."""
  step = training(squared, schedule)
  calls = [(X, Y), (X[:, :4], Y[:, :4]), (X, Y), (X[:2], Y[:2]), (X[:, :4], Y[:, :4])]
  check_each(step, PARAMS, calls)


def test_placement_changes(schedule):
  step = training(squared, schedule)
  whole, apart = LAYOUT.replicate((X, Y)), LAYOUT.shard((X, Y), (None, 'batch', None))
  check_each(step, PARAMS, [(X, Y), apart, whole, apart])


def test_dtypes_change(schedule):
  step = training(squared, schedule)
  check_each(step, PARAMS, [(X, Y), (X.astype(jnp.bfloat16), Y), (X, Y)], tolerance=2e-2)


def test_lowered_from_shapes(schedule):
  """Compiled without arrays, and then called with them."""
  step = training(squared, schedule)
  shapes = jax.eval_shape(lambda: (PARAMS, X, Y))
  compiled = LAYOUT.pipeline_jit(step).lower(*shapes).compile()
  assert_same(compiled(PARAMS, X, Y), jax.jit(step)(PARAMS, X, Y))
  found, seconds = compiled.measure(PARAMS, X, Y)
  assert_same(found, jax.jit(step)(PARAMS, X, Y))
  assert len(seconds) >= 2 * STAGES * MICROBATCHES - MICROBATCHES


def test_decorator(schedule):
  @LAYOUT.pipeline_jit
  def step(params, x, y):
    """Trains."""
    return training(squared, schedule)(params, x, y)

  assert step.__doc__ == 'Trains.'
  assert_same(step(PARAMS, X, Y), jax.jit(training(squared, schedule))(PARAMS, X, Y))


def test_two_pipelines_of_one_function(schedule):
  """JAX keeps traces: they are no one layout's."""
  step = training(squared, schedule)
  narrow = spmd.Layout(spmd.make_mesh({'stage': STAGES}, devices=jax.devices()[:STAGES]))
  expected = jax.jit(step)(PARAMS, X, Y)
  assert_same(LAYOUT.pipeline_jit(step)(PARAMS, X, Y), expected)
  assert_same(narrow.pipeline_jit(step)(PARAMS, X, Y), expected)
  assert_same(jax.jit(step)(PARAMS, X, Y), expected, 0)


def test_train_then_evaluate(schedule):
  """A state of one pipeline is an argument of another, and of plain functions."""
  params, _ = LAYOUT.pipeline_jit(training(squared, schedule))(PARAMS, X, Y)
  expected, _ = jax.jit(training(squared, schedule))(PARAMS, X, Y)
  assert_same(LAYOUT.pipeline_jit(mlp)(params, X[0]), jax.jit(mlp)(expected, X[0]))
  gathered = spmd.gather(params)
  assert_same(jax.jit(mlp)(gathered, X[0]), jax.jit(mlp)(expected, X[0]))


# -- outside of a pipeline


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
def test_transforms_pass_marks_by(name):
  marked, without = map(TRANSFORMS[name], pairs())
  x = {'vmap': X, 'vmap of grad': X, 'grad of vmap': X, 'hessian': jnp.linspace(0, 1, ROWS)}.get(
    name, X[0]
  )
  assert_same(marked(x), without(x), 1e-6)


@pytest.mark.parametrize('lift', [nn.jit, nn.remat], ids=['jit', 'remat'])
def test_linen_transforms_pass_marks_by(lift):
  lifted, direct = Network(block=lift(Block)), Network()
  variables = direct.init(jax.random.key(0), X[0])
  loss = lambda model: lambda variables: jnp.mean(model.apply(variables, X[0]) ** 2)
  renamed = lifted.init(jax.random.key(0), X[0])
  filled = jax.tree.structure(renamed).unflatten(jax.tree.leaves(variables))
  found, expected = jax.grad(loss(lifted))(filled), jax.grad(loss(direct))(variables)
  assert_same(jax.tree.leaves(found), jax.tree.leaves(expected))


def test_nn_scan_passes_marks_by():
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
  found = total(lambda variables: scanned.apply(variables, X[0], None)[0])(variables)
  assert_same(found, total(lambda variables: direct(variables, X[0]))(variables))


def test_accumulate_is_a_loop():
  """By itself it gives what a loop in Python gives."""
  grad = jax.value_and_grad(squared)
  loss, grads = accumulate(lambda one: grad(PARAMS, *one), (X, Y), GPipe(STAGES), (Concat, Add))
  each = [grad(PARAMS, x, y) for x, y in zip(X, Y)]
  assert_same(loss, jnp.stack([value for value, _ in each]))
  assert_same(
    grads, functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), [one for _, one in each])
  )
