"""Scheduled store: a store in memory whose actors take turns, one operation at a time, in an order drawn by chance.

`World` has the files, checks the promises after every operation, and knows what a power cut may leave. `ScheduledStore` is the
`Store` of the package over it. `take_turns` runs functions in threads, of which only one ever runs; it is suspended
before each of its operations, and may be killed there.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from flax_spmd._src.checkpoint.storage.checksum import checksum
from flax_spmd._src.checkpoint.storage.store import ANY, LARGEST, FileRecord, Tag
from flax_spmd.errors import CheckpointError

ROOT, NAME = '/root', 'step'
HEAD = f'{ROOT}/{NAME}/HEAD'


class Killed(BaseException):
  """Ends an actor in the middle of its program."""


class Actor:
  """A function in a thread of its own, which runs only when it is resumed."""

  def __init__(self, name: str, call: Callable[[], Any]):
    self.name, self._call = name, call
    self.killed = self.ended = False
    self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
    self._thread.start()

  def _run(self) -> None:
    self.turn()
    try:
      if not self.killed:
        self._call()
    except (Killed, CheckpointError):
      pass
    finally:
      self.ended = True
      self._back.release()

  def turn(self) -> None:
    """Suspends the actor, in its own thread."""
    self._go.acquire()

  def resume(self) -> None:
    """Lets it do one operation, and waits until it stands before the next one."""
    self._go.release()
    self._back.acquire()

  def pause(self) -> None:
    """Called in its own thread before an operation."""
    if not self.killed:
      self._back.release()
      self.turn()
    if self.killed:
      raise Killed


class World:
  """Files of all actors, and the promises about them.

  Args:
    rng: source of all chance.
    without: rules that the store leaves out: 'conditions', 'conditional removal', 'sync', 'durable takes', 'durable commits'.
    disk: whether writes are volatile until they are synced, and tags are digests of contents; else a bucket.
    faults: probability of a fault in an operation.
  """

  def __init__(self, rng: random.Random, disk: bool, without: str = ''):
    self.rng, self.disk, self.without, self.faults = rng, disk, without, 0.0
    self.files: dict[str, bytes] = {}
    self.tags: dict[str, Tag] = {}
    self.before: dict[
      str, set[bytes | None]
    ] = {}  # what a power cut may leave beside the present content
    self.late: list[tuple[str, Tag | None, bytes, str]] = []
    self.named: list[str | None] = [None]  # by HEAD, one after the other
    self.since: dict[bytes | None, int] = {None: 0}  # how many had been named at each content of HEAD
    self.contents: dict[str, dict[str, bytes]] = {}  # of generations that HEAD has named
    self.returned = 0
    self.base: dict[str, str | None] = {}
    self.leases: set[str] = set()
    self.actors: dict[str, Actor] = {}
    self.by_thread: dict[int, Actor] = {}
    self.writes, self.trace, self.broken = 0, [], ''

  # Actors

  def add(self, name: str, call: Callable[[], Any]) -> None:
    """Adds an actor."""

    def known() -> None:
      self.by_thread[threading.get_ident()] = self.actors[name]
      try:
        call()
      finally:
        del self.by_thread[threading.get_ident()]

    self.actors[name] = Actor(name, known)

  @property
  def current(self) -> str:
    """The name of the actor that calls."""
    actor = self.by_thread.get(threading.get_ident())
    return actor.name if actor else 'fresh'

  def operation(self, text: str) -> None:
    """Called before each operation."""
    actor = self.by_thread.get(threading.get_ident())
    if actor is not None:
      actor.pause()
    self.trace.append(f'{self.current}: {text}')

  def fault(self, scale: float = 1.0) -> bool:
    """Whether a fault happens now."""
    return self.rng.random() < self.faults * scale

  def fail(self, text: str) -> None:
    """Records a broken promise."""
    self.broken = self.broken or text

  # Files

  def set(self, name: str, content: bytes | None, volatile: bool) -> Tag | None:
    """Replaces or removes a file."""
    old = self.files.get(name)
    if name == HEAD:
      self._check_update(content)
    if volatile:
      self.before.setdefault(name, set()).add(old)
    else:
      self.before.pop(name, None)
    if content is None:
      self.files.pop(name, None)
      return None
    self.writes += 1
    self.files[name] = content
    self.tags[name] = Tag(checksum(iter([content, b''])) if self.disk else str(self.writes))
    return self.tags[name]

  def settle(self, prefix: str) -> None:
    """Makes the files below a prefix durable."""
    self.before = {name: old for name, old in self.before.items() if not name.startswith(prefix)}

  def settle_folder(self, name: str) -> None:
    """Makes the names in a file's folder durable."""
    folder = name.rpartition('/')[0]
    self.before = {
      other: old for other, old in self.before.items() if other.rpartition('/')[0] != folder
    }

  # Promises

  def _check_update(self, content: bytes | None) -> None:
    head = json.loads(content) if content else {'generation': None, 'lease': None}
    before, after, actor = self.named[-1], head['generation'], self.current
    if head['lease'] is not None and head['lease']['token'] not in self.leases:
      self.leases.add(head['lease']['token'])
      self.base[actor] = before
    if before != after:
      own = self.contents.get(after or '') or {
        name: data for name, data in self.files.items() if after and f'/{after}/' in name
      }
      base, named_again = self.base.get(actor), actor == 'delete' and after == self.base.get(actor)
      mine = after is None or actor in ('fresh', _writer(own))
      if not ((before in (base, None) and mine) or named_again):
        self.fail(f'lost update: {actor} replaces {before} by {after}')
      self.named.append(after)
      self.contents.setdefault(after or '', own)
    self.since[content] = len(self.named) - 1

  def check(self) -> None:
    """HEAD names a whole generation, whichever of its values and files a power cut leaves."""
    for content in {self.files.get(HEAD), *self.before.get(HEAD, set())}:
      generation = json.loads(content)['generation'] if content else None
      if self.since[content] < self.returned:
        self.fail('a power cut removes a save that has returned')
      expected = self.contents[generation or ''] if generation else {}
      if generation and not any(name.endswith('/MANIFEST') for name in expected):
        self.fail(f'HEAD names {generation} without MANIFEST')
      for name, data in expected.items():
        if self.files.get(name) != data or self.before.get(name):
          self.fail(f'HEAD names {generation} without {name}')

  def report(self, generation: str) -> None:
    """A save has returned."""
    if generation not in self.named:
      self.fail(f'{self.current} returns, and HEAD has never named {generation}')
    else:
      self.returned = max(self.returned, self.named.index(generation))

  def power_cut(self) -> None:
    """Leaves what is durable, and some of what is not."""
    for name, old in self.before.items():
      content = self.rng.choice(sorted({*old, self.files.get(name)}, key=repr))
      if content is None:
        self.files.pop(name, None)
      else:
        self.files[name], self.tags[name] = content, Tag(checksum(iter([content, b''])))
    self.before = {}
    head = self.files.get(HEAD)
    self.named.append(json.loads(head)['generation'] if head else None)


