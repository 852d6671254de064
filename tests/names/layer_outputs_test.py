"""Models without constraints get those that an author would write; the oracle is the same model with constraints by hand."""

import collections
import enum
from typing import Any

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
from flax_spmd._src import compat
from flax_spmd.errors import LayoutError

KEY = jax.random.key(0)
OPEN = jax.P.UNCONSTRAINED
LAYOUT = spmd.Layout({'data': 2, 'model': 4}, spmd.presets.fsdp_tensor_parallel(min_size=1))
RULES = (
  ('batch', 'data'),
  ('layers', None),
  ('out', 'model'),
  ('vocab', 'model'),
  ('length', None),
  ('in', None),
)
OUT = spmd.Layout(LAYOUT.mesh, RULES)


def by_hand(x, *names):
  return spmd.with_logical_constraint(x, names)


def nothing(x, *names):
  return x


def leading(rank):
  """The names of all dimensions but the last ones, of which there are `rank`."""
  return ('batch', 'length') if rank == 2 else ('batch', *[OPEN] * (rank - 1))


def constraints(layout, fn, *args):
  """The shape and the spec of each constraint of a program, with the number of its occurrences."""
  found = collections.Counter()

  def visit(program):
    for equation in compat.jaxpr_parts(program).equations:
      if equation.primitive.name == 'sharding_constraint':
        spec = equation.params['sharding'].spec
        found[equation.outvars[0].aval.shape, str(spec)] += 1
      for inner in compat.jaxprs_in(equation.params):
        visit(inner)

  with layout, nnx.use_eager_sharding(False):
    visit(jax.make_jaxpr(fn)(*args))
  return found


def dense(x, constrain):
  return constrain(nn.Dense(16)(x), *leading(x.ndim - 1), 'out')


def general(x, constrain):
  apart = constrain(nn.DenseGeneral((4, 4))(x), *leading(x.ndim - 1), 'out', None)
  joined = nn.DenseGeneral(16, axis=(-2, -1), use_bias=False)(apart)
  return constrain(joined, *leading(x.ndim - 1), 'out')


def einsum(x, constrain):
  y = nn.Einsum((16, 4, 4), '...d,dhk->...hk', use_bias=False)(x)
  return constrain(y, *leading(x.ndim - 1), 'out', None).reshape(x.shape)


def over_places(x, constrain, cls, **options):
  """A convolution; the places of `x` are the dimensions between the batch and the features."""
  places = x if x.ndim > 2 else x[:, None]
  y = cls(16, (1,) * (places.ndim - 2), **options)(places)
  return constrain(y, 'batch', *[OPEN] * (places.ndim - 2), 'out').reshape(x.shape)


def convolution(x, constrain):
  return over_places(x, constrain, nn.Conv)


def transposed(x, constrain):
  return over_places(x, constrain, nn.ConvTranspose, transpose_kernel=True)


def embedded(x, constrain):
  embed = nn.Embed(16, 16)
  logits = constrain(embed.attend(x), *leading(x.ndim - 1), 'vocab')
  return constrain(embed(logits.argmax(-1)), *leading(x.ndim - 1), 'embed')


def author(x, constrain):
  """A layer whose author has given names; the initializer has them, the array has not."""
  init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ('in', 'embed'))
  return constrain(nn.Dense(16, kernel_init=init)(x), *leading(x.ndim - 1), 'embed')


LAYERS = (dense, general, einsum, convolution, transposed, embedded, author)


class Block(nn.Module):
  layer: object
  constrain: object = nothing

  @nn.compact
  def __call__(self, x, _=None):
    return self.layer(nn.LayerNorm()(x), self.constrain), None


class Stack(nn.Module):
  blocks: tuple
  constrain: object = nothing

  @nn.compact
  def __call__(self, x):
    for index, (layer, around) in enumerate(self.blocks):
      cls = {'': Block, 'remat': nn.remat(Block), 'jit': nn.jit(Block)}.get(around)
      if around == 'scan':
        names = {nn.PARTITION_NAME: 'layers'}
        options = {'split_rngs': {'params': True}, 'length': 3, 'metadata_params': names}
        cls = nn.scan(nn.remat(Block), {'params': 0}, **options)
      x, _ = cls(layer, self.constrain, name=f'{index}')(x, None)
    return x


blocks = st.tuples(st.sampled_from(LAYERS), st.sampled_from(['', 'remat', 'jit', 'scan']))


