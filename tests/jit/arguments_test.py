"""Static, keyword-only and variadic arguments of `layout.jit`, and calls from several threads."""

import sys
import threading
import time
from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import errors
from tests.texts import text_of

DATA = spmd.fsdp('data', min_size=1)


def on(rules, mesh=None, **policies):
  return spmd.Layout(spmd.make_mesh(mesh or {'data': 8}), rules, **policies)


def test_equal_static_arguments_of_different_types():
  fn = on(()).jit(lambda m, x: x if isinstance(m, bool) else {'a': x, 'b': x}, static_argnums=0)
  assert set(fn(1, np.ones(8))) == {'a', 'b'}
  assert fn(True, np.ones(8)).shape == (8,)


def test_an_unhashable_static_argument_is_named():
  fn = on(()).jit(lambda sizes, x: x, static_argnums=0)
  assert text_of(TypeError, fn, [1], np.ones(8)) == dedent("""\
    Static argument 0 is a list, which is not hashable: [1].
    Fix: pass a tuple, a frozen dataclass or another hashable value.""")


def test_in_rules_for_keyword_only_arguments():
  layout = on(())

  def total(*, x):
    return x.sum()

  fn = layout.jit(total, in_rules={'x': P('data')})
  lowered = fn.lower(x=jax.ShapeDtypeStruct((8,), jnp.float32)).compile()
  assert lowered.input_shardings[1]['x'].is_equivalent_to(jax.NamedSharding(layout.mesh, P('data')), 1)
  assert float(fn(x=np.ones(8))) == 8
  text = text_of(errors.LayoutError, fn, x=layout.replicate(np.ones(8)))
  assert text.startswith(
    "argument x is sharded as P() on {'data': 8}, but in_rules require P('data',) on {'data': 8}."
  )


def test_in_rules_for_variadic_arguments():
  fn = on(()).jit(lambda *xs: xs, in_rules={'xs': P('data')}, out_rules=P('data'))
  assert [x.sharding.spec for x in fn(np.ones(8), np.ones(16))] == [P('data'), P('data')]
  assert text_of(errors.LayoutError, fn, np.ones(8), np.ones(3)).startswith('argument xs/1, dim 0')
  lowered = fn.lower(*[jax.ShapeDtypeStruct((8,), jnp.float32)] * 2).compile()
  assert {sharding.spec for sharding in lowered.input_shardings[0]} == {P('data')}


@pytest.mark.parametrize('option', ['in_rules', 'in_constraints'])
@pytest.mark.parametrize('placements', [{'c': P('data')}, (None, None, P('data'))])
def test_an_argument_without_a_placement_keeps_its_sharding(option, placements):
  """A None for each of several arguments is not the names of one array, whatever their ranks."""
  layout = on(())
  a, b = layout.shard((np.ones((8, 2)), np.ones((2, 8))), (P('data'), P(None, 'data')))

  def same(a, b, *, c):
    return a, b, c

  fn = layout.jit(same, **{option: placements})
  assert [x.sharding.spec for x in fn(a, b, c=np.ones(8))] == [P('data'), P(None, 'data'), P('data')]
  by_position = layout.jit(lambda a, b: (a, b), **{option: (None, None)}, out_rules=(None, None))
  assert [x.sharding.spec for x in by_position(a, b)] == [P('data'), P(None, 'data')]


def test_in_rules_name_the_parameters():
  layout = on((('batch', 'data'),))

  def step(params, batch, *, mask=None):
    return batch['x']

  x, y = np.ones((8, 4)), np.ones(3)
  for rules in ((None, ('batch',)), {'batch': ('batch',)}):
    fn = layout.jit(step, in_rules=rules)
    for args, kwargs in (({}, {'x': x, 'y': y}), {}), (({},), {'batch': {'x': x, 'y': y}}):
      assert text_of(errors.LayoutError, fn, *args, **kwargs).startswith(
        "argument batch/y, dim 0 'batch': size 3 is not"
      )
  fn = layout.jit(step, in_rules=(None, {'z': None}, {'m': ('rows',)}))
  text = text_of(errors.LayoutError, fn, {}, {'x': x}, mask={'m': x})
  assert text.startswith("argument batch: the placements {'z': None} are not a prefix of the tree: ")


@pytest.mark.parametrize('method', ['jit', 'pipeline_jit'])
def test_options_that_a_method_lacks(method):
  layout = spmd.Layout({'stage': 2, 'data': 4})
  options = {'in_shardings': None, 'out_shardings': P(), 'donate_argnum': 0}
  expected = dedent(f"""\
    layout.{method} has no option 'in_shardings'.
    layout.{method} has no option 'out_shardings'.
    layout.{method} has no option 'donate_argnum'. Did you mean 'donate_argnums'?
    Fix: pass in_rules, which accepts shardings too.
    Fix: pass out_rules, which accepts shardings too.
    Fix: correct the name, or leave it out.""")
  for args in ((lambda x: x,), ()):
    with pytest.raises(TypeError) as caught:
      getattr(layout, method)(*args, **options)
    assert str(caught.value) == expected


