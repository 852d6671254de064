"""User errors: an exception of the user's own code ends a command with exit code 3 and the user's frames."""

import sys
from textwrap import dedent

import pytest

import flax_spmd as spmd
from flax_spmd import cli

MODEL = """
import jax
import jax.numpy as jnp
from functools import reduce

BATCH = jax.ShapeDtypeStruct((8, 8), jnp.float32)

def create():
  return {'w': jnp.ones((8, 8))}

def step(state, x):
  return state, (x @ state['w']).reshape(3, 5)

def of_step():
  return step, create, BATCH

def of_create():
  return step, lambda: reduce(lambda *_: {}['w'], [1, 2]), BATCH

def of_note():
  error = RuntimeError('my own')
  error.add_note('my note')
  raise error

def of_itself():
  raise RuntimeError('my own')

def of_layout(layout):
  raise RuntimeError('my own')

def not_functions():
  return create(), 3, BATCH

def create_of_key(key):
  return create()

def without_key():
  return step, create_of_key, BATCH
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
  """Runs a command on a function of a model; returns the exit code and what it printed to stderr."""
  layout = spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'),))
  (tmp_path / 'layout.toml').write_text(layout.to_toml())
  (tmp_path / 'users_model.py').write_text(MODEL)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.chdir(tmp_path)
  monkeypatch.delitem(sys.modules, 'users_model', raising=False)

  def call(command, function, *options):
    code = cli.main([command, f'users_model:{function}', *options])
    return code, capsys.readouterr().err.replace(str(tmp_path), 'FOLDER')

  return call


@pytest.mark.parametrize(
  ('command', 'function'),
  [
    ('explain', 'of_itself'),
    ('explain', 'of_layout'),
    ('compare', 'of_itself'),
    ('compare', 'of_layout'),
    ('search', 'of_itself'),
  ],
)
def test_a_function_that_raises(run, command, function):
  options = {
    'explain': ['layout.toml'],
    'compare': ['layout.toml', '--target', 'cpu:8'],
    'search': ['--target', 'cpu:8'],
  }
  number = MODEL.split('\n').index(f'def {function}({"layout" if function == "of_layout" else ""}):') + 2
  code, err = run(command, function, *options[command])
  assert code == 3
  assert err == dedent(f"""\
    Traceback (most recent call last):
      File "FOLDER/users_model.py", line {number}, in {function}
        raise RuntimeError('my own')
    RuntimeError: my own
    """)


def test_only_frames_of_the_user_are_shown(run):
  code, err = run('compare', 'of_step', 'layout.toml', '--target', 'cpu:8')
  assert code == 3 and err.count('  File ') == 1 and 'in step' in err
  assert err.endswith('cannot reshape array of shape (8, 8) (size 64) into shape (3, 5) (size 15)\n')
  code, err = run('explain', 'of_note', 'layout.toml')
  assert code == 3 and err.endswith('RuntimeError: my own\nmy note\n')
  code, err = run('explain', 'of_create', 'layout.toml')
  assert code == 3 and err.count('  File ') == 2 and err.endswith("KeyError: 'w'\n")


def test_parts_of_a_training_step_that_are_not_functions(run):
  assert run('explain', 'not_functions', 'layout.toml') == (
    2,
    'users_model:not_functions returned a training step whose step is dict and create is int, not a function.\n'
    'Fix: return (step, create, batch), where create() returns the state, and step(state, batch) the next one.\n',
  )


@pytest.mark.parametrize('command', [['explain'], ['compare', '--target', 'cpu:8']])
def test_a_create_function_without_its_arguments(run, command):
  name, *options = command
  assert run(name, 'without_key', 'layout.toml', *options) == (
    2,
    dedent("""\
      users_model:without_key returned a training step that cannot be called.
      TrainStep calls create(*args), with 0 arguments, but create_of_key(key) takes other arguments.
      Fix: pass its arguments, TrainStep(step, create, batch, args=(...)).
      """),
  )


def test_a_step_in_the_place_of_a_training_step(run):
  assert run('explain', 'step', 'layout.toml') == (
    2,
    "users_model:step(state, x) is called with a layout: missing a required argument: 'x'.\n"
    'Fix: name an explore.TrainStep, or a function, of a layout if need be, that returns one.\n',
  )


def test_a_fault_of_this_package_is_not_the_users(run, monkeypatch):
  monkeypatch.setattr('flax_spmd.cli.explore.model_of', cli.explore.reference)  # of other arguments
  with pytest.raises(AttributeError, match='partition'):
    run('explain', 'of_step', 'layout.toml')
