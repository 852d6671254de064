"""Early digests: of the last content of a file, or none, whatever is written meanwhile; and no thread is left behind."""

import os
import random
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd._src.checkpoint.storage import early_digests
from flax_spmd._src.checkpoint.storage.checksum import file_checksum
from flax_spmd._src.checkpoint.storage.early_digests import EarlyDigests

LAYOUT = spmd.Layout({'data': 8})


@pytest.fixture
def small_files(monkeypatch):
  monkeypatch.setattr(early_digests, '_LARGE', 1)


def waited_for(digests, file):
  """The digest of a file, as soon as there is one; None after three seconds."""
  end = time.monotonic() + 3
  while digests.of(file) is None and time.monotonic() < end:
    time.sleep(0.005)
  return digests.of(file)


def write(file, data, mode='ab'):
  with open(file, mode) as opened:
    opened.write(data)


def test_a_file_that_has_come_to_rest(tmp_path, small_files):
  digests = EarlyDigests(tmp_path, 'gen*/d/*')
  (tmp_path / 'gen-1.tmp' / 'd').mkdir(parents=True)
  write(tmp_path / 'gen-1.tmp' / 'd' / 'x', b'12345')
  write(tmp_path / 'gen-1.tmp' / 'other', b'12345')
  digest = waited_for(digests, tmp_path / 'gen-1.tmp' / 'd' / 'x')
  assert digest == file_checksum(tmp_path / 'gen-1.tmp' / 'd' / 'x')
  (tmp_path / 'gen-1.tmp').rename(tmp_path / 'gen-1')
  digests.close()
  assert digests.of(tmp_path / 'gen-1' / 'd' / 'x') == digest
  assert digests.of(tmp_path / 'gen-1' / 'other') is digests.of(tmp_path / 'none') is None


def test_a_file_that_changes_after_its_digest(tmp_path, small_files):
  file = tmp_path / 'x'
  write(file, b'12345')
  digests = EarlyDigests(tmp_path, '*')
  for mode, data in (('ab', b'6'), ('r+b', b'0'), ('wb', b'12345'), ('r+b', b'1')):
    assert waited_for(digests, file) == file_checksum(file)
    write(file, data, mode)
    assert digests.of(file) is None
  digests.close()


@pytest.mark.parametrize('seed', range(5))
def test_files_that_are_written_at_random(tmp_path, monkeypatch, small_files, seed):
  """Pauses are about as long as the wait for a file to come to rest."""
  monkeypatch.setattr(early_digests, 'file_checksum', slow := SlowChecksum())
  rng = random.Random(seed)
  digests = EarlyDigests(tmp_path, '*')
  end = time.monotonic() + 1
  found = 0
  while time.monotonic() < end:
    for name in rng.choices('abc', k=3):
      file = tmp_path / name
      mode = rng.choice(['ab', 'r+b']) if file.exists() else 'ab'
      write(file, rng.randbytes(rng.randint(1, 9)), mode)
    time.sleep(rng.choice([0, 0.01, 0.03, 0.1]))
    for file in tmp_path.iterdir():
      digest = digests.of(file)
      found += digest is not None
      assert digest in (None, file_checksum(file))
  digests.close()
  assert found and slow.calls


class SlowChecksum:
  """The checksum of a file, which takes as long as that of a large one."""

  calls = 0

  def __call__(self, file):
    self.calls += 1
    with open(file, 'rb', buffering=0) as opened:
      content = opened.read(1)
      time.sleep(0.01)
      content += opened.read()
    copy = file.parent.parent / f'{file.parent.name}-copy'
    copy.write_bytes(content)
    return file_checksum(copy)


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch, small_files):
  def broken(file):
    raise OSError(5, 'Input/output error')

  calls = []
  monkeypatch.setattr(early_digests, 'file_checksum', lambda file: calls.append(file) or broken(file))
  write(tmp_path / 'x', b'1')
  digests = EarlyDigests(tmp_path, '*')
  time.sleep(0.3)
  assert digests.of(tmp_path / 'x') is None
  digests.close()
  assert len(calls) == 1


def test_a_file_that_grows_slowly_is_seldom_read(tmp_path, monkeypatch, small_files):
  """The time between two writes is longer than the first wait."""
  calls = []
  monkeypatch.setattr(early_digests, '_QUIET', 0.01)
  monkeypatch.setattr(
    early_digests, 'file_checksum', lambda file: calls.append(file) or file_checksum(file)
  )
  digests = EarlyDigests(tmp_path, '*')
  for _ in range(60):
    write(tmp_path / 'x', b'1')
    time.sleep(0.03)
  assert len(calls) <= 10
  assert waited_for(digests, tmp_path / 'x') in (None, file_checksum(tmp_path / 'x'))
  digests.close()


def threads():
  return [thread.name for thread in threading.enumerate() if thread.name == 'flax_spmd digests']


def test_no_thread_stays(tmp_path, monkeypatch):
  checkpoint.save(tmp_path / 'a', {'w': jnp.ones(8)}, LAYOUT)
  assert not threads()

  def refuse(*_):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(os, 'fsync', refuse)
  with pytest.raises(errors.CheckpointError):
    checkpoint.save(tmp_path / 'b', {'w': jnp.ones(8)}, LAYOUT)
  assert not threads()


def test_a_save_takes_them_and_its_files_are_whole(tmp_path, monkeypatch):
  taken = []
  of = EarlyDigests.of
  monkeypatch.setattr(EarlyDigests, 'of', lambda self, file: taken.append(of(self, file)) or taken[-1])
  monkeypatch.setattr(early_digests, '_LARGE', 1)
  monkeypatch.setattr(early_digests, '_QUIET', 0.001)
  state = {str(i): np.random.default_rng(i).standard_normal(1 << 22, np.float32) for i in range(8)}
  checkpoint.save(tmp_path / 'a', state, LAYOUT)
  assert any(taken)
  assert checkpoint.verify(tmp_path / 'a') == []
