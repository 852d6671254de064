"""Bad input: errors before anything is compiled, with their whole texts, which list every offender."""

import functools
from collections import UserList
from pathlib import Path
from textwrap import dedent
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import flax_spmd as spmd
from flax_spmd import errors


def box(shape, *names):
  return spmd.LogicallyPartitioned(jax.ShapeDtypeStruct(shape, jnp.float32), names)


def text_of(kind, f, *args, **kwargs):
  with pytest.raises(kind) as caught:
    f(*args, **kwargs)
  assert isinstance(caught.value, errors.FlaxSpmdError)
  return str(caught.value)


def layout(*rules, mesh=None, **policies):
  return spmd.Layout(mesh or {'data': 2, 'model': 4}, rules, **policies)


# -- rules


def test_unknown_mesh_axis_in_a_rule():
  text = text_of(errors.MeshAxisError, layout, ('embed', 'modle'), ('mlp', ('data', 'tensor')))
  assert text == dedent("""\
    Rule 0 ('embed', 'modle') uses mesh axis 'modle', but the mesh has axes ('data', 'model'). Did you mean 'model'?
    Rule 1 ('mlp', ('data', 'tensor')) uses mesh axis 'tensor', but the mesh has axes ('data', 'model').
    Fix: correct the axis name, add the axis to the mesh, or give the table missing_axis='drop'.""")


@pytest.mark.parametrize('rules', [3, {'embed': 'model'}, (pair for pair in ()), 'embed', None])
def test_invalid_rule_tables(rules):
  text = text_of(ValueError, spmd.Rules.of, rules)
  assert text == dedent(f"""\
    A rule table is a tuple or a list of rules, got {rules!r}.
    Fix: write it as (('batch', 'data'), ('hidden', 'model')).""")


def test_invalid_rules_in_a_table():
  text = text_of(ValueError, layout, ('batch', 'data'), 3, ('embed',), ('mlp', 4), (5, 'model'))
  assert (
    text
    == dedent("""\
    Rule 1 is 3, which is not a rule.
    Rule 2 is ('embed',), which is not a rule.
    Rule 3 is ('mlp', 4), which is not a rule.
    Rule 4 is (5, 'model'), which is not a rule.
    Fix: write every rule as ('logical name', mesh axes), ('path regex', PartitionSpec), ('path regex', Rules), ('@annotation', PartitionSpec), fsdp(...), optimizer_over(...), host(...) or a function of a leaf.""")
  )


@pytest.mark.parametrize('as_rule', [lambda v: v, lambda v: ('embed', v), lambda v: (v, 'data')])
@pytest.mark.parametrize('kind', [list, tuple])
def test_rules_that_are_nested_too_deeply_for_python(as_rule, kind):
  nested: Any = 'data'
  for _ in range(3000):
    nested = kind([nested])
  text = text_of(errors.RulesError, layout, ('batch', 'data'), as_rule(nested))
  assert text.startswith('Rule 1 is ') and ', which is not a rule.\nFix: ' in text and len(text) < 1000
  assert spmd.Rules(('embed', [('data', ('model',))])) == spmd.Rules(('embed', ('data', 'model')))


def test_a_single_rule_instead_of_a_table():
  assert text_of(errors.RulesError, spmd.Layout, {'data': 8}, ('batch', 'data')) == dedent("""\
    ('batch', 'data') is one rule, where a table of rules is expected.
    Fix: write a table of one rule with a comma, (('batch', 'data'),).""")


def test_an_invalid_policy():
  assert text_of(errors.RulesError, spmd.Rules, unmatchd='error') == dedent("""\
    'unmatchd' is not a policy of a rule table. Did you mean 'unmatched'?
    Fix: the policies are unmatched, conflict, indivisible, missing_axis, short_names.""")
  assert text_of(errors.RulesError, spmd.Rules, unmatched='raise', conflict='drop') == dedent("""\
    unmatched='raise' is not a policy value.
    conflict='drop' is not a policy value.
    Fix: unmatched is one of 'replicate', 'error'.
    Fix: conflict is one of 'skip', 'error'.""")


# -- names against shapes and meshes; all leaves of a tree at once


def test_a_name_without_a_rule():
  strict = layout(('embed', 'model'), unmatched='error')
  tree = {'params': {'w': box((8, 8), 'embd', 'xyz'), 'v': box((8,), 'embed')}}
  assert text_of(errors.UnmatchedNameError, strict.sharding, tree) == dedent("""\
    params/w, dim 0 'embd': no rule for this logical name (names ('embd', 'xyz')). Did you mean 'embed'?
    params/w, dim 1 'xyz': no rule for this logical name (names ('embd', 'xyz')).
    Fix: correct the name, or add a rule for it; ('embd', None) replicates it.
    Fix: correct the name, or add a rule for it; ('xyz', None) replicates it.""")


def test_wrong_rank():
  tree = {'params': {'w': box((8, 8), 'embed'), 'v': box((8,), 'embed', 'mlp')}}
  longer = "params/v: 2 names ('embed', 'mlp') for an array of rank 1, shape (8,)."
  assert text_of(ValueError, layout(('embed', 'data')).sharding, tree) == dedent(f"""\
    {longer}
    Fix: give at most one name per dimension.""")
  assert (
    text_of(ValueError, layout(('embed', 'data'), short_names='error').sharding, tree)
    == dedent(f"""\
    {longer}
    params/w: 1 name ('embed',) for an array of rank 2, shape (8, 8).
    Fix: give at most one name per dimension.
    Fix: give one name per dimension, None for a dimension without a name, or give the table short_names='pad'.""")
  )


def test_a_bare_string_for_names():
  tree = {'v': spmd.LogicallyPartitioned(jnp.ones((8, 8)), 'em')}
  assert text_of(ValueError, layout().sharding, tree) == dedent("""\
    v: its names are the bare string 'em', which would be read letter by letter.
    Fix: write them as a tuple, ('em',).""")


def test_a_repeated_name():
  tree = {'w': box((8, 8), 'embed', 'embed')}
  assert text_of(ValueError, layout(('embed', 'model')).sharding, tree) == dedent("""\
    w: names ('embed', 'embed'): 'embed' names more than one dimension.
    Fix: give every dimension a name of its own, or None.""")


def test_an_indivisible_dimension():
  tree = {
    'params': {'mlp': {'kernel': box((8, 10), 'embed', 'mlp')}, 'emb': box((3, 7), 'vocab', 'embed')}
  }
  rules = (('mlp', 'model'), ('vocab', ('data', 'model')))
  assert (
    text_of(ValueError, layout(*rules).sharding, tree)
    == dedent("""\
    params/emb, dim 0 'vocab': size 3 is not divisible by mesh axes 'data' (2) x 'model' (4) = 8, required by rule 1 ('vocab', ('data', 'model')).
    params/mlp/kernel, dim 1 'mlp': size 10 is not divisible by mesh axis 'model' (4), required by rule 0 ('mlp', 'model').
    Fix: pad it to 8, put the rule ('vocab', None) before rule 1 to replicate it, or give the table indivisible='next' or 'replicate'.
    Fix: pad it to 12, put the rule ('mlp', None) before rule 0 to replicate it, or give the table indivisible='next' or 'replicate'.""")
  )


