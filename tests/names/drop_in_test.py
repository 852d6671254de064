"""Drop-in: the functions of `flax.linen.spmd`, with the same arguments and results.

Flax itself is the oracle. Wherever our semantics are meant to equal its own, both run side by side, on
hand-picked quirks and on thousands of drawn examples. Tests name every deliberate difference.
"""

import functools
import inspect
import threading

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta
from flax.linen import partitioning as legacy
from flax.linen import spmd as flax_functions
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import flax_spmd as spmd
from tests import strategies
from tests.strategies import examples

UNCONSTRAINED = PartitionSpec.UNCONSTRAINED
X = jnp.ones((8, 16))

# Our public names that Flax has too.
FLAX = {
  name: getattr(module, name)
  for module in (meta, flax_functions, nn)
  for name, ours in vars(spmd).items()
  if hasattr(module, name) and not name.startswith('_') and not inspect.ismodule(ours)
}
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def outcome(fn, *args, **kwargs):
  """The result of a call, or the class of its error."""
  try:
    return fn(*args, **kwargs)
  except Exception as error:
    return ValueError if isinstance(error, ValueError) else type(error)


def entries(spec):
  """A spec as a tuple, which compares more strictly than a spec."""
  return tuple(spec) if isinstance(spec, PartitionSpec) else spec


def described(tree):
  """A tree with the class, names and value of each box in its place, equal for both libraries."""

  def describe(leaf):
    if not spmd.is_axis_metadata(leaf):
      return leaf
    return {'kind': type(leaf).__name__, 'names': str(leaf.names), 'value': described(leaf.value)}

  return jax.tree.map(describe, tree, is_leaf=spmd.is_axis_metadata)


# -- names and signatures


def test_every_name_of_flax_is_here():
  wanted = """
    AxisMetadata LogicallyPartitioned PARTITION_NAME Partitioned RulesFallback add_axis
    get_logical_axis_rules get_partition_spec get_sharding is_axis_metadata logical_axis_rules
    logical_to_mesh logical_to_mesh_axes logical_to_mesh_sharding map_axis_meta remat_scan remove_axis
    replace_boxed set_logical_axis_rules unbox with_logical_constraint with_logical_partitioning
    with_partitioning
  """
  assert sorted(FLAX) == wanted.split()


def positional(fn):
  return [
    parameter for parameter in inspect.signature(fn).parameters.values() if parameter.kind in POSITIONAL
  ]


def assert_same_signature(ours, theirs):
  """Our positional parameters are Flax's; additional ones follow them and have defaults."""
  ours, theirs = positional(ours), positional(theirs)
  assert [(p.name, p.kind) for p in ours[: len(theirs)]] == [(p.name, p.kind) for p in theirs]
  for mine, other in zip(ours, theirs, strict=False):
    assert (mine.default is mine.empty) == (other.default is other.empty), mine.name
  assert all(added.default is not added.empty for added in ours[len(theirs) :])


@pytest.mark.parametrize('name', sorted(name for name, value in FLAX.items() if callable(value)))
def test_same_signature(name):
  assert_same_signature(getattr(spmd, name), FLAX[name])


@pytest.mark.parametrize('cls', ['Partitioned', 'LogicallyPartitioned'])
@pytest.mark.parametrize(
  'method',
  [
    'unbox', 'replace_boxed', 'replace', 'add_axis', 'remove_axis', 'get_partition_spec', 'get_sharding',
    'to_nnx_metadata', 'from_nnx_metadata',
  ],
)  # fmt: skip
def test_same_methods(cls, method):
  assert_same_signature(getattr(getattr(spmd, cls), method), getattr(getattr(nn, cls), method))


def test_constants():
  assert spmd.PARTITION_NAME == nn.PARTITION_NAME
  assert {one.name: one.value for one in spmd.RulesFallback} == {
    one.name: one.value for one in flax_functions.RulesFallback
  }


# -- names to mesh axes


