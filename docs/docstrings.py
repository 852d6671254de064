"""Docstrings are written like Markdown, with Google's sections; Sphinx reads reStructuredText.

What differs is translated before Napoleon reads the sections: code between backticks, which is a link where
it is a public name, indented lines that are code, and stars before arguments.
"""

from __future__ import annotations

import functools
import importlib
import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

MODULES = ('checkpoint', 'explore', 'pipeline', 'presets', 'testing', 'tracking', 'translate', 'errors')
CODE = re.compile(r'(?<![`:\w])`([^`]+)`(?!`)(\w?)')
INDENTED = re.compile(r'(?<=\n\n)(?<!::\n\n)((?: {4}.*\n|\n)+)')  # after `::` it is code already


def translate(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
  """One docstring, in place, as `autodoc-process-docstring` has it."""
  text = '\n'.join(lines) + '\n'
  if what == 'module':
    text = INDENTED.sub(lambda found: f'::\n\n{found[1]}\n', text)
  blocks = re.split(r'((?:^ *(?:>>>|\.\.\.) .*\n)+)', text, flags=re.M)
  blocks[::2] = [
    _prose(block, name.rpartition('.')[0]) for block in blocks[::2]
  ]  # every other one is an example
  lines[:] = ''.join(blocks).splitlines()


def _prose(text: str, home: str) -> str:
  text = re.sub(r'(?<=, )\*+(?=\w+[,:])', lambda stars: stars[0].replace('*', r'\*'), text)
  # Napoleon reads the text before a colon in `Returns` as a type; an empty text is no type.
  text = re.sub(r'^( *(?:Returns|Yields):\n +)', r'\1: ', text, flags=re.M)
  return CODE.sub(lambda found: _code(found[1], home) + (f'\\ {found[2]}' if found[2] else ''), text)


def _code(code: str, home: str) -> str:
  """Code, as a link where it is a public name; one of the same module is meant before others."""
  name = code.removesuffix('(...)').removesuffix('()').removeprefix('spmd.')
  neighbour = f'{home.removeprefix("flax_spmd.")}.{name}'
  target = _targets().get(neighbour) or _targets().get(name)
  return f':py:obj:`{code} <{target}>`' if target else f'``{" ".join(code.split())}``'


@functools.cache
def _targets() -> dict[str, str]:
  """What is linked: public names, alone where they are of the package itself, and methods of a layout."""
  package = importlib.import_module('flax_spmd')
  own = [name for name in dir(package) if name not in (*MODULES, 'compare', 'search')]
  found = {name: f'flax_spmd.{name}' for name in own if callable(getattr(package, name))}
  for module in MODULES:
    names = [name for name in vars(importlib.import_module(f'flax_spmd.{module}')) if name[0] != '_']
    found |= {f'{module}.{name}': f'flax_spmd.{module}.{name}' for name in names}
  found |= {'compare': 'flax_spmd.explore.compare', 'search': 'flax_spmd.explore.search'}
  methods = [name for name in vars(package.Layout) if name[0] != '_']
  found |= {
    f'{layout}.{name}': f'flax_spmd.Layout.{name}' for layout in ('Layout', 'layout') for name in methods
  }
  return found


def _without_overloads() -> None:
  """Makes autodoc show implementations, which have every option: overloads are for type checkers."""
  analyze = ModuleAnalyzer.analyze

  def analyze_without_overloads(self: ModuleAnalyzer) -> None:
    analyze(self)
    self.overloads = {}

  ModuleAnalyzer.analyze = analyze_without_overloads


def setup(app: Sphinx) -> dict[str, bool]:
  """Connects, ahead of Napoleon."""
  _without_overloads()
  app.connect('autodoc-process-docstring', translate, priority=400)
  return {'parallel_read_safe': True}
