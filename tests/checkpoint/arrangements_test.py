"""`Changes(rearranged=...)` and stacks with names: for every kind of checkpoint, with optimizer state, in any layout."""

from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import checkpoints as flax_checkpoints
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import save_file

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd.checkpoint import Changes
from tests.texts import text_of

LAYOUT = spmd.Layout({'data': 2, 'model': 4}, (('embed', 'data'), ('heads', 'model'), ('mlp', 'model')))
VALUES = np.arange(8 * 24, dtype=np.float32).reshape(8, 24)


def by_flax(path):
  flax_checkpoints.save_checkpoint(path / 'flax', {'w': VALUES}, step=1)
  return path / 'flax' / 'checkpoint_1'


def by_us(path, **options):
  checkpoint.save(path / 'ours', LAYOUT.shard({'w': VALUES}), layout=LAYOUT, **options)
  return path / 'ours'


def by_orbax(path):
  ocp.save(path / 'orbax', {'w': VALUES})
  return path / 'orbax'


def by_safetensors(path):
  save_file({'w': VALUES}, path / 'x.safetensors')
  return path / 'x.safetensors'


WRITERS = {
  'ours': by_us,
  'ours, packed': lambda path: by_us(path, pack=10_000),
  'orbax': by_orbax,
  'flax': by_flax,
  'safetensors': by_safetensors,
}


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
@pytest.mark.parametrize('write', WRITERS.values(), ids=list(WRITERS))
def test_every_kind_of_checkpoint(write, tmp_path):
  path = write(tmp_path)
  changes = Changes(rearranged={'w': '(three=3 heads head) -> three heads head'})
  text = "'(three=3 heads head) -> three heads head' does not fit float32[8,24]: it has 1 dimensions."
  target = LAYOUT.abstract(
    lambda: {
      'w': spmd.LogicallyPartitioned(jnp.zeros((3, 4, 2, 8)), ('three', 'heads', 'head', 'embed'))
    }
  )
  assert f'w: {text}' in text_of(
    errors.CheckpointError, checkpoint.restore, path, target, changes=changes
  )
  changes = Changes(rearranged={'w': 'embed (three=3 heads=4 head) -> three heads head embed'})
  w = spmd.unbox(checkpoint.restore(path, target, changes=changes))['w']
  assert w.sharding.spec == P(None, 'model', None, 'data')
  assert np.array_equal(w, VALUES.reshape(8, 3, 4, 2).transpose(1, 2, 3, 0))
  on_host = checkpoint.restore(path, {'w': np.zeros((3, 4, 2, 8), np.float32)}, changes=changes)['w']
  assert isinstance(on_host, np.ndarray) and np.array_equal(on_host, w)


@st.composite
def arrangements(draw):
  """A text, the shape that it applies to, and the same by numpy."""
  sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
  order = draw(st.permutations(range(len(sizes))))

  def grouped(parts):
    cuts = sorted(draw(st.sets(st.integers(1, len(parts) - 1)))) if len(parts) > 1 else []
    return [parts[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(parts)], strict=True)]

  saved, new = grouped(list(range(len(sizes)))), grouped(list(order))
  rest = draw(st.sampled_from([(), (2,), (3, 2)]))
  dots = '... ' if rest or draw(st.booleans()) else ''

  def text(groups, given):
    names = [
      [f'n{part}={sizes[part]}' if part in given else f'n{part}' for part in group] for group in groups
    ]
    return ' '.join(
      names[i][0] if len(names[i]) == 1 and draw(st.booleans()) else f'({" ".join(names[i])})'
      for i in range(len(names))
    )

  given_sizes = {part for group in saved for part in group[1:]}
  before = (*rest, *(int(np.prod([sizes[p] for p in group])) for group in saved))
  after = (*rest, *(int(np.prod([sizes[p] for p in group])) for group in new))
  axes = (*range(len(rest)), *(len(rest) + part for part in order))
  return (
    f'{dots}{text(saved, given_sizes)} -> {dots}{text(new, set())}',
    before,
    (*rest, *sizes),
    axes,
    after,
  )


