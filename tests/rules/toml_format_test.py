"""The text form of a layout: parse → print → parse is the identity, and mistakes name their place."""

import re
from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import errors
from tests.strategies import examples

TEXT = dedent("""\
  format = 1

  [mesh]
  data = 2
  model = 4

  [rules]
  clauses = [
    ["batch", "data"],
    ["vocab", ["data", "model"]],
    ["embed", []],
    ["embed", "model"],
  ]
  unmatched = "error"
  """)


def test_the_text():
  layout = spmd.Layout(
    {'data': 2, 'model': 4},
    (('batch', 'data'), ('vocab', ('data', 'model')), ('embed', None), ('embed', 'model')),
    unmatched='error',
  )
  assert layout.to_toml() == TEXT
  assert spmd.Layout.from_toml(TEXT).to_toml() == TEXT


def test_an_empty_list_stands_for_none():
  rules = spmd.Layout.from_toml(TEXT).rules
  assert rules.clauses[2] == ('embed', None)
  assert rules.spec(('embed', 'batch')) == P(None, 'data')


NASTY = [
  *(
    '',
    '_',
    '?',
    '\\?',
    '\\\\?',
    '??',
    'a.b',
    'a"b',
    "a'b",
    "'''",
    '"""',
    '\n',
    '\r\n',
    '\\',
    'a b',
    '#',
  ),
  *(
    '[',
    '=',
    '{}',
    '$HOME',
    '.*',
    '(?i)',
    'é',
    '\u2028',
    '\x00',
    '\x7f',
    '😀',
    'true',
    '1',
    '1.5',
    'inf',
  ),
  *('format', 'x' * 200, 'None'),
]
NAME = (st.sampled_from(NASTY) | st.text(max_size=8)).filter(lambda name: not name.startswith('@'))
AXES = st.sampled_from([None, (), [[]], 'data', 'mod el', ('data', ['mod el']), P.UNCONSTRAINED])


@given(
  st.lists(st.tuples(NAME, AXES), max_size=6),
  st.fixed_dictionaries(
    {},
    optional={
      'unmatched': st.sampled_from(['replicate', 'error']),
      'conflict': st.sampled_from(['skip', 'error']),
      'indivisible': st.sampled_from(['error', 'next', 'replicate']),
      'missing_axis': st.sampled_from(['error', 'drop']),
      'short_names': st.sampled_from(['pad', 'error']),
    },
  ),
)
def test_round_trip(clauses, policies):
  mesh = spmd.abstract_mesh({'data': 2, 'mod el': 4})
  layout = spmd.Layout(mesh, clauses, **policies)
  assert spmd.Layout.from_toml(layout.to_toml(), mesh=mesh) == layout


SPECS = st.lists(
  st.sampled_from([None, (), 'data', 'mod el', ('data', 'mod el'), P.UNCONSTRAINED]), max_size=3
).map(
  lambda entries: P(*dict.fromkeys(entries))  # no axis twice
)
SPECS |= SPECS.map(lambda spec: P(..., *spec))
FILLS = st.builds(
  spmd.fsdp,
  st.sampled_from(['data', ('data', 'mod el')]),
  min_size=st.integers(0, 2**20),
  skip=st.lists(NAME, max_size=2),
) | st.builds(
  spmd.optimizer_over,
  st.sampled_from(['data', ('data', 'mod el')]),
  min_size=st.integers(0, 2**20),
  avoid=st.lists(NAME, max_size=2),
)
PATHS = st.sampled_from(['kernel$', '^opt_state/', r'layer_\d+/(wi|wo)/"x"', 'a{2}', '', r'\n|\?'])
CLAUSES = st.recursive(
  st.tuples(NAME, AXES)
  | st.tuples(PATHS, SPECS)
  | FILLS
  | st.tuples(NAME.map('@{}'.format), SPECS | FILLS),
  lambda inner: (
    st.tuples(PATHS | NAME.map('@{}'.format), st.lists(inner, max_size=3).map(lambda c: spmd.Rules(*c)))
    | inner.filter(lambda clause: not re.match(r"""(host\()?\(['"]@""", str(clause))).map(spmd.host)
  ),
  max_leaves=6,
)