@given(st.lists(blocks, min_size=1, max_size=2), st.lists(st.integers(2, 3), max_size=3), st.booleans())
@settings(max_examples=10)
def test_a_model_has_the_constraints_that_an_author_would_write(blocks, between, gradient):
  """In any composition of layers and transformations, for any number of dimensions, also differentiated."""
  x = jax.ShapeDtypeStruct((8, *between, 16), jnp.float32)
  plain, twin = Stack(tuple(blocks)), Stack(tuple(blocks), by_hand)
  params = spmd.unbox(jax.eval_shape(plain.init, KEY, x))

  def of(model):
    total = lambda params, x: model.apply(params, x).sum()
    return jax.grad(total) if gradient else total

  expected = constraints(OUT, of(twin), params, x)
  assert constraints(OUT, spmd.names_for(of(plain)), params, x) == expected != {}
  assert not constraints(OUT, of(plain), params, x)


class Decoder(nn.Module):
  """A decoder with an embedding of positions, and a cache."""

  constrain: object = nothing
  decode: bool = False

  @nn.compact
  def __call__(self, tokens):
    embed, names = nn.Embed(32, 16), ('batch', 'length')
    x = self.constrain(embed(tokens), *names, 'embed')
    x = x + nn.Embed(64, 16, name='positions')(jnp.arange(tokens.shape[1]))[None]
    attend = nn.MultiHeadDotProductAttention(4, decode=self.decode, name='attention')
    x = x + self.constrain(attend(nn.LayerNorm()(x)), *names, 'embed')
    h = nn.relu(self.constrain(nn.Dense(64, name='wi')(x), *names, 'mlp'))
    x = x + self.constrain(nn.Dense(16, name='wo')(h), *names, 'embed')
    return self.constrain(embed.attend(x), *names, 'vocab')


TABLE = {'wi/kernel$': ('embed', 'mlp'), 'wi/bias$': ('mlp',), 'wo/kernel$': ('mlp', 'embed')}
TOKENS = np.random.default_rng(0).integers(0, 32, (8, 6))


