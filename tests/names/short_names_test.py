"""Names for fewer dimensions than an array has: the last dimensions have none, as in Flax; and names for more.

Flax is the oracle for parameters and for the moments of optimizers.
"""

import pickle
import types
from textwrap import dedent

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen import partitioning
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import checkpoint, errors, explore
from tests import strategies
from tests.texts import text_of

MESH = spmd.abstract_mesh({'data': 2, 'model': 4})
RULES = (('embed', 'data'), ('kv', 'model'), ('mlp', 'model'))
KEY = jax.random.key(0)
X = jnp.linspace(-1.0, 1.0, 8 * 4 * 16).reshape(8, 4, 16)


def box(shape, *names, cls=spmd.LogicallyPartitioned):
  return cls(jax.ShapeDtypeStruct(shape, jnp.float32), names)


# -- against Flax


@st.composite
def arrays(draw):
  """Shape and names of an array; it may have more dimensions than names."""
  names = draw(strategies.names(max_size=3))
  rank = len(names) + draw(st.integers(0, 3))
  return (8,) * rank, tuple(names)


def sharded_by_flax(names, shape, rules, mesh):
  sharding = NamedSharding(mesh, nn.logical_to_mesh_axes(names, rules))
  sharding.shard_shape(shape)
  return sharding


@given(arrays(), strategies.rules())
def test_specs_are_those_of_flax(array, rules):
  shape, names = array
  mesh = spmd.abstract_mesh(dict.fromkeys(strategies.MESH_AXES, 2))
  try:
    expected = sharded_by_flax(names, shape, rules, mesh)
  except Exception:
    with pytest.raises(errors.FlaxSpmdError):
      spmd.Layout(mesh, rules).sharding({'w': box(shape, *names)})
    return
  layout = spmd.Layout(mesh, rules)
  tree = {'w': box(shape, *names)}
  stored = [None if axes is P.UNCONSTRAINED else axes for axes in expected.spec]
  spec = layout.spec(tree)['w']
  assert tuple(spec) == (*stored, *[None] * (len(shape) - len(stored)))
  assert [(*d[:1],) for d in layout.rows(tree)[0].decisions] == [(dim,) for dim in range(len(shape))]
  assert spmd.get_partition_spec(tree) == nn.get_partition_spec(tree)


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from('abc'), arrays(), min_size=1, max_size=3), strategies.rules())
def test_moments_are_sharded_as_by_flax(described, rules):
  mesh = spmd.abstract_mesh(dict.fromkeys(strategies.MESH_AXES, 2))

  def state(lib):
    params = {
      key: box(shape, *names, cls=lib.LogicallyPartitioned) for key, (shape, names) in described.items()
    }
    return jax.eval_shape(
      lambda p: TrainState.create(apply_fn=None, params=p, tx=optax.adam(1e-3)), params
    )

  for part in (lambda state: state, lambda state: state.opt_state):
    specs = spmd.get_partition_spec(part(state(spmd)))
    assert jax.tree.leaves(specs) == jax.tree.leaves(nn.get_partition_spec(part(state(nn))))
    try:
      expected = jax.tree.leaves(nn.logical_to_mesh_sharding(specs, mesh, rules))
    except Exception:
      return  # an axis for two dimensions
    assert jax.tree.leaves(spmd.logical_to_mesh_sharding(specs, mesh, rules)) == expected


class Attention(nn.Module):
  """Flax's example lm1b in small: two names on kernels of three dimensions, by our boxes or Flax's."""

  lib: types.ModuleType = spmd

  def named(self, init, *names):
    return self.lib.with_logical_partitioning(init, names)

  @nn.compact
  def __call__(self, x):
    lecun = nn.initializers.lecun_normal()
    ones = self.named(nn.initializers.ones, 'embed')
    y = nn.LayerNorm(scale_init=ones, bias_init=self.named(nn.initializers.zeros, 'embed'))(x)
    kernel = self.named(lecun, 'embed', 'kv')
    x += nn.MultiHeadDotProductAttention(4, qkv_features=32, use_bias=False, kernel_init=kernel)(y)
    y = nn.Dense(32, kernel_init=self.named(lecun, 'embed', 'mlp'), use_bias=False)(x)
    return x + nn.Dense(16, kernel_init=self.named(lecun, 'mlp', 'embed'), use_bias=False)(jnp.tanh(y))


