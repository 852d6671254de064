"""Results of a stage that the compiler shards otherwise than Shardy alone; other ranks rely on the sharding."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import flax_spmd as spmd
from flax_spmd.pipeline import DualPipeV, GPipe, Mean, ZeroBubbleV, accumulate, stage_end
from tests.pipeline.cases import assert_same, normal

LAYOUT = spmd.Layout({'stage': 2, 'data': 4}, ())
X, OTHER = normal(0, 24, 8), normal(1, 24, 8)


def scanned(x):
  """The compiler simplifies these loops before it propagates shardings."""

  def sums(x):
    return lax.scan(lambda total, row: (total + row, total * row), x[0], x)[1]

  return sums(jnp.pad(sums(x), [(1, 1), (0, 0)]))


def called_back(x):
  """A callback's result is on one device."""
  return jax.pure_callback(lambda value: 2 * np.asarray(value), x, x + 1)


def divided(x):
  """Dimensions over parts of a mesh axis, which no spec can name."""
  return (x.T @ x).reshape(2, 4, 8)


def empty(x):
  return x[:0], jnp.sin(x)


@pytest.mark.parametrize('axes', [('data', None), (None, 'data')], ids=str)
@pytest.mark.parametrize('stage', [scanned, called_back, divided, empty])
def test_equals_jit(stage, axes):
  """The second stage's result has shards on all devices, each from the result of the first on this device."""

  def fn(x, other):
    return jax.tree.map(lambda h: jnp.cos(h).sum() + other, stage_end(stage(x)))

  placed = jax.device_put((X, OTHER), NamedSharding(LAYOUT.mesh, PartitionSpec(*axes)))
  assert_same(LAYOUT.pipeline_jit(fn)(*placed), jax.jit(fn)(X, OTHER), 1e-4)


@pytest.mark.parametrize('schedule', [DualPipeV(2), ZeroBubbleV(2)], ids=str)
def test_a_backward_that_is_split_in_some_microbatches(schedule):
  """Its results have one sharding, whether gradients of weights are computed in the same program or not."""
  layout = spmd.Layout(
    {'stage': 2, 'data': 2, 'model': 2},
    (('batch', 'data'), ('columns', 'model'), ('w.', PartitionSpec(None, 'model'))),
  )

  def attended(x, w):
    return jnp.tanh(x + jax.nn.softmax(x @ w @ x.T) @ x)

  def step(weights, x):
    def loss(weights, x):
      x = stage_end(jnp.tanh(jnp.cumsum(x @ weights['w0'], 0)))
      x = stage_end(attended(x, weights['w1']))
      x = stage_end(spmd.with_logical_constraint(jnp.tanh(x @ weights['w2']), (None, 'columns')))
      return jnp.mean(attended(x, weights['w3']) ** 2)

    return accumulate(lambda x: jax.grad(loss)(weights, x), x, schedule)

  weights, batch = {f'w{number}': normal(number, 8, 8) for number in range(4)}, X.reshape(6, 4, 8)
  args = layout.shard(weights), layout.shard(batch, (None, 'batch'))
  assert_same(layout.pipeline_jit(step)(*args), jax.jit(step)(weights, batch), 1e-4)


@pytest.mark.parametrize('once', [False, True])
def test_weights_are_gathered_in_each_task_or_once(once):
  """Sums of gradients stay sharded as the weights are."""

  def step(weights, x):
    whole = [spmd.constrain(w, PartitionSpec()) for w in weights] if once else weights

    def loss(weights, x):
      return jnp.mean(jnp.sin(stage_end(jnp.sin(x @ weights[0])) @ weights[1]) ** 2)

    grads = accumulate(lambda x: jax.grad(loss)(whole, x), x, GPipe(2), Mean, microbatches=2)
    return [w - 0.1 * grad for w, grad in zip(weights, grads, strict=True)]

  layout = spmd.Layout({'stage': 2, 'data': 4}, (('batch', 'data'), spmd.fsdp('data', min_size=1)))
  weights = layout.shard([normal(2, 8, 16), normal(3, 16, 8)])
  arguments = weights, layout.shard(normal(4, 64, 8), ('batch', None))
  compiled = layout.pipeline_jit(step).compile(*arguments)
  gathering = {
    program.name.partition('_')[0]
    for program, each in compiled.executables.items()
    if 'all-gather(' in each.compiled.as_text()
  }
  assert gathering == ({'start'} if once else {'fwd', 'bwd'})
  result = compiled(*arguments)
  with layout:
    assert_same(result, jax.jit(step)(*arguments))
  for one, other in zip(result, weights, strict=True):
    assert tuple(one.sharding.spec).index('data') == tuple(other.sharding.spec).index('data')


def test_ordered_effects(capfd):
  """Programs of one device; their first result is a token."""

  def fn(x):
    jax.debug.print('first', ordered=True)
    x = stage_end(jnp.sin(x))
    jax.debug.print('second', ordered=True)
    return jnp.cos(x)

  layout = spmd.Layout(spmd.make_mesh({'stage': 2}, devices=jax.devices()[:2]), ())
  assert_same(layout.pipeline_jit(fn)(X), jnp.cos(jnp.sin(X)))
  jax.effects_barrier()
  assert sorted(capfd.readouterr().out.split()) == ['first', 'second']


