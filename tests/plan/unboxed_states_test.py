"""Unboxed states: recognised by their structure in every equal layout, and never mistaken for another state."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import checkpoint
from flax_spmd._src.checkpoint.storage.readers import open_checkpoint

RULES = (('batch', 'data'), ('hidden', 'model'))


def layout(*more):
  """A layout with additional rules per test, because equal layouts share their records."""
  return spmd.Layout({'data': 2, 'model': 4}, (*RULES, *((name, None) for name in more)))


def make(*names, shape=(16, 16), bias=True):
  box = spmd.LogicallyPartitioned(jnp.ones(shape), names)
  return lambda: {'w': box, 'b': jnp.ones(16)} if bias else {'w': box}


def test_every_method_of_the_layout_uses_the_names():
  lay = layout('t1')
  state = lay.init(make('embed', 'hidden'), boxed=False)
  where = NamedSharding(lay.mesh, P(None, 'model'))
  assert state['w'].sharding == where
  assert lay.sharding(state) == {'w': where, 'b': NamedSharding(lay.mesh, P())}
  assert lay.names(state) == [None, ('embed', 'hidden')]
  assert lay.shard(jax.tree.map(np.asarray, state))['w'].sharding == where
  row = spmd.explain(lay, state).rows[1]
  assert (row.names, row.bytes_per_device) == (('embed', 'hidden'), 256)


def test_an_equal_layout_knows_the_names():
  state = layout('t2').init(make('embed', 'hidden'), boxed=False)
  assert layout('t2').names(state) == [None, ('embed', 'hidden')]


def test_a_different_layout_does_not_know_the_names():
  state = layout('t3').init(make('embed', 'hidden'), boxed=False)
  assert layout('other').names(state) == [None, None]


def test_shardings_distinguish_two_states_of_one_structure():
  lay = layout('t4')
  wide = lay.init(make('embed', 'hidden'), boxed=False)
  tall = lay.init(make('hidden', 'embed'), boxed=False)
  assert lay.names(wide)[1] == ('embed', 'hidden')
  assert lay.names(tall)[1] == ('hidden', 'embed')
  target = lay.abstract(make('hidden', 'embed'), boxed=False)
  assert lay.names(target)[1] == ('hidden', 'embed')


def test_inside_a_trace_two_states_of_one_structure_are_left_to_the_compiler():
  lay = layout('t5')
  wide = lay.init(make('embed', 'hidden'), boxed=False)
  lay.init(make('hidden', 'embed'), boxed=False)
  doubled = lay.jit(lambda s: jax.tree.map(lambda x: 2 * x, s))(wide)
  assert doubled['w'].sharding.is_equivalent_to(wide['w'].sharding, 2)


def test_a_lone_array_is_not_recorded():
  """Any other array of its shape would be mistaken for it."""
  lay = layout('t6')
  lay.init(lambda: spmd.LogicallyPartitioned(jnp.ones((16, 16)), ('embed', 'hidden')), boxed=False)
  x = lay.shard(jnp.ones((16, 16)), ('batch', None))
  assert lay.jit(lambda x: x + 1)(x).sharding.spec[0] == 'data'
  assert lay.names({'other': jnp.ones((16, 16))}) == [None]


def test_bare_arrays_in_a_state_are_pinned_and_bare_results_are_free():
  lay = layout('t7')
  state = lay.init(make('embed', 'hidden'))
  x = lay.shard(jnp.ones((8, 16)), ('batch', None))

  @lay.jit
  def step(state, x):
    y = x @ state['w'].value
    return {'w': state['w'], 'b': state['b'] + y.sum(0)}, y

  new, y = step(state, x)
  assert new['b'].sharding == NamedSharding(lay.mesh, P())
  assert y.sharding.is_equivalent_to(NamedSharding(lay.mesh, P('data', 'model')), 2)


def test_a_checkpoint_of_a_state_without_boxes_has_its_names(tmp_path):
  lay = layout('t8')
  state = lay.init(make('embed', 'hidden'), boxed=False)
  checkpoint.save(tmp_path / 'a', state, layout=layout('t8'))
  leaves = open_checkpoint(tmp_path / 'a').record.leaves
  assert {path: leaf.names for path, leaf in leaves.items()} == {'b': None, 'w': ('embed', 'hidden')}


def test_trees_with_unhashable_static_parts_are_planned():
  @partial(jax.tree_util.register_dataclass, data_fields=['w'], meta_fields=['config'])
  @dataclasses.dataclass
  class State:
    w: Any
    config: dict

  lay = layout('t9')
  lay.init(make('embed', 'hidden'), boxed=False)
  box = spmd.LogicallyPartitioned(jnp.ones((16, 16)), ('embed', 'hidden'))
  assert lay.spec(State(box, {})).w == P(None, 'model')
  assert lay.names(State(jnp.ones(3), {})) == [None]
