"""The trainers of the examples, as modules."""

import contextlib
import importlib
import sys

import pytest

from tests.examples.jobs import EXAMPLES


@contextlib.contextmanager
def imported(example):
  """The trainer of an example, which imports its neighbours by their names."""
  folder = EXAMPLES / example
  sys.path.insert(0, str(folder))
  try:
    yield importlib.import_module('train')
  finally:
    sys.path.remove(str(folder))
    for name in {path.stem for path in folder.glob('*.py')} & set(sys.modules):
      del sys.modules[name]


@pytest.fixture(scope='module')
def trainer():
  """The trainer of llama."""
  with imported('llama') as module:
    yield module
