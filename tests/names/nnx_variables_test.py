"""Names in the metadata of NNX variables are read as those of boxes, and as Flax resolves them."""

import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as MemoryLayout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import checkpoint
from flax_spmd.errors import LayoutError, UnmatchedNameError
from tests import strategies

RULES = (('batch', 'data'), ('mlp', 'model'), ('embed', None))
TX = {
  'adam': optax.adam(1e-3),
  'adafactor': optax.adafactor(1e-3, min_dim_size_to_factor=8),
  'scheduled': optax.inject_hyperparams(optax.adam)(1e-3),
  'accumulated': optax.MultiSteps(optax.sgd(1.0, momentum=0.9), 2),
}


@pytest.fixture(scope='module')
def layout():
  return spmd.Layout({'data': 2, 'model': 4}, RULES)


@pytest.fixture(autouse=True)
def no_eager_sharding():
  with nnx.use_eager_sharding(False):
    yield


def named(*names, **metadata):
  return nnx.with_partitioning(nnx.initializers.lecun_normal(), names, **metadata)


class MLP(nnx.Module):
  def __init__(self, rngs):
    self.up = nnx.Linear(32, 64, kernel_init=named('embed', 'mlp'), rngs=rngs)
    self.down = nnx.Linear(64, 32, kernel_init=named('mlp', 'embed'), rngs=rngs)
    self.norm = nnx.BatchNorm(32, rngs=rngs)
    self.up_again = self.up.kernel


@pytest.fixture(scope='module')
def model():
  with nnx.use_eager_sharding(False):
    return MLP(nnx.Rngs(0))


def outcome(layout, unit):
  """The spec of an array, or the text of the error."""
  try:
    return layout.spec({'w': unit})
  except LayoutError as error:
    return str(error)


@given(st.data())
@settings(max_examples=40)
def test_a_variable_is_planned_as_a_box(data):
  """In any table over mesh axes that are no logical names."""
  sizes = data.draw(strategies.axis_sizes)
  rules = data.draw(strategies.rules())
  layout = spmd.Layout(spmd.abstract_mesh(sizes), rules, indivisible='replicate')
  names = tuple(data.draw(strategies.names(max_size=3)))
  shape = tuple(data.draw(strategies.dimensions) for _ in names)
  value = jax.ShapeDtypeStruct(shape, jnp.float32)
  variable = nnx.Param(value, out_sharding=names)
  box = spmd.LogicallyPartitioned(value, names)
  if names:  # without any entry Flax takes a variable for one without names
    assert outcome(layout, variable) == outcome(layout, box)
    assert spmd.get_partition_spec({'w': variable})['w'].get_value() == P(*names)


def test_a_module_its_state_and_its_optimizer_have_one_plan(layout, model):
  for tx in TX.values():
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    rows = {row.path: row for row in layout.rows((model, optimizer))}
    state = {row.path: row.spec for row in layout.rows(nnx.state((model, optimizer)))}
    assert {path: rows[path].spec for path in state} == state
    assert set(rows) - set(state) == {'0/up_again'}  # a state has a shared variable once
    assert rows['0/up/kernel'].spec == P(None, 'model') and rows['0/down/kernel'].spec == P(
      'model', None
    )
    copies = [row for path, row in rows.items() if path.endswith(('mu/up/kernel', 'trace/up/kernel'))]
    assert all(row.spec == P(None, 'model') and row.field for row in copies)
    assert not layout.check((model, optimizer)).suspicious


def test_factored_moments_keep_the_names_of_their_dimensions(layout, model):
  state = nnx.state((model, nnx.Optimizer(model, TX['adafactor'], wrt=nnx.Param)))
  specs = {row.path: row.spec for row in layout.rows(state)}
  assert specs['1/opt_state/0/v_row/up/kernel'] == P(None)
  assert specs['1/opt_state/0/v_col/up/kernel'] == P('model')


@pytest.mark.parametrize(
  'given_names',
  [
    (None, 'model'),
    P(None, 'model'),
    ['embed', 'mlp'],
    lambda mesh: NamedSharding(mesh, P(None, 'model')),
    lambda mesh: Format(MemoryLayout((0, 1)), NamedSharding(mesh, P(None, 'model'))),
  ],
)
def test_names_are_mesh_axes_where_there_is_no_rule(layout, given_names):
  names = given_names(layout.mesh) if callable(given_names) else given_names
  variable = nnx.Param(jnp.ones((8, 16)), out_sharding=names)
  assert layout.spec({'w': variable}) == {'w': P(None, 'model')}


