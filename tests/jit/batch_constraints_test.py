"""Steps that do not constrain their batch, which `layout.jit` keeps sharded under FSDP."""

import dataclasses
import functools
import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd._src.compare.lowering import lower
from flax_spmd._src.jit.batch_constraints import shared_larger_programs
from flax_spmd.explore import TrainStep, compare, parse_target

FSDP = spmd.presets.fsdp(min_size=64)
LAYOUT = spmd.Layout({'data': 8}, FSDP)
X, Y = np.ones((16, 32), np.float32), np.arange(16) % 8


class Mlp(nn.Module):
  """Two blocks, unrolled or scanned, in which only the last dimension changes."""

  scanned: bool = False

  @nn.compact
  def __call__(self, x):
    if self.scanned:
      stack = nn.scan(
        nn.remat(Block), length=2, variable_axes={'params': 0}, split_rngs={'params': True}
      )
      x, _ = stack()(x, None)
    else:
      for _ in range(2):
        x, _ = Block()(x, None)
    return nn.Dense(8)(x)


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(64)(x))), None


def loss_of(logits, labels):
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def of_linen(scanned):
  model, tx = Mlp(scanned), optax.adam(1e-2)

  def create():
    params = model.init(jax.random.key(0), X)
    return params, tx.init(params)

  def step(state, batch):
    params, opt_state = state
    loss, grads = jax.value_and_grad(lambda p: loss_of(model.apply(p, batch[0]), batch[1]))(params)
    updates, opt_state = tx.update(grads, opt_state)
    return (optax.apply_updates(params, updates), opt_state), loss

  return create, step


def of_functions():
  """A model of plain functions, whose batch is two arguments, with accumulation over two microbatches."""

  def create():
    return {'up': jnp.full((32, 64), 0.1), 'down': jnp.full((64, 8), 0.1)}

  def step(w, x, labels):
    def loss_and_grads(total, one):
      loss, grads = jax.value_and_grad(
        lambda w: loss_of(jnp.tanh(one[0] @ w['up']) @ w['down'], one[1])
      )(w)
      return jax.tree.map(jnp.add, total, (loss, grads)), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, w)
    parts = x.reshape(2, -1, 32), labels.reshape(2, -1)
    (loss, grads), _ = jax.lax.scan(loss_and_grads, zeros, parts)
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads), loss

  return create, step


MODELS = {'unrolled': of_linen(False), 'scanned': of_linen(True), 'functions': of_functions()}


def arguments(model, layout, shard=True):
  x, y = layout.shard((X, Y), (('batch', None), ('batch',))) if shard else (X, Y)
  return (x, y) if model == 'functions' else ((x, y),)


def constraints(jitted, *args):
  return str(jitted.trace(*args).jaxpr).count('sharding_constraint')


@pytest.mark.parametrize('model', MODELS)
def test_the_batch_stays_sharded_and_values_stay(model):
  create, step = MODELS[model]
  state, results = LAYOUT.init(create), {}
  for constrain in (False, True):
    jitted = LAYOUT.jit(step, constrain_batch=constrain)
    args = arguments(model, LAYOUT)
    assert (constraints(jitted, state, *args) > 0) == constrain
    new, loss = jitted(state, *args)
    assert jax.tree.map(lambda x: x.sharding, new) == jax.tree.map(lambda x: x.sharding, state)
    results[constrain] = jax.tree.leaves(LAYOUT.gather((new, loss)))
  for one, other in zip(results[False], results[True], strict=True):
    np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


def test_no_activation_moves():
  """All-to-alls and permutations move activations; FSDP gathers parameters and reduces gradients."""
  create, step = MODELS['unrolled']
  for shard in (True, False):
    explanation = LAYOUT.jit(step).explain(LAYOUT.init(create), *arguments('unrolled', LAYOUT, shard))
    assert {kind.split()[0] for kind in explanation.by_kind} <= {
      'all-gather',
      'all-reduce',
      'reduce-scatter',
    }


