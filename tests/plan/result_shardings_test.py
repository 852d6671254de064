"""Results of jitted functions: sharded by what is in hand, whatever the process did before."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from tests.history import models

RULES = (('batch', 'data'), ('hidden', 'model'))
LAYOUT = spmd.Layout({'data': 2, 'model': 4}, RULES)


def box(*names, shape=(16, 16)):
  return spmd.LogicallyPartitioned(jnp.ones(shape), names)


def spec(array):
  """The spec without trailing Nones, which two equivalent shardings may differ in."""
  entries = list(array.sharding.spec)
  while entries and entries[-1] is None:
    entries.pop()
  return P(*entries)


def placed(shape, *entries):
  return LAYOUT.shard(np.ones(shape, np.float32), P(*entries))


CONTAINERS = models.CONTAINERS | {
  'list': lambda state, logits: [state, logits],
  'nested': lambda state, logits: {'a': ({'b': state}, [logits])},
}


def test_every_container_gives_the_same_shardings():
  state = LAYOUT.init(lambda: {'w': box('embed', 'hidden'), 'b': jnp.ones(16)})
  x = LAYOUT.shard(np.ones((8, 16), np.float32), ('batch', None))
  for name, container in CONTAINERS.items():
    step = LAYOUT.jit(
      lambda s, x, make=container: make(s, jnp.tile(x, 2) @ jnp.ones((32, 24)) @ jnp.ones((24, 12)))
    )
    leaves = jax.tree.leaves(step(state, x))
    by_shape = {leaf.shape: spec(leaf) for leaf in leaves}
    assert by_shape == {(16, 16): P(None, 'model'), (16,): P(), (8, 12): P('data')}, name


def test_a_second_model_of_the_same_form_changes_nothing():
  first = {'w': box('embed', 'hidden')}
  step = lambda state: jax.tree.map(
    lambda w: spmd.with_logical_constraint(w * 2, ('batch', None)), state
  )
  state = LAYOUT.init(lambda: first, boxed=False)
  alone = LAYOUT.jit(step)(state)['w'].sharding
  host = jax.device_get(state)
  sharded = LAYOUT.shard(host)['w'].sharding
  LAYOUT.init(lambda: {'w': box('hidden', 'embed')}, boxed=False)
  assert LAYOUT.jit(lambda state: step(state))(state)['w'].sharding == alone == state['w'].sharding
  assert LAYOUT.shard(host)['w'].sharding == sharded == NamedSharding(LAYOUT.mesh, P())


def test_planning_a_model_gives_an_unrelated_tree_no_names():
  plain = {'kernel': np.ones((16, 16), np.float32), 'bias': np.ones(16, np.float32)}
  LAYOUT.abstract(lambda: {'kernel': box('embed', 'hidden'), 'bias': jnp.ones(16)}, boxed=False)
  assert LAYOUT.names(plain) == [None, None]
  assert LAYOUT.shard(plain)['kernel'].sharding.spec == P()
  assert spmd.explain(LAYOUT, plain).row('kernel').spec == P()


def test_parts_without_names_do_not_drift():
  """Batch statistics without names beside parameters with names, in a tuple and below a dict."""
  state = LAYOUT.init(lambda: ({'w': box('embed', 'hidden')}, {'big': jnp.zeros((64, 16))}))
  x = LAYOUT.shard(np.ones((8, 16), np.float32), ('batch', None))

  def step(state, x):
    params, stats = state
    y = spmd.with_logical_constraint(x @ params['w'].unbox(), ('batch', 'hidden'))
    return params, {'big': stats['big'] + jnp.tile(y, (8, 1))}

  steps = {'tuple': LAYOUT.jit(step), 'dict': LAYOUT.jit(lambda s, x: {'s': step(s, x)})}
  for name, jitted in steps.items():
    result = jitted(state, x)
    result = result if name == 'tuple' else result['s']
    assert result[1]['big'].sharding == state[1]['big'].sharding


def test_a_cache_without_names_comes_out_as_it_came_in():
  for start in (P(), P('data'), P(None, 'model')):
    cache = {'k': LAYOUT.shard(np.zeros((8, 64, 8, 8), np.float32), start)}
    x = placed((8, 64, 8, 8), 'data', None, 'model')
    step = LAYOUT.jit(lambda cache, x: {'k': cache['k'] + x})
    assert step(cache, x)['k'].sharding == cache['k'].sharding


def test_one_function_serves_arguments_of_every_sharding():
  """JAX traces once for all of them, and the order of the calls does not matter."""
  step = LAYOUT.jit(lambda cache: jax.tree.map(lambda x: x + 1, cache))
  starts = [P(), P('data'), P(None, 'model'), P('model', 'data')]
  for start in [*starts * 12, *starts]:
    cache = {'k': LAYOUT.shard(np.zeros((8, 8), np.float32), start)}
    assert step(cache)['k'].sharding == cache['k'].sharding


def test_a_steady_function_notices_other_shardings():
  """JAX's dispatch has taken over when the shardings of the arguments change."""
  step = LAYOUT.jit(lambda a, b: {'a': a['a'] + b['b'].T, 'b': b['b'] * 2}, donate_argnums=0)
  for start in [P('data')] * 12 + [P('model')] + [P('data'), P('model')] * 3:
    a, b = {'a': placed((8, 8), *start)}, {'b': placed((8, 8), None, *start)}
    result = step(a, b)
    assert (spec(result['a']), spec(result['b'])) == (P(*start), P(None, *start))


