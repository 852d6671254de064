"""Conversions: stacked, single and moved layers, renames, parts, dtypes, other optimizers; equal to the bit."""

import itertools
from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd._src.checkpoint.storage import readers
from flax_spmd.checkpoint import Changes
from tests.checkpoint.states import (
  LAYOUTS,
  OPTIMIZERS,
  Model,
  assert_equal,
  assert_matches_target,
  create,
  distinct,
  one_by_one,
)

LAYOUT, OTHER = LAYOUTS['two_by_four'](), LAYOUTS['other_rules']()
SINGLE = {'blocks': 'blocks_{}'}
MODELS = {'axis 0': Model(), 'axis 1': Model(axis=1), 'single': Model(axis=None)}
MORE_OPTIMIZERS = {
  'multi_transform': optax.multi_transform(
    {'w': optax.adamw(1e-3), 'b': optax.sgd(0.1, momentum=0.9)},
    lambda params: jax.tree_util.tree_map_with_path(
      lambda path, _: 'w' if 'kernel' in jax.tree_util.keystr(path) else 'b', params
    ),
  ),
  'inject': optax.inject_hyperparams(optax.adamw)(1e-3),
  'chain': optax.chain(optax.clip_by_global_norm(1.0), optax.ema(0.9), optax.adam(1e-3)),
}
ALL = OPTIMIZERS | MORE_OPTIMIZERS


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  folder, there = tmp_path_factory.mktemp('conversions'), {}

  def get(tx, model):
    if (tx, model) not in there:
      state = LAYOUT.init(create, ALL[tx], MODELS[model])
      checkpoint.save(folder / f'{tx}-{model}', state, layout=LAYOUT)
      there[tx, model] = state, folder / f'{tx}-{model}'
    return there[tx, model]

  return get


def put(path, state, layout=LAYOUT, **options):
  checkpoint.save(path, state, layout=layout, **options)
  return path


def text_of(*args, kind=errors.CheckpointMismatchError, **kwargs):
  with pytest.raises(kind) as caught:
    checkpoint.restore(*args, **kwargs)
  text = str(caught.value)
  assert len(text.splitlines()) <= 40
  return text


def of_layers(state, model):
  return state if model == 'single' else one_by_one(state)


# -- layers


MOVES = list(itertools.permutations(MODELS, 2))
CASES = [
  pytest.param(tx, *MOVES[move], marks=() if (number + move) % 3 == 0 else pytest.mark.exhaustive)
  for number, tx in enumerate(ALL)
  for move in range(len(MOVES))
]


@pytest.mark.parametrize(('tx', 'model', 'to'), CASES)
def test_layers_stacked_single_and_moved(saved, tx, model, to):
  """Every optimizer's moments, and leaves without names, follow."""
  state, path = saved(tx, model)
  target = OTHER.abstract(create, ALL[tx], MODELS[to])
  restored = checkpoint.restore(path, target, changes=Changes(stacks=SINGLE, moved='layers'))
  assert_matches_target(restored, target)
  assert_equal(of_layers(state, model), of_layers(restored, to))


def test_unstacked_and_stacked_again(saved, tmp_path):
  state, path = saved('adamw', 'axis 0')
  single = checkpoint.restore(
    path, OTHER.abstract(create, ALL['adamw'], MODELS['single']), changes=Changes(stacks=SINGLE)
  )
  put(tmp_path / 'single', single, OTHER)
  back = checkpoint.restore(
    tmp_path / 'single', LAYOUT.abstract(create, ALL['adamw']), changes=Changes(stacks=SINGLE)
  )
  assert_equal(state, back)
  assert jax.tree.structure(back) == jax.tree.structure(state)


def nested(names=('embed', 'mlp'), layers=2, shape=(4, 8)):
  size = layers * int(np.prod(shape))
  w = jnp.arange(size, dtype=jnp.float32).reshape(layers, *shape)
  return {'decoder': {'layers': {'mlp': {'w': spmd.LogicallyPartitioned(w, ('layers', *names))}}}}


def test_layers_of_one_stack_on_different_devices(tmp_path):
  first, last = jax.devices()[:4], jax.devices()[4:]
  meshes = [jax.sharding.Mesh(np.array(devices), 'd') for devices in (first, last, last[::-1])]
  stack = np.arange(3 * 8.0, dtype=np.float32).reshape(3, 8)
  path = put(tmp_path / 'a', {'layers': {'w': jnp.asarray(stack)}})
  target = {
    f'layers_{i}': {'w': jax.device_put(np.empty(8, np.float32), jax.NamedSharding(mesh, P('d')))}
    for i, mesh in enumerate(meshes)
  }
  restored = checkpoint.restore(path, target, changes=Changes(stacks={'layers': 'layers_{}'}))
  for i, mesh in enumerate(meshes):
    np.testing.assert_array_equal(restored[f'layers_{i}']['w'], stack[i])
    assert restored[f'layers_{i}']['w'].sharding.mesh == mesh


