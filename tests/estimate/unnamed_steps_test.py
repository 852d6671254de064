"""Steps without names: their automatic batch constraints, against compiled programs."""

from random import Random

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jaxlib.mlir import ir

import flax_spmd as spmd
from flax_spmd import presets
from flax_spmd._src.compare.lowering import abstract_batch, lower
from flax_spmd._src.compat import mlir_context
from flax_spmd._src.estimate.name_mesh import lower_on_names
from flax_spmd.explore import Estimator, TrainStep, compare, parse_target
from tests.estimate.doubts import doubts_of

EMBED, MLP, BATCH = 64, 256, 64
X = jax.ShapeDtypeStruct((BATCH, EMBED), jnp.float32)


class Residual(nn.Module):
  """Without names, biases included."""

  @nn.compact
  def __call__(self, x):
    for _ in range(2):
      x = x + nn.Dense(EMBED)(nn.gelu(nn.Dense(MLP)(x)))
    return x


def unnamed_train_step(microbatches):
  model = Residual()

  def loss(variables, x):
    rows = x.reshape(microbatches, -1, EMBED)
    return jnp.mean(jax.lax.map(lambda one: jnp.mean(model.apply(variables, one) ** 2), rows))

  def unnamed_step(variables, x):
    if microbatches == 1:
      value, grads = jax.value_and_grad(lambda v, x: jnp.mean(model.apply(v, x) ** 2))(variables, x)
    else:
      value, grads = jax.value_and_grad(loss)(variables, x)
    return jax.tree.map(lambda old, slope: old - 0.1 * slope, variables, grads), value

  return TrainStep(unnamed_step, lambda: model.init(jax.random.key(0), jnp.ones((1, EMBED))), X)


UNNAMED = {
  'fsdp': spmd.Layout(spmd.abstract_mesh({'data': 8}), spmd.presets.fsdp(min_size=16)),
  'data': spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'),)),
  'fsdp over one of two axes': spmd.Layout(
    spmd.abstract_mesh({'data': 4, 'model': 2}), (('batch', 'data'), spmd.fsdp('data', min_size=16))
  ),
}


def test_a_step_without_names_has_the_batch_constraints_of_layout_jit():
  """Without them, activations would be sharded as the parameters are; biases' gradients are partial sums."""
  train_step = unnamed_train_step(1)
  compiled, estimator = compare(train_step, UNNAMED, 'cpu:8'), Estimator(train_step, platform='cpu')
  for name, one in UNNAMED.items():
    estimated = estimator.estimate(one, parse_target('cpu:8'))
    assert estimated.counts.flops == compiled[name].counts.flops
    assert estimated.counts.by_kind() == pytest.approx(compiled[name].counts.by_kind(), rel=1e-3), name
    assert doubts_of(estimated) == ()


