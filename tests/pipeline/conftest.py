"""The schedules of the tests that compare a pipeline with `jax.jit`."""

import pytest

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
