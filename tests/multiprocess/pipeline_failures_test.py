"""Ranks of other processes that die, stall or make another call: an error that names the rank and the transfer."""

import re
import time

import jax
import pytest

import flax_spmd as spmd
from flax_spmd._src.pipeline.run import process_transfer
from flax_spmd._src.pipeline.run.rank_watch import Wait
from tests.processes import JAX_COPIES, run_processes

STEP = """
import os, signal, time
import jax.numpy as jnp
import flax_spmd as spmd
from flax_spmd import pipeline

me = jax.process_index()
layout = spmd.Layout({'stage': STAGES, 'data': 1}, ())
w = {str(k): np.eye(8, dtype=np.float32) for k in range(STAGES)}
batch = np.ones((4, 2, 8), np.float32)

def loss(w, x):
  for k in range(STAGES):
    x = pipeline.stage_end(jnp.tanh(x @ w[str(k)]))
  return (x ** 2).mean()

def train_step(w, batch):
  value, grads = pipeline.accumulate(
    lambda x: jax.value_and_grad(loss)(w, x), batch, pipeline.OneFOneB(STAGES), pipeline.Mean)
  return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads), value

step = layout.pipeline_jit(train_step, timeout=TIMEOUT)
"""


WAYS = pytest.mark.parametrize(
  'setting', [pytest.param('', id='gloo'), pytest.param(JAX_COPIES, id='JAX')]
)
"""Transfers by `ppermute`, and by JAX's copies."""


def run(source, stages, timeout, setting='', **options):
  step = STEP.replace('STAGES', str(stages)).replace('TIMEOUT', str(timeout))
  return run_processes(setting + step + source, processes=stages, devices=1, timeout=100, **options)


@WAYS
def test_a_stalled_rank_is_named_by_all_others(setting):
  """The last process stops coming; the second waits for it, and the first for the second."""
  source = """
for number in range(3):
  if number == 2 and me == 2:
    time.sleep(9)
  begin = time.monotonic()
  try:
    w, value = step(w, batch)
    float(value)
  except spmd.errors.PipelineError as error:
    report([number, time.monotonic() - begin, str(error)])
    break
"""
  results = run(source, 3, 4, setting, check=False)
  for result in results[:2]:
    number, seconds, text = result.value
    assert number == 2 and seconds < 8
    assert re.fullmatch(
      r'pipeline_jit of train_step: rank 2, of process 2, is stalled: process \d waited in the transfer '
      r'"rank \d -> rank \d: float32\[.*\]( of microbatch \d)?" for 4 s'
      r'(; process 1, of rank 1, waits in turn in the transfer "rank \d -> rank \d: float32.*")?\.\n'
      r'Fix: check whether that process is stuck, stopped or outside of the step \(loading data, say\), and restart all '
      r'processes from the newest checkpoint; pass a longer timeout= to pipeline_jit if it is only slow\.',
      text,
    )
    assert result.returncode in (0, 1)  # it ended by itself


CALLBACK = """
def fails(x):
  if number == 2 and me == FAILING:
    raise ValueError('an error of the user')
  return np.asarray(x)

def model(w, x):
  for k in range(2):
    x = jnp.tanh(x @ w[str(k)])
    zero = jax.pure_callback(fails, jax.ShapeDtypeStruct((), x.dtype), jnp.zeros(()), vmap_method='sequential')
    x = pipeline.stage_end(x + jax.lax.stop_gradient(zero))
  return (x ** 2).mean()

loss = model
expected = w
for number in range(6):
  batch = np.random.default_rng(number).normal(size=(4, 2, 8)).astype(np.float32)
  try:
    new, value = step(w, batch)
    float(value)
  except Exception as error:
    report([number, type(error).__name__, str(error)])
    continue
  number = -1
  expected, loss_of_jit = jax.jit(train_step)(expected, batch)
  w = new
  assert abs(float(value) - float(loss_of_jit)) < 1e-5
time.sleep(6 - 3 * me)  # JAX ends the other process with process 0
"""


