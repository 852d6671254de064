"""Batches that are on no mesh, and models that constrain no activation: devices compute their share, and activations do not move."""

import functools
from contextlib import nullcontext

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flax_spmd as spmd
from flax_spmd._src.hlo.counts import count
from flax_spmd.pipeline import GPipe, Mean, OneFOneB, accumulate, stage_end
from tests.pipeline.cases import assert_same

WIDTH, LENGTH, WORDS, BATCH, MICROBATCHES = 32, 64, 64, 64, 4
DATA_PARALLEL, FSDP = (('batch', 'data'),), (('batch', 'data'), spmd.fsdp('data', min_size=1))
MESH = {'stage': 1, 'data': 4}  # of a stage
TOKENS = np.random.default_rng(0).integers(0, WORDS, (BATCH, LENGTH))


class Decoder(nn.Module):
  """A decoder; `names` are those of the dense layers' weights, if they have any."""

  names: bool = False

  @nn.compact
  def __call__(self, tokens):
    def dense(features, *names):
      init = nn.initializers.lecun_normal()
      return nn.Dense(
        features, kernel_init=spmd.with_logical_partitioning(init, names) if self.names else init
      )

    x = nn.Embed(WORDS, WIDTH)(tokens)
    for layer in range(2):
      y = nn.LayerNorm()(x)
      x += nn.MultiHeadDotProductAttention(4, deterministic=True)(y, mask=nn.make_causal_mask(tokens))
      y = nn.gelu(dense(4 * WIDTH, 'embed', 'mlp')(nn.LayerNorm()(x)))
      x += dense(WIDTH, 'mlp', 'embed')(y)
      x = stage_end(x) if layer == 0 else x
    return dense(WORDS, 'embed', 'vocab')(nn.LayerNorm()(x))


