"""Swapping the rules always takes effect: under every transformation, in threads, in asyncio tasks."""

import asyncio
import threading
from functools import partial
from textwrap import dedent

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd._src.active_layout import record_names
from flax_spmd.errors import ContextError, RulesError

A = spmd.Layout({'data': 2, 'model': 4}, (('batch', 'data'), ('hidden', 'model')))
B = spmd.Layout({'data': 2, 'model': 4}, (('batch', 'model'), ('hidden', 'data')))
EXPECTED = {A: P('data', 'model'), B: P('model', 'data')}
X = jnp.ones((8, 8))


class Ours(nn.Module):
  @nn.compact
  def __call__(self, x, _=None):
    return spmd.with_logical_constraint(2 * x, ('batch', 'hidden')), None


class Flaxs(nn.Module):
  """A third-party module, which only uses Flax."""

  @nn.compact
  def __call__(self, x, _=None):
    return nn.with_logical_constraint(2 * x, ('batch', 'hidden')), None


class Boxed(nn.Module):
  """The names of the parameter's box decide the sharding of the result."""

  @nn.compact
  def __call__(self, x, _=None):
    init = spmd.with_logical_partitioning(nn.initializers.ones, ('batch', 'hidden'))
    return self.param('w', init, (8, 8)) * 2, None


def plain(module):
  return lambda x: module().apply({}, x)[0]


def under_nn_jit(module):
  return lambda x: nn.jit(module)().apply({}, x)[0]


def under_remat(module):
  return lambda x: nn.remat(module)().apply({}, x)[0]


def under_scan(module):
  scanned = nn.scan(module, length=2, variable_axes={'params': 0})
  return lambda x: scanned().apply({}, x)[0]


def under_inner_jit(module):
  inner = jax.jit(lambda x: module().apply({}, x)[0])
  return lambda x: inner(x)


WRAPPERS = [plain, under_nn_jit, under_remat, under_scan, under_inner_jit]


@pytest.mark.parametrize('wrap', WRAPPERS)
@pytest.mark.parametrize('module', [Ours, Flaxs])
def test_swapping_layouts_under_jax_jit(wrap, module):
  """The same function, jitted once, called under one layout after the other."""
  jitted = jax.jit(wrap(module))
  for layout in (A, B, A, B):
    with layout:
      assert jitted(X).sharding.spec == EXPECTED[layout]


@pytest.mark.parametrize('wrap', WRAPPERS)
@pytest.mark.parametrize('module', [Ours, Flaxs])
def test_swapping_under_layout_jit(wrap, module):
  function = wrap(module)
  jitted = {layout: layout.jit(function) for layout in (A, B)}
  for layout in (A, B, A, B):
    assert jitted[layout](X).sharding.spec == EXPECTED[layout]


def test_swapping_takes_effect_for_boxes():
  jitted = jax.jit(lambda w: Boxed().apply({'params': {'w': w}}, X)[0])
  box = spmd.LogicallyPartitioned(X, ('batch', 'hidden'))
  for layout in (A, B, A):
    with layout:
      assert jitted(box).sharding.spec == EXPECTED[layout]


def test_equal_layouts_share_traces():
  traces = []

  @jax.jit
  def f(x):
    traces.append(1)
    return spmd.with_logical_constraint(x, ('batch', 'hidden'))

  for rules in (A.rules, spmd.Rules(*A.rules), list(A.rules)):
    with spmd.Layout({'data': 2, 'model': 4}, rules):
      f(X)
  assert len(traces) == 1


def test_a_function_of_one_layout_called_inside_another():
  """It carries its own mesh and rules, whatever is in force around the call."""
  other = spmd.Layout({'data': 4, 'model': 2}, B.rules)
  for module in (Ours, Flaxs):
    f = A.jit(plain(module))
    with other:
      assert f(X).sharding.spec == EXPECTED[A]
      assert dict(f(X).sharding.mesh.shape) == {'data': 2, 'model': 4}
      assert spmd.get_logical_axis_rules() == other.rules.clauses


def test_swapping_rules_without_a_mesh():
  f = jax.jit(partial(spmd.with_logical_constraint, logical_axis_resources=('batch', 'hidden')))
  with jax.set_mesh(A.mesh):
    for layout in (A, B, A):
      with spmd.logical_axis_rules(layout.rules.clauses):
        assert f(X).sharding.spec == EXPECTED[layout]


def test_blocks_nest_and_restore_even_after_errors():
  with A:
    with pytest.raises(KeyError), B:
      assert spmd.get_logical_axis_rules() == B.rules.clauses
      raise KeyError
    assert spmd.get_logical_axis_rules() == A.rules.clauses
    assert nn.get_logical_axis_rules() == A.rules.clauses
    with A:
      pass
    assert spmd.get_logical_axis_rules() == A.rules.clauses
  assert spmd.get_logical_axis_rules() == nn.get_logical_axis_rules() == ()


def test_one_layout_object_can_be_entered_twice():
  with A, A:
    assert spmd.get_logical_axis_rules() == A.rules.clauses
  assert spmd.get_logical_axis_rules() == ()


