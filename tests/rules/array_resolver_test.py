"""Whole arrays against a table: paths, fsdp, policies, tables within the table."""

import os
import re
import subprocess
import sys
from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import errors
from flax_spmd._src.plan.planner import Planner
from flax_spmd._src.rules.array_resolver import ArrayResolver, resolver_of
from flax_spmd._src.rules.decisions import axis_names
from flax_spmd._src.rules.path_patterns import PathMatcher, plain_text
from tests import strategies
from tests.strategies import PATTERN_PIECES
from tests.texts import text_of

U = P.UNCONSTRAINED
SIZES = {'data': 2, 'model': 4}
MESH = spmd.abstract_mesh(SIZES)


def spec(rules, path, shape, dtype=jnp.float32, names=None, sizes=SIZES):
  leaf = spmd.Leaf(path, shape, dtype, names)
  return resolver_of(spmd.Rules.of(rules)).resolve(leaf, sizes).stored().spec


# -- who owns an array


def test_the_first_rule_that_applies_owns_the_array():
  rules = (
    ('attn/.*kernel$', P(None, 'model')),
    ('kernel$', P('model')),
    ('bias$', P()),
    spmd.fsdp('data', min_size=1),
  )
  assert spec(rules, 'attn/q/kernel', (8, 16)) == P(None, 'model')
  assert spec(rules, 'mlp/kernel', (8, 16)) == P('model', None)
  assert spec(rules, 'mlp/bias', (8,)) == P(None)
  assert spec(rules, 'mlp/scale', (8,)) == P('data')


def test_names_stand_where_the_first_rule_for_one_of_them_stands():
  logical, path = ('embed', 'data'), ('kernel$', P('model'))
  named = dict(path='kernel', shape=(8, 16), names=('embed', 'mlp'))
  assert spec((logical, path), **named) == P('data', None)
  assert spec((path, logical), **named) == P('model', None)
  assert spec((('bias', P()), logical, path), **named) == P('data', None)
  assert spec((path,), **named) == P('model', None)
  assert spec((logical, path), 'kernel', (8, 16)) == P('model', None)
  assert spec((('batch', 'data'), path, logical), **named) == P('model', None)
  assert spec((('batch', 'data'), path), **named) == P('model', None)


def test_a_policy_is_asked_in_its_turn_and_may_decline():
  asked = []

  def policy(leaf):
    asked.append(leaf)
    return P('data') if leaf.path == 'a' else None

  rules = (('^c', P('model')), policy, ('.*', P()))
  assert [spec(rules, path, (8,)) for path in 'abc'] == [P('data'), P(None), P('model')]
  assert asked == [spmd.Leaf('a', (8,), jnp.float32), spmd.Leaf('b', (8,), jnp.float32)]


def test_a_table_beside_a_policy_sees_the_paths_of_arrays_that_are_alike():
  def policy(leaf):
    return P('data') if leaf.path.endswith('c') else None

  inner = spmd.Rules(('a$', P('model')), ('b$', P(None, 'model')))
  tree = {key: jax.ShapeDtypeStruct((8, 16), jnp.float32) for key in 'abcd'}
  assert spmd.Layout(MESH, (policy, ('[abc]', inner))).spec(tree) == {
    'a': P('model', None),
    'b': P(None, 'model'),
    'c': P('data', None),
    'd': P(),
  }


def test_a_policy_is_not_asked_about_an_array_whose_names_are_wrong():
  asked = []
  tree = {
    'a': spmd.LogicallyPartitioned(jnp.ones((8, 16)), 'em'),
    'b': spmd.LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'mlp')),
  }
  with pytest.raises(errors.LayoutError, match="a: its names are the bare string 'em'"):
    spmd.Layout(MESH, asked.append).sharding(tree)
  assert {leaf.path for leaf in asked} == {'b'}


def test_a_policy_gets_one_name_per_dimension_or_none():
  asked = []
  tree = {
    'few': spmd.LogicallyPartitioned(jnp.ones((8, 16)), ('embed',)),
    'many': spmd.LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'mlp', 'heads')),
  }
  spmd.Layout(MESH, asked.append).sharding(tree)
  assert {leaf.path: leaf.names for leaf in asked} == {'few': ('embed', None), 'many': None}


