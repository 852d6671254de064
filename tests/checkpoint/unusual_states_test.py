"""States that cannot be saved, layouts and names that are unusual, and verification in groups."""

import itertools
import sys
from textwrap import dedent
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd._src.checkpoint.storage import verification
from flax_spmd._src.checkpoint.storage.readers import open_checkpoint
from tests.texts import text_of


def by_size(leaf):
  return P('data') if leaf.size > 8 else None


def test_deleted_arrays_and_empty_states_cannot_be_saved(tmp_path):
  layout = spmd.Layout({'data': 8})
  gone = layout.shard(jnp.ones((8, 2)), ('batch', None))
  gone.delete()
  assert text_of(
    errors.CheckpointError, checkpoint.save, tmp_path / '1', {'w': gone}, layout=layout
  ) == dedent("""\
    w has been deleted, or donated to a jitted function.
    Fix: save the state that the step returned, not the one that was donated to it.""")
  assert text_of(errors.CheckpointError, checkpoint.save, tmp_path / '1', {}, layout=layout) == dedent("""\
    The state has no leaves.
    Fix: save a state that contains arrays.""")
  assert not (tmp_path / '1').exists()


def test_traced_arrays_cannot_be_saved(tmp_path):
  def step(state):
    checkpoint.save(tmp_path / '1', {'n': 3, **state}, layout=spmd.Layout({'data': 8}))
    return state

  assert text_of(errors.CheckpointError, jax.jit(step), {'w': jnp.ones(8)}) == dedent("""\
    w is traced: it has no values.
    Fix: call save outside of the function that JAX traces, with the state that it returns.""")
  assert not (tmp_path / '1').exists()


def test_states_that_are_nested_too_deeply_for_python_cannot_be_saved(tmp_path):
  state = np.ones(1)
  for _ in range(480):
    state = Node(state)
  assert text_of(
    errors.CheckpointError, checkpoint.save, tmp_path / '1', state, layout=spmd.Layout({'data': 8})
  ) == dedent(f"""\
    The state is nested too deeply, or contains itself.
    Fix: save a flatter one; Python allows {sys.getrecursionlimit()} nested calls.""")
  assert not (tmp_path / '1').exists()


@flax.struct.dataclass
class Node:
  inner: Any


def test_a_layout_with_a_function_is_not_recorded(tmp_path):
  """A function has no text. Arrays and names are saved, and a target provides the shardings."""
  layout = spmd.Layout({'data': 8}, (by_size,))
  state = layout.shard({'w': np.arange(16.0)}, None)
  checkpoint.save(tmp_path / '1', state, layout=layout)
  restored = checkpoint.restore(tmp_path / '1', layout.abstract(lambda: {'w': jnp.zeros(16)}))
  np.testing.assert_array_equal(restored['w'], np.arange(16.0))


def test_names_in_a_list_are_recorded(tmp_path):
  state = {'w': spmd.LogicallyPartitioned(jnp.ones((8, 16)), ['embed', ('data',)])}
  checkpoint.save(tmp_path / '1', state, layout=spmd.Layout({'data': 8}))
  assert 'embed' in str(checkpoint.show(tmp_path / '1'))


def test_verify_reads_a_large_checkpoint_in_groups(tmp_path, monkeypatch):
  """Damage is found in every group; the size of groups is limited."""
  state = {f'w{number}': np.full(64, float(number), np.float32) for number in range(5)}
  checkpoint.save(tmp_path / '1', state, layout=spmd.Layout({'data': 8}))
  source = open_checkpoint(tmp_path / '1')
  for path in ('w0', 'w4'):  # the stored array now differs from the record
    source.record.leaves[path] = source.record.leaves[path]._replace(checksum='crc32c:00000000')
  monkeypatch.setattr(verification, 'GROUP_BYTES', 300)
  assert [len(group) for group in verification.groups(source.record.leaves, 300)] == [2, 2, 1]
  assert verification.verify(source).names == ['w0', 'w4']


def test_a_failed_preflight_prints_its_problems(tmp_path):
  checkpoint.save(tmp_path / '1', {'w': np.ones(8)}, layout=spmd.Layout({'data': 8}))
  result = checkpoint.preflight(tmp_path / '1', spmd.Layout({'data': 8}).abstract(dict, v=jnp.ones(8)))
  assert result.problems and 'v' in str(result) and 'Fix:' in str(result)


class Huge:
  def __repr__(self):
    return 'x' * 10**6


def nested_list():
  inner: list = []
  for _ in range(3000):
    inner = [inner]
  return inner


ARGUMENTS = {
  'save': lambda value, path: checkpoint.save(value, {'w': np.ones(8)}, spmd.Layout({'data': 8})),
  'save, layout': lambda value, path: checkpoint.save(path / '2', {'w': np.ones(8)}, value),
  'save, where': lambda value, path: checkpoint.save(
    path / '2', {}, spmd.Layout({'data': 8}), where=value
  ),
  'save, pack': lambda value, path: checkpoint.save(
    path / '2', {}, spmd.Layout({'data': 8}), pack=value
  ),
  'save, leaf': lambda value, path: checkpoint.save(path / '2', {'w': value}, spmd.Layout({'data': 8})),
  'restore': lambda value, path: checkpoint.restore(value),
  'restore, layout': lambda value, path: checkpoint.restore(path / '1', layout=value),
  'restore, rules': lambda value, path: checkpoint.restore(path / '1', rules=value),
  'restore, limit': lambda value, path: checkpoint.restore(path / '1', limit=value),
  'restore, changes': lambda value, path: checkpoint.restore(path / '1', changes=value),
  **{
    f'Changes, {name}': lambda value, path, name=name: checkpoint.Changes(**{name: value})
    for name in ('renames', 'rearranged', 'stacks', 'axes', 'moved', 'dtypes', 'missing', 'only')
  },
  'show': lambda value, path: checkpoint.show(value),
  'verify': lambda value, path: checkpoint.verify(value),
  'convert': lambda value, path: checkpoint.convert(path / '1', value),
  'save_safetensors': lambda value, path: checkpoint.save_safetensors(value, {'w': np.ones(8)}),
  'Manager': lambda value, path: checkpoint.Manager(value, spmd.Layout({'data': 8}), every=1),
  'Manager, keep': lambda value, path: checkpoint.Manager(
    path, spmd.Layout({'data': 8}), every=1, keep=value
  ),
  'metrics': lambda value, path: checkpoint.Manager(path, spmd.Layout({'data': 8}), every=1).save(
    2, {'w': np.ones(8)}, metrics=value
  ),
  'save_program': lambda value, path: checkpoint.save_program(
    path / 'p', spmd.Layout({'data': 8}).jit(jnp.sin), np.ones(8), platforms=value
  ),
}


@pytest.mark.parametrize(
  'value', [Huge, nested_list, lambda: itertools.repeat('a'), lambda: 'a' * 10**6]
)
@pytest.mark.parametrize('call', ARGUMENTS)
def test_values_that_print_badly_are_refused_with_a_short_text(tmp_path, call, value):
  """Texts of a million letters, lists that Python cannot print, and iterators without an end."""
  state = {'w': jnp.ones(8)}
  checkpoint.save(tmp_path / '1', state, layout=spmd.Layout({'data': 8}))
  if isinstance(value(), str) and call in ('Changes, moved', 'Changes, missing', 'Changes, only'):
    return  # valid, and matches nothing
  text = text_of(errors.FlaxSpmdError, ARGUMENTS[call], value(), tmp_path)
  assert 'Fix: ' in text and len(text) < 3000
