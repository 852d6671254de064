r"""Layouts as TOML: text that a person can read, edit and keep in version control.

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

A strict layout has `strict = true` after the format. The order of clauses is their priority, `[]` is "replicated"
(TOML has no null), "?" is UNCONSTRAINED (a mesh axis of that name is "\\?"), and "..." at the start of a spec
aligns it with the last dimensions. Axes other than Auto are listed in
`[mesh_axis_types]`. Parse → print → parse is the identity. Functions have no text form.

The author of a file may be hostile: a file is a layout, or it is a RulesError that names the line or the entry.
"""

from __future__ import annotations

import math
import re
import reprlib
import tomllib
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.sharding import AxisType

from flax_spmd._src.mesh import MOST_DEVICES
from flax_spmd._src.rules.clauses.base import kind_of_toml, toml_forms, toml_kinds
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.rules.toml_values import quoted, read_axes
from flax_spmd._src.text import value_text
from flax_spmd.errors import MeshError, RulesError, did_you_mean

FORMAT = 1
_SECTIONS = {'format', 'strict', 'mesh', 'mesh_axis_types', 'rules'}
_TYPES = {'auto': AxisType.Auto, 'explicit': AxisType.Explicit}
_MOST_BRACKETS = 60  # within each other; a parser that recurses ends at some depth
_LONGEST_WORD = 100  # characters of a key or a number without quotes


class Parsed(NamedTuple):
  """A layout file: size and type per mesh axis, the rules, and whether the layout is strict."""

  axes: dict[str, int]
  types: dict[str, AxisType]
  rules: Rules
  strict: bool


def write(
  axes: Mapping[str, int], types: Mapping[str, AxisType], rules: Rules, *, strict: bool = False
) -> str:
  """The text of a layout.

  Raises:
    RulesError: a rule has no text form, such as a function; or an axis has none.
  """
  keys = {name: _key(name) for name in axes}
  lines = [f'format = {FORMAT}', *(['strict = true'] if strict else []), '', '[mesh]']
  lines += [f'{keys[name]} = {size}' for name, size in axes.items()]
  special = {name: type_ for name, type_ in types.items() if type_ is not AxisType.Auto}
  if special:
    lines += ['', '[mesh_axis_types]']
    lines += [f'{keys[name]} = "{_type_text(name, type_)}"' for name, type_ in special.items()]
  lines += ['', '[rules]', 'clauses = [', *rules.toml_clauses('  '), ']', *rules.toml_policies()]
  text = '\n'.join(lines) + '\n'
  _check_nesting(text, 'The layout')
  return text


def read(text: str) -> Parsed:
  """Reads a layout file.

  Raises:
    RulesError: the text is none, or not TOML (with the line), an entry is missing, unknown or of the wrong kind, or a
      newer version wrote the file.
  """
  if not isinstance(text, str):
    raise RulesError(
      f'A {type(text).__name__} is not the text of a layout file.\nFix: pass its text, such as path.read_text().'
    )
  if len(text.splitlines()) == 1 and (text.strip().endswith('.toml') or not re.search(r'[=\[#]', text)):
    raise RulesError(
      f'{value_text(text)} is the name of a layout file, not its text.\nFix: pass its text, Path({value_text(text)}).read_text().'
    )
  _check_nesting(text, 'The layout file')
  try:
    table = tomllib.loads(text)
  except ValueError as error:
    raise RulesError(f'The layout file is not TOML: {error}.\nFix: correct the file there.') from None
  _check_sections(table)
  _check_sizes(table['mesh'])
  types = table.get('mesh_axis_types', {})
  _check_types(types, table['mesh'])
  rules = _rules(table['rules'], 'rules')
  axis_types = {name: _TYPES[value] for name, value in types.items()}
  return Parsed(dict(table['mesh']), axis_types, rules, table.get('strict', False))


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