def test_rules_of_a_variable_come_before_those_of_the_layout(layout):
  """As in Flax's test_logical_rules: a variable has a rule for one of its names, the context for the other."""
  state = {
    'w': nnx.Param(jnp.ones((8, 16)), out_sharding=('row', 'mlp'), sharding_rules=(('row', 'data'),))
  }
  assert layout.spec(state) == {'w': P('data', 'model')}
  assert not layout.check(state).of('unmatched')
  with nnx.logical_axis_rules(RULES):
    theirs = nnx.get_partition_spec(state)
  assert theirs['w'].get_value() == P('data', 'model')


class Misspelled(nnx.Module):
  def __init__(self):
    names = {
      'kernel_metadata': {'out_sharding': ('embedd', 'mlp')},
      'bias_metadata': {'out_sharding': ('mpl',)},
    }
    self.up = nnx.Linear(8, 16, rngs=nnx.Rngs(0), **names)


def test_a_name_without_a_rule_follows_the_policies_of_the_table(layout):
  assert str(layout.check(layout.abstract(Misspelled)).of('unmatched')) == (
    "name 'mpl' has no rule and is replicated (1 array: up/bias). Did you mean 'mlp'?\n"
    "name 'embedd' has no rule and is replicated (1 array: up/kernel). Did you mean 'embed'?"
  )
  with pytest.raises(UnmatchedNameError) as error:
    layout.replace(unmatched='error').init(Misspelled)
  assert str(error.value) == textwrap.dedent("""\
    up/bias, dim 0 'mpl': no rule for this logical name (names ('mpl',)). Did you mean 'mlp'?
    up/kernel, dim 0 'embedd': no rule for this logical name (names ('embedd', 'mlp')). Did you mean 'embed'?
    Fix: correct the name, or add a rule for it; ('mpl', None) replicates it.
    Fix: correct the name, or add a rule for it; ('embedd', None) replicates it.""")


def test_more_names_than_dimensions_are_an_error_before_anything_runs(layout):
  def create():
    names = {'w': nnx.Param(jnp.ones(16), out_sharding=('embed', 'mlp'))}
    return nnx.State({**names, 'scale': nnx.Param(jnp.ones(()), out_sharding=('mlp',))})

  with pytest.raises(LayoutError) as error:
    layout.init(create)
  assert str(error.value) == textwrap.dedent("""\
    scale: 1 name ('mlp',) for an array of rank 0, shape ().
    w: 2 names ('embed', 'mlp') for an array of rank 1, shape (16,).
    Fix: give at most one name per dimension.""")


def test_names_of_stacked_layers_come_from_nnx_vmap(layout):
  @nnx.split_rngs(splits=4)
  @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: 'layers'})
  def stacked(rngs):
    return nnx.Linear(32, 64, kernel_init=named('embed', 'mlp'), rngs=rngs)

  layout = layout.replace(rules=(*RULES, ('layers', 'data')))
  state = layout.init(lambda: nnx.state(stacked(nnx.Rngs(0))))
  assert state['kernel'].out_sharding == ('layers', 'embed', 'mlp')
  assert state['kernel'].sharding.spec == P('data', None, 'model')


def test_with_names_names_variables(layout, model):
  state = nnx.state(nnx.clone(model))
  given_names = spmd.with_names(state, {'norm': {'scale': ('mlp',)}})
  assert layout.spec(given_names)['norm']['scale'] == P('model')
  assert given_names['norm']['scale'].out_sharding == ('mlp',)
  assert layout.spec(state)['norm']['scale'] == P()


def test_a_variable_that_is_shared_stays_shared(layout, model, tmp_path):
  placed = layout.shard(model)
  assert placed.up_again is placed.up.kernel and placed.up_again[...].sharding.spec == P(None, 'model')
  assert len(model.up.kernel[...].devices()) == 1
  checkpoint.save(tmp_path / 'model', placed, layout)
  back = checkpoint.restore(tmp_path / 'model', placed)
  assert back.up_again is back.up.kernel
  np.testing.assert_array_equal(back.up_again[...], model.up_again[...])


