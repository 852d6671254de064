"""`optimizer_over`: the state of optimizers is sharded as its parameters, and over further mesh axes."""

import math
import pickle
from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import errors

SIZES = {'data': 2, 'fsdp': 2, 'tensor': 2}
NAMES = (('batch', 'data'), ('embed', 'fsdp'), ('mlp', 'tensor'))
OVER = spmd.optimizer_over('data', min_size=1)


def on(*rules, **policies):
  return spmd.Layout(SIZES, rules, **policies)


def box(*shape, names=('embed', 'mlp'), dtype=jnp.float32):
  return spmd.LogicallyPartitioned(jax.ShapeDtypeStruct(shape, dtype), names)


def state_of(params, tx):
  return jax.eval_shape(lambda: TrainState.create(apply_fn=None, params=params, tx=tx))


def specs_by_path(layout, tree):
  return {row.path: row.spec for row in layout.rows(tree)}


# -- the algorithm


def spec_with_data(shape, entries, sizes):
  """The spec of MaxText's `shard_optimizer_over_data`, by its description."""
  axes = [(entry,) if isinstance(entry, str) else entry or () for entry in entries]
  if math.prod(shape) == 1 or any('data' in each for each in axes):
    return axes
  shards = NamedSharding(spmd.abstract_mesh(sizes), P(*entries)).shard_shape(shape)
  for dim, size in enumerate(shards):
    if size % sizes['data'] == 0 and 'tensor' not in axes[dim]:
      return [*axes[:dim], ('data', *axes[dim]), *axes[dim + 1 :]]
  return axes


@st.composite
def sharded_arrays(draw):
  sizes = {axis: draw(st.sampled_from([1, 2, 3, 4])) for axis in ('data', 'fsdp', 'tensor', 'expert')}
  left = draw(st.permutations(list(sizes)))
  entries, shape = [], []
  for _ in range(draw(st.integers(0, 4))):
    count = draw(st.integers(0, min(2, len(left))))
    taken, left = left[:count], left[count:]
    entries.append(None if not taken else taken[0] if len(taken) == 1 else tuple(taken))
    parts = math.prod(sizes[axis] for axis in taken)
    shape.append(parts * draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12])))
  return sizes, tuple(shape), entries


@given(sharded_arrays())
def test_the_specs_are_those_of_maxtext(array):
  sizes, shape, entries = array
  names = tuple(f'n{dim}' for dim in range(len(shape)))
  over = spmd.optimizer_over('data', min_size=1, avoid='tensor')
  rules = (over, *zip(names, entries, strict=True))
  layout = spmd.Layout(spmd.abstract_mesh(sizes), rules)
  spec = layout.spec({'opt_state': {'w': box(*shape, names=names)}})['opt_state']['w']
  axes = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
  assert axes == spec_with_data(shape, entries, sizes)


def test_several_axes_are_added_as_far_as_they_are_not_used_yet():
  layout = on(*NAMES, spmd.optimizer_over(('data', 'fsdp'), min_size=1))
  specs = specs_by_path(
    layout, state_of({'w': box(8, 16), 'b': box(8, names=('mlp',))}, optax.adam(1.0))
  )
  assert specs['opt_state/0/mu/w'] == P(('data', 'fsdp'), 'tensor')
  assert specs['opt_state/0/mu/b'] == P(('data', 'fsdp', 'tensor'))


def test_it_follows_the_other_rules_wherever_it_stands():
  fill = spmd.fsdp('fsdp', min_size=1)
  tree = {'opt_state': {'w': jnp.ones((8, 16))}}
  for rules in ((fill, OVER), (OVER, fill)):
    assert on(*rules).spec(tree) == {'opt_state': {'w': P('data', 'fsdp')}}
  assert on(OVER, spmd.fsdp('data', min_size=1)).spec(tree) == {'opt_state': {'w': P(None, 'data')}}


def test_small_arrays_and_those_that_it_does_not_divide_are_left_as_they_are():
  layout = on(spmd.optimizer_over('data'))
  tree = {'opt_state': {'small': jnp.ones(8), 'large': jax.ShapeDtypeStruct((2**20,), jnp.float32)}}
  assert layout.spec(tree) == {'opt_state': {'small': P(), 'large': P('data')}}
  assert on(OVER).spec({'opt_state': [jnp.ones((3, 5)), jnp.ones(())]}) == {'opt_state': [P(), P()]}


# -- which arrays are optimizer state

