"""Strict layouts: each surprise is an error before anything runs, and a clean training run meets none."""

import flax.linen as nn
import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import errors
from tests.texts import text_of

RULES = (('batch', 'data'), ('hidden', 'model'))
STRICT = spmd.Layout({'data': 2, 'model': 4}, RULES, strict=True)
LENIENT = STRICT.replace(strict=False)
BATCH = np.ones((512, 1024), np.float32)

compiled = []


@jax.monitoring.register_event_duration_secs_listener
def count(event, duration, **details):
  compiled.extend([event] if event.endswith('backend_compile_duration') else [])


def batch():
  return STRICT.shard(BATCH, ('batch', None))


# -- a large replicated result


def outer(x):
  return {'loss': x.sum(), 'outer': x.sum(0)[:, None] * jnp.ones((1, 1024))}


def test_a_large_replicated_result_is_an_error():
  assert text_of(errors.LayoutError, STRICT.jit(outer), batch()) == (
    "result outer: float32[1024,1024] (4 MiB) is replicated on all devices, by the compiler's choice.\n"
    'Fix: constrain it where it is computed, or give its sharding in out_rules; PartitionSpec() replicates it.'
  )


def test_a_large_replicated_result_that_was_asked_for_is_none():
  replicated = LENIENT.replicate(np.ones((1024, 1024), np.float32))
  constrained = STRICT.jit(lambda x: spmd.constrain(outer(x)['outer'], P()))
  asked = [
    STRICT.jit(outer, out_rules=P())(batch())['outer'],
    constrained(batch()),
    STRICT.jit(lambda w, x: w + x.sum())(replicated, batch()),
    STRICT.jit(lambda x: spmd.LogicallyPartitioned(outer(x)['outer'], (None, None)))(batch()).value,
  ]
  assert all(one.sharding.is_fully_replicated for one in asked)


# -- drift


def test_a_result_whose_names_move_an_argument_is_an_error():
  names = ('embed', 'hidden')
  moved = LENIENT.shard(np.ones((8, 16), np.float32), P('data'))
  state = {'w': spmd.LogicallyPartitioned(moved, names), 'x': batch()}
  step = STRICT.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state))
  assert text_of(errors.LayoutError, step, state) == (
    "result w: float32[8,16] (512 B) comes out as P(None, 'model'), by its names, but argument 0/w came in as "
    "P('data',).\n"
    'Fix: move the argument there before the call, with layout.shard, or give the sharding of the result in '
    'out_rules.'
  )
  assert step(STRICT.shard(state, {'w': None, 'x': P('data')}))['w'].value.sharding.spec == P(
    None, 'model'
  )


def test_a_result_unlike_all_of_several_arguments_is_an_error():
  a, b = (LENIENT.shard(np.ones((8, 8), np.float32), P(*spec)) for spec in (('data',), (None, 'data')))
  fn = STRICT.jit(lambda a, b: spmd.constrain((a @ b) * 2, P('model')).T)
  assert text_of(errors.LayoutError, fn, a, b) == (
    "result: float32[8,8] (256 B) comes out as P(None, 'model'), by the compiler's choice, but argument 0 came in as "
    "P('data',), argument 1 came in as P(None, 'data').\n"
    'Fix: move the argument there before the call, with layout.shard, or give the sharding of the result in '
    'out_rules.'
  )


def test_a_constraint_at_the_end_of_a_function_is_no_drift():
  a, b = (LENIENT.shard(np.ones((8, 8), np.float32), P(*spec)) for spec in (('data',), (None, 'data')))
  fn = STRICT.jit(lambda a, b: spmd.constrain(a @ b, P('model')))
  assert fn(a, b).sharding.spec == P('model')
  mesh = spmd.make_mesh({'data': 2, 'model': 4}, axis_types=AxisType.Explicit)
  explicit = STRICT.replace(mesh=mesh)
  moved = explicit.jit(lambda x: jax.sharding.reshard(x, P('model', None)))
  assert moved(explicit.shard(np.ones((8, 8), np.float32), P('data'))).sharding.spec == P('model', None)


# -- nothing on the mesh