def test_a_leaf_of_another_rank_beside_one_that_moves(tmp_path):
  def state(names, shape, scale):
    return {'up': {'w': spmd.LogicallyPartitioned(jnp.zeros(shape), names), 'scale': jnp.zeros(scale)}}

  path = put(tmp_path / 'a', state(('layers', 'embed'), (3, 8), 8))
  target = LAYOUT.abstract(lambda: state(('embed', 'layers'), (8, 3), (8, 3)))
  assert (
    text_of(path, target, changes=Changes(moved='layers'))
    == dedent(f"""\
    Checkpoint {path} does not match the target:
    up/scale: float32[8] in the checkpoint, float32[8,3] in the target.
    Fix: give the model the sizes and dtypes that it was saved with; or keep the target's value of another shape: Changes(missing='regex', unused='regex').""")
  )


def test_nested_modules_and_a_number_inside_a_name(tmp_path):
  state = LAYOUT.shard(nested())
  path = put(tmp_path / 'a', state)
  box = lambda n: spmd.LogicallyPartitioned(jnp.zeros((4, 8)), ('embed', 'mlp'))
  target = OTHER.abstract(
    lambda: {'decoder': {'layer': {f'{n}_': {'mlp': {'w': box(n)}} for n in range(2)}}}
  )
  restored = checkpoint.restore(
    path, target, changes=Changes(stacks={'decoder/layers': 'decoder/layer/{}_'})
  )
  assert_matches_target(restored, target)
  for n in range(2):
    np.testing.assert_array_equal(
      restored['decoder']['layer'][f'{n}_']['mlp']['w'].value,
      state['decoder']['layers']['mlp']['w'].value[n],
    )


def test_an_explicit_stacked_dimension(tmp_path):
  w = np.arange(8.0 * 8 * 4, dtype=np.float32).reshape(8, 8, 4)
  path = put(tmp_path / 'a', {'layers': {'w': w}})
  target = OTHER.abstract(lambda: {f'layers_{n}': {'w': jnp.zeros((8, 4))} for n in range(8)})
  assert text_of(path, target, changes=Changes(stacks={'layers': 'layers_{}'})).splitlines()[-1] == (
    "Fix: choose one: pass Changes(stacks={'layers': ('layers_{}', 0)})."
  )
  for axis, take in ((0, 0), (1, 1), (-2, 1)):
    restored = checkpoint.restore(path, target, changes=Changes(stacks={'layers': ('layers_{}', axis)}))
    for n in range(8):
      np.testing.assert_array_equal(restored[f'layers_{n}']['w'], np.take(w, n, take))


def test_wrong_numbers_of_layers(tmp_path):
  path = put(tmp_path / 'stacked', {'layers': {'w': jnp.ones((3, 8))}})
  singles = lambda count: {f'layers_{n}': {'w': jnp.ones(8)} for n in range(count)}
  stacks = {'layers': 'layers_{}'}
  assert text_of(path, LAYOUT.abstract(lambda: singles(2)), changes=Changes(stacks=stacks)) == dedent(f"""\
    Checkpoint {path} does not match the target:
    layers/w: the checkpoint has 3 layers, the target 2.
    Fix: give the model as many layers as were saved.""")
  assert text_of(path, LAYOUT.abstract(lambda: singles(4)), changes=Changes(stacks=stacks)) == dedent(f"""\
    Checkpoint {path} does not match the target:
    layers_3/w: the checkpoint has only 3 layers, in layers/w.
    Fix: give the model as many layers as were saved.""")
  path = put(tmp_path / 'single', singles(3))
  assert (
    text_of(
      path, LAYOUT.abstract(lambda: {'layers': {'w': jnp.ones((2, 8))}}), changes=Changes(stacks=stacks)
    )
    == dedent(f"""\
    Checkpoint {path} does not match the target:
    layers/w: the checkpoint has 3 layers, the target 2.
    layers/w: float32[3,8] in the checkpoint, float32[2,8] in the target.
    Fix: give the model as many layers as were saved.
    Fix: give the model the sizes and dtypes that it was saved with; or keep the target's value of another shape: Changes(missing='regex', unused='regex').""")
  )


