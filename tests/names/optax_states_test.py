"""Every optimizer of Optax under path rules, names and fsdp: its state is sharded wherever its parameters are."""

import inspect
import warnings

import flax.struct
import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from flax.training.train_state import TrainState
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import errors

MESH = spmd.abstract_mesh({'data': 2, 'model': 4})


def constructed(make):
  """The optimizer that a function of Optax makes without arguments, or with a learning rate."""
  for options in ({}, {'learning_rate': 1e-2}):
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')
      try:
        made = make(**options)
      except Exception:
        continue
    if isinstance(made, optax.GradientTransformation):
      return made
  return None


def public_functions():
  for module in (optax, optax.contrib):
    for name, value in vars(module).items():
      if not name.startswith('_') and inspect.isfunction(value):
        yield f'{module.__name__}.{name}', value


def by_rank(params, many, one):
  return jax.tree.map(lambda x: many if x.ndim > 1 else one, params)


ADAM = optax.adam(1e-2)
OPTIMIZERS = {name: made for name, make in public_functions() if (made := constructed(make)) is not None}
OPTIMIZERS |= {
  'small adafactor': optax.adafactor(1e-2, min_dim_size_to_factor=4),
  'short lbfgs': optax.lbfgs(memory_size=3),
  'chain': optax.chain(
    optax.clip_by_global_norm(1.0), optax.scale_by_sm3(), optax.scale_by_factored_rms()
  ),
  'masked': optax.masked(ADAM, lambda params: by_rank(params, True, False)),
  'partition': optax.partition(
    {'a': ADAM, 'b': optax.sm3(1e-2)}, lambda params: by_rank(params, 'b', 'a')
  ),
  'ema': optax.ema(0.9),
  'trace': optax.trace(0.9),
  'apply_if_finite': optax.apply_if_finite(optax.adafactor(1e-2, min_dim_size_to_factor=4), 3),
  'MultiSteps': optax.MultiSteps(optax.sm3(1e-2), 2),
  'inject_hyperparams': optax.inject_hyperparams(optax.adamw)(1e-2),
  'schedule_free': optax.contrib.schedule_free(optax.sgd(1e-2), 1e-2),
  'mechanize': optax.contrib.mechanize(optax.sm3(1e-2)),
  'sam': optax.contrib.sam(optax.sgd(1e-2), optax.sgd(1e-2)),
  'flatten': optax.flatten(ADAM),
}
if galore := getattr(optax.contrib, 'galore', None):  # not in Optax 0.2.6
  OPTIMIZERS |= {f'galore of rank {rank}': galore(1e-2, rank=rank) for rank in (3, 4)}
  OPTIMIZERS['galore over sm3'] = galore(1e-2, rank=4, base_optimizer=optax.scale_by_sm3())

SHAPES = {
  'w': (16, 32),
  'b': (32,),
  'layers': {'attn': {'kernel': (8, 16, 32)}, 'q': {'kernel': (16, 16)}, 'scale': ()},
  'one': {'kernel': (1, 32)},
  'conv': {'kernel': (4, 8, 16, 16)},
}
NAMES = ('height', 'layers', 'embed', 'hidden')


def is_shape(x):
  return isinstance(x, tuple)


def parameters(is_boxed):
  """Abstract parameters, the ones chosen by `is_boxed` in boxes that name their last dimensions."""

  def parameter(path, shape):
    array = jax.ShapeDtypeStruct(shape, jnp.float32)
    boxed = is_boxed(jax.tree_util.keystr(path)) and shape
    names = [
      name if size > 1 else None for name, size in zip(NAMES[4 - len(shape) :], shape, strict=True)
    ]
    return spmd.LogicallyPartitioned(array, names) if boxed else array

  return jax.tree_util.tree_map_with_path(parameter, SHAPES, is_leaf=is_shape)


PARAMETERS = {
  'bare': parameters(lambda path: False),
  'boxed': parameters(lambda path: True),
  'some boxed': parameters(lambda path: 'attn' in path or "'w'" in path),
}


def matrices(leaf):
  return P('data') if leaf.path.endswith('w') and len(leaf.shape) == 2 else None


def declines(leaf):
  return None