def test_none_in_a_rule_is_a_decision_and_in_a_box_it_is_not():
  fill = spmd.fsdp('data', min_size=1)
  assert spec((('w', P(None, 'model')), fill), 'w', (8, 16)) == P(None, 'model')
  assert spec((('w', P(U, 'model')), fill), 'w', (8, 16)) == P('data', 'model')
  assert spec((('w', P(U, 'model')),), 'w', (8, 16)) == P(None, 'model')
  assert spec((('mlp', 'model'), ('embed', None), fill), 'w', (8, 16), names=('embed', 'mlp')) == P(
    None, 'model'
  )
  assert spec((('mlp', 'model'), fill), 'w', (8, 16), names=('embed', 'mlp')) == P('data', 'model')
  assert spec((('mlp', 'model'), fill), 'w', (8, 16), names=(None, 'mlp')) == P('data', 'model')


def test_fsdp_fills_the_largest_open_dimension_that_divides():
  fill = spmd.fsdp('model', min_size=8)
  assert spec((fill,), 'w', (8, 16)) == P(None, 'model')
  assert spec((fill,), 'w', (16, 16)) == P('model', None)  # the first of equals
  assert spec((fill,), 'w', (8, 18)) == P('model', None)
  assert spec((fill,), 'w', (6, 18)) == P()
  assert spec((fill,), 'w', (4,)) == P()
  assert spec((fill,), 'w', (0, 16)) == P()
  assert spec((fill,), 'step', ()) == P()
  assert spec((fill,), 'w', (16, 8), names=('layers', 'embed')) == P(None, 'model')
  both = (spmd.fsdp('model', min_size=1), spmd.fsdp('data', min_size=1))
  assert spec(both, 'w', (8, 16)) == P('data', 'model')
  assert spec((spmd.fsdp(('data', 'model'), min_size=1),), 'w', (8, 12)) == P(('data', 'model'), None)


@pytest.mark.parametrize(
  'dtype', ['int4', 'int8', 'uint8', 'int32', 'bool', 'float8_e4m3fn', 'bfloat16']
)
def test_fsdp_shards_arrays_of_any_numbers(dtype):
  """Quantised weights are integers, packed ones of 32 bits."""
  assert spec((spmd.fsdp('data', min_size=1),), 'w', (8, 16), jnp.dtype(dtype)) == P(None, 'data')


def test_fsdp_leaves_random_keys():
  keys = jax.random.split(jax.random.key(0), 16)
  assert spec((spmd.fsdp('data', min_size=1),), 'w', keys.shape, keys.dtype) == P()
  layout = spmd.Layout(MESH, (spmd.fsdp('data', min_size=1),))
  assert [skip.reason for row in layout.rows({'keys': keys}) for skip in row.skipped] == ['not numbers']


def test_a_table_within_the_table_decides_alone():
  inner = spmd.Rules(('mu', P('model')), spmd.fsdp('data', min_size=1))
  rules = (('^opt_state/', inner), ('.*', P()))
  assert spec(rules, 'opt_state/0/mu/w', (8, 16)) == P('model', None)
  assert spec(rules, 'opt_state/0/nu/w', (8, 16)) == P(None, 'data')
  assert spec(rules, 'params/w', (8, 16)) == P(None, None)
  found = resolver_of(spmd.Rules(*rules)).resolve(
    spmd.Leaf('opt_state/0/nu/w', (8, 16), jnp.float32), SIZES
  )
  assert found.decisions[1].rule == (0, 1) and spmd.Rules(*rules).at((0, 1)) == inner.clauses[1]


def test_axes_that_the_mesh_lacks_are_dropped_if_the_table_says_so():
  rules = spmd.Rules(
    ('w', P(('data', 'pod'), 'pod')), spmd.fsdp(('pod', 'model'), min_size=1), missing_axis='drop'
  )
  assert spec(rules, 'w', (8, 16)) == P('data', 'model')
  assert spec(rules, 'v', (8, 16)) == P(None, 'model')


# -- properties

