"""The public API's types, as a type checker sees them; `nox -s typecheck` checks this file."""

import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, assert_type, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import flax_spmd as spmd
from flax_spmd._src.checkpoint.restore_options import RecordRestoreOptions
from flax_spmd._src.jit.jit_options import JitOptions
from flax_spmd._src.pipeline.run.request import PipelineOptions
from flax_spmd._src.plan.rows import Row


class Params(NamedTuple):
  w: jax.Array


class Batch(NamedTuple):
  x: jax.Array
  y: jax.Array


def create(key: jax.Array, size: int = 8) -> Params:
  return Params(jax.random.normal(key, (size,)))


def loss(params: Params, batch: Batch, scale: float = 1.0) -> jax.Array:
  return jnp.mean((batch.x * params.w - batch.y) ** 2) * scale


layout = spmd.Layout({'data': 8}, (('batch', 'data'),))


class Trainer:
  """A class with jitted methods, one of them made by the decorator with options."""

  def __init__(self, rate: float):
    self.rate = rate

  @layout.jit
  def evaluate(self, params: Params, batch: Batch) -> jax.Array:
    return loss(params, batch)

  @layout.jit(donate_argnums=1)
  def train(self, params: Params, batch: Batch) -> Params:
    return jax.tree.map(lambda w, g: w - self.rate * g, params, jax.grad(loss)(params, batch))


@layout.jit
def total(batch: Batch) -> jax.Array:
  return batch.x.sum() + batch.y.sum()


@layout.jit(static_argnames='count', keep_unused=True)
def repeated(batch: Batch, *, count: int) -> list[Batch]:
  return [batch] * count


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


def test_a_state_has_the_type_that_its_function_returns():
  key = jax.random.key(0)
  state = layout.init(create, key, size=8)
  assert_type(state, Params)
  assert isinstance(state, Params)

  abstract = layout.abstract(create, key, boxed=False)
  assert_type(abstract, Params)
  assert isinstance(abstract, Params)

  plan = layout.plan(create, key)
  assert_type(plan, spmd.Plan[Params])
  assert_type(plan.init(), Params)
  assert_type(plan.abstract(), Params)
  assert_type(plan.shard({'w': np.zeros(8)}), Params)
  assert_type(plan.box(state), Params)
  assert isinstance(plan.init(), Params)

  assert_type(layout.init(lambda: {'w': jnp.zeros(8)}), dict[str, jax.Array])


def test_a_checkpoint_has_the_type_of_its_target(tmp_path):
  key = jax.random.key(0)
  plan = layout.plan(create, key)
  with spmd.checkpoint.Manager(tmp_path, layout, every=1) as manager:
    step, state = manager.resume(create, key)
    assert_type(step, int)
    assert_type(state, Params)
    assert manager.save(1, state)
    resumed = manager.resume(plan)
    assert_type(resumed, spmd.checkpoint.ResumedState[Params])
    assert_type(manager.restore(plan).state, Params)
    assert_type(manager.restore(plan.abstract(), verify=False).state, Params)
    assert_type(manager.restore(), spmd.checkpoint.ResumedState[Any])

  path = tmp_path / '1'
  restored = spmd.checkpoint.restore(path, plan)
  assert_type(restored, Params)
  assert_type(spmd.checkpoint.restore(path, restored), Params)
  assert_type(spmd.checkpoint.restore(path, plan.abstract(), limit=2**20), Params)
  assert_type(spmd.checkpoint.restore(path, layout=layout, boxed=True), Any)
  assert isinstance(restored, Params) and isinstance(resumed.state, Params)


def test_batches_keep_their_type():
  array = layout.shard(np.ones((16, 4)), ('batch', None))
  assert_type(array, jax.Array)
  assert_type(layout.shard(1), jax.Array)
  assert_type(layout.shard({'x': np.ones(16)}, ('batch',)), dict[str, jax.Array])
  x, y = layout.shard((np.ones(16), np.ones(8)), ('batch',))
  assert_type((x, y), tuple[jax.Array, jax.Array])
  assert_type(
    layout.shard((array, {'x': array}), ('batch', None)), tuple[jax.Array, dict[str, jax.Array]]
  )
  batch = layout.shard(Batch(array, array), ('batch', None))
  assert_type(batch, Batch)
  assert_type(layout.replicate(batch), Batch)
  assert_type(layout.replicate(np.float32(1)), jax.Array)
  assert_type(layout.replicate({0: np.ones(3)}), dict[int, jax.Array])

  numpy_batches: Iterator[dict[str, np.ndarray]] = iter([{'x': np.ones(16)}] * 2)
  ready = spmd.prefetch(numpy_batches, lambda batch: layout.shard(batch, ('batch',)))
  assert_type(next(ready), dict[str, jax.Array])
  assert isinstance(next(ready)['x'], jax.Array)