@settings(max_examples=examples(500))
@given(strategies.names(repeated=True), strategies.rules())
@example((UNCONSTRAINED, UNCONSTRAINED, None, None, ('x',), ('x',)), ())
@example((('x', 'y'), 'embed'), (('embed', 'y'), ('embed', 'z')))
@example(('embed', 'embed'), ())
def test_names_are_resolved_as_by_flax(names, rules):
  expected = outcome(nn.logical_to_mesh_axes, names, rules)
  assert entries(outcome(spmd.logical_to_mesh_axes, names, rules)) == entries(expected)

  resolution = spmd.Rules.of(rules).resolve(names)
  if expected is ValueError:
    assert resolution.problems
  else:
    assert not resolution.problems
    assert entries(resolution.spec) == entries(expected)
    assert PartitionSpec(*(decision.axes for decision in resolution.decisions)) == resolution.spec


@given(strategies.names(), strategies.rules(), strategies.axis_sizes, st.data())
def test_sizes_that_divide_change_nothing(names, rules, sizes, data):
  expected = outcome(nn.logical_to_mesh_axes, names, rules)
  shape = tuple(int(np.prod(list(sizes.values()))) * data.draw(st.integers(1, 3)) for _ in names)
  axes = [
    axis for name in names if isinstance(name, tuple) for axis in name
  ]  # which Flax does not look at
  for policy in ('error', 'next', 'replicate'):
    resolution = spmd.Rules.of(rules, indivisible=policy).resolve(names, shape, sizes)
    assert entries(resolution.spec) == entries(expected)
    assert bool(resolution.problems) == (len(axes) > len(set(axes)))


@given(strategies.names(), strategies.rules())
def test_rules_in_force_are_the_default(names, rules):
  expected = entries(outcome(nn.logical_to_mesh_axes, names, rules))
  with spmd.logical_axis_rules(rules):
    assert entries(outcome(spmd.logical_to_mesh_axes, names)) == expected
    assert entries(outcome(nn.logical_to_mesh_axes, names)) == expected
  with nn.logical_axis_rules(rules):
    assert entries(outcome(spmd.logical_to_mesh_axes, names)) == expected


QUIRKS = {
  'order is priority, not dimension order': (('a', 'b'), (('b', 'x'), ('a', 'x')), (None, 'x')),
  'duplicates are fallbacks': (('a', 'b'), (('b', 'x'), ('a', 'x'), ('a', 'y')), ('y', 'x')),
  'the first fit stays': (('a',), (('a', 'x'), ('a', 'y')), ('x',)),
  'an explicit None wins for its name': (('a',), (('a', None), ('a', 'x')), (None,)),
  'a tuple is all or nothing': (('a', 'b'), (('b', 'x'), ('a', ('x', 'y'))), (None, 'x')),
  'a tuple takes all of its axes': (
    ('a', 'b'),
    (('a', ('x', 'y')), ('b', 'y'), ('b', 'z')),
    (('x', 'y'), 'z'),
  ),
  '() is None': (('a',), (('a', ()), ('a', 'x')), (None,)),
  'a list is a tuple': (('a',), (('a', ['x', 'y']),), (('x', 'y'),)),
  'rules may be lists': (['a'], [['a', 'x']], ('x',)),
  'UNCONSTRAINED is a target': (('a', 'b'), (('a', UNCONSTRAINED), ('b', 'x')), (UNCONSTRAINED, 'x')),
  'UNCONSTRAINED passes, repeatedly': (
    (UNCONSTRAINED, 'a', UNCONSTRAINED),
    (),
    (UNCONSTRAINED, None, UNCONSTRAINED),
  ),
  'None passes, repeatedly': ((None, 'a', None), (('a', 'x'),), (None, 'x', None)),
  'tuples of axes pass, and take their axes': (
    (('x', 'y'), 'a'),
    (('a', 'y'), ('a', 'z')),
    (('x', 'y'), 'z'),
  ),
  'a mesh axis without a rule is a name': (('x',), (('a', 'x'),), (None,)),
  'trailing None is kept': (('a', 'b', None), (('a', 'x'),), ('x', None, None)),
  'no names': ((), (('a', 'x'),), ()),
  'no rules': (('a', 'b'), (), (None, None)),
  'a spec is names': (PartitionSpec('a', 'b'), (('b', 'x'),), (None, 'x')),
}


