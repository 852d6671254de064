"""Resource meshes: models that look for the mesh of `with mesh:` are reported, and find the layout's where it is entered."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters import pxla
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd.explore import TrainStep

pytestmark = pytest.mark.filterwarnings('ignore::DeprecationWarning')
LAYOUT = spmd.Layout({'expert': 4, 'replica': 2}, (('batch', ('expert', 'replica')),))
X = jnp.ones(16)


def model(x):
  """As models for `pjit` constrain."""
  if pxla.thread_resources.env.physical_mesh.empty:
    return x
  return jax.lax.with_sharding_constraint(2 * x, P('expert'))


LINE = model.__code__.co_firstlineno + 2


def entered(layout):
  def step(x):
    with layout.mesh:
      return model(x)

  return step


def messages(run):
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always', UserWarning)
    result = run()
  found = [one for one in caught if one.category is UserWarning]
  assert all((one.filename, one.lineno) == (__file__, LINE) for one in found)
  return result, [str(one.message) for one in found]


@pytest.mark.parametrize('wrap', [lambda f: f, jax.jit, jax.checkpoint, jax.vmap, jax.grad])
@pytest.mark.parametrize('call', ['jit', 'lower', 'init', 'abstract'])
def test_a_model_that_looks_for_the_mesh_of_a_block_is_reported_once(call, wrap):
  def fn(x):
    inner = wrap(lambda x: jnp.sum(model(x))) if wrap is jax.grad else wrap(lambda x: model(x))
    return inner(jnp.float32(1)) * model(x) if wrap is jax.grad else inner(x) + model(x)

  jitted = LAYOUT.jit(fn)
  run = {'jit': jitted, 'lower': jitted.lower}.get(call, lambda x: getattr(LAYOUT, call)(fn, x))
  _, first = messages(lambda: run(X))
  assert first == [
    f'{fn.__qualname__}: resource_meshes_test.py:{LINE} looked for the mesh of `with mesh:`, and found none. Its '
    "constraints have no effect: the layout's mesh is that of jax.sharding.get_abstract_mesh().\n"
    'Fix: enter `with layout.mesh:` in the function, around its model.'
  ]
  if call == 'jit':
    assert messages(lambda: run(jnp.ones(32)))[1] == []


def test_the_mesh_of_a_block_in_the_function_is_found():
  y, none = messages(lambda: LAYOUT.jit(entered(LAYOUT))(X))
  assert none == [] and y.sharding.spec == P('expert')


def test_the_function_of_a_layout_in_another_is_the_one_that_is_reported():
  inner = LAYOUT.jit(lambda x: model(x))
  _, [text] = messages(lambda: LAYOUT.jit(lambda x: inner(x) + 1)(X))
  assert text.startswith(f'{inner.__qualname__}: resource_meshes_test.py:{LINE} looked')


def test_the_mesh_of_a_block_around_the_call_is_found():
  with LAYOUT.mesh:
    y, none = messages(lambda: LAYOUT.jit(lambda x: model(x))(X))
  assert none == [] and y.sharding.spec == P('expert')


def test_what_jax_itself_looks_for_is_not_reported():
  def fn(x):
    x = jax.lax.with_sharding_constraint(jax.jit(jnp.sin)(x), P('expert'))
    jax.debug.inspect_array_sharding(x, callback=lambda sharding: None)
    return jnp.sum(jax.checkpoint(jnp.cos)(x))

  assert messages(lambda: LAYOUT.jit(fn)(X))[1] == []


@pytest.mark.parametrize('mesh', [LAYOUT.mesh, spmd.abstract_mesh({'expert': 4, 'replica': 2})])
@pytest.mark.parametrize('spec', [None, P('expert'), P('absent')])
def test_a_model_that_looks_for_the_mesh_and_has_nothing_to_constrain_is_not_reported(spec, mesh):
  """V-MoE looks for the mesh first, then for a spec; others look, then leave CPUs alone."""

  def fn(x):
    if pxla.thread_resources.env.physical_mesh.empty or spec is None:
      return jax.jit(jnp.sin)(x)
    return jax.jit(jnp.sin)(jax.lax.with_sharding_constraint(x, spec))

  jitted = LAYOUT.replace(mesh=mesh).jit(fn)
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    jitted.trace(X)
  assert [one.category for one in caught] == [UserWarning] * (spec is not None)


def test_resources_are_unchanged_after_a_trace_and_after_a_failing_one():
  before = pxla.thread_resources.env

  def fails(x):
    model(x)
    raise KeyError('x')

  messages(lambda: LAYOUT.jit(lambda x: model(x))(X))
  with pytest.raises(KeyError):
    messages(lambda: LAYOUT.jit(fails)(X))
  assert pxla.thread_resources.env is before
  assert pxla.thread_resources.stack[-1] is before


@pytest.mark.parametrize('mesh', [{'expert': 8, 'replica': 1}, {'expert': 2, 'replica': 4}])
def test_a_model_enters_the_mesh_of_a_target(mesh):
  """Its program is that of constraints without a block."""

  def of(constrained):
    def train(layout):
      step = lambda state, x: (state, jnp.sum(constrained(layout)(x * state['w'])))
      return TrainStep(step, lambda: {'w': jnp.ones(16)}, jax.ShapeDtypeStruct((16,), jnp.float32))

    return train

  layout = LAYOUT.replace(mesh=spmd.abstract_mesh(mesh))
  plain = lambda layout: lambda x: jax.lax.with_sharding_constraint(2 * x, P('expert'))
  [one], [other] = (spmd.compare(of(each), {'it': layout}, 'cpu:8') for each in (entered, plain))
  assert one.error is None and one.counts.by_axis() == other.counts.by_axis() != {}
  with pytest.raises(spmd.errors.MeshError, match='uses __enter__ of the mesh'):
    layout.jit(entered(layout)).trace(X)  # devices are absent, and no target's devices stand for them
