"""Processes with different pipelines: an error in all of them before anything runs, which names the difference."""

import re

import numpy as np

from tests.processes import run_processes

SETUP = """
import jax.numpy as jnp
import flax_spmd as spmd
from flax_spmd import pipeline

me = jax.process_index()

def outcome(schedule=pipeline.OneFOneB(2), rate=0.1, microbatches=4, activation=jnp.tanh, rules=(),
            shift=0.0, dtype=np.float32, scale=1.0, row=0.0, fails=False):
  def step(w, batch):
    if fails:
      raise FileNotFoundError('no such file')
    def loss(w, x):
      within = jax.jit(lambda x: jnp.sort(x) + (np.arange(8, dtype=np.float32) + row))
      rows, _ = jax.lax.scan(lambda x, _: (within(x), None), x, length=2)
      h = pipeline.stage_end(activation(rows @ w['a']))
      return ((h @ w['b'] - x - table) ** 2).mean()
    loss, grads = pipeline.accumulate(
      lambda x: jax.value_and_grad(loss)(w, x), batch, op=pipeline.Mean, microbatches=microbatches)
    return jax.tree.map(lambda w, g: w - rate * g, w, grads), loss
  table = jnp.arange(8, dtype=jnp.float32) + shift
  layout = spmd.Layout({'stage': 2, 'data': 2}, (('batch', 'data'), *rules))
  w = {name: np.full((8, 8), scale, dtype) for name in 'ab'}
  try:
    return float(layout.pipeline_jit(step, schedule=schedule)(w, np.ones((8, 8), np.float32) * scale)[1])
  except (spmd.errors.FlaxSpmdError, FileNotFoundError) as error:
    return [type(error).__name__, *str(error).splitlines()]
"""
_NUMBERS = re.compile(
  r'(\bline|%)(?: \d+|\w+)'
)  # of lines and values: they depend on the version of JAX
SAME = 'Fix: create it from the same code, arguments, files and number of devices on every process.'
SUBJECT = 'pipeline_jit of step, line'


