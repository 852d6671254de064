"""Runs benchmarks and keeps what they say in `results/`, from which the tables and plots of the pages are made.

    python benchmarks/run.py                          # all of them
    python benchmarks/run.py boxes "layouts --large"  # some
    python benchmarks/run.py search                   # all of one script
    python benchmarks/run.py search --sample 20       # one with arguments of its own: shown, and not kept

What was kept of the same benchmark and the same JAX is replaced; what other versions of JAX gave stays.
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
  'imports',
  'checkpoint',
  'checkpoint_faults',
  'layouts',
  'layouts --large',
  'pipelines',
  'search --only published',
  'search --only sample',
  'search --only fits',
  'search --only search',
)


def run(command: Sequence[str]) -> dict[str, Any] | None:
  """What a benchmark says, with its targets met or not; None if it said nothing."""
  script, *arguments = command
  print(f'{shlex.join(command)} ...', flush=True)
  done = subprocess.run(
    [sys.executable, HERE / f'{script}.py', *arguments, '--json'], stdout=subprocess.PIPE, text=True
  )
  try:
    record = json.loads(done.stdout)
  except json.JSONDecodeError:
    print(f'{done.stdout}\nended with {done.returncode} and no result', flush=True)
    return None
  print(render.table([record]) if record['figures'] else 'nothing can be measured here', flush=True)
  return record


def keep(record: dict[str, Any]) -> None:
  """Puts a result into the place of the last one; says so if that had figures that this one lacks."""
  path = RESULTS / f'{record["benchmark"]}-jax-{record["versions"]["jax"]}.json'
  if path.exists():
    now = {figure['name'] for figure in record['figures']}
    gone = [each['name'] for each in json.loads(path.read_text())['figures'] if each['name'] not in now]
    print('\n'.join(f'not measured this time: {name}' for name in gone), flush=True)
  RESULTS.mkdir(exist_ok=True)
  path.write_text(json.dumps(record, indent=1) + '\n')


def commands_of(asked: Sequence[str]) -> tuple[list[list[str]], bool]:
  """What to run, and whether to keep what it says; a name that is none of them stands for all of its script.

  Raises:
    SystemExit: of a name that is no script's.
  """
  scripts = {one.split()[0] for one in ALL}
  words = shlex.split(' '.join(asked))
  if asked and words[:1] not in [[one] for one in scripts]:
    raise SystemExit(f'{" ".join(words[:1])!r} is no benchmark; there are {", ".join(ALL)}')
  if not all(one in ALL or one in scripts for one in asked):
    return [words], False
  chosen = [one for each in asked for one in ALL if each == (one if each in ALL else one.split()[0])]
  return [shlex.split(one) for one in dict.fromkeys(chosen or ALL)], True


def main() -> int:
  commands, kept = commands_of(sys.argv[1:])
  whole = True
  for command in commands:
    record = run(command)
    whole = whole and record is not None
    if kept and record and record['figures']:
      keep(record)
  if kept:
    render.main()
  return 0 if whole else 1


if __name__ == '__main__':
  sys.exit(main())
