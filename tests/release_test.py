"""Releases: a wheel with only the package, an sdist that builds it, and one version."""

import importlib.metadata
import re
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from hatchling import build

import flax_spmd as spmd

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / 'flax_spmd'

from_sources = pytest.mark.skipif(not PACKAGE.is_dir(), reason='the package is installed, not here')


@pytest.fixture
def wheel(tmp_path, monkeypatch):
  """A wheel that was built from here."""
  monkeypatch.chdir(ROOT)
  with zipfile.ZipFile(tmp_path / build.build_wheel(str(tmp_path))) as archive:
    yield archive


@pytest.fixture
def sdist(tmp_path, monkeypatch):
  """The unpacked sdist that was built from here."""
  monkeypatch.chdir(ROOT)
  with tarfile.open(tmp_path / build.build_sdist(str(tmp_path))) as archive:
    archive.extractall(tmp_path / 'unpacked', filter='data')
  (top,) = (tmp_path / 'unpacked').iterdir()
  return top


def files(folder):
  return {path for path in folder.rglob('*') if path.is_file() and path.suffix != '.pyc'}


def contents(archive):
  """The contents of each file of a wheel, without its RECORD, whose order depends on the disk."""
  return {name: archive.read(name) for name in archive.namelist() if not name.endswith('RECORD')}


@from_sources
def test_the_wheel_contains_only_the_package(wheel):
  metadata = f'flax_spmd-{spmd.__version__}.dist-info'
  expected = {path.relative_to(ROOT).as_posix() for path in files(PACKAGE)}
  expected |= {f'{metadata}/{name}' for name in ('METADATA', 'WHEEL', 'RECORD', 'entry_points.txt')}
  assert set(wheel.namelist()) == expected | {f'{metadata}/licenses/LICENSE'}
  assert {
    'flax_spmd/py.typed',
    'flax_spmd/_src/compare/hardware.toml',
    'flax_spmd/_src/compare/report.css',
  } <= expected


@from_sources
def test_the_metadata_of_the_wheel(wheel):
  metadata = message_from_bytes(wheel.read(f'flax_spmd-{spmd.__version__}.dist-info/METADATA'))
  assert (metadata['Name'], metadata['Version']) == ('flax-spmd', spmd.__version__)
  assert metadata['Requires-Python'] == '>=3.11'
  assert metadata['License-Expression'] == 'Apache-2.0'
  assert metadata.get_payload().startswith('# flax_spmd')


@from_sources
def test_the_sdist_builds_the_same_wheel(wheel, sdist, tmp_path, monkeypatch):
  monkeypatch.chdir(sdist)
  (tmp_path / 'again').mkdir()
  with zipfile.ZipFile(tmp_path / 'again' / build.build_wheel(str(tmp_path / 'again'))) as again:
    assert contents(again) == contents(wheel)


@from_sources
def test_the_sdist_contains_the_files_that_contributors_need(sdist):
  here = {path.relative_to(ROOT) for path in (ROOT / 'tests').rglob('*.py')}
  there = {path.relative_to(sdist) for path in files(sdist)}
  assert here <= there
  assert {Path('noxfile.py'), Path('pyproject.toml'), Path('CONTRIBUTING.md'), Path('LICENSE')} <= there


def test_one_version():
  """The package's: metadata has it from there, and the changelog's newest entry is of it."""
  assert importlib.metadata.version('flax-spmd') == spmd.__version__
  headings = re.findall(r'^## \[?([0-9][^\] ]*)', (ROOT / 'CHANGELOG.md').read_text(), re.MULTILINE)
  assert headings[0] == spmd.__version__


def test_the_installed_package_is_typed_and_licensed():
  installed = importlib.metadata.distribution('flax-spmd')
  assert Path(spmd.__file__).with_name('py.typed').is_file()
  names = {path.name for path in installed.files or []}
  assert {'LICENSE', 'entry_points.txt'} <= names


def test_the_command_prints_its_version(capsys):
  from flax_spmd import cli

  with pytest.raises(SystemExit) as ended:
    cli.main(['--version'])
  assert (ended.value.code, capsys.readouterr().out) == (0, f'flax_spmd {spmd.__version__}\n')


def test_the_command_is_an_entry_point():
  from flax_spmd import cli

  (command,) = importlib.metadata.entry_points(group='console_scripts', name='flax-spmd')
  assert command.load() is cli.main
