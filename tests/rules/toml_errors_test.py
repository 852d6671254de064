"""Layout files with mistakes, and tables that cannot be written."""

import ast
from textwrap import dedent

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import errors
from tests.texts import text_of

LAYOUT = spmd.Layout(spmd.abstract_mesh({'data': 2, 'model': 4}), (('embed', 'data'), ('mlp', 'model')))


def by_size(leaf):
  return P('data') if leaf.size > 8 else None


@pytest.mark.parametrize(
  ('clause', 'text'),
  [
    (
      '{path = "mu", rules = 3}',
      'The layout file has 3 for rules.clauses[0].rules.\nFix: write {clauses = [...]}.',
    ),
    (
      '{path = "mu", rules = {clauses = 3}}',
      'The layout file has 3 for rules.clauses[0].rules.clauses.\nFix: write a list of rules.',
    ),
  ],
)
def test_invalid_tables_in_a_file(clause, text):
  file = f'format = 1\n[mesh]\ndata = 8\n[rules]\nclauses = [{clause}]\n'
  assert text_of(errors.RulesError, spmd.Layout.from_toml, file) == text


FORMS = (
  '["name", "axis"], {host = {...}}, {path = "regex", spec = [...]}, {path = "regex", rules = {...}}, {fsdp = "axis"}, {optimizer_over = "axis"} or '
  '{annotation = "name", ...} with one of spec, rules, fsdp and optimizer_over'
)


def file_of(clauses='', mesh='data = 2\nmodel = 4', more=''):
  return f'format = 1\n\n[mesh]\n{mesh}\n\n[rules]\nclauses = [{clauses}]\n{more}'


def error_of(file):
  return text_of(errors.RulesError, spmd.Layout.from_toml, file)


@pytest.mark.parametrize(
  'entry',
  ['3', 'true', '"batch"', '[]', '["batch"]', '[3, "data"]', '[["batch", "data"], ["hidden", "model"]]'],
)
def test_entries_that_are_not_rules(entry):
  assert error_of(file_of(f'["batch", "data"], {entry}')) == (
    f'The layout file has a rule rules.clauses[1] that means nothing: {ast.literal_eval(entry.capitalize())!r}.\n'
    f'Fix: write {FORMS}.'
  )


@pytest.mark.parametrize(
  'rule',
  [
    '{path = 3, spec = []}',
    '{path = "@weights", spec = []}',
    '{annotation = 3, spec = []}',
    '{annotation = ["a"], fsdp = "data"}',
    '{path = "a", spec = [], spec.x = 3}',
    '{path = "a", spec = nan}',
    '{path = "a", spec = [["data", ["model"]]]}',
    '{}',
  ],
)
def test_rules_with_values_of_the_wrong_kind(rule):
  text = error_of(file_of(f'["batch", "data"], {rule}'))
  assert text.startswith(
    ('The layout file has a rule rules.clauses[1] that', 'The layout file is not TOML: ')
  )


