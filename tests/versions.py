"""Which tests each JAX runs: of those that take long its share, and `nox -s exhaustive` the others.

A test that is marked for one JAX runs there. Other slow tests are dealt out by their names, so that about half
of each kind runs on either; everything else runs on both.
"""

import zlib

import jax
import pytest

_NEW = jax.__version_info__ >= (0, 11)

ON_NEW_JAX = (pytest.mark.new_jax,)
ON_OLD_JAX = (pytest.mark.old_jax,)


def is_for_another_jax(test: pytest.Item) -> bool:
  """Whether a test is among those that the other JAX runs."""
  for mark, new in (('new_jax', True), ('old_jax', False)):
    if test.get_closest_marker(mark):
      return new != _NEW
  return bool(test.get_closest_marker('slow')) and zlib.crc32(test.nodeid.encode()) % 2 != _NEW
