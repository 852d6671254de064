"""Compilers start in no time."""

import pytest

from flax_spmd._src.estimate import estimator


@pytest.fixture(scope='module', autouse=True)
def quick_compilers(forked_compilers):
  """For all tests here."""


@pytest.fixture
def no_partitioner(monkeypatch):
  """Estimates as without the compiler for GPUs."""
  monkeypatch.setattr(estimator, 'can_partition', lambda platform: False)