class Glued(nn.Module):
  """A table, and a dense layer of its rows beside the batch."""

  @nn.compact
  def __call__(self, x):
    rows = nn.Embed(64, 32)(jnp.argmax(x, -1))
    return nn.Dense(8)(nn.gelu(nn.Dense(64)(jnp.concatenate([rows, x], -1))))


@pytest.mark.parametrize('model', [Mlp(False), Mlp(True), Glued()])
def test_no_activation_moves_in_a_step_for_pmap(model):
  """Groups of devices keep their parts: the step moves the bytes of one over the whole batch."""
  x, y = np.ones((256, 8, 32), np.float32), np.zeros((256, 8), np.int32)

  def step(params, batch, reduce):
    loss = lambda params: loss_of(model.apply(params, batch[0]), batch[1])
    value, grads = reduce(jax.value_and_grad(loss)(params))
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

  def moved(reduce, **axis):
    params = LAYOUT.init(model.init, jax.random.key(0), x)
    jitted = LAYOUT.jit(functools.partial(step, reduce=reduce), **axis)
    explanation = jitted.explain(params, LAYOUT.shard((x, y), P('data')))
    return sum(each.collective.wire for each in explanation.collectives)

  one, of_groups = moved(lambda x: x), moved(lambda x: jax.lax.pmean(x, 'data'), axis_name='data')
  assert 0 < of_groups <= 1.05 * one


def test_every_constraint_is_open_but_for_the_batch():
  create, step = MODELS['scanned']
  text = str(LAYOUT.jit(step).trace(LAYOUT.init(create), *arguments('scanned', LAYOUT)).jaxpr)
  specs = re.findall(r'sharding_constraint\[.*?spec=P\((.*?)\)', text, re.DOTALL)
  assert set(specs) == {"'data', UNCONSTRAINED", "'data',"}


def named(step):
  def constrained(state, batch):
    x = spmd.with_logical_constraint(batch[0], ('batch', 'embed'))
    return step(state, (x, batch[1]))

  return constrained


class Named(nn.Module):
  @nn.compact
  def __call__(self, x):
    init = spmd.with_logical_partitioning(nn.initializers.normal(), ('embed', 'mlp'))
    return x @ self.param('w', init, (32, 8))


def test_what_an_author_has_decided_stays():
  """Names or constraints, replicated parameters, and a returned batch."""
  create, step = MODELS['unrolled']
  batch, state = arguments('unrolled', LAYOUT), LAYOUT.init(create)

  def program(layout, step, *args):
    return str(layout.jit(step).trace(*args).jaxpr), str(
      layout.jit(step, constrain_batch=False).trace(*args).jaxpr
    )

  def same(state, batch):
    return step(state, batch), batch

  plain = spmd.Layout({'data': 8}, spmd.presets.data_parallel())
  boxed = LAYOUT.init(Named().init, jax.random.key(0), X)
  for layout, each, args in (
    (LAYOUT, named(step), (state, *batch)),
    (LAYOUT, lambda params, x: Named().apply(params, x).sum(), (boxed, batch[0][0])),
    (plain, step, (plain.init(create), *batch)),
    (plain, step, (plain.init(create), *arguments('unrolled', plain))),
    (plain, named(step), (plain.init(create), (X, Y))),
    (plain, same, (plain.init(create), *arguments('unrolled', plain))),
    (LAYOUT, same, (state, *batch)),
  ):
    one, other = program(layout, each, *args)
    assert one == other


class WithNames(nn.Module):
  """Parameters with names, and nothing constrained."""

  @nn.compact
  def __call__(self, x):
    init = spmd.with_logical_partitioning(nn.initializers.lecun_normal(), ('embed', 'mlp'))
    return nn.Dense(8, kernel_init=init)(x)


@pytest.mark.parametrize('rules', [spmd.presets.data_parallel(), FSDP])
def test_a_reshard_on_auto_axes_decides_nothing(rules):
  """`jnp.histogram` leaves one, without effect. It hid the batch."""
  create, step = MODELS['unrolled']
  layout = spmd.Layout({'data': 8}, rules)

  def monitored(state, batch):
    return step(state, batch), jax.tree.map(lambda w: jnp.histogram(w, 4)[0], state[0])

  args = layout.init(create), (X, Y)
  assert 'reshard' in str(layout.jit(monitored).trace(*args).jaxpr)
  assert constraints(layout.jit(monitored), *args) == constraints(layout.jit(step), *args) > 0


