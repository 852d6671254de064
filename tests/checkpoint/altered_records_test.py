"""One entry of a record is altered, with a right digest: the other leaves are salvaged, and verify agrees with restore."""

import functools
import itertools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd.checkpoint import Changes
from tests.checkpoint.damage import edit_manifest, signed
from tests.checkpoint.states import plain

LAYOUT = spmd.Layout({'data': 2, 'model': 4}, (('rows', 'data'), ('columns', 'model')))
STACKS = Changes(stacks={'layer': 'layer_{}'})


def state():
  box = spmd.LogicallyPartitioned
  layers = {
    f'layer_{i}': {
      'a': box(jnp.arange(32.0).reshape(8, 4) + i, ('rows', 'columns')),
      'b': jnp.arange(6.0) * i,
    }
    for i in range(3)
  }
  return {
    **layers,
    'empty': box(jnp.zeros((0, 4)), ('rows', 'columns')),
    'half': box(jnp.arange(6, dtype=jnp.bfloat16), ('rows',)),
    'keys': jax.random.split(jax.random.key(5), 4),
    'list': [jnp.arange(8, dtype=jnp.int8), jnp.float32(0.5)],
    'rate': 0.25,
    'step': 7,
  }


@functools.cache
def written(folder, pack):
  path = folder / f'packed_{pack}'
  arrays = jax.tree.map(lambda x: x if isinstance(x, (int, float)) else jnp.asarray(x), state())
  numbers = {name: arrays.pop(name) for name in ('rate', 'step')}
  checkpoint.save(path, {**LAYOUT.shard(arrays), **numbers}, LAYOUT, pack=pack)
  return path


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """A function that returns the checkpoint that was saved with `pack`."""
  return functools.partial(written, tmp_path_factory.mktemp('whole'))


def leaves_of(tree):
  return {
    jax.tree_util.keystr(keys, simple=True, separator='/'): leaf
    for keys, leaf in jax.tree_util.tree_flatten_with_path(spmd.unbox(tree))[0]
  }


# -- alterations: functions that edit the stored record of one leaf


def shaped(change):
  def edit(leaf):
    leaf.update(shape=change(leaf['shape']))
    leaf.pop('names', None)
    leaf.pop('spec', None)

  return edit


def put(**fields):
  return lambda leaf: leaf.update(fields)


def without(field):
  return lambda leaf: leaf.pop(field, None)


def names(leaf):
  leaf['names'] = ['rows', *[None] * (len(leaf['shape']) - 1)] if leaf['shape'] else []


def value(leaf):
  leaf['value'] = type(leaf['value'])(leaf['value'] * 3)


HARMLESS = {
  'names': names,
  'no names': without('names'),
  'sharding': put(spec=['nowhere']),
}
SHAPES = {
  'one dimension': shaped(lambda shape: [int(np.prod(shape, dtype=int))]),
  'another rank': shaped(lambda shape: [1, *shape]),
  'longer': shaped(lambda shape: [*shape[:-1], shape[-1] + 1] if shape else [2]),
  'shorter': shaped(
    lambda shape: [max(shape[0] - 1, 1) if shape[0] > 1 else 2, *shape[1:]] if shape else [3]
  ),
  'transposed': shaped(lambda shape: shape[::-1] if len(set(shape)) > 1 else [1, 1, *shape]),
  'impossible': shaped(lambda shape: [2**59]),
}
OTHERS = {
  'the same width': lambda leaf: put(
    dtype=other(leaf['dtype'], ('int32', 'float32', 'uint8', 'float16', 'key<rbg>'))
  )(leaf),
  'another width': lambda leaf: put(dtype=other(leaf['dtype'], ('int8', 'uint16')))(leaf),
  'checksum': put(checksum='crc32c:01234567'),
  'checksum of an earlier version': put(checksum='01234567'),
  'no checksum': without('checksum'),
}


def other(dtype, candidates):
  widths = {'float32': 'int32', 'bfloat16': 'float16', 'int8': 'float8_e5m2', 'int32': 'float32'}
  return (
    widths.get(dtype, candidates[0])
    if len(candidates) > 2
    else next(c for c in candidates if c != dtype)
  )


