"""Doubts count by the most that they could change."""

import pytest

from flax_spmd._src.estimate.doubts import UNBOUNDED, Bound, Doubts

STEP = {'wire': 2.0**20, 'memory': 2.0**20, 'flops': 1e6}


@pytest.mark.parametrize('bound', [Bound(wire=2**15), Bound(memory=2**15), Bound(flops=9e3), Bound()])
def test_a_doubt_within_the_accuracy_of_estimates_is_none(bound):
  doubts = Doubts()
  doubts.add('model.py:1', 'reason', bound)
  assert doubts.texts(**STEP) == ()


def test_small_doubts_count_together():
  doubts = Doubts()
  for line in range(2):
    doubts.add(f'model.py:{line}', 'reason', Bound(wire=2**15))
  assert doubts.texts(**STEP) == tuple(
    f'model.py:{line}: reason, by up to 32 KiB on the wire' for line in range(2)
  )


def test_doubts_are_listed_by_size_without_those_that_do_not_matter():
  doubts = Doubts()
  doubts.add('model.py:1', 'small', Bound(wire=2**8))
  doubts.add('model.py:2', 'memory', Bound(memory=2**18))
  doubts.add('model.py:3', 'large', Bound(wire=2**19))
  assert doubts.texts(**STEP) == (
    'model.py:3: large, by up to 512 KiB on the wire',
    'model.py:2: memory, by about 256 KiB of memory',
  )


def test_arrays_that_are_kept_count_together():
  doubts = Doubts()
  for line in range(2):
    doubts.add_kept(f'model.py:{line}', 'copies', 2**15)
  doubts.add('model.py:3', 'buffers', Bound(memory=2**15))
  assert doubts.texts(**STEP) == (
    'model.py:3: buffers, by about 32 KiB of memory',
    'model.py:0: copies, by about 32 KiB of memory',
    'model.py:1: copies, by about 32 KiB of memory',
  )


def test_an_unbounded_doubt_has_no_extent():
  doubts = Doubts()
  doubts.add('model.py:1', 'unknown', UNBOUNDED)
  assert doubts.texts(**STEP) == ('model.py:1: unknown',)
