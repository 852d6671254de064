"""Models that hold a mesh, in MaxText's style, compared under several layouts: built anew for each."""

import functools
import json
import re
from textwrap import dedent

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import cli
from flax_spmd.errors import EstimatorError, MeshError, SearchError
from flax_spmd.explore import Estimator, Pipeline, TrainStep, compare, search
from flax_spmd.pipeline import OneFOneB, accumulate, stage_end

TOKENS, EMBED, MLP, EXPERTS, TARGET = 64, 16, 32, 4, 'cpu:8'
RULES = (
  ('batch', ('data', 'fsdp', 'expert')),
  ('embed', 'fsdp'),
  ('mlp', 'tensor'),
  ('exp', 'expert'),
)
MESHES = {
  'fsdp': {'data': 1, 'fsdp': 8, 'tensor': 1, 'expert': 1},
  'tensor': {'data': 2, 'fsdp': 1, 'tensor': 4, 'expert': 1},
  'expert': {'data': 1, 'fsdp': 2, 'tensor': 1, 'expert': 4},
}
X = jax.ShapeDtypeStruct((TOKENS, EMBED), jnp.float32)


def layouts(make=spmd.abstract_mesh):
  return {name: spmd.Layout(make(sizes), RULES) for name, sizes in MESHES.items()}


class Dense(nn.Module):
  """A block whose activations are constrained over the mesh that the module holds."""

  mesh: object
  rules: tuple = RULES

  def shard(self, x, *names):
    spec = nn.logical_to_mesh_axes(names, self.rules)
    return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

  @nn.compact
  def __call__(self, x):
    weight = functools.partial(self.param)
    up = weight('up', named('embed', 'mlp'), (EMBED, MLP))
    down = weight('down', named('mlp', 'embed'), (MLP, EMBED))
    h = self.shard(nn.relu(x @ spmd.unbox(up)), 'batch', 'mlp')
    return x + self.shard(h @ spmd.unbox(down), 'batch', None)


class Experts(Dense):
  """Sparse experts: tokens go to the devices of their experts and back, in a `shard_map` over the whole mesh."""

  @nn.compact
  def __call__(self, x):
    platform = self.mesh.devices.flat[0].platform  # MaxText chooses its kernels by it
    router = spmd.unbox(self.param('router', named('embed', None), (EMBED, EXPERTS)))
    wi = spmd.unbox(self.param('wi', named('exp', 'embed', 'mlp'), (EXPERTS, EMBED, MLP)))
    wo = spmd.unbox(self.param('wo', named('exp', 'mlp', 'embed'), (EXPERTS, MLP, EMBED)))
    batch = ('data', 'fsdp', 'expert')
    specs = P(batch), P(), P('expert', None, 'tensor'), P('expert', 'tensor', None)
    mapped = jax.shard_map(sparse, mesh=self.mesh, in_specs=specs, out_specs=P(batch), check_vma=False)
    return super().__call__(x) + mapped(x, router, wi, wo) * (1.0 if platform == 'cpu' else 2.0)


def sparse(x, router, wi, wo):
  """The shard of a block of experts, with all tokens of an expert on its devices."""
  tokens = jax.lax.all_gather(x, 'expert', tiled=True)
  weights = jax.nn.softmax(tokens @ router)
  first = jax.lax.axis_index('expert') * wi.shape[0]
  mine = jax.lax.dynamic_slice_in_dim(weights, first, wi.shape[0], axis=1)
  sizes = jnp.full((wi.shape[0],), tokens.shape[0], jnp.int32)
  every = jnp.tile(tokens, (wi.shape[0], 1))
  h = nn.relu(jax.lax.ragged_dot(every, wi, sizes))
  out = jax.lax.ragged_dot(h, wo, sizes).reshape(wi.shape[0], *tokens.shape)
  out = jax.lax.psum(jnp.einsum('etd,te->td', out, mine), 'tensor')
  return jax.lax.psum_scatter(out, 'expert', tiled=True)


def named(*names):
  return nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)


