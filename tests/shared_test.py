"""Shared objects: one for equal arguments, in all threads, for as long as it is used."""

import gc
import sys
import threading

import pytest

from flax_spmd._src.shared import shared


class Made:
  def __init__(self, content):
    self.content = content


def test_equal_arguments_give_one_object_while_it_is_used():
  calls = []

  @shared
  def make(*content):
    calls.append(content)
    return Made(content)

  kept = make('a', (1, 2))
  assert make('a', (1, 2)) is kept
  assert make('a', (1, 3)) is not kept
  del kept
  gc.collect()
  assert make('a', (1, 2)).content == ('a', (1, 2))
  assert calls == [('a', (1, 2)), ('a', (1, 3)), ('a', (1, 2))]


def test_an_error_is_raised_again():
  @shared
  def make(number):
    return Made(1 // number)

  for _ in range(2):
    with pytest.raises(ZeroDivisionError):
      make(0)
  assert make(1).content == 1


def test_threads_get_one_object():
  """8 threads make the same 20 objects at once, 50 times, while Python switches threads as often as it can."""

  @shared
  def make(number):
    return Made(number)

  def work(round_number):
    barrier.wait()
    made.append([make((round_number, number)) for number in range(20)])

  interval = sys.getswitchinterval()
  sys.setswitchinterval(1e-6)
  try:
    for round_number in range(50):
      made, barrier = [], threading.Barrier(8)
      threads = [threading.Thread(target=work, args=(round_number,)) for _ in range(8)]
      for thread in threads:
        thread.start()
      for thread in threads:
        thread.join()
      assert len({tuple(map(id, each)) for each in made}) == 1
  finally:
    sys.setswitchinterval(interval)
