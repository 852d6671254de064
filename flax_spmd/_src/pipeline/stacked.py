"""Stacked stages: a pipeline within one program, of stages that are all alike.

    blocks = spmd.pipeline.stacked(Block, stages=4, microbatches=8)(width, name='blocks')
    x = blocks(x)                                   # in a Linen module, under any `layout.jit`

`layout.pipeline_jit` makes a program for each stage, and an array of a stage lies on the devices of that
stage. One program cannot do this with arrays of their own: each of them lies on the whole mesh. So the
stages' parameters are one array with a first dimension for the stage, which a rule lays over a mesh axis,
`('stage', 'stage')`. All stages work at once, each on another microbatch. At every tick what they made
moves on by one stage: a `collective-permute` between neighbours.

Of m microbatches and p stages that takes m + p - 1 ticks, and so do gradients, which are those of the loop:
forwards come first, then all backwards. That is GPipe's order (https://arxiv.org/abs/1811.06965), with its
bubble of (p - 1) / (m + p - 1) and its memory: activations of all microbatches, unless `nn.remat` is around
a stage. What is outside of the stages (embedding, head) every stage's devices compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import DenyList

from flax_spmd._src.constraints import with_logical_constraint
from flax_spmd._src.pipeline.accumulate import way_out
from flax_spmd._src.pipeline.argument_checks import differences, named_leaves
from flax_spmd._src.pipeline.schedules.stage_ranks import at_least_one
from flax_spmd._src.public_module import set_module
from flax_spmd._src.text import few
from flax_spmd.errors import PipelineError

_SPLIT_ALL: Mapping[Any, bool] = {True: True}
_SPLIT_OTHERS: Mapping[Any, bool] = {'params': False, DenyList('params'): True}


@set_module('flax_spmd.pipeline')
def stacked(
  target: Any, stages: int, microbatches: int, *, axis: str = 'stage', names: Any = ('batch',)
) -> Any:
  """A Linen module, several times one after another, as the stages of a pipeline within one program.

  Values and gradients are those of the modules one after another (`nn.scan` with `variable_axes={'params': 0}`
  has the same parameters). Random keys (dropout) differ between stages and microbatches.

  Args:
    target: a Module class, or a function of a Module and a value: one stage. It takes a tree of arrays with
      examples in their first dimension, and returns one like it; what every stage needs (a mask) goes along
      in the tree. It has parameters only, no batch statistics.
    stages: how many times.
    microbatches: into how many the examples are divided; dealt out in turn, as by `accumulate`.
    axis: the logical name of the dimension that parameters get, their first one; a rule lays it over a
      mesh axis.
    names: logical names of the dimensions of what goes from stage to stage (fewer are fine), or a tree of
      them that is a prefix of it.

  Returns:
    `target`, transformed.

  Raises:
    PipelineError: a number is below 1; when called, a batch that does not divide, or a stage that returns
      something else than it takes.

  Example:
    >>> init = with_logical_partitioning(nn.initializers.lecun_normal(), ('embed', 'mlp'))
    >>> class Deep(nn.Module):
    ...   @nn.compact
    ...   def __call__(self, x):
    ...     block = pipeline.stacked(nn.Dense, stages=4, microbatches=2)
    ...     return block(8, use_bias=False, kernel_init=init, name='blocks')(x)
    >>> layout = Layout({'stage': 4, 'data': 2}, (('stage', 'stage'), ('batch', 'data')))
    >>> variables = layout.init(Deep().init, jax.random.key(0), jnp.ones((4, 8)))
    >>> variables['params']['blocks']['kernel'].value.sharding.spec
    P('stage', None, None)
    >>> layout.jit(Deep().apply)(variables, jnp.ones((4, 8))).shape
    (4, 8)
  """
  at_least_one(stages, 'stacked: stages')
  at_least_one(microbatches, 'stacked: microbatches')

  def lifted(body: Callable[..., Any], **_: Any) -> Callable[[Any, Any], Any]:
    all_at_once = flax.core.vmap(
      body,
      variable_axes={'params': 0},
      split_rngs=_SPLIT_ALL,
      axis_size=stages,
      metadata_params={nn.PARTITION_NAME: axis},
    )
    return lambda scope, x: _run(all_at_once, scope, x, stages, microbatches, _Places(axis, names))

  return nn.transforms.lift_transform(lifted, target)


class _Places:
  """Where what the stages work on lies: a stage's on its devices."""

  def __init__(self, axis: str, names: Any):
    self._names = jax.tree.map(
      lambda each: (axis, *each), names, is_leaf=lambda each: type(each) is tuple
    )

  def __call__(self, x: Any) -> Any:
    return with_logical_constraint(x, self._names)