@pytest.mark.parametrize('quirk', QUIRKS)
def test_quirks_that_are_kept(quirk):
  names, rules, expected = QUIRKS[quirk]
  assert entries(nn.logical_to_mesh_axes(names, rules)) == expected
  assert entries(spmd.logical_to_mesh_axes(names, rules)) == expected


def test_no_names_at_all():
  assert nn.logical_to_mesh_axes(None, (('a', 'x'),)) is None
  assert spmd.logical_to_mesh_axes(None, (('a', 'x'),)) is None


@pytest.mark.parametrize('rules', [{'a': 'x'}, (rule for rule in [('a', 'x')]), {('a', 'x')}, 'ax'])
def test_rules_are_a_tuple_or_a_list(rules):
  for lib in (nn, spmd):
    with pytest.raises(ValueError):
      lib.logical_to_mesh_axes(('a',), rules)


@pytest.mark.parametrize('rules', [(('a', 'x', 'y'),), ('a', 'x'), (('a',),)])
def test_rules_are_pairs(rules):
  for lib in (nn, spmd):
    with pytest.raises(ValueError):
      lib.logical_to_mesh_axes(('a',), rules)


def test_empty_rules_are_not_the_default():
  for lib in (nn, spmd):
    with lib.logical_axis_rules((('a', 'x'),)):
      assert entries(lib.logical_to_mesh_axes(('a',))) == ('x',)
      assert entries(lib.logical_to_mesh_axes(('a',), None)) == ('x',)
      assert entries(lib.logical_to_mesh_axes(('a',), ())) == (None,)


# -- trees


TREES = {
  'specs': {'a': PartitionSpec('a', 'b'), 'b': (PartitionSpec('b'), PartitionSpec())},
  'None stays None': {'a': None, 'b': PartitionSpec('a')},
  'None': None,
  'one spec': PartitionSpec('b', 'a'),
  'nothing': {},
}


@pytest.mark.parametrize('tree', TREES.values(), ids=TREES)
def test_trees_of_specs(tree, mesh):
  rules = (('a', 'data'), ('b', 'model'))
  assert spmd.logical_to_mesh(tree, rules) == nn.logical_to_mesh(tree, rules)
  assert spmd.logical_to_mesh_sharding(tree, mesh, rules) == nn.logical_to_mesh_sharding(
    tree, mesh, rules
  )
  with nn.logical_axis_rules(rules):
    assert spmd.logical_to_mesh(tree) == nn.logical_to_mesh(tree)
    assert spmd.logical_to_mesh_sharding(tree, mesh) == nn.logical_to_mesh_sharding(tree, mesh)


@given(
  st.dictionaries(st.sampled_from('abc'), strategies.names().map(lambda n: PartitionSpec(*n))),
  strategies.rules(),
)
def test_drawn_trees_of_specs(tree, rules):
  mesh = spmd.abstract_mesh(dict.fromkeys(strategies.MESH_AXES, 2))
  theirs, ours = outcome(nn.logical_to_mesh, tree, rules), outcome(spmd.logical_to_mesh, tree, rules)
  assert jax.tree.map(entries, ours) == jax.tree.map(entries, theirs)
  assert outcome(spmd.logical_to_mesh_sharding, tree, mesh, rules) == outcome(
    nn.logical_to_mesh_sharding, tree, mesh, rules
  )


def test_both_reject_leaves_that_are_not_specs():
  for lib, error in ((nn, TypeError), (spmd, spmd.errors.LayoutError)):
    for leaf in (3, jnp.ones(2)):
      with pytest.raises(error):
        lib.logical_to_mesh({'a': leaf}, (('a', 'x'),))


