"""Accumulation: runs a function on every microbatch of a batch and combines the results.

    loss, grads = spmd.pipeline.accumulate(value_and_grad, batch, schedule=OneFOneB(ranks=4), op=Mean)

On its own it is a `lax.scan` over the microbatches. Inside `layout.pipeline_jit` the loop runs as a
pipeline, by its schedule, with the same result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from flax_spmd._src.pipeline import reductions
from flax_spmd._src.pipeline.argument_checks import check_arrays, named_leaves
from flax_spmd._src.pipeline.cut.stage_marks import microbatch_p
from flax_spmd._src.pipeline.reductions import Add
from flax_spmd._src.pipeline.schedules.schedule import Schedule, check_schedule
from flax_spmd._src.pipeline.schedules.stage_ranks import check_positive
from flax_spmd._src.public import public
from flax_spmd._src.text import first_lines, with_article
from flax_spmd.errors import PipelineError


@public('flax_spmd.pipeline')
def accumulate(
  fn: Callable[[Any], Any],
  batch: Any,
  schedule: Schedule | None = None,
  op: Any = Add,
  *,
  microbatches: int | None = None,
  axis: int = 0,
) -> Any:
  """Runs a function on every microbatch of a batch and combines the results.

  Args:
    fn: function from a microbatch to a tree of results; usually `value_and_grad` of the loss. It may
      close over parameters and random keys.
    batch: tree of arrays, all with the same size of dimension `axis`.
    schedule: order in which stages run the microbatches under `layout.pipeline_jit`. Results do not
      depend on it.
    op: reduction of the results: `Add`, `Mean`, `Max`, `Stack` or `Concat` for all of them, an operation of
      your own (see below), or a tree of these that is a prefix of the result of `fn`.
    microbatches: number of microbatches to split the batch into. Example i goes to microbatch
      i % microbatches, so that a batch sharded by examples stays sharded in every microbatch; `Concat`
      restores the order. None: dimension `axis` counts the microbatches, and a microbatch lacks it.
    axis: dimension of every array of the batch that is split; negative counts from the end.

  Returns:
    The combined results, with the tree structure of the result of `fn`.

  Raises:
    PipelineError: sizes of `axis` that differ or do not divide, an op that cannot combine a result, or
      a number of microbatches that the schedule does not support.

  An operation of your own is an object with two methods. `state(count, result)` returns the first state, an
  array, for a number of microbatches and a `ShapeDtypeStruct`. `update(state, result, index)` returns the next
  one, of the same shape and dtype. A schedule may run the microbatches of a stage in any order.

  Example:
    >>> from flax_spmd.pipeline import Mean
    >>> w = jnp.ones(3)
    >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
    >>> batch = jnp.arange(12.0).reshape(4, 3)
    >>> value_and_grad = lambda x: jax.value_and_grad(loss)(w, x)
    >>> mean, grads = accumulate(value_and_grad, batch, op=Mean, microbatches=2)
    >>> float(mean) == float(loss(w, batch))
    True
  """
  check_schedule(schedule, 'accumulate')
  count, batch = _split(batch, microbatches, schedule, axis)
  traced = jax.jit(_of_arrays(fn))  # traced once, for `eval_shape` and for the loop
  avals = jax.tree.map(jax.typeof, batch)
  one = jax.tree.map(lambda aval: jax.ShapeDtypeStruct(aval.shape[1:], aval.dtype), avals)
  results, treedef = jax.tree.flatten(jax.eval_shape(traced, one))
  ops = reductions.of_results(op, jax.tree.unflatten(treedef, results), count)
  stacks = [isinstance(each, reductions.STACKING) for each in ops]

  def one_pass(carry, each):
    microbatch, index = each
    leaves, structure = jax.tree.flatten(microbatch)
    microbatch = jax.tree.unflatten(
      structure, microbatch_p.bind(*leaves, direction='forward', schedule=schedule)
    )
    new = jax.tree.leaves(traced(microbatch))
    carry = [
      None if stacked else each.update(old, one, index)
      for each, stacked, old, one in zip(ops, stacks, carry, new)
    ]
    return carry, [one for stacked, one in zip(stacks, new) if stacked]

  batch = jax.tree.map(jnp.asarray, batch)
  start = [
    None if stacked else each.state(count, result) for each, stacked, result in zip(ops, stacks, results)
  ]
  indices = jnp.arange(count) if any(map(reductions.is_custom, ops)) else None
  carry, rows = lax.scan(one_pass, start, (batch, indices))
  stacked_rows = iter(rows)
  return jax.tree.unflatten(
    treedef,
    [
      reductions.finished(
        each, next(stacked_rows) if old is None else old, count, microbatches is not None
      )
      for each, old in zip(ops, carry)
    ],
  )


def _of_arrays(fn: Any) -> Callable[[Any], Any]:
  """The function of a microbatch, whose results are checked.

  Raises:
    PipelineError: it is no function; a call raises it for results that are not arrays.
  """
  if not callable(fn):
    raise PipelineError(
      f'accumulate has {with_article(type(fn).__name__)} in place of a function.\n'
      'Fix: write accumulate(fn, batch), such as accumulate(lambda x: jax.grad(loss)(params, x), batch).'
    )

  @functools.wraps(fn, updated=())
  def checked(microbatch: Any) -> Any:
    result = fn(microbatch)
    fix = 'return arrays and numbers; keep values that are the same for all microbatches outside of accumulate.'
    check_arrays(named_leaves(result), 'accumulate: results of the function are not arrays', fix)
    return result

  return checked


def _split(
  batch: Any, microbatches: int | None, schedule: Schedule | None, axis: int
) -> tuple[int, Any]:
  """The number of microbatches, and the batch with microbatches in its first dimension."""
  size = _size(batch, axis)
  if microbatches is None:
    if schedule is not None:
      schedule.tasks(size)  # raises if the schedule does not support this number
    return size, batch if axis == 0 else jax.tree.map(lambda leaf: jnp.moveaxis(leaf, axis, 0), batch)
  if size % check_positive(microbatches, 'accumulate: microbatches'):
    raise PipelineError(
      f'accumulate: a batch of {size} cannot be split into {microbatches} equal microbatches.\n'
      f'Fix: {suggestion(size, microbatches, schedule)}'
    )
  if schedule is not None and not schedule.supports(microbatches):
    raise PipelineError(
      f'{schedule.limitation(microbatches)}\nFix: {suggestion(size, microbatches, schedule)}'
    )

  def split(leaf):
    at = axis % leaf.ndim
    shape = (*leaf.shape[:at], -1, microbatches, *leaf.shape[at + 1 :])
    return jnp.moveaxis(jnp.reshape(leaf, shape), at + 1, 0)

  return microbatches, jax.tree.map(split, batch)


def _size(batch: Any, axis: int) -> int:
  """The size of the dimension that is split, which all arrays of a batch share."""
  leaves = named_leaves(batch)
  check_arrays(
    leaves,
    'accumulate: a batch is a tree of arrays, but these leaves are not',
    'close over values that are not split into microbatches.',
  )
  named = [(name, jax.typeof(leaf)) for name, leaf in leaves]
  if not named:
    raise PipelineError(
      f'accumulate: the batch {batch!r} has no arrays.\nFix: pass the arrays to split into microbatches.'
    )
  noun = 'first dimension' if axis == 0 else f'dimension {axis}'
  lacking = [
    f'{name}: {leaf.dtype}{list(leaf.shape)}' if leaf.shape else name
    for name, leaf in named
    if not -leaf.ndim <= axis < leaf.ndim
  ]
  if lacking:
    what = 'these leaves are scalars' if axis == 0 else 'these leaves have no such dimension'
    raise PipelineError(
      f'accumulate: a batch is split along its {noun}, but {what}: '
      f'{", ".join(lacking)}.\nFix: close over values that are not split into microbatches.'
    )
  sizes = {leaf.shape[axis] for _, leaf in named}
  if len(sizes) != 1 or 0 in sizes:
    raise PipelineError(
      f'accumulate: the arrays of a batch need the same {noun}, of size 1 or more:\n'
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