TABLES = {
  'one path': (('w$', P('data', 'model')),),
  'paths': (('w$', P('data', 'model')), ('b$', P('model')), ('kernel$', P(None, 'model'))),
  'anchored': (('^params/w$', P('data', 'model')), ('kernel$', P(None, 'model'))),
  'found in fields too': (('w', P('model', 'data')),),
  'whole specs': (
    ('attn/kernel$', P('data', None, 'model')),
    ('q/kernel$', P('data', 'model')),
    ('conv', P(None, 'data', 'model', None)),
    ('w$', P(('data', 'model'))),
  ),
  'tables': (
    ('^opt_state/', spmd.Rules(('w$', P('data', 'model')), ('attn/kernel$', P('data', None, 'model')))),
    ('w$', P('model')),
  ),
  'names': (('embed', 'data'), ('hidden', 'model')),
  'paths before names': (
    ('attn/kernel$', P('data', 'model')),
    ('w$', P('data', 'model')),
    ('embed', 'data'),
    ('hidden', 'model'),
  ),
  'paths after names': (
    ('embed', 'data'),
    ('w$', P('data', 'model')),
    ('attn/kernel$', P('data', 'model')),
  ),
  'fsdp': (spmd.fsdp('data', min_size=1),),
  'fsdp after paths': (('w$', P(P.UNCONSTRAINED, 'model')), spmd.fsdp('data', min_size=1)),
  'a function': (matrices, ('b$', P('model'))),
  'a function that declines': (declines, ('w$', P('data', 'model')), ('kernel$', P(None, 'model'))),
}


def state_of(optimizer, params):
  return jax.eval_shape(lambda p: TrainState.create(apply_fn=None, params=p, tx=optimizer), params)


def assert_sharded(layout, state):
  """Plans the state, and checks that every sharding fits its array."""
  shardings = jax.tree.leaves(layout.sharding(state))
  rows = layout.rows(state)
  for row in rows:
    jax.sharding.NamedSharding(layout.mesh, row.spec).shard_shape(row.shape)
  assert shardings and len(rows) == len(jax.tree.leaves(state))


@pytest.mark.parametrize('optimizer', OPTIMIZERS)
def test_the_state_of_every_optimizer_is_sharded_where_its_parameters_are(optimizer):
  for params in PARAMETERS.values():
    try:
      state = state_of(OPTIMIZERS[optimizer], params)
    except Exception:
      continue  # Optax does not accept boxes, or arrays of these ranks, here
    for table in TABLES.values():
      assert_sharded(spmd.Layout(MESH, table), state)


def test_most_optimizers_are_tested():
  assert len(OPTIMIZERS) > 90
  tested = [name for name, tx in OPTIMIZERS.items() if state_is_made(tx)]
  assert len(tested) > 90


def state_is_made(optimizer):
  try:
    return state_of(optimizer, PARAMETERS['bare']) is not None
  except Exception:
    return False


PATTERNS = st.sampled_from(
  [
    'w',
    'w$',
    'b$',
    'kernel',
    'kernel$',
    'attn',
    '^params/',
    'layers/',
    '.*',
    'mu',
    'params/(w|b)$',
    'q|w',
  ]
)
ENTRIES = st.sampled_from([None, 'data', 'model', ('data', 'model'), P.UNCONSTRAINED])
CLAUSES = (
  st.tuples(PATTERNS, st.lists(ENTRIES, max_size=4, unique=True).map(lambda entries: P(*entries)))
  | st.tuples(st.sampled_from(NAMES), st.sampled_from([None, 'data', 'model', P.UNCONSTRAINED]))
  | st.builds(spmd.fsdp, st.sampled_from(['data', 'model']), min_size=st.just(1))
  | st.sampled_from([matrices, declines])
)
STATES = {
  (optimizer, params): state_of(OPTIMIZERS[optimizer], PARAMETERS[params])
  for optimizer in (
    'optax.sm3',
    'small adafactor',
    'galore of rank 3',
    'short lbfgs',
    'MultiSteps',
    'partition',
  )
  if optimizer in OPTIMIZERS
  for params in PARAMETERS
}


@given(st.lists(CLAUSES, max_size=5), st.sampled_from(sorted(STATES)))
def test_no_table_fails_for_optimizer_state_alone(clauses, case):
  rules = spmd.Rules(*clauses)
  if any('mu' in clause[0] for clause in clauses if isinstance(clause, tuple)):
    return  # a rule for the state itself
  layout, state = spmd.Layout(MESH, rules), STATES[case]
  try:
    layout.sharding({'params': state.params})
  except errors.FlaxSpmdError:
    return
  assert_sharded(layout, state)


