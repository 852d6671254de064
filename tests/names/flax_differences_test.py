"""Differences from Flax: faults of `flax.linen.spmd`, reproduced, and our behaviour beside them.

Each test first shows a fault of the installed Flax, so that a release that repairs it is noticed, and then
runs the same program with this library. The faults were reported by users (`flax#2938` is an issue of
google/flax, `maxtext#4208` one of AI-Hypercomputer/maxtext) or found while this library was written.
"""

import os
import pickle
import subprocess
import sys
import types
import warnings
from textwrap import dedent

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.errors import PartitioningUnspecifiedError
from flax.linen import spmd as flax_functions
from flax.nnx import bridge
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

import flax_spmd as spmd

KEY = jax.random.key(0)
X = jnp.linspace(-1.0, 1.0, 64).reshape(8, 8)
RULES = (('batch', 'data'), ('mlp', 'model'))
OTHER_RULES = (('batch', 'model'), ('mlp', 'data'))


def wave(key, shape, dtype=jnp.float32):
  """An initializer that compiles quickly."""
  return jnp.cos(jnp.arange(np.prod(shape), dtype=dtype)).reshape(shape)


def named(names, lib=spmd, **options):
  return lib.with_logical_partitioning(wave, names, **options)


class MLP(nn.Module):
  """Two layers with names for parameters and activations; `lib` provides boxes and constraints."""

  lib: types.ModuleType = spmd
  width: int = 16

  @nn.compact
  def __call__(self, x):
    w = self.param('w', named(('embed', 'mlp'), self.lib), (x.shape[-1], self.width))
    v = self.param('v', named(('mlp', 'embed'), self.lib), (self.width, x.shape[-1]))
    y = self.lib.with_logical_constraint(jnp.tanh(x @ w), ('batch', 'mlp'))
    return self.lib.with_logical_constraint(y @ v, ('batch', None))


def constraints(fn, *args):
  """The specs of all sharding constraints in a function."""
  equations = jax.make_jaxpr(fn)(*args).eqns
  return [
    equation.params['sharding'].spec for equation in equations if 'constraint' in str(equation.primitive)
  ]


# -- rules that change between calls


STALE = """
import flax.linen as nn, jax, numpy as np
{imports}
jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', 8)
mesh = jax.make_mesh((2, 4), ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2)

class Inner(nn.Module):
  def __call__(self, x):
    return nn.with_logical_constraint(2 * x, ('batch', 'mlp'))

plain = jax.jit(lambda x: Inner().apply({{}}, x))
model = nn.jit(Inner)()
for rules in {tables!r}:
  with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
    for run in (plain, lambda x: model.apply({{}}, x)):
      print(run(np.ones((8, 8), np.float32)).sharding.spec)
"""


@pytest.mark.parametrize('imports', ['', 'import flax_spmd'])
def test_flax_reuses_stale_traces_after_a_change_of_rules(imports):
  """Alone, and not in a program that imports this library: then the rules are part of JAX's cache key."""
  code = STALE.format(imports=imports, tables=(RULES, OTHER_RULES))
  environment = {key: value for key, value in os.environ.items() if key != 'XLA_FLAGS'}
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env=environment)
  second = P('model', 'data') if imports else P('data', 'model')
  assert done.stdout.splitlines() == [str(P('data', 'model'))] * 2 + [str(second)] * 2, done.stderr


def test_a_change_of_rules_takes_effect_under_jit_and_nn_jit(mesh):
  class Inner(nn.Module):
    lib: types.ModuleType

    def __call__(self, x):
      return self.lib.with_logical_constraint(2 * x, ('batch', 'mlp'))

  for constraints_of in (nn, spmd):
    model = nn.jit(Inner)(constraints_of)
    runs = [
      jax.jit(lambda x, model=model: model.apply({}, x)),
      lambda x, model=model: model.apply({}, x),
    ]
    for blocks_of in (nn, spmd):
      for rules, expected in ((RULES, P('data', 'model')), (OTHER_RULES, P('model', 'data'))):
        with jax.set_mesh(mesh), blocks_of.logical_axis_rules(rules):
          assert [run(X).sharding.spec for run in runs] == [expected, expected]


def test_constraints_of_flax_follow_our_layouts(mesh):
  def step(x):
    return nn.with_logical_constraint(2 * x, ('batch', 'mlp'))

  specs = [spmd.Layout(mesh, rules).jit(step)(X).sharding.spec for rules in (RULES, OTHER_RULES)]
  assert specs == [P('data', 'model'), P('model', 'data')]


# -- the mesh as a context (flax#2938, flax#3303)


def test_flax_ignores_constraints_under_a_bare_mesh(mesh):
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', DeprecationWarning)
    with mesh, nn.logical_axis_rules(RULES):
      assert constraints(lambda x: nn.with_logical_constraint(x, ('batch', 'mlp')), X) == []
      with pytest.raises(RuntimeError, match='mesh'):
        jax.jit(lambda x: x, out_shardings=P('data'))(X)
      with pytest.raises(spmd.errors.MeshError) as error:
        constraints(lambda x: spmd.with_logical_constraint(x, ('batch', 'mlp')), X)
  assert str(error.value) == (
    "There is no mesh for the logical names ('batch', 'mlp'). (A bare `with mesh:` does not "
    'set one: JAX ignores it here.)\n'
    'Fix: run it under `with layout:` or through `layout.jit`, under `with jax.set_mesh(mesh):`, or '
    'pass mesh=.'
  )
  assert not hasattr(jax.sharding, 'use_mesh')
  with spmd.Layout(mesh, RULES):
    assert constraints(lambda x: spmd.with_logical_constraint(x, ('batch', 'mlp')), X) == [
      P('data', 'model')
    ]


