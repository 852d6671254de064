"""`layout.jit` with placements of arguments and results, and with annotations inside the function."""

import functools
import warnings
from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import errors

FSDP = spmd.fsdp('data', min_size=1)
layout = spmd.Layout({'data': 2, 'model': 4}, (('batch', 'data'), ('embed', 'model')))


def spec(x):
  return x.sharding.spec


def test_placements_of_every_kind():
  sharding = NamedSharding(layout.mesh, P(None, 'model'))
  kinds = [FSDP, ('batch', 'embed'), P('model'), sharding, None, lambda leaf: P(None, 'data')]

  @functools.partial(layout.jit, in_rules=(kinds,), out_rules=kinds)
  def double(xs):
    return [2 * x for x in xs]

  out = double([np.ones((8, 16))] * 6)
  assert list(map(spec, out[:4])) == [
    P(None, 'data'),
    P('data', 'model'),
    P(
      'model',
    ),
    P(None, 'model'),
  ]
  assert spec(out[5]) == P(None, 'data')
  np.testing.assert_array_equal(out[0], 2 * np.ones((8, 16)))


def test_a_train_state_with_an_integer_step_and_empty_states():
  """Where Scalax's README stops: a nested None, `step`, `EmptyState`."""
  params = {'w': jnp.ones((8, 16)), 'b': jnp.ones(16)}
  state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
  rules = spmd.Rules(FSDP)

  @functools.partial(layout.jit, in_rules=(rules, {'x': P('data'), 'y': None}), out_rules=(rules, None))
  def step(state, batch):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((batch['x'] @ p['w'] + p['b'][None]) ** 2))(
      state.params
    )
    return state.apply_gradients(grads=grads), {'loss': loss, 'y': batch['y']}

  batch = {'x': np.ones((4, 8), np.float32), 'y': 3}
  state, metrics = step(state, batch)
  assert spec(state.params['w']) == spec(state.opt_state[0].mu['w']) == P(None, 'data')
  state, metrics = step(state, batch)
  assert int(state.step) == 2 and int(metrics['y']) == 3


def test_another_shape_gets_its_own_layout():
  """Scalax keys on static arguments only, and keeps the first spec."""
  same = layout.jit(lambda xs: jax.tree.map(lambda x: x + 1, xs), in_rules=FSDP, out_rules=FSDP)
  assert spec(same(np.ones((16, 8)))) == P('data', None)
  assert spec(same(np.ones((8, 16)))) == P(None, 'data')
  assert spec(same(np.ones((8, 6)))) == P('data', None)
  assert spec(same(np.ones((6, 8)))) == P(None, 'data')
  assert [spec(x) for x in same({'a': np.ones((16, 8)), 'b': np.ones(4)}).values()] == [
    P('data', None),
    P('data'),
  ]
  assert spec(same(np.ones((16, 8)))) == P('data', None)


@pytest.mark.parametrize(
  'static',
  [{'static_argnums': (2, 0)}, {'static_argnums': (-1, -3)}, {'static_argnames': ('times', 'plus')}],
)
def test_static_arguments_in_every_form(static):
  def fn(times, x, plus=1):
    assert isinstance(times, int) and isinstance(plus, int)
    return times * x + plus

  jitted = layout.jit(fn, in_rules=(FSDP,), out_rules=FSDP, in_constraints=(FSDP,), **static)
  for out in (
    jitted(3, np.ones((4, 8)), 2),
    jitted(3, x=np.ones((4, 8)), plus=2),
    jitted(times=3, x=np.ones((4, 8)), plus=2),
  ):
    assert float(out[0, 0]) == 5 and spec(out) == P(None, 'data')
  assert float(jitted(2, np.ones((4, 8)), 2)[0, 0]) == 4


def test_keyword_arguments_defaults_and_keyword_only():
  @functools.partial(layout.jit, in_rules={'x': FSDP, 'bias': P('model')}, out_rules=(FSDP, None))
  def fn(x, scale=2.0, *, bias):
    return x * scale, bias

  for call in (
    lambda: fn(np.ones((8, 4)), bias=np.ones(4)),
    lambda: fn(bias=np.ones(4), x=np.ones((8, 4))),
    lambda: fn(np.ones((8, 4)), 2.0, bias=np.ones(4)),
  ):
    out, bias = call()
    assert spec(out) == P('data', None) and spec(bias) == P('model') and float(out[0, 0]) == 2


