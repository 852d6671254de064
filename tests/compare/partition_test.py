"""Partitioned programs against compiled ones."""

import importlib.util
import random

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import flax_spmd as spmd
from flax_spmd._src.compare.compilation import CompileResult
from flax_spmd._src.compare.partition import can_partition, partition
from flax_spmd._src.hlo.counts import Counts
from flax_spmd.explore import TrainStep, compare, parse_target

EMBED, MLP, VOCAB, BATCH, LENGTH = 64, 256, 512, 32, 16
has_cuda = pytest.mark.skipif(
  not importlib.util.find_spec('jax_cuda12_plugin'), reason="NVIDIA's compiler is not installed"
)


class Model(nn.Module):
  """Embeddings, a block in a scan, a convolution, and logits."""

  @nn.compact
  def __call__(self, tokens):
    named = lambda *names: spmd.with_logical_partitioning(nn.initializers.normal(0.02), names)
    x = nn.Embed(VOCAB, EMBED, embedding_init=named('vocab', 'embed'))(tokens)
    x = nn.Conv(EMBED, (3,), kernel_init=named('width', 'embed', 'features'))(x)
    stack = nn.scan(
      nn.remat(Block),
      length=2,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      metadata_params={nn.PARTITION_NAME: 'layers'},
    )
    x, _ = stack(name='blocks')(x, None)
    return nn.Dense(VOCAB, kernel_init=named('embed', 'vocab'))(x)


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    named = lambda *names: spmd.with_logical_partitioning(nn.initializers.normal(0.02), names)
    y = nn.gelu(nn.Dense(MLP, kernel_init=named('embed', 'mlp'))(nn.LayerNorm()(x)))
    y = nn.Dense(EMBED, kernel_init=named('mlp', 'embed'))(y)
    return spmd.with_logical_constraint(x + y, ('batch', 'length', 'act_embed')), None


def create():
  params = Model().init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))['params']
  return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))


def step(state, tokens):
  def loss(params):
    logits = Model().apply({'params': params}, tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

  value, grads = jax.value_and_grad(loss)(state.params)
  return state.apply_gradients(grads=grads), value


TRAIN_STEP = TrainStep(step, create, jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32))
NAMES = ('batch', 'vocab', 'embed', 'mlp', 'features', 'length', 'act_embed')


def drawn(seed):
  """A random layout: each name over random axes, in random order."""
  rng = random.Random(seed)
  mesh = spmd.abstract_mesh(rng.choice([{'a': 8}, {'a': 4, 'b': 2}, {'a': 2, 'b': 2, 'c': 2}]))
  axes = lambda: tuple(rng.sample(mesh.axis_names, rng.randint(0, min(2, len(mesh.axis_names)))))
  return spmd.Layout(mesh, tuple((name, axes() or None) for name in rng.sample(NAMES, len(NAMES))))


@pytest.mark.parametrize('jobs', [1, 2, 3, 8])
def test_programs_are_shared_among_workers(monkeypatch, jobs):
  """The compiler fails for one program; one layout does not divide its array."""

  def compiled(work, **options):
    assert options['parallel'] == jobs and all(one.partition_only for one in work)
    return [[result_of(program) for program in one.programs] for one in work]

  def result_of(program):
    size = dict(program.mesh)['a']
    counts = None if size == 1 else Counts(size, 0.0, (), (), ())
    return CompileResult(counts, {}, None, None, [], 0.0, 0.0, 0, False, None)

  monkeypatch.setattr('flax_spmd._src.compare.partition.compile_jobs', compiled)
  layouts = {
    f'{size}': spmd.Layout(spmd.abstract_mesh({'a': size, 'b': 8 // size}), (('batch', 'a'),))
    for size in (8, 1, 2, 4)
  }
  layouts['odd'] = spmd.Layout(spmd.abstract_mesh({'a': 8}), (('odd', 'a'),))
  found = partition(small_step(), layouts, parse_target('cpu:8'), jobs=jobs)
  assert {name: counts.flops for name, counts in found.items()} == {'8': 8, '2': 2, '4': 4}
  assert partition(small_step(), {}, parse_target('cpu:8'), jobs=jobs) == {}


def small_step():
  create = lambda: {'w': spmd.LogicallyPartitioned(jnp.ones((64, 60)), ('embed', 'odd'))}
  batch = jax.ShapeDtypeStruct((32, 64), jnp.float32)
  return TrainStep(lambda state, x: (state, jnp.sum(x @ state['w'].unbox())), create, batch)


@pytest.mark.parametrize('target', ['cpu:8', 'v5e:2x4', 'mi300:8'])
def test_only_compilers_for_gpus_can_end_after_partitioning(target):
  assert not can_partition(parse_target(target))


@has_cuda
@pytest.mark.exhaustive
@pytest.mark.parametrize('seed', range(6))
def test_wire_and_flops_of_random_layouts_are_those_of_compiled_programs(seed):
  layout, target = drawn(seed), parse_target('h100:8')
  assert can_partition(target)
  counts = partition(TRAIN_STEP, {'': layout}, target)['']
  compiled = compare(TRAIN_STEP, [layout], 'h100:8')['layout 0'].counts
  assert counts.flops == pytest.approx(compiled.flops, rel=1e-3)
  assert counts.by_kind() == pytest.approx(compiled.by_kind())