# -- Explicit axes (flax#5070, maxtext#4208)


@pytest.mark.parametrize(
  'axis_types, failure',
  [(AxisType.Explicit, AssertionError), ({'model': AxisType.Explicit}, (AssertionError, ValueError))],
)
def test_flax_fails_on_explicit_meshes(axis_types, failure):
  mesh = spmd.make_mesh({'data': 2, 'model': 4}, axis_types=axis_types)
  with jax.set_mesh(mesh), nn.logical_axis_rules(RULES), pytest.raises(failure):
    jax.eval_shape(MLP(nn).init, KEY, X)

  layout = spmd.Layout(mesh, (('batch', 'data'), ('out', 'model')))

  class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
      w = self.param('w', named(('embed', 'out')), (8, 16))
      return spmd.with_logical_constraint(jnp.tanh(x @ w), ('batch', 'out'))

  variables = layout.init(Model().init, KEY, X)
  assert variables['params']['w'].value.sharding.spec == P(None, 'model')
  y = layout.jit(lambda v, x: Model().apply(v, x))(variables, X)
  assert y.sharding.spec == P('data', 'model')
  np.testing.assert_allclose(y, jnp.tanh(X @ wave(None, (8, 16))), rtol=1e-5)


# -- optimizer state whose shape differs from its parameter's


class TwoLayers(nn.Module):
  """An oblong kernel, a square one and a bias."""

  lib: types.ModuleType = spmd

  @nn.compact
  def __call__(self, x):
    w = self.param('w', named(('embed', 'mlp'), self.lib), (8, 16))
    v = self.param('v', named(('mlp', 'out'), self.lib), (16, 16))
    b = self.param('b', named(('out',), self.lib), (16,))
    return jnp.tanh(x @ w) @ v + b[None]


LAYERS = TwoLayers()
LAYERS_RULES = (('embed', 'data'), ('mlp', 'model'), ('out', 'data'))
SPECS = {'w': P('data', 'model'), 'v': P('model', 'data'), 'b': P('data')}

OPTIMIZERS = {
  'acprop': optax.contrib.acprop(0.1),
  'adabelief': optax.adabelief(0.1),
  'adadelta': optax.adadelta(0.1),
  'adafactor': optax.adafactor(0.1, min_dim_size_to_factor=4),
  'adafactor with momentum': optax.adafactor(0.1, min_dim_size_to_factor=4, momentum=0.9),
  'adafactor, unfactored': optax.adafactor(0.1),
  'adagrad': optax.adagrad(0.1),
  'adam': optax.adam(0.1),
  'adamax': optax.adamax(0.1),
  'adamaxw': optax.adamaxw(0.1),
  'adamw with a mask': optax.adamw(0.1, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)),
  'adan': optax.adan(0.1),
  'ademamix': optax.contrib.ademamix(0.1),
  'amsgrad': optax.amsgrad(0.1),
  'apply_if_finite': optax.apply_if_finite(optax.adam(0.1), 2),
  'chain with clip and ema': optax.chain(
    optax.clip_by_global_norm(1.0), optax.adam(0.1), optax.ema(0.9)
  ),
  'cocob': optax.contrib.cocob(0.1),
  'dadapt_adamw': optax.contrib.dadapt_adamw(0.1),
  'dog': optax.contrib.dog(0.1),
  'dowg': optax.contrib.dowg(0.1),
  'fromage': optax.fromage(0.1),
  **({'galore': optax.contrib.galore(0.1)} if hasattr(optax.contrib, 'galore') else {}),
  'inject_hyperparams': optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
  'lamb': optax.lamb(0.1),
  'lars': optax.lars(0.1),
  'lbfgs': optax.scale_by_lbfgs(memory_size=8),
  'lion': optax.lion(0.1),
  'masked': optax.masked(optax.adam(0.1), {'w': True, 'v': False, 'b': True}),
  'mechanize': optax.contrib.mechanize(optax.adam(0.1)),
  'multi_transform': optax.multi_transform(
    {'adam': optax.adam(0.1), 'adafactor': optax.adafactor(0.1, min_dim_size_to_factor=4)},
    {'w': 'adafactor', 'v': 'adafactor', 'b': 'adam'},
  ),
  'MultiSteps': optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
  'muon': optax.contrib.muon(0.1),
  'nadam': optax.nadam(0.1),
  'noisy_sgd': optax.noisy_sgd(0.1, key=jax.random.key(0)),
  'novograd': optax.novograd(0.1),
  'prodigy': optax.contrib.prodigy(0.1),
  'radam': optax.radam(0.1),
  'rmsprop': optax.rmsprop(0.1, centered=True, momentum=0.9),
  'rprop': optax.rprop(0.1),
  'schedule_free_adamw': optax.contrib.schedule_free_adamw(0.1),
  'sgd with momentum': optax.sgd(0.1, momentum=0.9),
  'sm3': optax.sm3(0.1),
  'yogi': optax.yogi(0.1),
}


LAYOUT_OF_LAYERS = spmd.abstract_mesh({'data': 2, 'model': 4}), LAYERS_RULES


def train_state(tx, model=LAYERS):
  return TrainState.create(apply_fn=model.apply, params=model.init(KEY, X)['params'], tx=tx)


def specs_by_path(layout, tree):
  return {row.path: row.spec for row in layout.rows(tree)}


def planned(name):
  """The spec of every array of a state, by path, and the findings of the layout."""
  layout = spmd.Layout(*LAYOUT_OF_LAYERS)
  state = layout.abstract(train_state, OPTIMIZERS[name])
  return specs_by_path(layout, state), layout.check(state)


