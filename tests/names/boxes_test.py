"""Boxes: arrays with names, through everything that Linen, NNX, pickle and Flax's serializers do.

Names have to arrive where they belong, values have to stay what they were, and where Flax's own
box is wrong (equality, negative axes, missing names, NNX) the difference is shown beside ours.
"""

import copy
import pickle
import re
import types
from textwrap import dedent

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, serialization
from flax.core import meta
from flax.nnx import bridge
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import flax_spmd as spmd

KEY = jax.random.key(0)
X = jnp.linspace(0.0, 1.0, 16).reshape(2, 8)
RULES = (('embed', None), ('mlp', 'model'), ('heads', 'model'), ('kv', None), ('layers', None))


NORMAL = nn.initializers.normal()


def named(names, init=NORMAL, lib=spmd, **options):
  return lib.with_logical_partitioning(init, names, **options)


def box(names=('embed', 'mlp'), shape=(8, 16), cls=spmd.LogicallyPartitioned, **options):
  return cls(jnp.asarray(np.arange(np.prod(shape), dtype=np.float32).reshape(shape)), names, **options)


def names_of(tree):
  """The tree with a box's names in its place, and None for a leaf without a box."""
  return jax.tree.map(
    lambda leaf: leaf.names if spmd.is_axis_metadata(leaf) else None, tree, is_leaf=spmd.is_axis_metadata
  )


def assert_same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def init(model, *args):
  """`model.init`, in one compilation."""
  return jax.jit(model.init)(KEY, *args)


def abstract(model, *args):
  """`model.init`, without running it."""
  return jax.eval_shape(model.init, KEY, *args)


def apply(model, variables, *args, **options):
  return jax.jit(lambda variables, *args: model.apply(variables, *args, **options))(variables, *args)


def gradients(model, variables, *args):
  """Gradients of the sum of the model's output, abstract."""
  return jax.eval_shape(
    jax.grad(lambda v: jnp.sum(jax.tree.leaves(model.apply(v, *args))[0])), variables
  )


class Block(nn.Module):
  """One square layer, fit for `nn.scan`; `lib` gives the boxes."""

  lib: types.ModuleType = spmd

  @nn.compact
  def __call__(self, x, _=None):
    w = self.param('w', named(('embed', 'mlp'), lib=self.lib), (x.shape[-1], x.shape[-1]))
    return jnp.tanh(x @ w), None


class Stack(nn.Module):
  """Three blocks, scanned over `axis` under the name `layer`."""

  axis: int = 0
  layer: str | None = 'layers'
  lib: types.ModuleType = spmd

  @nn.compact
  def __call__(self, x):
    scanned = nn.scan(
      Block,
      variable_axes={'params': self.axis},
      split_rngs={'params': True},
      length=3,
      metadata_params={} if self.layer is None else {nn.PARTITION_NAME: self.layer},
    )
    return scanned(self.lib, name='blocks')(x, None)[0]


# -- what a box is


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


