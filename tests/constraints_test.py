"""Constraints on every kind of mesh axis: Auto, Explicit, Manual and mixed; and constraints without a mesh."""

import re
from functools import partial
from textwrap import dedent

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import spmd as flax_linen_spmd
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd.errors import LayoutError, MeshAxisError, MeshError, UnmatchedNameError

RULES = (('batch', 'data'), ('hidden', 'model'))


def spec_of(x):
  """The spec without trailing Nones."""
  entries = list(x.sharding.spec)
  while entries and entries[-1] is None:
    entries.pop()
  return P(*entries)


def test_auto_axes_get_a_constraint(mesh):
  y = jax.jit(lambda x: spmd.constrain(2 * x, P('data', 'model'), mesh))(jnp.ones((8, 8)))
  assert spec_of(y) == P('data', 'model')


def test_unconstrained_dimensions_stay_open(mesh):
  x = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P(None, 'model')))
  y = jax.jit(lambda x: spmd.constrain(x, P('data', P.UNCONSTRAINED), mesh))(x)
  assert spec_of(y) == P('data', 'model')


def test_explicit_axes_change_the_type():
  mesh = spmd.make_mesh({'data': 2, 'model': 4}, axis_types=AxisType.Explicit)
  seen = []

  def f(x):
    y = spmd.constrain(2 * x, P('data', 'model'))
    seen.append(jax.typeof(y).sharding.spec)
    return y

  with jax.set_mesh(mesh):
    y = jax.jit(f)(jnp.ones((8, 8)))
  assert seen == [P('data', 'model')]
  assert spec_of(y) == P('data', 'model')


def test_explicit_axes_keep_what_is_unconstrained():
  mesh = spmd.make_mesh({'data': 2, 'model': 4}, axis_types=AxisType.Explicit)
  with jax.set_mesh(mesh):
    x = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P(None, 'model')))
    y = jax.jit(lambda x: spmd.constrain(x, P('data', P.UNCONSTRAINED)))(x)
  assert spec_of(y) == P('data', 'model')


def test_explicit_axes_of_size_one_are_omitted():
  """With them, values of equal layout would have different types and could not be added."""
  mesh = spmd.make_mesh({'data': 8, 'model': 1}, axis_types=AxisType.Explicit)
  layout = spmd.Layout(mesh, RULES)

  @layout.jit
  def f(x):
    return spmd.with_logical_constraint(x, ('batch', 'hidden')) + spmd.with_logical_constraint(
      x, ('batch', None)
    )

  assert f(jnp.ones((8, 8))).shape == (8, 8)


def test_uneven_explicit_axes_are_omitted():
  mesh = spmd.make_mesh({'data': 2, 'model': 4}, axis_types=AxisType.Explicit)
  layout = spmd.Layout(mesh, RULES)
  y = layout.jit(lambda x: spmd.with_logical_constraint(x, ('batch', 'hidden')))(jnp.ones((1, 8)))
  assert spec_of(y) == P(None, 'model')


def test_mixed_axes():
  mesh = spmd.make_mesh({'data': 2, 'model': 4}, axis_types={'data': AxisType.Explicit})
  with jax.set_mesh(mesh):
    y = jax.jit(lambda x: spmd.constrain(2 * x, P('data', 'model')))(jnp.ones((8, 8)))
  assert spec_of(y) == P('data', 'model')


def test_manual_axes_are_omitted(mesh):
  """Inside shard_map the program is written per shard; a constraint over its axes means nothing."""

  @jax.jit
  @partial(jax.shard_map, mesh=mesh, in_specs=P('data', 'model'), out_specs=P('data', 'model'))
  def f(x):
    return spmd.with_logical_constraint(2 * x, ('batch', 'hidden'), rules=RULES)

  np.testing.assert_array_equal(f(jnp.ones((8, 8))), 2)


def test_partly_manual_axes(mesh):
  @jax.jit
  @partial(jax.shard_map, mesh=mesh, in_specs=P('data'), out_specs=P('data'), axis_names={'data'})
  def f(x):
    return spmd.with_logical_constraint(2 * x, ('batch', 'hidden'), rules=RULES)

  y = f(jnp.ones((8, 8)))
  assert spec_of(y) == P('data', 'model')


def test_unboxing_inside_shard_map(mesh):
  box = spmd.Partitioned(jnp.ones((8, 8)), ('data', 'model'))

  @jax.jit
  @partial(jax.shard_map, mesh=mesh, in_specs=P('data', 'model'), out_specs=P('data', 'model'))
  def f(x):
    return spmd.unbox(box.replace_boxed(x)) * 2

  np.testing.assert_array_equal(f(jnp.ones((8, 8))), 2)


def test_concrete_arrays_are_resharded(mesh):
  y = spmd.constrain(jnp.ones((8, 8)), P('data', 'model'), mesh)
  assert y.sharding == NamedSharding(mesh, P('data', 'model'))


def test_concrete_arrays_are_unchanged_on_an_abstract_mesh():
  x = jnp.ones((8, 8))
  assert spmd.constrain(x, P('data'), spmd.abstract_mesh({'data': 64})) is x


