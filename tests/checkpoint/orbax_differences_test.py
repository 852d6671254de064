"""Faults of plain Orbax and flax.training.checkpoints, and the same restores here.

Each test is named after the fault, which its docstring describes. Here, the restore succeeds, or it is refused
before any array is read, with an error that names each leaf and the fix.
"""

import warnings
from textwrap import dedent

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as v0
import pytest
from flax.training import checkpoints as flax_checkpoints
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd._src.checkpoint.storage import readers
from flax_spmd.checkpoint import Changes
from tests.checkpoint.states import (
  LAYOUTS,
  OPTIMIZERS,
  RULES,
  Model,
  assert_equal,
  assert_matches_target,
  create,
  one_by_one,
)

SGD = optax.sgd(0.1)
ADAMW = OPTIMIZERS['adamw']
LAYOUT, OTHER = LAYOUTS['two_by_four'](), LAYOUTS['eight']()
TREE_FIX = (
  'Fix: restore into a state of the model and optimizer that was saved; '
  "for renamed leaves, pass Changes(renames={'old': 'new'}); "
  "to keep the target's values of leaves that were not saved, pass Changes(missing='regex'); "
  "to leave saved leaves out, pass Changes(unused='regex')."
)


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """Saves each state once, by name; returns the state and its path."""
  folder, there = tmp_path_factory.mktemp('orbax'), {}

  def get(name, make, layout=LAYOUT, **options):
    if name not in there:
      state = make()
      checkpoint.save(folder / name, state, layout=layout, **options)
      there[name] = state, folder / name
    return there[name]

  return get


@pytest.fixture
def adamw(saved):
  return saved('adamw', lambda: LAYOUT.init(create, ADAMW))


@pytest.fixture
def small(saved):
  return saved('small', lambda: LAYOUT.shard(boxes()))


def boxes(shape=(8, 4), names=('embed', 'mlp'), dtype=jnp.float32):
  w = jnp.arange(np.prod(shape)).reshape(shape).astype(dtype)
  return {'w': spmd.LogicallyPartitioned(w, names), 'b': jnp.ones(4)}


@pytest.fixture
def refused(monkeypatch):
  """Restores while every function that reads arrays raises; returns the text of the error."""

  def fail(*_, **__):
    raise AssertionError('arrays were read')

  def text_of(*args, kind=errors.CheckpointMismatchError, **kwargs):
    with monkeypatch.context() as patch:
      patch.setattr(readers.OrbaxReader, 'read', fail)
      patch.setattr(readers.WholeFileReader, 'read', fail)
      patch.setattr(ocp, 'load', fail)
      patch.setattr(v0.PyTreeCheckpointHandler, 'restore', fail)
      with pytest.raises(kind) as caught:
        checkpoint.restore(*args, **kwargs)
    text = str(caught.value)
    assert len(text.splitlines()) <= 40
    return text

  return text_of


def lines(*texts):
  return '\n'.join(texts)


# -- layouts and boxes


@pytest.mark.parametrize('name', LAYOUTS)
def test_a_boxed_state_cannot_be_restored_without_boxes(adamw, name):
  """The error was a diff of two trees, without a hint. Here, it works under every layout."""
  state, path = adamw
  target = LAYOUTS[name]().abstract(create, ADAMW, boxed=False)
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always', UserWarning)
    restored = checkpoint.restore(path, target)
  assert_equal(state, restored)
  assert_matches_target(restored, target)
  assert [w.category for w in caught] == [UserWarning] * (name == 'replicated')


def test_an_unboxed_state_cannot_be_restored_with_boxes(saved):
  """The error was a diff of two trees, without a hint."""
  layout = LAYOUTS['four_by_two']()
  state, path = saved('unboxed', lambda: layout.init(create, ADAMW, boxed=False), layout)
  target = LAYOUT.abstract(create, ADAMW)
  restored = checkpoint.restore(path, target)
  assert_equal(state, restored)
  assert_matches_target(restored, target)
  assert restored.params['blocks']['Dense_0']['kernel'].names == ('layers', 'embed', 'mlp')


