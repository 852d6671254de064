"""Placements that do not fit the tree or its arrays."""

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import errors
from tests.texts import text_of


def on(rules, mesh=None, **policies):
  return spmd.Layout(spmd.make_mesh(mesh or {'data': 8}), rules, **policies)


def test_problems_of_all_parts_are_listed():
  rules = spmd.Rules(('w$', P('data')))
  tree = {'a': {'w': np.ones(6)}, 'b': {'w': np.ones(6)}, 'c': np.ones(7)}
  text = text_of(errors.LayoutError, on(()).shard, tree, {'a': rules, 'b': rules, 'c': P('data')})
  assert [line.split(', dim')[0] for line in text.splitlines() if not line.startswith('Fix')] == [
    'a: w',
    'b: w',
    'c',
  ]


def test_an_invalid_placement():
  layout = spmd.Layout({'data': 8})
  text = text_of(errors.LayoutError, layout.shard, {'x': jnp.ones(8)}, {'x': 3})
  assert text.startswith(
    "The placements {'x': 3} are not a prefix of the tree: 3 is not a placement.\nFix: "
  )
