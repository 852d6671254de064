"""Whole steps that are partitioned: their FLOPs and collectives are those of the compiled program."""

import random

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import flax_spmd as spmd
from flax_spmd._src.estimate import estimator as estimator_module
from flax_spmd._src.estimate.estimator import Estimator
from flax_spmd._src.estimate.partitioned_step import partitioned_counts
from flax_spmd._src.hlo.counts import Collective, Counts, scaled
from flax_spmd._src.text import size_text
from flax_spmd.explore import TrainStep, compare

SIZES = {'batch': 16, 'length': 64, 'embed': 128, 'heads': 4, 'head': 32, 'mlp': 512, 'vocab': 1024}
WEIGHTS = {
  'in': ('embed', 'heads', 'head'),
  'out': ('heads', 'head', 'embed'),
  'up': ('embed', 'mlp'),
  'down': ('mlp', 'embed'),
}
MESHES = ({'a': 8}, {'a': 2, 'b': 4}, {'a': 2, 'b': 2, 'c': 2})


def transformer():
  """Two blocks in a loop, on tokens, with a cross-entropy."""

  def create():
    weights = {
      name: spmd.LogicallyPartitioned(jnp.ones((2, *map(SIZES.get, names))), ('layers', *names))
      for name, names in WEIGHTS.items()
    }
    table = jnp.ones((SIZES['vocab'], SIZES['embed']))
    return weights | {'table': spmd.LogicallyPartitioned(table, ('vocab', 'embed'))}

  def block(x, w):
    x = spmd.with_logical_constraint(x, ('batch', 'length', 'embed'))
    heads = jnp.einsum('bte,ehd->bthd', x, w['in'])
    scores = jax.nn.softmax(jnp.einsum('bthd,bshd->bhts', heads, heads))
    x += jnp.einsum('bthd,hde->bte', jnp.einsum('bhts,bshd->bthd', scores, heads), w['out'])
    x /= jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    return x + jax.nn.gelu(x @ w['up']) @ w['down'], None

  def loss(state, ids):
    plain = spmd.unbox(state)
    weights = {name: plain[name] for name in WEIGHTS}
    x, _ = lax.scan(block, plain['table'][ids], weights)
    chances = jax.nn.log_softmax(x @ plain['table'].T)
    return -jnp.mean(jnp.take_along_axis(chances, ids[..., None], -1))

  def step(state, ids):
    value, gradient = jax.value_and_grad(loss)(state, ids)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradient), value

  ids = jax.ShapeDtypeStruct((SIZES['batch'], SIZES['length']), jnp.int32)
  return TrainStep(step, create, ids, placements=('batch', 'length'))


def random_layouts(count, seed):
  """Layouts with rules that may contradict each other."""
  draw = random.Random(seed)
  layouts = {}
  while len(layouts) < count:
    mesh = spmd.abstract_mesh(draw.choice(MESHES))
    names = draw.sample(sorted(SIZES), 4)
    rules = tuple((name, draw.choice(mesh.axis_names)) for name in names)
    layouts[f'{mesh.shape} {rules}'] = spmd.Layout(mesh, rules)
  return layouts


@pytest.mark.usefixtures('gpu_compiler')
def test_flops_and_collectives_are_those_of_compiled_programs(whole_steps):
  train = transformer()
  estimator, layouts = Estimator(train), random_layouts(5, 3)
  for compiled in compare(train, layouts, 'h100:8'):
    outcome = estimator.estimate(layouts[compiled.name], 'h100:8')
    assert outcome.source == 'partitioned'
    assert outcome.counts.flops == pytest.approx(compiled.counts.flops, rel=1e-6), compiled.name
    sent, right = (dict(one.counts.by_axis()) for one in (outcome, compiled))
    assert sent == pytest.approx(right, rel=0.001, abs=1024), compiled.name


@pytest.mark.usefixtures('gpu_compiler')
def test_independent_collectives_are_combined(whole_steps):
  layout = spmd.Layout(spmd.abstract_mesh({'a': 8}), (('batch', 'a'),))
  outcome = Estimator(transformer()).estimate(layout, 'h100:8')
  [compiled] = compare(transformer(), {'data': layout}, 'h100:8')
  ours, right = (
    sorted((one.kind, one.times, one.bytes) for one in each.counts.collectives)
    for each in (outcome, compiled)
  )
  assert ours == right


def test_a_step_is_not_partitioned_where_that_is_not_asked_for(whole_steps, monkeypatch):
  monkeypatch.setattr(estimator_module, 'partitioned_counts', None)
  layout = next(iter(random_layouts(1, 5).values()))
  assert Estimator(transformer()).estimate(layout, 'h100:8', partition=False).source == 'estimated'
  assert Estimator(transformer(), platform='tpu').estimate(layout, 'v5e:2x4').source == 'estimated'
  monkeypatch.setattr(estimator_module, 'can_partition', lambda platform: False)
  assert Estimator(transformer()).estimate(layout, 'h100:8').source == 'estimated'