def test_a_rule_for_the_state_itself_that_does_not_fit_is_an_error():
  state = STATES['optax.sm3', 'boxed']
  with pytest.raises(errors.LayoutError, match=r"opt_state/0/mu/w: rule 0 \('mu/w\$'"):
    spmd.Layout(MESH, (('mu/w$', P('data', 'model')),)).sharding(state)


def test_the_vectors_of_sm3_have_their_entries_of_the_parameters_spec():
  layout = spmd.Layout(MESH, (('w$', P('data', 'model')),))
  for case in ('boxed', 'bare'):
    mu = layout.spec(STATES['optax.sm3', case]).opt_state[0].mu['w']
    if case == 'boxed':
      assert mu.value == [P('data'), P('model')]
  unanchored = spmd.Layout(MESH, (('w', P('data', 'model')),))
  assert unanchored.spec(STATES['optax.sm3', 'bare']).opt_state[0].mu['w'] == [P('data'), P('model')]


def test_state_that_a_rule_for_parameters_does_not_fit_is_replicated_and_reported():
  layout = spmd.Layout(MESH, (('w', P('data', 'model')),))
  state = STATES['small adafactor', 'bare']
  assert layout.spec(state).opt_state[0].v_row['layers']['q']['kernel'] == P()
  assert (
    'opt_state/0/v_row/layers/q/kernel: shape (16,) does not follow from the shape of any parameter in this '
    'tree; it is replicated.'
  ) in [finding.text for finding in layout.check(state).of('not inferred')]


class Agent(flax.struct.PyTreeNode):
  actor: TrainState
  critic: TrainState


def model(keys, stack):
  params = {'Dense_0': {'kernel': jax.ShapeDtypeStruct((*stack, 8, 16), jnp.float32)}}
  for key in reversed(keys):
    params = {key: params}
  return params


SMALL = ['optax.adam', 'small adafactor', 'optax.sm3', 'short lbfgs', 'masked', 'MultiSteps']
TWO_MODELS = st.tuples(
  *[
    st.builds(
      model,
      st.lists(st.sampled_from(['MLP_0', 'layers', 'params']), max_size=2),
      st.sampled_from([(), (2,), (3, 2)]),
    )
  ]
  * 2
)
TWO_OPTIMIZERS = st.tuples(*[st.sampled_from(SMALL)] * 2)
ONE_RULE = st.sampled_from(
  [('kernel$', P(..., 'model')), ('kernel$', P('data')), spmd.fsdp('model', min_size=1)]
).map(lambda rule: spmd.Layout(MESH, (rule,), indivisible='replicate'))


@given(
  st.sampled_from([lambda a, b: (a, b), lambda a, b: {'actor': a, 'critic': b}, Agent]),
  TWO_MODELS,
  TWO_OPTIMIZERS,
  ONE_RULE,
)
def test_each_of_two_models_in_a_state_is_sharded_as_it_is_alone(pair, models, optimizers, layout):
  """Even where the paths of one end with those of the other, as those of a critic under `nn.vmap` do."""
  states = [state_of(OPTIMIZERS[name], params) for name, params in zip(optimizers, models, strict=True)]
  together = jax.tree.leaves(layout.spec(pair(*states)))
  assert together == [spec for state in states for spec in jax.tree.leaves(layout.spec(state))]


@given(
  st.sampled_from([tuple, lambda both: dict(zip(['actor', 'critic'], both, strict=True))]),
  st.sampled_from(
    [('opt_states', 'params', 'slow'), ('a', 'b', 'c'), ('optimizers', 'models', 'averages')]
  ),
  TWO_MODELS,
  TWO_OPTIMIZERS,
  ONE_RULE,
)
def test_each_of_two_models_with_an_optimizer_is_sharded_as_it_is_alone(
  pair, roots, models, optimizers, layout
):
  """In dictionaries of models and of optimizers, beside the average of one model."""
  pairs = zip(optimizers, models, strict=True)
  states = [jax.eval_shape(OPTIMIZERS[name].init, params) for name, params in pairs]
  trees = dict(zip(roots, [pair(states), pair(models), models[1]], strict=True))
  alone = [
    layout.spec(dict(zip(roots[:2], each, strict=True))) for each in zip(states, models, strict=True)
  ]
  specs = layout.spec(trees)
  for root in roots[:2]:
    assert jax.tree.leaves(specs[root]) == jax.tree.leaves([each[root] for each in alone])