@pytest.fixture(scope='module')
def trained():
  """States of all optimizers, before and after a training step, in one program each."""
  layout = spmd.Layout({'data': 2, 'model': 4}, LAYERS_RULES)

  def create():
    return {name: train_state(tx) for name, tx in OPTIMIZERS.items()}

  def step(states, x):
    grads = jax.grad(lambda params: jnp.mean(LAYERS.apply({'params': params}, x) ** 2))(
      states['adam'].params
    )
    return {name: state.apply_gradients(grads=grads) for name, state in states.items()}

  before = layout.init(create)
  quick_to_compile = {'xla_backend_optimization_level': 0}
  return before, layout.jit(step, compiler_options=quick_to_compile)(before, X)


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_every_optimizer_is_planned(name):
  """Every spec fits its array: `shard_shape` raises for a sharding that does not divide the shape."""
  layout = spmd.Layout(*LAYOUT_OF_LAYERS)
  state = layout.abstract(train_state, OPTIMIZERS[name])
  shards = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(state)]
  assert shards[1:4] == [(8,), (4, 8), (4, 4)]  # b, v and w
  for row in layout.rows(state):
    if row.path.endswith('/w') and row.shape == (8, 16):
      assert row.spec == P('data', 'model')


@pytest.mark.new_jax
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_every_optimizer_trains(name, trained):
  before, after = (states[name] for states in trained)
  assert after.step == 1
  assert jax.tree.map(lambda array: array.sharding, after) == jax.tree.map(
    lambda array: array.sharding, before
  )
  expected, _ = planned(name)
  assert [array.sharding.spec for array in jax.tree.leaves(after)] == list(expected.values())


def expected_specs(name, expected):
  """Asserts the specs at these paths; every other array has its parameter's shape, or is a scalar."""
  specs, findings = planned(name)
  prefix = 'opt_state/'
  assert {path: specs[prefix + path] for path in expected} == expected
  for path, spec in specs.items():
    if path.removeprefix(prefix) not in expected:
      name = path.rsplit('/', 1)[-1]
      assert spec == {'w': P('data', 'model'), 'v': P('model', 'data'), 'b': P('data')}.get(name, P()), (
        path
      )
  return findings


@pytest.mark.parametrize('name', ['adafactor', 'adafactor with momentum'])
def test_specs_of_adafactor(name):
  """Rows drop the largest dimension, columns the second largest, also for a square kernel."""
  findings = expected_specs(
    name,
    {
      '0/v_row/w': P('data'), '0/v_col/w': P('model'), '0/v/w': P(None),
      '0/v_row/v': P('model'), '0/v_col/v': P('data'), '0/v/v': P(None),
      '0/v_row/b': P(None), '0/v_col/b': P(None),
    },
  )  # fmt: skip
  assert not findings.of('not inferred')


def test_specs_of_sm3():
  """A list of one vector per dimension; those of a square kernel are ambiguous and reported."""
  findings = expected_specs(
    'sm3', {'0/mu/w/0': P('data'), '0/mu/w/1': P('model'), '0/mu/v/0': P(), '0/mu/v/1': P()}
  )
  assert str(findings.of('not inferred')) == '\n'.join(
    f'opt_state/0/mu/v/{dim}: shape (16,) follows from the shape of params/v in more than one way; '
    'it is replicated.'
    for dim in (0, 1)
  )


def test_specs_of_novograd():
  findings = expected_specs('novograd', {'0/nu/w': P(), '0/nu/v': P(), '0/nu/b': P()})
  assert not findings.of('not inferred')


def test_specs_of_lbfgs():
  """The first dimension is the history: it never gets the axis of the parameter's first dimension."""
  history = {'w': P(None, 'data', 'model'), 'v': P(None, 'model', 'data'), 'b': P(None, 'data')}
  findings = expected_specs(
    'lbfgs',
    {
      f'{memory}/{name}': spec
      for memory in ('diff_params_memory', 'diff_updates_memory')
      for name, spec in history.items()
    },
  )
  assert not findings.of('not inferred')


@pytest.mark.parametrize('name', ['adam', 'adafactor', 'sm3', 'novograd', 'lbfgs'])
def test_drop_in_functions_agree_with_the_layout(name, mesh):
  state = jax.eval_shape(lambda: train_state(OPTIMIZERS[name]))
  expected = jax.tree.leaves(spmd.Layout(mesh, LAYERS_RULES).sharding(state))
  specs = spmd.get_partition_spec(state)
  assert jax.tree.leaves(spmd.logical_to_mesh_sharding(specs, mesh, LAYERS_RULES)) == expected
  with spmd.logical_axis_rules(LAYERS_RULES):
    assert jax.tree.leaves(spmd.get_sharding(state, mesh)) == expected


@pytest.mark.parametrize('name', ['adafactor', 'sm3', 'novograd'])
def test_flax_gives_specs_that_do_not_fit(name, mesh):
  state = jax.eval_shape(lambda: train_state(OPTIMIZERS[name], TwoLayers(nn)))
  shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(state), mesh, LAYERS_RULES)
  with pytest.raises(ValueError):
    jax.jit(lambda: train_state(OPTIMIZERS[name], TwoLayers(nn)), out_shardings=shardings)()


def test_flax_shards_the_history_of_lbfgs_over_the_wrong_axes():
  state = jax.eval_shape(lambda: train_state(OPTIMIZERS['lbfgs'], TwoLayers(nn)))
  specs = nn.logical_to_mesh(nn.get_partition_spec(state), LAYERS_RULES)
  assert state.opt_state.diff_params_memory['w'].value.shape == (8, 8, 16)
  assert specs.opt_state.diff_params_memory['w'] == P('data', 'model')