def train_step_of(layout, block=Experts, batch=X):
  model, tx = block(layout.mesh, layout.rules.pairs), optax.adam(1e-3)

  def create():
    params = model.init(jax.random.key(0), jnp.ones(batch.shape))['params']
    return TrainState.create(apply_fn=None, params=params, tx=tx)

  def step(state, x):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(model.apply({'params': p}, x) ** 2))(
      state.params
    )
    return state.apply_gradients(grads=grads), loss

  return TrainStep(step, create, batch)


dense_of = functools.partial(train_step_of, block=Dense)


def figures(outcome):
  collectives = [
    (one.kind, one.axes, one.group, one.bytes, one.times) for one in outcome.counts.collectives
  ]
  return outcome.memory, outcome.counts.flops, collectives


@pytest.mark.parametrize('make', [pytest.param(train_step_of, marks=pytest.mark.exhaustive), dense_of])
def test_each_row_is_that_of_a_model_built_for_its_mesh(make):
  together = compare(make, layouts(), TARGET)
  assert [one.error for one in together] == [None] * 3
  for name, layout in layouts(spmd.make_mesh).items():
    train_step = make(layout)
    state, x = layout.abstract(train_step.create), layout.sharding(X, ('batch', None))
    batch = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=x)
    stats = layout.jit(train_step.step, donate_argnums=0).lower(state, batch).compile().memory_analysis()
    memory = together[name].memory
    assert memory.peak == (
      stats.argument_size_in_bytes
      + stats.output_size_in_bytes
      - stats.alias_size_in_bytes
      + stats.temp_size_in_bytes
    )
    assert figures(compare(make, {name: layout}, TARGET)[name]) == figures(together[name])
  assert len({one.memory.peak for one in together}) == 3


def test_a_model_of_one_layout_is_an_error_in_the_rows_of_the_others():
  built = {name: dense_of(layout) for name, layout in layouts(spmd.make_mesh).items()}
  rows = compare(built['tensor'], layouts(), TARGET)
  assert [one.error is None for one in rows] == [False, True, False]
  lines = rows['fsdp'].error.splitlines()
  assert lines[0].endswith(
    "is on the mesh {'data': 2, 'fsdp': 1, 'tensor': 4}; the layout's mesh is {'data': 1, 'fsdp': 8, 'tensor': 1}."
  )
  assert lines[0].startswith('The constraint P((') and 'own_mesh_test.py:' in lines[0]
  assert lines[-1] == (
    "Fix: build the model on the layout's mesh, layout.mesh. For compare, search and Estimator, pass a function that "
    'builds it for a layout: lambda layout: TrainStep(...).'
  )
  with pytest.raises(MeshError, match='is on the mesh'):
    compare(built['tensor'], {'fsdp': layouts()['fsdp']}, TARGET)


@pytest.mark.slow
def test_the_same_function_trains():
  losses = {}
  for name, layout in layouts(spmd.make_mesh).items():
    train_step = train_step_of(layout)
    state, x = layout.init(train_step.create), layout.shard(jnp.ones(X.shape), ('batch', None))
    losses[name] = float(layout.jit(train_step.step)(state, x)[1])
  assert losses['tensor'] == pytest.approx(losses['fsdp'], rel=1e-5)
  assert losses['expert'] == pytest.approx(losses['fsdp'], rel=1e-5)


def constrained_by_axes(layout):
  """A step whose constraints have mesh axes, and no mesh, in EasyLM's style."""
  del layout

  def step(state, x):
    def loss(params):
      h = jax.lax.with_sharding_constraint(
        nn.relu(x @ params['up']), P(('data', 'fsdp', 'expert'), 'tensor')
      )
      return jnp.mean((h @ params['down']) ** 2)

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value

  def create():
    params = {'up': jnp.ones((EMBED, MLP)), 'down': jnp.ones((MLP, EMBED))}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

  return TrainStep(step, create, X)


# -- the estimator and the search


def test_a_model_that_constrains_by_its_names_is_lowered_once_for_all_layouts():
  calls = []
  estimator = Estimator(lambda layout: calls.append(layout) or dense_of(layout), platform='cpu')
  made = len(calls)
  for name, layout in layouts().items():
    estimate = estimator.estimate(layout, spmd.explore.parse_target(TARGET))
    compiled = compare(dense_of, {name: layout}, TARGET)[name]
    assert estimate.memory.parameters == compiled.memory.parameters
    assert estimate.memory.optimizer == compiled.memory.optimizer
    assert estimate.counts.flops == pytest.approx(compiled.counts.flops, rel=0.05)
  assert made == len(calls) == 2  # on a mesh of one name, and on that of all names


