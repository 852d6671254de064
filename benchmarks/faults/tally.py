"""Tallies: what the trials of a campaign have shown."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import NamedTuple


class Harm(Exception):
  """A trial in which a fault did harm, or was not reported clearly."""


class Outcome(NamedTuple):
  """Result of a campaign in one store: how many faults were survived, and what was seen."""

  campaign: str
  store: str
  ok: int
  total: int
  seen: dict[str, int]
  failures: list[str]


class Tally:
  """Counter of a campaign's observations, with a list of its failures."""

  def __init__(self, campaign: str, store: str):
    self.campaign, self.store = campaign, store
    self._seen: collections.Counter[str] = collections.Counter()
    self._failures: list[str] = []

  def trial(self, fault: str, examine: Callable[[], str]) -> None:
    """Runs a trial, which returns an observation; any exception is a failure."""
    try:
      self._seen[examine()] += 1
    except Exception as error:
      kind = '' if isinstance(error, Harm) else f'{type(error).__name__}: '
      self._seen['HARM'] += 1
      self._failures.append(f'{fault}: {kind}{str(error)[:600]}')

  def outcome(self) -> Outcome:
    total = sum(self._seen.values())
    return Outcome(
      self.campaign,
      self.store,
      total - len(self._failures),
      total,
      dict(self._seen),
      self._failures[:10],
    )