def test_specs_of_adafactor_for_scanned_kernels():
  def params():
    boxes = {
      'oblong': (('layers', 'embed', 'mlp'), (4, 8, 16)),
      'square': (('layers', 'mlp', 'embed'), (4, 16, 16)),
    }
    return {
      name: spmd.LogicallyPartitioned(jnp.ones(shape), names) for name, (names, shape) in boxes.items()
    }

  def create():
    return {'params': params(), 'opt_state': OPTIMIZERS['adafactor'].init(params())}

  layout = spmd.Layout(*LAYOUT_OF_LAYERS)
  specs = specs_by_path(layout, layout.abstract(create))
  assert {path: spec for path, spec in specs.items() if '/v_' in path} == {
    'opt_state/0/v_row/oblong': P(None, 'data'),
    'opt_state/0/v_col/oblong': P(None, 'model'),
    'opt_state/0/v_row/square': P(None, 'model'),
    'opt_state/0/v_col/square': P(None, 'data'),
  }


@pytest.mark.parametrize('shape', [(16, 16), (8, 8, 4, 4), (4, 8, 8), (8, 8, 8)])
def test_adafactor_keeps_the_dimensions_that_optax_keeps(shape):
  """Optax's sort of the sizes is unstable, so the dimensions that it keeps are measured.

  The gradient varies along one dimension at a time; a statistic that varies has kept that dimension.
  """
  tx = OPTIMIZERS['adafactor']

  @jax.jit
  def variation(grads):
    _, (factored, *_) = tx.update(grads, tx.init(grads), grads)
    return {field: jnp.ptp(getattr(factored, field)) for field in ('v_row', 'v_col')}

  kept = {'v_row': [], 'v_col': []}
  for dim, size in enumerate(shape):
    ramp = np.arange(1.0, 1.0 + size, dtype=np.float32).reshape([-1] + [1] * (len(shape) - 1 - dim))
    for field, varies in variation(np.broadcast_to(ramp, shape)).items():
      if varies > 1e-6:
        kept[field].append(dim)

  layout = spmd.Layout(
    spmd.abstract_mesh(dict.fromkeys('wxyz', 1)), tuple(zip('abcd', 'wxyz', strict=True))
  )
  box = spmd.LogicallyPartitioned(jax.ShapeDtypeStruct(shape, jnp.float32), tuple('abcd'[: len(shape)]))
  state = jax.eval_shape(lambda w: {'params': {'w': w}, 'opt': tx.init({'w': w})}, box)
  specs = specs_by_path(layout, state)
  for field, dims in kept.items():
    assert len(dims) == len(shape) - 1
    assert specs[f'opt/0/{field}/w'] == P(*('wxyz'[dim] for dim in dims))


def test_states_of_two_train_states_do_not_mix():
  """A generator and a discriminator have the same paths and names, but different sizes."""

  def create():
    return {
      name: train_state(optax.adafactor(0.1, min_dim_size_to_factor=4, momentum=0.9), MLP(width=width))
      for name, width in (('generator', 16), ('discriminator', 32))
    }

  layout = spmd.Layout(*LAYOUT_OF_LAYERS)
  state = layout.abstract(create)
  specs = specs_by_path(layout, state)
  for name in ('generator', 'discriminator'):
    assert specs[f'{name}/opt_state/0/v_row/w'] == P('data')
    assert specs[f'{name}/opt_state/0/v_col/w'] == P('model')
    assert specs[f'{name}/opt_state/4/ema/w'] == P('data', 'model')
  assert not layout.check(state).of('not inferred')


def test_parameters_in_lists_do_not_mix():
  def create():
    params = [
      {'w': spmd.LogicallyPartitioned(jnp.ones((8, width)), ('embed', 'mlp'))} for width in (16, 32)
    ]
    return {'params': params, 'opt_state': optax.adam(0.1).init(params)}

  layout = spmd.Layout(*LAYOUT_OF_LAYERS)
  state = layout.abstract(create)
  arrays = [row for row in layout.rows(state) if row.shape]
  assert [row.spec for row in arrays] == [P('data', 'model')] * 6
  assert not layout.check(state).of('not inferred')


def test_parameters_beside_lists_of_parameters_are_not_optimizer_state():
  tree = {
    'w': spmd.LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'mlp')),
    'blocks': [{'w': spmd.LogicallyPartitioned(jnp.ones((8, 32)), ('embed', 'mlp'))}],
  }
  assert spmd.Layout(*LAYOUT_OF_LAYERS).spec(tree) == {
    'w': P('data', 'model'),
    'blocks': [{'w': P('data', 'model')}],
  }


@pytest.mark.parametrize('name', ['adam', 'adafactor', 'sm3', 'novograd', 'lbfgs'])
def test_optimizer_state_without_its_parameters(name):
  """`opt_state = jit(tx.init)(params)`: some names cannot be inferred, and nothing is raised."""
  layout = spmd.Layout({'data': 2, 'model': 4}, LAYERS_RULES)
  params = layout.init(LAYERS.init, KEY, X)['params']
  opt_state = layout.jit(OPTIMIZERS[name].init)(params)
  for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
    if leaf.shape == (8, 16) and "['w']" in jax.tree_util.keystr(path):
      assert leaf.sharding.spec == P('data', 'model')


# -- typos (maxtext#1058, maxtext#1810)