def test_processes_with_other_pipelines_are_told_before_anything_runs():
  """All of these trained on or blocked; one joint job shows that an error leaves the next pipeline intact."""
  cases = {
    'rate': 'rate=0.3 if me else 0.1',
    'schedule': 'schedule=pipeline.GPipe(2) if me else pipeline.OneFOneB(2)',
    'costs': "schedule=pipeline.Eager1F1B(2).with_costs({'fwd': (1, 50 * me), 'bwd': (1, 50 * me)})",
    'microbatches': 'microbatches=2 + 2 * me',
    'activation': 'activation=jnp.sin if me else jnp.tanh',
    'layout': "rules=(('embed', 'data'),) if me else ()",
    'constant': 'shift=float(me)',
    'row': 'row=float(me)',
    'dtype': 'dtype=np.float16 if me else np.float32',
    'fails': 'fails=me == 1',
    'argument': 'scale=1.0 + me',
    'equal': '',
  }
  source = '\n'.join(f'report(outcome({each}))' for each in cases.values())
  results = run_processes(SETUP + source, processes=2, devices=2, timeout=100)
  first, second = (dict(zip(cases, result.reported, strict=True)) for result in results)
  assert first.pop('fails') == [
    'PipelineError',
    'The compilation of pipeline_jit of step failed in process 1: no such file.',
    'Fix: see the error of that process.',
  ]
  assert second.pop('fails') == ['FileNotFoundError', 'no such file']
  expected = {
    'rate': [
      f"{SUBJECT}: 'end_0 of rank 0: % = stablehlo.constant dense<1.000000e-01> : tensor<f32>' in process 0, "
      "'end_0 of rank 0: % = stablehlo.constant dense<3.000000e-01> : tensor<f32>' in process 1.",
      f"{SUBJECT}: 'end_1 of rank 1: % = stablehlo.constant dense<1.000000e-01> : tensor<f32>' in process 0, "
      "'end_1 of rank 1: % = stablehlo.constant dense<3.000000e-01> : tensor<f32>' in process 1.",
      SAME,
    ],
    'schedule': [
      f"{SUBJECT}: 'schedule OneFOneB(ranks=2)' in process 0, 'schedule GPipe(ranks=2)' in process 1.",
      SAME,
    ],
    'costs': [
      f"{SUBJECT}: no line in process 0, 'transfer 1: rank 0 -> rank 1: float32[2,8] of microbatch 1' in process 1."
    ],
    'microbatches': [
      f"{SUBJECT}: 'microbatches 2' in process 0, 'microbatches 4' in process 1.",
      SAME,
    ],
    'activation': [
      f"{SUBJECT}: 'fwd_0 of rank 0: % = stablehlo.tanh % : tensor<2x8xf32>' in process 0, "
      "'fwd_0 of rank 0: % = stablehlo.sine % : tensor<2x8xf32>' in process 1."
    ],
    'layout': [
      f"{SUBJECT}: no line in process 0, \"rule 1 ('embed', 'data')\" in process 1.",
      SAME,
    ],
    'constant': [
      'closed-over array 0 of bwd_1 (float32[8]): digest 7a4de46932449862 in process 0, '
      'digest f778a385f24704a2 in process 1.',
      'Fix: close over equal arrays on every process, or pass them as arguments.',
    ],
    'row': [
      f"{SUBJECT}: 'fwd_0 of rank 0: % = stablehlo.constant dense<digest 761ead0d9dc837f1> : tensor<8xf32>' in process 0, "
      "'fwd_0 of rank 0: % = stablehlo.constant dense<digest f94ac4fd94c4102a> : tensor<8xf32>' in process 1.",
      SAME,
    ],
    'dtype': [
      f"{SUBJECT}: 'argument 0/a: float32[8, 8]' in process 0, 'argument 0/a: float16[8, 8]' in process 1.",
      f"{SUBJECT}: 'argument 0/b: float32[8, 8]' in process 0, 'argument 0/b: float16[8, 8]' in process 1.",
      SAME,
    ],
  }
  argument, equal = first.pop('argument'), first.pop('equal')
  plain = {name: [_NUMBERS.sub(r'\1', line) for line in lines] for name, lines in first.items()}
  del plain['activation'][2:]  # the derivatives of each JAX
  del plain['costs'][2:]  # the next transfers
  assert plain == {name: ['LayoutError', *text] for name, text in expected.items()}
  assert argument[1].startswith('argument 1 (float32[8,8]): digest ')
  assert argument[1:][1:] == [
    'Fix: pass the same batch and state on every process; layout.local_to_global joins the batches of several processes.'
  ]
  assert second == first | {'argument': argument, 'equal': equal}
  assert isinstance(equal, float)


def test_equal_programs_agree():
  """What differs between the processes is part of no program; 64-bit numbers are a setting of the calling thread."""
  source = """
import dataclasses
import jax.numpy as jnp
import flax_spmd as spmd
from flax_spmd import pipeline

@dataclasses.dataclass(frozen=True)
class Host:
  process: int

def step(w, batch, host):
  def loss(w, x):
    h = pipeline.stage_end(jnp.tanh(x @ w['a']))
    h = h + jax.random.normal(jax.random.key(1), h.shape, h.dtype)
    return ((h @ w['b'] - x) ** 2).mean()
  return pipeline.accumulate(
    lambda x: jax.value_and_grad(loss)(w, x), batch, op=pipeline.Mean, microbatches=4)

layout = spmd.Layout({'stage': 2, 'data': 1}, ())
step_ = layout.pipeline_jit(step, schedule=pipeline.OneFOneB(2), static_argnames='host')
arguments = {'a': np.eye(8), 'b': np.eye(8)}, np.ones((8, 8))
with jax.enable_x64(True):
  host = Host(jax.process_index())
  report([float(jax.jit(step, static_argnames='host')(*arguments, host)[0]), float(step_(*arguments, host)[0])])
"""
  for result in run_processes(source, processes=2, devices=1, timeout=100):
    expected, actual = result.value
    assert abs(actual - expected) < 1e-12