def test_single_layers_with_other_names_than_the_stack(tmp_path):
  """At square sizes every shape matches, but the names differ."""
  box = lambda *names: spmd.LogicallyPartitioned(jnp.ones((8, 8)), names)
  path = put(tmp_path / 'a', {f'layers_{n}': {'w': box('embed', 'mlp')} for n in range(2)})
  stacked = lambda: {
    'layers': {'w': spmd.LogicallyPartitioned(jnp.ones((2, 8, 8)), ('layers', 'mlp', 'embed'))}
  }
  text = text_of(path, LAYOUT.abstract(stacked), changes=Changes(stacks={'layers': 'layers_{}'}))
  assert text.splitlines()[1] == (
    'layers/w: float32[2, embed=8, mlp=8] in the checkpoint, float32[layers=2, mlp=8, embed=8] in the target.'
  )
  mixed = {'layers_0': {'w': box('embed', 'mlp')}, 'layers_1': {'w': box('mlp', 'embed')}}
  path = put(tmp_path / 'b', mixed)
  target = LAYOUT.abstract(
    lambda: {'layers': {'w': spmd.LogicallyPartitioned(jnp.ones((2, 8, 8)), ('layers', 'embed', 'mlp'))}}
  )
  text = text_of(path, target, changes=Changes(stacks={'layers': 'layers_{}'}))
  assert 'layers that differ cannot be stacked' in text


def test_optimizer_state_factored_across_layers(tmp_path):
  """Adafactor factors the two largest dimensions. If one is the stacked one, the state has no layers to unstack."""
  tx = optax.adafactor(1e-3, min_dim_size_to_factor=2)

  def state(stacked):
    if stacked:
      w = spmd.LogicallyPartitioned(jnp.ones((8, 4, 8)), ('layers', 'embed', 'mlp'))
      params = {'layers': {'w': w}}
    else:
      w = lambda: spmd.LogicallyPartitioned(jnp.ones((4, 8)), ('embed', 'mlp'))
      params = {f'layers_{n}': {'w': w()} for n in range(8)}
    return {'params': params, 'opt': tx.init(params)}

  saved = LAYOUT.init(lambda: distinct(state(True)))
  path = put(tmp_path / 'a', saved)
  target = LAYOUT.init(lambda: state(False))
  stacks = {'layers': 'layers_{}'}
  of_v_col = [
    f'opt/0/v_col/layers_{n}/w: in the target (float32[8] of FactoredState), not in the checkpoint. '
    "Did you mean 'opt/0/v_col/layers/w'?"
    for n in range(8)
  ]
  assert text_of(path, target, changes=Changes(stacks=stacks)).splitlines() == [
    f'Checkpoint {path} does not match the target:',
    "opt/0/v_col/layers/w: its dimension 'embed' does not stack layers, as 'layers' does.",
    *of_v_col,
    'opt/0/v_col/layers/w: in the checkpoint (float32[4,8] of FactoredState), not in the target.',
    "Fix: such state cannot be converted; to keep the target's own, pass Changes(missing='regex', unused='regex') with patterns for its paths.",
    'Fix: restore into a state of the model and optimizer that was saved; '
    "for renamed leaves, pass Changes(renames={'old': 'new'}); "
    "to keep the target's values of leaves that were not saved, pass Changes(missing='regex'); "
    "to leave saved leaves out, pass Changes(unused='regex').",
  ]
  restored = checkpoint.restore(
    path, target, changes=Changes(stacks=stacks, missing='/v_col/', unused='/v_col/')
  )
  np.testing.assert_array_equal(
    restored['params']['layers_7']['w'].value, saved['params']['layers']['w'].value[7]
  )
  v_row, was = (s['opt'][0].v_row for s in (restored, saved))
  np.testing.assert_array_equal(v_row['layers_7']['w'].value, was['layers']['w'].value[7])


# -- without a target


def test_layers_without_a_target(saved):
  state, path = saved('adamw', 'axis 0')
  restored = checkpoint.restore(path, layout=OTHER, changes=Changes(only='params', stacks=SINGLE))
  assert_equal(one_by_one(state).params, restored)
  kernel = restored['blocks_1']['Dense_0']['kernel']
  assert kernel.sharding.spec == P('model', 'data')
  state, path = saved('adafactor', 'single')
  restored = checkpoint.restore(path, layout=OTHER, changes=Changes(stacks=SINGLE), boxed=True)
  assert_equal(one_by_one(restored['params']), state.params)
  assert restored['params']['blocks']['Dense_0']['kernel'].names == ('blocks', 'embed', 'mlp')