def test_flax_replicates_a_mistyped_name_silently():
  names = ('batch', 'mpl')
  assert nn.logical_to_mesh_axes(names, RULES) == P('data', None)

  tree = {'params': {'w': spmd.LogicallyPartitioned(jax.ShapeDtypeStruct((8, 16), jnp.float32), names)}}
  layout = spmd.Layout({'data': 2, 'model': 4}, RULES)
  assert layout.spec(tree) == {'params': {'w': P('data', None)}}
  assert str(layout.check(tree)) == dedent("""\
    name 'mpl' has no rule and is replicated (1 array: params/w). Did you mean 'mlp'?
    mesh axis 'model' (4) is not used by this tree.""")
  with pytest.raises(spmd.errors.UnmatchedNameError) as error:
    layout.replace(unmatched='error').spec(tree)
  assert str(error.value) == dedent("""\
    params/w, dim 1 'mpl': no rule for this logical name (names ('batch', 'mpl')). Did you mean 'mlp'?
    Fix: correct the name, or add a rule for it; ('mpl', None) replicates it.""")


def test_flax_does_not_raise_for_unmatched_names_without_rules(mesh):
  with jax.set_mesh(mesh):
    fallback = flax_functions.RulesFallback.RAISE_ERROR
    assert constraints(lambda x: nn.with_logical_constraint(x, ('mpl',), fallback=fallback), X) == []
    with pytest.raises(spmd.errors.UnmatchedNameError, match="'mpl'"):
      fallback = spmd.RulesFallback.RAISE_ERROR
      constraints(lambda x: spmd.with_logical_constraint(x, ('mpl',), fallback=fallback), X)


# -- init (flax#4844)


def test_flax_replicates_parameters_in_a_jitted_init(mesh):
  init = nn.with_logical_partitioning(wave, ('embed', 'mlp'))
  with jax.set_mesh(mesh), nn.logical_axis_rules((('embed', 'data'), ('mlp', 'model'))):
    kernel = jax.jit(nn.Dense(32, kernel_init=init).init)(KEY, X)['params']['kernel'].value
  assert kernel.addressable_shards[0].data.nbytes == kernel.nbytes

  layout = spmd.Layout(mesh, (('embed', 'data'), ('mlp', 'model')))
  kernel = layout.init(nn.Dense(32, kernel_init=named(('embed', 'mlp'))).init, KEY, X)['params'][
    'kernel'
  ].value
  assert kernel.addressable_shards[0].data.nbytes == kernel.nbytes // 8


# -- conflicts (maxtext#4205)


def test_flax_drops_conflicting_axes_silently():
  rules = (('a', ('x', 'y')), ('b', ('y', 'z')))
  assert nn.logical_to_mesh_axes(('a', 'b'), rules) == P(('x', 'y'), None)

  tree = {'w': spmd.LogicallyPartitioned(jax.ShapeDtypeStruct((8, 8), jnp.float32), ('a', 'b'))}
  layout = spmd.Layout(spmd.abstract_mesh({'x': 2, 'y': 2, 'z': 2}), rules)
  assert layout.spec(tree) == {'w': P(('x', 'y'), None)}
  assert str(layout.check(tree).of('conflict')) == (
    "name 'b' is replicated: the axes of rule 1 ('b', ('y', 'z')) went to another dimension "
    '(1 array: w).'
  )
  with pytest.raises(spmd.errors.ConflictError) as error:
    layout.replace(conflict='error').spec(tree)
  assert str(error.value) == dedent("""\
    w, dim 1 'b': rule 1 ('b', ('y', 'z')) lost its mesh axes to dim 0 'a' (rule 0 ('a', ('x', 'y'))).
    Fix: add a fallback for 'b' after rule 1, such as ('b', None), or put its rule first.""")


# -- checkpoints (flax#3787, flax#3164, flax#5110)


def test_flax_cannot_map_shardings_over_a_boxed_restore_target(mesh):
  abstract = jax.eval_shape(MLP(nn).init, KEY, X)
  shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract), mesh, RULES)
  with pytest.raises((ValueError, AttributeError)):
    jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings)

  target = spmd.Layout(mesh, RULES).abstract(MLP().init, KEY, X)
  assert target['params']['w'].names == ('embed', 'mlp')
  assert target['params']['w'].value.sharding == NamedSharding(mesh, P(None, 'model'))
  assert target['params']['w'].value.shape == (8, 16)


def test_a_restore_target_without_shardings_takes_those_of_the_file(tmp_path, mesh):
  layout = spmd.Layout(mesh, RULES)
  variables = layout.init(MLP().init, KEY, X, boxed=False)
  bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), variables)

  ocp.save(tmp_path / 'orbax', variables)
  with pytest.warns(UserWarning, match='sharding file'):
    read = ocp.load(tmp_path / 'orbax', bare)
  assert read['params']['w'].sharding.spec == P(
    None, 'model'
  )  # the sharding in the file, not the layout's

  spmd.checkpoint.save(tmp_path / 'ours', variables, layout=layout)
  with pytest.raises(spmd.errors.TargetError) as error:
    spmd.checkpoint.restore(tmp_path / 'ours', bare)
  assert str(error.value).splitlines()[:2] == [
    'params/v (float32[16,8]) has no sharding.',
    'params/w (float32[8,16]) has no sharding.',
  ]


