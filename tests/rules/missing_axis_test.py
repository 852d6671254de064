"""`missing_axis='drop'`: a table on a mesh without some of its axes is the table without these axes."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import errors

SIZES = {'data': 2, 'model': 4}
KINDS = {
  'name': lambda axes: (('embed', axes),),
  'path': lambda axes: (('w$', P(axes)),),
  'aligned path': lambda axes: (('w$', P(..., axes, None)),),
  'function': lambda axes: (lambda leaf: P(axes),),
  'fsdp': lambda axes: (spmd.fsdp(axes, min_size=1),) if axes else (),
  'optimizer over': lambda axes: (spmd.optimizer_over(axes, min_size=1),) if axes else (),
  'table': lambda axes: (
    ('opt_state', spmd.Rules(('embed', axes), ('w', P(..., axes, None)), missing_axis='drop')),
  ),
}
LATER = (('embed', 'model'), spmd.fsdp('model', min_size=1))


def tree_of(*shape):
  array = jax.ShapeDtypeStruct(shape, jnp.float32)
  return {'opt_state': {'w': spmd.LogicallyPartitioned(array, ('embed', 'mlp'))}, 'w': array}


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize(
  ('axes', 'left'), [(('other', 'data'), 'data'), (('data', 'other', 'model'), ('data', 'model'))]
)
def test_axes_that_the_mesh_lacks_are_left_out(kind, axes, left):
  dropped = spmd.Layout(SIZES, KINDS[kind](axes), missing_axis='drop')
  assert dropped.spec(tree_of(16, 16)) == spmd.Layout(SIZES, KINDS[kind](left)).spec(tree_of(16, 16))


@pytest.mark.parametrize('kind', [kind for kind in KINDS if kind != 'table'])
def test_a_rule_without_any_axis_left_leaves_its_dimension_to_others(kind):
  table = KINDS[kind](('other', 'more')) + LATER
  specs = spmd.Layout(SIZES, table, missing_axis='drop').spec(tree_of(16, 16))
  assert [str(spec).count("'model'") for spec in (specs['w'], specs['opt_state']['w'])] == [1, 1]


def test_the_reason_is_shown():
  layout = spmd.Layout(SIZES, (('w', P(..., 'other', 'model')),), missing_axis='drop')
  assert spmd.explain(layout, {'w': jnp.ones((8, 8))}).why('w').splitlines()[2:4] == [
    '  dim 0, 8: replicated, no rule decided',
    "    rule 0 ('w', P(Ellipsis, 'other', 'model')) skipped: the mesh has no axis 'other'",
  ]


def test_annotations_and_placements():
  rules = (
    ('@spec', P(..., 'other', 'data')),
    ('@fill', spmd.fsdp(('other', 'data'), min_size=1)),
    ('@over', spmd.optimizer_over(('other', 'data'), min_size=1)),
  )
  layout = spmd.Layout(SIZES, rules, missing_axis='drop')
  annotate = lambda x: [spmd.with_sharding_annotation(x, name) for name in ('spec', 'fill', 'over')]
  annotated = layout.jit(annotate)(jnp.ones((8, 16)))
  assert [x.sharding.spec for x in annotated] == [P(None, 'data'), P(None, 'data'), P('data')]
  assert layout.shard(jnp.ones((8, 16)), P(..., ('other', 'data'))).sharding.spec == P(None, 'data')


@pytest.mark.parametrize('kind', KINDS)
def test_by_default_such_axes_are_errors(kind):
  with pytest.raises(errors.MeshAxisError, match="'other'"):
    table = tuple(
      (rule[0], rule[1].replace(missing_axis='error')) if kind == 'table' else rule
      for rule in KINDS[kind](('other', 'data'))
    )
    spmd.Layout(SIZES, table).spec(tree_of(16, 16))


@given(
  st.lists(st.sampled_from(['data', 'model', 'other', 'more']), unique=True, max_size=4),
  st.integers(1, 3),
)
def test_aligned_specs_with_and_without_the_axes(axes, dims):
  entries = [tuple(axes[dim::dims]) for dim in range(dims)]
  left = [tuple(axis for axis in entry if axis in SIZES) or None for entry in entries]
  array = {'w': jax.ShapeDtypeStruct((16, 16, 16), jnp.float32)}
  dropped = spmd.Layout(SIZES, (('w', P(..., *entries)),), missing_axis='drop').sharding(array)['w']
  assert dropped.is_equivalent_to(spmd.Layout(SIZES, (('w', P(..., *left)),)).sharding(array)['w'], 3)