def test_a_conflict():
  strict = layout(('a', ('data', 'model')), ('b', 'model'), conflict='error')
  assert text_of(errors.ConflictError, strict.sharding, {'w': box((8, 8), 'b', 'a')}) == dedent("""\
    w, dim 0 'b': rule 1 ('b', 'model') lost its mesh axes to dim 1 'a' (rule 0 ('a', ('data', 'model'))).
    Fix: add a fallback for 'b' after rule 1, such as ('b', None), or put its rule first.""")


def test_a_fallback_rule_resolves_a_conflict():
  for fallback in (None, 'data'):
    strict = layout(('a', 'model'), ('b', 'model'), ('b', fallback), conflict='error')
    assert strict.spec({'w': box((8, 8), 'a', 'b')})['w'] == spmd.Rules(
      ('a', 'model'), ('b', fallback)
    ).spec(('a', 'b'))


def test_mesh_axes_as_names():
  tree = {
    'a': spmd.Partitioned(jnp.ones((8, 8)), ('data', 'modle')),
    'b': spmd.Partitioned(jnp.ones((8, 8)), ('data', ('model', 'data'))),
    'c': spmd.Partitioned(jnp.ones((3, 8)), ('data', None)),
  }
  assert (
    text_of(errors.LayoutError, layout().sharding, tree)
    == dedent("""\
    a, dim 1 of names ('data', 'modle'): 'modle' is not an axis of the mesh, which has ('data', 'model'). Did you mean 'model'?
    b, dim 1 of names ('data', ('model', 'data')): mesh axis 'data' is used for an earlier dimension too.
    c, dim 0: size 3 is not divisible by mesh axis 'data' (2).
    Fix: correct the axis name, or, if it is a logical name, give the table a rule for it, or missing_axis='drop' to leave it open.
    Fix: use every mesh axis for one dimension only.
    Fix: pad it to 4, name the dimension None to replicate it, or give the table indivisible='replicate'.""")
  )


def test_nothing_is_compiled_or_run_before_the_check():
  ran = []

  def create():
    jax.debug.callback(lambda: ran.append(1))
    return {'w': spmd.LogicallyPartitioned(jnp.ones((3, 8)), ('embed', 'mlp'))}

  bad = layout(('embed', 'model'))
  for call in (bad.init, bad.abstract):
    assert 'size 3 is not divisible' in text_of(errors.LayoutError, call, create)
  assert 'size 3 is not divisible' in text_of(errors.LayoutError, bad.jit(create))
  jax.effects_barrier()
  assert not ran


def test_explain_and_check_raise_the_errors_of_sharding():
  bad, tree = layout(('embed', 'model')), {'w': box((3,), 'embed')}
  assert text_of(errors.LayoutError, spmd.explain, bad, tree) == text_of(
    errors.LayoutError, bad.check, tree
  )


def test_lenient_policies():
  tree = {'w': box((6, 8), 'vocab', 'embed')}
  rules = (('vocab', 'model'), ('vocab', 'data'), ('embed', 'model'))
  assert layout(*rules, indivisible='next').spec(tree)['w'] == jax.P('data', 'model')
  assert layout(*rules, indivisible='replicate').spec(tree)['w'] == jax.P(None, 'model')
  dropping = layout(
    ('vocab', ('pod', 'data')), ('embed', 'pod'), ('embed', 'model'), missing_axis='drop'
  )
  assert dropping.spec(tree)['w'] == jax.P('data', 'model')
  direct = {'w': spmd.Partitioned(jnp.ones((3, 8)), ('data', ('pod', 'model')))}
  assert layout(indivisible='replicate', missing_axis='drop').spec(direct)['w'] == jax.P(None, 'model')


# -- batches


def test_a_batch_that_does_not_fit_its_names():
  lay = layout(('batch', 'data'))
  batch = {'x': np.ones((3, 4)), 'y': np.ones(4)}
  assert text_of(errors.LayoutError, lay.shard, batch, ('batch', None)) == dedent("""\
    x, dim 0 'batch': size 3 is not divisible by mesh axis 'data' (2), required by rule 0 ('batch', 'data').
    y: 2 names ('batch', None) for an array of rank 1, shape (4,).
    Fix: pad it to 4, put the rule ('batch', None) before rule 0 to replicate it, or give the table indivisible='next' or 'replicate'.
    Fix: give at most one name per dimension.""")


def test_mesh_axes_among_logical_names():
  """Flax takes a tuple among the names for mesh axes."""
  ones = jnp.ones((8, 8))
  tree = {
    'a': spmd.LogicallyPartitioned(ones, (('data', 'modle'), 'mlp')),
    'b': spmd.LogicallyPartitioned(ones, (('data', 'model'), 'mlp')),
  }
  assert text_of(errors.MeshAxisError, layout(('mlp', 'model')).sharding, tree) == dedent("""\
    a, dim 0 of names (('data', 'modle'), 'mlp'): 'modle' is not an axis of the mesh, which has ('data', 'model'). Did you mean 'model'?
    Fix: correct the axis name, or give the dimension one logical name, and the table a rule for it.""")
  lenient = spmd.Layout({'data': 2, 'model': 4}, spmd.Rules((('mlp', 'model'),), missing_axis='drop'))
  specs = {'a': PartitionSpec('data', 'model'), 'b': PartitionSpec(('data', 'model'), None)}
  assert lenient.spec(tree) == specs


def test_mesh_axes_among_logical_names_that_do_not_fit():
  ones = jnp.ones((6, 8))
  tree = {
    'again': spmd.LogicallyPartitioned(ones, (('data',), ('data',))),
    'nested': spmd.LogicallyPartitioned(ones, (('data', ('data',)), None)),
    'number': spmd.LogicallyPartitioned(ones, ('mlp', 3)),
    'uneven': spmd.LogicallyPartitioned(ones, (('data', ('model',)), None)),
  }
  assert text_of(errors.LayoutError, layout().sharding, tree) == dedent("""\
    again, dim 1 of names (('data',), ('data',)): mesh axis 'data' is used for an earlier dimension too.
    nested, dim 0 of names (('data', ('data',)), None): mesh axis 'data' is used twice.
    nested, dim 0: size 6 is not divisible by mesh axes 'data' (2) x 'data' (2) = 4.
    number, dim 1 of names ('mlp', 3): 3 is neither a name nor mesh axes.
    uneven, dim 0: size 6 is not divisible by mesh axes 'data' (2) x 'model' (4) = 8.
    Fix: use every mesh axis for one dimension only.
    Fix: pad it to 8, name the dimension None to replicate it, or give the table indivisible='replicate'.
    Fix: write a name, a tuple of mesh axes, or None.""")
  lenient = spmd.Layout({'data': 2, 'model': 4}, spmd.Rules(indivisible='replicate'))
  assert lenient.spec(tree['uneven']) == PartitionSpec(None, None)
  even = spmd.LogicallyPartitioned(jnp.ones((8, 8)), (('data', ('model',)), None))
  assert lenient.spec(even) == PartitionSpec(('data', 'model'), None)


def test_unknown_mesh_axes_among_the_names_of_a_box_that_is_unboxed():
  made = layout(('mlp', 'model')).jit(
    lambda: spmd.LogicallyPartitioned(jnp.ones((8, 8)), (('data', 'modle'), 'mlp')).unbox()
  )
  assert "'modle' is not an axis of the mesh" in text_of(errors.MeshAxisError, made)


