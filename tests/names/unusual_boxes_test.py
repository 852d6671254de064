"""Boxes of other libraries, boxes with rules of their own, and boxes that name mesh axes."""

from textwrap import dedent
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from flax.core import meta
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import errors
from tests.texts import text_of

DATA = spmd.fsdp('data', min_size=1)
BOTH = {'data': 2, 'model': 4}
LAYOUT = spmd.Layout(spmd.abstract_mesh({'data': 2, 'model': 4}), (('embed', 'data'), ('mlp', 'model')))


def on(rules, mesh=None, **policies):
  return spmd.Layout(spmd.make_mesh(mesh or {'data': 8}), rules, **policies)


@flax.struct.dataclass
class WithSpec(meta.AxisMetadata):
  """A box of another library, with mesh axes."""

  value: Any
  axes: tuple = flax.struct.field(pytree_node=False)

  def unbox(self):
    return self.value

  def replace_boxed(self, val):
    return self.replace(value=val)

  def add_axis(self, index, params):
    return self

  def remove_axis(self, index, params):
    return self

  def get_partition_spec(self):
    return P(*self.axes)


@flax.struct.dataclass
class WithNothing(meta.AxisMetadata):
  """A box of another library, without names or spec."""

  held: Any

  def unbox(self):
    return self.held

  def replace_boxed(self, val):
    return self.replace(held=val)

  def add_axis(self, index, params):
    return self

  def remove_axis(self, index, params):
    return self


def test_boxes_of_other_libraries():
  array = jax.ShapeDtypeStruct((8, 16), jnp.float32)
  layout = LAYOUT.replace(rules=(('held|value', P(None, 'model')),))
  tree = {'spec': WithSpec(array, ('model', None)), 'none': WithNothing(array)}
  assert LAYOUT.spec(tree) == {'spec': P('model', None), 'none': P()}
  assert layout.spec({'none': WithNothing(array)}) == {'none': P()}  # the path does not include the box


def test_a_box_accepts_only_rules_for_names():
  text = text_of(errors.RulesError, spmd.LogicallyPartitioned, 1, ('a',), None, spmd.Rules(DATA))
  assert text == dedent("""\
    A box has Rules(fsdp('data', min_size=1)), but a box can only have rules for logical names.
    Fix: put rules for paths, fsdp(...) and functions into the table of the layout.""")
  box = spmd.LogicallyPartitioned(jnp.ones((8, 8)), ('e', 'f'), None, (('x', None), ('e', 'data')))
  why = spmd.explain(on(()), {'w': box}).why('w')
  assert "dim 0, 'e' (8): data, from the box" in why


def test_mesh_axes_of_a_box_are_not_logical_names():
  box = spmd.Partitioned(jnp.ones((8, 8)), ('data', None))
  for rules in ((('w', P(None, 'data')),), (('data', 'model'), ('w', P(None, 'data')))):
    assert on(rules, BOTH).spec({'w': box}) == {'w': P(None, 'data')}


def test_names_of_mesh_axes_and_own_meshes_and_rules_are_stored_as_flax_says():
  """Flax's functions for both kinds of boxes; rules of a box's own decide here, and only constraints in Flax."""
  mesh, names = LAYOUT.mesh, ('embed', 'mlp')
  init = nn.initializers.ones
  axes = [
    nn.with_partitioning(init, ('data', 'model')),
    nn.with_partitioning(init, (('data', 'model'), None)),
    nn.with_partitioning(init, ('data', 'model'), mesh=mesh),
  ]
  logical = [
    nn.with_logical_partitioning(init, names),
    nn.with_logical_partitioning(init, names, mesh=mesh),
    nn.with_logical_partitioning(init, names, rules=()),
  ]
  for each in axes:
    box = each(jax.random.key(0), (8, 16))
    assert LAYOUT.spec(box) == nn.get_sharding(box, mesh).spec
  for each in logical:
    box = each(jax.random.key(0), (8, 16))
    rules = LAYOUT.rules.pairs
    assert LAYOUT.spec(box) == nn.logical_to_mesh_sharding(nn.get_partition_spec(box), mesh, rules).spec
  own = nn.with_logical_partitioning(init, names, rules=(('mlp', 'data'),))(jax.random.key(0), (8, 16))
  assert LAYOUT.spec(own) == P(None, 'data')
