"""Compilers start in no time."""

import pytest


@pytest.fixture(scope='module', autouse=True)
def quick_compilers(forked_compilers):
  """For all tests here."""