def test_a_restore_without_a_target_uses_some_of_the_devices(saved, refused):
  """Only 8 of 16 devices were used, silently; on fewer devices than before, the error gave no hint."""
  layout = LAYOUTS['four_devices']()
  state, path = saved('four', lambda: layout.init(create, SGD), layout)
  assert refused(path, kind=errors.MeshError) == dedent("""\
    The checkpoint was saved on a mesh of 4 devices, {'data': 2, 'model': 2}; this job has 8.
    Fix: pass mesh=make_mesh(...) over the devices to use, and rules= for other mesh axes.""")
  restored = checkpoint.restore(path, mesh=spmd.make_mesh({'data': 4, 'model': 2}))
  assert_equal(state.params, restored['params'])
  kernel = restored['params']['blocks']['Dense_0']['kernel']
  assert kernel.sharding.spec == P(None, 'data', 'model') and len(kernel.sharding.device_set) == 8


def test_a_target_without_shardings_fails_without_a_hint(small, refused):
  target = jax.eval_shape(lambda: spmd.unbox(boxes()))
  assert refused(small[1], target, kind=errors.TargetError) == dedent("""\
    b (float32[4]) has no sharding.
    w (float32[8,4]) has no sharding.
    Fix: build the target with layout.abstract(...), which sets shapes, dtypes and shardings.""")


def test_boxed_adafactor_state_has_the_wrong_rank(saved):
  """The usual recipe raised a ValueError about the rank."""
  tx = OPTIMIZERS['adafactor']
  state, path = saved('adafactor', lambda: LAYOUT.init(create, tx))
  target = OTHER.abstract(create, tx)
  restored = checkpoint.restore(path, target)
  assert_equal(state, restored)
  assert_matches_target(restored, target)


# -- scans


def test_stacked_layers_cannot_be_restored_as_single_ones(saved, refused):
  """The error was several kilobytes of text, without a hint."""
  state, path = saved('scanned', lambda: LAYOUT.init(create, SGD))
  target = OTHER.abstract(create, SGD, Model(axis=None))
  leaves = [
    ('Dense_0/bias', '32'),
    ('Dense_0/kernel', '16,32'),
    ('Dense_1/kernel', '32,16'),
    ('scale', '16'),
  ]
  assert refused(path, target) == lines(
    f'Checkpoint {path} does not match the target:',
    *(
      f'params/blocks_{n}/{leaf}: in the target (float32[{shape}]), not in the checkpoint. '
      f"Did you mean 'params/blocks/{leaf}'?"
      for n in range(3)
      for leaf, shape in leaves
    ),
    *(
      f'params/blocks/{leaf}: in the checkpoint (float32[3,{shape}]), not in the target.'
      for leaf, shape in leaves
    ),
    "Fix: layers are stacked on one side, single on the other: pass Changes(stacks={'blocks': 'blocks_{}'}).",
  )
  restored = checkpoint.restore(path, target, changes=Changes(stacks={'blocks': 'blocks_{}'}))
  assert_equal(one_by_one(state), restored)
  assert_matches_target(restored, target)


def test_single_layers_cannot_be_restored_as_stacked_ones(saved, refused):
  state, path = saved('unrolled', lambda: LAYOUT.init(create, SGD, Model(axis=None)))
  target = OTHER.abstract(create, SGD)
  text = refused(path, target)
  assert "pass Changes(stacks={'blocks': 'blocks_{}'})." in text.splitlines()[-1]
  restored = checkpoint.restore(path, target, changes=Changes(stacks={'blocks': 'blocks_{}'}))
  assert_equal(state, one_by_one(restored))
  assert_matches_target(restored, target)


