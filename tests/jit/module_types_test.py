"""Linen models over Explicit axes; the oracle is the same model, table and step over Auto axes."""

from collections.abc import Callable
from textwrap import dedent
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

import flax_spmd as spmd
from flax_spmd.errors import LayoutError

SIZES = {'data': 2, 'model': 4}
KEY = jax.random.key(0)
BATCH, LENGTH, WIDTH, VOCAB = 8, 4, 16, 32
TOKENS = jax.random.randint(KEY, (BATCH, LENGTH), 0, VOCAB)
KINDS = AxisType.Explicit, {'data': AxisType.Explicit}, {'model': AxisType.Explicit}
TABLES = {
  'fsdp': (('batch', 'data'), ('embed', 'data'), ('in', 'data'), ('out', 'model'), ('heads', 'model')),
  'products': (
    ('batch', 'data'),
    ('in', 'model'),
    ('vocab', 'model'),
    ('embed', 'data'),
    ('kv', 'model'),
  ),
  'both': (
    ('batch', ('data', 'model')),
    ('in', ('data', 'model')),
    ('vocab', 'data'),
    ('heads', 'model'),
  ),
  'outputs': (('batch', 'data'), ('out', ('model', 'data')), ('embed', 'model'), ('vocab', 'data')),
  'preset': spmd.presets.fsdp_tensor_parallel(min_size=1),
  'paths': (
    ('batch', 'data'),
    ('kernel$|embedding$', spmd.Rules((spmd.fsdp(('data', 'model'), min_size=1),))),
  ),
}


class OwnLayer(nn.Module):
  """A layer of the user's own, as those of T5X: a kernel without the dimensions of the result, in setup."""

  def setup(self):
    init = spmd.with_logical_partitioning(nn.initializers.lecun_normal(), ('embed', 'out'))
    self.kernel = self.param('kernel', init, (WIDTH, WIDTH))

  def __call__(self, x):
    y = jnp.einsum('bld,df->blf', x, self.kernel)
    return y.reshape(*y.shape[:2], 4, 4).swapaxes(2, 3).reshape(y.shape)


