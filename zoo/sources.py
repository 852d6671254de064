"""Checkouts of the repositories in `environments.toml`, and the import of their modules.

`FLAX_SPMD_ZOO_SOURCES` names a folder with checkouts (`flax/`, `t5x/`, ...). Without it, each repository is
fetched at its commit into the user's cache, once.
"""

import importlib.abc
import importlib.machinery
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import jax.numpy as jnp

TABLE = tomllib.loads((Path(__file__).parent / 'environments.toml').read_text())
# Packages that modules of models import for input pipelines and logs. A stand-in replaces those that are absent.
ABSENT = (
  'airio',
  'ale_py',
  'cv2',
  'datasets',
  'grain',
  'gymnasium',
  'jestimator',
  'seqio',
  'sentencepiece',
  'sklearn',
  'tensorboard',
  'tensorflow',
  'tensorflow_datasets',
  'tensorflow_text',
  'torch',
)
CACHE = Path(os.environ.get('XDG_CACHE_HOME', Path.home() / '.cache')) / 'flax_spmd_zoo'


def checkout(name: str) -> Path:
  """The folder of a repository."""
  given = os.environ.get('FLAX_SPMD_ZOO_SOURCES')
  return Path(given) / name if given else _fetched(name)


def commit(name: str) -> str:
  """The commit of the checkout that is used."""
  command = ['git', '-C', checkout(name), 'rev-parse', 'HEAD']
  return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _fetched(name: str) -> Path:
  source = TABLE['sources'][name]
  folder = CACHE / f'{name}-{source["commit"][:12]}'
  if not folder.exists():
    partial = folder.with_name(f'{folder.name}.{os.getpid()}')
    git = ['git', '-C', partial]
    subprocess.run(['git', 'init', '--quiet', partial], check=True)
    subprocess.run([*git, 'fetch', '--depth=1', source['url'], source['commit']], check=True)
    subprocess.run([*git, 'checkout', '--quiet', 'FETCH_HEAD'], check=True)
    partial.rename(folder)
  return folder


def importable(name: str, folder: str = '.') -> None:
  """Puts a folder of a repository on the path."""
  sys.path.insert(0, str(checkout(name) / folder))


class _Anything(MagicMock):
  __version__ = '0'


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Finds `ABSENT` and all their modules, after everything else has failed; every attribute exists."""

  def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
    if fullname.partition('.')[0] not in ABSENT:
      return None
    return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

  def create_module(self, spec: Any) -> Any:
    module = _Anything(name=spec.name)
    module.__path__ = []
    for name in ('Tensor', 'Variable', 'Module'):  # that have subclasses
      setattr(module, name, type(name, (), {}))
    return module

  def exec_module(self, module: Any) -> None:
    pass


def _clip_with_old_names(clip: Callable[..., Any]) -> Callable[..., Any]:
  """`jnp.clip` with the names that its arguments had when some of these models were written."""

  def with_old_names(arr: Any = None, min: Any = None, max: Any = None, **old: Any) -> Any:
    return clip(old.get('a', arr), old.get('a_min', min), old.get('a_max', max))

  return with_old_names


sys.meta_path.append(_StandIns())
jnp.clip = _clip_with_old_names(jnp.clip)
