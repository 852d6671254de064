"""Constraints in other people's code that do not fit the layout: errors that name their lines, or their axes dropped."""

import threading
from pathlib import Path
from textwrap import dedent

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen.partitioning import with_sharding_constraint as t5x_names
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.lax import with_sharding_constraint as imported_constraint
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import errors
from flax_spmd._src.constraint_log import record_constraints
from flax_spmd.explore import TrainStep, compare
from flax_spmd.pipeline import OneFOneB, accumulate, stage_end

LINES = Path(__file__).read_text().splitlines()
RULES = (('batch', 'data'), ('hidden', 'model'), ('length', None))
SIZES = {'data': 2, 'model': 4}
LAYOUT = spmd.Layout(SIZES, RULES)
KEY, X = jax.random.key(0), jnp.ones((8, 16))


def at(marker):
  """`file:line` of the line of this file that ends with a marker."""
  [number] = [number for number, line in enumerate(LINES, 1) if line.endswith(f'  # {marker}')]
  return f'jax_constraints_test.py:{number}'


def text_of(kind, fn, *args):
  with pytest.raises(errors.FlaxSpmdError) as caught:
    fn(*args)
  assert type(caught.value) is kind
  return str(caught.value)


def t5x_constraint(x, spec):
  """As in T5X: nothing without a mesh."""
  if jax.sharding.get_abstract_mesh().empty:
    return x
  return jax.lax.with_sharding_constraint(x, spec)  # t5x


class Inner(nn.Module):
  constrained: object

  @nn.compact
  def __call__(self, x):
    return self.constrained(nn.Dense(16)(x))


class Model(nn.Module):
  constrained: object

  @nn.compact
  def __call__(self, x):
    return Inner(self.constrained, name='inner')(x)


MISSING = {
  'jax': lambda x: jax.lax.with_sharding_constraint(x, P('data', 'tensor')),  # jax
  'imported': lambda x: imported_constraint(x, P('data', 'tensor')),  # imported
  't5x': lambda x: t5x_constraint(x, P('data', 'tensor')),
  'ours': lambda x: spmd.constrain(x, P('data', 'tensor')),  # ours
}


def step_of(model):
  def step(variables, x):
    grads = jax.grad(lambda v: jnp.sum(model.apply(v, x)))(variables)
    return jax.tree.map(jnp.add, variables, grads)

  return step


CALLS = {
  'init': lambda layout, model: layout.init(model.init, KEY, X),
  'plan': lambda layout, model: layout.plan(model.init, KEY, X),
  'jit': lambda layout, model: layout.jit(model.apply)(Model(lambda x: x).init(KEY, X), X),
  'compare': lambda layout, model: compare(
    TrainStep(step_of(model), lambda: Model(lambda x: x).init(KEY, X), X), [layout], 'cpu:8'
  ),
}


@pytest.mark.parametrize('form', MISSING)
@pytest.mark.parametrize('call', CALLS)
def test_a_mesh_axis_that_the_layout_lacks(form, call):
  assert text_of(errors.MeshAxisError, CALLS[call], LAYOUT, Model(MISSING[form])) == dedent(f"""\
    The constraint {P('data', 'tensor')} at {at(form)} (module inner) uses mesh axis 'tensor', but the mesh is {{'data': 2, 'model': 4}}.
    Fix: correct the axis name, add the axis to the mesh, or give the layout missing_axis='drop'.""")


def test_a_sharding_that_cannot_be_made():
  def constrained(x):
    sharding = NamedSharding(LAYOUT.mesh, P('data', 'modle'))  # sharding
    return jax.lax.with_sharding_constraint(x, sharding)

  for layout in (LAYOUT, LAYOUT.replace(missing_axis='drop')):
    assert text_of(errors.MeshAxisError, layout.init, Model(constrained).init, KEY, X) == dedent(f"""\
      The sharding {P('data', 'modle')} at {at('sharding')} (module inner) uses mesh axis 'modle', but the mesh is {{'data': 2, 'model': 4}}. Did you mean 'model'?
      Fix: correct the axis name, or add the axis to the mesh.""")


