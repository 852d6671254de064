"""A coordination service that fails for a while, or for good, during a save; and calls of several threads."""

import sys
import threading
import types

import jax
import pytest

from flax_spmd._src import whereabouts
from flax_spmd._src.checkpoint.storage import heartbeat
from flax_spmd._src.joint_call import JointCall


class FailingService:
  """A coordination service whose writes fail in some rounds.

  Attributes:
    fails: whether the write with this number fails.
    reached: set once a write with the number `last` was tried.
  """

  def __init__(self, fails, last):
    self.fails, self.last, self.writes = fails, last, 0
    self.values, self.reached = {}, threading.Event()

  def key_value_set(self, key, value, allow_overwrite=False):
    number, self.writes = self.writes, self.writes + 1
    if number >= self.last:
      self.reached.set()
    if self.fails(number):
      raise jax.errors.JaxRuntimeError('UNAVAILABLE: for a moment')
    self.values[key] = value

  def key_value_try_get(self, key):
    if key not in self.values:
      raise jax.errors.JaxRuntimeError('NOT_FOUND: ' + key)
    return self.values[key]

  def key_value_dir_get(self, folder):
    return [(key, value) for key, value in self.values.items() if key.startswith(f'{folder}/')]


@pytest.fixture
def beating(monkeypatch):
  """A function that starts heartbeats in one of two processes, with a service."""
  started = []

  def start(service):
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    for module in (heartbeat, whereabouts):
      monkeypatch.setattr(module, 'coordination_service', lambda: service)
    started.append(heartbeat.Heartbeat(JointCall('save', 'The save to /a')))
    assert service.reached.wait(20)
    return started[-1]

  yield start
  for each in started:
    each.stop()


def test_a_failed_write_is_repeated(beating):
  service = FailingService(fails=lambda number: number in (1, 2), last=4)
  beat = beating(service)
  assert beat.gone() == [] and int(service.values[f'{beat.call.folder}/heartbeat/0']) >= 3


def test_a_service_that_fails_for_good_is_gone_after_the_silence(beating, monkeypatch):
  beat = beating(FailingService(fails=lambda number: number > 0, last=2))
  now = heartbeat.time.monotonic()
  found = []
  for seconds in (0, 5, 10, 15):
    later = types.SimpleNamespace(monotonic=lambda seconds=seconds: now + seconds)
    monkeypatch.setattr(heartbeat, 'time', later)
    found.append(beat.gone())
  assert found == [[], [], [], [0]]


def test_threads_number_their_calls_apart():
  """The first calls of a kind, at once."""
  before = sys.getswitchinterval()
  sys.setswitchinterval(1e-6)
  try:
    for kind in map(str, range(300)):
      folders, barrier = [], threading.Barrier(4)

      def call(kind=kind, folders=folders, barrier=barrier):
        barrier.wait()
        folders.append(JointCall(f'kind {kind}', 'A call').folder)

      threads = [threading.Thread(target=call) for _ in range(4)]
      for thread in threads:
        thread.start()
      for thread in threads:
        thread.join()
      assert len(set(folders)) == 4
  finally:
    sys.setswitchinterval(before)


class CountedRequests:
  """A coordination service that has nothing stored."""

  def __init__(self):
    self.count = 0

  def key_value_set(self, key, value, allow_overwrite=False):
    self.count += 1

  def key_value_try_get(self, key):
    self.count += 1
    raise jax.errors.JaxRuntimeError('NOT_FOUND: ' + key)

  def key_value_dir_get(self, folder):
    self.count += 1
    return []


@pytest.mark.parametrize('processes', [2, 1000])
def test_a_waiting_process_asks_a_few_times_for_any_number_of_others(monkeypatch, processes):
  """Each look of a process that waits in a call; all processes may wait, and look once a second."""
  service = CountedRequests()
  monkeypatch.setattr(jax, 'process_count', lambda: processes)
  monkeypatch.setattr(whereabouts, 'coordination_service', lambda: service)
  call = JointCall('save', 'The save to /a')
  assert call.error() is None
  assert service.count == 5