@given(st.lists(CLAUSES, max_size=5))
def test_every_kind_of_clause_round_trips(clauses):
  layout = spmd.Layout(spmd.abstract_mesh({'data': 2, 'mod el': 4}), clauses)
  assert spmd.Layout.from_toml(layout.to_toml(), mesh=layout.mesh) == layout


@st.composite
def layouts(draw):
  """A layout with any names for mesh axes, and rules that use them."""
  names = draw(st.lists(NAME | st.just('@'), min_size=1, max_size=3, unique=True))
  axes = st.sampled_from(names)
  several = st.lists(axes, max_size=len(names), unique=True).map(tuple)
  targets = axes | several | st.sampled_from([None, P.UNCONSTRAINED])
  clauses = (
    st.tuples(NAME, targets)
    | st.tuples(PATHS, targets.map(P))
    | st.tuples(NAME.map('@{}'.format), targets.map(lambda target: P(None, target)))
    | st.builds(spmd.fsdp, st.permutations(names).map(tuple) | axes)
  )
  types = st.sampled_from([AxisType.Auto, AxisType.Explicit])
  mesh = spmd.abstract_mesh(
    {name: draw(st.integers(1, 1000)) for name in names},
    axis_types={name: draw(types) for name in names},
  )
  return spmd.Layout(mesh, draw(st.lists(clauses, max_size=4)))


@given(layouts())
def test_every_name_of_an_axis_round_trips(layout):
  text = layout.to_toml()
  read = spmd.Layout.from_toml(text.encode().decode(), devices=layout.mesh.size)
  assert read == layout and read.to_toml() == text
  assert read.mesh.axis_types == layout.mesh.axis_types


def test_a_mesh_axis_that_is_named_as_the_text_of_unconstrained():
  mesh = spmd.abstract_mesh({'?': 2, r'\?': 4})
  rules = spmd.Rules(
    ('a', '?'),
    ('b', P.UNCONSTRAINED),
    ('c', ('?', r'\?')),
    ('w', P(r'\?', P.UNCONSTRAINED)),
    spmd.fsdp('?'),
  )
  text = spmd.Layout(mesh, rules).to_toml()
  assert (
    text
    == dedent(r"""
    format = 1

    [mesh]
    "?" = 2
    "\\?" = 4

    [rules]
    clauses = [
      ["a", "\\?"],
      ["b", "?"],
      ["c", ["\\?", "\\\\?"]],
      {path = "w", spec = ["\\\\?", "?"]},
      {fsdp = "\\?"},
    ]
    """).lstrip()
  )
  assert spmd.Layout.from_toml(text, mesh=mesh).rules == rules


WHOLE = dedent("""\
  format = 1

  [mesh]
  data = 2
  "mod el" = 4

  [mesh_axis_types]
  data = "explicit"

  [rules]
  clauses = [
    ["batch", "data"],
    ["embed", []],
    ["mlp", ["data", "mod el"]],
    {path = "norm/(scale|bias)+$", spec = [[], "?"]},
    {path = "^opt_state/", rules = {clauses = [{fsdp = "data", min_size = 1024}], unmatched = "error"}},
    {annotation = "activations", spec = ["data"]},
    {fsdp = ["data", "mod el"], skip = ["layers"]},
  ]
  conflict = "error"
  """)
VALUES = [
  *(
    'true',
    'nan',
    '-inf',
    '1e999',
    '0',
    '-1',
    '99999999999999999999',
    '0xff',
    '1.5',
    '""',
    '"?"',
    '"data"',
  ),
  *('"@a"', '[]', '[[]]', '{}', '[true]', '["data", 3]', '{a = 1}', '1979-05-27', "'''x'''", '[' * 100),
  *('a.' * 9, '9' * 999, r'"\ud800"', '"(a+)+$"', '"("', '"a{99999999999}"', '{path = "x", spec = []}'),
  *(
    '{clauses = [["a", "data"]]}',
    'data',
    'rules',
    'format = 1',
    '[rules]',
    '[[mesh]]',
    'a.b = 1',
    '"',
    "'",
  ),
  *('[', ']', '{', '}', '=', ',', '\n', '#', '\\', '25:00:00', '0000-13-40', '"' * 3, "'" * 3),
]
TOKEN = re.compile(r'"[^"\n]*"|\w+|\S|\n')


