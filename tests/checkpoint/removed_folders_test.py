"""Removed folders: their names go at once, their space later; nothing keeps it for long."""

import itertools
import os
import resource
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from flax_spmd import Layout, checkpoint
from flax_spmd._src.checkpoint.storage import removed_folders
from flax_spmd._src.checkpoint.storage.removed_folders import remove_folder, settle

LARGE = b'x' * (1 << 20)
CLOSE = os.close


@pytest.fixture
def gate(monkeypatch):
  """Files of the removals are closed only when this event is set."""
  settle()
  event = threading.Event()
  monkeypatch.setattr(removed_folders, '_close', lambda descriptor: (event.wait(60), CLOSE(descriptor)))
  yield event
  event.set()
  settle()


def filled(folder, count=3):
  (folder / 'd').mkdir(parents=True)
  (folder / 'small').write_bytes(b'1')
  for number in range(count):
    (folder / 'd' / str(number)).write_bytes(LARGE)
  return folder


def open_below(folder):
  """The open files of this process that were below a folder."""
  links = []
  for descriptor in os.listdir('/proc/self/fd'):
    try:
      links.append(os.readlink(f'/proc/self/fd/{descriptor}'))
    except FileNotFoundError:
      continue
  return [link for link in links if link.startswith(str(folder))]


def test_names_go_at_once_and_space_later(tmp_path, gate):
  folder = filled(tmp_path / 'old')
  remove_folder(folder)
  assert not folder.exists()
  assert len(open_below(folder)) == 3
  gate.set()
  settle()
  assert not open_below(folder)


def test_many_files_need_few_descriptors(tmp_path, gate, monkeypatch):
  monkeypatch.setattr(removed_folders, '_MOST', 2)
  folder = filled(tmp_path / 'old', count=5)
  remove_folder(folder)
  assert not folder.exists()
  assert len(open_below(folder)) == 2


def test_the_last_descriptors_are_left_to_the_removal(tmp_path):
  folder = filled(tmp_path / 'old', count=40)
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  used = set(map(int, os.listdir('/proc/self/fd')))
  limit = next(n for n in itertools.count() if n - len(used & set(range(n))) == 16)
  resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
  try:
    remove_folder(folder)
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
  assert not folder.exists() and not open_below(folder)


def test_nothing_is_held_after_an_error(tmp_path, monkeypatch):
  def refuse(folder):
    raise OSError('not empty')

  monkeypatch.setattr(shutil, 'rmtree', refuse)
  folder = filled(tmp_path / 'old')
  with pytest.raises(OSError, match='not empty'):
    remove_folder(folder)
  assert not open_below(folder)


def test_without_a_thread_the_space_is_free_at_once(tmp_path, monkeypatch):
  def refuse(thread):
    raise RuntimeError("can't start new thread")

  monkeypatch.setattr(threading.Thread, 'start', refuse)
  folder = filled(tmp_path / 'old')
  remove_folder(folder)
  assert not folder.exists() and not open_below(folder)


def test_targets_of_links_stay(tmp_path):
  folder = filled(tmp_path / 'old')
  outside = filled(tmp_path / 'outside')
  (folder / 'file').symlink_to(outside / 'd' / '0')
  (folder / 'folder').symlink_to(outside)
  remove_folder(folder)
  settle()
  assert not folder.exists() and (outside / 'd' / '0').read_bytes() == LARGE


@pytest.mark.filterwarnings('ignore:.*fork:')
def test_a_forked_process_does_not_keep_the_space(tmp_path, gate):
  folder = filled(tmp_path / 'old')
  remove_folder(folder)
  threading.Timer(0.1, gate.set).start()
  child = os.fork()
  if not child:
    os._exit(len(open_below(folder)))
  assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
  filled(folder)
  remove_folder(folder)  # in the parent, removals go on
  assert not folder.exists()


def test_the_next_save_waits_for_the_space(tmp_path, gate):
  layout = Layout({'data': 8})
  state = layout.shard({'w': np.random.default_rng(0).standard_normal(1 << 20)})
  path = tmp_path / 'state'
  checkpoint.save(path, state, layout)
  checkpoint.save(path, state, layout, overwrite=True)
  assert len([name for name in os.listdir(path) if name.startswith('gen-')]) == 1
  assert open_below(path)
  ended = threading.Event()
  saves = threading.Thread(
    target=lambda: (checkpoint.save(tmp_path / 'other', state, layout), ended.set())
  )
  saves.start()
  assert not ended.wait(0.5)
  assert not Path(tmp_path / 'other').exists() or not list(Path(tmp_path, 'other').glob('gen-*'))
  gate.set()
  saves.join()
  assert ended.is_set() and not open_below(path)
