"""Which tests each JAX runs: of those that take long its share, and `nox -s exhaustive` the others.

A test that is marked for one JAX runs there. Other slow tests, and those of folders and files with many tests of one
kind, are dealt out by their names, so that about half of each kind runs on either; everything else runs on both.
"""

import zlib
from pathlib import Path

import jax
import pytest

from flax_spmd._src.compare.compilation import has_wheel

_NEW = jax.__version_info__ >= (0, 11)

_DEALT_FOLDERS = {
  # many tests of one kind each, so that both halves show the same; those of files and text hardly depend on JAX
  'checkpoint',
  'cli',
  'compare',
  'data',
  'draw',
  'estimate',
  'examples',
  'history',
  'hlo',
  'jit',
  'multiprocess',
  'names',
  'pipeline',
  'reshard',
  'rules',
  'search',
}

_DEALT_FILES = {
  'benchmarks_test.py',
  'docs_test.py',
  'docstrings_test.py',
  'house_test.py',
  'open_blocks_test.py',
  'pickling_test.py',
  'readme_test.py',
  'zoo_test.py',
}

_CASES = {  # each function of these on one JAX, under one of its schedules
  'pipeline/arguments_test.py',
  'pipeline/loops_test.py',
  'pipeline/models_test.py',
  'pipeline/optimizers_test.py',
}

ON_NEW_JAX = (pytest.mark.new_jax,)
ON_OLD_JAX = (pytest.mark.old_jax,)


def needs_compiler(test: pytest.Item) -> bool:
  """Whether a test needs a compiler for absent GPUs or TPUs."""
  return not {'gpu_compiler', 'tpu_compiler'}.isdisjoint(getattr(test, 'fixturenames', ()))


def is_for_another_jax(test: pytest.Item) -> bool:
  """Whether a test is among those that the other JAX runs."""
  marked = [
    new for mark, new in (('new_jax', True), ('old_jax', False)) if test.get_closest_marker(mark)
  ]
  if marked and marked[0] != _NEW:
    return True
  path = test.path.relative_to(Path(__file__).parent)
  if path.as_posix() in _CASES:
    return zlib.crc32(test.nodeid.partition('[')[0].encode()) % 2 != _NEW
  is_slow = bool(test.get_closest_marker('slow'))
  dealt = is_slow or path.parts[0] in _DEALT_FOLDERS or path.as_posix() in _DEALT_FILES
  dealt = dealt and not needs_compiler(test)  # that may be installed for one of them only
  return dealt and not marked and zlib.crc32(test.nodeid.encode()) % 2 != _NEW


def needs_gpu_compiler() -> None:
  """Skips the test where XLA's compiler for GPUs is not installed."""
  if not has_wheel('cuda'):
    pytest.skip('no compiler for GPUs')


def needs_tpu_compiler() -> None:
  """Skips the test where the compiler for TPUs is not installed."""
  if not has_wheel('tpu'):
    pytest.skip('no compiler for TPUs')