LEAVES = st.builds(
  spmd.Leaf,
  st.lists(st.sampled_from(['params', 'opt_state', 'mu', 'kernel', 'bias']), min_size=1, max_size=3).map(
    '/'.join
  ),
  st.lists(strategies.dimensions | st.just(0), max_size=4).map(tuple),
  st.sampled_from([jnp.float32, jnp.bfloat16, jnp.int32, jnp.bool_]),
  st.none(),
)


@st.composite
def named_leaves(draw):
  leaf = draw(LEAVES)
  leaf = leaf._replace(optimizer='opt_state' in leaf.path.split('/'))
  if draw(st.booleans()):
    names = st.lists(
      st.none() | strategies.logical_names, min_size=len(leaf.shape), max_size=len(leaf.shape)
    )
    leaf = leaf._replace(names=tuple(strategies.without_repeats(draw(names)))[: len(leaf.shape)])
    leaf = leaf._replace(names=leaf.names + (None,) * (len(leaf.shape) - len(leaf.names)))
  return leaf


SPECS = st.lists(st.none() | strategies.mesh_axes | st.just(U), max_size=3, unique=True).map(
  lambda axes: P(*axes)
) | strategies.mesh_axes.map(lambda axes: P(..., axes, None))
PATTERNS = st.sampled_from(['kernel$', '^params', 'mu/|bias', '.*', '(kernel|bias)$', '(?i)KERNEL'])


def by_shape(leaf):
  return P('w') if len(leaf.shape) == 2 else None


def by_optimizer(leaf):
  return P(..., 'y') if leaf.optimizer else None


def by_path(leaf):
  return P('x') if 'kernel' in leaf.path else None


CLAUSES = st.recursive(
  st.tuples(strategies.logical_names, strategies.rule_targets)
  | st.tuples(PATTERNS, SPECS)
  | st.builds(spmd.fsdp, strategies.mesh_axes, min_size=st.sampled_from([0, 1, 16]))
  | st.builds(
    spmd.optimizer_over,
    strategies.mesh_axes,
    min_size=st.sampled_from([0, 16]),
    avoid=st.sampled_from(['', 'w', 'x']),
  )
  | st.sampled_from([by_shape, by_path, by_optimizer]),
  lambda inner: (
    st.tuples(PATTERNS, st.lists(inner, max_size=4).map(lambda clauses: spmd.Rules(*clauses)))
    | inner.map(spmd.host)
  ),
  max_leaves=8,
)
TABLES = st.builds(
  lambda clauses, **policies: spmd.Rules(*clauses, **policies),
  st.lists(CLAUSES, max_size=6),
  indivisible=st.sampled_from(['error', 'next', 'replicate']),
  unmatched=st.sampled_from(['replicate', 'error']),
)


@given(TABLES, named_leaves(), strategies.axis_sizes)
def test_every_spec_divides_and_uses_an_axis_once(rules, leaf, sizes):
  found = ArrayResolver(rules).resolve(leaf, sizes)
  if found.problems:
    return
  axes = axis_names(tuple(found.spec))
  assert len(axes) == len(set(axes))
  assert len(found.spec) <= len(leaf.shape)
  for size, entry in zip(leaf.shape, found.spec, strict=False):
    assert size % np.prod([sizes[axis] for axis in axis_names(entry)], dtype=int) == 0
  for decision in found.decisions:
    if decision.rule is not None:
      assert rules.at(decision.rule) is not None


@given(TABLES, st.lists(named_leaves(), max_size=8))
def test_a_plan_is_what_each_array_alone_would_get(rules, leaves):
  """The planner resolves kinds of arrays and remembers them; that must not show."""
  mesh = spmd.abstract_mesh({'w': 1, 'x': 2, 'y': 4, 'z': 3})
  tree = {}
  for i, leaf in enumerate(leaves):
    value = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    box = value if leaf.names is None else spmd.LogicallyPartitioned(value, leaf.names)
    tree[f'{i}'] = {leaf.path: box}  # a key with slashes reads like a path
  planner = Planner(mesh, rules)
  alone = {
    f'{i}': resolver_of(rules).resolve(leaf._replace(path=f'{i}/{leaf.path}'), planner.sizes)
    for i, leaf in enumerate(leaves)
  }
  if any(resolution.problems for resolution in alone.values()):
    with pytest.raises(errors.FlaxSpmdError):
      planner.shardings(tree)
  else:
    for _ in range(2):
      planned = planner.shardings(tree)
      assert {key: next(iter(inner.values())).spec for key, inner in planned.items()} == {
        key: resolution.stored().spec for key, resolution in alone.items()
      }


