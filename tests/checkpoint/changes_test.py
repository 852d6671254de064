"""`Changes`: validated when made, compared and hashed by value, and printed as it was written."""

import copy
import dataclasses
import functools
import itertools
import pickle
import random
from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd.checkpoint import Changes


@pytest.mark.parametrize(
  ('arguments', 'text'),
  [
    (
      {'renames': {'(': 'c'}},
      "renames: '(' is not a regular expression: missing ), unterminated subpattern at position 0.\n"
      'Fix: correct it; it is searched for in paths such as params/layers/wi.',
    ),
    (
      {'missing': 'a**'},
      "missing: 'a**' is not a regular expression: multiple repeat at position 2.\n"
      'Fix: correct it; it is searched for in paths such as params/layers/wi.',
    ),
    (
      {'unused': '['},
      "unused: '[' is not a regular expression: unterminated character set at position 0.\n"
      'Fix: correct it; it is searched for in paths such as params/layers/wi.',
    ),
    (
      {'renames': {'(a+)+$': 'b', '[': 'c'}, 'unused': r'(a*)*\1'},
      "renames: a replacement of '(a+)+$' may take exponential time, because it has nested repetitions.\n"
      "renames: '[' is not a regular expression: unterminated character set at position 0.\n"
      "unused: a search for '(a*)*\\\\1' may take exponential time, because it has nested repetitions and a construct of "
      'the kind groupref.\n'
      'Fix: write it without a repetition inside a repetition.\n'
      'Fix: correct it; it is searched for in paths such as params/layers/wi.\n'
      'Fix: write it without backreferences and possessive groups, or without a repetition inside a repetition.',
    ),
    (
      {'stacks': {'layers': 'layers'}},
      "stacks={'layers': 'layers'} has no {} for the number of a layer, or several.\n"
      "Fix: write {} once, where the number goes: stacks={'layers': 'layers_{}'}.",
    ),
    (
      {'stacks': {'layers': ('{}_{}', 1)}},
      "stacks={'layers': ('{}_{}', 1)} has no {} for the number of a layer, or several.\n"
      "Fix: write {} once, where the number goes: stacks={'layers': 'layers_{}'}.",
    ),
    *(
      (
        {'stacks': {'layers': single}},
        f"stacks={{'layers': {single!r}}} is neither a path nor a path and a dimension.\n"
        "Fix: write stacks={'layers': 'layers_{}'}, or stacks={'layers': ('layers_{}', 0)}.",
      )
      for single in (3, ('layers_{}',), ('layers_{}', '0'), ('layers_{}', 0, 1), ('layers_{}', True))
    ),
    (
      {'renames': {'(a)': [r'\1', r'\2'], 'b': r'\q', 'c': r'\g<x>'}},
      "renames: '\\\\2' cannot replace '(a)': invalid group reference 2 at position 1.\n"
      "renames: '\\\\q' cannot replace 'b': bad escape \\q at position 0.\n"
      "renames: '\\\\g<x>' cannot replace 'c': unknown group name 'x'.\n"
      'Fix: refer to its groups as \\1, \\2 or \\g<name>, and write \\\\ for one backslash.',
    ),
    (
      {'dtypes': 'float32'},
      "dtypes='float32' is neither 'keep', 'cast' nor a mapping of dtypes.\n"
      "Fix: write dtypes='cast'; for casts that lose digits, list them: dtypes={'float32': 'bfloat16'}.",
    ),
    (
      {'dtypes': ('f4', 'f2')},
      "dtypes=('f4', 'f2') is neither 'keep', 'cast' nor a mapping of dtypes.\n"
      "Fix: write dtypes='cast'; for casts that lose digits, list them: dtypes={'float32': 'bfloat16'}.",
    ),
    (
      {'dtypes': {'float32': 'float3'}},
      "dtypes={'float32': 'float3'} contains an unknown dtype: data type 'float3' not understood.\n"
      "Fix: write dtypes={'float32': 'bfloat16'}.",
    ),
  ],
)
def test_invalid_arguments(arguments, text):
  with pytest.raises(errors.CheckpointError) as caught:
    Changes(**arguments)
  assert str(caught.value) == text


