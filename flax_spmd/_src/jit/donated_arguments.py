"""Donated arguments: those of a call, and an error where one is passed again.

JAX before 0.11.1 may end the process at an array on several devices that was donated to an earlier call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer

from flax_spmd._src.jit.arguments import Arguments

_REMEMBERED = 4096  # donated arguments


class DonatedArguments:
  """The arguments that a function of `jax.jit` donates.

  Args:
    fn: the function.
    options: arguments of `jax.jit`.
  """

  def __init__(self, fn: Callable[..., Any], options: Mapping[str, Any]):
    places = {f'static_{each}': options.get(f'donate_{each}') for each in ('argnums', 'argnames')}
    self._places = Arguments.of(fn, places)
    self._known: set[int] = set()  # ids of those of earlier calls

  def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The donated arguments of a call."""
    found = [value for position, value in enumerate(args) if position in self._places.positions]
    return found + [value for name, value in kwargs.items() if name in self._places.names]

  def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises the error of newer versions of JAX for arguments that an earlier call was given, and are deleted.

    Raises:
      RuntimeError: an array of them has been deleted.
    """
    if len(self._known) > _REMEMBERED:
      self._known.clear()
    for value in self.of(args, kwargs):
      if id(value) in self._known:
        check_not_deleted(value)
      self._known.add(id(value))


def check_not_deleted(tree: Any) -> None:
  """Raises the error of newer versions of JAX for a deleted array.

  Raises:
    RuntimeError: an array of the tree has been deleted.
  """
  for leaf in jax.tree.leaves(tree):
    if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
      raise RuntimeError(f'Array has been deleted with shape={leaf.aval.str_short()}.')
