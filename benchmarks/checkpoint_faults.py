"""Fault injection for checkpoints: killed and stopped writers, power cuts, errors of disks and servers, damage, readers.

    python benchmarks/checkpoint_faults.py                     # all campaigns on all stores, with their default counts
    python benchmarks/checkpoint_faults.py killed_writers damage --stores disk gcs --runs 10 --json

Each campaign of `faults/` injects one fault many times, at random moments and places. After each fault it checks that what
was reported as saved is intact, that damage is reported, and that the next save works. It prints how many faults were
survived; the exit code is 1 if any was not. Restored arrays are compared element by element with the saved ones,
independently of the library's checksums. Emulations of GCS and S3 run on this machine.

A campaign that needs what this machine lacks (root for loop devices, a C compiler, an emulation) is left out, with a word.
"""

import os

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'

import contextlib
import gc
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).parent.parent))

from faults import (
  cut_connections,
  damage,
  disk_errors,
  full_disks,
  killed_writers,
  lost_processes,
  lost_servers,
  power_cuts,
  readers,
  stopped_writers,
  two_writers,
)
from faults.places import Place
from faults.stores import opened
from faults.tally import Outcome
from harness import at_most, exact
from reporting import Report, Table, parser

CAMPAIGNS = {
  module.__name__.removeprefix('faults.'): module
  for module in (
    killed_writers,
    stopped_writers,
    two_writers,
    readers,
    damage,
    power_cuts,
    disk_errors,
    full_disks,
    lost_servers,
    cut_connections,
    lost_processes,
  )
}
STORES = ('disk', 'gcs', 's3')


def main() -> int:
  arguments = _arguments()
  outcomes: list[Outcome] = []
  with tempfile.TemporaryDirectory(prefix='flax_spmd_faults_') as temporary, _quiet() as aside:
    for store in arguments.stores:
      with opened(store, Path(temporary)) as place:
        if place is None:
          print(f'{store}: left out, as its emulation is not installed', file=aside)
          continue
        for name in arguments.campaigns or CAMPAIGNS:
          if store not in CAMPAIGNS[name].STORES:
            continue
          for outcome in _outcomes(name, place, arguments.runs):
            outcomes.append(outcome)
            print(_line(outcome), file=aside, flush=True)
  report = reported(outcomes)
  report.publish(arguments.json)
  return 1 if report.missed else 0


def _outcomes(name: str, place: Place, runs: int | None) -> Iterator[Outcome]:
  """Runs a campaign; one that cannot even prepare its trials has failed."""
  campaign = CAMPAIGNS[name]
  try:
    yield from campaign.run(place, runs or campaign.RUNS[place.store])
  except Exception as error:
    text = f'{type(error).__name__}: {error}'
    yield Outcome(name, place.store, 0, 1, {'cannot be tried': 1}, [text])


def _arguments():
  options = parser('checkpoint_faults')
  options.add_argument('campaigns', nargs='*', choices=[[], *CAMPAIGNS], metavar='CAMPAIGN')
  options.add_argument('--stores', nargs='+', choices=STORES, default=STORES)
  options.add_argument(
    '--runs', type=int, help='number of faults per campaign (default: as in the recorded results)'
  )
  return options.parse_args()


def reported(outcomes: Sequence[Outcome]) -> Report:
  figures = [
    exact(
      f'{one.campaign}, {one.store}: did harm, or was not clearly reported',
      one.total - one.ok,
      f'of {one.total}',
      at_most(0),
    )
    for one in outcomes
  ]
  rows = [[one.campaign, one.store, f'{one.ok} of {one.total}', _seen(one)] for one in outcomes]
  details = {
    'failures': {f'{one.campaign}, {one.store}': one.failures for one in outcomes if one.failures}
  }
  table = Table('What was seen', ['', 'store', 'survived', ''], rows)
  return Report('checkpoint_faults', figures, [table], details)


@contextlib.contextmanager
def _quiet() -> Iterator[TextIO]:
  """Hides stderr, where Orbax logs even caught errors at length; yields the original stream."""
  stderr = os.dup(2)
  with open(os.devnull, 'w') as nowhere:
    os.dup2(nowhere.fileno(), 2)
  warnings.simplefilter('ignore')
  try:
    with os.fdopen(os.dup(stderr), 'w') as aside:
      yield aside
  finally:
    gc.collect()  # coroutines of failed reads report their errors when they are collected
    os.dup2(stderr, 2)


def _seen(outcome: Outcome) -> str:
  return ', '.join(f'{observation}: {count}' for observation, count in sorted(outcome.seen.items()))


def _line(outcome: Outcome) -> str:
  name = f'{outcome.campaign}, {outcome.store}'
  lines = [f'{name:45} {outcome.ok:4} of {outcome.total:4}   {_seen(outcome)}']
  return '\n'.join([*lines, *(f'    {failure}' for failure in outcome.failures)])


if __name__ == '__main__':
  sys.exit(main())