@pytest.mark.new_jax  # older compilers add a kernel, and some hundred bytes
@pytest.mark.parametrize(
  'train_step', [train_step_of, constrained_by_axes], ids=['shard_map', 'constraint']
)
@pytest.mark.parametrize('target', ['h100:8', 'v5e:2x4'])
def test_a_step_with_mesh_axes_is_partitioned_for_each_layout(
  train_step, target, gpu_compiler, tpu_compiler
):
  estimator = Estimator(train_step, platform='cuda' if target == 'h100:8' else 'tpu')
  assert 'mesh axes itself' in estimator.reason and not estimator.names
  of_the_compiler = compare(train_step, layouts(), target)
  for name, layout in layouts().items():
    estimate, compiled = estimator.estimate(layout, target, partition=False), of_the_compiler[name]
    assert estimate.source == 'partitioned' and not estimate.doubts
    assert estimate.counts.flops == compiled.counts.flops
    assert estimate.counts.by_axis() == compiled.counts.by_axis()
    assert estimate.memory.peak == compiled.memory.peak
    assert estimate.memory._replace(temporaries=0) == compiled.memory._replace(temporaries=0)
  with pytest.raises(
    EstimatorError, match=r'^The step uses mesh axes itself.*\nFix: choose the layouts'
  ):
    estimator.estimate(layouts()['fsdp'], 'cpu:8')


