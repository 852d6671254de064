"""Searches over what users tune besides layouts: batches, lengths, remat policies; and layouts that are equally fast."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import flax_spmd as spmd
from flax_spmd._src.estimate import estimator, step_program
from flax_spmd._src.search import trials
from flax_spmd._src.search.result import ranks_of
from flax_spmd.explore import Estimator, TrainStep, parse_target

WIDTH, LAYERS = 1024, 4


def create():
  names = 'layers', 'embed', 'mlp'
  return {'w': spmd.LogicallyPartitioned(jnp.ones((LAYERS, WIDTH, WIDTH)), names)}


def train_step_of(layout, batch=64, length=128, keep=('out',)):
  """A step with the choices of a user: sequences, their length, and the values that are kept."""
  policy = keep if callable(keep) else jax.checkpoint_policies.save_only_these_names(*keep)

  def layer(x, w):
    y = checkpoint_name(x @ w, 'out')
    return checkpoint_name(jax.nn.gelu(y), 'active'), None

  def step(state, x):
    def loss(state):
      y, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy, prevent_cse=False), x, state['w'].unbox())
      return jnp.sum(y.astype(jnp.float32) ** 2)

    value, gradients = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), value

  return TrainStep(step, create, jax.ShapeDtypeStruct((batch, length, WIDTH), jnp.float32))


def search(choices, **options):
  return spmd.search(train_step_of, 'h100:8', choices=choices, candidates=12, top=0, **options)


@pytest.fixture(scope='module')
def batches():
  return search({'batch': (64, 4096)})


def test_batches_are_ranked_by_time_per_element(batches):
  assert batches.choices == {'batch': 4096}  # the gradients are reduced once for all of it
  by_batch = {one.batch for one in batches.estimates}
  assert by_batch == {1.0, 64.0}
  assert 'Ranked by time per element of the batch.' in str(batches)
  best, small = (
    batches.best,
    min((one for one in batches.estimates if one.batch == 1), key=lambda one: one.cost.low),
  )
  assert small.cost.low < best.cost.low and best.cost.low / 64 < small.cost.low


def test_lengths_count_as_elements():
  result = search({'length': (128, 512), 'batch': (64,)})
  assert {one.batch for one in result.estimates} == {1.0, 4.0}


def test_values_that_move_to_the_host_are_in_doubt():
  offload = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=['out'],
    offload_src='device',
    offload_dst='pinned_host',
  )
  layout = spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'),))
  estimates = {
    policy: Estimator(lambda layout, policy=policy: train_step_of(layout, keep=policy)).estimate(
      layout, parse_target('h100:8'), partition=False
    )
    for policy in (('out',), offload)
  }
  moved = 'a value moves between device and host; estimates count it as memory of the device throughout'
  assert [any(moved in doubt for doubt in one.doubts) for one in estimates.values()] == [False, True]


def test_remat_policies_and_memory():
  kept = ('out', 'active')
  choices = {'keep': ((), kept), 'batch': (2048,)}  # large enough for the products to decide
  wide = search(choices, mesh={'data': 8}, pin={'batch': 'data'})
  assert wide.choices['keep'] == kept  # nothing is computed twice
  peaks = {}
  for one in wide.estimates:
    name = 'kept' if 'active' in one.name else 'recomputed'
    peaks[name] = max(peaks.get(name, 0), one.memory.peak)
  budget = (peaks['kept'] + peaks['recomputed']) // 2
  tight = search(choices, mesh={'data': 8}, pin={'batch': 'data'}, memory=budget)
  assert tight.choices['keep'] == ()


def test_equally_fast_layouts_share_a_rank(batches):
  plain = batches.best
  scaled = lambda factor: plain._replace(
    cost=plain.cost._replace(expected=factor * plain.cost.expected),
    name=str(factor),
  )
  times = [scaled(factor) for factor in (1.0, 1.015, 1.03, 1.1, 1.11, 1.5)]
  assert ranks_of(times) == ['1=', '1=', '3', '4=', '4=', '6']
  assert ranks_of([scaled(1.0), scaled(1.01)._replace(fits=False), plain._replace(cost=None)]) == [
    '1',
    '2',
    '',
  ]
  assert ranks_of([]) == []


def test_ties_are_named(tmp_path, batches):
  ranks = ranks_of(batches.outcomes)
  assert batches.ties == [one.name for one, rank in zip(batches.outcomes, ranks) if rank == '1='][1:]
  result = search({'batch': (64,)}, mesh={'data': 8})
  text = str(result)
  assert re.search(r'rank +memory +time', text)
  if result.ties:
    assert f'As fast as the best, within 2 %: {result.ties[0]}' in re.sub(r'\s+', ' ', text)
  result.to_html(tmp_path / 'page.html')
  assert ('As fast as the best' in (tmp_path / 'page.html').read_text()) == bool(result.ties)


def test_few_candidates_try_every_choice_or_name_those_that_they_do_not():
  few = search({'batch': (64, 128, 256), 'length': (128,)})
  assert {one.batch for one in few.estimates} == {1.0, 2.0, 4.0} and few.notes == []
  result = spmd.search(train_step_of, 'h100:8', choices={'batch': (64, 128, 256)}, candidates=1, top=0)
  assert result.notes == [
    "2 of 3 combinations of choices were not tried, such as {'batch': 128}: raise candidates."
  ]


@pytest.mark.parametrize('sizes', [(12, 64), (64, 12), (7, 8), (30, 32, 48)])
def test_each_batch_is_sharded_over_the_axes_that_divide_it(sizes):
  result = spmd.search(
    train_step_of, 'mi300:8', choices={'batch': sizes, 'length': (16,)}, candidates=60, top=0
  )
  assert not [one.error for one in result.estimates if one.error]
  for size in sizes:
    of_size = [one.name for one in result.estimates if f'batch={size}' in one.name]
    assert any(name.startswith('data=8: batch=data') for name in of_size) == (size % 8 == 0), of_size


# -- optimizer state in the host's memory


def create_with_adam():
  params = jax.tree.map(lambda box: box, create())
  return {'params': params, 'opt_state': {'mu': params, 'nu': params}}


def adam_step(state, x):
  def loss(params):
    y, _ = jax.lax.scan(lambda x, w: (jax.nn.gelu(x @ w), None), x, params['w'].unbox())
    return jnp.sum(y**2)

  value, gradients = jax.value_and_grad(loss)(state['params'])
  decay = lambda moments: jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments, gradients)
  moments = {name: decay(one) for name, one in state['opt_state'].items()}
  params = jax.tree.map(
    lambda w, mu, nu: w - 0.1 * mu / (nu + 1), state['params'], moments['mu'], moments['nu']
  )
  return {'params': params, 'opt_state': moments}, value


def search_on_host(**options):
  """A search without a compiler: what is tested is arithmetic."""
  batch = jax.ShapeDtypeStruct(
    (4096, 128, WIDTH), jnp.float32
  )  # so many activations that they decide the peak
  train_step = TrainStep(adam_step, create_with_adam, batch)
  fixed = {'mesh': {'data': 8}, 'pin': {'batch': 'data'}, 'host': '^opt_state/', 'top': 0}
  with pytest.MonkeyPatch.context() as patch:
    for module in (estimator, step_program, trials):
      patch.setattr(module, 'can_partition', lambda platform: False)
    return spmd.search(train_step, 'h100:8', **fixed | {'candidates': 40} | options)


@pytest.fixture(scope='module')
def with_room():
  return search_on_host()


def split(estimates):
  """The estimates with and without arrays on the host, by their names without it."""
  on_host = {one.name.removesuffix(' host=^opt_state/'): one for one in estimates if 'host=' in one.name}
  return on_host, {one.name: one for one in estimates if 'host=' not in one.name}


def test_optimizer_state_on_the_host_by_arithmetic(with_room):
  on_host, kept = split(with_room.estimates)
  assert len(on_host.keys() & kept.keys()) >= 3
  for name in on_host.keys() & kept.keys():
    one, other = on_host[name].memory, kept[name].memory
    assert one.host == other.optimizer > 0 == one.optimizer == other.host
    assert other.peak - one.peak == one.host
    assert on_host[name].cost.links[('host memory',)] == 2 * one.host / 6.4e10


def test_the_host_comes_last_where_it_does_not_pay_and_first_where_nothing_else_fits(with_room):
  on_host, kept = split(with_room.estimates)
  assert 'host=' not in with_room.best.name and not with_room.best.memory.host
  smallest = min(one.memory.peak for one in kept.values())
  assert min(one.memory.peak for one in on_host.values()) < smallest
  tight = search_on_host(memory=smallest - 1)
  assert tight.best.memory.host and 'host=^opt_state/' in tight.best.name
  assert f'{tight.best.memory.text(tight.best.memory.peak)} per device' in tight.toml
  assert ' on host' in tight.toml and ' on host' in str(tight) and ' on host' in tight.to_html()
  assert tight.layout.sharding(jax.eval_shape(create_with_adam))['opt_state']['mu']['w'].memory_kind == (
    'pinned_host'
  )
  assert spmd.Layout.from_toml(tight.layout.to_toml()).rules == tight.layout.rules
  with pytest.raises(spmd.errors.InfeasibleError, match='The smallest needs'):
    search_on_host(memory=smallest - 1, host=())


def test_the_host_is_tried_before_a_search_ends_without_a_layout_that_fits():
  _, kept = split(search_on_host(candidates=1, host=()).estimates)
  memory = min(one.memory.peak for one in kept.values()) - 1
  paths = ('^opt_state/mu', '^opt_state/nu', '^opt_state/mu')
  found = search_on_host(candidates=1, host=paths, memory=memory)
  assert 'host=^opt_state/' in found.best.name and found.best.memory.peak <= memory
  with pytest.raises(spmd.errors.InfeasibleError) as error:
    search_on_host(candidates=1, host=paths, memory='1KiB')
  assert str(error.value).endswith(
    'Fix: use more devices, a smaller batch, or remat (as an argument of the step, passed in choices).'
  )


def test_paths_of_the_host_that_match_nothing():
  with pytest.raises(spmd.errors.SearchError) as error:
    search_on_host(host=('^optimizer/', '('))
  assert str(error.value) == (
    "host: no path of the 3 arrays of the state matches '^optimizer/'.\n"
    "host: '(' is not a regular expression: missing ), unterminated subpattern at position 0.\n"
    "Fix: correct it; the paths begin with 'opt_state/mu/w', 'opt_state/nu/w', 'params/w'.\n"
    'Fix: correct it; it is searched for in paths such as params/layers/wi.'
  )


@pytest.mark.parametrize('host', [3, (3,), ('^opt_state/', None)])
def test_paths_of_the_host_that_are_no_texts(host):
  with pytest.raises(spmd.errors.SearchError) as error:
    search_on_host(host=host)
  assert str(error.value) == (
    f'host: {host!r} is no path expression, and no sequence of them.\n'
    "Fix: pass the paths of arrays that may be in the host's memory, such as host='^opt_state/'."
  )


@pytest.mark.parametrize('name', ['act_batch', 'B', 'examples'])
def test_activations_may_name_the_batch_in_their_own_way(name):
  def step(state, x):
    def loss(state):
      y = spmd.with_logical_constraint(x @ state['w'][0], (name, 'act_length', 'act_embed'))
      y = spmd.with_logical_constraint(y @ state['w'][1], (name, 'act_length', 'act_embed'))
      return jnp.sum(y**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, state, jax.grad(loss)(state)), 0.0

  plain = lambda: {'w': jnp.ones((2, WIDTH, WIDTH))}
  train_step = TrainStep(step, plain, jax.ShapeDtypeStruct((512, 128, WIDTH), jnp.float32))
  result = spmd.search(train_step, 'h100:8', candidates=10, top=0)
  assert {'data_parallel', 'fsdp'} <= {*result.presets.values()}
  shown = (one.layout for one in result.outcomes if one.name in result.presets)
  tables = [dict(layout.rules.pairs) for layout in (result.layout, *shown)]
  assert all(table[name] == table['batch'] for table in tables)


def test_names_that_a_search_leaves_without_rules_are_no_findings():
  def create():
    return {'w': spmd.LogicallyPartitioned(jnp.ones((64, 256)), ('kv_heads', 'heads'))}

  def step(state, x):
    return jax.tree.map(lambda w: w - 0.1, state), jnp.sum((x @ state['w'].unbox()) ** 2)

  train_step = TrainStep(step, create, jax.ShapeDtypeStruct((64, 64), jnp.float32))
  result = spmd.search(
    train_step, 'cpu:8', candidates=10, top=1, pin={'heads': 'model'}, forbid=['kv_heads']
  )
  assert result.best.source == 'compiled:cpu'
  [finding] = result.layout.check(jax.eval_shape(create)).of('unmatched')
  assert finding.text.endswith("Did you mean 'heads'?")
  assert not [one for one in result.remarks if 'kv_heads' in one]