@given(
  st.lists(PATTERNS | st.sampled_from(['a+', 'x/y', 'k.*l$']), max_size=5),
  st.text(alphabet='akelnrximu/\n', max_size=12),
)
def test_the_matcher_finds_the_first_pattern(patterns, path):
  compiled = list(map(re.compile, patterns))
  expected = next((i for i, pattern in enumerate(compiled) if pattern.search(path)), None)
  assert PathMatcher(patterns).first(path) == expected


def compiles(pattern):
  try:
    return re.compile(pattern) is not None
  except (re.error, OverflowError):
    return False


@given(
  st.lists(st.sampled_from(PATTERN_PIECES), max_size=6).map(''.join).filter(compiles),
  st.text(alphabet='ab/0.A|(){-]\\', max_size=8),
)
def test_the_plain_text_of_a_pattern_is_in_all_that_it_matches(pattern, path):
  compiled = re.compile(pattern)
  if compiled.search(path):
    assert plain_text(compiled) in path


@pytest.mark.parametrize(
  'pattern, text',
  [
    ('attn/.*kernel$', 'kernel'),
    ('nomatch3/.*kernel', 'nomatch3/'),
    ('bias$', 'bias'),
    ('layers_[0-9]+/(wi|wo)/w', 'layers_'),
    ('a|b', ''),
    ('.*', ''),
    ('(?i)abc', ''),
    ('kernels?$', 'kernel'),
  ],
)
def test_the_plain_text_of_common_patterns(pattern, text):
  assert plain_text(re.compile(pattern)) == text


def test_every_process_decides_alike(tmp_path):
  """Hash seeds differ between processes; a layout must not."""
  script = tmp_path / 'resolve.py'
  script.write_text(
    dedent("""\
    import jax, jax.numpy as jnp, flax_spmd as spmd
    from jax.sharding import PartitionSpec as P
    sizes = [(16, 16, 16), (8, 24), (24, 24), (6, 8), (64,), (12, 12, 4)]
    tree = {f'layer_{i}': {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in zip('abcdef', sizes)} for i in range(3)}
    rules = (('a$', P(None, 'model')), ('^layer_1', spmd.Rules(spmd.fsdp('model', min_size=1))), spmd.fsdp(('data', 'model'), min_size=1))
    layout = spmd.Layout(spmd.abstract_mesh({'data': 2, 'model': 2}), rules)
    print(jax.tree.map(lambda spec: tuple(spec), layout.spec(tree)), layout.to_toml())
    """)
  )
  texts = {
    subprocess.run(
      [sys.executable, str(script)],
      env={**os.environ, 'PYTHONHASHSEED': seed, 'JAX_PLATFORMS': 'cpu'},
      capture_output=True,
      text=True,
      check=True,
    ).stdout
    for seed in ('0', '1')
  }
  assert len(texts) == 1 and 'model' in texts.pop()


# -- states

STATES = {
  'adam': optax.adam(1e-3),
  'adafactor': optax.adafactor(1e-3, min_dim_size_to_factor=8),
  'sm3': optax.sm3(1e-3),
  'lbfgs': optax.lbfgs(memory_size=3),
}


@pytest.mark.parametrize('optimizer', STATES)
@pytest.mark.parametrize(
  'rules',
  [
    (('kernel$', P(None, 'model')), ('bias$', P('model'))),
    (('opt_state/', spmd.Rules(('kernel$', P('model')))),),
  ],
)
def test_optimizer_state_under_path_rules(optimizer, rules):
  """Never an error, never a wrong axis: state lies as the rule lays the parameter that it is of."""
  params = {'kernel': jnp.ones((16, 32)), 'bias': jnp.ones(32)}
  state = TrainState.create(apply_fn=None, params=params, tx=STATES[optimizer])
  rows = spmd.Layout(MESH, rules).rows(jax.eval_shape(lambda: state))
  wanted = {16: None, 32: 'model'} if rules[0][0] == 'kernel$' else {16: 'model', 32: None}
  assert spmd.Layout(MESH, rules).sharding(state)
  for row in rows:
    if row.path.startswith('opt_state') and row.path.endswith('kernel') and np.prod(row.shape) > 1:
      entries = (*row.spec, *(None,) * (len(row.shape) - len(row.spec)))
      assert entries == tuple(wanted.get(size) for size in row.shape), row


