"""Flax's own boxes under a layout: around kernels that are made flat, and of arrays that a rule for a path has placed."""

import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import meta
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd._src.constraint_log import record_constraints
from flax_spmd._src.names.flax_boxes import StoredNames
from flax_spmd.explore import TrainStep, compare

NORMAL = nn.initializers.normal()
NAMES = (('embed', 'data'), ('heads', 'model'))
BOTH = {'data': 2, 'model': 4}
LAYOUT = spmd.Layout(BOTH, NAMES)
KEY, X = jax.random.key(0), jnp.ones((4, 2, 8))

ANNOTATIONS = {
  'mesh axes': lambda *names: nn.with_partitioning(
    NORMAL, tuple(dict(NAMES).get(name) for name in names)
  ),
  'names': lambda *names: nn.with_logical_partitioning(NORMAL, names),
  'names, rules of its own': lambda *names: nn.with_logical_partitioning(NORMAL, names, rules=NAMES),
  'names in boxes of axes': lambda *names: nn.with_partitioning(NORMAL, names),
  'names, mesh of its own': lambda *names: nn.with_logical_partitioning(NORMAL, names, mesh=LAYOUT.mesh),
  'mesh axes, mesh of its own': lambda *names: nn.with_partitioning(
    NORMAL, tuple(dict(NAMES).get(name) for name in names), mesh=LAYOUT.mesh
  ),
}
BY_FLAX = [
  name for name in ANNOTATIONS if 'mesh of its own' not in name
]  # with one, Flax refuses flat kernels


class Attention(nn.Module):
  """Kernels of three dimensions, which Flax makes flat."""

  annotated: object

  @nn.compact
  def __call__(self, x, _=None):
    x = nn.DenseGeneral((8,), kernel_init=self.annotated('embed', None))(x)
    return nn.MultiHeadDotProductAttention(
      4,
      kernel_init=self.annotated('embed', 'heads', None),
      out_kernel_init=self.annotated('heads', None, 'embed'),
    )(x, x), None


STACKED = {'variable_axes': {'params': 0}, 'split_rngs': {'params': True}}
TRANSFORMS = {
  'plain': lambda cls, **_: cls,
  'remat': lambda cls, **_: nn.remat(cls),
  'scan': lambda cls, **options: nn.scan(cls, **STACKED, length=3, **options),
  'scan over remat': lambda cls, **options: TRANSFORMS['scan'](nn.remat(cls), **options),
  'vmap': lambda cls, **options: nn.vmap(cls, **STACKED, in_axes=None, axis_size=3, **options),
}


def transformed(cls, transform, name):
  """A module class under a transformation, whose new axis has no mesh axis."""
  new = None if 'mesh axes' in name else 'layers'
  annotated = ANNOTATIONS.get(name, lambda *names: NORMAL)
  return TRANSFORMS[transform](cls, metadata_params={nn.PARTITION_NAME: new})(annotated)


def cases(names, quick):
  """Every transformation and annotation; those that are not quick only if all tests run."""
  return pytest.mark.parametrize(
    ('transform', 'name'),
    [
      pytest.param(transform, name, marks=() if (transform, name) in quick else pytest.mark.exhaustive)
      for transform in TRANSFORMS
      for name in names
    ],
  )


def by_hand(model):
  """The state, as Flax's users create it."""
  abstract = jax.eval_shape(model.init, KEY, X)
  with nn.logical_axis_rules(NAMES):
    shardings = nn.logical_to_mesh_sharding(
      nn.get_partition_spec(abstract), LAYOUT.mesh, ((*NAMES, ('data', 'data'), ('model', 'model')))
    )
    return jax.jit(model.init, out_shardings=shardings)(KEY, X)


def training(model, optimizer):
  """A step as users write it, with boxes in parameters, gradients and moments."""

  def create(key, x):
    params = model.init(key, x)['params']
    return {'params': params, 'opt_state': optimizer.init(params)}

  def step(state, x):
    def loss_of(params):
      return jnp.mean(model.apply({'params': params}, x)[0] ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state['params'])
    updates, moments = optimizer.update(grads, state['opt_state'], state['params'])
    params = jax.tree.map(jnp.add, state['params'], updates)
    return {'params': params, 'opt_state': moments}, loss

  return create, step


