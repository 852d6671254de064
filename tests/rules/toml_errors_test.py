"""Layout files with mistakes, and tables that cannot be written."""

from textwrap import dedent

import pytest
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import errors

LAYOUT = spmd.Layout(spmd.abstract_mesh({'data': 2, 'model': 4}), (('embed', 'data'), ('mlp', 'model')))


def text_of(kind, fn, *args, **kwargs):
  with pytest.raises(kind) as caught:
    fn(*args, **kwargs)
  return str(caught.value)


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


def test_a_number_as_a_rule_in_a_file():
  file = 'format = 1\n[mesh]\ndata = 8\n[rules]\nclauses = [["batch", "data"], 3]\n'
  assert text_of(errors.RulesError, spmd.Layout.from_toml, file).startswith(
    'Rule 1 is 3, which is not a rule.'
  )


def test_a_function_cannot_be_written_to_a_file():
  layout = LAYOUT.replace(rules=(('@weights', by_size),))
  assert text_of(errors.RulesError, layout.to_toml) == dedent(f"""\
    Rule 0 ('@weights', {by_size!r}) has no text form: it is a function.
    Fix: write path rules and fsdp(...) instead, in tables that are saved.""")
