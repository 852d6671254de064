"""Layout: init, jit, shard, abstract, check, and training steps."""

import enum
import inspect
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd

RULES = (('batch', 'data'), ('hidden', 'model'))
SWAPPED = (('batch', 'model'), ('hidden', 'data'))
INIT = nn.initializers.xavier_normal()


class Block(nn.Module):
  depth: int = 32

  @nn.compact
  def __call__(self, x, _=None):
    w1 = self.param(
      'w1', spmd.with_logical_partitioning(INIT, ('embed', 'hidden')), (x.shape[-1], self.depth)
    )
    y = spmd.with_logical_constraint(nn.relu(x @ w1), ('batch', 'hidden'))
    w2 = self.param(
      'w2', spmd.with_logical_partitioning(INIT, ('hidden', 'embed')), (self.depth, x.shape[-1])
    )
    return spmd.with_logical_constraint(y @ w2, ('batch', 'embed')), None


class Model(nn.Module):
  layers: int = 2

  @nn.compact
  def __call__(self, x):
    stack = nn.scan(
      Block,
      length=self.layers,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      metadata_params={nn.PARTITION_NAME: 'layers'},
    )
    return stack(name='blocks')(x, None)[0]


MODEL = Model()
TX = optax.adam(1e-2)
X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), jnp.float32)


def create(key, x, tx=TX):
  return TrainState.create(apply_fn=MODEL.apply, params=MODEL.init(key, x)['params'], tx=tx)


def loss_fn(params, x):
  return jnp.mean((MODEL.apply({'params': params}, x) - jnp.roll(x, 1, 1)) ** 2)


def train_step(state, x):
  loss, grads = jax.value_and_grad(loss_fn)(state.params, x)
  return state.apply_gradients(grads=grads), loss


@pytest.fixture(scope='module')
def layout():
  return spmd.Layout({'data': 2, 'model': 4}, RULES)


@pytest.fixture(scope='module')
def reference():
  """Three plain steps on one device."""
  state = jax.jit(create)(jax.random.key(0), X)
  losses = []
  for _ in range(3):
    state, loss = jax.jit(train_step)(state, X)
    losses.append(float(loss))
  return losses


def w1(state):
  return state.params['blocks']['w1']


# -- init


def test_init_creates_a_sharded_state(layout):
  state = layout.init(create, jax.random.key(0), X)
  assert isinstance(w1(state), spmd.LogicallyPartitioned)
  assert w1(state).value.sharding == NamedSharding(layout.mesh, P(None, None, 'model'))
  moment = state.opt_state[0].mu['blocks']['w2'].value
  assert moment.sharding == NamedSharding(layout.mesh, P(None, 'model', None))
  assert state.step.sharding == NamedSharding(layout.mesh, P())


def test_init_generates_the_same_numbers_under_every_layout(layout):
  other = spmd.Layout({'data': 8}, (('embed', 'data'),))
  a, b = (lay.init(create, jax.random.key(0), X) for lay in (layout, other))
  plain = create(jax.random.key(0), X)
  for one, two, three in zip(*map(jax.tree.leaves, (a, b, plain)), strict=True):
    np.testing.assert_array_equal(one, two)
    np.testing.assert_allclose(one, three, rtol=1e-5, atol=1e-7)


def test_init_passes_models_and_optimizers_through(layout):
  def make(key, x, model, tx, *, scale):
    params = model.init(key, x)['params']
    return TrainState.create(
      apply_fn=model.apply, params=jax.tree.map(lambda p: scale * p, params), tx=tx
    )

  state = layout.init(make, jax.random.key(0), X, MODEL, TX, scale=2.0)
  assert w1(state).value.sharding.spec == P(None, None, 'model')
  target = layout.abstract(make, jax.random.key(0), X, MODEL, TX, scale=2.0)
  assert w1(target).value.sharding == w1(state).value.sharding


def test_init_without_boxes(layout):
  plan = layout.plan(create, jax.random.key(0), X, boxed=False)
  state = plan.init()
  assert isinstance(w1(state), jax.Array)
  assert w1(state).sharding == NamedSharding(layout.mesh, P(None, None, 'model'))
  names = dict(zip(_paths(state), plan.names, strict=True))
  assert names['params/blocks/w1'] == ('layers', 'embed', 'hidden')
  assert names['opt_state/0/nu/blocks/w2'] == ('layers', 'hidden', 'embed')
  assert names['step'] is None