@st.composite
def changed_texts(draw):
  """A layout file with tokens replaced, removed, repeated or inserted, and characters changed."""
  tokens = TOKEN.findall(WHOLE)
  for _ in range(draw(st.integers(1, 3))):
    at = draw(st.integers(0, len(tokens) - 1))
    end = at + draw(st.integers(0, 2))
    tokens[at:end] = draw(st.lists(st.sampled_from(VALUES) | st.sampled_from(tokens), max_size=2))
  text = ' '.join(tokens)
  if draw(st.booleans()):
    at = draw(st.integers(0, len(text)))
    text = text[:at] + draw(st.text(max_size=2)) + text[at + draw(st.integers(0, 2)) :]
  return text


@settings(max_examples=examples(1000))
@given(changed_texts())
def test_a_changed_file_is_a_layout_or_an_error_that_names_the_place(text):
  try:
    layout = spmd.Layout.from_toml(text, devices=8)
  except errors.MeshError as error:
    assert '-1' in text and 'cannot be computed' in str(error)  # a size that does not fit the devices
  except errors.RulesError as error:
    mistake, _, fix = str(error).partition('\nFix: ')
    assert fix
    assert re.search(
      r'line \d+|end of document|rules|Rule \d+|mesh axis|an entry|in \[mesh|for mesh|for rules|has format|has no format|no section',
      mistake,
    )
  else:
    assert spmd.Layout.from_toml(layout.to_toml(), mesh=layout.mesh) == layout


def test_the_text_of_every_kind_of_clause():
  layout = spmd.Layout(
    spmd.abstract_mesh({'data': 2, 'model': 4}),
    (
      ('batch', 'data'),
      ('norm/scale$', P()),
      (
        '^opt_state/',
        spmd.Rules(('mu', P(None, ('data', 'model'))), spmd.fsdp('data', min_size=8), unmatched='error'),
      ),
      ('@activations', P('data', P.UNCONSTRAINED)),
      ('@grads', spmd.fsdp('data')),
      spmd.fsdp(('data', 'model'), skip=()),
    ),
  )
  assert layout.to_toml().partition('[rules]\n')[2] == dedent("""\
    clauses = [
      ["batch", "data"],
      {path = "norm/scale$", spec = []},
      {path = "^opt_state/", rules = {clauses = [
        {path = "mu", spec = [[], ["data", "model"]]},
        {fsdp = "data", min_size = 8},
      ], unmatched = "error"}},
      {annotation = "activations", spec = ["data", "?"]},
      {annotation = "grads", fsdp = "data"},
      {fsdp = ["data", "model"], skip = []},
    ]
    """)


def test_a_function_has_no_text():
  def by_rank(leaf):
    return None

  with pytest.raises(errors.RulesError) as caught:
    spmd.Layout({'data': 8}, (('batch', 'data'), by_rank)).to_toml()
  assert str(caught.value) == dedent(f"""\
    Rule 1 {by_rank!r} has no text form: it is a function.
    Fix: write path rules and fsdp(...) instead, in tables that are saved.""")


def test_a_clause_that_means_nothing():
  text = text_of(errors.RulesError, TEXT.replace('["embed", []]', '{pth = "kernel$", spec = []}'))
  assert (
    text
    == dedent("""\
    The layout file has a rule rules.clauses[2] that means nothing: {'pth': 'kernel$', 'spec': []}. Did you mean 'path'?
    Fix: write ["name", "axis"], {host = {...}}, {path = "regex", spec = [...]}, {path = "regex", rules = {...}}, {fsdp = "axis"}, {optimizer_over = "axis"} or {annotation = "name", ...} with one of spec, rules, fsdp and optimizer_over.""")
  )


def test_axis_types_travel():
  mesh = spmd.make_mesh({'data': 2, 'model': 4}, axis_types={'data': AxisType.Explicit})
  layout = spmd.Layout(mesh, (('batch', 'data'),))
  assert '[mesh_axis_types]\ndata = "explicit"\n' in layout.to_toml()
  assert spmd.Layout.from_toml(layout.to_toml()).mesh.axis_types == mesh.axis_types


def test_minus_one_and_another_mesh():
  text = TEXT.replace('data = 2', 'data = -1')
  assert spmd.Layout.from_toml(text).mesh.shape == {'data': 2, 'model': 4}
  abstract = spmd.abstract_mesh({'data': 64, 'model': 4})
  assert spmd.Layout.from_toml(text, mesh=abstract).mesh == abstract


