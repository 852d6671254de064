"""The estimate cache: its content, and the source digest that it is keyed on."""

import json
import shutil
from pathlib import Path

import pytest

import flax_spmd as spmd
from flax_spmd._src.compare.costs import Cost
from flax_spmd._src.compare.outcome import Memory
from flax_spmd._src.hlo.collectives import Collective
from flax_spmd._src.hlo.counts import Counts
from flax_spmd._src.search import estimate_cache
from flax_spmd._src.search.estimate_cache import open_cache, package_digest, source_digest
from flax_spmd.explore import Outcome, parse_target

PACKAGE = Path(spmd.__file__).parent
TARGET = parse_target('h100:8')
LAYOUT = spmd.Layout(
  spmd.abstract_mesh({'data': 4, 'model': 2}), (('batch', 'data'), ('embed', 'model'))
)
COUNTS = Counts(4e9, 1e6, (Collective('all-gather', ('data',), 4, 8e7, 1, 8e7, 'f32', '', ''),), (), ())
COST = Cost(1.0, 2.0, {('data', 'model'): 0.5}, 2.0, 3.0, 3.5, 'memory')
ESTIMATE = Outcome(
  'a',
  LAYOUT,
  Memory(1, 2, 3, 4, 5, 15),
  COUNTS,
  COST,
  True,
  None,
  None,
  None,
  'estimated',
  ('embed is sharded twice',),
)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
  monkeypatch.setenv('FLAX_SPMD_CACHE', str(tmp_path / 'cache'))
  return tmp_path / 'cache'


def test_estimates_survive_unchanged():
  failed = Outcome.failed('b', LAYOUT.replace(rules=()), 'no')._replace(source='estimated')
  cache = open_cache('program', TARGET)
  cache.add(ESTIMATE)
  cache.add(failed)
  cache.add(partitioned := ESTIMATE._replace(source='partitioned', doubts=()))
  again = open_cache('program', TARGET)
  assert again.get('a', LAYOUT, 'estimated') == ESTIMATE
  assert again.get('a', LAYOUT, 'partitioned') == partitioned
  assert again.get('b', failed.layout, 'estimated') == failed
  assert again.get('b', failed.layout, 'partitioned') is None
  assert open_cache('another', TARGET).get('a', LAYOUT, 'estimated') is None
  assert open_cache('program', TARGET, fresh=True).get('a', LAYOUT, 'estimated') is None


# -- the key


@pytest.fixture
def package(tmp_path):
  """A copy of the package's source."""
  ignored = shutil.ignore_patterns('__pycache__')
  return Path(shutil.copytree(PACKAGE, tmp_path / 'flax_spmd', ignore=ignored))


@pytest.mark.parametrize('name', ['XLA_FLAGS', 'LIBTPU_INIT_ARGS'])
def test_estimates_under_other_flags_of_compilers_are_others(name, monkeypatch):
  monkeypatch.setenv(name, '')
  open_cache('program', TARGET).add(ESTIMATE)
  monkeypatch.setenv(name, '--xla_force_host_platform_device_count=4')  # of no compiler
  found = open_cache('program', TARGET).get('a', LAYOUT, 'estimated')
  assert found == (ESTIMATE if name == 'XLA_FLAGS' else None)
  monkeypatch.setenv(name, '--xla_some_flag=true')
  assert open_cache('program', TARGET).get('a', LAYOUT, 'estimated') is None
  monkeypatch.setenv(name, '')
  assert open_cache('program', TARGET).get('a', LAYOUT, 'estimated') == ESTIMATE


def test_estimates_of_other_source_are_discarded(cache_folder, monkeypatch):
  open_cache('program', TARGET).add(ESTIMATE)
  [file] = cache_folder.iterdir()
  assert json.loads(file.read_text().splitlines()[0])['source'] == source_digest(PACKAGE)
  monkeypatch.setattr(estimate_cache, 'package_digest', lambda: 'another')
  cache = open_cache('program', TARGET)
  assert cache.get('a', LAYOUT, 'estimated') is None and cache.outdated.startswith('jaxlib ')


def test_a_copy_has_the_same_digest(package):
  assert source_digest(package) == source_digest(PACKAGE) == package_digest()


PARTS = (
  'errors.py',
  'presets.py',
  '_src/active_layout.py',
  '_src/compare/costs.py',
  '_src/compare/gpus.toml',
  '_src/compare/hardware.py',
  '_src/compare/hardware.toml',
  '_src/compare/lowering.py',
  '_src/compat.py',
  '_src/constraints.py',
  '_src/estimate',
  '_src/estimate/mlir',
  '_src/hlo',
  '_src/jit',
  '_src/layout.py',
  '_src/mesh.py',
  '_src/names',
  '_src/pipeline',
  '_src/plan',
  '_src/rules',
  '_src/rules/clauses',
)


@pytest.mark.parametrize('part', PARTS)
def test_every_file_counts(package, part):
  digest = source_digest(package)
  files = [package / part] if (package / part).is_file() else sorted((package / part).glob('*.py'))
  assert files
  for file in files:
    content = file.read_bytes()
    file.write_bytes(content + b'\n# changed\n')
    assert source_digest(package) != digest, file
    file.write_bytes(content)
  assert source_digest(package) == digest


def test_new_renamed_and_removed_modules_count(package):
  digests = [source_digest(package)]
  (package / '_src/estimate/new_part').mkdir()
  (package / '_src/estimate/new_part/new_module.py').write_text('FACTOR = 2\n')
  digests.append(source_digest(package))
  shutil.move(package / '_src/estimate/graph.py', package / '_src/estimate/moved_graph.py')
  digests.append(source_digest(package))
  (package / '_src/estimate/moved_graph.py').unlink()
  digests.append(source_digest(package))
  assert len({*digests}) == 4


def test_byte_code_does_not_count(package):
  digest = source_digest(package)
  (package / '__pycache__').mkdir()
  (package / '__pycache__/layout.cpython-312.pyc').write_bytes(b'code')
  assert source_digest(package) == digest


def test_a_dangling_link_does_not_matter(package):
  digest = source_digest(package)
  (package / '_src' / '.#lock.py').symlink_to('nowhere')
  assert source_digest(package) == digest