def test_flax_restores_a_boxed_checkpoint_as_a_dict(tmp_path, mesh):
  boxed = {'w': nn.LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'mlp'))}
  read = serialization.from_bytes({'w': jnp.zeros((8, 16))}, serialization.to_bytes(boxed))
  assert list(read['w']) == ['value']  # no error, and no array

  layout, other = spmd.Layout(mesh, RULES), spmd.Layout({'x': 8}, (('mlp', 'x'),))
  for was_boxed in (True, False):
    state = layout.init(MLP().init, KEY, X, boxed=was_boxed)
    spmd.checkpoint.save(tmp_path / str(was_boxed), state, layout=layout)
    for is_boxed in (True, False):
      target = other.abstract(MLP().init, KEY, X, boxed=is_boxed)
      restored = spmd.checkpoint.restore(tmp_path / str(was_boxed), target)
      assert jax.tree.structure(restored) == jax.tree.structure(target)
      w = spmd.unbox(restored)['params']['w']
      assert w.sharding.spec == P(None, 'x')
      np.testing.assert_array_equal(w, wave(None, (8, 16)))


# -- names that do not fit (flax#3676, flax#3892)


def test_flax_fails_on_fused_kernels_under_a_mesh(mesh):
  rules = (('heads', 'model'), ('embed', 'data'))

  def layer(lib):
    return nn.DenseGeneral((4, 2), use_bias=False, kernel_init=named(('embed', 'heads', 'kv'), lib))

  with jax.set_mesh(mesh), nn.logical_axis_rules(rules), pytest.raises(ValueError, match='rank'):
    jax.eval_shape(layer(nn).init, KEY, X)
  kernel = spmd.Layout(mesh, rules).init(layer(spmd).init, KEY, X)['params']['kernel']
  assert kernel.names == ('embed', 'heads', 'kv')
  assert kernel.value.sharding.spec == P('data', 'model', None)


def boxed(names, shape, lib=spmd, cls='LogicallyPartitioned'):
  return {'params': {'w': getattr(lib, cls)(jax.ShapeDtypeStruct(shape, jnp.float32), names)}}


def test_flax_accepts_too_many_names_and_a_bare_string(mesh):
  flax_specs = [
    nn.get_partition_spec(boxed('em', (8, 16), nn))['params']['w'],
    nn.get_partition_spec(boxed(('batch', 'mlp', None), (8, 16), nn))['params']['w'],
  ]
  assert flax_specs == [P('e', 'm'), P('batch', 'mlp', None)]

  tree = {
    'few': boxed(('batch',), (8, 16)),
    'bare': boxed('em', (8, 16)),
    'many': boxed(('batch', 'mlp', None), (8, 16)),
    'right': boxed(('batch', 'mlp'), (8, 16)),
  }
  with pytest.raises(spmd.errors.LayoutError) as error:
    spmd.Layout(mesh, RULES).sharding(tree)
  assert str(error.value) == dedent("""\
    bare/params/w: its names are the bare string 'em', which would be read letter by letter.
    many/params/w: 3 names ('batch', 'mlp', None) for an array of rank 2, shape (8, 16).
    Fix: write them as a tuple, ('em',).
    Fix: give at most one name per dimension.""")


def test_flax_reports_indivisible_sizes_late_or_never(mesh):
  init = nn.with_logical_partitioning(wave, ('embed', 'mlp'))
  model = nn.Dense(6, use_bias=False, kernel_init=init)
  specs = nn.get_partition_spec(jax.eval_shape(model.init, KEY, X))
  shardings = nn.logical_to_mesh_sharding(specs, mesh, RULES)
  with pytest.raises(ValueError, match='divi'):
    jax.jit(model.init, out_shardings=shardings)(KEY, X)
  with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
    assert constraints(lambda x: nn.with_logical_constraint(x, ('mlp',)), jnp.ones(6)) == [P('model')]

  layout = spmd.Layout(mesh, (*RULES, ('mlp', 'data')))
  with pytest.raises(spmd.errors.LayoutError) as error:
    layout.init(nn.Dense(6, use_bias=False, kernel_init=named(('embed', 'mlp'))).init, KEY, X)
  assert str(error.value) == (
    "params/kernel, dim 1 'mlp': size 6 is not divisible by mesh axis 'model' (4), required by "
    "rule 1 ('mlp', 'model').\n"
    "Fix: pad it to 8, put the rule ('mlp', None) before rule 1 to replicate it, or give the table "
    "indivisible='next' or 'replicate'."
  )
  tree = boxed(('embed', 'mlp'), (8, 6))
  assert layout.replace(indivisible='next').spec(tree) == {'params': {'w': P(None, 'data')}}
  assert layout.replace(indivisible='replicate').spec(tree) == {'params': {'w': P(None, None)}}


# -- transformations (flax#3088, flax#3870, flax#5112, flax#5508, flax#5590)


class Repeated(nn.Module):
  """One layer, repeated three times by `transform`."""

  transform: object
  lib: types.ModuleType = spmd

  @nn.compact
  def __call__(self, x):
    def body(module, x):
      w = module.param('w', named(('embed', 'mlp'), self.lib), (8, 8))
      return jnp.tanh(x @ w)

    return self.transform(body)(self, x)


def scan(axis=0, **options):
  def transform(body):
    scanned = nn.scan(
      lambda module, x, _: (body(module, x), None),
      variable_axes={'params': axis},
      split_rngs={'params': True},
      length=3,
      **options,
    )
    return lambda module, x: scanned(module, x, None)[0]

  return transform


LAYER_NAME = {'metadata_params': {nn.PARTITION_NAME: 'layers'}}


def names(model):
  return jax.eval_shape(model.init, KEY, X)['params']['w'].names


def test_flax_remat_scan_fails_on_boxes():
  with pytest.raises(PartitioningUnspecifiedError):
    names(Repeated(lambda body: nn.remat_scan(body, (2, 3)), nn))
  ours = Repeated(lambda body: spmd.remat_scan(body, (2, 3), **LAYER_NAME))
  assert names(ours) == ('layers', 'layers', 'embed', 'mlp')