def assert_equal_states(one, other):
  assert jax.tree.structure(one) == jax.tree.structure(other)
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


@cases(
  BY_FLAX,
  {('plain', 'names, rules of its own'), ('remat', 'mesh axes'), ('scan', 'names in boxes of axes')},
)
def test_a_kernel_that_is_made_flat_is_created_and_sharded_as_by_hand(transform, name):
  model = transformed(Attention, transform, name)
  assert_equal_states(LAYOUT.init(model.init, KEY, X), by_hand(model))


@cases(ANNOTATIONS, {('plain', 'mesh axes, mesh of its own'), ('vmap', 'names, mesh of its own')})
def test_a_kernel_that_is_made_flat_in_a_step(transform, name):
  """As on one device, with the shardings of the state."""

  def run(layout, name):
    create, step = training(transformed(Attention, transform, name), optax.sgd(0.1))
    state = layout.init(create, KEY, X)
    return state, *layout.jit(step)(state, X)

  state, after, loss = run(LAYOUT, name)
  _, expected, expected_loss = run(spmd.Layout({'data': 1}), 'no annotation')
  assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
  for one, before, other in zip(*map(jax.tree.leaves, (after, state, expected)), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert one.sharding == before.sharding


@pytest.mark.parametrize('name', BY_FLAX)
def test_under_a_block_of_a_layout_too(name):
  model = Attention(ANNOTATIONS[name])
  with LAYOUT:
    state = jax.jit(model.init)(KEY, X)
  jax.tree.map(np.testing.assert_array_equal, state, jax.jit(model.init)(KEY, X))


@pytest.mark.slow
def test_a_kernel_that_is_made_flat_is_compared():
  create, step = training(Attention(ANNOTATIONS['mesh axes']), optax.adam(1e-3))
  layout = spmd.Layout(spmd.abstract_mesh(BOTH), NAMES)
  outcome = compare(TrainStep(step, create, X, args=(KEY, X)), {'one': layout}, 'cpu:8')['one']
  assert outcome.error is None
  planned = layout.plan(create, KEY, X).explain().rows
  assert outcome.memory.parameters == sum(
    row.bytes_per_device for row in planned if row.path.startswith('params/')
  )


# -- arrays that a rule for their path has placed

OWNED = LAYOUT.replace(rules=(('w$', P('model', None)), *NAMES))
OWNED_STACK = LAYOUT.replace(rules=(('w$', P(None, 'model', None)), *NAMES))


class Layer(nn.Module):
  annotated: object

  @nn.compact
  def __call__(self, x, _=None):
    return jnp.tanh(x @ self.param('w', self.annotated('embed', 'heads'), (64, 64))), None


def collectives(layout, step, *args):
  text = layout.jit(step).lower(*args).compile().as_text()
  kinds = ('all-to-all', 'all-gather', 'collective-permute', 'all-reduce')
  return {kind: count for kind in kinds if (count := text.count(f' {kind}('))}


def boxes(tree):
  found = jax.tree.leaves(tree, is_leaf=spmd.is_axis_metadata)
  return [
    (type(box), box.names, box.mesh, getattr(box, 'rules', None))
    for box in found
    if spmd.is_axis_metadata(box)
  ]


WITHOUT_RULES = [name for name in ANNOTATIONS if 'rules' not in name]


@pytest.mark.slow
@cases(
  WITHOUT_RULES,
  {('plain', 'names, mesh of its own'), ('scan over remat', 'names'), ('vmap', 'mesh axes')},
)
def test_a_path_rule_owns_the_array_of_a_box_inside_a_step(transform, name):
  """The step has the collectives of one without boxes, and its result the boxes of its argument."""
  layout = OWNED_STACK if transform in ('scan', 'scan over remat', 'vmap') else OWNED
  x = layout.shard(np.ones((8, 64), np.float32), P('data'))

  def run(name):
    create, step = training(transformed(Layer, transform, name), optax.adam(1e-2))
    state = layout.init(create, KEY, x)
    after, loss = layout.jit(step)(state, x)
    return state, after, loss, collectives(layout, step, state, x), layout.jit(step).explain(state, x)

  state, after, loss, moved, explanation = run(name)
  _, plain, plain_loss, needed, plain_explanation = run('no annotation')
  assert moved == needed
  assert [str(one) for one in explanation.collectives] == [
    str(one) for one in plain_explanation.collectives
  ]
  assert jax.tree.structure(after) == jax.tree.structure(state)
  assert boxes(after) == boxes(state) != []
  assert {type(names) for _, names, _, _ in boxes(after)} == {tuple}
  assert float(loss) == pytest.approx(float(plain_loss), rel=1e-6)
  for one, other in zip(*map(jax.tree.leaves, (after, plain)), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert one.sharding == other.sharding


def test_a_box_with_rules_of_its_own_is_stored_and_opened_by_them():
  create, step = training(Layer(ANNOTATIONS['names, rules of its own']), optax.adam(1e-2))
  x = OWNED.shard(np.ones((8, 64), np.float32), P('data'))
  state = OWNED.init(create, KEY, x)
  assert state['params']['w'].value.sharding.spec == P('data', 'model')
  by_names = spmd.Layout(BOTH, NAMES)
  assert collectives(OWNED, step, state, x) == collectives(by_names, step, state, x)


def test_names_get_their_spec_through_a_transformation_and_stay_equal():
  names = StoredNames(('embed', None), P('data', None))
  assert (names, hash(names), repr(names)) == (('embed', None), hash(('embed', None)), "('embed', None)")
  box = nn.LogicallyPartitioned(1.0, names)
  plain = nn.LogicallyPartitioned(1.0, ('embed', None))
  assert jax.tree.structure(box) == jax.tree.structure(plain)
  [leaf], treedef = jax.tree.flatten(box)
  assert treedef.unflatten([leaf]).names.stored == P('data', None)
  assert type(pickle.loads(pickle.dumps(names))) is tuple
  assert type(box.add_axis(0, {nn.PARTITION_NAME: 'layers'}).names) is tuple


# -- Flax without a layout


def test_flax_has_its_own_methods_outside_of_blocks():
  before = meta.Partitioned.unbox, nn.LogicallyPartitioned.unbox, meta.Partitioned.remove_axis
  inside = []
  with LAYOUT:
    inside += [meta.Partitioned.unbox, nn.LogicallyPartitioned.unbox, meta.Partitioned.remove_axis]
    with spmd.Layout({'data': 8}), spmd.logical_axis_rules(NAMES):
      pass
    assert meta.Partitioned.unbox is inside[0]
    LAYOUT.init(Layer(ANNOTATIONS['names']).init, KEY, jnp.ones((8, 64)))
  assert not set(inside) & set(before)
  assert (meta.Partitioned.unbox, nn.LogicallyPartitioned.unbox, meta.Partitioned.remove_axis) == before


def test_a_thread_without_a_layout_opens_boxes_as_flax_does():
  import threading

  text = []
  box = nn.Partitioned(jax.ShapeDtypeStruct((8, 4), jnp.float32), ('data', None, None))

  def elsewhere():
    try:
      with jax.set_mesh(LAYOUT.mesh):
        jax.eval_shape(lambda box: box.unbox(), box)
    except ValueError as error:
      text.append(str(error))

  with LAYOUT:
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert jax.eval_shape(lambda box: box.unbox(), box).shape == (8, 4)
  assert len(text) == 1 and 'rank at least 3' in text[0]


def test_the_log_attributes_the_constraint_of_a_box_to_flax():
  model = Layer(ANNOTATIONS['mesh axes'])
  state = LAYOUT.abstract(model.init, KEY, jnp.ones((8, 64)))
  with record_constraints() as requests:
    LAYOUT.jit(model.apply).eval_shape(state, jnp.ones((8, 64)))
  assert [(one.by, one.names, one.spec) for one in requests] == [
    ('flax', ('data', 'model'), P('data', 'model'))
  ]
