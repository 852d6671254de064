"""Calls made in several threads, also where none can be started."""

import random
import threading

import pytest

from flax_spmd._src.worker_threads import map_in_threads


@pytest.mark.parametrize('case', range(20))
def test_results_and_errors_with_any_number_of_threads(monkeypatch, case):
  rng = random.Random(case)
  values, threads, allowed = range(rng.randrange(30)), rng.randrange(1, 9), rng.randrange(9)
  failing = rng.choice([None, *values])
  start, started, made = threading.Thread.start, [], []

  def limited(thread):
    if len(started) == allowed:
      raise RuntimeError("can't create new thread at interpreter shutdown")
    started.append(thread)
    start(thread)

  def call(value):
    made.append(value)
    if value == failing:
      raise KeyError(value)
    return value * value

  monkeypatch.setattr(threading.Thread, 'start', limited)
  if failing is None:
    assert map_in_threads(call, values, threads) == [value * value for value in values]
    assert sorted(made) == [*values]
  else:
    with pytest.raises(KeyError, match=str(failing)):
      map_in_threads(call, values, threads)
    assert len(made) == len({*made})
  assert len(started) <= max(0, min(allowed, threads - 1, len(values) - 1))
  assert not any(thread.is_alive() for thread in started)