@given(strategies.boxed_trees)
def test_specs_of_boxed_trees(build):
  expected = nn.get_partition_spec(build(nn))
  assert spmd.get_partition_spec(build(spmd)) == expected
  assert spmd.get_partition_spec(build(nn)) == expected
  assert nn.get_partition_spec(build(spmd)) == expected


def test_specs_of_a_box_around_nothing_beside_an_array_of_its_name():
  for lib in (nn, spmd):
    box = lambda value, lib=lib: lib.LogicallyPartitioned(value, (None,))
    tree = {'params': box([]), 'kernel': {'params': box(jnp.ones(2))}}
    assert spmd.get_partition_spec(tree) == nn.get_partition_spec(tree)


def test_specs_of_leaves_without_a_box():
  tree = {
    'array': jnp.ones(2),
    'numpy': np.ones(2),
    'abstract': jax.ShapeDtypeStruct((2,), jnp.float32),
    'n': 3,
  }
  expected = {'array': PartitionSpec(), 'numpy': PartitionSpec(), 'abstract': PartitionSpec(), 'n': None}
  assert nn.get_partition_spec(tree) == expected
  assert spmd.get_partition_spec(tree) == expected


def test_shardings_of_boxed_trees(mesh):
  def tree(lib):
    return {
      'w': lib.Partitioned(X, ('data', 'model')),
      'v': lib.Partitioned((X, X), (('data', 'model'),)),
      'array': X,
      'n': 3,
      'none': None,
    }

  expected = nn.get_sharding(tree(nn), mesh)
  assert spmd.get_sharding(tree(spmd), mesh) == expected
  assert spmd.get_sharding(tree(nn), mesh) == expected
  assert nn.get_sharding(tree(spmd), mesh) == expected
  assert expected['w'] == NamedSharding(mesh, PartitionSpec('data', 'model'))


@given(strategies.names(), st.booleans())
@example((('w',), None), False)
def test_a_sharding_is_the_resolution_of_the_names(names, own):
  """Tuples of one mesh axis too, which a spec does not distinguish from a name."""
  mesh = spmd.abstract_mesh(dict.fromkeys(strategies.MESH_AXES, 2))
  rules = (('batch', 'w'), ('embed', 'x'), ('mlp', ('y', 'z')), ('embed', None))
  box = spmd.LogicallyPartitioned(
    jax.ShapeDtypeStruct((8,) * len(names), jnp.float32), names, rules=rules if own else None
  )
  with spmd.logical_axis_rules(() if own else rules):
    expected = outcome(lambda: NamedSharding(mesh, spmd.logical_to_mesh_axes(tuple(names), rules)))
    assert outcome(box.get_sharding, mesh) == expected
    assert outcome(spmd.get_sharding, box, mesh) == expected


@given(strategies.boxed_trees, st.integers(0, 3), st.sampled_from(['layers', None]))
def test_adding_and_removing_axes(build, index, name):
  params = {nn.PARTITION_NAME: name}
  theirs, ours = meta.add_axis(build(nn), index, params), spmd.add_axis(build(spmd), index, params)
  assert described(ours) == described(theirs)
  assert described(meta.add_axis(build(spmd), index, params)) == described(theirs)
  assert described(spmd.remove_axis(ours, index, params)) == described(
    meta.remove_axis(theirs, index, params)
  )


@given(strategies.boxed_trees)
def test_opening_and_filling_boxes(build):
  theirs, ours = build(nn), build(spmd)
  assert spmd.unbox(ours) == nn.unbox(theirs) == spmd.unbox(theirs)

  updates = jax.tree.map(lambda leaf: 'new', nn.unbox(theirs))
  assert described(spmd.replace_boxed(ours, updates)) == described(meta.replace_boxed(theirs, updates))


@given(strategies.boxed_trees)
def test_mapping_over_boxes(build):
  def names(box):
    return str(box.names)

  assert spmd.map_axis_meta(names, build(spmd)) == meta.map_axis_meta(names, build(nn))
  assert spmd.map_axis_meta(names, build(nn)) == meta.map_axis_meta(names, build(nn))


