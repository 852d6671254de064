"""Folders of checkpoints: leftovers belong to one path, and an interrupted replacement is completed."""

import pytest

from flax_spmd._src.checkpoint.storage.folders import Claim, as_path, existing
from flax_spmd.errors import CheckpointBusyError, CheckpointExistsError


def write(folder, content):
  folder.mkdir(parents=True)
  (folder / 'content').write_text(content)


def test_leftovers_of_a_longer_name_are_kept(tmp_path):
  longer = Claim(as_path(tmp_path / 'step.1'), overwrite=False)
  write(longer.new, 'of step.1')
  shorter = Claim(as_path(tmp_path / 'step'), overwrite=False)
  write(shorter.new, 'of step')
  shorter.commit()
  shorter.release()
  longer.commit()
  longer.release()
  assert (tmp_path / 'step.1' / 'content').read_text() == 'of step.1'
  assert (tmp_path / 'step' / 'content').read_text() == 'of step'


def test_the_next_claim_removes_leftovers(tmp_path):
  left = Claim(as_path(tmp_path / 'a'), overwrite=False)
  write(left.new, 'half')
  left.lock.release()  # as when its process is killed
  claim = Claim(as_path(tmp_path / 'a'), overwrite=False)
  assert not left.new.exists()
  claim.release()


@pytest.mark.parametrize('moves', [0, 1])
def test_an_interrupted_replacement_is_completed(tmp_path, moves, monkeypatch):
  path = as_path(tmp_path / 'a')
  write(path, 'old')
  claim = Claim(path, overwrite=True)
  write(claim.new, 'new')
  if moves:
    path.rename(claim.new.with_suffix('.old'))
  claim.lock.release()
  monkeypatch.setattr('flax_spmd._src.checkpoint.storage.folders.SWAP_SECONDS', 0.1)
  expected = 'new' if moves else 'old'  # the old one is moved away only after the new one was verified
  assert (existing(path) / 'content').read_text() == expected
  again = Claim(path, overwrite=True)
  assert (path / 'content').read_text() == expected
  again.release()


def test_a_claimed_path_is_busy_and_then_exists(tmp_path):
  path = as_path(tmp_path / 'a')
  claim = Claim(path, overwrite=False)
  with pytest.raises(CheckpointBusyError):
    Claim(path, overwrite=True)
  write(claim.new, 'new')
  claim.commit()
  claim.release()
  with pytest.raises(CheckpointExistsError):
    Claim(path, overwrite=False)
  assert sorted(child.name for child in tmp_path.iterdir()) == ['.a.lock', 'a']