WRITTEN = [
  'Changes()',
  "Changes(renames={'^a$': 'b', 'c': 'd'})",
  "Changes(stacks={'layers': 'layers_{}', 'blocks': ('blocks_{}', 1)})",
  "Changes(axes={'embed': 'model'}, moved='layers')",
  "Changes(moved=('blocks', 'layers'), dtypes='cast')",
  "Changes(moved='layers', resized='vocab')",
  "Changes(resized=('layers', 'vocab'))",
  "Changes(dtypes={'float32': 'bfloat16'}, missing='lora', unused='^opt/', only='params/head')",
]


@pytest.mark.parametrize('text', WRITTEN)
def test_printed_as_written(text):
  changes = eval(text, {'Changes': Changes})
  assert repr(changes) == text


@pytest.mark.parametrize('text', WRITTEN)
def test_compared_and_hashed_by_value(text):
  changes, again = (eval(text, {'Changes': Changes}) for _ in range(2))
  assert changes == again and hash(changes) == hash(again)
  assert pickle.loads(pickle.dumps(changes)) == copy.deepcopy(changes) == changes
  assert dataclasses.replace(changes) == changes != dataclasses.replace(changes, missing='other')


def test_equal_ways_of_writing():
  assert Changes(moved='layers') == Changes(moved=['layers']) == Changes(moved={'layers'})
  assert Changes(moved='layers', resized='b') == Changes(moved=('layers',), resized={'b': 1}.keys())
  assert Changes(moved=('b', 'a')) == Changes(moved=('a', 'b'))
  assert Changes(only='/params/') == Changes(only='params')
  assert Changes(dtypes={jnp.float32: jnp.bfloat16}) == Changes(dtypes={'float32': 'bfloat16'})
  assert Changes(dtypes={}) == Changes(dtypes='keep', renames={}, only='') == Changes()


def test_the_order_of_renames_matters():
  assert Changes(renames={'a': 'b', 'c': 'd'}) != Changes(renames={'c': 'd', 'a': 'b'})


def test_changes_are_immutable():
  with pytest.raises(dataclasses.FrozenInstanceError):
    Changes().only = 'params'


def test_patterns_with_exponentially_many_ways_are_searched_for_in_bounded_time(tmp_path):
  layout, slow = spmd.Layout({'data': 8}), '(a+)+$'
  state = {'a' * 50 + 'b': jnp.ones(8), 'c': {'a': jnp.ones(8)}}
  checkpoint.save(tmp_path / 'all', state, layout=layout)
  checkpoint.save(tmp_path / 'some', state, layout=layout, where=slow)
  target = layout.abstract(lambda: state)
  with pytest.raises(errors.CheckpointError, match=r'a{50}b'):
    checkpoint.restore(tmp_path / 'some', target, changes=Changes(missing=slow))
  part = layout.abstract(lambda: {name: state[name] for name in state if name != 'c'})
  assert list(checkpoint.restore(tmp_path / 'all', part, changes=Changes(unused=slow))) == [
    'a' * 50 + 'b'
  ]


def test_a_pattern_of_paths_to_save_that_is_none(tmp_path):
  with pytest.raises(errors.CheckpointError) as caught:
    checkpoint.save(tmp_path / 'a', {'w': jnp.ones(8)}, layout=spmd.Layout({'data': 8}), where='(')
  assert str(caught.value) == (
    "where: '(' is not a regular expression: missing ), unterminated subpattern at position 0.\n"
    'Fix: correct it; it is searched for in paths such as params/layers/wi.'
  )
  assert not (tmp_path / 'a').exists()


