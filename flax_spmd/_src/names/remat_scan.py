"""Remat scan: `nn.remat_scan` for models whose parameters have names.

`nn.scan` and `nn.vmap` accept `metadata_params`, so they work with boxes. `nn.remat_scan` lacks that
argument and fails on a boxed model; this `remat_scan` accepts it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.core
import flax.linen as nn
from flax.core import Scope

from flax_spmd._src.public import public

_EVERYTHING_AT_0: Mapping[Any, Any] = {True: 0}
_SPLIT_ALL: Mapping[Any, bool] = {True: True}


@public('flax_spmd')
def remat_scan(
  target: Any,
  lengths: Sequence[int] = (),
  policy: Callable[..., bool] | None = None,
  variable_broadcast: Any = False,
  variable_carry: Any = False,
  variable_axes: Mapping[Any, Any] = _EVERYTHING_AT_0,
  split_rngs: Mapping[Any, bool] = _SPLIT_ALL,
  metadata_params: Mapping[Any, Any] | Sequence[Mapping[Any, Any]] = (),
) -> Any:
  """`nn.remat_scan` for models whose parameters have names.

  Repeats `target` `prod(lengths)` times in nested, rematerialised loops, so that memory grows with the
  `len(lengths)`-th root of the depth.

  Args:
    target: a Module class, or a function of a Module and a value. It must accept its own result.
    lengths: number of iterations per level, the outermost first.
    policy, variable_broadcast, variable_carry, variable_axes, split_rngs: as in `nn.remat_scan`.
    metadata_params: metadata of the axis that a level adds, such as `{nn.PARTITION_NAME: 'layers'}`; one per
      level, or one for all levels. A layout accepts no name twice in one array, so levels need names of their own.

  Returns:
    `target`, transformed.

  Raises:
    ValueError: `lengths` is empty, or `metadata_params` is a sequence of a different length.

  Example:
    >>> init = with_logical_partitioning(nn.initializers.ones, ('embed', 'mlp'))
    >>> stack = remat_scan(nn.Dense, (2, 3), metadata_params=({nn.PARTITION_NAME: 'group'}, {nn.PARTITION_NAME: 'layer'}))
    >>> class Deep(nn.Module):
    ...   @nn.compact
    ...   def __call__(self, x):
    ...     return stack(8, use_bias=False, kernel_init=init, name='stack')(x)
    >>> jax.eval_shape(Deep().init, jax.random.key(0), jnp.ones((1, 8)))['params']['stack']['kernel']
    LogicallyPartitioned(float32[2,3,8,8], names=('group', 'layer', 'embed', 'mlp'))
  """
  if not lengths or not isinstance(lengths, Sequence):
    raise ValueError(
      f'remat_scan has lengths={lengths!r}.\nFix: give the iterations per level, such as (4, 6).'
    )
  per_level = _per_level(metadata_params, len(lengths))
  if len(per_level) != len(lengths):
    raise ValueError(
      f'remat_scan has {len(lengths)} levels {tuple(lengths)}, but {len(per_level)} metadata_params.\n'
      'Fix: give one for all levels, or one per level.'
    )
  scan_options = {
    'variable_broadcast': variable_broadcast,
    'variable_carry': variable_carry,
    'variable_axes': variable_axes,
    'split_rngs': split_rngs,
  }

  def lifted(body: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    return _level(body, list(zip(lengths, per_level, strict=True)), policy, scan_options)

  return nn.transforms.lift_transform(lifted, target)


def _per_level(params: Mapping[Any, Any] | Sequence[Mapping[Any, Any]], levels: int) -> list[dict]:
  if isinstance(params, Mapping):
    return [dict(params)] * levels
  return [dict(each) for each in params] or [{}] * levels


def _level(body, levels, policy, scan_options) -> Callable[[Scope, Any], Any]:
  """One loop over all inner levels; only the body of the innermost is not rematerialised."""
  (length, params), *inner = levels
  step = body
  if inner:
    step = flax.core.remat(_level(body, inner, policy, scan_options), policy=policy, prevent_cse=False)

  def one(scope: Scope, carry: Any) -> tuple[Any, tuple[()]]:
    return step(scope, carry), ()

  scanned = flax.core.scan(one, length=length, metadata_params=params, **scan_options)
  return lambda scope, carry: scanned(scope, carry)[0]