def test_leaves_that_are_no_arrays():
  tree = {
    'int': 3,
    'bool': True,
    'float': 1.5,
    'none': None,
    'numpy': np.ones((8, 16)),
    'empty': np.ones((0, 8)),
    'state': optax.EmptyState(),
    'abstract': jax.ShapeDtypeStruct((8, 16), jnp.float32),
    'key': jax.random.key(0),
    'keys': jax.random.split(jax.random.key(0), 8),
    'half': jnp.ones((8, 16), jnp.bfloat16),
  }
  layout = spmd.Layout({'data': 2, 'model': 4}, spmd.fsdp('data', min_size=1))
  specs = layout.spec(tree)
  assert specs['none'] is None and specs['state'] == optax.EmptyState()
  sharded = {name for name in ('numpy', 'abstract', 'half') if specs[name] == P(None, 'data')}
  assert sharded == {'numpy', 'abstract', 'half'}
  assert all(specs[name] == P() for name in ('int', 'bool', 'float', 'empty', 'key', 'keys'))
  by_path = spmd.Layout(
    {'data': 2, 'model': 4},
    (
      ('keys', P('model')),
      ('.*', P('data')),
    ),
  )
  assert by_path.spec({'keys': tree['keys'], 'n': 3, 'one': np.ones(1)}) == {
    'keys': P('model'),
    'n': P(),
    'one': P(None),
  }
  del tree['abstract']
  assert layout.shard(tree)['numpy'].sharding.spec == P(None, 'data')


# -- bad input


def test_an_invalid_regular_expression():
  assert text_of(
    errors.RulesError, spmd.Rules, ('batch', 'data'), ('attn/(q', P()), ('*', P())
  ) == dedent("""\
    Rule 1: 'attn/(q' is not a regular expression: missing ), unterminated subpattern at position 5.
    Rule 2: '*' is not a regular expression: nothing to repeat at position 0.
    Fix: correct it; it is searched for in paths such as params/layers/wi.""")


def test_specs_that_do_not_fit_are_listed():
  layout = spmd.Layout(MESH, (('bias$', P('data', 'model')), ('kernel$', P('data', 'model'))))
  tree = {'a': {'bias': jnp.ones(8), 'kernel': jnp.ones((8, 6))}, 'b': {'bias': jnp.ones(8)}}
  assert (
    text_of(errors.LayoutError, layout.sharding, tree)
    == dedent("""\
    a/bias: rule 0 ('bias$', P('data', 'model')) has 2 entries for an array of rank 1, shape (8,).
    a/kernel, dim 1: size 6 is not divisible by mesh axis 'model' (4), required by rule 1 ('kernel$', P('data', 'model')).
    b/bias: rule 0 ('bias$', P('data', 'model')) has 2 entries for an array of rank 1, shape (8,).
    Fix: give at most one entry per dimension, or add a rule for this path before rule 0.
    Fix: pad it to 8, add a rule for this path before rule 1, or give the table indivisible='next' or 'replicate'.""")
  )


def test_a_mistake_is_said_once_for_parameter_and_moments():
  params = {'bias': jnp.ones(8)}
  state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
  text = text_of(errors.LayoutError, spmd.Layout(MESH, (('bias$', P('data', 'model')),)).sharding, state)
  assert text.splitlines()[0].startswith('params/bias: rule 0') and len(text.splitlines()) == 2


def test_no_rule_applies_in_a_strict_table():
  layout = spmd.Layout(MESH, (('kernel$', P('data')),), unmatched='error')
  tree = {'kernel': jnp.ones((8, 16)), 'scale': jnp.ones(8), 'step': 0, 'one': jnp.ones(1)}
  assert text_of(errors.UnmatchedNameError, layout.sharding, tree) == dedent("""\
    scale: no rule applies to this array of shape (8,), which has no names.
    Fix: add a rule for this path; ('.*', PartitionSpec()) at the end replicates the rest.""")


