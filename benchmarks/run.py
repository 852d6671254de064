"""Runs benchmarks and records their results in `results/`; the tables and plots of the pages are made from them.

    python benchmarks/run.py                          # all of them
    python benchmarks/run.py boxes "layouts --large"  # some
    python benchmarks/run.py search                   # all of one script
    python benchmarks/run.py search --sample 20       # with other arguments: shown, not recorded

A new result replaces the recorded one of the same benchmark and JAX version; those of other versions stay.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import render
from render import RESULTS

HERE = Path(__file__).parent
ALL = (
  'boxes',
  'specs',
  'rules',
  'dispatch',
  'placement',
  'step',
  'process_values',
  'imports',
  'checkpoint',
  'checkpoint_faults',
  'hugging_face',
  'layouts',
  'layouts --large',
  'pipelines',
  'search --only published',
  'search --only activations',
  'search --only sample',
  'search --only fits',
  'search --only strangers',
  'search --only search',
)


def run(command: Sequence[str]) -> dict[str, Any] | None:
  """Runs a benchmark and prints its table; returns its record, or None if it printed no result."""
  script, *arguments = command
  print(f'{shlex.join(command)} ...', flush=True)
  done = subprocess.run(
    [sys.executable, HERE / f'{script}.py', *arguments, '--json'], stdout=subprocess.PIPE, text=True
  )
  try:
    record = json.loads(done.stdout)
  except json.JSONDecodeError:
    print(f'{done.stdout}\nexit code {done.returncode} without a result', flush=True)
    return None
  print(
    render.table([record]) if record['figures'] else 'nothing can be measured on this machine',
    flush=True,
  )
  return record


def save(record: dict[str, Any]) -> None:
  """Records a result in place of the last one, and prints which of the last figures it lacks."""
  path = RESULTS / f'{record["benchmark"]}-jax-{record["versions"]["jax"]}.json'
  if path.exists():
    now = {figure['name'] for figure in record['figures']}
    gone = [each['name'] for each in json.loads(path.read_text())['figures'] if each['name'] not in now]
    print('\n'.join(f'not measured this time: {name}' for name in gone), flush=True)
  RESULTS.mkdir(exist_ok=True)
  path.write_text(json.dumps(record, indent=1) + '\n')


def commands_of(names: Sequence[str]) -> tuple[list[list[str]], bool]:
  """The commands to run, and whether to record their results; a script's name stands for all its commands.

  Raises:
    SystemExit: If a name is not that of a script.
  """
  scripts = {one.split()[0] for one in ALL}
  words = shlex.split(' '.join(names))
  if names and words[:1] not in [[one] for one in scripts]:
    raise SystemExit(f'{" ".join(words[:1])!r} is not a benchmark; available: {", ".join(ALL)}')
  if not all(one in ALL or one in scripts for one in names):
    return [words], False
  chosen = [one for each in names for one in ALL if each == (one if each in ALL else one.split()[0])]
  return [shlex.split(one) for one in dict.fromkeys(chosen or ALL)], True


def main() -> int:
  commands, recorded = commands_of(sys.argv[1:])
  whole = True
  for command in commands:
    record = run(command)
    whole = whole and record is not None
    if recorded and record and record['figures']:
      save(record)
  if recorded:
    render.main()
  return 0 if whole else 1


if __name__ == '__main__':
  sys.exit(main())
