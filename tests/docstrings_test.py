"""Every example in a docstring runs, and prints what it says."""

import doctest
import importlib
import pkgutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import flax_spmd

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
MODULES = sorted(found.name for found in pkgutil.walk_packages(flax_spmd.__path__, 'flax_spmd.'))


def names_for_examples(tmp_path):
  """What a docstring example may use without importing it."""
  ours = {name: getattr(flax_spmd, name) for name in dir(flax_spmd) if not name.startswith('_')}
  others = dict(nn=nn, jax=jax, jnp=jnp, np=np, PartitionSpec=PartitionSpec, tmp=tmp_path)
  return {**ours, **others, 'checkpoint': flax_spmd.checkpoint}


@pytest.mark.parametrize('name', MODULES)
def test_examples(name, tmp_path):
  module = importlib.import_module(name)
  runner = doctest.DocTestRunner(optionflags=FLAGS)
  names = {
    name: value for name, value in names_for_examples(tmp_path).items() if name not in vars(module)
  }
  for example in doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs=names):
    report = []
    runner.run(example, out=report.append)
    assert not runner.failures, ''.join(report)


def test_there_are_examples():
  found = [
    example
    for name in MODULES
    for example in doctest.DocTestFinder().find(importlib.import_module(name))
    if example.examples
  ]
  assert len(found) > 35
