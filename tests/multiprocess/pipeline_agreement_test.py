"""Processes with different pipelines: an error in all of them before anything runs, which names the difference."""

import re

import numpy as np
import pytest

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
SAME_ARGUMENTS = 'Fix: pass the same batch and state on every process; layout.local_to_global joins the batches of several processes.'
_DIGEST = re.compile(r'(?<=digest) \w+')
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
  assert [_DIGEST.sub('', line) for line in argument[1:]] == [
    *(
      f'argument {name} (float32[8,8]): digest in process 0, digest in process 1.'
      for name in ('0/a', '0/b', '1')
    ),
    SAME_ARGUMENTS,
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
  local = [
    'LayoutError',
    "the devices of argument 1 (float32[8,4]): '0-1' in process 0, '2048-2049' in process 1.",
    SAME_ARGUMENTS,
  ]
  for result in results:
    *outcomes, other = result.reported
    assert outcomes == [local, total, local, total, total]
    assert [_DIGEST.sub('', line) for line in other] == [
      'LayoutError',
      'argument 1 (float32[8,4]): digest in process 0, digest in process 1.',
      SAME_ARGUMENTS,
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


VALUES = """
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

devices = np.array(jax.devices()).reshape(2, 2)
own, across = (Mesh(each, ('stage', 'data')) for each in (devices, devices.T))  # a rank is a process, or has both

def step(w, batch, scale=1.0):
  def loss(xy):
    h = pipeline.stage_end(jnp.tanh(xy[0] @ w['a'])) * inside(xy[0])
    return (scale * (h @ w['b'] - xy[1]) ** 2).mean()
  return pipeline.accumulate(loss, batch, pipeline.OneFOneB(2), pipeline.Mean)

def predict(w, x, key=None):
  h = pipeline.stage_end(jnp.tanh(x @ w['a'])) @ w['b']
  return h.mean() + (0 if key is None else 0 * jax.random.uniform(key))

def compiled(mesh):
  return spmd.Layout(mesh, ()).pipeline_jit(step, timeout=10).compile(jax.eval_shape(create), (x, x))

def create(key=None, size=1.0):
  a, b = jax.random.normal(jax.random.key(0) if key is None else key, (2, 8, 8))
  return {'a': size * a, 'b': size * b}

def replicated(mesh, value):
  return jax.make_array_from_callback(value.shape, NamedSharding(mesh, P()), lambda index: value[index])

def outcome(function, *arguments):
  try:
    return round(float(function(*arguments)), 4)
  except spmd.errors.FlaxSpmdError as error:
    return [type(error).__name__, *str(error).splitlines()]

def jitted(mesh=own, fn=step):
  return spmd.Layout(mesh, ()).pipeline_jit(fn, timeout=10)

def outcome_with(function):
  global inside
  inside = function
  return outcome(jitted(), w, (x, x))

def trained(mesh, *arguments):
  pipelined = compiled(mesh)
  return pipelined(pipelined.init(*arguments), (x, x))

def called(value):
  return lambda x: jax.pure_callback(value, jax.ShapeDtypeStruct((), x.dtype))

one, two = (lambda: np.float32(1)), (lambda: np.float32(2))
x = np.ones((4, 8, 8), np.float32)
w = {name: np.eye(8, dtype=np.float32) for name in 'ab'}
inside = lambda x: 1.0
"""


def _values_of(cases, setup=''):
  """What the two processes reported, by case; those whose reports are equal have one."""
  source = '\n'.join([SETUP, VALUES, setup, *(f'report({each})' for each in cases.values())])
  results = run_processes(source, processes=2, devices=2, timeout=200)
  first, second = (dict(zip(cases, result.reported, strict=True)) for result in results)
  assert first == second
  return {
    name: [_DIGEST.sub('', line) for line in each] if isinstance(each, list) else each
    for name, each in first.items()
  }


def test_values_that_one_process_uses_alone_are_compared():
  """Training went on with them: each process used its own parameters, keys and replicas."""
  cases = {
    'parameter': "outcome(jitted(), w | {'b': w['b'] * (1 + me)}, (x, x))",
    'measured': "outcome(compiled(own).measure, w | {'a': w['a'] * (1 + me)}, (x, x))",
    'weight': "outcome(jitted(fn=predict), w | {'a': w['a'] * (1 + me)}, x[0])",
    'key': 'outcome(jitted(fn=predict), w, x[0], jax.random.key(me))',
    'replicas': "outcome(jitted(), w | {'a': replicated(own, w['a'] * (1 + me))}, (x, x))",
    'replicas of a rank': "outcome(compiled(across), {n: replicated(jitted(across)._setting.ranks[n == 'b'], w[n] * (1 + me)) for n in 'ab'}, (x, x))",
    'created from a key': 'outcome(trained, own, create, jax.random.key(me))',
    'created with a number': 'outcome(trained, across, create, None, 1.0 + me)',
  }
  differs = 'digest in process 0, digest in process 1.'
  created = 'the state of pipeline_jit of step'
  number = "stablehlo.constant dense<{0}.000000e+00> : tensor<f32>' in process {1}"
  found = _values_of(cases)
  lines = [_NUMBERS.sub(r'\1', line) for line in found.pop('created with a number')]
  assert lines == [
    'LayoutError',
    *(
      f"{created}, line: 'arrays {at}: % = {number.format(1, 0)}, 'arrays {at}: % = {number.format(2, 1)}."
      for at in (0, 1)
    ),
    SAME,
  ]
  assert found == {
    'parameter': ['LayoutError', f'argument 0/b (float32[8,8]): {differs}', SAME_ARGUMENTS],
    'measured': ['LayoutError', f'argument 0/a (float32[8,8]): {differs}', SAME_ARGUMENTS],
    'weight': ['LayoutError', f'argument 0/a (float32[8,8]): {differs}', SAME_ARGUMENTS],
    'key': [
      'LayoutError',
      'argument 2 (key<fry>[]): [0, 0] in process 0, [0, 1] in process 1.',
      SAME_ARGUMENTS,
    ],
    'replicas': ['LayoutError', f'argument 0/a (float32[8,8]), rows 0-7: {differs}', SAME_ARGUMENTS],
    'replicas of a rank': [
      'LayoutError',
      *(f'argument 0/{name} (float32[8,8]), rows 0-7: {differs}' for name in 'ab'),
      SAME_ARGUMENTS,
    ],
    'created from a key': [
      'LayoutError',
      'argument 0 of create (key<fry>[]): [0, 0] in process 0, [0, 1] in process 1.',
      'Fix: pass create equal keys and arrays on every process.',
    ],
  }


def test_values_that_programs_close_over_are_compared():
  """Arrays of all processes too, and the bytecode of functions whose results count."""
  cases = {
    'array': 'outcome_with(lambda x: x.mean() + common)',
    'callback': 'outcome_with(called(two if me else one))',
  }
  found = _values_of(cases, 'common = replicated(own, np.float32(1 + me))')
  assert found['array'] == [
    'LayoutError',
    'closed-over array 0 of fwd_1 (float32[]): 1.0 in process 0, 2.0 in process 1.',
    'Fix: close over equal arrays on every process, or pass them as arguments.',
  ]
  assert [re.sub(r'(?<=bytecode) \w+', '', _NUMBERS.sub(r'\1', line)) for line in found['callback']] == [
    'LayoutError',
    f"{SUBJECT}: 'pure_callback 0: <lambda>, bytecode' in process 0, 'pure_callback 0: <lambda>, bytecode' in process 1.",
    SAME,
  ]


def test_what_processes_have_of_their_own_is_no_difference():
  """Data that one process uses, arrays on its mesh, data of callbacks, and functions that return nothing."""
  cases = {
    'equal': 'outcome(jitted(), w, (x, x))',
    'data': 'outcome(jitted(), w, (x * (1 - me), x * me))',
    'input': 'outcome(jitted(fn=predict), w, x[0] * (1 - me))',
    'created': 'outcome(trained, own, create, jax.random.key(1), 2.0)',
    'created across': 'outcome(trained, across, create, jax.random.key(1), 2.0)',
    'array': 'outcome_with(lambda x: replicated(own, ones)[0])',
    'shards': 'outcome_with(lambda x: shards[0])',
    'own mesh': 'outcome_with(lambda x: local[0])',
    'callback': 'outcome_with(called(functools.partial(lambda process: np.float32(1), me)))',
    'debug': 'outcome_with(lambda x: (jax.debug.callback(print if me else lambda *_: None), 1.0)[1])',
  }
  setup = """
import functools
ones = np.ones(2, np.float32)
shards = jax.device_put(ones, NamedSharding(own, P('data')))
local = jax.device_put(ones, NamedSharding(Mesh(np.array(jax.local_devices()), 'x'), P()))
"""
  found = _values_of(cases, setup)
  assert found.pop('created') == found.pop('created across')
  assert found.pop('input') == 0.7616
  assert found == dict.fromkeys(found, 0.0568)


ORDER = """
import collections
import threading
from flax_spmd._src import compat, multihost, whereabouts

def of(width, microbatches=2, devices=None):
  def step(w, batch):
    loss = lambda w, x: ((pipeline.stage_end(jnp.tanh(x @ w['a'])) @ w['b']) ** 2).mean()
    return pipeline.accumulate(
      lambda x: jax.value_and_grad(loss)(w, x), batch, pipeline.OneFOneB(2), pipeline.Mean)[0]
  step.__name__ = f'width_{width}'
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:2] if devices is None else devices), ('stage',))
  step_ = spmd.Layout(mesh, ()).pipeline_jit(step, timeout=20)
  arguments = {n: np.eye(width, dtype=np.float32) for n in 'ab'}, np.ones((microbatches, 4, width), np.float32)
  compiled = step_.compile(*arguments)
  return lambda: outcome_of(compiled, *arguments)

def outcome_of(function, *arguments):
  try:
    return round(float(function(*arguments)), 4)
  except spmd.errors.FlaxSpmdError as error:
    return [type(error).__name__, *str(error).splitlines()]
"""
SAME_ORDER = 'Fix: call pipelines in the same order on every process.'


def test_pipelines_in_another_order():
  """Their transfers were taken for each other: gloo ended both processes where sizes differ, else values were others'."""
  source = """
a, b, again = of(8), of(4), of(8)
for first, second in ((a, b), (b, a), (a, again)):
  report((second if me else first)())
report([each() for each in (b, a, b, b, a, again)])
"""
  name = 'pipeline_jit of width_{0} (compilation {1} of processes 0-1)'.format
  for result in run_processes(SETUP + ORDER + source, processes=2, devices=1, timeout=100):
    *outcomes, steps = result.reported
    assert outcomes == [
      [
        'LayoutError',
        f'The next pipeline: {name(*first)} in process 0, {name(*second)} in process 1.',
        SAME_ORDER,
      ]
      for first, second in (((8, 1), (4, 2)), ((4, 2), (8, 1)), ((8, 1), (8, 3)))
    ]
    assert steps == [0.58] * 6


@pytest.mark.parametrize('repeats', [0, 1])
def test_a_pipeline_instead_of_one_that_is_repeated(repeats):
  """The process that repeats it makes no request before its step; it waits in the first transfer for the other one."""
  source = f"""
a, b = of(8), of(4)
report([a(), b(), a()])
report(a() if me == {repeats} else b())
"""
  step = 'a step of pipeline_jit of width_8'
  change = 'the change to pipeline_jit of width_4 (compilation 2 of processes 0-1)'
  calls = (change, step) if repeats else (step, change)
  results = run_processes(SETUP + ORDER + source, processes=2, devices=1, timeout=100, check=False)
  both = [f'Process {me} waits in {calls[me]}, and process {1 - me} in {calls[1 - me]}' for me in (0, 1)]
  for result in results:
    steps, (kind, text, fix) = result.reported
    assert steps == [0.58] * 3 and kind == 'LayoutError'
    assert text in [
      f'{each}: neither makes the call of the other.' for each in both
    ]  # by who sees it first
    assert fix == 'Fix: make the same calls on every process, equally often and in the same order.'


def test_a_step_makes_no_request_unless_the_pipeline_changes():
  source = """
a, b = of(8), of(4)
[each() for each in (a, b, a)]
requests = collections.Counter()

class Counted:
  def __init__(self, service):
    self.service = service
  def __getattr__(self, name):
    if threading.current_thread().name != 'flax_spmd whereabouts':  # which looks every two seconds
      requests[name] += 1
    return getattr(self.service, name)

service = Counted(compat.coordination_service())
for module in (multihost, whereabouts, compat):
  module.coordination_service = lambda: service
for steps in ((a,) * 5, (b,)):
  requests.clear()
  report([[each() for each in steps], sum(requests.values())])
"""
  for result in run_processes(SETUP + ORDER + source, processes=2, devices=1, timeout=100):
    repeated, (_, requests) = result.reported
    assert repeated == [[0.58] * 5, 0]
    assert 2 <= requests <= 4  # a digest, the result, old keys


def test_pipelines_of_overlapping_processes():
  """Two processes compare the pipelines that both of them call, no others."""
  source = """
devices = jax.devices()
pair, ends = devices[:2], devices[::2]
a = of(8, devices=pair) if me < 2 else None
b = of(4, devices=ends) if me != 1 else None
c = of(2, devices=pair) if me < 2 else None
report([each() for each in (a, b, b, c, b, a, a, b) if each is not None])
"""
  results = run_processes(SETUP + ORDER + source, processes=3, devices=1, timeout=100)
  assert [result.value for result in results] == [[0.58] * 8, [0.58] * 4, [0.58] * 4]


def test_a_number_that_differs_in_a_later_step():
  """Only some steps compare what comes from the host; a request in each step would cost more than it finds."""
  source = """
from flax_spmd._src.pipeline.run import compiled

compiled.COMPARED_EVERY = 64
def step(w, batch, rate, key):
  loss = lambda w, x: ((pipeline.stage_end(jnp.tanh(x @ w['a'])) @ w['b']) ** 2).mean()
  loss, grads = pipeline.accumulate(
    lambda x: jax.value_and_grad(loss)(w, x), batch, pipeline.OneFOneB(2), pipeline.Mean)
  scale = rate + 0 * jax.random.uniform(key)
  return jax.tree.map(lambda w, g: w - scale * g, w, grads), loss

step = spmd.Layout({'stage': 2}, ()).pipeline_jit(step, timeout=20)
keys = list(jax.random.split(jax.random.key(0), 129))
w = {n: np.eye(4, dtype=np.float32) for n in 'ab'}
for number in range(1, 1000):
  late = me and number > 75
  try:
    w, loss = step(w, np.full((2, 4, 4), 1, np.float32), np.float32(0.3 if late else 1 / number), keys[number])
  except spmd.errors.FlaxSpmdError as error:
    report([number, type(error).__name__, *str(error).splitlines()])
    break
"""
  for result in run_processes(SETUP + source, processes=2, devices=1, timeout=100):
    number, kind, rate, fix = result.value
    assert (number, kind) == (128, 'LayoutError')
    assert rate == 'argument 2 (float32[]): 0.0078125 in process 0, 0.30000001192092896 in process 1.'
    assert fix == SAME_ARGUMENTS
