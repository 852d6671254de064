"""Stores: what all of them promise, checked against a dictionary."""

import secrets
import threading
import zlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from flax_spmd._src.checkpoint.storage.store import ANY, open_store


@pytest.fixture(params=['disk'])
def root(request, tmp_path):
  return str(tmp_path / 'run')


NAMES = st.sampled_from(['HEAD', 'pin-1', 'gen-1/MANIFEST', 'gen-1/d/x', 'gen-10/MANIFEST'])
FOLDERS = ['', 'gen-1', 'gen-1/d', 'gen-10', 'gen-2']


class AgainstDict(RuleBasedStateMachine):
  """Random calls of a store, with the same done to a dictionary."""

  root = ''

  def __init__(self):
    super().__init__()
    self.store = open_store(f'{self.root}/{secrets.token_hex(4)}')
    self.model, self.tags = {}, {}

  @rule(name=NAMES, condition=st.sampled_from(['any', 'none', 'current', 'old']), data=st.binary())
  def write(self, name, condition, data):
    data = secrets.token_bytes(8) + data
    expected = {'any': ANY, 'none': None, 'old': 'old'}.get(condition, self.tags.get(name))
    holds = expected == ANY or expected == self.tags.get(name)
    tag = self.store.write(name, data, expected=expected)
    assert (tag is not None) == holds
    if holds:
      self.model[name], self.tags[name] = data, tag

  @rule(name=NAMES | st.sampled_from(FOLDERS))
  def remove(self, name):
    self.store.remove(name)
    for known in list(self.model):
      if known == name or known.startswith(f'{name}/'[name == '' :]):
        del self.model[known], self.tags[known]

  @rule(name=NAMES)
  def digest(self, name):
    if name in self.model:
      assert self.store.digest(name, 'crc32:') == f'crc32:{zlib.crc32(self.model[name]):08x}'
      assert self.store.digest(name) == self.store.digest(name, self.store.digest(name))

  @invariant()
  def same_contents(self):
    for name in ('HEAD', 'pin-1', 'gen-1/MANIFEST', 'gen-1/d/x', 'gen-10/MANIFEST'):
      found = self.store.read(name)
      assert found == ((self.model[name], self.tags[name]) if name in self.model else None)

  @invariant()
  def same_lists(self):
    for folder in FOLDERS:
      start = f'{folder}/' if folder else ''
      below = {
        name.removeprefix(start): len(d) for name, d in self.model.items() if name.startswith(start)
      }
      assert self.store.files(folder) == below
      children = set(self.store.children(folder))
      assert children >= {name.split('/')[0] for name in below}  # empty folders remain on disk
      assert all(self.store.files(f'{start}{child}') == {} for child in children if not below)


def test_a_store_is_a_dictionary_with_conditions(root):
  machine = type('Machine', (AgainstDict,), {'root': root})
  run_state_machine_as_test(machine, settings=settings(max_examples=30, stateful_step_count=12))


def test_exactly_one_writer_wins(root):
  """Two writers race for 200 rounds, from the same tag each time."""
  stores = [open_store(root) for _ in range(2)]
  before = None
  for _ in range(200):
    barrier, won = threading.Barrier(2), {}

    def race(number, before=before, barrier=barrier, won=won):
      data = secrets.token_bytes(8)
      barrier.wait()
      won[number] = (stores[number].write('HEAD', data, expected=before), data)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(2)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    (winner,) = [result for result in won.values() if result[0] is not None]
    assert stores[0].read('HEAD') == (winner[1], winner[0])
    before = winner[0]