def test_init_of_a_model_created_inside_the_function(layout):
  """The optimizer's functions differ from trace to trace, and with them the state's structure."""

  def make(key, x):
    return create(key, x, optax.adam(1e-2))

  state = layout.init(make, jax.random.key(0), X, boxed=False)
  step = layout.jit(train_step)
  new, _ = step(state, X)
  assert w1(new).sharding == w1(state).sharding


def test_abstract_describes_the_result_of_init(layout):
  for boxed in (True, False):
    state = layout.init(create, jax.random.key(0), X, boxed=boxed)
    target = layout.abstract(create, jax.random.key(0), X, boxed=boxed)
    assert jax.tree.structure(state) == jax.tree.structure(target)
    for array, described in zip(jax.tree.leaves(state), jax.tree.leaves(target), strict=True):
      assert (array.shape, array.dtype, array.sharding) == (
        described.shape,
        described.dtype,
        described.sharding,
      )


def test_abstract_with_abstract_arguments_and_meshes():
  layout = spmd.Layout(spmd.abstract_mesh({'data': 512, 'model': 8}), RULES)
  x = jax.ShapeDtypeStruct((1024, 64), jnp.float32)
  target = layout.abstract(create, jax.eval_shape(jax.random.key, 0), x)
  assert w1(target).value.sharding.spec == P(None, None, 'model')


# -- jit


@pytest.mark.parametrize('boxed', [True, False])
def test_training_is_traced_once_and_compiled_once(layout, boxed, reference):
  traces = []

  def step(state, x):
    traces.append(1)
    return train_step(state, x)

  state = layout.init(create, jax.random.key(0), X, boxed=boxed)
  placed = jax.tree.map(lambda leaf: leaf.sharding, state)
  jitted = layout.jit(step, donate_argnums=0)
  batch = layout.shard(X, ('batch', None))
  losses = []
  for _ in range(3):
    state, loss = jitted(state, batch)
    losses.append(float(loss))
  assert len(traces) == 1
  [function] = jitted.functions.values()
  assert function._cache_size() == 1
  assert jax.tree.map(lambda leaf: leaf.sharding, state) == placed
  np.testing.assert_allclose(losses, reference, rtol=1e-5)


def test_donated_arguments_are_deleted(layout):
  state = layout.init(create, jax.random.key(0), X)
  layout.jit(train_step, donate_argnums=0)(state, X)
  assert w1(state).value.is_deleted()


def test_constraints_are_in_the_program(layout):
  text = layout.jit(train_step).lower(layout.abstract(create, jax.random.key(0), X), X).as_text()
  assert 'sharding_constraint' in text or '@Sharding' in text
  assert '{"data"}' in text or 'devices=[2,4]' in text


def test_another_signature_gets_its_own_output_shardings(layout):
  @layout.jit
  def double(tree):
    return jax.tree.map(lambda x: 2 * x, tree)

  wide = spmd.LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'hidden'))
  tall = spmd.LogicallyPartitioned(jnp.ones((16, 8)), ('hidden', 'embed'))
  for _ in range(2):
    assert double({'w': wide})['w'].value.sharding.spec == P(None, 'model')
    assert double({'w': tall})['w'].value.sharding.spec == P('model', None)
    assert double([wide, tall])[1].value.sharding.spec == P('model', None)
    assert double(jnp.ones(3)).shape == (3,)