def text_of(kind, *args, **kwargs):
  with pytest.raises(kind) as caught:
    spmd.Layout.from_toml(*args, **kwargs)
  return str(caught.value)


def test_no_toml():
  text = text_of(errors.RulesError, 'format = 1\n[mesh\n')
  assert text.startswith('The layout file is not TOML: ') and 'line 2' in text
  assert text.endswith('Fix: correct the file there.')


def test_a_newer_format_and_none():
  assert text_of(errors.RulesError, TEXT.replace('format = 1', 'format = 2')) == dedent("""\
    The layout file has format 2, this version reads up to 1.
    Fix: upgrade flax_spmd, or write the file for format = 1.""")
  assert text_of(errors.RulesError, TEXT.replace('format = 1', '')) == dedent("""\
    The layout file has no format.
    Fix: start the file with format = 1.""")
  assert text_of(errors.RulesError, TEXT.replace('format = 1', 'fromat = 1')).startswith(
    "The layout file has an entry 'fromat', which means nothing. Did you mean 'format'?"
  )


def test_an_unknown_entry():
  assert text_of(errors.RulesError, TEXT + '\n[meshes]\n') == dedent("""\
    The layout file has an entry 'meshes', which means nothing. Did you mean 'mesh'?
    Fix: the entries are format, mesh, mesh_axis_types, rules, strict.""")


def test_a_missing_section():
  assert text_of(errors.RulesError, 'format = 1\n[mesh]\ndata = 8\n') == dedent("""\
    The layout file has no section [rules].
    Fix: add it.""")


def test_mistakes_in_the_rules_are_the_tables_own():
  assert "'unmatchd' is not a policy" in text_of(
    errors.RulesError, TEXT.replace('unmatched', 'unmatchd')
  )
  assert 'Rule 0 is' in text_of(errors.RulesError, TEXT.replace('"batch", "data"', '"batch", 3'))
  assert "mesh axis 'dat'" in text_of(
    errors.MeshAxisError, TEXT.replace('"batch", "data"', '"batch", "dat"')
  )


def test_an_axis_type_that_is_none():
  text = TEXT + '\n[mesh_axis_types]\ndata = "explict"\n'
  assert text_of(errors.RulesError, text).startswith(
    "The layout file gives mesh axis 'data' the type 'explict'. Did you mean 'explicit'?\n"
  )


def test_a_mesh_with_other_axes():
  assert text_of(errors.MeshError, TEXT, mesh=spmd.abstract_mesh({'data': 2, 'model': 8})) == dedent("""\
    The layout file requires the mesh {'data': 2, 'model': 4}, got {'data': 2, 'model': 8}.
    Fix: pass a mesh with these axes and sizes, or edit the file.""")


@pytest.mark.parametrize(
  'rule',
  [
    '{path = "w", spec = "data"}',
    '{path = "w", spec = 3}',
    '{path = "w", spec = [], skip = ["a"]}',
    '{path = "w"}',
    '{path = "w", fsdp = "data"}',
    '{path = "w", spec = [1]}',
  ],
)
def test_values_of_the_wrong_kind(rule):
  text = text_of(errors.RulesError, TEXT.replace('["embed", []]', rule))
  assert text.startswith('The layout file has a rule rules.clauses[2] that means nothing: {')


def test_other_values_of_the_wrong_kind():
  text = text_of(errors.RulesError, TEXT.replace('["embed", []]', '{fsdp = 3, min_size = "big"}'))
  assert text.startswith(
    "In the layout file, rules.clauses[2]: fsdp(...) does not take axes=3, min_size='big'."
  )
  text = text_of(errors.RulesError, 'format = 1\n[mesh]\ndata = 8\n[rules]\nclauses = 3\n')
  assert text == 'The layout file has 3 for rules.clauses.\nFix: write a list of rules.'
  text = text_of(errors.RulesError, TEXT + '[mesh_axis_types]\ndta = "explicit"\n')
  assert text == dedent("""\
    The layout file has 'dta' in [mesh_axis_types], which is not an axis of its mesh. Did you mean 'data'?
    Fix: the axes are data, model.""")