def test_initializers():
  for wrap, names in (
    ('with_partitioning', ('data', None)),
    ('with_logical_partitioning', ('embed', 'mlp')),
  ):
    results = []
    for lib in (nn, spmd):
      init = getattr(lib, wrap)(nn.initializers.ones, names)
      assert init.__name__ == nn.initializers.ones.__name__
      results.append(init(jax.random.key(0), (2, 3), jnp.bfloat16))
    theirs, ours = results
    assert type(ours).__name__ == type(theirs).__name__
    assert ours.names == theirs.names and ours.mesh is theirs.mesh is None
    assert (ours.value.shape, ours.value.dtype) == (theirs.value.shape, theirs.value.dtype)


# -- rules in force


@pytest.mark.parametrize('inner, outer', [(nn, nn), (nn, spmd), (spmd, nn), (spmd, spmd)])
def test_rules_nest_across_libraries(inner, outer):
  first, second = (('a', 'x'),), (('a', 'y'), ('b', None))

  def seen():
    return nn.get_logical_axis_rules(), spmd.get_logical_axis_rules()

  assert seen() == ((), ())
  with outer.logical_axis_rules(first):
    assert seen() == (first, first)
    with inner.logical_axis_rules(second):
      assert seen() == (second, second)
      with outer.logical_axis_rules(()):
        assert seen() == ((), ())
      assert seen() == (second, second)
    assert seen() == (first, first)
  assert seen() == ((), ())


@pytest.mark.parametrize('lib', [nn, spmd])
def test_rules_are_reset_after_an_exception(lib):
  with pytest.raises(KeyError), lib.logical_axis_rules((('a', 'x'),)):
    raise KeyError
  assert nn.get_logical_axis_rules() == spmd.get_logical_axis_rules() == ()


@pytest.mark.parametrize('lib', [nn, spmd])
def test_rules_are_set_until_they_are_set_again(lib):
  try:
    lib.set_logical_axis_rules((('a', 'x'),))
    assert nn.get_logical_axis_rules() == spmd.get_logical_axis_rules() == (('a', 'x'),)
    with lib.logical_axis_rules((('b', 'y'),)):
      assert spmd.get_logical_axis_rules() == (('b', 'y'),)
    assert nn.get_logical_axis_rules() == spmd.get_logical_axis_rules() == (('a', 'x'),)
  finally:
    lib.set_logical_axis_rules(())
  assert nn.get_logical_axis_rules() == spmd.get_logical_axis_rules() == ()


@pytest.mark.parametrize('lib', [nn, spmd])
def test_rules_set_in_a_block_end_with_it(lib):
  with lib.logical_axis_rules((('a', 'x'),)):
    lib.set_logical_axis_rules((('b', 'y'),))
    assert nn.get_logical_axis_rules() == spmd.get_logical_axis_rules() == (('b', 'y'),)
  assert nn.get_logical_axis_rules() == spmd.get_logical_axis_rules() == ()


def in_thread(fn):
  result = []
  thread = threading.Thread(target=lambda: result.append(fn()))
  thread.start()
  thread.join()
  return result[0]


@pytest.mark.parametrize('lib', [nn, spmd])
def test_rules_belong_to_their_thread(lib):
  def set_and_get():
    before = lib.get_logical_axis_rules()
    lib.set_logical_axis_rules((('b', 'y'),))
    return before, lib.get_logical_axis_rules()

  with lib.logical_axis_rules((('a', 'x'),)):
    assert in_thread(set_and_get) == ((), (('b', 'y'),))
    assert lib.get_logical_axis_rules() == (('a', 'x'),)


@pytest.mark.parametrize('lib', [nn, spmd])
def test_rules_as_a_decorator(lib):
  decorated = lib.logical_axis_rules((('a', 'x'),))(lambda: entries(lib.logical_to_mesh_axes(('a',))))
  assert decorated() == decorated() == ('x',)