@settings(max_examples=150)
@given(case=arrangements(), data=st.data())
def test_any_arrangement_is_what_numpy_computes(case, data, tmp_path_factory):
  text, before, split, axes, after = case
  file = tmp_path_factory.mktemp('any') / 'x.safetensors'
  whole = np.arange(np.prod(before), dtype=np.int32).reshape(before)
  save_file({'w': whole}, file)
  expected = whole.reshape(split).transpose(axes).reshape(after)
  changes = Changes(rearranged={'w': text})
  on_host = checkpoint.restore(file, {'w': np.zeros(after, np.int32)}, changes=changes)['w']
  assert np.array_equal(on_host, expected)
  assert eval(repr(changes), {'Changes': Changes}) == changes


SHARDED = st.sampled_from(
  [
    P('data', 'model'),
    P(None, None, 'model'),
    P('model', None, ('data',)),
    P(('model', 'data')),
    P(None, 'data', 'model'),
  ]
)


@settings(max_examples=25)
@given(spec=SHARDED, order=st.permutations(['heads', 'head', 'embed']))
def test_any_sharding_of_a_result(spec, order, tmp_path_factory):
  file = tmp_path_factory.mktemp('any') / 'x.safetensors'
  whole = np.arange(64 * 8, dtype=np.float32).reshape(64, 8)
  save_file({'w': whole}, file)
  names = ['heads', 'head', 'embed']
  expected = whole.reshape(8, 8, 8).transpose([names.index(name) for name in order])
  target = jax.ShapeDtypeStruct(expected.shape, np.float32, sharding=NamedSharding(LAYOUT.mesh, spec))
  changes = Changes(rearranged={'w': f'(heads=8 head) embed -> {" ".join(order)}'})
  w = checkpoint.restore(file, {'w': target}, changes=changes)['w']
  assert w.sharding.spec == spec and np.array_equal(w, expected)


# -- stacks with names, and several of them


def layer(number, fused):
  kernel = (np.arange(3 * 8 * 8, dtype=np.float32) + 1000 * number).reshape(3, 8, 8)
  if fused:
    return {'attn': {'qkv': spmd.LogicallyPartitioned(kernel, ('parts', 'embed', 'heads'))}}
  return {
    'attn': {
      name: spmd.LogicallyPartitioned(kernel[part], ('embed', 'heads'))
      for part, name in enumerate('qkv')
    }
  }


def train_state(params):
  return TrainState.create(apply_fn=None, params=jax.tree.map(jnp.asarray, params), tx=optax.adamw(1e-3))


def trained(params):
  """A state whose moments are not zero."""
  state = train_state(params)
  return state.apply_gradients(grads=state.params)


def single(fused):
  return {f'layers_{number}': layer(number, fused) for number in range(2)}


def stacked(fused):
  def stack(*boxes):
    values = np.stack([box.value for box in boxes])
    return spmd.LogicallyPartitioned(values, ('layers', *boxes[0].names))

  is_box = lambda node: isinstance(node, spmd.LogicallyPartitioned)
  return {'layers': jax.tree.map(stack, layer(0, fused), layer(1, fused), is_leaf=is_box)}


SPLIT, FUSE = {'attn/qkv': 'attn/{q,k,v}'}, {'attn/qkv': 'attn/{q,k,v}'}
LAYERS = {'layers': 'layers_{}'}


@pytest.mark.parametrize(
  ('saved', 'target', 'stacks'),
  [
    (single(True), single(False), SPLIT),
    (single(False), single(True), FUSE),
    (single(True), stacked(False), {**SPLIT, **LAYERS}),
    (single(True), stacked(False), {**LAYERS, 'attn/qkv': ('attn/{q,k,v}', 1)}),
    (single(False), stacked(True), {**FUSE, **LAYERS}),
    (stacked(True), single(False), {**LAYERS, **SPLIT}),
    (stacked(False), single(True), {**LAYERS, **FUSE}),
  ],
  ids=[
    'split',
    'fuse',
    'split, stack',
    'stack, split',
    'fuse, stack',
    'unstack, split',
    'unstack, fuse',
  ],
)
def test_parts_of_one_array_with_optimizer_state(saved, target, stacks, tmp_path):
  state = LAYOUT.shard(trained(saved))
  checkpoint.save(tmp_path / 'a', state, layout=LAYOUT)
  wanted = trained(target)
  changes = Changes(stacks=stacks)
  restored = checkpoint.restore(tmp_path / 'a', LAYOUT.abstract(lambda: wanted), changes=changes)
  pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(wanted), strict=True)
  assert all(np.array_equal(a, b) for a, b in pairs)
  alone = checkpoint.restore(tmp_path / 'a', layout=LAYOUT, changes=changes)
  assert jax.tree.all(jax.tree.map(np.array_equal, alone['params'], spmd.unbox(restored.params)))