def test_parameters_and_optimizer_state_as_two_results(layout):
  """Factored moments are read off the parameters, which are another result of the same function."""
  tx = optax.adafactor(1e-2, min_dim_size_to_factor=4)

  def make(key, x):
    params = MODEL.init(key, x)['params']
    return params, tx.init(params)

  def step(params, opt_state, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  params, opt_state = layout.init(make, jax.random.key(0), X)
  assert opt_state[0].v_col['blocks']['w1'].value.sharding.spec == P(None, 'model')
  new_params, new_state, _ = layout.jit(step)(params, opt_state, X)
  for old, new in zip(
    jax.tree.leaves((params, opt_state)), jax.tree.leaves((new_params, new_state)), strict=True
  ):
    assert new.sharding == old.sharding


def test_another_batch_size_is_traced_again_with_the_same_shardings(layout):
  state = layout.init(create, jax.random.key(0), X)
  step = layout.jit(train_step)
  for size in (16, 8, 16, 8):
    new, _ = step(state, X[:size])
    assert w1(new).value.sharding == w1(state).value.sharding
  assert len(step.functions) == 1


@pytest.mark.parametrize(
  'options, args, kwargs',
  [
    (dict(static_argnums=1), (4,), {}),
    (dict(static_argnums=-1), (4,), {}),
    (dict(static_argnums=(1,)), (4,), {}),
    (dict(static_argnames='n'), (4,), {}),
    (dict(static_argnames='n'), (), dict(n=4)),
    (dict(static_argnames=('n',)), (), dict(n=4)),
    (dict(static_argnums=1), (), {}),
  ],
)
def test_static_arguments(layout, options, args, kwargs):
  def make(x, n=4):
    return spmd.LogicallyPartitioned(
      jnp.ones((n, n)) * x[0], ('embed', 'hidden') if n > 4 else ('hidden', None)
    )

  jitted = layout.jit(make, **options)
  assert jitted(jnp.ones(1), *args, **kwargs).value.sharding.spec == P('model', None)
  eight = (8,) if args else ()
  named = dict(n=8) if not args else {}
  if options.get('static_argnums') is None or args:
    assert jitted(jnp.ones(1), *eight, **named).value.sharding.spec == P(None, 'model')
  assert jitted(jnp.ones(1), *args, **kwargs).value.shape == (4, 4)


def test_kwargs_defaults_and_keyword_only(layout):
  @layout.jit
  def f(x, scale=2.0, *, shift=1.0):
    return spmd.with_logical_constraint(x * scale + shift, ('batch',))

  assert float(f(jnp.ones(8))[0]) == 3
  assert float(f(jnp.ones(8), shift=5.0)[0]) == 7
  assert float(f(x=jnp.ones(8), scale=3.0)[0]) == 4


def test_decorator_and_method(layout):
  class Trainer:
    calls = 0

    @layout.jit
    def reduce(self, x):
      type(self).calls += 1
      return spmd.with_logical_constraint(x, ('batch',)).sum()

    @layout.jit(static_argnums=0)
    def static(self, x):
      return spmd.with_logical_constraint(x, ('batch',)).sum()

  jax.tree_util.register_static(Trainer)
  assert float(Trainer().reduce(jnp.ones(8))) == 8
  assert float(Trainer().static(jnp.ones(8))) == 8


def test_a_jitted_function_has_the_metadata_of_the_function(layout):
  jitted = layout.jit(train_step)
  assert jitted.__name__ == 'train_step'
  assert jitted.__wrapped__ is train_step
  assert list(inspect.signature(jitted).parameters) == ['state', 'x']
  assert repr(jitted) == '<layout.jit of train_step>'


def test_lower_trace_eval_shape_with_abstract_arguments(layout):
  state = layout.abstract(create, jax.random.key(0), X)
  x = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=NamedSharding(layout.mesh, P('data')))
  step = layout.jit(train_step, donate_argnums=0)
  assert step.eval_shape(state, x)[1].shape == ()
  assert 'dot_general' in str(step.trace(state, x).jaxpr)
  compiled = step.lower(state, x).compile()
  assert compiled.output_shardings[0].step.is_equivalent_to(NamedSharding(layout.mesh, P()), 0)


def test_lowering_for_an_abstract_mesh():
  layout = spmd.Layout(spmd.abstract_mesh({'data': 64, 'model': 8}), RULES)
  state = layout.abstract(create, jax.random.key(0), X)
  text = layout.jit(train_step).trace(state, X).lower(lowering_platforms=('tpu',)).as_text()
  assert '"data"=64' in text