@pytest.mark.parametrize(
  ('rule', 'text'),
  [
    (
      '["batch", 3]',
      "rules: Rule 0 is ('batch', 3), which is not a rule.\nFix: write every rule as ('logical name', mesh axes), "
      "('path regex', PartitionSpec), ('path regex', Rules), ('@annotation', PartitionSpec), fsdp(...), "
      'optimizer_over(...), host(...) or a function of a leaf.',
    ),
    (
      '["@grads", "data"]',
      "rules: Rule 0 is ('@grads', 'data'), but mesh axes alone do not shard an annotated value.\n"
      'Fix: give an annotation a PartitionSpec, Rules, fsdp(...), optimizer_over(...) or a function.',
    ),
    (
      '["batch", ["data", "data"]]',
      "rules: Rule 0 ('batch', ('data', 'data')) has mesh axis 'data' twice.\n"
      'Fix: give every mesh axis of a rule once.',
    ),
    (
      '{path = "mu", rules = {clauses = [["batch", "data"], {path = "(", spec = []}]}}',
      "rules.clauses[0].rules: Rule 1: '(' is not a regular expression: missing ), unterminated subpattern at "
      'position 0.\nFix: correct it; it is searched for in paths such as params/layers/wi.',
    ),
    (
      '{path = "mu", rules = {clauses = [{fsdp = "?", min_size = true}], unmatched = 3}}',
      'rules.clauses[0].rules.clauses[0]: fsdp(...) does not take axes=UNCONSTRAINED, min_size=True.\n'
      'Fix: axes is a mesh axis or a tuple of them, min_size a number of elements, skip a tuple of names.',
    ),
    (
      '{path = "mu", rules = {unmatched = 3, self = "x"}}',
      "rules.clauses[0].rules: 'self' is not a policy of a rule table.\n"
      'Fix: the policies are unmatched, conflict, indivisible, missing_axis, short_names.',
    ),
  ],
)
def test_invalid_rules_are_reported_with_their_place(rule, text):
  assert error_of(file_of(rule)) == f'In the layout file, {text}'


@pytest.mark.parametrize(
  ('size', 'shown'),
  [
    ('"2"', "'2'"),
    ('true', 'True'),
    ('nan', 'nan'),
    ('2.0', '2.0'),
    ('0', '0'),
    ('-2', '-2'),
    ('{x = {y = 1}}', "{'x': {'y': 1}}"),
    ('[2]', '[2]'),
    ('1979-05-27', 'datetime.date(1979, 5, 27)'),
  ],
)
def test_sizes_of_the_wrong_kind(size, shown):
  assert error_of(file_of(mesh=f'data = {size}')) == (
    f"The layout file gives mesh axis 'data' the size {shown}.\n"
    'Fix: write a positive number, or -1 for the rest of the devices.'
  )


def test_sizes_that_jax_cannot_count():
  assert error_of(file_of(mesh=f'data = -1\nmodel = {2**31}')) == dedent("""\
    The layout file gives its mesh more than 2147483647 devices: {'data': -1, 'model': 2147483648}.
    Fix: write smaller sizes.""")


def test_two_sizes_to_fill_in():
  assert error_of(file_of(mesh='data = -1\nmodel = -1')) == dedent("""\
    The layout file gives more than one mesh axis the size -1: 'data', 'model'.
    Fix: write -1 for one axis only.""")


@pytest.mark.parametrize(
  ('type_', 'shown'), [('["auto"]', "['auto']"), ('{}', '{}'), ('1', '1'), ('"manual"', "'manual'")]
)
def test_axis_types_of_the_wrong_kind(type_, shown):
  assert error_of(file_of(more=f'[mesh_axis_types]\ndata = {type_}\n')) == (
    f"The layout file gives mesh axis 'data' the type {shown}.\nFix: the types are auto, explicit."
  )


def test_axis_types_that_are_not_a_section():
  assert error_of(f'mesh_axis_types = 3\n{file_of()}') == dedent("""\
    The layout file has 3 for mesh_axis_types.
    Fix: write a section with a type per axis.""")


@pytest.mark.parametrize(
  ('version', 'shown'), [('true', 'True'), ('0', '0'), ('"1"', "'1'"), ('1.0', '1.0'), ('[1]', '[1]')]
)
def test_formats_of_the_wrong_kind(version, shown):
  assert error_of(file_of().replace('format = 1', f'format = {version}')) == dedent(f"""\
    The layout file has format {shown}.
    Fix: start the file with format = 1.""")


def test_a_section_that_is_no_table():
  assert error_of('format = 1\nrules = []\n[mesh]\ndata = 8\n') == dedent("""\
    The layout file has [] for rules, which is a section.
    Fix: write [rules], and below it clauses = [...].""")


TOO_DEEP = (
  'The layout file nests too deeply in line {line}: more than 60 brackets within each other, or four dots in '
  'one key.\nFix: write flatter tables.'
)


