"""What is seldom met, from the ground up: odd boxes, odd rules, odd states, and what they are told."""

from textwrap import dedent
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import checkpoint, errors, explore
from flax_spmd._src.checkpoint.storage import verification
from flax_spmd._src.checkpoint.storage.readers import open_checkpoint
from flax_spmd._src.compare.costs import between
from flax_spmd._src.plan.findings import size_text

LAYOUT = spmd.Layout(spmd.abstract_mesh({'data': 2, 'model': 4}), (('embed', 'data'), ('mlp', 'model')))


def message(error, call, *args, **kwargs):
  with pytest.raises(error) as caught:
    call(*args, **kwargs)
  return str(caught.value)


# -- boxes and trees


@flax.struct.dataclass
class WithSpec(meta.AxisMetadata):
  """A box of some other library that knows its mesh axes."""

  value: Any
  axes: tuple = flax.struct.field(pytree_node=False)

  def unbox(self):
    return self.value

  def replace_boxed(self, val):
    return self.replace(value=val)

  def add_axis(self, index, params):
    return self

  def remove_axis(self, index, params):
    return self

  def get_partition_spec(self):
    return P(*self.axes)


@flax.struct.dataclass
class WithNothing(meta.AxisMetadata):
  """A box that says nothing of where its array goes."""

  held: Any

  def unbox(self):
    return self.held

  def replace_boxed(self, val):
    return self.replace(held=val)

  def add_axis(self, index, params):
    return self

  def remove_axis(self, index, params):
    return self


def test_boxes_of_other_libraries():
  array = jax.ShapeDtypeStruct((8, 16), jnp.float32)
  layout = LAYOUT.replace(rules=(('held|value', P(None, 'model')),))
  tree = {'said': WithSpec(array, ('model', None)), 'silent': WithNothing(array)}
  assert LAYOUT.spec(tree) == {'said': P('model', None), 'silent': P()}
  assert layout.spec({'silent': WithNothing(array)}) == {'silent': P()}  # a box is no part of the path


class Unhashable:
  __hash__ = None

  def __eq__(self, other):
    return isinstance(other, Unhashable)


@flax.struct.dataclass
class WithStatic:
  w: Any
  static: Any = flax.struct.field(pytree_node=False)


def test_a_state_with_something_static_that_has_no_hash():
  """It cannot be remembered, so it is planned each time; without boxes it is known by its arrays."""
  layout = spmd.Layout({'data': 2, 'model': 4}, (('embed', 'data'), ('mlp', 'model')))

  def create():
    return WithStatic(spmd.LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'mlp')), Unhashable())

  for _ in range(2):
    assert layout.spec(jax.eval_shape(create)).w == P('data', 'model')


# -- rules


def test_names_that_are_not_there_have_no_spec():
  assert LAYOUT.rules.spec(None) is None


def test_a_layout_is_no_table():
  assert LAYOUT.rules != LAYOUT
  assert spmd.Layout(LAYOUT.mesh, LAYOUT.rules) == LAYOUT


def test_what_a_path_rule_cannot_divide_is_left_to_fsdp():
  """Under indivisible='next': the path rule wants 6 rows over 4, and does not get them."""
  rules = (('w$', P('model', None)), spmd.fsdp('data', min_size=1))
  array = jax.ShapeDtypeStruct((6, 5), jnp.float32)
  left = LAYOUT.replace(rules=spmd.Rules(*rules, indivisible='next'))
  assert left.spec({'w': array}) == {'w': P('data', None)}
  assert message(errors.LayoutError, LAYOUT.replace(rules=rules).spec, {'w': array})


@pytest.mark.parametrize(
  ('clause', 'text'),
  [
    (
      '{path = "mu", rules = 3}',
      'The layout file has 3 for rules.clauses[0].rules.\nFix: write {clauses = [...]}.',
    ),
    (
      '{path = "mu", rules = {clauses = 3}}',
      'The layout file has 3 for rules.clauses[0].rules.clauses.\nFix: write a list of rules.',
    ),
  ],
)
def test_tables_in_a_file_that_are_none(clause, text):
  file = f'format = 1\n[mesh]\ndata = 8\n[rules]\nclauses = [{clause}]\n'
  assert message(errors.RulesError, spmd.Layout.from_toml, file) == text


