"""The page of public models: it shows the recorded results, and no model is silently other than by its own partitioner."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope='module')
def render():
  spec = importlib.util.spec_from_file_location('zoo_render', ROOT / 'zoo' / 'render.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_the_page_shows_the_recorded_results(render):
  page = render.PAGE.read_text()
  assert {match[2] for match in render.BLOCK.finditer(page)} == {
    'count',
    'annotated',
    'plain',
    'failures',
  }
  assert render.filled(page) == page


def test_a_failure_is_a_row_with_its_error(render, monkeypatch):
  row = {
    'package': 'p',
    'version': '1',
    'annotated': 'names',
    'changes': '',
    'checks': dict.fromkeys(CHECKS, 'ok') | {'pipeline': render.NOT_TRIED},
  }
  row['versions'] = {'jax': '1', 'flax': '2', 'python': '3'}
  row['checks']['shardings'] = 'silently 1 of 2 leaves otherwise: w'
  monkeypatch.setattr(render, 'recorded', lambda: {'model': row})
  assert (
    render.annotated().splitlines()[-1]
    == '| model (names) | p 1 | equal | equal | fails | equal | equal | – | – |'
  )
  assert render.failures() == '- **model**, shardings: `silently 1 of 2 leaves otherwise: w`'
  assert '1 cases from 1 packages and repositories, 1 of them' in render.count()
  assert '0 pass every check that was tried, 1 are silently' in render.count()
  assert render.count().endswith(
    ' 0 were tried as pipelines, and 0 of them pass. Run with jax 1, flax 2, Python 3.'
  )


CHECKS = ('init', 'shardings', 'steps', 'restore', 'compare', 'pipeline')


def test_every_row_has_every_check():
  rows = json.loads((ROOT / 'zoo' / 'results.json').read_text())
  assert {tuple(sorted(row['checks'])) for row in rows.values()} == {tuple(sorted(CHECKS))}
