"""Saved programs: a step under a layout, run without the code of its model, in this process and in another; bad files."""

import dataclasses
import hashlib
import json
from textwrap import dedent

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from tests.processes import run_process
from tests.texts import text_of

LAYOUT = spmd.Layout({'data': 2, 'model': 4}, (('batch', 'data'), ('mlp', 'model')))
INIT = spmd.with_logical_partitioning(nn.initializers.lecun_normal(), ('embed', 'mlp'))
MODEL = nn.Dense(16, kernel_init=INIT)
X = np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32)


def create():
  return TrainState.create(
    apply_fn=MODEL.apply, params=MODEL.init(jax.random.key(0), X)['params'], tx=optax.adam(1e-2)
  )


def train_step(state, x):
  loss, grads = jax.value_and_grad(lambda params: (state.apply_fn({'params': params}, x) ** 2).mean())(
    state.params
  )
  return state.apply_gradients(grads=grads), loss


RUN = """
from flax_spmd import checkpoint

program = checkpoint.load_program(ROOT + '/step.program')
state = checkpoint.restore(ROOT + '/state')
x = np.load(ROOT + '/x.npy')
losses = []
for _ in range(2):
  old, (state, loss) = state, program(state, x)
  losses.append(float(loss))
kernel = state['params']['kernel']
report([losses, str(kernel.sharding.spec), old['params']['kernel'].is_deleted(), sorted(state), program.jax_version])
"""


def test_a_step_runs_beside_its_checkpoint_without_the_code_of_the_model(tmp_path):
  """The other process has neither the model nor the optimizer."""
  state = LAYOUT.init(create)
  step = LAYOUT.jit(train_step, donate_argnums=0)
  checkpoint.save(tmp_path / 'state', state, layout=LAYOUT)
  x = LAYOUT.shard(X, ('batch', None))
  checkpoint.save_program(tmp_path / 'step.program', step, LAYOUT.abstract(create), x)
  np.save(tmp_path / 'x.npy', X)
  losses = []
  for _ in range(2):
    state, loss = step(state, x)
    losses.append(float(loss))
  reported = run_process(RUN.replace('ROOT', repr(str(tmp_path)))).value
  keys = ['opt_state', 'params', 'step']
  np.testing.assert_allclose(reported[0], losses, rtol=1e-6)
  assert reported[1:] == [str(P(None, 'model')), True, keys, jax.__version__]


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  path = tmp_path_factory.mktemp('programs') / 'matmul'
  w = LAYOUT.shard(np.ones((8, 16), np.float32), (None, 'mlp'))
  checkpoint.save_program(
    path, LAYOUT.jit(lambda params, x: x @ params['w']), {'w': w}, np.ones((4, 8), np.float32)
  )
  return path


def test_arguments_are_transferred_and_compared(saved):
  program = checkpoint.load_program(saved)
  w, x = np.arange(128, dtype=np.float32).reshape(8, 16), np.ones((4, 8), np.float32)
  for boxed in (w, spmd.LogicallyPartitioned(w, ('embed', 'mlp'))):
    np.testing.assert_array_equal(program({'w': boxed}, x.astype(np.float64)), x @ w)
  assert repr(program) == f"<program {saved} of 2 arrays on {{'data': 2, 'model': 4}}>"
  with pytest.raises(errors.LayoutError) as caught:
    program({'v': w}, np.ones((4, 7), np.float32))
  assert str(caught.value) == dedent("""\
    0/w: float32[8,16] in the program, but not among the arguments.
    1: float32[4,8] in the program, but float32[4,7].
    0/v: among the arguments, but not in the program.
    Fix: pass the arguments that the step was saved with; program.arguments lists their arrays.""")


