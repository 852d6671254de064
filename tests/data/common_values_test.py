"""Common values in a job of one process; `tests/multiprocess/values_test.py` has those of several."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd._src.data.common_values import check_arguments, common_shards
from flax_spmd.errors import LayoutError


@pytest.mark.parametrize('values', [False, True, 'part'])
def test_a_single_process_has_nothing_to_compare(values):
  layout = spmd.Layout({'data': 8})
  assert layout.check_processes({'w': np.ones(8), 'key': jax.random.key(0)}, values=values) is None
  assert check_arguments((np.ones(8), object()), {'train': True}, members=()) is None


@pytest.mark.parametrize('spec', [P(), P('data'), P('model', 'data')])
def test_no_shard_of_a_single_process_is_common(mesh, spec):
  assert common_shards(NamedSharding(mesh, spec), (8, 8)) == ()


def test_an_unknown_choice_of_values():
  with pytest.raises(LayoutError) as error:
    spmd.Layout({'data': 8}).check_processes({'w': np.ones(8)}, values='all')
  assert str(error.value) == "values='all' is not a choice.\nFix: pass True, False or 'part'."
