"""Cost of boxes: a TrainState of 990 boxes against the same state without boxes.

Each training step flattens and rebuilds every box of its state. The benchmark times that pair alone, and a
jitted call that takes and returns the state. The program itself does almost nothing and runs on one
device, so that the cost of the boxes shows.

A namedtuple of one field is the lower bound: JAX flattens it without running Python code.

A state from `layout.init(..., boxed=False)` has no boxes and should cost as much as a bare state. It is
sharded over the layout's 8 devices.
"""

import os

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import states
from harness import Figure, at_most, equal, measure, ratio
from reporting import report

import flax_spmd as spmd

LAYERS = 33
ROUNDS = 201


class OneField(NamedTuple):
  value: Any


def figures() -> list[Figure]:
  return [*tree_figures(), *call_figures(), *unboxed_figures()]


def tree_figures() -> list[Figure]:
  arms = {name: _rebuild(state) for name, state in _states().items()}
  rounds = measure(arms, rounds=ROUNDS, calls=3)
  return [
    ratio('flatten + unflatten, boxes of flax_spmd', rounds, 'spmd', 'unboxed', at_most(2.5)),
    ratio('flatten + unflatten, namedtuples', rounds, 'namedtuple', 'unboxed'),
    ratio('flatten + unflatten, boxes of Flax', rounds, 'flax', 'unboxed'),
  ]


def call_figures() -> list[Figure]:
  arms = {name: _call(state) for name, state in _states().items()}
  rounds = measure(arms, rounds=ROUNDS, calls=3)
  return [
    ratio('jitted call, boxes of flax_spmd', rounds, 'spmd', 'unboxed', at_most(1.2)),
    ratio('jitted call, namedtuples', rounds, 'namedtuple', 'unboxed'),
    ratio('jitted call, boxes of Flax', rounds, 'flax', 'unboxed'),
  ]


def unboxed_figures() -> list[Figure]:
  """The same call on a state from `layout.init(boxed=False)`, and on one that is sharded by hand."""
  layout = spmd.Layout({'data': 2, 'model': 4}, (('mlp', 'model'), ('embed', 'data')))
  state = layout.init(lambda: states.train_state(LAYERS, spmd.LogicallyPartitioned), boxed=False)
  shardings = jax.tree.map(lambda array: array.sharding, state)
  placed = jax.device_put(states.train_state(LAYERS, states.unboxed), shardings)
  rounds = measure({'layout': _call(state), 'hand': _call(placed)}, rounds=ROUNDS, calls=3)
  return [ratio('jitted call, layout.init(boxed=False)', rounds, 'layout', 'hand', equal(1.0))]


def _states():
  boxes = {
    'unboxed': states.unboxed,
    'namedtuple': lambda value, names: OneField(value),
    'spmd': spmd.LogicallyPartitioned,
    'flax': nn.LogicallyPartitioned,
  }
  device = jax.devices()[0]
  return {name: jax.device_put(states.train_state(LAYERS, box), device) for name, box in boxes.items()}


def _rebuild(state):
  def rebuild():
    leaves, treedef = jax.tree.flatten(state)
    return treedef.unflatten(leaves)

  return rebuild


def _call(state):
  step = jax.jit(lambda state: state.replace(step=state.step + 1))
  return lambda: step(state)


if __name__ == '__main__':
  report('boxes', figures)