def test_layers_not_along_the_first_dimension_without_a_target(saved):
  state, path = saved('adamw', 'axis 1')
  assert text_of(
    path, layout=OTHER, changes=Changes(only='params', stacks=SINGLE), kind=errors.CheckpointError
  ) == dedent("""\
    The leaves of blocks disagree on the stacked dimension: 32 in params/blocks/Dense_0/bias, 16 in params/blocks/Dense_0/kernel.
    Fix: choose it, Changes(stacks={'blocks': ('blocks_{}', 0)}).""")
  restored = checkpoint.restore(
    path, layout=OTHER, changes=Changes(only='params', stacks={'blocks': ('blocks_{}', 1)})
  )
  assert_equal(one_by_one(state).params, restored)


@pytest.mark.parametrize('boxed', [True, False])
def test_without_a_model(saved, boxed):
  state, path = saved('adamw', 'axis 0')
  mesh = spmd.make_mesh({'data': 4, 'model': 2})
  restored = checkpoint.restore(path, mesh=mesh, boxed=boxed)
  assert_equal(state.params, restored['params'])
  assert_equal(state.opt_state[0].nu, restored['opt_state'][0]['nu'])
  kernel = restored['opt_state'][0]['mu']['blocks']['Dense_0']['kernel']
  assert hasattr(kernel, 'names') is boxed
  if boxed:
    assert kernel.names == ('layers', 'embed', 'mlp')
    kernel = kernel.value
  assert kernel.sharding == jax.NamedSharding(mesh, P(None, 'data', 'model'))


def test_rules_alone_are_combined_with_the_recorded_mesh(saved):
  _, path = saved('adamw', 'axis 0')
  restored = checkpoint.restore(
    path, rules=(('mlp', 'data'), ('embed', None)), changes=Changes(only='params')
  )
  kernel = restored['blocks']['Dense_0']['kernel']
  assert kernel.sharding == jax.NamedSharding(LAYOUT.mesh, P(None, None, 'data'))


# -- renames


def test_renames_by_path_and_by_regex(tmp_path):
  state = {'enc': {'w': jnp.arange(8.0), 'b': jnp.ones(4)}, 'dec': {'w': jnp.arange(8.0) + 8}}
  path = put(tmp_path / 'a', state)
  target = LAYOUT.abstract(
    lambda: {'encoder': {'kernel': jnp.ones(8), 'b': jnp.ones(4)}, 'dec': {'kernel': jnp.ones(8)}}
  )
  restored = checkpoint.restore(
    path,
    target,
    changes=Changes(renames={'^enc/w$': 'encoder/kernel', '^enc/': 'encoder/', r'/w$': '/kernel'}),
  )
  assert_equal({'dec': state['dec'], 'enc': {'b': state['enc']['b'], 'w': state['enc']['w']}}, restored)
  assert_matches_target(restored, target)


def test_renames_that_collide_or_match_nothing(tmp_path):
  path = put(tmp_path / 'a', {'a': jnp.ones(8), 'b': jnp.ones(8)})
  target = LAYOUT.abstract(lambda: {'c': jnp.ones(8)})
  assert text_of(path, target, changes=Changes(renames={'[ab]': 'c', 'zz': 'y'})) == dedent(f"""\
    Checkpoint {path} does not match the target:
    a and b are both renamed to c.
    renames: 'zz' matches no path of the checkpoint.
    Fix: make the pattern in renames match only one of them.
    Fix: look up paths and names with flax-spmd checkpoint show.""")


def test_a_renamed_leaf_displaces_the_leaf_at_its_new_path(tmp_path):
  path = put(tmp_path / 'a', {'a': jnp.zeros(8), 'b': jnp.ones(8)})
  swapped = checkpoint.restore(
    path,
    LAYOUT.abstract(lambda: {'a': jnp.ones(8), 'b': jnp.ones(8)}),
    changes=Changes(renames={'^a$': 'b', '^b$': 'a'}),
  )
  assert swapped['a'].tolist() == [1] * 8 and swapped['b'].tolist() == [0] * 8


