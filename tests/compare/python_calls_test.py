"""Calls of Python in a step, for logs, checks or environments: programs for absent devices leave them out, and report them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd.explore import Estimator, Pipeline, TrainStep, compare
from flax_spmd.pipeline import Mean, OneFOneB, accumulate, stage_end

RULES = (('batch', 'data'), spmd.fsdp('data', min_size=1))
LAYOUT = spmd.Layout(spmd.abstract_mesh({'data': 8}), RULES)
BATCH = jax.ShapeDtypeStruct((64, 64), jnp.float32)
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def create():
  return {'w': jnp.full((64, 128), 0.1), 'v': jnp.full((128, 64), 0.1)}


def one(*_):
  return np.float32(1)


# -- functions from activations to a factor of them that is 1


def printed(h):
  jax.debug.print('mean {}', h.mean())
  return 1.0


def called(h):
  jax.debug.callback(lambda *_: None, h, jnp.linalg.norm(h))
  return 1.0


def inspected(h):
  jax.debug.inspect_array_sharding(h, callback=lambda _: None)
  return 1.0


def pure(h):
  return jax.pure_callback(one, SCALAR, jax.lax.stop_gradient(h))


def impure(h):
  del h
  return io_callback(one, SCALAR)


def whole_numbers(h):
  shape = jax.ShapeDtypeStruct(h.shape[1:], jnp.int32)
  return io_callback(lambda h: np.ones(h.shape[1:], np.int32), shape, jax.lax.stop_gradient(h))[None]


def of_each_row(h):
  call = lambda row: jax.pure_callback(one, SCALAR, row, vmap_method='sequential')
  return jax.vmap(call)(jax.lax.stop_gradient(h))[:, None]


def in_a_loop(h):
  body = lambda carry, _: (carry * jax.pure_callback(one, SCALAR, carry), None)
  return jax.lax.scan(body, jax.lax.stop_gradient(h), None, length=3)[0][:1, :1] * 0 + 1


def in_a_branch(h):
  return jax.lax.cond(jnp.sum(h) > 0, lambda: jax.pure_callback(one, SCALAR), lambda: jnp.float32(1))


CALLS = {
  call.__name__: call
  for call in (
    printed,
    called,
    inspected,
    pure,
    impure,
    whole_numbers,
    of_each_row,
    in_a_loop,
    in_a_branch,
  )
}

FEW = [
  pytest.param(name, marks=[] if name in ('called', 'whole_numbers') else pytest.mark.exhaustive)
  for name in CALLS
]


def train_step(factor):
  def step(params, x):
    def loss(params):
      h = jnp.tanh(x @ params['w'])
      return jnp.mean((h * factor(h) @ params['v']) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

  return TrainStep(step, create, BATCH)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv('FLAX_SPMD_CACHE', str(tmp_path))


def wire(outcome):
  return outcome.counts.by_axis().get(('data',), 0)


@pytest.mark.parametrize('name', FEW)
def test_a_step_with_calls_of_python(name):
  """It has the costs of the step without them, but for arrays that are sent to the device of the call."""
  outcome, plain = (
    compare(train_step(f), {'': LAYOUT}, 'cpu:8')[''] for f in (CALLS[name], lambda h: 1.0)
  )
  estimate, plain_estimate = (
    Estimator(train_step(f)).estimate(LAYOUT, 'h100:8', partition=False)
    for f in (CALLS[name], lambda h: 1.0)
  )
  assert outcome.error is None
  assert outcome.counts.flops == plain.counts.flops
  assert estimate.counts.flops == plain_estimate.counts.flops
  assert wire(plain) <= wire(outcome) <= 3 * wire(plain)
  if (
    CALLS[name] is not of_each_row
  ):  # whose slices of sharded rows an estimate without a partition counts in each turn
    assert wire(plain_estimate) <= wire(estimate) <= 3 * wire(plain_estimate)
  found = [text for text in outcome.program.findings if text.startswith('calls of Python')]
  if CALLS[name] is inspected:
    assert found == []
  else:
    [text] = found
    kind = {printed: 'debug_print', called: 'debug_callback', impure: 'io_callback'}.get(CALLS[name])
    kind = 'io_callback' if CALLS[name] is whole_numbers else kind or 'pure_callback'
    start = f'calls of Python are left out, with all that is computed for them alone: {kind} at '
    line = text.removeprefix(start)
    assert line.startswith('python_calls_test.py:') or line == 'an unknown line'
    assert any(doubt.startswith(start) for doubt in estimate.doubts)


@pytest.mark.parametrize('name', FEW)
def test_layout_jit_calls_python(name):
  step, x = train_step(CALLS[name]).step, np.linspace(0, 1, 64 * 64, dtype=np.float32).reshape(64, 64)
  layout = spmd.Layout({'data': 8}, RULES)
  result = layout.jit(step)(layout.shard(create()), x)
  expected = jax.jit(train_step(lambda h: 1.0).step)(create(), x)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), result, expected)


def test_in_a_shard_map():
  def step(params, x):
    def local(x, w):
      jax.debug.print('{}', x.sum())
      return x @ w * jax.pure_callback(one, SCALAR, jax.lax.stop_gradient(x))

    def loss(w):
      specs = {'in_specs': (P('data'), P()), 'out_specs': P('data')}
      return jnp.mean(jax.shard_map(local, **specs)(x, w) ** 2)

    return jax.tree.map(lambda p: p - 0.1 * jax.grad(loss)(params['w']).mean(), params)

  outcome = compare(TrainStep(step, create, BATCH), {'': LAYOUT}, 'cpu:8')['']
  assert outcome.error is None
  assert outcome.program.left_out[0].count('python_calls_test.py:') == 2


def ordered(h):
  del h
  return io_callback(one, SCALAR, ordered=True)


def test_calls_in_a_fixed_order(monkeypatch):
  assert compare(train_step(ordered), {'': LAYOUT}, 'cpu:8')[''].error is None
  monkeypatch.setattr('flax_spmd._src.estimate.estimator.can_partition', lambda platform: False)
  with pytest.raises(spmd.errors.EstimatorError) as caught:
    Estimator(train_step(ordered), platform='cpu')
  assert str(caught.value) == (
    'The step calls Python with ordered=True, so its program has arguments for this order, and none for all layouts.\n'
    'Fix: pass ordered=False, or choose the layouts, and compile them with spmd.compare.'
  )


def printed_in_order(h):
  jax.debug.print('{}', h.mean(), ordered=True)
  return 1.0


FINDS = {
  'compare': lambda step: compare(step, {'': LAYOUT}, 'cpu:8'),
  'search': lambda step: spmd.search(step, 'cpu:8', candidates=2, top=0),
}


@pytest.mark.parametrize('find', FINDS.values(), ids=FINDS)
def test_prints_in_a_fixed_order_are_for_one_device(find):
  step = train_step(printed_in_order)
  with pytest.raises(spmd.errors.TargetDeviceError) as caught:
    find(step)
  line = printed_in_order.__code__.co_firstlineno + 1
  assert str(caught.value) == (
    'The step calls jax.debug with ordered=True, which JAX supports on one device, and cpu:8 has 8: '
    f'python_calls_test.py:{line}.\nFix: pass ordered=False there.'
  )
  alone = spmd.Layout(spmd.abstract_mesh({'data': 1}), RULES)
  assert compare(step, {'': alone}, 'cpu:1')[''].error is None


@pytest.mark.parametrize('name', ['pure', pytest.param('printed', marks=pytest.mark.exhaustive)])
def test_a_pipeline_with_calls_of_python(name):
  def step(params, x):
    def loss(params, x):
      h = stage_end(jnp.tanh(x @ params['w']))
      return jnp.mean((h * CALLS[name](h) @ params['v']) ** 2)

    value, grads = accumulate(
      lambda x: jax.value_and_grad(loss)(params, x), x, OneFOneB(ranks=2), Mean, microbatches=4
    )
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

  layout = spmd.Layout(spmd.abstract_mesh({'stage': 2, 'data': 4}), RULES[:1])
  outcome = compare(TrainStep(step, create, BATCH), {'': Pipeline(layout)}, 'cpu:8')['']
  assert outcome.error is None
  assert outcome.program.findings[0].startswith('calls of Python are left out')


@pytest.mark.usefixtures('gpu_compiler')
@pytest.mark.parametrize('name', ['whole_numbers', 'ordered'])
def test_partitioned_as_compiled(name):
  step = train_step({**CALLS, 'ordered': ordered}[name])
  compiled = compare(step, {'': LAYOUT}, 'h100:8')['']
  estimate = Estimator(step).estimate(LAYOUT, 'h100:8')
  assert estimate.source == 'partitioned' and compiled.error is None
  assert estimate.counts.flops == compiled.counts.flops
  assert estimate.counts.by_axis() == pytest.approx(compiled.counts.by_axis())
  assert estimate.memory.peak == pytest.approx(compiled.memory.peak, rel=0.05)
  assert any(text.startswith('calls of Python are left out') for text in estimate.doubts)


def test_lines_of_a_step_whose_batch_is_constrained():
  program = compare(train_step(printed), {'': LAYOUT}, 'cpu:8')[''].program
  line = printed.__code__.co_firstlineno + 1
  assert program.left_out == (
    'calls of Python are left out, with all that is computed for them alone: debug_print at '
    f'python_calls_test.py:{line}',
  )
