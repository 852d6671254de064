"""Cost of `shard` and `gather`: 200 small arrays, against one call of JAX for all of them.

`layout.shard` ends in one `jax.device_put`, and `gather` in one `jax.device_get`; the benchmark measures
the work around them. The arrays are small, so that it shows. Both sides wait until the arrays are ready.

An array caches its numpy copy, so each round gathers new arrays, which are placed before the clock starts.

Scalax makes a function per array and direction, and compiles each at its first use. That is slow, so first
uses are measured only a few times; the compiled functions take part in all rounds.
"""

import os

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'

import itertools
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import states
from harness import WALL, Figure, at_most, measure, ratio, summary
from reporting import report

import flax_spmd as spmd
from flax_spmd import gather

try:
  from scalax import sharding as scalax
except ImportError:
  scalax = None
  print('Scalax is not installed, so its arms are left out. Fix: pip install scalax', file=sys.stderr)

LAYERS = 20  # 200 parameters
SMALL = 64  # elements of arrays that are not sharded
ROUNDS, WARM_UP = 101, 3
FSDP = spmd.fsdp('model', min_size=SMALL)
RULES = (('heads', 'model'), ('mlp', 'model'), ('embed', 'data'))
host = lambda shape: np.ones(shape, np.float32)


def figures() -> list[Figure]:
  return [*shard_figures(), *gather_figures(), *first_use_figures()]


def shard_figures() -> list[Figure]:
  layout, params = _layout(), _params()
  boxed = _params(spmd.LogicallyPartitioned)
  names = jax.tree.map(lambda box: box.names, boxed, is_leaf=spmd.is_axis_metadata)
  shardings = layout.sharding(params)
  arms = {
    'by rules': lambda: layout.shard(params),
    'by a table': lambda: layout.shard(params, spmd.fsdp('data', min_size=SMALL)),
    'by names': lambda: layout.shard(params, names),
    'device_put': lambda: jax.device_put(params, shardings),
  }
  if scalax:
    shard, _ = _scalax_functions()
    arms['Scalax'] = lambda: scalax.MeshShardingHelper.apply_shard_and_gather_fns(shard, params)
  waiting = {name: lambda call=call: jax.block_until_ready(call()) for name, call in arms.items()}
  rounds = measure(waiting, rounds=ROUNDS, warm_up=WARM_UP, clock=WALL)
  result = [
    summary('one jax.device_put', [1e3 * times['device_put'] for times in rounds], 'ms'),
    ratio("shard by the layout's rules", rounds, 'by rules', 'device_put', at_most(1.5)),
    ratio('shard by another table', rounds, 'by a table', 'device_put', at_most(1.5)),
    ratio('shard by names', rounds, 'by names', 'device_put', at_most(1.5)),
  ]
  return [*result, *_scalaxs('shard by the functions of Scalax, compiled', rounds, 'device_put')]


def gather_figures() -> list[Figure]:
  arms: dict[str, Callable[[Any], Any]] = {'gather': gather, 'device_get': jax.device_get}
  if scalax:
    _, gathering = _scalax_functions()
    helper = scalax.MeshShardingHelper
    arms['Scalax'] = lambda placed: helper.apply_shard_and_gather_fns(gathering, placed)
  calls = {name: _on_new_arrays(call) for name, call in arms.items()}
  rounds = measure(calls, rounds=ROUNDS, warm_up=WARM_UP, clock=WALL)
  result = [
    summary('one jax.device_get', [1e3 * times['device_get'] for times in rounds], 'ms'),
    ratio('gather', rounds, 'gather', 'device_get', at_most(1.5)),
  ]
  return [*result, *_scalaxs('gather by the functions of Scalax, compiled', rounds, 'device_get')]


def first_use_figures() -> list[Figure]:
  """Shards and gathers with new functions and layouts each time."""
  params, numbers = _params(), itertools.count()

  def ours():
    layout = spmd.Layout(_layout().mesh, (FSDP, (f'unused_{next(numbers)}', None)))
    gather(layout.shard(params))

  def theirs():
    shard, gathering = _scalax_functions()
    apply = scalax.MeshShardingHelper.apply_shard_and_gather_fns
    apply(gathering, apply(shard, params))

  arms = {'ours': ours, 'Scalax': theirs} if scalax else {'ours': ours}
  rounds = measure(arms, rounds=3, warm_up=0, clock=WALL)
  return [
    summary(f'shard and gather for the first time, {name}', [times[name] for times in rounds], 's')
    for name in arms
  ]


def _layout() -> spmd.Layout:
  return spmd.Layout({'data': 2, 'model': 4}, (*RULES, FSDP))


def _params(box: states.Box = states.unboxed) -> Any:
  """200 host arrays, boxed or not."""
  return states.train_state(LAYERS, box, host).params


def _on_new_arrays(call: Callable[[Any], Any]) -> Callable[[], Any]:
  """The call on a new tree of arrays each time."""
  layout, params = _layout(), _params()
  placed = [jax.block_until_ready(layout.shard(params)) for _ in range(ROUNDS + WARM_UP)]
  return lambda: call(placed.pop())


def _scalax_functions():
  """Two trees of functions: one shards each array, the other gathers it."""
  mesh = _layout().mesh
  helper = scalax.MeshShardingHelper(list(mesh.shape.values()), list(mesh.shape))
  rule = scalax.FSDPShardingRule('model', mesh.shape['model'], SMALL)
  return helper.make_shard_and_gather_fns(_params(), rule)


def _scalaxs(name: str, rounds, base: str) -> list[Figure]:
  return [ratio(name, rounds, 'Scalax', base)] if scalax else []


if __name__ == '__main__':
  report('placement', figures)
