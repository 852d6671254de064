"""Accumulation: a function of a microbatch, over all microbatches of a batch.

    loss, grads = spmd.pipeline.accumulate(value_and_grad, batch, schedule=OneFOneB(ranks=4), op=Mean)

By itself it is `lax.scan` over the microbatches. Inside `layout.pipeline_jit` it is the loop that is run
as a pipeline, by its schedule, with the same result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flax_spmd._src.pipeline.argument_checks import strangers
from flax_spmd._src.pipeline.cut.stage_marks import microbatch_p
from flax_spmd._src.pipeline.schedules.schedule import Schedule, check_schedule
from flax_spmd._src.pipeline.schedules.stage_ranks import at_least_one
from flax_spmd._src.public_module import set_module
from flax_spmd._src.text import few
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import PipelineError


@set_module('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class Add:
  """The sum over the microbatches, in the dtype that the results have.

  Example:
    >>> float(accumulate(lambda x: x.sum(), jnp.array([[1.0], [3.0]]), op=Add))
    4.0
  """


@set_module('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class Mean:
  """The mean over the microbatches: their sum by their number.

  Example:
    >>> float(accumulate(lambda x: x.sum(), jnp.array([[1.0], [3.0]]), op=Mean))
    2.0
  """


@set_module('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class Max:
  """The maximum over the microbatches, element by element.

  Example:
    >>> float(accumulate(lambda x: x.sum(), jnp.array([[1.0], [3.0]]), op=Max))
    3.0
  """


@set_module('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class Concat:
  """The microbatches' results one after another.

  Attributes:
    axis: along which, of those that a result has; scalars become a vector.

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
  """Runs a function on every microbatch of a batch, and combines the results.

  Args:
    fn: from a microbatch to a tree of results; usually `value_and_grad` of the loss. It may close over
      parameters, keys, anything.
    batch: a tree of arrays, all of the same first dimension.
    schedule: in which order stages work on microbatches, under `layout.pipeline_jit`. It changes no
      result.
    op: how results are combined: `Add`, `Mean`, `Max` or `Concat` for all of them, or a tree of these
      that is a prefix of what `fn` returns.
    microbatches: into how many the batch is split. Examples are dealt out in turn, so that a device which
      holds some of them has some of every microbatch; `Concat` puts them back in order. None: the first
      dimension counts the microbatches, as in `lax.scan`.

  Returns:
    What `fn` returns, combined.

  Raises:
    PipelineError: leaves whose first dimensions differ or do not divide, an op that cannot combine a
      result, a number of microbatches that the schedule is not made for.

  Example:
    >>> w = jnp.ones(3)
    >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
    >>> batch = jnp.arange(12.0).reshape(4, 3)
    >>> mean, grads = accumulate(lambda x: jax.value_and_grad(loss)(w, x), batch, op=Mean, microbatches=2)
    >>> float(mean) == float(loss(w, batch))
    True
  """
  check_schedule(schedule, 'accumulate')
  count, batch = _split(batch, microbatches, schedule)
  traced = jax.jit(fn)  # so that it is traced once for its form and its pass
  avals = jax.tree.map(jax.typeof, batch)
  one = jax.tree.map(lambda aval: jax.ShapeDtypeStruct(aval.shape[1:], aval.dtype), avals)
  results, treedef = jax.tree.flatten(jax.eval_shape(traced, one))
  ops = _ops(op, treedef.unflatten(results))

  def one_pass(carry, microbatch):
    leaves, form = jax.tree.flatten(microbatch)
    microbatch = form.unflatten(microbatch_p.bind(*leaves, way='forward', schedule=schedule))
    new = jax.tree.leaves(traced(microbatch))
    added = [_combine(each, old, one) for each, old, one in zip(ops, carry, new) if old is not None]
    kept = iter(added)
    carry = [None if old is None else next(kept) for old in carry]
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
  """The number of microbatches, and the batch with a first dimension that counts them."""
  size = _size(batch)
  if microbatches is None:
    if schedule is not None:
      schedule.tasks(size)  # says which counts it is made for
    return size, batch
  if size % at_least_one(microbatches, 'accumulate: microbatches'):
    raise PipelineError(
      f'accumulate: a batch of {size} cannot be split into {microbatches} equal microbatches.\n'
      f'Fix: {way_out(size, microbatches, schedule)}'
    )
  if schedule is not None and not schedule.takes(microbatches):
    raise PipelineError(
      f'{schedule.objection(microbatches)}\nFix: {way_out(size, microbatches, schedule)}'
    )
  return microbatches, jax.tree.map(
    lambda leaf: jnp.swapaxes(jnp.reshape(leaf, (-1, microbatches, *leaf.shape[1:])), 0, 1), batch
  )