class Normalized(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.BatchNorm(use_running_average=False)(x)


class Recurrent(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.RNN(nn.LSTMCell(WIDTH))(x)


class Residual(nn.Module):
  layer: nn.Module

  @nn.compact
  def __call__(self, x):
    return x + nn.tanh(self.layer(nn.LayerNorm()(x)))


class Turn(nn.Module):
  """The body of a scan: the carry has the type that it began with."""

  @nn.compact
  def __call__(self, x, _):
    y = nn.Dense(WIDTH)(nn.relu(nn.Dense(2 * WIDTH)(x)))
    return spmd.with_logical_constraint(x + y, ('batch', None, None)), None


class Stacked(nn.Module):
  @nn.compact
  def __call__(self, x):
    scanned = nn.scan(Turn, variable_axes={'params': 0}, split_rngs={'params': True}, length=2)
    return scanned()(spmd.with_logical_constraint(x, ('batch', None, None)), None)[0]


LAYERS = {
  'dense': lambda: nn.Dense(WIDTH),
  'general': lambda: nn.DenseGeneral((4, WIDTH // 4)),
  'joined': lambda: nn.DenseGeneral(WIDTH, axis=(-2, -1)),
  'einsum': lambda: nn.Einsum((WIDTH, WIDTH), 'bld,df->blf'),
  'conv': lambda: nn.Conv(WIDTH, (3,)),
  'strided': lambda: nn.Conv(WIDTH, (2,), strides=(2,)),
  'transposed': lambda: nn.ConvTranspose(WIDTH, (2,)),
  'attention': lambda: nn.MultiHeadDotProductAttention(num_heads=4),
  'dropout': lambda: nn.Sequential([nn.Dropout(0.5, deterministic=False), nn.Dense(WIDTH)]),
  'batch norm': Normalized,
  'group norm': lambda: nn.GroupNorm(num_groups=4),
  'rms norm': nn.RMSNorm,
  'own': OwnLayer,
  'recurrent': Recurrent,
  'remat': lambda: nn.remat(Residual)(nn.Dense(WIDTH)),
  'stacked': Stacked,
}


class Model(nn.Module):
  layers: tuple[str, ...]

  @nn.compact
  def __call__(self, tokens):
    table = nn.Embed(VOCAB, WIDTH)
    x = spmd.with_logical_constraint(table(tokens), ('batch', None, None))
    for name in self.layers:
      x = Residual(LAYERS[name]())(x) if name not in SHAPES else LAYERS[name]()(x)
    return spmd.with_logical_constraint(table.attend(x), ('batch', None, None))


SHAPES = 'general', 'joined', 'strided'  # their results have other shapes than their arguments


def run(layers, table, kind):
  """The loss, the updates of variables and the gradients of a model."""
  layout = spmd.Layout(spmd.make_mesh(SIZES, axis_types=kind), table)
  model = Model(tuple(layers))
  variables = layout.init(spmd.names_for(model.init), {'params': KEY, 'dropout': KEY}, TOKENS)
  tokens = layout.shard(TOKENS, spmd.Layout(layout.mesh, table).rules.spec(('batch', None)))

  @layout.jit
  def step(variables, tokens):
    def loss(params):
      state = {**variables, 'params': params}
      logits, updates = model.apply(state, tokens, rngs={'dropout': KEY}, mutable=['batch_stats'])
      labels = jnp.broadcast_to(tokens[:, :1], logits.shape[:2])
      return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), updates

    return jax.value_and_grad(loss, has_aux=True)(variables['params'])

  return variables, step(variables, tokens)


def check_equal(layers, table, kind):
  expected, found = run(layers, table, AxisType.Auto), run(layers, table, kind)
  assert jax.tree.structure(expected) == jax.tree.structure(found)
  for (path, one), two in zip(
    jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found), strict=True
  ):
    np.testing.assert_allclose(two, one, rtol=2e-4, atol=2e-5, err_msg=str(path))
  for one, two in zip(
    *(jax.tree.leaves((each[0], each[1][1])) for each in (expected, found)), strict=True
  ):
    assert two.sharding.spec == one.sharding.spec or two.sharding.is_equivalent_to(
      jax.NamedSharding(two.sharding.mesh, one.sharding.spec), one.ndim
    )


@pytest.mark.parametrize(
  'layers, table, kind',
  [
    (('recurrent',), 'fsdp', KINDS[0]),
    (('batch norm', 'own'), 'products', KINDS[1]),
  ],
)
def test_a_model_computes_the_same_as_over_auto_axes(layers, table, kind):
  check_equal(layers, TABLES[table], kind)


@pytest.mark.exhaustive
@settings(max_examples=60, phases=(Phase.explicit, Phase.generate))
@given(
  layers=st.lists(st.sampled_from(sorted({*LAYERS} - {*SHAPES})), min_size=1, max_size=3),
  first=st.sampled_from([(), ('strided',)]),
  table=st.sampled_from(sorted(TABLES)),
  kind=st.sampled_from(KINDS),
)
def test_random_models_compute_the_same_as_over_auto_axes(layers, first, table, kind):
  check_equal([*first, *layers], TABLES[table], kind)


def test_a_result_has_the_types_of_its_dimensions():
  """Those of the argument first, then those of the kernel; a constraint in the module decides."""
  layout = spmd.Layout(
    spmd.make_mesh(SIZES, axis_types=AxisType.Explicit),
    (('batch', 'data'), ('in', 'data'), ('out', 'model')),
  )
  seen = []

  class Two(nn.Module):
    @nn.compact
    def __call__(self, x):
      for layer in (nn.Dense(16), nn.Dense(8), nn.Einsum((8, 4, 2), 'bd,dhk->bhk')):
        x = layer(x)
        seen.append(jax.typeof(x).sharding.spec)
      return x

  variables = layout.init(spmd.names_for(Two().init), KEY, jnp.ones((4, 8)))
  seen.clear()
  layout.jit(Two().apply)(variables, layout.shard(jnp.ones((4, 8)), ('batch', None)))
  assert {*seen[:2]} == {jax.P('data', 'model')} and {*seen[2:]} == {jax.P('data', 'model', None)}


def test_attempts_leave_no_trace():
  """A module that runs again: random numbers, sown values, updates and names are those of one run."""

  class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x):
      count = self.variable('counts', 'calls', jnp.zeros, ())
      count.value = count.value + 1
      noise = jax.random.normal(self.make_rng('noise'), (8,))
      self.sow('intermediates', 'seen', noise)
      kernel = self.param('kernel', nn.initializers.ones, (8, 8))
      y = nn.Dense(8)(x) @ kernel  # sums over a sharded dimension
      self.sow('intermediates', 'seen', y)
      return y + noise[None]

  model, results = Noisy(), []
  for kind in (AxisType.Auto, AxisType.Explicit):
    table = (spmd.fsdp('model', min_size=1),)
    layout = spmd.Layout(spmd.make_mesh(SIZES, axis_types=kind), table)
    variables = layout.init(model.init, {'params': KEY, 'noise': KEY}, jnp.ones((4, 8)))
    apply = layout.jit(
      lambda v, k, x: model.apply(v, x, rngs={'noise': k}, mutable=['counts', 'intermediates'])
    )
    results.append(
      (variables, apply({each: variables[each] for each in ('params', 'counts')}, KEY, jnp.ones((4, 8))))
    )
  jax.tree.map(lambda one, two: np.testing.assert_allclose(two, one, rtol=1e-5), *results)


class Applied(nn.Module):
  """A module that calls a function with its argument and its variable, both sharded."""

  function: Callable[..., Any]

  @nn.compact
  def __call__(self, x):
    init = spmd.with_logical_partitioning(nn.initializers.normal(), ('in', 'out'))
    return self.function(x, self.param('kernel', init, (8, 8)))


def applied(function, kind=AxisType.Explicit):
  table = ('batch', 'data'), ('in', 'data'), ('out', 'model')
  layout, x = spmd.Layout(spmd.make_mesh(SIZES, axis_types=kind), table), np.arange(64.0).reshape(8, 8)
  variables = layout.init(Applied(lambda x, w: w).init, KEY, x)
  return layout.jit(Applied(function).apply)(variables, layout.shard(x, ('batch', None)))


@pytest.mark.parametrize(
  'function',
  [
    lambda x, w: jax.lax.scan(lambda turn, row: (turn + row @ w, turn), jnp.zeros(8), x),
    lambda x, w: jax.lax.map(lambda row: row @ w, x),
    lambda x, w: jax.lax.switch(1, [lambda: x @ w, lambda: w]),
    lambda x, w: jax.ops.segment_sum(w, jnp.argmax(w, 1), 4),
    lambda x, w: jnp.nonzero(w > 0, size=4),
    lambda x, w: jax.vmap(lambda row, other: row * other)(x, w.T),
  ],
  ids=['scan', 'map', 'switch', 'segments', 'nonzero', 'vmap'],
)
def test_operations_that_take_no_out_sharding(function):
  expected = applied(function, AxisType.Auto)
  jax.tree.map(
    lambda one, two: np.testing.assert_allclose(two, one, rtol=1e-5, atol=1e-5),
    expected,
    applied(function),
  )


def test_dimensions_keep_their_types_in_a_mapped_module():
  """Of a module that runs over Auto axes inside `nn.vmap`; a mapped dimension may be sharded."""
  seen = []

  class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x):
      y = nn.Dropout(0.5, deterministic=False)(nn.Dense(8)(x))
      seen.append(jax.typeof(y).sharding.spec)
      return nn.Dense(8)(y)

  class Mapped(nn.Module):
    axis: int | None

    @nn.compact
    def __call__(self, x):
      split = {'params': True, 'dropout': True}
      size = 2 if self.axis is None else x.shape[self.axis]
      return nn.vmap(Noisy, {'params': 0}, split, in_axes=self.axis, axis_size=size)()(x)

  table, x = (('batch', 'data'), spmd.fsdp('model', min_size=1)), jax.random.normal(KEY, (4, 8, 8))
  for axis in (None, 1, 0):
    results = []
    for kind in (AxisType.Auto, AxisType.Explicit):
      layout = spmd.Layout(spmd.make_mesh(SIZES, axis_types=kind), table)
      variables = layout.init(Mapped(axis).init, {'params': KEY, 'dropout': KEY}, x)
      apply = layout.jit(lambda v, x, axis=axis: Mapped(axis).apply(v, x, rngs={'dropout': KEY}))
      results.append((variables, apply(variables, layout.shard(x, ('batch', None, None)))))
    jax.tree.map(lambda one, two: np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-5), *results)
    assert axis is not None or seen[-1][0] == 'data'