class Layer(nn.Module):
  """A block whose parameters have names, and whose activations have none, unless it constrains them."""

  constrained: bool = False
  experts: int = 0

  @nn.compact
  def __call__(self, x, _):
    def weight(name, *names_and_sizes):
      names, shape = zip(*names_and_sizes, strict=True)
      init = nn.initializers.lecun_normal()
      return self.param(name, spmd.with_logical_partitioning(init, names), shape)

    embed, mlp, groups = ('embed', x.shape[-1]), ('mlp', 64), ('expert', self.experts)
    if self.experts:
      sent = jnp.einsum('bld,ble->ebld', x, nn.softmax(x @ weight('router', embed, groups)))
      hidden = nn.gelu(jnp.einsum('ebld,edm->eblm', sent, weight('up', groups, embed, mlp)))
      return x + jnp.einsum('eblm,emd->bld', hidden, weight('down', groups, mlp, embed)), None
    hidden = nn.gelu(x @ weight('up', embed, mlp))
    if self.constrained:
      hidden = spmd.with_logical_constraint(hidden, ('batch', None, 'mlp'))
    return x + hidden @ weight('down', mlp, embed), None


class Layers(nn.Module):
  stack: str = 'unrolled'
  constrained: bool = False
  experts: int = 0

  @nn.compact
  def __call__(self, x):
    layer = functools.partial(Layer, self.constrained, self.experts)
    if self.stack == 'unrolled':
      for _ in range(4):
        x, _ = layer()(x, None)
    elif self.stack == 'scanned':
      scanned = nn.scan(
        nn.remat(Layer),
        variable_axes={'params': 0},
        split_rngs={'params': True},
        length=4,
        metadata_params={nn.PARTITION_NAME: 'layers'},
      )
      x, _ = scanned(self.constrained, self.experts)(x, None)
    else:
      x = spmd.remat_scan(Single, lengths=(2, 2))()(x)
    return x


class Single(nn.Module):
  @nn.compact
  def __call__(self, x):
    return Layer()(x, None)[0]


TABLES = {
  'fsdp': ({'data': 8}, (('batch', 'data'), ('embed', 'data'))),
  'fsdp and tensor': ({'data': 4, 'model': 2}, (('batch', 'data'), ('embed', 'data'), ('mlp', 'model'))),
}


EXPERTS = {'data': 8}, (('batch', 'data'), ('expert', 'data'), ('embed', 'data'))


def of_names(table, model, has_size=False):
  """A layout, a step of a model with names, and its arguments; `has_size`: the step is for one size of the batch."""
  layout, x = spmd.Layout(*table), np.ones((1024, 8, 32), np.float32)
  params = layout.init(model.init, jax.random.key(0), x[:1])

  def step(params, x):
    x = x + 0 * jnp.ones((1024, 1, 1)) if has_size else x
    value, grads = jax.value_and_grad(lambda params: (model.apply(params, x) ** 2).mean())(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

  return layout, step, (params, x)


@pytest.mark.filterwarnings('ignore:.*adds an axis without a name')  # of remat_scan
@pytest.mark.parametrize(
  ('stack', 'table'),
  [
    pytest.param(stack, table, marks=[pytest.mark.exhaustive] * ((number + other) % 2))
    for number, stack in enumerate(['unrolled', 'scanned', 'experts', 'remat_scan', 'one size'])
    for other, table in enumerate(reversed(TABLES))
  ],
)
def test_no_activation_moves_over_the_axis_of_the_batch_in_a_model_with_names(stack, table):
  has_size = stack == 'one size'
  model = Layers(stack if 'scan' in stack else 'unrolled', experts=2 if stack == 'experts' else 0)
  layout, step, args = of_names(TABLES[table], model, has_size)
  moved = layout.jit(step).explain(*args).collectives
  over_data = sum(each.collective.wire for each in moved if 'data' in each.collective.axes)
  held = sum(leaf.nbytes for leaf in jax.tree.leaves(args[0]))
  assert 0 < over_data < 5 * held < args[1].nbytes  # gathered twice, and summed by all-reduce
  expected, result = jax.jit(step)(*jax.device_get(args)), layout.jit(step)(*args)
  jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, 1e-4, 1e-5), result, expected)


