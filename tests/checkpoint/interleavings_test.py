"""Interleavings: savers, a reader, a sweep and a deletion on one path, one store operation at a time, in any order.

The code is the package's own; only the store, the processes' identities and the verdicts about who is dead are
replaced. Verdicts are drawn by chance, since no promise may rest on time. Actors are killed or suspended
anywhere, answers of puts are lost or late, syncs fail, and the power goes.
"""

import itertools
import random
import threading
import types

import pytest
from etils import epath

from flax_spmd._src.checkpoint.storage import generations, head_lease, killed_saves, pins, source
from flax_spmd._src.checkpoint.storage.generations import Claim, remove_checkpoint
from flax_spmd._src.checkpoint.storage.killed_saves import remove_killed_saves
from flax_spmd._src.checkpoint.storage.process_identity import ProcessIdentity
from flax_spmd._src.checkpoint.storage.record import Record
from flax_spmd._src.checkpoint.storage.source import read_whole
from flax_spmd.errors import CheckpointDamagedError, CheckpointError
from tests.checkpoint.scheduled_store import NAME, ROOT, ScheduledStore, World, take_turns

PATH = epath.Path(ROOT) / NAME
RECORD = Record(None, {}, {})


class Setting:
  """The package over one world: stores, processes and verdicts."""

  def __init__(self, world, patch):
    self.world, self.owners, self.numbers = world, {}, itertools.count()
    self.verdicts = world.rng.choice([0.0, 0.2, 1.0])
    self.disturbed = set()
    for module in (generations, source):
      patch.setattr(module, 'open_store', lambda path: ScheduledStore(self.world, path))
    patch.setattr(head_lease, 'BEAT', 1e6)
    patch.setattr(pins, 'BEAT', 1e6)
    for module in (head_lease, killed_saves, pins):
      patch.setattr(module, 'this_process', self.this_process)
      patch.setattr(module, 'new_token', self.new_token)
    patch.setattr(
      head_lease, 'has_ended', lambda holder, token: self.is_dead(None, '', holder, token, None)
    )
    patch.setattr(head_lease, 'stays_silent', lambda store, name, tag: False)
    patch.setattr(killed_saves, 'is_dead', self.is_dead)
    patch.setattr(pins, 'is_dead', self.is_dead)
    patch.setattr(generations, 'time', types.SimpleNamespace(sleep=lambda seconds: None))
    patch.setattr(
      generations, 'secrets', types.SimpleNamespace(token_hex=lambda n: f'{next(self.numbers):08x}')
    )

  def this_process(self):
    return ProcessIdentity(self.world.current, '', 1, '')

  def new_token(self):
    token = f'{next(self.numbers):016x}'
    self.owners[token] = self.world.current
    return token

  def is_dead(self, store, name, holder, token, tag):
    if self.owners[token] != holder.host:
      self.world.fail(f'a verdict about {holder.host} with the token of {self.owners[token]}')
    dead = self.world.rng.random() < self.verdicts
    if dead:
      self.disturbed.add(holder.host)
    return dead

  def save(self, overwrite=True):
    world = self.world
    claim = Claim(PATH, overwrite)
    generation = claim.new.name
    try:
      store = ScheduledStore(world)
      for file in ('a', 'b'):
        store.write_data(f'{NAME}/{generation}/{file}', f'{world.current}:{generation}/{file}'.encode())
      claim.commit(RECORD, {})
      world.report(generation)
    finally:
      claim.release()

  def read(self, pinless=False):
    world = self.world

    def read(found):
      return None if found is None else (found.folder.name, self.files(found))

    try:
      result = read_whole(PATH, read)
    except CheckpointDamagedError as error:
      world.fail(f'the reader reports damage: {error}')
      return
    if result and any(f'{result[0]}/{file}' not in data for file, data in result[1].items()):
      world.fail(f'the reader returns {result}')

  def files(self, found):
    """The files of a generation. An absent one is damage, or a hole."""
    world = self.world
    contents = {}
    for file in sorted(found.manifest.files):
      stored = ScheduledStore(world, PATH).read(f'{found.folder.name}/{file}')
      pinned = any(f'/{NAME}/pin-' in name and name.endswith(found.folder.name) for name in world.files)
      if stored is None and pinned and 'reader' not in self.disturbed:
        world.fail(f'the reader loses {found.folder.name}/{file} under its pin')
      if stored is None and world.rng.random() < 0.5:
        raise CheckpointDamagedError('a file is missing\nFix: none.')
      contents[file] = stored[0].decode() if stored else '0'
    return contents

  def delete(self):
    remove_checkpoint(PATH)

  def sweep(self):
    remove_killed_saves(ScheduledStore(self.world))

  def check_fresh_save(self):
    """A save succeeds if all others are dead, and leaves HEAD and one generation."""
    world = self.world
    world.faults, world.disk, self.verdicts, world.late = 0.0, False, 1.0, []
    try:
      self.save()
    except CheckpointError as error:
      world.fail(f'a save finds no way on: {error}')
      return
    generation = world.named[-1]
    expected = {
      f'{ROOT}/{NAME}/HEAD',
      *(f'{ROOT}/{NAME}/{generation}/{file}' for file in ('a', 'b', 'MANIFEST')),
    }
    if set(world.files) != expected:
      world.fail(f'litter after a save: {sorted(set(world.files) ^ expected)}')


