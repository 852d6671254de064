"""Accumulation: runs a function on every microbatch of a batch and combines the results.

    loss, grads = spmd.pipeline.accumulate(value_and_grad, batch, schedule=OneFOneB(ranks=4), op=Mean)

On its own it is a `lax.scan` over the microbatches. Inside `layout.pipeline_jit` the loop runs as a
pipeline, by its schedule, with the same result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flax_spmd._src.pipeline.argument_checks import unexpected_leaves
from flax_spmd._src.pipeline.cut.stage_marks import microbatch_p
from flax_spmd._src.pipeline.schedules.schedule import Schedule, check_schedule
from flax_spmd._src.pipeline.schedules.stage_ranks import check_positive
from flax_spmd._src.public_module import set_module
from flax_spmd._src.text import first_lines
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import PipelineError


@set_module('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class Add:
  """The sum over the microbatches, in the dtype of the results.

  Example:
    >>> float(accumulate(lambda x: x.sum(), jnp.array([[1.0], [3.0]]), op=Add))
    4.0
  """


@set_module('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class Mean:
  """The mean over the microbatches.

  Example:
    >>> float(accumulate(lambda x: x.sum(), jnp.array([[1.0], [3.0]]), op=Mean))
    2.0
  """


@set_module('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class Max:
  """The elementwise maximum over the microbatches.

  Example:
    >>> float(accumulate(lambda x: x.sum(), jnp.array([[1.0], [3.0]]), op=Max))
    3.0
  """


@set_module('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class Concat:
  """The results of the microbatches, concatenated. Scalars become a vector.

  Attributes:
    axis: axis of a result to concatenate along; negative counts from the end.

  Example:
    >>> accumulate(lambda x: 2 * x, jnp.array([[1.0, 2.0], [3.0, 4.0]]), op=Concat())
    Array([2., 4., 6., 8.], dtype=float32)
  """

  axis: int = 0


Op = Add | Mean | Max | Concat
OPS = (Add, Mean, Max, Concat)


@set_module('flax_spmd.pipeline')
def accumulate(
  fn: Callable[[Any], Any],
  batch: Any,
  schedule: Schedule | None = None,
  op: Any = Add,
  *,
  microbatches: int | None = None,
) -> Any:
  """Runs a function on every microbatch of a batch and combines the results.

  Args:
    fn: function from a microbatch to a tree of results; usually `value_and_grad` of the loss. It may
      close over parameters and random keys.
    batch: tree of arrays, all with the same first dimension.
    schedule: order in which stages run the microbatches under `layout.pipeline_jit`. Results do not
      depend on it.
    op: reduction of the results: `Add`, `Mean`, `Max` or `Concat` for all of them, or a tree of these
      that is a prefix of the result of `fn`.
    microbatches: number of microbatches to split the batch into. Example i goes to microbatch
      i % microbatches, so that a batch sharded by examples stays sharded in every microbatch; `Concat`
      restores the order. None: the first dimension counts the microbatches, as in `lax.scan`.

  Returns:
    The combined results, with the tree structure of the result of `fn`.

  Raises:
    PipelineError: first dimensions that differ or do not divide, an op that cannot combine a result, or
      a number of microbatches that the schedule does not support.

  Example:
    >>> w = jnp.ones(3)
    >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
    >>> batch = jnp.arange(12.0).reshape(4, 3)
    >>> value_and_grad = lambda x: jax.value_and_grad(loss)(w, x)
    >>> mean, grads = accumulate(value_and_grad, batch, op=Mean, microbatches=2)
    >>> float(mean) == float(loss(w, batch))
    True
  """
  check_schedule(schedule, 'accumulate')
  count, batch = _split(batch, microbatches, schedule)
  traced = jax.jit(fn)  # traced once, for `eval_shape` and for the loop
  avals = jax.tree.map(jax.typeof, batch)
  one = jax.tree.map(lambda aval: jax.ShapeDtypeStruct(aval.shape[1:], aval.dtype), avals)
  results, treedef = jax.tree.flatten(jax.eval_shape(traced, one))
  ops = _ops(op, treedef.unflatten(results))

  def one_pass(carry, microbatch):
    leaves, structure = jax.tree.flatten(microbatch)
    microbatch = structure.unflatten(microbatch_p.bind(*leaves, direction='forward', schedule=schedule))
    new = jax.tree.leaves(traced(microbatch))
    carry = [
      None if old is None else _combine(each, old, one) for each, old, one in zip(ops, carry, new)
    ]
    return carry, [one for each, one in zip(ops, new) if isinstance(each, Concat)]

  batch = jax.tree.map(jnp.asarray, batch)
  start = [_start(each, result) for each, result in zip(ops, results)]
  carry, stacked = lax.scan(one_pass, start, batch)
  rows = iter(stacked)
  return treedef.unflatten(
    _finish(each, next(rows) if old is None else old, count, microbatches is not None)
    for each, old in zip(ops, carry)
  )


def _split(batch: Any, microbatches: int | None, schedule: Schedule | None) -> tuple[int, Any]:
  """The number of microbatches, and the batch with microbatches in its first dimension."""
  size = _size(batch)
  if microbatches is None:
    if schedule is not None:
      schedule.tasks(size)  # raises if the schedule does not support this number
    return size, batch
  if size % check_positive(microbatches, 'accumulate: microbatches'):
    raise PipelineError(
      f'accumulate: a batch of {size} cannot be split into {microbatches} equal microbatches.\n'
      f'Fix: {suggestion(size, microbatches, schedule)}'
    )
  if schedule is not None and not schedule.supports(microbatches):
    raise PipelineError(
      f'{schedule.limitation(microbatches)}\nFix: {suggestion(size, microbatches, schedule)}'
    )
  return microbatches, jax.tree.map(
    lambda leaf: jnp.swapaxes(jnp.reshape(leaf, (-1, microbatches, *leaf.shape[1:])), 0, 1), batch
  )


def _size(batch: Any) -> int:
  """The size of the first dimension, which all arrays of a batch share."""
  unexpected = unexpected_leaves(batch)
  if unexpected:
    raise PipelineError(
      'accumulate: a batch is a tree of arrays, but these leaves are not:\n'
      + first_lines(unexpected)
      + '\nFix: close over values that are not split into microbatches.'
    )
  named = [
    (path_string(path), jax.typeof(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
  ]
  if not named:
    raise PipelineError(
      f'accumulate: the batch {batch!r} has no arrays.\nFix: pass the arrays to split into microbatches.'
    )
  scalars = [name for name, leaf in named if not leaf.shape]
  if scalars:
    raise PipelineError(
      'accumulate: a batch is split along its first dimension, but these leaves are scalars: '
      f'{", ".join(scalars)}.\nFix: close over values that are not split into microbatches.'
    )
  sizes = {leaf.shape[0] for _, leaf in named}
  if len(sizes) != 1 or 0 in sizes:
    raise PipelineError(
      'accumulate: the arrays of a batch need the same first dimension, of size 1 or more:\n'
      + first_lines([f'  {name}: {leaf.dtype}{list(leaf.shape)}' for name, leaf in named])
      + '\nFix: give every array the same number of microbatches or examples; close over values that '
      'are not split.'
    )
  return sizes.pop()


def suggestion(size: int, microbatches: int, schedule: Schedule | None) -> str:
  """The nearest numbers of microbatches that divide a batch and that the schedule supports."""
  legal = [n for n in range(1, size + 1) if size % n == 0 and (schedule is None or schedule.supports(n))]
  if schedule is not None and not legal:
    nearest = schedule.nearest_supported(microbatches)
    return f'use {nearest} microbatches, and a batch that divides into as many.'
  near = [max((n for n in legal if n < microbatches), default=None)]
  near.append(min((n for n in legal if n > microbatches), default=None))
  return f'use {" or ".join(str(n) for n in near if n)} microbatches, or another batch size.'


def _ops(op: Any, results: Any) -> list[Op]:
  """The op of every result."""
  prefix, treedef = jax.tree.flatten(op, is_leaf=_is_op_or_none)
  try:
    parts = treedef.flatten_up_to(results)
  except (ValueError, TypeError) as error:
    raise PipelineError(
      f'accumulate: op is not a prefix of the tree of results. {str(error).rstrip(".")}.\n'
      'Fix: pass one op for all results, or a tree of ops with the same structure.'
    ) from None
  prefix = [each() if any(each is op for op in OPS) else each for each in prefix]
  ops = [each for each, part in zip(prefix, parts) for _ in jax.tree.leaves(part)]
  paths = jax.tree_util.tree_leaves_with_path(results)
  problems = [
    f'  {f"result {path_string(path)}" if path else "the result"}: {why}'
    for (path, result), each in zip(paths, ops)
    if (why := _mismatch(each, result))
  ]
  if problems:
    raise PipelineError(
      'accumulate: results that cannot be combined:\n'
      + first_lines(problems)
      + '\nFix: choose an op that supports each result, or cast the result inside the function.'
    )
  return ops


def _is_op(node: Any) -> bool:
  return isinstance(node, OPS) or any(node is op for op in OPS)


def _is_op_or_none(node: Any) -> bool:
  return node is None or _is_op(node)


def _mismatch(op: Any, result: Any) -> str | None:
  """Why an op cannot combine a result, or None if it can."""
  dtype, text = result.dtype, f'{result.dtype}{list(result.shape)}'
  if not isinstance(op, OPS):
    return f'{getattr(op, "__name__", repr(op))} is not an op; the ops are Add, Mean, Max and Concat.'
  if isinstance(op, Concat):
    if not isinstance(op.axis, int):
      return f'the axis of {op!r} is not an integer.'
    rank = max(len(result.shape), 1)
    return None if -rank <= op.axis < rank else f'{text} has no axis {op.axis} to Concat along.'
  numbers, supported = _COMBINES[type(op)]
  if not jnp.issubdtype(dtype, numbers) or (
    isinstance(op, Max) and jnp.issubdtype(dtype, np.complexfloating)
  ):
    return f'{type(op).__name__} combines {supported}, not {text}.'
  return None


_COMBINES = {
  Add: (np.number, 'numbers'),
  Mean: (np.inexact, 'floating-point and complex numbers'),
  Max: (np.number, 'integers and floating-point numbers'),
}


def _start(op: Op, result: Any) -> Any:
  """The initial value of an accumulator; None for `Concat`, which has none."""
  if isinstance(op, Concat):
    return None
  if isinstance(op, Max):
    inexact = jnp.issubdtype(result.dtype, np.inexact)
    lowest = -jnp.inf if inexact else jnp.iinfo(result.dtype).min
    return jnp.full(result.shape, lowest, result.dtype)
  return jnp.zeros(result.shape, result.dtype)


def _combine(op: Op, old: Any, new: Any) -> Any:
  return lax.max(old, new) if isinstance(op, Max) else lax.add(old, new)


def _finish(op: Op, combined: Any, count: int, interleaved: bool) -> Any:
  """The final result.

  Args:
    op: the op.
    combined: the accumulator after the loop, or the stacked results of `Concat`.
    count: number of microbatches.
    interleaved: whether neighbours in the batch are in different microbatches.
  """
  if isinstance(op, Mean):
    return combined / count
  if isinstance(op, Concat) and combined.ndim > 1:
    axis = op.axis % (combined.ndim - 1)
    return lax.collapse(jnp.moveaxis(combined, 0, axis + interleaved), axis, axis + 2)
  return combined