def _check_nesting(text: str, what: str) -> None:
  """Raises if the text nests too deeply for a parser, or has a number that is too long to read."""
  depth = 0
  for token in _TOKEN.finditer(text):
    depth += _STEP.get(token[0], 0)
    if depth <= _MOST_BRACKETS and token.lastgroup is None:
      continue
    line = text.count('\n', 0, token.start()) + 1
    if depth > _MOST_BRACKETS or token['dotted']:
      raise RulesError(
        f'{what} nests too deeply in line {line}: more than {_MOST_BRACKETS} brackets within each other, or '
        'four dots in one key.\nFix: write flatter tables.'
      )
    raise RulesError(
      f'{what} has a word of {len(token[0])} characters in line {line}.\n'
      f'Fix: put it into quotes, or shorten it to {_LONGEST_WORD} characters.'
    )


_SECTION_FORMS = {
  'mesh': '[mesh], and below it a line such as data = 8 for each axis',
  'rules': '[rules], and below it clauses = [...]',
}


def _check_sections(table: Mapping[str, Any]) -> None:
  version = table.get('format', FORMAT)
  if type(version) is int and version > FORMAT:  # it may have entries that this version does not know
    raise RulesError(
      f'The layout file has format {version}, this version reads up to {FORMAT}.\n'
      f'Fix: upgrade flax_spmd, or write the file for format = {FORMAT}.'
    )
  for name in table:
    if name not in _SECTIONS:
      raise RulesError(
        f'The layout file has an entry {value_text(name)}, which means nothing.{did_you_mean(name, _SECTIONS)}\n'
        f'Fix: the entries are {", ".join(sorted(_SECTIONS))}.'
      )
  if 'format' not in table or type(version) is not int or version < 1:
    has = f'format {_shown(version)}' if 'format' in table else 'no format'
    raise RulesError(f'The layout file has {has}.\nFix: start the file with format = {FORMAT}.')
  if not isinstance(table.get('strict', False), bool):
    raise RulesError(
      f'The layout file has {table["strict"]!r} for strict.\nFix: write strict = true, or remove it.'
    )
  for name in ('mesh', 'rules'):
    if name not in table:
      raise RulesError(f'The layout file has no section [{name}].\nFix: add it.')
    if not isinstance(table[name], dict):
      raise RulesError(
        f'The layout file has {_shown(table[name])} for {name}, which is a section.\n'
        f'Fix: write {_SECTION_FORMS[name]}.'
      )


def _check_sizes(mesh: Mapping[str, Any]) -> None:
  for name, size in mesh.items():
    if type(size) is not int or (size < 1 and size != -1):
      raise RulesError(
        f'The layout file gives mesh axis {value_text(name)} the size {_shown(size)}.\n'
        'Fix: write a positive number, or -1 for the rest of the devices.'
      )
  if math.prod(map(abs, mesh.values())) > MOST_DEVICES:
    raise RulesError(
      f'The layout file gives its mesh more than {MOST_DEVICES} devices: {_shown(dict(mesh))}.\n'
      'Fix: write smaller sizes.'
    )
  fills = [name for name, size in mesh.items() if size == -1]
  if len(fills) > 1:
    raise RulesError(
      f'The layout file gives more than one mesh axis the size -1: {", ".join(map(repr, fills))}.\n'
      'Fix: write -1 for one axis only.'
    )


def _check_types(types: Any, mesh: Mapping[str, int]) -> None:
  if not isinstance(types, dict):
    raise RulesError(
      f'The layout file has {_shown(types)} for mesh_axis_types.\nFix: write a section with a type per axis.'
    )
  for name, value in types.items():
    if name not in mesh:
      raise RulesError(
        f'The layout file has {value_text(name)} in [mesh_axis_types], which is not an axis of its mesh.'
        f'{did_you_mean(name, mesh)}\nFix: the axes are {", ".join(mesh)}.'
      )
    if not isinstance(value, str) or value not in _TYPES:
      raise RulesError(
        f'The layout file gives mesh axis {value_text(name)} the type {_shown(value)}.'
        f'{did_you_mean(value, _TYPES)}\n'
        f'Fix: the types are {", ".join(_TYPES)}.'
      )


