"""Known states: random arrays that are determined by a number, so that every restored state can be told from all others."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import flax_spmd as spmd

RULES = (('rows', 'data'), ('columns', 'model'))


class Size(NamedTuple):
  """Number of large arrays, their side, and number of small arrays."""

  leaves: int
  side: int
  small: int = 0

  @property
  def bytes(self) -> int:
    return 4 * (self.leaves * self.side**2 + 7 * self.small)


def layout() -> spmd.Layout:
  return spmd.Layout({'data': 2, 'model': 4}, RULES)


def values(number: int, size: Size) -> dict[str, np.ndarray]:
  """Arrays of random numbers that differ by state and by leaf."""
  generator = np.random.default_rng(number)
  arrays = {
    f'w{i}': generator.standard_normal((size.side, size.side), np.float32) for i in range(size.leaves)
  }
  arrays |= {f's{i}': generator.standard_normal(7, np.float32) for i in range(size.small)}
  return arrays | {'step': np.asarray(number, np.int32)}


def state_of(number: int, size: Size) -> Any:
  """The state of a number, boxed and on the devices."""
  boxes = {name: _box(value) for name, value in values(number, size).items()}
  return jax.block_until_ready(layout().shard(boxes))


def target_of(size: Size) -> Any:
  """An abstract state with the shapes and names of the states of a size."""

  def zeros() -> Any:
    return {name: _box(jnp.zeros(array.shape, array.dtype)) for name, array in values(0, size).items()}

  return layout().abstract(zeros)


def is_state(restored: Any, number: int, size: Size) -> bool:
  """Whether a restored state equals that of a number, element by element."""
  expected, actual = values(number, size), spmd.unbox(restored)
  return set(actual) == set(expected) and all(
    np.array_equal(np.asarray(actual[name]), expected[name]) for name in expected
  )


def _box(value: Any) -> Any:
  return spmd.LogicallyPartitioned(value, ('rows', 'columns')) if value.ndim == 2 else value
