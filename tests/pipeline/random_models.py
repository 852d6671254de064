"""Random models, schedules, optimizers and arguments of pipelines: a seed is a case.

    case = random_case(17)
    state = case.layout.pipeline_jit(case.step, **case.options)(case.state, case.batch, case.key)

A seed draws a schedule with up to 12 stages, the number of microbatches, a mesh, the operations of every stage, the
shardings of weights and results, the optimizer, the reductions and the arguments of `pipeline_jit`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import pipeline as pp

ROWS, WIDTH, WORDS = 4, 16, 7


# -- schedules


def random_placement(rng, ranks, stages):
  """A rank for every stage, such that every rank has one."""
  rest = rng.integers(ranks, size=stages - ranks)
  return tuple(int(rank) for rank in rng.permutation([*range(ranks), *rest]))


def by_placement(rng, ranks):
  """A greedy order for stages on random ranks; weight gradients are tasks of their own or not."""
  stages = int(rng.integers(ranks, 13))
  placement = random_placement(rng, ranks, stages)
  live, split = stages + int(rng.integers(4)), bool(rng.integers(2))

  def greedy(rank, microbatches):
    return pp.greedy(placement, microbatches, live, split)[rank]

  return pp.Schedule.of(greedy, ranks, placement=placement)


def automatic(rng, ranks):
  """The fastest order for random costs."""
  chunks = int(rng.integers(1, 12 // ranks + 1))
  costs = {kind: tuple(rng.uniform(1, 3, ranks * chunks)) for kind in ('fwd', 'bwd', 'wgrad')}
  return pp.Automatic(ranks, costs, transfer=0.3, chunks=chunks, split=bool(rng.integers(2)))


def random_schedule(rng):
  """A schedule with up to 12 stages on up to 8 ranks."""
  ranks = int(rng.integers(1, 9))
  two = min(ranks, 6)  # for two stages on each
  chunks = int(rng.integers(1, 12 // ranks + 1))
  fuse = (None, 'last', 'steady')[rng.integers(3)]
  kinds = [
    lambda: pp.GPipe(ranks),
    lambda: pp.OneFOneB(ranks),
    lambda: pp.Eager1F1B(ranks),
    lambda: pp.ZeroBubbleH1(ranks),
    lambda: pp.InterleavedGPipe(ranks, chunks),
    lambda: pp.Interleaved1F1B(ranks, chunks, fuse),
    lambda: pp.KimiK2(ranks, chunks, bool(rng.integers(2))),
    lambda: pp.ZeroBubbleV(two),
    lambda: pp.DualPipeV(two, bool(rng.integers(2))),
    lambda: by_placement(rng, ranks),
    lambda: automatic(rng, ranks),
  ]
  schedule = kinds[rng.integers(len(kinds))]()
  return schedule.with_costs({'fwd': 1, 'bwd': 2, 'wgrad': 1}) if rng.integers(4) == 0 else schedule


# -- models


class Pass:
  """One microbatch on its way through the stages."""

  def __init__(self, params, tokens, index, key, h):
    self.params, self.tokens, self.index, self.key, self.h = params, tokens, index, key, h
    self.before, self.auxiliary, self.statistics = [h], 0.0, []

  def weight(self, stage):
    return self.params[f'w{stage}']


@jax.custom_vjp
def bounded(h):
  """The identity, with bounded gradients."""
  return h


bounded.defvjp(lambda h: (h, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


def normed(one, stage):
  mean = one.h.mean(0, keepdims=True)
  one.statistics.append(mean)
  return (one.h - mean) * one.weight(stage)[:1]


def penalised(one, stage):
  one.auxiliary += 0.1 * jnp.mean(one.h**2)
  return one.h + one.weight(stage)[1:2]


def dropped(one, stage):
  keep = jax.random.bernoulli(jax.random.fold_in(one.key, stage), 0.8, one.h.shape)
  return jnp.where(keep, one.h / 0.8, 0)


def repeated(one, stage):
  weights = jnp.stack([one.weight(stage), one.params['shared']])
  return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), one.h, weights)[0]


def branched(one, stage):
  w = one.weight(stage)
  # a mean that an operation before has made zero would have the sign of rounding errors
  return lax.cond(one.h.mean() > 0.05, lambda h: jnp.sin(h @ w), lambda h: 0.5 * h, one.h)


def switched(one, stage):
  w = one.weight(stage)
  return lax.switch(one.index % 3, [jnp.sin, lambda h: h @ w, lambda h: h + w[2:3]], one.h)


def rematerialised(policy):
  def apply(one, stage):
    return jax.checkpoint(lambda h, w: jnp.sin(jnp.tanh(h @ w) @ w), policy=policy)(
      one.h, one.weight(stage)
    )

  return apply


def attended(one, stage):
  return jax.nn.softmax(one.h @ one.h.T / 4) @ (one.h @ one.weight(stage))


OPERATIONS = [
  lambda one, stage: jnp.tanh(one.h @ one.weight(stage)),
  lambda one, stage: jnp.tanh(one.h @ one.params['shared']),
  lambda one, stage: one.h + 0.5 * one.before[(7 * stage) % len(one.before)],
  lambda one, stage: one.h + one.params['table'][one.tokens],
  lambda one, stage: one.params['scale'] * one.h,
  lambda one, stage: jax.jit(jax.nn.gelu)(one.h @ one.weight(stage)),
  lambda one, stage: bounded(one.h) + jax.nn.silu(one.h),
  lambda one, stage: jax.vmap(lambda row: row @ one.weight(stage))(one.h),
  lambda one, stage: jnp.sort(jnp.cumsum(one.h, 0) / 2, 1),
  lambda one, stage: jnp.concatenate(jnp.split(one.h @ one.weight(stage), 2, 1)[::-1], 1),
  lambda one, stage: lax.fori_loop(0, 3, lambda _, h: jnp.sin(h + one.weight(stage)[3:4]), one.h),
  lambda one, stage: one.h - lax.stop_gradient(one.h).mean(),
  lambda one, stage: jnp.where(one.tokens[:, None] > 3, one.h, one.h @ one.weight(stage)),
  normed,
  penalised,
  dropped,
  repeated,
  branched,
  switched,
  rematerialised(None),
  rematerialised(jax.checkpoint_policies.dots_saveable),
  attended,
]


def random_model(rng, names):
  """A loss, with predictions and statistics beside it, of parameters and a microbatch.

  `names` has those of the dimensions that the result of each stage is constrained by, or None.
  """
  stages = len(names)
  plan = [rng.choice(len(OPERATIONS), rng.integers(1, 4)) for _ in range(stages)]
  last_end, with_tree = bool(rng.integers(2)), bool(rng.integers(2))
  tied = bool(rng.integers(2))

  def loss(params, x, tokens, targets, index, key):
    one = Pass(params, tokens, index, key, x + params['table'][tokens])
    for stage, operations in enumerate(plan):
      for number in operations:
        one.h = OPERATIONS[number](one, stage)
      if names[stage] is not None:
        one.h = spmd.with_logical_constraint(one.h, names[stage])
      if stage < stages - 1 or last_end:
        if with_tree:
          marked = {'h': one.h, 'auxiliary': one.auxiliary, 'index': one.index}
          marked = pp.stage_end(marked, name=f'stage {stage}')
          one.h, one.auxiliary, one.index = marked['h'], marked['auxiliary'], marked['index']
        else:
          one.h = pp.stage_end(one.h)
      one.before.append(one.h)
    logits = one.h @ (params['table'].T if tied else params['head'])
    value = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean() + one.auxiliary
    # logits that are equal up to rounding errors count as equal
    return value, {
      'predictions': jnp.round(logits, 6).argmax(-1),
      'logits': logits,
      'statistics': one.statistics,
    }

  return loss


def random_params(rng, stages):
  shapes = {f'w{stage}': (WIDTH, WIDTH) for stage in range(stages)}
  shapes |= {'shared': (WIDTH, WIDTH), 'table': (WORDS, WIDTH), 'head': (WIDTH, WORDS)}
  weights = {name: rng.normal(size=shape) / np.sqrt(shape[0]) for name, shape in shapes.items()}
  return {**weights, 'scale': np.float64(1.2)}


# -- steps


def without_rounding_errors(grads, _):
  """Gradients that are zero but for rounding errors, as zeros: LAMB scales any other to the norm of its weight."""
  return jax.tree.map(lambda g: jnp.where(jnp.abs(g) < 1e-12, 0, g), grads)


OPTIMIZERS = [
  lambda: optax.sgd(0.1),
  lambda: optax.sgd(optax.exponential_decay(0.1, 1, 0.5), momentum=0.9),
  lambda: optax.adamw(1e-2, eps=1e-3),
  lambda: optax.chain(optax.clip_by_global_norm(0.01), optax.adam(1e-2, eps=1e-3)),
  lambda: optax.MultiSteps(optax.adam(1e-2, eps=1e-3), every_k_schedule=2),
  lambda: optax.apply_if_finite(optax.adam(1e-2, eps=1e-3), 2),
  lambda: optax.chain(optax.stateless(without_rounding_errors), optax.lamb(1e-2, eps=1e-3)),
  lambda: optax.flatten(optax.adam(1e-2, eps=1e-3)),  # one vector of all weights
  lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
  lambda: optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-2, 0, 4), eps=1e-3),
]


def random_step(rng, schedule, microbatches, split, second, names):
  """A step of `(params, optimizer state, average of the parameters)` on a batch, and its optimizer.

  `second` is a second call of the model on every microbatch: by the 'same' parameters, by their 'average', or None.
  """
  loss, tx = random_model(rng, names), OPTIMIZERS[rng.integers(len(OPTIMIZERS))]()
  total = (pp.Mean, pp.Add)[rng.integers(2)]
  rows = (pp.Stack(), pp.Concat(), pp.Stack(axis=1))[rng.integers(3)]
  auxiliary = {'predictions': rows, 'logits': (pp.Max, rows)[rng.integers(2)]}
  auxiliary |= {'statistics': pp.Mean, 'weight': pp.Stack}

  def step(state, batch, key):
    params, memory, average = state

    def of_microbatch(one):
      (x, tokens, targets), index = one
      index = index if split is None else index[0]
      keyed = jax.random.fold_in(key, index)
      weight = 0.5 + jnp.mean(tokens > 2)  # of the batch alone: any task can compute it

      def weighted(params):
        value, beside = loss(params, x, tokens, targets, index, keyed)
        if second:
          others = params if second == 'same' else average
          reverse, other = loss(others, x[::-1], tokens, targets, index, jax.random.fold_in(keyed, 1))
          value += 0.5 * reverse + jnp.mean((beside['logits'] - other['logits']) ** 2)
        return value / weight, beside | {'weight': weight}

      result, grads = jax.value_and_grad(weighted, has_aux=True)(params)
      return result, jax.tree.map(lambda g: weight * g, grads)

    count = split or microbatches
    numbers = jnp.arange(count) if split is None else jnp.tile(jnp.arange(count), len(batch[0]) // count)
    (value, beside), grads = pp.accumulate(
      of_microbatch,
      (batch, numbers),
      schedule,
      ((total, auxiliary), total),
      microbatches=split,
    )
    updates, memory = tx.update(grads, memory, params)
    params = optax.apply_updates(params, updates)
    average = optax.incremental_update(params, average, 0.1)
    return (params, memory, average), (value, beside, optax.tree.norm(grads))

  return step, tx


def random_batch(rng, microbatches, split):
  shape = (microbatches * ROWS,) if split else (microbatches, ROWS)
  tokens, targets = rng.integers(WORDS, size=(2, *shape))
  return rng.normal(size=(*shape, WIDTH)), tokens, targets


# -- shardings


def random_names(rng, stages):
  names = [None, ('batch', 'columns'), (None, 'columns'), ('batch', None), (None, None)]
  return [names[number] for number in rng.integers(len(names), size=stages)]


def random_rules(rng, stages):
  specs = [P(), P('model'), P(None, 'model'), P('data'), P('data', 'model'), P(None, 'data')]
  weights = ((f'w{stage}$', specs[rng.integers(len(specs))]) for stage in range(stages))
  return ('batch', 'data'), ('columns', 'model'), *weights


# -- cases


class Case(NamedTuple):
  """A step, its first arguments, and how a pipeline runs it."""

  step: Callable[..., Any]
  state: Any
  batch: Any
  key: jax.Array
  rows: tuple[str | None, ...]  # names of the dimensions of the batch
  layout: spmd.Layout
  options: dict[str, Any]


def random_case(seed, devices=None):
  """The case of a seed, on the first of `devices`; under `jax.enable_x64`."""
  rng = np.random.default_rng(seed)
  schedule = random_schedule(rng)
  supported = [number for number in range(1, 13) if schedule.supports(number)]
  microbatches = int(rng.choice(supported))
  split = microbatches if rng.integers(2) else None
  second = np.random.default_rng((seed, 1)).choice([None, None, 'same', 'average'])
  sharded = np.random.default_rng((seed, 2))
  names = random_names(sharded, schedule.stages)
  step, tx = random_step(rng, schedule, microbatches, split, second, names)
  inside = 2 if schedule.ranks <= 4 and rng.integers(2) else 1
  devices = jax.devices() if devices is None else devices
  model = 2 if 2 * schedule.ranks * inside <= len(devices) and sharded.integers(3) else 1
  sizes = {'stage': schedule.ranks, 'data': inside, 'model': model}
  mesh = spmd.make_mesh(sizes, devices=devices[: schedule.ranks * inside * model])
  options = {'threads': bool(rng.integers(2))} | ({'donate_argnums': 0} if rng.integers(2) else {})
  options |= {'host_after': int(rng.integers(1, 4))} if rng.integers(2) else {}
  print(
    f'seed {seed}: {schedule}, {microbatches} microbatches, {dict(mesh.shape)}, {options}, second={second}'
  )
  params = jax.tree.map(jnp.asarray, random_params(rng, schedule.stages))
  batch, key = random_batch(rng, microbatches, split), jax.random.key(seed)
  rows = ('batch',) if split else (None, 'batch')
  state = params, tx.init(params), params
  return Case(
    step, state, batch, key, rows, spmd.Layout(mesh, random_rules(sharded, schedule.stages)), options
  )