def test_remat_scan_with_a_name_per_level():
  per_level = tuple({nn.PARTITION_NAME: name} for name in ('groups', 'layers'))
  ours = Repeated(lambda body: spmd.remat_scan(body, (2, 3), metadata_params=per_level))
  assert names(ours) == ('groups', 'layers', 'embed', 'mlp')


@pytest.mark.parametrize('axis, right, flaxs', [
  (-1, ('embed', 'mlp', 'layers'), ('embed', 'layers', 'mlp')),
  (-2, ('embed', 'layers', 'mlp'), ('layers', 'embed', 'mlp')),
])  # fmt: skip
def test_flax_mislabels_negative_scan_axes(axis, right, flaxs):
  theirs, ours = Repeated(scan(axis, **LAYER_NAME), nn), Repeated(scan(axis, **LAYER_NAME))
  assert (names(theirs), names(ours)) == (flaxs, right)
  variables = jax.eval_shape(ours.init, KEY, X)
  assert variables['params']['w'].shape.index(3) == right.index('layers')
  assert jax.eval_shape(ours.apply, variables, X).shape == X.shape


@pytest.mark.parametrize('axis', [1, 5])
def test_flax_raises_empty_errors_for_a_changed_scan_axis(axis):
  for lib, failure in ((nn, (AssertionError, IndexError)), (spmd, spmd.errors.LayoutError)):
    variables = jax.eval_shape(Repeated(scan(0, **LAYER_NAME), lib).init, KEY, X)
    with pytest.raises(failure) as error:
      jax.eval_shape(Repeated(scan(axis, **LAYER_NAME), lib).apply, variables, X)
    if lib is nn and axis == 1:
      assert str(error.value) == ''
  assert f"removes dimension {axis}, named 'layers'" in str(error.value)


OPTIMISED = """
  import flax.linen as nn, flax_spmd as spmd, jax, jax.numpy as jnp

  def run(lib):
    init = lib.with_logical_partitioning(nn.initializers.ones, ('embed', 'mlp'))

    class Model(nn.Module):
      @nn.compact
      def __call__(self, x):
        layer = lambda module, x, _: (x @ module.param('w', init, (4, 4)), None)
        metadata = {nn.PARTITION_NAME: 'layers'}
        options = dict(variable_axes={'params': 0}, split_rngs={'params': True}, length=3)
        return nn.scan(layer, metadata_params=metadata, **options)(self, x, None)[0]

    x = jnp.ones((2, 4))
    with jax.set_mesh(spmd.make_mesh({'data': 1})), nn.logical_axis_rules((('embed', 'data'),)):
      variables = jax.eval_shape(Model().init, jax.random.key(0), x)
      return variables['params']['w'].names, jax.eval_shape(Model().apply, variables, x).shape

  assert False, 'python -O does not run this'
  print('ours', run(spmd))
  try:
    print('flax', run(nn))
  except Exception as error:
    print('flax', type(error).__name__)
"""


def test_flax_fails_under_python_O():
  done = subprocess.run(
    [sys.executable, '-O', '-c', dedent(OPTIMISED)],
    env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stderr
  ours, flaxs = done.stdout.splitlines()
  assert ours == "ours (('layers', 'embed', 'mlp'), (2, 4))"
  assert flaxs == 'flax ValueError'


def test_flax_raises_for_a_missing_partition_name():
  with pytest.raises(PartitioningUnspecifiedError) as error:
    names(Repeated(scan(), nn))
  assert 'JitTracer' in str(error.value)  # the array, and no path
  with pytest.warns(UserWarning, match='adds an axis without a name. It is None') as warned:
    assert names(Repeated(scan())) == (None, 'embed', 'mlp')
  assert len(warned) == 1


def test_flax_constrains_a_scalar_by_names_left_over(mesh):
  """An axis past the end of the names pads them with None, and its removal leaves the padding."""
  layer = {nn.PARTITION_NAME: 'layers'}

  def opened(lib, x):
    box = lib.LogicallyPartitioned(x, ()).add_axis(1, layer).remove_axis(1, layer)
    assert box.names == (None,)
    return box.unbox()

  with jax.set_mesh(mesh), nn.logical_axis_rules(RULES), pytest.raises(ValueError, match='rank'):
    jax.jit(opened, static_argnums=0)(nn, 1.0)
  with jax.set_mesh(mesh), spmd.logical_axis_rules(RULES):
    assert jax.jit(opened, static_argnums=0)(spmd, 1.0) == 1.0


def test_nested_scans_have_a_name_each():
  inner = {'metadata_params': {nn.PARTITION_NAME: 'layers'}}
  outer = {'metadata_params': {nn.PARTITION_NAME: 'groups'}}
  nested = Repeated(lambda body: scan(**outer)(scan(**inner)(body)))
  assert names(nested) == ('groups', 'layers', 'embed', 'mlp')


# -- opening boxes


def test_flax_cannot_unbox_abstract_and_single_device_arrays(mesh):
  """Under a mesh and rules, for abstract values and for arrays on a single device."""
  values = jax.ShapeDtypeStruct((8, 16), jnp.float32), jnp.ones((8, 16))
  for value in values:
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
      with pytest.raises(TypeError):
        nn.unbox(nn.LogicallyPartitioned(value, ('embed', 'mlp')))
      assert spmd.unbox(spmd.LogicallyPartitioned(value, ('embed', 'mlp'))) is value
      assert (
        spmd.unbox(nn.LogicallyPartitioned(value, ('embed', 'mlp')), apply_constraint=False) is value
      )


def test_flax_cannot_unbox_inside_shard_map(mesh):
  def mapped(lib):
    def body(w):
      return 2 * lib.unbox(lib.LogicallyPartitioned(w, ('batch', 'mlp')))

    return jax.shard_map(body, mesh=mesh, in_specs=P('data', 'model'), out_specs=P('data', 'model'))

  with jax.set_mesh(mesh), nn.logical_axis_rules(RULES), pytest.raises(ValueError):
    jax.jit(mapped(nn))(jnp.ones((8, 16)))
  result = spmd.Layout(mesh, RULES).jit(mapped(spmd))(jnp.ones((8, 16)))
  np.testing.assert_array_equal(result, 2 * jnp.ones((8, 16)))


# -- specs (maxtext#2737)


def test_flax_fails_on_explicit_axes_of_size_one():
  mesh = spmd.make_mesh({'data': 8, 'model': 1}, axis_types=AxisType.Explicit)
  with jax.set_mesh(mesh), nn.logical_axis_rules(RULES), pytest.raises(AssertionError):
    jax.jit(lambda x: nn.with_logical_constraint(x, ('batch', 'mlp')))(X)

  types_seen = []

  def step(x):
    y = spmd.with_logical_constraint(x, ('batch', 'mlp'))
    types_seen.append(jax.typeof(y).sharding.spec)
    return y + x

  layout = spmd.Layout(mesh, RULES)
  y = layout.jit(step)(layout.shard(X, ('batch', None)))
  assert set(types_seen) == {P('data', None)}  # with 'model' in the type, `+ x` would fail
  np.testing.assert_array_equal(y, 2 * X)


def test_flax_get_sharding_fails_on_logical_names(mesh):
  def tree(lib):
    plain = lib.LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'mlp'))
    own = lib.LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'mlp'), rules=(('embed', 'data'),))
    return {'plain': plain, 'own': own}

  with nn.logical_axis_rules(RULES):
    with pytest.raises(ValueError, match='not found in mesh'):
      nn.get_sharding(tree(nn), mesh)
    assert nn.logical_to_mesh(nn.get_partition_spec(tree(nn)))['own'] == P(
      None, 'model'
    )  # its rules are ignored

  expected = {'plain': P(None, 'model'), 'own': P('data', None)}
  with spmd.logical_axis_rules(RULES):
    assert jax.tree.map(lambda sharding: sharding.spec, spmd.get_sharding(tree(spmd), mesh)) == expected
  assert spmd.Layout(mesh, RULES).spec(tree(spmd)) == expected
  assert spmd.Layout(mesh, RULES).spec(tree(nn)) == expected