def test_a_process_outside_of_the_mesh_may_end(tmp_path):
  """The first rank waits for longer than a look, and the third process has ended by then."""
  source = """
import time
import jax.numpy as jnp
import flax_spmd as spmd
from flax_spmd import pipeline

everyone = spmd.Layout({'data': 3}, (('batch', 'data'),))
state = {'w': everyone.local_to_global(np.ones((1, 2), np.float32), ('batch', None))}
spmd.checkpoint.save('FOLDER', state, everyone)  # a joint call
if jax.process_index() < 2:
  def step(w, batch):
    loss = lambda w, x: (pipeline.stage_end(x @ w['a']) @ w['b']).mean()
    return pipeline.accumulate(
      lambda x: jax.value_and_grad(loss)(w, x), batch, op=pipeline.Mean, microbatches=2)
  layout = spmd.Layout(jax.sharding.Mesh(jax.devices()[:2], ('stage',)), ())
  step_ = layout.pipeline_jit(step, schedule=pipeline.OneFOneB(2))
  arguments = {'a': np.eye(8, dtype=np.float32), 'b': np.eye(8, dtype=np.float32)}, np.ones((4, 8), np.float32)
  step_(*arguments)
  time.sleep(3 * jax.process_index())
  report(float(step_(*arguments)[0]))
else:
  report(None)
"""
  source = source.replace('FOLDER', str(tmp_path / 'state'))
  results = run_processes(source, processes=3, devices=1, timeout=100)
  assert [result.value for result in results] == [1.0, 1.0, None]


def test_arrays_of_one_process():
  """No other process knows them: each reports their devices, in any call, instead of waiting for another.

  Those on one device are values, compared like arrays on the host.
  """
  source = """
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

own = Mesh(np.array(jax.local_devices()).reshape(1, 2), ('stage', 'data'))
layout = spmd.Layout({'stage': 2, 'data': 2}, ())
x = np.arange(32, dtype=np.float32).reshape(8, 4)

def new_step():
  return layout.pipeline_jit(lambda w, x: jnp.sum(pipeline.stage_end(x * w) * x))

def outcome(x):
  try:
    return float(step(np.float32(2), x))
  except spmd.errors.FlaxSpmdError as error:
    return [type(error).__name__, *str(error).splitlines()]

step = new_step()
report(outcome(jax.device_put(x, NamedSharding(own, P('data')))))
report(outcome(x))
report(outcome(jax.device_put(x, NamedSharding(own, P()))))  # fits the programs of the array on the host
report(outcome(jax.device_put(x, jax.local_devices()[0])))
report(outcome(jax.device_put(x, NamedSharding(layout.mesh, P()))))
step = new_step()
report(outcome(jax.device_put(x + me, jax.local_devices()[0])))
"""
  results = run_processes(SETUP + source, processes=2, devices=2, timeout=100)
  x = np.arange(32, dtype=np.float32)
  total = float(2 * (x * x).sum())
  fix = (
    'Fix: pass the same batch and state on every process; layout.local_to_global joins the batches of several '
    'processes.'
  )
  local = [
    'LayoutError',
    "the devices of argument 1 (float32[8,4]): '0-1' in process 0, '2048-2049' in process 1.",
    fix,
  ]
  for result in results:
    *outcomes, other = result.reported
    assert outcomes == [local, total, local, total, total]
    assert [re.sub(r'digest \w+', 'digest', line) for line in other] == [
      'LayoutError',
      'argument 1 (float32[8,4]): digest in process 0, digest in process 1.',
      fix,
    ]


def test_callbacks_and_earlier_programs_of_a_process_make_no_difference():
  """A program has a number or an address per callback of its process, and names that count."""
  source = """
if me:  # programs of this process alone
  echo = lambda x: jax.pure_callback(lambda y: y, x, x)
  jax.jit(echo)(np.ones(3, np.float32)), jax.jit(lambda x: (jax.debug.callback(print, x), x))(1.0)

def watched(x):
  jax.debug.callback(lambda total: None, x.sum())
  return jnp.tanh(x)

def called_back(x):
  zero = jax.pure_callback(lambda y: 0 * y, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x))
  return jnp.tanh(x) + jax.lax.stop_gradient(zero)

for activation in (jnp.tanh, watched, called_back, jax.checkpoint(jnp.tanh)):
  report(outcome(activation=activation))
"""
  results = run_processes(SETUP + source, processes=2, devices=2, timeout=100)
  assert results[0].reported == results[1].reported
  assert [round(each, 4) for each in results[0].reported] == [17.5] * 4