PATHS = ['layer_1/a', 'layer_2/b', 'half', 'keys', 'list/0', 'list/1']
UNCHANGED = {(path, 'one dimension') for path in ('layer_2/b', 'half', 'keys', 'list/0')}
EDITS = {**HARMLESS, **SHAPES, **OTHERS}
QUICK = {
  ('layer_1/a', 'another rank'),
  ('layer_2/b', 'impossible'),
  ('half', 'the same width'),
  ('keys', 'longer'),
  ('list/0', 'no checksum'),
  ('layer_1/a', 'names'),
  ('step', 'value'),
}
CASES = [
  pytest.param(*case, marks=[] if case in QUICK else pytest.mark.exhaustive)
  for case in [*itertools.product(PATHS, EDITS), ('rate', 'value'), ('step', 'value')]
  if case not in UNCHANGED
]


def altered(path, to, name, edit):
  """A copy of a checkpoint, in which the record of one leaf is edited."""
  shutil.copytree(path, to)

  def change(record):
    edit(record['leaves'][list(leaves_of(state())).index(name)])

  edit_manifest(to, signed(change))
  return to


def outcome(call):
  try:
    return call()
  except errors.CheckpointError as error:
    return error


def check_salvaged(path, lost):
  """Everything but `lost` is salvaged, with and without a target, and as stacked layers."""
  expected = leaves_of(state())
  target = LAYOUT.abstract(lambda: {**state(), 'rate': jnp.float32(0), 'step': jnp.int32(0)})
  for arguments in ({'layout': LAYOUT}, {'target': target}):
    salvaged = checkpoint.restore(path, salvage=True, **arguments)
    assert set(salvaged.damaged) == lost and not salvaged.files
    found = leaves_of(salvaged.state)
    for name in expected.keys() - lost - {'rate', 'step'}:
      assert plain(found[name]).tobytes() == plain(expected[name]).tobytes(), name
    assert all(found[name] == expected[name] for name in {'rate', 'step'} - lost)
  check_salvaged_stack(path, lost)


def check_salvaged_stack(path, lost):
  rest = {name: leaf for name, leaf in spmd.unbox(state()).items() if not name.startswith('layer')}
  rest = jax.tree.map(np.zeros_like, jax.tree.map(plain, rest))
  own = {'a': np.full((3, 8, 4), -1, np.float32), 'b': np.full((3, 6), -1, np.float32)}
  target = {**rest, 'keys': LAYOUT.shard(jax.random.split(jax.random.key(1), 4)), 'layer': own}
  salvaged = checkpoint.restore(path, target, changes=STACKS, salvage=True)
  assert set(salvaged.damaged) == lost
  for name in 'ab':
    layers = [f'layer_{i}/{name}' for i in range(3)]
    together = np.stack([plain(leaves_of(state())[layer]) for layer in layers])
    wanted = own[name] if lost & set(layers) else together
    np.testing.assert_array_equal(salvaged.state['layer'][name], wanted)


@pytest.mark.filterwarnings('ignore:Every device will hold', 'ignore:.*no rule for this logical name')
@pytest.mark.parametrize(('name', 'edit'), CASES)
def test_one_altered_field(whole, tmp_path, name, edit):
  path = altered(whole(0), tmp_path / 'a', name, value if edit == 'value' else EDITS[edit])
  lost = set() if edit in HARMLESS else {name}
  assert set(checkpoint.verify(path)) == lost
  restored = outcome(lambda: checkpoint.restore(path, layout=LAYOUT))
  assert isinstance(restored, errors.CheckpointDamagedError) == bool(lost), restored
  assert all(f'{each}: ' in str(restored) for each in lost)
  if edit in HARMLESS:
    assert [plain(x).tobytes() for x in jax.tree.leaves(spmd.unbox(restored))] == [
      plain(x).tobytes() for x in jax.tree.leaves(spmd.unbox(state()))
    ]
  else:
    check_salvaged(path, lost)


def without_leaf(name):
  """An edit of a record that removes a leaf, as if it had never been saved."""
  index = list(leaves_of(state())).index(name)

  def renumbered(node):
    if isinstance(node, dict):
      return {key: renumbered(child) for key, child in node.items() if child != index}
    if isinstance(node, list):
      return [renumbered(child) for child in node if child != index]
    return node if node is None else node - (node > index)

  def edit(record):
    del record['leaves'][index]
    record['tree'] = renumbered(record['tree'])

  return signed(edit)


