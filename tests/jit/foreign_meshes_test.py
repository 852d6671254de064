"""Constraints on another mesh than the layout's: an error, unless they are a view of the same devices."""

import functools
import itertools
import math
import re
from textwrap import dedent

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd.errors import AxisNameError, MeshError
from flax_spmd.pipeline import OneFOneB, accumulate, stage_end

X = jax.ShapeDtypeStruct((16, 8), jnp.float32)
LAYOUT = spmd.Layout({'data': 8, 'model': 1}, (('batch', 'data'), ('mlp', 'model')))
OTHER = spmd.make_mesh({'data': 2, 'model': 4})
FIX = (
  "\nFix: build the model on the layout's mesh, layout.mesh. For compare, search and Estimator, pass a function that "
  'builds it for a layout: lambda layout: TrainStep(...).'
)


def constrained(x, mesh=OTHER, *spec):
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def without_lines(error):
  return re.sub(r'_test.py:\d+', '_test.py:N', str(error.value))


class Holder(nn.Module):
  """A module with a mesh of its own, in MaxText's style."""

  mesh: Mesh

  @nn.compact
  def __call__(self, x):
    w = self.param('w', spmd.with_logical_partitioning(nn.initializers.ones, ('embed', 'mlp')), (8, 8))
    with nn.logical_axis_rules((('batch', 'data'), ('mlp', 'model'))):
      return nn.with_logical_constraint(x @ spmd.unbox(w), ('batch', 'mlp'), mesh=self.mesh)


def test_every_constraint_on_another_mesh_is_listed_once_with_its_line_and_both_meshes():
  def step(x):
    def body(x, _):
      return constrained(x, OTHER, 'data', 'model'), None

    x, _ = jax.lax.scan(body, x, length=3)
    return jax.jit(lambda x: constrained(2 * x, OTHER, 'model'))(x)

  with pytest.raises(MeshError) as error:
    LAYOUT.jit(step)(jnp.ones(X.shape))
  sentence = (
    'The constraint {} at foreign_meshes_test.py:N is on the mesh '
    "{{'data': 2, 'model': 4}}; the layout's mesh is {{'data': 8, 'model': 1}}."
  )
  expected = [sentence.format("P('data', 'model')"), sentence.format("P('model',)")]
  assert without_lines(error) == '\n'.join(expected) + FIX
  line = constrained.__code__.co_firstlineno + 1
  assert f'foreign_meshes_test.py:{line} ' in str(error.value)


@pytest.mark.parametrize('wrap', [jax.jit, jax.checkpoint, jax.vmap, jax.value_and_grad])
def test_a_constraint_is_found_under_every_transformation(wrap):
  shape = (16,) if wrap is jax.vmap else X.shape
  inner = wrap(lambda x: jnp.sum(constrained(x, OTHER, 'data') ** 2))
  with pytest.raises(MeshError, match=r"is on the mesh {'data': 2, 'model': 4}"):
    LAYOUT.jit(inner).trace(
      jax.ShapeDtypeStruct((8, *shape) if wrap is jax.vmap else shape, jnp.float32)
    )


@pytest.mark.parametrize('call', ['init', 'abstract', 'plan', 'jit'])
def test_a_module_that_holds_another_mesh_is_refused(call):
  model, key = Holder(OTHER), jax.random.key(0)
  create = lambda key: model.init(key, jnp.ones(X.shape))
  run = {'jit': lambda: LAYOUT.jit(create)(key)}.get(call, lambda: getattr(LAYOUT, call)(create, key))
  with pytest.raises(
    MeshError, match=r"is on the mesh {'data': 2, 'model': 4}; the layout's mesh is {'data': 8, "
  ):
    run()


def test_a_module_on_the_mesh_of_the_layout_runs():
  layout = LAYOUT.replace(mesh=OTHER)
  model = Holder(layout.mesh)
  state = layout.init(lambda: model.init(jax.random.key(0), jnp.ones(X.shape)))
  assert layout.jit(model.apply)(state, jnp.ones(X.shape)).sharding.spec == P('data', 'model')


STAGES = spmd.Layout({'stage': 2, 'data': 4}, (('batch', 'data'),))
W, ROWS = {'first': jnp.eye(4), 'second': jnp.ones((4, 4))}, jnp.arange(96.0).reshape(3, 8, 4) / 96


def doubled(x, axis='data', **mesh):
  return jax.shard_map(lambda x: 2 * x, in_specs=P(axis), out_specs=P(axis), **mesh)(x)