@pytest.mark.parametrize(
  'value',
  [
    '[' * 100_000,
    '[' * 100_000 + ']' * 100_000,
    '{a = ' * 5000 + '1' + '}' * 5000,
    '{path = "a", rules = {clauses = [' * 400 + ']}}' * 400,
    '[1,\n' * 5000,
  ],
  ids=['open', 'lists', 'tables', 'rules', 'lines'],
)
def test_deep_nesting(value):
  text = error_of(file_of('\n' + value))
  assert text in [TOO_DEEP.format(line=line) for line in (9, 68)]


@pytest.mark.parametrize('key', ['.'.join('a' * 5000), '"a" . ' * 5000 + 'b', "'a.b'.'c'.d.e.f"])
def test_long_keys(key):
  assert error_of(f'{file_of()}\n{key} = 1\n') == TOO_DEEP.format(line=10)
  assert error_of(f'{file_of()}\n[{key}]\n') == TOO_DEEP.format(line=10)


def test_dots_and_brackets_in_strings_and_comments_do_not_nest():
  rule = f'{{path = "{"[a.b.c.d.e]" * 50}", spec = []}}, # {"[" * 100} a.b.c.d.e.f'
  path = spmd.Layout.from_toml(file_of(rule + '\n')).rules.clauses[0][0]
  assert path == '[a.b.c.d.e]' * 50


@pytest.mark.parametrize('number', ['9' * 5000, '-' + '9' * 5000, '0x' + 'f' * 5000])
def test_long_numbers(number):
  assert error_of(file_of(mesh=f'data = {number}')) == (
    f'The layout file has a word of {len(number)} characters in line 4.\n'
    'Fix: put it into quotes, or shorten it to 100 characters.'
  )


def test_a_table_that_is_too_deep_for_a_file_is_not_written():
  rules = spmd.Rules(('batch', 'data'))
  for _ in range(19):
    rules = spmd.Rules(('mu', rules))
  layout = LAYOUT.replace(rules=rules)
  assert spmd.Layout.from_toml(layout.to_toml(), mesh=layout.mesh) == layout
  layout = layout.replace(rules=spmd.Rules(('mu', rules)))
  assert text_of(errors.RulesError, layout.to_toml) == (
    'The layout nests too deeply in line 28: more than 60 brackets within each other, or four dots in one key.\n'
    'Fix: write flatter tables.'
  )


def test_axes_without_text_are_not_written():
  mesh = Mesh(np.array(jax.devices()), (0,))
  assert text_of(errors.RulesError, spmd.Layout(mesh).to_toml) == dedent("""\
    Mesh axis 0 has no text form.
    Fix: name the axes of the mesh with plain strings.""")
  layout = spmd.Layout(spmd.abstract_mesh({'\ud800': 2}))
  assert text_of(errors.RulesError, layout.to_toml).startswith("Mesh axis '\\ud800' has no text form.")
  layout = LAYOUT.replace(rules=(('\ud800', 'data'),))
  assert text_of(errors.RulesError, layout.to_toml).startswith(
    "Rule 0 ('\\ud800', 'data') has no text form: 'utf-8' codec can't encode"
  )


def test_a_mesh_inside_shard_map_is_not_written():
  mesh = AbstractMesh((2,), ('data',), axis_types=(AxisType.Manual,))
  assert text_of(errors.RulesError, spmd.Layout(mesh).to_toml) == dedent("""\
    Mesh axis 'data' is Manual, which only exists inside shard_map.
    Fix: write the layout outside of it.""")


def test_a_function_cannot_be_written_to_a_file():
  layout = LAYOUT.replace(rules=(('@weights', by_size),))
  assert text_of(errors.RulesError, layout.to_toml) == dedent(f"""\
    Rule 0 ('@weights', {by_size!r}) has no text form: it is a function.
    Fix: write path rules and fsdp(...) instead, in tables that are saved.""")