def test_a_kernel_of_unknown_costs_is_a_doubt(tpu_compiler):
  pallas = pytest.importorskip('jax.experimental.pallas')

  def doubled(x, out):
    out[...] = 2 * x[...]

  def of(layout):
    kernel = lambda x: pallas.pallas_call(doubled, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
    mapped = jax.shard_map(
      kernel, mesh=layout.mesh, in_specs=P('data'), out_specs=P('data'), check_vma=False
    )
    return TrainStep(lambda w, x: (w, jnp.sum(mapped(x) @ w)), lambda: jnp.ones((EMBED, EMBED)), X)

  layout = spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'),))
  estimate = Estimator(of, platform='tpu').estimate(layout, 'v5e:2x4')
  assert estimate.doubts == ('the costs of the kernel tpu_custom_call are unknown',)


def test_a_search_partitions_a_step_with_mesh_axes(gpu_compiler):
  result = search(constrained_by_axes, 'h100:8', mesh=MESHES['fsdp'], candidates=12, top=1)
  assert result.best.source == 'compiled:h100'
  assert {one.source for one in result.estimates} == {'partitioned'}
  assert any('partitioned for each candidate' in note for note in result.notes)
  assert 'Estimates checked against 1 compiled layout' in str(result)


@pytest.mark.slow
def test_a_search_builds_the_model_for_every_candidate():
  result = search(
    train_step_of, TARGET, mesh=MESHES['expert'], candidates=3, top=1, pin={'batch': ('data', 'fsdp')}
  )
  assert result.layout.mesh.shape == MESHES['expert'] and result.outcomes[0].source == 'compiled:cpu'


def test_choices_reach_the_function_that_builds_the_model():
  def of(layout, scale=1):
    train_step = dense_of(layout)
    sizes.add(scale)
    return train_step._replace(batch=jax.ShapeDtypeStruct((TOKENS * scale, EMBED), jnp.float32))

  sizes = set()
  search(of, TARGET, choices={'scale': (4, 2)}, mesh={'data': 8}, candidates=12, top=0)
  assert sizes == {2, 4}


def test_a_search_without_the_axes_of_the_model():
  with pytest.raises(SearchError) as error:
    search(train_step_of, TARGET, candidates=2, top=1)
  assert (
    str(error.value)
    == dedent("""\
    The model cannot be built without the mesh axes that it uses: ValueError: shard_map in_specs argument must refer to an axis marked as manual (frozenset({'all'})), but:
      in_specs[0] refers to 'data'
      in_specs[0] refers to 'fsdp'
      in_specs[0] refers to 'expert'
      in_specs[2] refers to 'expert'
      in_specs[2] refers to 'tensor'
      in_specs[3] refers to 'expert'
      in_specs[3] refers to 'tensor'
    Check the in_specs values passed to shard_map.
    Fix: pass mesh= or pin= to search, which name axes that each of its meshes has; a model that holds a mesh is built for each of these by a function of the layout, lambda layout: TrainStep(...).""")
  )


def test_a_search_over_logical_names_in_boxes_of_mesh_axes():
  """As in three of ten public files with `nn.with_partitioning`; it was refused."""

  def of(box, *names):
    params = lambda: {'v': box(jnp.ones((64, 256)), names), 'w': box(jnp.ones((256, 64)), names[::-1])}
    step = lambda w, x: (w, jnp.sum(jnp.tanh(x @ w['v'].unbox()) @ w['w'].unbox()))
    return TrainStep(step, params, jax.ShapeDtypeStruct((32, 64), jnp.float32))

  run = lambda *args, **options: search(of(*args), TARGET, candidates=12, top=1, **options)
  by_name, by_axis = (run(box, 'embed', 'mlp') for box in (nn.LogicallyPartitioned, nn.Partitioned))
  assert [one.name for one in by_axis.outcomes] == [one.name for one in by_name.outcomes]
  assert by_axis.layout == by_name.layout.replace(missing_axis='drop')
  assert [one.memory for one in by_axis.outcomes] == [one.memory for one in by_name.outcomes]
  with pytest.raises(SearchError, match=r"'model' is not an axis of the mesh, which has \('all',\)"):
    run(nn.Partitioned, 'embed', 'model')  # a mesh of the search may have an axis of this name
  result = run(nn.Partitioned, 'embed', 'model', mesh={'data': 2, 'model': 4})
  assert all(dict(one.layout.rules.pairs).keys() <= {'batch', 'embed'} for one in result.outcomes)
  state = result.layout.abstract(of(nn.Partitioned, 'embed', 'model').create)
  assert [w.value.sharding.spec[dim] for dim, w in ((1, state['v']), (0, state['w']))] == ['model'] * 2


def test_a_search_over_the_axes_of_a_constraint_without_a_mesh():
  """As EasyLM and Praxis write them; a model's `init` has them, too."""

  def halved(x):
    return jax.lax.with_sharding_constraint(x / 2, P('data'))

  train_step = TrainStep(
    lambda w, x: (w, jnp.sum(halved(x) @ w)), lambda: halved(jnp.ones((EMBED, EMBED))), X
  )
  with pytest.raises(SearchError) as error:
    search(train_step, TARGET, candidates=2, top=1)
  assert (
    re.sub(r'test.py:\d+', 'test.py:1', str(error.value))
    == dedent("""\
    The model cannot be built without the mesh axes that it uses: MeshAxisError: The constraint P('data',) at own_mesh_test.py:1 uses mesh axis 'data', but the mesh is {'all': 1}.
    Fix: pass mesh= or pin= to search, which name axes that each of its meshes has; a model that holds a mesh is built for each of these by a function of the layout, lambda layout: TrainStep(...).""")
  )
  result = search(train_step, TARGET, mesh={'data': -1}, candidates=2, top=1)
  assert result.layout.mesh.shape == {'data': 8} and result.outcomes[0].source == 'compiled:cpu'


def test_a_search_over_the_mesh_on_which_a_model_creates_its_state():
  mesh = spmd.abstract_mesh({'data': 8})
  doubled = jax.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=P('data'), out_specs=P('data'))
  train_step = TrainStep(lambda w, x: (w, jnp.sum(x @ w)), lambda: doubled(jnp.ones((EMBED, EMBED))), X)
  result = search(train_step, TARGET, mesh={'data': -1}, candidates=2, top=1)
  assert result.layout.mesh.shape == {'data': 8} and result.outcomes[0].source == 'compiled:cpu'
  with pytest.raises(SearchError) as error:
    search(train_step, TARGET, mesh={'data': 4, 'model': 2}, candidates=2, top=1)
  assert (
    re.sub(r'test.py:\d+', 'test.py:1', str(error.value))
    == dedent("""\
    The model cannot be built on the mesh {'data': 4, 'model': 2}: MeshError: The shard_map at own_mesh_test.py:1 is on the mesh {'data': 8}; the layout's mesh is {'data': 4, 'model': 2}.
    Fix: pass mesh= or pin= to search, which name axes that each of its meshes has; a model that holds a mesh is built for each of these by a function of the layout, lambda layout: TrainStep(...).""")
  )


