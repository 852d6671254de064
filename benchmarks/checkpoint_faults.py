"""Fault injection for checkpoints: killed saves, full disks, flipped bits, cut files and concurrent writers.

    python benchmarks/checkpoint_faults.py                     # all campaigns, with their default counts
    python benchmarks/checkpoint_faults.py kills flips --runs 10 --json

Each campaign injects one fault many times, at random moments and places. After each fault it checks that an
intact checkpoint is still intact, and that damage is reported. It prints how many runs passed; the exit code
is 1 if any failed. Restored arrays are compared element by element with the saved ones, independently of the
library's checksums.
"""

import os

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'

import collections
import contextlib
import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from harness import at_most, exact
from reporting import Report, Table, parser

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from tests.processes import run_processes

RULES = (('rows', 'data'), ('columns', 'model'))
PLAIN, COMPRESSED, PACKED = {}, {'compress': True}, {'pack': 1 << 20}
KINDS = {'plain': PLAIN, 'compressed': COMPRESSED, 'packed': PACKED}


class Outcome(NamedTuple):
  """Result of a campaign: how many faults were harmless or reported."""

  campaign: str
  ok: int
  total: int
  seen: dict[str, int]
  failures: list[str]


class Tally:
  """Counter of a campaign's observations, with a list of its failures."""

  def __init__(self, campaign: str):
    self.campaign = campaign
    self.seen: collections.Counter[str] = collections.Counter()
    self.failures: list[str] = []

  def add(self, observation: str, failure: str | None = None) -> None:
    self.seen[observation] += 1
    if failure is not None:
      self.failures.append(failure)

  def outcome(self) -> Outcome:
    total = sum(self.seen.values())
    ok = total - len(self.failures)
    return Outcome(self.campaign, ok, total, dict(self.seen), self.failures[:10])


def layout() -> spmd.Layout:
  return spmd.Layout({'data': 2, 'model': 4}, RULES)


def values(number: int, leaves: int, side: int) -> dict[str, np.ndarray]:
  """Arrays of random numbers that differ by state and by leaf."""
  generator = np.random.default_rng(number)
  arrays = {f'w{i}': generator.standard_normal((side, side), np.float32) for i in range(leaves)}
  return arrays | {'step': np.asarray(number, np.int32)}


def state_of(number: int, leaves: int, side: int) -> Any:
  boxes = {
    name: spmd.LogicallyPartitioned(value, ('rows', 'columns')) if value.ndim else value
    for name, value in values(number, leaves, side).items()
  }
  return jax.block_until_ready(layout().shard(boxes))


def is_state(restored: Any, number: int, leaves: int, side: int) -> bool:
  expected = values(number, leaves, side)
  actual = spmd.unbox(restored)
  return set(actual) == set(expected) and all(
    np.array_equal(np.asarray(actual[name]), expected[name]) for name in expected
  )


# -- kills: a saving process is killed at a random moment

LARGE = (6, 1024)  # number of leaves, and their side: 25 MB
MODES = ('new path', 'async', 'overwrite', 'manager')


def kills(runs: int, folder: Path) -> Iterator[Outcome]:
  for mode in MODES:
    yield _kills(mode, runs, folder)


def _kills(mode: str, runs: int, folder: Path) -> Outcome:
  tally, drawn = Tally(f'killed: {mode}'), random.Random(mode)
  seconds = _unharmed(mode, folder / 'whole')
  following = _Victim(mode, folder / f'{mode}_0')
  for run in range(runs):
    victim, following = following, _Victim(mode, folder / f'{mode}_{run + 1}')
    victim.kill_after(drawn.uniform(0, 1.15) * seconds)
    tally.add(*_after_kill(mode, victim))
    shutil.rmtree(victim.folder)
  following.end()
  return tally.outcome()


