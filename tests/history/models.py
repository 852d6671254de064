"""Models and steps of the calls: several states of one form, with other names, and steps over any state."""

import enum
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.core import FrozenDict
from flax.training.train_state import TrainState

import flax_spmd as spmd


def _boxed(first, second):
  w = np.arange(256, dtype=np.float32).reshape(16, 16) % 7
  return {
    'w': spmd.LogicallyPartitioned(jnp.asarray(w), first),
    'v': spmd.LogicallyPartitioned(jnp.asarray(w.T), second),
    'b': jnp.arange(16.0),
  }


class _Net(nn.Module):
  @nn.compact
  def __call__(self, x):
    ones = nn.initializers.ones
    x = nn.Dense(16, kernel_init=spmd.with_logical_partitioning(ones, ('embed', 'hidden')), name='up')(x)
    x = spmd.with_logical_constraint(x, ('batch', 'hidden'))
    return nn.Dense(
      16, kernel_init=spmd.with_logical_partitioning(ones, ('hidden', 'embed')), name='down'
    )(x)


def _train_state():
  net = _Net()
  params = net.init(jax.random.key(0), jnp.ones((2, 16)))['params']
  return TrainState.create(apply_fn=_Net.apply, params=params, tx=_ADAM)


_ADAM = optax.adam(0.5)

# The first five have one form: only names or boxes differ.
MODELS = {
  'columns': lambda: _boxed(('embed', 'hidden'), ('hidden', 'embed')),
  'rows': lambda: _boxed(('hidden', 'embed'), ('embed', 'hidden')),
  'batch': lambda: _boxed(('batch', None), (None, 'batch')),
  'unknown': lambda: _boxed(('nowhere', None), ('embed', 'hidden')),
  'plain': lambda: spmd.unbox(_boxed(('embed', 'hidden'), ('hidden', 'embed'))),
  'net': lambda: _Net().init(jax.random.key(0), jnp.ones((2, 16))),
  'train': _train_state,
  'cache': lambda: {
    'k': jnp.zeros((8, 16, 16)),
    'v': jnp.zeros((8, 16, 16)),
    'index': jnp.zeros((), jnp.int32),
  },
}


class Mode(enum.Enum):
  ADD = 1
  DOUBLE = 2


class Pair(NamedTuple):
  state: Any
  logits: Any


@flax.struct.dataclass
class Result:
  state: Any
  logits: Any


CONTAINERS = {
  'tuple': lambda state, logits: (state, logits),
  'dict': lambda state, logits: {'state': state, 'logits': logits},
  'FrozenDict': lambda state, logits: FrozenDict({'state': state, 'logits': logits}),
  'NamedTuple': Pair,
  'dataclass': Result,
}


def _tree(fn, *trees):
  return jax.tree.map(fn, *trees)


def _with_logits(container, state, x):
  state = _tree(lambda leaf: leaf + 1, state)
  return container(state, x @ jnp.ones((16, 12)))


def _lone(state, x):
  return x * 2


def _constrained(state, x):
  return spmd.with_logical_constraint(x + 1, ('batch', 'hidden'))


def _all_constrained(state, x):
  return _tree(
    lambda leaf: spmd.with_logical_constraint(leaf * 2, ('batch', 'hidden')) if leaf.ndim == 2 else leaf,
    state,
  )


def _gradients(state, x):
  def loss(state):
    return sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.float32)

  return jax.grad(loss, allow_int=True)(state)


def _parts(state, x):
  leaves = jax.tree.leaves(state)
  return {'last': leaves[-1], 'all': [leaf * 2 for leaf in leaves], 'x': x.T}


def _number(state, x):
  return _tree(lambda leaf: leaf * 2, state), x * 3


def _raises(state, x):
  raise ValueError(f'{x.shape} is not a shape that this step takes.')


def _new(state, x):
  return _boxed(('embed', 'hidden'), ('hidden', None)), x


STEPS = {
  **{f'with_{name}': functools.partial(_with_logits, make) for name, make in CONTAINERS.items()},
  'lone': _lone,
  'constrained': _constrained,
  'all_constrained': _all_constrained,
  'gradients': _gradients,
  'parts': _parts,
  'number': _number,
  'raises': _raises,
  'new': _new,
}


def pair(a, b):
  """A step over two arrays of one shape."""
  return a + b, a - b


def pair_by_key(a, b):
  """A step over two dicts with the same keys."""
  return {'w': a['w'] + b['w']}


def product(a, b):
  """A step with one result that could be either argument."""
  return a * b


def with_mode(x, mode, scale=2):
  """A step with an argument that is not an array."""
  if callable(mode):
    return mode(x)
  if isinstance(mode, (Mode, str)):
    return x + 1 if mode in (Mode.ADD, 'add') else x * scale
  return x * jnp.asarray(mode).astype(x.dtype)


ARRAY_STEPS = {'pair': pair, 'pair_by_key': pair_by_key, 'product': product, 'with_mode': with_mode}
MODES = {
  'enum': Mode.ADD,
  'other enum': Mode.DOUBLE,
  'str': 'add',
  'int': 1,
  'bool': True,
  'float': 1.0,
  'function': jnp.tanh,
  'list': [object()],
  'numpy': np.float32(1),
}
