"""Random transformers: whole steps as users write them, for `search.py --only transformers`.

Model, loss, optimizer and layout are drawn: one to three blocks, scanned or not, with or without dropout, under four remat
policies; grouped queries, five activation functions, two norms, nine ways to write a cross-entropy, of logits in 16 or 32
bits, seven optimizers, microbatches, with and without constraints; data parallel, fully sharded by name or by size, tensor
parallel, or both. Each is estimated, and compiled for eight H100s. An
estimate that is not in doubt may deviate by 15 % of the bytes on the wire, 12 % of the peak and 1 % of the FLOPs.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state
from harness import Figure, at_least, at_most, exact
from reporting import Table
from samples import Pair

import flax_spmd as spmd
from flax_spmd.explore import Estimator, TrainStep, compare, parse_target

TARGET = 'h100:8'
BATCH, HEADS = 64, 8
WIRE, MEMORY, FLOPS = 15, 12, 1  # %, the most that an estimate without a doubt may be off
ACTIVATIONS = {'gelu': nn.gelu, 'silu': nn.silu, 'relu': nn.relu, 'tanh': jnp.tanh}
GATED = 'swiglu'
NORMS = {'layer': nn.LayerNorm, 'RMS': nn.RMSNorm}
OPTIMIZERS = {
  'adamw': optax.adamw(1e-3),
  'sgd': optax.sgd(1e-3, momentum=0.9),
  'lion': optax.lion(1e-3),
  'adafactor': optax.adafactor(1e-3),
  'clipped adamw': optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
  'lamb': optax.lamb(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)),
  'adam in 16 bits': optax.adam(1e-3, mu_dtype=jnp.bfloat16),
}
REMAT = {  # policies by name
  'remat': None,
  'remat of all but products': jax.checkpoint_policies.checkpoint_dots,
  'remat of all but weights': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
NAMED = (('batch', 'data'), ('mlp', 'model'), ('heads', 'model'), ('vocab', 'model'))
LAYOUTS = {
  'data': ({'data': 8}, (('batch', 'data'),)),
  'fsdp by name': ({'data': 8}, (('batch', 'data'), ('embed', 'data'))),
  'fsdp by size': ({'data': 8}, (('batch', 'data'), spmd.fsdp('data'))),
  'tensor': ({'data': 2, 'model': 4}, NAMED),
  'tensor and fsdp': ({'data': 2, 'model': 4}, (*NAMED, ('embed', 'data'))),
}


class Case(NamedTuple):
  """What is drawn: the step, and its layout."""

  layout: str
  dtype: str
  layers: int
  width: int
  wider: int
  vocab: int
  length: int
  loss: str
  norm: str
  activation: str
  optimizer: str
  dropout: float
  remat: str
  kv_heads: int
  microbatches: int
  scan: bool
  tied: bool
  causal: bool
  constrained: bool
  cast: bool
  logits_constrained: bool
  loss_in_16_bits: bool

  def __str__(self) -> str:
    flags = [name.replace('_', ' ') for name in self._fields[15:] if getattr(self, name)]
    parts = [f'{self.layers} x {self.width}, x {self.wider}, {self.vocab} words, {self.length} long']
    parts += [self.dtype, self.loss, f'{self.norm} norm', self.activation, self.optimizer]
    parts += ['dropout'] * bool(self.dropout) + [self.remat] * bool(self.remat)
    parts += [f'{self.kv_heads} key heads'] * (self.kv_heads < HEADS)
    parts += [f'{self.microbatches} microbatches'] * (self.microbatches > 1)
    return ', '.join([*parts, *flags])


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
  'integer labels': lambda logits, ids: optax.softmax_cross_entropy_with_integer_labels(
    logits, ids
  ).mean(),
  'one-hot labels': lambda logits, ids: optax.softmax_cross_entropy(
    logits, jax.nn.one_hot(ids, logits.shape[-1])
  ).mean(),
  'smooth labels': lambda logits, ids: optax.softmax_cross_entropy(
    logits, optax.smooth_labels(jax.nn.one_hot(ids, logits.shape[-1]), 0.1)
  ).mean(),
  'log_softmax': lambda logits, ids: -_picked(jax.nn.log_softmax(logits), ids).mean(),
  'masked log_softmax': lambda logits, ids: _masked(jax.nn.log_softmax(logits[:, :-1]), ids[:, 1:]),
  'logsumexp and z': lambda logits, ids: (
    jax.nn.logsumexp(logits, -1) - _picked(logits, ids) + 1e-4 * jax.nn.logsumexp(logits, -1) ** 2
  ).mean(),
  'logsumexp of the next': lambda logits, ids: (
    jax.nn.logsumexp(logits[:, :-1], -1) - _picked(logits[:, :-1], ids[:, 1:])
  ).mean(),
  'one-hot sum': lambda logits, ids: (
    -(jax.nn.one_hot(ids, logits.shape[-1]) * jax.nn.log_softmax(logits)).sum(-1).mean()
  ),
  'masked integer labels': lambda logits, ids: (
    (optax.softmax_cross_entropy_with_integer_labels(logits, ids) * (ids > 0)).sum()
    / jnp.maximum((ids > 0).sum(), 1)
  ),
}


def _picked(x: jax.Array, ids: jax.Array) -> jax.Array:
  return jnp.take_along_axis(x, ids[..., None], -1)[..., 0]


def _masked(chances: jax.Array, ids: jax.Array) -> jax.Array:
  mask = ids > 0
  return -(_picked(chances, ids) * mask).sum() / mask.sum()


def drawn(count: int, seed: int) -> list[Case]:
  rng = random.Random(seed)
  flag = lambda share=0.5: rng.random() < share
  return [
    Case(
      rng.choice(list(LAYOUTS)),
      rng.choice(['bfloat16', 'bfloat16', 'float32']),
      rng.randint(1, 3),
      rng.choice([256, 512, 768]),
      rng.choice([2, 4]),
      rng.choice([1000, 8192, 32000, 50304]),
      rng.choice([128, 256]),
      rng.choice(list(LOSSES)),
      rng.choice(list(NORMS)),
      rng.choice([*ACTIVATIONS, GATED]),
      rng.choice(list(OPTIMIZERS)),
      rng.choice([0.0, 0.0, 0.1]),
      rng.choice(['', '', '', *REMAT]),
      rng.choice([HEADS, HEADS, HEADS // 2]),
      rng.choice([1, 1, 1, 4]),
      flag(),
      flag(),
      flag(),
      flag(2 / 3),
      flag(),
      flag(1 / 3),
      flag(1 / 5),
    )
    for _ in range(count)
  ]


class Block(nn.Module):
  case: Case

  @nn.compact
  def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
    case, dtype = self.case, jnp.dtype(self.case.dtype)
    norm = lambda x: NORMS[case.norm](dtype=dtype)(x)
    dense = lambda features, *names, **options: nn.DenseGeneral(
      features, dtype=dtype, kernel_init=_named(*names), **options
    )
    dropped = nn.Dropout(case.dropout, deterministic=not case.dropout)
    y, shape = norm(x), (HEADS, case.width // HEADS)
    q, k, v = (
      dense((heads, shape[1]), 'embed', 'heads', 'kv', use_bias=False)(y)
      for heads in (HEADS, case.kv_heads, case.kv_heads)
    )
    if case.kv_heads < HEADS:
      k, v = (jnp.repeat(one, HEADS // case.kv_heads, axis=2) for one in (k, v))
    scores = jnp.einsum('bqhd,bkhd->bhqk', q, k) / shape[1] ** 0.5
    if case.causal:
      scores = jnp.where(jnp.tril(jnp.ones((case.length,) * 2, bool)), scores, -1e9)
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(dtype)
    y = jnp.einsum('bhqk,bkhd->bqhd', weights, v)
    y = dense(case.width, 'heads', 'kv', 'embed', axis=(-2, -1), use_bias=False)(y)
    x = _constrained(case, x + dropped(y), 'batch', None, None)
    y, wide = norm(x), case.wider * case.width
    h = dense(wide, 'embed', 'mlp')(y)
    if case.activation == GATED:
      h = nn.silu(h) * dense(wide, 'embed', 'mlp')(y)
    else:
      h = ACTIVATIONS[case.activation](h)
    h = _constrained(case, h, 'batch', None, 'mlp')
    y = dense(case.width, 'mlp', 'embed')(h)
    return _constrained(case, x + dropped(y), 'batch', None, None), None


class Model(nn.Module):
  case: Case

  @nn.compact
  def __call__(self, ids: jax.Array) -> jax.Array:
    case, dtype = self.case, jnp.dtype(self.case.dtype)
    embed = nn.Embed(case.vocab, case.width, dtype=dtype, embedding_init=_named('vocab', 'embed'))
    x = embed(ids)
    block = Block
    if case.remat:
      block = nn.remat(Block, prevent_cse=not case.scan, policy=REMAT[case.remat])
    if case.scan:
      x, _ = nn.scan(
        block,
        variable_axes={'params': 0},
        split_rngs={'params': True, 'dropout': True},
        length=case.layers,
        metadata_params={nn.PARTITION_NAME: 'layers'},
      )(case)(x, None)
    else:
      for _ in range(case.layers):
        x, _ = block(case)(x)
    x = NORMS[case.norm](dtype=dtype)(x)
    if case.tied:
      return embed.attend(x)
    return nn.Dense(case.vocab, dtype=dtype, use_bias=False, kernel_init=_named('embed', 'vocab'))(x)


def _named(*names: str | None) -> Any:
  return nn.with_logical_partitioning(nn.initializers.normal(0.02), names)


def _constrained(case: Case, x: jax.Array, *names: str | None) -> jax.Array:
  return nn.with_logical_constraint(x, names) if case.constrained else x


def train_step(case: Case) -> TrainStep:
  """A step of a Flax TrainState."""

  def create() -> train_state.TrainState:
    model, keys = Model(case), {'params': jax.random.key(0), 'dropout': jax.random.key(1)}
    params = model.init(keys, jnp.zeros((1, case.length), jnp.int32))['params']
    return train_state.TrainState.create(
      apply_fn=model.apply, params=params, tx=OPTIMIZERS[case.optimizer]
    )

  def step(state: train_state.TrainState, batch: dict[str, jax.Array]) -> Any:
    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
      if case.cast:
        params = jax.tree.map(lambda x: x.astype(case.dtype), params)
      logits = state.apply_fn({'params': params}, batch['x'], rngs={'dropout': jax.random.key(2)})
      if case.logits_constrained:
        logits = nn.with_logical_constraint(logits, ('batch', None, 'vocab'))
      logits = logits if case.loss_in_16_bits else logits.astype(jnp.float32)
      return LOSSES[case.loss](logits, batch['y']).astype(jnp.float32)

    value, gradients = _accumulated(jax.value_and_grad(loss), state.params, batch, case.microbatches)
    return state.apply_gradients(grads=gradients), value

  ids = jax.ShapeDtypeStruct((BATCH, case.length), jnp.int32)
  return TrainStep(step, create, {'x': ids, 'y': ids})


def _accumulated(gradient: Callable[..., Any], params: Any, batch: Any, count: int) -> Any:
  """The means of values and gradients over some microbatches, each of them of rows of all devices."""
  if count == 1:
    return gradient(params, batch)
  parts = jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1), batch)

  def add(total: Any, part: Any) -> tuple[Any, None]:
    return jax.tree.map(jnp.add, total, gradient(params, part)), None

  zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
  return jax.tree.map(lambda x: x / count, jax.lax.scan(add, zeros, parts)[0])


class CasePair(NamedTuple):
  """A case with its estimated and its compiled outcome."""

  case: Case
  pair: Pair

  @property
  def is_off(self) -> bool:
    pair = self.pair
    return abs(pair.wire) > WIRE or abs(pair.memory) > MEMORY or abs(pair.flops) > FLOPS

  def __str__(self) -> str:
    errors = ', '.join(f'{name} {getattr(self.pair, name):+.1f}' for name in ('wire', 'memory', 'flops'))
    return f'{errors}{" in doubt" if self.pair.doubted else ""}: {self.case.layout}; {self.case}'


def measured(cases: Sequence[Case], log: Callable[[str], None]) -> list[CasePair]:
  target, pairs = parse_target(TARGET), []
  for case in cases:
    train, (mesh, rules) = train_step(case), LAYOUTS[case.layout]
    layout = spmd.Layout(spmd.abstract_mesh(mesh), rules)
    estimated = Estimator(train).estimate(layout, target)
    compiled = compare(train, {case.layout: layout}, TARGET)[case.layout]
    if compiled.error:
      log(f'not compiled, {compiled.error}: {case}')
      continue
    pairs.append(CasePair(case, Pair(case.layout, estimated, compiled)))
    log(str(pairs[-1]))
  return pairs


def figures(pairs: Sequence[CasePair]) -> list[Figure]:
  plain = [one for one in pairs if not one.pair.doubted]
  lowest = -min([0.0, *(one.pair.memory for one in plain)])
  return [
    exact('random transformers', len(pairs), '', at_least(1)),
    exact(
      'random transformers: in doubt', 100 * (1 - len(plain) / max(1, len(pairs))), '%', at_most(20)
    ),
    exact(
      'random transformers: not in doubt, but off', sum(one.is_off for one in plain), '', at_most(0)
    ),
    exact('random transformers: not in doubt, memory, the furthest below', lowest, '%', at_most(MEMORY)),
  ]


def table(pairs: Sequence[CasePair], seed: int) -> Table:
  """The cases, the furthest below first."""
  rows = [
    [
      *(f'{getattr(one.pair, name):+.1f}' for name in ('memory', 'wire', 'flops')),
      'yes' if one.pair.doubted else '',
      one.case.layout,
      str(one.case),
    ]
    for one in sorted(pairs, key=lambda one: one.pair.memory)
  ]
  heads = ['memory off, %', 'wire, %', 'FLOPs, %', 'in doubt', 'layout', 'step']
  return Table(f'Random transformers of seed {seed}', heads, rows)