def test_a_moved_scan_axis_cannot_be_restored(saved, refused):
  state, path = saved('scanned', lambda: LAYOUT.init(create, SGD))
  target = OTHER.abstract(create, SGD, Model(axis=1))
  assert (
    refused(path, target)
    == dedent(f"""\
    Checkpoint {path} does not match the target:
    params/blocks/Dense_0/bias: float32[3,32] in the checkpoint, float32[32,3] in the target.
    params/blocks/Dense_0/kernel: float32[layers=3, embed=16, mlp=32] in the checkpoint, float32[embed=16, layers=3, mlp=32] in the target.
    params/blocks/Dense_1/kernel: float32[layers=3, mlp=32, embed=16] in the checkpoint, float32[mlp=32, layers=3, embed=16] in the target.
    params/blocks/scale: float32[3,16] in the checkpoint, float32[16,3] in the target.
    Fix: give the model the sizes and dtypes that it was saved with; or keep the target's value of another shape: Changes(missing='regex', unused='regex').
    Fix: to move the dimension to the target's position, pass Changes(moved='layers'); if a name was wrong, pass Changes(axes={{old: new}}).""")
  )
  restored = checkpoint.restore(path, target, changes=Changes(moved='layers'))
  assert_equal(one_by_one(state), one_by_one(restored))
  assert_matches_target(restored, target)


SQUARE = {'features': 16, 'layers': 16}


def test_a_moved_scan_axis_is_not_noticed_in_square_arrays(saved, refused):
  """Every shape matches, so the arrays were restored untransposed."""
  _, path = saved('square', lambda: LAYOUT.init(create, SGD, Model(**SQUARE)))
  target = OTHER.abstract(create, SGD, Model(axis=1, **SQUARE))
  assert (
    refused(path, target)
    == dedent(f"""\
    Checkpoint {path} does not match the target:
    params/blocks/Dense_0/kernel: float32[layers=16, embed=16, mlp=16] in the checkpoint, float32[embed=16, layers=16, mlp=16] in the target.
    params/blocks/Dense_1/kernel: float32[layers=16, mlp=16, embed=16] in the checkpoint, float32[mlp=16, layers=16, embed=16] in the target.
    Fix: to move the dimension to the target's position, pass Changes(moved='layers'); if a name was wrong, pass Changes(axes={{old: new}}).""")
  )
  assert (
    refused(path, target, changes=Changes(moved='layers'))
    == dedent(f"""\
    Checkpoint {path} does not match the target:
    params/blocks/scale: float32[16,16] is unnamed, and its shape does not show whether it has moved.
    Fix: name it in the model before saving; or keep the old axis, and transpose the leaf after the restore.""")
  )


def test_unnamed_leaves_of_a_moved_scan_are_not_transposed(saved):
  state, path = saved('square', lambda: LAYOUT.init(create, SGD, Model(**SQUARE)))
  target = OTHER.abstract(create, SGD, Model(axis=1, **SQUARE)).params['blocks']['Dense_0']
  part = checkpoint.restore(path, target, changes=Changes(only='params/blocks/Dense_0', moved='layers'))
  saved_part = spmd.unbox(state.params['blocks']['Dense_0'])
  np.testing.assert_array_equal(part['kernel'].value, np.moveaxis(saved_part['kernel'], 0, 1))
  np.testing.assert_array_equal(part['bias'], np.asarray(saved_part['bias']).T)


def test_square_stacked_layers_cannot_be_restored_as_single_ones(saved, refused):
  state, path = saved('square', lambda: LAYOUT.init(create, SGD, Model(**SQUARE)))
  target = OTHER.abstract(create, SGD, Model(axis=None, **SQUARE))
  text = refused(path, target, changes=Changes(stacks={'blocks': 'blocks_{}'}))
  reason = 'dimensions 0 and 1 of float32[16,16] could each be the stacked one.'
  assert f'params/blocks_3/scale: {reason}' in text.splitlines()
  assert text.splitlines()[-1] == "Fix: choose one: pass Changes(stacks={'blocks': ('blocks_{}', 0)})."
  restored = checkpoint.restore(path, target, changes=Changes(stacks={'blocks': ('blocks_{}', 0)}))
  for number in (0, 7, 15):
    one = jax.tree.map(lambda x, n=number: np.asarray(x)[n], spmd.unbox(state.params['blocks']))
    assert_equal(one, restored.params[f'blocks_{number}'])


