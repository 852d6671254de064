"""Runs the zoo and records the results; the table in `docs/works_with.md` is made from them.

    nox -s zoo                            # every model, each environment of its own
    nox -s zoo -- lm1b nanodo             # some
    python zoo/run.py linen               # every model of an environment, here
    python zoo/run.py linen lm1b nanodo   # some
    python zoo/run.py linen --check pipeline lm1b   # one check, beside the recorded results of the others

A model runs in a process of its own. A failure is a result, and recorded.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import peers  # noqa: F401 (enters all of them)
import sources
from case import ENTRIES, Entry
from checks import CHECKS, results
from render import RESULTS, recorded
from render import main as render_pages

LIMIT = 900  # seconds for one model


def row(entry: Entry, checks: Sequence[str]) -> dict[str, Any]:
  """The results of one model, with versions."""
  return {
    'package': entry.package,
    'version': _version(entry.package),
    'annotated': entry.annotated,
    'changes': entry.changes,
    'versions': {'python': platform.python_version(), 'jax': version('jax'), 'flax': version('flax')},
    'checks': results(entry.make, checks),
  }


def _version(package: str) -> str:
  """Of the repository if there is one, otherwise of the installed distribution."""
  if package in sources.TABLE['sources']:
    return sources.commit(package)[:12]
  try:
    return version(package)
  except PackageNotFoundError:
    return 'not installed'


def run(entry: Entry, checks: Sequence[str]) -> dict[str, Any]:
  """The results of one model, from a process of its own."""
  print(f'{entry.name} ...', flush=True)
  command = [sys.executable, __file__, entry.environment, '--here', entry.name, *checks]
  try:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT, env=_environment())
    return json.loads(done.stdout.splitlines()[-1])
  except (subprocess.TimeoutExpired, IndexError, json.JSONDecodeError) as error:
    return row(Entry(entry.name, _fails(error), *_rest(entry)), checks)


def _rest(entry: Entry) -> tuple[str, str, str, str]:
  return entry.package, entry.environment, entry.annotated, entry.changes


def _fails(error: Exception):
  def make():
    raise RuntimeError(f'the process ended without a result: {error}')

  return make


def _environment() -> dict[str, str]:
  """Eight emulated devices, and programs that compile quickly instead of running quickly."""
  flags = '--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true'
  return {**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': flags}


def main() -> int:
  environment, *names = sys.argv[1:]
  if names[:1] == ['--here']:
    print(json.dumps(row(ENTRIES[names[1]], names[2:])))
    return 0
  checks = list(CHECKS)
  if names[:1] == ['--check']:
    checks, names = names[1:2], names[2:]
    if not checks or checks[0] not in CHECKS:
      raise SystemExit(f'{checks} is no check of the zoo; available: {", ".join(CHECKS)}')
  if unknown := set(names) - set(ENTRIES):
    raise SystemExit(f'{sorted(unknown)} are no models of the zoo; available: {", ".join(ENTRIES)}')
  chosen = [
    one for one in ENTRIES.values() if one.environment == environment and one.name in (names or ENTRIES)
  ]
  for entry in chosen:
    result = run(entry, checks)
    print('\n'.join(f'  {name}: {result["checks"][name]}' for name in checks), flush=True)
    if len(checks) < len(CHECKS):
      before = recorded().get(entry.name, {})
      if {**before, 'checks': None} != {**result, 'checks': None}:
        raise SystemExit(
          f'{entry.name} was recorded with other versions, or never: run all of its checks'
        )
      result['checks'] = before['checks'] | result['checks']
    RESULTS.write_text(json.dumps({**recorded(), entry.name: result}, indent=1, sort_keys=True) + '\n')
  render_pages()
  return 0


if __name__ == '__main__':
  sys.exit(main())