# -- boxes and tools


def test_paths_of_boxes_end_in_an_attribute():
  """Tools that read `path[-1].key` fail on all boxes, ours too; `boxed=False` avoids them."""
  flax_variables = {'kernel': nn.LogicallyPartitioned(jnp.ones(2), ('mlp',))}
  [(path, _)] = jax.tree_util.tree_leaves_with_path(flax_variables)
  assert not hasattr(path[-1], 'key')

  layout = spmd.Layout({'data': 2, 'model': 4}, RULES)
  variables = layout.init(MLP().init, KEY, X, boxed=False)
  keys = [path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(variables)]
  assert keys == ['v', 'w']
  assert variables['params']['w'].sharding.spec == P(None, 'model')


def test_flax_fails_on_unboxed_gradients_of_a_boxed_state():
  def state_of(lib, **options):
    layout = spmd.Layout({'data': 2, 'model': 4}, RULES)
    return layout, layout.init(lambda: train_state(optax.adam(0.1), MLP(lib)), **options)

  def step(state):
    plain = jax.tree.map(lambda x: x, spmd.unbox(state.params))
    return state.apply_gradients(grads=jax.tree.map(jnp.ones_like, plain))

  _, boxed_state = state_of(nn)
  with pytest.raises((TypeError, ValueError)):
    step(boxed_state)
  layout, state = state_of(spmd, boxed=False)
  state = layout.jit(step)(state)
  assert state.step == 1
  assert state.opt_state[0].mu['w'].sharding.spec == P(None, 'model')


def test_flax_boxes_lack_attributes_equality_and_pickle(mesh):
  theirs, ours = (
    lib.LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'mlp'), mesh) for lib in (nn, spmd)
  )
  again = [lib.LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'mlp'), mesh) for lib in (nn, spmd)]
  assert not hasattr(theirs, 'shape')
  with pytest.raises(ValueError, match='truth value'):
    bool(theirs == again[0])
  with pytest.raises(TypeError):
    pickle.dumps(theirs)

  assert (ours.shape, ours.ndim, ours.dtype, ours.size) == ((8, 16), 2, jnp.float32, 128)
  assert ours == again[1]
  assert pickle.loads(pickle.dumps(ours)) == ours


# -- NNX (flax#5589)


def test_flax_nnx_metadata_destroys_the_box(mesh):
  theirs, ours = (lib.LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'mlp')) for lib in (nn, spmd))
  theirs.to_nnx_metadata()
  assert not hasattr(theirs, 'names')

  linen = nn.Dense(16, kernel_init=named(('embed', 'mlp')))
  with spmd.Layout(mesh, (('embed', None), ('mlp', 'model'))):
    assert ours.to_nnx_metadata()['out_sharding'] == ours.names == ('embed', 'mlp')
    model = bridge.ToNNX(linen, rngs=nnx.Rngs(0)).lazy_init(X)
    assert model.kernel[...].sharding.spec == P(None, 'model')
    back = bridge.variables.nnx_attrs_to_linen_vars({'kernel': model.kernel})['params']['kernel']
  assert type(back) is spmd.LogicallyPartitioned and back.names == ('embed', 'mlp')
