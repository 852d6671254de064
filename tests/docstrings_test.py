"""Docstring examples: every public function, class and method of a layout has one, and all of them run."""

import ast
import doctest
import functools
import importlib
import inspect
import pkgutil
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import flax_spmd

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
MODULES = sorted(m.name for m in pkgutil.walk_packages(flax_spmd.__path__, 'flax_spmd.'))
PUBLIC = (
  'flax_spmd',
  'flax_spmd.checkpoint',
  'flax_spmd.cli',
  'flax_spmd.errors',
  'flax_spmd.explore',
  'flax_spmd.pipeline',
  'flax_spmd.presets',
  'flax_spmd.testing',
  'flax_spmd.tracking',
  'flax_spmd.translate',
)


class Finder(doctest.DocTestFinder):
  """Finds examples where they are written: `public` gives public objects the name of another module."""

  def _from_module(self, module, obj):
    if inspect.isfunction(obj):
      return inspect.unwrap(obj).__globals__ is vars(module)
    if inspect.isclass(obj):
      return obj.__qualname__.partition('.')[0] in classes_of(module.__file__)
    return super()._from_module(module, obj)


@functools.cache
def classes_of(file):
  return {node.name for node in ast.parse(Path(file).read_text()).body if isinstance(node, ast.ClassDef)}


def names_for_examples(tmp_path):
  """The names that a docstring example may use without imports."""
  ours = {name: getattr(flax_spmd, name) for name in dir(flax_spmd) if not name.startswith('_')}
  others = dict(
    nn=nn,
    jax=jax,
    jnp=jnp,
    np=np,
    PartitionSpec=PartitionSpec,
    NamedSharding=NamedSharding,
    tmp=tmp_path,
  )
  asked_for = {name: getattr(flax_spmd, name) for name in ('checkpoint', 'compare', 'search')}
  return {**ours, **others, **asked_for}


def each(name):
  """A module as a parameter: examples with compilers that start run on one JAX."""
  compiles = name in ('flax_spmd._src.compare.compare', 'flax_spmd._src.search.search')
  return pytest.param(name, marks=pytest.mark.slow if compiles else ())


@pytest.mark.parametrize('name', list(map(each, MODULES)))
def test_examples(name, tmp_path):
  module = importlib.import_module(name)
  runner = doctest.DocTestRunner(optionflags=FLAGS)
  names = {
    name: value for name, value in names_for_examples(tmp_path).items() if name not in vars(module)
  }
  for example in Finder(exclude_empty=True).find(module, extraglobs=names):
    report = []
    runner.run(example, out=report.append)
    assert not runner.failures, ''.join(report)


def public_things():
  """Functions and classes by their public names, and the methods of a layout."""
  for module_name in PUBLIC:
    module = importlib.import_module(module_name)
    for name in dir(module):
      thing = getattr(module, name)
      home = getattr(thing, '__module__', '')  # of the package, any module's
      ours = home.startswith('flax_spmd') if hasattr(module, '__path__') else home == module_name
      if name[0] != '_' and ours and (inspect.isfunction(thing) or is_class(thing)):
        yield f'{module_name}.{name}', thing
  for name in vars(flax_spmd.Layout):
    if name[0] != '_' and inspect.isroutine(getattr(flax_spmd.Layout, name)):
      yield f'flax_spmd.Layout.{name}', getattr(flax_spmd.Layout, name)


def is_class(thing):
  """Whether it is a class with something to show: errors are raised, and kinds of them do the same."""
  return inspect.isclass(thing) and not issubclass(thing, Exception)


def test_everything_public_has_an_example():
  things = dict(public_things())
  parser = doctest.DocTestParser()
  without = [
    name for name, thing in things.items() if not parser.get_examples(inspect.getdoc(thing) or '')
  ]
  assert len(things) > 120  # or they were not found
  assert not without, 'without an example:\n' + '\n'.join(without)


def test_every_public_example_is_run():
  modules = [importlib.import_module(name) for name in MODULES]
  found = [example for module in modules for example in Finder(exclude_empty=True).find(module)]
  run = {example.name for example in found if example.examples}
  missing = [
    name
    for name, thing in public_things()
    if not any(one.endswith(f'.{thing.__qualname__}') for one in run)
  ]
  assert len(run) > 200 and not missing