def test_nested_layout_jit(layout):
  inner = layout.jit(lambda x: spmd.with_logical_constraint(2 * x, ('batch', 'hidden')))
  outer = jax.jit(lambda x: inner(x) + 1)
  assert outer(jnp.ones((8, 8))).sharding.spec == P('data', 'model')
  assert float(jax.grad(lambda x: inner(x).sum())(jnp.ones((8, 8)))[0, 0]) == 2


def test_errors_in_the_function_propagate(layout):
  def broken(x):
    raise KeyError('mine')

  with pytest.raises(KeyError, match='mine'):
    layout.jit(broken)(X)
  with pytest.raises(KeyError, match='mine'):
    layout.init(broken, X)


def test_caches_can_be_cleared(layout):
  step = layout.jit(train_step)
  state = layout.init(create, jax.random.key(0), X)
  step(state, X)
  jax.clear_caches()
  new, _ = step(state, X)
  assert w1(new).value.sharding == w1(state).value.sharding


# -- shard, spec, names


class Batch(NamedTuple):
  x: np.ndarray
  y: np.ndarray


def test_shard_by_one_name_for_all(layout):
  batch = layout.shard({'x': np.ones((8, 4)), 'y': np.ones((8, 2))}, ('batch', None))
  assert {leaf.sharding.spec for leaf in jax.tree.leaves(batch)} == {P('data', None)}


def test_shard_by_a_tree_of_names(layout):
  batch = layout.shard(Batch(np.ones((8, 4)), np.ones(8)), Batch(('batch', None), ('batch',)))
  assert batch.x.sharding.spec == P('data', None)
  assert batch.y.sharding.spec == P('data')


def test_shard_by_a_prefix_and_none(layout):
  tree = {'a': {'x': np.ones((8, 4)), 'z': np.ones((4, 4))}, 'n': np.ones(3)}
  placed = layout.shard(tree, {'a': ('batch', None), 'n': None})
  assert placed['a']['z'].sharding.spec == P('data', None)
  assert placed['n'].sharding.spec == P()


def test_shard_by_mesh_axes(layout):
  placed = layout.shard(
    {'x': np.ones((8, 4)), 'y': np.ones((8, 4))}, {'x': P('data', 'model'), 'y': P()}
  )
  assert (placed['x'].sharding.spec, placed['y'].sharding.spec) == (P('data', 'model'), P())


def test_shard_warns_of_misspelt_names(layout):
  with pytest.warns(UserWarning) as caught:
    placed = layout.shard({'x': np.ones((8, 4))}, ('bacth', None))
  assert [str(one.message) for one in caught] == [
    "x, dim 0 'bacth': no rule for this logical name; it is replicated. Did you mean 'batch'?"
  ]
  assert placed['x'].sharding.spec == P(None, None)


def test_unknown_options_of_jit_are_rejected_immediately(layout):
  with pytest.raises(TypeError, match='donate_argnum'):
    layout.jit(train_step, donate_argnum=0)
  with pytest.raises(TypeError, match='out_shardings'):
    layout.jit(train_step, out_shardings=None)


def test_shard_boxes_by_their_own_names(layout):
  state = create(jax.random.key(0), X)
  placed = layout.shard(state)
  assert w1(placed).value.sharding.spec == P(None, None, 'model')
  assert placed.step.sharding.spec == P()


def test_spec_and_sharding(layout):
  state = jax.eval_shape(create, jax.random.key(0), X)
  assert layout.spec(state).params['blocks']['w1'] == P(None, None, 'model')
  sharding = layout.sharding(state)
  assert sharding.params['blocks']['w1'] == NamedSharding(layout.mesh, P(None, None, 'model'))
  by_hand = jax.jit(create, out_shardings=sharding)(jax.random.key(0), X)
  assert w1(by_hand).value.sharding == sharding.params['blocks']['w1']


