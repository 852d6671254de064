"""A pytest plugin that runs Flax's own tests with our names in place of Flax's: `pytest -p ... partitioning_test.py`.

A name is ours wherever a test takes it from one of Flax's modules, `nn.get_partition_spec` say, under whatever alias.
"""

import inspect
import types

import flax.linen as nn
from flax.core import meta
from flax.linen import partitioning
from flax.linen import spmd as flax_functions

import flax_spmd as spmd

FLAX_MODULES = (nn, meta, partitioning, flax_functions)
# Names of `partitioning` that are not ours: one is another class; the tests of the other, an alias of
# `with_logical_constraint`, mock a private function of Flax, which ours does not call.
KEPT = {(partitioning, 'AxisMetadata'), (partitioning, 'with_sharding_constraint')}

_OURS = {
  id(theirs): ours
  for module in FLAX_MODULES
  for name, ours in vars(spmd).items()
  if callable(ours) and callable(theirs := getattr(module, name, None)) and (module, name) not in KEPT
}


class WithOurNames(types.ModuleType):
  """One of Flax's modules, with our functions and classes in place of its own."""

  def __init__(self, module: types.ModuleType):
    super().__init__(module.__name__)
    self.theirs = module

  def __getattr__(self, name: str):
    value = getattr(self.theirs, name)
    if inspect.ismodule(value) and value in FLAX_MODULES:
      return WithOurNames(value)
    return value if (self.theirs, name) in KEPT else _OURS.get(id(value), value)


def put_our_names_into(module: types.ModuleType) -> None:
  """Replaces Flax's modules in the namespace of a module."""
  for name, value in list(vars(module).items()):
    if inspect.ismodule(value) and value in FLAX_MODULES:
      setattr(module, name, WithOurNames(value))


def pytest_collection_modifyitems(items):
  for module in {item.module for item in items}:
    put_our_names_into(module)