def test_a_rule_in_a_file_that_is_a_number():
  file = 'format = 1\n[mesh]\ndata = 8\n[rules]\nclauses = [["batch", "data"], 3]\n'
  assert message(errors.RulesError, spmd.Layout.from_toml, file).startswith(
    'Rule 1 is 3, which is not a rule.'
  )


def test_an_annotation_by_a_function_has_no_text():
  layout = LAYOUT.replace(rules=(('@weights', by_size),))
  assert message(errors.RulesError, layout.to_toml) == dedent(f"""\
    Rule 0 ('@weights', {by_size!r}) has no text form: it is a function.
    Fix: write path rules and fsdp(...) instead, in tables that are saved.""")


def by_size(leaf):
  return P('data') if leaf.size > 8 else None


def test_an_annotation_without_a_mesh():
  with spmd.logical_axis_rules((('@weights', P('data')),)):
    text = message(errors.MeshError, spmd.with_sharding_annotation, jnp.ones(8), 'weights')
  assert "the annotation 'weights'" in text and 'Fix:' in text


def test_a_place_that_is_none():
  layout = spmd.Layout({'data': 8})
  text = message(errors.LayoutError, layout.shard, {'x': jnp.ones(8)}, {'x': 3})
  assert text.startswith(
    "The placements {'x': 3} are not a prefix of the tree: 3 is not a placement.\nFix: "
  )


# -- checkpoints


def test_what_cannot_be_saved(tmp_path):
  layout = spmd.Layout({'data': 8})
  gone = layout.shard(jnp.ones((8, 2)), ('batch', None))
  gone.delete()
  assert message(
    errors.CheckpointError, checkpoint.save, tmp_path / '1', {'w': gone}, layout=layout
  ) == dedent("""\
    w has been deleted, or donated to a jitted function.
    Fix: save the state that the step returned, not the one that was donated to it.""")
  assert message(errors.CheckpointError, checkpoint.save, tmp_path / '1', {}, layout=layout) == dedent("""\
    The state has no leaves.
    Fix: save a state that contains arrays.""")
  assert not (tmp_path / '1').exists()


def test_a_layout_with_a_function_is_not_recorded(tmp_path):
  """It has no text; the arrays and names are there, and a target says where they go."""
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
  """Damage in any group is found; a group ends when it is large enough."""
  state = {f'w{number}': np.full(64, float(number), np.float32) for number in range(5)}
  checkpoint.save(tmp_path / '1', state, layout=spmd.Layout({'data': 8}))
  source = open_checkpoint(tmp_path / '1')
  for path in ('w0', 'w4'):  # what was written is not what the record says
    source.record.leaves[path] = source.record.leaves[path]._replace(checksum='crc32:00000000')
  monkeypatch.setattr(verification, 'GROUP_BYTES', 300)
  assert [len(group) for group in verification.groups(source.record.leaves)] == [2, 2, 1]
  assert verification.verify(source) == ['w0', 'w4']


def test_a_preflight_that_fails_prints_what_is_wrong(tmp_path):
  checkpoint.save(tmp_path / '1', {'w': np.ones(8)}, layout=spmd.Layout({'data': 8}))
  found = checkpoint.preflight(tmp_path / '1', spmd.Layout({'data': 8}).abstract(dict, v=jnp.ones(8)))
  assert found.problems and 'v' in str(found) and 'Fix:' in str(found)


# -- hardware and figures


def test_a_file_of_chips_that_is_not_there():
  assert message(errors.TargetDeviceError, explore.parse_target, 'x:8', 'no.toml') == dedent("""\
    no.toml cannot be read: No such file or directory.
    Fix: pass a TOML file.""")


def test_neighbours_on_a_torus():
  target = explore.parse_target('v5e:4x4')
  assert between(target, {'stage': 4, 'data': 4}, 'stage', 0, 1) == target.chip.link


def test_sizes_that_are_large():
  assert [size_text(5 * 2**exponent) for exponent in (30, 40, 50)] == ['5 GiB', '5 TiB', '5.12e+03 TiB']


def test_a_difference_to_what_failed():
  failed = [explore.Outcome.failed(name, LAYOUT, f'{name} is wrong') for name in ('one', 'other')]
  found = explore.Comparison(explore.parse_target('h100:8'), failed)
  assert found.diff('one', 'other') == ['one: one is wrong', 'other: other is wrong']