@pytest.mark.parametrize('form', MISSING)
@pytest.mark.parametrize('call', ['init', 'plan', 'jit'])
def test_such_an_axis_is_dropped_on_request(form, call):
  CALLS[call](LAYOUT.replace(missing_axis='drop'), Model(MISSING[form]))


SHARDING = NamedSharding(LAYOUT.mesh, P('data', None, 'model'))
TOO_LONG = {
  'rank of jax': lambda x: jax.lax.with_sharding_constraint(x, SHARDING.spec),  # rank of jax
  'of a sharding': lambda x: jax.lax.with_sharding_constraint(x, SHARDING),  # of a sharding
  'rank of ours': lambda x: spmd.constrain(x, P('data', None, 'model')),  # rank of ours
}
NAMES = ('batch', 'length', 'hidden')
TOO_MANY_NAMES = {
  'names of flax': lambda x: nn.with_logical_constraint(x, NAMES),  # names of flax
  'names of t5x': lambda x: t5x_names(x, NAMES),  # names of t5x
}


@pytest.mark.parametrize('form', TOO_LONG | TOO_MANY_NAMES)
def test_more_entries_than_dimensions(form):
  named = f'{NAMES} as ' if form in TOO_MANY_NAMES else ''
  assert text_of(
    errors.LayoutError, LAYOUT.init, Model((TOO_LONG | TOO_MANY_NAMES)[form]).init, KEY, X
  ) == dedent(f"""\
    The constraint {named}{P('data', None, 'model')} at {at(form)} (module inner) has 3 entries for an array of rank 2, shape (8, 16).
    Fix: give at most one entry per dimension.""")


def test_every_array_of_a_tree_is_reported():
  def step(tree):
    return imported_constraint(tree, {'a': P('data', 'modle'), 'b': P('data', 'data')})  # tree

  tree = {'a': jnp.ones(8), 'b': [jnp.ones((8, 8)), jnp.ones(4)]}
  one, two = f'The constraint {P("data", "modle")} at', f'The constraint {P("data", "data")} at'
  assert text_of(errors.LayoutError, LAYOUT.jit(step), tree) == dedent(f"""\
    {one} {at('tree')} uses mesh axis 'modle', but the mesh is {{'data': 2, 'model': 4}}. Did you mean 'model'?
    {one} {at('tree')} has 2 entries for an array of rank 1, shape (8,).
    {two} {at('tree')} uses a mesh axis for more than one dimension.
    {two} {at('tree')} has 2 entries for an array of rank 1, shape (4,).
    Fix: correct the axis name, add the axis to the mesh, or give the layout missing_axis='drop'.
    Fix: give at most one entry per dimension.
    Fix: use every mesh axis once.""")


def test_in_a_stage_of_a_pipeline():
  layout = spmd.Layout({'stage': 2, 'data': 4})
  params = {'a': jnp.ones((4, 4)), 'b': jnp.ones((4, 4))}

  def step(params, batch):
    def loss(params, x):
      hidden = stage_end(jnp.tanh(x @ params['a']))
      hidden = jax.lax.with_sharding_constraint(hidden, P('data', 'tensor'))  # stage
      return jnp.mean((hidden @ params['b']) ** 2)

    return accumulate(lambda x: jax.value_and_grad(loss)(params, x), batch, OneFOneB(2))

  batch = np.ones((4, 8, 4), np.float32)
  piped = layout.pipeline_jit(step)
  assert text_of(errors.MeshAxisError, piped.lower, params, batch) == dedent(f"""\
    The constraint {P('data', 'tensor')} at {at('stage')} uses mesh axis 'tensor', but the mesh is {{'stage': 1, 'data': 4}}.
    Fix: correct the axis name, add the axis to the mesh, or give the layout missing_axis='drop'.""")


def test_sizes_that_do_not_divide_are_padded_inside_a_program():
  """As by JAX."""

  def step(x):
    x = jax.lax.with_sharding_constraint(x, P('model', 'data'))
    return nn.with_logical_constraint(2 * x, ('batch', 'hidden')).sum(0)

  x = np.ones((3, 5), np.float32)
  np.testing.assert_array_equal(LAYOUT.jit(step)(x), [6] * 5)


