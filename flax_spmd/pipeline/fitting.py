"""Fitting: whether the leaves of a tree are arrays, and whether arguments are like others.

What does not fit is told a line for each leaf, by its path.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from flax_spmd.naming import path_string

_SHOWN = 8  # lines of one message


def strangers(tree: Any) -> list[str]:
  """A line for each leaf that is neither an array nor a number.

  Example:
    >>> strangers({'x': 1.0, 'name': 'a'})
    ["  name: 'a' is a str"]
  """
  return [
    f'  {path_string(path)}: {reprlib.repr(leaf)} is a {type(leaf).__name__}'
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    if not _is_array(leaf)
  ]


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
  parts = [*enumerate(dynamic[0]), *sorted(dynamic[1].items())]
  return [
    (path_string((jax.tree_util.DictKey(name), *path)), leaf)
    for name, part in parts
    for path, leaf in jax.tree_util.tree_leaves_with_path(part)
  ]


def staged(
  named: Sequence[tuple[str, Any]], specs: Sequence[PartitionSpec | None], axis: str
) -> list[str]:
  """A line for each leaf that is laid over the axis of the stages."""
  return [
    f'  {name}: {spec}'
    for (name, _), spec in zip(named, specs, strict=True)
    if spec is not None and any(axis in _as_tuple(entry) for entry in spec)
  ]


def _as_tuple(entry: Any) -> tuple[Any, ...]:
  return entry if isinstance(entry, tuple) else (entry,)


def differences(old: Sequence[tuple[str, str]], new: Sequence[tuple[str, str]]) -> list[str]:
  """A line for each leaf that is not as it was; leaves are given by their names and what is said of them.

  Example:
    >>> differences([('0/w', 'float32[4]'), ('1', 'int32[]')], [('0/w', 'float32[8]'), ('2', 'int32[]')])
    ['  0/w: float32[8], was float32[4]', '  1: is not there', '  2: is new']
  """
  was, now = dict(old), dict(new)
  lines = [f'  {name}: {now[name]}, was {said}' for name, said in old if now.get(name, said) != said]
  lines += [f'  {name}: is not there' for name in was if name not in now]
  lines += [f'  {name}: is new' for name in now if name not in was]
  return lines


def few(lines: Sequence[str]) -> str:
  """Some of the lines, and how many more there are.

  Example:
    >>> print(few([f'  w{i}' for i in range(10)]).splitlines()[-1])
      … and 2 more
  """
  more = [f'  … and {len(lines) - _SHOWN} more'] if len(lines) > _SHOWN else []
  return '\n'.join([*lines[:_SHOWN], *more])
