"""Pipelines of equal stages within one program, beside one program per stage: time, memory and bubble.

    stacked          `pipeline.stacked` under `layout.jit`: GPipe's order
    shard_map        GPipe by hand: a loop of ticks with a `ppermute`, under `jax.shard_map`
    circular         by hand, with several layers per stage in turn, as MaxText describes it: the layers are
                     assigned to the stages round-robin, and a microbatch passes the ring once per layer of a stage
    GPipe, 1F1B, ... one program per stage, by `layout.pipeline_jit`

All train the same layers on the same batch, and have to return the same loss. A layer is rematerialized in all
of them. Memory is that of the device that needs most, arguments included. The bubble of a loop of ticks is the
fraction of its ticks in which a stage has no microbatch; there, it computes on other values. Emulated devices
share their cores, so these ticks cost time here as they do on real devices, and idle ranks cost none.
"""

import os

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from harness import WALL, Figure, exact, measure, ratio
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from reporting import report

import flax_spmd as spmd
from flax_spmd import pipeline

RATE = 0.1  # of learning


class Size(NamedTuple):
  """Sizes of the model and its batch."""

  stages: int = 4
  chunks: int = 2
  microbatches: int = 8
  examples: int = 16
  width: int = 256


FULL = Size()


class Arm(NamedTuple):
  """A way to run the step.

  Attributes:
    step: function from parameters and batch to both new parameters and loss.
    params: its parameters, placed.
    memory: bytes of a device.
    bubble: fraction of the time in which a stage has no microbatch.
  """

  step: Callable[..., Any]
  params: Any
  memory: int
  bubble: float


def figures(size: Size = FULL, rounds: int = 31) -> list[Figure]:
  layers, batch = layers_of(size), batch_of(size)
  alone = jax.jit(functools.partial(sequential_step, size))
  arms = dict(arms_of(size, layers, batch))
  runs = {name: functools.partial(_run, arm.step, arm.params, batch) for name, arm in arms.items()}
  expected, losses = (
    float(alone(layers, batch)[1]),
    {name: float(run()[1]) for name, run in runs.items()},
  )
  if not np.allclose(list(losses.values()), expected, rtol=1e-4):
    raise RuntimeError(f'losses differ: {losses}, one device {expected}')
  base = functools.partial(_run, alone, layers, batch)
  times = measure({**runs, 'one device': base}, rounds=rounds, warm_up=2, clock=WALL)
  return [
    figure
    for name, arm in arms.items()
    for figure in (
      ratio(f'equal stages, {name}: step over one device', times, name, 'one device'),
      exact(f'equal stages, {name}: memory of a device', arm.memory / 1024, 'KiB'),
      exact(f'equal stages, {name}: bubble', 100 * arm.bubble, '%'),
    )
  ]


def _run(step: Callable[..., Any], params: Any, batch: jax.Array) -> Any:
  return jax.block_until_ready(step(params, batch))


def arms_of(size: Size, layers: Any, batch: jax.Array) -> Iterator[tuple[str, Arm]]:
  mesh = jax.sharding.Mesh(np.array(jax.devices()[: size.stages]), ('stage',))
  # Stage s has the layers from s v on, or, in a circle, every p-th layer from s on.
  in_order = jax.tree.map(lambda w: w.reshape(size.stages, size.chunks, *w.shape[1:]), layers)
  in_turn = jax.tree.map(
    lambda w: w.reshape(size.chunks, size.stages, *w.shape[1:]).swapaxes(0, 1), layers
  )
  layout = spmd.Layout(mesh, (('stage', 'stage'),))
  yield 'stacked', _one_program(size, layout, stacked_loss(size), in_order, batch)
  yield 'shard_map', _one_program(size, layout, shard_map_loss(size, mesh), in_order, batch)
  yield 'circular', _one_program(size, layout, circular_loss(size, mesh), in_turn, batch)
  for schedule in (
    pipeline.GPipe(size.stages),
    pipeline.OneFOneB(size.stages),
    pipeline.Interleaved1F1B(size.stages, size.chunks),
  ):
    yield str(schedule), _program_per_stage(size, spmd.Layout(mesh, ()), schedule, layers, batch)