def test_experts_stacked_in_layers(tmp_path):
  arrays = {
    f'layers.{n}.experts.{e}.w1': np.full((4, 6), 10 * n + e, np.float32)
    for n in range(3)
    for e in range(2)
  }
  save_file(arrays, tmp_path / 'x.safetensors')
  target = LAYOUT.abstract(lambda: {'layers': {'experts': {'w1': jnp.zeros((3, 2, 6, 4))}}})
  changes = Changes(
    rearranged={'w1': 'out in -> in out'}, stacks={'experts': 'experts/{}', 'layers': 'layers/{}'}
  )
  w1 = checkpoint.restore(tmp_path, target, changes=changes)['layers']['experts']['w1']
  assert np.array_equal(w1[:, :, 0, 0], [[0, 1], [10, 11], [20, 21]])


def test_a_part_that_is_left_out_is_reported(tmp_path):
  save_file({'attn.qkv': VALUES.reshape(3, 64)}, tmp_path / 'x.safetensors')
  target = LAYOUT.abstract(lambda: {'attn': {name: jnp.zeros(64) for name in 'qk'}})
  changes = Changes(stacks={'attn/qkv': 'attn/{q,k,v}'})
  assert text_of(
    errors.CheckpointError, checkpoint.restore, tmp_path, target, changes=changes
  ) == dedent(f"""\
    Checkpoint {tmp_path} does not match the target:
    attn/qkv: the checkpoint has 3 layers, the target 2.
    Fix: give the model as many layers as were saved.""")


def test_as_many_parts_as_names(tmp_path):
  save_file({'attn.qkv': VALUES.reshape(4, 48)}, tmp_path / 'x.safetensors')
  changes = Changes(stacks={'attn/qkv': 'attn/{q,k,v}'})
  assert text_of(
    errors.CheckpointError, checkpoint.restore, tmp_path, layout=LAYOUT, changes=changes
  ) == dedent("""\
    The leaves of attn/qkv hold 4 parts, and stacks names 3: attn/{q,k,v}.
    Fix: name as many parts as the stacked dimension has, or choose another dimension.""")


def test_layers_that_do_not_count_from_0(tmp_path):
  """As where the first layers are dense and the others have experts; as with every second layer of another kind."""
  save_file({f'layers.{n}.w': VALUES + n for n in (1, 2, 3)}, tmp_path / 'x.safetensors')
  target = {'sparse': {'w': np.zeros((3, 8, 24), np.float32)}}
  changes = Changes(stacks={'sparse': ('layers/{}', 0)})
  text = text_of(errors.CheckpointError, checkpoint.restore, tmp_path, target, changes=changes)
  assert (
    text
    == dedent(f"""\
    Checkpoint {tmp_path} does not match the target:
    sparse: the checkpoint has the layers 1, 2, 3; stacks counts them from 0, without gaps.
    sparse/w: in the target (float32[3,8,24]), not in the checkpoint.
    layers/1/w: in the checkpoint (float32[8,24]), not in the target.
    layers/2/w: in the checkpoint (float32[8,24]), not in the target.
    layers/3/w: in the checkpoint (float32[8,24]), not in the target.
    Fix: name them in order: pass Changes(stacks={{'sparse': ('layers/{{1,2,3}}', 0)}}).
    Fix: restore into a state of the model and optimizer that was saved; for renamed leaves, pass Changes(renames={{'old': 'new'}}); to keep the target's values of leaves that were not saved, pass Changes(missing='regex'); to leave saved leaves out, pass Changes(unused='regex').""")
  )


