"""Processes: those of a multi-controller job, and whether they agree.

A job of several processes runs one program on the devices of all of them, so all have to mean the same.
What differs between them is found by asking the coordination service of `jax.distributed`, not by a
program on the devices: nothing waits for the steps that are queued there, it may be done from a thread
that loads data, and it ends with an error where a process does not come.

Like everything that involves all processes, these functions are called by all of them, equally often
and in the same order.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import itertools
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from flax_spmd._src.compat import coordination_service
from flax_spmd.errors import LayoutError, Problem, raise_problems

TIMEOUT = 300.0  # seconds: one process may still compile, or fill its shuffle buffer
CALLS = 'call it on every process, equally often and in the same order'

_SHOWN_DIFFERENCES = 5
_ANSWER = 1000  # milliseconds: on a busy machine, what is there already takes a while to be told


def check_same_on_every_process(what: str, value_text: str, *, timeout: float = TIMEOUT) -> None:
  """Raises on every process unless all of them pass the same text; does nothing in one process.

  Args:
    what: what the text describes, for the message.
    value_text: the text; lines make for a readable message.
    timeout: seconds to wait for the other processes.

  Raises:
    LayoutError: the texts differ (the first lines that do, and whose they are), or a process does
      not come.

  Example:
    >>> check_same_on_every_process('the layout', Layout({'data': 8}).to_toml())
  """
  if jax.process_count() > 1:
    everyone = tuple(range(jax.process_count()))
    fix = f'{CALLS}, and see which of them is stuck or has ended.'
    said = exchange('same', everyone, f'{what}\n{value_text}', fix, timeout)
    raise_problems([problem for other in said[1:] for problem in _lines(said[0], other)])


def exchange(
  topic: str, members: tuple[int, ...], text: str, fix: str, timeout: float
) -> list[tuple[list[int], str]]:
  """Says a text and hears the others': who says the same, and what. One entry: all agree.

  The first member hears everyone's digest and tells who agrees with whom; the texts themselves are
  sent only where they differ. So each process asks once or twice, however many there are, and all of
  them raise if one does not come.

  Raises:
    LayoutError: a member did not come in time.
  """
  asked = _Asked(_service(), f'flax_spmd/{topic}/{_digest(repr(members))}', members, fix, timeout)
  number = next(_numbers(topic, members))
  asked.set(f'{number}/{jax.process_index()}', _digest(text))
  if jax.process_index() == members[0]:
    found = asked.groups(number)
    asked.set(f'{number}/groups', json.dumps(found))
    if number and '' not in found:  # who came here is through with the last exchange
      asked.forget(f'{number - 1}')
  groups = asked.heard_groups(number)
  if len(groups) == 1:
    return [(groups[0], text)]
  for processes in groups:
    if jax.process_index() == processes[0]:
      asked.set(f'{number}/text/{processes[0]}', text)
  return [(processes, asked.text(number, processes[0])) for processes in groups]


def tell(topic: str, text: str) -> None:
  """Says a text once, to whoever asks for the topic."""
  _service().key_value_set(f'flax_spmd/told/{topic}', text)


def told(topic: str, process: int, *, timeout: float = TIMEOUT) -> str:
  """The text that a process tells; waits until it is there.

  Raises:
    LayoutError: it did not come in time.
  """
  asked = _Asked(_service(), 'flax_spmd/told', (process,), CALLS, timeout)
  text = asked.get(topic, timeout)
  asked.check_came([process] if text is None else [])
  return text or ''


@functools.cache
def _numbers(topic: str, members: tuple[int, ...]) -> Iterator[int]:
  """Numbers the exchanges, so that the processes' first meets the others' first, and so on."""
  return itertools.count()


class _Asked(NamedTuple):
  """Keys of the coordination service that one kind of exchange uses."""

  service: Any
  folder: str
  members: tuple[int, ...]
  fix: str
  timeout: float

  def set(self, key: str, value: str) -> None:
    self.service.key_value_set(f'{self.folder}/{key}', value)

  def forget(self, key: str) -> None:
    self.service.key_value_delete(f'{self.folder}/{key}')

  def get(self, key: str, seconds: float) -> str | None:
    """The value, or None if it does not come in time."""
    try:
      return self.service.blocking_key_value_get(
        f'{self.folder}/{key}', max(_ANSWER, round(1000 * seconds))
      )
    except jax.errors.JaxRuntimeError as error:
      if 'DEADLINE_EXCEEDED' in str(error):
        return None
      raise

  def groups(self, number: int) -> dict[str, list[int]]:
    """The processes by what they say; under '' those that say nothing."""
    deadline = time.monotonic() + self.timeout
    by_digest: dict[str, list[int]] = {}
    for process in self.members:
      digest = self.get(f'{number}/{process}', deadline - time.monotonic())
      by_digest.setdefault(digest or '', []).append(process)
    return by_digest

  def heard_groups(self, number: int) -> list[list[int]]:
    """The groups, as the first member found them."""
    first = self.members[0]
    found = self.get(f'{number}/groups', self.timeout)
    if found is None and self.get(f'{number}/{first}', 0):  # it came later and waits for another one
      found = self.get(f'{number}/groups', self.timeout)
    groups = {'': [first]} if found is None else json.loads(found)
    self.check_came(groups.pop('', []))
    return list(groups.values())

  def text(self, number: int, process: int) -> str:
    text = self.get(f'{number}/text/{process}', self.timeout)
    self.check_came([process] if text is None else [])
    return text or ''

  def check_came(self, late: list[int]) -> None:
    if late:
      raise LayoutError(
        f'{named(late).capitalize()} did not come within {self.timeout:g} s, while process '
        f'{jax.process_index()} waited to compare with {"it" if len(late) == 1 else "them"}.\n'
        f'Fix: {self.fix}'
      )


def _service() -> Any:
  service = coordination_service()
  if service is None:
    raise LayoutError(
      f'The {jax.process_count()} processes of this job cannot ask each other: the coordination '
      'service of JAX is not running.\n'
      'Fix: call jax.distributed.initialize() before JAX is first used.'
    )
  return service


def _digest(text: str) -> str:
  return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _lines(one: tuple[list[int], str], other: tuple[list[int], str]) -> list[Problem]:
  """The first lines in which two texts differ; line 0 is what they are about."""
  what = one[1].partition('\n')[0]
  fix = 'make it from the same code, arguments and files, and as many devices, on every process.'
  problems = [
    problem
    for number, *lines in _changes(one[1].splitlines(), other[1].splitlines())
    for problem in differ(
      f'{what}, line {number}',
      {p: line for (processes, _), line in zip((one, other), lines, strict=True) for p in processes},
      fix,
    )
  ]
  more = len(problems) - _SHOWN_DIFFERENCES
  if more <= 0:
    return problems
  rest = f'{what}: {more} more lines differ between {named(one[0])} and {named(other[0])}.'
  return [*problems[:_SHOWN_DIFFERENCES], Problem(rest, fix)]


def _changes(one: list[str], other: list[str]) -> Iterator[tuple[int, str, str]]:
  """The lines that differ: number in the first text, and what either has there."""
  matcher = difflib.SequenceMatcher(None, one, other, autojunk=False)
  for kind, *(begin, end, other_begin, other_end) in matcher.get_opcodes():
    if kind != 'equal':
      there, here = map(repr, one[begin:end]), map(repr, other[other_begin:other_end])
      pairs = itertools.zip_longest(there, here, fillvalue='no line')
      yield from ((number, *pair) for number, pair in enumerate(pairs, start=begin))


def differ(where: str, values: Mapping[int, str], fix: str) -> list[Problem]:
  """`x: float32 in process 0, int32 in process 1.`, unless all values are the same."""
  by_value: dict[str, list[int]] = {}
  for process, value in sorted(values.items()):
    by_value.setdefault(value, []).append(process)
  if len(by_value) == 1:
    return []
  each = ', '.join(f'{value} in {named(processes)}' for value, processes in by_value.items())
  return [Problem(f'{where}: {each}.', fix)]


def processes_of(shardings: Iterable[Any]) -> tuple[int, ...]:
  """The processes whose devices some shardings use, in order."""
  return tuple(sorted({device.process_index for one in shardings for device in one.device_set}))


def named(processes: Iterable[int]) -> str:
  """`process 3`, `processes 0-3 and 7`."""
  *first, last = ranges(sorted(processes)).split(', ')
  listed = ' and '.join(filter(None, (', '.join(first), last)))
  return f'process {listed}' if listed.isdecimal() else f'processes {listed}'


def ranges(numbers: Iterable[int]) -> str:
  """`0-3, 7` for 0, 1, 2, 3, 7."""
  runs: list[list[int]] = []
  for number in numbers:
    if runs and number == runs[-1][-1] + 1:
      runs[-1].append(number)
    else:
      runs.append([number])
  return ', '.join(str(run[0]) if len(run) == 1 else f'{run[0]}-{run[-1]}' for run in runs)
