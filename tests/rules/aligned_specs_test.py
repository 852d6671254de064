"""Specs that begin with an Ellipsis: one rule for arrays of several ranks."""

import pickle
from textwrap import dedent

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import errors
from tests.texts import text_of

KERNEL = ('kernel$', P(..., 'data', 'model'))


def on(*rules, **policies):
  return spmd.Layout({'data': 2, 'model': 4}, rules, **policies)


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    return x + nn.Dense(8)(nn.relu(nn.Dense(16)(x))), None


class Scanned(nn.Module):
  """Blocks that are scanned, and a head that is not, as in big_vision's ViT."""

  @nn.compact
  def __call__(self, x):
    blocks = nn.scan(Block, variable_axes={'params': 0}, split_rngs={'params': True}, length=3)
    return nn.Dense(4, name='head')(blocks(name='blocks')(x, None)[0])


def create():
  params = Scanned().init(jax.random.key(0), jnp.ones((2, 8)))['params']
  return TrainState.create(apply_fn=None, params=params, tx=optax.adafactor(min_dim_size_to_factor=4))


def test_one_rule_is_for_scanned_layers_and_for_others():
  specs = {row.path: row.spec for row in on(KERNEL).rows(jax.eval_shape(create))}
  assert specs['params/blocks/Dense_0/kernel'] == P(None, 'data', 'model')
  assert specs['params/head/kernel'] == P('data', 'model')
  assert specs['params/head/bias'] == P()


def test_optimizer_state_of_another_shape_follows_its_parameter():
  """The kernels are (3, 16, 8); Adafactor's rows are means over the 16, its columns over the 8."""
  specs = {row.path: row.spec for row in on(KERNEL).rows(jax.eval_shape(create))}
  rows = {path: spec for path, spec in specs.items() if '/v_row/blocks/Dense_0/kernel' in path}
  columns = {path: spec for path, spec in specs.items() if '/v_col/blocks/Dense_0/kernel' in path}
  assert list(rows.values()) == [P(None, 'model')] and list(columns.values()) == [P(None, 'data')]


@given(st.integers(0, 5), st.lists(st.sampled_from([None, 'data', 'model']), max_size=3, unique=True))
def test_the_entries_are_those_of_the_last_dimensions(rank, entries):
  layout, array = on(('w', P(..., *entries))), jax.ShapeDtypeStruct((8,) * rank, jnp.float32)
  if rank and len(entries) > rank:
    with pytest.raises(errors.LayoutError):
      layout.spec({'w': array})
    return
  expected = (*(None,) * (rank - len(entries)), *entries) if rank else ()
  assert layout.spec({'w': array}) == {'w': P(*expected)}
  by_function = on(lambda leaf: P(..., *entries))
  assert by_function.spec({'w': array}) == {'w': P(*expected)}


def test_axes_that_the_mesh_lacks_are_dropped_where_they_stand():
  layout = on(('w', P(..., 'other', ('more', 'model'))), missing_axis='drop')
  assert layout.spec({'w': jnp.ones((3, 8, 8))}) == {'w': P(None, None, 'model')}


def test_named_arrays_and_annotations():
  box = spmd.LogicallyPartitioned(jnp.ones((3, 8, 8)), ('layers', 'embed', 'mlp'))
  layout = on(KERNEL, ('embed', 'model'), ('@grads', P(..., 'model')))
  assert layout.spec({'kernel': box}) == {'kernel': P(None, 'data', 'model')}
  annotated = layout.jit(lambda x: spmd.with_sharding_annotation(x, 'grads'))(jnp.ones((2, 4, 8)))
  assert annotated.sharding.spec == P(None, None, 'model')


def test_placements_and_constraints():
  layout = on()
  batch = layout.shard({'x': np.ones((2, 8)), 'y': np.ones(8), 'count': 3}, P(..., 'model'))
  assert batch['x'].sharding.spec == P(None, 'model') and batch['y'].sharding.spec == P('model')
  double = layout.jit(lambda x: spmd.constrain(2 * x, P(..., 'data')))
  assert double(jnp.ones((4, 8))).sharding.spec == P(None, 'data')


def test_text_and_back():
  layout = on(KERNEL, ('a', P(...)), ('@grads', P(..., None, ('data', 'model'))))
  assert '{path = "kernel$", spec = ["...", "data", "model"]},' in layout.to_toml()
  assert '{annotation = "grads", spec = ["...", [], ["data", "model"]]},' in layout.to_toml()
  assert spmd.Layout.from_toml(layout.to_toml()) == layout
  assert pickle.loads(pickle.dumps(layout.rules)) == layout.rules
  assert eval(repr(layout.rules), {'Rules': spmd.Rules, 'P': P}) == layout.rules


@pytest.mark.parametrize('name', ['...', '\\...', '?', '..'])
def test_a_mesh_axis_may_have_such_a_name(name):
  layout = spmd.Layout({name: 8}, (('w', P(..., name, (name,))), ('n', name), spmd.fsdp(name)))
  assert spmd.Layout.from_toml(layout.to_toml()) == layout


def test_explain_shows_the_rule_and_the_dimensions():
  explanation = spmd.explain(on(KERNEL), {'kernel': jnp.ones((3, 8, 8))})
  assert explanation.why('kernel') == dedent("""\
    kernel: float32[3,8,8] as P(None, 'data', 'model'), 96 B per device
      decided as a whole by rule 0 ('kernel$', P(Ellipsis, 'data', 'model'))
      dim 0, 3: replicated, by rule 0 ('kernel$', P(Ellipsis, 'data', 'model'))
      dim 1, 8: data, by rule 0 ('kernel$', P(Ellipsis, 'data', 'model'))
      dim 2, 8: model, by rule 0 ('kernel$', P(Ellipsis, 'data', 'model'))""")


def test_too_many_entries_and_sizes_that_do_not_divide():
  assert text_of(errors.LayoutError, on(KERNEL).spec, {'kernel': jnp.ones(8)}) == dedent("""\
    kernel: rule 0 ('kernel$', P(Ellipsis, 'data', 'model')) has 2 entries for an array of rank 1, shape (8,).
    Fix: give at most one entry per dimension, or add a rule for this path before rule 0.""")
  assert (
    text_of(errors.LayoutError, on(KERNEL).spec, {'kernel': jnp.ones((8, 2, 6))})
    == dedent("""\
    kernel, dim 2: size 6 is not divisible by mesh axis 'model' (4), required by rule 0 ('kernel$', P(Ellipsis, 'data', 'model')).
    Fix: pad it to 8, add a rule for this path before rule 0, or give the table indivisible='next' or 'replicate'.""")
  )


def test_an_ellipsis_that_is_not_the_first_entry():
  assert (
    text_of(errors.RulesError, spmd.Rules, ('w', P('data', ...)), ('v', P(..., None, ...)))
    == dedent("""\
    Rule 0 ('w', P('data', Ellipsis)) has an Ellipsis for dim 1, where the number of dimensions before it is known.
    Rule 1 ('v', P(Ellipsis, None, Ellipsis)) has an Ellipsis for dim 2, where the number of dimensions before it is known.
    Fix: write it first, P(..., 'model'), for the last dimensions of an array; None replicates one dimension.""")
  )
  with pytest.raises(errors.RulesError, match='which is not a rule'):
    spmd.Layout.from_toml('format = 1\n[mesh]\ndata = 2\n[rules]\nclauses = [["batch", "..."]]\n')
