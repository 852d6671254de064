"""Every way to run this project: `nox -s demo`, `nox -s tests`, `nox -l` for the rest."""

import os
import pathlib
import shutil
import tarfile
import tempfile

import nox

nox.options.sessions = ['tests', 'lint', 'typecheck', 'layers', 'guides', 'docs']
nox.options.default_venv_backend = 'venv'

BETWEEN = ['0.11.0', '0.11.1', '0.11.2', '0.12.0']
PYTHONS = ['3.11', '3.12', '3.13']
# 3.13 has the JAX and the Flax of 3.12, so only tests that depend on the language run there, and `TAKEN_OVER`.
SAME_JAX = (
  'active_layout',
  'cli',
  'explanation',
  'layout',
  'mesh',
  'pipeline/schedules',
  'public_names',
  'rules',
  'typing',
)
# Tests that take long, or use no JAX: 3.12 leaves them out where 3.13 is installed.
TAKEN_OVER = (
  'benchmarks',
  'checkpoint/protocol_model',
  'docstrings',
  'examples',
  'history',
  'house',
  'multiprocess',
  'readme',
  'search',
)
# Tests of everything that differs in a wheel: data files, worker processes, entry points, metadata.
INSTALLED = (
  *SAME_JAX,
  'checkpoint/conversion',
  'checkpoint/save_restore',
  'compare/hardware',
  'docstrings',
  'hlo/parser',
  'release',
  'state_plan',
)
QUICK = ('-m', 'not slow and not exhaustive')
ZOO = nox.project.load_toml('zoo/environments.toml')['environments']
GROUPS = nox.project.load_toml('pyproject.toml')['dependency-groups']
EMULATED = {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '--xla_force_host_platform_device_count=8'}


def install(session, *groups):
  """Installs the package as its users would, and the dependency groups of a session."""
  session.install('-e', '.', *(requirement for group in groups for requirement in GROUPS[group]))


def files_of(tests):
  """Their files, or folders."""
  paths = (pathlib.Path('tests', name) for name in tests)
  return [str(path if path.is_dir() else path.with_name(f'{path.name}_test.py')) for path in paths]


def print_versions(session):
  code = 'import jax, flax, sys; print("Python", sys.version.split()[0], "jax", jax.__version__, "flax", flax.__version__)'
  session.run('python', '-c', code, env=EMULATED)


def run_tests(session, *which, measured=False):
  """Runs pytest as a module: so that the working directory's `tests` are found, wherever it is."""
  workers = str(min(4, (os.cpu_count() or 1) + 1))  # tests of several processes often wait
  command = ['coverage', 'run', '-m', 'pytest'] if measured else ['python', '-m', 'pytest']
  bytecode = {'PYTHONDONTWRITEBYTECODE': ''}  # the tests start many processes, which import the package
  session.run(*command, '-n', workers, '--dist', 'worksteal', *which, env=bytecode)


@nox.session
def demo(session):
  """Train a transformer under one layout, save, restore under another, train on; under 2 minutes."""
  install(session)
  session.run('flax-spmd', 'demo', *session.posargs)


@nox.session(python=PYTHONS)
def tests(session):
  """The tests, on every installed Python; `nox -s tests -- -k boxes` for a part."""
  install(session, 'test')
  print_versions(session)
  which, taken_over = ['-m', 'not exhaustive'], files_of(TAKEN_OVER)
  if session.python == '3.13':
    which += [*files_of(SAME_JAX), *taken_over]
  elif session.python == '3.12' and shutil.which('python3.13'):
    which += [f'--ignore={path}' for path in taken_over]
  run_tests(session, *(session.posargs or which))


@nox.session(python=['3.11', '3.12'])
def compilers(session):
  """The tests that need the compilers for GPUs and TPUs, which are wheels of several 100 MB; no device is needed."""
  install(session, 'test')
  session.install('-e', '.[cuda,tpu]')
  print_versions(session)
  run_tests(session, '-m', 'compiler and not exhaustive', *session.posargs)


@nox.session(python=['3.11', '3.12'])
def exhaustive(session):
  """Tests too many for CI: all pipelines, more examples, and those that CI runs on the other JAX."""
  install(session, 'test', 'loaders')
  print_versions(session)
  which = ('-m', 'exhaustive or hypothesis', '--hypothesis-profile=exhaustive')
  run_tests(session, *which, *session.posargs)


@nox.session
def lint(session):
  """Formatting and lint."""
  session.install(*GROUPS['lint'])
  session.run('ruff', 'check', '.')
  session.run('ruff', 'format', '--check', '.')


@nox.session(python=['3.11', '3.12'])
def typecheck(session):
  """Types, under the oldest JAX and the newest: the package by pyright, the typing tests by pyright and mypy."""
  install(session, 'typecheck')
  session.run('pyright')
  session.run('mypy')


