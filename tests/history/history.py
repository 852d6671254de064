"""Histories: calls of one process in random order, each compared with the outcome that a fresh process gives.

An event is a number of equal calls in a row, calls in several threads at once, or the loss of what the process has
made: of its layouts and compiled functions, or of everything that JAX has cached.
"""

import itertools
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from tests.history.calls import (
  ARRAYS,
  LAYOUTS,
  LOOKS,
  OPTIONS,
  PLACEMENTS,
  PLANNED,
  STATES,
  Call,
  Outcome,
  World,
  prepare,
)
from tests.history.models import MODELS, MODES, STEPS

_REPEATS = (1, 1, 1, 2, 3, 12)  # after the last, JAX's own dispatch has taken over


class Difference(NamedTuple):
  """A call whose outcome depends on the calls before it."""

  call: Call
  found: Outcome
  fresh: Outcome


class Event(NamedTuple):
  """An event of a history.

  Attributes:
    kind: 'calls', 'threads', 'forget' or 'clear'.
    calls: the calls, in order; or at once, one per thread.
  """

  kind: str
  calls: tuple[Call, ...] = ()


# -- alphabets: groups of calls that have something in common, such as a compiled function


def alphabet(seed: int, functions: int, others: int) -> list[list[Call]]:
  """Groups of calls: those of some compiled functions, and others."""
  chance = random.Random(seed)
  groups = [_calls_of_function(chance) for _ in range(functions)]
  return [*groups, *([_other(chance) for _ in range(4)] for _ in range(others))]


def _calls_of_function(chance: random.Random) -> list[Call]:
  """Calls of one compiled function with different arguments."""
  layout, option = _one(chance, LAYOUTS), _one(chance, [*OPTIONS, '', ''])
  if chance.random() < 0.3:
    step = chance.choice(['pair', 'pair_by_key', 'product'])
    return [('arrays', layout, step, option, *chance.choices(ARRAYS, k=2)) for _ in range(6)]
  step, models = _one(chance, STEPS), chance.sample([*MODELS], 2)
  kinds = ['step'] * 8 + ['keyword', 'inside', 'abstract step', 'program']
  return [
    (
      chance.choice(kinds),
      layout,
      step,
      option,
      chance.choice(models),
      _one(chance, STATES),
      _one(chance, ARRAYS),
    )
    for _ in range(6)
  ]


def _other(chance: random.Random) -> Call:
  layout, model = _one(chance, LAYOUTS), _one(chance, MODELS)
  kind = chance.choices(
    ['init', 'plan', 'tree', 'shard', 'block', 'mode', 'save'], [2, 4, 4, 2, 1, 2, 2]
  )[0]
  boxed = chance.choice(['boxed', 'plain'])
  return {
    'init': (kind, layout, model, boxed),
    'plan': (kind, layout, model, boxed, _one(chance, PLANNED)),
    'tree': (kind, layout, _one(chance, LOOKS), model, _one(chance, STATES)),
    'shard': (kind, layout, _one(chance, ARRAYS), _one(chance, PLACEMENTS)),
    'block': (kind, layout, _one(chance, LAYOUTS), _one(chance, ARRAYS)),
    'mode': (kind, layout, _one(chance, ARRAYS), _one(chance, MODES)),
    'save': (kind, layout, model, _one(chance, STATES), chance.choice(['none', 'abstract', 'plan'])),
  }[kind]


def _one(chance, choices):
  return chance.choice([*choices])


# -- histories


def history(seed: int, groups: Sequence[Sequence[Call]], length: int = 12) -> list[Event]:
  """A random history of the calls of a few groups."""
  chance = random.Random(seed)
  some = chance.sample(groups, min(4, len(groups)))
  return [_event(chance, some) for _ in range(length)]


def surprises(group: Sequence[Call]) -> list[Event]:
  """A history in which one call of a function repeats, and then another one comes in four threads at once."""
  return [
    event
    for usual, new in itertools.permutations(dict.fromkeys(group), 2)
    for event in (Event('forget'), Event('calls', (usual,) * 12), Event('threads', (new,) * 4))
  ]


def _event(chance: random.Random, groups: Sequence[Sequence[Call]]) -> Event:
  what, group = chance.random(), chance.choice(groups)
  if what < 0.02:
    return Event('forget')
  if what < 0.024:
    return Event('clear')
  if what < 0.12:
    usable = [call for call in group if call[0] not in ('save', 'block', 'init')]
    return Event('threads', tuple(chance.choices(usable or group, k=chance.choice([2, 4]))))
  call = chance.choice(group)
  repeats = chance.choice(_REPEATS) if call[0] in ('step', 'keyword', 'arrays', 'mode') else 1
  return Event('calls', (call,) * repeats)


class Process:
  """One process that lives through histories, one after another."""

  def __init__(self, fresh: Mapping[Call, Outcome]):
    self._fresh = fresh
    self._world = World()
    self.calls = 0

  def differences(self, events: Sequence[Event]) -> Iterator[Difference]:
    """The calls of a history that give something else than in a fresh process."""
    return itertools.chain.from_iterable(map(self._happen, events))

  def _happen(self, event: Event) -> list[Difference]:
    if event.kind == 'forget':
      self._world = World()
    elif event.kind == 'clear':
      jax.clear_caches()
    self.calls += len(event.calls)
    found = self._at_once(event.calls) if event.kind == 'threads' else self._in_turn(event.calls)
    return [
      Difference(call, outcome, self._fresh[call])
      for call, outcome in found
      if outcome != self._fresh[call]
    ]

  def _in_turn(self, calls: Sequence[Call]) -> Iterator[tuple[Call, Outcome]]:
    run = None
    for call in calls:
      if run is None or 'donate' in call:
        run = prepare(call, self._world)
      yield call, run()

  def _at_once(self, calls: Sequence[Call]) -> list[tuple[Call, Outcome]]:
    ready = [(call, prepare(call, self._world)) for call in calls]
    start, found = threading.Barrier(len(calls)), []

    def work(call, run):
      start.wait()
      found.append((call, run()))

    threads = [threading.Thread(target=work, args=each) for each in ready]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    return found