UPDATES = {
  'average': lambda old, h: 0.9 * old + 0.1 * h,
  'sum': lambda old, h: old + h,
  'maximum': jnp.maximum,
  'momentum': lambda old, h: jnp.tanh(old - h) + old[:, ::-1] / 2,
}


@pytest.mark.parametrize('seed', range(6))
def test_carried_activations_are_sharded_as_those_of_their_stage(seed):
  """The step creates the carried values; each stage updates one, and some read it. No task gathers one."""
  rng = np.random.default_rng(seed)
  updates = [UPDATES[name] for name in rng.choice(list(UPDATES), 2)]
  read, axes = rng.random(2) < 0.5, [('data', None, None), (None, 'data', None)][rng.integers(2)]

  def step(weights, batch):
    def one_pass(carry, x):
      carried, sums = carry

      def loss(weights):
        h, new = x, []
        for old, w, update, is_read in zip(carried, weights, updates, read):
          h = jnp.tanh(h @ w + (old.mean(2, keepdims=True) if is_read else 0))
          new.append(update(old, lax.stop_gradient(h)))
          h = stage_end(h)
        return jnp.mean(h**2), new

      (value, new), grads = jax.value_and_grad(loss, has_aux=True)(weights)
      return (new, jax.tree.map(jnp.add, sums, grads)), value

    start = [jnp.zeros((16, 32, 64))] * 2, jax.tree.map(jnp.zeros_like, weights)
    (carried, sums), losses = lax.scan(one_pass, start, batch)
    return carried, jax.tree.map(lambda w, g: w - g, weights, sums), losses

  weights, batch = [normal(number, 64, 64) / 8 for number in range(2)], normal(9, 4, 16, 32, 64)
  placed = jax.device_put(batch, NamedSharding(LAYOUT.mesh, PartitionSpec(None, *axes)))
  compiled = LAYOUT.pipeline_jit(step, schedule=GPipe(2)).compile(weights, placed)
  found = compiled(weights, placed)
  assert_same(found, jax.jit(step)(weights, batch), 1e-4)
  for array in found[0]:
    assert array.addressable_shards[0].data.nbytes == array.nbytes // 4
  texts = [one.compiled.as_text() for one in compiled.executables.values()]
  assert not any('all-gather' in text for text in texts)


@pytest.mark.parametrize('is_read', [False, True])
def test_a_sum_that_is_returned_is_sharded_as_the_result(is_read):
  """A state's buffer of gradients has a rule of its own. Within a microbatch, sums had the sharding of the weights."""

  def step(state, batch):
    loss = lambda weights, h: jnp.mean((stage_end(jnp.tanh(h @ weights[0])) @ weights[1]) ** 2)

    def body(sums, h):
      sums = jax.tree.map(jnp.add, sums, jax.grad(loss)(state['weights'], h))
      return sums, [one[0] for one in sums if is_read]

    sums, rows = lax.scan(body, state['buffer'], batch)
    weights = [w - 0.1 * one for w, one in zip(state['weights'], sums, strict=True)]
    return {'weights': weights, 'buffer': sums}, rows

  layout = spmd.Layout({'stage': 2, 'data': 4}, (('buffer/', PartitionSpec('data')),))
  weights, batch = [normal(2, 16, 16), normal(3, 16, 16)], normal(4, 3, 8, 16)
  state = layout.shard({'weights': weights, 'buffer': [normal(5, 16, 16), normal(6, 16, 16)]})
  found = layout.pipeline_jit(step, schedule=GPipe(2))(state, batch)
  assert_same(found, jax.jit(step)(jax.device_get(state), batch), 1e-4)
  assert [one.sharding.spec[0] for one in found[0]['buffer']] == ['data', 'data']


def test_shardings_of_a_call_that_is_opened():
  """Calls of a few operations, and all calls outside the loop, are opened; operands and results are constrained instead."""
  layout = spmd.Layout({'stage': 2, 'data': 2, 'model': 2}, (('batch', 'data'),))

  def jitted(fn, before=None, after=None):
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:  # on one device
      return fn
    given, result = (spec and NamedSharding(mesh, PartitionSpec(*spec)) for spec in (before, after))
    return jax.jit(fn, in_shardings=given, out_shardings=result)

  def step(weights, x):
    def loss(weights, x):
      h = stage_end(jitted(jnp.tanh, before=('data', 'model'))(x @ weights[0]))
      return jnp.mean((h @ weights[1]) ** 2)

    grads = accumulate(lambda x: jax.grad(loss)(weights, x), x, GPipe(2), Mean)
    doubled = jitted(lambda grads: jax.tree.map(lambda g: g + g.T @ g, grads), after=(None, 'data'))
    return doubled(grads)

  weights, batch = [normal(2, 8, 8), normal(3, 8, 8)], X.reshape(3, 8, 8)
  pipelined = layout.pipeline_jit(step)
  found: Any = pipelined(weights, batch)
  assert [one.sharding.spec for one in found] == [PartitionSpec(None, 'data')] * 2
  assert_same(found, jax.jit(step)(weights, batch), 1e-4)
  tasks = pipelined.lower(weights, batch).programs.tasks
  specs = [one.params['sharding'].spec for one in tasks['fwd', 0].equations if 'constraint' in one.name]
  assert PartitionSpec('data', 'model') in specs
