"""The text form of a layout: parse → print → parse is the identity, and mistakes name their place."""

from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import errors

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


NAME = st.text(min_size=1, max_size=8).filter(lambda name: not name.startswith('@'))
AXES = st.sampled_from([None, (), 'data', 'mod el', ('data', 'mod el')])


@given(
  st.lists(st.tuples(NAME, AXES), max_size=6),
  st.fixed_dictionaries(
    {},
    optional={
      'unmatched': st.sampled_from(['replicate', 'error']),
      'conflict': st.sampled_from(['skip', 'error']),
      'indivisible': st.sampled_from(['error', 'next', 'replicate']),
      'missing_axis': st.sampled_from(['error', 'drop']),
    },
  ),
)
def test_round_trip(clauses, policies):
  mesh = spmd.abstract_mesh({'data': 2, 'mod el': 4})
  layout = spmd.Layout(mesh, clauses, **policies)
  assert spmd.Layout.from_toml(layout.to_toml(), mesh=mesh) == layout


SPECS = st.lists(AXES | st.just(P.UNCONSTRAINED), max_size=3).map(
  lambda entries: P(*dict.fromkeys(entries))  # no axis twice
)
FILLS = st.builds(
  spmd.fsdp,
  st.sampled_from(['data', ('data', 'mod el')]),
  min_size=st.integers(0, 2**20),
  skip=st.lists(NAME, max_size=2),
)
PATHS = st.sampled_from(['kernel$', '^opt_state/', r'layer_\d+/(wi|wo)/"x"', 'a{2}'])
CLAUSES = st.recursive(
  st.tuples(NAME, AXES)
  | st.tuples(PATHS, SPECS)
  | FILLS
  | st.tuples(NAME.map('@{}'.format), SPECS | FILLS),
  lambda inner: st.tuples(
    PATHS | NAME.map('@{}'.format), st.lists(inner, max_size=3).map(lambda c: spmd.Rules(*c))
  ),
  max_leaves=6,
)


@given(st.lists(CLAUSES, max_size=5))
def test_every_kind_of_clause_round_trips(clauses):
  layout = spmd.Layout(spmd.abstract_mesh({'data': 2, 'mod el': 4}), clauses)
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
    Fix: write {path = "regex", spec = [...]}, {path = "regex", rules = {...}}, {fsdp = "axis"} or {annotation = "name", ...} with one of spec, rules and fsdp.""")
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
    Fix: upgrade flax_spmd, or start the file with format = 1.""")
  assert 'has format None' in text_of(errors.RulesError, TEXT.replace('format = 1', ''))


def test_an_unknown_entry():
  assert text_of(errors.RulesError, TEXT + '\n[meshes]\n') == dedent("""\
    The layout file has an entry 'meshes', which means nothing. Did you mean 'mesh'?
    Fix: the entries are format, mesh, mesh_axis_types, rules.""")


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
  assert text.startswith("fsdp(...) does not take axes=3, min_size='big'.")
  text = text_of(errors.RulesError, 'format = 1\n[mesh]\ndata = 8\n[rules]\nclauses = 3\n')
  assert text == 'The layout file has 3 for rules.clauses.\nFix: write a list of rules.'
  text = text_of(errors.RulesError, TEXT + '[mesh_axis_types]\ndta = "explicit"\n')
  assert text == dedent("""\
    The layout file has 'dta' in [mesh_axis_types], which is not an axis of its mesh. Did you mean 'data'?
    Fix: the axes are data, model.""")
