"""`flax-spmd search`."""

import json
import sys

import pytest

import flax_spmd as spmd
from flax_spmd import cli, explore
from flax_spmd._src.rules import toml_format
from flax_spmd._src.search import trials
from tests.search import search_test


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
  """A folder with a module that defines the model."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.setenv('FLAX_SPMD_CACHE', str(tmp_path / 'cache'))
  monkeypatch.setattr(trials, 'Estimator', search_test.Formula)
  monkeypatch.setattr(trials, 'compare', search_test.compiling)
  (tmp_path / 'a_model.py').write_text(
    'from tests.search.search_test import step, create, data\ndef setup():\n  return step, create, data()\n'
  )
  return tmp_path


def run(capsys, *arguments):
  code = cli.main(['search', 'a_model:setup', '--target', 'cpu:8', '--candidates', '60', *arguments])
  captured = capsys.readouterr()
  return code, captured.out, captured.err


def test_search_from_the_command_line(project, capsys):
  code, out, err = run(capsys, '--out', 'layout.toml', '--html', 'page.html', '--memory', '1GiB')
  assert (code, err) == (0, '') and out.endswith('Wrote layout.toml, page.html\n')
  mesh = spmd.abstract_mesh(toml_format.read((project / 'layout.toml').read_text()).axes)
  assert spmd.Layout.from_toml((project / 'layout.toml').read_text(), mesh=mesh).mesh.size == 8
  assert 'Search for cpu:8' in (project / 'page.html').read_text()


def test_constraints(capsys):
  constraints = (
    '--mesh',
    'rows=2,model=-1',
    '--pin',
    'mlp=model',
    '--pin',
    'embed=',
    '--batch-only',
    'rows',
  )
  code, out, _ = run(
    capsys, *constraints, '--choice', 'remat=none,full', '--tensor', '4', '--top', '1', '--json'
  )
  result = json.loads(out)
  assert code == 0 and result['choices'] == {'remat': 'none'}
  layout = toml_format.read(result['layout'])
  assert layout.axes == {'rows': 2, 'model': 4} and dict(layout.rules.pairs)['mlp'] == 'model'
  code, out, _ = run(capsys, '--forbid', 'mlp', '--forbid', 'embed=model', '--json')
  assert code == 0 and 'mlp' not in json.loads(out)['layout']


def test_bars_are_no_part_of_the_output(capsys, monkeypatch):
  monkeypatch.setattr(sys.stderr, 'isatty', lambda: True)
  code, out, err = run(capsys, '--json')
  assert code == 0 and json.loads(out)['target'] == 'cpu:8' and 'estimating' in err


def test_exit_codes(capsys):
  code, out, err = run(capsys, '--memory', '1MiB')
  assert (code, out) == (1, '') and err.startswith(
    'FAILED None of the 60 layouts fits into 1 MiB per device on cpu:8.'
  )
  code, _, err = run(capsys, '--memory', '100GiB')
  assert code == 2 and err.startswith('The memory budget of 100 GiB exceeds the 16 GiB of one cpu.')
  with pytest.raises(SystemExit):
    run(capsys, '--mesh', 'data=many')


@pytest.mark.parametrize('option', ['--out', '--html'])
@pytest.mark.parametrize(
  ('path', 'reason'),
  [
    ('.', "'.' is a folder, not a file"),
    ('no/x', "'no/x' cannot be written: there is no folder 'no'"),
  ],
)
def test_files_that_cannot_be_written_are_refused_before_the_search(option, path, reason, capsys):
  with pytest.raises(SystemExit) as caught:
    run(capsys, option, path)
  error = capsys.readouterr().err
  assert caught.value.code == 2 and error.endswith(f'error: argument {option}: {reason}\n')


def test_pipelines(capsys, monkeypatch):
  received = {}

  def search(*args, pipelines, **rest):
    received['pipelines'] = pipelines
    return real(*args, **rest)

  real = explore.search
  monkeypatch.setattr(explore, 'search', search)
  schedules = (
    '--pipeline',
    "Automatic(4, {'fwd': (1, 1, 1, 2), 'bwd': 1, 'wgrad': 1})",
    '--pipeline',
    "Interleaved1F1B(ranks=2, chunks=2, fuse='last')",
  )
  assert run(capsys, *schedules, '--top', '0')[0] == 0
  one, two = received['pipelines']
  assert (one, two) == (
    spmd.pipeline.Automatic(4, {'fwd': (1, 1, 1, 2), 'bwd': 1, 'wgrad': 1}),
    spmd.pipeline.Interleaved1F1B(ranks=2, chunks=2, fuse='last'),
  )


NOT_SCHEDULES = ['GPipe', 'gpipe(4)', 'GPipe(ranks=x)', 'GPipe(4, ranks=4)', 'print(1)', '1 +']


def test_invalid_numbers_of_a_schedule(capsys):
  with pytest.raises(SystemExit):
    run(capsys, '--pipeline', 'GPipe(0)')
  error = capsys.readouterr().err
  assert error.endswith("'GPipe(0)': GPipe.ranks is 0.\nFix: pass a positive integer.\n")


@pytest.mark.parametrize('text', [*NOT_SCHEDULES, 'GPipe(ranks=2, ranks=4)', f'GPipe({"-" * 5000}4)'])
def test_text_that_is_not_a_schedule(text, capsys):
  with pytest.raises(SystemExit):
    run(capsys, '--pipeline', text)
  error = capsys.readouterr().err
  assert error.endswith(
    f'argument --pipeline: {text!r} is not a schedule such as OneFOneB(ranks=4); known schedules: Automatic, DualPipeV, '
    'Eager1F1B, GPipe, Interleaved1F1B, InterleavedGPipe, KimiK2, OneFOneB, ZeroBubbleH1, ZeroBubbleV\n'
  )