ADAMW = optax.adamw(1e-2)
MODELS = {spmd: Attention(spmd), nn: Attention(nn)}


def create(key, x, lib=spmd):
  variables = MODELS[lib].init(key, x)
  return TrainState.create(apply_fn=MODELS[lib].apply, params=variables['params'], tx=ADAMW)


def step(state, x):
  loss, grads = jax.value_and_grad(
    lambda params: jnp.mean((state.apply_fn({'params': params}, x) - 1) ** 2)
  )(state.params)
  return state.apply_gradients(grads=grads), loss


def losses_of(step, state, x):
  losses = []
  for _ in range(3):
    state, loss = step(state, x)
    losses.append(float(loss))
  return losses


@pytest.mark.slow
@pytest.mark.parametrize('lib', [spmd, nn])
def test_an_attention_with_two_names_trains_as_by_flax(lib):
  """Everything under a layout, against Flax's functions by hand."""
  layout = spmd.Layout({'data': 2, 'model': 4}, RULES)
  abstract = jax.eval_shape(lambda key, x: create(key, x, nn), KEY, X)
  shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract), layout.mesh, RULES)
  with jax.set_mesh(layout.mesh):
    flaxs = jax.jit(lambda key, x: nn.unbox(create(key, x, nn)), out_shardings=nn.unbox(shardings))(
      KEY, X
    )
  state = layout.init(create, KEY, X, lib)
  pairs = zip(jax.tree.leaves(state), jax.tree.leaves(flaxs), strict=True)
  for ours, theirs in pairs:
    assert ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim)
    np.testing.assert_array_equal(ours, theirs)
  query = state.params['MultiHeadDotProductAttention_0']['query']['kernel']
  assert query.names == ('embed', 'kv') and query.value.shape == (16, 4, 8)
  assert state.opt_state[0].mu['MultiHeadDotProductAttention_0']['query'][
    'kernel'
  ].value.sharding.spec == P('data', 'model', None)
  losses = losses_of(jax.jit(step), flaxs, X)
  batch = layout.shard(X, ('embed',))
  np.testing.assert_allclose(losses_of(layout.jit(step), state, batch), losses, rtol=1e-4)
  assert len(set(losses)) == 3


def by_hand(model, mesh, rules):
  """`init` under a mesh and rules in force, without a layout."""
  with jax.set_mesh(mesh), spmd.logical_axis_rules(rules):
    return jax.jit(model.init)(KEY, X)


class General(nn.Module):
  """A kernel that is initialised flat, with names for all of its dimensions or fewer."""

  initializer: object

  @nn.compact
  def __call__(self, x):
    return nn.DenseGeneral((4, 4), use_bias=False, kernel_init=self.initializer)(x).reshape(x.shape)


class Repeated(nn.Module):
  """`General` under `nn.scan` or `nn.vmap`."""

  initializer: object
  transform: str

  @nn.compact
  def __call__(self, x):
    options = dict(
      variable_axes={'params': 0},
      split_rngs={'params': True},
      metadata_params={nn.PARTITION_NAME: None},
    )
    if self.transform == 'vmap':
      return nn.vmap(General, in_axes=1, out_axes=1, **options)(self.initializer)(x)
    body = nn.scan(lambda layer, x, _: (layer(x), None), length=3, **options)
    return body(General(self.initializer), x, None)[0]


LECUN = nn.initializers.lecun_normal()
ANNOTATED = {
  'mesh axes': lambda lib: lib.with_partitioning(LECUN, ('data', 'model', None)),
  'one mesh axis': lambda lib: lib.with_partitioning(LECUN, ('data',)),
  'names': lambda lib: lib.with_logical_partitioning(LECUN, ('embed', 'kv', None)),
  'two names': lambda lib: lib.with_logical_partitioning(LECUN, ('embed', 'kv')),
}
REPEATED = {
  'alone': lambda init: General(init),
  'scan': lambda init: Repeated(init, 'scan'),
  'vmap': lambda init: Repeated(init, 'vmap'),
}