@pytest.mark.parametrize(
  ('fused', 'heads'),
  [('(parts=4 kv=4 head)', '(groups kv)'), ('(kv=4 parts=4 head)', '(kv groups)')],
  ids=['phi3', 'falcon'],
)
def test_fused_projections_of_fewer_keys_than_queries(tmp_path, fused, heads):
  """The parts are two groups of queries, keys and values: one after the other, or for each head of keys."""
  weights = np.arange(2 * 64 * 32, dtype=np.float32).reshape(2, 64, 32)
  save_file({f'layers.{n}.attn.qkv.weight': weights[n] for n in range(2)}, tmp_path / 'x.safetensors')
  changes = Changes(
    renames={'/weight$': '/kernel'},
    rearranged={
      '/qkv/kernel$': f'{fused} embed -> parts embed kv head',
      '/q/kernel$': f'... groups embed kv head -> ... embed {heads} head',
    },
    stacks={'attn/qkv': 'attn/{q_0,q_1,k,v}', 'attn/q': 'attn/q_{}', 'layers': 'layers/{}'},
  )
  shapes = {'q': (2, 32, 8, 4), 'k': (2, 32, 4, 4), 'v': (2, 32, 4, 4)}
  boxes = {
    name: spmd.LogicallyPartitioned(jnp.zeros(shape), ('layers', 'embed', 'heads', 'head'))
    for name, shape in shapes.items()
  }
  target = LAYOUT.abstract(lambda: {'layers': {'attn': {n: {'kernel': b} for n, b in boxes.items()}}})
  restored = spmd.unbox(checkpoint.restore(tmp_path, target, changes=changes))['layers']['attn']
  if heads == '(groups kv)':
    ends = {'q': (0, 32), 'k': (32, 48), 'v': (48, 64)}
    parts = {name: weights[:, begin:end] for name, (begin, end) in ends.items()}
  else:
    of_keys = weights.reshape(2, 4, 4, 4, 32)
    parts = {'q': of_keys[:, :, :2], 'k': of_keys[:, :, 2], 'v': of_keys[:, :, 3]}
  for name, shape in shapes.items():
    expected = parts[name].reshape(2, -1, 4, 32).transpose(0, 3, 1, 2)
    assert expected.shape == shape and np.array_equal(restored[name]['kernel'], expected)


def test_experts_of_each_layer(tmp_path):
  values = np.arange(2 * 3 * 8 * 24, dtype=np.float32).reshape(2, 3, 24, 8)
  names = {f'layers.{n}.moe.experts.{x}.w1.weight': values[n, x] for n in range(2) for x in range(3)}
  save_file(names, tmp_path / 'x.safetensors')
  changes = Changes(
    renames={'/w1/weight$': '/up'},
    rearranged={'/up$': 'out in -> in out'},
    stacks={'/experts': '/experts/{}', 'layers': 'layers/{}'},
  )
  box = spmd.LogicallyPartitioned(jnp.zeros((2, 3, 8, 24)), ('layers', 'experts', 'embed', 'mlp'))
  target = LAYOUT.abstract(lambda: {'layers': {'moe': {'experts': {'up': box}}}})
  restored = spmd.unbox(checkpoint.restore(tmp_path, target, changes=changes))
  assert np.array_equal(restored['layers']['moe']['experts']['up'], values.swapaxes(-1, -2))


def test_a_named_layer_that_is_not_there(tmp_path):
  save_file({f'layers.{n}.w': VALUES + n for n in (1, 2)}, tmp_path / 'x.safetensors')
  target = {'sparse': {'w': np.zeros((3, 8, 24), np.float32)}}
  changes = Changes(stacks={'sparse': 'layers/{1,2,3}'}, unused='.*')
  assert (
    text_of(errors.CheckpointError, checkpoint.restore, tmp_path, target, changes=changes)
    == dedent(f"""\
    Checkpoint {tmp_path} does not match the target:
    sparse/w: stacks makes it of layers/{{1,2,3}}, and the checkpoint has no layers/3/w.
    sparse/w: in the target (float32[3,8,24]), not in the checkpoint.
    Fix: name the layers that the checkpoint has, or rename them first.
    Fix: restore into a state of the model and optimizer that was saved; to keep the target's values of leaves that were not saved, pass Changes(missing='regex').""")
  )


@settings(max_examples=25)
@given(st.sets(st.integers(0, 12), min_size=1, max_size=5))
def test_the_fix_for_any_numbers_of_layers_stacks_them_in_order(tmp_path_factory, numbers):
  path = tmp_path_factory.mktemp('layers')
  save_file({f'layers.{n}.w': VALUES + n for n in numbers}, path / 'x.safetensors')
  target = {'blocks': {'w': np.zeros((len(numbers), 8, 24), np.float32)}}
  changes = Changes(stacks={'blocks': 'layers/{}'})
  if numbers != set(range(len(numbers))):
    text = text_of(errors.CheckpointError, checkpoint.restore, path, target, changes=changes)
    (fix,) = [line for line in text.splitlines() if line.startswith('Fix: name them in order: pass ')]
    changes = eval(fix.removeprefix('Fix: name them in order: pass ').removesuffix('.'))
  restored = checkpoint.restore(path, target, changes=changes)['blocks']['w']
  assert np.array_equal(restored, np.stack([VALUES + n for n in sorted(numbers)]))


