"""Reductions: operations that combine the results of microbatches, as `accumulate` takes them.

    accumulate(value_and_grad, batch, op=(Stack(), Mean))     # every loss, the mean of the gradients

An operation has a *state*, an array that each microbatch updates. So it needs the memory of one result, and
stages keep their own states. `Stack` and `Concat` have none: they keep the results of all microbatches.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flax_spmd._src.public import public
from flax_spmd._src.text import first_lines, value_text
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import PipelineError


@public('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class Add:
  """The sum over the microbatches, in the dtype of the results.

  Example:
    >>> from flax_spmd.pipeline import accumulate
    >>> float(accumulate(lambda x: x.sum(), jnp.array([[1.0], [3.0]]), op=Add))
    4.0
  """

  combines: ClassVar[tuple[tuple[Any, ...], str]] = (np.number,), 'numbers'

  def state(self, count: int, result: Any) -> jax.Array:
    """Zeros, of the shape and dtype of a result."""
    return lax.full(result.shape, 0, result.dtype)

  def update(self, state: jax.Array, result: jax.Array, index: Any) -> jax.Array:
    """The sum of both."""
    return lax.add(state, result)


@public('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class Mean(Add):
  """The mean over the microbatches.

  Example:
    >>> from flax_spmd.pipeline import accumulate
    >>> float(accumulate(lambda x: x.sum(), jnp.array([[1.0], [3.0]]), op=Mean))
    2.0
  """

  combines: ClassVar[tuple[tuple[Any, ...], str]] = (np.inexact,), 'floating-point and complex numbers'


@public('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class Max:
  """The elementwise maximum over the microbatches; of booleans, whether any is true.

  Example:
    >>> from flax_spmd.pipeline import accumulate
    >>> float(accumulate(lambda x: x.sum(), jnp.array([[1.0], [3.0]]), op=Max))
    3.0
  """

  combines: ClassVar[tuple[tuple[Any, ...], str]] = (
    (np.integer, np.floating, np.bool_),
    'integers, floating-point numbers and booleans',
  )

  def state(self, count: int, result: Any) -> jax.Array:
    """The lowest numbers, of the shape and dtype of a result."""
    is_integer = jnp.issubdtype(result.dtype, np.integer)
    lowest = jnp.iinfo(result.dtype).min if is_integer else -jnp.inf
    return jnp.full(result.shape, False if result.dtype == bool else lowest, result.dtype)

  def update(self, state: jax.Array, result: jax.Array, index: Any) -> jax.Array:
    """The larger of both, element by element."""
    return lax.max(state, result)


@public('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class Stack:
  """The results of the microbatches in a new dimension, in the order of the microbatches.

  Attributes:
    axis: the new dimension; negative counts from the end.

  Example:
    >>> from flax_spmd.pipeline import accumulate
    >>> accumulate(lambda x: x.sum(), jnp.array([[1.0], [3.0]]), op=Stack())
    Array([1., 3.], dtype=float32)
    >>> accumulate(lambda x: 2 * x, jnp.ones((4, 3)), op=Stack(axis=1)).shape
    (3, 4)
  """

  axis: int = 0


@public('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class Concat:
  """The results of the microbatches, concatenated. Scalars become a vector.

  Attributes:
    axis: axis of a result to concatenate along; negative counts from the end.

  Example:
    >>> from flax_spmd.pipeline import accumulate
    >>> accumulate(lambda x: 2 * x, jnp.array([[1.0, 2.0], [3.0, 4.0]]), op=Concat())
    Array([2., 4., 6., 8.], dtype=float32)
  """

  axis: int = 0


STACKING = (Stack, Concat)
_OWN = (Add, Mean, Max, *STACKING)


def is_custom(op: Any) -> bool:
  """Whether an object is an operation of the caller's: it has the methods `state` and `update`."""
  has_methods = all(callable(getattr(op, name, None)) for name in ('state', 'update'))
  return has_methods and not _is_own(op)


