"""NNX models without names get those that an author would write; the oracle is the same model, annotated."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import flax_spmd as spmd

kernel, bias, ones = nnx.initializers.lecun_normal(), nnx.initializers.zeros, nnx.initializers.ones
RULES = spmd.Rules(
  ('heads', 'model'),
  ('vocab', 'model'),
  ('out', 'model'),
  spmd.fsdp('data', min_size=1),
  indivisible='replicate',
)


@pytest.fixture(autouse=True)
def no_eager_sharding():
  with nnx.use_eager_sharding(False):
    yield


def plain(init, *_):
  return init


def annotated(init, *names):
  return nnx.with_partitioning(init, names)


def dense(n, rngs):
  return nnx.Linear(16, 32, kernel_init=n(kernel, 'in', 'out'), bias_init=n(bias, 'out'), rngs=rngs)


def attention(n, rngs, **options):
  return nnx.MultiHeadAttention(
    4,
    16,
    **{'decode': False, **options},
    kernel_init=n(kernel, 'embed', 'heads', 'kv'),
    bias_init=n(bias, 'heads', 'kv'),
    out_kernel_init=n(kernel, 'heads', 'kv', 'embed'),
    out_bias_init=n(bias, 'embed'),
    rngs=rngs,
  )


def cell(cls):
  def make(n, rngs):
    inits = {'kernel_init': n(kernel, 'in', 'out'), 'bias_init': n(bias, 'out')}
    return cls(16, 16, **inits, recurrent_kernel_init=n(kernel, 'in', 'out'), rngs=rngs)

  return make


def norm(cls, name, **options):
  def make(n, rngs):
    inits = {f'{each}_init': n(ones, name) for each in ('scale', 'bias')}
    return cls(16, **options, **inits, rngs=rngs)

  return make


LAYERS = {
  'dense': dense,
  'attention': attention,
  'general': lambda n, rngs: nnx.LinearGeneral(
    (4, 4),
    (2, 8),
    axis=(-2, -1),
    use_bias=False,
    kernel_init=n(kernel, 'in', None, 'out', None),
    rngs=rngs,
  ),
  'einsum': lambda n, rngs: nnx.Einsum(
    'bld,dhk->blhk', (16, 4, 4), kernel_init=n(kernel, 'in', 'out', None), rngs=rngs
  ),
  'embed': lambda n, rngs: nnx.Embed(32, 16, embedding_init=n(kernel, 'vocab', 'embed'), rngs=rngs),
  'conv': lambda n, rngs: nnx.Conv(
    3, 16, (3, 3), use_bias=False, kernel_init=n(kernel, None, None, 'in', 'out'), rngs=rngs
  ),
  'transposed': lambda n, rngs: nnx.ConvTranspose(
    3, 16, 3, transpose_kernel=True, use_bias=False, kernel_init=n(kernel, None, 'out', 'in'), rngs=rngs
  ),
  'layer norm': norm(nnx.LayerNorm, 'embed'),
  'rms norm': lambda n, rngs: nnx.RMSNorm(16, scale_init=n(ones, 'embed'), rngs=rngs),
  'group norm': norm(nnx.GroupNorm, 'out', num_groups=4),
  'batch norm': norm(nnx.BatchNorm, 'out'),
  'lora': lambda n, rngs: nnx.LoRA(
    16, 2, 32, a_initializer=n(kernel, 'in', None), b_initializer=n(kernel, None, 'out'), rngs=rngs
  ),
  'lstm': cell(nnx.LSTMCell),
  'fused lstm': cell(nnx.OptimizedLSTMCell),
  'gru': cell(nnx.GRUCell),
}


class Model(nnx.Module):
  """Layers, some of them stacked by `nnx.vmap`, and one shared variable."""

  def __init__(self, layers, names, rngs):
    self.layers = nnx.List([])
    for layer, stacked in layers:
      if stacked:
        create = functools.partial(LAYERS[layer], names)
        layers_of = nnx.vmap(create, transform_metadata={nnx.PARTITION_NAME: 'layers'})
        self.layers.append(nnx.List([nnx.split_rngs(splits=3)(layers_of)(rngs)]))
      else:
        self.layers.append(LAYERS[layer](names, rngs))
    self.shared = nnx.List([self.layers[0]])


def names_of(model):
  """The names of every parameter that has some, by its path."""
  flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
  found = {path: variable.get_metadata().get('out_sharding') for path, variable in flat}
  return {path: names for path, names in found.items() if names}


@given(st.lists(st.tuples(st.sampled_from(sorted(LAYERS)), st.booleans()), min_size=1, max_size=3))
@settings(max_examples=25)
def test_a_model_has_the_names_that_an_author_would_give(layers):
  """In any composition of layers, single and stacked."""
  stacked = any(each for _, each in layers)
  table = {r'^layers/\d+/0/': 'layers'} if stacked else {}
  author = nnx.eval_shape(lambda: Model(layers, annotated, nnx.Rngs(0)))
  named = nnx.eval_shape(spmd.names_for(lambda: Model(layers, plain, nnx.Rngs(0)), table))
  assert names_of(named) == names_of(author) != {}
  layout = spmd.Layout(spmd.abstract_mesh({'data': 2, 'model': 4}), RULES)
  assert layout.spec(nnx.state(named, nnx.Param)) == layout.spec(nnx.state(author, nnx.Param))


class Decoder(nnx.Module):
  def __init__(self, names, rngs, *, decode=False):
    wide, down = names(kernel, 'embed', 'mlp'), names(kernel, 'mlp', 'embed')
    inits = {f'{each}_init': names(ones, 'embed') for each in ('scale', 'bias')}
    self.embed = nnx.Embed(32, 16, embedding_init=names(kernel, 'vocab', 'embed'), rngs=rngs)
    self.norm = nnx.LayerNorm(16, **inits, rngs=rngs)
    self.attention = attention(names, rngs, decode=decode)
    self.wi = nnx.Linear(16, 64, use_bias=False, kernel_init=wide, rngs=rngs)
    self.wo = nnx.Linear(64, 16, use_bias=False, kernel_init=down, rngs=rngs)
    if decode:
      self.attention.init_cache((8, 8, 16))

  def __call__(self, tokens):
    x = self.embed(tokens)
    x = x + self.attention(self.norm(x))
    return self.embed.attend(x + self.wo(nnx.relu(self.wi(x))))


TABLE = {'wi/kernel$': ('embed', 'mlp'), 'wo/kernel$': ('mlp', 'embed')}
TOKENS = np.random.default_rng(0).integers(0, 32, (8, 8))


def train(layout, create):
  """The losses of three steps, and the sharding of every array of the model and of its optimizer."""
  model = layout.init(create)
  optimizer = layout.init(lambda model: nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), model)

  @layout.jit
  def step(model, optimizer, tokens):
    def loss_of(model):
      return optax.softmax_cross_entropy_with_integer_labels(model(tokens), tokens).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss

  tokens = layout.shard(TOKENS, ('batch',))
  losses = [float(step(model, optimizer, tokens)) for _ in range(3)]
  flat = jax.tree_util.tree_leaves_with_path((nnx.state(model), nnx.state(optimizer)))
  return losses, {jax.tree_util.keystr(path): leaf.sharding.spec for path, leaf in flat}


@pytest.mark.slow
def test_a_model_trains_as_its_annotated_version():
  layout = spmd.Layout({'data': 2, 'model': 4}, spmd.presets.fsdp_tensor_parallel(min_size=1))
  losses, specs = train(layout, spmd.names_for(lambda: Decoder(plain, nnx.Rngs(0)), TABLE))
  expected = train(layout, lambda: Decoder(annotated, nnx.Rngs(0)))
  assert (losses, specs) == expected and losses[2] < losses[0]
  assert jax.P('data', 'model') in specs.values()


def test_a_cache_is_sharded_and_stays_so():
  layout = spmd.Layout({'data': 2, 'model': 4}, spmd.presets.fsdp_tensor_parallel(min_size=1))
  create = lambda: Decoder(plain, nnx.Rngs(0), decode=True)
  model, alone = layout.init(spmd.names_for(create, TABLE)), create()
  step = layout.jit(lambda model, token: model(token))
  for column in range(3):
    token = TOKENS[:, column : column + 1]
    np.testing.assert_allclose(step(model, token), alone(token), rtol=1e-4, atol=1e-5)
    keys = model.attention.cached_key[...]
    assert keys.shape == (8, 8, 4, 4) and keys.sharding.spec == jax.P('data', None, 'model', None)
  assert int(model.attention.cache_index[...]) == 3


def test_a_model_and_its_optimizer_at_once():
  """The optimizer is created before the model has names; it has those of its parameters nevertheless."""
  layout = spmd.Layout(spmd.abstract_mesh({'data': 2, 'model': 4}), RULES)

  def create():
    model = Decoder(plain, nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

  _, optimizer = layout.abstract(spmd.names_for(create, TABLE))
  mu = optimizer.opt_state[0].mu
  assert mu['attention']['query']['kernel'].sharding.spec == jax.P('data', 'model', None)


class Net(nnx.Module):
  def __init__(self, rngs):
    self.up, self.norm = nnx.Linear(16, 32, rngs=rngs), nnx.BatchNorm(32, rngs=rngs)
    self.down = nnx.LoRALinear(32, 16, lora_rank=4, rngs=rngs)


def by_layer(params):
  return jax.tree_util.tree_map_with_path(lambda path, _: 'ab'['up' in str(path)], params)


def large(params):
  return jax.tree.map(lambda x: x.ndim > 1, params)


EACH = {'a': optax.adam(1e-2), 'b': optax.sgd(1e-2, momentum=0.9)}
OPTIMIZERS = {
  'adam': optax.adam(1e-2),
  'chain': optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2), optax.ema(0.9)),
  'inject_hyperparams': optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
  'multi_steps': optax.MultiSteps(optax.adam(1e-2), 2),
  'masked': optax.masked(optax.adam(1e-2), large),
  'multi_transform': optax.multi_transform(EACH, by_layer),
}
FILTERS = {
  'all': nnx.Param,
  'lora': nnx.LoRAParam,
  'path': nnx.All(nnx.Param, nnx.PathContains('up')),
}


class Both(nnx.Module):
  def __init__(self, tx, wrt):
    self.z = nnx.Dict(net=Net(nnx.Rngs(0)))
    self.a = nnx.List([nnx.Optimizer(self.z.net, tx, wrt=wrt)])


def pair(tx, wrt):
  net = Net(nnx.Rngs(0))
  return net, nnx.Optimizer(net, tx, wrt=wrt)


PLACES = {
  'pair': pair,
  'reversed': lambda *args: pair(*args)[::-1],
  'dictionaries': lambda *args: dict(zip(('z', 'a'), ([each] for each in pair(*args)), strict=True)),
  'one module': lambda *args: {'x': [Both(*args)]},
  'two': lambda *args: {'x': [Both(*args)], 'a': {'b': pair(*args)}},
  'joined': lambda tx, wrt: [nnx.ModelAndOptimizer(Net(nnx.Rngs(0)), tx, wrt=wrt)],
}


@given(
  st.sampled_from(sorted(OPTIMIZERS)), st.sampled_from(sorted(FILTERS)), st.sampled_from(sorted(PLACES))
)
@settings(max_examples=15)
def test_state_of_an_optimizer_that_is_created_with_its_model(optimizer, wrt, place):
  """It is sharded as the parameters are, wherever the two are in the result."""
  layout = spmd.Layout(spmd.abstract_mesh({'data': 2, 'model': 4}), RULES)
  create = lambda: PLACES[place](OPTIMIZERS[optimizer], FILTERS[wrt])
  result = layout.abstract(spmd.names_for(create))
  is_node = lambda node: isinstance(node, (nnx.Module, nnx.Optimizer))
  nodes = [
    each
    for _, top in jax.tree.leaves_with_path(result, is_leaf=is_node)
    for _, each in nnx.iter_graph(top)
  ]
  nets = [each for each in nodes if isinstance(each, Net)]
  parameters = {
    path: each.get_value() for net in nets for path, each in nnx.to_flat_state(nnx.state(net))
  }
  state = [
    each
    for node in nodes
    if isinstance(node, nnx.Optimizer)
    for each in nnx.to_flat_state(nnx.state(node.opt_state))
  ]
  arrays = [(path, each.get_value()) for path, each in state if getattr(each.get_value(), 'ndim', 0)]
  assert arrays
  for path, array in arrays:
    [own] = [value for below, value in parameters.items() if path[-len(below) :] == below]
    assert (array.shape, array.sharding) == (own.shape, own.sharding)


def test_names_of_the_model_and_shared_variables_stay():
  class Tied(nnx.Module):
    def __init__(self, rngs):
      self.first = nnx.Linear(16, 16, kernel_init=annotated(kernel, 'a', 'b'), rngs=rngs)
      self.second = nnx.Linear(16, 16, rngs=rngs)
      self.second.kernel = self.first.kernel
      self.second.bias = nnx.Param(jnp.ones(16))

  model = spmd.names_for(
    lambda: Tied(nnx.Rngs(0)), {'second/bias': ('c',), 'first/kernel': ('d', 'd')}
  )()
  assert model.second.kernel is model.first.kernel
  assert model.first.kernel.get_metadata()['out_sharding'] == ('a', 'b')
  assert model.second.bias.get_metadata()['out_sharding'] == ('c',)


def test_a_bridged_linen_model():
  """Its variables have the names of the Linen layers, by type and by path."""
  model = nn.Sequential([nn.Dense(16), nn.Dense(16)])
  bridge = lambda: nnx.bridge.ToNNX(model, rngs=nnx.Rngs(0))
  create = lambda: nnx.bridge.lazy_init(bridge(), jnp.ones((1, 16)))
  named = spmd.names_for(create, {'params/layers_1/kernel': ('embed', 'mlp')})()
  assert named.layers_0['kernel'].get_metadata()['out_sharding'] == ('in', 'out')
  assert named.layers_1['kernel'].get_metadata()['out_sharding'] == ('embed', 'mlp')
  np.testing.assert_array_equal(named(jnp.ones((1, 16))), create()(jnp.ones((1, 16))))


@pytest.mark.parametrize('axis', [0, 1])
@pytest.mark.parametrize(
  'make',
  [
    lambda rngs: nnx.Linear(5, 7, rngs=rngs),
    lambda rngs: nnx.LinearGeneral((5, 6), (7, 8), axis=(-2, -1), batch_axis={0: 9}, rngs=rngs),
    lambda rngs: nnx.Conv(4, 7, (2, 5), feature_group_count=2, rngs=rngs),
    lambda rngs: nnx.Einsum('ab,bcd->acd', (5, 6, 7), (6, 7), rngs=rngs),
    lambda rngs: nnx.Embed(5, 7, rngs=rngs),
    lambda rngs: nnx.BatchNorm(5, rngs=rngs),
    lambda rngs: nnx.MultiHeadAttention(2, 6, qkv_features=8, decode=False, rngs=rngs),
  ],
)
def test_stacked_layers_have_the_names_of_a_single_one(make, axis):
  """The oracle is a single layer, whose names get one more at the dimension that `nnx.vmap` adds."""
  stacked = nnx.vmap(
    lambda key: make(nnx.Rngs(key)), out_axes=nnx.StateAxes({nnx.RngState: 0, ...: axis})
  )
  keys = jax.random.split(jax.random.key(0), 3)
  [found, single] = [
    dict(nnx.to_flat_state(nnx.state(spmd.names_for(create, {'.': 'layers'})(), nnx.Not(nnx.RngState))))
    for create in (lambda: stacked(keys), lambda: make(nnx.Rngs(0)))
  ]
  assert found.keys() == single.keys()
  for path, variable in single.items():
    names = variable.get_metadata().get('out_sharding')
    expected = names and (*names[:axis], 'layers', *names[axis:])
    assert found[path].get_metadata().get('out_sharding') == expected


def test_stacked_variables_of_the_model_have_the_names_of_a_single_one():
  class Block(nnx.Module):
    def __init__(self, key):
      self.linear = nnx.Linear(5, 7, rngs=nnx.Rngs(key))
      self.scale = nnx.Param(jnp.ones((5, 7)))

  create = lambda: nnx.vmap(Block)(jax.random.split(jax.random.key(0), 3))
  for own in ({Block: {'scale': ('embed', 'mlp')}}, {'scale$': ('embed', 'mlp')}):
    block = spmd.names_for(create, {**own, '.': 'layers'})()
    assert block.scale.get_metadata()['out_sharding'] == ('layers', 'embed', 'mlp')
