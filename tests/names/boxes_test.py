"""Boxes: their fields, equality, behaviour as pytrees, and how they open under a mesh.

Where Flax's own box is wrong (equality, fused layers, abstract values), the difference is shown beside ours.
"""

import copy
import re
import sys
import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta
from jax.sharding import NamedSharding, PartitionSpec

import flax_spmd as spmd
from tests.names.boxed_models import (
  KEY,
  RULES,
  Stack,
  X,
  abstract,
  assert_same,
  box,
  named,
  names_of,
)

# -- fields and classes


@pytest.mark.parametrize(
  'shown, made',
  [
    ("LogicallyPartitioned(float32[8,16], names=('embed', 'mlp'))", lambda: box()),
    (
      "Partitioned(float32[8,16], names=('data', None))",
      lambda: box(('data', None), cls=spmd.Partitioned),
    ),
    ('Partitioned(int32[], names=())', lambda: spmd.Partitioned(jnp.int32(1), ())),
    (
      "Partitioned(bfloat16[2], names=('a',))",
      lambda: spmd.Partitioned(jax.ShapeDtypeStruct((2,), jnp.bfloat16), ('a',)),
    ),
    ("Partitioned(1.5, names=('a',))", lambda: spmd.Partitioned(1.5, ('a',))),
    ("Partitioned(None, names=('a',))", lambda: spmd.Partitioned(None, ('a',))),
    (
      "Partitioned(float32[2], names=(('a', 'b'),))",
      lambda: spmd.Partitioned(jnp.ones(2), [['a', 'b']]),
    ),
    (
      "LogicallyPartitioned(float32[8,16], names=('embed', 'mlp'), rules=Rules(('mlp', 'model')))",
      lambda: box(rules=[['mlp', 'model']]),
    ),
  ],
)
def test_repr_is_one_line(shown, made):
  assert repr(made()) == shown


def test_repr_with_a_mesh_names_the_mesh(mesh):
  shown = repr(box(('data', None), cls=spmd.Partitioned, mesh=mesh))
  assert shown == f"Partitioned(float32[8,16], names=('data', None), mesh={mesh!r})"


def test_array_attributes_are_the_values():
  for value in (jnp.ones((8, 16), jnp.bfloat16), jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)):
    one = spmd.LogicallyPartitioned(value, ('embed', 'mlp'))
    assert (one.shape, one.ndim, one.dtype, one.size) == ((8, 16), 2, jnp.bfloat16, 128)


def test_flax_boxes_have_no_array_attributes():
  theirs = box(cls=nn.LogicallyPartitioned)
  assert not any(hasattr(theirs, name) for name in ('shape', 'ndim', 'dtype', 'size'))


def test_fields(mesh):
  rules = (('mlp', 'model'),)
  one = box(mesh=mesh, rules=rules)
  assert one.names == ('embed', 'mlp')
  assert one.mesh is mesh
  assert one.rules == spmd.Rules(*rules)
  assert box().mesh is None and box().rules is None
  assert not hasattr(box(cls=spmd.Partitioned), 'rules')


def test_a_box_is_immutable():
  with pytest.raises(AttributeError):
    box().names = ('a', 'b')
  with pytest.raises(AttributeError):
    box().value = 1


def test_names_are_canonical():
  assert box(['embed', 'mlp']).names == ('embed', 'mlp')
  assert box(PartitionSpec('embed', 'mlp')).names == ('embed', 'mlp')
  assert box([['data', 'fsdp'], None]).names == (('data', 'fsdp'), None)
  assert box(['embed', 'mlp']) == box(('embed', 'mlp'))


@pytest.mark.parametrize(
  'names', [(), ('a',), ('a', None), (('x', 'y'), None), (PartitionSpec.UNCONSTRAINED, 'b')]
)
def test_partition_spec_is_the_names(names):
  assert spmd.Partitioned(0.0, names).get_partition_spec() == PartitionSpec(*names)
  assert (
    spmd.Partitioned(0.0, names).get_partition_spec() == nn.Partitioned(0.0, names).get_partition_spec()
  )


def test_sharding_of_mesh_axes(mesh):
  assert box(('data', 'model'), cls=spmd.Partitioned).get_sharding(mesh) == NamedSharding(
    mesh, PartitionSpec('data', 'model')
  )


