"""Every way to run this project: `nox -s demo`, `nox -s tests`, `nox -l` for the rest."""

import json
import os
import pathlib

import nox

nox.options.sessions = ['tests', 'lint', 'typecheck', 'layers', 'guides']
nox.options.default_venv_backend = 'venv'

PYTHONS = ['3.11', '3.12', '3.13']
# 3.13 has the JAX and the Flax of 3.12: what could differ is the language.
SAME_JAX = (
  'cli',
  'context',
  'docstrings',
  'explain',
  'layout',
  'mesh',
  'public_names',
  'rules',
  'schedules',
  'toml',
  'typing',
)
GROUPS = nox.project.load_toml('pyproject.toml')['dependency-groups']
EMULATED = {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '--xla_force_host_platform_device_count=8'}


def install(session, *groups):
  """Installs the package as its users would, and the dependency groups of a session."""
  session.install('-e', '.', *(requirement for group in groups for requirement in GROUPS[group]))


def say_versions(session):
  code = 'import jax, flax, sys; print("Python", sys.version.split()[0], "jax", jax.__version__, "flax", flax.__version__)'
  session.run('python', '-c', code, env=EMULATED)


def run_tests(session, *which):
  workers = str(min(4, os.cpu_count() or 1))
  session.run('pytest', '-n', workers, '--dist', 'worksteal', *which)


@nox.session
def demo(session):
  """Train a transformer under one layout, save, restore under another, train on; under 2 minutes."""
  install(session)
  session.run('flax-spmd', 'demo', *session.posargs)


@nox.session(python=PYTHONS)
def tests(session):
  """The tests, on every Python that is here; `nox -s tests -- -k boxes` for some of them."""
  install(session, 'test')
  say_versions(session)
  which = [f'tests/{name}_test.py' for name in SAME_JAX] if session.python == '3.13' else []
  run_tests(session, *(session.posargs or [*which, '-m', 'not exhaustive']))


@nox.session(python=['3.11', '3.12'])
def exhaustive(session):
  """What there is too much of for CI: pipelines with everything, and the other JAX's share of slow tests."""
  install(session, 'test')
  say_versions(session)
  run_tests(session, '-m', 'exhaustive', *session.posargs)


@nox.session
def lint(session):
  """Formatting and lint."""
  session.install(*GROUPS['lint'])
  session.run('ruff', 'check', '.')
  session.run('ruff', 'format', '--check', '.')


@nox.session
def typecheck(session):
  """Types, the typing tests included."""
  install(session, 'typecheck')
  session.run('pyright')


@nox.session
def layers(session):
  """Imports go down the layers only."""
  install(session, 'layers')
  session.run('lint-imports')


@nox.session
def guides(session):
  """Runs every guide as a script, on emulated devices."""
  install(session, 'guides')
  session.run(
    'pytest', '-p', 'no:cacheprovider', '-s', 'guides/run_guides.py', *session.posargs, env=EMULATED
  )


@nox.session(python='3.11')
def minimums(session):
  """The tests, on the oldest supported versions of everything."""
  requirements = nox.project.load_toml('pyproject.toml')['project']['dependencies']
  oldest = [requirement.replace('>=', '==') for requirement in requirements]
  session.install('-e', '.', *GROUPS['test'], *oldest)
  say_versions(session)
  session.run('pytest', '-n', '2', *session.posargs)


@nox.session
def bench(session):
  """Every benchmark; `nox -s bench -- boxes` for one of them."""
  install(session, 'bench')
  names = session.posargs or json.loads(pathlib.Path('benchmarks/index.json').read_text())
  for name in names:
    session.run('python', f'benchmarks/{name}.py')