@pytest.mark.parametrize(
  ('types', 'fn', 'effect'),
  [
    (AxisType.Auto, lambda x: 2 * x, 'every device computes the same'),
    (AxisType.Auto, lambda x: 2, 'it runs on one device'),
    (AxisType.Explicit, lambda x: 2 * x, 'every device computes the same'),
  ],
)
def test_a_program_without_anything_on_the_mesh_is_an_error(types, fn, effect):
  layout = STRICT.replace(mesh=spmd.make_mesh({'data': 2, 'model': 4}, axis_types=types))
  assert text_of(errors.LayoutError, layout.jit(fn), np.ones(8, np.float32)) == (
    f"<lambda>: no argument, result or constraint is on the mesh {{'data': 2, 'model': 4}}, so {effect}.\n"
    'Fix: pass arguments from layout.shard or layout.init, or give in_rules; or use jax.jit.'
  )


def test_an_argument_a_result_a_constraint_or_a_closed_over_array_puts_a_program_on_the_mesh():
  x, on_mesh = np.ones((8, 16), np.float32), LENIENT.shard(np.ones((8, 16), np.float32), P('data'))
  STRICT.jit(lambda x: x + 1)(on_mesh)
  STRICT.jit(lambda x: x + 1, in_rules=P('data'))(x)
  STRICT.jit(lambda x: x + 1, out_rules=P())(x)
  STRICT.jit(jax.jit(lambda x: spmd.with_logical_constraint(x, ('batch', None)).sum()))(x)
  STRICT.jit(lambda x: (x + on_mesh).sum())(x)
  spmd.Layout({'data': 1}, strict=True).jit(lambda x: x + 1)(x)


# -- Flax's rules

OTHER = (('batch', 'model'),)


def test_rules_of_flax_around_a_call_are_an_error():
  def total(x):
    return x.sum()

  step, x = STRICT.jit(total), batch()
  for _ in range(4):  # the last ones are dispatched by JAX
    step(x)
  with nn.logical_axis_rules(OTHER):
    for call in (step, step.lower, lambda x: STRICT.init(total, x)):
      assert text_of(errors.LayoutError, call, x) == (
        "total is called in a block of Flax's logical_axis_rules (or after its set_logical_axis_rules), whose rules "
        "do not apply to a function of a strict layout: (('batch', 'model'),).\n"
        'Fix: call it outside of the block, or pass these rules to the layout.'
      )
    with STRICT:
      step(x)
  with nn.logical_axis_rules(RULES):
    step(x)
  step(x)


def test_rules_of_flax_around_a_constraint_are_an_error():
  def constrained(x):
    with nn.logical_axis_rules(OTHER):
      return spmd.with_logical_constraint(x, ('batch', None))

  text = (
    "A constraint of a strict layout is in a block of Flax's logical_axis_rules (or after its set_logical_axis_rules), "
    "whose rules replace those of the layout: (('batch', 'model'),).\n"
    'Fix: remove the block, or pass its rules to the layout or to the constraint (rules=).'
  )
  assert text_of(errors.LayoutError, STRICT.jit(constrained), batch()) == text
  with STRICT:
    assert text_of(errors.LayoutError, jax.jit(constrained), batch()) == text
  assert LENIENT.jit(constrained)(batch()).sharding.spec == P('model')


# -- a large array without names


def test_a_large_array_without_names_or_rule_is_an_error_in_a_state():
  def create():
    named = spmd.LogicallyPartitioned(jnp.ones((512, 1024)), ('embed', 'hidden'))
    return {'w': named, 'table': jnp.ones((512, 1024)), 'cache': [jnp.ones((1024, 1024)), jnp.ones(3)]}

  text = (
    'cache/0: float32[1024,1024] (4 MiB) has no names, and no rule applies to it, so all 8 devices would hold a copy.\n'
    'table: float32[512,1024] (2 MiB) has no names, and no rule applies to it, so all 8 devices would hold a copy.\n'
    "Fix: name its dimensions, or add a rule for its path; ('PATH', PartitionSpec()) replicates it."
  )
  for call in (STRICT.plan, STRICT.init, STRICT.abstract):
    assert text_of(errors.LayoutError, call, create) == text
  host = jax.tree.map(np.asarray, create())
  assert text_of(errors.LayoutError, STRICT.shard, host) == text
  placed = {'w': None, 'table': ('batch', None), 'cache': P()}
  assert STRICT.shard(host, placed)['table'].sharding.spec == P('data', None)
  ruled = STRICT.replace(rules=(*RULES, ('table', P('data')), ('cache', P())))
  assert ruled.init(create)['table'].sharding.spec == P('data', None)
  small = STRICT.replace(rules=(*RULES, spmd.fsdp('data', min_size=2**23)))
  small.init(create)


# -- no surprise