def test_a_pattern_that_matches_nothing_is_reported_with_other_problems(tmp_path):
  path = by_safetensors(tmp_path)
  changes = Changes(rearranged={'kernel$': 'a b -> b a'})
  same = checkpoint.restore(path, {'w': np.zeros((8, 24), np.float32)}, changes=changes)['w']
  assert np.array_equal(same, VALUES)
  assert text_of(
    errors.CheckpointError,
    checkpoint.restore,
    path,
    {'w': np.zeros((24, 8), np.float32)},
    changes=changes,
  ) == dedent(f"""\
    Checkpoint {path} does not match the target:
    w: float32[8,24] in the checkpoint, float32[24,8] in the target.
    rearranged: 'kernel$' matches no path of the checkpoint.
    Fix: give the model the sizes that it was saved with; if dimensions are in another order, split or merged, pass Changes(rearranged={{'regex': 'out in -> in out'}}).
    Fix: look up paths and names with flax-spmd checkpoint show.""")


@pytest.mark.parametrize(
  ('text', 'problem'),
  [
    ('a b', 'it has no arrow ->, or several'),
    ('a -> b -> a', 'it has no arrow ->, or several'),
    ('a b -> a', 'b is on one side only'),
    ('a a -> a', 'a is on one side twice'),
    ('(a b -> a b', 'its brackets do not match, or are nested'),
    ('((a) b) -> a b', 'its brackets do not match, or are nested'),
    ('... a -> a', 'only one side begins with ...'),
    ('a ... -> a ...', "'...' is not a name"),
    ('a=0 -> a', "'a=0' is not a name"),
    ('2 -> 2', "'2' is not a name"),
    ('a=2 -> a=3', 'a has two sizes'),
    (3, 'it is not a text'),
  ],
)
def test_texts_that_are_no_arrangements(text, problem):
  assert text_of(errors.CheckpointError, Changes, rearranged={'w': text}) == dedent(f"""\
    rearranged: {text!r} for 'w' is not an arrangement: {problem}.
    Fix: write the saved dimensions, an arrow, and the new ones: 'out in -> in out'.""")


@pytest.mark.parametrize(
  ('text', 'problem'),
  [
    ('(a b) c -> a b c', 'the sizes of a and b are open'),
    ('(a=3 b) c -> a b c', '8 is not divisible by 3'),
    ('(a=3 b=3) c -> a b c', '(a b) has 9 elements, and the dimension 8'),
    ('a b c -> c b a', 'it has 3 dimensions'),
    ('... a b c -> ... c b a', 'it has 3 dimensions'),
  ],
)
def test_arrangements_that_do_not_fit(text, problem, tmp_path):
  target = {'w': np.zeros((8, 24), np.float32)}
  plan = checkpoint.preflight(by_safetensors(tmp_path), target, changes=Changes(rearranged={'w': text}))
  assert plan.problems[0].text == f'w: {text!r} does not fit float32[8,24]: {problem}.'


def test_names_of_dimensions_that_stay_whole_are_kept(tmp_path):
  w = spmd.LogicallyPartitioned(VALUES, ('embed', 'mlp'))
  checkpoint.save(tmp_path / 'a', LAYOUT.shard({'w': w}), layout=LAYOUT)
  changes = Changes(rearranged={'w': 'embed (heads=4 head) -> heads head embed'})
  restored = checkpoint.restore(tmp_path / 'a', layout=LAYOUT, boxed=True, changes=changes)['w']
  assert restored.names == (None, None, 'embed') and restored.value.sharding.spec == P(
    None, None, 'data'
  )
  turned = LAYOUT.abstract(
    lambda: {'w': spmd.LogicallyPartitioned(jnp.zeros((24, 8)), ('embed', 'mlp'))}
  )
  assert 'float32[mlp=24, embed=8] in the checkpoint, float32[embed=24, mlp=8] in the target' in text_of(
    errors.CheckpointError,
    checkpoint.restore,
    tmp_path / 'a',
    turned,
    changes=Changes(rearranged={'w': 'a b -> b a'}),
  )


@pytest.mark.parametrize('single', ['{q}', '{q,q}', '{q,}', '{a/b,c}'])
def test_names_of_parts(single):
  assert text_of(errors.CheckpointError, Changes, stacks={'qkv': single}) == dedent(f"""\
    stacks={{'qkv': {single!r}}} does not name several different parts.
    Fix: write their names in order: stacks={{'qkv': '{{query,key,value}}'}}.""")


