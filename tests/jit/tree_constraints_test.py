"""Constraints and annotations inside jitted functions."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import errors
from tests.texts import text_of

DATA = spmd.fsdp('data', min_size=1)


def on(rules, mesh=None, **policies):
  return spmd.Layout(spmd.make_mesh(mesh or {'data': 8}), rules, **policies)


def test_logical_constraints_under_a_table_without_names():
  layout, x = on(DATA), np.ones((16, 4), np.float32)
  placed = layout.shard(x, P('data'))
  ours, flaxs = (
    layout.jit(lambda x, f=f: f(2 * x, ('batch', 'embed')))(placed).sharding.spec
    for f in (spmd.with_logical_constraint, nn.with_logical_constraint)
  )
  assert ours == flaxs == P('data')


def test_numbers_in_a_constrained_tree_are_unchanged():
  layout = on(())
  out = layout.jit(lambda x: spmd.with_sharding_constraint({'x': x, 'n': 3}, P('data')))(np.ones(8))
  assert out['n'] == 3 and out['x'].shape == (8,)


def test_annotations_in_a_cached_inner_function_cause_no_warning():
  layout = on((('@a', P('data')), ('@b', P('data'))))
  inner = jax.jit(lambda w: spmd.with_sharding_annotation(w, 'b'))
  fn = layout.jit(lambda x, w: (spmd.with_sharding_annotation(x, 'a'), inner(w)))
  fn(np.ones(8), np.ones(8))
  fn(np.ones(16), np.ones(8))


def test_an_annotation_without_a_mesh():
  with spmd.logical_axis_rules((('@weights', P('data')),)):
    text = text_of(errors.MeshError, spmd.with_sharding_annotation, jnp.ones(8), 'weights')
  assert "the annotation 'weights'" in text and 'Fix:' in text
