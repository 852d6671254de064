r"""TOML values: strings and mesh axes, written and read.

`[]` is "replicated", since TOML has no null, "?" is UNCONSTRAINED, and "..." is an Ellipsis. A mesh axis that is
named `?` or `...` is written with a backslash before it, and one that is named `\?` with one more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from flax_spmd._src.rules.decisions import UNCONSTRAINED, Axes
from flax_spmd._src.text import value_text

_SPECIAL = re.compile(r'\\*(\?|\.\.\.)')


def quoted(value: Any) -> str:
  """Strings and lists of strings. JSON text is TOML text, except for two kinds of characters.

  Raises:
    ValueError: a string cannot be encoded in a file.
  """
  text = json.dumps(value, ensure_ascii=False).replace('\x7f', '\\u007f')
  text.encode()
  return text


def axes_text(axes: Axes) -> str:
  """Mesh axes as TOML.

  Example:
    >>> axes_text(None), axes_text(('data', 'model'))
    ('[]', '["data", "model"]')
  """
  if axes is None:
    return '[]'
  return quoted([_axis_text(axis) for axis in axes] if isinstance(axes, tuple) else _axis_text(axes))


def spec_text(spec: PartitionSpec) -> str:
  """A PartitionSpec as TOML: `[["data"], "model"]`."""
  return f'[{", ".join(map(axes_text, spec))}]'


def read_axes(value: Any) -> Any:
  """Mesh axes from TOML, with UNCONSTRAINED for "?" and an Ellipsis for "..."."""
  if isinstance(value, (list, tuple)):
    return type(value)(map(read_axes, value))
  if value == '?':
    return UNCONSTRAINED
  if value == '...':
    return ...
  return value[1:] if isinstance(value, str) and _SPECIAL.fullmatch(value) else value


def read_spec(value: Any) -> PartitionSpec:
  """A PartitionSpec from TOML.

  Raises:
    ValueError: the value is not a list with a string, or a list of strings, per dimension.
  """
  if not isinstance(value, list) or not all(isinstance(e, str) or _is_strings(e) for e in value):
    raise ValueError(f'{value_text(value)} is not a list of mesh axes')
  return PartitionSpec(*map(_read_entry, value))


def _read_entry(value: Any) -> Axes:
  axes = read_axes(tuple(value) if isinstance(value, list) else value)
  return (axes,) if isinstance(axes, str) else axes or None  # JAX reads '' as None, but not ('',)


def _axis_text(axis: Any) -> str:
  if axis is UNCONSTRAINED:
    return '?'
  if axis is ...:
    return '...'
  return f'\\{axis}' if _SPECIAL.fullmatch(axis) else axis


def _is_strings(value: Any) -> bool:
  return isinstance(value, Sequence) and all(isinstance(axis, str) for axis in value)
