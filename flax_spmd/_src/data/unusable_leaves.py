"""Unusable leaves: leaves of a tree that no device can hold, each named with its path."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from flax_spmd._src.text import value_text
from flax_spmd.errors import Problem, raise_problems

_NUMBERS = (np.ndarray, np.generic, bool, int, float, complex)


def check_usable(leaves: Iterable[tuple[str, Any]]) -> None:
  """Raises `LayoutError` for leaves that `jax.device_put` refuses: text, tensors of other libraries, deleted arrays.

  Args:
    leaves: paths and leaves.
  """
  found = (unusable(path, leaf) for path, leaf in leaves)
  raise_problems([problem for problem in found if problem])


def unusable(path: str, leaf: Any) -> Problem | None:
  """The problem of a leaf that is no array or number of JAX, or an array that is deleted; None otherwise."""
  if isinstance(leaf, Tracer):
    return None
  if isinstance(leaf, jax.Array):
    fix = 'pass the state that the step returned, not the one that was donated to it.'
    deleted = f'{path} has been deleted, or donated to a jitted function.'
    return Problem(deleted, fix) if leaf.is_deleted() else None
  if not hasattr(leaf, '__jax_array__') and not _is_number(leaf):
    shown = ' '.join(value_text(leaf).split())
    return Problem(f'{path}: {shown:.60} is no array or number of JAX.', _fix(leaf))
  return None


def _fix(leaf: Any) -> str:
  if isinstance(leaf, int):
    return 'pass a smaller number or a float, or set jax_enable_x64 before JAX is first used.'
  is_array = hasattr(leaf, 'shape') and hasattr(leaf, 'dtype') and not isinstance(leaf, np.ndarray)
  if is_array or isinstance(leaf, range):
    return 'convert it with numpy.asarray, or keep it out of the tree.'
  return 'keep it out of the tree, or make it static, such as by flax.struct.field(pytree_node=False).'


def _is_number(leaf: Any) -> bool:
  if not isinstance(leaf, _NUMBERS):
    return False
  try:
    np.zeros((), jnp.result_type(leaf))[...] = leaf if isinstance(leaf, int) else 0
  except (TypeError, OverflowError):
    return False
  return True