def test_ema_to_parameters(saved):
  state, path = saved('chain', 'axis 0')
  target = OTHER.abstract(create, ALL['chain']).params
  restored = checkpoint.restore(
    path, target, changes=Changes(only='params', renames={'^opt_state/1/ema/': 'params/'})
  )
  assert_equal(state.opt_state[1].ema, restored)
  assert_matches_target(restored, target)
  plain = checkpoint.restore(
    path, layout=OTHER, changes=Changes(only='params', renames={'^opt_state/1/ema/': 'params/'})
  )
  assert_equal(state.opt_state[1].ema, plain)


# -- parts


def test_parts(saved):
  state, path = saved('adamw', 'axis 0')
  target = OTHER.abstract(create, ALL['adamw'])
  for only, part in (
    ('params', lambda s: s.params),
    ('opt_state/0', lambda s: s.opt_state[0]),
    ('opt_state/0/mu/blocks', lambda s: s.opt_state[0].mu['blocks']),
    ('params/blocks/scale', lambda s: s.params['blocks']['scale']),
    ('rng', lambda s: s.rng),
  ):
    for whole_or_part in (target, part(target)):
      restored = checkpoint.restore(path, whole_or_part, changes=Changes(only=only))
      assert_equal(part(state), restored)
      assert_matches_target(restored, part(target))
    if only != 'opt_state/0':  # there a dict, whose keys have another order
      assert_equal(part(state), checkpoint.restore(path, layout=OTHER, changes=Changes(only=only)))


def test_only_reads_no_other_part(saved, monkeypatch):
  state, path = saved('adamw', 'axis 0')
  assert checkpoint.preflight(path, layout=OTHER, changes=Changes(only='params')).bytes_read == sum(
    x.nbytes for x in jax.tree.leaves(state.params)
  )
  read = []
  was = readers.OrbaxReader.read
  monkeypatch.setattr(
    readers.OrbaxReader,
    'read',
    lambda self, requests, memory: read.extend(requests) or was(self, requests, memory),
  )
  checkpoint.restore(path, layout=OTHER, changes=Changes(only='params/head'))
  assert sorted(read) == ['params/head/bias', 'params/head/kernel']


def test_a_subset_over_a_base(tmp_path):
  """LoRA: only the adapters are saved, and restored into a state with its own base parameters."""
  base = {'w': jnp.arange(8.0), 'lora_a': jnp.zeros((8, 2)), 'lora_b': jnp.zeros((2, 8))}
  trained = {'w': jnp.zeros(8), 'lora_a': jnp.ones((8, 2)), 'lora_b': jnp.ones((2, 8))}
  path = put(tmp_path / 'a', LAYOUT.shard({'params': trained}), where='lora')
  assert sorted(readers.open_checkpoint(path).record.leaves) == ['params/lora_a', 'params/lora_b']
  there = LAYOUT.shard({'params': base})
  restored = checkpoint.restore(path, there, changes=Changes(missing='^(?!.*lora)'))['params']
  assert restored['w'].tolist() == list(range(8))
  assert restored['lora_a'].tolist() == [[1, 1]] * 8 and restored['lora_b'].tolist() == [[1] * 8] * 2
  assert (
    text_of(path, there).splitlines()[1]
    == 'params/w: in the target (float32[8]), not in the checkpoint.'
  )


def test_unused_leaves_are_left_out(tmp_path):
  path = put(tmp_path / 'a', {'w': jnp.arange(8.0), 'old': {'a': jnp.ones(4), 'b': jnp.ones(4)}})
  target = LAYOUT.abstract(lambda: {'w': jnp.ones(8)})
  assert checkpoint.restore(path, target, changes=Changes(unused='^old/'))['w'].tolist() == list(
    range(8)
  )
  assert text_of(path, target, changes=Changes(unused='^old/a')).splitlines()[1:] == [
    'old/b: in the checkpoint (float32[4]), not in the target.',
    "Fix: restore into a state of the model and optimizer that was saved; to leave saved leaves out, pass Changes(unused='regex').",
  ]


# -- dtypes

DTYPES = {'f': jnp.float32, 'h': jnp.float16, 'b': jnp.bfloat16, 'e': jnp.float8_e4m3fn, 'i': jnp.int32}


@pytest.fixture(scope='module')
def of_dtypes(tmp_path_factory):
  state = {name: jnp.asarray([0, 1, 2.5, -3], dtype) for name, dtype in DTYPES.items()}
  state |= {'key': jax.random.key(1), 'n': 3, 'x': 0.5}
  return state, put(tmp_path_factory.mktemp('dtypes') / 'a', state)


