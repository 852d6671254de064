"""Microbatch loops: their results, side effects and reductions, and functions without a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import flax_spmd as spmd
from flax_spmd.pipeline import (
  Add,
  Concat,
  DualPipeV,
  Interleaved1F1B,
  Max,
  Mean,
  ZeroBubbleH1,
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
  Network,
  X,
  Y,
  assert_same,
  check,
  check_once,
  cross_entropy,
  descend,
  mlp,
  squared,
  training,
  weight,
)

# -- results beside the loss


def test_auxiliary_losses(schedule):
  """Every stage adds to the loss, as in the load balancing of experts."""

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
  """The loss uses the parameters of every stage."""

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
    result = mlp(params, x)
    aux = {'result': result, 'rows': len(x), 'largest': jnp.max(jnp.abs(result)), 'mean': result.mean()}
    return jnp.mean((result - y) ** 2), aux

  ops = ((Mean, {'result': Concat, 'rows': Add, 'largest': Max, 'mean': Mean}), Mean)
  _, (_, aux) = check(training(loss, schedule, ops, has_aux=True), PARAMS, X, Y)
  assert aux['result'].shape == (MICROBATCHES * ROWS, WIDTH)
  assert aux['rows'] == MICROBATCHES * ROWS


@pytest.mark.parametrize('weighted', [ZeroBubbleH1(STAGES), DualPipeV(2)], ids=str)
def test_weights_of_the_batch_scale_gradients_and_are_results(weighted):
  """The last backward repeats what the first forward computes, and hands it to its weight gradient."""
  layout = LAYOUT if weighted.ranks == STAGES else spmd.Layout({'stage': 2, 'data': 4}, LAYOUT.rules)

  def step(params, x, mask):
    def one_pass(carry, each):
      count = each[1].sum()

      def loss(params):
        h = mlp(params, each[0])
        return jnp.sum(jnp.mean(h**2, -1) * each[1]) / count

      value, grads = jax.value_and_grad(loss)(params)
      grads = jax.tree.map(lambda total, g: total + count * g, carry[0], grads)
      return (grads, carry[1] + count), (value, count)

    start = jax.tree.map(jnp.zeros_like, params), 0.0
    (grads, total), (losses, counts) = lax.scan(one_pass, start, (x, mask))
    return descend(params, jax.tree.map(lambda g: g / total, grads)), losses, counts

  mask = (Y[:, :, 0] > 0).astype(jnp.float32)
  check(step, PARAMS, X, mask, layout=layout, schedule=weighted)


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
    result = mlp(params, x)
    return jnp.mean((result - y) ** 2), result

  ops = ((Concat, Concat(axis)), Mean)
  _, (losses, result) = check(training(loss, schedule, ops, has_aux=True), PARAMS, X, Y)
  assert losses.shape == (MICROBATCHES,)
  assert result.shape == ((32, WIDTH) if axis == 0 else (ROWS, 64))


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
  """A batch without a microbatch dimension gives the result of the whole batch."""

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
  """Examples are dealt to microbatches in turn; `Concat` restores their order along any axis."""
  x = jnp.arange(24.0).reshape(12, 2)
  same, turned = accumulate(lambda x: (x, x.T), x, op=(Concat, Concat(axis=1)), microbatches=3)
  np.testing.assert_array_equal(same, x)
  np.testing.assert_array_equal(turned, x.T)


def test_examples_stay_on_their_devices(schedule):
  """Splitting a batch that is sharded over a stage's devices moves nothing between them."""

  def step(params, x, y):
    grad = jax.value_and_grad(squared)
    loss, _ = accumulate(
      lambda one: grad(params, *one), (x, y), schedule, Mean, microbatches=MICROBATCHES
    )
    return loss

  batch = LAYOUT.shard((X.reshape(-1, WIDTH), Y.reshape(-1, WIDTH)), ('batch', None))
  compiled = LAYOUT.pipeline_jit(step).compile(PARAMS, *batch)
  starts = [one for unit, one in compiled.executables.items() if unit.name.startswith('start')]
  assert any('data' in each.spec for one in starts for each in one.compiled.output_shardings)
  for one in starts:
    text = one.compiled.as_text()
    assert not any(kind in text for kind in ('all-gather', 'all-to-all', 'collective-permute'))


def test_schedule_of_pipeline_jit(schedule):
  check(training(squared, None), PARAMS, X, Y, schedule=schedule)


# -- side effects


def test_debug_callback(schedule):
  seen = []

  def loss(params, x, y):
    for i in range(STAGES):
      x = jnp.tanh(x @ params[f'w{i}'])
      jax.debug.callback(lambda stage, size: seen.append((int(stage), float(size))), i, x.sum())
      x = stage_end(x)
    return jnp.mean((x - y) ** 2)

  step = training(loss, schedule)
  result = LAYOUT.pipeline_jit(step)(PARAMS, X, Y)
  jax.effects_barrier()
  pipelined, seen[:] = sorted(seen), []
  assert_same(result, jax.jit(step)(PARAMS, X, Y))
  jax.effects_barrier()
  assert len(seen) == STAGES * MICROBATCHES
  np.testing.assert_allclose(pipelined, sorted(seen), 1e-4, 1e-4)


def test_debug_print(schedule, capfd):
  def loss(params, x, y):
    result = mlp(params, x)
    jax.debug.print('rows {}', result.shape[0])
    jax.debug.print('first {:.3f}', result[0, 0])
    return jnp.mean((result - y) ** 2)

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
  """The schedule assigns the eight stages to ranks."""
  params = {f'w{i}': weight(i) for i in range(8)}

  def predict(params, x):
    for i in range(8):
      x = stage_end(jnp.tanh(x @ params[f'w{i}']))
    return x

  check_once(predict, params, X[0], schedule=Interleaved1F1B(STAGES, chunks=2))


def test_evaluation_without_a_loop():
  def evaluate(params, x, y):
    result = mlp(params, x)
    return {'loss': jnp.mean((result - y) ** 2), 'result': result, 'right': jnp.sum(result * y > 0)}

  check_once(evaluate, PARAMS, *LAYOUT.shard((X[0], Y[0]), ('batch', None)))


def test_evaluation_without_an_end():
  check_once(lambda params, x: mlp(params, x, STAGES - 1), PARAMS, X[0])


@pytest.mark.parametrize('ends', [STAGES, STAGES - 1])
def test_evaluation_of_a_model_called_twice(ends):
  """Its calls have stages of their own if there are ends for that; otherwise they pass through the same."""
  check_once(lambda params, x, y: mlp(params, x, ends) - mlp(params, y, ends), PARAMS, X[0], Y[0])


def test_evaluation_in_a_loop(schedule):
  def evaluate(params, x, y):
    def fn(one):
      result = mlp(params, one[0])
      return {
        'loss': jnp.mean((result - one[1]) ** 2),
        'result': result,
        'right': jnp.sum(result * one[1] > 0),
      }

    ops = {'loss': Mean, 'result': Concat, 'right': Add}
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


@pytest.mark.parametrize('kind', ['fwd', 'bwd'])
def test_tasks_without_a_duration(kind):
  """Their results are sent after they run, all at one time."""
  costs = {'fwd': 1, 'bwd': 1, kind: 0}
  check(training(squared, Interleaved1F1B(STAGES, 1).with_costs(costs)), PARAMS, X, Y)
