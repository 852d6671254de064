"""Pins: the generations that readers are reading, so that no save removes them.

A pin is a small file `pin-<token>-<generation>` beside the head, renewed while the reader lives. On a
read-only store there are no pins; see `source.read_whole`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading

from flax_spmd._src.checkpoint.storage.head import is_generation
from flax_spmd._src.checkpoint.storage.liveness import BEAT, drop, is_dead, new_token
from flax_spmd._src.checkpoint.storage.process_identity import (
  ProcessIdentity,
  parsed_identity,
  this_process,
)
from flax_spmd._src.checkpoint.storage.store import Store
from flax_spmd._src.periodic_calls import start_periodic_calls
from flax_spmd.errors import CheckpointError

PIN = 'pin-'
_UNKNOWN = ProcessIdentity(
  '', '', 0, ''
)  # of a pin that a newer version may have written: it is watched


class Pin:
  """A pin of a generation, until it is closed.

  Args:
    store: store of the folder that holds the checkpoint.
    name: name of the checkpoint.
    generation: name of the generation.

  Attributes:
    is_written: whether the store could be written to.
  """

  def __init__(self, store: Store, name: str, generation: str):
    self._store, self._token = store, new_token()
    self._name = f'{name}/{PIN}{self._token}-{generation}'
    self._stopped, self._writing = threading.Event(), threading.Lock()
    self._beats = itertools.count(1)
    self.is_written = False
    with contextlib.suppress(OSError, CheckpointError):  # read-only
      self._tag = store.write(self._name, self._content(0), expected=None, durable=False)
      self.is_written = self._tag is not None
    if self.is_written:
      try:
        start_periodic_calls(self._renew, BEAT, 'flax_spmd pin', self._stopped)
      except BaseException:
        self.close()
        raise

  def _content(self, beat: int) -> bytes:
    return json.dumps({'holder': this_process(), 'beat': beat}).encode()

  def _renew(self) -> bool:
    content = self._content(next(self._beats))
    with self._writing, contextlib.suppress(OSError, CheckpointError):
      if not self._stopped.is_set():
        self._tag = self._store.write(self._name, content, expected=self._tag, durable=False)
    return self._tag is not None  # else a save took this reader for dead; `read_whole` notices

  def close(self) -> None:
    """Removes the pin."""
    self._stopped.set()
    with self._writing, contextlib.suppress(OSError, CheckpointError):
      if self.is_written:
        self._store.remove(self._name, is_file=True)
    drop(self._token)


def pinned_generations(store: Store, name: str) -> set[str]:
  """The generations of a checkpoint that living readers have pinned. Pins of dead readers are removed."""
  pinned = set()
  for child in filter(is_pin, store.children(name)):
    token, _, generation = child.removeprefix(PIN).partition('-')
    if _is_dead(store, f'{name}/{child}', token):
      store.remove(f'{name}/{child}', is_file=True)
    else:
      pinned.add(generation)
  return pinned


def is_pin(name: str) -> bool:
  """Whether a name is that of a pin."""
  token, _, generation = name.removeprefix(PIN).partition('-')
  return name.startswith(PIN) and token.isalnum() and is_generation(generation)


def _is_dead(store: Store, name: str, token: str) -> bool:
  stored = store.read(name)
  if stored is None or not stored[0].strip(b'\0'):  # of a power cut
    return True
  try:
    holder = parsed_identity(json.loads(stored[0])['holder'])
  except (ValueError, KeyError, TypeError, RecursionError):
    holder = _UNKNOWN
  return is_dead(store, name, holder, token, stored[1])
