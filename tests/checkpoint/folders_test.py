"""Where checkpoints lie: leftovers belong to one path, and a replacement that was cut off is ended."""

import pytest

from flax_spmd._src.checkpoint.storage.folders import Claim, as_path, existing
from flax_spmd.errors import CheckpointBusyError, CheckpointExistsError


def write(folder, content):
  folder.mkdir(parents=True)
  (folder / 'content').write_text(content)


def test_a_name_that_begins_like_another_is_another(tmp_path):
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


def test_leftovers_go_with_the_next_claim(tmp_path):
  left = Claim(as_path(tmp_path / 'a'), overwrite=False)
  write(left.new, 'half')
  left._lock.release()  # as when its process is killed
  claim = Claim(as_path(tmp_path / 'a'), overwrite=False)
  assert not left.new.exists()
  claim.release()


@pytest.mark.parametrize('moves', [0, 1])
def test_a_replacement_that_was_cut_off(tmp_path, moves, monkeypatch):
  path = as_path(tmp_path / 'a')
  write(path, 'old')
  claim = Claim(path, overwrite=True)
  write(claim.new, 'new')
  if moves:
    path.rename(claim.new.with_suffix('.old'))
  claim._lock.release()
  monkeypatch.setattr('flax_spmd._src.checkpoint.storage.folders._SWAP_SECONDS', 0.1)
  wanted = 'new' if moves else 'old'  # once the old one is moved away, the new one is whole and verified
  assert (existing(path) / 'content').read_text() == wanted
  again = Claim(path, overwrite=True)
  assert (path / 'content').read_text() == wanted
  again.release()


def test_taken_and_busy(tmp_path):
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