@nox.session
def layers(session):
  """Imports go down the layers only; the sources are read, not imported."""
  session.install(*GROUPS['layers'])
  session.run('lint-imports')


@nox.session
def guides(session):
  """Executes guides and how-tos on emulated devices, all of them; `nox -s guides -- scale_up` for one."""
  install(session, 'docs')
  session.run('python', 'docs/execute.py', *session.posargs, env=EMULATED)


@nox.session
def docs(session):
  """The site, in docs/_build/html; executes pages without outputs of this code first."""
  install(session, 'docs')
  session.run('python', 'docs/execute.py', '--missing', env=EMULATED)
  session.run(
    'sphinx-build', '-W', '--keep-going', '-E', '-c', 'docs', '.', 'docs/_build/html', env=EMULATED
  )


@nox.session(python='3.11')
def minimums(session):
  """The quick tests, on the oldest supported versions of everything; `-- tests` for all."""
  requirements = nox.project.load_toml('pyproject.toml')['project']['dependencies']
  oldest = [requirement.replace('>=', '==') for requirement in requirements]
  session.install('-e', '.', *GROUPS['test'], *oldest)
  print_versions(session)
  run_tests(session, *(session.posargs or QUICK))


@nox.session(python='3.12')
@nox.parametrize('jax', BETWEEN)
def between(session, jax):
  """The tests, on versions of JAX between the oldest and the newest."""
  session.install('-e', '.', *GROUPS['test'], f'jax=={jax}', f'jaxlib=={jax}')
  print_versions(session)
  run_tests(session, *(session.posargs or ['-m', 'not exhaustive']))


@nox.session(python='3.12')
def coverage(session):
  """The tests with coverage, of worker processes too; fails under 95 % of the package's lines."""
  install(session, 'test', 'coverage')
  session.run('coverage', 'erase')
  run_tests(session, *(session.posargs or ['-m', 'not exhaustive']), measured=True)
  session.run('coverage', 'combine', '--quiet')
  session.run('coverage', 'report')


@nox.session
def build(session):
  """Builds wheel and sdist in dist/, and tests them on every installed Python (session `installed`)."""
  session.install(*GROUPS['build'])
  shutil.rmtree('dist', ignore_errors=True)
  session.run('python', '-m', 'build')
  session.run('twine', 'check', '--strict', *built('*'))
  for python in PYTHONS:
    session.notify(f'installed-{python}', session.posargs)


@nox.session(python=PYTHONS)
def installed(session):
  """The wheel as users get it: installed alone, then the README, the demo, and the sdist's tests."""
  session.install(*built('*.whl'))
  with (
    tempfile.TemporaryDirectory() as folder,
    session.chdir(without_package(*built('*.tar.gz'), folder)),
  ):
    example = pathlib.Path('README.md').read_text().split('```python\n')[1].split('```')[0]
    session.run('python', '-c', example, env=EMULATED)
    session.run('flax-spmd', '--help', silent=True)
    session.run('flax-spmd', 'demo')
    session.install(*GROUPS['test'])
    run_tests(session, *(session.posargs or [*files_of(INSTALLED), *QUICK]))


def built(pattern):
  """Files that `build` made in dist/."""
  return [str(path.absolute()) for path in pathlib.Path('dist').glob(pattern)]


def without_package(sdist, folder):
  """An sdist unpacked in a folder, without the package: its tests use the installed one."""
  with tarfile.open(sdist) as archive:
    archive.extractall(folder, filter='data')
  (top,) = pathlib.Path(folder).iterdir()
  shutil.rmtree(top / 'flax_spmd')
  return top


@nox.session(python=['3.11', '3.12'])
def bench(session):
  """Benchmarks, the source of the pages' tables and plots; `nox -s bench-3.12 -- boxes` for one.

  `layouts` and `search` compile for GPUs and TPUs with their own compilers, on the newer JAX: some 3 GB of wheels.
  """
  install(session, 'bench')
  requested = {name.split()[0] for name in session.posargs}
  if session.python == '3.12' and (not requested or requested & {'layouts', 'search'}):
    session.install('-e', '.[cuda,tpu]')
  session.run('python', 'benchmarks/run.py', *session.posargs)


@nox.session(python='3.12')
@nox.parametrize('environment', list(ZOO), ids=list(ZOO))
def zoo(session, environment):
  """Public models as their authors wrote them, into docs/works_with.md; `nox -s zoo -- lm1b` for one.

  Fetches repositories that are on no registry, or takes them from the folder `FLAX_SPMD_ZOO_SOURCES`.
  """
  session.install('-e', '.', *ZOO[environment]['requirements'])
  print_versions(session)
  session.run('python', 'zoo/run.py', environment, *session.posargs)
