"""Liveness: whether the process that holds a lease or a pin is still alive.

A process of the same PID namespace is looked up. Any other has to renew what it holds: it is taken for dead
after `LEASE` seconds without a renewal, by the clock of the process that watches. A wrong verdict costs the
process its lease or pin, and never anybody's data.
"""

from __future__ import annotations

import secrets
import time
from typing import NamedTuple

from flax_spmd._src.checkpoint.storage.process_identity import ProcessIdentity, this_process
from flax_spmd._src.checkpoint.storage.store import Store, Tag

LEASE = 15.0  # seconds
BEAT = 3.0  # seconds between two renewals

_held: set[str] = set()  # tokens of the leases and pins of this process
_seen: dict[str, _Sighting] = {}  # objects of other machines' processes


class _Sighting(NamedTuple):
  """The version of an object, and the time at which it was first seen."""

  tag: Tag | None
  when: float


def new_token() -> str:
  """A unique token that this process holds until `drop`."""
  token = secrets.token_hex(8)
  _held.add(token)
  return token


def drop(token: str) -> None:
  """Gives a token up."""
  _held.discard(token)


def has_ended(holder: ProcessIdentity, token: str) -> bool:
  """Whether the holder of a token is known to have ended, or to have given it up."""
  return holder.has_ended or (holder == this_process() and token not in _held)


def is_dead(store: Store, name: str, holder: ProcessIdentity, token: str, tag: Tag | None) -> bool:
  """Whether the process that renews an object is dead. It does not wait.

  A process of another machine is watched from one call to the next, so the first call never finds it dead.

  Args:
    store: store of the object.
    name: its name.
    holder: the process.
    token: its token.
    tag: current version of the object.
  """
  if holder.is_local:
    return has_ended(holder, token)
  key = f'{store.root}/{name}'
  seen = _seen.get(key)
  if seen is None or seen.tag != tag:
    _seen[key] = _Sighting(tag, time.monotonic())
    return False
  return time.monotonic() - seen.when > LEASE


def stays_silent(store: Store, name: str, tag: Tag | None) -> bool:
  """Watches an object for `LEASE` seconds; returns False as soon as it changes."""
  end = time.monotonic() + LEASE
  while time.monotonic() < end:
    time.sleep(BEAT / 3)
    stored = store.read(name)
    if (None if stored is None else stored[1]) != tag:
      return False
  return True