class _Victim:
  """A process that is ready to save into a folder with an intact checkpoint."""

  def __init__(self, mode: str, folder: Path):
    self.folder, self.done = folder, False
    folder.mkdir(parents=True)
    command = [sys.executable, __file__, '--victim', mode, str(folder)]
    self._process = subprocess.Popen(
      command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )

  def _go(self) -> None:
    while (line := self._process.stdout.readline()) != 'ready\n':
      if not line:
        raise RuntimeError('A process could not start.')
    self._process.stdin.write('go\n')
    self._process.stdin.flush()

  def kill_after(self, seconds: float) -> None:
    self._go()
    time.sleep(seconds)
    self._process.send_signal(signal.SIGKILL)
    self.done = 'done' in self._process.stdout.read()
    self._process.wait()

  def finish(self) -> float:
    """Lets the process save; returns the time in seconds."""
    self._go()
    start = time.perf_counter()
    self._process.stdout.readline()
    seconds = time.perf_counter() - start
    self._process.wait()
    return seconds

  def end(self) -> None:
    self._process.kill()
    self._process.wait()


def _unharmed(mode: str, folder: Path) -> float:
  seconds = _Victim(mode, folder).finish()
  shutil.rmtree(folder)
  return seconds


def _victim(mode: str, folder: Path) -> None:
  """Runs in the process to kill: saves one state, waits, and saves another."""
  one, two = state_of(1, *LARGE), state_of(2, *LARGE)
  manager = None
  if mode == 'manager':
    manager = checkpoint.Manager(folder / 'run', layout(), every=1, keep=1)
    manager.save(1, one)
    manager.wait()
  else:
    checkpoint.save(folder / '1', one, layout=layout())
  print('ready', flush=True)
  sys.stdin.readline()
  if manager is not None:
    manager.save(2, two)
    manager.wait()
  elif mode == 'async':
    checkpoint.save_async(folder / '2', two, layout=layout()).result()
  elif mode == 'overwrite':
    checkpoint.save(folder / '1', two, layout=layout(), overwrite=True)
  else:
    checkpoint.save(folder / '2', two, layout=layout())
  print('done', flush=True)


def _after_kill(mode: str, victim: _Victim) -> tuple[str, str | None]:
  """The observation after a kill, and the failure if there is one."""
  observation = 'saved before the kill' if victim.done else 'killed'
  try:
    wrong = _checks[mode](victim.folder, victim.done)
  except Exception as error:
    wrong = f'{type(error).__name__}: {error}'
  return observation, wrong and f'{mode}, {observation}: {wrong}'


def _check_new_path(folder: Path, done: bool) -> str | None:
  """The old checkpoint is intact, the new one intact or absent, and saving again works."""
  if not is_state(_restored(folder / '1'), 1, *LARGE):
    return 'the old checkpoint has changed'
  try:
    new_is_intact = is_state(_restored(folder / '2'), 2, *LARGE)
  except errors.CheckpointNotFoundError:
    new_is_intact = None
  if new_is_intact is False or (done and not new_is_intact):
    return 'the new checkpoint is wrong or missing'
  checkpoint.save(folder / '2', _tiny(), layout=layout(), overwrite=True)
  return _leftovers(folder, {'1', '2'})


def _check_overwrite(folder: Path, done: bool) -> str | None:
  """The old or the new checkpoint is intact, and can be replaced."""
  restored = _restored(folder / '1')
  if not (is_state(restored, 2, *LARGE) or (not done and is_state(restored, 1, *LARGE))):
    return 'neither the old nor the new state'
  checkpoint.save(folder / '1', _tiny(), layout=layout(), overwrite=True)
  return _leftovers(folder, {'1'})


def _check_manager(folder: Path, done: bool) -> str | None:
  """The newest step listed is intact, and the run continues."""
  with checkpoint.Manager(folder / 'run', layout(), every=1, keep=1) as manager:
    step, restored = manager.restore(state_of(0, *LARGE))
    if step not in (1, 2) or (done and step != 2) or not is_state(restored, step, *LARGE):
      return f'step {step} is not the saved state'
    manager.save(3, _tiny())
    manager.wait()
    if manager.steps != [3]:
      return f'steps after the next save: {manager.steps}'
  return _leftovers(folder / 'run', {'3'})


