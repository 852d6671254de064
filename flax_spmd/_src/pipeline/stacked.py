"""Stacked stages: a pipeline of identical stages within one program.

    blocks = spmd.pipeline.stacked(Block, stages=4, microbatches=8)(width, name='blocks')
    x = blocks(x)                                   # in a Linen module, under any `layout.jit`

`layout.pipeline_jit` compiles one program per stage, and keeps a stage's arrays on that stage's devices.
Within one program every array spans the whole mesh. So the parameters of all stages are one array with a
leading stage dimension, which a rule such as `('stage', 'stage')` shards over a mesh axis. All stages
run in parallel, each on a different microbatch. After every tick their outputs move to the next stage: a
`collective-permute` between neighbours.

With m microbatches and p stages the forward takes m + p - 1 ticks, and so does the backward: it is
the gradient of the loop, so all forwards come first. That is GPipe's order
(https://arxiv.org/abs/1811.06965), with its bubble of (p - 1) / (m + p - 1) and its memory: activations
of all microbatches, unless a stage is wrapped in `nn.remat`. Layers outside the stages (embedding, head)
are computed on every stage's devices.
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
from flax_spmd._src.pipeline.accumulate import suggestion
from flax_spmd._src.pipeline.argument_checks import differences, named_leaves
from flax_spmd._src.pipeline.schedules.stage_ranks import check_positive
from flax_spmd._src.public import public
from flax_spmd._src.text import first_lines
from flax_spmd.errors import PipelineError

_SPLIT_ALL: Mapping[Any, bool] = {True: True}
_SPLIT_OTHERS: Mapping[Any, bool] = {'params': False, DenyList('params'): True}


@public('flax_spmd.pipeline')
def stacked(
  target: Any, stages: int, microbatches: int, *, axis: str = 'stage', names: Any = ('batch',)
) -> Any:
  """Repeats a Linen module as the stages of a pipeline within one program.

  Values and gradients equal those of the modules in sequence; parameters have the structure of `nn.scan`
  with `variable_axes={'params': 0}`. Random keys (dropout) differ between stages and microbatches.

  Args:
    target: one stage: a Module class, or a function of a Module and a value. It maps a tree of arrays
      with examples in the first dimension to a tree of the same shapes and dtypes; inputs of every stage
      (a mask) are passed along in the tree. It has parameters only, no batch statistics.
    stages: number of stages.
    microbatches: number of microbatches to split the examples into, as in `accumulate`.
    axis: logical name of the leading dimension of the parameters; a rule shards it over a mesh axis.
    names: logical names of the leading dimensions of the values between stages, or a tree of such names
      that is a prefix of them.

  Returns:
    `target`, transformed.

  Raises:
    PipelineError: a number below 1; when called, a batch that does not divide, or a stage whose result
      differs in shape or dtype from its input.

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
  check_positive(stages, 'stacked: stages')
  check_positive(microbatches, 'stacked: microbatches')

  # between stages, the leading dimension is that of the stages
  own = jax.tree.map(lambda each: (axis, *each), names, is_leaf=lambda each: type(each) is tuple)

  def constrain(x: Any) -> Any:
    return with_logical_constraint(x, own)

  def lifted(body: Callable[..., Any], **_: Any) -> Callable[[Any, Any], Any]:
    all_stages = flax.core.vmap(
      body,
      variable_axes={'params': 0},
      split_rngs=_SPLIT_ALL,
      axis_size=stages,
      metadata_params={nn.PARTITION_NAME: axis},
    )
    return lambda scope, x: _run(all_stages, scope, x, stages, microbatches, constrain)

  return nn.transforms.lift_transform(lifted, target)


def _run(
  all_stages, scope: Any, x: Any, stages: int, microbatches: int, constrain: Callable[[Any], Any]
) -> Any:
  """Runs all microbatches through all stages."""
  initializing = any(one.is_mutable_collection('params') for one in jax.tree.leaves(scope))
  count = _count(x, microbatches, initializing)
  entering = jax.tree.map(lambda leaf: _split(leaf, count, stages - 1), x)
  # Until its first microbatch arrives, a stage runs on a copy of it: zeros could give NaN gradients.
  start = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[0], (stages, *leaf.shape[1:])), entering)

  def tick(scope: Any, before: Any, new: Any) -> tuple[Any, Any]:
    given = constrain(jax.tree.map(_shift, before, new))
    results = all_stages(scope, given)
    _check_structure(given, results)
    return constrain(results), jax.tree.map(lambda leaf: leaf[-1], results)

  loop = flax.core.scan(tick, variable_broadcast='params', split_rngs=_SPLIT_OTHERS)
  _, leaving = loop(scope, constrain(start), entering)
  return jax.tree.map(lambda leaf: _merge(leaf[stages - 1 :]), leaving)


def _shift(before: Any, new: Any) -> Any:
  """The result of each stage at the next stage, and a new microbatch at the first stage."""
  first = jnp.arange(len(before)).reshape(-1, *[1] * (before.ndim - 1)) == 0
  return jnp.where(first, new[None], jnp.roll(before, 1, axis=0))


def _split(leaf: Any, count: int, padding: int) -> Any:
  """Microbatches in the first dimension, padded with copies of the last one."""
  rows = jnp.swapaxes(jnp.reshape(leaf, (-1, count, *leaf.shape[1:])), 0, 1)
  return jnp.concatenate([rows, jnp.broadcast_to(rows[-1:], (padding, *rows.shape[1:]))])


def _merge(rows: Any) -> Any:
  """The inverse of `_split`: examples in their original order."""
  return jnp.reshape(jnp.swapaxes(rows, 0, 1), (-1, *rows.shape[2:]))


def _count(x: Any, microbatches: int, initializing: bool) -> int:
  """The number of microbatches; 1 in `init`, whose batch may be too small to divide."""
  named = named_leaves(x)
  sizes = {leaf.shape[0] if leaf.ndim else 0 for _, leaf in named}
  if len(sizes) != 1 or 0 in sizes:
    raise PipelineError(
      'stacked: the inputs of a stage need the same number of examples in their first dimension:\n'
      + (
        first_lines([f'  {name}: {leaf.dtype}{list(leaf.shape)}' for name, leaf in named])
        or '  no arrays'
      )
      + '\nFix: give each array a first dimension of examples, or close over it in the stage.'
    )
  [size] = sizes
  if size % microbatches == 0:
    return microbatches
  if initializing:
    return 1
  raise PipelineError(
    f'stacked: a batch of {size} cannot be split into {microbatches} equal microbatches.\n'
    f'Fix: {suggestion(size, microbatches, None)}'
  )


def _check_structure(given: Any, results: Any) -> None:
  """Raises unless a stage's results have the paths, shapes and dtypes of its inputs."""
  before, after = (
    [(name, f'{leaf.dtype}{list(leaf.shape[1:])}') for name, leaf in named_leaves(tree)]
    for tree in (given, results)
  )
  if before != after:
    raise PipelineError(
      'stacked: the result of a stage differs from its input, so the next stage cannot take it:\n'
      f'{differences(before, after, "the order of the leaves differs")}\n'
      'Fix: return arrays of the same shapes and dtypes; change shapes before or after the stages.'
    )
