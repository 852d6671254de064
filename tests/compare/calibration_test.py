"""Calibration by measured step times: what it changes, what it keeps, and which times it refuses."""

import functools

import jax
import jax.numpy as jnp
import pytest

import flax_spmd as spmd
from flax_spmd.explore import Estimator, TrainStep, calibrate, parse_target

MESH = spmd.abstract_mesh({'data': 4, 'model': 2})
LAYOUTS = {
  'data': spmd.Layout(MESH, (('batch', ('data', 'model')),)),
  'tensor': spmd.Layout(MESH, (('batch', 'data'), ('mlp', 'model'))),
  'fsdp': spmd.Layout(MESH, (('batch', ('data', 'model')), ('embed', 'data'))),
}


def create():
  return {'w': spmd.LogicallyPartitioned(jnp.ones((4096, 16384)), ('embed', 'mlp'))}


def step(state, x):
  loss = lambda state: jnp.sum((x @ state['w'].unbox()) ** 2)
  value, gradients = jax.value_and_grad(loss)(state)
  return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), value


@functools.cache
def estimator():
  return Estimator(TrainStep(step, create, jax.ShapeDtypeStruct((8192, 4096), jnp.float32)))


def outcome(name, hardware=None):
  return estimator().estimate(LAYOUTS[name], parse_target('h100:8', hardware))._replace(name=name)


def test_a_measured_step_narrows_the_brackets_of_other_layouts(tmp_path):
  known = outcome('data')
  seconds = 1.5 * known.cost.high
  calibration = calibrate([(known, seconds)], 'h100:8')
  calibration.to_toml(tmp_path / 'measured.toml')
  assert parse_target('h100:64', tmp_path / 'measured.toml').chip == calibration.chip
  for name in LAYOUTS:
    before, after = outcome(name).cost, outcome(name, tmp_path / 'measured.toml').cost
    assert after.high / after.low < before.high / before.low
    assert (after.compute, after.memory, after.links) == (before.compute, before.memory, before.links)
  cost = outcome('data', tmp_path / 'measured.toml').cost
  assert cost.low < seconds < cost.high
  assert str(calibration).startswith('h100, calibrated by 1 measured step: pace ')
  assert calibration.errors == ()


def test_brackets_contain_each_of_several_measured_steps(tmp_path):
  measured = [
    (outcome(name), factor * outcome(name).cost.high) for name, factor in zip(LAYOUTS, (1, 1.2, 1.4))
  ]
  calibration = calibrate(measured, 'h100:8')
  calibration.to_toml(tmp_path / 'measured.toml')
  for one, seconds in measured:
    cost = outcome(one.name, tmp_path / 'measured.toml').cost
    assert cost.low <= seconds <= cost.high
  assert calibration.names == tuple(LAYOUTS) and len(calibration.errors) == 3
  assert max(map(abs, calibration.errors)) > 0.1


def test_a_calibrated_chip_can_be_calibrated_again(tmp_path):
  known = outcome('data')
  calibrate([(known, 2 * known.cost.high)], 'h100:8').to_toml(tmp_path / 'first.toml')
  again = outcome('data', tmp_path / 'first.toml')
  second = calibrate([(again, 3 * known.cost.high)], 'h100:8', hardware=tmp_path / 'first.toml')
  assert second.chip == calibrate([(known, 3 * known.cost.high)], 'h100:8').chip


def test_costs_of_another_chip_are_refused():
  """They are taken for the pace of this one otherwise: the counts are equal, the figures are not."""
  for other in ('a100:8', 'h200:8', 'v5e:2x4', 'cpu:8'):
    known = estimator().estimate(LAYOUTS['data'], parse_target(other))._replace(name='data')
    with pytest.raises(ValueError) as caught:
      calibrate([(known, 1.0)], 'h100:8')
    assert str(caught.value) == f'data: the outcome has the times of another chip than h100\n{FIX}'
    assert calibrate(iter([(known, known.cost.high)]), other).names == ('data',)


def test_a_pace_far_from_one_is_reported():
  known = outcome('data')
  milliseconds = str(calibrate([(known, 1e3 * known.cost.high)], 'h100:8'))
  assert ', far from 1: check that the times are seconds of one whole step; brackets' in milliseconds
  assert 'far from 1' not in str(calibrate([(known, known.cost.high)], 'h100:8'))


FIX = 'Fix: pass pairs of an outcome of compare or Estimator and the seconds of a whole step of it.'


def test_impossible_measurements():
  known = outcome('data')
  failed = type(known).failed('bad', LAYOUTS['data'], 'a reason')
  compiled = known._replace(source='compiled:v5e')
  with pytest.raises(ValueError) as caught:
    calibrate([(known, 1e-6), (failed, 1.0), (compiled, 1.0), (known, float('nan'))], 'h100:8')
  least = '139 us'
  assert str(caught.value) == (
    f'data: 1e-06 s is impossible: its products alone take {least} at the peak of h100\n'
    'bad: there are no costs: a reason\n'
    'data: the outcome is for 8 devices of v5e, not for h100:8\n'
    f'data: nan s is impossible: its products alone take {least} at the peak of h100\n{FIX}'
  )
  with pytest.raises(ValueError) as caught:
    calibrate([], 'h100:8')
  assert str(caught.value) == f'No step was measured.\n{FIX}'
  pipeline = known._replace(pipeline=object())
  with pytest.raises(ValueError) as caught:
    calibrate([(pipeline, 1.0), (known, '3')], 'h100:8')
  assert str(caught.value) == (
    'data: the outcome is a pipeline, whose time has bubbles that a pace would count again\n'
    f"data: '3' is no time\n{FIX}"
  )
  with pytest.raises(ValueError, match='for 8 devices of some chip, not for h100:16'):
    calibrate([(known, 1.0)], 'h100:16')