def test_layers_of_another_arrangement_are_reported_as_such(tmp_path):
  arrays = {f'layers.{n}.{name}': np.ones((8, 24), np.float32) for n in range(2) for name in ('w', 'v')}
  save_file(arrays, tmp_path / 'x.safetensors')
  target = LAYOUT.abstract(
    lambda: {'layers': {'w': jnp.zeros((2, 24, 8)), 'v': jnp.zeros((2, 3, 8, 8))}}
  )
  changes = Changes(stacks={'layers': 'layers/{}'})
  assert (
    text_of(errors.CheckpointError, checkpoint.restore, tmp_path, target, changes=changes)
    == dedent(f"""\
    Checkpoint {tmp_path} does not match the target:
    layers/v: float32[2,8,24] in the checkpoint, float32[2,3,8,8] in the target.
    layers/w: float32[2,8,24] in the checkpoint, float32[2,24,8] in the target.
    Fix: give the model the sizes that it was saved with; if dimensions are in another order, split or merged, pass Changes(rearranged={{'regex': 'out in -> in out'}}).""")
  )


def test_a_saved_array_may_occur_several_times_in_one_stack(tmp_path):
  arrays = {name: np.full(3, number, np.float32) for number, name in enumerate(('shared', 'other'))}
  save_file(arrays, tmp_path / 'tied.safetensors')
  changes = Changes(
    renames={'^shared$': ['layers/0/w', 'layers/1/w'], '^other$': 'layers/2/w'},
    stacks={'layers': ('layers/{}', 0)},
  )
  target = LAYOUT.abstract(lambda: {'layers': {'w': jnp.zeros((3, 3))}})
  w = checkpoint.restore(tmp_path / 'tied.safetensors', target, changes=changes)['layers']['w']
  assert np.array_equal(w, [[0, 0, 0], [0, 0, 0], [1, 1, 1]])


def test_parts_of_an_array_as_parts_of_another_one(tmp_path):
  fused = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
  save_file({f'layers.{layer}.qkv': fused[layer] for layer in range(2)}, tmp_path / 'x.safetensors')
  stacks = {'qkv': '{q,k,v}', 'kv': ('{k,v}', 0), 'layers': ('layers/{}', 0)}
  target = LAYOUT.abstract(
    lambda: {'layers': {'q': jnp.zeros((2, 4, 5)), 'kv': jnp.zeros((2, 2, 4, 5))}}
  )
  layers = checkpoint.restore(tmp_path / 'x.safetensors', target, changes=Changes(stacks=stacks))[
    'layers'
  ]
  assert np.array_equal(layers['q'], fused[:, 0]) and np.array_equal(layers['kv'], fused[:, 1:])
  on_host = {'layers': {name: np.zeros(x.shape, np.float32) for name, x in layers.items()}}
  layers = checkpoint.restore(tmp_path / 'x.safetensors', on_host, changes=Changes(stacks=stacks))[
    'layers'
  ]
  assert np.array_equal(layers['q'], fused[:, 0]) and np.array_equal(layers['kv'], fused[:, 1:])


@pytest.mark.parametrize('kinds', ['device, device', 'device, host', 'host, device', 'host, host'])
def test_tied_arrays_in_places_of_their_own(kinds, tmp_path):
  save_file({'w': VALUES}, tmp_path / 'x.safetensors')
  names = ('embed', 'mlp'), ('mlp', 'embed')
  target = {
    name: jnp.zeros_like(
      VALUES, device=LAYOUT.sharding(spmd.LogicallyPartitioned(jnp.zeros(VALUES.shape), axes))
    )
    if kind == 'device'
    else np.zeros_like(VALUES)
    for name, axes, kind in zip('ab', names, kinds.split(', '), strict=True)
  }
  changes = Changes(renames={'^w$': ['a', 'b']})
  restored = checkpoint.restore(tmp_path / 'x.safetensors', target, changes=changes)
  for name, leaf in target.items():
    assert type(restored[name]) is type(leaf) and np.array_equal(restored[name], VALUES)
    if isinstance(leaf, jax.Array):
      assert restored[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
  if kinds == 'host, host':
    restored['a'][:] = 0
    assert np.array_equal(restored['b'], VALUES)