def test_sharding_of_logical_names_follows_the_boxes_rules_then_those_in_force(mesh):
  own = box(rules=(('embed', 'data'),))
  with spmd.logical_axis_rules((('mlp', 'model'),)):
    assert own.get_sharding(mesh).spec == PartitionSpec('data', None)
    assert box().get_sharding(mesh).spec == PartitionSpec(None, 'model')
  assert box().get_sharding(mesh).spec == PartitionSpec(None, None)


def test_replace():
  one = box()
  assert one.replace(names=('a', 'b')).names == ('a', 'b')
  assert one.replace(names=('a', 'b')).value is one.value
  assert one.replace(value=3).names == ('embed', 'mlp')
  assert one.replace(rules=(('a', 'b'),)).rules == spmd.Rules(('a', 'b'))
  with pytest.raises(TypeError):
    one.replace(name=('a', 'b'))


def test_instances_and_subclasses():
  ours, logical = box(cls=spmd.Partitioned), box()
  for kind in (spmd.AxisMetadata, meta.AxisMetadata, nn.Partitioned, meta.Partitioned):
    assert isinstance(ours, kind) and isinstance(logical, kind)
  assert isinstance(logical, nn.LogicallyPartitioned)
  assert not isinstance(ours, nn.LogicallyPartitioned)
  assert issubclass(spmd.LogicallyPartitioned, spmd.Partitioned)
  assert issubclass(spmd.LogicallyPartitioned, nn.LogicallyPartitioned)
  assert issubclass(spmd.Partitioned, nn.Partitioned)
  assert not issubclass(spmd.Partitioned, nn.LogicallyPartitioned)
  assert not isinstance(box(cls=nn.Partitioned), spmd.Partitioned)
  assert spmd.is_axis_metadata(ours) and spmd.is_axis_metadata(box(cls=nn.Partitioned))
  assert not spmd.is_axis_metadata(jnp.ones(2))
  assert spmd.PARTITION_NAME == nn.PARTITION_NAME


# -- equality, hash, copies


def test_equality_is_by_names_and_value():
  assert box() == box()
  assert box() != box(('mlp', 'embed'))
  assert box() != box().replace_boxed(jnp.zeros((8, 16)))
  assert box() != box(cls=spmd.Partitioned)
  assert box() != box(rules=(('mlp', 'model'),))
  assert box() != box().value.shape
  assert spmd.Partitioned((jnp.ones(2), 1), ('a',)) == spmd.Partitioned((jnp.ones(2), 1), ('a',))
  assert spmd.Partitioned((jnp.ones(2), 1), ('a',)) != spmd.Partitioned((jnp.ones(2), 2), ('a',))
  assert spmd.Partitioned(jnp.ones(2), ('a',)) != spmd.Partitioned(jnp.ones(3), ('a',))
  assert spmd.Partitioned(jnp.ones(2), ('a',)) != spmd.Partitioned(jnp.ones(2, jnp.bfloat16), ('a',))


def test_equality_of_flax_boxes_ignores_names_or_raises():
  assert nn.LogicallyPartitioned(1.0, ('a',)) == nn.LogicallyPartitioned(1.0, ('b',))
  for cls in (nn.Partitioned, nn.LogicallyPartitioned):
    with pytest.raises(ValueError, match='truth value'):
      assert box(cls=cls) == box(cls=cls)


def test_equality_with_traced_values():
  @jax.jit
  def f(x):
    assert spmd.Partitioned(x, ('a',)) == spmd.Partitioned(x, ('a',))
    assert spmd.Partitioned(x, ('a',)) != spmd.Partitioned(x + 1, ('a',))
    assert spmd.Partitioned(x, ('a',)) != spmd.Partitioned(jnp.ones(2), ('a',))
    return x

  f(jnp.ones(2))


def test_hash_agrees_with_equality():
  assert hash(box()) == hash(box())
  assert len({box(), box(), box(('a', 'b'))}) == 2


def test_copies():
  for copied in (copy.copy(box()), copy.deepcopy(box())):
    assert copied == box() and type(copied) is spmd.LogicallyPartitioned


def test_copies_keep_the_mesh(mesh):
  one = box(mesh=mesh, rules=RULES)
  for copied in (copy.copy(one), copy.deepcopy(one)):
    assert copied.mesh is mesh and copied.rules == one.rules and copied == one


def test_deepcopy_copies_the_value():
  one = spmd.Partitioned(np.zeros(2), ('a',))
  copied = copy.deepcopy(one)
  copied.value[0] = 1.0
  assert one.value[0] == 0.0


# -- boxes as pytrees