# -- the layers


def layers_of(size: Size) -> dict[str, jax.Array]:
  count, keys = size.stages * size.chunks, jax.random.split(jax.random.key(0))
  shapes = {'up': (count, size.width, 4 * size.width), 'down': (count, 4 * size.width, size.width)}
  return {
    name: jax.random.normal(key, shape) / shape[1] ** 0.5
    for key, (name, shape) in zip(keys, shapes.items())
  }


def batch_of(size: Size) -> jax.Array:
  """Microbatches in the first dimension."""
  return jax.random.normal(jax.random.key(1), (size.microbatches, size.examples, size.width))


@jax.checkpoint
def layer(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
  scale = lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
  return x + jnp.tanh((x * scale) @ weights['up']) @ weights['down']


def in_sequence(layers: dict[str, jax.Array], x: jax.Array) -> jax.Array:
  return lax.scan(lambda x, weights: (layer(weights, x), None), x, layers)[0]


def error(results: jax.Array, batch: jax.Array) -> jax.Array:
  return jnp.mean((results - jnp.sin(batch)) ** 2)


def updated(params: Any, grads: Any) -> Any:
  return jax.tree.map(lambda w, g: w - RATE * g, params, grads)


def sequential_step(size: Size, layers: Any, batch: jax.Array) -> Any:
  del size
  one = lambda x: jax.value_and_grad(lambda layers: error(in_sequence(layers, x), x))(layers)
  loss, grads = pipeline.accumulate(one, batch, op=pipeline.Mean)
  return updated(layers, grads), loss


# -- one program


def _one_program(
  size: Size, layout: spmd.Layout, loss: Callable[..., Any], params: Any, batch: jax.Array
) -> Arm:
  def step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    return updated(params, grads), value

  params = jax.device_put(params, NamedSharding(layout.mesh, PartitionSpec('stage')))
  compiled = layout.jit(step).lower(params, batch).compile()
  memory = compiled.memory_analysis()
  ticks = max(_scan_lengths(jax.make_jaxpr(step)(params, batch).jaxpr))
  chunks = round(ticks / size.microbatches)  # that a loop of ticks takes apart
  return Arm(
    compiled,
    params,
    memory.argument_size_in_bytes + memory.temp_size_in_bytes,
    1 - chunks * size.microbatches / ticks,
  )


def _scan_lengths(jaxpr: Any) -> Iterator[int]:
  """The lengths of the loops in a program, at any depth."""
  for one in jaxpr.eqns:
    if one.primitive.name == 'scan':
      yield one.params['length']
    for param in jax.tree.leaves(list(one.params.values()), is_leaf=lambda each: hasattr(each, 'eqns')):
      inner = getattr(param, 'jaxpr', param)
      yield from _scan_lengths(inner) if hasattr(inner, 'eqns') else ()


class Stage(nn.Module):
  """The layers of a stage."""

  size: Size

  @nn.compact
  def __call__(self, x):
    width, chunks = self.size.width, self.size.chunks
    zeros = nn.initializers.zeros_init()
    up = self.param('up', zeros, (chunks, width, 4 * width))
    down = self.param('down', zeros, (chunks, 4 * width, width))
    return in_sequence({'up': up, 'down': down}, x)


class StackedStages(nn.Module):
  """`pipeline.stacked` of equal stages."""

  size: Size

  @nn.compact
  def __call__(self, x):
    return pipeline.stacked(Stage, self.size.stages, self.size.microbatches, names=())(
      self.size, name='stages'
    )(x)


def stacked_loss(size: Size) -> Callable[..., Any]:
  def loss(params, batch):
    examples = batch.swapaxes(0, 1).reshape(-1, size.width)  # of example i, microbatch i % m
    results = StackedStages(size).apply({'params': {'stages': params}}, examples)
    return error(results, examples)

  return loss


def shard_map_loss(size: Size, mesh: jax.sharding.Mesh) -> Callable[..., Any]:
  last, forwards = size.stages - 1, [(stage, stage + 1) for stage in range(size.stages - 1)]

  def of_a_stage(params, batch):
    stage, [own] = lax.axis_index('stage'), [jax.tree.map(lambda w: w[0], params)]

    def tick(arrived, new):
      result = in_sequence(own, jnp.where(stage == 0, new, arrived))
      return lax.ppermute(result, 'stage', forwards), result

    padding = jnp.broadcast_to(batch[-1:], (last, *batch.shape[1:]))
    start = jnp.where(stage == 0, batch[0], 0)
    _, results = lax.scan(tick, start, jnp.concatenate([batch, padding]))
    return lax.psum(jnp.where(stage == last, error(results[last:], batch), 0), 'stage')

  specs = PartitionSpec('stage'), PartitionSpec()
  return jax.shard_map(of_a_stage, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())


def circular_loss(size: Size, mesh: jax.sharding.Mesh) -> Callable[..., Any]:
  """At tick t, stage s works on the item t - s: its layer (t - s) // m, on the microbatch (t - s) % m.

  The results of the last stage go to the first one, which stores them until their next turn.
  """
  stages, count = jnp.arange(size.stages), size.microbatches
  by_stage = NamedSharding(mesh, PartitionSpec('stage'))

  @jax.checkpoint  # around the choice of the weights, which would be kept for every tick
  def of_turn(own, turn, x):
    return layer(jax.tree.map(lambda w: w[turn], own), x)

  def loss(params, batch):
    def tick(carry, t):
      arrived, waiting = carry
      turns = jnp.clip((t - stages) // count, 0, size.chunks - 1)
      first = jnp.where(t < count, batch[t % count], waiting[:, t % count])
      given = jnp.where((stages == 0)[:, None, None], first, arrived)
      results = jax.vmap(of_turn)(params, turns, lax.with_sharding_constraint(given, by_stage))
      arrived = jnp.roll(results, 1, axis=0)
      done = (t - (size.stages - 1)) % count
      waiting = lax.dynamic_update_index_in_dim(waiting, arrived, done, 1)
      return (arrived, lax.with_sharding_constraint(waiting, by_stage)), None

    start = jnp.broadcast_to(batch[0], (size.stages, *batch.shape[1:]))
    empty = jnp.zeros((size.stages, *batch.shape), batch.dtype)
    ticks = jnp.arange(size.chunks * count + size.stages - 1)
    (_, waiting), _ = lax.scan(tick, (start, empty), ticks)
    return error(waiting[0], batch)

  return loss


# -- one program per stage


def _program_per_stage(
  size: Size, layout: spmd.Layout, schedule: pipeline.Schedule, layers: Any, batch: jax.Array
) -> Arm:
  each = size.stages * size.chunks // schedule.stages
  parts = [
    jax.tree.map(lambda w: w[stage * each : (stage + 1) * each], layers)  # noqa: B023
    for stage in range(schedule.stages)
  ]

  def loss(parts, x):
    h = x
    for part in parts:
      h = pipeline.stage_end(in_sequence(part, h))
    return error(h, x)

  def step(parts, batch):
    one = lambda x: jax.value_and_grad(loss)(parts, x)
    value, grads = pipeline.accumulate(one, batch, schedule, pipeline.Mean)
    return updated(parts, grads), value

  compiled = layout.pipeline_jit(step).compile(parts, batch)
  placed = jax.device_put(parts, compiled.input_shardings[0][0])
  return Arm(compiled, placed, max(compiled.memory), schedule.simulate(size.microbatches).bubble)


if __name__ == '__main__':
  parser = argparse.ArgumentParser()
  parser.add_argument('--small', action='store_true', help='a small model and few rounds, for a trial')
  if parser.parse_known_args()[0].small:
    for one in figures(Size(width=32, examples=4), rounds=3):
      print(f'{one.name:70}{one.value:10.2f} {one.unit}')
  else:
    report('one_program', figures)
