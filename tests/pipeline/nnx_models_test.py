"""NNX models in functional form as pipelines: `nnx.split` outside of the step, `nnx.merge` inside of each microbatch."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from flax_spmd.pipeline import Mean, accumulate, stage_end
from tests.pipeline.cases import LAYOUT, STAGES, WIDTH, X, Y, assert_same, check_once

TX = optax.sgd(0.1, momentum=0.9)


class Block(nnx.Module):
  """A residual block with dropout and statistics of the batch."""

  def __init__(self, rngs):
    self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
    self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)

  def __call__(self, x):
    return x + self.dropout(self.down(nnx.gelu(self.up(self.norm(x)))))


class Network(nnx.Module):
  """A block per stage."""

  def __init__(self, rngs):
    for stage in range(STAGES):
      setattr(self, f'block_{stage}', Block(rngs))

  def __call__(self, x):
    for stage in range(STAGES):
      x = stage_end(getattr(self, f'block_{stage}')(x))
    return x


class Last:
  """The result of the last microbatch to be run: the statistics and counters of a model."""

  def state(self, count, result):
    return jnp.zeros(result.shape, result.dtype)

  def update(self, state, result, index):
    return result


def create():
  graphdef, params, rest = nnx.split(Network(nnx.Rngs(0)), nnx.Param, ...)
  return graphdef, (params, rest, TX.init(params))


def step_of(graphdef, schedule):
  def step(state, x, y):
    params, rest, memory = state

    def of_microbatch(one):
      def loss(params):
        model = nnx.merge(graphdef, params, rest, copy=True)
        value = jnp.mean((model(one[0]) - one[1]) ** 2)
        return value, nnx.state(model, nnx.Not(nnx.Param))

      return jax.value_and_grad(loss, has_aux=True)(params)

    (value, rest), grads = accumulate(of_microbatch, (x, y), schedule, ((Mean, Last()), Mean))
    updates, memory = TX.update(grads, memory, params)
    return (optax.apply_updates(params, updates), rest, memory), value

  return step


def test_a_step_over_the_state(schedule):
  """Parameters, statistics and counters of random numbers equal those of `jax.jit`; a stage creates its own."""
  graphdef, state = create()
  step = step_of(graphdef, schedule)
  pipelined = LAYOUT.pipeline_jit(step)
  created = pipelined.compile(jax.eval_shape(lambda: create()[1]), X, Y).init(lambda: create()[1])
  assert_same(created, state)
  result, expected = (created,), (state,)
  for _ in range(2):
    result, expected = pipelined(result[0], X, Y), jax.jit(step)(expected[0], X, Y)
  assert_same(result, expected)
  params, rest, _ = result[0]
  kernels = [params[f'block_{stage}']['up']['kernel'][...] for stage in range(STAGES)]
  means = [rest[f'block_{stage}']['norm']['mean'][...] for stage in range(STAGES)]
  for arrays in (kernels, means):
    assert len(set().union(*(one.devices() for one in arrays))) == 2 * STAGES
    assert [len(one.devices()) for one in arrays] == [2] * STAGES


@pytest.mark.parametrize(
  ('abstract', 'names'),
  [(LAYOUT.abstract, ('embed', 'mlp')), (LAYOUT.abstract, ()), (jax.eval_shape, ())],
)
def test_creation_of_variables(abstract, names):
  """Names in variables are logical in `init`, too; the pipeline takes the state without a second compilation."""

  def create():
    kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
    return nnx.split(nnx.Linear(WIDTH, WIDTH, kernel_init=kernel, rngs=nnx.Rngs(0)))[1]

  def step(state, x):
    for _ in range(STAGES):
      x = stage_end(x @ state['kernel'][...])
    return x

  pipelined = LAYOUT.pipeline_jit(step)
  compiled = pipelined.compile(abstract(create), X[0])
  created = compiled.init(create)
  pipelined(created, X[0])
  with LAYOUT:
    assert_same(compiled.init(create), created)
  assert pipelined.compile(created, X[0]) is compiled


def test_the_graph_as_an_argument():
  """A graph definition is a tree without leaves."""
  model = Network(nnx.Rngs(0))
  model.eval()
  graphdef, state = nnx.split(model)
  check_once(lambda graphdef, state, x: nnx.merge(graphdef, state)(x), graphdef, state, X[0])
