"""TOML values: strings and mesh axes, written and read.

`[]` is "replicated", since TOML has no null, and "?" is UNCONSTRAINED.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from flax_spmd._src.rules.decisions import UNCONSTRAINED, Axes


def quoted(value: Any) -> str:
  """Strings and lists of strings. JSON text is TOML text, except for two kinds of characters."""
  return json.dumps(value, ensure_ascii=False).replace('\x7f', '\\u007f')


def axes_text(axes: Axes) -> str:
  """Mesh axes as TOML.

  Example:
    >>> axes_text(None), axes_text(('data', 'model'))
    ('[]', '["data", "model"]')
  """
  if axes is None:
    return '[]'
  return quoted(jax.tree.map(lambda axis: '?' if axis is UNCONSTRAINED else axis, axes))


def spec_text(spec: PartitionSpec) -> str:
  """A PartitionSpec as TOML: `[["data"], "model"]`."""
  return f'[{", ".join(map(axes_text, spec))}]'


def read_axes(value: Any) -> Any:
  """Mesh axes from TOML, with UNCONSTRAINED for "?"."""
  if isinstance(value, (list, tuple)):
    return type(value)(map(read_axes, value))
  return UNCONSTRAINED if value == '?' else value


def read_spec(value: Any) -> PartitionSpec:
  """A PartitionSpec from TOML.

  Raises:
    ValueError: the value is not a list with a string, or a list of strings, per dimension.
  """
  if not isinstance(value, list) or not all(isinstance(e, str) or _is_strings(e) for e in value):
    raise ValueError(f'{value!r} is not a list of mesh axes')
  return PartitionSpec(*(read_axes(tuple(e) if isinstance(e, list) else e) or None for e in value))


def _is_strings(value: Any) -> bool:
  return isinstance(value, Sequence) and all(isinstance(axis, str) for axis in value)