def _rules(table: Any, where: str) -> Rules:
  """A rule table: `[rules]`, or `rules` within a clause."""
  if not isinstance(table, dict):
    raise RulesError(
      f'The layout file has {_shown(table)} for {where}.\nFix: write {{clauses = [...]}}.'
    )
  policies = {name: value for name, value in table.items() if name != 'clauses'}
  written = table.get('clauses', [])
  if not isinstance(written, list):
    raise RulesError(
      f'The layout file has {_shown(written)} for {where}.clauses.\nFix: write a list of rules.'
    )
  clauses = [_clause(clause, f'{where}.clauses[{i}]') for i, clause in enumerate(written)]
  try:
    return Rules(*clauses, **policies)
  except RulesError as error:
    raise _placed(error, where) from None


def _clause(entry: Any, where: str) -> Any:
  """A clause: a pair is a name rule, a small table any other kind."""
  if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str):
    return (entry[0], read_axes(entry[1]))
  if not isinstance(entry, dict):
    raise _meaningless(entry, where)
  try:
    return kind_of_toml(entry).from_toml(entry, lambda table: _rules(table, f'{where}.rules'))
  except RulesError as error:
    raise _placed(error, where) from None
  except ValueError:
    raise _meaningless(entry, where) from None


def _placed(error: RulesError, where: str) -> RulesError:
  """An error with its place in the file, unless it names a place further inside."""
  text = str(error)
  if text.startswith((_PLACE, 'The layout file')):
    return error
  return type(error)(f'{_PLACE}{where}: {text}')


def _meaningless(entry: Any, where: str) -> RulesError:
  kinds = toml_kinds()
  known = {'spec', 'rules', *kinds, *(key for kind in kinds.values() for key in kind.toml_keys)}
  unknown = [key for key in entry if key not in known] if isinstance(entry, dict) else []
  forms = ['["name", "axis"]', *toml_forms()]
  return RulesError(
    f'The layout file has a rule {where} that means nothing: {_shown(entry)}.'
    + (did_you_mean(unknown[0], known) if unknown else '')
    + f'\nFix: write {", ".join(forms[:-1])} or {forms[-1]}.'
  )


def _key(name: Any) -> str:
  """A mesh axis as a TOML key; a bare one if it is a short identifier."""
  if isinstance(name, str) and name.isidentifier() and name.isascii() and len(name) <= _LONGEST_WORD:
    return name
  try:
    if isinstance(name, str):
      return quoted(name)
  except ValueError:
    pass
  raise RulesError(
    f'Mesh axis {value_text(name)} has no text form.\nFix: name the axes of the mesh with plain strings.'
  )


def _type_text(name: str, type_: AxisType) -> str:
  for text, known in _TYPES.items():
    if type_ is known:
      return text
  raise RulesError(
    f'Mesh axis {value_text(name)} is {type_.name}, which only exists inside shard_map.\n'
    'Fix: write the layout outside of it.'
  )


def _shown(value: Any) -> str:
  """A value of a file in an error message, cut to a readable length and depth."""
  return _REPR.repr(value)


_PLACE = 'In the layout file, '

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 100
_REPR.maxdict = _REPR.maxlist = 10

_STEP = {'[': 1, '{': 1, ']': -1, '}': -1}

# The parts of a TOML text that matter for its nesting: strings and comments are skipped as a whole.
_STRING = r'"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\''
_TOKEN = re.compile(
  rf"""
  \"\"\"(?:[^\\]|\\.)*?\"\"\" | \'\'\'.*?\'\'\' | \#[^\n]*
  | (?P<dotted>(?:(?:[\w-]+|{_STRING})[ \t]*\.[ \t]*){{4}})
  | {_STRING} | [\[\]{{}}] | (?P<word>[\w+-]{{{_LONGEST_WORD + 1},}})
  """,
  re.VERBOSE | re.DOTALL,
)
