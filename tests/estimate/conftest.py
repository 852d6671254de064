"""Compilers start in no time, and what is tested is the walk: whole steps are partitioned in `whole_steps` alone."""

import pytest

from tests.estimate.partitioners import replace_partitioner


@pytest.fixture(scope='module', autouse=True)
def quick_compilers(forked_compilers):
  """For all tests here."""


@pytest.fixture
def no_partitioner(monkeypatch):
  """Estimates as without the compiler for GPUs."""
  replace_partitioner(monkeypatch, can_partition=lambda platform: False)


@pytest.fixture
def whole_steps():
  """Whole steps are partitioned, where the compiler for GPUs is installed."""


@pytest.fixture(autouse=True)
def walk_alone(request, monkeypatch):
  """Whole steps are not partitioned."""
  if 'whole_steps' not in request.fixturenames:
    replace_partitioner(monkeypatch, partitioned_step=lambda code, sizes, target: None)