@pytest.mark.parametrize(
  ('failing', 'setting'),
  [(1, ''), (0, JAX_COPIES), pytest.param(0, '', marks=pytest.mark.exhaustive)],
  ids=str,
)
def test_no_step_runs_after_one_that_failed(failing, setting):
  """The transfers of the next step would be taken for those that the other process still waits in."""
  results = run(CALLBACK.replace('FAILING', str(failing)), 2, 30, setting, check=False)
  for result in results:
    steps = {number: (kind, text) for number, kind, text in result.reported}
    assert list(steps)[-3:] == [3, 4, 5], result.stderr  # what JAX copies, a process may still finish
    for number in (3, 4, 5):
      kind, text = steps[number]
      assert kind == 'PipelineError'
      assert re.fullmatch(
        r'pipeline_jit of train_step: an earlier step of these processes has failed, and transfers between them are '
        r'unfinished: .+\.\nFix: restart all processes from the newest checkpoint\.',
        text,
      ), text


def test_a_donated_argument_is_named_and_the_next_step_runs():
  source = """
step = layout.pipeline_jit(train_step, timeout=TIMEOUT, donate_argnums=0)
new, value = step(w, batch)
newer, _ = step(new, batch)
try:
  step(new, batch)
except spmd.errors.LayoutError as error:
  report(str(error))
_, value = step(newer, batch)
expected = w
for _ in range(3):
  expected, loss_of_jit = jax.jit(train_step)(expected, batch)
report(abs(float(value) - float(loss_of_jit)) < 1e-5)
"""
  for rank, result in enumerate(run(source.replace('TIMEOUT', '30'), 2, 30)):
    assert result.reported == [
      f'0/{rank} has been deleted, or donated to a jitted function.\n'
      'Fix: pass the state that the step returned, not the one that was donated to it.',
      True,
    ]


@WAYS
def test_a_rank_that_dies_is_named(setting):
  source = """
for number in range(100_000):
  if number == 2 and me == 1:
    os.kill(os.getpid(), signal.SIGKILL)
  try:
    w, value = step(w, batch)
    float(value)
  except spmd.errors.PipelineError as error:
    report([number, str(error)])
    os._exit(3)
"""
  [survivor, victim] = run(source, 2, 10, setting, check=False, grace=30)
  assert victim.returncode == -9 and survivor.returncode == 3
  number, text = survivor.value
  assert number == 2 or (setting and number == 1)  # JAX's copies go on after the sender's step
  assert text.startswith(
    'pipeline_jit of train_step: rank 1, of process 1, has ended, or the connection to it: process 0 '
  )


RETURNS_EARLY = """
from flax_spmd._src.pipeline.run import process_transfer
for cls in (process_transfer.CrossHostCopy, process_transfer.ProcessTransfer):
  def made(self, *args, make=cls.__init__):
    make(self, *args)
    self.has_to_wait = False
  cls.__init__ = made
"""
"""Source that dispatches transfers as on GPUs: a step returns before JAX's copies have ended."""

DIES_AFTER_A_STEP = """
for number in range(100):
  w, value = step(w, batch)
  if number == 2 and me == 1:
    os.kill(os.getpid(), signal.SIGKILL)
  try:
    float(value)
  except jax.errors.JaxRuntimeError:
    break
"""
"""Source in which one rank dies, and the other reads results until that is an error."""

STALLED = re.compile(
  r'pipeline_jit of train_step: rank 1, of process 1, is stalled: process 0 waited in the transfer '
  r'"rank \d -> rank \d: float32\[2,8\] of microbatch \d" for 2 s\.\n'
  r'Fix: check whether that process is stuck, stopped or outside of the step \(loading data, say\), and restart all '
  r'processes from the newest checkpoint; pass a longer timeout= to pipeline_jit if it is only slow\.'
)
ENDED = re.compile(
  r'pipeline_jit of train_step: rank 1, of process 1, has ended, or the connection to it: process 0 waited in the '
  r'transfer "rank \d -> rank \d: float32\[(2,8\] of microbatch \d|\])", and it failed: .+\.\n'
  r'Fix: see the end of its output; then restart all processes from the newest checkpoint\.'
)


