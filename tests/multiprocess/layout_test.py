"""A layout over several real processes: init, step, batches, gather, explain, compared across processes."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd.errors import LayoutError
from tests.processes import run_processes

BATCH = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
NAMES = (('batch', 'data'), ('hidden', 'model'))


class Mlp(nn.Module):
  @nn.compact
  def __call__(self, x):
    dense = functools.partial(nn.Dense, use_bias=False)
    init = spmd.with_logical_partitioning(nn.initializers.lecun_normal(), ('embed', 'hidden'))
    x = nn.relu(dense(32, kernel_init=init)(x))
    x = spmd.with_logical_constraint(x, ('batch', 'hidden'))
    return dense(8)(x)


def create(key, x):
  model = Mlp()
  return TrainState.create(
    apply_fn=model.apply, params=model.init(key, x)['params'], tx=optax.adam(1e-2)
  )


def train_step(state, x):
  loss, grads = jax.value_and_grad(lambda p: jnp.mean(state.apply_fn({'params': p}, x) ** 2))(
    state.params
  )
  return state.apply_gradients(grads=grads), loss


def train(rules, devices=None):
  """Three steps under a layout; returns results that have to be equal on every process."""
  layout = spmd.Layout(spmd.make_mesh({'data': 4, 'model': 2}, devices=devices), rules)
  state = layout.init(create, jax.random.key(0), BATCH)
  step = layout.jit(train_step, donate_argnums=0)
  losses = []
  part = part_of(layout)
  np.testing.assert_array_equal(BATCH[np.ix_(*layout.local_indices(BATCH, ('batch', None)))], part)
  for _ in range(3):
    state, loss = step(state, layout.local_to_global(part, ('batch', None)))
    losses.append(float(loss))
  whole = layout.gather(state)
  return {
    'losses': losses,
    'sum': float(sum(np.abs(leaf).sum() for leaf in jax.tree.leaves(whole.params))),
    'spec': str(layout.spec(state).params['Dense_0']['kernel']),
    'table': str(spmd.explain(layout, state)),
  }


def part_of(layout):
  """The rows of the batch on the devices of this process, computed without the code under test."""
  sharding = jax.sharding.NamedSharding(layout.mesh, P('data'))
  mine = sharding.addressable_devices_indices_map(BATCH.shape).values()
  rows = sorted({row for index in mine for row in range(len(BATCH))[index[0]]})
  return BATCH[rows]


TABLES = {'names': NAMES, 'fsdp': (('batch', 'data'), spmd.fsdp('data', min_size=64))}


def every_process():
  """The results of one process; runs in each of them."""
  reported = {name: train(rules) for name, rules in TABLES.items()}
  shuffled = [jax.devices()[i] for i in np.random.default_rng(1).permutation(8)]
  reported['shuffled'] = train(NAMES, shuffled)
  me = jax.process_index()
  differing = (('batch', 'data'), ('hidden', 'model' if me else None))
  layout = spmd.Layout({'data': 4, 'model': 2}, differing)
  with pytest.raises(LayoutError) as caught:
    layout.init(create, jax.random.key(0), BATCH)
  reported['error'] = str(caught.value)
  with pytest.raises(LayoutError) as caught:
    spmd.Layout({'data': 8}, NAMES[:1]).local_to_global(BATCH[: 4 + 4 * me], ('batch', None))
  reported['batch'] = str(caught.value)
  return reported


@functools.cache
def run(processes):
  source = 'from tests.multiprocess import layout_test\nreport(layout_test.every_process())'
  return [result.value for result in run_processes(source, processes, 8 // processes)]


@pytest.mark.slow
@pytest.mark.parametrize('processes', [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_every_process_trains_as_a_single_process_does(processes):
  reported = run(processes)
  for name in ('names', 'fsdp', 'shuffled'):
    alone = train(TABLES.get(name, NAMES))
    for one in reported:
      assert one[name]['table'] == reported[0][name]['table']
      np.testing.assert_allclose(one[name]['losses'], alone['losses'], rtol=1e-5)
      np.testing.assert_allclose(one[name]['sum'], alone['sum'], rtol=1e-5)
      assert one[name]['spec'] == alone['spec']


@pytest.mark.slow
@pytest.mark.parametrize('processes', [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_processes_with_different_rules_or_batches_all_raise(processes):
  others = 'process 1' if processes == 2 else 'processes 1-3'
  reported = run(processes)
  assert len({one['error'] for one in reported}) == 1
  first, *_, fix = reported[0]['error'].splitlines()
  assert first == (
    f"the layout, line 3: \"rule 1 ('hidden', None)\" in process 0, \"rule 1 ('hidden', 'model')\" in {others}."
  )
  assert fix.startswith('Fix: create it from the same code')
  if processes == 2:
    assert {one['batch'] for one in reported} == {
      '(root), dim 0: 4 of 8 in process 0, 8 of 16 in process 1.\n'
      'Fix: pass on every process as much as its devices hold: pad or drop the remainder at the end.'
    }
