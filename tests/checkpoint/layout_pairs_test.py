"""All pairs of layouts, with and without boxes, for three optimizers: restored bit-equal, with the target's sharding."""

import itertools
import warnings

import pytest

from flax_spmd import checkpoint
from tests.checkpoint.states import LAYOUTS, OPTIMIZERS, assert_equal, assert_matches_target, create


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """One checkpoint for each layout and optimizer, boxed or not in turn."""
  folder, there = tmp_path_factory.mktemp('layouts'), {}

  def get(name, tx, boxed):
    key = name, tx, boxed
    if key not in there:
      layout = LAYOUTS[name]()
      state = layout.init(create, OPTIMIZERS[tx], boxed=boxed)
      path = folder / f'{name}-{tx}-{boxed}'
      checkpoint.save(path, state, layout=layout)
      there[key] = state, path
    return there[key]

  return get


def check(saved, one, other, tx, was_boxed, boxed):
  state, path = saved(one, tx, was_boxed)
  target = LAYOUTS[other]().abstract(create, OPTIMIZERS[tx], boxed=boxed)
  with warnings.catch_warnings(action='ignore', category=UserWarning):  # of what shards nothing
    restored = checkpoint.restore(path, target)
  assert_equal(state, restored)
  assert_matches_target(restored, target)


def rotated(one):
  """Every second layout, with each kind of boxes and each optimizer in turn."""
  kinds = list(itertools.product((True, False), OPTIMIZERS, (True, False)))
  index = list(LAYOUTS).index(one)
  others = list(enumerate(LAYOUTS))[index % 2 :: 2]
  return [(other, *kinds[(5 * index + number) % len(kinds)]) for number, other in others]


@pytest.mark.slow
@pytest.mark.parametrize('one', LAYOUTS)
def test_each_pair(saved, one):
  for other, boxed, tx, was_boxed in rotated(one):
    check(saved, one, other, tx, was_boxed, boxed)


@pytest.mark.exhaustive
@pytest.mark.parametrize('tx', OPTIMIZERS)
@pytest.mark.parametrize('one', LAYOUTS)
def test_all_pairs(saved, one, tx):
  for was_boxed, boxed, other in itertools.product((True, False), (True, False), LAYOUTS):
    check(saved, one, other, tx, was_boxed, boxed)