def test_a_step_that_cannot_be_partitioned_is_estimated():
  layout = next(iter(random_layouts(1, 5).values()))  # the partitioner returns nothing in these tests
  estimator = Estimator(transformer())
  outcome = estimator.estimate(layout, 'h100:8')
  assert outcome == estimator.estimate(layout, 'h100:8', partition=False)
  assert partitioned_counts(b'no program', {'a': 8}) is None


@pytest.mark.parametrize(('share', 'is_in_doubt'), [(0.0, False), (0.08, False), (0.12, True)])
def test_memory_is_in_doubt_where_the_walk_gathers_other_arrays(monkeypatch, share, is_in_doubt):
  """The bytes are a share of the peak memory."""
  layout = spmd.Layout(spmd.abstract_mesh({'a': 8}), (('batch', 'a'),))
  estimator = Estimator(transformer())
  quick = estimator.estimate(layout, 'h100:8', partition=False)
  more = share * quick.memory.peak
  gathered = Collective('all-gather', ('a',), 8, more / 8, 1, 7 * more / 8, 'f32', '', '')
  flops = 0.95 * quick.counts.flops
  changed = Counts(flops, 2.0, (*quick.counts.collectives, gathered), (), ())
  monkeypatch.setattr(estimator_module, 'can_partition', lambda platform: True)
  monkeypatch.setattr(estimator_module, 'partitioned_counts', lambda code, sizes: changed)
  outcome = estimator.estimate(layout, 'h100:8')
  assert outcome.source == 'partitioned' and outcome.memory == quick.memory
  known = scaled(quick.counts, flops=flops / quick.counts.flops)
  assert outcome.counts == known._replace(flops=flops, collectives=changed.collectives)
  text = f'memory: gathered arrays of {size_text(more)} are others than the estimate has'
  assert outcome.doubts == ((text,) if is_in_doubt else ())


@pytest.mark.parametrize(('share', 'is_in_doubt'), [(0.15, False), (0.25, True)])
def test_memory_is_in_doubt_where_sums_are_scattered_otherwise(monkeypatch, share, is_in_doubt):
  """The bytes that sums write, as a share of the peak memory."""
  layout = spmd.Layout(spmd.abstract_mesh({'a': 8}), (('batch', 'a'),))
  estimator = Estimator(transformer())
  quick = estimator.estimate(layout, 'h100:8', partition=False)
  whole, less = quick.counts.collectives, share * quick.memory.peak
  assert {one.kind for one in whole} == {'all-reduce'}
  written = sum(one.bytes for one in whole)
  scattered = Collective('reduce-scatter', ('a',), 8, 8 * (written + less), 1, 0.0, 'f32', '', '')
  monkeypatch.setattr(estimator_module, 'can_partition', lambda platform: True)
  changed = quick.counts._replace(collectives=(scattered,))
  monkeypatch.setattr(estimator_module, 'partitioned_counts', lambda code, sizes: changed)
  outcome = estimator.estimate(layout, 'h100:8')
  text = f'memory: sums of {size_text(less)} are scattered otherwise than the estimate has'
  assert outcome.doubts == ((text,) if is_in_doubt else ())


@pytest.mark.parametrize(('factor', 'is_in_doubt'), [(1.05, False), (1.2, True), (0.8, True)])
def test_memory_is_in_doubt_where_the_flops_are_others(monkeypatch, factor, is_in_doubt):
  """Each device then computes other shards, of which the estimate of the memory knows nothing."""
  layout = spmd.Layout(spmd.abstract_mesh({'a': 8}), (('batch', 'a'),))
  estimator = Estimator(transformer())
  quick = estimator.estimate(layout, 'h100:8', partition=False)
  flops = factor * quick.counts.flops
  changed = quick.counts._replace(flops=flops)
  monkeypatch.setattr(estimator_module, 'can_partition', lambda platform: True)
  monkeypatch.setattr(estimator_module, 'partitioned_counts', lambda code, sizes: changed)
  outcome = estimator.estimate(layout, 'h100:8')
  text = f'memory: of {flops:.3g} FLOPs the estimate has {quick.counts.flops:.3g}, with other shards of activations'
  assert outcome.doubts == ((text,) if is_in_doubt else ())


def test_the_flops_of_kernels_count_in_a_partitioned_step(monkeypatch):
  """The partitioned program has them as custom calls, whose work its text does not have."""
  layout = spmd.Layout(spmd.abstract_mesh({'a': 8}), (('batch', 'a'),))
  estimator = Estimator(transformer())
  quick = estimator.estimate(layout, 'h100:8', partition=False)
  changed = quick.counts._replace(flops=1.0, opaque=(('kernel', 1),))
  monkeypatch.setattr(estimator_module, 'can_partition', lambda platform: True)
  monkeypatch.setattr(estimator_module, 'partitioned_counts', lambda code, sizes: changed)
  assert estimator.estimate(layout, 'h100:8').counts.flops == quick.counts.flops
