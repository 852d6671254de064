"""Kinds of clauses: a new kind is one class, and everything else finds it there."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import errors
from flax_spmd._src.rules.clauses import OwningClause
from flax_spmd._src.rules.decisions import axis_names
from flax_spmd._src.rules.toml_values import quoted, read_spec, spec_text


@dataclasses.dataclass(frozen=True)
class of_dtype(OwningClause):
  """A plug-in: all arrays of a dtype get one spec."""

  dtype: str
  spec: P

  form = "of_dtype('int8', PartitionSpec)"
  reads = frozenset({'dtype'})
  toml_head = 'of_dtype'
  toml_keys = frozenset({'of_dtype', 'spec'})

  @property
  def mesh_axes(self):
    return axis_names(tuple(self.spec))

  def target(self, leaf):
    return self.spec if leaf.dtype == self.dtype else None

  def toml(self, indent):
    return f'of_dtype = {quoted(self.dtype)}, spec = {spec_text(self.spec)}'

  @classmethod
  def from_toml(cls, entry, read_table):
    return cls(entry['of_dtype'], read_spec(entry['spec']))


RULES = (of_dtype('int8', P('model')), ('embed', 'data'), spmd.fsdp('model', min_size=1))


def on(rules=RULES, **policies):
  return spmd.Layout({'data': 2, 'model': 4}, rules, **policies)


def box(dtype):
  return spmd.LogicallyPartitioned(jnp.ones((8, 16), dtype), ('embed', None))


def test_it_owns_arrays_with_names_and_without():
  tree = {'q': box('int8'), 'w': box('float32'), 'bare': jnp.ones(8, 'int8')}
  assert on().spec(tree) == {'q': P('model', None), 'w': P('data', 'model'), 'bare': P('model')}


def test_order_is_priority():
  assert on((('embed', 'data'), *RULES)).spec(box('int8')) == P('data', 'model')


def test_it_shows_in_explain_and_in_errors():
  layout = on()
  rows = {row.path: row for row in layout.rows({'q': box('int8'), 'w': box('float32')})}
  assert (rows['q'].owner, rows['w'].owner) == (0, None)
  assert "of_dtype(dtype='int8', spec=P('model',))" in str(spmd.explain(layout, {'q': box('int8')}))
  with pytest.raises(
    errors.MeshAxisError, match=r"Rule 0 of_dtype.* uses mesh axis 'modle'.*Did you mean 'model'"
  ):
    on((of_dtype('int8', P('modle')),))
  with pytest.raises(
    errors.LayoutError, match=r'size 6 is not divisible by .*required by rule 0 of_dtype'
  ):
    layout.spec({'q': jnp.ones(6, 'int8')})


def test_a_check_reports_it_where_it_decides_nothing():
  text = str(on((of_dtype('int4', P('model')),)).check({'w': box('float32')}))
  assert "rule 0 of_dtype(dtype='int4', spec=P('model',)) decided nothing." in text


def test_it_is_a_placement_and_a_table_of_its_own():
  layout = on(())
  assert layout.shard(np.ones(8, 'int8'), of_dtype('int8', P('model'))).sharding.spec == P('model')
  assert spmd.Rules(('^opt/', spmd.Rules(RULES[0]))).at((0, 0)) == RULES[0]


def test_text_and_back():
  layout = on((*RULES, ('^opt/', spmd.Rules(of_dtype('int4', P())))))
  assert '{of_dtype = "int8", spec = ["model"]},' in layout.to_toml()
  assert spmd.Layout.from_toml(layout.to_toml()) == layout


@given(
  st.permutations(RULES), st.lists(st.sampled_from(['int8', 'int4', 'float32']), min_size=1, max_size=6)
)
def test_a_plan_gives_each_array_its_own_resolution(rules, dtypes):
  layout = on(tuple(rules))
  tree = {str(number): box(dtype) for number, dtype in enumerate(dtypes)}
  assert layout.spec(tree) == {key: on(tuple(rules)).spec(one) for key, one in tree.items()}