def _run(all_at_once, scope: Any, x: Any, stages: int, microbatches: int, place: _Places) -> Any:
  """All microbatches through all stages."""
  initializing = any(one.is_mutable_collection('params') for one in jax.tree.leaves(scope))
  count = _count(x, microbatches, initializing)
  entering = jax.tree.map(lambda leaf: _dealt(leaf, count, stages - 1), x)
  # Before the first microbatch comes, a stage has something like it: zeros could make its gradient NaN.
  start = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[0], (stages, *leaf.shape[1:])), entering)

  def tick(scope: Any, before: Any, new: Any) -> tuple[Any, Any]:
    working = place(jax.tree.map(_moved_on, before, new))
    done = all_at_once(scope, working)
    _check_alike(working, done)
    return place(done), jax.tree.map(lambda leaf: leaf[-1], done)

  loop = flax.core.scan(tick, variable_broadcast='params', split_rngs=_SPLIT_OTHERS)
  _, left = loop(scope, place(start), entering)
  return jax.tree.map(lambda leaf: _gathered(leaf[stages - 1 :]), left)


def _moved_on(before: Any, new: Any) -> Any:
  """What each stage made, at the stage after it, and a microbatch that comes in at the first one."""
  first = jnp.arange(len(before)).reshape(-1, *[1] * (before.ndim - 1)) == 0
  return jnp.where(first, new[None], jnp.roll(before, 1, axis=0))


def _dealt(leaf: Any, count: int, more: int) -> Any:
  """Microbatches in the first dimension; after the last one it comes again, and nobody looks at that."""
  rows = jnp.swapaxes(jnp.reshape(leaf, (-1, count, *leaf.shape[1:])), 0, 1)
  return jnp.concatenate([rows, jnp.broadcast_to(rows[-1:], (more, *rows.shape[1:]))])


def _gathered(rows: Any) -> Any:
  """Examples in their order."""
  return jnp.reshape(jnp.swapaxes(rows, 0, 1), (-1, *rows.shape[2:]))


def _count(x: Any, microbatches: int, initializing: bool) -> int:
  """Into how many microbatches a batch is divided; one for `init` need not be large enough."""
  named = named_leaves(x)
  sizes = {leaf.shape[0] if leaf.ndim else 0 for _, leaf in named}
  if len(sizes) != 1 or 0 in sizes:
    raise PipelineError(
      'stacked: arrays that go through stages have examples in their first dimension, all as many:\n'
      + (
        few([f'  {name}: {leaf.dtype}{list(leaf.shape)}' for name, leaf in named]) or '  there are none'
      )
      + '\nFix: give each array a first dimension of examples; what has none, the stages close over.'
    )
  [size] = sizes
  if size % microbatches == 0:
    return microbatches
  if initializing:
    return 1
  raise PipelineError(
    f'stacked: a batch of {size} cannot be split into {microbatches} equal microbatches.\n'
    f'Fix: {way_out(size, microbatches, None)}'
  )


def _check_alike(given: Any, made: Any) -> None:
  """Raises unless a stage returns what the next one takes."""
  was, now = (
    [(name, f'{leaf.dtype}{list(leaf.shape[1:])}') for name, leaf in named_leaves(tree)]
    for tree in (given, made)
  )
  if was != now:
    raise PipelineError(
      'stacked: a stage returns something else than it takes, which the next one takes too:\n'
      f'{few(differences(was, now) or ["  it is in containers of other kinds"])}\n'
      'Fix: let it return arrays like those it gets; what changes shape comes before or after the stages.'
    )
