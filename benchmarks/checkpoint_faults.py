"""Campaigns against checkpoints: what is left when a save is killed, a disk is full, or bits change.

    python benchmarks/checkpoint_faults.py                     # all of them, as often as the figures say
    python benchmarks/checkpoint_faults.py kills flips --runs 10 --json

Each campaign does one harm many times, at moments and places that are drawn, and asks the same each time:
is a checkpoint that was whole whole still, and is what is wrong said? It prints how often the answer was
yes; the script ends with 1 unless it always was. What is restored is compared with what was saved, number
by number, so that nothing depends on our own checksums being right.
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
  """How often a campaign's harm did no harm."""

  campaign: str
  ok: int
  total: int
  seen: dict[str, int]
  failures: list[str]


class Tally:
  """Counts what was seen, and keeps what should not have been."""

  def __init__(self, campaign: str):
    self.campaign = campaign
    self.seen: collections.Counter[str] = collections.Counter()
    self.failures: list[str] = []

  def add(self, what: str, failure: str | None = None) -> None:
    self.seen[what] += 1
    if failure is not None:
      self.failures.append(failure)

  def outcome(self) -> Outcome:
    total = sum(self.seen.values())
    ok = total - len(self.failures)
    return Outcome(self.campaign, ok, total, dict(self.seen), self.failures[:10])


def layout() -> spmd.Layout:
  return spmd.Layout({'data': 2, 'model': 4}, RULES)


def values(number: int, leaves: int, side: int) -> dict[str, np.ndarray]:
  """Numbers that tell which state they are of, and where in it they belong."""
  generator = np.random.default_rng(number)
  made = {f'w{i}': generator.standard_normal((side, side), np.float32) for i in range(leaves)}
  return made | {'step': np.asarray(number, np.int32)}


def placed(number: int, leaves: int, side: int) -> Any:
  boxes = {
    name: spmd.LogicallyPartitioned(value, ('rows', 'columns')) if value.ndim else value
    for name, value in values(number, leaves, side).items()
  }
  return jax.block_until_ready(layout().shard(boxes))


def is_state(restored: Any, number: int, leaves: int, side: int) -> bool:
  wanted = values(number, leaves, side)
  found = spmd.unbox(restored)
  return set(found) == set(wanted) and all(
    np.array_equal(np.asarray(found[name]), wanted[name]) for name in wanted
  )


# -- kills: a process that saves is killed at a random moment

LARGE = (6, 1024)  # leaves and their side: 25 MB
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
  """A process that is about to save in a folder that has a whole checkpoint already."""

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
    """Lets it save; the seconds that it takes."""
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
  """What the process does that is killed."""
  one, two = placed(1, *LARGE), placed(2, *LARGE)
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
  """What is there after a kill, and what is wrong with it."""
  what = 'saved before the kill' if victim.done else 'killed'
  try:
    wrong = _checks[mode](victim.folder, victim.done)
  except Exception as error:
    wrong = f'{type(error).__name__}: {error}'
  return what, wrong and f'{mode}, {what}: {wrong}'


def _check_new_path(folder: Path, done: bool) -> str | None:
  """The old one is there, the new one whole or not there, and can be saved again."""
  if not is_state(_restored(folder / '1'), 1, *LARGE):
    return 'the checkpoint before is not what it was'
  try:
    there = is_state(_restored(folder / '2'), 2, *LARGE)
  except errors.CheckpointNotFoundError:
    there = None
  if there is False or (done and not there):
    return 'the new checkpoint is wrong, or gone'
  checkpoint.save(folder / '2', _tiny(), layout=layout(), overwrite=True)
  return _leftovers(folder, {'1', '2'})


def _check_overwrite(folder: Path, done: bool) -> str | None:
  """The old one or the new one is there, and can be replaced."""
  restored = _restored(folder / '1')
  if not (is_state(restored, 2, *LARGE) or (not done and is_state(restored, 1, *LARGE))):
    return 'neither the old nor the new state'
  checkpoint.save(folder / '1', _tiny(), layout=layout(), overwrite=True)
  return _leftovers(folder, {'1'})


def _check_manager(folder: Path, done: bool) -> str | None:
  """The newest step that is listed is whole, and the run goes on."""
  with checkpoint.Manager(folder / 'run', layout(), every=1, keep=1) as manager:
    step, restored = manager.restore(placed(0, *LARGE))
    if step not in (1, 2) or (done and step != 2) or not is_state(restored, step, *LARGE):
      return f'step {step}, which is not the one that was saved'
    manager.save(3, _tiny())
    manager.wait()
    if manager.steps != [3]:
      return f'then the steps {manager.steps}'
  return _leftovers(folder / 'run', {'3'})


_checks = {
  'new path': _check_new_path,
  'async': _check_new_path,
  'overwrite': _check_overwrite,
  'manager': _check_manager,
}