# -- parts, and what is missing


def test_a_part_of_a_state(adamw):
  """No fault: parameters alone can be restored by plain Orbax too."""
  state, path = adamw
  target = OTHER.abstract(create, ADAMW)
  for whole_or_part in (target, target.params):  # the whole, or the part itself
    restored = checkpoint.restore(path, whole_or_part, changes=Changes(only='params'))
    assert_equal(state.params, restored)
    assert_matches_target(restored, target.params)


def test_a_part_at_the_wrong_root_restores_nothing(saved, refused):
  """With `partial_load`, no leaf was restored, and no error raised."""
  _, path = saved('scanned', lambda: LAYOUT.init(create, SGD))
  target = OTHER.abstract(create, SGD)
  leaves = [
    ('blocks/Dense_0/bias', '3,32'),
    ('blocks/Dense_0/kernel', '3,16,32'),
    ('blocks/Dense_1/kernel', '3,32,16'),
    ('blocks/scale', '3,16'),
    ('head/bias', '4'),
    ('head/kernel', '16,4'),
  ]
  inside = [
    f'params/{leaf}: in the checkpoint (float32[{shape}]), not in the target.' for leaf, shape in leaves
  ]
  assert refused(path, target.params) == lines(
    f'Checkpoint {path} does not match the target:',
    *(
      f"{leaf}: in the target (float32[{shape}]), not in the checkpoint. Did you mean 'params/{leaf}'?"
      for leaf, shape in leaves
    ),
    'step: in the checkpoint (int32[]), not in the target.',
    *inside,
    'rng: in the checkpoint (key<fry>[]), not in the target.',
    "Fix: the target is a part of the saved state: pass Changes(only='params').",
  )
  assert refused(path, target, kind=errors.CheckpointError, changes=Changes(only='param')) == dedent("""\
    The checkpoint has no part 'param'; its parts are step, params, rng. Did you mean 'params'?
    Fix: pass Changes(only=...) with one of these parts, or a path inside one.""")


def test_missing_leaves_stay_abstract(small, refused):
  """With `partial_load`, the restored state contained shapes in place of arrays."""
  state, path = small
  target = OTHER.abstract(lambda: {**boxes(), 'new': jnp.ones(3)})
  assert (
    refused(path, target)
    == dedent(f"""\
    Checkpoint {path} does not match the target:
    new: in the target (float32[3]), not in the checkpoint.
    Fix: restore into a state of the model and optimizer that was saved; to keep the target's values of leaves that were not saved, pass Changes(missing='regex').""")
  )
  assert refused(path, target, changes=Changes(missing='^new$')) == dedent(f"""\
    Checkpoint {path} does not match the target:
    new: missing= keeps its value, but the target is abstract: float32[3].
    Fix: pass a target with values, such as the result of layout.init.""")
  there = {**OTHER.shard(jax.tree.map(jnp.zeros_like, boxes())), 'new': jnp.full(3, 7.0)}
  restored = checkpoint.restore(path, there, changes=Changes(missing='^new$'))
  assert_equal(state, {k: restored[k] for k in 'bw'})
  assert restored['new'].tolist() == [7, 7, 7]


