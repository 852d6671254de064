"""Benchmark pages: every table is generated from the recorded results."""

import importlib
import json
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import flax_spmd as spmd
from flax_spmd import explore
from flax_spmd._src.compare import costs

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / 'benchmarks'
SEARCHES = ('published', 'activations', 'sample', 'fits', 'strangers', 'search')


@pytest.fixture(scope='module')
def scripts():
  """The modules of the folder, which are scripts and no package."""
  names = (
    'harness',
    'reporting',
    'render',
    'run',
    'samples',
    'strangers',
    'strange_steps',
    'published_steps',
    'one_gpu',
  )
  sys.path.insert(0, str(FOLDER))
  yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
  sys.path.remove(str(FOLDER))
  for name in names:
    del sys.modules[name]


@pytest.fixture
def render(scripts):
  return scripts.render


@pytest.mark.parametrize('page', ['benchmarks/README.md', 'README.md'])
def test_the_page_shows_the_recorded_results(render, page):
  text = (ROOT / page).read_text()
  assert render.BLOCK.search(text)
  assert render.filled(text) == text


def test_recorded_results_are_shown_and_can_be_reproduced(render, scripts):
  kept = {path.name.partition('-jax-')[0] for path in render.RESULTS.glob('*.json')}
  shown = {match[2] for match in render.BLOCK.finditer((FOLDER / 'README.md').read_text())}
  named = {re.sub(' --(only )?', '_', command) for command in scripts.run.ALL}
  assert kept == shown <= named


def test_benchmarks_are_run_by_name(scripts):
  search = [['search', '--only', one] for one in SEARCHES]
  assert scripts.run.commands_of(['boxes', 'search']) == ([['boxes'], *search], True)
  assert scripts.run.commands_of(['layouts --large', 'layouts']) == (
    [['layouts', '--large'], ['layouts']],
    True,
  )
  for arguments in (['search', '--sample', '20'], ['search --sample 20'], ['search --sample', '20']):
    assert scripts.run.commands_of(arguments) == ([['search', '--sample', '20']], False)
  assert scripts.run.commands_of(['search --only fits', 'search'])[0] == [
    search[3],
    *search[:3],
    *search[4:],
  ]
  assert len(scripts.run.commands_of([])[0]) == len(scripts.run.ALL)
  for name in ('boxen', ''):
    with pytest.raises(SystemExit, match=f"'{name}' is not a benchmark; available: boxes, "):
      scripts.run.commands_of([name])


def test_headlines_are_recorded_figures(render):
  missing = [
    figure
    for name, figure, *_ in render.HEADLINES
    if not any(each['name'] == figure for one in render.records(name) for each in one['figures'])
  ]
  assert not missing


def test_time_brackets_are_those_fitted_to_the_published_steps(render, scripts):
  [record] = render.records('search_published')
  module = scripts.published_steps
  steps = [module.Step(**step) for step in record['details']['published']['steps']]
  fitted = module.fitted(steps)
  assert fitted == record['details']['published']['fitted']
  assert fitted['bandwidth'] == costs.BANDWIDTH
  figures = {one['name']: one['value'] for one in record['figures']}
  assert figures['published: steps'] == costs.PUBLISHED
  assert figures['published: of them in their bracket'] == costs.INSIDE
  assert figures['published: faster than the low end'] == 0
  known = explore.chips()
  for step in steps:
    chip = known[step.target.partition(':')[0]]
    assert chip.efficiency == fitted['efficiencies'][step.die]
    assert list(chip.spread) == fitted['spreads'][chip.platform]


def test_every_published_step_names_its_source_and_is_in_the_results(render, scripts):
  [record] = render.records('search_published')
  content = tomllib.loads((FOLDER / 'published.toml').read_text())
  steps = record['details']['published']['steps']
  listed = steps[: len(content['steps'])]
  assert [(one['target'], one['model'], one['batch']) for one in content['steps']] == [
    (one['target'], one['model'], one['batch']) for one in listed
  ]
  measured = json.loads((FOLDER / 'one_gpu.json').read_text())
  others = steps[len(listed) :]
  assert len(others) == 12 and all(one['target'] == 'h100:1' for one in others)
  assert all(one['seconds'] == measured[one['model']]['seconds'] for one in others)
  assert all(re.match(r'https://github.com/\S+/\S+$', one['source']) for one in steps)


