"""`flax-spmd search`."""

import json

import pytest

import flax_spmd as spmd
from flax_spmd import cli, explore
from flax_spmd._src.rules import toml_format
from flax_spmd._src.search import trials
from tests.search import search_test


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
  """A folder with a module that has the model."""
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
  assert (code, err) == (0, '') and out.endswith('written: layout.toml, page.html\n')
  mesh = spmd.abstract_mesh(toml_format.read((project / 'layout.toml').read_text()).axes)
  assert spmd.Layout.from_toml((project / 'layout.toml').read_text(), mesh=mesh).mesh.size == 8
  assert 'Search for cpu:8' in (project / 'page.html').read_text()


def test_wishes(capsys):
  wishes = '--mesh', 'rows=2,model=-1', '--pin', 'mlp=model', '--pin', 'embed=', '--batch-only', 'rows'
  code, out, _ = run(
    capsys, *wishes, '--choice', 'remat=none,full', '--tensor', '4', '--top', '1', '--json'
  )
  found = json.loads(out)
  assert code == 0 and found['choices'] == {'remat': 'none'}
  layout = toml_format.read(found['layout'])
  assert layout.axes == {'rows': 2, 'model': 4} and dict(layout.rules.pairs)['mlp'] == 'model'
  code, out, _ = run(capsys, '--forbid', 'mlp', '--forbid', 'embed=model', '--json')
  assert code == 0 and 'mlp' not in json.loads(out)['layout']


def test_exit_codes(capsys):
  code, out, err = run(capsys, '--memory', '1MiB')
  assert (code, out) == (1, '') and err.startswith(
    'FAILED Of 60 layouts, none fits into 1 MiB on cpu:8.'
  )
  code, _, err = run(capsys, '--memory', '100GiB')
  assert code == 2 and err.startswith('The budget of 100 GiB is larger than the memory of a cpu')
  with pytest.raises(SystemExit):
    run(capsys, '--mesh', 'data=many')


def test_pipelines(capsys, monkeypatch):
  asked = {}

  def search(*args, pipelines, **rest):
    asked['pipelines'] = pipelines
    return real(*args, **rest)

  real = explore.search
  monkeypatch.setattr(explore, 'search', search)
  schedules = (
    '--pipeline',
    'OneFOneB(4)',
    '--pipeline',
    "Interleaved1F1B(ranks=2, chunks=2, fuse='last')",
  )
  assert run(capsys, *schedules, '--top', '0')[0] == 0
  one, two = asked['pipelines']
  assert (one, two) == (
    spmd.pipeline.OneFOneB(4),
    spmd.pipeline.Interleaved1F1B(ranks=2, chunks=2, fuse='last'),
  )


NO_SCHEDULES = ['GPipe', 'gpipe(4)', 'GPipe(ranks=x)', 'GPipe(4, ranks=4)', 'print(1)', '1 +']


def test_what_a_schedule_says_of_its_numbers(capsys):
  with pytest.raises(SystemExit):
    run(capsys, '--pipeline', 'GPipe(0)')
  said = capsys.readouterr().err
  assert said.endswith("'GPipe(0)': GPipe.ranks is 0.\nFix: pass a whole number from 1 up.\n")


@pytest.mark.parametrize('text', [*NO_SCHEDULES, 'GPipe(ranks=2, ranks=4)', f'GPipe({"-" * 5000}4)'])
def test_what_is_no_schedule(text, capsys):
  with pytest.raises(SystemExit):
    run(capsys, '--pipeline', text)
  said = capsys.readouterr().err
  assert said.endswith(
    f'argument --pipeline: {text!r} is no schedule such as OneFOneB(ranks=4); there are DualPipeV, '
    'Eager1F1B, GPipe, Interleaved1F1B, InterleavedGPipe, KimiK2, OneFOneB, ZeroBubbleH1, ZeroBubbleV\n'
  )