def test_a_search_builds_a_model_that_asks_for_the_platform():
  def of(layout):
    platforms.add(layout.mesh.devices.flat[0].platform)
    return dense_of(layout)

  platforms = set()
  assert search(of, TARGET, mesh={'data': 8}, candidates=2, top=0).layout is not None
  assert platforms == {'cpu'}


# -- the command line


def of_a_platform(layout):
  assert layout.mesh.devices.flat[0].platform == 'cpu'
  return dense_of(layout)


def test_a_command_builds_the_model_for_each_layout_file(tmp_path, capsys):
  for name, layout in layouts().items():
    (tmp_path / f'{name}.toml').write_text(layout.to_toml())
  files = sorted(map(str, tmp_path.glob('*.toml')))
  assert cli.main(['compare', f'{__name__}:dense_of', *files, '--target', TARGET, '--json']) == 0
  printed = {each['name']: each['memory'] for each in json.loads(capsys.readouterr().out)['layouts']}
  assert printed == {one.name: one.memory._asdict() for one in compare(dense_of, layouts(), TARGET)}
  assert cli.main(['explain', f'{__name__}:dense_of', files[0]]) == 0
  assert 'params/up' in capsys.readouterr().out
  assert cli.main(['explain', f'{__name__}:of_a_platform', files[0]]) == 0


# -- pipelines


def test_a_stage_is_built_on_the_mesh_of_a_rank():
  seen = []

  def of(layout):
    seen.append(dict(layout.mesh.shape))
    shard = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(layout.mesh, P('data')))

    def step(w, batch):
      def loss(w, x):
        x = stage_end(jnp.tanh(shard(x @ w['first'])))
        return jnp.mean(shard(x @ w['second']) ** 2)

      grads = accumulate(lambda x: jax.grad(loss)(w, x), batch, OneFOneB(2))
      return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads)

    create = lambda: {'first': jnp.ones((EMBED, EMBED)), 'second': jnp.ones((EMBED, EMBED))}
    batch = jax.ShapeDtypeStruct((4, TOKENS, EMBED), jnp.float32)
    return TrainStep(step, create, batch, placements=(None, 'batch', None))

  layout = spmd.Layout(spmd.abstract_mesh({'stage': 2, 'data': 4}), (('batch', 'data'),))
  [outcome] = compare(of, {'1F1B': Pipeline(layout, OneFOneB(2))}, TARGET)
  assert outcome.error is None and len(outcome.pipeline.ranks) == 2
  assert seen == [{'stage': 2, 'data': 4}, {'stage': 1, 'data': 4}]


# -- bad input


def test_a_function_that_returns_something_else():
  def of(layout):
    return layout.mesh

  with pytest.raises(TypeError) as error:
    compare(of, layouts(), TARGET)
  assert str(error.value) == dedent("""\
    of, which was passed in place of a TrainStep, returned AbstractMesh for a layout.
    Fix: return TrainStep(step, create, batch), with TrainStep from flax_spmd.explore.""")


def test_the_devices_of_a_target_have_a_platform_and_nothing_else():
  def of(layout):
    return TrainStep(lambda s, x: (s, layout.mesh.devices.flat[0].device_kind), dict, X)

  with pytest.raises(AttributeError, match=r"'TargetDevice' object has no attribute 'device_kind'"):
    compare(of, layouts(), TARGET)


def test_outside_of_a_comparison_abstract_meshes_have_no_devices():
  compare(dense_of, {'fsdp': layouts()['fsdp']}, TARGET)
  with pytest.raises(ValueError, match=r'^AbstractMesh does not implement devices$'):
    _ = spmd.abstract_mesh({'data': 8}).devices
