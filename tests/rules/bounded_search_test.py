"""Path patterns in bounded time: the results of `re`, and expressions that `re` would not finish."""

import re
import time
from textwrap import dedent

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import errors
from flax_spmd._src.rules.bounded_search import MOST_WAYS, UnboundedError, bounded_search, ways
from flax_spmd._src.rules.path_patterns import searcher
from tests.strategies import PATTERN_PIECES, examples
from tests.texts import text_of


def compiles(pattern):
  """Whether it is an expression, without the possessive repetitions and flags of the wrong place."""
  try:
    return re.compile(pattern) is not None and bounded_search(pattern) is not None
  except (re.error, OverflowError, UnboundedError):
    return False


@settings(max_examples=examples(500))
@given(
  st.lists(st.sampled_from(PATTERN_PIECES), max_size=7).map(''.join).filter(compiles),
  st.text(alphabet='abA/0.\n', max_size=9),
)
def test_a_bounded_search_finds_what_re_finds(pattern, text):
  assert bounded_search(pattern)(text) == bool(re.search(pattern, text))


EXPONENTIAL = [
  *(
    '(a+)+$',
    '(.*)*x$',
    '(a|aa)+$',
    '(a|a)*b$',
    '([a-z]+)*!',
    '(.*a){20}$',
    '(a?){40}a{40}b',
    '(x+x+)+y',
  ),
  *('(((((a*)*)*)*)*)*b!', '(?:(?:a?){30}){30}b!', '^(([a-z])+.)+[A-Z]([a-z])+$', '.*.*.*.*.*.*.*=x'),
  *(
    '(?=(a+)+$)b',
    '(' * 30 + 'a' + '*)' * 30 + 'c',
    '(a+)+' * 10 + '$',
    'a?' * 40 + 'a' * 40 + 'b',
    '((a|b|ab)*c?)*d',
  ),
]


@pytest.mark.parametrize('pattern', EXPONENTIAL)
def test_a_search_that_re_would_not_finish(pattern):
  assert ways(pattern) > MOST_WAYS
  layout = spmd.Layout(spmd.abstract_mesh({'x': 2}), ((pattern, P('x')),))
  tree = {'a' * 200 + '!': jnp.ones(4), 'ab' * 100 + '/': jnp.ones(4)}
  began = time.thread_time()
  layout.spec(tree)
  layout.check(tree)
  assert time.thread_time() - began < 5


ORDINARY = [
  *(
    '.*',
    '',
    'kernel$',
    'bias',
    '^opt_state/',
    '^params/w$',
    'attn/.*kernel$',
    'mu/|bias',
    '(?i)KERNEL',
  ),
  *(
    'a{2}',
    '(wq|wk|wv|gate|up|head)/kernel$',
    '(wo|down)/kernel$',
    '(^|/)wi$',
    'relpos_bias/.*',
    '[0-9]+',
  ),
  *('layers/.*?/kernel$', 'norm.*/scale$', r'layer_\d+/(wi|wo)', 'attn_[0-9]+/(q|k)?/kernels*$'),
  # T5X, MaxText, EasyLM, Scalax, big_vision
  *(
    '.*/(query|key|value)/kernel',
    r'(encoder|decoder)/layers_\d+/mlp/wi(_\d+)?/kernel',
    'target/(.*)/kernel',
  ),
  *(
    'attention/(wq|wk|wv)/kernel',
    'feed_forward/w[123]/kernel',
    'transformer/wte/embedding',
    'lm_head/kernel',
  ),
  *('.*self_attention.*(query|key|value|out).kernel', '(attention_norm|ffn_norm)/kernel'),
  *(r'^(?!.*opt_state).*kernel$', r'(?<!rel_)embedding$', r'(?:block_\d{1,2}/)?wi'),
]


@pytest.mark.parametrize('pattern', ORDINARY)
def test_ordinary_patterns_are_searched_for_by_re(pattern):
  assert ways(pattern) <= MOST_WAYS
  assert searcher(pattern).__self__.pattern == pattern


@pytest.mark.parametrize(
  'pattern',
  [
    '(?:[^/]+/)*kernel$',
    '((layers|blocks)_[0-9]+/)*wi',
    r'(\w+/)*mlp/(\w+/)*kernel',
    '.*decoder.*mlp.*(wi_0|wi_1|wo).*kernel',
  ],
)
def test_nested_repetitions_without_ambiguity_are_allowed(pattern):
  assert spmd.Rules((pattern, P())).clauses[0][0] == pattern
  paths = ['params/layers_0/mlp/wi/kernel', 'layers_1/blocks_2/wi', 'mlp/', 'kernel', 'kernel/bias']
  assert [bool(searcher(pattern)(path)) for path in paths] == [
    bool(re.search(pattern, path)) for path in paths
  ]


@pytest.mark.parametrize(
  ('pattern', 'construct'),
  [(r'((a+)+)\1$', 'groupref'), ('((a+)+)(?>b)', 'atomic_group'), ('(a+)+b++', 'possessive_repeat')],
)
def test_an_exponential_search_that_cannot_be_bounded_is_refused(pattern, construct):
  with pytest.raises(UnboundedError):
    bounded_search(pattern)
  assert text_of(errors.RulesError, spmd.Rules, ('bias', P()), (pattern, P())) == (
    f'Rule 1: a search for {pattern!r} may take exponential time, because it has nested repetitions and a '
    f'construct of the kind {construct}.\n'
    'Fix: write it without backreferences and possessive groups, or without a repetition inside a repetition.'
  )


def test_backreferences_without_nested_repetitions_are_allowed():
  layout = spmd.Layout(spmd.abstract_mesh({'x': 2}), ((r'(\w+)/\1$', P('x')),))
  assert layout.spec({'a': {'a': jnp.ones(2), 'b': jnp.ones(2)}}) == {'a': {'a': P('x'), 'b': P()}}


def test_an_expression_that_is_too_large():
  assert text_of(errors.RulesError, spmd.Rules, ('a{99999999999}', P())) == dedent("""\
    Rule 0: 'a{99999999999}' is not a regular expression: the repetition number is too large.
    Fix: correct it; it is searched for in paths such as params/layers/wi.""")
  assert text_of(errors.RulesError, spmd.Rules, ('(' * 5000 + ')' * 5000, P())).startswith(
    "Rule 0: '(((("
  )