def test_donation_lowering_and_methods():
  class Trainer:
    @functools.partial(
      layout.jit, static_argnums=0, in_rules=(FSDP, None), out_rules=FSDP, donate_argnums=1
    )
    def step(self, w, x):
      return w + x.sum()

  trainer, w = Trainer(), layout.shard(jnp.ones((8, 16)), FSDP)
  out = trainer.step(w, np.ones(3))
  assert w.is_deleted() and spec(out) == P(None, 'data')
  abstract = jax.ShapeDtypeStruct((8, 16), jnp.float32)
  add = layout.jit(lambda w: w + 1, in_rules=FSDP, out_rules=FSDP)
  assert 'sharding' in add.lower(abstract).as_text()
  assert add.trace(abstract).out_info.shape == add.eval_shape(w=abstract).shape == (8, 16)


def test_an_argument_with_another_sharding():
  fn = layout.jit(lambda w, x: w + x, in_rules=(FSDP, None))
  placed = layout.shard(np.ones((8, 16), np.float32), P('model'))
  expected = dedent("""\
    argument w is sharded as P('model',) on {'data': 2, 'model': 4}, but in_rules require P(None, 'data') on {'data': 2, 'model': 4}.
    Fix: reshard it with layout.shard before the call, or pass the rules as in_constraints, which accept any sharding.""")
  for _ in range(2):  # the first call plans; the second reuses the plan
    with pytest.raises(errors.LayoutError) as caught:
      fn(placed, 1.0)
    assert str(caught.value).replace("P('model', None)", "P('model',)") == expected
    fn(np.ones((8, 16), np.float32), 1.0)
  moved = layout.jit(lambda w, x: w + x, in_constraints=(FSDP, None))(placed, 1.0)
  assert spec(moved) == P(None, 'data')


def test_an_error_in_the_function_is_not_replaced():
  def fn(x):
    raise ValueError('mine')

  jitted = layout.jit(fn, in_rules=FSDP)
  with pytest.raises(ValueError, match='mine'):
    jitted(np.ones(8))


def test_placements_that_do_not_fit_the_arguments():
  fn = layout.jit(lambda x, y: x, in_rules=(None, None, None))
  with pytest.raises(errors.LayoutError) as caught:
    fn(1, 2)
  assert str(caught.value) == dedent("""\
    There are 3 placements for 2 dynamic arguments.
    Fix: pass one placement per argument; None keeps the sharding that an argument has.""")
  with pytest.raises(errors.LayoutError) as caught:
    layout.jit(lambda x, y: x, in_rules={'z': None})(1, 2)
  assert (
    str(caught.value)
    == dedent("""\
    There are placements for 'z', but the dynamic parameters are 'x', 'y'.
    Fix: correct the name; to pass a tree of placements for one argument, put it into a tuple, ({...},).""")
  )


def test_annotations_follow_the_rules_in_force():
  def step(x):
    return x.sum(), spmd.with_sharding_annotation({'a': x, 'b': x.T}, 'weights')

  def specs(table):
    _, weights = layout.replace(rules=table).jit(step)(jnp.ones((4, 16)))
    return [spec(x) for x in weights.values()]

  assert specs((('@weights', P('model')),)) == [
    P(
      'model',
    ),
    P(
      'model',
    ),
  ]
  assert specs((('@weights', spmd.Rules(('^a$', P('model')), FSDP)),)) == [
    P(
      'model',
    ),
    P(
      'data',
    ),
  ]
  layout.jit(step)(jnp.ones((4, 16)))  # without rules for annotations: no warning