def test_pytree_path_is_value_as_in_flax():
  for lib in (spmd, nn):
    tree = {'w': box(cls=lib.LogicallyPartitioned)}
    [(path, leaf)] = jax.tree_util.tree_leaves_with_path(tree)
    assert jax.tree_util.keystr(path) == "['w'].value"
    assert leaf.shape == (8, 16)


def test_map_over_two_boxed_trees():
  tree = {'w': box(), 'b': box(('mlp',), (16,), spmd.Partitioned)}
  summed = jax.tree.map(jnp.add, tree, tree)
  assert names_of(summed) == {'w': ('embed', 'mlp'), 'b': ('mlp',)}
  assert_same(spmd.unbox(summed), jax.tree.map(lambda x: x + x, spmd.unbox(tree)))


def test_trees_with_other_names_are_other_trees():
  with pytest.raises(ValueError, match=re.escape("('embed', 'mlp')")):
    jax.tree.map(jnp.add, box(), box(('mlp', 'embed')))


def test_equal_names_give_the_same_treedef():
  a, b = jax.tree.structure(box()), jax.tree.structure(box(['embed', 'mlp']))
  assert a == b and hash(a) == hash(b)
  assert a != jax.tree.structure(box(cls=spmd.Partitioned))


def test_a_box_does_not_make_jit_compile_again():
  traces = []

  @jax.jit
  def f(tree):
    traces.append(0)
    return jax.tree.map(lambda x: x + 1, tree)

  for _ in range(3):
    out = f({'w': box(['embed', 'mlp'])})
  assert len(traces) == 1
  assert out['w'].names == ('embed', 'mlp')


def test_gradients_keep_their_boxes():
  grads = jax.grad(lambda tree: jnp.sum(spmd.unbox(tree)['w'] ** 2))({'w': box()})
  assert grads['w'].names == ('embed', 'mlp')
  np.testing.assert_array_equal(grads['w'].value, 2 * box().value)


def test_vmap_and_scan_of_jax_take_boxes():
  doubled = jax.vmap(lambda one: one.replace_boxed(2 * one.value))(box())
  assert doubled == box().replace_boxed(2 * box().value)
  carried, _ = jax.lax.scan(lambda carry, _: (carry, None), box(), length=2)
  assert carried == box()


def test_boxes_around_trees():
  one = spmd.Partitioned({'a': jnp.ones((8, 4)), 'b': jnp.ones((16, 8))}, ('data', None))
  assert spmd.get_partition_spec(one) == PartitionSpec('data', None)
  assert jax.tree.map(jnp.shape, spmd.unbox(one)) == {'a': (8, 4), 'b': (16, 8)}
  assert spmd.Layout({'data': 8}).spec({'w': one}) == {'w': PartitionSpec('data', None)}
  rows = spmd.explain(spmd.Layout({'data': 8}), {'w': one}).rows
  assert [(row.shape, row.spec) for row in rows] == [
    ((8, 4), PartitionSpec('data', None)),
    ((16, 8), PartitionSpec('data', None)),
  ]


def test_boxes_of_abstract_values():
  abstract = jax.eval_shape(lambda: {'w': box()})
  assert repr(abstract) == "{'w': LogicallyPartitioned(float32[8,16], names=('embed', 'mlp'))}"
  assert isinstance(abstract['w'].value, jax.ShapeDtypeStruct)
  with spmd.Layout({'data': 2, 'model': 4}, (('mlp', 'model'),)):
    assert spmd.unbox(abstract) == {'w': jax.ShapeDtypeStruct((8, 16), jnp.float32)}


def test_nested_boxes_open_together_and_have_the_outer_names():
  for lib in (spmd, nn):
    inner = lib.Partitioned(jnp.ones((8, 8)), (None, 'model'))
    outer = lib.Partitioned(inner, ('data', None))
    assert spmd.get_partition_spec({'w': outer}) == {'w': PartitionSpec('data', None)}
    assert spmd.Layout({'data': 8, 'model': 1}).spec({'w': outer}) == {'w': PartitionSpec('data', None)}
    assert spmd.unbox(outer).shape == (8, 8)
    doubled = spmd.replace_boxed(outer, 2 * jnp.ones((8, 8)))
    assert doubled.names == ('data', None) and doubled.value.names == (None, 'model')
    assert doubled.value.value.sum() == 128


# -- fused layers: the initializer sees a flat kernel