# -- missing_axis='drop'

AXES = ['data', 'model', 'tensor', 'pod']


@st.composite
def specs(draw):
  axes = draw(st.permutations(AXES))
  rank = draw(st.integers(0, 3))
  cuts = sorted(draw(st.lists(st.integers(0, len(axes)), min_size=rank, max_size=rank)))
  entries = [tuple(axes[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)]
  return P(*[entry[0] if len(entry) == 1 and draw(st.booleans()) else entry for entry in entries])


def constraint_in(layout, fn, *args):
  """The sharding in the one constraint of a function's trace."""
  [sharding] = [
    equation.params['sharding']
    for equation in layout.jit(fn).trace(*args).jaxpr.eqns
    if equation.primitive.name == 'sharding_constraint'
    and P.UNCONSTRAINED not in equation.params['sharding'].spec
  ]
  return NamedSharding(layout.mesh, sharding.spec).devices_indices_map((16, 16, 16))


@settings(max_examples=40)
@given(specs())
def test_an_axis_that_is_dropped_has_no_effect_as_one_of_size_1(spec):
  whole = spmd.Layout(SIZES | {'tensor': 1, 'pod': 1})
  dropping = spmd.Layout(SIZES, missing_axis='drop')
  x = jax.ShapeDtypeStruct((16, 16, 16), jnp.float32)

  def fn(x):
    return jax.lax.with_sharding_constraint(x, spec)

  assert constraint_in(dropping, fn, x) == constraint_in(whole, fn, x)


def test_flax_follows_the_rules_that_are_left():
  """A rule without any axis left is skipped, so a later one for its name decides."""
  rules = (('batch', ('pod', 'data')), ('hidden', 'tensor'), ('hidden', 'model'), ('length', None))
  layout = spmd.Layout(SIZES, rules, missing_axis='drop')
  x = jnp.ones((8, 8, 8))
  for lib in (nn, spmd):
    with record_constraints() as requests:
      y = layout.jit(lambda x: lib.with_logical_constraint(x, ('batch', 'length', 'hidden')))(x)  # noqa: B023
    assert [one.spec for one in requests] == [P('data', None, 'model')]
    assert y.sharding.is_equivalent_to(NamedSharding(layout.mesh, P('data', None, 'model')), 3)


def test_flax_rules_that_are_left_are_those_of_the_layout():
  """A block with the rules that Flax reports keeps the layout's."""
  rules = (('w', P('data')), ('batch', ('pod', 'data')), ('hidden', 'tensor'))
  layout = spmd.Layout(SIZES, rules, missing_axis='drop')
  with layout:
    assert nn.get_logical_axis_rules() == (('batch', 'data'),)
    with nn.logical_axis_rules(nn.get_logical_axis_rules()):
      assert spmd.get_logical_axis_rules() == rules[1:]
  assert nn.get_logical_axis_rules() == ()


# -- JAX without a layout


def test_jax_has_its_own_errors_without_a_layout():
  found = []

  def elsewhere():
    with pytest.raises(ValueError) as caught, jax.set_mesh(LAYOUT.mesh):
      jax.jit(MISSING['jax'])(X)
    found.append(caught.value)

  with LAYOUT:
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
  elsewhere()
  assert [isinstance(error, errors.FlaxSpmdError) for error in found] == [False, False]


def test_a_mesh_that_is_set_inside_a_layout():
  other = spmd.make_mesh({'tensor': 4, 'data': 2})
  with LAYOUT, jax.set_mesh(other):
    assert jax.jit(MISSING['jax'])(X).sharding.spec == P('data', 'tensor')


def test_a_tree_of_specs_that_is_no_prefix_is_left_to_jax():
  with pytest.raises(ValueError, match='pytree'):
    LAYOUT.jit(lambda x: jax.lax.with_sharding_constraint({'a': x}, {'b': P()}))(X)