def _restored(path: Path) -> Any:
  return checkpoint.restore(path, layout().abstract(lambda: placed_shapes(*LARGE)))


def placed_shapes(leaves: int, side: int) -> Any:
  """What has the shapes and names of a state."""
  made = {
    f'w{i}': spmd.LogicallyPartitioned(jnp.zeros((side, side)), ('rows', 'columns'))
    for i in range(leaves)
  }
  return made | {'step': jnp.int32(0)}


def _tiny() -> Any:
  return {'w': jnp.ones(8)}


def _leftovers(folder: Path, wanted: set[str]) -> str | None:
  found = {child.name for child in folder.iterdir() if not child.name.endswith('.lock')}
  return None if found == wanted else f'{sorted(found - wanted)} are left over'


# -- flips: one bit of a file changes; cuts: a file is cut short, or gone

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
  checkpoint.save(path, placed(1, *SMALL), layout=layout(), **how)
  return path


def _files(path: Path) -> list[Path]:
  return sorted(file for file in path.rglob('*') if file.is_file())


def _is_data(file: Path) -> bool:
  return file.parent.name == 'd'


def _flips(
  campaign: str, path: Path, runs: int, which: Callable[[Path], bool], exact: bool = False
) -> Outcome:
  """Flips in evenly spread bytes of some files; `exact`: every byte of the arrays is meant."""
  tally, drawn = Tally(campaign), random.Random(campaign)
  files = [file for file in _files(path) if which(file) and file.stat().st_size]
  sizes = [file.stat().st_size for file in files]
  for run in range(runs):
    place = int((run + drawn.random()) / runs * sum(sizes))
    number = 0
    while place >= sizes[number]:
      place -= sizes[number]
      number += 1
    bit = drawn.randrange(8)
    with _harmed(files[number], lambda data: _flipped(data, place, bit)):  # noqa: B023
      what = f'bit {bit} of byte {place} of {files[number].relative_to(path)}'
      tally.add(*_judged(path, what))
  return tally.outcome()


def _flipped(data: bytes, place: int, bit: int) -> bytes:
  return data[:place] + bytes([data[place] ^ (1 << bit)]) + data[place + 1 :]


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
  """Restores with a target, and by the record alone: caught, harmless, or silently wrong."""
  target = layout().abstract(lambda: placed_shapes(*SMALL))
  found = {_one_restore(path, target), _one_restore(path, None)}
  for bad in found - {'caught', 'harmless'}:
    return bad.split(':')[0], f'{harm}: {bad}'
  return ('caught' if 'caught' in found else 'harmless'), None


def _one_restore(path: Path, target: Any) -> str:
  try:
    restored = checkpoint.restore(path, target, layout=layout())
  except errors.CheckpointError:
    return 'caught'
  except Exception as error:
    return f'unclear: {type(error).__name__}: {str(error)[:300]}'
  return 'harmless' if is_state(restored, 1, *SMALL) else 'SILENTLY WRONG'


# -- full: there is no room


def full(runs: int, folder: Path) -> Iterator[Outcome]:
  yield _full('a file may not grow', min(runs, 10), folder, _small_files)
  if _can_mount(folder):
    yield _full('the disk is full', min(runs, 10), folder, _small_disk)


def _full(campaign: str, runs: int, folder: Path, scarce: Any) -> Outcome:
  tally, drawn = Tally(campaign), random.Random(campaign)
  for run in range(runs):
    here = folder / f'{campaign}_{run}'.replace(' ', '_')
    here.mkdir()
    with scarce(here, drawn.randrange(64 << 10, 900 << 10)) as squeezed:
      tally.add(*_without_room(here, squeezed, overwrite=bool(run % 2)))
  return tally.outcome()


def _without_room(folder: Path, squeezed: Any, overwrite: bool) -> tuple[str, str | None]:
  what = 'overwrite' if overwrite else 'new path'
  checkpoint.save(folder / '1', placed(1, *SMALL), layout=layout())
  path = folder / ('1' if overwrite else '2')
  begin = time.monotonic()
  with squeezed():
    try:
      checkpoint.save(path, placed(2, 4, 256), layout=layout(), overwrite=overwrite)
      wrong = 'it was saved, though there was no room'
    except errors.CheckpointError:
      wrong = None
    except Exception as error:
      wrong = f'{type(error).__name__}: {error}'
  if time.monotonic() - begin > 30:
    wrong = 'it took more than 30 s'
  restored = checkpoint.restore(folder / '1', layout().abstract(lambda: placed_shapes(*SMALL)))
  if not is_state(restored, 1, *SMALL):
    wrong = 'what was there before is not what it was'
  wrong = wrong or _leftovers(folder, {'1'})
  return what, wrong and f'{what}: {wrong}'


@contextlib.contextmanager
def _small_files(folder: Path, room: int) -> Iterator[Any]:
  """While it is squeezed, no file may have more bytes; Python ignores the signal, writing fails."""

  @contextlib.contextmanager
  def squeezed() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
      yield
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, before)

  yield squeezed