def test_automatic_constraints_that_do_not_divide_are_left_out():
  """Microbatches of four examples on eight devices."""
  train_step = unnamed_train_step(X.shape[0] // 4)
  estimated = Estimator(train_step, platform='cpu').estimate(UNNAMED['fsdp'], parse_target('cpu:8'))
  compiled = compare(train_step, {'fsdp': UNNAMED['fsdp']}, 'cpu:8')['fsdp']
  assert compiled.error is None
  assert estimated.counts.flops == pytest.approx(compiled.counts.flops, rel=0.01)


EXPERTS = 8


class Expert(nn.Module):
  """Layers with names."""

  @nn.compact
  def __call__(self, x):
    for size, names in ((MLP, ('embed', 'mlp')), (EMBED, ('mlp', 'embed'))):
      kernel = spmd.with_logical_partitioning(nn.initializers.lecun_normal(), names)
      x = nn.Dense(size, kernel_init=kernel)(nn.gelu(x))
    return x


class Mixture(nn.Module):
  """A `vmap` over experts, and a gate whose bias, if any, counts them."""

  bias: bool

  @nn.compact
  def __call__(self, x):
    experts = nn.vmap(
      Expert,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      axis_size=EXPERTS,
      metadata_params={nn.PARTITION_NAME: 'expert'},
    )
    gates = nn.sigmoid(nn.Dense(EXPERTS, use_bias=self.bias)(x))
    of_experts = experts()(jnp.broadcast_to(x[None], (EXPERTS, *x.shape)))
    return jnp.einsum('ebld,ble->bld', of_experts, gates)


def experts_step(rows, bias):
  """A step of that model; its batch has a name of its own."""
  model = Mixture(bias)

  def step(params, x):
    value, grads = jax.value_and_grad(lambda p: jnp.mean(model.apply(p, x) ** 2))(params)
    return jax.tree.map(lambda old, slope: old - 0.1 * slope, params, grads), value

  create = lambda: model.init(jax.random.key(0), jnp.ones((2, 32, EMBED)))
  x = jax.ShapeDtypeStruct((32, 32, EMBED), jnp.float32)
  return TrainStep(step, create, x, placements=(rows, None, None))


@pytest.mark.parametrize('min_size', [1, 256])
@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize('rows', ['batch', 'rows'])
def test_each_layout_decides_whether_the_batch_is_constrained(rows, bias, min_size):
  """Where an array that counts experts is sharded as well, it is not; any name may be that of the batch."""
  rules = ((rows, 'data'), spmd.fsdp('data', min_size=min_size))
  layout = spmd.Layout(spmd.abstract_mesh({'data': 8}), rules)
  train_step = experts_step(rows, bias)
  lowering = lower_on_names(train_step, 'cpu')
  batch = abstract_batch(train_step, layout)
  found = lowering.batch_under(layout, batch, lowering.shardings(layout, batch))
  assert (found is None) == (bias and min_size == 1)
  if found is not None:
    assert found.axes == (rows,)
    codes = lowering.with_batch(found).code, lower(train_step, layout, parse_target('cpu:8')).code
    with mlir_context():
      texts = [str(ir.Module.parse(code)) for code in codes]
    assert texts[0].count('sharding_constraint') == texts[1].count('sharding_constraint') > 0


class Sequence(nn.Module):
  """Layers whose arrays get names, those of weights that a transformation hides, and an embedding."""

  @nn.compact
  def __call__(self, ids):
    x = nn.Embed(MLP, EMBED)(ids)
    for wrap in (nn.WeightNorm, lambda layer: layer):
      x = x + wrap(nn.Dense(EMBED))(nn.gelu(wrap(nn.Dense(MLP))(x)))
    return x


@pytest.mark.parametrize(
  'seed', [pytest.param(n, marks=[pytest.mark.exhaustive] if n >= 4 else []) for n in range(12)]
)
def test_results_of_layers_are_constrained_as_in_the_compiled_step(seed):
  """Their batch has its axes whatever the order of the rules; so have lengths, and names that no array has."""
  random = Random(seed)
  model = Sequence()
  ids = jax.ShapeDtypeStruct((64, 16), jnp.int32)

  def step(params, ids):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(model.apply(p, ids) ** 2))(params)
    return jax.tree.map(lambda old, slope: old - 0.1 * slope, params, grads), loss

  axes = ('data', 'model', ('data', 'model'), None)
  rules = [(name, random.choice(axes)) for name in ('in', 'out', 'vocab', 'length')]
  rules = random.sample(rules, random.randint(1, 4))
  rules.insert(random.randint(0, len(rules)), ('batch', random.choice(axes[:3])))
  policies = random.choice(({}, {'conflict': 'skip'}, {'unmatched': 'replicate'}))
  layout = spmd.Layout(spmd.abstract_mesh({'data': 2, 'model': 4}), spmd.Rules(*rules, **policies))
  create = spmd.names_for(lambda: model.init(jax.random.key(0), jnp.ones((2, 16), jnp.int32)))
  train_step = TrainStep(spmd.names_for(step), create, ids)
  estimated = Estimator(train_step, platform='cpu').estimate(layout, parse_target('cpu:8'))
  [compiled] = compare(train_step, {'it': layout}, 'cpu:8')
  assert estimated.counts.flops == pytest.approx(compiled.counts.flops, rel=0.01), rules
  if not estimated.doubts:
    wires = [sum(each.counts.by_axis().values()) for each in (estimated, compiled)]
    assert wires[0] == pytest.approx(wires[1], rel=0.15), rules


class Layers(nnx.Module):
  """Two layers, the first of them in two places."""

  def __init__(self, names):
    init = nnx.initializers.lecun_normal()
    init = nnx.with_partitioning(init, names) if names else init
    self.up = nnx.Linear(512, 2048, rngs=nnx.Rngs(0))
    self.down = nnx.Linear(2048, 512, kernel_init=init, rngs=nnx.Rngs(1))
    self.again = self.up

  def __call__(self, x):
    return self.down(nnx.relu(self.again(self.down(nnx.relu(self.up(x))))))


@pytest.mark.parametrize('names', [None, ('mlp', 'embed')])
@pytest.mark.parametrize('returns', [True, False])
@pytest.mark.parametrize('rule', [spmd.fsdp('data', min_size=1), spmd.optimizer_over('data')])
def test_modules_are_estimated_as_their_states(rule, returns, names):
  """The parameters that a step returns, or only changes, keep their sharding: under ZeRO-1 they are gathered."""

  def create():
    model = Layers(names)
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

  def step(modules, x):
    model, optimizer = modules
    value, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, gradients)
    return (modules, value) if returns else value

  def functional(state, x):
    modules = nnx.merge(graph, state)
    value = step(modules, x)
    return nnx.state(modules), value[1] if returns else value

  x = jax.ShapeDtypeStruct((64, 512), 'float32')
  rules = (('batch', 'data'), ('mlp', 'model'), ('embed', None), rule)
  layout = spmd.Layout(spmd.abstract_mesh({'data': 4, 'model': 2}), rules)
  graph = nnx.graphdef(layout.abstract(create))
  ours, theirs = (
    Estimator(TrainStep(each, made, x)).estimate(layout, parse_target('h100:8'), partition=False)
    for each, made in ((step, create), (functional, lambda: nnx.state(create())))
  )
  assert ours.counts == theirs.counts
  assert ours.memory == theirs.memory
  kinds = {one.kind for one in ours.counts.collectives}
  assert 'all-gather' in kinds and kinds & {'all-reduce', 'reduce-scatter'}