MODEL = Decoder()
SHAPES = {'split': (BATCH, LENGTH), 'rows': (MICROBATCHES, BATCH // MICROBATCHES, LENGTH)}


def training(shape, model=MODEL):
  """A step, of a batch that it splits into microbatches, or whose dimension 0 is theirs; and the batch."""

  def loss(params, tokens):
    logits = model.apply(params, tokens)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

  def step(params, batch):
    grad = jax.value_and_grad(loss)
    count = MICROBATCHES if shape == 'split' else None
    value, grads = accumulate(
      lambda one: grad(params, one['tokens']), batch, op=Mean, microbatches=count
    )
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

  return step, {'tokens': TOKENS.reshape(SHAPES[shape])}


def created(rules, model=MODEL):
  layout = spmd.Layout({'stage': 2, 'data': 4}, rules)
  return layout, layout.init(model.init, jax.random.key(0), TOKENS[:1])


def totals(compiled):
  """FLOPs and bytes on the wire of a device of each rank, of all programs of a step."""
  flops, wire = 0, 0
  for program, one in compiled.executables.items():
    counts = count(one.compiled.as_text(), MESH)
    calls = MICROBATCHES if program.name.startswith(('fwd', 'bwd')) else 1
    flops += calls * counts.flops
    wire += calls * sum(counts.by_kind().values())
  return flops, wire


@pytest.mark.parametrize(
  ('rules', 'shape'),
  [(DATA_PARALLEL, 'split'), pytest.param(FSDP, 'rows', marks=pytest.mark.exhaustive)],
)
def test_a_batch_of_the_host_costs_what_a_sharded_one_does(rules, shape):
  layout, params = created(rules)
  step, batch = training(shape)
  names = ('batch', None) if shape == 'split' else (None, 'batch', None)
  results, costs = [], []
  for one in (batch, layout.shard(batch, {'tokens': names})):
    compiled = layout.pipeline_jit(step, schedule=OneFOneB(2)).compile(params, one)
    results.append(compiled(params, one))
    costs.append(totals(compiled))
  assert costs[0] == pytest.approx(costs[1], rel=0.01)
  assert_same(*results)
  assert_same(results[0], jax.jit(step)(jax.device_get(params), batch), 1e-4)


@pytest.mark.parametrize(
  ('names', 'shape'),
  [
    pytest.param(names, shape, id=f'{"names" if names else "fsdp"}-{shape}', marks=marks)
    for names, shape, *marks in (
      (False, 'split', pytest.mark.new_jax),
      (True, 'rows', pytest.mark.old_jax),
      (False, 'rows', pytest.mark.exhaustive),
      (True, 'split', pytest.mark.exhaustive),
    )
  ],
)
def test_parameters_move_and_activations_do_not(names, shape):
  """Where nothing but the parameters has names, or nothing at all."""
  layout, params = created((('batch', 'data'), ('embed', 'data')) if names else FSDP, Decoder(names))
  step, batch = training(shape, Decoder(names))
  compiled = layout.pipeline_jit(step, schedule=OneFOneB(2)).compile(params, batch)
  _, wire = totals(compiled)
  once = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) * 3 / 4
  # a microbatch: parameters are gathered forward and backward, and gradients are summed by all-reduce
  assert wire < 1.1 * MICROBATCHES * (1 + 1 + 2) * once
  assert_same(compiled(params, batch), jax.jit(step)(jax.device_get(params), batch), 1e-4)


def test_weights_that_jax_reshards_onto_no_mesh():
  """JAX does so, without effect, in the gradient of a sum with an array: a straight-through estimator. It hid the batch."""
  layout = spmd.Layout({'stage': 2, 'data': 4}, FSDP)

  def step(of_weight, w, batch):
    loss = lambda w, h: jnp.mean((stage_end(jnp.tanh(h @ of_weight(w[0]))) @ of_weight(w[1])) ** 2)
    grads = accumulate(lambda h: jax.grad(loss)(w, h), batch, GPipe(2))
    return [each - 0.1 * grad for each, grad in zip(w, grads, strict=True)]

  rounded = lambda w: w + jax.lax.stop_gradient(jnp.round(8 * w) / 8 - w)
  w, batch = (
    layout.shard([np.ones((64, 32), np.float32), np.ones((32, 64), np.float32)]),
    np.ones((4, 8, 64)),
  )
  steps = [functools.partial(step, of_weight) for of_weight in (lambda w: w, rounded)]
  one, other = (totals(layout.pipeline_jit(each).compile(w, batch))[1] for each in steps)
  assert one == other > 0


def test_fsdp_without_a_loop():
  """Inference on a batch of the host: each device computes its examples; parameters are gathered once."""
  layout, params = created(FSDP)
  predict = layout.pipeline_jit(MODEL.apply)
  compiled = predict.compile(params, TOKENS)
  counts = [count(one.compiled.as_text(), MESH) for one in compiled.executables.values()]
  bytes_ = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
  assert sum(each.wire for one in counts for each in one.collectives) < 1.1 * bytes_
  alone = count(jax.jit(MODEL.apply).lower(jax.device_get(params), TOKENS).compile().as_text(), {})
  assert sum(one.flops for one in counts) == pytest.approx(alone.flops / 4, rel=0.01)
  assert_same(predict(params, TOKENS), jax.jit(MODEL.apply)(jax.device_get(params), TOKENS), 1e-4)


def squares(w, batch):
  def loss(w, one):
    return jnp.mean((stage_end(jnp.tanh(one['x'] @ w[0])) @ w[1] * one.get('scale', 1)) ** 2)

  grads = accumulate(lambda one: jax.grad(loss)(w, one), batch, GPipe(2), Mean)
  return [each - 0.1 * grad for each, grad in zip(w, grads, strict=True)]


@pytest.mark.parametrize(
  'batch, is_sharded',
  [
    ({'x': (4, 8, 16)}, True),
    ({'x': (4, 8, 16), 'scale': (4, 8, 1)}, True),
    ({'x': (4, 8, 16), 'scale': (4,)}, True),
    ({'x': (4, 8, 16), 'scale': (4, 1, 16)}, False),  # no common number of examples
    ({'x': (4, 6, 16)}, False),
  ],
)
@pytest.mark.parametrize('rules', [DATA_PARALLEL, FSDP, ()], ids=['data parallel', 'fsdp', 'no rules'])
def test_which_batches_are_sharded(rules, batch, is_sharded):
  layout = spmd.Layout({'stage': 2, 'data': 4}, rules)
  rng = np.random.default_rng(1)
  w = layout.shard([rng.normal(size=(16, 16)).astype(np.float32) for _ in range(2)])
  batch = {name: rng.normal(size=shape).astype(np.float32) for name, shape in batch.items()}
  for constrains in (False, True):
    is_whole = constrains and not is_sharded and bool(rules)
    with pytest.warns(UserWarning, match='each of 4 devices') if is_whole else nullcontext():
      compiled = layout.pipeline_jit(squares, constrain_batch=constrains).compile(w, batch)
    [forward] = [one.compiled for unit, one in compiled.executables.items() if unit.name == 'fwd_0']
    activations = [each.spec for each in forward.output_shardings]
    assert any('data' in spec[:1] for spec in activations) == (constrains and is_sharded and bool(rules))
  assert_same(compiled(w, batch), jax.jit(squares)(jax.device_get(w), batch))


def test_a_warning_of_microbatches_that_constraints_replicate():
  """The model has another name for the batch than the table."""
  layout = spmd.Layout({'stage': 2, 'data': 4}, DATA_PARALLEL)

  def step(w, batch):
    def loss(w, x):
      x = spmd.with_logical_constraint(stage_end(x @ w), ('act_batch', None))
      return jnp.mean((x @ w) ** 2)

    return accumulate(lambda x: jax.grad(loss)(w, x), batch, OneFOneB(ranks=2), Mean, microbatches=3)

  w, x = np.eye(16, dtype=np.float32), np.ones((24, 16), np.float32)
  pipelined = layout.pipeline_jit(step)
  with pytest.warns(UserWarning) as warnings:
    pipelined.lower(w, x)
  [warning] = [str(each.message) for each in warnings]
  line = warning.partition(' at ')[2].partition('. Fix')[0]
  assert warning == (
    'pipeline_jit of step: every device computes all examples of the batch:\n'
    "  constraints replicate the batch, which is sharded over data: no rule for 'act_batch' in 1 constraint, such as "
    f"('act_batch', None) at {line}. Fix: add the rule ('act_batch', 'data')."
  )
  pipelined.lower(w, x)  # warns once
  others = layout.replace(rules=(*layout.rules.pairs, ('act_batch', 'data')))
  others.pipeline_jit(step).lower(w, x)
  layout.pipeline_jit(step, constrain_batch=False).lower(w, x)


def test_a_warning_of_microbatches_that_cannot_be_sharded():
  """18 examples in three microbatches, for four devices of a stage; 24, or a batch that is sharded, are fine."""
  layout = spmd.Layout({'stage': 2, 'data': 4}, DATA_PARALLEL)

  def step(w, batch, scale):
    def loss(w, x):
      return jnp.mean((stage_end(x @ w) @ w * scale) ** 2)

    return accumulate(
      lambda one: jax.grad(loss)(w, one['x']), batch, OneFOneB(ranks=2), Mean, microbatches=3
    )

  pipelined, w = layout.pipeline_jit(step), np.eye(16, dtype=np.float32)

  def batch(examples):
    return {'x': np.ones((examples, 16), np.float32)}

  pipelined.lower(w, batch(24), 1.0)
  pipelined.lower(w, batch(9), 1.0)  # fewer examples than devices
  with pytest.warns(UserWarning) as warnings:
    pipelined.lower(w, batch(18), 1.0)
  [warning] = [str(each.message) for each in warnings]
  assert warning == (
    'pipeline_jit of step: each of 4 devices of a stage computes all examples of a microbatch, since their number is '
    "not the same multiple of 4, the size of mesh axis 'data', in all arrays of the batch:\n"
    '  1/x: float32[18, 16]\n'
    'Fix: pass microbatches of a multiple of 4 examples, and close over arrays without examples; or '
    'constrain_batch=False, if this is no batch.'
  )
  pipelined.lower(w, batch(18), 1.0)  # warns once