def test_rules_in_lists_come_back_as_tuples():
  with spmd.logical_axis_rules([['a', ['x', 'y']]]):
    assert spmd.get_logical_axis_rules() == nn.get_logical_axis_rules() == (('a', ('x', 'y')),)


# -- constraints


def constraints(lib, names, rules, x=X, **options):
  """The specs of the constraints on the arrays of `x`, in order."""
  with lib.logical_axis_rules(rules):
    jaxpr = jax.make_jaxpr(lambda x: lib.with_logical_constraint(x, names, **options))(x)
  return [tuple(equation.params['sharding'].spec) for equation in jaxpr.eqns]


def fallbacks(name):
  return {nn: flax_functions.RulesFallback[name], spmd: spmd.RulesFallback[name]}


CONSTRAINT_RULES = (('batch', 'data'), ('heads', 'model'), ('mlp', 'model'), ('embed', None))


@given(strategies.constraint_names(max_size=2), strategies.rules(max_size=5))
def test_constraints_are_those_of_flax(names, rules):
  mesh = spmd.abstract_mesh(dict.fromkeys(strategies.MESH_AXES, 2))
  with jax.sharding.use_abstract_mesh(mesh):
    assert outcome(constraints, spmd, names, rules) == outcome(constraints, nn, names, rules)


@pytest.mark.parametrize(
  'names',
  [
    ('batch', 'mlp'),
    ('mlp', 'batch'),
    ('batch',),
    (None, 'heads'),
    PartitionSpec('batch', 'mlp'),
    ('embed', UNCONSTRAINED),
    ('unknown', 'mlp'),
    (),
  ],
)
def test_constrained_arrays_are_sharded_as_with_flax(names, mesh):
  results = []
  for lib in (nn, spmd):
    with jax.set_mesh(mesh), lib.logical_axis_rules(CONSTRAINT_RULES):
      results.append(jax.jit(lambda x: lib.with_logical_constraint(x + 1, names))(X))  # noqa: B023
  theirs, ours = results
  assert ours.sharding == theirs.sharding
  np.testing.assert_array_equal(ours, theirs)


def test_rules_and_mesh_as_arguments(mesh):
  for lib in (nn, spmd):
    constrained = jax.jit(
      functools.partial(lib.with_logical_constraint, mesh=mesh), static_argnums=(1, 2)
    )
    assert constrained(X, ('mlp', 'batch'), CONSTRAINT_RULES).sharding == NamedSharding(
      mesh, PartitionSpec('model', 'data')
    )


@pytest.mark.parametrize('names, rules', [(('batch',), ()), (None, CONSTRAINT_RULES), (None, ())])
def test_nothing_is_constrained_without_names_or_rules(names, rules, mesh):
  for lib in (nn, spmd):
    with jax.set_mesh(mesh):
      assert constraints(lib, names, rules) == []
    assert lib.with_logical_constraint(X, names, rules) is X


def test_fewer_names_than_dimensions(mesh):
  with jax.set_mesh(mesh):
    assert (
      constraints(nn, ('batch',), CONSTRAINT_RULES)
      == constraints(spmd, ('batch',), CONSTRAINT_RULES)
      == [('data',)]
    )


def test_more_names_than_dimensions(mesh):
  for lib in (nn, spmd):
    with jax.set_mesh(mesh), pytest.raises(ValueError):
      constraints(lib, ('batch', 'mlp', None), CONSTRAINT_RULES)