_checks = {
  'new path': _check_new_path,
  'async': _check_new_path,
  'overwrite': _check_overwrite,
  'manager': _check_manager,
}


def _restored(path: Path) -> Any:
  return checkpoint.restore(path, layout().abstract(lambda: zero_state(*LARGE)))


def zero_state(leaves: int, side: int) -> Any:
  """A state of zeros with the shapes and names of the saved one."""
  boxes = {
    f'w{i}': spmd.LogicallyPartitioned(jnp.zeros((side, side)), ('rows', 'columns'))
    for i in range(leaves)
  }
  return boxes | {'step': jnp.int32(0)}


def _tiny() -> Any:
  return {'w': jnp.ones(8)}


def _leftovers(folder: Path, expected: set[str]) -> str | None:
  names = {child.name for child in folder.iterdir() if not child.name.endswith('.lock')}
  return None if names == expected else f'left over: {sorted(names - expected)}'


# -- flips: one bit of a file changes; cuts: a file is truncated or missing

SMALL = (4, 64)


def flips(runs: int, folder: Path) -> Iterator[Outcome]:
  for kind, how in KINDS.items():
    yield _flips(
      f'bit flips in data: {kind}', _saved(folder / f'd_{kind}', how), runs, _is_data, exact=True
    )
    yield _flips(
      f'bit flips in metadata: {kind}',
      _saved(folder / f'm_{kind}', how),
      runs,
      lambda f: not _is_data(f),
    )


def cuts(runs: int, folder: Path) -> Iterator[Outcome]:
  del runs  # every file once
  for kind, how in KINDS.items():
    path, tally = _saved(folder / f'c_{kind}', how), Tally(f'files cut or gone: {kind}')
    for file in _files(path):
      for harm in (_gone, _halved, _emptied):
        with _harmed(file, harm):
          tally.add(*_judged(path, f'{harm.__name__[1:]} {file.relative_to(path)}'))
    yield tally.outcome()


def _saved(path: Path, how: dict[str, Any]) -> Path:
  checkpoint.save(path, state_of(1, *SMALL), layout=layout(), **how)
  return path


def _files(path: Path) -> list[Path]:
  return sorted(file for file in path.rglob('*') if file.is_file())


def _is_data(file: Path) -> bool:
  return file.parent.name == 'd'


def _flips(
  campaign: str, path: Path, runs: int, which: Callable[[Path], bool], exact: bool = False
) -> Outcome:
  """Flips a random bit in evenly spread bytes of some files."""
  tally, drawn = Tally(campaign), random.Random(campaign)
  files = [file for file in _files(path) if which(file) and file.stat().st_size]
  sizes = [file.stat().st_size for file in files]
  for run in range(runs):
    offset = int((run + drawn.random()) / runs * sum(sizes))
    number = 0
    while offset >= sizes[number]:
      offset -= sizes[number]
      number += 1
    bit = drawn.randrange(8)
    with _harmed(files[number], lambda data: _flipped(data, offset, bit)):  # noqa: B023
      fault = f'bit {bit} of byte {offset} of {files[number].relative_to(path)}'
      tally.add(*_judged(path, fault))
  return tally.outcome()


def _flipped(data: bytes, offset: int, bit: int) -> bytes:
  return data[:offset] + bytes([data[offset] ^ (1 << bit)]) + data[offset + 1 :]


def _gone(data: bytes) -> None:
  return None