def test_threads_that_share_a_function_get_the_right_shardings():
  layout = on(DATA)
  shapes = [(16, 8), (8, 16), (24, 8), (8, 24)]
  wrong = []
  old = sys.getswitchinterval()
  sys.setswitchinterval(1e-6)
  try:
    for _ in range(5):
      fn = layout.jit(lambda x: x + 1, in_rules=DATA, out_rules=DATA)

      def work(shape, fn=fn):
        expected = P('data', None) if shape[0] > shape[1] else P(None, 'data')
        for _ in range(3):
          if fn(np.ones(shape)).sharding.spec != expected:
            wrong.append(shape)

      threads = [threading.Thread(target=work, args=(shape,)) for shape in shapes]
      for thread in threads:
        thread.start()
      for thread in threads:
        thread.join()
  finally:
    sys.setswitchinterval(old)
  assert not wrong


def test_threads_that_bring_new_shardings_at_once_get_the_right_ones():
  """JAX's dispatch has taken over the calls, and compiles the first program for the new shardings."""
  layout = spmd.Layout({'data': 2, 'model': 4})
  step = layout.jit(lambda state: {'w': jnp.tanh(state['w'] @ state['w']) + state['w']})
  placed = lambda *spec: {'w': layout.shard(np.ones((16, 16), np.float32), P(*spec))}
  for _ in range(12):
    assert step(placed('data'))['w'].sharding.spec == P('data')
  barrier, found = threading.Barrier(4), []

  def work():
    state = placed(None, 'model')
    barrier.wait()
    found.append(step(state)['w'].sharding.spec)

  threads = [threading.Thread(target=work) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert found == [P(None, 'model')] * 4


def test_threads_that_plan_a_call_at_once_share_the_plan():
  """What is known of a plan is known by its identity, so a plan is never replaced."""
  layout = spmd.Layout({'data': 8})

  def slow(x):
    time.sleep(0.2)  # traced once, while the others wait
    return x * 2

  step, barrier, plans = layout.jit(slow), threading.Barrier(4), []

  def work():
    barrier.wait()
    plans.append(step.plan_of(np.ones(16)))

  threads = [threading.Thread(target=work) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert len({id(plan) for plan in plans}) == 1


def test_jax_takes_over_in_another_thread_once_the_first_has_ended():
  layout = spmd.Layout({'data': 2, 'model': 4})
  step = layout.jit(lambda state: {'w': state['w'] * 2})
  placed = lambda *spec: {'w': layout.shard(np.ones((16, 16), np.float32), P(*spec))}
  first = threading.Thread(target=lambda: [step(placed('data')) for _ in range(12)])
  first.start()
  first.join()
  for spec in [('data',)] * 12 + [(None, 'model'), ('data',), (None, 'model')]:
    assert step(placed(*spec))['w'].sharding.spec == P(*spec)


@pytest.mark.parametrize('weak_first', [True, False])
def test_weak_types_are_planned_for_themselves(weak_first):
  """The dtype of the result differs, and with it the argument that the result comes out as."""
  layout = spmd.Layout({'data': 2, 'model': 4})
  multiply = layout.jit(lambda x, y: x * y)
  y = layout.shard(jnp.ones((16, 16), jnp.bfloat16), P('data'))
  weak = layout.shard(jnp.broadcast_to(jnp.asarray(2.0), (16, 16)), P(None, 'model'))
  strong = layout.shard(jnp.ones((16, 16)), P(None, 'model'))
  assert weak.weak_type and not strong.weak_type
  expected = [(weak, jnp.bfloat16, P('data')), (strong, jnp.float32, P(None, 'model'))]
  for x, dtype, spec in expected if weak_first else reversed(expected):
    result = multiply(x, y)
    assert (result.dtype, result.sharding.spec) == (dtype, spec)


def test_an_array_on_other_devices_beside_a_static_object_raises_the_error_of_the_array():
  """The object is none that JAX's dispatch, which has taken over, would accept."""
  layout = spmd.Layout({'data': 2, 'model': 4})
  x = jax.device_put(np.ones((16, 16), np.float32), jax.devices()[0])
  errors_of_calls = []
  for calls_before in (0, 12):
    step = layout.jit(lambda x, fn: spmd.with_logical_constraint(fn(x), P('data')))
    for _ in range(calls_before):
      step(layout.shard(np.ones((16, 16), np.float32), P('data')), jnp.tanh)
    with pytest.raises(errors.LayoutError, match='argument x is on devices') as error:
      step(x, jnp.tanh)
    errors_of_calls.append(str(error.value))
  assert errors_of_calls[0] == errors_of_calls[1]


@st.composite
def placed_on_other_meshes(draw):
  """An array's place: None, or a sharding over some axes of a mesh of all devices in some order."""
  if draw(st.booleans()):
    return None
  names, shape = draw(
    st.sampled_from([('i', (8,)), ('data', (8,)), ('data i', (4, 2)), ('i data model', (2, 2, 2))])
  )
  devices = np.array(jax.devices())[:: draw(st.sampled_from([1, 1, 1, -1]))]
  types = [draw(st.sampled_from([AxisType.Auto, AxisType.Auto, AxisType.Explicit]))] * len(shape)
  mesh = Mesh(devices.reshape(shape), names.split(), axis_types=tuple(types))
  dims = {axis: draw(st.integers(0, 2)) for axis in mesh.axis_names}  # 2: over none
  return NamedSharding(mesh, P(*(tuple(axis for axis in dims if dims[axis] == dim) for dim in range(2))))


@settings(max_examples=30, deadline=None)
@given(placed_on_other_meshes(), placed_on_other_meshes())
def test_arrays_on_other_meshes_are_computed_or_named(of_weights, of_batch):
  """On the same devices JAX computes with them, unless it cannot describe the shardings of the results."""
  layout = spmd.Layout({'data': 4, 'model': 2}, (('batch', 'data'),))
  w, x = np.arange(64.0, dtype='float32').reshape(8, 8), np.ones((16, 8), 'float32')
  state = {'w': w if of_weights is None else jax.device_put(w, of_weights)}
  batch = x if of_batch is None else jax.device_put(x, of_batch)

  def step(state, batch):
    return jax.tree.map(lambda w: w + 1, state), (batch @ state['w']).sum()

  try:
    new, total = layout.jit(step)(state, batch)
  except errors.LayoutError as error:
    assert ' is on the mesh {' in str(error) or ' is on devices in the order [' in str(error)
  else:
    np.testing.assert_array_equal(new['w'], w + 1)
    np.testing.assert_allclose(total, (x @ w).sum())


def test_arrays_of_types_on_another_mesh():
  """`jax.make_mesh` makes Explicit axes by default."""
  layout, mesh = (
    spmd.Layout({'data': 8}),
    Mesh(np.array(jax.devices()), ('i',), axis_types=(AxisType.Explicit,)),
  )
  x = jax.device_put(np.ones(8, 'float32'), NamedSharding(mesh, P('i')))
  step = layout.jit(lambda state: {'x': state['x'] + 1})
  for call in (step, step.explain, step.lower):
    assert text_of(errors.LayoutError, call, {'x': x}) == dedent("""\
      argument state/x is on the mesh {'i': 8} of Explicit axes, but the layout is on {'data': 8} of Auto axes.
      Fix: transfer it with layout.shard, or with reshard of the layout that it is stored by.""")
  np.testing.assert_array_equal(step(layout.shard({'x': x}))['x'], x + 1)


def test_arrays_on_the_same_devices_in_another_order():
  layout, turned = spmd.Layout({'data': 8}), Mesh(np.array(jax.devices()[::-1]), ('data',))
  x = jax.device_put(np.ones(8), NamedSharding(turned, P('data')))
  assert text_of(
    errors.LayoutError, layout.jit(lambda x, y: x + y), x, layout.shard(np.ones(8))
  ) == dedent("""\
    argument x is on devices in the order [7, 6, 5, 4, 3, 2, 1, 0], but the layout has the order [0, 1, 2, 3, 4, 5, 6, 7].
    Fix: transfer it with layout.shard, or with reshard of the layout that it is stored by.""")
  np.testing.assert_array_equal(layout.shard(x), np.ones(8))


def test_new_shardings_after_jax_has_cleared_its_caches():
  layout = spmd.Layout({'data': 2, 'model': 4})
  step = layout.jit(lambda state: {'w': state['w'] * 2})
  placed = lambda *spec: {'w': layout.shard(np.ones((16, 16), np.float32), P(*spec))}
  call = lambda *spec: step(placed(*spec))['w'].sharding.spec
  for _ in range(12):
    assert call('data') == P('data')
  jax.clear_caches()
  other = threading.Thread(target=call, args=('data',))
  other.start()
  other.join()
  for spec in [(None, 'model'), ('data',), (None, 'model')]:
    assert call(*spec) == P(*spec)