@pytest.mark.parametrize(
  ('one', 'to'),
  [('h', 'float32'), ('b', 'float32'), ('e', 'float32'), ('e', 'bfloat16'), ('e', 'float16')],
)
def test_lossless_casts_of_floats(of_dtypes, one, to):
  state, path = of_dtypes
  target = LAYOUT.abstract(lambda: jnp.zeros(4, to))
  restored = checkpoint.restore(path, target, changes=Changes(only=one, dtypes='cast'))
  assert restored.dtype == to and restored.tolist() == state[one].tolist()
  saved = state[one].dtype
  text = text_of(path, target, changes=Changes(only=one))
  assert f'{one}: {saved}[4] in the checkpoint, {to}[4] in the target.' in text
  assert text.endswith("Fix: to cast without loss, pass Changes(dtypes='cast').")


@pytest.mark.parametrize(
  ('one', 'to'),
  [('f', 'float16'), ('h', 'bfloat16'), ('b', 'float16'), ('i', 'float32'), ('f', 'int32')],
)
def test_lossy_casts_have_to_be_listed(of_dtypes, one, to):
  state, path = of_dtypes
  target = LAYOUT.abstract(lambda: jnp.zeros(4, to))
  saved = str(state[one].dtype)
  assert f"pass Changes(dtypes={{'{saved}': '{to}'}})." in text_of(
    path, target, changes=Changes(only=one, dtypes='cast')
  )
  restored = checkpoint.restore(path, target, changes=Changes(only=one, dtypes={saved: to}))
  np.testing.assert_array_equal(restored, state[one].astype(to))
  assert 'can lose digits' in text_of(path, target, changes=Changes(only=one, dtypes={'float64': to}))


def test_listed_casts_without_a_target(of_dtypes):
  """All arrays of the listed dtypes are cast, and nothing else."""
  state, path = of_dtypes
  restored = checkpoint.restore(
    path, layout=LAYOUT, changes=Changes(dtypes={'float32': 'bfloat16', 'int32': 'int16'})
  )
  assert {name: str(getattr(x, 'dtype', type(x).__name__)) for name, x in restored.items()} == {
    'f': 'bfloat16',
    'h': 'float16',
    'b': 'bfloat16',
    'e': 'float8_e4m3fn',
    'i': 'int16',
    'key': 'key<fry>',
    'n': 'int',
    'x': 'float',
  }
  assert_equal(state['key'], restored['key'])
  assert restored['f'].tolist() == [0, 1, 2.5, -3] and (restored['n'], restored['x']) == (3, 0.5)


# -- optimizers


def with_opt(tx, *sizes):
  params = {f'w{n}': jnp.ones(size) for n, size in enumerate(sizes or (8,))}
  return distinct({'params': params, 'opt': tx.init(params)})


@pytest.mark.parametrize(
  ('before', 'after'),
  [
    (optax.adamw(1e-3), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))),
    (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), optax.adamw(1e-3)),
    (optax.adam(1e-3), optax.adamw(1e-3)),
    (optax.adamw(1e-3), optax.MultiSteps(optax.adamw(1e-3), 4)),
    (optax.adamw(1e-3), optax.inject_hyperparams(optax.adamw)(1e-3)),
    (
      optax.chain(optax.trace(0.9), optax.scale_by_adam(), optax.trace(0.5)),
      optax.chain(optax.scale(1.0), optax.trace(0.9), optax.scale_by_adam(), optax.trace(0.5)),
    ),
  ],
)
def test_states_are_found_by_their_kind(tmp_path, before, after):
  state = LAYOUT.init(lambda: with_opt(before))
  path = put(tmp_path / 'a', state)
  fresh = LAYOUT.init(lambda: jax.tree.map(jnp.zeros_like, with_opt(after)))
  new = r'/(mini_step|gradient_step|acc_grads|skip_state|inner_opt_state/0/x|hyperparams|hyperparams_states)(/|$)|^opt/count$'
  restored = checkpoint.restore(path, fresh, changes=Changes(missing=new))
  kept = lambda tree: [x for x in jax.tree.leaves(tree) if x.ndim and np.any(x)]
  assert_equal(kept(state), kept(restored))


def test_another_optimizer_is_refused_leaf_by_leaf(tmp_path):
  path = put(tmp_path / 'a', LAYOUT.init(lambda: with_opt(optax.adam(1e-3))))
  text = text_of(path, LAYOUT.abstract(lambda: with_opt(optax.lion(1e-3))))
  assert 'opt/0/mu/w0: in the target (float32[8] of ScaleByLionState), not in the checkpoint.' in text
  restored = checkpoint.restore(
    path,
    LAYOUT.init(lambda: with_opt(optax.lion(1e-3))),
    changes=Changes(missing='^opt/', unused='^opt/'),
  )
  assert_equal(with_opt(optax.adam(1e-3))['params'], restored['params'])


