"""Collectives of an estimate, combined."""

from flax_spmd._src.estimate.collective_combiner import CollectiveCombiner
from flax_spmd._src.estimate.resharding import CollectiveOp

MIB = 2**20


def test_independent_collectives_are_combined_up_to_30_mib():
  """The third depends on the first two; that of a loop is not combined with others."""
  combiner = CollectiveCombiner({'data': 8, 'idle': 1})

  def reduce(value, size, axes=('data',), times=1, block=0):
    ops = [CollectiveOp('all-reduce', axes, size)]
    return combiner.add(value, ops, times, 'f32', 'dot_general', f'line {value}', block)

  assert reduce(0, 32) == reduce(1, 16 * MIB) == [0]
  assert reduce(2, 16 * MIB) == [1]  # no room
  combiner.add_dependences([3], [0, 1])
  assert reduce(3, 32) == [1]
  assert reduce(4, 32, times=5, block=7) == [2]
  assert reduce(5, 32, axes=('idle',)) == []
  found = [(one.bytes, one.times, one.source) for one in combiner.collectives()]
  assert found == [(16 * MIB + 32, 1, 'line 1'), (16 * MIB + 32, 1, 'line 2'), (32, 5, 'line 4')]
  wire = 2 * 7 / 8
  assert [one.wire for one in combiner.collectives()] == [
    wire * size * times for size, times, _ in found
  ]