class Model(nn.Module):
  @nn.compact
  def __call__(self, x):
    init = spmd.with_logical_partitioning(nn.initializers.lecun_normal(), ('embed', 'hidden'))
    y = nn.Dense(1024, kernel_init=init)(nn.BatchNorm(use_running_average=True)(x))
    return nn.Dense(64)(spmd.with_logical_constraint(nn.relu(y), ('batch', 'hidden')))


class State(TrainState):
  batch_stats: dict


def create(key, x):
  variables = Model().init(key, x)
  return State.create(apply_fn=Model().apply, tx=optax.adamw(1e-3), **variables)


def train_step(state, x):
  def loss_of(params):
    logits = state.apply_fn({'params': params, 'batch_stats': state.batch_stats}, x)
    return jnp.mean(logits**2), logits

  (loss, logits), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
  return state.apply_gradients(grads=grads), {'loss': loss, 'logits': logits}


def train(layout, boxed):
  """The losses of a training run, and how often it compiled."""
  state = layout.init(create, jax.random.key(0), jnp.ones((1, 1024)), boxed=boxed)
  step, x = layout.jit(train_step, donate_argnums=0), layout.shard(BATCH, ('batch', None))
  jax.block_until_ready((state, x))
  compiled.clear()
  losses = []
  for _ in range(12):
    state, metrics = step(state, x)
    losses.append(metrics['loss'])
  count = len(compiled)
  return list(map(float, losses)), count


@pytest.mark.slow
@pytest.mark.parametrize('boxed', [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_clean_training_run_compiles_once_and_raises_nothing(boxed):
  assert train(STRICT, boxed) == train(LENIENT, boxed)
  assert train(STRICT, boxed)[1] == 1


def test_an_error_comes_again_and_before_arguments_are_donated():
  step = STRICT.jit(lambda w, x: (w + 1, outer(x)), donate_argnums=0)
  w, x = LENIENT.shard(np.ones(8, np.float32), P('data')), batch()
  step.explain(w, x)
  assert text_of(errors.LayoutError, step, w, x) == text_of(errors.LayoutError, step, w, x)
  assert not w.is_deleted()


def test_arguments_with_other_shardings_are_checked_before_a_call_that_jax_dispatches():
  step = STRICT.jit(lambda w, x: (w + 1, x.T @ x), donate_argnums=0)
  w = LENIENT.shard(np.ones(8, np.float32), P('data'))
  columns = LENIENT.shard(BATCH, P(None, 'model'))
  for _ in range(12):
    w, product = step(w, columns)
    assert not product.sharding.is_fully_replicated
  rows = LENIENT.shard(BATCH, P('data'))
  assert text_of(errors.LayoutError, step, w, rows).startswith(
    'result 1: float32[1024,1024] (4 MiB) is replicated'
  )
  assert not w.is_deleted()
  step(w, columns)


def test_functions_inside_another_jit_are_not_checked():
  inner = STRICT.jit(lambda x: outer(x)['outer'])
  assert jax.jit(lambda x: inner(x).sum())(batch()) > 0
  assert jax.grad(lambda x: inner(x).sum())(batch()).shape == BATCH.shape


def test_a_call_that_was_explained_before_is_checked():
  step = STRICT.jit(lambda x: x.T @ x)
  rows, columns = (LENIENT.shard(BATCH, spec) for spec in (P('data'), P(None, 'model')))
  step.explain(rows)
  for _ in range(12):
    step(columns)
  assert 'is replicated on all devices' in text_of(errors.LayoutError, step, rows)


# -- a value


def test_strictness_is_part_of_a_layout():
  assert STRICT.strict and not LENIENT.strict
  assert STRICT != LENIENT and spmd.Layout({'data': 2, 'model': 4}, RULES, strict=True) == STRICT
  assert len({STRICT, LENIENT, STRICT.replace(conflict='error')}) == 3
  assert STRICT.replace(rules=(('batch', 'model'),)).strict
  assert repr(STRICT) == repr(LENIENT)[:-1] + ', strict=True)'


def test_strictness_round_trips_through_toml():
  text = STRICT.to_toml()
  assert text.startswith('format = 1\nstrict = true\n\n[mesh]\n')
  assert 'strict' not in LENIENT.to_toml()
  assert spmd.Layout.from_toml(text) == STRICT
  assert spmd.Layout.from_toml(LENIENT.to_toml()) == LENIENT
  with pytest.raises(errors.RulesError) as caught:
    spmd.Layout.from_toml(text.replace('true', '"yes"'))
  assert str(caught.value) == (
    "The layout file has 'yes' for strict.\nFix: write strict = true, or remove it."
  )