def test_a_state_does_not_move_to_another_optimizer(tmp_path):
  """The discriminator's Adam is removed, a third network's is new: the latter is missing, and not the former."""
  adam, lion = optax.adam(1e-3), optax.lion(1e-3)
  make = lambda **txs: {name: tx.init({'w': jnp.ones(8)}) for name, tx in txs.items()}
  path = put(tmp_path / 'a', LAYOUT.init(lambda: distinct(make(disc=adam, gen=adam))))
  target = LAYOUT.abstract(lambda: make(disc=lion, gen=adam, third=adam))
  text = text_of(path, target)
  assert 'third/0/mu/w: in the target (float32[8] of ScaleByAdamState), not in the checkpoint.' in text


def test_two_states_of_one_kind_for_different_parameters(tmp_path):
  labels = lambda a, b: lambda params: {'w0': a, 'w1': b}
  make = lambda names, of: optax.multi_transform(
    {names[0]: optax.adam(1e-3), names[1]: optax.adam(1e-3)}, labels(*of)
  )
  state = LAYOUT.init(lambda: with_opt(make('ab', 'ab'), 8, 4))
  path = put(tmp_path / 'a', state)
  swapped = LAYOUT.abstract(lambda: with_opt(make('ab', 'ba'), 8, 4))
  text = text_of(path, swapped)
  assert 'opt/inner_states/a/inner_state/0/mu/w1: in the target (float32[4] of ScaleByAdamState)' in text
  renamed = checkpoint.restore(path, LAYOUT.abstract(lambda: with_opt(make('xy', 'xy'), 8, 4)))
  assert_equal(state, renamed)


# -- names


def test_changed_names(tmp_path):
  box = lambda *names: spmd.LogicallyPartitioned(jnp.arange(64.0).reshape(8, 8), names)
  path = put(tmp_path / 'a', LAYOUT.shard({'w': box('embed', 'mlp')}))
  target = LAYOUT.abstract(lambda: {'w': box('model', 'mlp')})
  restored = checkpoint.restore(path, target, changes=Changes(axes={'embed': 'model'}))
  np.testing.assert_array_equal(restored['w'].value, np.arange(64.0).reshape(8, 8))
  assert "pass Changes(axes={'embed': 'model'})" in text_of(path, target)
  assert 'float32[embed=8, model=8] in the checkpoint' in text_of(
    path, target, changes=Changes(axes={'mlp': 'model'})
  )


def test_a_scan_that_moves_leaves_other_modules_alone(tmp_path):
  """An unnamed module of the same name elsewhere is not transposed with the scanned one."""
  make = lambda axis: {
    'scanned': {
      'Dense_0': {
        'kernel': spmd.LogicallyPartitioned(
          jnp.moveaxis(jnp.arange(4.0 * 8 * 8).reshape(4, 8, 8), 0, axis),
          ('embed', 'layers', 'mlp') if axis else ('layers', 'embed', 'mlp'),
        ),
        'bias': jnp.moveaxis(jnp.arange(32.0).reshape(4, 8), 0, axis),
      }
    },
    'other': {
      'Dense_0': {'kernel': jnp.arange(64.0).reshape(8, 8)},
      'named': spmd.LogicallyPartitioned(jnp.ones(8), ('embed',)),
    },
  }
  path = put(tmp_path / 'a', LAYOUT.shard(make(0)))
  target = LAYOUT.abstract(lambda: make(1))
  restored = checkpoint.restore(path, target, changes=Changes(moved='layers'))
  assert_equal(make(1), restored)
  assert_matches_target(restored, target)


AXES = (0, 1, -1)


@pytest.mark.parametrize(('old', 'new'), [*itertools.permutations(AXES, 2)])
@pytest.mark.parametrize('sizes', [(4, 4, 4, 4), (4, 8, 2, 3)])
def test_a_scan_along_any_axis_moves_unnamed_leaves_of_any_rank(tmp_path, old, new, sizes):
  """A last axis was counted from the front: leaves of other ranks and equal sizes stayed as they were, in silence."""
  ranks = {'a': {'kernel': 2, 'bias': 1}, 'b': {'kernel': 3, 'bias': 2, 'scale': 1, 'table': 4}}

  def make(axis):
    def leaf(name, rank):
      shape = (*sizes, 5)[: rank + 1]
      array = jnp.moveaxis(jnp.arange(float(np.prod(shape))).reshape(shape), 0, axis)
      names = [*'xyz'[:rank]]
      names.insert(axis % array.ndim, 'layers')
      return spmd.LogicallyPartitioned(array, tuple(names)) if name == 'kernel' else array

    return {'blocks': {m: {n: leaf(n, rank) for n, rank in of.items()} for m, of in ranks.items()}}

  path = put(tmp_path / 'a', LAYOUT.shard(make(old)))
  target = LAYOUT.abstract(lambda: make(new))
  assert_equal(make(new), checkpoint.restore(path, target, changes=Changes(moved='layers')))


