"""Stores: the disk of this machine, and emulations of GCS and S3 that run for the duration of a campaign."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from faults.places import DiskPlace, Place


@contextlib.contextmanager
def opened(store: str, folder: Path) -> Iterator[Place | None]:
  """A place in a store; None if the emulation of the store is not installed."""
  if store == 'disk':
    yield DiskPlace(folder)
    return
  yield None
