"""Conventions of the code base: file names and class names are unique, and every module has a docstring."""

import ast
from collections import Counter
from pathlib import Path

import flax_spmd

PACKAGE = Path(flax_spmd.__file__).parent
SAME_STEM = {'html_report'}  # of a comparison, and of a search


def modules(folder):
  return {path: ast.parse(path.read_text()) for path in sorted(folder.rglob('*.py'))}


def twice(names):
  return sorted(name for name, count in Counter(names).items() if count > 1)


def test_file_names_are_unique():
  stems = [path.stem for path in modules(PACKAGE / '_src') if path.stem != '__init__']
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