def test_a_changed_optimizer_is_reported_without_its_leaves(saved, refused):
  """The error was "(list,2) vs (list,3)", without any path."""
  layout = OTHER
  make = lambda tx: {'w': jnp.ones(8), 'opt': tx.init({'w': jnp.ones(8)})}
  _, path = saved('adam', lambda: layout.init(make, optax.adam(1e-3)), layout)
  assert refused(path, layout.abstract(make, optax.lion(1e-3))) == lines(
    f'Checkpoint {path} does not match the target:',
    'opt/0/count: in the target (int32[] of ScaleByLionState), not in the checkpoint.',
    'opt/0/mu/w: in the target (float32[8] of ScaleByLionState), not in the checkpoint.',
    'opt/0/count: in the checkpoint (int32[] of ScaleByAdamState), not in the target.',
    'opt/0/mu/w: in the checkpoint (float32[8] of ScaleByAdamState), not in the target.',
    'opt/0/nu/w: in the checkpoint (float32[8] of ScaleByAdamState), not in the target.',
    TREE_FIX,
  )


# -- shapes, dtypes, names


@pytest.mark.parametrize('kind', ['abstract', 'array', 'numpy'])
def test_another_shape_is_reported_without_its_path(small, refused, kind):
  """Only the first mismatch was reported, without a path; numpy targets got arrays of the stored shape."""
  _, path = small
  target = {
    'abstract': lambda: OTHER.abstract(lambda: {**boxes((8, 6)), 'b': jnp.ones(8)}),
    'array': lambda: OTHER.shard({**boxes((8, 6)), 'b': jnp.ones(8)}),
    'numpy': lambda: {'w': np.ones((8, 6), np.float32), 'b': np.ones(8, np.float32)},
  }[kind]()
  assert (
    refused(path, target)
    == dedent(f"""\
    Checkpoint {path} does not match the target:
    b: float32[4] in the checkpoint, float32[8] in the target.
    w: float32[8,4] in the checkpoint, float32[8,6] in the target.
    Fix: give the model the sizes and dtypes that it was saved with; or keep the target's value of another shape: Changes(missing='regex', unused='regex').
    Fix: give the model the sizes and dtypes that it was saved with; or restore the part that both have: Changes(resized='mlp'); or keep the target's value of another shape: Changes(missing='regex', unused='regex').""")
  )


@pytest.mark.parametrize('dtype', ['int8', 'bool', 'float8_e4m3fn', 'bfloat16', 'int32', 'complex64'])
@pytest.mark.parametrize('dtypes', ['keep', 'cast'])
def test_lossy_casts_are_silent(small, refused, dtype, dtypes):
  """The arrays were cast without a warning, to NaN for float8."""
  _, path = small
  target = OTHER.abstract(lambda: {**boxes(), 'b': jnp.ones(4, dtype)})
  assert refused(path, target, changes=Changes(dtypes=dtypes)) == dedent(f"""\
    Checkpoint {path} does not match the target:
    b: float32[4] in the checkpoint, {dtype}[4] in the target.
    Fix: this cast can lose digits; to allow it, pass Changes(dtypes={{'float32': '{dtype}'}}).""")
  restored = checkpoint.restore(path, target['b'], changes=Changes(only='b', dtypes={'float32': dtype}))
  assert restored.dtype == dtype and restored.tolist() == [1] * 4


def test_an_indivisible_dimension_is_reported_without_its_path(small, refused):
  _, path = small
  mesh = spmd.make_mesh({'data': 1, 'model': 3}, devices=jax.devices()[:3])
  assert (
    refused(path, mesh=mesh, kind=errors.LayoutError)
    == dedent("""\
    w, dim 1 'mlp': size 4 is not divisible by mesh axis 'model' (3), required by rule 1 ('mlp', 'model').
    Fix: pad it to 6, put the rule ('mlp', None) before rule 1 to replicate it, or give the table indivisible='next' or 'replicate'.""")
  )
  with pytest.raises(errors.LayoutError, match="w, dim 1 'mlp': size 4 is not divisible"):
    spmd.Layout(mesh, RULES).abstract(boxes)


