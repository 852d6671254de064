"""Boxes across `flax.nnx.bridge`: names survive in both directions."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.nnx import bridge
from jax.sharding import PartitionSpec

import flax_spmd as spmd
from tests.names.boxed_models import KEY, RULES, X, assert_same, box, named, names_of


def test_nnx_metadata_leaves_the_box_alone(mesh):
  one = box(mesh=mesh, rules=RULES)
  described = one.to_nnx_metadata()
  assert described == {
    'value': one.value,
    'out_sharding': ('embed', 'mlp'),
    'mesh': mesh,
    'sharding_rules': RULES,
  }
  assert one.names == ('embed', 'mlp')
  assert spmd.LogicallyPartitioned.from_nnx_metadata({**described, 'added_by_nnx': 1}) == one
  plain = box(('data', None), cls=spmd.Partitioned)
  assert spmd.Partitioned.from_nnx_metadata(plain.to_nnx_metadata()) == plain
  assert spmd.LogicallyPartitioned.from_nnx_metadata(
    {'value': one.value, 'out_sharding': ('a', 'b')}
  ) == box(('a', 'b'))


def test_nnx_metadata_of_flax_destroys_the_box():
  theirs = box(cls=nn.LogicallyPartitioned)
  theirs.to_nnx_metadata()
  assert not hasattr(theirs, 'names')


@pytest.mark.parametrize(
  'cls, names', [(spmd.LogicallyPartitioned, ('embed', 'mlp')), (spmd.Partitioned, (None, 'model'))]
)
def test_nnx_bridge_there_and_back(cls, names, mesh):
  with jax.set_mesh(mesh), spmd.logical_axis_rules(RULES):
    variables = {'params': {'dense': {'kernel': box(names, cls=cls), 'bias': jnp.ones(16)}}}
    attrs = bridge.variables.linen_vars_to_nnx_attrs(variables)
    assert attrs['dense']['kernel'].get_metadata()['out_sharding'] == names
    assert variables['params']['dense']['kernel'] == box(names, cls=cls)
    back = bridge.variables.nnx_attrs_to_linen_vars(attrs)
  assert names_of(back) == names_of(variables)
  assert type(back['params']['dense']['kernel']) is cls
  assert_same(spmd.unbox(back), spmd.unbox(variables))


def test_linen_module_in_nnx(mesh):
  linen = nn.Dense(16, kernel_init=named(('embed', 'mlp')))
  with jax.set_mesh(mesh), spmd.logical_axis_rules(RULES):
    model = bridge.ToNNX(linen, rngs=nnx.Rngs(0)).lazy_init(X)
    assert model.kernel.get_metadata()['out_sharding'] == ('embed', 'mlp')
    assert model.kernel[...].sharding.spec == PartitionSpec(None, 'model')
    assert model(X).shape == (2, 16)


def test_nnx_module_in_linen(mesh):
  class Inner(nnx.Module):
    def __init__(self, *, rngs):
      init = nnx.with_partitioning(
        nnx.initializers.lecun_normal(),
        ('embed', 'mlp'),
        linen_meta_type=spmd.LogicallyPartitioned,
      )
      self.w = nnx.Param(init(rngs.params(), (8, 16)))

    def __call__(self, x):
      return x @ self.w[...]

  with jax.set_mesh(mesh), spmd.logical_axis_rules(RULES):
    model = bridge.to_linen(Inner)
    variables = model.init(KEY, X)
    w = variables['params']['w']
    assert type(w) is spmd.LogicallyPartitioned and w.names == ('embed', 'mlp')
    assert w.value.sharding.spec == PartitionSpec(None, 'model')
    assert model.apply(variables, X).shape == (2, 16)