def test_figures_of_no_layout_have_no_verdict(scripts):
  figures = scripts.strange_steps.figures({})
  judged = [figure.name for figure in figures if figure.verdict in ('met', 'MISSED')]
  assert judged == [
    'strangers: neither estimated nor compiled',
    'strangers: estimates without it, per second and core',
  ]


def _record(jax: str, value: float, interval: tuple[float, float]) -> dict:
  figure = {
    'name': 'save',
    'value': value,
    'interval': interval,
    'unit': 'x',
    'target': '<= 1',
    'verdict': 'met',
  }
  return {
    'versions': {'jax': jax, 'python': '3.12'},
    'cores': 2,
    'figures': [figure],
  }


def test_table_has_columns_for_each_jax(render):
  made = render.table([_record('0.10.2', 0.5, (0.4, 0.6)), _record('0.12.0', 1234.5, (1234.5, 1234.5))])
  assert made == (
    '|      | unit | target | jax 0.10.2       |     | jax 0.12.0 |     |\n'
    '| ---- | ---- | ------ | ---------------- | --- | ---------- | --- |\n'
    '| save | x    | <= 1   | 0.5 (0.4 to 0.6) | met | 1,234      | met |'
  )


def test_newer_jax_comes_later(render, monkeypatch, tmp_path):
  monkeypatch.setattr(render, 'RESULTS', tmp_path)
  for version in ('0.12.0', '0.9.2', '0.10.2'):
    (tmp_path / f'boxes-jax-{version}.json').write_text(f'{{"versions": {{"jax": "{version}"}}}}')
  assert [one['versions']['jax'] for one in render.records('boxes')] == ['0.9.2', '0.10.2', '0.12.0']


@pytest.mark.parametrize(
  ('interval', 'verdict'), [((1, 2), 'met'), ((1, 4), 'undecided'), ((4, 5), 'MISSED')]
)
def test_a_verdict_is_about_the_whole_interval(scripts, interval, verdict):
  target = scripts.harness.at_most(3)
  assert (str(target), target.verdict(*interval)) == ('<= 3', verdict)


def test_targets_as_text(scripts):
  harness = scripts.harness
  assert [str(harness.at_least(15)), str(harness.equal(1)), str(harness.equal(4, 0))] == [
    '>= 15',
    '1.00 +- 0.05',
    '= 4',
  ]
  assert harness.at_least(15).verdict(14, 14) == 'MISSED'


def test_a_report_is_recorded_as_json_and_shown(scripts, capsys):
  harness, reporting = scripts.harness, scripts.reporting
  figure = harness.summary('save', [1.0, 1.1, 1.2, 1.3, 1.4], 's', harness.at_most(2))
  table = reporting.Table('Two', ['a|b', 'c'], [['1', '2\n3']])
  reporting.Report('save', [figure], [table], {'none': float('inf')}).publish(as_json=True)
  record = json.loads(capsys.readouterr().out)
  assert record['details'] == {'none': None} and record['benchmark'] == 'save'
  assert '| save | s    | <= 2   | 1.2 (1 to 1.4)' in scripts.render.table([record])
  assert str(table) == 'Two\n\n| a\\|b | c   |\n| ---- | --- |\n| 1    | 2 3 |'


@pytest.mark.parametrize('name', ['t5', 'lstm', pytest.param('unrolled', marks=pytest.mark.exhaustive)])
def test_steps_of_a_gpu_are_as_estimated(scripts, name):
  """The time that was measured lies in the bracket, and the memory is the compiler's, which was that of another JAX."""
  measured = json.loads((FOLDER / 'one_gpu.json').read_text())[name]
  layout = spmd.Layout(spmd.abstract_mesh({'data': 1}), scripts.one_gpu.RULES)
  with jax.numpy_rank_promotion('allow'):
    outcome = explore.Estimator(scripts.one_gpu.train_step(name)).estimate(layout, 'h100:1')
  assert outcome.cost.low <= measured['seconds'] <= outcome.cost.high
  peak = measured['arguments'] + measured['temporaries'] + measured['results']
  assert outcome.memory.peak == pytest.approx(peak, rel=0.04)


def test_the_decoders_of_a_gpu_are_in_the_fit_as_measured(scripts):
  measured = json.loads((FOLDER / 'one_gpu.json').read_text())
  for name, step in scripts.one_gpu.DECODERS.items():
    assert step['seconds'] == pytest.approx(measured[name]['seconds'], rel=1e-3)
