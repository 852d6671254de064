"""Which tests each JAX runs: of those that take long its share, and `nox -s exhaustive` the others.

A test that is marked for one JAX runs there. Other slow tests, and those of files with many tests of one kind, are
dealt out by their names, so that about half of each kind runs on either; everything else runs on both.
"""

import zlib
from pathlib import Path

import jax
import pytest

_NEW = jax.__version_info__ >= (0, 11)

_DEALT = {
  # those of files, stores, processes and text hardly depend on JAX
  'checkpoint/arrangements_test.py',
  'checkpoint/async_save_test.py',
  'checkpoint/bad_checkpoints_test.py',
  'checkpoint/bad_safetensors_test.py',
  'checkpoint/changes_test.py',
  'checkpoint/conversion_test.py',
  'checkpoint/damaged_heads_test.py',
  'checkpoint/disk_store_test.py',
  'checkpoint/format_1_test.py',
  'checkpoint/generations_test.py',
  'checkpoint/hugging_face_test.py',
  'checkpoint/inspection_test.py',
  'checkpoint/interleavings_test.py',
  'checkpoint/killed_saves_test.py',
  'checkpoint/layout_pairs_test.py',
  'checkpoint/manager_buckets_test.py',
  'checkpoint/manager_policies_test.py',
  'checkpoint/manager_readers_test.py',
  'checkpoint/manager_storage_test.py',
  'checkpoint/object_store_test.py',
  'checkpoint/orbax_buckets_test.py',
  'checkpoint/protocol_model_test.py',
  'checkpoint/restore_arguments_test.py',
  'checkpoint/safetensors_test.py',
  'checkpoint/salvage_test.py',
  'checkpoint/save_safetensors_test.py',
  'checkpoint/stores_test.py',
  'checkpoint/unusual_states_test.py',
  'compare/pipelines_test.py',
  'pipeline/bad_input_test.py',
  'pipeline/states_test.py',
  'rules/toml_errors_test.py',
  'rules/toml_format_test.py',
  'search/pipelines_test.py',
  'search/search_test.py',
}

_CASES = {  # each function of these on one JAX, under one of its schedules
  'pipeline/arguments_test.py',
  'pipeline/loops_test.py',
  'pipeline/models_test.py',
  'pipeline/optimizers_test.py',
}

ON_NEW_JAX = (pytest.mark.new_jax,)
ON_OLD_JAX = (pytest.mark.old_jax,)


def is_for_another_jax(test: pytest.Item) -> bool:
  """Whether a test is among those that the other JAX runs."""
  marked = [
    new for mark, new in (('new_jax', True), ('old_jax', False)) if test.get_closest_marker(mark)
  ]
  if marked and marked[0] != _NEW:
    return True
  file = test.path.relative_to(Path(__file__).parent).as_posix()
  if file in _CASES:
    return zlib.crc32(test.nodeid.partition('[')[0].encode()) % 2 != _NEW
  dealt = file in _DEALT or bool(test.get_closest_marker('slow'))
  return dealt and not marked and zlib.crc32(test.nodeid.encode()) % 2 != _NEW