def test_a_caller_that_reads_a_result_of_a_stalled_rank_leaves():
  """Nothing can interrupt it: the process says why, and ends."""
  source = """
for number in range(3):
  if number == 2 and me == 1:
    time.sleep(30)
  w, value = step(w, batch)
  report(number)
  float(value)
report('went on')
"""
  waiting, _ = run(source, 2, 2, JAX_COPIES + RETURNS_EARLY, check=False)
  assert waiting.returncode == 1 and waiting.value == 2
  error, _, last = waiting.stderr.strip().rpartition('\n')
  assert STALLED.fullmatch(error.removeprefix('PipelineError: ')), waiting.stderr
  assert last == (
    'pipeline_jit of train_step: process 0 leaves, as a transfer is unfinished and no step has raised the error above.'
  )


@WAYS
def test_a_stalled_rank_is_named_by_a_step_before_many_have_returned(setting):
  source = """
for number in range(9):
  if number == 2 and me == 1:
    time.sleep(30)
  begin = time.monotonic()
  try:
    w, value = step(w, batch)
  except spmd.errors.PipelineError as error:
    report([number, time.monotonic() - begin, str(error)])
    break
"""
  waiting, _ = run(source, 2, 2, setting + RETURNS_EARLY, check=False)
  number, seconds, text = waiting.value
  assert number <= 4 and seconds < 15  # two may return before their transfers have ended
  assert STALLED.fullmatch(text), text
  assert waiting.returncode == 1


def test_a_rank_that_dies_after_the_step_has_returned_is_named():
  """Reading the result raises JAX's error. The reason is on stderr, and the next step raises it."""
  source = """
time.sleep(1)  # the watch learns it later than the caller by milliseconds
errors = []
for _ in range(2):
  try:
    step(w, batch)
  except spmd.errors.PipelineError as error:
    errors.append(str(error))
report(errors)
"""
  survivor, victim = run(
    DIES_AFTER_A_STEP + source, 2, 20, JAX_COPIES + RETURNS_EARLY, check=False, grace=30
  )
  assert victim.returncode == -9 and survivor.returncode == 1
  first, second = survivor.value
  assert ENDED.fullmatch(first), first
  assert f'PipelineError: {first}\n' in survivor.stderr
  assert second == (
    'pipeline_jit of train_step: an earlier step of these processes has failed, and transfers between them are '
    f'unfinished: {first.splitlines()[0]}\nFix: restart all processes from the newest checkpoint.'
  )


def test_a_process_that_ends_after_the_error_of_jax_has_said_why():
  survivor, _ = run(DIES_AFTER_A_STEP, 2, 20, JAX_COPIES + RETURNS_EARLY, check=False, grace=30)
  assert survivor.returncode == 1
  reason = re.search(r'(?m)^PipelineError: (.*\n.*)', survivor.stderr)
  assert reason and ENDED.fullmatch(reason[1]), survivor.stderr


def test_a_slow_evaluation_and_an_early_end_are_no_stall():
  """Both take longer than the timeout after a step; one ends without its result, long before the other reads it."""
  source = """
new, value = step(w, batch)
time.sleep(5)
_, value = step(new, batch)
if me == 0:
  time.sleep(3)
  report([float(value), float(jax.jit(train_step)(jax.jit(train_step)(w, batch)[0], batch)[1])])
"""
  results = run(source, 2, 2, JAX_COPIES + RETURNS_EARLY, grace=30)
  actual, expected = results[0].value
  assert abs(actual - expected) < 1e-6
  assert not any('PipelineError' in result.stderr for result in results)