def of_results(op: Any, results: Any, count: int) -> list[Any]:
  """The operation of every result.

  Args:
    op: an operation, or a tree of operations that is a prefix of the results.
    results: tree of shapes and dtypes.
    count: number of microbatches.

  Raises:
    PipelineError: the paths of the results that their operation cannot combine.
  """
  prefix, treedef = jax.tree.flatten(op, is_leaf=_is_leaf)
  try:
    parts = treedef.flatten_up_to(results)
  except (ValueError, TypeError) as error:
    raise PipelineError(
      f'accumulate: op is not a prefix of the tree of results. {str(error).rstrip(".")}.\n'
      'Fix: pass one op for all results, or a tree of ops with the same structure.'
    ) from None
  prefix = [each() if isinstance(each, type) and _is_leaf(each) else each for each in prefix]
  ops = [each for each, part in zip(prefix, parts) for _ in jax.tree.leaves(part)]
  paths = jax.tree_util.tree_leaves_with_path(results)
  problems = [
    f'  {f"result {path_string(path)}" if path else "the result"}: {why}'
    for (path, result), each in zip(paths, ops)
    if (why := _mismatch(each, result, count))
  ]
  if problems:
    raise PipelineError(
      'accumulate: results that cannot be combined:\n'
      + first_lines(problems)
      + '\nFix: choose an op that supports each result, or cast the result inside the function.'
    )
  return ops


def _is_own(node: Any) -> bool:
  return isinstance(node, _OWN) or any(node is op for op in _OWN)


def _is_leaf(node: Any) -> bool:
  return node is None or _is_own(node) or is_custom(node)


def _mismatch(op: Any, result: Any, count: int) -> str | None:
  """Why an op cannot combine a result, or None if it can."""
  text = _array_text(result)
  if isinstance(op, STACKING):
    name, new = type(op).__name__, isinstance(op, Stack)
    rank = len(result.shape) + 1 if new else max(len(result.shape), 1)
    return None if -rank <= op.axis < rank else f'{text} has no axis {op.axis} to {name} along.'
  if is_custom(op):
    return _state_mismatch(op, result, count)
  if not isinstance(op, (Add, Max)):
    return (
      f'{getattr(op, "__name__", value_text(op))} is not an op; the ops are Add, Mean, Max, Stack, Concat, and '
      'objects with methods state and update.'
    )
  kinds, supported = op.combines
  if not any(jnp.issubdtype(result.dtype, kind) for kind in kinds):
    return f'{type(op).__name__} combines {supported}, not {text}.'
  return None


def _state_mismatch(op: Any, result: Any, count: int) -> str | None:
  """Why the methods of a custom op do not fit a result, or None if they do."""
  name = type(op).__name__
  state = jax.eval_shape(lambda: op.state(count, result))
  if not isinstance(state, jax.ShapeDtypeStruct):
    return f'the state of {name} is not an array, but a {type(state).__name__}.'
  updated = jax.eval_shape(op.update, state, result, jax.ShapeDtypeStruct((), jnp.int32))
  if not isinstance(updated, jax.ShapeDtypeStruct):
    return f'update of {name} returns no array, but a {type(updated).__name__}.'
  if (updated.shape, updated.dtype) == (state.shape, state.dtype):
    return None
  return f'update of {name} returns {_array_text(updated)}, and its state is {_array_text(state)}.'


def _array_text(array: Any) -> str:
  return f'{array.dtype}{list(array.shape)}'


def finished(op: Any, combined: Any, count: int, interleaved: bool) -> Any:
  """The final result.

  Args:
    op: the op.
    combined: the state after the loop, or the results of all microbatches.
    count: number of microbatches.
    interleaved: whether neighbours in the batch are in different microbatches.
  """
  if isinstance(op, Mean):
    return lax.div(combined, np.asarray(count, combined.dtype))
  if isinstance(op, Stack):
    return jnp.moveaxis(combined, 0, op.axis)
  if isinstance(op, Concat) and combined.ndim > 1:
    axis = op.axis % (combined.ndim - 1)
    return lax.collapse(jnp.moveaxis(combined, 0, axis + interleaved), axis, axis + 2)
  return combined
