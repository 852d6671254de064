"""Stores: what all of them promise, checked against a dictionary."""

import secrets
import subprocess
import sys
import threading
import zlib
from textwrap import dedent

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from flax_spmd._src.checkpoint.storage.store import ANY, open_store
from flax_spmd.errors import CheckpointDamagedError, CheckpointError

NAMES = st.sampled_from(['HEAD', 'pin-1', 'gen-1/MANIFEST', 'gen-1/d/x', 'gen-10/MANIFEST'])
FOLDERS = ['', 'gen-1', 'gen-1/d', 'gen-10', 'gen-2']


class AgainstDict(RuleBasedStateMachine):
  """Random calls of a store, with the same done to a dictionary."""

  root = ''

  def __init__(self):
    super().__init__()
    self.store = open_store(f'{self.root}/{secrets.token_hex(4)}')
    self.model, self.tags, self.former = {}, {}, []

  @rule(name=NAMES, condition=st.sampled_from(['any', 'none', 'current', 'old']), data=st.binary())
  def write(self, name, condition, data):
    data = secrets.token_bytes(8) + data
    former = self.former[-2] if len(self.former) > 1 else None
    expected = {'any': ANY, 'none': None, 'old': former}.get(condition, self.tags.get(name))
    holds = expected == ANY or expected == self.tags.get(name)
    tag = self.store.write(name, data, expected=expected)
    assert (tag is not None) == holds
    if holds:
      self.model[name], self.tags[name] = data, tag
      self.former.append(tag)

  @rule(name=NAMES | st.sampled_from(FOLDERS[1:]))
  def remove(self, name):
    self.store.remove(name)
    for known in list(self.model):
      if known == name or known.startswith(f'{name}/'):
        del self.model[known], self.tags[known]

  @rule(name=NAMES, current=st.booleans())
  def remove_if(self, name, current):
    if name in self.model:
      former = [tag for tag in self.former if tag != self.tags[name]]
      tag = self.tags[name] if current or not former else former[-1]
      assert self.store.remove_if(name, tag) == (tag == self.tags[name])
      if tag == self.tags[name]:
        del self.model[name], self.tags[name]

  def teardown(self):
    self.same_lists()

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

  @rule()
  def same_lists(self):
    for folder in FOLDERS:
      start = f'{folder}/' if folder else ''
      below = {
        name.removeprefix(start): len(d) for name, d in self.model.items() if name.startswith(start)
      }
      assert sizes(self.store, folder) == below
      children = set(self.store.children(folder))
      assert children >= {name.split('/')[0] for name in below}  # empty folders remain on disk
      assert all(not self.store.files(f'{start}{child}') for child in children if not below)


def sizes(store, folder=''):
  return {name: file.size for name, file in store.files(folder).items()}


def test_a_store_is_a_dictionary_with_conditions(root):
  machine = type('Machine', (AgainstDict,), {'root': root})
  examples = 6 if '://' in root else 50
  run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=10))


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


COUNTS = """
  import sys
  from flax_spmd._src.checkpoint.storage.store import open_store
  store = open_store(sys.argv[1])
  done = 0
  while done < 100:
    content, tag = store.read('HEAD')
    number = int(content.split()[0])
    done += store.write('HEAD', f'{number + 1} {sys.argv[2]}'.encode(), expected=tag) is not None
"""


def test_no_write_of_two_processes_is_lost(tmp_path):
  """On disk, where the processes have to agree among themselves."""
  root = str(tmp_path)
  store = open_store(root)
  store.write('HEAD', b'0 start')
  script = dedent(COUNTS)
  workers = [subprocess.Popen([sys.executable, '-c', script, root, name]) for name in 'ab']
  assert [worker.wait(600) for worker in workers] == [0, 0]
  assert store.read('HEAD')[0].split()[0] == b'200'


def test_a_name_that_begins_another(root):
  """Folders end at slashes: `gen-1` is not part of `gen-10`."""
  store = open_store(root)
  for name in ('gen-1/x', 'gen-10/x', 'gen-1', 'gen-1.part'):
    if name != 'gen-1' or '://' in root:
      store.write(name, name.encode())
  store.remove('gen-1')
  assert sizes(store) == {'gen-10/x': 8, 'gen-1.part': 10}
  assert store.children() == ['gen-1.part', 'gen-10']


def test_the_root_is_not_removed(root):
  store = open_store(root)
  store.write('x', b'1')
  with pytest.raises(CheckpointError) as caught:
    store.remove('')
  assert str(caught.value) == (
    f'{root} is not removed as a whole.\nFix: remove the files in it, by their names.'
  )
  assert store.children() == ['x']


def test_a_file_of_more_bytes_than_expected(root):
  store = open_store(root)
  store.write('x', b'12345')
  assert store.read('x', limit=5)[0] == b'12345'
  with pytest.raises(CheckpointDamagedError) as caught:
    store.read('x', limit=4)
  assert str(caught.value) == (
    f'{root}/x has more than 4 bytes, as no such file of a checkpoint has.\n'
    'Fix: restore another checkpoint; this one was changed after it was written.'
  )


def test_names_of_all_kinds(root):
  store = open_store(root)
  names = [
    'a b',
    'a%20b',
    'ü',
    'a+b',
    'a?b',
    'a#b',
    'a*b',
    'a[b]',
    "a'b",
    'a&b=c',
    'a~',
    'opt.0.mu',
    '.hidden',
  ]
  for name in names:
    store.write(f'folder/{name}', name.encode(), expected=None)
  assert sizes(store, 'folder') == {name: len(name.encode()) for name in names}
  assert store.children('folder') == sorted(names)
  assert [store.read(f'folder/{name}')[0] for name in names] == [name.encode() for name in names]
  assert [store.digest(f'folder/{n}', 'crc32') for n in names] == [
    f'crc32:{zlib.crc32(n.encode()):08x}' for n in names
  ]
  store.remove('folder')
  assert store.files() == {}


def test_a_larger_file(root):
  store = open_store(root)
  data = secrets.token_bytes(1 << 20) * 40  # more than one part of a read
  store.write('x', data)
  assert store.digest('x', 'crc32') == f'crc32:{zlib.crc32(data):08x}'
  assert sizes(store) == {'x': len(data)}