OPTIMIZERS = {
  'adamw': lambda: optax.adamw(1e-2),
  'adafactor': lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.9),
  'lion': lambda: optax.lion(1e-2),
  'sm3': lambda: optax.sm3(1e-2),
  'muon': lambda: optax.contrib.muon(1e-2),
  'chain': lambda: optax.chain(
    optax.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.adam)(1e-2)
  ),
  'multi steps': lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
  'multi transform': lambda: optax.multi_transform(
    {'a': optax.adam(1e-2), 'b': optax.sgd(1e-2, momentum=0.9)},
    lambda params: {key: 'a' if key < 'v' else 'b' for key in params},
  ),
  'noise': lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.adam(1e-2)),
}


def params_of(kind):
  shapes = {'b': (8,), 'w': (8, 16), 'v': (16, 16)}
  names = {'b': ('mlp',), 'w': ('embed', 'mlp'), 'v': ('embed', 'mlp')}
  wave = {
    key: jnp.cos(jnp.arange(math.prod(shape), dtype=jnp.float32)).reshape(shape)
    for key, shape in shapes.items()
  }
  if kind == 'named':
    return {key: spmd.LogicallyPartitioned(value, names[key]) for key, value in wave.items()}
  return wave


RULES = {
  'named': NAMES,
  'unnamed': (spmd.fsdp('fsdp', min_size=1),),
  'by path': (('(^|/)[wv]$', P('fsdp', 'tensor')), ('(^|/)b$', P())),
}


@pytest.mark.parametrize('kind', RULES)
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_the_state_of_an_optimizer_takes_less_memory_and_its_parameters_as_much(name, kind):
  tx = OPTIMIZERS[name]()
  state = {'params': params_of(kind), 'step': jnp.zeros((), int)}
  state['moments'] = jax.eval_shape(tx.init, state['params'])
  before, after = (specs_by_path(on(*rules), state) for rules in (RULES[kind], (*RULES[kind], OVER)))
  layout, mesh = on(*RULES[kind], OVER), spmd.abstract_mesh(SIZES)
  more = 0
  for row in layout.rows(state):
    old, new = (NamedSharding(mesh, specs[row.path]).shard_shape(row.shape) for specs in (before, after))
    if row.path.startswith('moments'):
      more += old != new
      assert old == new or math.prod(old) == 2 * math.prod(new), row.path
      assert old != new or all(size % 2 for size in old)
    else:
      assert before[row.path] == after[row.path]
  assert more


@pytest.mark.parametrize(
  ('name', 'kind'),
  [
    ('adamw', 'named'),
    pytest.param('adafactor', 'by path', marks=pytest.mark.slow),
    pytest.param('multi steps', 'unnamed', marks=pytest.mark.slow),
    pytest.param('multi transform', 'named', marks=pytest.mark.slow),
  ],
)
def test_training_has_the_losses_of_one_device_and_moves_nothing(name, kind):
  tx = OPTIMIZERS[name]()
  x = jnp.sin(jnp.arange(64.0)).reshape(8, 8)

  def create():
    return TrainState.create(apply_fn=None, params=params_of(kind), tx=tx)

  def step(state, x):
    def loss(params):
      p = spmd.unbox(params)
      return jnp.mean((jnp.tanh(x @ p['w']) @ p['v']) ** 2) + jnp.sum(p['b'] ** 2)

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value

  layout = on(*RULES[kind], OVER)
  state, single = layout.init(create), create()
  planned, run, alone = layout.sharding(state), layout.jit(step, donate_argnums=0), jax.jit(step)
  for _ in range(3):
    state, loss = run(state, layout.shard(x, P('data')))
    single, expected = alone(single, x)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
  assert not layout.check(state).of('not as planned')
  pairs = zip(jax.tree.leaves(state), jax.tree.leaves(planned), strict=True)
  assert all(array.sharding.is_equivalent_to(sharding, array.ndim) for array, sharding in pairs)


def test_parameters_that_optax_keeps_are_not_optimizer_state():
  weights = optax.LookaheadParams.init_synced({'w': jnp.ones((8, 16))})
  assert on(OVER).spec(weights).fast == {'w': P()}


def test_state_is_recognised_by_its_class_or_its_key():
  w = jnp.ones((8, 16))
  tree = (
    {'w': w},
    optax.sgd(1.0, momentum=0.9).init({'w': w}),
    {'opt_state': {'mine': w}, 'state': {'param_states': {'w': w}}, 'other': w},
  )
  params, moments, rest = on(OVER).spec(tree)
  assert params == {'w': P()} and moments[0].trace == {'w': P('data', None)}
  assert rest['opt_state']['mine'] == rest['state']['param_states']['w'] == P('data', None)
  assert rest['other'] == P()


