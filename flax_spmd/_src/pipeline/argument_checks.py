"""Argument checks: finds leaves that are not arrays, and differences between two calls' arguments.

Each offending leaf is reported on one line, by its path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from flax_spmd._src.text import first_lines, value_text
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import PipelineError

_MAX_REPR = 60  # characters of a value in a message


def check_seconds(seconds: float, name: str) -> None:
  """Raises PipelineError unless a number is positive."""
  if not seconds > 0:
    raise PipelineError(f'{name} is {value_text(seconds)}.\nFix: pass a positive number of seconds.')


def check_arrays(named: Sequence[tuple[str, Any]], refused: str, fix: str) -> None:
  """Raises PipelineError with a line per leaf that is neither an array nor a number."""
  strange = [(name, repr(leaf), type(leaf)) for name, leaf in named if not _is_array(leaf)]
  if strange:
    lines = [
      f'  {name}: {text[:_MAX_REPR]}{"…" * (len(text) > _MAX_REPR)} is a {kind.__name__}'
      for name, text, kind in strange
    ]
    raise PipelineError(f'{refused}:\n{first_lines(lines)}\nFix: {fix}')


def _is_array(leaf: Any) -> bool:
  if isinstance(leaf, jax.ShapeDtypeStruct):
    return True
  try:
    jax.typeof(leaf)
  except TypeError:
    return False
  return True


def named_arguments(dynamic: tuple[tuple, dict[str, Any]]) -> list[tuple[str, Any]]:
  """The leaves of arguments, each with its path: `0/params/w` by position, `batch/x` by keyword."""
  paths = jax.tree_util.tree_leaves_with_path(dynamic)
  return [(path_string(path[1:]), leaf) for path, leaf in paths]


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
  """The leaves of a tree, each with its path."""
  return [(path_string(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def differences(old: Sequence[tuple[str, str]], new: Sequence[tuple[str, str]], otherwise: str) -> str:
  """One line per leaf that differs, for leaves given as pairs of a path and a description; `otherwise` if none does.

  Example:
    >>> print(differences([('0/w', 'float32[4]'), ('1', 'int32[]')], [('0/w', 'float32[8]'), ('2', 'int32[]')], ''))
      0/w: float32[8] instead of float32[4]
      1: missing
      2: unexpected
  """
  expected, actual = dict(old), dict(new)
  lines = [
    f'  {name}: {actual[name]} instead of {text}' for name, text in old if actual.get(name, text) != text
  ]
  lines += [f'  {name}: missing' for name in expected if name not in actual]
  lines += [f'  {name}: unexpected' for name in actual if name not in expected]
  return first_lines(lines or [f'  {otherwise}'])


def argument_text(aval: Any, spec: PartitionSpec) -> str:
  """An argument's shape, dtype and spec: `float32[8, 4] over P('data',)`."""
  weak = ' of weak type' if aval.weak_type else ''
  return f'{aval.dtype}{list(aval.shape)}{weak}{f" over {spec}" if len(spec) else ""}'