def test_a_state_with_unknown_mesh_axes_among_its_names_is_saved(tmp_path):
  tree = {'a': spmd.LogicallyPartitioned(jnp.ones((8, 8)), (('data', 'modle'), 'mlp'))}
  spmd.checkpoint.save(tmp_path / 'state', tree, layout=layout())
  other = spmd.Layout({'data': 2, 'modle': 4}, ())
  restored = spmd.checkpoint.restore(tmp_path / 'state', layout=other)
  assert restored['a'].sharding.spec == PartitionSpec(('data', 'modle'), None)


def test_a_mesh_axis_instead_of_a_logical_name():
  lay = layout(('batch', 'data'))
  assert text_of(errors.LayoutError, lay.shard, {'x': np.ones((4, 4))}, ('data', None)) == dedent("""\
    x, dim 0 'data': this is a mesh axis, where logical names are expected.
    Fix: give mesh axes as a PartitionSpec, or use a logical name that has a rule.""")
  constrained = lay.jit(lambda x: spmd.with_sharding_constraint(x, {'x': ('data', None)}))
  by_option = lay.jit(lambda x: x, in_constraints=({'x': ('data', None)},))
  for inside in (constrained, by_option):
    assert text_of(errors.LayoutError, inside, {'x': np.ones((4, 4))}) == dedent("""\
      constraint, dim 0 'data': this is a mesh axis, where logical names are expected.
      Fix: give mesh axes as a PartitionSpec, or use a logical name that has a rule.""")
  own = layout(('data', 'data')).jit(lambda x: spmd.with_sharding_constraint(x, ('data', None)))
  assert own(np.ones((4, 4))).sharding.spec == PartitionSpec('data')
  assert "'dta' is not an axis of the mesh" in text_of(
    errors.MeshAxisError, lay.shard, {'x': np.ones((4, 4))}, jax.P('dta', None)
  )


def test_names_that_are_not_a_prefix_of_the_batch():
  text = text_of(errors.LayoutError, layout().shard, {'x': np.ones((4, 4))}, {'y': ('batch', None)})
  assert text.startswith("The placements {'y': ('batch', None)} are not a prefix of the tree: ")
  assert text.endswith('mesh axes go into a PartitionSpec, rules into Rules(...).')


def test_problems_of_parameters_are_not_repeated_for_optimizer_state():
  import optax

  def create():
    params: Any = {'w': spmd.LogicallyPartitioned(jnp.ones((3, 8)), ('embed', 'mlp'))}
    return {'params': params, 'opt_state': optax.adam(1e-3).init(params)}

  assert (
    text_of(errors.LayoutError, layout(('embed', 'data')).init, create)
    == dedent("""\
    params/w, dim 0 'embed': size 3 is not divisible by mesh axis 'data' (2), required by rule 0 ('embed', 'data').
    Fix: pad it to 4, put the rule ('embed', None) before rule 0 to replicate it, or give the table indivisible='next' or 'replicate'.""")
  )


def test_unknown_mesh_axes_are_reported_with_their_paths():
  """And not by the constraint at which the box is opened."""

  class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
      ones = nn.initializers.ones
      w = self.param('w', spmd.with_partitioning(ones, ('embed', 'model')), (8, 8))
      v = self.param('v', spmd.with_partitioning(ones, ('model', 'model')), (8, 8))
      return x @ w @ v

  assert (
    text_of(errors.LayoutError, layout().init, Dense().init, jax.random.key(0), jnp.ones((1, 8)))
    == dedent("""\
    params/v, dim 1 of names ('model', 'model'): mesh axis 'model' is used for an earlier dimension too.
    params/w, dim 0 of names ('embed', 'model'): 'embed' is not an axis of the mesh, which has ('data', 'model').
    Fix: use every mesh axis for one dimension only.
    Fix: correct the axis name, or, if it is a logical name, give the table a rule for it, or missing_axis='drop' to leave it open.""")
  )


# -- meshes


def test_a_mesh_larger_than_the_devices():
  assert (
    text_of(errors.MeshError, spmd.Layout, {'data': 4, 'model': 4})
    == dedent("""\
    The mesh {'data': 4, 'model': 4} needs 16 devices, but 8 (cpu) are available.
    Fix: choose sizes whose product is at most 8, emulate devices with jax.config.update('jax_num_cpu_devices', 16) before JAX is first used, or plan without devices: flax_spmd.abstract_mesh({'data': 4, 'model': 4}).""")
  )


def test_a_size_of_minus_one_that_cannot_be_computed():
  assert text_of(errors.MeshError, spmd.make_mesh, {'data': 3, 'model': -1}) == dedent("""\
    The size of axis 'model' of the mesh {'data': 3, 'model': -1} cannot be computed: 8 is not divisible by 3.
    Fix: pass a size for 'model', or choose other sizes that divide 8.""")
  assert text_of(errors.MeshError, spmd.make_mesh, {'data': -1, 'model': -1}) == dedent("""\
    The mesh {'data': -1, 'model': -1} has more than one size of -1: 'data', 'model'.
    Fix: pass -1 for one axis only.""")


def test_invalid_mesh_sizes():
  assert text_of(errors.MeshError, spmd.make_mesh, {'data': 0, 'model': 2.0}) == dedent("""\
    The mesh {'data': 0, 'model': 2.0} has invalid sizes: 'data', 'model'.
    Fix: pass positive integers; one size may be -1.""")
  assert text_of(errors.MeshError, spmd.abstract_mesh, {'data': -1}) == dedent("""\
    The mesh {'data': -1} has invalid sizes: 'data'.
    Fix: pass positive integers.""")


def test_placing_on_an_abstract_mesh():
  lay = spmd.Layout(spmd.abstract_mesh({'data': 64}), (('batch', 'data'),))
  expected = dedent("""\
    The mesh {'data': 64} is abstract: there are no devices to place arrays on.
    Fix: use a layout over a concrete mesh, made by Layout({...}, rules) or make_mesh.""")
  assert text_of(errors.MeshError, lay.shard, np.ones(64), ('batch',)) == expected
  assert text_of(errors.MeshError, lay.init, lambda: jnp.ones(64)) == expected


def test_a_model_that_reads_boxed_variables_directly():
  class Tied(nn.Module):
    @nn.compact
    def __call__(self, tokens):
      embed = nn.Embed(8, 4, name='embed')
      return embed(tokens) @ self.variables['params']['embed']['embedding'].T

  tokens = jnp.ones((2, 3), int)
  params = spmd.names_for(Tied().init)(jax.random.key(0), tokens)
  logits: Any = Tied().apply(spmd.unbox(params), tokens)
  assert logits.shape == (2, 3, 8)
  with pytest.raises(AttributeError) as caught:
    Tied().apply(params, tokens)
  assert (
    str(caught.value)
    == dedent("""\
    'LogicallyPartitioned' object has no attribute 'T': it is a box around an array, with names ('vocab', 'embed').
    Fix: pass flax_spmd.unbox(variables) to a model that reads its variables directly, or create them without boxes, by layout.init(..., boxed=False).""")
  )
  box = params['params']['embed']['embedding']
  assert not hasattr(box, 'other')
  expected = dedent("""\
    LogicallyPartitioned(float32[8,4], names=('vocab', 'embed')) is a box around an array, and no array.
    Fix: pass flax_spmd.unbox(variables) to a model that reads its variables directly, or create them without boxes, by layout.init(..., boxed=False).""")
  for read in (jnp.transpose, jnp.asarray, lambda each: jnp.ones(8) @ each):
    with pytest.raises(TypeError) as found:
      read(box)
    assert str(found.value) == expected