def test_functions_see_whether_an_array_is_optimizer_state():
  layout = on(lambda leaf: P('data') if leaf.optimizer else P())
  w = jnp.ones((8, 16))
  params, moments = layout.spec(({'w': w}, optax.sgd(1.0, momentum=0.9).init({'w': w})))
  assert params == {'w': P(None, None)} and moments[0].trace == {'w': P('data', None)}


def test_boxes_with_rules_of_their_own():
  def create():
    init = spmd.with_logical_partitioning(nn.initializers.ones, ('a', 'b'), rules=(('b', 'tensor'),))
    return TrainState.create(
      apply_fn=None, params={'w': init(jax.random.key(0), (8, 16))}, tx=optax.adam(1.0)
    )

  specs = on(OVER).spec(jax.eval_shape(create))
  assert specs.params['w'] == P(None, 'tensor')
  assert specs.opt_state[0].mu['w'] == P('data', 'tensor')


# -- where it may stand


def test_in_a_table_for_a_part_of_the_tree():
  inner = spmd.Rules(('w', P(None, 'tensor')), OVER)
  layout = on(('^opt_state/', inner))
  params = {'w': jnp.ones((8, 16))}
  state = state_of(params, OPTIMIZERS['adafactor']())
  specs = specs_by_path(layout, state)
  assert specs['params/w'] == P()
  assert {path: spec for path, spec in specs.items() if path.endswith(('v_row/w', 'v_col/w'))} != {}
  row = next(row for row in layout.rows(state) if row.path.endswith('/ema/w'))
  assert row.spec == P('data', 'tensor')
  assert [(decision.rule, decision.further) for decision in row.decisions] == [
    ((0, 0), (0, 1)),
    ((0, 0), None),
  ]


def test_gradients_by_an_annotation():
  """ZeRO-2: gradients are sharded by the layout's rules like parameters, and over the axis too."""
  layout = on(*NAMES, ('@gradients', OVER))
  boxed = spmd.LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'mlp'))
  placed = spmd.Partitioned(jnp.ones((8, 16)), (None, 'tensor'))
  annotate = layout.jit(lambda grads: spmd.with_sharding_annotation(grads, 'gradients'))
  assert '[{"data", "fsdp"}, {"tensor"}]' in annotate.lower({'w': boxed}).as_text()
  assert '[{"data"}, {"tensor"}]' in annotate.lower({'w': placed}).as_text()
  assert annotate(jnp.ones((8, 16))).sharding.spec == P('data')


def test_the_presets_keep_the_names():
  table = spmd.presets.zero2(min_size=1) + NAMES
  specs = on(*table).spec(state_of({'w': box(8, 16)}, optax.adam(1.0)))
  assert specs.params['w'] == P('fsdp', 'tensor')
  assert specs.opt_state[0].mu['w'] == P(('data', 'fsdp'), 'tensor')


def test_text_and_back():
  layout = on(
    *NAMES,
    spmd.optimizer_over(['data', 'fsdp'], min_size=8, avoid='tensor'),
    ('@gradients', spmd.optimizer_over('data')),
  )
  assert '{optimizer_over = ["data", "fsdp"], min_size = 8, avoid = ["tensor"]},' in layout.to_toml()
  assert '{annotation = "gradients", optimizer_over = "data"},' in layout.to_toml()
  assert spmd.Layout.from_toml(layout.to_toml()) == layout
  assert pickle.loads(pickle.dumps(layout.rules)) == layout.rules
  assert (
    repr(layout.rules.clauses[3]) == "optimizer_over(('data', 'fsdp'), min_size=8, avoid=('tensor',))"
  )


# -- elsewhere


def create():
  return TrainState.create(apply_fn=None, params=params_of('named'), tx=optax.adam(1e-2))


def test_a_checkpoint_moves_to_and_from_such_a_layout(tmp_path):
  further, plain = on(*NAMES, OVER), on(*NAMES)
  other = spmd.Layout({'data': 4, 'model': 2}, (('mlp', 'model'), OVER))
  state = further.init(create)
  for number, layout in enumerate((plain, other, further)):
    spmd.checkpoint.save(tmp_path / str(number), state, further)
    restored = spmd.checkpoint.restore(tmp_path / str(number), layout.plan(create))
    assert not layout.check(restored).of('not as planned')
    for one, two in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
      np.testing.assert_array_equal(one, two)