@pytest.mark.parametrize(
  'annotated, repeated',
  [
    pytest.param(
      annotated,
      repeated,
      marks=[] if repeated == 'alone' or annotated == 'two names' else [pytest.mark.slow],
    )
    for annotated in ANNOTATED
    for repeated in REPEATED
  ],
)
def test_kernels_that_are_initialised_flat_have_the_values_of_flax(annotated, repeated):
  model = lambda lib: REPEATED[repeated](ANNOTATED[annotated](lib))
  flaxs = jax.jit(model(nn).init)(KEY, X)  # without a mesh: Flax's boxes constrain the flat kernel
  layout = spmd.Layout({'data': 2, 'model': 4}, RULES)
  expected = ('data', 'model', None) if annotated != 'one mesh axis' else ('data', None, None)
  stacked = () if repeated == 'alone' else (None,)
  for ours in (layout.init(model(spmd).init, KEY, X), by_hand(model(spmd), layout.mesh, RULES)):
    (kernel,), (theirs,) = jax.tree.leaves(ours), jax.tree.leaves(flaxs)
    np.testing.assert_array_equal(kernel, theirs)
  assert layout.spec(jax.eval_shape(model(spmd).init, KEY, X)) == jax.tree.map(
    lambda _: P(*stacked, *expected), nn.unbox(flaxs)
  )


# -- state of optimizers


SHORT = {'params': {'w': box((8, 4, 16), 'embed', 'kv'), 'v': box((8, 16), 'embed', 'kv')}}


def specs_by_field(tx):
  """Specs of the state of an optimizer, beside its parameters and alone."""
  layout = spmd.Layout(MESH, RULES)
  state = jax.eval_shape(lambda p: TrainState.create(apply_fn=None, params=p, tx=tx), SHORT['params'])
  return layout.spec(state).opt_state, layout.spec(state.opt_state)


def test_factored_moments_keep_the_names_of_their_dimensions():
  beside, _ = specs_by_field(optax.scale_by_factored_rms(min_dim_size_to_factor=4))
  assert beside.v_row == {'v': P('data'), 'w': P('data', 'model')}
  assert beside.v_col == {'v': P('model'), 'w': P('model', None)}


def test_a_history_is_stacked_before_the_dimensions_of_its_parameter():
  for specs in specs_by_field(optax.scale_by_lbfgs(memory_size=3)):
    assert specs.params == {'v': P('data', 'model'), 'w': P('data', 'model', None)}
    assert specs.diff_params_memory == {
      'v': P(None, 'data', 'model'),
      'w': P(None, 'data', 'model', None),
    }


def test_a_history_in_plain_dictionaries():
  tree = {
    **SHORT,
    'history': {'w': box((3, 8, 4, 16), 'embed', 'kv'), 'v': box((3, 8, 16), 'embed', 'kv')},
  }
  assert spmd.Layout(MESH, RULES).spec(tree)['history'] == {
    'v': P(None, 'data', 'model'),
    'w': P(None, 'data', 'model', None),
  }


def test_parameters_with_the_names_of_another_are_not_its_history():
  tree = {'a': {'w': box((8, 16), 'embed', 'kv')}, 'b': {'w': box((2, 8, 16), 'embed', 'kv')}}
  for params in (tree, {'params': tree}):
    specs = jax.tree.leaves(spmd.Layout(MESH, (('embed', 'data'),)).spec(params))
    assert specs == [P('data', None), P('data', None, None)]
    assert spmd.get_partition_spec(params) == nn.get_partition_spec(params)


def test_a_box_with_too_many_names_is_an_error_beside_one_that_fits():
  tree = {'params': {'a': {'w': box((8, 16), 'embed', 'kv')}, 'b': {'w': box((8,), 'embed', 'kv')}}}
  assert text_of(errors.LayoutError, spmd.Layout(MESH, RULES).spec, tree) == dedent("""\
    params/b/w: 2 names ('embed', 'kv') for an array of rank 1, shape (8,).
    Fix: give at most one name per dimension.""")


def test_names_in_a_collection_beside_the_arrays_are_padded_too():
  w = jax.ShapeDtypeStruct((8, 4, 16), jnp.float32)
  axes = {'params_axes': {'w_axes': partitioning.AxisMetadata(('embed', 'kv'))}}
  moments = jax.eval_shape(optax.adam(1e-3).init, {'w': w})
  specs = spmd.Layout(MESH, RULES).spec({'params': {'w': w}, 'opt_state': moments, **axes})
  expected = {'w': P('data', 'model', None)}
  assert specs['params'] == specs['opt_state'][0].mu == specs['opt_state'][0].nu == expected