def test_a_steady_function_notices_a_result_that_jax_may_move():
  step = LAYOUT.jit(lambda state, x: x * 2, constrain_batch=False)
  state, x = placed((8, 8), 'data'), np.ones((8, 8), np.float32)
  results = [step(state, x)]
  for _ in range(12):
    step(np.ones((8, 8), np.float32), placed((8, 8), 'data'))
  results.append(step(state, x))
  assert [(result.committed, result.sharding) for result in results] == 2 * [
    (False, results[0].sharding)
  ]


def test_effects_of_a_steady_function_happen_once_per_call():
  seen = []

  def count(x):
    jax.debug.callback(lambda: seen.append(1))
    return x * 2

  step = LAYOUT.jit(count)
  for start in [P('data')] * 12 + [P('model')] * 2:
    result = step(placed((8, 8), *start))
    assert spec(result) == start
  jax.effects_barrier()
  assert len(seen) == 14


@pytest.mark.slow
@pytest.mark.parametrize('once', ['donates', 'has effects'])
def test_a_steady_function_that_runs_once_commits_its_results_as_a_new_one_does(once):
  def double(state, x):
    if once == 'has effects':
      jax.debug.callback(lambda: None)
    return {'w': x['w'] * 2}, state * 2

  options = {'donate_argnums': 1} if once == 'donates' else {}
  arguments = [
    (placed((4, 4), 'data'), lambda: placed((8, 8), 'model')),
    (placed((4, 4), 'data'), lambda: placed((8, 8), 'data')),
    (placed((4, 4), 'data'), lambda: jnp.ones((8, 8))),
    (np.ones((4, 4), np.float32), lambda: jnp.ones((8, 8))),
    (np.ones((4, 4), np.float32), lambda: placed((8, 8), 'data')),
  ]

  def found(step, state, x):
    return [(one.committed, one.sharding) for one in jax.tree.leaves(step(state, {'w': x()}))]

  expected = [found(LAYOUT.jit(double, **options), *each) for each in arguments]
  for first, second in itertools.permutations(range(len(arguments)), 2):
    step = LAYOUT.jit(double, **options)
    for number in [first] * 9 + [second, first, second]:
      assert found(step, *arguments[number]) == expected[number]


class Counted(dict):
  """A dict that counts how often its class is flattened."""

  flattened = 0


def _flatten(counted):
  Counted.flattened += 1
  return list(counted.values()), tuple(counted)


jax.tree_util.register_pytree_node(
  Counted, _flatten, lambda keys, values: Counted(zip(keys, values, strict=True))
)