def _halved(data: bytes) -> bytes:
  return data[: len(data) // 2]


def _emptied(data: bytes) -> bytes:
  return b''


@contextlib.contextmanager
def _harmed(file: Path, harm: Callable[[bytes], bytes | None]) -> Iterator[None]:
  whole = file.read_bytes()
  changed = harm(whole)
  file.unlink()
  if changed is not None:
    file.write_bytes(changed)
  try:
    yield
  finally:
    file.write_bytes(whole)


def _judged(path: Path, harm: str) -> tuple[str, str | None]:
  """Restores with a target, and by the record alone: caught, harmless or silently wrong."""
  target = layout().abstract(lambda: zero_state(*SMALL))
  results = {_one_restore(path, target), _one_restore(path, None)}
  for bad in results - {'caught', 'harmless'}:
    return bad.split(':')[0], f'{harm}: {bad}'
  return ('caught' if 'caught' in results else 'harmless'), None


def _one_restore(path: Path, target: Any) -> str:
  try:
    restored = checkpoint.restore(path, target, layout=layout())
  except errors.CheckpointError:
    return 'caught'
  except Exception as error:
    return f'unclear: {type(error).__name__}: {str(error)[:300]}'
  return 'harmless' if is_state(restored, 1, *SMALL) else 'SILENTLY WRONG'


# -- full: no space is left


def full(runs: int, folder: Path) -> Iterator[Outcome]:
  yield _full('a file may not grow', min(runs, 10), folder, _small_files)
  if _can_mount(folder):
    yield _full('the disk is full', min(runs, 10), folder, _small_disk)


def _full(campaign: str, runs: int, folder: Path, scarce: Any) -> Outcome:
  tally, drawn = Tally(campaign), random.Random(campaign)
  for run in range(runs):
    subfolder = folder / f'{campaign}_{run}'.replace(' ', '_')
    subfolder.mkdir()
    with scarce(subfolder, drawn.randrange(64 << 10, 900 << 10)) as limited:
      tally.add(*_without_space(subfolder, limited, overwrite=bool(run % 2)))
  return tally.outcome()


def _without_space(folder: Path, limited: Any, overwrite: bool) -> tuple[str, str | None]:
  mode = 'overwrite' if overwrite else 'new path'
  checkpoint.save(folder / '1', state_of(1, *SMALL), layout=layout())
  path = folder / ('1' if overwrite else '2')
  begin = time.monotonic()
  with limited():
    try:
      checkpoint.save(path, state_of(2, 4, 256), layout=layout(), overwrite=overwrite)
      wrong = 'saved without enough space'
    except errors.CheckpointError:
      wrong = None
    except Exception as error:
      wrong = f'{type(error).__name__}: {error}'
  if time.monotonic() - begin > 30:
    wrong = 'took more than 30 s'
  restored = checkpoint.restore(folder / '1', layout().abstract(lambda: zero_state(*SMALL)))
  if not is_state(restored, 1, *SMALL):
    wrong = 'the old checkpoint has changed'
  wrong = wrong or _leftovers(folder, {'1'})
  return mode, wrong and f'{mode}: {wrong}'


@contextlib.contextmanager
def _small_files(folder: Path, room: int) -> Iterator[Any]:
  """Limits the size of files to `room` bytes; Python ignores the signal, so that writing fails."""

  @contextlib.contextmanager
  def limited() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
      yield
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, before)

  yield limited


@contextlib.contextmanager
def _small_disk(folder: Path, room: int) -> Iterator[Any]:
  """A separate file system, too small for the second state."""
  subprocess.run(
    ['mount', '-t', 'tmpfs', '-o', f'size={(256 << 10) + room}', 'tmpfs', folder], check=True
  )
  try:
    yield contextlib.nullcontext
  finally:
    subprocess.run(['umount', folder], check=True)


def _can_mount(folder: Path) -> bool:
  probe = folder / 'probe'
  probe.mkdir()
  done = subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=64k', 'tmpfs', probe], capture_output=True)
  if done.returncode:
    print('Mounting is not permitted: the full disk is left out.', file=sys.stderr)
    return False
  subprocess.run(['umount', probe], check=True)
  return True


# -- writers: two processes save to one path concurrently