def test_a_function_in_the_block_of_another_number_of_devices():
  eight, four = (
    layout(mesh={'data': 8}),
    layout(mesh=spmd.make_mesh({'data': 4}, devices=jax.devices()[:4])),
  )
  expected = dedent("""\
    A function is traced on the layout's mesh, {'data': 8}, under a mesh of another number of devices, {'data': 4}: JAX does not change between them inside a program.
    Fix: call the function outside of the block (`with layout:`, `jax.set_mesh`) or the program of that mesh.""")
  x = jnp.ones(8)
  for ask in (
    lambda: eight.jit(jnp.sin)(x),
    lambda: eight.init(lambda: {'w': x}),
    lambda: four.jit(lambda x: eight.jit(jnp.sin)(x))(x),
  ):
    with four:
      assert text_of(errors.MeshError, ask) == expected


@pytest.mark.parametrize('method', ['__call__', 'lower', 'explain'])
@pytest.mark.parametrize('kernel', [(3, 3), (1, 1)])
def test_arguments_on_other_devices(method, kernel):
  one, half = layout(('mlp', 'model')), layout(mesh={'model': 2})
  w = one.shard(np.ones((4, 8), 'float32'), (None, 'mlp'))
  images = jax.device_put(np.ones((2, 4, 4, 4), 'float32'), jax.devices()[3])
  b = half.replicate({'b': np.ones(8, 'float32')})

  @one.jit
  def step(w, images, *, b):
    windows = jnp.broadcast_to(w, (*kernel, *w.shape))
    numbers = 'NHWC', 'HWIO', 'NHWC'
    return b['b'].sum() * jax.lax.conv_general_dilated(
      images, windows, (1, 1), 'SAME', dimension_numbers=numbers
    )

  text = text_of(errors.LayoutError, getattr(step, method), w, images, b=b)
  assert text == dedent("""\
    argument images is on devices [3], but the layout is on [0, 1, 2, 3, 4, 5, 6, 7].
    argument b/b is on devices [0, 1], but the layout is on [0, 1, 2, 3, 4, 5, 6, 7].
    Fix: transfer it with layout.shard, or with reshard of the layout that it is stored by.""")


@pytest.mark.parametrize('kind', ['jit', 'pipeline_jit'])
def test_a_step_that_is_called_instead_of_passed(kind):
  jit = getattr(layout(mesh={'data': 2, 'stage': 2}), kind)
  assert text_of(errors.LayoutError, jit, np.ones(3)) == dedent("""\
    jit has a ndarray in place of a function.
    Fix: pass the function without calling it, such as layout.jit(step).""")


@pytest.mark.parametrize('name', ['with_partitioning', 'with_logical_partitioning'])
def test_names_in_place_of_an_initializer(name):
  """Where it is wrapped; None only where it is called: modules wrap initializers of parameters that they may not have."""
  wrap = getattr(spmd, name)
  expected = dedent(f"""\
    {name} has a tuple in place of an initializer.
    Fix: write {name}(initializer, names), such as {name}(nn.initializers.lecun_normal(), ('embed', 'mlp')).""")
  assert text_of(errors.LayoutError, wrap, ('embed', 'mlp'), nn.initializers.ones) == expected
  without_bias = nn.Dense(8, use_bias=False, bias_init=wrap(None, ('mlp',)))
  assert list(without_bias.init(jax.random.key(0), jnp.ones((1, 4)))['params']) == ['kernel']
  none = wrap(None, ('mlp',))
  assert text_of(errors.LayoutError, none, jax.random.key(0), (8,)) == expected.replace(
    'tuple', 'NoneType'
  )


@pytest.mark.parametrize('kind', ['jit', 'pipeline_jit'])
def test_a_step_that_is_already_jitted(kind):
  """Its own mesh and rules would hold: a comparison would be one of the same program with itself."""

  def train_step(state, x):
    return state, spmd.with_logical_constraint(x, ('batch', None))

  def create():
    return {'w': jnp.ones((8, 8))}

  staged = layout(('batch', 'data'), mesh={'data': 4, 'stage': 2})
  step = getattr(staged, kind)(train_step)
  expected = dedent("""\
    train_step is already jitted by another layout, with mesh {'data': 4, 'stage': 2}.
    Fix: pass the function itself, train_step.__wrapped__.""")
  other = layout(('batch', 'model'), mesh={'stage': 2, 'model': 4})
  x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
  pipelined = spmd.explore.Pipeline(other, spmd.pipeline.OneFOneB(2))
  task = spmd.explore.TrainStep(step, create, x)
  for ask in (
    lambda: other.jit(step),
    lambda: other.jit(functools.partial(step)),
    lambda: other.jit(step, in_constraints=(None, ('batch', None))),
    lambda: other.jit(step, axis_name='batch'),
    lambda: other.pipeline_jit(step),
    lambda: spmd.compare(task, {'other': other}, 'cpu:8'),
    lambda: spmd.compare(task, {'staged': staged}, 'cpu:8'),
    lambda: spmd.compare(task, {'pipelined': pipelined}, 'cpu:8'),
    lambda: spmd.explore.Estimator(task),
    lambda: spmd.search(task, 'cpu:8'),
  ):
    assert text_of(errors.LayoutError, ask) == expected
  assert step.__wrapped__ is train_step
  if kind == 'jit':
    assert repr(staged.jit(step)) == repr(step)  # by the same layout: nothing else would hold
  assert text_of(errors.PipelineError, staged.pipeline_jit, step) == dedent("""\
    pipeline_jit: train_step is already jitted by a layout, so it cannot be cut into stages.
    Fix: pass the function itself, train_step.__wrapped__.""")

  @functools.wraps(step)
  def logged(state, x):
    return step(state, x)

  other.jit(logged)  # a function of one's own, whatever it calls


@pytest.mark.parametrize('placement', [None, ('embed',)])
def test_leaves_that_no_device_can_hold(placement):
  """Whatever stops the transfer first, the leaves are named: text, objects, abstract and deleted arrays."""

  class Tensor:
    shape, dtype, ndim = (8,), np.dtype('float32'), 1

    def __repr__(self):
      return 'tensor([1.,\n        2.])'

  gone = jnp.ones(8)
  gone.delete()
  tree = {
    'gone': gone,
    'object': Tensor(),
    'text': 'adam',
    'texts': np.array(['a']),
    'whole': np.ones(8),
  }
  place = layout(('embed', 'model')).shard
  assert text_of(errors.LayoutError, place, tree, placement) == dedent("""\
    gone has been deleted, or donated to a jitted function.
    object: tensor([1., 2.]) is no array or number of JAX.
    text: 'adam' is no array or number of JAX.
    texts: array(['a'], dtype='<U1') is no array or number of JAX.
    Fix: pass the state that the step returned, not the one that was donated to it.
    Fix: convert it with numpy.asarray, or keep it out of the tree.
    Fix: keep it out of the tree, or make it static, such as by flax.struct.field(pytree_node=False).""")
  abstract = text_of(errors.LayoutError, place, {'w': jax.ShapeDtypeStruct((8,), 'float32')}, placement)
  assert abstract.startswith('w: ShapeDtypeStruct(shape=(8,), dtype=float32) is no array')