def test_rules_of_flax_inside_a_layout_win():
  with A, nn.logical_axis_rules(B.rules.clauses):
    assert spmd.get_logical_axis_rules() == B.rules.clauses
    assert jax.jit(plain(Ours))(X).sharding.spec == EXPECTED[B]


def test_rules_of_flax_without_a_layout():
  with jax.set_mesh(A.mesh), nn.logical_axis_rules(A.rules.clauses):
    assert jax.jit(plain(Ours))(X).sharding.spec == EXPECTED[A]


def test_set_logical_axis_rules():
  spmd.set_logical_axis_rules(A.rules.clauses)
  try:
    assert spmd.get_logical_axis_rules() == nn.get_logical_axis_rules() == A.rules.clauses
    with jax.set_mesh(A.mesh):
      f = jax.jit(plain(Ours))
      assert f(X).sharding.spec == EXPECTED[A]
      spmd.set_logical_axis_rules(B.rules.clauses)
      assert f(X).sharding.spec == EXPECTED[B]
  finally:
    spmd.set_logical_axis_rules(())
  assert spmd.get_logical_axis_rules() == ()


def test_invalid_rules():
  with pytest.raises(RulesError), spmd.logical_axis_rules({'batch': 'data'}):
    pass
  assert spmd.get_logical_axis_rules() == ()


def test_each_thread_has_its_own_layout():
  """60 tries in two threads that take turns inside their blocks."""
  wrong = []
  barrier = threading.Barrier(2)

  def work(layout):
    f = jax.jit(plain(Ours))
    for _ in range(30):
      barrier.wait()
      with layout:
        barrier.wait()
        if f(X).sharding.spec != EXPECTED[layout] or nn.get_logical_axis_rules() != layout.rules.clauses:
          wrong.append(layout)
        barrier.wait()

  threads = [threading.Thread(target=work, args=(layout,)) for layout in (A, B)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert not wrong


def test_a_new_thread_has_nothing_in_force():
  seen = []
  with A:
    thread = threading.Thread(target=lambda: seen.append(spmd.get_logical_axis_rules()))
    thread.start()
    thread.join()
  assert seen == [()]


def test_asyncio_tasks_that_take_turns():
  """One jitted function per task; the tasks alternate between calls."""

  async def work(layout, results):
    f = layout.jit(plain(Ours))
    for _ in range(5):
      await asyncio.sleep(0)
      results.append((layout, f(X).sharding.spec))
      with layout:
        results.append((layout, jax.jit(plain(Flaxs))(X).sharding.spec))

  async def main():
    results = []
    await asyncio.gather(work(A, results), work(B, results))
    return results

  results = asyncio.run(main())
  assert len(results) == 20
  assert all(spec == EXPECTED[layout] for layout, spec in results)


OUT_OF_STEP = dedent("""\
  The layout in force in this task differs from the one in JAX's cache key: another task of this thread is suspended by an `await` inside a `with layout:` block, or this thread was started inside such a block.
  Fix: call functions from `layout.jit`, which carry their layout; or close the block before awaiting; or enter `with layout:` in the thread that runs the function.""")


def test_two_tasks_cannot_have_open_layouts_in_one_thread():
  """JAX's cache key is per thread; entering a second layout there would run the first one's programs."""

  async def suspended(entered, release):
    with A:
      entered.set()
      await release.wait()

  async def other(entered, release):
    await entered.wait()
    try:
      assert B.jit(plain(Ours))(X).sharding.spec == EXPECTED[B]
      with pytest.raises(ContextError) as caught, B:
        pass
      assert str(caught.value) == OUT_OF_STEP
    finally:
      release.set()

  async def main():
    entered, release = asyncio.Event(), asyncio.Event()
    await asyncio.gather(suspended(entered, release), other(entered, release))

  asyncio.run(main())


def test_tracing_in_a_thread_with_an_inherited_layout_raises():
  async def main():
    with A:
      assert (await asyncio.to_thread(spmd.get_logical_axis_rules)) == A.rules.clauses
      with pytest.raises(ContextError) as caught:
        await asyncio.to_thread(jax.jit(plain(Ours)), X)
      assert str(caught.value) == OUT_OF_STEP
      result = await asyncio.to_thread(A.jit(plain(Ours)), X)
      assert result.sharding.spec == EXPECTED[A]

  asyncio.run(main())


def test_recorders_in_two_threads_overlap():
  """Each records its own names, in whatever order they end, and Flax's function is restored."""
  original = nn.spmd._logical_to_mesh_axes
  recorded, entered, left = {}, threading.Event(), threading.Event()

  def first():
    with record_names() as recorded['first']:
      entered.set()
      assert second_entered.wait(300)
      nn.logical_to_mesh_axes(('a',), (('a', None),))
    left.set()

  second_entered = threading.Event()
  thread = threading.Thread(target=first)
  thread.start()
  assert entered.wait(300)
  with record_names() as names:
    second_entered.set()
    assert left.wait(300)
    nn.logical_to_mesh_axes(('b',), (('b', None),))
  thread.join()
  assert (recorded['first'], names) == ({'a'}, {'b'})
  assert nn.spmd._logical_to_mesh_axes is original
