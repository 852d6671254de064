"""Devices and strictness, set once: 8 emulated devices, warnings are errors, rank promotion raises."""

import gc
import os
import subprocess
import sys
import tempfile
from types import SimpleNamespace

from tests.processes import QUICKLY_COMPILED, run_module

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = f'--xla_force_host_platform_device_count=8 {QUICKLY_COMPILED}'
# What is compiled is kept for this run only, for all of its processes: many tests compile the same programs.
if 'PYTEST_XDIST_WORKER' not in os.environ:
  CACHES = tempfile.TemporaryDirectory(prefix='flax_spmd_tests_')
  os.environ['FLAX_SPMD_CACHE'] = f'{CACHES.name}/compared'
  os.environ['JAX_COMPILATION_CACHE_DIR'] = f'{CACHES.name}/compiled'
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
  os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'

import jax
import pytest
from hypothesis import HealthCheck, settings

import flax_spmd as spmd
from flax_spmd._src.compare import compilation
from tests.versions import (
  is_for_another_jax,
  needs_compiler,
  needs_gpu_compiler,
  needs_tpu_compiler,
)

jax.config.update('jax_numpy_rank_promotion', 'raise')
for profile, examples in (('default', 100), ('exhaustive', 400)):
  settings.register_profile(
    profile,
    deadline=None,
    max_examples=examples,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],  # which a loaded machine would fail
  )
settings.load_profile('default')  # `nox -s exhaustive` asks for the other


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  """Leaves tests that another JAX version runs to `nox -s exhaustive`; marks those for `nox -s compilers`."""
  for test in items:
    if is_for_another_jax(test):
      test.add_marker(pytest.mark.exhaustive)
    if needs_compiler(test):
      test.add_marker(pytest.mark.compiler)


def pytest_collection_finish():
  """Takes what is loaded by now out of the garbage collection."""
  gc.collect()
  gc.freeze()


def pytest_sessionfinish():
  """Under `nox -s coverage`, saves the measurement now, since xdist kills workers that end slowly."""
  coverage = sys.modules.get('coverage')
  measured = coverage and coverage.Coverage.current()
  if measured:
    measured.save()


@pytest.fixture(scope='session')
def mesh():
  """Eight devices as data 2 x model 4."""
  return spmd.make_mesh({'data': 2, 'model': 4})


@pytest.fixture(scope='module')
def forked_compilers():
  """Compilers of `compare` and `search` that start in no time; those of examples and commands start as they do for users."""
  start = SimpleNamespace(run=run_module, TimeoutExpired=subprocess.TimeoutExpired)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(compilation, 'subprocess', start)
    yield


@pytest.fixture(scope='module')
def new_objects_only():
  """Takes what is there out of the garbage collection, for tests that ask for it many times."""
  gc.collect()
  gc.freeze()


@pytest.fixture(autouse=True)
def survivors_are_not_collected_again():
  """Leaves what has survived a collection of all garbage out of the next ones, which would take seconds each."""
  before = gc.get_stats()[2]['collections']
  yield
  if gc.get_stats()[2]['collections'] > before:
    gc.freeze()


@pytest.fixture
def gpu_compiler():
  """Skips the test where XLA's compiler for GPUs is not installed."""
  needs_gpu_compiler()


@pytest.fixture
def tpu_compiler():
  """Skips the test where the compiler for TPUs is not installed."""
  needs_tpu_compiler()


@pytest.fixture(autouse=True)
def no_url_is_a_folder():
  """Checks that the test wrote nothing to a local folder such as `s3:`, into which a client of no bucket makes a URL."""
  folder = os.getcwd()
  before = os.listdir(folder)
  yield
  assert not [name for name in os.listdir(folder) if name.endswith(':') and name not in before]


@pytest.fixture(autouse=True)
def nothing_left_in_force():
  """Checks that the test left no rules and no mesh in force."""
  yield
  assert spmd.get_logical_axis_rules() == ()
  assert jax.sharding.get_abstract_mesh().empty