def fused_layers(lib):
  lecun = nn.initializers.lecun_normal()
  in_out = named(('embed', 'heads', 'kv'), lecun, lib)
  yield (
    nn.DenseGeneral(
      (4, 2), kernel_init=in_out, bias_init=named(('heads', 'kv'), nn.initializers.zeros, lib)
    ),
    {
      'kernel': ('embed', 'heads', 'kv'),
      'bias': ('heads', 'kv'),
    },
  )
  out_init = named(('heads', 'kv', 'embed'), lecun, lib)
  yield (
    nn.MultiHeadDotProductAttention(
      4, qkv_features=8, kernel_init=in_out, out_kernel_init=out_init, use_bias=False
    ),
    {
      **{part: {'kernel': ('embed', 'heads', 'kv')} for part in ('query', 'key', 'value')},
      'out': {'kernel': ('heads', 'kv', 'embed')},
    },
  )


@pytest.mark.parametrize('which', [0, 1])
def test_fused_kernels_under_a_mesh(which):
  layout = spmd.Layout({'data': 2, 'model': 4}, (('heads', 'model'), ('embed', 'data')))
  model, names = list(fused_layers(spmd))[which]
  variables = layout.init(model.init, KEY, X)
  assert names_of(variables) == {'params': names}
  kernel = variables['params']['kernel' if which == 0 else 'query']
  kernel = kernel if which == 0 else kernel['kernel']
  assert kernel.shape == (8, 4, 2)
  assert kernel.value.sharding.spec == PartitionSpec('data', 'model', None)
  y = layout.jit(lambda v, x: model.apply(v, x))(variables, X)
  np.testing.assert_allclose(
    y, model.apply(spmd.unbox(jax.device_get(variables)), X), rtol=1e-5, atol=1e-6
  )


@pytest.mark.parametrize('which', [0, 1])
def test_fused_kernels_fail_in_flax_under_a_mesh(which, mesh):
  model, _ = list(fused_layers(nn))[which]
  rules = nn.logical_axis_rules((('heads', 'model'), ('embed', 'data')))
  with jax.set_mesh(mesh), rules, pytest.raises(ValueError, match='rank'):
    abstract(model, X)


# -- opening boxes


def test_unbox_constrains_traced_values_only():
  layout = spmd.Layout({'data': 2, 'model': 4}, (('mlp', 'model'),))
  with layout:
    concrete = box()
    assert concrete.unbox() is concrete.value
    opened = jax.jit(lambda one: one.unbox() + 1)(concrete)
    closed = jax.jit(lambda one: one.unbox(apply_constraint=False) + 1)
    assert 'sharding_constraint' not in str(jax.make_jaxpr(closed)(concrete))
  assert opened.sharding.spec == PartitionSpec(None, 'model')


@pytest.mark.parametrize('names', [('mlp',), ('mlp', None, None)])
def test_unbox_does_not_constrain_a_value_whose_rank_differs_from_its_names(names):
  layout = spmd.Layout({'data': 2, 'model': 4}, (('mlp', 'model'),))
  one = box(names)
  np.testing.assert_array_equal(layout.jit(lambda one: one.unbox())(one), one.value)


def test_unbox_inside_shard_map_leaves_manual_axes_out():
  layout = spmd.Layout({'data': 8}, (('embed', 'data'),))

  def body(w):
    return spmd.unbox(box(('embed', 'mlp')).replace_boxed(w)) * 2

  spec = PartitionSpec('data', None)
  mapped = jax.shard_map(body, mesh=layout.mesh, in_specs=spec, out_specs=spec)
  np.testing.assert_array_equal(layout.jit(mapped)(box().value), 2 * box().value)


def test_a_boxes_own_mesh_and_rules_win_over_those_in_force(mesh):
  one = box(mesh=mesh, rules=(('mlp', 'data'),))
  assert jax.jit(lambda one: one.unbox() + 1)(one).sharding.spec == PartitionSpec(None, 'data')
  with spmd.Layout(mesh, (('embed', 'data'), ('mlp', 'model'))):
    assert jax.jit(lambda one: one.unbox() + 1)(one).sharding.spec == PartitionSpec(None, 'data')


def test_boxes_without_rules_are_not_constrained(mesh):
  with jax.set_mesh(mesh):
    assert 'sharding_constraint' not in str(jax.make_jaxpr(lambda one: one.unbox())(box()))


# -- Flax's own boxes in our functions


def test_flax_boxes_in_unbox():
  tree = {'w': box(cls=nn.LogicallyPartitioned), 'm': box(('data', None), cls=nn.Partitioned), 'n': 1}
  assert jax.tree.map(jnp.shape, spmd.unbox(tree)) == {'w': (8, 16), 'm': (8, 16), 'n': ()}
  with spmd.Layout({'data': 2, 'model': 4}, (('mlp', 'model'),)):
    abstract = jax.eval_shape(lambda: tree)
    assert spmd.unbox(abstract, apply_constraint=False)['w'].shape == (8, 16)


