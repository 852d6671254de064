"""Data shards in one process: sizes, placements, and bad input. Several processes: multiprocess/loaders_test."""

from textwrap import dedent

import pytest
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd.errors import LayoutError, MeshError

RULES = (('batch', 'data'), ('embed', 'data'))


@pytest.mark.parametrize('placement', ['batch', ('batch', None), ('batch', 'embed'), P('data'), P()])
def test_one_process_reads_everything(placement):
  shard = spmd.Layout({'data': 8}, RULES).data_shard(placement)
  assert shard == spmd.DataShard(0, 1, (0,)) and shard.local_size(24) == 24


def test_a_batch_that_does_not_divide():
  with pytest.raises(LayoutError) as caught:
    spmd.DataShard(1, 4, (1,)).local_size(30)
  assert str(caught.value) == dedent("""\
    A batch of 30 rows does not divide into 4 data shards of equal size.
    Fix: pass a multiple of 4, such as 28.""")
  assert spmd.DataShard(1, 4, (1,)).local_size(28) == 7


@pytest.mark.parametrize('size', [0, -4])
def test_a_size_that_is_no_number_of_rows(size):
  with pytest.raises(LayoutError) as caught:
    spmd.DataShard(0, 1, (0,)).local_size(size)
  assert str(caught.value) == f'{size!r} is no number of rows.\nFix: pass a whole number of 1 or more.'


def test_names_without_a_rule():
  layout = spmd.Layout({'data': 8}, RULES)
  with pytest.raises(LayoutError) as caught:
    layout.data_shard(('btach', 'length'))
  assert str(caught.value) == dedent("""\
    dim 0 'btach': no rule for this logical name. Did you mean 'batch'?
    dim 1 'length': no rule for this logical name.
    Fix: add a rule to the layout; ('btach', None) for rows that every process reads.
    Fix: add a rule to the layout; ('length', None) for rows that every process reads.""")
  with pytest.raises(LayoutError) as caught:
    layout.data_shard('data')
  assert str(caught.value) == dedent("""\
    (root), dim 0 'data': this is a mesh axis, where logical names are expected.
    Fix: give mesh axes as a PartitionSpec, or use a logical name that has a rule.""")


@pytest.mark.parametrize('placement', [None, 3, (), {'x': ('batch',)}])
def test_no_placement_of_a_batch(placement):
  with pytest.raises(LayoutError) as caught:
    spmd.Layout({'data': 8}, RULES).data_shard(placement)
  assert str(caught.value) == dedent(f"""\
    {placement!r} is no placement of a batch.
    Fix: pass the logical name of its rows, or ('batch', None), or a PartitionSpec.""")


def test_an_abstract_mesh():
  with pytest.raises(MeshError, match='is abstract'):
    spmd.Layout(spmd.abstract_mesh({'data': 8}), RULES).data_shard('batch')