@pytest.mark.parametrize('case', ['constrained', 'experts', 'inference'])
@pytest.mark.parametrize('stack', ['unrolled', 'scanned'])
def test_what_the_author_of_a_model_with_names_has_decided_stays(stack, case):
  """Constrained activations; experts over the axis of the batch, to which tokens move; weights of inference, which may stay."""
  model = Layers(stack, case == 'constrained', 8 if case == 'experts' else 0)
  layout, step, args = of_names(EXPERTS, model)
  step = model.apply if case == 'inference' else step
  one, other = (
    re.findall(
      r'sharding_constraint\[.*?\]',
      str(layout.jit(step, constrain_batch=each).trace(*args).jaxpr),
      re.DOTALL,
    )
    for each in (True, False)
  )
  assert one == other and one


KEYS = {'no key': (), 'a key': (jax.random.key(0),), 'a raw key': (jax.random.PRNGKey(0),)}


@pytest.mark.parametrize(
  ('model', 'keys'),
  [
    (Mlp(False), 'no key'),
    (WithNames(), 'a raw key'),
    *(
      pytest.param(*case, marks=pytest.mark.exhaustive)
      for case in (
        (Mlp(False), 'a raw key'),
        (WithNames(), 'no key'),
        (Mlp(False), 'a key'),
        (WithNames(), 'a key'),
      )
    ),
  ],
)
@pytest.mark.parametrize(
  ('mesh', 'table'),
  [
    ({'data': 8}, ()),
    ({'data': 2, 'model': 4}, (('mlp', 'model'),)),
    ({'data': 2, 'model': 4}, spmd.presets.fsdp('model', min_size=64)),
  ],
)
def test_a_batch_of_the_host_is_sharded_where_the_state_is_not(mesh, table, model, keys):
  """Without this, every device computes all of it. One trace each is enough."""
  layout = spmd.Layout(mesh, (('batch', 'data'), *table))
  state = layout.init(model.init, jax.random.key(0), X)

  def step(params, batch, *keys):
    traces.append(batch)
    scale = 1 + 0 * jax.random.uniform(*keys) if keys else 1.0
    loss = lambda params: loss_of(scale * model.apply(params, batch['x']), batch['y'])
    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

  found, traces = [], []
  for batch in ({'x': X, 'y': Y}, layout.shard({'x': X, 'y': Y}, ('batch',))):
    jitted = layout.jit(step)
    compiled = jitted.lower(state, batch, *KEYS[keys]).compile()
    shardings = [each.spec for each in jax.tree.leaves(compiled.input_shardings[0][1])]
    found.append((shardings, compiled.cost_analysis()['flops'], jitted(state, batch, *KEYS[keys])[1]))
  (host, flops, loss), (_, expected, placed) = found
  assert [spec[0] for spec in host] == ['data', 'data'] and flops == pytest.approx(expected, rel=0.02)
  np.testing.assert_allclose(loss, placed, rtol=1e-6)
  assert len(traces) == 2


RAW_KEY = jax.random.PRNGKey(0)


