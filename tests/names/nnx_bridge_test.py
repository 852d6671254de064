"""Models through `nnx.bridge`, both ways, under a layout: names, values, losses and shardings of the unbridged model."""

import textwrap

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import checkpoint
from flax_spmd.errors import LayoutError

LAYOUT = spmd.Layout({'data': 2, 'model': 4}, (('batch', 'data'), ('mlp', 'model')))
X = np.random.default_rng(0).normal(size=(8, 16)).astype('float32')
BOXES = {
  'ours': (spmd.with_logical_partitioning, ('embed', 'mlp')),
  'logical names of Flax': (nn.with_logical_partitioning, ('embed', 'mlp')),
  'mesh axes of Flax': (nn.with_partitioning, (None, 'model')),
}
RNGS = {'params': jax.random.key(0), 'dropout': jax.random.key(1)}


@pytest.fixture(autouse=True)
def no_eager_sharding():
  with nnx.use_eager_sharding(False):
    yield


class Linen(nn.Module):
  boxes: str = 'ours'

  @nn.compact
  def __call__(self, x):
    box, names = BOXES[self.boxes]
    init = lambda names: box(nn.initializers.lecun_normal(), names)
    h = nn.Dense(64, kernel_init=init(names), name='up')(x)
    h = nn.BatchNorm(use_running_average=False, name='norm')(h)
    h = spmd.with_logical_constraint(nn.relu(h), ('batch', 'mlp'))
    return nn.Dense(16, kernel_init=init(names[::-1]), name='down')(h)


class Nnx(nnx.Module):
  def __init__(self, rngs, **metadata):
    def linear(inputs, outputs, *names):
      init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names, **metadata)
      return nnx.Linear(inputs, outputs, kernel_init=init, rngs=rngs)

    self.up = linear(16, 64, 'embed', 'mlp')
    self.norm = nnx.BatchNorm(64, rngs=rngs)
    self.down = linear(64, 16, 'mlp', 'embed')

  def __call__(self, x):
    h = spmd.with_logical_constraint(nnx.relu(self.norm(self.up(x))), ('batch', 'mlp'))
    return self.down(h)


def linen_step(model):
  """A step of training of a Linen model: its loss, and the variables afterwards."""

  @LAYOUT.jit
  def step(variables, x):
    def loss(params):
      y, updates = model.apply({**variables, 'params': params}, x, mutable=['batch_stats'])
      return jnp.mean((y - x) ** 2), updates

    (value, updates), grads = jax.value_and_grad(loss, has_aux=True)(variables['params'])
    params = jax.tree.map(lambda a, b: a - 0.1 * b, variables['params'], grads)
    return value, {**updates, 'params': params}

  return step


def nnx_step(call):
  """A step of training of an NNX model: its loss."""

  @LAYOUT.jit
  def step(model, x):
    value, grads = nnx.value_and_grad(lambda model: jnp.mean((call(model, x) - x) ** 2))(model)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda a, b: a - 0.1 * b, params, grads))
    return value

  return step


def assert_same(one, other):
  """Paths without collections, values and shardings."""
  flat = [
    {
      row.path.removeprefix('params/').removeprefix('batch_stats/'): leaf
      for row, leaf in zip(LAYOUT.rows(tree), jax.tree.leaves(tree), strict=True)
    }
    for tree in (one, other)
  ]
  flat = [{path: leaf for path, leaf in each.items() if 'rngs' not in path} for each in flat]
  assert set(flat[0]) == set(flat[1])
  for path, leaf in flat[0].items():
    np.testing.assert_allclose(leaf, flat[1][path], rtol=1e-4, atol=1e-6, err_msg=path)
    assert leaf.sharding.is_equivalent_to(flat[1][path].sharding, leaf.ndim), path