def test_unknown_and_unused_annotations_are_reported():
  rules = spmd.Rules(('@weights', P('model')), ('@activations', P('data')))

  def step(x):
    return spmd.with_sharding_annotation(x, 'weigths')

  with pytest.warns(UserWarning) as caught:
    layout.replace(rules=rules).jit(step)(jnp.ones(8))
  texts = [str(warning.message) for warning in caught]
  assert texts == [
    "annotation 'weigths': the table has no rule for it. Did you mean 'weights'? The value is not constrained.",
    'test_unknown_and_unused_annotations_are_reported.<locals>.step: rules for annotations that it does not '
    "make: 0 ('@weights', P('model',)), 1 ('@activations', P('data',)). It makes 'weigths'.",
  ]
  with pytest.raises(errors.UnmatchedNameError) as error:
    layout.replace(rules=rules.replace(unmatched='error')).jit(step)(jnp.ones(8))
  assert str(error.value) == dedent("""\
    annotation 'weigths': the table has no rule for it. Did you mean 'weights'?
    Fix: correct the name, or add a rule ('@weigths', PartitionSpec()).""")
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    layout.replace(rules=rules).jit(lambda x: x)(jnp.ones(8))


def test_constraints_by_every_kind_of_placement():
  sharding = NamedSharding(layout.mesh, P('model'))

  @layout.jit
  def fn(x):
    placements = (FSDP, ('batch', 'embed'), P(None, 'model'), sharding, None)
    return spmd.with_sharding_constraint((x,) * 5, placements)

  out = fn(jnp.ones((8, 16)))
  assert [spec(x) for x in out[:4]] == [
    P(None, 'data'),
    P('data', 'model'),
    P(None, 'model'),
    P(
      'model',
    ),
  ]


def test_a_constraint_that_does_not_fit_names_every_array():
  with pytest.raises(errors.LayoutError) as caught:
    layout.jit(
      lambda x: spmd.with_sharding_constraint(
        {'a': x, 'b': {'c': x}}, spmd.Rules(('.*', P(None, 'data')))
      )
    )(jnp.ones(8))
  assert str(caught.value) == dedent("""\
    constraint, a: rule 0 ('.*', P(None, 'data')) has 2 entries for an array of rank 1, shape (8,).
    constraint, b/c: rule 0 ('.*', P(None, 'data')) has 2 entries for an array of rank 1, shape (8,).
    Fix: give at most one entry per dimension, or add a rule for this path before rule 0.""")


def test_a_constraint_without_a_mesh():
  with pytest.raises(errors.MeshError, match='There is no mesh for the constraint'):
    jax.jit(lambda x: spmd.with_sharding_constraint(x, FSDP))(jnp.ones(8))


def test_an_argument_on_the_same_devices_in_another_order():
  other = spmd.Layout(spmd.make_mesh({'data': 2, 'model': 4}, devices=jax.devices()[::-1]))
  with pytest.raises(errors.LayoutError) as caught:
    layout.jit(lambda x: x, in_rules=P('data'))(other.shard(np.ones(8, np.float32), P('data')))
  first, _ = str(caught.value).splitlines()
  assert first == (
    "argument x is sharded as P('data',) on {'data': 2, 'model': 4} with devices [7, 6, 5, 4, 3, 2, 1, 0], but "
    "in_rules require P('data',) on {'data': 2, 'model': 4} with devices [0, 1, 2, 3, 4, 5, 6, 7]."
  )


def test_mistakes_in_placements_are_errors():
  def text_of(kind, placement, x):
    with pytest.raises(kind) as caught:
      layout.shard(x, placement)
    return str(caught.value)

  assert text_of(errors.MeshAxisError, spmd.fsdp('dta', min_size=1), np.ones((8, 8))) == dedent("""\
    Rule 0 fsdp('dta', min_size=1) uses mesh axis 'dta', but the mesh has axes ('data', 'model'). Did you mean 'data'?
    Fix: correct the axis name, add the axis to the mesh, or give the table missing_axis='drop'.""")
  batch = {'x': np.ones((8, 4)), 'y': np.ones(8), 'n': 3}
  assert text_of(errors.LayoutError, P('data', 'model'), batch) == dedent("""\
    y: P('data', 'model') has 2 entries for an array of rank 1, shape (8,).
    Fix: give at most one entry per dimension.""")
  assert jax.tree.map(spec, layout.shard(batch, P('data'))) == {'x': P('data'), 'y': P('data'), 'n': P()}
  total = layout.jit(lambda b: b['x'].sum() + b['n'], in_constraints=P('data'))
  assert float(total(batch)) == 35