ALONE = {
  'renames': {'^w$': 'u'},
  'rearranged': {'w': 'a -> a'},
  'stacks': {'layers': 'layers_{}'},
  'axes': {'embed': 'model'},
  'moved': 'embed',
  'resized': 'embed',
  'dtypes': 'cast',
  'missing': 'u',
  'unused': '^v$',
  'only': 'w',
}


@pytest.mark.parametrize('name', [field.name for field in dataclasses.fields(Changes)])
def test_a_change_that_needs_a_target_is_refused_without_one(name, tmp_path):
  layout, state = spmd.Layout({'data': 8}), {'v': jnp.ones(8), 'w': jnp.ones(8)}
  checkpoint.save(tmp_path / 'a', state, layout=layout)
  changes = Changes(**{name: ALONE[name]})
  for function, taken, call in (
    ('convert', set(), functools.partial(checkpoint.convert, tmp_path / 'a', tmp_path / 'b')),
    (
      'save_safetensors',
      {'unused'},
      functools.partial(checkpoint.save_safetensors, tmp_path / 'c', state),
    ),
  ):
    if name in {'renames', 'rearranged', 'stacks', 'dtypes', 'only'} | taken:
      call(changes=changes)
    else:
      with pytest.raises(errors.CheckpointError) as caught:
        call(changes=changes)
      text = f'{function} has no target, so Changes({name}=...) cannot apply.'
      assert str(caught.value).startswith(text)
    with pytest.raises(errors.CheckpointError, match='is not a Changes'):
      call(changes={name: ALONE[name]})


def test_changes_for_a_target_are_refused_by_convert(tmp_path):
  layout = spmd.Layout({'data': 8})
  checkpoint.save(tmp_path / 'a', {'w': jnp.ones(8)}, layout=layout)
  changes = Changes(axes={'embed': 'model'}, missing='b', only='w')
  with pytest.raises(errors.CheckpointError) as caught:
    checkpoint.convert(tmp_path / 'a', tmp_path / 'b', changes=changes)
  assert str(caught.value) == dedent("""\
    convert has no target, so Changes(axes=..., missing=...) cannot apply.
    Fix: pass only renames, rearranged, stacks, dtypes and only.""")
  assert not (tmp_path / 'b').exists()


@pytest.mark.parametrize(
  'argument',
  [
    {'renames': 'a'},
    {'renames': {3: 'b'}},
    {'renames': ('wi', 'up')},
    {'rearranged': ('wi', 'a b -> b a')},
    {'stacks': ('ls', 'l_{}')},
    {'stacks': ['layers']},
    {'axes': 3},
    {'moved': 3},
    {'moved': ('layers', 3)},
    {'resized': 3},
    {'resized': itertools.repeat('embed')},  # it may have no end
    {'moved': iter(['embed'])},
    {'renames': {'a': itertools.repeat('b')}},
  ],
)
def test_arguments_of_the_wrong_type(argument):
  ((name, value),) = argument.items()
  with pytest.raises(errors.CheckpointError) as caught:
    Changes(**argument)
  assert (
    str(caught.value)
    == dedent(f"""\
    Changes(...) does not take {name}={value!r}.
    Fix: renames, rearranged, stacks and axes are dicts of strings by name, and moved and resized are a name or a list of names.""")
  )


@pytest.mark.parametrize('changes', [None, {'only': 'a'}, Changes])
def test_changes_of_the_wrong_type(tmp_path, changes):
  layout = spmd.Layout({'data': 8})
  checkpoint.save(tmp_path / 'a', {'w': jnp.ones(8)}, layout=layout)
  calls = (
    lambda: checkpoint.restore(tmp_path / 'a', changes=changes),
    lambda: checkpoint.preflight(tmp_path / 'a', changes=changes),
    lambda: checkpoint.convert(tmp_path / 'a', tmp_path / 'b', changes=changes),
  )
  for call in calls:
    with pytest.raises(errors.CheckpointError) as caught:
      call()
    assert str(caught.value) == (
      f"changes={changes!r} is not a Changes.\nFix: write changes=Changes(renames={{'old': 'new'}}), or leave it out."
    )


