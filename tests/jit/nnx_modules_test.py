"""NNX modules under a layout: `init`, `plan` and `jit` take and return them, with the semantics of `nnx.jit`."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import checkpoint, explore
from flax_spmd.errors import LayoutError

RULES = (('batch', 'data'), ('mlp', 'model'))  # none for 'embed'
X = np.random.default_rng(0).normal(size=(16, 32)).astype('float32')


@pytest.fixture(scope='module')
def layout():
  return spmd.Layout({'data': 2, 'model': 4}, RULES)


def named(*names):
  return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)


class Model(nnx.Module):
  """With an embedding used twice, batch statistics, dropout, and a variable that nothing changes."""

  def __init__(self, rngs):
    self.up = nnx.Linear(32, 64, kernel_init=named('embed', 'mlp'), rngs=rngs)
    self.down = nnx.Linear(64, 32, kernel_init=named('mlp', 'embed'), rngs=rngs)
    self.norm = nnx.BatchNorm(64, rngs=rngs)
    self.drop = nnx.Dropout(0.1, rngs=rngs)
    self.up_again = self.up.kernel

  def __call__(self, x):
    x = self.drop(self.norm(nnx.relu(self.up(x))))
    return self.down(x) @ self.up_again


def create():
  return Model(nnx.Rngs(0))


def optimizer_of(model):
  return nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def step(model, optimizer, x):
  loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
  optimizer.update(model, grads)
  return loss


def specs(node):
  return {path: variable.sharding.spec for path, variable in nnx.to_flat_state(nnx.state(node))}


def assert_same(one, other):
  for a, b in zip(jax.tree.leaves(nnx.state(one)), jax.tree.leaves(nnx.state(other)), strict=True):
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
      a, b = jax.random.key_data(a), jax.random.key_data(b)
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_init_gives_a_module_that_is_born_sharded(layout):
  model = layout.init(create)
  assert type(model) is Model and model.up_again is model.up.kernel
  assert model.up.kernel.sharding.spec == P(None, 'model') and model.down.kernel.sharding.spec == P(
    'model', None
  )
  with nnx.use_eager_sharding(False):
    assert_same(model, create())
  abstract = layout.abstract(create)
  assert abstract.up_again is abstract.up.kernel and specs(abstract) == specs(model)
  assert isinstance(abstract.up.kernel.get_value(), jax.ShapeDtypeStruct)
  assert not layout.check(model).of('not as planned')


def test_init_takes_modules_and_updates_their_variables(layout):
  rngs = nnx.Rngs(0)
  model = layout.init(Model, rngs)
  fresh = nnx.Rngs(0)
  with nnx.use_eager_sharding(False):
    assert_same(model, Model(fresh))
  assert int(rngs.default.count[...]) == int(fresh.default.count[...]) > 0
  optimizer = layout.init(optimizer_of, model)
  assert optimizer.opt_state[0].mu['up']['kernel'].sharding.spec == P(None, 'model')


def test_steps_equal_those_of_nnx_jit(layout):
  model = layout.init(create)
  optimizer = layout.init(optimizer_of, model)
  with nnx.use_eager_sharding(False):
    reference = create()
    theirs = optimizer_of(reference)
  before, kernel = specs((model, optimizer)), model.up.kernel
  ours, by_nnx = layout.jit(step), nnx.jit(step)
  batch = layout.shard(X, ('batch', None))
  for _ in range(3):
    np.testing.assert_allclose(ours(model, optimizer, batch), by_nnx(reference, theirs, X), rtol=1e-4)
  assert_same(model, reference)
  assert_same(optimizer, theirs)
  assert specs((model, optimizer)) == before
  assert model.up.kernel is kernel is model.up_again


def test_donated_modules_are_updated_whole(layout):
  model = layout.init(create)
  optimizer = layout.init(optimizer_of, model)
  donating = layout.jit(step, donate_argnums=(0, 1))
  old = model.norm.mean[...], model.up.kernel[...]
  for _ in range(2):
    donating(model, optimizer, X)
  assert old[1].is_deleted()
  assert all(not leaf.is_deleted() for leaf in jax.tree.leaves((model, optimizer)))


def test_a_module_may_be_returned_changed_and_created(layout):
  model = layout.init(create)

  @layout.jit
  def same_and_new(model):
    model.drop.deterministic = True
    model.extra = nnx.Param(jnp.ones((4, 64)), out_sharding=(None, 'mlp'))
    return model, nnx.Linear(32, 64, kernel_init=named('embed', 'mlp'), rngs=nnx.Rngs(1))

  same, new = same_and_new(model)
  assert same is model and model.drop.deterministic and model.up_again is model.up.kernel
  assert model.extra.sharding.spec == P(None, 'model') == new.kernel.sharding.spec
  assert layout.jit(lambda model: model)(model) is model


def test_modules_that_change_places_or_contain_themselves(layout):
  model = nnx.Dict(one=nnx.Param(jnp.array(1)), two=nnx.Param(jnp.array(2)))
  one, two = model.one, model.two

  @layout.jit
  def swap(model):
    model.one, model.two = model.two, model.one

  swap(model)
  assert model.one is two and model.two is one and (int(one[...]), int(two[...])) == (1, 2)
  model.itself = model

  @layout.jit
  def add(model):
    model.itself.itself.one[...] += 5

  add(model)
  assert int(two[...]) == 7 and model.itself is model


@pytest.mark.parametrize('donated', [None, 0])
def test_arrays_in_no_variable_are_updated(layout, donated):
  create = lambda: nnx.Dict(
    cache=nnx.data(jnp.zeros(8)), w=nnx.Param(jnp.ones(8)), list=nnx.List([jnp.ones(8)])
  )

  def copy_and_add(model):
    model.w[...] += 1 + model.cache
    model.list[0] = model.w[...]  # now also there

  def add(model):
    model.cache = model.cache + model.w[...]

  def read(model):
    model.w[...] = model.w[...] + model.cache

  ours, theirs = create(), create()
  for fn in (add, copy_and_add, add, read, read):
    layout.jit(fn, donate_argnums=donated)(ours)
    nnx.jit(fn, donate_argnums=donated)(theirs)
    assert_same(nnx.Dict(model=ours), nnx.Dict(model=theirs))
  np.testing.assert_array_equal(ours.cache, theirs.cache)
  np.testing.assert_array_equal(ours.list[0], theirs.list[0])


@pytest.mark.parametrize('names, constrained', [((None, None), True), (('in', 'out'), False)])
def test_the_batch_of_a_step_without_names_is_constrained(names, constrained):
  fsdp = spmd.Layout({'data': 8}, (('batch', 'data'), spmd.fsdp('data', min_size=1)))
  init = {} if constrained else {'kernel_init': named(*names)}
  model = fsdp.init(lambda: nnx.Linear(32, 64, rngs=nnx.Rngs(0), **init))

  def double(model, x):
    model.kernel[...] *= 2
    return model(jnp.sin(x)).sum()

  x = fsdp.shard(X, ('batch', None))
  text = fsdp.jit(double).lower(model, x).as_text()
  without = fsdp.jit(double, constrain_batch=False).lower(model, x).as_text()
  assert (text.count('sharding_constraint') > without.count('sharding_constraint')) == constrained
  before = model.kernel[...]
  np.testing.assert_allclose(
    fsdp.jit(double)(model, x), (jnp.sin(X) @ (2 * before) + model.bias[...][None]).sum(), rtol=1e-4
  )
  np.testing.assert_array_equal(model.kernel[...], 2 * before)


class Chain(nnx.Module):
  def __init__(self, rngs):
    names = [('embed', 'mlp'), ('mlp', 'embed')] * 2
    sizes = {'embed': 32, 'mlp': 64}
    self.layers = nnx.List(
      [nnx.Linear(*map(sizes.get, each), rngs=rngs, kernel_init=named(*each)) for each in names]
    )

  def __call__(self, x):
    for layer in self.layers:
      x = jnp.tanh(layer(x))
    return x


@pytest.mark.parametrize('momentum', [None, 0.9])
def test_parameters_with_names_move_and_activations_do_not(momentum):
  fsdp = spmd.Layout({'data': 8}, (('batch', 'data'), ('embed', 'data')))

  def create():
    model = Chain(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.1, momentum), wrt=nnx.Param)

  def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss

  x = np.random.default_rng(0).normal(size=(4096, 32)).astype(np.float32)
  model, optimizer = fsdp.init(create)
  replicated = spmd.Layout({'data': 8})
  expected = replicated.jit(step)(*replicated.init(create), x)
  held = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
  moved = fsdp.jit(step).explain(model, optimizer, x).collectives
  assert 0 < sum(each.collective.wire for each in moved) < 5 * held < x.nbytes
  apply = lambda model, x: model(x)
  x = fsdp.shard(x, ('batch', None))
  texts = [fsdp.jit(apply, constrain_batch=each).lower(model, x).as_text() for each in (True, False)]
  assert texts[0] == texts[1]  # weights may stay where they are for inference
  np.testing.assert_allclose(fsdp.jit(step)(model, optimizer, x), expected, rtol=1e-5)


def test_methods_and_shared_modules_in_several_arguments(layout):
  class Counter(nnx.Module):
    def __init__(self):
      self.count = nnx.Variable(jnp.array(0))

    @spmd.Layout({'data': 8}).jit
    def add(self, other):
      self.count[...] += 1
      other.count[...] += 10

  counter, other = Counter(), Counter()
  counter.add(other)
  counter.add(counter)
  counter.add(other)
  assert (int(counter.count[...]), int(other.count[...])) == (13, 20)


def test_a_module_moves_to_the_layout_of_the_step(layout):
  model = layout.init(create)
  optimizer = layout.init(optimizer_of, model)
  other = layout.replace(rules=(('embed', 'data'), ('mlp', 'model')))
  other.jit(step)(model, optimizer, X)
  assert model.up.kernel.sharding.spec == P('data', 'model')
  assert optimizer.opt_state[0].mu['up']['kernel'].sharding.spec == P('data', 'model')


def test_rules_for_arguments_and_results_reach_modules(layout):
  model = layout.init(create)
  first = layout.jit(
    lambda model, x: model(x), in_rules=(None, ('batch', None)), out_rules=('batch', None)
  )
  assert first(model, X).sharding.spec == P('data', None)
  assert int(model.drop.rngs.count[...]) > 0  # the update of a function with rules for its result


def test_states_are_functional(layout):
  graph, state = nnx.split(layout.init(create))

  @layout.jit
  def forward(state, x):
    model = nnx.merge(graph, state)
    y = model(x)
    return y, nnx.state(model)

  _, new = forward(state, X)
  assert int(new['drop']['rngs']['count'][...]) > int(state['drop']['rngs']['count'][...])
  assert new['up']['kernel'].sharding.spec == P(None, 'model')


def test_lower_eval_shape_and_explain_change_nothing(layout):
  model = layout.init(create)
  optimizer = layout.init(optimizer_of, model)
  count = int(model.drop.rngs.count[...])
  jitted = layout.jit(step)
  assert jitted.eval_shape(model, optimizer, X).shape == ()
  assert jitted.lower(model, optimizer, X).compile()
  paths = [array.path for array in jitted.explain(model, optimizer, X).arguments]
  assert 'argument 0/up/kernel' in paths
  assert int(model.drop.rngs.count[...]) == count and int(optimizer.step[...]) == 0
  assert not isinstance(model.up.kernel[...], jax.core.Tracer)


def test_a_failed_trace_leaves_the_module(layout):
  model = layout.init(create)
  kernel = model.up.kernel[...]

  @layout.jit
  def broken(model):
    model.up.kernel[...] = jnp.zeros((32, 64))
    raise ValueError('no')

  with pytest.raises(ValueError, match='no'):
    broken(model)
  assert model.up.kernel[...] is kernel


COPIED = """\
{by} copies its arguments, and there are NNX modules or variables among them ({kinds}): changes of their variables would \
be lost.
Fix: pass nnx.state(module), and return the new state."""


@pytest.mark.parametrize(
  'by, options',
  [
    ('in_constraints', {'in_constraints': (P(), P(), None)}),
    ('axis_name', {'axis_name': 'batch', 'in_axes': (None, None, 0)}),
  ],
)
def test_options_that_would_lose_updates_are_refused(layout, by, options):
  model = layout.init(create)
  with pytest.raises(LayoutError) as error:
    layout.jit(step, **options)(model, optimizer_of(model), X)
  assert str(error.value) == COPIED.format(by=by, kinds='Model, Optimizer')


def test_a_pipeline_of_modules_is_refused(layout):
  model = layout.init(create)
  staged = spmd.Layout({'stage': 2, 'data': 4})
  with pytest.raises(LayoutError) as error:
    staged.pipeline_jit(lambda model, x: model(x))(model, X)
  assert str(error.value) == COPIED.format(by='pipeline_jit', kinds='Model')


def test_changes_of_a_module_that_is_no_argument_are_refused_by_flax(layout):
  model = layout.init(create)
  with pytest.raises(flax.errors.TraceContextError):
    layout.jit(lambda x: model(x))(X)


def test_an_array_in_the_place_of_a_number_is_told(layout):
  model = nnx.Dict(numbers=nnx.List([1.0]))

  @layout.jit
  def broken(model):
    model.numbers[0] = jnp.ones(8)

  with pytest.raises(LayoutError) as error:
    broken(model)
  assert str(error.value) == (
    'numbers/0: an array in the place of a number, which is part of the structure of its module.\n'
    'Fix: create it as an array or as an nnx.Variable, so that functions may change it.'
  )
  assert model.numbers[0] == 1.0


def test_a_module_under_two_layouts_is_reported_and_moves(layout):
  model = layout.init(create)
  other = spmd.Layout({'data': 4, 'model': 2}, (*RULES, ('embed', 'data')))
  moved = [
    f"{path}: planned P({after}), stored as P({before}) on {{'data': 2, 'model': 4}}"
    for path, after, before in (
      ('down/kernel', "'model', 'data'", "'model', None"),
      ('up/kernel', "'data', 'model'", "None, 'model'"),
      ('up_again', "'data', 'model'", "None, 'model'"),
    )
  ]
  assert str(other.check(model)) == (
    f'3 arrays not on the planned mesh ({"; ".join(moved)}). '
    'Fix: move them with layout.shard(tree), or plan an abstract tree with this layout.'
  )
  value = layout.jit(lambda model, x: model(x).sum())(nnx.clone(model), X)
  np.testing.assert_allclose(other.jit(lambda model, x: model(x).sum())(model, X), value, rtol=1e-4)
  other.jit(step)(model, other.init(optimizer_of, model), X)
  assert model.up.kernel.sharding.mesh == other.mesh and not other.check(other.shard(model)).of(
    'not as planned'
  )


class Accumulator(nnx.Module):
  """Gradients, and beside them the dtypes that they are cast to, as data."""

  def __init__(self, data):
    self.dtypes = nnx.data(data)
    self.total = nnx.Param(jnp.zeros((8, 8)), out_sharding=('embed', None))


@pytest.mark.parametrize('data', [{'a': jnp.dtype('float32')}, {'a': 2, 'b': 0}])
def test_a_module_whose_data_are_no_arrays_is_returned(data):
  layout = spmd.Layout({'data': 8}, (('embed', 'data'),))
  module = layout.jit(lambda: (Accumulator(data), jnp.ones((8, 8))))()[0]
  assert module.dtypes == data
  assert module.total.sharding.spec == P('data', None)


DTYPE = {'a': jnp.dtype('float32')}


def add_to_total(state, x):
  gradients = state['gradients']
  gradients.total[...] += x.astype(gradients.dtypes['a'])
  return gradients.total.sum()


def test_a_state_keeps_data_that_are_no_arrays():
  """As NNX does, which takes them for a part of the structure; Tunix keeps the dtypes of gradients so."""
  layout = spmd.Layout({'data': 8}, (('embed', 'data'),))
  create = lambda: {'gradients': Accumulator(DTYPE)}
  plan = layout.plan(create)
  state = plan.init()
  assert state['gradients'].dtypes == plan.abstract()['gradients'].dtypes == DTYPE
  assert state['gradients'].total.sharding.spec == P('data', None)
  assert [row.path for row in plan.explain(state).rows] == ['gradients/total']
  assert layout.jit(add_to_total, donate_argnums=0)(state, jnp.ones((8, 8))) == 64
  assert state['gradients'].total.sharding.spec == P('data', None)
  train_step = explore.TrainStep(add_to_total, create, jnp.ones((8, 8)))
  compiled = spmd.compare(train_step, {'': layout}, 'cpu:8')['']
  estimated = explore.Estimator(train_step, platform='cpu').estimate(layout, 'cpu:8')
  assert compiled.memory.parameters == estimated.memory.parameters == 32
  with pytest.raises(LayoutError) as error:
    plan.shard(state)
  assert str(error.value) == (
    "gradients/dtypes/a: dtype('float32') is no array or number of JAX.\n"
    'Fix: keep it out of the tree, or make it static, such as by flax.struct.field(pytree_node=False).'
  )


@pytest.mark.parametrize('number', range(4))
def test_numbers_beside_arrays_are_no_arrays(number, tmp_path):
  """An integer in the data of a module is not the number of an array."""
  layout = spmd.Layout({'data': 8}, (('embed', 'data'),))

  def create():
    lengths = {f'w{length}': nnx.Param(jnp.full(length, float(length))) for length in (1, 2, 3)}
    return nnx.Dict(count=Accumulator({'k': number}), **lengths)

  state = layout.init(create)
  checkpoint.save(tmp_path / 'state', state, layout)
  for copy in (
    layout.shard(state),
    layout.plan(create).shard(state),
    checkpoint.restore(tmp_path / 'state', state),
  ):
    assert copy.count.dtypes == {'k': number}
    for length in (1, 2, 3):
      np.testing.assert_array_equal(copy[f'w{length}'][...], np.full(length, float(length)))
