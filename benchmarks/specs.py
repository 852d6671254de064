"""Cost of deriving shardings: a boxed TrainState of 10,000 leaves under a table of 70 rules.

It is paid once per program, but on every host and before anything else. Two ways lead from boxes to
NamedShardings: a layout derives them in one step and checks names against shapes; Flax's pair of functions
(names, then shardings) exists in flax_spmd too. Cold means a new layout, or a table that is a plain tuple;
warm means objects that have already planned this tree.

The slow path is a tree in which parameters share names but not shapes. Optimizer state that is not shaped
like its parameter is recognised by such differences, so every leaf's path must be examined.

The times are absolute, and depend on other load on the machine. The lower bound and the ratios to Flax's
pair, measured in the same rounds, show how much.
"""

import os

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import states
from harness import Figure, at_most, measure, per_item, ratio
from reporting import report

import flax_spmd as spmd

LAYERS = 333
LEAVES = LAYERS * states.LEAVES_PER_LAYER + 2
RULES = (
  *((f'name_{i}', ('data', 'model')[i % 2]) for i in range(64)),
  ('batch', 'data'),
  ('embed', 'data'),
  ('heads', 'model'),
  ('mlp', 'model'),
  ('kv', None),
  ('vocab', 'model'),
)
abstract = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)


def figures() -> list[Figure]:
  mesh = spmd.make_mesh({'data': 2, 'model': 4})
  ours = states.train_state(LAYERS, spmd.LogicallyPartitioned, abstract)
  flaxs = states.train_state(LAYERS, nn.LogicallyPartitioned, abstract)
  varied = states.train_state(LAYERS, spmd.LogicallyPartitioned, _varied())
  rules, warm = spmd.Rules(*RULES), spmd.Layout(mesh, RULES)
  numbers = itertools.count()

  def fresh() -> spmd.Layout:
    """A layout that differs from all others, because equal layouts share their plans."""
    return spmd.Layout(mesh, (*RULES, (f'unused_{next(numbers)}', None)))

  arms = {
    'layout, cold': lambda: fresh().sharding(ours),
    'layout, warm': lambda: warm.sharding(ours),
    'pair, cold': lambda: _pair(spmd, ours, mesh, RULES),
    'pair, warm': lambda: _pair(spmd, ours, mesh, rules),
    'flax': lambda: _pair(nn, flaxs, mesh, RULES),
    "layout, Flax's boxes": lambda: fresh().sharding(flaxs),
    'layout, slow path': lambda: fresh().sharding(varied),
    'pair, slow path': lambda: _pair(spmd, varied, mesh, RULES),
    'floor': lambda: jax.tree.map(lambda leaf: None, ours),
  }
  rounds = measure(arms, rounds=41)
  figure = functools.partial(per_item, rounds=rounds, items=LEAVES)
  return [
    figure('floor: jax.tree.map of a constant over the boxes', arm='floor'),
    figure('layout.sharding, cold', arm='layout, cold', target=at_most(2.5)),
    figure('layout.sharding, warm', arm='layout, warm', target=at_most(2.5)),
    figure('the pair of flax_spmd, cold', arm='pair, cold', target=at_most(2.5)),
    figure('the pair of flax_spmd, warm', arm='pair, warm', target=at_most(2.5)),
    figure('the pair of Flax', arm='flax'),
    figure("layout.sharding of Flax's boxes, cold", arm="layout, Flax's boxes"),
    figure('layout.sharding, same names on many shapes', arm='layout, slow path'),
    figure('the pair of flax_spmd, same names on many shapes', arm='pair, slow path'),
    ratio('layout.sharding, cold, over the pair of Flax', rounds, 'layout, cold', 'flax'),
    ratio('layout.sharding, warm, over the pair of Flax', rounds, 'layout, warm', 'flax'),
    ratio('the pair of flax_spmd over the pair of Flax', rounds, 'pair, cold', 'flax'),
  ]


def _pair(module, tree, mesh, rules):
  return module.logical_to_mesh_sharding(module.get_partition_spec(tree), mesh, rules)


def _varied():
  """A constructor of arrays; every third array is twice as large in each dimension."""
  shapes = []

  def make(shape):
    shapes.append(shape)
    return abstract(tuple(2 * size if len(shapes) % 3 == 0 else size for size in shape))

  return make


if __name__ == '__main__':
  report('specs', figures)
