"""The house: a name stands for one file and one class, every module has a docstring, tests touch no private name."""

import ast
import functools
import re
from collections import Counter
from pathlib import Path

import pytest

import flax_spmd

pytestmark = pytest.mark.new_jax  # it uses no JAX

PACKAGE = Path(flax_spmd.__file__).parent
SAME_STEM = {'html_report'}  # of a comparison, and of a search


@functools.cache
def modules(folder):
  return {path: ast.parse(path.read_text()) for path in sorted(folder.rglob('*.py'))}


def twice(names):
  return sorted(name for name, count in Counter(names).items() if count > 1)


def test_file_names_are_unique():
  stems = [path.stem for path in (PACKAGE / '_src').rglob('*.py') if path.stem != '__init__']
  assert set(twice(stems)) <= SAME_STEM


def test_class_names_are_unique():
  classes = [
    node.name.lstrip('_')
    for tree in modules(PACKAGE).values()
    for node in ast.walk(tree)
    if isinstance(node, ast.ClassDef)
  ]
  assert not twice(classes)


def test_every_module_has_a_docstring():
  without = [
    path.name for path, tree in modules(PACKAGE).items() if tree.body and not ast.get_docstring(tree)
  ]
  assert not without


def test_trees_are_made_by_jax():
  """States whose classes check their fields let `jax.tree.unflatten` pass, and not a method of the tree's structure."""
  of_other_trees = re.compile(r'jax\.tree|skeleton|_graphlib\(\)')  # checkpoints', NNX's
  offenders = [
    f'{path.name}:{node.lineno} {ast.unparse(node)}'
    for path, tree in modules(PACKAGE).items()
    for node in ast.walk(tree)
    if isinstance(node, ast.Attribute)
    and node.attr == 'unflatten'
    and not of_other_trees.fullmatch(ast.unparse(node.value))
  ]
  assert not offenders


def test_tests_touch_no_private_name():
  """Attributes with an underscore, except those of NamedTuples, displays, JAX's jitted functions, and a test's own classes."""
  allowed = re.compile(r'_(asdict|replace|fields|make|exit|repr_\w+_|cache_size)|__\w+__')
  trees = modules(Path(__file__).parent)
  offenders = [
    f'{path.name}:{node.lineno} {ast.unparse(node)}'
    for path, tree in trees.items()
    for node in ast.walk(tree)
    if isinstance(node, ast.Attribute)
    and node.attr.startswith('_')
    and not allowed.fullmatch(node.attr)
    and ast.unparse(node.value) not in ('self', 'cls', 'super()', 'flax_spmd', 'jax', 'nn.spmd')
  ]
  imported = [
    f'{path.name}:{node.lineno} {name.name}'
    for path, tree in trees.items()
    for node in ast.walk(tree)
    if isinstance(node, ast.ImportFrom) and (node.module or '').startswith('flax_spmd')
    for name in node.names
    if name.name.startswith('_')
  ]
  assert not offenders + imported