@pytest.mark.parametrize('rules', [spmd.presets.data_parallel(), FSDP])
@pytest.mark.parametrize(
  ('batch', 'others'),
  [
    ({'x': X, 'key': RAW_KEY}, ()),
    ({'x': X}, (np.ones((8, 4)),)),
    ({'x': X}, (jax.random.split(RAW_KEY, 8), {'x': X[:8]})),
  ],
)
def test_other_arrays_do_not_hide_a_batch_of_the_host(batch, others, rules):
  """A random key in the batch, and arguments that could be batches, too."""
  layout = spmd.Layout({'data': 8}, rules)
  w = layout.init(lambda: jnp.ones((32, 64)))

  def step(w, batch, *others):
    given = sum(jnp.sum(each) for each in jax.tree.leaves((batch.get('key'), others)))
    return jax.grad(lambda w: jnp.sum((batch['x'] @ w) ** 2))(w), given

  lowered = layout.jit(step).lower(w, batch, *others)
  assert lowered.compile().input_shardings[0][1]['x'].spec[0] == 'data'
  results = zip(layout.jit(step)(w, batch, *others), jax.jit(step)(np.ones((32, 64)), batch, *others))
  for one, other in results:
    np.testing.assert_allclose(one, other, rtol=1e-5)


def test_a_batch_of_the_host_that_no_device_shares_is_named():
  """Once for each step."""
  layout = spmd.Layout({'data': 8}, spmd.presets.data_parallel())
  w = layout.init(lambda: jnp.ones((32, 64)))
  step = layout.jit(lambda w, batch: w - jax.grad(lambda w: jnp.sum((batch['x'] @ w) ** 2))(w))
  with pytest.warns(UserWarning) as caught:
    for rows in (12, 13):
      step(w, {'x': np.ones((rows, 32), np.float32), 'key': RAW_KEY})
  assert [str(each.message) for each in caught] == [
    '<lambda>: each of 8 devices computes all examples of these arrays, since dimension 0 is not the same multiple of 8, '
    "the size of mesh axis 'data', in all arrays of an argument:\n"
    '  argument batch/x: (12, 32)\n'
    'Fix: pass a multiple of 8 examples, and arrays of another length as arguments of their own; or shard the arrays with '
    "examples before the call, by layout.shard(array, ('batch',)); or constrain_batch=False, if this is no batch."
  ]


@pytest.mark.parametrize('scanned', [False, True])
def test_boxes_over_the_axes_of_the_batch_do_not_hide_that_no_device_shares_it(scanned):
  """They are constrained as the model opens them, which was taken for a constraint of the batch."""

  class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
      init = spmd.with_logical_partitioning(nn.initializers.lecun_normal(), ('embed', 'mlp'))
      return nn.Dense(32, kernel_init=init)(x), None

  class Layers(nn.Module):
    @nn.compact
    def __call__(self, x):
      split = {'variable_axes': {'params': 0}, 'split_rngs': {'params': True}}
      names = {nn.PARTITION_NAME: 'layers'}
      of = nn.scan(Layer, **split, length=2, metadata_params=names) if scanned else Layer
      return of()(x, None)[0]

  layout, model = spmd.Layout({'data': 8}, (('batch', 'data'), ('embed', 'data'))), Layers()
  params = layout.init(model.init, jax.random.key(0), X)
  step = layout.jit(lambda w, x: jax.grad(lambda w: jnp.sum(model.apply(w, x) ** 2))(w))
  with pytest.warns(UserWarning, match=r'computes all examples of these arrays(.|\n)*x: \(12, 32\)'):
    step(params, np.ones((12, 32), np.float32))


@pytest.mark.parametrize('way', ['arguments of their own', 'shard'])
def test_each_fix_for_arrays_of_several_lengths_shards_them(way):
  """Pairs of examples and their labels, as in preference optimization; the fix mentioned arrays without examples only."""
  layout = spmd.Layout({'data': 8}, spmd.presets.data_parallel())
  w = layout.init(lambda: jnp.ones((32, 64)))
  batch = (np.ones((32, 32), np.float32), np.ones(16, np.float32))
  step = layout.jit(lambda w, pairs, *more: jnp.mean((pairs[0] @ w)[:16, 0] - [*pairs, *more][1]) * w)
  with pytest.warns(UserWarning, match='computes all examples'):
    step(w, batch)
  given = (layout.shard(batch, ('batch',)),) if way == 'shard' else (batch[:1], batch[1])
  shardings = jax.tree.leaves(step.lower(w, *given).compile().input_shardings[0][1:])
  assert [each.spec[0] for each in shardings] == ['data', 'data']


