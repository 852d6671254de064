"""Sources of the documentation: the picture is drawn by the code, and the reference has every public name."""

import importlib.util
import inspect
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import flax_spmd

DOCS = Path(__file__).parent.parent / 'docs'
MODULES = ('checkpoint', 'errors', 'explore', 'pipeline', 'presets', 'testing', 'tracking', 'translate')
ELSEWHERE = {
  'errors.Problem',
  'errors.problems_text',
  'errors.raise_problems',
  'errors.did_you_mean',
}  # internal


def script(name):
  """One of the scripts that draw."""
  spec = importlib.util.spec_from_file_location(name, DOCS / f'{name}.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_badges_agree_with_the_package():
  badges = script('badges')
  drawn = badges.picture(badges.badges())
  assert drawn == (DOCS / 'badges.svg').read_text(), 'run `python docs/badges.py`'
  words = {element.text for element in ET.fromstring(drawn).iter() if element.text}
  assert {'3.11 | 3.12 | 3.13', 'Apache-2.0'} <= words


def test_the_picture_is_of_the_example():
  idea = script('idea')
  drawn = idea.picture(*idea.example())
  assert drawn == (DOCS / 'idea.svg').read_text(), 'run `python docs/idea.py`'
  words = {element.text for element in ET.fromstring(drawn).iter() if element.text}
  assert {'batch → data', 'hidden → model', 'embed 64', '0, 4'} <= words


def public_names():
  """Functions and classes as users reach them: `Layout`, `checkpoint.save`."""
  names = {name for name in dir(flax_spmd) if is_public(name, getattr(flax_spmd, name))}
  for module in MODULES:
    things = vars(getattr(flax_spmd, module)).items()
    names |= {f'{module}.{name}' for name, thing in things if is_public(name, thing)}
  imported = {
    'presets.fsdp_rule',
    'presets.optimizer_over_rule',
    'presets.Rules',
    'testing.Layout',
    'testing.Row',
  }
  twice = {'compare', 'search'}  # documented in `explore`
  return names - imported - twice - ELSEWHERE


def is_public(name, thing):
  ours = getattr(thing, '__module__', '').startswith('flax_spmd')
  return name[0] != '_' and ours and (inspect.isfunction(thing) or inspect.isclass(thing))


def documented(pages, entry):
  """The names on some pages, below each `currentmodule` or `automodule`."""
  names = set()
  for page in pages:
    module = 'flax_spmd'
    for line in page.read_text().splitlines():
      if named := re.match(r'\.\. (?:currentmodule|automodule):: (\S+)', line):
        module = named[1]
      elif named := re.match(entry, line):
        names.add(f'{module}.{named[1]}'.removeprefix('flax_spmd.'))
  return names


@pytest.mark.parametrize(
  'pages, entry',
  [('[!i]*.rst', r'\.\. auto(?:function|class|exception):: (\w+)'), ('index.rst', r'   ([A-Za-z]\w*)$')],
  ids=['pages', 'index'],
)
def test_the_reference_has_every_public_name(pages, entry):
  names = documented((DOCS / 'api').glob(pages), entry)
  topics = {page.stem for page in (DOCS / 'api').iterdir()}
  assert not public_names() - names
  assert names - topics <= public_names() | {'AxisMetadata', 'RulesFallback'}