def jitted(x, mesh, axis='data'):
  return jax.jit(lambda x: 2 * x, in_shardings=NamedSharding(mesh, P(axis)))(x)


def pipelined_step(layer):
  def step(w, batch):
    def loss(w, x):
      x = stage_end(jax.checkpoint(layer)(jnp.tanh(x @ w['first'])))
      return jnp.mean(jnp.where(x > 0, layer(x @ w['second']), 2 * x) ** 2)

    return accumulate(lambda x: jax.grad(loss)(w, x), batch, OneFOneB(2))

  return step


def test_a_stage_of_a_model_on_the_mesh_of_all_ranks():
  """Its own mesh is in the place of the layout's, which a model may hold as MaxText's does."""
  of_call = jax.sharding.get_abstract_mesh
  for layer, factor in (
    (lambda x: jax.lax.with_sharding_constraint(x, P('data')), 1),
    (lambda x: constrained(x, STAGES.mesh, 'data'), 1),
    (lambda x: constrained(x, STAGES.mesh.abstract_mesh, 'data'), 1),
    (lambda x: doubled(x), 2),
    (lambda x: doubled(x, mesh=of_call()), 2),
    (lambda x: doubled(x, mesh=STAGES.mesh), 2),
    (lambda x: doubled(x, mesh=STAGES.mesh, axis_names={'data'}), 2),
    (lambda x: jitted(x, of_call()), 2),
    (lambda x: jitted(x, STAGES.mesh), 2),
  ):
    found = STAGES.pipeline_jit(pipelined_step(layer))(W, ROWS)
    wanted = jax.jit(pipelined_step(lambda x: factor * x))(W, ROWS)  # noqa: B023
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5), found, wanted)


def test_a_stage_on_another_mesh_is_refused():
  def text_of(layer):
    with pytest.raises(MeshError) as error:
      STAGES.pipeline_jit(pipelined_step(layer)).trace(W, ROWS)
    return set(without_lines(error).splitlines())

  fix = (
    "Fix: build the model on the layout's mesh, layout.mesh, and shard nothing over its axis of stages; or give a "
    'constraint a PartitionSpec alone, and a shard_map no mesh: each stage is a program on a mesh of its own.'
  )
  stage, line = "{'stage': 1, 'data': 4}", 'foreign_meshes_test.py:N is on the mesh'
  over_all = f"{line} {{'stage': 2, 'data': 4}}; the mesh of a stage is {stage}."
  over_stages = lambda x: doubled(x, 'stage', mesh=STAGES.mesh)
  assert text_of(over_stages) == {f'The shard_map at {over_all}', fix}
  over_stages = lambda x: jitted(x, STAGES.mesh, 'stage')
  assert text_of(over_stages) == {f"The jit P('stage',) at {over_all}", fix}

  def over_all_axes(x):
    """A mean over all devices: on the mesh of a stage alone it would be a half of it."""
    mean = lambda x: jax.lax.psum(x, STAGES.mesh.axis_names) / STAGES.mesh.size
    return (
      x
      + jax.shard_map(mean, mesh=STAGES.mesh, in_specs=P('data'), out_specs=P(), check_vma=False)(
        x
      ).mean()
    )

  with pytest.raises(
    AxisNameError, match=r"^The axis name 'stage' is not bound, but foreign_meshes_test.py:\d+ "
  ):
    STAGES.pipeline_jit(pipelined_step(over_all_axes)).trace(W, ROWS)
  other = f"{line} {{'data': 2, 'model': 4}}; the mesh of a stage is {{'data': 4}}."
  assert text_of(constrained) == {f'The constraint P() at {other}', fix}
  in_where = lambda x: jnp.where(x > 0, constrained(x), 1.0)  # JAX's own error names no line
  assert text_of(in_where) == {f'The operation at {other}', fix}
  of_rank = Mesh(STAGES.mesh.devices[:1], STAGES.mesh.axis_names)
  assert text_of(lambda x: constrained(x, of_rank, 'data')) == {
    f"The constraint P('data',) at {line} {{'data': 4}} of given devices, not of those of each rank; the mesh of a stage "
    "is {'data': 4}.",
    fix,
  }


