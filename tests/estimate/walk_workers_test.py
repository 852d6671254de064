"""Walk workers: costs of other processes, equal to those of this one."""

import contextlib
import os
import signal
import threading
import time

import jax
import jax.numpy as jnp
import pytest

import flax_spmd as spmd
from flax_spmd._src.compare.hardware import parse_target
from flax_spmd._src.estimate import walk_workers
from flax_spmd._src.estimate.estimator import begin_estimate
from flax_spmd._src.estimate.walk_workers import WalkWorkers
from flax_spmd._src.worker_process import WorkerProcess
from flax_spmd.explore import Estimator, TrainStep, search

TARGET = parse_target('cpu:8')


def create():
  params = {'up': jnp.ones((64, 256)), 'down': jnp.ones((256, 64))}
  names = {'up': ('embed', 'mlp'), 'down': ('mlp', 'embed')}
  return {key: spmd.LogicallyPartitioned(value, names[key]) for key, value in params.items()}


def step(state, x):
  def loss(params):
    hidden = spmd.with_logical_constraint(x @ params['up'], ('batch', 'mlp'))
    return jnp.sum((jax.nn.relu(hidden) @ params['down']) ** 2)

  grads = jax.grad(lambda boxed: loss(spmd.unbox(boxed)))(state)
  return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads)


TRAIN_STEP = TrainStep(step, create, jax.ShapeDtypeStruct((64, 64), jnp.float32))
LAYOUTS = [
  spmd.Layout(spmd.abstract_mesh(mesh), rules)
  for mesh, rules in (
    ({'data': 8}, (('batch', 'data'),)),
    ({'data': 8}, (('batch', 'data'), ('embed', 'data'))),
    ({'model': 8}, (('mlp', 'model'),)),
    ({'data': 2, 'model': 4}, (('batch', 'data'), ('mlp', 'model'))),
  )
]


@pytest.fixture(scope='module')
def estimator():
  return Estimator(TRAIN_STEP, platform='cpu')


def begun(estimator, layouts=LAYOUTS):
  return [begin_estimate(estimator, layout, TARGET, partition=False) for layout in layouts]


def started(workers, program):
  """Waits until all processes have started."""
  workers.start(program)
  deadline = time.monotonic() + 120
  while len(workers.ready()) < workers.count:
    assert time.monotonic() < deadline
    time.sleep(0.05)
  return workers


@pytest.fixture(scope='module')
def workers(estimator):
  with contextlib.closing(WalkWorkers(2)) as both:
    yield started(both, program_of(estimator))


QUICK = """
import sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
connection.send(None)
while True:
  connection.recv_bytes()
  connection.send(None)
"""


@pytest.fixture
def quick(estimator, monkeypatch, tmp_path):
  """Processes that start at once, and find nothing."""
  (tmp_path / 'quick_worker.py').write_text(QUICK)
  monkeypatch.setenv('PYTHONPATH', str(tmp_path))
  monkeypatch.setattr(walk_workers, '_MODULE', 'quick_worker')
  with contextlib.closing(WalkWorkers(2)) as both:
    yield started(both, program_of(estimator))


def program_of(estimator):
  return begun(estimator)[0].program


def requests_of(estimates):
  return [(one.program, one.request) for one in estimates]


def test_the_costs_equal_those_of_this_process(workers):
  other = Estimator(TRAIN_STEP, platform='cpu')  # another program, which the processes do not have yet
  estimates = begun(other, LAYOUTS * 2)
  for one, costs in zip(estimates, workers.costs(requests_of(estimates)), strict=True):
    alone = Estimator(TRAIN_STEP, platform='cpu').estimate(one.layout, TARGET, partition=False)
    assert one.finished(costs) == alone
    assert alone.counts.flops > 0


def test_requests_that_are_known_or_there_twice_are_not_sent(workers, monkeypatch):
  other = Estimator(TRAIN_STEP, platform='cpu')
  other.estimate(LAYOUTS[0], TARGET, partition=False)
  sent = []
  send = WorkerProcess.send
  monkeypatch.setattr(WorkerProcess, 'send', lambda *task: sent.append(task) or send(*task))
  found = workers.costs(requests_of(begun(other, [LAYOUTS[0], LAYOUTS[1], LAYOUTS[1]])))
  assert len(sent) == 1 and None not in found and found[1] == found[2] != found[0]


def test_without_a_process_there_are_no_costs(estimator):
  assert WalkWorkers(2).costs(requests_of(begun(Estimator(TRAIN_STEP, platform='cpu')))) == [None] * 4


def test_a_request_that_fails_has_no_costs_and_the_next_ones_have(workers):
  other = Estimator(TRAIN_STEP, platform='cpu')
  first, *rest = begun(other)
  wrong = first.request._replace(constraints=())
  found = workers.costs([(first.program, wrong), *requests_of(rest)])
  assert found[0] is None and None not in found[1:]


def test_processes_that_end_are_not_waited_for(quick):
  first, second = quick.ready()
  os.kill(first.process.pid, signal.SIGKILL)
  first.process.wait()
  assert quick.ready() == [second]
  os.kill(second.process.pid, signal.SIGSTOP)
  requests = requests_of(begun(Estimator(TRAIN_STEP, platform='cpu')))
  killer = threading.Timer(0.3, second.process.kill)  # while it has a request
  killer.start()
  assert quick.costs(requests) == [None] * 4
  assert not quick.ready()


def test_an_interruption_ends_the_processes(quick, monkeypatch):
  processes = [worker.process for worker in quick.ready()]

  def interrupted(connections, timeout):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(walk_workers, 'wait', interrupted)
    quick.costs(requests_of(begun(Estimator(TRAIN_STEP, platform='cpu'))))
  assert all(process.poll() is not None for process in processes)
  assert not quick.ready()


def test_other_flags_for_compilers_have_other_processes(quick, estimator, monkeypatch):
  before = [worker.process for worker in quick.ready()]
  quick.start(program_of(estimator))
  assert [worker.process for worker in quick.ready()] == before
  monkeypatch.setenv('XLA_FLAGS', f'{os.environ.get("XLA_FLAGS", "")} --xla_dump_max_hlo_modules=1')
  quick.start(program_of(estimator))
  assert not quick.ready() and all(process.poll() is not None for process in before)


def test_once_closed_they_start_no_processes(estimator, monkeypatch):
  workers = WalkWorkers(2)
  workers.close()
  monkeypatch.setattr(walk_workers, 'WorkerProcess', None)
  workers.start(program_of(estimator))
  assert not workers.ready()


def test_a_search_finds_the_same_with_several_processes(monkeypatch, tmp_path):
  monkeypatch.setattr('flax_spmd._src.search.trials._STARTING', 0.0)
  sent, starting, costs = [], WalkWorkers.start, WalkWorkers.costs

  def start(self, program):
    if not self.ready():
      monkeypatch.setattr(WalkWorkers, 'start', starting)
      started(self, program)
      monkeypatch.setattr(WalkWorkers, 'start', start)

  def counted(self, requests):
    sent.extend(requests)
    return costs(self, requests)

  monkeypatch.setattr(WalkWorkers, 'start', start)
  monkeypatch.setattr(WalkWorkers, 'costs', counted)
  results = []
  for jobs in (1, 2):
    monkeypatch.setenv('FLAX_SPMD_CACHE', str(tmp_path / str(jobs)))
    results.append(search(TRAIN_STEP, 'cpu:8', candidates=60, top=0, jobs=jobs))
  alone, parallel = results
  assert len(sent) > 30
  assert parallel.estimates == alone.estimates and parallel.outcomes == alone.outcomes