def _size(batch: Any) -> int:
  """The first dimension of the arrays of a batch."""
  strange = strangers(batch)
  if strange:
    raise PipelineError(
      'accumulate: what is no array cannot be divided into microbatches:\n'
      + few(strange)
      + '\nFix: close over what is not divided.'
    )
  named = [
    (path_string(path), jax.typeof(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
  ]
  if not named:
    raise PipelineError(
      f'accumulate: the batch {batch!r} has no array.\n'
      'Fix: pass the arrays that are divided into microbatches.'
    )
  scalars = [name for name, leaf in named if not leaf.shape]
  if scalars:
    raise PipelineError(
      f'accumulate: a batch is divided along its first dimension, but of it are scalars: '
      f'{", ".join(scalars)}.\nFix: close over what is not divided.'
    )
  sizes = {leaf.shape[0] for _, leaf in named}
  if len(sizes) != 1 or 0 in sizes:
    raise PipelineError(
      'accumulate: the arrays of a batch have to have one first dimension, of 1 or more:\n'
      + few([f'  {name}: {leaf.dtype}{list(leaf.shape)}' for name, leaf in named])
      + '\nFix: give every array the same number of microbatches, or of examples; close over what is not '
      'divided.'
    )
  return sizes.pop()


def way_out(size: int, microbatches: int, schedule: Schedule | None) -> str:
  """The numbers on either side that divide a batch, and that the schedule is made for."""
  legal = [n for n in range(1, size + 1) if size % n == 0 and (schedule is None or schedule.takes(n))]
  if schedule is not None and not legal:
    return (
      f'use {schedule.nearest(microbatches)} microbatches, and a batch that can be split into these.'
    )
  near = [max((n for n in legal if n < microbatches), default=None)]
  near.append(min((n for n in legal if n > microbatches), default=None))
  return f'use {" or ".join(str(n) for n in near if n)} microbatches, or a batch of another size.'


def _ops(op: Any, results: Any) -> list[Op]:
  """An op for every result."""
  given, treedef = jax.tree.flatten(op, is_leaf=_is_op_or_none)
  try:
    parts = treedef.flatten_up_to(results)
  except (ValueError, TypeError) as error:
    raise PipelineError(
      f'accumulate: op is no prefix of what the function returns. {str(error).rstrip(".")}.\n'
      'Fix: give one op for all results, or a tree of ops of the same form.'
    ) from None
  given = [each() if any(each is op for op in OPS) else each for each in given]
  found = [each for each, part in zip(given, parts) for _ in jax.tree.leaves(part)]
  paths = jax.tree_util.tree_leaves_with_path(results)
  problems = [
    f'  {f"result {path_string(path)}" if path else "the result"}: {why}'
    for (path, result), each in zip(paths, found)
    if (why := _objection(each, result))
  ]
  if problems:
    raise PipelineError(
      'accumulate: results that cannot be combined:\n'
      + few(problems)
      + '\nFix: give each result an op that fits, or cast it inside the function.'
    )
  return found


def _is_op(node: Any) -> bool:
  return isinstance(node, OPS) or any(node is op for op in OPS)


def _is_op_or_none(node: Any) -> bool:
  return node is None or _is_op(node)


def _objection(op: Any, result: Any) -> str | None:
  """Why an op cannot combine such results."""
  dtype, said = result.dtype, f'{result.dtype}{list(result.shape)}'
  if not isinstance(op, OPS):
    return f'{getattr(op, "__name__", repr(op))} is no op; there are Add, Mean, Max and Concat.'
  if isinstance(op, Concat):
    if not isinstance(op.axis, int):
      return f'the axis of {op!r} is no whole number.'
    fits = -max(len(result.shape), 1) <= op.axis < max(len(result.shape), 1)
    return None if fits else f'{said} has no axis {op.axis} to Concat along.'
  numbers, which = _COMBINES[type(op)]
  if not jnp.issubdtype(dtype, numbers) or (
    isinstance(op, Max) and jnp.issubdtype(dtype, np.complexfloating)
  ):
    return f'{type(op).__name__} combines {which}, not {said}.'
  return None


_COMBINES = {
  Add: (np.number, 'numbers'),
  Mean: (np.inexact, 'floating and complex numbers'),
  Max: (np.number, 'integers and floating numbers'),
}


def _start(op: Op, result: Any) -> Any:
  """What an accumulator begins with; None for results that are kept."""
  if isinstance(op, Concat):
    return None
  if isinstance(op, Max):
    inexact = jnp.issubdtype(result.dtype, np.inexact)
    lowest = -jnp.inf if inexact else jnp.iinfo(result.dtype).min
    return jnp.full(result.shape, lowest, result.dtype)
  return jnp.zeros(result.shape, result.dtype)


def _combine(op: Op, old: Any, new: Any) -> Any:
  return lax.max(old, new) if isinstance(op, Max) else lax.add(old, new)


def _finish(op: Op, combined: Any, count: int, dealt: bool) -> Any:
  """A result; `dealt` says that neighbours of the batch are in different microbatches."""
  if isinstance(op, Mean):
    return combined / count
  if isinstance(op, Concat) and combined.ndim > 1:
    axis = op.axis % (combined.ndim - 1)
    return lax.collapse(jnp.moveaxis(combined, 0, axis + dealt), axis, axis + 2)
  return combined