@pytest.mark.parametrize('calls', [1, 3])
def test_a_state_that_was_donated_to_an_earlier_call(calls):
  """Named in a call that JAX dispatches by itself, too."""
  lay = layout()
  step = lay.jit(lambda state, x: {'w': state['w'] + x}, donate_argnums=0)
  gone = {'w': lay.replicate(np.ones((8, 4), 'float32'))}
  state = gone
  for _ in range(calls):
    state = step(state, 1.0)
  assert text_of(errors.LayoutError, step, gone, 1.0) == dedent("""\
    argument state/w has been deleted, or donated to a jitted function.
    Fix: pass the state that the step returned, not the one that was donated to it.""")
  assert text_of(errors.LayoutError, spmd.gather, gone).startswith('w has been deleted')
  assert float(step(state, 1.0)['w'][0, 0]) == calls + 2


def test_arguments_of_another_kind_than_expected():
  lay, ones = layout(), np.ones((8, 4))
  mesh = "{'data': 2, 'model': 4}"
  for kind, call, text in (
    (
      errors.MeshError,
      lambda: spmd.make_mesh({'data': 8}, devices=cast(Any, 8)),
      'devices=8 are not devices.\n'
      'Fix: pass devices of JAX in one list, such as jax.devices()[:4]; abstract_mesh takes their number.',
    ),
    (
      errors.MeshError,
      lambda: spmd.Layout.from_toml(lay.to_toml(), devices=4),
      f'The mesh {mesh} needs 8 devices, but is given devices=4.\n'
      'Fix: choose sizes whose product is at most 4; one may be -1.',
    ),
    (
      errors.RulesError,
      lambda: spmd.Layout.from_toml(cast(Any, Path('layout.toml'))),
      f'A {type(Path()).__name__} is not the text of a layout file.\n'
      'Fix: pass its text, such as path.read_text().',
    ),
    (
      errors.LayoutError,
      lambda: lay.jit(lambda x: spmd.with_sharding_annotation(cast(Any, 'weights'), x))(ones),
      'A DynamicJaxprTracer is not the name of an annotation.\n'
      "Fix: write with_sharding_annotation(x, name), such as with_sharding_annotation(x, 'weights').",
    ),
    (
      errors.LayoutError,
      lambda: spmd.prefetch([ones], cast(Any, ('batch', None))),
      'prefetch has a tuple in place of a function.\n'
      "Fix: pass a function of a batch, such as lambda batch: layout.shard(batch, ('batch', None)).",
    ),
    (
      errors.LayoutError,
      lambda: spmd.with_names({'w': ('embed', 'mlp')}, {'w': ones}),
      'There are no names in the dict that with_names is given.\n'
      "Fix: write with_names(tree, names), with names such as {'kernel': ('embed', 'mlp')}.",
    ),
  ):
    assert text_of(kind, call) == text


def test_a_module_in_place_of_a_function():
  x = jnp.ones((8, 8))
  for create in (layout().init, layout().abstract, layout().plan):
    assert text_of(errors.LayoutError, create, nn.Dense(8), jax.random.key(0), x) == dedent("""\
      A Dense is not a function that creates a state.
      Fix: pass its init, such as layout.init(model.init, key, x).""")
  assert text_of(errors.LayoutError, layout().jit, nn.Dense(8)) == dedent("""\
    jit has a Dense in place of a function.
    Fix: pass its method, such as layout.jit(model.apply).""")


@pytest.mark.parametrize(
  'tree, kind',
  [
    (nn.Dense(8), 'Dense'),
    (nn.Dense(8).init, 'method'),
    ('params', 'str'),
    (layout(), 'Layout'),
    (layout().mesh, 'Mesh'),
    (layout().plan(lambda: jnp.ones(8)), 'Plan'),
    (layout().sharding(jnp.ones(8)), 'NamedSharding'),
    (PartitionSpec('data'), PartitionSpec.__name__),
    (jnp, 'module'),
    (jnp.float32, '_ScalarMeta'),
    (Path('state'), 'PosixPath'),
  ],
)
def test_something_that_is_no_tree_of_arrays(tree, kind):
  one = layout()
  for report in (functools.partial(spmd.explain, one), one.check, one.spec, one.sharding, one.names):
    assert (
      text_of(errors.LayoutError, report, tree)
      == dedent(f"""\
      A {kind} is no tree of arrays.
      Fix: pass a state, or one without arrays, such as layout.abstract(model.init, key, x) or plan.abstract().""")
    )


@pytest.mark.parametrize(
  'tree', [3, 2.5, True, 1j, np.float32(1), np.ones(8), box((8,), None), None, ()]
)
def test_trees_of_one_array_or_number_or_none(tree):
  leaves = jax.tree.leaves(tree)
  assert layout().names(tree) == [None] * len(leaves) or spmd.is_axis_metadata(tree)
  assert len(spmd.explain(layout(), tree).rows) == len(leaves)
  assert all(not any(spec) for spec in jax.tree.leaves(layout().spec(tree)))


def test_abstract_arguments_of_a_call():
  state = layout(('mlp', 'model')).abstract(lambda: {'b': jnp.ones(4), 'w': jnp.ones((8, 8))})
  step = layout().jit(lambda state, x: (state, x))
  for _ in range(2):
    assert (
      text_of(errors.LayoutError, step, state, jnp.ones(8))
      == dedent("""\
      argument state/b is abstract, float32[4].
      argument state/w is abstract, float32[8,8].
      Fix: pass arrays, as layout.init creates them; .lower, .trace, .eval_shape and .explain accept abstract arguments.""")
    )
    step(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), state), jnp.ones(8))


def test_bare_strings_for_placements_and_constraints():
  batched, x = layout(('batch', 'data')), jnp.ones((8, 8))
  for options in ({'in_rules': 'batch'}, {'in_constraints': 'batch'}):
    assert text_of(errors.LayoutError, batched.jit(lambda x: x, **options), x) == dedent("""\
      The bare string 'batch' is no placement.
      Fix: write logical names as a tuple, ('batch', None), or give one placement per argument.""")
  constrain = batched.jit(lambda x: spmd.with_logical_constraint(x, 'batch'))
  assert text_of(errors.LayoutError, constrain, x) == dedent("""\
    constraint: the logical names are the bare string 'batch', which would be read letter by letter.
    Fix: write them as a tuple, ('batch',).""")
  swapped = batched.jit(lambda x: spmd.with_logical_constraint('batch', (None,)))
  assert text_of(errors.LayoutError, swapped, x) == dedent("""\
    constraint: 'batch' is no array.
    Fix: pass the array first, and then its logical names.""")


@pytest.mark.parametrize(
  'rule',
  [
    spmd.fsdp,
    spmd.optimizer_over,
    spmd.presets.zero1,
    lambda path, leaf: None,
    lambda: None,
    nn.Dense(8),
    spmd.make_mesh({'data': 8}),
  ],
)
def test_functions_that_are_no_rules(rule):
  text = text_of(errors.RulesError, layout, ('batch', 'data'), rule)
  assert text.startswith(f'Rule 1 is {rule!r}, which is not a rule.\nFix: ')
  text = text_of(errors.LayoutError, layout().shard, jnp.ones(8), rule)
  assert text.startswith(f'The placements {rule!r} are not a prefix of the tree: ')
  assert layout(lambda leaf, skip=(): None).rules  # a second argument may have a default


@pytest.mark.parametrize('name', ['layouts/fsdp.toml', 'layouts/fsdp.tml', 'run=3/fsdp.toml'])
def test_the_name_of_a_layout_file_instead_of_its_text(name):
  assert text_of(errors.RulesError, spmd.Layout.from_toml, name) == dedent(f"""\
    '{name}' is the name of a layout file, not its text.
    Fix: pass its text, Path('{name}').read_text().""")