def test_layouts_are_values(layout):
  same = spmd.Layout({'data': 2, 'model': 4}, RULES)
  assert same == layout and hash(same) == hash(layout)
  assert layout.replace(rules=SWAPPED) != layout
  assert layout.replace(rules=SWAPPED).mesh == layout.mesh
  assert layout.replace(conflict='error').rules.policies.conflict == 'error'
  strict = layout.replace(conflict='error')
  assert strict.replace(mesh={'data': 4, 'model': 2}).rules.policies.conflict == 'error'
  assert strict.replace(rules=SWAPPED).rules.policies.conflict == 'error'
  assert strict.replace(rules=spmd.Rules(*SWAPPED)).rules.policies.conflict == 'skip'
  assert repr(layout) == "Layout({'data': 2, 'model': 4}, Rules(('batch', 'data'), ('hidden', 'model')))"


def test_a_layout_keeps_the_policies_of_its_table():
  rules = spmd.Rules(*RULES, unmatched='error')
  assert spmd.Layout({'data': 8, 'model': 1}, rules).rules.policies.unmatched == 'error'
  assert (
    spmd.Layout({'data': 8, 'model': 1}, rules, conflict='error').rules.policies.unmatched == 'error'
  )


# -- check


def test_check_finds_the_typo():
  layout = spmd.Layout({'data': 2, 'model': 4}, (('batch', 'data'), ('hiden', 'model')))
  findings = layout.check(jax.eval_shape(create, jax.random.key(0), X))
  assert [finding.text for finding in findings.suspicious] == [
    "name 'hidden' has no rule and is replicated (6 arrays: params/blocks/w1, params/blocks/w2, ...). "
    "Did you mean 'hiden'?"
  ]
  assert findings[0] is findings.suspicious[0]
  assert len(findings.of('unmatched')) == 3
  assert not findings.of('idle rule')  # names of a batch and of activations are not in a state
  assert [finding.text for finding in findings.of('idle axis')] == [
    "mesh axis 'model' (4) is not used by this tree."  # of the rule with the typo; 'data' is the batch's
  ]


def test_check_reports_axes_that_a_rule_could_have_used():
  mesh = {'data': 2, 'model': 4}
  rules = (('batch', 'data'), ('mlp', 'model'), ('@logits', jax.P('model')))
  named = {'w': spmd.LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'mlp'))}
  axes = lambda tree, *rules: [
    finding.text for finding in spmd.Layout(mesh, rules).check(tree).of('idle axis')
  ]
  text = 'mesh axis {} is not used by this tree.'.format
  assert axes(named, *rules) == []
  assert axes(spmd.unbox(named), *rules) == [text("'data' (2)")]
  assert axes(spmd.unbox(named), *rules[:2]) == [text("'data' (2)"), text("'model' (4)")]
  assert axes(named, ('mlp', None), ('embed', 'model'), ('mlp', 'data')) == [text("'data' (2)")]
  assert axes(named, ('mlp', 'model')) == [text("'data' (2)")]


@settings(deadline=None)
@given(
  st.lists(
    st.sampled_from((None, 'hidden', 'hiden', 'embed', 'layers')), min_size=2, max_size=2, unique=True
  )
)
def test_check_reports_names_of_boxes_of_mesh_axes_as_those_of_other_boxes(names):
  """A name without a rule was replicated beside one with a rule, and there was no finding."""
  layout = spmd.Layout({'data': 2, 'model': 4}, (('hidden', 'model'), ('embed', None)))
  logical = {'w': spmd.LogicallyPartitioned(jnp.ones((8, 8)), tuple(names))}
  axes = {'w': spmd.Partitioned(jnp.ones((8, 8)), tuple(names))}
  if {'hidden', 'embed'} & {*names}:
    assert layout.check(axes) == layout.check(logical)
    assert spmd.explain(layout, axes).why('w') == spmd.explain(layout, logical).why('w')
  elif {'hiden', 'layers'} & {*names}:
    with pytest.raises(spmd.errors.MeshAxisError, match=r"'(hiden|layers)' is not an axis") as error:
      layout.check(axes)
    assert ("Did you mean 'hidden'?" in str(error.value)) == ('hiden' in names)


def test_check_without_findings_is_empty_and_falsy():
  layout = spmd.Layout({'model': 8}, (('hidden', 'model'), ('embed', None), ('layers', None)))
  findings = layout.check(jax.eval_shape(create, jax.random.key(0), X))
  assert not findings
  assert str(findings) == ''