def test_flax_boxes_of_abstract_values_open_under_a_mesh_too():
  with spmd.Layout({'data': 2, 'model': 4}, (('mlp', 'model'),)):
    abstract = jax.eval_shape(lambda: {'w': box(cls=nn.LogicallyPartitioned)})
    assert nn.unbox(abstract)['w'].shape == spmd.unbox(abstract)['w'].shape == (8, 16)


def both_libraries():
  """The same tree with our boxes and with Flax's."""
  for lib in (spmd, nn):
    yield {
      'w': box(cls=lib.LogicallyPartitioned),
      'own': box(cls=lib.LogicallyPartitioned, rules=(('embed', 'data'),)),
      'm': box(('data', None), cls=lib.Partitioned),
      'plain': jnp.ones(3),
      'tree': lib.Partitioned((jnp.ones(8), jnp.ones(16)), ('data',)),
    }


def test_flax_boxes_in_get_partition_spec():
  ours, theirs = map(spmd.get_partition_spec, both_libraries())
  assert ours == theirs == nn.get_partition_spec(next(both_libraries()))


@pytest.mark.parametrize('key', ['w', 'own', 'm', 'plain', 'tree'])
def test_flax_boxes_in_a_layout(key, mesh):
  layout = spmd.Layout(mesh, (('mlp', 'model'),))
  expected = {
    'w': PartitionSpec(None, 'model'),
    'own': PartitionSpec('data', None),
    'm': PartitionSpec('data', None),
    'plain': PartitionSpec(),
    'tree': PartitionSpec('data'),
  }
  for tree in both_libraries():
    assert layout.sharding({key: tree[key]}) == {key: NamedSharding(mesh, expected[key])}
    assert {row.spec for row in spmd.explain(layout, {key: tree[key]}).rows} == {expected[key]}


@pytest.mark.parametrize('key', ['w', 'own', 'm', 'plain', 'tree'])
def test_flax_boxes_in_get_sharding(key, mesh):
  with spmd.logical_axis_rules((('mlp', 'model'),)):
    ours, theirs = [spmd.get_sharding({key: tree[key]}, mesh) for tree in both_libraries()]
  assert ours == theirs


def test_flax_boxes_in_init_and_jit():
  layout = spmd.Layout({'data': 2, 'model': 4}, (('mlp', 'model'),))
  variables = layout.init(Stack(lib=nn).init, KEY, X)
  w = variables['params']['blocks']['w']
  assert type(w) is nn.LogicallyPartitioned
  assert w.value.sharding.spec == PartitionSpec(None, None, 'model')
  assert layout.jit(lambda v, x: Stack(lib=nn).apply(v, x))(variables, X).shape == (2, 8)


def test_boxes_of_other_libraries():
  class Plain(nn.meta.AxisMetadata):
    """A box with only the abstract methods of Flax's class."""

    def __init__(self, value):
      self.value = value

    def unbox(self):
      return self.value

    def replace_boxed(self, val):
      return Plain(val)

    def add_axis(self, index, params):
      return self

    def remove_axis(self, index, params):
      return self

  jax.tree_util.register_pytree_node(Plain, lambda one: ((one.value,), None), lambda _, c: Plain(*c))
  tree = {'w': Plain(jnp.ones((8, 16))), 'v': box()}
  assert spmd.unbox(tree)['w'].shape == (8, 16)
  assert spmd.Layout({'model': 8}, (('mlp', 'model'),)).spec({'v': tree['v']}) == {
    'v': PartitionSpec(None, 'model')
  }


def test_equal_boxes_of_several_threads_have_one_structure():
  def work(number):
    barrier.wait()
    structures.append(
      jax.tree.structure([spmd.LogicallyPartitioned(1.0, (f'{number}_{i}', 'm')) for i in range(20)])
    )

  interval = sys.getswitchinterval()
  sys.setswitchinterval(1e-6)
  try:
    for number in range(50):
      structures, barrier = [], threading.Barrier(8)
      threads = [threading.Thread(target=work, args=(number,)) for _ in range(8)]
      for thread in threads:
        thread.start()
      for thread in threads:
        thread.join()
      assert len(set(structures)) == 1
  finally:
    sys.setswitchinterval(interval)