def test_changed_logical_names_are_not_noticed(saved, refused):
  """Any array of the same shape was accepted."""
  state, path = saved('names', lambda: LAYOUT.shard(boxes((8, 8))))
  other = LAYOUT.abstract(lambda: boxes((8, 8), ('embed', 'heads')))
  assert (
    refused(path, other)
    == dedent(f"""\
    Checkpoint {path} does not match the target:
    w: float32[embed=8, mlp=8] in the checkpoint, float32[embed=8, heads=8] in the target.
    Fix: if the names mean the same, pass Changes(axes={{'mlp': 'heads'}}); if not, correct the model.""")
  )
  assert_equal(state, checkpoint.restore(path, other, changes=Changes(axes={'mlp': 'heads'})))
  swapped = LAYOUT.abstract(lambda: boxes((8, 8), ('mlp', 'embed')))
  assert (
    refused(path, swapped)
    == dedent(f"""\
    Checkpoint {path} does not match the target:
    w: float32[embed=8, mlp=8] in the checkpoint, float32[mlp=8, embed=8] in the target.
    Fix: to move the dimension to the target's position, pass Changes(moved='embed'); if a name was wrong, pass Changes(axes={{old: new}}).""")
  )
  moved = checkpoint.restore(path, swapped, changes=Changes(moved='embed'))
  np.testing.assert_array_equal(moved['w'].value, np.asarray(state['w'].value).T)


@pytest.mark.parametrize('only', [None, 'params'])
def test_changed_logical_names_are_not_noticed_without_boxes(saved, refused, only):
  """Here, the plan of the target has its names, also those of a part."""
  make = lambda *names: {'params': boxes((8, 8), names), 'step': jnp.int32(0)}
  _, path = saved('part', lambda: LAYOUT.shard(make('embed', 'mlp')))
  layout = spmd.Layout({'data': 2, 'model': 4}, (('embed', 'data'), ('heads', 'model')))
  plan = layout.plan(make, 'embed', 'heads', boxed=False)
  text = refused(path, plan, changes=Changes(only=only))
  assert (
    'params/w: float32[embed=8, mlp=8] in the checkpoint, float32[embed=8, heads=8] in the target.'
    in text
  )


# -- where everything goes


def test_a_typo_in_a_rule_replicates_silently(adamw):
  """Arrays with the misspelt name were replicated without a warning."""
  _, path = adamw
  rules = (('embd', 'data'), ('mlp', 'model'))
  with pytest.warns(UserWarning) as caught:
    checkpoint.restore(path, mesh=spmd.make_mesh({'data': 2, 'model': 4}), rules=rules)
  assert [str(w.message) for w in caught] == [
    "'embed': no rule for this logical name; it is replicated. Did you mean 'embd'?"
  ]
  assert caught[0].filename == __file__
  target = spmd.Layout({'data': 2, 'model': 4}, rules).abstract(create, ADAMW)
  assert checkpoint.preflight(path, target).notes == [
    "Sharded when saved, now in no leaf: the name 'embed'."
  ]


REPLICATED = (
  'Every device will hold all {size} of {path}, which was sharded when it was saved: the target shards nothing. '
  'If this is not intended, check the rules with layout.check(...).'
)


@pytest.mark.parametrize('reason', ['no rules', 'unboxed', 'default device'])
def test_a_target_without_shards_replicates_silently(adamw, reason):
  """The whole state went to every device, or to device 0, without a warning."""
  _, path = adamw
  target = {
    'no rules': lambda: LAYOUTS['replicated']().abstract(create, ADAMW),
    'unboxed': lambda: LAYOUT.abstract(lambda: spmd.unbox(create(ADAMW))),
    'default device': lambda: create(ADAMW),
  }[reason]()
  with pytest.warns(UserWarning) as caught:
    checkpoint.restore(path, target)
  size = checkpoint.preflight(path, target).bytes_per_device
  assert [str(w.message) for w in caught] == [
    REPLICATED.format(size=f'{size / 1024:.1f} KiB', path=path)
  ]
  assert caught[0].filename == __file__


def test_a_mesh_of_one_device_gives_no_warning(adamw):
  checkpoint.restore(adamw[1], LAYOUTS['one_device']().abstract(create, ADAMW))


