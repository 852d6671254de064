"""Heartbeats of a save: silence is a sign of death only where a process was there to notice it."""

import threading

import jax
import pytest

from flax_spmd._src import whereabouts
from flax_spmd._src.checkpoint.storage import async_save, heartbeat
from flax_spmd._src.joint_call import JointCall


class Clock:
  def __init__(self):
    self.now = 1000.0

  def monotonic(self):
    return self.now


@pytest.fixture
def clock(monkeypatch):
  monkeypatch.setattr(heartbeat, 'time', Clock())
  return heartbeat.time


class Service:
  """The coordination service, with the keys of the other process; `answers` is clear while it is cut off."""

  def __init__(self):
    self.others, self.answers, self.asked = '0', threading.Event(), threading.Semaphore(0)
    self.waited_for = threading.Event()
    self.answers.set()

  def key_value_set(self, key, value, allow_overwrite=False):
    self.asked.release()
    if not self.answers.is_set():
      self.waited_for.set()
      self.answers.wait()

  def key_value_try_get(self, key):
    raise jax.errors.JaxRuntimeError('no such key')

  def key_value_dir_get(self, folder):
    return [(f'{folder}/0', 'its own'), (f'{folder}/1', self.others)]


@pytest.fixture
def service(monkeypatch):
  service = Service()
  for module in (heartbeat, whereabouts):
    monkeypatch.setattr(module, 'coordination_service', lambda: service)
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  yield service
  service.answers.set()
  for thread in threading.enumerate():
    if thread.name == 'flax_spmd heartbeat':
      thread.join(120)


@pytest.fixture
def beating(clock, service):
  """The heartbeat of a save; it has begun."""
  beating = heartbeat.Heartbeat(JointCall('save', 'The save'))
  beats(service)
  yield beating
  service.answers.set()
  beating.stop()


class SlowResponse:
  """Storage that takes a minute for a save, by the clock of the heartbeat."""

  def __init__(self, clock):
    self.clock, self.left = clock, 3

  def result(self, timeout):
    self.left -= 1
    if self.left:
      self.clock.now += 30
      threading.Event().wait(timeout)
      raise TimeoutError


def test_a_long_save_of_one_process(clock, tmp_path):
  beating = heartbeat.Heartbeat(JointCall('save', 'The save'))
  clock.now += 100
  async_save.wait_for(SlowResponse(clock), tmp_path, beating)
  assert beating.gone() == []


def beats(service):
  """Waits for a heartbeat that begins from now on, and its end."""
  while service.asked.acquire(blocking=False):
    pass
  for _ in range(2):
    assert service.asked.acquire(timeout=120)


def cut_off(service):
  service.answers.clear()
  assert service.waited_for.wait(120)


def looks(beating, clock, seconds):
  """Every half second, as a process that waits for a save does."""
  for _ in range(2 * seconds):
    clock.now += 0.5
    gone = beating.gone()
  return gone


def test_a_first_process_that_does_not_answer(clock, service, beating):
  cut_off(service)
  assert looks(beating, clock, int(heartbeat.SILENCE)) == []
  assert looks(beating, clock, 1) == [0]


def test_a_process_that_was_suspended_itself(clock, service, beating):
  cut_off(service)
  clock.now += 3600
  assert looks(beating, clock, int(heartbeat.SILENCE)) == []
  assert looks(beating, clock, 1) == [0]


def test_another_process_that_is_silent(clock, service, beating):
  for _ in range(3):
    clock.now += 5
    beats(service)
    gone = beating.gone()
  assert gone == [1]


def test_another_process_after_this_one_was_suspended(clock, service, beating):
  clock.now += 3600
  beats(service)
  assert beating.gone() == []
  service.others = '1'
  beats(service)
  assert looks(beating, clock, int(heartbeat.SILENCE) // 2) == []