def extra(record):
  record['leaves'].append(dict(record['leaves'][2]))
  record['tree']['more'] = len(record['leaves']) - 1


@pytest.mark.filterwarnings('ignore:Every device will hold')
@pytest.mark.parametrize('name', ['layer_1/a', pytest.param('half', marks=pytest.mark.exhaustive)])
def test_a_missing_entry(whole, tmp_path, name):
  shutil.copytree(whole(0), tmp_path / 'a')
  edit_manifest(tmp_path / 'a', without_leaf(name))
  assert checkpoint.verify(tmp_path / 'a') == [name]
  with pytest.raises(errors.CheckpointDamagedError) as caught:
    checkpoint.restore(tmp_path / 'a', layout=LAYOUT)
  assert f'{name}: it is stored, and missing in the record' in str(caught.value)
  check_salvaged(tmp_path / 'a', {name})


def places(leaf):
  leaf['packed'][1] += 3


PACKED = ['layer_1/a', 'layer_2/b', 'half', 'list/0', 'list/1']
PLACES = {'place': places, 'before the first': lambda leaf: leaf.update(packed=[leaf['dtype'], -4])}
# in a packed array, other shapes of the same size are as good as names: the elements are the same
IN_PACKS = PLACES | {name: SHAPES[name] for name in ('longer', 'shorter', 'impossible')} | OTHERS
QUICK_IN_PACKS = {('layer_1/a', 'place'), ('layer_2/b', 'longer'), ('list/1', 'the same width')}
OF_PACKS = [
  pytest.param(*case, marks=[] if case in QUICK_IN_PACKS else pytest.mark.exhaustive)
  for case in itertools.product(PACKED, IN_PACKS)
]


@pytest.mark.filterwarnings('ignore:Every device will hold', 'ignore:.*no rule for this logical name')
@pytest.mark.parametrize(('name', 'edit'), OF_PACKS)
def test_a_leaf_out_of_its_place_in_a_packed_array(whole, tmp_path, name, edit):
  """The other leaves of the array are whole, whichever of them the places contradict."""
  path = altered(whole(1 << 10), tmp_path / 'a', name, IN_PACKS[edit])
  assert set(checkpoint.verify(path)) == {name}
  for verify in {True, 'checksum' in edit}:
    with pytest.raises(errors.CheckpointDamagedError, match=f'(?m)^{name}: '):
      checkpoint.restore(path, layout=LAYOUT, verify=verify)
  check_salvaged(path, {name})


@pytest.mark.filterwarnings('ignore:Every device will hold')
def test_a_missing_entry_of_a_packed_array(whole, tmp_path):
  """Its name is lost with it; all others are whole."""
  shutil.copytree(whole(1 << 10), tmp_path / 'a')
  edit_manifest(tmp_path / 'a', without_leaf('list/1'))
  assert checkpoint.verify(tmp_path / 'a') == ['packed/float32']
  salvaged = checkpoint.restore(tmp_path / 'a', layout=LAYOUT, salvage=True)
  assert salvaged.damaged == {'packed/float32': 'the leaves of the record do not fill it'}
  expected, found = leaves_of(state()), leaves_of(salvaged.state)
  assert found.keys() == expected.keys() - {'list/1'}
  assert all(plain(found[name]).tobytes() == plain(expected[name]).tobytes() for name in found)
  target = jax.tree.map(
    lambda x: x * 0 if hasattr(x, 'dtype') and x.dtype != expected['keys'].dtype else x, state()
  )
  salvaged = checkpoint.restore(tmp_path / 'a', target, salvage=True)
  assert set(salvaged.damaged) == {'list/1', 'packed/float32'}
  found = leaves_of(salvaged.state)
  assert found.keys() == expected.keys() and plain(found.pop('list/1')) == 0
  assert all(plain(found[name]).tobytes() == plain(expected[name]).tobytes() for name in found)


@pytest.mark.filterwarnings('ignore:Every device will hold')
def test_an_extra_entry(whole, tmp_path):
  shutil.copytree(whole(0), tmp_path / 'a')
  edit_manifest(tmp_path / 'a', signed(extra))
  assert checkpoint.verify(tmp_path / 'a') == ['more']
  check_salvaged(tmp_path / 'a', {'more'})