def test_a_stage_asks_its_mesh_for_the_platform_of_its_devices():
  """As MaxText's attention does. `init` runs the function on the mesh of each rank, too."""
  layout = spmd.Layout({'stage': 2, 'data': 4}, (('batch', 'data'),))
  x = jnp.arange(32.0).reshape(8, 4) / 32

  def platform():
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.devices[(0,) * mesh.devices.ndim].platform

  def create():
    return {'first': jnp.eye(4), 'second': jnp.full((4, 4), {'cpu': 2.0}[platform()])}

  def predict(w, x):
    return stage_end(jnp.tanh(x @ w['first'])) @ w['second'] * {'cpu': 3.0}[platform()]

  w = {'first': jnp.eye(4), 'second': jnp.full((4, 4), 2.0)}
  step = layout.pipeline_jit(predict)
  created = step.compile(layout.abstract(lambda: w), x).init(create)
  np.testing.assert_allclose(step(created, x), 3 * (jnp.tanh(x) @ w['second']), 1e-5)
  with pytest.raises(ValueError, match='AbstractMesh does not implement devices'):
    _ = layout.mesh.abstract_mesh.devices


# -- shard_map, for which JAX's own error names no line


def mapped(mesh):
  return jax.shard_map(lambda x: jax.lax.psum(x, 'data'), mesh=mesh, in_specs=P('data'), out_specs=P())


def test_a_shard_map_on_another_mesh_is_refused_with_its_line():
  with pytest.raises(MeshError) as error:
    LAYOUT.jit(lambda x: mapped(OTHER)(x))(jnp.ones(X.shape))
  assert without_lines(error) == (
    "The shard_map at foreign_meshes_test.py:N is on the mesh {'data': 2, 'model': 4}; the layout's mesh is "
    "{'data': 8, 'model': 1}." + FIX
  )


def test_a_shard_map_on_devices_of_this_machine_is_refused_on_an_abstract_mesh():
  abstract = LAYOUT.replace(mesh=spmd.abstract_mesh({'data': 2, 'model': 4}))
  with pytest.raises(MeshError) as error:
    abstract.jit(lambda x: mapped(OTHER)(x)).trace(X)
  assert without_lines(error) == (
    "The shard_map at foreign_meshes_test.py:N is on the mesh {'data': 2, 'model': 4} of the devices of this "
    "machine, not of a target; the layout's mesh is {'data': 2, 'model': 4}." + FIX
  )


def test_a_shard_map_on_the_mesh_of_the_layout_runs():
  assert LAYOUT.jit(mapped(LAYOUT.mesh))(jnp.ones(X.shape))[0, 0] == 8
  abstract = LAYOUT.replace(mesh=spmd.abstract_mesh({'data': 2, 'model': 4}))
  assert abstract.jit(mapped(abstract.mesh)).eval_shape(X).shape == (8, 8)


def test_other_errors_of_a_step_stay_as_they_are():
  def step(x):
    raise ValueError('a mesh of mine')

  with pytest.raises(ValueError, match=r'^a mesh of mine'):
    LAYOUT.jit(step)(jnp.ones(8))


# -- meshes that are not foreign


def test_axes_of_one_device_make_no_difference():
  twelve = spmd.make_mesh({'pod': 1, 'data': 8, 'fsdp': 1, 'model': 1, 'expert': 1})
  for mesh in (spmd.make_mesh({'data': 8}), twelve):
    step = LAYOUT.jit(functools.partial(lambda x, mesh: constrained(x, mesh, 'data'), mesh=mesh))
    assert step(jnp.ones(X.shape)).sharding.shard_shape(X.shape) == (2, 8)
  abstract = spmd.Layout(spmd.abstract_mesh({'data': 8}))
  assert abstract.jit(lambda x: constrained(x, twelve, 'data')).eval_shape(X).shape == X.shape


def test_a_mesh_with_names_of_its_own_is_a_view_of_the_same_devices():
  view = spmd.make_mesh({'rows': 4, 'columns': 2})
  y = LAYOUT.jit(lambda x: 2 * constrained(x, view, 'rows', 'columns'))(jnp.ones(X.shape))
  np.testing.assert_array_equal(y, 2 * np.ones(X.shape))


def test_a_view_is_refused_where_devices_are_absent():
  abstract = spmd.Layout(spmd.abstract_mesh({'data': 8}))
  view = spmd.make_mesh({'rows': 8})
  with pytest.raises(MeshError, match=r"is on the mesh {'rows': 8}; the layout's mesh is {'data': 8}\."):
    abstract.jit(lambda x: constrained(x, view, 'rows')).trace(X)