def test_mesh_axes_in_every_kind_of_rule():
  rules = (
    ('w', P('modle')),
    spmd.fsdp('dta'),
    ('^opt', spmd.Rules(('mu', P('pod')))),
    ('@x', P('modle')),
  )
  assert text_of(errors.MeshAxisError, spmd.Layout, MESH, rules) == dedent("""\
    Rule 0 ('w', P('modle',)) uses mesh axis 'modle', but the mesh has axes ('data', 'model'). Did you mean 'model'?
    Rule 1 fsdp('dta') uses mesh axis 'dta', but the mesh has axes ('data', 'model'). Did you mean 'data'?
    Rule 2.0 ('mu', P('pod',)) uses mesh axis 'pod', but the mesh has axes ('data', 'model').
    Rule 3 ('@x', P('modle',)) uses mesh axis 'modle', but the mesh has axes ('data', 'model'). Did you mean 'model'?
    Fix: correct the axis name, add the axis to the mesh, or give the table missing_axis='drop'.""")


def test_what_a_policy_may_return():
  def policy(leaf):
    return P('data', 'pod') if leaf.path == 'a' else 'data'

  tree = {'a': jnp.ones((8, 16)), 'b': jnp.ones(8)}
  assert text_of(errors.LayoutError, spmd.Layout(MESH, policy).sharding, tree) == dedent(f"""\
    a, dim 1 of spec P('data', 'pod') of rule 0 {policy!r}: 'pod' is not an axis of the mesh, which has ('data', 'model').
    b: rule 0 {policy!r} returned 'data'.
    Fix: correct the axis name.
    Fix: return a PartitionSpec, or None where the rule does not apply.""")


def test_a_mistake_in_a_table_within_the_table():
  layout = spmd.Layout(MESH, (('^opt', spmd.Rules(('mu', P('model')))),))
  assert (
    text_of(errors.LayoutError, layout.sharding, {'opt': {'mu': jnp.ones(6)}})
    == dedent("""\
    opt/mu: in the table of rule 0 '^opt': dim 0: size 6 is not divisible by mesh axis 'model' (4), required by rule 0 ('mu', P('model',)).
    Fix: pad it to 8, add a rule for this path before rule 0, or give the table indivisible='next' or 'replicate'.""")
  )


def test_an_annotation_needs_a_place():
  assert text_of(errors.RulesError, spmd.Rules, ('@weights', 'data')) == dedent("""\
    Rule 0 is ('@weights', 'data'), but mesh axes alone do not shard an annotated value.
    Fix: give an annotation a PartitionSpec, Rules, fsdp(...), optimizer_over(...) or a function.""")


def test_rules_that_decided_nothing_and_what_was_meant():
  layout = spmd.Layout(
    MESH,
    (
      ('bais$', P()),
      ('kernel$', P('data')),
      ('mlp/kernel', P('model')),
      ('^opt_state/', spmd.Rules(('mu', P()))),
      spmd.fsdp('model'),
      lambda leaf: None,
    ),
  )
  tree = {'mlp': {'kernel': jnp.ones((8, 16)), 'bias': jnp.ones(8)}, 'step': 0}
  findings = layout.check(tree)
  policy = layout.rules.clauses[5]
  assert [finding.text for finding in findings.of('idle rule')] == [
    "rule 0 ('bais$', P()) matched no array. Closest path: 'bias'.",
    "rule 3 ('^opt_state/', Rules(...)) matched no array.",
    "rule 2 ('mlp/kernel', P('model',)) decided nothing: earlier rules own the arrays that it matches (1 array: mlp/kernel).",
    "rule 4 fsdp('model') decided nothing: 3 x small (min_size=1048576).",
    f'rule 5 {policy!r} decided nothing.',
  ]
  assert [finding.text for finding in findings.suspicious] == [findings.of('idle rule')[0].text]
  typo = spmd.Layout(MESH, (('^opt_sate/', spmd.Rules(spmd.fsdp('data'))),))
  [finding] = typo.check({'opt_state': {'mu': jnp.ones((8, 8))}}).suspicious
  assert finding.text == "rule 0 ('^opt_sate/', Rules(...)) matched no array. Closest path: 'opt_state'."