# -- the policy and the findings


def test_the_policy_makes_them_an_error_before_anything_is_compiled():
  layout = spmd.Layout({'data': 2, 'model': 4}, RULES, short_names='error')
  parts = [
    f"params/MultiHeadDotProductAttention_0/{part}/kernel: 2 names ('embed', 'kv')"
    for part in ('key', 'out')
  ]
  for fn in (layout.init, layout.plan, layout.abstract):
    text = text_of(errors.LayoutError, fn, create, KEY, X)
    lines = text.splitlines()
    assert [line.partition(' for')[0] for line in lines[:2]] == parts
    assert len(lines) == 5  # four kernels, whose moments are not repeated
    assert lines[-1] == (
      "Fix: give one name per dimension, None for a dimension without a name, or give the table short_names='pad'."
    )
  assert pickle.loads(pickle.dumps(layout)).rules.policies.short_names == 'error'
  assert "short_names='error'" in repr(layout) and 'short_names = "error"' in layout.to_toml()


def test_the_policy_of_a_table_within_the_table_is_its_own():
  strict = spmd.Rules(('embed', 'data'), short_names='error')
  layout = spmd.Layout(MESH, (('^b', strict), ('embed', 'data')))
  tree = {'a': box((8, 4), 'embed'), 'b': box((8, 4), 'embed')}
  assert text_of(errors.LayoutError, layout.spec, tree).splitlines()[0] == (
    "b: in the table of rule 0 '^b': 1 name ('embed',) for an array of rank 2, shape (8, 4)."
  )


def test_one_finding_names_paths_names_and_rank():
  layout = spmd.Layout(MESH, RULES)
  state = jax.eval_shape(create, KEY, X)
  (finding,) = layout.check(state).of('few names')
  where = 'params/MultiHeadDotProductAttention_0'
  assert finding.text == (
    "fewer names than dimensions, the last have none: ('embed', 'kv') for rank 3 "
    f'(4 arrays: {where}/key/kernel, {where}/out/kernel, ...).'
  )
  assert len(finding.paths) == 4 and not finding.suspicious
  (alone,) = layout.check(state.opt_state).of('few names')
  assert len(alone.paths) == 8
  assert not layout.check({'w': box((8, 4), 'embed', None)}).of('few names')


def test_the_explanation_has_a_line_for_every_dimension():
  layout = spmd.Layout(MESH, RULES)
  found = spmd.explain(layout, SHORT)
  assert found.row('params/w').names == ('embed', 'kv', None)
  assert [row.unnamed for row in found.rows] == [0, 1]
  assert found.why('params/w').splitlines() == [
    "params/w: float32[8,4,16] as P('data', 'model', None), 256 B per device",
    "  dim 0, 'embed' (8): data, by rule 0 ('embed', 'data')",
    "  dim 1, 'kv' (4): model, by rule 1 ('kv', 'model')",
    '  dim 2, 16: replicated, no rule decided',
  ]


# -- names that no rule uses


NAMELESS_TABLES = [
  (spmd.fsdp('data', min_size=1),),
  (('kernel$', P('data')), ('batch', 'model')),
  (('kernel$', P('data')), spmd.fsdp('data', min_size=1)),
  spmd.Rules(('kernel$', P('data')), short_names='error'),
]


@pytest.mark.parametrize('rules', NAMELESS_TABLES)
@pytest.mark.parametrize('names', [(), ('embed',), ('embed', 'kv', 'a', 'b')])
def test_names_that_no_rule_uses_do_not_block_a_table(names, rules):
  layout = spmd.Layout({'data': 8, 'model': 1}, rules)
  tree = {'kernel': spmd.LogicallyPartitioned(jnp.ones((8, 4, 4)), names)}
  assert layout.spec(tree) == {'kernel': P('data', None, None)}
  assert layout.shard(tree)['kernel'].value.sharding.spec == P('data', None, None)
  many = layout.check(tree).of('many names')
  assert [finding.text for finding in many] == (len(names) > 3) * [
    "more names than dimensions, ignored as no rule uses them: ('embed', 'kv', 'a', 'b') for rank 3 (1 array: kernel)."
  ]


