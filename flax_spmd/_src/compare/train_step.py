"""Training steps: a step function with everything needed to trace it, and nothing allocated.

train_step = TrainStep(step, create_state, batch)
compare(train_step, layouts, 'h100:64')
search(train_step, 'h100:64')
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flax_spmd._src.public_module import set_module


@set_module('flax_spmd.explore')
class TrainStep(NamedTuple):
  """A training step with the shapes that it is called with, for `compare`, `search` and `Estimator`.

  `step` and `create` are only traced: nothing is allocated, and nothing runs.

  Attributes:
    step: `step(state, batch)`, any function that can be jitted.
    create: `create(*args)`, which returns the state.
    batch: second argument of the step in its global shape: arrays or `jax.ShapeDtypeStruct`s.
    args: arguments of `create`.
    placements: placements of the batch, as for `Layout.shard`. Default: the first dimension of each array
      has the logical name `batch`.
    donate: whether the state is donated to the step.

  Example:
    >>> def create():
    ...   return {'w': LogicallyPartitioned(jnp.ones((64, 256)), ('embed', 'mlp'))}
    >>> def step(state, x):
    ...   return jax.tree.map(lambda w: w - 0.1, state), jnp.sum((x @ state['w'].unbox()) ** 2)
    >>> explore.TrainStep(step, create, jax.ShapeDtypeStruct((32, 64), jnp.float32)).donate
    True
  """

  step: Callable[..., Any]
  create: Callable[..., Any]
  batch: Any
  args: Sequence[Any] = ()
  placements: Any = None
  donate: bool = True


def check_train_step(value: Any, caller: str) -> None:
  """Raises unless a value is a `TrainStep`.

  Args:
    value: first argument of a function.
    caller: name of that function, for the error text.

  Raises:
    TypeError: the value has another type. The text shows how to write the call.
  """
  if not isinstance(value, TrainStep):
    raise TypeError(
      f'The first argument of {caller} is of type {type(value).__name__}, not a TrainStep.\n'
      f'Fix: write {caller}(TrainStep(step, create, batch), ...), with TrainStep from flax_spmd.explore.'
    )