def _writer(files: Mapping[str, bytes]) -> str:
  return next(
    (data.decode().partition(':')[0] for name, data in files.items() if name.endswith('/a')), ''
  )


class ScheduledStore:
  """See `Store`. Each method is one operation; on a disk a durable write is two, the rename and the sync."""

  def __init__(self, world: World, root: Any = ROOT):
    self.world, self.root = world, epath.Path(root)

  def _full(self, name: str) -> str:
    return f'{self.root}/{name}' if name else str(self.root)

  def read(self, name: str, limit: int = LARGEST) -> tuple[bytes, Tag] | None:
    """See `Store`."""
    del limit
    self.world.operation(f'read {name}')
    full = self._full(name)
    return (self.world.files[full], self.world.tags[full]) if full in self.world.files else None

  def write(
    self, name: str, data: bytes, *, expected: Tag | None = ANY, durable: bool = True
  ) -> Tag | None:
    """See `Store`."""
    world, full = self.world, self._full(name)
    shown = data.decode() if name.endswith('HEAD') else ''
    world.operation(f'write {name} {shown}')
    if name.endswith('HEAD') and not world.disk and world.fault():
      return self._unanswered(full, data, expected)
    if world.without == 'conditions' and name.endswith('HEAD'):
      expected = ANY
    if expected not in (ANY, world.tags[full] if full in world.files else None):
      world.trace.append('  refused')
      return None
    tag = world.set(full, data, volatile=world.disk)
    kind = 'durable takes' if '"token"' in shown else 'durable commits'
    if world.disk and durable and world.without != kind:
      world.operation(f'sync the folder of {name}')
      if world.fault():
        world.trace.append('  EIO')
        raise CheckpointError('EIO\nFix: none.')
      world.settle_folder(full)
    return tag

  def _unanswered(self, full: str, data: bytes, expected: Tag | None) -> None:
    """The put is applied now, later or never; the answer is an error, or "refused" to the second attempt."""
    world = self.world
    holds = expected in (ANY, world.tags[full] if full in world.files else None)
    fate = world.rng.choice(['now', 'refused', 'later', 'never'])
    world.trace.append(f'  unanswered, applied: {fate}')
    if holds and fate in ('now', 'refused'):
      world.set(full, data, volatile=False)
    if fate == 'refused':
      return
    if fate == 'later':
      world.late.append((full, expected, data, world.current))
    raise CheckpointError('no answer\nFix: none.')

  def remove_if(self, name: str, expected: Tag) -> bool:
    """See `Store`."""
    self.world.operation(f'remove {name} if unchanged')
    full = self._full(name)
    changed = full not in self.world.files or self.world.tags[full] != expected
    if changed and self.world.without != 'conditional removal':
      self.world.trace.append('  refused')
      return False
    self.world.set(full, None, volatile=self.world.disk)
    return True

  def children(self, folder: str = '') -> list[str]:
    """See `Store`."""
    self.world.operation(f'list {folder}')
    prefix = f'{self._full(folder)}/'
    return sorted(
      {name[len(prefix) :].partition('/')[0] for name in self.world.files if name.startswith(prefix)}
    )

  def files(self, folder: str = '', *, compared: bool = False) -> dict[str, FileRecord]:
    """See `Store`. Its lists have no checksums."""
    del compared
    self.world.operation(f'list {folder}')
    prefix = f'{self._full(folder)}/'
    files = self.world.files
    names = [name for name in sorted(files) if name.startswith(prefix)]
    return {name[len(prefix) :]: FileRecord(len(files[name]), '') for name in names}

  def digest(self, name: str, like: str = '') -> str:
    """See `Store`."""
    if self._full(name) not in self.world.files:
      raise CheckpointError(f'{name} is missing\nFix: none.')
    return checksum(iter([self.world.files[self._full(name)], b'']), like)

  def remove(self, folder_or_file: str, *, is_file: bool = False) -> None:
    """See `Store`. A folder is removed file by file."""
    del is_file
    full = self._full(folder_or_file)
    for name in self.world.rng.sample(sorted(self.world.files), len(self.world.files)):
      if name == full or name.startswith(f'{full}/'):
        self.world.operation(f'remove {name}')
        self.world.set(name, None, volatile=self.world.disk)

  def sync(self, folder: str = '') -> None:
    """See `Store`."""
    self.world.operation(f'sync {folder}')
    if self.world.disk and self.world.fault():
      self.world.trace.append('  EIO')
      raise CheckpointError('EIO\nFix: none.')
    if self.world.without != 'sync':
      self.world.settle(f'{self._full(folder)}/')

  def write_data(self, name: str, data: bytes) -> None:
    """Writes a file of arrays, as Orbax does."""
    self.world.operation(f'write {name}')
    if self.world.fault(0.3):
      self.world.trace.append('  ENOSPC')
      raise CheckpointError('ENOSPC\nFix: none.')
    self.world.set(self._full(name), data, volatile=self.world.disk)


def take_turns(world: World, kills: float) -> None:
  """Runs the actors of a world to their ends, or to those of the ones that live; stops at a broken promise.

  Args:
    world: world with its actors.
    kills: probability that an actor is killed instead of its next operation.
  """
  rng = world.rng
  waiting = list(world.actors.values())
  sticky = rng.choice([0.0, 0.5, 0.9])
  actor = waiting[0]
  while waiting and not world.broken:
    if actor not in waiting or rng.random() >= sticky:
      actor = rng.choice(waiting)
    if rng.random() < kills:
      world.trace.append(f'{actor.name} is killed')
      actor.killed = True
    if world.late and rng.random() < 0.1:
      _deliver(world)
    actor.resume()
    if actor.ended:
      waiting.remove(actor)
    world.check()
  for actor in waiting:
    actor.killed = True
    actor.resume()


def _deliver(world: World) -> None:
  full, expected, data, sender = world.late.pop()
  if expected in (ANY, world.tags[full] if full in world.files else None):
    world.trace.append(f'the late put of {sender} is applied')
    world.by_thread[threading.get_ident()] = world.actors[sender]
    try:
      world.set(full, data, volatile=False)
    finally:
      del world.by_thread[threading.get_ident()]