def test_an_unnamed_leaf_that_may_have_moved_in_two_ways_is_named(tmp_path):
  """Beside kernels of one rank, axis 1 cannot be told from axis -1."""

  def make(names, shape):
    kernel = spmd.LogicallyPartitioned(jnp.ones((4, 4)), names)
    return {'dense': {'kernel': kernel, 'table': jnp.arange(64.0).reshape(shape)}}

  def restored(old, new):
    path = put(tmp_path / 'a', LAYOUT.shard(make(('layers', 'x'), old)), overwrite=True)
    target = LAYOUT.abstract(lambda: make(('x', 'layers'), new))
    return checkpoint.restore(path, target, changes=Changes(moved='layers'))['dense']['table']

  table = jnp.arange(64.0).reshape(4, 8, 2)
  for axis in (1, 2):
    moved = jnp.moveaxis(table, 0, axis)
    np.testing.assert_array_equal(restored(table.shape, moved.shape), moved)
  with pytest.raises(
    errors.CheckpointMismatchError, match=r'dense/table: .* does not show whether it has moved\.'
  ):
    restored((4, 4, 4), (4, 4, 4))


# -- results


@pytest.mark.parametrize('conversion', ['same', 'single', 'stacked', 'moved', 'no target', 'packed'])
def test_a_restored_state_can_be_donated_as_a_whole(saved, tmp_path, conversion):
  """No two leaves share a buffer."""
  state, path = saved('adafactor', 'single' if conversion == 'stacked' else 'axis 0')
  model = {'single': MODELS['single'], 'moved': MODELS['axis 1']}.get(conversion, MODELS['axis 0'])
  target = None if conversion == 'no target' else OTHER.abstract(create, ALL['adafactor'], model)
  if conversion == 'packed':
    path = put(tmp_path / 'packed', state, pack=1 << 20)
  options = {'layout': OTHER} if target is None else {}
  restored = checkpoint.restore(
    path,
    target,
    changes=Changes(stacks=SINGLE if conversion in ('single', 'stacked') else {}, moved='layers'),
    **options,
  )
  arrays = [x for x in jax.tree.leaves(restored) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
  buffers = [{shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards} for x in arrays]
  assert len(set.union(*buffers)) == sum(map(len, buffers))
  before = [np.array(x) for x in arrays]
  shardings = [x.sharding for x in arrays]
  after = jax.jit(lambda xs: [x + 1 for x in xs], donate_argnums=0, out_shardings=shardings)(arrays)
  assert all(x.is_deleted() for x in arrays)
  for x, y in zip(before, after, strict=True):
    np.testing.assert_array_equal(x + 1, y)


def test_keys_for_stages_on_different_devices(tmp_path, mesh):
  """numpy, which slices what goes to several meshes, has no keys."""
  keys = jax.random.split(jax.random.key(7), 2)
  checkpoint.save(tmp_path / 'stacked', {'layers': {'key': keys}}, spmd.Layout(mesh))
  stages = [jax.sharding.SingleDeviceSharding(device) for device in jax.devices()[2:4]]
  target = {
    f'layers_{i}': {'key': jax.ShapeDtypeStruct((), keys.dtype, sharding=stage)}
    for i, stage in enumerate(stages)
  }
  changes = Changes(stacks={'layers': 'layers_{}'})
  single = checkpoint.restore(tmp_path / 'stacked', target, changes=changes)
  for i, stage in enumerate(stages):
    key = single[f'layers_{i}']['key']
    assert key.sharding == stage and (jax.random.key_data(key) == jax.random.key_data(keys[i])).all()
  checkpoint.save(tmp_path / 'single', single, spmd.Layout(mesh))
  stacked = checkpoint.restore(tmp_path / 'single', {'layers': {'key': keys}}, changes=changes)
  assert (jax.random.key_data(stacked['layers']['key']) == jax.random.key_data(keys)).all()