def test_an_array_in_two_places_is_counted_once():
  """In the parts of the memory, and in its peak: no array is taken for one that the program lacks."""

  def step(model, x):
    model.up.bias[...] += jnp.mean(model(x))

  layout = spmd.Layout(spmd.abstract_mesh({'data': 8}), presets.fsdp(min_size=1))
  train_step = TrainStep(step, lambda: Layers(None), jax.ShapeDtypeStruct((64, 512), 'float32'))
  compiled = compare(train_step, {'': layout}, 'cpu:8')[''].memory
  estimated = Estimator(train_step).estimate(layout, parse_target('h100:8'), partition=False).memory
  assert compiled.parameters == estimated.parameters == (2 * 512 * 2048 + 2048 + 512) * 4 // 8
  assert compiled.peak == compiled.parameters + compiled.batch + compiled.temporaries


def contrastive(weights, x):
  """The diagonal of the similarities of a batch: both coordinates of the lookup count along one dimension."""
  ours, theirs = jnp.tanh(x @ weights['up']), jnp.tanh(x @ weights['down'].T)
  return -jnp.mean(jnp.diag(jax.nn.log_softmax(ours @ theirs.T)))


def recurrent(weights, x):
  """A scan over complex numbers and an odd length, so that some of its parts are empty."""
  rows = jnp.tanh(x @ weights['up'])
  steps = jnp.stack([rows * number for number in range(1, 6)])
  combine = lambda one, other: (one[0] * other[0], other[0] * one[1] + other[1])
  states = jax.lax.associative_scan(combine, (jnp.full(steps.shape, 0.5 + 0.1j), steps + 0j))[1]
  return jnp.mean((states.real @ weights['down']) ** 2)


def spectral(weights, x):
  """Magnitudes of an FFT; the gradient selects between complex numbers."""
  return jnp.mean((jnp.abs(jnp.fft.fft(jnp.tanh(x @ weights['up']))) @ weights['down']) ** 2)


@pytest.mark.parametrize('loss', [contrastive, recurrent, spectral])
def test_losses_of_public_models_agree_with_compiled_programs(loss):
  def step(weights, x):
    value, gradients = jax.value_and_grad(loss)(weights, x)
    return jax.tree.map(lambda weight, slope: weight - 0.1 * slope, weights, gradients), value

  create = lambda: {'up': jnp.ones((EMBED, MLP)), 'down': jnp.ones((MLP, EMBED))}
  train_step = TrainStep(step, create, X)
  compiled, estimator = compare(train_step, UNNAMED, 'cpu:8'), Estimator(train_step, platform='cpu')
  for name, one in UNNAMED.items():
    estimated = estimator.estimate(one, parse_target('cpu:8'))
    assert estimated.counts.flops == compiled[name].counts.flops, name
    wire, expected = (sum(each.counts.by_kind().values()) for each in (estimated, compiled[name]))
    assert wire == pytest.approx(expected, rel=0.01), name


@pytest.mark.new_jax  # older versions of XLA move the rows in another way
@pytest.mark.usefixtures('gpu_compiler')
@pytest.mark.parametrize('minibatches', [2, 4])
def test_an_epoch_of_minibatches_of_a_batch_as_in_ppo(minibatches):
  def step(weights, x):
    for rows in x.reshape(minibatches, -1, EMBED):
      slope = jax.grad(lambda w, rows=rows: jnp.mean(nn.relu(rows @ w) ** 2))(weights)
      weights = weights - 0.1 * slope
    return weights

  train_step = TrainStep(
    step, lambda: jnp.ones((EMBED, MLP)), jax.ShapeDtypeStruct((1024, EMBED), jnp.float32)
  )
  estimated = Estimator(train_step).estimate(UNNAMED['data'], parse_target('h100:8'))
  compiled = compare(train_step, {'data': UNNAMED['data']}, 'h100:8')['data']
  assert estimated.counts.flops == pytest.approx(compiled.counts.flops, rel=0.01)
  assert estimated.counts.by_kind() == pytest.approx(compiled.counts.by_kind(), rel=0.05)