@pytest.mark.parametrize(
  'args',
  [
    (np.float32(2), 3),
    (X, 3),
    (jnp.float32(2), jnp.ones(4)),
    ({'w': jax.ShapeDtypeStruct((4,), 'float32')}, True),
  ],
  ids=lambda args: '',
)
def test_scalars_and_arrays_without_shardings(tmp_path, args):
  """JAX exports scalars without a mesh if no array has one; weak types stay weak."""
  step = LAYOUT.jit(lambda x, y: jax.tree.map(lambda leaf: leaf * y, x))
  checkpoint.save_program(tmp_path / 'p', step, *args)
  given = jax.tree.map(
    lambda leaf: np.ones(leaf.shape, leaf.dtype) if hasattr(leaf, 'shape') else leaf, args
  )
  result, expected = checkpoint.load_program(tmp_path / 'p')(*given), step(*given)
  for one, other in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
    assert one.dtype == other.dtype and one.sharding.mesh.size == LAYOUT.mesh.size
    np.testing.assert_array_equal(one, other)


def changed(saved, path, head=(), payload=None):
  """A copy of a program with other values in its first line, and another export."""
  line, _, old = saved.read_bytes().partition(b'\n')
  payload = old if payload is None else payload
  new = json.loads(line) | dict(head)
  rest = json.dumps({name: value for name, value in new.items() if name != 'sha256'}).encode()
  digest = {'sha256': hashlib.sha256(rest + b'\n' + payload).hexdigest()}
  path.write_bytes(json.dumps(new | digest | dict(head)).encode() + b'\n' + payload)
  return path


def test_numbers_and_typed_keys_as_arguments(tmp_path):
  """JAX exports those of no mesh."""
  step = LAYOUT.jit(lambda x, n, key: x * n + jax.random.uniform(key, x.shape))
  x, key = LAYOUT.shard(X, ('batch',)), jax.random.key(3)
  checkpoint.save_program(tmp_path / 'step', step, x, 3, key)
  program = checkpoint.load_program(tmp_path / 'step')
  np.testing.assert_array_equal(program(x, 3, key), step(x, 3, key))


def test_another_version_of_jax(saved, tmp_path):
  future = jax.export.maximum_supported_calling_convention_version + 1
  payload = saved.read_bytes().partition(b'\n')[2]
  exported = dataclasses.replace(
    jax.export.deserialize(bytearray(payload)), calling_convention_version=future
  )
  path = changed(saved, tmp_path / 'p', {'jax': '9.9.9'}, bytes(exported.serialize()))
  first = jax.export.minimum_supported_calling_convention_version
  assert text_of(errors.CheckpointError, lambda: checkpoint.load_program(path)) == (
    f'JAX {jax.__version__} cannot run {path}, which JAX 9.9.9 has exported: it has calling convention {future}, and those '
    f'from {first} to {future - 1} are supported.\n'
    'Fix: save it with this version of JAX; an export serves newer versions for six months.'
  )


def test_another_number_of_devices(saved, tmp_path):
  path = changed(saved, tmp_path / 'p', {'axes': {'data': 2, 'model': 8}})
  assert text_of(errors.MeshError, lambda: checkpoint.load_program(path)) == (
    f"{path} is a program for the mesh {{'data': 2, 'model': 8}}, but there are only 8 devices.\n"
    'Fix: save it under a layout on these devices, or load it on 16 devices.'
  )
  four = Mesh(np.array(jax.devices()[:4]), ('model',))
  assert text_of(errors.MeshError, lambda: checkpoint.load_program(saved, four)) == (
    f"{saved} is a program for the mesh {{'data': 2, 'model': 4}}, not for {{'model': 4}}.\n"
    'Fix: save it under a layout on these devices, or load it on 8 devices.'
  )
  other = spmd.make_mesh({'model': 4, 'data': 2})
  assert text_of(errors.MeshError, lambda: checkpoint.load_program(saved, other)) == (
    f"{saved} is a program for the mesh {{'data': 2, 'model': 4}}, not for {{'model': 4, 'data': 2}}.\n"
    'Fix: save it under a layout on these devices, or load it on 8 devices.'
  )
  explicit = spmd.make_mesh({'data': 2, 'model': 4}, axis_types=AxisType.Explicit)
  assert text_of(errors.MeshError, lambda: checkpoint.load_program(saved, explicit)) == (
    f'{saved} is a program for a mesh with axes of types data: Auto, model: Auto, not data: Explicit, model: Explicit.\n'
    'Fix: pass those to make_mesh as axis_types, or pass no mesh.'
  )
  turned = spmd.make_mesh({'data': 2, 'model': 4}, devices=jax.devices()[::-1])
  assert checkpoint.load_program(saved, turned).mesh == turned