def test_options_for_parameters_that_a_function_does_not_have():
  def step(state, batch, *, train=True):
    return state

  jit = layout().jit
  assert text_of(ValueError, jit, step, donate_argnames='stat', static_argnames=['trian']) == dedent("""\
    donate_argnames has 'stat', which is no parameter of step(state, batch, *, train=True). Did you mean 'state'?
    static_argnames has 'trian', which is no parameter of step(state, batch, *, train=True). Did you mean 'train'?
    Fix: correct the name.""")
  assert text_of(ValueError, jit, step, donate_argnums=(0, 2), static_argnums=-3) == dedent("""\
    donate_argnums has 2, but step(state, batch, *, train=True) has 2 positional parameters.
    static_argnums has -3, but step(state, batch, *, train=True) has 2 positional parameters.
    Fix: count the parameters from 0, or give the name of one.""")
  jit(lambda *args, **others: args, donate_argnums=7, donate_argnames='any')
  jit(step, donate_argnums=(-2, np.int64(1)), static_argnames='train')


def test_entries_of_options_that_are_no_positions_or_names():
  for jit in (layout().jit, layout(mesh={'stage': 8}).pipeline_jit):
    text = text_of(
      errors.LayoutError,
      jit,
      sum,
      donate_argnums='x',
      static_argnums=[1.5],
      static_argnames=(0, {'a': 1}),
    )
    assert text == dedent("""\
      donate_argnums has x, which is not the position of a parameter.
      static_argnums has 1.5, which is not the position of a parameter.
      static_argnames has 0, which is not the name of a parameter.
      static_argnames has {'a': 1}, which is not the name of a parameter.
      Fix: pass positions as donate_argnums, and names as donate_argnames.
      Fix: pass positions as static_argnums, and names as static_argnames.""")


@pytest.mark.parametrize('several', [tuple, list, set, dict.fromkeys, iter])
def test_names_of_static_arguments_may_be_any_iterable(several):
  step = layout().jit(lambda x, name: {name: x}, static_argnames=several(['name']))
  assert list(step(jnp.ones(8), name='a')) == list(step(jnp.ones(8), 'a')) == ['a']


@pytest.mark.parametrize('placements', [5, layout(), lambda: None, iter(()), np.ones(8), {'x'}])
def test_placements_of_arguments_that_are_none(placements):
  for option in ('in_rules', 'in_constraints'):
    step = layout().jit(lambda x: x, **cast(Any, {option: placements}))
    first, fix = text_of(errors.LayoutError, step, jnp.ones(8)).splitlines()
    assert first.endswith(' is no placement.')
    assert fix == (
      'Fix: give one placement for all arguments, a tuple with one per argument, or a dict by parameter name.'
    )


def test_a_sharding_that_does_not_fit_every_array():
  one = layout()
  sharding = one.sharding(jnp.ones((8, 8)), PartitionSpec('data', 'model'))
  tree = {'b': np.ones(8), 'v': np.ones((3, 8)), 'w': np.ones((8, 8))}
  step = one.jit(lambda tree: tree, in_rules=(sharding,))
  for place, at in ((functools.partial(one.shard, placements=sharding), ''), (step, 'argument tree/')):
    assert text_of(errors.LayoutError, place, tree) == dedent(f"""\
      {at}b: shape (8,) does not fit the sharding P('data', 'model') on {{'data': 2, 'model': 4}}.
      {at}v: shape (3, 8) does not fit the sharding P('data', 'model') on {{'data': 2, 'model': 4}}.
      Fix: pass a sharding that fits every array, or a tree with one for each.""")


@pytest.mark.parametrize('fallback', [None, 'raise_error', 'no_constraint', True, 2])
def test_a_fallback_that_is_none(fallback):
  """Flax leaves out the constraint."""
  for names in (('batch', 'hidden'), None):
    step = layout(('batch', 'data')).jit(
      lambda x, names=names: spmd.with_logical_constraint(x, names, fallback=fallback)
    )
    assert text_of(errors.LayoutError, step, jnp.ones((8, 8))) == (
      f'constraint: the fallback is {fallback!r}.\n'
      'Fix: pass a member of RulesFallback, such as RulesFallback.RAISE_ERROR.'
    )


@pytest.mark.parametrize('spec', ['data', {'data': 2, 'model': 4}, {'data'}, None, 5, iter(['data'])])
def test_a_spec_of_a_constraint_that_is_none(spec):
  text = text_of(errors.LayoutError, layout().jit(lambda x: spmd.constrain(x, spec)), jnp.ones((8, 8)))
  assert text == (
    f'constraint: the spec is {spec!r}.\n'
    "Fix: write a PartitionSpec with mesh axes or None for each dimension, such as PartitionSpec('data', None)."
  )


@pytest.mark.parametrize('names', ['embed', b'embed', {'embed'}, {'embed': 'mlp'}, iter(['embed']), 5])
def test_names_that_are_no_sequence(names):
  expected = (
    f'The names of an array are {names!r}.\n'
    "Fix: write a tuple with a name or None for each dimension, such as ('batch', None)."
  )
  rules = (('embed', 'data'),)
  assert text_of(errors.LayoutError, spmd.logical_to_mesh_axes, names, rules) == expected
  assert text_of(errors.LayoutError, spmd.Rules(*rules).spec, names) == expected


@pytest.mark.parametrize('mesh', [layout(), {'data': 8}, 'data', PartitionSpec('data'), jax.devices()])
def test_the_mesh_of_a_box_that_is_none(mesh):
  for cls in (spmd.Partitioned, spmd.LogicallyPartitioned):
    text = text_of(errors.MeshError, cls, jnp.ones(8), (None,), mesh)
    assert text.startswith('The mesh of a box in no module is ')
    assert text.endswith(
      'Fix: pass a mesh, such as layout.mesh, or leave it out: the mesh in force is used.'
    )


@pytest.mark.parametrize('mesh', [(), 0, False])
def test_replacing_a_mesh_by_none(mesh):
  if mesh == ():
    assert layout().replace(mesh=mesh).mesh.size == 1  # as Layout(())
  else:
    text_of(errors.MeshError, layout().replace, mesh=mesh)


@pytest.mark.parametrize(
  'names',
  [
    None,
    5,
    {'embed'},
    {'embed': 'mlp'},
    iter(['embed', 'mlp']),
    ('embed', {'mlp'}),
    ['embed', ['a', []]],
  ],
)
def test_names_of_a_box_that_are_no_sequence(names):
  class Inner(nn.Module):
    lib: Any

    @nn.compact
    def __call__(self, x):
      return self.param('w', self.lib.with_logical_partitioning(nn.initializers.ones, names), (8, 8)) * x

  class Outer(nn.Module):
    lib: Any

    @nn.compact
    def __call__(self, x):
      return Inner(self.lib, name='inner')(x)

  expected = dedent(f"""\
    The names of a box in module inner are {names!r}.
    Fix: write a tuple with a name, a tuple of mesh axes, or None for each dimension, such as ('embed', None).""")
  args = jax.random.key(0), jnp.ones((1, 8))
  for lib in (spmd, nn):
    assert text_of(errors.LayoutError, layout().init, Outer(lib).init, *args) == expected
  for written in (UserList(['embed', 'mlp']), PartitionSpec('embed', 'mlp')):
    assert spmd.LogicallyPartitioned(jnp.ones((8, 8)), written).names == ('embed', 'mlp')


