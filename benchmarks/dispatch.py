"""Overhead of `layout.jit`: calls of a function through it, against a bare `jax.jit`.

As long as the results of all signatures have the same structure and shardings, JAX's own dispatch does the
work, and a call costs little more than the `jax.set_mesh` around it. With several of them that repeat, the
structure of the arguments selects the program, which costs as much as to flatten them.

The tiny function has one small argument, committed to a mesh of one device. The state has about 1,000
leaves without boxes, sharded over 8 devices (`boxes.py` measures the cost of boxes).

The NNX model has as many layers; its functions are compared with `nnx.jit`, which traverses modules in each call too. One
reads the model and changes nothing, the other changes every parameter.
"""

import os

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'

import jax
import jax.numpy as jnp
import states
from flax import nnx
from harness import WALL, Figure, added, at_most, measure, ratio
from reporting import report

import flax_spmd as spmd

LAYERS = 33
RULES = (('mlp', 'model'), ('embed', 'data'))


def figures() -> list[Figure]:
  return [*tiny_figures(), *state_figures(), *several_figures(), *nnx_figures()]


def tiny_figures() -> list[Figure]:
  layout = spmd.Layout({'data': 1, 'model': 1}, RULES)
  x = layout.shard(jnp.ones(8), ('batch',))
  ours, bare = layout.jit(_add_one), jax.jit(_add_one)
  arms = {'ours': lambda: ours(x), 'bare': lambda: bare(x), 'in mesh': _in_mesh(layout.mesh, bare, x)}
  rounds = measure(arms, rounds=301, calls=500, warm_up=100, clock=WALL)
  return [
    added('tiny function, added per call', rounds, 'ours', 'bare', at_most(3)),
    added('tiny function, what jax.set_mesh adds per call', rounds, 'in mesh', 'bare'),
  ]


def state_figures() -> list[Figure]:
  layout, (state,) = _states(LAYERS)
  arms = {
    'ours, state': _each(layout.jit(_next), [state]),
    'bare, state': _each(jax.jit(_next), [state]),
    'ours, count': _each(layout.jit(_count), [state]),
    'bare, count': _each(jax.jit(_count), [state]),
  }
  rounds = measure(arms, rounds=151, calls=3)
  return [
    ratio('1 signature, state returned', rounds, 'ours, state', 'bare, state'),
    ratio('1 signature, a scalar returned', rounds, 'ours, count', 'bare, count'),
    added('1 signature, a scalar returned, added per call', rounds, 'ours, count', 'bare, count'),
  ]


def several_figures() -> list[Figure]:
  """Three states of different depths alternate, with three different result structures."""
  layout, alternating = _states(LAYERS - 1, LAYERS, LAYERS + 1)
  arms = {
    'ours, state': _each(layout.jit(_next), alternating),
    'bare, state': _each(jax.jit(_next), alternating),
    'ours, count': _each(layout.jit(_count), alternating),
    'bare, count': _each(jax.jit(_count), alternating),
  }
  rounds = measure(arms, rounds=151)
  return [
    ratio('3 signatures, state returned', rounds, 'ours, state', 'bare, state', at_most(2.2)),
    ratio('3 signatures, a scalar returned', rounds, 'ours, count', 'bare, count', at_most(2.2)),
  ]


def nnx_figures() -> list[Figure]:
  layout = spmd.Layout({'data': 1, 'model': 1}, RULES)
  create = lambda: nnx.List([_NnxBlock() for _ in range(LAYERS)])
  arms = {}
  for name, jit in (('ours', layout.jit), ('nnx.jit', nnx.jit)):
    model = layout.init(create)
    arms[f'{name}, read'] = _each(jit(_nnx_count), [model])
    arms[f'{name}, changed'] = _each(jit(_nnx_add), [model])
  rounds = measure(arms, rounds=151, calls=3)
  return [
    ratio('NNX module read, over nnx.jit', rounds, 'ours, read', 'nnx.jit, read', at_most(1)),
    ratio('NNX module changed, over nnx.jit', rounds, 'ours, changed', 'nnx.jit, changed', at_most(1)),
  ]


class _NnxBlock(nnx.Module):
  """A layer of six parameters."""

  def __init__(self):
    self.kernels = nnx.List(
      [nnx.Param(jnp.ones((8, 8)), out_sharding=('embed', 'mlp')) for _ in range(6)]
    )


def _nnx_count(model):
  return model[0].kernels[0][0, 0] + 1


def _nnx_add(model):
  for block in model:
    for kernel in block.kernels:
      kernel[...] += 1


def _in_mesh(mesh, call, argument):
  def run():
    with jax.set_mesh(mesh):
      call(argument)

  return run


def _add_one(x):
  return x + 1


def _next(state):
  return state.replace(step=state.step + 1)


def _count(state):
  """Reads its argument and does little else; the structure of its result depends on the depth."""
  return {f'step of {len(state.params)} layers': state.step + 1}


def _states(*depths: int):
  """A layout, and an unboxed state from it for each depth."""
  layout = spmd.Layout({'data': 2, 'model': 4}, RULES)

  def state(layers):
    create = lambda: states.train_state(layers, spmd.LogicallyPartitioned)
    return layout.init(create, boxed=False)

  return layout, [state(layers) for layers in depths]


def _each(call, arguments):
  return lambda: [call(argument) for argument in arguments]


if __name__ == '__main__':
  report('dispatch', figures)