def test_the_time_of_a_transfer_begins_after_the_programs_before_it(monkeypatch):
  """Those of a long evaluation, say, that the device runs first."""

  class Arrival:
    is_there, error = False, None

    def is_ready(self):
      return self.is_there

    def block_until_ready(self):
      if self.error:
        raise self.error

  wait, later = Wait(1, (1,), 'a transfer'), Wait(2, (2,), 'another one')
  before, one, two = Arrival(), Arrival(), Arrival()
  monkeypatch.setattr(process_transfer, '_arrival', lambda arrays: before)
  transfers = process_transfer.ProcessTransfers(spmd.Layout({'stage': 8}).mesh, 'stage')
  progress = transfers.progress
  for each, arrival in ((wait, one), (later, two)):
    received = transfers.followed(each, jax.devices()[0], lambda arrival=arrival: (['array'], arrival))
    assert received == ['array'] and progress.last is arrival
  assert progress.current is None
  before.is_there, begin = True, time.monotonic()
  assert progress.current[0] is wait and progress.current[1] >= begin and progress.failed is None
  one.is_there, one.error = True, ValueError('lost')
  assert progress.current[0] is later and progress.failed == (wait, one.error)
  two.is_there, two.error = True, ValueError('lost, too')
  assert progress.current is None and progress.last is None and progress.failed == (wait, one.error)


def test_a_process_that_compiles_anew_is_told():
  """One process passes a batch of another shape in the third step."""
  source = """
for number in range(3):
  try:
    w, value = step(w, batch[:2] if number == 2 and me == 1 else batch)
  except spmd.errors.FlaxSpmdError as error:
    report([number, type(error).__name__, str(error)])
"""
  results = run(source, 2, 30, check=False)
  for result in results:
    number, kind, text = result.value
    assert (number, kind) == (2, 'LayoutError')
    assert re.fullmatch(
      r'Process (\d) waits in (a step|the compilation) of pipeline_jit of train_step, and process (?!\1)\d in '
      r'(?!\2)(a step|the compilation) of pipeline_jit of train_step: neither makes the call of the other\.\n'
      'Fix: make the same calls on every process, equally often and in the same order.',
      text,
    )


NO_COLLECTIVES = "jax.config.update('jax_cpu_collectives_implementation', None)\n"


def test_no_transport_between_processes():
  """An error of the compilation, on both."""
  source = """
try:
  step.compile(w, batch)
except spmd.errors.PipelineError as error:
  report(str(error))
"""
  for result in run(source, 2, 30, NO_COLLECTIVES):
    assert result.value == (
      'The transfer "rank 0 -> rank 1: float32[2,8] of microbatch 0" is between processes 0-1, whose CPUs have no '
      'collectives: jax_cpu_collectives_implementation is None.\n'
      "Fix: leave it at 'gloo', its default, on every process; or set jax_cross_host_transfer_socket_address."
    )


def test_copies_by_jax_need_no_collectives():
  source = 'report([float(step(w, batch)[1]), float(jax.jit(train_step)(w, batch)[1])])'
  for result in run(source, 2, 30, NO_COLLECTIVES + JAX_COPIES):
    actual, expected = result.value
    assert abs(actual - expected) < 1e-6


@pytest.mark.parametrize('timeout', [0, -1])
def test_timeouts_that_are_no_seconds(timeout):
  with pytest.raises(spmd.errors.PipelineError) as caught:
    spmd.Layout({'stage': 2}).pipeline_jit(lambda x: x, timeout=timeout)
  assert str(caught.value) == (
    f'pipeline_jit: timeout is {timeout!r}.\nFix: pass a positive number of seconds.'
  )


def test_a_stopped_process_0_is_named():
  """It runs the coordination service too, which then never answers."""
  source = """
from tests.processes import end_by
for number in range(3):
  if number == 2 and me == 0:
    end_by(signal.SIGSTOP)
  begin = time.monotonic()
  try:
    w, value = step(w, batch)
    float(value)
  except spmd.errors.PipelineError as error:
    report([number, time.monotonic() - begin, str(error)])
    break
"""
  stopped, other = run(source, 2, 2, check=False, grace=1, heartbeat=60)
  assert stopped.returncode == -9  # by this test
  number, seconds, text = other.value
  assert other.returncode == 1 and number == 2
  assert 7 <= seconds < 30
  assert re.sub(r'microbatch \d', 'microbatch 0', text) == (
    'pipeline_jit of train_step: process 0, which coordinates all processes, does not answer, and process 1 waited in the '
    'transfer "rank 0 -> rank 1: float32[2,8] of microbatch 0" for 2 s.\n'
    'Fix: check whether that process is stopped or cannot be reached, and restart all processes from the newest '
    'checkpoint.'
  )


