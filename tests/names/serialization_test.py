"""Serialization of boxes: pickle, and Flax's serializers, between boxed and unboxed states."""

import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization

import flax_spmd as spmd
from tests.names.boxed_models import RULES, assert_same, box

# -- pickle


@pytest.mark.parametrize('protocol', range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle(protocol):
  one = box(rules=RULES)
  assert pickle.loads(pickle.dumps(one, protocol)) == one


def test_a_pickled_box_keeps_its_mesh(mesh):
  one = box(mesh=mesh)
  came_back = pickle.loads(pickle.dumps(one))
  assert came_back.mesh is mesh
  assert came_back == one


def test_flax_boxes_with_a_mesh_do_not_pickle(mesh):
  with pytest.raises(TypeError, match='pickle'):
    pickle.dumps(box(cls=nn.LogicallyPartitioned, mesh=mesh))


# -- Flax's serializers


def test_state_dicts_are_those_of_flax():
  assert serialization.to_state_dict({'w': spmd.Partitioned(1.5, ('a',))}) == {'w': {'value': 1.5}}
  assert serialization.to_state_dict({'w': nn.Partitioned(1.5, ('a',))}) == {'w': {'value': 1.5}}


def test_state_dicts_both_ways():
  zeros = {'w': box().replace_boxed(jnp.zeros((8, 16)))}
  boxed, plain = {'w': box()}, {'w': box().value}
  for state in (serialization.to_state_dict(boxed), serialization.to_state_dict(plain)):
    assert serialization.from_state_dict(zeros, state) == boxed


def test_bytes_both_ways():
  zeros = {'w': box().replace_boxed(jnp.zeros((8, 16))), 'n': 0}
  boxed, plain = {'w': box(), 'n': 3}, {'w': box().value, 'n': 3}
  flax_boxed = {'w': box(cls=nn.LogicallyPartitioned), 'n': 3}
  for saved in (boxed, plain, flax_boxed):
    assert serialization.from_bytes(zeros, serialization.to_bytes(saved)) == boxed
  flax_zeros = {'w': nn.LogicallyPartitioned(jnp.zeros((8, 16)), ('embed', 'mlp')), 'n': 0}
  restored = serialization.from_bytes(flax_zeros, serialization.to_bytes(boxed))
  assert_same(spmd.unbox(restored), plain)


def test_bytes_of_a_box_around_a_tree():
  one = {'w': spmd.Partitioned({'a': jnp.ones(2), 'b': jnp.zeros(3)}, ('data',))}
  zeros = jax.tree.map(jnp.zeros_like, one)
  assert serialization.from_bytes(zeros, serialization.to_bytes(one)) == one


def test_msgpack_of_a_state_dict():
  packed = serialization.msgpack_serialize(serialization.to_state_dict({'w': box()}))
  assert_same(serialization.msgpack_restore(packed), {'w': {'value': np.asarray(box().value)}})
