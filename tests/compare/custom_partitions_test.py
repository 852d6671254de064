"""Functions of `custom_partitioning`: compiled for absent devices, and estimated."""

import concurrent.futures
import threading

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

import flax_spmd as spmd
from flax_spmd._src.compat import PLACEHOLDER, lower_with_placeholders
from flax_spmd._src.estimate.doubts import particular
from flax_spmd.explore import Estimator, TrainStep, compare, parse_target

BATCH, WIDTH = 16, 32
X = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
DATA = spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'),))
WIDE = spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', None), ('embed', 'data')))


@custom_partitioning
def centered(x):
  """Rows minus their means: each device centers its own rows."""
  return x - jnp.mean(x, axis=-1, keepdims=True)


def partition(mesh, arguments, result):
  rows = NamedSharding(mesh, PartitionSpec(arguments[0].sharding.spec[0], None))
  return mesh, centered.fun, rows, (rows,)


centered.def_partition(partition, sharding_rule='i j -> i j')


def create():
  return {'w': jnp.ones((WIDTH, WIDTH))}


def step(state, x):
  scan = lambda c, _: (centered(c), None)  # in a loop, and twice
  y = jax.lax.scan(scan, centered(x), length=3)[0]
  return state, jnp.sum(y @ state['w'])


TRAIN_STEP = TrainStep(step, create, X)


def test_a_partitioned_function_is_compiled_for_the_shardings_of_its_operands():
  counts = compare(TRAIN_STEP, {'data': DATA}, 'cpu:8')['data'].counts
  assert counts.by_kind() == {'all-reduce': 7.0}  # the loss


def test_operands_that_the_function_wants_whole_are_gathered():
  wide = TRAIN_STEP._replace(placements=('batch', 'embed'))
  counts = compare(wide, {'wide': WIDE}, 'cpu:8')['wide'].counts
  assert counts.by_kind()['all-gather'] == pytest.approx(4 * BATCH * WIDTH * 7 / 8)


def test_a_function_with_unknown_costs_makes_an_estimate_doubtful():
  outcome = Estimator(TRAIN_STEP, platform='cpu').estimate(DATA, parse_target('cpu:8'))
  assert outcome.counts.by_kind() == {'all-reduce': 7.0}
  assert outcome.counts.opaque == (('centered', 4),)
  assert set(particular(outcome.doubts)) == {
    'custom_partitions_test.py:43: the costs of the kernel centered are unknown',
    'custom_partitions_test.py:42: the costs of the kernel centered are unknown',
  }


def test_two_threads_may_lower_for_absent_devices():
  """A program whose lowering begins during that of another one, and ends after it."""
  mesh = spmd.abstract_mesh({'data': 8})
  rows = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
  traced = jax.jit(centered).trace(rows)
  first_begins, first_ends, second_begins = (threading.Event() for _ in range(3))

  class First:
    def lower(self, **options):
      first_begins.set()
      second_begins.wait(0.5)
      return traced.lower(**options)

  class Second:
    def lower(self, **options):
      second_begins.set()
      assert first_ends.wait(10)
      return traced.lower(**options)

  with concurrent.futures.ThreadPoolExecutor() as pool:
    one = pool.submit(lower_with_placeholders, First(), 'cpu', mesh)
    assert first_begins.wait(10)
    other = pool.submit(lower_with_placeholders, Second(), 'cpu', mesh)
    assert PLACEHOLDER in one.result().as_text()
    first_ends.set()
    assert PLACEHOLDER in other.result().as_text()


def attention(state, x):
  def loss(w):
    q, k, v = jnp.split((x @ w).reshape(BATCH, 128, 4, 192), 3, -1)
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation='cudnn')
    return jnp.sum(y.astype(jnp.float32))

  loss, gradient = jax.value_and_grad(loss)(state['w'])
  return {'w': state['w'] - gradient}, loss


@pytest.mark.usefixtures('gpu_compiler')
def test_attention_of_cudnn_is_estimated_and_compiled_alike():
  state = lambda: {'w': jnp.ones((64, 3 * 4 * 64), jnp.bfloat16)}
  x = jax.ShapeDtypeStruct((BATCH, 128, 64), jnp.bfloat16)
  train_step = TrainStep(attention, state, x)
  compiled = compare(train_step, {'data': DATA}, 'h100:8')['data']
  estimated = Estimator(train_step).estimate(DATA, parse_target('h100:8'))
  assert compiled.error is None
  assert estimated.counts.flops == compiled.counts.flops
  assert estimated.counts.by_kind() == compiled.counts.by_kind()
  assert estimated.counts.opaque == () and estimated.doubts == ()
  assert estimated.source == 'partitioned' and estimated.memory.peak == compiled.memory.peak