def test_a_checkpoint_of_a_module_is_one_of_its_state(layout, model, tmp_path):
  checkpoint.save(tmp_path / 'state', layout.shard(nnx.state(model)), layout)
  listed = str(checkpoint.ls(tmp_path / 'state'))
  assert all(row.path in listed for row in layout.rows(nnx.state(model))) and '/value' not in listed
  other = spmd.Layout({'data': 4, 'model': 2}, RULES)
  plan = other.plan(lambda: nnx.state(MLP(nnx.Rngs(1))))
  back = checkpoint.restore(tmp_path / 'state', plan)
  assert (
    back['up']['kernel'].sharding.spec == P(None, 'model')
    and back['up']['kernel'].sharding.mesh == other.mesh
  )
  np.testing.assert_array_equal(back['up']['kernel'][...], model.up.kernel[...])


def test_get_sharding_resolves_the_names_of_variables(layout):
  state = {'w': nnx.Param(jnp.ones((8, 16)), out_sharding=('embed', 'mlp')), 'b': nnx.Param(jnp.ones(3))}
  with layout:
    shardings = spmd.get_sharding(state, layout.mesh)
  assert shardings['w'].get_value().spec == P(None, 'model') and shardings['b'].get_value().spec == P()


class Shared(nnx.Module):
  """A module in two places, and a variable."""

  def __init__(self, rngs):
    self.one = MLP(rngs)
    self.two = self.one
    self.list = nnx.List([self.one.up, nnx.data(jnp.arange(8.0))])


def test_a_module_that_is_shared_stays_shared(layout, tmp_path):
  create = lambda: Shared(nnx.Rngs(0))
  other: Any = nnx.Dict(x=nnx.Param(jnp.ones(8)))
  model = create()
  other.model = model
  plan = layout.plan(create)
  placed, placed_other = layout.shard((model, other))
  assert placed_other.model is placed
  checkpoint.save(tmp_path / 'model', placed, layout)
  restored = checkpoint.restore(tmp_path / 'model', placed)
  for each in (placed, restored, plan.abstract(), plan.box(model), layout.init(create)):
    assert (
      each.two is each.one and each.list[0] is each.one.up and each.one.up_again is each.one.up.kernel
    )
  for each in (placed, restored):
    np.testing.assert_array_equal(each.list[1], model.list[1])
    np.testing.assert_array_equal(each.two.down.kernel[...], model.one.down.kernel[...])
    assert each.two.down.kernel.sharding.spec == P('model', None)
  assert model.one.down.kernel.sharding.device_set != placed.one.down.kernel.sharding.device_set


BY_METHOD = [
  'shard',
  'replicate',
  'gather',
  'local_to_global',
  'local_indices',
  'check',
  'rows',
  'spec',
  'sharding',
  'names',
]
OTHER_USES = {
  'plan': lambda layout, create: layout.plan(create),
  'init': lambda layout, create: layout.init(create),
  'module-level gather': lambda layout, create: spmd.gather((1, create())),
  'local_to_global with names': lambda layout, create: layout.local_to_global(create(), ('batch',)),
  'constraint': lambda layout, create: spmd.with_sharding_constraint(create(), ('batch',)),
  'with_names': lambda layout, create: spmd.with_names(create(), lambda leaf: None),
  'Plan.shard': lambda layout, create: layout.plan(lambda: {'w': jnp.ones(8)}).shard(create()),
  'Plan.box': lambda layout, create: layout.plan(lambda: {'w': jnp.ones(8)}).box(create()),
  'reshard': lambda layout, create: layout.reshard(create(), layout),
  'explain': lambda layout, create: spmd.explain(layout, create()),
}


@pytest.mark.parametrize('use', [*BY_METHOD, *OTHER_USES])
def test_a_module_that_contains_itself_is_told(layout, use):
  def create():
    model: Any = MLP(nnx.Rngs(0))
    model.inner = nnx.Dict(back=model)
    return model

  with pytest.raises(LayoutError) as error:
    if use in OTHER_USES:
      OTHER_USES[use](layout, create)
    else:
      getattr(layout, use)(create())
  assert str(error.value) == (
    'MLP contains itself, at inner/back: it is no tree of arrays.\n'
    'Fix: pass nnx.state(module), which has each variable once. Arguments of functions of layout.jit may be such modules.'
  )