@pytest.mark.parametrize('names', [5, {'batch'}, b'batch'])
def test_names_of_a_constraint_that_are_no_tuple(names):
  step = layout(('batch', 'data')).jit(lambda x: spmd.with_logical_constraint(x, names))
  assert text_of(errors.LayoutError, step, jnp.ones((8, 8))) == dedent(f"""\
    constraint: the logical names are {names!r}.
    Fix: write a tuple with a name or None for each dimension, such as ('batch', None).""")


@pytest.mark.parametrize('names, kind', [(['batch', None], 'list'), (('batch', 1), 'tuple')])
def test_names_of_a_constraint_that_are_no_prefix(names, kind):
  step = layout(('batch', 'data')).jit(lambda x: spmd.with_logical_constraint(x, names))
  text = text_of(errors.LayoutError, step, jnp.ones((8, 8)))
  first = f'constraint: the logical names {names!r} are not a prefix of the tree: Expected {kind}, got '
  assert text.startswith(first)
  assert text.endswith(
    "\nFix: write one array's names as a tuple, such as ('batch', None), or a tree of such tuples."
  )


def test_an_array_in_an_error_text_is_cut():
  text = text_of(errors.LayoutError, layout().shard, np.ones((8, 16)), (('batch',),))
  first, fix = text.splitlines()
  assert first.startswith(
    "The placements (('batch',),) are not a prefix of the tree: Expected tuple, got "
  )
  assert first.endswith(' ...') and len(first) < 200 and fix.startswith('Fix: ')


def test_names_that_a_function_gives():
  for names in (['embed', 'mlp'], {'embed'}, 'embed'):
    text = text_of(errors.LayoutError, spmd.with_names, {'w': np.ones((8, 8))}, lambda leaf, n=names: n)
    assert text == (
      f'w: its names are {names!r}, a {type(names).__name__}.\n'
      'Fix: give a tuple of logical names, a PartitionSpec of mesh axes, or None.'
    )


def test_names_of_local_parts_whose_global_shape_is_unknown():
  for names in (('batch', None, None), PartitionSpec('data', None, None)):
    text = text_of(errors.LayoutError, layout(('batch', 'data')).local_to_global, np.ones((8, 4)), names)
    assert text.splitlines()[0].endswith(' for an array of rank 2.')


def test_equal_arrays_of_a_box_are_named_once():
  """Optimizers that map a function over boxed parameters put several arrays into each box."""
  arrays = (jax.ShapeDtypeStruct((10, 8), jnp.float32), jax.ShapeDtypeStruct((10, 8), jnp.int8))
  state = {'stats': spmd.LogicallyPartitioned(arrays, ('mlp', None))}
  text = text_of(errors.LayoutError, layout(('mlp', 'model')).abstract, lambda: state)
  assert (
    text
    == dedent("""\
    stats, dim 0 'mlp': size 10 is not divisible by mesh axis 'model' (4), required by rule 0 ('mlp', 'model').
    Fix: pad it to 12, put the rule ('mlp', None) before rule 0 to replicate it, or give the table indivisible='next' or 'replicate'.""")
  )


@pytest.mark.parametrize('method', ['init', 'plan', 'abstract'])
def test_results_that_are_no_arrays_are_listed(method):
  """As of a model of Equinox, which holds its activation beside its weights."""
  model = lambda: {'weight': jnp.ones((8, 8)), 'name': 'mlp', 'dtype': jnp.dtype('float32')}
  assert text_of(errors.LayoutError, getattr(layout(), method), model) == dedent("""\
    dtype: dtype('float32') is no array or number of JAX.
    name: 'mlp' is no array or number of JAX.
    Fix: keep it out of the tree, or make it static, such as by flax.struct.field(pytree_node=False).""")


@pytest.mark.parametrize('given', ['layout', 'sizes', None])
def test_a_value_in_place_of_a_mesh(tmp_path, given):
  lay = layout(('batch', 'data'))
  mesh: Any = {'layout': lay, 'sizes': {'data': 8}, None: None}[given]
  box_ = spmd.LogicallyPartitioned(jnp.ones(8), ('batch',))
  asked = [lambda: spmd.get_sharding({'w': box_}, mesh)]
  if mesh is not None:
    path = tmp_path / 'program'
    spmd.checkpoint.save_program(path, lay.jit(lambda x: x), jnp.ones(8))
    asked += [
      lambda: spmd.Layout.from_toml(lay.to_toml(), mesh=mesh),
      lambda: spmd.with_logical_constraint(jnp.ones(8), ('batch',), lay.rules, mesh),
      lambda: spmd.constrain(jnp.ones(8), PartitionSpec('data'), mesh),
      lambda: spmd.checkpoint.load_program(path, mesh),
    ]
  for ask in asked:
    assert text_of(errors.MeshError, ask) == (
      f'{mesh!r} is no mesh.\n'
      'Fix: pass a mesh, such as layout.mesh, make_mesh({...}) or abstract_mesh({...}).'
    )


def test_abstract_meshes_where_arrays_are_placed(tmp_path):
  lay = layout(('batch', 'data'))
  planned = layout(('batch', 'data'), mesh=spmd.abstract_mesh({'data': 2, 'model': 4}))
  path, program = tmp_path / 'state', tmp_path / 'program'
  spmd.checkpoint.save(path, {'w': jnp.ones(8)}, layout=lay)
  spmd.checkpoint.save_program(program, lay.jit(lambda x: x), jnp.ones(8))
  target = planned.abstract(lambda: {'w': jnp.ones(8)})
  for ask in (
    lambda: spmd.checkpoint.restore(path, target),
    lambda: spmd.checkpoint.restore(path, layout=planned),
    lambda: spmd.checkpoint.preflight(path, target),
    lambda: spmd.checkpoint.load_program(program, cast(Any, planned.mesh)),
  ):
    assert text_of(errors.MeshError, ask) == dedent("""\
      The mesh {'data': 2, 'model': 4} is abstract: there are no devices to place arrays on.
      Fix: use a layout over a concrete mesh, made by Layout({...}, rules) or make_mesh.""")
  assert text_of(errors.LayoutError, lay.plan_reshard, target, lay) == dedent("""\
    w: its mesh {'data': 2, 'model': 4} is abstract: there are no devices that hold it.
    Fix: plan the state on a layout over a concrete mesh.""")


def test_devices_that_make_no_mesh():
  grid = np.array(jax.devices()[:2]).reshape(2, 1)
  assert text_of(errors.MeshError, spmd.make_mesh, {'data': 2}, devices=grid) == (
    f'devices={grid!r} are not devices.\n'
    'Fix: pass devices of JAX in one list, such as jax.devices()[:4]; abstract_mesh takes their number.'
  )
  one = jax.devices()[0]
  assert text_of(errors.MeshError, spmd.make_mesh, {'data': 2}, devices=[one, one]) == dedent(f"""\
    devices=[{one!r}, {one!r}] contain {one!r} more than once.
    Fix: pass every device once, such as jax.devices()[:4].""")
  assert spmd.abstract_mesh({'data': -1}, devices=cast(int, np.int64(8))).size == 8
  assert text_of(errors.MeshError, spmd.abstract_mesh, {'data': -1}, devices=[one]) == dedent(f"""\
    devices=[{one!r}] is no number of devices.
    Fix: pass their number, such as devices=64; make_mesh takes devices of JAX.""")