def test_a_rename_to_nothing(tmp_path):
  """It makes a single leaf the tree itself; among others it is an error."""
  layout = spmd.Layout({'data': 8})
  to_nothing = Changes(renames={'^a/w$': ''})
  checkpoint.save(tmp_path / 'one', {'a': {'w': jnp.arange(8.0)}}, layout=layout)
  for target in (None, layout.abstract(lambda: jnp.zeros(8))):
    restored = checkpoint.restore(tmp_path / 'one', target, changes=to_nothing)
    np.testing.assert_array_equal(restored, np.arange(8.0))
  checkpoint.save(tmp_path / 'two', {'a': {'w': jnp.ones(8)}, 'b': 3}, layout=layout)
  with pytest.raises(errors.CheckpointError) as caught:
    checkpoint.restore(tmp_path / 'two', changes=to_nothing)
  assert str(caught.value) == dedent("""\
    A rename leaves no name of a path, which makes it the whole tree, beside b.
    Fix: give it a name, with Changes(renames={'old': 'new'}).""")


def test_a_rename_to_a_part_of_a_path(tmp_path):
  layout = spmd.Layout({'data': 8})
  checkpoint.save(tmp_path / 'a', {'x': {'y': {'w': jnp.ones(8)}}}, layout=layout)
  restored = checkpoint.restore(tmp_path / 'a', changes=Changes(renames={'y': ''}))
  assert list(restored['x']) == ['w']


def test_a_value_that_is_another_arguments_default_is_printed():
  assert repr(Changes(only='keep', moved='keep')) == "Changes(moved='keep', only='keep')"


@pytest.mark.parametrize('axis', [0, 1, 2, 3, -1, -2, -3, -4, 10**30])
def test_a_stacked_dimension_that_some_leaves_do_not_have(tmp_path, axis):
  """numpy says which dimensions there are; one that is too large is not counted from the begin again."""
  single = {
    f'layers_{i}': {'b': np.full(3, i, 'float32'), 'k': np.full((3, 4), i, 'float32')} for i in range(2)
  }
  layout = spmd.Layout({'data': 8})
  changes = Changes(stacks={'layers': ('layers_{}', axis)})
  checkpoint.save(tmp_path / 'single', single, layout)
  ranks = {f'layers_{i}/{name}': rank for i in range(2) for name, rank in (('b', 2), ('k', 3))}
  bad = [
    f'{path}: it has {rank} dimensions where layers is stacked, and stacks gives dimension {axis}.\n'
    for path, rank in ranks.items()
    if not -rank <= axis < rank
  ]
  fix = "Fix: give a dimension that all leaves of layers have, or none: Changes(stacks={'layers': 'layers_{}'})."
  if not bad:
    restored = checkpoint.restore(tmp_path / 'single', layout=layout, changes=changes)
    for name in ('b', 'k'):
      expected = np.stack([single[f'layers_{i}'][name] for i in range(2)], axis)
      np.testing.assert_array_equal(restored['layers'][name], expected)
    target = layout.abstract(lambda: {'layers': restored['layers']})
    again = checkpoint.restore(tmp_path / 'single', target, changes=changes)
    jax.tree.map(np.testing.assert_array_equal, again, restored)
    return
  for call in (
    lambda: checkpoint.restore(tmp_path / 'single', layout=layout, changes=changes),
    lambda: checkpoint.convert(tmp_path / 'single', tmp_path / 'other', changes=changes),
    lambda: checkpoint.save_safetensors(tmp_path / 'other', single, changes=changes),
  ):
    with pytest.raises(errors.CheckpointError) as caught:
      call()
    assert str(caught.value) == ''.join(bad) + fix
  stacked = jax.tree.map(lambda *layers: jnp.stack(layers), *single.values())
  with pytest.raises(errors.CheckpointMismatchError) as caught:
    checkpoint.restore(
      tmp_path / 'single', layout.abstract(lambda: {'layers': stacked}), changes=changes
    )
  assert fix.removeprefix('Fix: ') in str(caught.value)
  for line in dict.fromkeys(
    line.replace('layers_0', 'layers').replace('layers_1', 'layers') for line in bad
  ):
    assert line in str(caught.value)