def test_metadata_has_no_names_kinds_or_layout(adamw):
  """Without the arrays, there was only a tree of dicts and lists, of shapes and dtypes."""
  state, path = adamw
  plan = checkpoint.preflight(path, layout=OTHER)
  assert not plan.problems and plan.bytes_read == sum(x.nbytes for x in jax.tree.leaves(state))
  record = readers.open_checkpoint(path).record
  assert record.kinds['opt_state/0'] == 'ScaleByAdamState'
  assert record.leaves['opt_state/0/mu/blocks/Dense_0/kernel'].names == ('layers', 'embed', 'mlp')
  assert spmd.Layout.from_toml(record.layout) == LAYOUT


# -- numbers and keys


@pytest.fixture(scope='module')
def numbers(tmp_path_factory):
  path = tmp_path_factory.mktemp('numbers') / 'a'
  state = {'step': 300, 'rate': 0.1, 'on': True, 'key': jax.random.key(3), 'raw': jax.random.PRNGKey(3)}
  checkpoint.save(path, state, layout=OTHER)
  return state, path


def test_an_int_is_restored_as_an_array(numbers):
  """Numbers and random keys keep their types here."""
  state, path = numbers
  for restored in (checkpoint.restore(path, state), checkpoint.restore(path, layout=OTHER)):
    assert (restored['step'], restored['rate'], restored['on']) == (300, 0.1, True)
    assert list(map(type, (restored['step'], restored['rate'], restored['on']))) == [int, float, bool]
    assert restored['key'].dtype == state['key'].dtype
    assert_equal(state['key'], restored['key'])
    assert_equal(state['raw'], restored['raw'])


@pytest.mark.parametrize(
  ('path', 'value', 'text'),
  [
    ('step', jnp.int8(0), '300 does not fit into int8[].\nFix: give the target a wider dtype.'),
    ('step', jnp.float32(0), 'a Python int in the checkpoint, float32[] in the target.'),
    ('step', True, 'a Python int in the checkpoint, a Python bool in the target.'),
    ('step', 1.0, 'a Python int in the checkpoint, a Python float in the target.'),
    ('step', jnp.zeros(1, jnp.int32), 'a Python int in the checkpoint, int32[1] in the target.'),
    ('rate', jnp.bfloat16(0), '0.1 does not fit into bfloat16[].\nFix: give the target a wider dtype.'),
    ('rate', jnp.int32(0), 'a Python float in the checkpoint, int32[] in the target.'),
    ('on', jnp.int32(0), 'a Python bool in the checkpoint, int32[] in the target.'),
    (
      'key',
      jax.random.key(0, impl='rbg'),
      'key<fry>[] in the checkpoint, key<rbg>[] in the target.\n'
      "Fix: create the key of the target as that of the save, with jax.random.key(..., impl='threefry2x32').",
    ),
    ('raw', 3, 'uint32[2] in the checkpoint, a Python int in the target.'),
  ],
)
def test_a_random_key_is_restored_into_a_uint32_target(numbers, refused, path, value, text):
  """The target was ignored for random keys and Python numbers."""
  text = (
    text
    if 'Fix' in text
    else f"{text}\nFix: give the model the sizes and dtypes that it was saved with; or keep the target's value of another shape: Changes(missing='regex', unused='regex')."
  )
  error = refused(numbers[1], {path: value}, changes=Changes(unused=f'^(?!{path}$)'))
  assert error == f'Checkpoint {numbers[1]} does not match the target:\n{path}: {text}'


@pytest.mark.parametrize(
  ('path', 'dtype'), [('step', 'int32'), ('step', 'uint16'), ('rate', 'float32'), ('on', 'bool')]
)
def test_a_number_fits_into_an_array_of_its_kind(numbers, path, dtype):
  target = OTHER.abstract(lambda: {path: jnp.zeros((), dtype)})
  restored = checkpoint.restore(numbers[1], target, changes=Changes(unused=f'^(?!{path}$)'))[path]
  assert_matches_target(restored, target[path])
  assert restored == np.asarray(numbers[0][path], dtype)