def test_a_jitted_function_has_the_signature_of_the_function():
  params = layout.init(create, jax.random.key(0))
  batch = layout.shard(Batch(jnp.ones(8), jnp.zeros(8)), ('batch',))
  step = layout.jit(loss)
  assert_type(step(params, batch), jax.Array)
  assert_type(step(params, batch=batch, scale=2.0), jax.Array)
  assert_type(total(batch), jax.Array)
  assert_type(repeated(batch, count=2), list[Batch])
  assert isinstance(repeated(batch, count=2)[1], Batch)
  assert_type(step.explain(params, batch), spmd.ProgramExplanation)
  like: Callable[[Params, Batch], jax.Array] = step
  lowered = step.lower(jax.eval_shape(create, jax.random.key(0)), batch)
  assert lowered.compile() and step.trace(params, batch) and step.plan_of(params, batch)
  assert step.eval_shape(params, batch).shape == like(params, batch).shape == ()


def test_a_jitted_method_has_the_signature_of_the_bound_method():
  params = layout.init(create, jax.random.key(0))
  batch = layout.shard(Batch(jnp.ones(8), jnp.zeros(8)), ('batch',))
  trainer = Trainer(0.5)
  assert_type(trainer.evaluate(params, batch), jax.Array)
  assert_type(trainer.evaluate(params, batch=batch), jax.Array)
  assert_type(Trainer.evaluate(trainer, params, batch), jax.Array)
  new = trainer.train(params, batch)
  assert_type(new, Params)
  assert isinstance(new, Params)


def options_of(fn, *others: str) -> dict[str, Any]:
  """The keyword arguments of a function with their types, except `others`."""
  hints = get_type_hints(fn, localns={'Schedule': spmd.pipeline.Schedule})
  parameters = inspect.signature(fn).parameters.values()
  names = [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
  return {name: hints[name] for name in names if name not in others}


def test_the_options_for_type_checkers_are_those_of_the_functions():
  assert get_type_hints(JitOptions) == options_of(spmd.Layout.jit)
  assert get_type_hints(PipelineOptions) == options_of(spmd.Layout.pipeline_jit)
  # salvage= decides the type of the result, so the overloads have it.
  assert get_type_hints(RecordRestoreOptions) == options_of(spmd.checkpoint.restore, 'salvage')


def test_types_change_no_signature_at_run_time():
  assert inspect.signature(layout.jit(loss)) == inspect.signature(loss)
  assert inspect.signature(layout.jit(donate_argnums=0)(loss)) == inspect.signature(loss)
  stages = spmd.Layout({'stage': 8})
  assert inspect.signature(stages.pipeline_jit(loss)) == inspect.signature(loss)
  assert list(inspect.signature(Trainer(0.5).train).parameters) == ['params', 'batch']
  assert_type(total.__name__, str)
  assert_type(
    layout.jit(loss).__wrapped__(create(jax.random.key(0)), Batch(*jnp.ones((2, 8)))), jax.Array
  )
  assert total.__name__ == 'total' and layout.jit(loss).__wrapped__ is loss
  assert get_type_hints(loss)['return'] is jax.Array
  assert list(inspect.signature(spmd.Layout.init).parameters) == [
    'self',
    'fn',
    'args',
    'boxed',
    'kwargs',
  ]


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
  missing = spmd.Layot  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]

  # Mistakes: an error of pyright and of mypy each; one that is missing is an error too.
  params, batch = create(jax.random.key(0)), Batch(jnp.ones(8), jnp.ones(8))
  step, pipelined = layout.jit(loss), layout.pipeline_jit(loss, axis='data')
  plan = layout.plan(create, jax.random.key(0))
  step(batch, params)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
  step(params)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
  step(params, batch, scale='2')  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
  step(params, batch, weight=2.0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
  _ = step(params, batch).w  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
  step.lowered(params, batch)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
  repeated(batch, 2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
  Trainer(0.5).train(params)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
  Trainer(0.5).evaluate(params, batch, 1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
  pipelined(batch, params)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
  layout.jit(loss, donate_argnum=0)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
  layout.jit(donate_argnums='params')  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
  layout.pipeline_jit(loss, keep_unused=True)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
  _ = layout.init(create, jax.random.key(0)).weight  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
  layout.init(create(jax.random.key(0)))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
  _ = plan.init().weight  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
  _ = spmd.checkpoint.restore('run', plan).weight  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
  spmd.checkpoint.restore('run', plan, layout=layout)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
  spmd.checkpoint.restore('run', plan.abstract(), verfy=False)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
  wrong: dict[str, Any] = spmd.checkpoint.Manager('run', layout).resume(create).state  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
  assert_type(pipelined(params, batch), jax.Array)
  decorated = layout.pipeline_jit(axis='data', stages=2)(loss)
  assert_type(decorated(params, batch), jax.Array)
