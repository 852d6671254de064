"""Layouts as TOML: text that a person can read, edit and keep in version control.

    format = 1

    [mesh]
    data = 2
    model = 4

    [rules]
    clauses = [
      ["batch", "data"],
      ["vocab", ["data", "model"]],
      ["embed", []],
      {path = "norm/scale$", spec = []},
      {path = "^opt_state/", rules = {clauses = [
        {fsdp = "data", min_size = 1024},
      ]}},
      {annotation = "activations", spec = ["data", "?"]},
      {fsdp = ["data", "model"]},
    ]
    unmatched = "error"

The order of clauses is their priority, `[]` is "replicated" (TOML has no null), and "?" is UNCONSTRAINED.
Axes other than Auto are listed in `[mesh_axis_types]`. Parse → print → parse is the identity. Functions have
no text form.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.sharding import AxisType

from flax_spmd._src.rules.clauses.base import kind_of_toml, toml_forms, toml_kinds
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.rules.toml_values import quoted, read_axes
from flax_spmd.errors import MeshError, RulesError, did_you_mean

FORMAT = 1
_SECTIONS = {'format', 'mesh', 'mesh_axis_types', 'rules'}


class Parsed(NamedTuple):
  """A layout file: size and type per mesh axis, and the rules."""

  axes: dict[str, int]
  types: dict[str, AxisType]
  rules: Rules


def write(axes: Mapping[str, int], types: Mapping[str, AxisType], rules: Rules) -> str:
  """The text of a layout.

  Raises:
    RulesError: a rule has no text form, such as a function.
  """
  lines = [f'format = {FORMAT}', '', '[mesh]']
  lines += [f'{_key(name)} = {size}' for name, size in axes.items()]
  special = {name: type_ for name, type_ in types.items() if type_ is not AxisType.Auto}
  if special:
    lines += ['', '[mesh_axis_types]']
    lines += [f'{_key(name)} = "{type_.name.lower()}"' for name, type_ in special.items()]
  lines += ['', '[rules]', 'clauses = [', *rules.toml_clauses('  '), ']', *rules.toml_policies()]
  return '\n'.join(lines) + '\n'


def read(text: str) -> Parsed:
  """Reads a layout file.

  Raises:
    RulesError: the text is not TOML (with the line), an entry is missing or unknown, or a newer version
      wrote the file.
  """
  try:
    table = tomllib.loads(text)
  except tomllib.TOMLDecodeError as error:
    raise RulesError(f'The layout file is not TOML: {error}.\nFix: correct the file there.') from None
  _check_sections(table)
  rules = _rules(table['rules'], 'rules')
  types = {name: _axis_type(name, value) for name, value in table.get('mesh_axis_types', {}).items()}
  return Parsed(dict(table['mesh']), types, rules)


def check_same_axes(parsed: Parsed, axes: Mapping[str, int]) -> None:
  """Raises `MeshError` unless a mesh has the axes of the file; a size of -1 matches any."""
  sizes = [
    size if required == -1 else required
    for required, size in zip(parsed.axes.values(), axes.values(), strict=False)
  ]
  if list(parsed.axes) != list(axes) or sizes != list(axes.values()):
    raise MeshError(
      f'The layout file requires the mesh {parsed.axes}, got {dict(axes)}.\n'
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
  types = table.get('mesh_axis_types', {})
  unknown = [name for name in types if name not in table['mesh']] if isinstance(types, dict) else [types]
  if unknown:
    raise RulesError(
      f'The layout file has {unknown[0]!r} in [mesh_axis_types], which is not an axis of its mesh.'
      f'{did_you_mean(str(unknown[0]), table["mesh"])}\nFix: the axes are {", ".join(table["mesh"])}.'
    )


def _axis_type(name: str, value: Any) -> AxisType:
  known = {type_.name.lower(): type_ for type_ in AxisType}
  if value not in known:
    raise RulesError(
      f'The layout file gives mesh axis {name!r} the type {value!r}.'
      f'{did_you_mean(str(value), known)}\nFix: the types are {", ".join(known)}.'
    )
  return known[value]


def _rules(table: Any, where: str) -> Rules:
  """A rule table: `[rules]`, or `rules` within a clause."""
  if not isinstance(table, dict):
    raise RulesError(f'The layout file has {table!r} for {where}.\nFix: write {{clauses = [...]}}.')
  policies = {name: value for name, value in table.items() if name != 'clauses'}
  clauses = table.get('clauses', [])
  if not isinstance(clauses, list):
    raise RulesError(
      f'The layout file has {clauses!r} for {where}.clauses.\nFix: write a list of rules.'
    )
  return Rules(
    *(_clause(clause, f'{where}.clauses[{i}]') for i, clause in enumerate(clauses)), **policies
  )


def _clause(entry: Any, where: str) -> Any:
  """A clause: a pair is a name rule, a small table any other kind."""
  if isinstance(entry, list) and len(entry) == 2:
    return (entry[0], read_axes(entry[1]))
  if not isinstance(entry, dict):
    return entry  # not a rule, as `Rules` will report
  try:
    return kind_of_toml(entry).from_toml(entry, lambda table: _rules(table, f'{where}.rules'))
  except RulesError:
    raise
  except ValueError:
    raise _meaningless(entry, where) from None


def _meaningless(entry: dict[str, Any], where: str) -> RulesError:
  kinds = toml_kinds()
  known = {'spec', 'rules', *kinds, *(key for kind in kinds.values() for key in kind.toml_keys)}
  unknown = [key for key in entry if key not in known]
  forms = toml_forms()
  return RulesError(
    f'The layout file has a rule {where} that means nothing: {entry!r}.'
    + (did_you_mean(unknown[0], known) if unknown else '')
    + f'\nFix: write {", ".join(forms[:-1])} or {forms[-1]}.'
  )


def _key(name: str) -> str:
  return name if name.isidentifier() and name.isascii() else quoted(name)
