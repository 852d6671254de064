"""What a box costs: a TrainState of 990 boxes against the same state without boxes.

Each step of training flattens every box of its state and builds it again. Measured are that pair
alone, and a jitted call that takes and returns the state, which is where it is paid. The program itself
does next to nothing and lies on one device, so that nothing else hides the boxes.

A namedtuple of one field is the floor: JAX knows that kind of node, so no Python code runs for it.

A state from `layout.init(..., boxed=False)` has no boxes, and has to cost what a bare state costs;
that one lies on the layout's 8 devices.
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
  """The same call on a state that the layout made without boxes, and on one placed by hand."""
  layout = spmd.Layout({'data': 2, 'model': 4}, (('mlp', 'model'), ('embed', 'data')))
  made = layout.init(lambda: states.train_state(LAYERS, spmd.LogicallyPartitioned), boxed=False)
  where = jax.tree.map(lambda array: array.sharding, made)
  placed = jax.device_put(states.train_state(LAYERS, states.unboxed), where)
  rounds = measure({'layout': _call(made), 'hand': _call(placed)}, rounds=ROUNDS, calls=3)
  return [ratio('jitted call, layout.init(boxed=False)', rounds, 'layout', 'hand', equal(1.0))]


def _states():
  boxes = {
    'unboxed': states.unboxed,
    'namedtuple': lambda value, names: OneField(value),
    'spmd': spmd.LogicallyPartitioned,
    'flax': nn.LogicallyPartitioned,
  }
  one = jax.devices()[0]
  return {name: jax.device_put(states.train_state(LAYERS, box), one) for name, box in boxes.items()}


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
