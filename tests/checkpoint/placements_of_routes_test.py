"""Placements: reading saved arrays into their places gives what the conversions compute, for random routes and shards."""

import itertools
import math
import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flax_spmd._src.checkpoint.matching.arrangements import Arrangement
from flax_spmd._src.checkpoint.matching.placements_of_routes import moves_only, placements
from flax_spmd._src.checkpoint.matching.routes import Route, after, converted, evaluated, record_of
from flax_spmd._src.checkpoint.storage.record import LeafRecord

SIZES = st.sampled_from([0, 1, 2, 3, 4, 6])


@st.composite
def routes(draw):
  """A route of stacks, slices, moves and rearrangements, and the saved leaves."""
  shape = tuple(draw(st.lists(SIZES, max_size=3)))
  count = draw(st.integers(1, 3))
  saved = {f'w{i}': LeafRecord(shape, 'int32') for i in range(count)}
  operands = [Route((name,)) for name in saved]
  if shape and draw(st.booleans()):
    rearrangement = Arrangement(draw(arrangements(shape))).of_shape(shape)
    operands = [converted([each], 'rearrange', rearrangement=rearrangement) for each in operands]
  rank = len(record_of(operands[0], saved).shape)
  steps = draw(st.lists(st.sampled_from(['move', 'unstack']), max_size=2))
  route = converted(operands, 'stack', axis=draw(st.integers(0, rank)))
  for step in steps:
    shape = record_of(route, saved).shape
    if step == 'unstack' and shape:
      axis = draw(st.integers(0, len(shape) - 1))
      route = converted([route], 'unstack', axis=axis, layer=draw(st.integers(0, shape[axis] - 1)))
    else:
      route = converted([route], 'move', order=tuple(draw(st.permutations(range(len(shape))))))
  return route, saved


@st.composite
def arrangements(draw, shape):
  """An arrangement of arrays of a shape: some dimensions are split, all are shuffled, some are merged."""
  names = iter(string.ascii_lowercase)
  old, parts = [], []
  for size in shape:
    factor = draw(st.sampled_from([f for f in (1, 2, 3) if size % f == 0]))
    group = [next(names), next(names)] if draw(st.booleans()) else [next(names)]
    old.append(f'({group[0]}={factor} {group[1]})' if len(group) == 2 else group[0])
    parts += group
  parts = draw(st.permutations(parts))
  new, rest = [], list(parts)
  while rest:
    count = draw(st.integers(1, min(3, len(rest))))
    new.append('(' + ' '.join(rest[:count]) + ')' if count > 1 else rest[0])
    rest = rest[count:]
  return f'{" ".join(old)} -> {" ".join(new)}'


def boxes(shape, cuts):
  """The shards of a shape whose dimensions are cut into equal parts."""
  each = [
    [(size // cut * i, size // cut * (i + 1)) for i in range(cut)]
    for size, cut in zip(shape, cuts, strict=True)
  ]
  return itertools.product(*each)


@given(routes(), st.data())
def test_reading_into_place_is_the_conversion(route_and_saved, data):
  route, saved = route_and_saved
  arrays = {
    name: 1000 * number + np.arange(math.prod(leaf.shape), dtype=np.int32).reshape(leaf.shape)
    for number, (name, leaf) in enumerate(saved.items())
  }
  expected = evaluated(route, arrays.__getitem__, np)
  cuts = [data.draw(st.sampled_from([c for c in (1, 2, 3) if n % c == 0])) for n in expected.shape]
  assert moves_only(route)
  for box in boxes(expected.shape, cuts):
    shard = np.full([high - low for low, high in box], -1, np.int32)
    try:
      placed = list(placements(route, saved, box, shard))
    except ValueError:
      assert max(cuts) > 1  # a whole array is always a box
      continue
    for source, shape, part, memory in placed:
      assert np.shares_memory(memory, shard) or not shard.size
      memory[...] = arrays[source].reshape(shape)[tuple(slice(*each) for each in part)]
    np.testing.assert_array_equal(shard, expected[tuple(slice(*each) for each in box)])


def test_a_shard_of_a_head_and_a_half():
  rearrangement = Arrangement('heads head -> (heads head)').of_shape((4, 8))
  route = converted([Route(('w',))], 'rearrange', rearrangement=rearrangement)
  saved = {'w': LeafRecord((4, 8), 'float32')}
  assert after(saved['w'], route, 1).shape == (32,)
  for box, part in {(8, 24): ((1, 3), (0, 8)), (4, 8): ((0, 1), (4, 8))}.items():
    (placed,) = placements(route, saved, (box,), np.empty(box[1] - box[0]))
    assert placed.box == part
  with pytest.raises(ValueError, match=r'^4 to 16 is no box of \[4, 8\]$'):
    list(placements(route, saved, ((4, 16),), np.empty(12)))