def loss_of(model):
  def loss(params, tokens):
    logits = model.apply({'params': params}, tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

  return loss


@pytest.mark.slow
class Part(enum.Enum):
  """Keys without an order, by which JAX flattens no dictionary."""

  LEFT = 'left'
  RIGHT = 'right'


class Parts(nn.Module):
  constrain: Any = staticmethod(nothing)

  @nn.compact
  def __call__(self, x):
    parts = self.widened({Part.LEFT: x, Part.RIGHT: x + 1}, kind=Part.LEFT)
    return parts[Part.LEFT] + parts[Part.RIGHT]

  def widened(self, parts, kind):
    del kind
    return {key: self.constrain(nn.Dense(16)(x), 'batch', 'length', 'out') for key, x in parts.items()}


def test_arguments_of_methods_that_jax_cannot_flatten():
  x = jnp.ones((8, 4, 16))
  variables = Parts().init(KEY, x)
  expected = constraints(OUT, Parts(by_hand).apply, variables, x)
  assert sum(expected.values()) == 2
  assert constraints(OUT, spmd.names_for(Parts().apply), variables, x) == expected
  named = spmd.names_for(Parts().init)(KEY, x)['params']
  assert named['Dense_1']['kernel'].names == ('in', 'out')


def test_methods_that_call_init_and_apply_of_their_own_module():
  """As in diffusers: `init_weights` of a module that is not bound."""

  class Model(Parts):
    def created(self, key):
      return self.init(key, jnp.ones((8, 4, 16)))['params']

    def loss(self, params, x):
      return jnp.mean(self.apply({'params': params}, x))

  x = jnp.ones((8, 4, 16))
  params = spmd.names_for(Model().created)(KEY)
  assert params['Dense_1']['kernel'].names == ('in', 'out')
  expected = constraints(OUT, Model(by_hand).loss, params, x)
  assert sum(expected.values()) == 6
  assert constraints(OUT, spmd.names_for(Model().loss), params, x) == expected
  with pytest.raises(LayoutError, match='names nothing'):
    spmd.names_for(Model().created, {'params/Conv_0/kernel': ('in', 'out')})(KEY)


def test_losses_and_gradients_stay():
  """Against the model with constraints by hand and against one without: values, shardings, and `explain`."""
  model, twin = Decoder(), Decoder(by_hand)
  params = LAYOUT.init(spmd.names_for(model.init, TABLE), KEY, TOKENS, boxed=False)['params']
  tokens = LAYOUT.shard(TOKENS, ('batch',))
  step = LAYOUT.jit(spmd.names_for(jax.value_and_grad(loss_of(model)), TABLE))
  (loss, grads), explained = step(params, tokens), step.explain(params, tokens)
  for other in (model, twin):
    expected = LAYOUT.jit(jax.value_and_grad(loss_of(other)))(params, tokens)
    assert jax.tree.all(jax.tree.map(lambda x, y: np.allclose(x, y, atol=1e-5), (loss, grads), expected))
  assert jax.tree.map(lambda x: x.sharding, grads) == jax.tree.map(lambda x: x.sharding, params)
  assert {(one.names, one.module) for one in explained.constraints} >= {
    (('batch', None, 'mlp'), 'module wi'),
    (('batch', None, 'heads', 'kv'), 'module attention/query'),
  }


def test_heads_of_attention_are_constrained_too():
  """Nobody can constrain them by hand; an embedding of positions has no batch."""
  params = jax.eval_shape(Decoder().init, KEY, TOKENS)['params']
  found = constraints(LAYOUT, spmd.names_for(loss_of(Decoder()), TABLE), params, TOKENS)
  expected = constraints(LAYOUT, loss_of(Decoder(by_hand)), params, TOKENS)
  heads = {((8, 6, 4, 4), str(jax.P('data', None, 'model', None))): 3}
  assert found == expected + collections.Counter(heads)


def test_decoding_step_by_step():
  """The cache that `apply` gets without names is returned without names, and the names stay those of the batch."""
  model, params = Decoder(decode=True), Decoder().init(KEY, TOKENS)['params']
  _, cache = model.apply({'params': params}, TOKENS, mutable=['cache'])

  def step(cache, token):
    return model.apply({'params': params, 'cache': cache}, token, mutable=['cache'])

  named = spmd.names_for(step, TABLE)
  jitted, alone = LAYOUT.jit(named), jax.jit(step)
  mine = yours = cache['cache']
  for column in range(3):
    token = TOKENS[:, column : column + 1]
    (logits, changed), (expected, by_flax) = jitted(mine, token), alone(yours, token)
    mine, yours = changed['cache'], by_flax['cache']
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    assert jax.tree.structure(mine) == jax.tree.structure(yours)
  assert constraints(LAYOUT, named, cache['cache'], TOKENS[:, :1])[
    (8, 1, 64), str(jax.P('data', None, 'model'))
  ]


def test_variables_that_apply_creates_have_names():
  """Those that it gets do not."""
  model, params = Decoder(decode=True), Decoder().init(KEY, TOKENS)['params']
  create = spmd.names_for(
    lambda: model.apply({'params': params}, TOKENS, mutable=['cache', 'params'])[1], TABLE
  )
  created = jax.eval_shape(create)
  assert created['cache']['attention']['cached_key'].names == ('batch', 'length', 'heads', 'kv')
  assert jax.tree.structure(created['params']) == jax.tree.structure(params)


@pytest.mark.parametrize('inner', [jax.vmap, lambda fn: jax.vmap(jax.grad(fn))])
def test_examples_of_a_mapped_model_have_no_constraints(inner):
  """In `jax.vmap` over the batch, the first dimension is not the batch."""
  model = Stack(((dense, ''), (einsum, 'remat')))
  params = jax.eval_shape(model.init, KEY, jnp.ones((8, 16)))
  fn = spmd.names_for(inner(lambda x, params: model.apply(params, x).sum()))
  mapped = lambda params, x: jax.tree.map(
    jnp.sum, fn(x, jax.tree.map(lambda p: jnp.broadcast_to(p, (8, *p.shape)), params))
  )
  assert not constraints(OUT, mapped, params, jnp.ones((8, 8, 16)))


class MLP(nnx.Module):
  def __init__(self, rngs):
    self.wi, self.wo = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)
    self.attention = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)

  def __call__(self, x, constrain=nothing):
    x = x + constrain(self.attention(x), 'batch', 'length', 'embed')
    h = nnx.relu(constrain(self.wi(x), 'batch', 'length', 'mlp'))
    return x + constrain(self.wo(h), 'batch', 'length', 'embed')


