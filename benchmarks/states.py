"""The trees to measure: TrainStates of a deep model, with the boxes that a script chooses.

Parameters are nested dicts with ten leaves per layer, like a transformer's; Adam adds two more trees of the
same boxes. The arrays are tiny, because the cost of a box does not depend on its value.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

Box = Callable[[Any, tuple[str, ...]], Any]

LAYER = {
  'attention_norm': {'scale': (('embed',), (8,))},
  'attention': {
    'query': (('embed', 'heads', 'kv'), (8, 4, 2)),
    'key': (('embed', 'heads', 'kv'), (8, 4, 2)),
    'value': (('embed', 'heads', 'kv'), (8, 4, 2)),
    'out': (('heads', 'kv', 'embed'), (4, 2, 8)),
  },
  'mlp_norm': {'scale': (('embed',), (8,))},
  'mlp': {
    'wi': (('embed', 'mlp'), (8, 16)),
    'wi_bias': (('mlp',), (16,)),
    'wo': (('mlp', 'embed'), (16, 8)),
    'wo_bias': (('embed',), (8,)),
  },
}
LEAVES_PER_LAYER = 3 * 10  # the parameters, and Adam's two moments


def unboxed(value: Any, names: tuple[str, ...]) -> Any:
  return value


def train_state(layers: int, box: Box, make: Callable[[tuple[int, ...]], Any] = jnp.zeros) -> TrainState:
  """A TrainState of `layers` layers; `make` returns an array, or an abstract one, of a shape."""
  params = {f'layer_{i}': _layer(LAYER, box, make) for i in range(layers)}
  return TrainState.create(apply_fn=None, params=params, tx=OPTIMIZER).replace(step=make(()))


def _layer(description: Any, box: Box, make) -> Any:
  if isinstance(description, tuple):
    names, shape = description
    return box(make(shape), names)
  return {key: _layer(inner, box, make) for key, inner in description.items()}


OPTIMIZER = optax.adam(1e-3)
"""One optimizer for all states: it is part of a TrainState's type."""