@pytest.mark.parametrize('lift', [lambda block: block, nn.remat, nn.jit], ids=['', 'remat', 'jit'])
def test_layers_of_a_scan_may_be_sharded(lift):
  class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
      init = spmd.with_logical_partitioning(nn.initializers.lecun_normal(), ('in', 'out'))
      return spmd.with_logical_constraint(
        jnp.tanh(nn.Dense(16, kernel_init=init)(x)), ('batch', None)
      ), x.sum()

  class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
      layers = {nn.PARTITION_NAME: 'layers'}
      split = {'params': True}
      return nn.scan(lift(Block), {'params': 0}, split_rngs=split, length=4, metadata_params=layers)()(
        x, None
      )[0]

  model = Stack()
  table = ('layers', 'model'), ('in', 'data'), ('batch', 'data')
  results, x = [], jax.random.normal(KEY, (8, 16))
  for kind in (AxisType.Auto, AxisType.Explicit):
    layout = spmd.Layout(spmd.make_mesh(SIZES, axis_types=kind), table)
    variables = layout.init(model.init, KEY, x)
    step = layout.jit(jax.value_and_grad(lambda v, x: jnp.sum(model.apply(v, x) ** 2)))
    results.append((variables, step(variables, layout.shard(x, ('batch', None)))))
    kernels = [each for each in jax.tree.leaves(spmd.unbox(results[-1])) if each.shape == (4, 16, 16)]
    assert len(kernels) == 2
    assert {kernel.sharding.spec for kernel in kernels} == {jax.P('model', 'data', None)}
  jax.tree.map(lambda one, two: np.testing.assert_allclose(two, one, rtol=1e-5, atol=1e-6), *results)


