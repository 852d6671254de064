"""For pytest from the root: the tests' settings first, and the names that doctests may use."""

import os

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from jax.sharding import PartitionSpec

import flax_spmd

jax.config.update('jax_numpy_rank_promotion', 'raise')
settings.register_profile('default', deadline=None, max_examples=200, derandomize=True)
settings.load_profile('default')


@pytest.fixture(autouse=True)
def doctest_names(doctest_namespace, tmp_path):
  """What a docstring example may use without importing it."""
  names = {name: getattr(flax_spmd, name) for name in dir(flax_spmd) if not name.startswith('_')}
  doctest_namespace.update(names, checkpoint=flax_spmd.checkpoint, tmp=tmp_path)
  doctest_namespace.update(nn=nn, jax=jax, jnp=jnp, np=np, PartitionSpec=PartitionSpec)