# -- other writers


def test_v0_ignores_the_shardings_of_the_target(tmp_path):
  """`PyTreeRestore(item)` without `restore_args` ignored the shardings of the item."""
  state = spmd.unbox(boxes())
  with v0.PyTreeCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / 'a', LAYOUT.shard(state))
  target = OTHER.abstract(boxes)
  restored = checkpoint.restore(tmp_path / 'a', target)
  assert_equal(state, restored)
  assert_matches_target(restored, target)
  assert restored['w'].value.sharding.spec == P('data', None)


@pytest.mark.parametrize('dtype', ['complex64', 'complex128'])
def test_a_complex_number_of_numpy_is_an_array(tmp_path, dtype):
  """The whole checkpoint was refused: Orbax has no Python type for the number, and loads no Python complex."""
  state = {'w': np.ones((8, 4), np.float32), 'z': np.dtype(dtype).type(0.1 + 2j)}
  with v0.PyTreeCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / 'a', state)
  restored = checkpoint.restore(tmp_path / 'a', jax.tree.map(np.zeros_like, state))
  assert restored['z'].dtype == dtype
  assert_equal(state, restored)


@pytest.fixture(params=['msgpack', 'orbax'])
def by_flax(request, tmp_path):
  use_orbax = flax.config.flax_use_orbax_checkpointing
  flax.config.update('flax_use_orbax_checkpointing', request.param == 'orbax')
  state = {'w': np.arange(48.0, dtype=np.float32), 'n': {'b': np.ones(3, np.float32)}}
  with warnings.catch_warnings(action='ignore', category=DeprecationWarning):
    flax_checkpoints.save_checkpoint(tmp_path, state, step=3)
  flax.config.update('flax_use_orbax_checkpointing', use_orbax)
  return state, tmp_path


def test_flax_ignores_shapes_and_missing_leaves(by_flax, refused):
  """A target of 64 elements got 48; missing leaves stayed abstract."""
  _, folder = by_flax
  target = OTHER.abstract(lambda: {'w': jnp.ones(64), 'n': {'b': jnp.ones(3)}, 'more': jnp.ones(2)})
  assert (
    refused(folder / 'checkpoint_3', target)
    == dedent(f"""\
    Checkpoint {folder / 'checkpoint_3'} does not match the target:
    more: in the target (float32[2]), not in the checkpoint.
    w: float32[48] in the checkpoint, float32[64] in the target.
    Fix: restore into a state of the model and optimizer that was saved; to keep the target's values of leaves that were not saved, pass Changes(missing='regex').
    Fix: give the model the sizes and dtypes that it was saved with; or keep the target's value of another shape: Changes(missing='regex', unused='regex').""")
  )


def test_flax_returns_the_target_for_a_missing_folder(by_flax, refused):
  """The target was returned as if it had been restored."""
  _, folder = by_flax
  target = OTHER.abstract(lambda: {'w': jnp.ones(48)})
  assert refused(folder / 'nowhere', target, kind=FileNotFoundError) == dedent(f"""\
    There is no checkpoint at {folder / 'nowhere'}; beside it are checkpoint_3.
    Fix: pass the path of a checkpoint, such as {folder / 'checkpoint_3'}.""")
  assert refused(folder, target, kind=FileNotFoundError) == dedent(f"""\
    There is no checkpoint at {folder}; it holds the checkpoints checkpoint_3.
    Fix: pass the path of a checkpoint, such as {folder / 'checkpoint_3'}.""")


def test_flax_checkpoints_can_be_restored(by_flax):
  state, folder = by_flax
  named = lambda: {'w': spmd.LogicallyPartitioned(jnp.ones(48), ('embed',)), 'n': {'b': jnp.ones(3)}}
  target = OTHER.abstract(named)
  restored = checkpoint.restore(folder / 'checkpoint_3', target)
  assert_equal(state, restored)
  assert_matches_target(restored, target)