TRAIN = """
import os, random, signal, threading
import jax.numpy as jnp, optax
import flax_spmd as spmd
from flax_spmd import pipeline

STEPS, LAYERS = 12, 4
devices = np.array(jax.devices()).reshape(2, STAGES).T if SPANNING else np.array(jax.devices()).reshape(STAGES, 2)
layout = spmd.Layout(jax.sharding.Mesh(devices, ('stage', 'data')), (('batch', 'data'),))
optimizer = optax.adam(1e-2, eps=1e-3)

def create():
  w = {str(k): jax.random.normal(jax.random.key(k), (16, 16)) / 4 for k in range(LAYERS)}
  return w, optimizer.init(w)

def loss(w, x):
  for k in range(LAYERS):
    x = jnp.tanh(x @ w[str(k)])
    if (k + 1) % (LAYERS // STAGES) == 0:
      x = pipeline.stage_end(x)
  return ((x - 0.5) ** 2).mean()

def train_step(state, batch):
  w, moments = state
  value, grads = pipeline.accumulate(
    lambda x: jax.value_and_grad(loss)(w, x), batch, pipeline.OneFOneB(STAGES), pipeline.Mean)
  updates, moments = optimizer.update(grads, moments, w)
  return (optax.apply_updates(w, updates), moments), value

def batch(number):
  return np.random.default_rng(number).normal(size=(4, 2, 16)).astype(np.float32)

step = layout.pipeline_jit(train_step, timeout=20)
compiled = step.compile(layout.abstract(create), batch(0))
target = jax.tree.map(
  lambda array, sharding: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
  layout.abstract(create), compiled.input_shardings[0][0])
def train():
  with spmd.checkpoint.Manager(ROOT, layout, every=2, keep=2, durable=False) as manager:
    first, state = manager.restore(target) if manager.steps else (0, compiled.init(create))
    report(first)
    if VICTIM == jax.process_index():
      moment = random.Random(SEED)
      after, delay = moment.randrange(4, STEPS - 1), moment.uniform(0, 0.1)
    for number in range(first, STEPS):
      if VICTIM == jax.process_index() and number == after:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
      state, value = step(state, batch(number))
      manager.save(number + 1, state)
    if VICTIM == jax.process_index():
      os.kill(os.getpid(), signal.SIGKILL)
  return state

try:
  state = train()
except spmd.errors.FlaxSpmdError as error:
  report(str(error))
  os._exit(4)
if VICTIM < 0:
  expected = jax.jit(create)()
  for number in range(STEPS):
    expected, _ = jax.jit(train_step)(expected, batch(number))
  for actual, one in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
    for shard in actual.addressable_shards:
      np.testing.assert_allclose(shard.data, np.asarray(one)[shard.index], rtol=1e-4, atol=1e-5)
  report('trained')
"""


@pytest.mark.parametrize(
  'seed', [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 20))]
)
def test_training_goes_on_with_fewer_stages_after_a_death(seed, tmp_path):
  """Four stages; a process is killed at a random moment; then two stages go on from the newest checkpoint.

  Every stage belongs to one process or, for every other pair of seeds, to both.
  """

  def train(stages, victim):
    source = TRAIN.replace('STAGES', str(stages)).replace('ROOT', repr(str(tmp_path / 'run')))
    source = source.replace('VICTIM', str(victim)).replace('SEED', str(seed))
    source = source.replace('SPANNING', str(seed % 4 > 1))
    return run_processes(source, 2, stages, timeout=120, grace=60, check=victim < 0, heartbeat=30)

  victim = 1 - seed % 2
  results = train(4, victim)
  assert results[victim].returncode == -9
  if victim == 1:  # the death of process 0, which coordinates, lets JAX end the other one at any time
    survivor = results[0]
    assert survivor.returncode == 4, survivor.stderr
    assert 'process 1' in survivor.value.lower()
  assert results[1 - victim].returncode not in (0, -9)
  for result in train(2, -1):
    first, last = result.reported
    assert first >= 2 and last == 'trained'
