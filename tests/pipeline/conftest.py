"""The schedules of the tests that compare a pipeline with `jax.jit`."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from flax_spmd.pipeline import OneFOneB, ZeroBubbleH1
from tests.pipeline.cases import STAGES
from tests.versions import ON_NEW_JAX, ON_OLD_JAX


@pytest.fixture(
  params=[
    pytest.param(OneFOneB(STAGES), id='1f1b', marks=ON_OLD_JAX),
    pytest.param(ZeroBubbleH1(STAGES), id='zero_bubble', marks=ON_NEW_JAX),
  ]
)
def schedule(request):
  """A schedule with whole backwards, and one that splits off the gradients of weights."""
  return request.param


@pytest.fixture(autouse=True)
def no_cache_of_programs():
  """Turns the cache of this run off: a program that came from it is not loaded on the ranks of equal stages."""
  before = jax.config.values['jax_enable_compilation_cache']
  jax.config.update('jax_enable_compilation_cache', False)
  compilation_cache.reset_cache()
  yield
  jax.config.update('jax_enable_compilation_cache', before)
  compilation_cache.reset_cache()