SPLIT = {'params': True, 'dropout': True}
OUTERMOST = {
  'scan': lambda block: nn.scan(
    block, {'params': 0}, split_rngs=SPLIT, length=3, metadata_params={nn.PARTITION_NAME: 'layers'}
  ),
  'scan of remat': lambda block: OUTERMOST['scan'](nn.remat(block)),
  'remat': nn.remat,
  'vmap': lambda block: nn.vmap(
    block, {'params': None}, in_axes=(0, None), out_axes=(0, None), split_rngs={**SPLIT, 'params': False}
  ),
}


@pytest.mark.parametrize('names', [('in', 'out'), ('out', 'in')], ids=['out', 'in'])
@pytest.mark.parametrize('lift', OUTERMOST)
def test_a_transformation_may_be_the_outermost_module(lift, names):
  """With the types of one in a module, and with all its random numbers."""

  class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
      init = spmd.with_logical_partitioning(nn.initializers.lecun_normal(), names)
      y = nn.Dropout(0.5, deterministic=False)(nn.Dense(16, kernel_init=init)(x))
      return jnp.tanh(y) * 2, None

  class Around(nn.Module):
    @nn.compact
    def __call__(self, x, _):
      return OUTERMOST[lift](Block)(name='inner')(x, None)

  def step(variables, x):
    def loss(variables):
      y, _ = model.apply(variables, x, None, rngs={'dropout': KEY})
      return jnp.mean(y**2), y

    return jax.value_and_grad(loss, has_aux=True)(variables)

  table = ('batch', 'data'), ('out', 'model'), ('in', None)
  layout = spmd.Layout(spmd.make_mesh(SIZES, axis_types=AxisType.Explicit), table)
  model, x = OUTERMOST[lift](Block)(), jax.random.normal(KEY, (8, 4, 16))
  args = {'params': KEY, 'dropout': KEY}, x, None
  variables = jax.jit(lambda keys, x: model.init(keys, x, None))(*args[:2])
  made, placed = layout.init(model.init, *args), layout.shard(x, ('batch', None, None))
  result = layout.jit(step)(made, placed)
  jax.tree.map(
    lambda one, two: np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-5),
    (variables, jax.jit(step)(variables, x)),
    (made, result),
  )
  apply = layout.jit(lambda variables, x: Around().apply(variables, x, None, rngs={'dropout': KEY})[0])
  assert jax.typeof(result[0][1]) == jax.typeof(apply({'params': {'inner': made['params']}}, placed))


