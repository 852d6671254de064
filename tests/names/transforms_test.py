"""Boxes in Linen: names of parameters and variables, and the axes that transformations add to them.

Flax's own errors (negative axes, missing names) are shown beside our behaviour.
"""

import re
from textwrap import dedent

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import flax_spmd as spmd
from tests.names.boxed_models import (
  KEY,
  LAYERS,
  Block,
  Stack,
  X,
  abstract,
  apply,
  assert_same,
  box,
  gradients,
  init,
  named,
  names_of,
)

# -- axes that transformations add and remove


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


def test_an_added_axis_can_be_named_none():
  added = box().add_axis(0, {nn.PARTITION_NAME: None})
  assert added.names == (None, 'embed', 'mlp')
  assert added.remove_axis(0, {nn.PARTITION_NAME: None}) == box()


def layerwise(x, w, axis):
  """The computation of `Stack`, layer by layer."""
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
  """A module around a stack, so that errors show its path."""

  axis: int = 0
  layer: str | None = 'layers'

  @nn.compact
  def __call__(self, x):
    return Stack(self.axis, self.layer, name='decoder')(x)


def refusal(model):
  """The error of applying `model` to variables of `Decoder()`."""
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


def test_a_missing_partition_name_is_none_with_a_warning_that_names_the_module():
  model = Decoder(layer=None)
  with pytest.warns(UserWarning) as warned:
    variables = abstract(model, X)
  assert variables['params']['decoder']['blocks']['w'].names == (None, 'embed', 'mlp')
  assert [str(one.message) for one in warned] == [
    "LogicallyPartitioned(float32[3,8,8], names=('embed', 'mlp')) in module decoder: a transformation "
    'adds an axis without a name. It is None (replicated); name it with '
    'metadata_params={nn.PARTITION_NAME: ...}.'
  ]
  assert jax.eval_shape(model.apply, variables, X).shape == (2, 8)  # one warning, at init


def test_a_missing_partition_name_is_an_error_in_flax_that_prints_the_array():
  with pytest.raises(Exception, match='partition_name') as error:
    abstract(Stack(layer=None, lib=nn), X)
  assert type(error.value).__name__ == 'PartitioningUnspecifiedError'
  assert 'JitTracer' in str(error.value)
  assert 'blocks' not in str(error.value)


class Nested(nn.Module):
  """Nested scans, each level with its own name and axis."""

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
  """A statistic, a cache and a parameter, each scanned over its own axis."""

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
  """Accumulates its arguments in a boxed variable."""

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
