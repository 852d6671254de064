"""The public API's types, as a type checker sees them; `nox -s typecheck` checks this file."""

from typing import TYPE_CHECKING, Any, assert_type

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import flax_spmd as spmd
from flax_spmd._src.plan.rows import Row


def test_types():
  """Also runs as a test, so that the values have the asserted types."""
  rules = spmd.Rules(('batch', 'data'))
  assert_type(rules, spmd.Rules)
  assert_type(rules + (('embed', None),), spmd.Rules)
  assert_type(rules.resolve(('batch',)), spmd.Resolution)
  assert_type(rules.resolve(('batch',)).decisions, tuple[spmd.Decision, ...])
  assert_type(spmd.make_mesh({'data': 8}), Mesh)
  assert_type(spmd.abstract_mesh({'data': 64}), AbstractMesh)

  layout = spmd.Layout({'data': 8}, rules)
  assert_type(layout.rules, spmd.Rules)
  assert_type(layout.to_toml(), str)
  assert_type(spmd.Layout.from_toml(layout.to_toml()), spmd.Layout)
  with layout as entered:
    assert_type(entered, spmd.Layout)

  box = spmd.LogicallyPartitioned(jnp.ones((8, 4)), ('batch', None))
  assert_type(box, spmd.LogicallyPartitioned)
  assert_type(box.replace_boxed(jnp.ones(8)), spmd.LogicallyPartitioned)
  assert_type(box.get_partition_spec(), PartitionSpec)
  assert_type(box.get_sharding(layout.mesh), NamedSharding)
  assert_type(spmd.logical_to_mesh_axes(('batch',), rules), PartitionSpec | None)
  assert_type(spmd.constrain(jnp.ones(8), PartitionSpec('data'), layout.mesh), jax.Array)

  explanation = spmd.explain(layout, {'w': box})
  assert_type(explanation, spmd.Explanation)
  assert_type(explanation.rows, tuple[Row, ...])
  assert isinstance(explanation.rows[0], Row)


if TYPE_CHECKING:
  initializer: Any = None
  assert_type(spmd.with_partitioning(initializer, ('data',))(), spmd.Partitioned)
  assert_type(spmd.with_logical_partitioning(initializer, ('embed',))(), spmd.LogicallyPartitioned)

  train_step = spmd.explore.TrainStep(initializer, initializer, 1)
  layouts = {'data': spmd.Layout({'data': 8}, ())}
  assert_type(spmd.compare(train_step, layouts, 'cpu:8'), spmd.explore.Comparison)
  assert_type(spmd.search(train_step, 'h100:64'), spmd.explore.SearchResult)
  assert_type(spmd.checkpoint.Manager, type[spmd.checkpoint.Manager])
  assert_type(spmd.pipeline.OneFOneB(4).stages, int)
  missing = spmd.Layot  # pyright: ignore[reportAttributeAccessIssue]
