"""Bad tables for `names_for`, with the whole texts of their errors; and states that its functions may return."""

import textwrap

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_spmd as spmd
from flax_spmd.errors import LayoutError

KEY = jax.random.key(0)
X = jnp.ones((1, 16))


class MLP(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(16, name='wo')(nn.Dense(64, name='wi')(x))


class Linear(nnx.Module):
  def __init__(self, rngs):
    self.wi = nnx.Linear(16, 64, rngs=rngs)


def text_of(names):
  """The error for a table, before or after the model has run."""
  with pytest.raises(LayoutError) as raised:
    jax.eval_shape(spmd.names_for(MLP().init, names), KEY, X)
  return str(raised.value)


def dedented(text):
  return textwrap.dedent(text).strip()


def test_invalid_entries():
  names = [
    ('wi/kernel', ('embed', 'mlp')),
    (nn.Dense, {'kernel': ['in', 'out'], 'bias': ('out',)}),
    ('wi/kernel', None),
    (nn.Dense, ('in', 'out')),
    (dict, {'kernel': ('in', 'out')}),
    (7, ('in',)),
    ('wi/(', ('in',)),
    (['wi'], ('in',)),
    ('wo', 3),
    (nn.remat(MLP), {}),
  ]
  assert text_of(names) == dedented("""
    Dense, 'kernel': ['in', 'out'] is not a tuple of names.
    'wi/kernel' is in the table twice.
    Dense is in the table twice.
    Dense: its entry is ('in', 'out'), a tuple.
    dict is neither a path expression nor a type of Flax modules.
    7 is neither a path expression nor a type of Flax modules.
    Entry 'wi/(': 'wi/(' is not a regular expression: missing ), unterminated subpattern at position 3.
    ['wi'] is neither a path expression nor a type of Flax modules.
    'wo': 3 is not a tuple of names.
    CheckpointMLP is a transformed class, which the modules inside do not have.
    Fix: give a tuple of logical names, or None for an array without names.
    Fix: join the two entries.
    Fix: give a dictionary from paths of arrays below the layer to names: {'kernel': ('in', 'out')}.
    Fix: use a class that derives from flax.linen.Module or flax.nnx.Module, or an expression for paths.
    Fix: correct it; it is searched for in paths such as params/layers/wi.
    Fix: use the class that was transformed, MLP.
  """)


@pytest.mark.parametrize('names', [5, 'in', ['in', 'out'], ('in', 3)])
def test_a_function_that_returns_no_names(names):
  create = spmd.names_for(nn.Dense(3).init, {nn.Dense: {'kernel': lambda module: names}})
  with pytest.raises(LayoutError) as error:
    create(jax.random.key(0), jnp.ones((1, 8)))
  assert str(error.value) == (
    f"Dense, 'kernel': its function: {names!r} is not a tuple of names.\n"
    'Fix: give a tuple of logical names, or None for an array without names.'
  )


@pytest.mark.parametrize('names', [None, 'wi/kernel', ('wi/kernel', ('in', 'out')), [3]])
def test_what_is_no_table(names):
  assert text_of(names) == dedented(f"""
    {names!r} is not a table of names.
    Fix: give a dictionary or a sequence of pairs: from types of Flax modules, or expressions for paths, to names.
  """)


def test_entries_that_name_nothing():
  """A type that the model lacks is no mistake, nor is an array that some layers of a type lack."""
  names = {
    'wii/kernel': ('embed', 'mlp'),
    '^blocks/': 'layers',
    nn.Dense: {'kernl': ('in', 'out'), 'bias': ('out',)},
    MLP: {'up': ('in', 'out')},
    nn.Conv: {'kernel': ('in', 'out')},
    nnx.Linear: {'kernel': ('in', 'out')},
  }
  assert text_of(names) == dedented("""
    'wii/kernel': ('embed', 'mlp') names nothing, as no array has such a path. Did you mean 'params/wi/kernel'?
    '^blocks/': 'layers' names nothing, as no array has such a path.
    Dense, 'kernl': names nothing, as no such layer has that array. Did you mean 'kernel'?
    MLP, 'up': names nothing, as no such layer has that array.
    Fix: correct the expression, or leave the entry out; an entry for a type may be for arrays that a model lacks.
    Fix: correct the path below the layer, or leave the entry out.
  """)


def test_a_part_of_the_variables():
  """Entries may be for arrays that are created and not returned, so one table serves parameters and caches."""
  names = {MLP: {'wi/kernel': ('embed', 'mlp')}, 'wo/kernel$': ('mlp', 'embed')}
  part = lambda: MLP().init(KEY, X)['params']['wi']['bias']
  assert jax.eval_shape(spmd.names_for(part, names)).names == ('out',)
  with pytest.raises(LayoutError, match="MLP, 'wii/kernel': names nothing"):
    jax.eval_shape(spmd.names_for(part, {MLP: {'wii/kernel': ('embed', 'mlp')}}))


def test_more_names_than_dimensions():
  names = {'wi/bias': ('mlp', 'embed'), MLP: {'wo/kernel': ('a', 'b', 'c')}}
  assert text_of(names) == dedented("""
    params/wi/bias, a Dense: entry 'wi/bias' has 2 names ('mlp', 'embed'), but the array has rank 1.
    params/wo/kernel, a Dense: entry MLP, 'wo/kernel' has 3 names ('a', 'b', 'c'), but the array has rank 2.
    Fix: give at most one name for each dimension of a single layer; an entry with one str names those of nn.scan and vmap.
  """)


def test_more_names_than_dimensions_of_nnx():
  create = lambda key, x: Linear(nnx.Rngs(0))
  with nnx.use_eager_sharding(False), pytest.raises(LayoutError) as raised:
    spmd.names_for(create, {nnx.Linear: {'bias': ('a', 'b')}})(KEY, X)
  assert str(raised.value) == dedented("""
    wi/bias, a Linear: entry Linear, 'bias' has 2 names ('a', 'b'), but the array has rank 1.
    Fix: give at most one name for each dimension of a single layer; an entry with one str names those of nn.scan and vmap.
  """)


def test_a_layer_of_flax_with_another_rank_has_no_names():
  """LayerNorm over two dimensions has a scale of rank 2; the names are for one."""
  norm = nn.LayerNorm(feature_axes=(-2, -1), reduction_axes=(-2, -1))
  variables = spmd.names_for(norm.init)(KEY, jnp.ones((2, 4, 8)))
  assert variables['params']['scale'].shape == (4, 8) and not spmd.is_axis_metadata(
    variables['params']['scale']
  )


def test_collections_of_names_beside_the_arrays_have_priority():
  """T5X names parameters in `params_axes`."""
  from flax.linen.partitioning import param_with_axes

  class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
      w = param_with_axes('w', nn.initializers.ones, (16, 4), jnp.float32, axes=('embed', 'mlp'))
      return nn.Dense(4)(x @ w)

  create = spmd.names_for(Model().init, {'params/w$': ('other', 'names')})
  layout = spmd.Layout(spmd.abstract_mesh({'model': 4}), (('mlp', 'model'), ('out', 'model')))
  variables = layout.abstract(create, KEY, X, boxed=False)
  assert variables['params']['w'].sharding.spec == jax.P(None, 'model')
  assert variables['params']['Dense_0']['kernel'].sharding.spec == jax.P(None, 'model')


def test_a_state_of_both():
  """Variables of Linen and a module of NNX; other values stay as they are."""

  def create(key, x):
    return {'linen': MLP().init(key, x)['params'], 'nnx': Linear(nnx.Rngs(0)), 'step': 3, 'x': x}

  with nnx.use_eager_sharding(False):
    state = spmd.names_for(create, {'wi/kernel$': ('embed', 'mlp')})(KEY, X)
  assert state['linen']['wi']['kernel'].names == ('embed', 'mlp')
  assert state['nnx'].wi.kernel.get_metadata()['out_sharding'] == ('embed', 'mlp')
  assert state['step'] == 3 and state['x'] is X


def test_a_function_of_the_module_may_give_names():
  by_size = lambda dense: ('embed', 'mlp') if dense.features == 64 else ('mlp', 'embed')
  params = spmd.names_for(MLP().init, {nn.Dense: {'kernel': by_size}})(KEY, X)['params']
  assert params['wi']['kernel'].names == ('embed', 'mlp')
  assert params['wo']['kernel'].names == ('mlp', 'embed')


def test_layers_that_read_their_variables():
  """They get the arrays themselves, or what serves as these."""

  class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
      dense = nn.Dense(16, use_bias=False)
      y = dense(x)
      w = dense.variables['params']['kernel']
      total = sum(jnp.sum(row**2) for row in w) / len(w) - abs(-w).max() * (w > 0).sum()
      return (
        x @ w.T + jnp.dot(y, w) + np.float32(2) * jnp.sum(w) + w[:1] * w.size + total + x @ (w * w + 1)
      )

  plain = Model().init_with_output(KEY, X)
  named = spmd.names_for(Model().init_with_output)(KEY, X)
  np.testing.assert_array_equal(plain[0], named[0])


def test_arrays_in_a_list():
  """A parameter may be a tree with sequences; each array has a path."""

  class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
      pair = self.param('pair', lambda key: {'in': [jnp.ones((16, 4)), jnp.ones((4,))]})['in']
      return x @ pair[0] + pair[1][None]

  params = spmd.names_for(Model().init, {'pair/in/0$': ('embed', 'mlp')})(KEY, X)['params']
  assert params['pair']['in'][0].names == ('embed', 'mlp')
  assert params['pair']['in'][1].shape == (4,)


def test_arrays_of_a_normalised_layer_have_names_by_path():
  """Flax's WeightNorm names its scales by the paths of arrays, which boxes would be part of; also when it runs again."""

  class Model(nn.Module):
    def setup(self):
      self.inner = Inner()

    def __call__(self, x):
      return self.inner.again(self.inner(x))

  class Inner(nn.Module):
    def setup(self):
      self.norm = nn.WeightNorm(nn.Dense(16))

    def __call__(self, x):
      return self.norm(x)

    def again(self, x):
      return self.norm(x)

  for model in (Model(), nn.WeightNorm(nn.Dense(16))):
    create = spmd.names_for(model.init, {'layer_instance/kernel$': ('embed', 'mlp')})
    named, plain = jax.eval_shape(create, KEY, X), jax.eval_shape(model.init, KEY, X)
    assert jax.tree.structure(spmd.unbox(named)) == jax.tree.structure(plain)
    [names] = [
      box.names
      for box in jax.tree.leaves(named, is_leaf=spmd.is_axis_metadata)
      if spmd.is_axis_metadata(box)
    ]
    assert names == ('embed', 'mlp')
