"""Copies and pickles of layouts, rules, boxes and tree structures, in this process and in others."""

import copy
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import errors

SIZES = {'data': 2, 'model': 4}
RULES = (
  ('batch', 'data'),
  ('hidden', ('data', 'model')),
  ('bias$', P(None, P.UNCONSTRAINED)),
  ('^opt_state/', spmd.Rules(spmd.fsdp('data'), unmatched='error')),
  ('@weights', P('model')),
)


def by_size(leaf):
  return P('data') if leaf.size > 8 else None


def reversed_mesh():
  return Mesh(
    np.array(jax.devices())[::-1].reshape(2, 4),
    ('data', 'model'),
    axis_types=(AxisType.Auto, AxisType.Explicit),
  )


MESHES = {
  'of the first devices': lambda: spmd.make_mesh(SIZES),
  'of devices in another order': reversed_mesh,
  'of some devices': lambda: spmd.make_mesh({'data': 1, 'model': 2}, devices=jax.devices()[3:5]),
  'abstract': lambda: spmd.abstract_mesh(SIZES, axis_types=AxisType.Explicit),
}


def boxed_tree(mesh=None):
  return {
    'w': spmd.LogicallyPartitioned(jnp.ones((16, 16)), ('embed', 'hidden'), mesh),
    'n': jnp.ones(8),
  }


def used(layout):
  layout.spec(boxed_tree())
  layout.check(boxed_tree())
  return layout


@pytest.mark.parametrize('prepared', [lambda layout: layout, used], ids=['unused', 'used'])
@pytest.mark.parametrize('mesh', MESHES)
def test_a_copied_layout_is_equal(mesh, prepared):
  layout = prepared(spmd.Layout(MESHES[mesh](), RULES, conflict='error'))
  for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
    copied = pickle.loads(pickle.dumps(layout, protocol))
    assert copied.rules == layout.rules
    assert copied == layout and hash(copied) == hash(layout) and repr(copied) == repr(layout)
    assert type(copied.mesh) is type(layout.mesh)
    assert copied.mesh.axis_types == layout.mesh.axis_types
    assert copied.spec(boxed_tree()) == layout.spec(boxed_tree())
  assert copy.copy(layout) is copy.deepcopy(layout) is layout


def test_an_unpickled_layout_is_pickled_again():
  layout = spmd.Layout(reversed_mesh(), RULES)
  once = pickle.loads(pickle.dumps(layout))
  assert pickle.loads(pickle.dumps(once)) == layout == once


def test_an_unpickled_layout_runs():
  layout = pickle.loads(pickle.dumps(spmd.Layout(SIZES, (('batch', 'data'),))))
  assert layout.jit(lambda x: 2 * x, in_rules=(('batch',),))(np.ones(8)).sharding.spec == P('data')
  with pytest.raises(AttributeError):
    layout.no_such_attribute  # noqa: B018


def test_a_copied_table_is_equal():
  rules = spmd.Rules(*RULES, by_size, missing_axis='drop')
  assert pickle.loads(pickle.dumps(rules)) == rules
  assert copy.copy(rules) is copy.deepcopy(rules) is rules
  assert copy.deepcopy({'rules': [rules]}) == {'rules': [rules]}


@pytest.mark.parametrize('mesh', [None, *MESHES])
def test_a_copied_box_is_equal(mesh):
  box = boxed_tree(mesh and MESHES[mesh]())['w']
  for copied in (pickle.loads(pickle.dumps(box)), copy.copy(box), copy.deepcopy(box)):
    assert copied == box and copied.static is box.static and copied.mesh == box.mesh


@pytest.mark.parametrize('mesh', [None, *MESHES])
def test_a_copied_tree_structure_is_equal(mesh):
  tree = boxed_tree(mesh and MESHES[mesh]())
  treedef = jax.tree.structure(tree)
  for copied in (pickle.loads(pickle.dumps(treedef)), copy.copy(treedef), copy.deepcopy(treedef)):
    assert copied == treedef and hash(copied) == hash(treedef)
    assert jax.tree.structure(copied.unflatten(jax.tree.leaves(tree))) == treedef


def test_a_state_and_its_structure_are_copied():
  def create(key):
    init = spmd.with_logical_partitioning(jax.nn.initializers.ones, ('embed', 'hidden'))
    return TrainState.create(apply_fn=None, params={'w': init(key, (16, 32))}, tx=optax.sgd(1e-3, 0.9))

  layout = spmd.Layout(SIZES, (('hidden', 'model'),))
  state = layout.init(create, jax.random.key(0)).replace(tx=None)
  structure = jax.tree.structure(state)
  assert copy.deepcopy(structure) == pickle.loads(pickle.dumps(structure)) == structure
  copied = copy.deepcopy(state)
  assert copied.params['w'].value.sharding == state.params['w'].value.sharding


# -- other processes


def in_worker(fn, *args):
  """The result of a function of this module in a new process, as data loaders start it."""
  with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context('spawn')) as pool:
    return pool.submit(fn, *args).result(timeout=600)


def use_everywhere(layout, treedef, box):
  """In the worker: equality with a layout made there, and a computation on its devices."""
  made_here = spmd.Layout(reversed_mesh(), RULES)
  step = layout.jit(lambda x: spmd.with_logical_constraint(2 * x, ('batch',)))
  doubled = step(np.ones(8))
  return (
    layout == made_here,
    treedef == jax.tree.structure(boxed_tree()),
    box.mesh == made_here.mesh,
    [device.id for device in layout.mesh.devices.flat],
    str(doubled.sharding.spec),
    pickle.dumps(layout),
  )


def test_a_layout_works_on_the_devices_of_another_process():
  layout = used(spmd.Layout(reversed_mesh(), RULES))
  treedef = jax.tree.structure(boxed_tree())
  box = boxed_tree(reversed_mesh())['w'].replace_boxed(None)
  equal, same_tree, same_mesh, ids, spec, pickled = in_worker(use_everywhere, layout, treedef, box)
  assert equal and same_tree and same_mesh
  assert ids == [7, 6, 5, 4, 3, 2, 1, 0]
  assert spec == "P('data',)"
  assert pickle.loads(pickled) == layout


def plan_without_devices(layout, box):
  try:
    layout.shard(np.ones(8))
  except errors.MeshError as error:
    refused = str(error)
  return isinstance(layout.mesh, AbstractMesh), layout.spec(boxed_tree()), box.mesh, refused


def test_a_layout_is_abstract_where_its_devices_are_missing(monkeypatch):
  layout = spmd.Layout(spmd.make_mesh(SIZES), (('hidden', 'model'),))
  box = boxed_tree(layout.mesh)['w'].replace_boxed(None)
  monkeypatch.setenv('XLA_FLAGS', '--xla_force_host_platform_device_count=4')
  is_abstract, specs, mesh, refused = in_worker(plan_without_devices, layout, box)
  assert is_abstract and mesh is None
  assert specs == layout.spec(boxed_tree())
  assert refused.startswith("The mesh {'data': 2, 'model': 4} is abstract: there are no devices")


def read_rules(pickled):
  def fail(*args, **kwargs):
    raise AssertionError('JAX was asked for devices')

  jax.devices = fail  # in the worker only
  layout = pickle.loads(pickled)
  again = pickle.loads(pickle.dumps(layout))
  return layout.rules, again.rules.spec(('batch', 'hidden'))


def test_the_rules_of_a_layout_are_read_without_a_backend():
  layout = spmd.Layout(SIZES, RULES)
  rules, spec = in_worker(read_rules, pickle.dumps(layout))
  assert rules == layout.rules and spec == layout.rules.spec(('batch', 'hidden'))