@pytest.mark.parametrize('boxes', BOXES)
def test_a_linen_model_in_nnx(boxes, tmp_path):
  linen = Linen(boxes)
  variables = LAYOUT.init(linen.init, RNGS, X)
  create = lambda: nnx.bridge.ToNNX(linen, rngs=nnx.Rngs(0)).lazy_init(X)
  model = LAYOUT.init(create)
  assert model.up['kernel'].sharding.spec == P(None, 'model')
  assert 'up/kernel' in str(spmd.explain(LAYOUT, LAYOUT.abstract(create)))
  checkpoint.save(tmp_path / 'linen', variables, LAYOUT)
  changes = checkpoint.linen_nnx_changes(tmp_path / 'linen', model)
  model = checkpoint.restore(tmp_path / 'linen', model, changes=changes)
  assert_same(model, variables)
  step, bridged = linen_step(linen), nnx_step(lambda model, x: model(x, mutable=['batch_stats']))
  for _ in range(2):
    value, variables = step(variables, X)
    np.testing.assert_allclose(bridged(model, X), value, rtol=1e-5)
  assert_same(model, variables)
  assert_same(LAYOUT.shard(jax.device_get(nnx.state(model))), variables)


@pytest.mark.parametrize('metadata', [{}, {'linen_meta_type': spmd.LogicallyPartitioned}])
def test_an_nnx_model_in_linen(metadata, tmp_path):
  linen = nnx.bridge.to_linen(Nnx, **metadata)
  variables = LAYOUT.init(linen.init, RNGS, X)
  assert variables['params']['up']['kernel'].value.sharding.spec == P(None, 'model')
  specs = spmd.get_partition_spec(variables)['params']['up']
  assert specs == {'kernel': P('embed', 'mlp'), 'bias': P()}
  assert 'mlp → model' in str(spmd.explain(LAYOUT, LAYOUT.abstract(linen.init, RNGS, X)))
  checkpoint.save(tmp_path / 'linen', variables, LAYOUT)
  assert checkpoint.show(tmp_path / 'linen').record.leaves['params/up/kernel'].names == ('embed', 'mlp')
  model = LAYOUT.init(lambda: Nnx(nnx.Rngs(3)))
  changes = checkpoint.linen_nnx_changes(tmp_path / 'linen', model)
  model = checkpoint.restore(tmp_path / 'linen', model, changes=changes)
  step, plain = linen_step(linen), nnx_step(lambda model, x: model(x))
  for _ in range(2):
    value, variables = step(variables, X)
    np.testing.assert_allclose(value, plain(model, X), rtol=1e-5)
  assert_same(model, variables)
  other = spmd.Layout({'data': 4, 'model': 2}, LAYOUT.rules)
  back = checkpoint.restore(tmp_path / 'linen', other.abstract(linen.init, RNGS, X))
  assert type(back['params']['up']['kernel']) is type(variables['params']['up']['kernel'])
  assert back['params']['up']['kernel'].value.sharding.mesh == other.mesh


def scanned(**metadata):
  """Layers of NNX in a scan of Linen."""

  class Layers(nn.Module):
    @nn.compact
    def __call__(self, x):
      init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ('embed', 'mlp'), **metadata)
      body = lambda layer, x: (layer(x), None)
      scan = nn.scan(
        body,
        length=4,
        variable_axes={'params': 0},
        split_rngs={'params': True},
        metadata_params={nn.PARTITION_NAME: 'layers'},
      )
      return scan(nnx.bridge.to_linen(nnx.Linear, 16, 16, kernel_init=init, name='layer'), x)[0]

  return Layers()


def test_a_scan_names_its_dimension_in_boxes_of_linen_only():
  variables = LAYOUT.init(scanned(linen_meta_type=spmd.LogicallyPartitioned).init, RNGS, X)
  kernel = variables['params']['layer']['kernel']
  assert kernel.names == ('layers', 'embed', 'mlp') and kernel.value.sharding.spec == P(
    None, None, 'model'
  )
  with pytest.raises(LayoutError) as error:
    LAYOUT.init(scanned().init, RNGS, X)
  assert str(error.value) == textwrap.dedent("""\
    params/layer/kernel: 2 names ('embed', 'mlp') for an array of rank 3, in a box of nnx.bridge, which does not name the \
dimension that nn.scan or nn.vmap adds.
    Fix: create the variable with nnx.with_partitioning(init, names, linen_meta_type=flax_spmd.LogicallyPartitioned), \
whose box does.""")
