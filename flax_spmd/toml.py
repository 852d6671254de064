"""The text form of a layout: TOML that a person can read, edit and keep in version control.

    format = 1

    [mesh]
    data = 2
    model = 4

    [rules]
    clauses = [
      ["batch", "data"],
      ["vocab", ["data", "model"]],
      ["embed", []],
    ]
    unmatched = "error"

Order counts, and `[]` is "replicated" (TOML has no null). Axes that are not Auto stand in
`[mesh_axis_types]`. Parse → print → parse is the identity.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.sharding import AxisType

from flax_spmd.errors import MeshError, RulesError, did_you_mean
from flax_spmd.resolution import Policies
from flax_spmd.rules import Rules

FORMAT = 1
_SECTIONS = {'format', 'mesh', 'mesh_axis_types', 'rules'}
_POLICIES = [field.name for field in dataclasses.fields(Policies)]


class Parsed(NamedTuple):
  """What a text says: size and type per axis, and the rules."""

  axes: dict[str, int]
  types: dict[str, AxisType]
  rules: Rules


def write(axes: Mapping[str, int], types: Mapping[str, AxisType], rules: Rules) -> str:
  """The text of a layout.

  Raises:
    RulesError: a rule has UNCONSTRAINED for its axes, which has no text.
  """
  lines = [f'format = {FORMAT}', '', '[mesh]']
  lines += [f'{_key(name)} = {size}' for name, size in axes.items()]
  special = {name: type_ for name, type_ in types.items() if type_ is not AxisType.Auto}
  if special:
    lines += ['', '[mesh_axis_types]']
    lines += [f'{_key(name)} = "{type_.name.lower()}"' for name, type_ in special.items()]
  lines += ['', '[rules]', 'clauses = [']
  lines += [f'  [{_quoted(name)}, {_axes_text(name, axes)}],' for name, axes in rules]
  lines += [']', *(f'{name} = {_quoted(value)}' for name, value in rules.policies.changed().items())]
  return '\n'.join(lines) + '\n'


def read(text: str) -> Parsed:
  """Reads a text that `write` wrote, or that a person did.

  Raises:
    RulesError: it does not parse (names the line), an entry is missing or unknown, or it was
      written by a newer version.
  """
  try:
    table = tomllib.loads(text)
  except tomllib.TOMLDecodeError as error:
    raise RulesError(f'The layout file is no TOML: {error}.\nFix: correct the file there.') from None
  _check_sections(table)
  rules = dict(table['rules'])
  clauses = rules.pop('clauses', [])
  types = {name: _axis_type(name, value) for name, value in table.get('mesh_axis_types', {}).items()}
  return Parsed(dict(table['mesh']), types, Rules.of(clauses, **rules))


def check_same_axes(parsed: Parsed, axes: Mapping[str, int]) -> None:
  """Raises `MeshError` unless a mesh has the axes that the text asks for; a size of -1 is any."""
  sizes = [
    size if wanted == -1 else wanted
    for wanted, size in zip(parsed.axes.values(), axes.values(), strict=False)
  ]
  if list(parsed.axes) != list(axes) or sizes != list(axes.values()):
    raise MeshError(
      f'The layout file asks for the mesh {parsed.axes}, got {dict(axes)}.\n'
      'Fix: pass a mesh with these axes and sizes, or edit the file.'
    )


def _check_sections(table: Mapping[str, Any]) -> None:
  version = table.get('format')
  if not isinstance(version, int) or version > FORMAT:
    raise RulesError(
      f'The layout file has format {version!r}, this version reads up to {FORMAT}.\n'
      f'Fix: upgrade flax_spmd, or start the file with format = {FORMAT}.'
    )
  for name in table:
    if name not in _SECTIONS:
      raise RulesError(
        f'The layout file has an entry {name!r}, which means nothing.{did_you_mean(name, _SECTIONS)}\n'
        f'Fix: the entries are {", ".join(sorted(_SECTIONS))}.'
      )
  for name in ('mesh', 'rules'):
    if not isinstance(table.get(name), dict):
      raise RulesError(f'The layout file has no section [{name}].\nFix: add it.')


def _axis_type(name: str, value: Any) -> AxisType:
  known = {type_.name.lower(): type_ for type_ in AxisType}
  if value not in known:
    raise RulesError(
      f'The layout file gives mesh axis {name!r} the type {value!r}.'
      f'{did_you_mean(str(value), known)}\nFix: the types are {", ".join(known)}.'
    )
  return known[value]


def _axes_text(name: str, axes: Any) -> str:
  if axes is None:
    return '[]'
  try:
    return _quoted(axes)
  except TypeError:
    raise RulesError(
      f'The rule ({name!r}, {axes!r}) cannot be written as text.\n'
      'Fix: use mesh axes or None in rules that are to be saved.'
    ) from None


def _key(name: str) -> str:
  return name if name.isidentifier() and name.isascii() else _quoted(name)


def _quoted(value: Any) -> str:
  """Strings and lists of strings: JSON's text is TOML's, but for two kinds of characters."""
  return json.dumps(value, ensure_ascii=False).replace('\x7f', '\\u007f')