def test_files_that_are_no_programs(saved, tmp_path):
  load = checkpoint.load_program
  assert text_of(errors.CheckpointNotFoundError, lambda: load(tmp_path / 'none')) == (
    f'There is no program at {tmp_path / "none"}.\nFix: pass the file that save_program has written.'
  )
  (tmp_path / 'text').write_text('hello')
  assert text_of(errors.CheckpointDamagedError, lambda: load(tmp_path / 'text')) == (
    f'{tmp_path / "text"} is no program of save_program.\nFix: pass the file that save_program has written.'
  )
  damaged = changed(saved, tmp_path / 'damaged', {'sha256': ''})
  assert text_of(errors.CheckpointDamagedError, lambda: load(damaged)) == (
    f'{damaged} has changed since it was written.\nFix: save the program again.'
  )
  content = saved.read_bytes()
  for old, new in ((b'"w"', b'"v"'), (b'"axes"', b'"axis"'), (b'"donated": []', b'"donated": [1]')):
    damaged.write_bytes(content.replace(old, new, 1))
    assert damaged.read_bytes() != content
    assert 'has changed since it was written' in text_of(
      errors.CheckpointDamagedError, lambda: load(damaged)
    )
  newer = changed(saved, tmp_path / 'newer', {'flax_spmd_program': 2})
  assert text_of(errors.CheckpointError, lambda: load(newer)) == (
    f'A newer version of flax_spmd wrote {newer} (format 2).\nFix: upgrade flax_spmd.'
  )
  tpu = changed(saved, tmp_path / 'tpu', {'platforms': ['tpu']})
  assert text_of(errors.CheckpointError, lambda: load(tpu)) == (
    f"{tpu} is a program for tpu, but the devices are of platform 'cpu'.\nFix: save it with platforms=('tpu', 'cpu')."
  )


def test_steps_that_cannot_be_saved(tmp_path, monkeypatch):
  save = lambda step, *args: checkpoint.save_program(tmp_path / 'p', step, *args)
  x = np.ones(8, np.float32)
  assert text_of(errors.CheckpointError, lambda: save(jax.jit(jnp.sin), x)) == (
    'A PjitFunction is no function of layout.jit, so it has no shardings to export.\nFix: pass layout.jit(step).'
  )
  linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
  assert text_of(errors.CheckpointError, lambda: save(LAYOUT.jit(lambda m, x: m(x)), linear, x)) == (
    'The arguments have modules of NNX, which are code of the model.\nFix: nnx.split them, and merge them in the step.'
  )
  static = LAYOUT.jit(lambda x, kind: x)
  for array in (x, np.float32(1)):
    assert text_of(errors.CheckpointError, lambda array=array: save(static, array, 'relu')) == (
      'The step has 1 array as arguments, but 2 leaves: the others are static.\n'
      'Fix: bind static arguments with functools.partial before layout.jit.'
    )
  assert text_of(errors.CheckpointError, lambda: save(LAYOUT.jit(lambda: jnp.ones(8)))) == (
    'The step has no arguments, which give a program its devices.\nFix: pass it an array, such as a random key.'
  )
  callback = LAYOUT.jit(lambda x: jax.pure_callback(np.sin, x, x))
  text = text_of(errors.CheckpointError, lambda: save(callback, x))
  assert text.startswith(f'The step cannot be exported to {tmp_path / "p"}: ')
  assert text.endswith(
    '\nFix: jax.export has to support everything in it; pass its arguments by position, as arrays.'
  )
  monkeypatch.setitem(__import__('sys').modules, 'flatbuffers', None)
  assert text_of(errors.CheckpointError, lambda: save(LAYOUT.jit(jnp.sin), x)) == (
    "jax.export stores programs with flatbuffers, which is not installed.\nFix: pip install 'flax-spmd[export]'."
  )
  assert not list(tmp_path.iterdir())
