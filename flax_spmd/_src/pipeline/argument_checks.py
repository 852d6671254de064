"""Fitting: whether the leaves of a tree are arrays, and whether arguments are like others.

What does not fit is told a line for each leaf, by its path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from flax_spmd._src.text import few
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import PipelineError

_LONG = 60  # characters of one thing


def strangers(tree: Any) -> list[str]:
  """A line for each leaf that is neither an array nor a number.

  Example:
    >>> strangers({'x': 1.0, 'name': 'a'})
    ["  name: 'a' is a str"]
  """
  return [
    f'  {path_string(path)}: {_shown(leaf)}'
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    if not _is_array(leaf)
  ]


def _shown(leaf: Any) -> str:
  said = repr(leaf)
  return f'{said if len(said) <= _LONG else f"{said[:_LONG]}…"} is a {type(leaf).__name__}'


def _is_array(leaf: Any) -> bool:
  if isinstance(leaf, jax.ShapeDtypeStruct):
    return True
  try:
    jax.typeof(leaf)
  except TypeError:
    return False
  return True


def named_arguments(dynamic: tuple[tuple, dict[str, Any]]) -> list[tuple[str, Any]]:
  """The leaves of arguments, each with its name: `0/params/w` by position, `batch/x` by keyword."""
  paths = jax.tree_util.tree_leaves_with_path(dynamic)
  return [(path_string(path[1:]), leaf) for path, leaf in paths]


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
  """The leaves of a tree, each with its path."""
  return [(path_string(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def check_arrays(dynamic: tuple[tuple, dict[str, Any]]) -> None:
  """Raises unless arguments are arrays.

  Raises:
    PipelineError: names those that are not.
  """
  strange = [
    f'  {name}: {_shown(leaf)}' for name, leaf in named_arguments(dynamic) if not _is_array(leaf)
  ]
  if strange:
    raise PipelineError(
      'Arguments are no arrays:\n'
      + few(strange)
      + '\nFix: pass arrays and numbers, or say by static_argnums or static_argnames what is static.'
    )


def differences(old: Sequence[tuple[str, str]], new: Sequence[tuple[str, str]]) -> list[str]:
  """A line for each leaf that is not as it was; leaves are given by their names and what is said of them.

  Example:
    >>> differences([('0/w', 'float32[4]'), ('1', 'int32[]')], [('0/w', 'float32[8]'), ('2', 'int32[]')])
    ['  0/w: float32[8] in place of float32[4]', '  1: is not there', '  2: is new']
  """
  was, now = dict(old), dict(new)
  lines = [
    f'  {name}: {now[name]} in place of {said}' for name, said in old if now.get(name, said) != said
  ]
  lines += [f'  {name}: is not there' for name in was if name not in now]
  lines += [f'  {name}: is new' for name in now if name not in was]
  return lines


def said_of(aval: Any, spec: PartitionSpec) -> str:
  """What is said of an argument: `float32[8, 4] over P('data',)`."""
  weak = ' of weak type' if aval.weak_type else ''
  return f'{aval.dtype}{list(aval.shape)}{weak}{f" over {spec}" if len(spec) else ""}'