def test_check_reports_lost_axes():
  layout = spmd.Layout({'model': 8}, (('a', 'model'), ('b', 'model')))
  findings = layout.check({'w': spmd.LogicallyPartitioned(jnp.ones((8, 8)), ('a', 'b'))})
  assert [finding.text for finding in findings.of('conflict')] == [
    "name 'b' is replicated: the axes of rule 1 ('b', 'model') went to another dimension (1 array: w)."
  ]


def _paths(tree):
  from flax_spmd._src.tree_paths import path_string

  return [path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def test_init_generates_random_numbers_without_communication_or_warns():
  """With partitionable random numbers each device draws its own piece, and nothing else."""
  layout = spmd.Layout({'data': 8}, spmd.fsdp('data', min_size=1))

  def create(key):
    return {'w': jax.random.normal(key, (64, 64))}

  drawn = layout.jit(create, out_rules=layout.rules)
  text = drawn.lower(jax.random.key(0)).compile().as_text()
  assert not any(op in text for op in ('all-gather', 'all-reduce', 'collective-permute', 'all-to-all'))
  alone = jax.jit(create)(jax.random.key(0))
  np.testing.assert_array_equal(layout.init(create, jax.random.key(0))['w'], alone['w'])
  with (
    jax.threefry_partitionable(False),
    pytest.warns(UserWarning, match='jax_threefry_partitionable is off'),
  ):
    layout.init(create, jax.random.key(0))


class Axis(str, enum.Enum):  # noqa: UP042 (as before Python 3.11)
  """Names as some projects have them. Formatted, a member is `Axis.DATA`; in a set or a dictionary it equals 'data'."""

  DATA = 'data'
  MODEL = 'model'
  BATCH = 'batch'
  HIDDEN = 'hidden'
  EMBED = 'embed'


PLAIN = type('Plain', (), {member.name: member.value for member in Axis})


class Named(nn.Module):
  names: object

  @nn.compact
  def __call__(self, x):
    names = self.names
    init = spmd.with_logical_partitioning(INIT, (names.EMBED, names.HIDDEN))
    return spmd.with_logical_constraint(x @ self.param('w', init, (16, 32)), (names.BATCH, names.HIDDEN))


def texts_and_costs(names, mesh):
  """The texts of a layout with these names, and its estimate of a step."""
  rules = (
    (names.BATCH, names.DATA),
    (names.HIDDEN, (names.MODEL,)),
    ('bias$', P(None, names.MODEL)),
    spmd.fsdp([names.DATA], min_size=1),
    spmd.optimizer_over(names.MODEL, min_size=1),
  )
  layout, model, x = spmd.Layout(mesh(names), rules), Named(names), jnp.ones((8, 16))

  def create():
    params = model.init(jax.random.key(0), x)['params']
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

  def step(state, x):
    grads = jax.grad(lambda params: jnp.mean(model.apply({'params': params}, x) ** 2))(state.params)
    return state.apply_gradients(grads=grads)

  explanation = layout.plan(create).explain().to_json()
  estimator = spmd.explore.Estimator(spmd.explore.TrainStep(step, create, x))
  outcome = estimator.estimate(layout, 'h100:8', partition=False)
  return layout.to_toml(), repr(layout.rules), explanation, outcome.memory, outcome.counts


@pytest.mark.parametrize(
  'mesh',
  [
    lambda names: {names.DATA: 4, names.MODEL: 2},
    lambda names: spmd.abstract_mesh({names.DATA: 4, names.MODEL: 2}),
    lambda names: jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), (names.DATA, names.MODEL)),
  ],
)
def test_names_may_be_members_of_an_enum(mesh):
  """They are plain strings, in texts too: that of a checkpoint could not be read again, and a search aborted in MLIR."""
  assert texts_and_costs(Axis, mesh) == texts_and_costs(PLAIN, mesh)


def test_the_fix_for_an_axis_name_without_a_rule_has_a_plain_mesh_axis():
  mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), (Axis.DATA, Axis.MODEL))
  with pytest.raises(spmd.errors.UnmatchedNameError, match=r"such as \('examples', 'data'\)\."):
    spmd.Layout(mesh, ()).jit(lambda x: x, axis_name='examples')(jnp.ones(8))