class Model(nnx.Module):
  def __init__(self, rngs, stacked):
    self.embed, self.stacked = nnx.Embed(32, 16, rngs=rngs), stacked
    create = nnx.split_rngs(splits=2)(nnx.vmap(MLP)) if stacked else MLP
    self.blocks = create(rngs)

  def __call__(self, tokens, constrain=nothing):
    x = constrain(self.embed(tokens), 'batch', 'length', 'embed')
    body = nnx.remat(lambda x, block: block(x, constrain))
    if self.stacked:
      body = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    return constrain(self.embed.attend(body(x, self.blocks)), 'batch', 'length', 'vocab')


@pytest.mark.parametrize('stacked', [False, True])
@pytest.mark.parametrize('functional', [False, True])
def test_modules_of_nnx(stacked, functional):
  """Modules, and those that `nnx.merge` makes of a state, single and stacked."""
  create = spmd.names_for(lambda: Model(nnx.Rngs(0), stacked), {**TABLE, '^blocks/': 'layers'})
  with nnx.use_eager_sharding(False):
    model = create()
    graph, state = nnx.split(model)

  def loss(constrain):
    def of_state(state, tokens):
      model = nnx.merge(graph, state)
      return model(tokens, constrain).sum()

    def of_module(state, tokens):
      model = nnx.merge(graph, state)
      return nnx.value_and_grad(lambda model: model(tokens, constrain).sum())(model)[0]

    return of_state if functional else of_module

  found = constraints(LAYOUT, spmd.names_for(loss(nothing), TABLE), state, TOKENS)
  expected = constraints(LAYOUT, loss(by_hand), state, TOKENS)
  assert set(found) == {*expected, ((8, 6, 4, 4), str(jax.P('data', None, 'model', None)))}
  assert not constraints(LAYOUT, loss(nothing), state, TOKENS)


def test_flax_is_as_it_was_outside():
  """Methods of NNX are replaced only while a function with names runs."""
  before = {cls: cls.__call__ for cls in (nnx.Linear, nnx.Embed, nnx.Conv)}
  inside = []
  spmd.names_for(lambda: inside.append(nnx.Linear.__call__) or {})()
  assert inside != [before[nnx.Linear]]
  assert before == {cls: cls.__call__ for cls in before}


@pytest.mark.parametrize(
  'layout',
  [
    spmd.Layout(LAYOUT.mesh, (('mlp', 'model'), ('embed', 'data'))),
    spmd.Layout(
      spmd.make_mesh({'data': 2, 'model': 4}, axis_types=jax.sharding.AxisType.Explicit),
      spmd.presets.tensor_parallel(),
    ),
  ],
)
def test_layouts_that_ask_for_no_constraints(layout):
  """One without a rule for the batch, and one whose shardings are types."""
  params = jax.eval_shape(Decoder().init, KEY, TOKENS)['params']
  assert not constraints(layout, spmd.names_for(loss_of(Decoder()), TABLE), params, TOKENS)


def test_strict_rules_need_no_rule_for_the_length():
  rules = spmd.Rules(*spmd.presets.tensor_parallel(), ('embed', None), ('kv', None), unmatched='error')
  params = jax.eval_shape(Decoder().init, KEY, TOKENS)['params']
  found = constraints(
    spmd.Layout(LAYOUT.mesh, rules), spmd.names_for(loss_of(Decoder()), TABLE), params, TOKENS
  )
  assert found[(8, 6, 64), str(jax.P('data', None, 'model'))]


def test_a_jitted_part_depends_on_nothing_that_ran_before():
  """JAX has one trace of it in its cache: another batch around it, and other tables around those, are other traces."""
  layer, other, model = *(nnx.Linear(16, 16, rngs=nnx.Rngs(0)) for _ in range(2)), nn.Dense(16)
  part, linen = jax.jit(lambda x: layer(x)), jax.jit(model.apply)
  params = jax.eval_shape(model.init, KEY, jnp.ones((8, 16)))
  inner = spmd.names_for(lambda params, x: linen(params, x), {nn.Dense: {'kernel': ('in', None)}})
  calls = [
    (lambda x: part(x).sum() + other(x[:4]), jnp.ones((8, 16))),
    (lambda x: other(x[:4]).sum() + part(x), jnp.ones((8, 16))),
    (spmd.names_for(inner, {nn.Dense: {'kernel': ('in', 'out')}}), params, jnp.ones((8, 16))),
    (inner, params, jnp.ones((8, 16))),
  ]

  def alone(fn, *args):
    part.clear_cache(), linen.clear_cache()
    return constraints(OUT, spmd.names_for(fn), *args)

  expected = [alone(*call) for call in calls]
  for order in (calls, calls[::-1]):
    part.clear_cache(), linen.clear_cache()
    found = {id(call): constraints(OUT, spmd.names_for(call[0]), *call[1:]) for call in order}
    assert [found[id(call)] for call in calls] == expected
  assert all(expected) and expected[2] != expected[3]