@pytest.mark.parametrize('protocol', range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle(protocol):
  one = box(rules=RULES)
  assert pickle.loads(pickle.dumps(one, protocol)) == one


def test_pickle_leaves_the_mesh_behind(mesh):
  one = box(mesh=mesh)
  came_back = pickle.loads(pickle.dumps(one))
  assert came_back.mesh is None
  assert came_back == box()


def test_flax_boxes_with_a_mesh_do_not_pickle(mesh):
  with pytest.raises(TypeError, match='pickle'):
    pickle.dumps(box(cls=nn.LogicallyPartitioned, mesh=mesh))


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


def test_nested_boxes_open_together_and_the_outer_names_count():
  for lib in (spmd, nn):
    inner = lib.Partitioned(jnp.ones((8, 8)), (None, 'model'))
    outer = lib.Partitioned(inner, ('data', None))
    assert spmd.get_partition_spec({'w': outer}) == {'w': PartitionSpec('data', None)}
    assert spmd.Layout({'data': 8, 'model': 1}).spec({'w': outer}) == {'w': PartitionSpec('data', None)}
    assert spmd.unbox(outer).shape == (8, 8)
    doubled = spmd.replace_boxed(outer, 2 * jnp.ones((8, 8)))
    assert doubled.names == ('data', None) and doubled.value.names == (None, 'model')
    assert doubled.value.value.sum() == 128


# -- Flax's serializers


def test_state_dicts_are_those_of_flax():
  assert serialization.to_state_dict({'w': spmd.Partitioned(1.5, ('a',))}) == {'w': {'value': 1.5}}
  assert serialization.to_state_dict({'w': nn.Partitioned(1.5, ('a',))}) == {'w': {'value': 1.5}}


def test_state_dicts_both_ways():
  zeros = {'w': box().replace_boxed(jnp.zeros((8, 16)))}
  boxed, plain = {'w': box()}, {'w': box().value}
  for state in (serialization.to_state_dict(boxed), serialization.to_state_dict(plain)):
    assert serialization.from_state_dict(zeros, state) == boxed


def test_bytes_both_ways():
  zeros = {'w': box().replace_boxed(jnp.zeros((8, 16))), 'n': 0}
  boxed, plain = {'w': box(), 'n': 3}, {'w': box().value, 'n': 3}
  flax_boxed = {'w': box(cls=nn.LogicallyPartitioned), 'n': 3}
  for saved in (boxed, plain, flax_boxed):
    assert serialization.from_bytes(zeros, serialization.to_bytes(saved)) == boxed
  flax_zeros = {'w': nn.LogicallyPartitioned(jnp.zeros((8, 16)), ('embed', 'mlp')), 'n': 0}
  restored = serialization.from_bytes(flax_zeros, serialization.to_bytes(boxed))
  assert_same(spmd.unbox(restored), plain)


def test_bytes_of_a_box_around_a_tree():
  one = {'w': spmd.Partitioned({'a': jnp.ones(2), 'b': jnp.zeros(3)}, ('data',))}
  zeros = jax.tree.map(jnp.zeros_like, one)
  assert serialization.from_bytes(zeros, serialization.to_bytes(one)) == one


def test_msgpack_of_a_state_dict():
  packed = serialization.msgpack_serialize(serialization.to_state_dict({'w': box()}))
  assert_same(serialization.msgpack_restore(packed), {'w': {'value': np.asarray(box().value)}})


# -- axes that transformations add and remove


LAYERS = {nn.PARTITION_NAME: 'layers'}


@pytest.mark.parametrize('index', [0, 1, 2])
def test_add_axis_and_its_inverse_are_those_of_flax(index):
  ours = box().add_axis(index, LAYERS)
  assert ours.names == box(cls=nn.LogicallyPartitioned).add_axis(index, LAYERS).names
  assert ours.remove_axis(index, LAYERS) == box()


def test_add_axis_past_the_end_pads_with_none():
  assert spmd.Partitioned(0.0, ('a',)).add_axis(3, LAYERS).names == ('a', None, None, 'layers')
  assert nn.Partitioned(0.0, ('a',)).add_axis(3, LAYERS).names == ('a', None, None, 'layers')


@given(st.lists(st.sampled_from(['a', 'b', None]), max_size=4), st.data())
def test_a_negative_axis_counts_from_the_stacked_values_end(names, data):
  rank = len(names) + 1
  index = data.draw(st.integers(-rank, -1))
  stacked = spmd.LogicallyPartitioned(jax.ShapeDtypeStruct((2,) * rank, jnp.float32), tuple(names))
  front = stacked.add_axis(index + rank, LAYERS)
  assert stacked.add_axis(index, LAYERS) == front
  assert front.names[index + rank] == 'layers'
  assert front.remove_axis(index, LAYERS) == stacked


def test_functions_on_trees_add_and_remove_axes():
  tree = {'w': box(), 'n': 1}
  added = spmd.add_axis(tree, 0, LAYERS)
  assert names_of(added) == {'w': ('layers', 'embed', 'mlp'), 'n': None}
  assert spmd.remove_axis(added, 0, LAYERS) == tree


def test_none_is_a_name_that_an_axis_can_be_given():
  added = box().add_axis(0, {nn.PARTITION_NAME: None})
  assert added.names == (None, 'embed', 'mlp')
  assert added.remove_axis(0, {nn.PARTITION_NAME: None}) == box()


def layerwise(x, w, axis):
  """What `Stack` computes, layer by layer."""
  for layer in range(3):
    x = jnp.tanh(x @ jnp.take(w, layer, axis=axis))
  return x


@pytest.mark.parametrize(
  'axis, names',
  [
    (0, ('layers', 'embed', 'mlp')),
    (1, ('embed', 'layers', 'mlp')),
    (2, ('embed', 'mlp', 'layers')),
    (-1, ('embed', 'mlp', 'layers')),
    (-2, ('embed', 'layers', 'mlp')),
    (-3, ('layers', 'embed', 'mlp')),
  ],
)
def test_scan_over_any_axis(axis, names):
  model = Stack(axis)
  variables = init(model, X)
  w = variables['params']['blocks']['w']
  assert w.names == names
  assert w.shape[names.index('layers')] == 3
  y, reference = jax.jit(
    lambda v, x: (model.apply(v, x), layerwise(x, v['params']['blocks']['w'].value, axis))
  )(variables, X)
  np.testing.assert_allclose(y, reference, rtol=1e-5)
  assert names_of(gradients(model, variables, X)) == names_of(variables)


def test_scan_over_a_negative_axis_is_mislabelled_by_flax():
  variables = abstract(Stack(-1, lib=nn), X)
  w = variables['params']['blocks']['w']
  assert w.value.shape == (8, 8, 3)
  assert w.names == ('embed', 'layers', 'mlp')
  with pytest.raises(AssertionError):
    jax.eval_shape(Stack(-1, lib=nn).apply, variables, X)


class Decoder(nn.Module):
  """A module around a stack: what is in it has a path."""

  axis: int = 0
  layer: str | None = 'layers'

  @nn.compact
  def __call__(self, x):
    return Stack(self.axis, self.layer, name='decoder')(x)


def refusal(model):
  """What applying `model` to variables of `Decoder()` is refused with."""
  with pytest.raises(spmd.errors.LayoutError) as error:
    jax.eval_shape(model.apply, abstract(Decoder(), X), X)
  return str(error.value)


STACKED = "LogicallyPartitioned(float32[3,8,8], names=('layers', 'embed', 'mlp')) in module decoder"
FIX = (
  "Fix: give the transformation the axis and the 'partition_name' that the variables were "
  'initialised with.'
)


def test_apply_over_another_axis_than_init():
  assert refusal(Decoder(1)) == (
    f"{STACKED}: a transformation removes dimension 1, named 'layers' by its metadata_params, "
    f"but that dimension is 'embed'.\n{FIX}"
  )


def test_apply_over_an_axis_that_does_not_exist():
  assert refusal(Decoder(5)) == (
    f"{STACKED}: a transformation removes dimension 5, named 'layers' by its metadata_params, "
    f'but that dimension does not exist.\n{FIX}'
  )


def test_apply_over_a_negative_axis_that_does_not_exist():
  assert refusal(Decoder(-4)) == dedent(f"""\
    {STACKED}: axis -4 of a transformation does not exist, the rank is 3.
    Fix: use an axis from -3 to 2 in variable_axes.""")


def test_apply_under_another_partition_name():
  assert refusal(Decoder(0, 'stages')) == (
    f"{STACKED}: a transformation removes dimension 0, named 'stages' by its metadata_params, "
    f"but that dimension is 'layers'.\n{FIX}"
  )


def test_a_missing_partition_name_is_none_and_warned_about_with_the_module():
  model = Decoder(layer=None)
  with pytest.warns(UserWarning) as warned:
    variables = abstract(model, X)
  assert variables['params']['decoder']['blocks']['w'].names == (None, 'embed', 'mlp')
  assert [str(one.message) for one in warned] == [
    "LogicallyPartitioned(float32[3,8,8], names=('embed', 'mlp')) in module decoder: a transformation "
    'adds an axis without a name. It is None (replicated); name it with '
    'metadata_params={nn.PARTITION_NAME: ...}.'
  ]
  assert jax.eval_shape(model.apply, variables, X).shape == (2, 8)  # said once, at init


def test_a_missing_partition_name_is_an_error_in_flax_that_prints_the_array():
  with pytest.raises(Exception, match='partition_name') as error:
    abstract(Stack(layer=None, lib=nn), X)
  assert type(error.value).__name__ == 'PartitioningUnspecifiedError'
  assert 'JitTracer' in str(error.value)
  assert 'blocks' not in str(error.value)


class Nested(nn.Module):
  """Scans in scans, each level under its own name and over its own axis."""

  levels: tuple = (('groups', 2, 0), ('layers', 3, 0))

  @nn.compact
  def __call__(self, x):
    cell = Block
    for name, length, axis in reversed(self.levels):
      cell = nn.scan(
        cell,
        variable_axes={'params': axis},
        split_rngs={'params': True},
        length=length,
        metadata_params={nn.PARTITION_NAME: name},
      )
    return cell(name='blocks')(x, None)[0]


@pytest.mark.parametrize(
  'levels, names, shape',
  [
    ((('groups', 2, 0), ('layers', 3, 0)), ('groups', 'layers', 'embed', 'mlp'), (2, 3, 8, 8)),
    ((('groups', 2, 1), ('layers', 3, 0)), ('layers', 'groups', 'embed', 'mlp'), (3, 2, 8, 8)),
    ((('groups', 2, -1), ('layers', 3, -1)), ('embed', 'mlp', 'layers', 'groups'), (8, 8, 3, 2)),
    ((('groups', 2, -1), ('layers', 3, 1)), ('embed', 'layers', 'mlp', 'groups'), (8, 3, 8, 2)),
  ],
)
def test_nested_scans(levels, names, shape):
  model = Nested(levels)
  variables = abstract(model, X)
  w = variables['params']['blocks']['w']
  assert (w.names, w.shape) == (names, shape)
  assert jax.eval_shape(model.apply, variables, X).shape == (2, 8)
  assert names_of(gradients(model, variables, X)) == names_of(variables)


def test_nested_scans_compute_the_same_over_other_axes():
  first, last = Nested(), Nested((('groups', 2, -1), ('layers', 3, 1)))
  variables = init(first, X)
  moved = jax.tree.map(lambda w: jnp.moveaxis(w, (0, 1), (-1, 1)), spmd.unbox(variables))
  np.testing.assert_allclose(apply(last, moved, X), apply(first, variables, X), rtol=1e-5)


@pytest.mark.parametrize(
  'axis, names', [(0, ('experts', 'embed', 'mlp')), (-1, ('embed', 'mlp', 'experts'))]
)
def test_vmap(axis, names):
  class Experts(nn.Module):
    @nn.compact
    def __call__(self, x):
      vmapped = nn.vmap(
        Block,
        in_axes=None,
        axis_size=4,
        variable_axes={'params': axis},
        split_rngs={'params': True},
        metadata_params={nn.PARTITION_NAME: 'experts'},
      )
      return vmapped(name='experts')(x)[0]

  variables = init(Experts(), X)
  w = variables['params']['experts']['w']
  assert w.names == names
  y = apply(Experts(), variables, X)
  np.testing.assert_allclose(y[2], jnp.tanh(X @ jnp.take(w.value, 2, axis=axis)), rtol=1e-5)


def test_collections_in_scan():
  """A statistic, a cache and a parameter, scanned over axes of their own."""

  class Cell(nn.Module):
    @nn.compact
    def __call__(self, x, _):
      mean = self.variable('batch_stats', 'mean', named(('embed',), jnp.zeros), (8,))
      cache = self.variable('cache', 'seen', named(('batch', 'embed'), jnp.zeros), (2, 8))
      mean.value += x.mean(0)
      cache.value += x
      return Block(name='block')(x)[0], None

  class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
      scanned = nn.scan(
        Cell,
        variable_axes={'params': 0, 'batch_stats': 0, 'cache': 1},
        split_rngs={'params': True},
        length=3,
        metadata_params=LAYERS,
      )
      return scanned(name='cells')(x, None)[0]

  variables = init(Model(), X)
  names = {
    'params': {'cells': {'block': {'w': ('layers', 'embed', 'mlp')}}},
    'batch_stats': {'cells': {'mean': ('layers', 'embed')}},
    'cache': {'cells': {'seen': ('batch', 'layers', 'embed')}},
  }
  assert names_of(variables) == names
  _, updated = apply(Model(), variables, X, mutable=['batch_stats', 'cache'])
  assert names_of(updated) == {key: names[key] for key in ('batch_stats', 'cache')}
  before, after = (tree['cache']['cells']['seen'].value for tree in (variables, updated))
  np.testing.assert_allclose(after[:, 0], before[:, 0] + X, rtol=1e-5)


def test_carried_and_broadcast_variables_get_no_axis():
  class Cell(nn.Module):
    @nn.compact
    def __call__(self, x, _):
      seen = self.variable('carried', 'seen', named(('embed',), jnp.zeros), (8,))
      seen.value += x.sum(0)
      return Block(name='block')(x)[0], None

  class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
      scanned = nn.scan(
        Cell,
        variable_broadcast='params',
        variable_carry='carried',
        split_rngs={'params': False},
        length=3,
        metadata_params=LAYERS,
      )
      return scanned(name='cells')(x, None)[0]

  carried = {'carried': {'cells': {'seen': box(('embed',), (8,))}}}
  params = {'cells': {'block': abstract(Block(), X)['params']}}
  _, updated = jax.eval_shape(
    lambda variables: Model().apply(variables, X, mutable='carried'), {**carried, 'params': params}
  )
  assert names_of(updated) == names_of(carried)


# -- parameters and variables


def test_param_gives_the_value_and_keeps_the_box():
  seen = []

  class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
      w = self.param('w', named(('embed', 'mlp')), (8, 8))
      kept = self.param('kept', named(('embed', 'mlp')), (8, 8), unbox=False)
      seen.append((type(w), type(kept)))
      return x @ w @ kept.value

  variables = Model().init(KEY, X)
  assert names_of(variables) == {'params': {'w': ('embed', 'mlp'), 'kept': ('embed', 'mlp')}}
  Model().apply(variables, X)
  assert all(issubclass(w, jax.Array) and kept is spmd.LogicallyPartitioned for w, kept in seen)
  assert len(seen) == 2


class Counter(nn.Module):
  """Sums what it is called with, in a boxed variable."""

  @nn.compact
  def __call__(self, x):
    count = self.variable('stats', 'count', named(('embed',), jnp.zeros), (8,))
    if not self.is_initializing():
      count.value += x.sum(0)
    return count.value


def test_assigning_to_a_variable_keeps_its_box():
  variables = Counter().init(KEY, X)
  for calls in (1, 2):
    _, variables = Counter().apply(variables, X, mutable='stats')
    assert variables['stats']['count'].names == ('embed',)
    np.testing.assert_allclose(variables['stats']['count'].value, calls * X.sum(0))


def test_get_variable_gives_the_box():
  bound = Counter().bind(Counter().init(KEY, X))
  assert bound.get_variable('stats', 'count').names == ('embed',)


@pytest.mark.parametrize('model', [nn.Dense(8, kernel_init=named(('embed', 'mlp'))), Stack()])
def test_apply_takes_parameters_without_boxes(model):
  variables = init(model, X)
  np.testing.assert_array_equal(apply(model, spmd.unbox(variables), X), apply(model, variables, X))


def test_flax_boxes_go_through_the_same_model():
  ours, theirs = (init(Stack(lib=lib), X) for lib in (spmd, nn))
  assert_same(spmd.unbox(ours), spmd.unbox(theirs))
  results = [apply(Stack(lib=lib), variables, X) for lib in (spmd, nn) for variables in (ours, theirs)]
  for result in results[1:]:
    np.testing.assert_array_equal(result, results[0])


# -- the other transformations


@pytest.mark.parametrize('transform', [nn.remat, nn.jit])
def test_remat_and_jit_keep_names(transform):
  model = transform(Block)()
  variables = init(model, X)
  assert names_of(variables) == {'params': {'w': ('embed', 'mlp')}}
  np.testing.assert_allclose(apply(model, variables, X)[0], apply(Block(), variables, X)[0], rtol=1e-6)
  assert names_of(gradients(model, variables, X)) == names_of(variables)


def test_remat_under_a_layout():
  layout = spmd.Layout({'data': 2, 'model': 4}, (('mlp', 'model'),))
  variables = layout.init(nn.remat(Block)().init, KEY, X)
  grads = layout.jit(jax.grad(lambda v: nn.remat(Block)().apply(v, X)[0].sum()))(variables)
  assert grads['params']['w'].value.sharding.spec == PartitionSpec(None, 'model')


def test_map_variables_never_permutes_names():
  transposed = nn.map_variables(
    Block,
    'params',
    trans_in_fn=lambda tree: jax.tree.map(jnp.transpose, tree),
    trans_out_fn=lambda tree: jax.tree.map(jnp.transpose, tree),
    init=True,
  )
  variables = init(transposed(), X)
  assert variables['params']['w'].names == ('embed', 'mlp')
  np.testing.assert_allclose(
    apply(transposed(), variables, X)[0], jnp.tanh(X @ variables['params']['w'].value.T), rtol=1e-5
  )


def test_share_scope():
  class Model(nn.Module):
    def setup(self):
      self.block = Block()
      nn.share_scope(self, self.block)

    def __call__(self, x):
      return self.block(x)[0]

  variables = abstract(Model(), X)
  assert names_of(variables) == {'params': {'w': ('embed', 'mlp')}}
  assert jax.eval_shape(Model().apply, variables, X).shape == (2, 8)


def test_tied_parameters():
  class Tied(nn.Module):
    def setup(self):
      self.embed = nn.Embed(16, 8, embedding_init=named(('vocab', 'embed')))
      self.block = Block()

    def __call__(self, tokens):
      x = self.block(self.block(self.embed(tokens))[0])[0]
      return self.embed.attend(x)

  tokens = jnp.arange(4)
  variables = init(Tied(), tokens)
  assert names_of(variables) == {
    'params': {'embed': {'embedding': ('vocab', 'embed')}, 'block': {'w': ('embed', 'mlp')}}
  }
  embedding = variables['params']['embed']['embedding'].value
  w = variables['params']['block']['w'].value
  expected = jnp.tanh(jnp.tanh(embedding[:4] @ w) @ w) @ embedding.T
  np.testing.assert_allclose(apply(Tied(), variables, tokens), expected, rtol=1e-4, atol=1e-6)
  assert names_of(gradients(Tied(), variables, tokens)) == names_of(variables)


def test_cond_and_while_loop_keep_names():
  class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
      block, counter = Block(name='block'), Counter(name='counter')
      block(x), counter(x)
      x = nn.cond(x.sum() > 0, lambda m, x: m(x)[0], lambda m, x: x, block, x)
      if self.is_initializing():
        return x
      return nn.while_loop(
        lambda m, c: c[0] < 2,
        lambda m, c: (c[0] + 1, m(c[1]) + c[1][0]),
        counter,
        (0, x[0]),
        carry_variables='stats',
      )[1]

  variables = abstract(Model(), X)
  assert names_of(variables) == {
    'params': {'block': {'w': ('embed', 'mlp')}},
    'stats': {'counter': {'count': ('embed',)}},
  }
  _, updated = jax.eval_shape(lambda v: Model().apply(v, X, mutable='stats'), variables)
  assert names_of(updated['stats']) == names_of(variables['stats'])


def test_batch_norm_statistics_without_boxes_live_beside_boxes():
  scale_init = named(('embed',), nn.initializers.ones)
  model = nn.BatchNorm(use_running_average=False, scale_init=scale_init)
  variables = init(model, X)
  assert names_of(variables) == {
    'params': {'scale': ('embed',), 'bias': None},
    'batch_stats': {'mean': None, 'var': None},
  }
  _, updated = apply(model, variables, X, mutable='batch_stats')
  np.testing.assert_allclose(updated['batch_stats']['mean'], 0.01 * X.mean(0), rtol=1e-5)


def test_tabulate_shows_names():
  shown = Stack().tabulate(KEY, X, console_kwargs={'width': 120, 'force_terminal': False})
  assert 'w: float32[3,8,8] P(layers, embed, mlp)' in re.sub(r'\x1b\[[0-9;]*m', '', shown)


# -- remat_scan


class Layer(nn.Module):
  """One square layer that takes and returns a value, as `remat_scan` wants it."""

  boxed: bool = True

  @nn.compact
  def __call__(self, x):
    w = self.param('w', named(('embed', 'mlp')) if self.boxed else NORMAL, (8, 8))
    return jnp.tanh(x @ w)


def deep(remat_scan, lengths, boxed, **options):
  class Deep(nn.Module):
    @nn.compact
    def __call__(self, x):
      return remat_scan(Layer, lengths, **options)(boxed, name='deep')(x)

  return Deep()


GROUPS_AND_LAYERS = ({nn.PARTITION_NAME: 'groups'}, {nn.PARTITION_NAME: 'layers'})


@pytest.mark.parametrize(
  'lengths, metadata_params, names',
  [
    ((4,), LAYERS, ('layers', 'embed', 'mlp')),
    ((4,), (LAYERS,), ('layers', 'embed', 'mlp')),
    ((2, 3), GROUPS_AND_LAYERS, ('groups', 'layers', 'embed', 'mlp')),
    ((2, 3), {nn.PARTITION_NAME: None}, (None, None, 'embed', 'mlp')),
    ((2, 1, 3), tuple({nn.PARTITION_NAME: name} for name in 'abc'), ('a', 'b', 'c', 'embed', 'mlp')),
  ],
)
def test_remat_scan_names(lengths, metadata_params, names):
  model = deep(spmd.remat_scan, lengths, True, metadata_params=metadata_params)
  variables = abstract(model, X)
  assert variables['params']['deep']['w'].names == names
  assert variables['params']['deep']['w'].shape == (*lengths, 8, 8)
  assert jax.eval_shape(model.apply, variables, X).shape == (2, 8)
  assert names_of(gradients(model, variables, X)) == names_of(variables)


@pytest.mark.parametrize('lengths, metadata_params', [((4,), LAYERS), ((2, 3), GROUPS_AND_LAYERS)])
def test_remat_scan_computes_what_flax_does_without_boxes(lengths, metadata_params):
  ours = deep(spmd.remat_scan, lengths, True, metadata_params=metadata_params)
  flaxs = deep(nn.remat_scan, lengths, False)

  @jax.jit
  def both(key):
    variables = ours.init(key, X), flaxs.init(key, X)
    losses = [lambda v, model=model: jnp.sum(model.apply(v, X) ** 2) for model in (ours, flaxs)]
    return [(v, jax.value_and_grad(loss)(v)) for v, loss in zip(variables, losses, strict=True)]

  result, expected = both(KEY)
  assert_same(spmd.unbox(result), expected)


@pytest.mark.parametrize('lengths', [(4,), (2, 2), (2, 2, 2)])
def test_remat_scan_rematerialises_as_flax_does(lengths):
  def jaxpr(remat_scan):
    model = deep(remat_scan, lengths, False)
    return str(jax.make_jaxpr(jax.grad(lambda v: model.apply(v, X).sum()))(abstract_zeros(model)))

  def abstract_zeros(model):
    return jax.tree.map(jnp.zeros_like, abstract(model, X))

  ours, flaxs = jaxpr(spmd.remat_scan), jaxpr(nn.remat_scan)
  for primitive in ('remat2[', 'checkpoint[', 'scan['):
    assert ours.count(primitive) == flaxs.count(primitive)
  assert ours.count('scan[') >= 2


def test_remat_scan_of_a_function_of_a_module():
  class Deep(nn.Module):
    @nn.compact
    def __call__(self, x):
      return spmd.remat_scan(lambda m, x: Layer(name='layer')(x), (2,), metadata_params=LAYERS)(self, x)

  variables = abstract(Deep(), X)
  assert names_of(variables) == {'params': {'layer': {'w': ('layers', 'embed', 'mlp')}}}
  assert jax.eval_shape(Deep().apply, variables, X).shape == (2, 8)


def test_remat_scan_over_another_axis():
  model = deep(spmd.remat_scan, (4,), True, variable_axes={'params': -1}, metadata_params=LAYERS)
  variables = abstract(model, X)
  assert variables['params']['deep']['w'].names == ('embed', 'mlp', 'layers')
  assert jax.eval_shape(model.apply, variables, X).shape == (2, 8)


def test_remat_scan_without_names_warns():
  with pytest.warns(UserWarning, match='adds an axis without a name'):
    variables = abstract(deep(spmd.remat_scan, (2,), True), X)
  assert variables['params']['deep']['w'].names == (None, 'embed', 'mlp')


def test_remat_scan_of_flax_knows_no_names():
  with pytest.raises(Exception, match='partition_name') as error:
    abstract(FlaxDeep(), X)
  assert type(error.value).__name__ == 'PartitioningUnspecifiedError'


class FlaxDeep(nn.Module):
  """Flax's `remat_scan` around Flax's boxes."""

  @nn.compact
  def __call__(self, x):
    return nn.remat_scan(nn.Dense, (2,))(8, kernel_init=named(('embed', 'mlp'), lib=nn), name='deep')(x)


def test_remat_scan_with_names_for_other_levels():
  with pytest.raises(ValueError) as error:
    spmd.remat_scan(Layer, (2, 3), metadata_params=(LAYERS,))
  assert str(error.value) == dedent("""\
    remat_scan has 2 levels (2, 3), but 1 metadata_params.
    Fix: give one for all levels, or one per level.""")


def test_remat_scan_without_lengths_is_refused_with_a_reason():
  with pytest.raises(ValueError, match='lengths'):
    abstract(deep(spmd.remat_scan, (), True), X)


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
def test_unbox_leaves_values_alone_that_do_not_fit_their_names(names):
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


def test_boxes_mesh_and_rules_win_over_those_in_force(mesh):
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
    with pytest.raises(TypeError):
      nn.unbox(abstract)
    assert spmd.unbox(abstract)['w'].shape == (8, 16)


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
    """A box that has nothing but what is abstract in Flax's class."""

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


# -- NNX


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