def writers(runs: int, folder: Path) -> Iterator[Outcome]:
  pair = [_Writer(number, folder) for number in (1, 2)]
  for overwrite in (False, True):
    tally, drawn = (
      Tally(f'two writers: {"overwrite" if overwrite else "new path"}'),
      random.Random(overwrite),
    )
    for run in range(runs):
      path = folder / f'{overwrite}_{run}'
      if overwrite:
        checkpoint.save(path, state_of(0, *MIDDLE), layout=layout())
      for writer in drawn.sample(pair, 2):
        writer.go(path, overwrite)
        time.sleep(drawn.choice((0, 0, drawn.uniform(0, 0.1))))
      tally.add(*_after_writers(path, [writer.result() for writer in pair]))
      shutil.rmtree(path)
    yield tally.outcome()
  for writer in pair:
    writer.end()


MIDDLE = (4, 512)


class _Writer:
  """A process that saves its state to the paths that it receives."""

  def __init__(self, number: int, folder: Path):
    self._process = subprocess.Popen(
      [sys.executable, __file__, '--writer', str(number), str(folder)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
    )

  def go(self, path: Path, overwrite: bool) -> None:
    self._process.stdin.write(json.dumps([str(path), overwrite]) + '\n')
    self._process.stdin.flush()

  def result(self) -> str:
    return self._process.stdout.readline().strip()

  def end(self) -> None:
    self._process.stdin.close()
    self._process.wait()


def _writer(number: int) -> None:
  """Runs in the writing process: saves to each path from stdin."""
  state = state_of(number, *MIDDLE)
  for line in sys.stdin:
    path, overwrite = json.loads(line)
    try:
      checkpoint.save(path, state, layout=layout(), overwrite=overwrite)
      print('saved', flush=True)
    except Exception as error:
      print(type(error).__name__, str(error).splitlines()[0], flush=True)


def _after_writers(path: Path, results: list[str]) -> tuple[str, str | None]:
  kinds = [text.split()[0] for text in results]
  observation = ' and '.join(sorted(kinds))
  if set(kinds) - {'saved', 'CheckpointBusyError', 'CheckpointExistsError'} or 'saved' not in kinds:
    return observation, f'{results}'
  restored = checkpoint.restore(path, layout().abstract(lambda: zero_state(*MIDDLE)))
  if not any(is_state(restored, n, *MIDDLE) for n in (1, 2) if kinds[n - 1] == 'saved'):
    return observation, f'{results}, but the checkpoint is neither state'
  return observation, None


# -- processes: one of two is killed during a save

PAIR = """
import os, signal, threading, time
import flax_spmd as spmd
from flax_spmd import checkpoint
layout = spmd.Layout({{'data': 2, 'model': 4}}, (('rows', 'data'), ('columns', 'model')))
def state(number):
  sharding = jax.sharding.NamedSharding(layout.mesh, jax.sharding.PartitionSpec('data', 'model'))
  make = lambda i: np.random.default_rng(number + 10 * i).standard_normal(({side}, {side}), np.float32)
  arrays = [make(i) for i in range(4)]
  return {{
    f'w{{i}}': spmd.LogicallyPartitioned(
      jax.make_array_from_callback(a.shape, sharding, lambda index, a=a: a[index]), ('rows', 'columns'))
    for i, a in enumerate(arrays)
  }}
one, two = state(1), state(2)
checkpoint.save('{path}', one, layout=layout)
report('ready')
if jax.process_index() == {victim}:
  threading.Timer({seconds}, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
time.sleep(0.2)
begin = time.monotonic()
try:
  checkpoint.save('{path}', two, layout=layout, overwrite=True)
  report(['saved', time.monotonic() - begin, ''])
except Exception as error:
  report([type(error).__name__, time.monotonic() - begin, str(error)])
if jax.process_index() == {victim}:
  time.sleep(60)
os._exit(0)
"""


_JAX_MESSAGE = (
  'another task died'  # process 0 runs the coordination service: without it JAX ends the others
)


def processes(runs: int, folder: Path) -> Iterator[Outcome]:
  for victim in (1, 0):
    tally, drawn = Tally(f'one of two processes killed: process {victim}'), random.Random(victim)
    for run in range(min(runs, 5)):
      path = folder / f'processes_{victim}_{run}'
      tally.add(*_one_of_two(path, victim, 0.2 + drawn.uniform(0, 0.5)))
    yield tally.outcome()


def _one_of_two(path: Path, victim: int, seconds: float) -> tuple[str, str | None]:
  source = PAIR.format(path=path, victim=victim, seconds=seconds, side=1024)
  begin = time.monotonic()
  results = run_processes(source, processes=2, devices=4, timeout=120, grace=60, check=False)
  survivor, took = results[1 - victim], time.monotonic() - begin
  outcome = (
    survivor.value if isinstance(survivor.value, list) else ['ended by JAX', took, survivor.stderr]
  )
  observation = f'the other: {outcome[0]}'
  if outcome[1] > 30:
    return observation, f'killed after {seconds:.2f} s: {outcome[:2]}, {outcome[2][-500:]}'
  if outcome[0] == 'ended by JAX' and _JAX_MESSAGE not in outcome[2]:
    return observation, f'no clear error: {outcome[2][-500:]}'
  if outcome[0] not in ('CheckpointError', 'saved', 'ended by JAX'):
    return observation, f'unexpected error: {outcome}'
  restored = checkpoint.restore(path, layout=layout())
  for number in (1, 2):
    arrays = [
      np.random.default_rng(number + 10 * i).standard_normal((1024, 1024), np.float32) for i in range(4)
    ]
    if all(np.array_equal(np.asarray(restored[f'w{i}']), arrays[i]) for i in range(4)):
      return observation, None
  return observation, f'killed after {seconds:.2f} s: the checkpoint is neither the old nor the new one'


# -- all campaigns

CAMPAIGNS = {
  'kills': (kills, 30),
  'flips': (flips, 110),
  'cuts': (cuts, 1),
  'full': (full, 10),
  'writers': (writers, 25),
  'processes': (processes, 3),
}


def main() -> int:
  options = parser('checkpoint_faults')
  options.add_argument('campaigns', nargs='*', choices=[[], *CAMPAIGNS], metavar='CAMPAIGN')
  options.add_argument(
    '--runs', type=int, help='number of faults per campaign (default: as in the recorded results)'
  )
  arguments = options.parse_args()
  outcomes: list[Outcome] = []
  with tempfile.TemporaryDirectory(prefix='flax_spmd_faults_') as temporary, _quiet() as aside:
    for name in arguments.campaigns or CAMPAIGNS:
      campaign, runs = CAMPAIGNS[name]
      folder = Path(temporary) / name
      folder.mkdir()
      for outcome in campaign(arguments.runs or runs, folder):
        outcomes.append(outcome)
        print(_line(outcome), file=aside, flush=True)
  report = reported(outcomes)
  report.publish(arguments.json)
  return 1 if report.missed else 0


def reported(outcomes: Sequence[Outcome]) -> Report:
  figures = [
    exact(
      f'{one.campaign}: did harm, or was not clearly said',
      one.total - one.ok,
      f'of {one.total}',
      at_most(0),
    )
    for one in outcomes
  ]
  rows = [[one.campaign, f'{one.ok} of {one.total}', _seen(one)] for one in outcomes]
  details = {'failures': {one.campaign: one.failures for one in outcomes if one.failures}}
  return Report('checkpoint_faults', figures, [Table('What was seen', ['', 'ok', ''], rows)], details)


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
    os.dup2(stderr, 2)


def _seen(outcome: Outcome) -> str:
  return ', '.join(f'{observation}: {count}' for observation, count in sorted(outcome.seen.items()))


def _line(outcome: Outcome) -> str:
  lines = [f'{outcome.campaign:45} {outcome.ok:4} of {outcome.total:4}   {_seen(outcome)}']
  return '\n'.join([*lines, *(f'    {failure}' for failure in outcome.failures)])


if __name__ == '__main__':
  if sys.argv[1:2] == ['--victim']:
    _victim(sys.argv[2], Path(sys.argv[3]))
  elif sys.argv[1:2] == ['--writer']:
    _writer(int(sys.argv[2]))
  else:
    sys.exit(main())