@pytest.mark.parametrize('seed', range(6))
def test_leaves_of_other_shapes_that_may_be_missing_and_unused(tmp_path, seed):
  """As a head for other classes. Leaves of the same shape are restored, and one of the two permissions is not enough."""
  rng = random.Random(seed)
  shapes = {name: (8, rng.randint(1, 3)) for name in 'abcd'}
  others = {name: (8, rng.randint(1, 3)) for name in 'abcd'}
  layout = spmd.Layout({'data': 8})
  create = {name: np.full(shape, 1, 'float32') for name, shape in shapes.items()}
  checkpoint.save(tmp_path / 'x', {'params': create, 'mu': create}, layout)
  fresh = {name: np.full(shape, 2, 'float32') for name, shape in others.items()}
  target = layout.shard({'params': fresh, 'mu': fresh})
  restored = checkpoint.restore(
    tmp_path / 'x', target, changes=Changes(missing='[abcd]$', unused='[abcd]$')
  )
  differing = [name for name in 'abcd' if shapes[name] != others[name]]
  for part in ('params', 'mu'):
    for name in 'abcd':
      expected = fresh[name] if name in differing else create[name]
      np.testing.assert_array_equal(restored[part][name], expected)
  for changes in (
    Changes(),
    Changes(missing='.'),
    Changes(unused='.'),
    Changes(missing='params', unused='mu'),
  ):
    call = functools.partial(checkpoint.restore, tmp_path / 'x', target, changes=changes)
    if not differing:
      call()
      continue
    with pytest.raises(errors.CheckpointMismatchError) as caught:
      call()
    for name in differing:
      assert f'params/{name}: float32[8,{shapes[name][1]}] in the checkpoint, ' in str(caught.value)
    assert str(caught.value).endswith(
      "or keep the target's value of another shape: Changes(missing='regex', unused='regex')."
    )


@pytest.mark.parametrize(
  'inner', [{'params': {'w': 1}}, {'params': {'w': 1}, 'w': 2}, {'params': 1, 'stats': 2}]
)
@pytest.mark.parametrize('whole', [False, True])
def test_a_part_with_a_part_of_its_own_name(tmp_path, inner, whole):
  """As in a `TrainState` whose `params` are all variables of a model, `{'params': ...}`."""
  layout = spmd.Layout({'data': 8}, ())
  state = jax.tree.map(jnp.float32, {'params': inner, 'step': 3})
  checkpoint.save(tmp_path / 'a', state, layout)
  target = layout.abstract(lambda: state if whole else state['params'])
  changes = Changes(only='params')
  assert checkpoint.restore(tmp_path / 'a', target, changes=changes) == state['params']
  assert not checkpoint.preflight(tmp_path / 'a', target, changes=changes).problems


def test_a_part_that_a_rename_takes_out_of_one_of_its_name(tmp_path):
  layout = spmd.Layout({'data': 8}, ())
  w = jnp.float32(1)
  checkpoint.save(tmp_path / 'a', {'params': {'params': {'w': w}}}, layout)
  target = layout.abstract(lambda: {'params': {'w': w}, 'step': 3})
  changes = Changes(only='params', renames={'^params/params': 'params'})
  assert checkpoint.restore(tmp_path / 'a', target, changes=changes) == {'w': w}


def test_names_of_an_axis_that_are_no_strings():
  with pytest.raises(errors.CheckpointError) as caught:
    Changes(axes={'a': 3})
  assert str(caught.value).splitlines()[0] == "Changes(...) does not take axes={'a': 3}."
