"""Linen models without names get those that an author would write; the oracle is the same model, annotated."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st
from jax_resnet import resnet

import flax_spmd as spmd

KEY = jax.random.key(0)
X = jax.ShapeDtypeStruct((2, 8, 16), jnp.float32)
RULES = spmd.Rules(
  ('batch', 'data'),
  ('heads', 'model'),
  ('mlp', 'model'),
  ('vocab', 'model'),
  ('out', 'model'),
  ('layers', None),
  spmd.fsdp('data', min_size=1),
  indivisible='replicate',
)
kernel, bias, ones = nn.initializers.lecun_normal(), nn.initializers.zeros, nn.initializers.ones


def plain(init, *_):
  return init


def annotated(init, *names):
  return spmd.with_logical_partitioning(init, names)


def dense(n, features=16, **options):
  inits = {'kernel_init': n(kernel, 'in', 'out'), 'bias_init': n(bias, 'out')}
  return nn.Dense(features, **inits, **options)


def general(n):
  apart = nn.DenseGeneral(
    (4, 4), kernel_init=n(kernel, 'in', 'out', None), bias_init=n(bias, 'out', None)
  )
  joined = nn.DenseGeneral(
    16, axis=(-2, -1), kernel_init=n(kernel, 'in', None, 'out'), bias_init=n(bias, 'out')
  )
  return nn.Sequential([apart, joined])


def attention(n, **options):
  return nn.MultiHeadDotProductAttention(
    4,
    **options,
    kernel_init=n(kernel, 'embed', 'heads', 'kv'),
    bias_init=n(bias, 'heads', 'kv'),
    out_kernel_init=n(kernel, 'heads', 'kv', 'embed'),
    out_bias_init=n(bias, 'embed'),
  )


def cell(cls):
  def make(n):
    inits = {'kernel_init': n(kernel, 'in', 'out'), 'bias_init': n(bias, 'out')}
    return nn.RNN(cls(16, recurrent_kernel_init=n(kernel, 'in', 'out'), **inits))

  return make


def norm(cls, name, **options):
  return lambda n: cls(**options, **{f'{each}_init': n(ones, name) for each in ('scale', 'bias')})


def tied(n):
  """An embedding that is also the head, and is read without `self.param`."""

  class Tied(nn.Module):
    @nn.compact
    def __call__(self, x):
      embed = nn.Embed(16, 16, embedding_init=n(kernel, 'vocab', 'embed'))
      table = lambda: nn.unbox(embed.variables['params']['embedding'])
      return embed(x.argmax(-1)) @ table().T

  return Tied()


LAYERS = {
  'dense': dense,
  'general': general,
  'attention': attention,
  'tied': tied,
  'conv': lambda n: nn.Conv(
    16, (3,), kernel_init=n(kernel, None, 'in', 'out'), bias_init=n(bias, 'out')
  ),
  'transposed': lambda n: nn.ConvTranspose(
    16, (3,), transpose_kernel=True, use_bias=False, kernel_init=n(kernel, None, 'out', 'in')
  ),
  'einsum': lambda n: nn.Einsum(
    (16, 4, 4), 'bld,dhk->blhk', use_bias=False, kernel_init=n(kernel, 'in', 'out', None)
  ),
  'layer norm': norm(nn.LayerNorm, 'embed'),
  'rms norm': lambda n: nn.RMSNorm(scale_init=n(ones, 'embed')),
  'group norm': norm(nn.GroupNorm, 'out', num_groups=4),
  'batch norm': norm(nn.BatchNorm, 'out', use_running_average=False),
  'lstm': cell(nn.LSTMCell),
  'fused lstm': cell(nn.OptimizedLSTMCell),
  'gru': cell(nn.GRUCell),
  'simple cell': cell(nn.SimpleCell),
  'weight norm': lambda n: nn.WeightNorm(nn.Dense(16)),  # nobody can annotate this one
}


class Block(nn.Module):
  """A layer whose result has the shape of its argument."""

  layer: str
  names: object = plain

  @nn.compact
  def __call__(self, x, _=None):
    return LAYERS[self.layer](self.names)(x).reshape(x.shape), None


class Stack(nn.Module):
  """Blocks under transformations. `metadata` is that of the dimensions which these add."""

  blocks: tuple
  metadata: tuple
  names: object = plain

  @nn.compact
  def __call__(self, x):
    shared = {}
    for index, (layer, around) in enumerate(self.blocks):
      cls, axes = Block, {'params': 0, 'batch_stats': 0}
      if around == 'remat':
        cls = nn.remat(Block)
      if around == 'jit':
        cls = nn.jit(Block)
      if around in {'scan', 'last'}:
        axes = axes if around == 'scan' else {'params': -1, 'batch_stats': 0}
        split = {'params': True}
        cls = nn.scan(
          nn.remat(Block), axes, split_rngs=split, length=3, metadata_params=dict(self.metadata)
        )
      make = lambda cls=cls, layer=layer, index=index: cls(layer, self.names, name=f'block_{index}')
      x, _ = (shared.setdefault(layer, make()) if around == 'shared' else make())(x, None)
    return x


def leaves(tree):
  """The names of every array by its path, and the array without its box."""
  is_box = spmd.is_axis_metadata
  flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box)
  return {
    jax.tree_util.keystr(path): (getattr(each, 'names', None), nn.unbox(each)) for path, each in flat
  }


blocks = st.tuples(
  st.sampled_from(sorted(LAYERS)), st.sampled_from(['', 'remat', 'jit', 'scan', 'last', 'shared'])
)


@given(st.lists(blocks, min_size=1, max_size=3), st.booleans())
@settings(max_examples=20)
def test_a_model_has_the_names_that_an_author_would_give(blocks, from_table):
  """In any composition of layers and transformations."""
  layers = (('partition_name', 'layers'),)
  model = Stack(tuple(blocks), () if from_table else layers)
  author = Stack(tuple(blocks), layers, annotated)
  stacked = any(around in {'scan', 'last'} for _, around in blocks)
  table = {'^(params|batch_stats)/block': 'layers'} if from_table and stacked else {}
  named = jax.eval_shape(spmd.names_for(model.init, table), KEY, X)
  expected = jax.eval_shape(author.init, KEY, X)
  assert leaves(named['params']) == leaves(expected['params'])
  assert jax.tree.structure(nn.unbox(named)) == jax.tree.structure(jax.eval_shape(model.init, KEY, X))
  layout = spmd.Layout(spmd.abstract_mesh({'data': 2, 'model': 4}), RULES)
  assert layout.spec(named['params']) == layout.spec(expected['params'])


class Decoder(nn.Module):
  """A decoder that nobody has annotated, or that its author has, with names like those of the presets."""

  names: object = plain
  decode: bool = False

  @nn.compact
  def __call__(self, tokens):
    n = self.names
    embed = nn.Embed(32, 16, embedding_init=n(kernel, 'vocab', 'embed'))
    x = embed(tokens)
    for index in range(2):
      attend = attention(n, decode=self.decode, name=f'attention_{index}')
      x = x + attend(nn.LayerNorm(scale_init=n(ones, 'embed'), bias_init=n(bias, 'embed'))(x))
      wide = nn.Dense(64, name=f'wi_{index}', kernel_init=n(kernel, 'embed', 'mlp'), use_bias=False)
      down = nn.Dense(16, name=f'wo_{index}', kernel_init=n(kernel, 'mlp', 'embed'), use_bias=False)
      x = x + down(nn.relu(wide(x)))
    return embed.attend(x)


TABLE = {r'wi_\d/kernel$': ('embed', 'mlp'), r'wo_\d/kernel$': ('mlp', 'embed')}
TOKENS = np.random.default_rng(0).integers(0, 32, (8, 8))


def train(layout, create, *, boxed):
  """The losses of three steps, and the spec of every array of the state by its path."""
  state = layout.init(create, KEY, TOKENS, boxed=boxed)

  @layout.jit
  def step(state, tokens):
    def loss_of(params):
      logits = state.apply_fn({'params': params}, tokens)
      return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss

  tokens, losses = layout.shard(TOKENS, ('batch',)), []
  for _ in range(3):
    state, loss = step(state, tokens)
    losses.append(float(loss))
  plain_state = spmd.unbox(state)
  flat = jax.tree_util.tree_leaves_with_path(plain_state)
  return losses, {jax.tree_util.keystr(path): leaf.sharding.spec for path, leaf in flat}


@pytest.mark.slow
@pytest.mark.parametrize('boxed', [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_model_trains_as_its_annotated_version(boxed):
  """With every array of the state, of the optimizer too, where the names of an author would put it."""
  layout = spmd.Layout({'data': 2, 'model': 4}, spmd.presets.fsdp_tensor_parallel(min_size=1))

  def create_for(model):
    def create(key, tokens):
      params = model.init(key, tokens)['params']
      return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))

    return create

  losses, specs = train(layout, spmd.names_for(create_for(Decoder()), TABLE), boxed=boxed)
  expected = train(layout, create_for(Decoder(annotated)), boxed=boxed)
  assert (losses, specs) == expected and losses[2] < losses[0]
  assert specs[".opt_state[0].mu['wi_0']['kernel']"] == jax.P('data', 'model')


def test_a_cache_is_sharded_and_stays_so():
  """Flax's attention creates a replicated cache; here it is sharded as the heads are, at every step."""
  layout = spmd.Layout({'data': 2, 'model': 4}, spmd.presets.fsdp_tensor_parallel(min_size=1))
  model = Decoder(decode=True)
  state = layout.init(spmd.names_for(model.init, TABLE), KEY, TOKENS, boxed=False)
  step = lambda state, token: model.apply(state, token, mutable=['cache'])
  sharded_step, alone = layout.jit(step), jax.device_get(state)
  for column in range(3):
    token = TOKENS[:, column : column + 1]
    logits, changed = sharded_step(state, token)
    expected, changed_alone = step(alone, token)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    state, alone = {**state, **changed}, {**alone, **changed_alone}
    keys = state['cache']['attention_0']['cached_key']
    assert keys.shape == (8, 8, 4, 4) and keys.sharding.spec == jax.P('data', None, 'model', None)
  assert int(state['cache']['attention_1']['cache_index']) == 3