def test_jax_dispatches_calls_whose_results_alternate_in_structure():
  step = LAYOUT.jit(lambda state: {name: value * 2 for name, value in state.items()})
  states = [
    Counted({name: placed((8, 8), *start)}) for name, start in (('a', ('data',)), ('b', ()), ('c', ()))
  ]
  for _ in range(12):
    for state in states:
      step(state)
  Counted.flattened = 0
  for state in states:
    [(name, result)] = step(state).items()
    assert result.sharding == state[name].sharding
  assert Counted.flattened == 2 * len(
    states
  )  # JAX's own dispatch, and the structure that selects the function
  for start in (('model',), ('data',), ('model',)):
    for name in 'abc':
      assert spec(step(Counted({name: placed((8, 8), *start)}))[name]) == P(*start)


def test_functions_that_alternate_with_the_shapes_of_one_structure():
  rule = lambda leaf: P('data') if leaf.shape[0] % 2 == 0 else P()
  step = LAYOUT.jit(lambda x: {'x': x['x'] * 2}, out_rules=rule)
  for rows in [4] * 12 + [3, 4] * 12 + [5, 6, 3]:
    result = step({'x': np.ones((rows, 8), np.float32)})['x']
    assert result.shape[0] == rows and spec(result) == (P('data') if rows % 2 == 0 else P())


def test_an_uncommitted_argument_leaves_its_result_to_the_compiler():
  step = LAYOUT.jit(lambda cache, x: {'k': cache['k'] + x})
  x = placed((8, 8), 'data')
  for _ in range(3):
    assert spec(step({'k': placed((8, 8), 'model')}, x)['k']) == P('model')
    assert spec(step({'k': jnp.zeros((8, 8))}, x)['k']) == P('data')
    assert spec(step({'k': np.zeros((8, 8), np.float32)}, x)['k']) == P('data')


def test_a_state_of_another_layout_moves_in_its_first_step():
  other = spmd.Layout({'data': 8}, (('embed', 'data'),))
  state = other.init(lambda: {'w': box('embed', 'hidden')})
  step = LAYOUT.jit(lambda state: jax.tree.map(lambda w: w + 1, state))
  assert step(state)['w'].value.sharding == NamedSharding(LAYOUT.mesh, P(None, 'model'))


def test_arguments_of_one_form_correspond_by_key_then_in_order():
  p, m = placed((8, 8), 'data'), placed((8, 8), 'model')
  in_order = LAYOUT.jit(lambda p, m: (p + m, m - p))(p, m)
  assert [spec(each) for each in in_order] == [P('data'), P('model')]
  by_key = LAYOUT.jit(lambda s: {'m': s['m'] + 1, 'p': s['p'], 'extra': s['p']})({'p': p, 'm': m})
  assert spec(by_key['m']) == P('model') and spec(by_key['p']) == P('data')


def test_a_result_that_could_be_either_argument_is_the_compilers():
  p, m = placed((8, 8), 'data'), placed((8, 8), 'model')
  plan = LAYOUT.jit(lambda p, m: p @ m).plan_of(p, m)
  assert [(each.sharding, each.source) for each in plan.results] == [(None, None)]


def test_constraints_decide_the_sharding_of_a_single_result():
  x = placed((8, 16))
  end = lambda x: spmd.with_logical_constraint(2 * x, ('batch', 'hidden'))
  for fn in (end, jax.jit(end), lambda x: end(x).astype(jnp.float32), lambda x: {'y': end(x)}):
    [result] = jax.tree.leaves(LAYOUT.jit(lambda x, fn=fn: fn(x))(x))
    assert spec(result) == P('data', 'model')
  assert spec(LAYOUT.jit(lambda x: 1 + end(x))(x)) == P('data', 'model')


def test_an_array_with_the_shape_of_a_weight_is_the_compilers():
  state = LAYOUT.init(lambda: {'w': box('embed', 'hidden'), 'v': jnp.ones((16, 16))})
  x = placed((8, 16), 'data')
  outer = LAYOUT.jit(lambda state, x: {'scores': x.T @ x, 'v': state['v'] + x.T @ x})
  plan = outer.plan_of(state, x)
  assert [each.source for each in plan.results] == [None, 0]


def test_gradients_of_boxed_parameters_without_boxes_keep_the_shardings():
  state = LAYOUT.init(lambda: {'a': box('embed', 'hidden'), 'b': box('hidden', 'embed')})
  plain = LAYOUT.jit(lambda state: spmd.unbox(jax.tree.map(lambda w: w * 2, state)))(state)
  assert (spec(plain['a']), spec(plain['b'])) == (P(None, 'model'), P('model'))