def test_a_transformation_reads_variables_of_the_module_around_it():
  class Normal(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.WeightNorm(nn.Dense(16))(x)

  results, x = [], jax.random.normal(KEY, (8, 16))
  for kind in (AxisType.Auto, AxisType.Explicit):
    layout = spmd.Layout(spmd.make_mesh(SIZES, axis_types=kind), (spmd.fsdp('model', min_size=1),))
    variables = layout.init(Normal().init, KEY, x)
    results.append((variables, layout.jit(Normal().apply)(variables, x)))
  jax.tree.map(lambda one, two: np.testing.assert_allclose(two, one, rtol=1e-5, atol=1e-5), *results)


def test_a_module_raises_its_own_error():
  error = ValueError('these kernels need out_sharding')

  def function(x, w):
    raise error

  with pytest.raises(ValueError) as caught:
    applied(function)
  assert caught.value is error


def test_a_module_that_needs_explicit_axes():
  """It runs over Auto axes for one operation, and another needs Explicit ones: the error is that of the first."""
  spec = jax.P('data', None)

  def function(x, w):
    y = jnp.dot(x, w, out_sharding=spec)
    return y.T @ y

  with pytest.raises(
    LayoutError, match=r"^Over the Explicit axes 'data', 'model', .* Contracting dimensions"
  ):
    applied(function)


class Constrained(nn.Module):
  """A constraint of Flax's own, which only compares types on Explicit axes."""

  names: tuple[str, ...]

  def __call__(self, x):
    return nn.with_logical_constraint(x * 2, self.names)


PLACES = {'rows': 'data', 'columns': 'model', 'all': ('data', 'model'), 'none': None}


@pytest.mark.parametrize('kind', KINDS, ids=['all', 'data', 'model'])
@settings(deadline=None, max_examples=15)
@given(st.permutations([*PLACES]), st.permutations([*PLACES]))
def test_constraints_of_flax_reshard(kind, before, after):
  before, after = (('all', 'none') if 'all' in names[:2] else names[:2] for names in (before, after))
  layout = spmd.Layout(spmd.make_mesh(SIZES, axis_types=kind), tuple(PLACES.items()))
  x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
  y = layout.jit(lambda x: Constrained(tuple(after)).apply({}, x))(layout.shard(x, tuple(before)))
  np.testing.assert_array_equal(y, x * 2)
  if kind is AxisType.Explicit:  # others keep the Explicit axes that a constraint does not name
    wanted = nn.logical_to_mesh_axes(tuple(after), tuple(PLACES.items()))
    assert y.sharding.is_equivalent_to(jax.NamedSharding(layout.mesh, wanted), 2)


def test_a_program_in_a_program_raises_one_error():
  layout = spmd.Layout(spmd.make_mesh(SIZES, axis_types=AxisType.Explicit), (('batch', 'data'),))
  inner = layout.jit(lambda x: x.T @ x)
  with pytest.raises(LayoutError) as caught:
    layout.jit(lambda x: inner(x))(layout.shard(jnp.ones((8, 8)), ('batch', None)))
  assert str(caught.value).count('Over the Explicit axes') == 1


@pytest.mark.parametrize(
  'loop',
  [
    lambda x, first: jax.lax.scan(lambda c, _: (c + x, None), first, None, length=3),
    lambda x, first: jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] + x, c[1] + 1), (first, 0)),
    lambda x, first: jax.lax.cond(x.sum() > 0, lambda: x, lambda: first),
  ],
)
def test_a_loop_or_branches_outside_of_modules(loop):
  """Whose types differ in their shardings; if they differ in more, the error is JAX's own."""
  layout = spmd.Layout(spmd.make_mesh(SIZES, axis_types=AxisType.Explicit), (('batch', 'data'),))
  x = layout.shard(jnp.ones((8, 8)), ('batch', None))
  with pytest.raises(
    LayoutError, match=r"(?s)Over the Explicit axes 'data'.*@data.*\nFix: pass out_sharding="
  ):
    layout.jit(lambda x: loop(x, jnp.zeros((8, 8))))(x)
  with pytest.raises(TypeError, match='must have equal'):
    layout.jit(lambda x: loop(x, jnp.zeros((8, 8), jnp.bfloat16)))(x)


def test_an_operation_outside_of_modules():
  mesh = spmd.make_mesh(SIZES, axis_types={'model': AxisType.Explicit})
  layout = spmd.Layout(mesh, (('mlp', 'model'),))
  w = layout.shard(jnp.ones((8, 8)), ('mlp', None))
  with pytest.raises(LayoutError) as caught:
    layout.jit(lambda w: w.T @ w)(w)
  text = str(caught.value)
  line = test_an_operation_outside_of_modules.__code__.co_firstlineno + 5
  assert text.startswith(
    f"Over the Explicit axes 'model', JAX finds no sharding for an operation of module_types_test.py:{line}: Contracting"
  )
  assert text.endswith(
    dedent("""
    Fix: pass out_sharding= to the operation, constrain its operands before it (flax_spmd.with_logical_constraint), or make these axes Auto (make_mesh, axis_types=).""")
  )