def test_a_public_model():
  """ResNet-18 of the package jax-resnet: every kernel is sharded by the names of its layer."""
  layout = spmd.Layout(
    spmd.abstract_mesh({'data': 2, 'model': 4}),
    (('out', 'model'), ('in', 'data')),
    indivisible='replicate',
  )
  model = resnet.ResNet18(n_classes=10)
  image = jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32)
  variables = layout.abstract(spmd.names_for(model.init), KEY, image, boxed=False)
  flat = jax.tree_util.tree_leaves_with_path(variables)
  kernels = [leaf for path, leaf in flat if path[-1].key == 'kernel']
  assert len(kernels) == 21
  for each in kernels:
    rank, (inputs, outputs) = each.ndim, each.shape[-2:]
    ends = 'data' if inputs % 2 == 0 else None, 'model' if outputs % 4 == 0 else None
    assert each.sharding.spec == jax.P(*[None] * (rank - 2), *ends)
  assert {leaf.sharding.spec for path, leaf in flat if path[-1].key in {'scale', 'mean', 'var'}} == {
    jax.P('model')
  }


def test_one_trace_serves_modules_with_other_entries():
  """`nn.jit` uses the trace of one module for the next one, which has another path and another parent."""

  class Outer(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.jit(Two)(name='inner')(x)

  class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
      return Outer(name='outer')(nn.jit(Two)(name='b')(nn.jit(Two)(name='a')(x)))

  table = {'/a/wi/kernel': ('a',), '/b/wi/kernel': ('b',), Outer: {'inner/wo/kernel': ('c', 'd')}}
  create = spmd.names_for(Model().init, table)
  for _ in range(2):
    params = jax.eval_shape(create, KEY, jnp.ones((1, 16)))['params']
    assert params['a']['wi']['kernel'].names == ('a', None)
    assert params['b']['wi']['kernel'].names == ('b', None)
    assert params['a']['wo']['kernel'].names == ('in', 'out')
    assert params['outer']['inner']['wo']['kernel'].names == ('c', 'd')


class Two(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(16, name='wo')(nn.Dense(16, name='wi')(x))


def test_traces_of_others_have_no_names():
  """A jitted `init` is traced apart for each table, and for nobody's."""
  init = jax.jit(nn.Dense(16).init)
  x = jnp.ones((1, 16))
  bare = init(KEY, x)['params']['kernel']
  assert isinstance(bare, jax.Array)
  for name in ('embed', 'mlp', 'embed'):
    create = spmd.names_for(init, {nn.Dense: {'kernel': (name,)}})
    assert create(KEY, x)['params']['kernel'].names == (name, None)
  assert isinstance(init(KEY, x)['params']['kernel'], jax.Array)


def test_the_most_specific_entry_wins():
  """The author's own names, expressions, outer types, derived types, Flax's layers."""

  class Own(nn.Dense):
    pass

  class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = dense(annotated, name='by_author')(x)
      return Own(16, name='derived')(Own(16, name='by_block')(nn.Dense(16, name='by_path')(x)))

  table = {
    'by_path/kernel': ('path', None),
    'bias$': None,
    Block: {'by_block/kernel': ('block', None), 'by_path/kernel': ('not', 'this')},
    Own: {'kernel': ('own', None)},
    nn.Dense: {'kernel': ('dense', None)},
    '^params/by_author': ('not', 'this'),
  }
  params = spmd.names_for(Block().init, table)(KEY, jnp.ones((1, 16)))['params']
  names = {name: variables['kernel'].names for name, variables in params.items()}
  assert names == {
    'by_author': ('in', 'out'),
    'by_path': ('path', None),
    'by_block': ('block', None),
    'derived': ('own', None),
  }
  assert isinstance(params['derived']['bias'], jax.Array)


def test_loops_that_call_methods_of_their_module():
  """In a method that has variables already: `nn.while_loop` and `nn.scan` carry them as they are."""

  class Counting(nn.Module):
    @nn.compact
    def __call__(self, x):
      count = self.variable('state', 'count', jnp.zeros, (4,))
      count.value = count.value + 1
      return nn.Dense(4)(x)

  class Model(nn.Module):
    def setup(self):
      self.inner = Counting()

    def again(self, x):
      return self.inner(x)

    @nn.compact
    def __call__(self, x):
      total = self.variable('state', 'total', jnp.zeros, (4,))
      x = self.inner(x)

      def body(module, carry):
        number, x = carry
        total = module.variable('state', 'total', jnp.zeros, (4,))
        total.value = total.value + x.sum(0)
        return number + 1, module.again(x)

      carried = {'carry_variables': ['state'], 'broadcast_variables': ['params']}
      _, x = nn.while_loop(lambda module, carry: carry[0] < 3, body, self, (0, x), **carried)
      total.value = total.value + 1
      options = {'variable_carry': 'state', 'variable_broadcast': 'params', 'length': 2}
      return nn.scan(lambda module, x, _: (module.again(x), None), **options)(self, x, None)[0]

  x = jnp.ones((1, 4))
  named, plain = spmd.names_for(Model().init)(KEY, x), Model().init(KEY, x)
  assert named['params']['inner']['Dense_0']['kernel'].names == ('in', 'out')
  np.testing.assert_array_equal(named['state']['total'], plain['state']['total'])
  assert jax.tree.structure(nn.unbox(named)) == jax.tree.structure(plain)
