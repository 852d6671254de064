"""The log of constraints: complete, per task, and gone after its block."""

import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd._src.constraint_log import record_constraints

layout = spmd.Layout({'data': 2, 'model': 4}, (('batch', 'data'), ('hidden', 'model')))
X = jax.ShapeDtypeStruct((8, 8), jnp.float32)


class Block(nn.Module):
  @nn.compact
  def __call__(self, x):
    init = spmd.with_logical_partitioning(nn.initializers.ones, ('embed', 'hidden'))
    x = nn.with_logical_constraint(x @ self.param('w', init, (8, 8)), ('batch', None))
    return spmd.constrain(x, P('data'))


class Model(nn.Module):
  @nn.compact
  def __call__(self, x):
    return Block(name='second')(Block(name='first')(x))


def log_of(fn, *args):
  with record_constraints() as requests:
    layout.jit(fn).eval_shape(*args)
  return requests


def test_constraints_of_boxes_of_flax_and_of_ours_with_their_modules():
  state = layout.abstract(Model().init, jax.random.key(0), X)
  asked = [
    (one.by, one.names, one.spec, one.module, one.dropped) for one in log_of(Model().apply, state, X)
  ]
  per_block = [
    ('flax_spmd', ('embed', 'hidden'), P(None, 'model')),
    ('flax', ('batch', None), P('data', None)),
    ('flax_spmd', None, P('data')),
  ]
  assert asked == [(*one, f'module {name}', '') for name in ('first', 'second') for one in per_block]


def test_text_and_number_of_equal_constraints():
  def fn(x):
    for _ in range(3):
      x = spmd.with_logical_constraint(x, ('batch', 'hiden'))
    return x

  [request] = log_of(fn, X)
  assert (request.times, request.unmatched, request.shape) == (3, ('hiden',), (8, 8))
  text, _, line = str(request).rpartition(':')
  assert text == "3 x ('batch', 'hiden') as P('data', None), constraint_log_test.py" and line.isdecimal()


def test_a_function_that_jax_has_traced_is_logged_again():
  def fn(x):
    return spmd.with_logical_constraint(x, ('batch', None))

  inner = jax.jit(fn)
  assert len(log_of(inner, X)) == len(log_of(inner, X)) == 1


def test_other_threads_and_later_calls_are_not_logged():
  original = nn.spmd._with_sharding_constraint_one_fallback

  def trace(name):
    layout.jit(lambda x: nn.with_logical_constraint(x, (name, None))).eval_shape(X)

  with record_constraints() as requests:
    thread = threading.Thread(target=trace, args=('hidden',))
    thread.start()
    thread.join()
    trace('batch')
    assert nn.spmd._with_sharding_constraint_one_fallback is not original
  trace('hidden')
  assert [one.names for one in requests] == [('batch', None)]
  assert nn.spmd._with_sharding_constraint_one_fallback is original
