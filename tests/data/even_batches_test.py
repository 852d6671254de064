"""Even batches in one process: any sizes, positions, prefetch, bad input. Several: multiprocess/loaders_test."""

from textwrap import dedent

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flax_spmd as spmd
from flax_spmd.errors import LayoutError


@given(st.lists(st.integers(0, 5), max_size=6), st.sampled_from(['pad', 'drop']))
def test_every_row_once_and_nothing_else(sizes, last):
  numbers = iter(range(1, 100))
  batches = [np.array([next(numbers) for _ in range(size)], np.int32) for size in sizes]
  found = list(spmd.even_batches(batches, 5, last))
  assert all(each.batch.shape == each.mask.shape == (5,) for each in found)
  assert all(each.batch.dtype == np.int32 and not each.batch[~each.mask].any() for each in found)
  count = len(sizes) if last == 'pad' else [*map((5).__eq__, sizes), False].index(False)
  kept = [row for batch in batches[:count] for row in batch]
  assert [row for each in found for row in each.batch[each.mask]] == kept


class Positioned:
  def __init__(self):
    self.at = 0

  def __iter__(self):
    return self

  def __next__(self):
    if self.at == 4:
      raise StopIteration
    self.at += 1
    return np.full(3 if self.at < 4 else 1, self.at)

  def get_state(self):
    return self.at

  def set_state(self, state):
    self.at = state


@pytest.mark.parametrize('ahead', [False, True])
def test_positions_are_those_of_the_batches_in_use(tmp_path, ahead):
  layout = spmd.Layout({'data': 8})
  source = Positioned()
  even = spmd.even_batches(source, 3)
  batches = spmd.prefetch(even, lambda each: each) if ahead else even
  with spmd.checkpoint.Manager(tmp_path, layout, every=1) as manager:
    assert int(next(batches).batch[0]) == 1 and int(next(batches).batch[0]) == 2
    for step, data in enumerate((source, even, batches), start=1):
      manager.save(step, {'w': np.zeros(8, np.float32)}, data=data)
    for step in (1, 2, 3):
      fresh = spmd.even_batches(Positioned(), 3)
      manager.restore(step=step, data=fresh)
      assert [int(mask.sum()) for _, mask in fresh] == [3, 1]
  if ahead:
    batches.close()


def test_a_position_after_the_end():
  even = spmd.even_batches(Positioned(), 3)
  assert len(list(even)) == 4 and next(even, None) is None
  even.set_state(3)
  assert [each.batch.tolist() for each in even] == [[4, 0, 0]]


@pytest.mark.parametrize(
  'batch, text',
  [
    (
      {'x': np.ones(4), 'y': np.ones((3, 2))},
      """
      x: 4 rows.
      y: 3 rows.
      Fix: pass batches whose arrays have one number of rows each, the first dimension.""",
    ),
    (
      {'x': 3},
      """
      A batch has no array with rows.
      Fix: pass batches whose arrays have one number of rows each, the first dimension.""",
    ),
    (
      np.ones(5),
      """
      A batch has 5 rows, more than the size of 4.
      Fix: pass size=5, or let the loader make batches of 4 rows.""",
    ),
  ],
)
def test_batches_without_a_size(batch, text):
  with pytest.raises(LayoutError) as caught:
    next(spmd.even_batches([batch], 4))
  assert str(caught.value) == dedent(text).strip()


def test_invalid_arguments():
  with pytest.raises(LayoutError) as caught:
    spmd.even_batches([], 4, last='keep')
  assert str(caught.value) == "last='keep' is not a choice.\nFix: pass 'pad' or 'drop'."
  with pytest.raises(LayoutError) as caught:
    spmd.even_batches([], 0)
  assert (
    str(caught.value)
    == 'even_batches cannot make batches of 0 rows.\nFix: pass a whole number of 1 or more.'
  )


def test_sizes_of_numpy():
  [(rows, mask)] = spmd.even_batches([np.ones(3)], np.int64(4))
  assert rows.tolist() == [1, 1, 1, 0] and mask.sum() == 3