@contextlib.contextmanager
def _small_disk(folder: Path, room: int) -> Iterator[Any]:
  """A file system of its own, of a size that has no room for the second state."""
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
    print('Nothing can be mounted here: no full disk.', file=sys.stderr)
    return False
  subprocess.run(['umount', probe], check=True)
  return True


# -- writers: two processes save to one path at once


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
        checkpoint.save(path, placed(0, *MIDDLE), layout=layout())
      for writer in drawn.sample(pair, 2):
        writer.go(path, overwrite)
        time.sleep(drawn.choice((0, 0, drawn.uniform(0, 0.1))))
      tally.add(*_after_writers(path, [writer.said() for writer in pair]))
      shutil.rmtree(path)
    yield tally.outcome()
  for writer in pair:
    writer.end()


MIDDLE = (4, 512)


class _Writer:
  """A process that saves its state wherever it is told to."""

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

  def said(self) -> str:
    return self._process.stdout.readline().strip()

  def end(self) -> None:
    self._process.stdin.close()
    self._process.wait()


def _writer(number: int) -> None:
  """What the process does."""
  state = placed(number, *MIDDLE)
  for line in sys.stdin:
    path, overwrite = json.loads(line)
    try:
      checkpoint.save(path, state, layout=layout(), overwrite=overwrite)
      print('saved', flush=True)
    except Exception as error:
      print(type(error).__name__, str(error).splitlines()[0], flush=True)


def _after_writers(path: Path, said: list[str]) -> tuple[str, str | None]:
  kinds = [text.split()[0] for text in said]
  what = ' and '.join(sorted(kinds))
  if set(kinds) - {'saved', 'CheckpointBusyError', 'CheckpointExistsError'} or 'saved' not in kinds:
    return what, f'{said}'
  restored = checkpoint.restore(path, layout().abstract(lambda: placed_shapes(*MIDDLE)))
  if not any(is_state(restored, n, *MIDDLE) for n in (1, 2) if kinds[n - 1] == 'saved'):
    return what, f'{said}, and neither is there'
  return what, None


# -- processes: one of two is killed in the middle of a save

PAIR = """
import os, signal, threading, time
import flax_spmd as spmd
from flax_spmd import checkpoint
layout = spmd.Layout({{'data': 2, 'model': 4}}, (('rows', 'data'), ('columns', 'model')))
def state(number):
  place = jax.sharding.NamedSharding(layout.mesh, jax.sharding.PartitionSpec('data', 'model'))
  make = lambda i: np.random.default_rng(number + 10 * i).standard_normal(({side}, {side}), np.float32)
  arrays = [make(i) for i in range(4)]
  return {{
    f'w{{i}}': spmd.LogicallyPartitioned(
      jax.make_array_from_callback(a.shape, place, lambda index, a=a: a[index]), ('rows', 'columns'))
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


_JAXS_WORDS = 'another task died'  # it ends what has lost the first process, with its service


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
  said = survivor.value if isinstance(survivor.value, list) else ['ended by JAX', took, survivor.stderr]
  what = f'the other: {said[0]}'
  if said[1] > 30:
    return what, f'killed after {seconds:.2f} s: {said[:2]}, {said[2][-500:]}'
  if said[0] == 'ended by JAX' and _JAXS_WORDS not in said[2]:
    return what, f'no clear error: {said[2][-500:]}'
  if said[0] not in ('CheckpointError', 'saved', 'ended by JAX'):
    return what, f'another error: {said}'
  restored = checkpoint.restore(path, layout=layout())
  for number in (1, 2):
    made = [
      np.random.default_rng(number + 10 * i).standard_normal((1024, 1024), np.float32) for i in range(4)
    ]
    if all(np.array_equal(np.asarray(restored[f'w{i}']), made[i]) for i in range(4)):
      return what, None
  return what, f'killed after {seconds:.2f} s: the checkpoint is neither the old nor the new one'


# -- all of it

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
    '--runs', type=int, help='how often each harm is done; default: as in the figures'
  )
  asked = options.parse_args()
  outcomes: list[Outcome] = []
  with tempfile.TemporaryDirectory(prefix='flax_spmd_faults_') as temporary, _quiet() as aside:
    for name in asked.campaigns or CAMPAIGNS:
      campaign, runs = CAMPAIGNS[name]
      folder = Path(temporary) / name
      folder.mkdir()
      for outcome in campaign(asked.runs or runs, folder):
        outcomes.append(outcome)
        print(_line(outcome), file=aside, flush=True)
  report = reported(outcomes)
  report.publish(asked.json)
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
  """Orbax tells of each error on stderr, in some hundred lines, whoever catches it: a stderr of our own."""
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
  return ', '.join(f'{what}: {count}' for what, count in sorted(outcome.seen.items()))


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
