"""Activations that wait in the memory of the host: equal numbers, the memory of both, the text of a step, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import flax_spmd as spmd
from flax_spmd._src import host_memory
from flax_spmd._src.text import size_text
from flax_spmd.errors import MeshError, PipelineError
from flax_spmd.explore import Pipeline, TrainStep, compare
from flax_spmd.pipeline import GPipe, Mean, accumulate, stage_end
from tests.pipeline.schedule_matrix_test import SCHEDULES, microbatches

ROWS, WIDTH = 16, 32
QUICK = ('ZeroBubbleH1', 'DualPipeV fused')


def training(schedule):
  """A step of gradient descent on a layer per stage."""

  def loss(params, x):
    for w in params:
      x = stage_end(jnp.sin(x @ w) + x)
    return jnp.mean(x**2)

  def step(params, batch):
    value, grads = accumulate(lambda x: jax.value_and_grad(loss)(params, x), batch, schedule, Mean)
    return [w - 0.1 * grad for w, grad in zip(params, grads, strict=True)], value

  keys = jax.random.split(jax.random.key(0), schedule.stages)
  params = [jax.random.normal(key, (WIDTH, WIDTH)) / np.sqrt(WIDTH) for key in keys]
  return step, params


def batch_of(ranks):
  return jax.random.normal(jax.random.key(1), (microbatches(ranks), ROWS, WIDTH))


def layout_of(ranks, inside, axis_type=AxisType.Auto):
  devices = jax.devices()[: ranks * inside]
  sizes = {'stage': ranks, 'data': inside}
  mesh = spmd.make_mesh(sizes, devices=devices, axis_types=(axis_type,) * 2)
  return spmd.Layout(mesh, (('batch', 'data'),))


def trained(layout, schedule, **options):
  """The compiled pipeline, and its parameters and losses after two steps."""
  step, params = training(schedule)
  batch = layout.shard(batch_of(schedule.ranks), (None, 'batch', None))
  compiled = layout.pipeline_jit(step, donate_argnums=0, **options).compile(params, batch)
  results = []
  for _ in range(2):
    params, value = compiled(params, batch)
    results.append(value)
  return compiled, jax.device_get((params, results))


@pytest.mark.parametrize(
  'name', [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.exhaustive]) for n in SCHEDULES]
)
def test_the_numbers_are_the_same_to_the_bit(name):
  schedule = SCHEDULES[name](4)
  layout = layout_of(4, 2)
  plain, expected = trained(layout, schedule)
  moved = []
  for after in (1, 3):
    hosted, actual = trained(layout, schedule, host_after=after, threads=after == 3)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert all(less <= more for less, more in zip(hosted.memory, plain.memory, strict=True))
    moved.append(sum(hosted.host_memory))
  nothing_waits = name == 'of, fused pairs'  # its backward is the next task but one
  assert plain.host_memory == [0] * 4 and (moved[0] > 0) != nothing_waits


def test_bytes_of_device_and_host():
  """GPipe keeps two arrays of each of eight microbatches for seven tasks. The first are back when the last move."""
  plain, _ = trained(layout_of(4, 1), GPipe(4))
  hosted, _ = trained(layout_of(4, 1), GPipe(4), host_after=6)
  kept, _ = trained(layout_of(4, 1), GPipe(4), host_after=7)
  activation = ROWS * WIDTH * 4
  assert kept.memory == plain.memory and kept.host_memory == [0] * 4
  assert hosted.host_memory[1] == hosted.host_memory[2] == 7 * 2 * activation
  for rank in (1, 2):  # at most two microbatches are on the device, one of which moves
    assert plain.memory[rank] - hosted.memory[rank] == 6 * 2 * activation


def test_explicit_axes():
  explicit, actual = trained(layout_of(2, 2, AxisType.Explicit), GPipe(2), host_after=1)
  auto, expected = trained(layout_of(2, 2), GPipe(2), host_after=1)
  assert explicit.host_memory == auto.host_memory and sum(auto.host_memory)
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_the_text_of_a_step():
  step, params = training(GPipe(2))
  lowered = layout_of(2, 1).pipeline_jit(step, host_after=1).lower(params, batch_of(2))
  lines = [line for line in lowered.as_text().splitlines() if 'rank 0' in line and 'rank 1' not in line]
  assert lines[5:12] == [
    'rank 0: fwd_0__2            3 arrays -> 2 arrays',
    'rank 0 -> host of rank 0    float32[16,32] of microbatch 2',
    'host of rank 0 -> rank 0    float32[16,32] of microbatch 0',
    'rank 0: fwd_0__3            3 arrays -> 2 arrays',
    'rank 0 -> host of rank 0    float32[16,32] of microbatch 3',
    'host of rank 0 -> rank 0    float32[16,32] of microbatch 1',
    'rank 0: bwd_0__0            5 arrays -> 1 array',
  ]


def test_a_comparison_has_the_bytes_on_the_host(tmp_path, monkeypatch):
  monkeypatch.setenv('FLAX_SPMD_CACHE', str(tmp_path))
  step, params = training(GPipe(2))
  layout = spmd.Layout(spmd.abstract_mesh({'stage': 2, 'data': 1}), (('batch', 'data'),))
  rows = {'kept': Pipeline(layout), 'moved': Pipeline(layout, host_after=1)}
  batch = jax.ShapeDtypeStruct(batch_of(2).shape, jnp.float32)
  kept, moved = compare(TrainStep(step, lambda: params, batch), rows, 'cpu:2')
  compiled, _ = trained(layout_of(2, 1), GPipe(2), host_after=1)
  assert [rank.memory.host for rank in moved.pipeline.ranks] == compiled.host_memory
  for line, size in zip(moved.pipeline.lines(1e9)[1:], compiled.host_memory, strict=True):
    assert f' on a device, {size_text(size)} on host; idle' in line
  assert moved.cost.links['host memory',] > 0 and kept.cost.links.keys() == {('stage',)}
  assert moved.cost.high - kept.cost.high >= moved.cost.links['host memory',] * 0.99


def test_devices_without_this_memory(monkeypatch):
  monkeypatch.setattr(host_memory, 'memory_kinds', lambda device: ['device'])
  with pytest.raises(MeshError) as error:
    layout_of(2, 1).pipeline_jit(training(GPipe(2))[0], host_after=2)
  assert str(error.value) == (
    "pipeline_jit: host_after=2: cpu devices have no memory 'pinned_host', only 'device'.\n"
    'Fix: leave it out, or use a backend with this memory: GPUs, TPUs, and CPUs since JAX 0.4.31.'
  )


@pytest.mark.parametrize('number', [0, -1])
def test_numbers_of_tasks_that_are_none(number):
  with pytest.raises(PipelineError) as error:
    layout_of(2, 1).pipeline_jit(training(GPipe(2))[0], host_after=number)
  assert str(error.value) == (f'pipeline_jit: host_after is {number!r}.\nFix: pass a positive integer.')