@pytest.mark.parametrize('boxed', [True, False])
def test_a_train_state_comes_back_as_it_went_in(boxed):
  layout = LAYOUT.replace(rules=(*RULES, spmd.fsdp('data', min_size=1)))
  tx = optax.adamw(1e-3)
  plan = layout.plan(
    lambda: TrainState.create(
      apply_fn=None, params={'w': box('embed', 'hidden'), 'b': jnp.ones(16)}, tx=tx
    ),
    boxed=boxed,
  )
  state = plan.init()

  @layout.jit
  def step(state, x):
    loss, grads = jax.value_and_grad(lambda p: ((x @ spmd.unbox(p)['w'] + p['b'][None]) ** 2).mean())(
      state.params
    )
    return state.apply_gradients(grads=grads), {'loss': loss}

  x = layout.shard(np.ones((8, 16), np.float32), ('batch', None))
  after, _ = step(state, x)
  for planned, old, new in zip(*map(jax.tree.leaves, (plan.abstract(), state, after)), strict=True):
    assert planned.sharding == old.sharding == new.sharding
  assert step(after, x)[0].step == 2
  assert len(step.functions) == 1


@pytest.mark.parametrize('boxed', [True, False])
def test_a_path_rule_owns_a_boxed_array_inside_the_step_too(boxed):
  layout = LAYOUT.replace(rules=(('w$', P('model', None)), ('hidden', 'model'), ('embed', None)))
  state = layout.init(lambda: {'w': box('embed', 'hidden', shape=(1024, 1024))}, boxed=boxed)
  step = layout.jit(lambda state: jnp.tanh(spmd.unbox(state)['w']).sum())
  text = step.lower(state).compile().as_text()
  assert 'all-reduce(' in text
  assert not any(f' {kind}(' in text for kind in ('all-to-all', 'all-gather', 'collective-permute'))


def test_a_path_rule_owns_a_stack_of_layers_inside_a_scan_too():
  class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
      init = spmd.with_logical_partitioning(nn.initializers.ones, ('embed', 'hidden'))
      return jnp.tanh(x @ self.param('w', init, (64, 64))), None

  class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
      scan = nn.scan(
        Layer,
        {'params': 0},
        split_rngs={'params': True},
        length=3,
        metadata_params={nn.PARTITION_NAME: 'layers'},
      )
      return scan(name='layers')(x, None)[0]

  x = jnp.ones((8, 64))

  def collectives(rules):
    layout = LAYOUT.replace(rules=rules)
    state = layout.init(Stack().init, jax.random.key(0), x)
    text = layout.jit(Stack().apply).lower(state, layout.shard(x, P())).compile().as_text()
    kinds = ('all-to-all', 'all-gather', 'collective-permute', 'all-reduce')
    return {kind: text.count(f' {kind}(') for kind in kinds}

  by_name = collectives((('hidden', 'model'),))
  assert collectives((('w$', P(None, None, 'model')), ('embed', 'model'))) == by_name
  assert collectives((('embed', 'model'),)) != by_name


def test_an_array_that_a_path_rule_owns_is_gathered_from_fsdp_where_it_is_used():
  """`fsdp` shards what is stored; where it is used, the box is opened as its rule says."""
  inner = spmd.Rules(('hidden', 'model'), spmd.fsdp('data', min_size=1))
  layout = LAYOUT.replace(rules=(('w$', inner),))
  state = layout.init(lambda: {'w': box('embed', 'hidden', shape=(1024, 1024))})
  assert state['w'].value.sharding.spec == P('data', 'model')
  x = layout.shard(np.ones((8, 1024), np.float32), P('data'))
  text = layout.jit(lambda state, x: x @ state['w'].unbox()).lower(state, x).compile().as_text()
  assert 'all-gather(' in text


def test_a_constant_result_does_not_put_the_program_on_one_device():
  layer = lambda x: nn.with_logical_constraint(x * 2, ('batch', 'hidden'))
  result = LAYOUT.jit(lambda x: {'loss_scale': 1.0, 'y': layer(x)})(np.ones((8, 8), np.float32))
  assert result['y'].sharding == NamedSharding(LAYOUT.mesh, P('data', 'model'))
