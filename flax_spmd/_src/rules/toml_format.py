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
      {path = "norm/scale$", spec = []},
      {path = "^opt_state/", rules = {clauses = [
        {fsdp = "data", min_size = 1024},
      ]}},
      {annotation = "activations", spec = ["data", "?"]},
      {fsdp = ["data", "model"]},
    ]
    unmatched = "error"

Order counts, `[]` is "replicated" (TOML has no null), and "?" is UNCONSTRAINED. Axes that are not Auto
stand in `[mesh_axis_types]`. Parse → print → parse is the identity. Functions have no text.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, PartitionSpec

from flax_spmd._src.rules.clauses import Fsdp, fsdp
from flax_spmd._src.rules.decisions import UNCONSTRAINED
from flax_spmd._src.rules.table import Rules, is_annotation, is_logical
from flax_spmd.errors import MeshError, RulesError, did_you_mean

FORMAT = 1
_SECTIONS = {'format', 'mesh', 'mesh_axis_types', 'rules'}


class Parsed(NamedTuple):
  """What a text says: size and type per axis, and the rules."""

  axes: dict[str, int]
  types: dict[str, AxisType]
  rules: Rules


def write(axes: Mapping[str, int], types: Mapping[str, AxisType], rules: Rules) -> str:
  """The text of a layout.

  Raises:
    RulesError: a rule is a function, or has one.
  """
  lines = [f'format = {FORMAT}', '', '[mesh]']
  lines += [f'{_key(name)} = {size}' for name, size in axes.items()]
  special = {name: type_ for name, type_ in types.items() if type_ is not AxisType.Auto}
  if special:
    lines += ['', '[mesh_axis_types]']
    lines += [f'{_key(name)} = "{type_.name.lower()}"' for name, type_ in special.items()]
  lines += ['', '[rules]', 'clauses = [', *_clauses_text(rules, '  '), ']', *_policies_text(rules)]
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
  rules = _rules(table['rules'], 'rules')
  types = {name: _axis_type(name, value) for name, value in table.get('mesh_axis_types', {}).items()}
  return Parsed(dict(table['mesh']), types, rules)


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
  types = table.get('mesh_axis_types', {})
  strangers = (
    [name for name in types if name not in table['mesh']] if isinstance(types, dict) else [types]
  )
  if strangers:
    raise RulesError(
      f'The layout file has {strangers[0]!r} in [mesh_axis_types], which is no axis of its mesh.'
      f'{did_you_mean(str(strangers[0]), table["mesh"])}\nFix: the axes are {", ".join(table["mesh"])}.'
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
  """A table, `[rules]` or the `rules` of a clause."""
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
  """A clause: a pair stands for itself, everything else is a small table."""
  if isinstance(entry, list) and len(entry) == 2:
    return (entry[0], _open(entry[1]))
  if not isinstance(entry, dict):
    return entry  # no rule, as `Rules` will say
  known = {'path', 'annotation', *_PLACES, *_FSDP_OPTIONS}
  unknown = [key for key in entry if key not in known]
  places = [key for key in _PLACES if key in entry]
  misplaced = [key for key in _FSDP_OPTIONS if key in entry and 'fsdp' not in entry]
  both = 'path' in entry and ('fsdp' in entry or 'annotation' in entry)
  if unknown or misplaced or both or len(places) != 1 or not _is_spec(entry.get('spec', [])):
    raise RulesError(
      f'The layout file has a rule {where} that means nothing: {entry!r}.'
      + (did_you_mean(unknown[0], known) if unknown else '')
      + '\nFix: write {path = "regex", spec = [...]}, {path = "regex", rules = {...}}, {fsdp = "axis"} or '
      '{annotation = "name", ...} with one of spec, rules and fsdp.'
    )
  target = _PLACES[places[0]](entry, where)
  if 'annotation' in entry:
    return (f'@{entry["annotation"]}', target)
  return (entry['path'], target) if 'path' in entry else target


def _is_spec(value: Any) -> bool:
  """Whether this is a list with mesh axes for each dimension: a string, or a list of them."""
  of_strings = lambda axes: isinstance(axes, list) and all(isinstance(axis, str) for axis in axes)
  return isinstance(value, list) and all(isinstance(axes, str) or of_strings(axes) for axes in value)


def _spec(entry: dict[str, Any], where: str) -> PartitionSpec:
  return PartitionSpec(*(_open(tuple(e) if isinstance(e, list) else e) or None for e in entry['spec']))


def _fsdp(entry: dict[str, Any], where: str) -> Fsdp:
  return fsdp(entry['fsdp'], **{name: entry[name] for name in _FSDP_OPTIONS if name in entry})


_PLACES = {
  'spec': _spec,
  'rules': lambda entry, where: _rules(entry['rules'], f'{where}.rules'),
  'fsdp': _fsdp,
}
_FSDP_OPTIONS = ('min_size', 'skip')


def _open(value: Any) -> Any:
  """What a text says, with UNCONSTRAINED for "?"."""
  if isinstance(value, (list, tuple)):
    return type(value)(map(_open, value))
  return UNCONSTRAINED if value == '?' else value


def _clauses_text(rules: Rules, indent: str) -> list[str]:
  return [line for i, clause in enumerate(rules) for line in _clause_text(i, clause, indent)]


def _clause_text(index: int, clause: Any, indent: str) -> list[str]:
  if isinstance(clause, Fsdp):
    return [f'{indent}{{{_fsdp_text(clause)}}},']
  if callable(clause):
    raise _no_text(index, clause)
  name, target = clause
  if is_logical(clause):
    return [f'{indent}[{_quoted(name)}, {_axes_text(target)}],']
  head = f'annotation = {_quoted(name[1:])}' if is_annotation(clause) else f'path = {_quoted(name)}'
  if isinstance(target, PartitionSpec):
    return [f'{indent}{{{head}, spec = [{", ".join(map(_axes_text, target))}]}},']
  if isinstance(target, Fsdp):
    return [f'{indent}{{{head}, {_fsdp_text(target)}}},']
  if not isinstance(target, Rules):
    raise _no_text(index, clause)
  policies = ''.join(f', {line}' for line in _policies_text(target))
  inner = _clauses_text(target, indent + '  ')
  return [f'{indent}{{{head}, rules = {{clauses = [', *inner, f'{indent}]{policies}}}}},']


def _fsdp_text(clause: Fsdp) -> str:
  changed = {
    name: getattr(clause, name)
    for name in _FSDP_OPTIONS
    if getattr(clause, name) != getattr(Fsdp(''), name)
  }
  return ', '.join(
    [
      f'fsdp = {_axes_text(clause.axes)}',
      *(f'{name} = {_quoted(value)}' for name, value in changed.items()),
    ]
  )


def _policies_text(rules: Rules) -> list[str]:
  return [f'{name} = {_quoted(value)}' for name, value in rules.policies.changed().items()]


def _axes_text(axes: Any) -> str:
  if axes is None:
    return '[]'
  return _quoted(jax.tree.map(lambda axis: '?' if axis is UNCONSTRAINED else axis, axes))


def _no_text(index: int, clause: Any) -> RulesError:
  return RulesError(
    f'Rule {index} {clause!r} has no text: it is a function.\n'
    'Fix: say it with path rules and fsdp(...) in tables that are to be saved.'
  )


def _key(name: str) -> str:
  return name if name.isidentifier() and name.isascii() else _quoted(name)


def _quoted(value: Any) -> str:
  """Strings and lists of strings: JSON's text is TOML's, but for two kinds of characters."""
  return json.dumps(value, ensure_ascii=False).replace('\x7f', '\\u007f')