ODD = np.ones((12, 32), np.float32)


@pytest.mark.parametrize(
  ('case', 'batch', 'options'),
  [
    ('other arrays', {'x': X, 'weights': np.ones(4)}, {}),
    ('other arrays of the same divisor', {'x': X, 'mask': np.ones((32, 32))}, {}),
    ('no batch', {'x': ODD}, {'constrain_batch': False}),
    ('fewer than devices', {'x': ODD[:7]}, {}),
    ('numbers', {'scale': np.ones(12)}, {}),
    ('of the result', {'x': np.ones((33, 64), np.float32)}, {}),
    ('placed', {'x': ODD}, {}),
    ('another rule', {'x': ODD}, {}),
    ('constrained', {'x': ODD}, {}),
  ],
)
def test_arguments_of_the_host_that_are_named_as_a_whole_batch(case, batch, options):
  rules = (('rows', 'data'),) if case == 'another rule' else spmd.presets.data_parallel()
  layout = spmd.Layout({'data': 8}, rules)
  w = layout.init(lambda: jnp.ones((32, 64)))
  others = () if case != 'placed' else (layout.shard(np.ones((16, 4)), ('batch',)),)

  def step(w, batch, *others):
    if case == 'constrained':
      batch = {'x': spmd.with_logical_constraint(batch['x'] + 1, ('batch', None))}
    return sum(jnp.sum(each) for each in jax.tree.leaves((w, batch, others))), jnp.ones((33, 64))

  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    layout.jit(step, **options)(w, batch, *others)
  assert bool(caught) == case.startswith('other arrays')


@pytest.mark.parametrize('rules', [spmd.presets.data_parallel(), FSDP])
@pytest.mark.parametrize('batch', [(X,), (X, Y), (X, Y, np.ones((8, 8)))])
def test_a_step_that_returns_arrays_like_its_batch(batch, rules):
  """A reconstruction, say. Other arrays that it returns, such as counts, are a state."""
  layout = spmd.Layout({'data': 8}, rules)
  w = layout.init(lambda: jnp.ones((32, 64)))

  def step(w, x, labels=1.0, counts=0.0):
    grads = jax.grad(lambda w: jnp.sum((x @ w) ** 2) * jnp.mean(labels))(w)
    return grads, (x @ w) @ w.T, counts + 1

  _, *shardings = layout.jit(step).lower(w, *batch).compile().input_shardings[0]
  split = [bool(each.spec and each.spec[0]) for each in shardings]
  assert split[0] and not any(split[2:])


def test_a_step_that_has_the_size_of_its_batch_as_a_constant():
  """Dimensions of that size are the batch, unless a parameter has one too."""
  create, step = MODELS['unrolled']
  batch, state = arguments('unrolled', LAYOUT), LAYOUT.init(create)

  def for_16(state, batch):
    return step(state, (batch[0] * jnp.ones((16, 32)), batch[1]))

  explanation = LAYOUT.jit(for_16).explain(state, *batch)
  kinds = {kind.split()[0] for kind in explanation.by_kind}
  assert kinds <= {'all-gather', 'all-reduce', 'reduce-scatter'}
  new, loss = LAYOUT.jit(for_16)(state, *batch)
  plain, expected = jax.jit(step)(LAYOUT.gather(state), (X, Y))
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  for one, other in zip(jax.tree.leaves(new), jax.tree.leaves(plain), strict=True):
    np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)
  ambiguous = LAYOUT.shard({'w': np.ones((32, 16), np.float32)})
  assert constraints(LAYOUT.jit(lambda w, x: (x * jnp.ones((16, 32))) @ w['w']), ambiguous, X) == 0


W = {'up': np.linspace(0, 1, 32 * 64, dtype=np.float32).reshape(32, 64)}


def product(w, x):
  return (x @ w['up']).sum()


