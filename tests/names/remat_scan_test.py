"""`remat_scan` over boxed parameters: a name per level, and otherwise the results of Flax's own."""

from textwrap import dedent

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import flax_spmd as spmd
from tests.names.boxed_models import (
  KEY,
  LAYERS,
  NORMAL,
  X,
  abstract,
  assert_same,
  gradients,
  named,
  names_of,
)


class Layer(nn.Module):
  """One square layer that maps a value to a value, as `remat_scan` requires."""

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


def test_remat_scan_of_flax_fails_on_boxes():
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


@pytest.mark.parametrize('lengths', [(), 3])
def test_lengths_that_are_no_levels(lengths):
  with pytest.raises(ValueError) as caught:
    spmd.remat_scan(nn.Dense, lengths)
  assert str(caught.value) == (
    f'remat_scan has lengths={lengths}.\nFix: give the iterations per level, such as (4, 6).'
  )