def test_a_step_whose_trace_is_in_the_cache_of_jax():
  """Nothing runs in the second call; entries for the state are no errors there either."""
  model, x = nn.Dense(16), jnp.ones((8, 16))
  step = spmd.names_for(jax.jit(model.apply), {'^other/kernel$': ('in', 'mlp')})
  params = model.init(KEY, x)
  np.testing.assert_array_equal(step(params, x), step(params, x))


class Twins(nn.Module):
  """Equal modules, whose paths and parents differ."""

  around: object = nn.jit

  @nn.compact
  def __call__(self, x):
    for name in ('a', 'b'):
      x = self.around(Pair)(name=name)(x)
    return Parent(self.around, name='parent')(x)


class Parent(nn.Module):
  around: object

  @nn.compact
  def __call__(self, x):
    return self.around(Pair)(name='a')(x)


class Pair(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(16)(x)


def test_equal_modules_under_nn_jit_have_the_names_of_their_own_paths():
  """They share a trace in Flax; the oracle is the model without `nn.jit`."""
  table = {
    '/a/Dense_0/kernel$': ('in', 'out'),
    '/b/Dense_0/kernel$': ('in', None),
    Parent: {'a/Dense_0/kernel': (None, 'length')},
  }
  x, plain = jnp.ones((8, 16)), Twins(lambda cls: cls)
  params = jax.eval_shape(plain.init, KEY, x)
  for entries in (table, table | {'/a/Dense_0/kernel$': ('out', 'in')}):
    expected = constraints(OUT, spmd.names_for(plain.apply, entries), params, x)
    for _ in range(2):
      assert constraints(OUT, spmd.names_for(Twins().apply, entries), params, x) == expected
  assert not constraints(OUT, Twins().apply, params, x)


class Biased(nnx.Module):
  """A decoder with positions of a batch of one before the tokens or after them, and a bias by distance."""

  def __init__(self, rngs, positions_first):
    self.embed, self.bias = nnx.Embed(32, 16, rngs=rngs), nnx.Embed(8, 4, rngs=rngs)
    self.positions, self.wi = nnx.Embed(64, 16, rngs=rngs), nnx.Linear(16, 64, rngs=rngs)
    self.positions_first = positions_first

  def __call__(self, tokens):
    places = jnp.arange(tokens.shape[1])
    embeds = (lambda: self.embed(tokens)), (lambda: self.positions(places[None]))
    one, other = (each() for each in embeds[:: -1 if self.positions_first else 1])
    bias = self.bias(abs(places[:, None] - places[None]))
    return self.wi(one + other) + bias.sum()


@pytest.mark.parametrize('positions_first', [False, True])
def test_positions_do_not_change_the_batch_in_nnx(positions_first):
  """Nor do distances; a model that runs again on another batch does."""
  model = Biased(nnx.Rngs(0), positions_first)
  step = lambda tokens: model(tokens).sum() + model(tokens[:4]).sum()
  found = constraints(LAYOUT, spmd.names_for(step, TABLE), TOKENS)
  assert {shape for shape, _ in found} >= {(8, 6, 16), (8, 6, 64), (4, 6, 16), (4, 6, 64)}
  assert (6, 6, 4) not in {shape for shape, _ in found}


def test_a_name_that_has_the_axis_of_the_batch_is_left_out_under_strict_rules():
  """Rules without conflicts among arrays, such as those of FSDP, are valid for a step too."""
  rules = spmd.Rules(('batch', 'data'), ('embed', 'data'), ('mlp', 'model'), conflict='error')
  params = jax.eval_shape(Decoder().init, KEY, TOKENS)['params']
  found = constraints(
    spmd.Layout(LAYOUT.mesh, rules), spmd.names_for(loss_of(Decoder()), TABLE), params, TOKENS
  )
  assert found[(8, 6, 64), str(jax.P('data', None, 'model'))]
  assert found[(8, 6, 16), str(jax.P('data', None, None))]