def with_fewer_branches(w, x):
  branches = [lambda x, i=i: product(w, x) * i for i in range(1 + 32 // x.shape[0])]
  return jax.lax.switch(32 // x.shape[0], branches, x)


def with_more_dimensions(w, x):
  return product(w, x.reshape((4, 4, 32) if x.shape[0] == 16 else (-1, 4, 4, 32)))


@pytest.mark.parametrize('step', [with_fewer_branches, with_more_dimensions])
def test_a_step_that_depends_on_the_size_of_its_batch_stays_as_it_is(step):
  w = LAYOUT.shard(W)
  jitted = LAYOUT.jit(step)
  np.testing.assert_allclose(jitted(w, X), jax.jit(step)(W, X), rtol=1e-5)
  assert constraints(jitted, w, X) == 0


def test_the_traces_leave_nothing_behind():
  """The step records the size of its batch, and its result has a function of its own, as of another trace."""
  sizes = []

  def step(w, x):
    sizes.append(len(x))
    return jax.tree_util.Partial(lambda total: total, product(w, x))

  w = LAYOUT.shard(W)
  result = LAYOUT.jit(step)(w, X)
  np.testing.assert_allclose(result(), product(W, X), rtol=1e-5)
  assert sizes == [16, 32, 16]


@pytest.mark.parametrize(('model', 'of_mesh'), [('unrolled', False), ('functions', True)])
def test_several_layouts_share_the_trace_for_twice_the_batch(model, of_mesh):
  """The programs are those of each layout alone, also of a step that is another one on some meshes."""
  create, plain = MODELS[model]
  meshes, traces = [{'data': 8}, {'data': 4, 'model': 2}, {'data': 2, 'model': 4}], []
  mesh = {}

  def step(state, batch):
    traces.append(len(batch[0]))
    x = batch[0] @ jnp.ones((32, 32)) if of_mesh and mesh.get('model') == 2 else batch[0]
    return plain(state, x, batch[1]) if model == 'functions' else plain(state, (x, batch[1]))

  def lowered(sizes):
    mesh.clear()
    mesh.update(sizes)
    train = TrainStep(step, create, (X, Y))
    return lower(train, spmd.Layout(spmd.abstract_mesh(sizes), FSDP), parse_target('cpu:8')).identity

  alone = [*map(lowered, meshes)]
  assert traces == [16, 32, 16] * 3
  traces.clear()
  with shared_larger_programs():
    assert [*map(lowered, meshes)] == alone
  assert traces == ([16, 32, 16] * 3 if of_mesh else [16, 32, 16, 16, 16])


def test_a_step_need_not_be_hashable():
  @dataclasses.dataclass
  class Step:
    rate: float = 0.1

    def __call__(self, weights, x):
      value, slopes = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(weights)
      return weights - self.rate * slopes, value

  weights = LAYOUT.init(lambda: jnp.ones((32, 32)))
  x = LAYOUT.shard(X, ('batch', None))
  _, expected = Step()(jnp.ones((32, 32)), X)  # jax.jit refuses it
  assert LAYOUT.jit(Step())(weights, x)[1] == pytest.approx(float(expected), rel=1e-6)
  train = TrainStep(Step(), lambda: jnp.ones((32, 32)), X)
  assert all(one.counts for one in compare(train, {'a': LAYOUT, 'b': LAYOUT}, 'cpu:8'))


def test_a_step_that_refuses_a_second_trace():
  traces = []

  def step(w, x):
    traces.append(x)
    assert len(traces) == 1
    return product(w, x)

  np.testing.assert_allclose(LAYOUT.jit(step)(LAYOUT.shard(W), X), product(W, X), rtol=1e-5)


@pytest.mark.parametrize(('mesh', 'rows'), [({'data': 1, 'model': 8}, 16), ({'data': 8}, 3)])
def test_a_batch_that_is_not_split_needs_no_further_trace(mesh, rows):
  layout, sizes = spmd.Layout(mesh, (('batch', 'data'),)), []

  def step(w, x):
    sizes.append(len(x))
    return product(w, x)

  w = layout.shard(W, {'up': P(None, 'data')})
  np.testing.assert_allclose(layout.jit(step)(w, X[:rows]), product(W, X[:rows]), rtol=1e-5)
  assert sizes == [rows]