@pytest.mark.slow
def test_an_estimate_has_the_smaller_state_and_the_same_parameters():
  def step(state, x):
    loss = lambda params: jnp.mean(jnp.tanh(x @ spmd.unbox(params)['w']) ** 2)
    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value

  batch = jax.ShapeDtypeStruct((16, 8), jnp.float32)
  estimator = spmd.explore.Estimator(spmd.explore.TrainStep(step, create, batch), platform='cpu')
  target = spmd.explore.parse_target('cpu:8')
  plain, further = (estimator.estimate(on(*rules), target).memory for rules in (NAMES, (*NAMES, OVER)))
  assert further.parameters == plain.parameters
  assert further.optimizer - 4 == (plain.optimizer - 4) / 2  # but for the count


# -- reports


def test_explain_names_both_rules():
  explanation = spmd.explain(on(*NAMES, OVER), state_of({'w': box(8, 16)}, optax.adam(1.0)))
  assert explanation.why('opt_state/0/mu/w') == dedent("""\
    opt_state/0/mu/w: float32[8,16] as P(('data', 'fsdp'), 'tensor'), 64 B per device
      dim 0, 'embed' (8): data x fsdp, by rule 1 ('embed', 'fsdp') and rule 3 optimizer_over('data', min_size=1)
      dim 1, 'mlp' (16): tensor, by rule 2 ('mlp', 'tensor')""")
  assert 'embed → data+fsdp (1+3), mlp → tensor (2)' in str(explanation)
  record = next(each for each in explanation.records() if each['path'] == 'opt_state/0/mu/w')
  assert record['rules'] == ('1+3', '2')
  assert not explanation.findings.of('idle rule')


def test_it_is_reported_where_it_decides_nothing():
  layout = on(*NAMES, spmd.optimizer_over('data'))
  assert [str(finding.text) for finding in layout.check({'w': box(8, 16)}).of('idle rule')] == [
    "rule 3 optimizer_over('data') found no optimizer state, which is an Optax state, or below a key 'opt_state'."
  ]
  state = state_of({'w': box(8, 16)}, optax.sgd(1.0, momentum=0.9))
  assert [finding.text for finding in layout.check(state).of('idle rule')] == [
    "rule 3 optimizer_over('data') decided nothing: 1 x small (min_size=1048576)."
  ]


def test_the_reasons_for_which_it_skips_an_array():
  skipped = lambda rule, *shape: [
    skip.reason
    for row in on(('mlp', 'tensor'), ('embed', 'data'), rule, missing_axis='drop').rows(
      {'opt_state': box(*shape)}
    )
    for skip in row.skipped
  ]
  assert skipped(spmd.optimizer_over('fsdp', min_size=1), 6, 2) == ['indivisible']
  assert skipped(spmd.optimizer_over('data', min_size=1), 8, 16) == ['taken']
  assert skipped(spmd.optimizer_over('other', min_size=1), 8, 16) == ['missing']
  assert skipped(spmd.optimizer_over('fsdp', min_size=1, avoid=('tensor', 'data')), 8, 16) == [
    'no open dimension'
  ]


def test_wrong_arguments():
  with pytest.raises(errors.RulesError) as caught:
    spmd.optimizer_over((), avoid=(1,))
  assert (
    str(caught.value)
    == dedent("""\
    optimizer_over(...) does not take axes=(), avoid=(1,).
    Fix: axes is a mesh axis or a tuple of them, min_size a number of elements, avoid a tuple of mesh axes.""")
  )
  with pytest.raises(errors.MeshAxisError) as missing:
    on(spmd.optimizer_over('dta'))
  assert str(missing.value) == dedent("""\
    Rule 0 optimizer_over('dta') uses mesh axis 'dta', but the mesh has axes ('data', 'fsdp', 'tensor'). Did you mean 'data'?
    Fix: correct the axis name, add the axis to the mesh, or give the table missing_axis='drop'.""")


def test_a_table_that_drops_the_names_of_parameters_is_reported():
  state = state_of({'w': box(2048, 1024), 'b': box(8, names=('mlp',))}, optax.adam(1.0))
  dropping = on(('^opt_state/', spmd.Rules(spmd.fsdp('data'))), *NAMES)
  assert [finding.text for finding in dropping.check(state).suspicious] == [
    "optimizer state is sharded less than its parameter (2 arrays: opt_state/0/mu/w as P('data', None), "
    "params/w as P('fsdp', 'tensor')). optimizer_over(...) keeps the axes of the parameter, and adds others."
  ]
  for rules in (NAMES, (*NAMES, OVER), (*NAMES, spmd.fsdp('data'))):
    assert not on(*rules).check(state).of('sharded less')