def test_a_mesh_of_one_device_is_described_with_its_axes():
  layout = spmd.Layout(spmd.make_mesh({'data': 1, 'model': 1}, devices=jax.devices()[:1]))
  with pytest.raises(MeshError) as error:
    layout.jit(lambda x: jax.device_put(x, NamedSharding(OTHER, P())))(jnp.ones(X.shape))
  assert without_lines(error) == (
    "The device_put P() at foreign_meshes_test.py:N is on the mesh {'data': 2, 'model': 4}; the layout's mesh is "
    "{'data': 1, 'model': 1}." + FIX
  )


def test_the_same_devices_in_another_order_are_another_mesh():
  turned = Mesh(LAYOUT.mesh.devices[::-1], ('data', 'model'))
  with pytest.raises(MeshError) as error:
    LAYOUT.jit(lambda x: constrained(x, turned, 'data'))(jnp.ones(X.shape))
  assert without_lines(error) == (
    "The constraint P('data',) at foreign_meshes_test.py:N is on the mesh {'data': 8} of other devices, or of "
    "the same in another order; the layout's mesh is {'data': 8}." + FIX
  )


def test_the_function_of_another_layout_is_named_by_its_own_constraints():
  inner = spmd.Layout(OTHER).jit(lambda x: constrained(x, OTHER, 'data'))
  with pytest.raises(MeshError) as error:
    LAYOUT.jit(lambda x: 2 * inner(x))(jnp.ones(X.shape))
  assert without_lines(error) == (
    "The constraint P('data',) at foreign_meshes_test.py:N is on the mesh {'data': 2, 'model': 4}; "
    "the layout's mesh is {'data': 8, 'model': 1}." + FIX
  )


def test_the_same_axes_of_another_type_are_another_mesh():
  explicit = spmd.make_mesh({'data': 8, 'model': 1}, axis_types=AxisType.Explicit)  # jax.make_mesh's own
  mapped = jax.shard_map(lambda x: 2 * x, mesh=explicit, in_specs=P('data'), out_specs=P('data'))
  with pytest.raises(MeshError) as error:
    LAYOUT.jit(lambda x: mapped(x))(jnp.ones(X.shape))
  assert without_lines(error) == (
    "The shard_map at foreign_meshes_test.py:N is on the mesh {'data': 8} with axis types Explicit, Explicit; "
    "the layout's mesh is {'data': 8}." + FIX
  )


def factorizations(devices, rank):
  sizes = itertools.product([1, 2, 4, 8], repeat=rank)
  return [each for each in sizes if math.prod(each) == devices]


@st.composite
def meshes(draw):
  names = draw(
    st.lists(st.sampled_from(['data', 'model', 'fsdp', 'expert']), min_size=1, max_size=3, unique=True)
  )
  return dict(zip(names, draw(st.sampled_from(factorizations(8, len(names)))), strict=True))


def positions(mesh, axis):
  """The position of each device along an axis."""
  at = np.moveaxis(np.arange(8).reshape(tuple(mesh.values())), list(mesh).index(axis), 0)
  return {int(device): row for row, devices in enumerate(at) for device in devices.flat}


@given(meshes(), meshes())
def test_an_axis_of_one_name_has_to_be_the_same_axis_of_devices(sizes, others):
  layout, other = spmd.Layout(spmd.make_mesh(sizes)), spmd.make_mesh(others)
  shared = set(sizes) & set(others)
  is_view = all(positions(sizes, axis) == positions(others, axis) for axis in shared)
  traced = layout.jit(lambda x: constrained(x, other, next(iter(others)))).trace
  if is_view:
    traced(X)
  else:
    with pytest.raises(MeshError, match='is on the mesh'):
      traced(X)


def test_explicit_axes_are_compared_too():
  mesh = spmd.make_mesh({'data': 8}, axis_types=AxisType.Explicit)
  layout = spmd.Layout(mesh)
  assert layout.jit(lambda x: jax.sharding.reshard(x, P('data')))(jnp.ones(8)).sharding.spec == P('data')


# -- the devices of an abstract mesh


def test_the_devices_of_an_abstract_mesh_are_refused_with_the_line():
  abstract = spmd.Layout(spmd.abstract_mesh({'data': 8}))

  def step(x):
    return x * abstract.mesh.devices.size

  with pytest.raises(MeshError) as error:
    abstract.jit(step).trace(X)
  assert without_lines(error) == dedent("""\
    The program at foreign_meshes_test.py:N uses devices of the mesh {'data': 8}, which is abstract: it has axes, and no devices.
    Fix: use the axes (mesh.shape, mesh.size, mesh.axis_names), or a layout on concrete devices.""")