def test_moments_of_a_parameter_with_too_many_names_follow_it():
  params = {'w': box((8, 16), 'embed', 'kv', 'a')}
  state = jax.eval_shape(
    lambda params: TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3)), params
  )
  layout = spmd.Layout(MESH, (spmd.fsdp('data', min_size=1),))
  specs = layout.spec(state)
  assert specs.opt_state[0].mu == specs.params == {'w': P(None, 'data')}
  assert [finding.kind for finding in layout.check(state)] == ['many names', 'idle axis']
  text = text_of(errors.LayoutError, layout.replace(rules=RULES).spec, state)
  assert text.splitlines()[:-1] == [
    "params/w: 3 names ('embed', 'kv', 'a') for an array of rank 2, shape (8, 16)."
  ]


def test_too_many_names_are_an_error_if_something_uses_them():
  tree = {'w': box((8,), 'embed', 'kv')}
  layouts = [
    spmd.Layout(MESH, (('kv', 'data'),)),
    spmd.Layout(MESH, (spmd.fsdp('data'), ('embed', None))),
    spmd.Layout(MESH, (spmd.fsdp('data'),), unmatched='error'),
  ]
  for layout in layouts:
    assert text_of(errors.LayoutError, layout.spec, tree) == dedent("""\
      w: 2 names ('embed', 'kv') for an array of rank 1, shape (8,).
      Fix: give at most one name per dimension.""")
  axes = {'w': box((8,), 'data', None, cls=spmd.Partitioned)}
  with pytest.raises(errors.LayoutError, match=r"w: 2 names \('data', None\) for an array of rank 1"):
    spmd.Layout(MESH).spec(axes)


# -- placements, checkpoints, comparison


def test_placements_may_be_shorter_than_the_rank():
  layout = spmd.Layout({'data': 2, 'model': 4}, RULES)
  assert layout.shard(X, ('embed',)).sharding.spec == P('data')
  double = layout.jit(lambda x: 2 * x, in_rules=(('embed',),), out_rules=(None, 'kv'))
  assert double(X).sharding.is_equivalent_to(NamedSharding(layout.mesh, P(None, 'model')), 3)
  assert layout.local_to_global(np.ones((8, 4)), ('embed',)).sharding.spec == P('data')
  strict = layout.replace(short_names='error')
  assert text_of(errors.LayoutError, strict.shard, X, ('embed',)).startswith(
    "(root): 1 name ('embed',) for an array of rank 3, shape (8, 4, 16)."
  )


def test_a_step_opens_boxes_that_a_path_rule_has_placed_as_stored():
  """Equal boxes around arrays of two ranks, of which the rule places one."""
  layout = spmd.Layout({'data': 2, 'model': 4}, (('^w', P(None, None, 'data')), *RULES))
  w = spmd.LogicallyPartitioned(jnp.ones((8, 4, 16)), ('embed', 'kv'))
  v = spmd.LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'kv'))
  for tree in ({'w': w}, {'w': w, 'v': v}):
    state = layout.shard(tree)
    program = layout.jit(lambda tree: spmd.unbox(tree)['w'] * 2).lower(state).compile()
    assert 'all-to-all' not in program.as_text() and 'all-gather' not in program.as_text()


def test_a_checkpoint_has_one_name_per_dimension(tmp_path):
  layout = spmd.Layout({'data': 2, 'model': 4}, RULES)
  state = layout.init(create, KEY, X)
  checkpoint.save(tmp_path / 'state', state, layout=layout)
  other = spmd.Layout({'data': 8}, (('kv', 'data'),), indivisible='replicate')
  restored = checkpoint.restore(tmp_path / 'state', other.abstract(create, KEY, X))
  jax.tree.map(np.testing.assert_array_equal, state.params, restored.params)
  leaves = checkpoint.show(tmp_path / 'state').record.leaves
  kernel = 'MultiHeadDotProductAttention_0/query/kernel'
  for path in (f'params/{kernel}', f'opt_state/0/mu/{kernel}'):
    assert leaves[path].names == ('embed', 'kv', None)


@pytest.mark.slow
def test_compared_layouts():
  layouts = {
    'names': spmd.Layout({'data': 2, 'model': 4}, RULES),
    'fsdp': spmd.Layout({'data': 8}, (spmd.fsdp('data'),)),
  }
  train_step = explore.TrainStep(step, create, X, (KEY, X))
  found = spmd.compare(train_step, layouts, 'cpu:8')
  assert [outcome.error for outcome in found.outcomes] == [None, None]