def test_a_state_on_another_mesh_than_the_batch_of_the_compiler():
  """JAX describes the shardings that a compiler chooses on the mesh of an argument, and cannot describe these there."""
  old, new = layout(('hidden', 'data'), mesh={'data': 8}), layout(('batch', 'data'), ('hidden', 'model'))
  state = old.init(lambda: {'w': spmd.LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'hidden'))})

  def step(state, x):
    return jax.tree.map(lambda w: w - 0.1, state), jnp.sum(x @ state['w'].unbox())

  jitted, x = new.jit(step), jnp.ones((8, 8))
  assert text_of(errors.LayoutError, jitted, state, x) == dedent("""\
    argument state/w/value is on the mesh {'data': 8}, but the layout is on {'data': 2, 'model': 4}.
    Fix: transfer it with layout.shard, or with reshard of the layout that it is stored by.""")
  assert jitted(old.reshard(state, new), x)[1] == 1024


@pytest.mark.parametrize('wrap', [spmd.with_logical_partitioning, spmd.with_partitioning])
def test_an_initializer_that_is_not_called(wrap):
  lecun: Any = nn.initializers.lecun_normal
  model = nn.Dense(8, kernel_init=wrap(lecun, ('embed', 'model')))
  text = text_of(errors.LayoutError, model.init, jax.random.key(0), jnp.ones((1, 8)))
  assert text == dedent(f"""\
    The initializer lecun_normal of {wrap.__name__} returned a function.
    Fix: call it first: {wrap.__name__}(lecun_normal(), names).""")


def test_results_that_have_a_dtype_and_are_no_arrays():
  """A module of Linen has one."""
  step = layout().jit(lambda x: {'x': x, 'model': nn.Dense(3)})
  text = text_of(errors.LayoutError, step, jnp.ones(8)).splitlines()
  assert text[0].startswith('model: Dense(') and text[0].endswith(' is no array or number of JAX.')
  assert text[1:] == [
    'Fix: keep it out of the tree, or make it static, such as by flax.struct.field(pytree_node=False).'
  ]


def test_arguments_of_a_search_of_another_type():
  train_step = spmd.explore.TrainStep(lambda s, x: s, lambda: {'w': jnp.ones(8)}, jnp.ones(8))
  given: Any = {'choices': ['batch'], 'pin': 'hidden', 'forbid': 3, 'mesh': 8}
  text = text_of(errors.SearchError, lambda: spmd.search(train_step, 'cpu:8', **given))
  assert (
    text
    == dedent("""\
    search does not take choices=['batch'], pin='hidden', forbid=3, mesh=8.
    Fix: choices and pin are dicts by name, such as pin={'batch': 'data'}; pipelines is a list of schedules, forbid a dict or a list of names, mesh a mesh or a dict of sizes.""")
  )


def test_values_that_a_search_cannot_use():
  step, create, x = lambda s, x, remat=None: s, lambda: {'w': jnp.ones(8)}, jnp.ones(8)
  train_step = spmd.explore.TrainStep(step, create, x)
  choices = {'remta': (None, 'dots'), 'dtype': ('float32',)}
  other: Any = train_step._replace(args=cast(Any, 0))
  no_arguments = dedent("""\
    The choices do not fit <lambda>(s, x, remat):
      no argument 'remta'. Did you mean 'remat'?
      no argument 'dtype'.
    Fix: name arguments of the step that have defaults, such as def step(state, batch, remat=None) and choices={'remat': [None, 'dots']}.""")
  for kind, call, text in (
    (
      errors.SearchError,
      lambda: spmd.search(train_step, 'cpu:8', memory=0),
      "memory=0 is not a size.\nFix: pass a positive number of bytes, or text such as '14GiB'.",
    ),
    (errors.SearchError, lambda: spmd.search(train_step, 'cpu:8', choices=choices), no_arguments),
    (
      errors.SearchError,
      lambda: spmd.search(lambda layout: train_step, 'cpu:8', choices=choices),
      no_arguments,
    ),
    (
      errors.EstimatorError,
      lambda: spmd.explore.Estimator(train_step, platform='gpu'),
      "The platform 'gpu' is unknown.\nFix: pass one of 'cuda', 'rocm', 'tpu', 'cpu'.",
    ),
  ):
    assert text_of(kind, call) == text
  with pytest.raises(TypeError) as caught:
    spmd.search(other, 'cpu:8')
  assert str(caught.value) == (
    'TrainStep.args is 0, of type int.\n'
    'Fix: pass the arguments of create as a tuple, TrainStep(step, create, batch, args=(key,)).'
  )
  for donate in ('False', 0, (0,), None):
    call = functools.partial(spmd.search, train_step._replace(donate=donate), 'cpu:8')
    assert text_of(errors.ArgumentTypeError, call) == (
      f'TrainStep.donate is {donate!r}, of type {type(donate).__name__}.\n'
      'Fix: pass True, which donates the state to the step, or False.'
    )


def test_place_with_of_other_values():
  text = text_of(
    errors.PipelineError, lambda: spmd.pipeline.place_with('x', {'g': jnp.ones(3), 'k': 'y'})
  )
  assert (
    text
    == dedent("""\
    place_with takes arrays and numbers, and these leaves are neither:
      anchor/k: 'y' is a str
      x: 'x' is a str
    Fix: write place_with(x, anchor), with the arrays to compute and an array of the rank, such as a gradient.""")
  )


def test_arguments_of_an_estimate_a_comparison_and_a_calibration_of_another_type():
  explore, lay = spmd.explore, layout(('batch', 'data'))
  step = lambda state, x: state
  train_step = explore.TrainStep(step, lambda: {'w': jnp.ones(8)}, {'x': np.array(['a'] * 8)})
  assert text_of(errors.LayoutError, lambda: spmd.compare(train_step, [lay], 'cpu:8')) == dedent("""\
    batch/x: array(['a', 'a', 'a', 'a', 'a', 'a', 'a', 'a'], dtype='<U1') is no array or number of JAX.
    Fix: keep it out of the tree, or make it static, such as by flax.struct.field(pytree_node=False).""")
  swapped: Any = explore.Pipeline(cast(Any, spmd.pipeline.OneFOneB(2)), cast(Any, lay))
  estimator = explore.Estimator(train_step._replace(batch=jnp.ones(8)), platform='cpu')
  for kind, ask, text in (
    (
      TypeError,
      lambda: spmd.compare(train_step, {'1F1B': swapped}, 'cpu:8'),
      'compare needs layouts and pipelines, and these are none:\n  1F1B: layout: an OneFOneB\n'
      "Fix: pass compare(train_step, {'fsdp': Layout(mesh, rules)}, target).",
    ),
    (
      TypeError,
      lambda: estimator.estimate(cast(Any, 'cpu:8'), cast(Any, lay)),
      "estimate needs a layout, and 'cpu:8' is none.\nFix: write estimate(Layout(mesh, rules), 'h100:64').",
    ),
    (
      ValueError,
      lambda: explore.calibrate(cast(Any, [(1.0, lay)]), 'cpu:8'),
      f'(1.0, {lay!r}) is no pair of an outcome and seconds.\n'
      'Fix: pass pairs of an outcome of compare or Estimator and the seconds of a whole step of it.',
    ),
  ):
    with pytest.raises(kind) as caught:
      ask()
    assert str(caught.value) == text


def test_a_limit_of_a_reshard_below_zero():
  text = text_of(errors.LayoutError, layout().plan_reshard, {'w': jnp.ones(8)}, layout(), limit=-1)
  assert text == ('limit=-1 is not a number of bytes.\nFix: pass 0 or more, such as limit=8 * 2**30.')
