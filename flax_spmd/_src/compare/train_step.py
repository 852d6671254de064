"""Training steps: a step, and everything needed to trace it without running it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flax_spmd._src.public_module import set_module


@set_module('flax_spmd.explore')
class TrainStep(NamedTuple):
  """A training step with the shapes that it is called with, for `compare`, `search` and `Estimator`.

  Nothing is allocated and nothing runs: `step` and `create` are traced only.

  Attributes:
    step: `step(state, batch)`, any function that can be jitted.
    create: function that returns the state; called with `args`.
    batch: second argument of the step, in its global shape: arrays or `jax.ShapeDtypeStruct`s.
    args: arguments of `create`.
    placements: shardings of the batch, as for `Layout.shard`. Default: the first dimension of each array
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