def test_the_argument_wins_over_the_mesh_in_force(mesh):
  other = spmd.make_mesh({'data': 8})
  with jax.set_mesh(mesh):
    y = spmd.with_logical_constraint(jnp.ones((8, 8)), ('batch', 'embed'), RULES[:1], mesh=other)
  assert y.sharding.mesh.shape == {'data': 8}


def test_a_mesh_set_inside_a_layout_wins():
  inner = spmd.make_mesh({'data': 8})
  with spmd.Layout({'data': 2, 'model': 4}, RULES[:1]), jax.set_mesh(inner):
    y = jax.jit(lambda x: spmd.with_logical_constraint(x, ('batch',)))(jnp.ones(8))
  assert y.sharding.num_devices == 8
  assert len(y.sharding.device_set) == 8
  assert y.sharding.shard_shape((8,)) == (1,)


@pytest.mark.parametrize('devices', [slice(4, 8), slice(3, None, -1)])
def test_a_mesh_set_inside_a_layout_wins_with_other_devices(devices):
  """Also the same devices in another order; also for a function that JAX has cached outside, or inside."""
  layout = spmd.Layout(spmd.make_mesh({'data': 4}, devices=jax.devices()[:4]), RULES[:1])
  inner = spmd.make_mesh({'data': 4}, devices=jax.devices()[devices])
  constrained = partial(spmd.with_logical_constraint, logical_axis_resources=('batch',))
  for order in ((layout.mesh, inner, layout.mesh), (inner, layout.mesh)):
    functions = [jax.jit(lambda x: constrained(2 * x)), constrained]
    for mesh in order:
      with layout, jax.set_mesh(mesh):
        for function in functions:
          y = function(jnp.ones(8))
          assert y.sharding.is_equivalent_to(NamedSharding(mesh, P('data')), 1)
  with layout, jax.set_mesh(inner), spmd.logical_axis_rules((('batch', None), ('other', 'data'))):
    y = jax.jit(lambda x: spmd.with_logical_constraint(2 * x, ('other',)))(jnp.ones(8))
    assert y.sharding.is_equivalent_to(NamedSharding(inner, P('data')), 1)


def test_layout_jit_keeps_its_devices_inside_another_layout():
  meshes = [spmd.make_mesh({'data': 4}, devices=jax.devices()[part]) for part in (slice(4), slice(4, 8))]
  first, second = (spmd.Layout(mesh, RULES[:1]) for mesh in meshes)
  function = first.jit(lambda x: spmd.with_logical_constraint(2 * x, ('batch',)))
  with first:
    assert function(np.ones(8)).sharding.device_set == set(jax.devices()[:4])
  assert function(np.ones(8)).sharding.device_set == set(jax.devices()[:4])
  with second, pytest.raises(ValueError, match='incompatible devices'):  # of JAX
    function(np.ones(8))


def test_uneven_activations_are_padded_by_xla():
  """`model.init` is usually called with a batch of one."""
  layout = spmd.Layout({'data': 2, 'model': 4}, RULES)
  y = layout.jit(lambda x: spmd.with_logical_constraint(2 * x, ('batch', 'hidden')).sum())
  assert y(jnp.ones((1, 8))) == 16


def test_uneven_activations_follow_the_policy():
  layout = spmd.Layout({'data': 2, 'model': 4}, RULES, indivisible='replicate')
  y = layout.jit(lambda x: spmd.with_logical_constraint(2 * x, ('batch', 'hidden')))(jnp.ones((1, 8)))
  assert spec_of(y) == P(None, 'model')


def test_grad_vmap_and_remat_keep_constraints():
  layout = spmd.Layout({'data': 2, 'model': 4}, RULES)

  def loss(w, x):
    y = jax.vmap(lambda row: spmd.with_logical_constraint(row @ w, ('hidden',)))(x)
    return jnp.sum(spmd.with_logical_constraint(jnp.tanh(y), ('batch', 'hidden')))

  w, x = jnp.ones((4, 8)) / 8, jnp.ones((8, 4))
  plain = jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w)))(w, x)
  under = layout.jit(jax.grad(jax.checkpoint(loss)))(w, x)
  np.testing.assert_allclose(plain, under, rtol=1e-6)


# -- bad input


def test_rules_without_a_mesh():
  with spmd.logical_axis_rules(RULES), pytest.raises(MeshError) as caught:
    spmd.with_logical_constraint(jnp.ones((8, 8)), ('batch', 'hidden'))
  assert (
    str(caught.value)
    == dedent("""\
    There is no mesh for the logical names ('batch', 'hidden'). (A bare `with mesh:` does not set one: JAX ignores it here.)
    Fix: run it under `with layout:` or through `layout.jit`, under `with jax.set_mesh(mesh):`, or pass mesh=.""")
  )


def test_spec_without_a_mesh():
  with pytest.raises(MeshError, match='There is no mesh for the constraint P'):
    spmd.constrain(jnp.ones(8), P('data'))


def test_without_rules_there_is_no_constraint():
  x = jnp.ones((8, 8))
  assert spmd.with_logical_constraint(x, ('batch', 'hidden')) is x
  assert spmd.with_logical_constraint(x, None, rules=RULES) is x