CASTS = [
  {'A': 'overwrite', 'B': 'overwrite', 'reader': 'read'},
  {'A': 'first', 'B': 'first', 'sweep': 'sweep'},
  {'A': 'overwrite', 'delete': 'delete', 'reader': 'read'},
  {'delete': 'delete', 'sweep': 'sweep', 'reader': 'read'},
  {'A': 'overwrite', 'B': 'overwrite', 'reader': 'read', 'sweep': 'sweep', 'delete': 'delete'},
]


def play(seed, patch, without=''):
  """One schedule; returns the world at its end."""
  rng = random.Random(seed)
  world = World(rng, disk=rng.random() < 0.5, without=without)
  setting = Setting(world, patch)
  cast = rng.choice(CASTS)
  if 'first' not in cast.values():
    setting.save()
    world.returned = 0
    world.check()
  calls = {
    'overwrite': setting.save,
    'first': lambda: setting.save(overwrite=False),
    'read': setting.read,
    'delete': setting.delete,
    'sweep': setting.sweep,
  }
  world.faults = rng.choice([0.0, 0.1, 0.3])
  world.trace = [f'cast {cast}, {"disk" if world.disk else "bucket"}']
  for name, role in cast.items():
    world.add(name, calls[role])
  take_turns(world, kills=rng.choice([0.0, 0.02, 0.1]))
  if not world.broken and world.disk and rng.random() < 0.5:
    world.power_cut()
    world.trace.append('power cut')
  if not world.broken:
    setting.check_fresh_save()
  check_threads(world)
  return world


def check_threads(world):
  """No lease and no pin is renewed after its end."""
  for thread in threading.enumerate():
    if thread.name.startswith(('flax_spmd lease', 'flax_spmd pin')):
      thread.join(5)
      if thread.is_alive():
        world.fail(f'{thread.name} is renewed for ever')


def broken(seeds, mutate=lambda patch: None, without=''):
  """The first schedule that breaks a promise, and its steps; '' if none does."""
  for seed in seeds:
    with pytest.MonkeyPatch.context() as patch:
      mutate(patch)
      world = play(seed, patch, without)
    if world.broken:
      return '\n'.join([f'seed {seed}: {world.broken}', *world.trace])
  return ''


@pytest.mark.parametrize(
  'seeds',
  [
    range(400),
    *(pytest.param(range(n, n + 5000), marks=pytest.mark.exhaustive) for n in range(1000, 31000, 5000)),
  ],
)
def test_every_schedule_keeps_the_promises(seeds):
  assert not broken(seeds)


def manifest_last(patch):
  def remove(store, folder):
    for file in ('a', 'b', ''):
      store.remove(f'{folder}/{file}'.rstrip('/'))

  for module in (generations, killed_saves):
    patch.setattr(module, 'remove_generation', remove)


def no_last_look(patch):
  patch.setattr(source.Source, 'is_whole', True)


def no_pins(patch):
  for module in (generations, killed_saves):
    patch.setattr(module, 'pinned_generations', lambda store, name: set())


def no_release(patch):
  patch.setattr(head_lease.HeadLease, 'release', lambda lease, **changes: True)


def no_intents(patch):
  patch.setattr(generations, 'remove_killed_saves', lambda store: None)


MUTATIONS = [manifest_last, no_last_look, no_pins, no_release, no_intents]
STORES = ['conditions', 'conditional removal', 'sync', 'durable takes', 'durable commits']


@pytest.mark.parametrize('mutate', MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_schedules_show_a_rule_of_the_code_that_is_left_out(mutate):
  first = 1200 if mutate is manifest_last else 0  # a rare one
  assert broken(range(first, first + 1500), mutate)


@pytest.mark.parametrize('without', STORES)
def test_schedules_show_a_guarantee_of_the_store_that_is_missing(without):
  assert broken(range(1500), without=without)
