"""Random models under every schedule, compared with `jax.jit` in float64: a seed is a case.

    pytest -m "" tests/pipeline/random_models_test.py -k 'seed_17'
    FLAX_SPMD_SEEDS=5000:5500 pytest -m "" tests/pipeline/random_models_test.py     # seeds of your own

Two steps in a row have to agree.
"""

import os

import jax
import jax.numpy as jnp
import pytest

from tests.pipeline.cases import assert_same
from tests.pipeline.random_models import random_case
from tests.versions import ON_NEW_JAX

QUICK = 2
"""The seeds in CI; the others are exhaustive."""
FIRST, _, LAST = os.environ.get('FLAX_SPMD_SEEDS', '0:100').partition(':')
SEEDS = [
  pytest.param(seed, id=f'seed_{seed}', marks=ON_NEW_JAX if seed < QUICK else [pytest.mark.exhaustive])
  for seed in range(int(FIRST), int(LAST))
]


@pytest.mark.parametrize('seed', SEEDS)
def test_equals_jit(seed):
  with jax.enable_x64(True):
    case = random_case(seed)
    expected, actual = case.state, jax.tree.map(jnp.array, case.state)
    actual = case.layout.shard(actual) if seed % 3 else actual
    batch = case.layout.shard(case.batch, case.rows) if seed % 2 else case.batch
    plain, pipelined = jax.jit(case.step), case.layout.pipeline_jit(case.step, **case.options)
    for _ in range(2):
      expected, beside = plain(expected, case.batch, case.key)
      actual, other = pipelined(actual, batch, case.key)
      assert_same((actual, other), (expected, beside), 1e-9)