@pytest.mark.parametrize(
  'fallback, names, expected',
  [
    ('AXIS_IS_UNSHARDED', ('batch', 'unknown'), [('data', None)]),
    ('NO_CONSTRAINT', ('batch', 'unknown'), []),
    ('RAISE_ERROR', ('batch', 'unknown'), ValueError),
    ('AXIS_IS_UNSHARDED', ('batch', 'embed'), [('data', None)]),
    ('NO_CONSTRAINT', ('batch', 'embed'), [('data', None)]),
    ('RAISE_ERROR', ('batch', 'embed'), [('data', None)]),
    ('NO_CONSTRAINT', (None, 'mlp'), [(None, 'model')]),
    ('RAISE_ERROR', (UNCONSTRAINED, 'mlp'), [(UNCONSTRAINED, 'model')]),
    ('AXIS_IS_UNSHARDED', ('heads', 'mlp'), [('model', None)]),
    ('NO_CONSTRAINT', ('heads', 'mlp'), []),
    ('RAISE_ERROR', ('heads', 'mlp'), ValueError),
  ],
)
def test_fallbacks(fallback, names, expected, mesh):
  """For a name without a rule, or whose rules have all lost their axes."""
  with jax.set_mesh(mesh):
    for lib, member in fallbacks(fallback).items():
      assert outcome(constraints, lib, names, CONSTRAINT_RULES, fallback=member) == expected, (
        lib.__name__
      )


@pytest.mark.parametrize('fallback, expected', [('NO_CONSTRAINT', []), ('RAISE_ERROR', ValueError)])
def test_fallbacks_of_flax_are_accepted(fallback, expected, mesh):
  with jax.set_mesh(mesh):
    member = flax_functions.RulesFallback[fallback]
    assert outcome(constraints, spmd, ('unknown',), CONSTRAINT_RULES, fallback=member) == expected


def test_names_are_a_prefix_of_the_tree(mesh):
  names = {'a': ('batch', 'mlp'), 'b': PartitionSpec('mlp'), 'c': ('embed',)}
  x = {'a': [X, X], 'b': X, 'c': {'d': X[0]}}
  expected = [('data', 'model'), ('data', 'model'), ('model',), (None,)]
  with jax.set_mesh(mesh):
    for lib in (nn, spmd):
      assert constraints(lib, names, CONSTRAINT_RULES, x) == expected
      assert constraints(lib, ('batch',), CONSTRAINT_RULES, [X, (X,)]) == [('data',), ('data',)]


def test_names_that_are_no_prefix_of_the_tree(mesh):
  for lib in (nn, spmd):
    with jax.set_mesh(mesh), pytest.raises(ValueError):
      constraints(lib, {'a': ('batch',)}, CONSTRAINT_RULES, {'b': X})


def test_none_in_a_tree_of_names_leaves_its_part_unconstrained(mesh):
  """None alone leaves `x` unconstrained in both; None inside a tree of names replicates its part in Flax only."""
  names, x = {'a': ('batch',), 'b': None}, {'a': X, 'b': X}
  with jax.set_mesh(mesh):
    assert constraints(spmd, names, CONSTRAINT_RULES, x) == [('data',)]
    assert constraints(nn, names, CONSTRAINT_RULES, x) == [('data',), ()]


def test_both_reject_repeated_names(mesh):
  for lib in (nn, spmd):
    with jax.set_mesh(mesh), pytest.raises(ValueError):
      constraints(lib, ('batch', 'batch'), CONSTRAINT_RULES)


# -- Flax's older functions


def test_axes_of_the_older_functions_are_read_as_names(mesh):
  """`flax.linen.partitioning` (T5X) stores names in `*_axes` collections beside the arrays."""

  class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
      w = legacy.param_with_axes('w', nn.initializers.ones, (16, 8), axes=('embed', 'mlp'))
      cache = legacy.variable_with_axes('cache', 'seen', jnp.zeros, (8, 8), axes=('batch', 'mlp'))
      cache.value += x @ w
      return x @ w

  layout = spmd.Layout(mesh, CONSTRAINT_RULES)
  variables = jax.eval_shape(Model().init, jax.random.key(0), X)
  assert nn.logical_to_mesh(
    legacy.get_axis_names(flax.core.unfreeze(variables)['params_axes']), CONSTRAINT_RULES
  )['w'] == PartitionSpec(None, 'model')
  specs = layout.spec(flax.core.unfreeze(variables))
  assert specs['params']['w'] == PartitionSpec(None, 'model')
  assert specs['cache']['seen'] == PartitionSpec('data', 'model')