def test_more_names_than_dimensions(mesh):
  with pytest.raises(LayoutError) as caught:
    spmd.with_logical_constraint(jnp.ones(8), ('batch', 'hidden'), RULES, mesh)
  assert str(caught.value) == dedent("""\
    constraint: 2 logical names ('batch', 'hidden') for an array of rank 1, shape (8,).
    Fix: pass at most one name per dimension.""")


def text_of(kind, fn, *args):
  """The text of an error, without the line number of this file."""
  with pytest.raises(kind) as caught:
    fn(*args)
  return re.sub(r'(constraints_test.py):\d+', r'\1', str(caught.value))


def test_more_entries_than_dimensions(mesh):
  spec = P('data', 'model')
  assert text_of(LayoutError, spmd.constrain, jnp.ones(8), spec, mesh) == dedent(f"""\
    The constraint {spec} at constraints_test.py has 2 entries for an array of rank 1, shape (8,).
    Fix: give at most one entry per dimension.""")


def test_unknown_axis(mesh):
  assert text_of(MeshAxisError, spmd.constrain, jnp.ones(8), P('modle'), mesh) == dedent(f"""\
    The constraint {P('modle')} at constraints_test.py uses mesh axis 'modle', but the mesh is {{'data': 2, 'model': 4}}. Did you mean 'model'?
    Fix: correct the axis name, add the axis to the mesh, or give the layout missing_axis='drop'.""")


def test_fallback_raise_error(mesh):
  with pytest.raises(UnmatchedNameError) as caught:
    spmd.with_logical_constraint(
      jnp.ones((8, 8)), ('bacth', 'hidden'), RULES, mesh, spmd.RulesFallback.RAISE_ERROR
    )
  assert str(caught.value) == dedent("""\
    constraint: logical names ('bacth', 'hidden'): no rule for 'bacth'. Did you mean 'batch'?
    Fix: correct the name, or add a rule for it; ('bacth', None) replicates it.""")


def test_fallback_raise_error_with_no_rules_at_all():
  """Flax skips the check there."""
  x = jnp.ones(8)
  strict = spmd.RulesFallback.RAISE_ERROR
  assert flax_linen_spmd.with_logical_constraint(x, ('batch',), fallback=strict) is x
  with pytest.raises(UnmatchedNameError), jax.set_mesh(spmd.make_mesh({'data': 8})):
    spmd.with_logical_constraint(x, ('batch',), fallback=strict)


@pytest.mark.parametrize('names', [(), (None,), (P.UNCONSTRAINED,), P(None)])
def test_fallback_raise_error_with_neither_rules_nor_names(names):
  """Nothing is constrained, as in Flax: without rules, None does not replicate a dimension."""
  strict = spmd.RulesFallback.RAISE_ERROR
  layout = spmd.Layout({'data': 8})
  x = layout.shard(jnp.ones(8), P('data'))
  assert spmd.with_logical_constraint(x, names, fallback=strict) is x
  y = layout.jit(lambda x: spmd.with_logical_constraint(x, names, fallback=strict) + 1)(x)
  assert y.sharding.is_equivalent_to(x.sharding, 1)


def test_errors_inside_a_model_name_the_module():
  class Inner(nn.Module):
    @nn.compact
    def __call__(self, x):
      return spmd.with_logical_constraint(x, ('batch', 'hiden'))

  class Outer(nn.Module):
    @nn.compact
    def __call__(self, x):
      return Inner(name='inner')(x)

  layout = spmd.Layout({'data': 2, 'model': 4}, RULES, unmatched='error')
  with pytest.raises(UnmatchedNameError) as caught:
    layout.jit(Outer().apply)({}, jnp.ones((8, 8)))
  assert str(caught.value) == dedent("""\
    constraint in module inner, dim 1 'hiden': no rule for this logical name (names ('batch', 'hiden')). Did you mean 'hidden'?
    Fix: correct the name, or add a rule for it; ('hiden', None) replicates it.""")


def test_a_mesh_axis_for_two_dimensions(mesh):
  assert text_of(LayoutError, spmd.constrain, jnp.ones((8, 8)), ('data', 'data'), mesh) == dedent(f"""\
    The constraint {P('data', 'data')} at constraints_test.py uses a mesh axis for more than one dimension.
    Fix: use every mesh axis once.""")


def test_fallback_no_constraint(mesh):
  x = jnp.ones((8, 8))
  fallback = spmd.RulesFallback.NO_CONSTRAINT
  assert spmd.with_logical_constraint(x, ('other', 'hidden'), RULES, mesh, fallback) is x


def test_policies_of_the_table_hold_for_activations(mesh):
  rules = spmd.Rules(*RULES, unmatched='error')
  with pytest.raises(UnmatchedNameError) as caught:
    spmd.with_logical_constraint(jnp.ones((8, 8)), ('batch', 'hiden'), rules, mesh)
  assert str(caught.value) == dedent("""\
    constraint, dim 1 'hiden': no rule for this logical name (names ('batch', 'hiden')). Did you mean 'hidden'?
    Fix: correct the name, or add a rule for it; ('hiden', None) replicates it.""")
