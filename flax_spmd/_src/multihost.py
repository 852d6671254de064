"""Multihost: comparison of values across the processes of a multi-controller JAX job.

All processes run one program together, so they need equal layouts, batches and states. They compare them
through the coordination service of `jax.distributed` instead of through a program on the devices. That
does not wait for queued steps, is safe in a data-loading thread, and ends with an error if a process does
not arrive.

All processes have to call these functions equally often and in the same order.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import itertools
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import Mesh

from flax_spmd._src.compat import coordination_service
from flax_spmd._src.joint_call import JointCall, answer_others, current_call
from flax_spmd._src.whereabouts import stored
from flax_spmd.errors import CheckpointError, FlaxSpmdError, LayoutError, Problem, raise_problems

TIMEOUT = 300.0  # seconds; one process may still compile, or fill its shuffle buffer
CALLS = 'call it on every process, equally often and in the same order'

_SHOWN_DIFFERENCES = 5
_MINIMUM_WAIT = 1.0  # seconds; on a busy machine even a value that exists takes a while to arrive
_LOOK = 1.0  # seconds between two looks at whether another process has failed
_SOON = 0.2  # seconds in which processes that are in step arrive
_KEPT = 16  # exchanges whose keys are removed together
_counters: dict[tuple[str, tuple[int, ...]], Iterator[int]] = {}  # by topic and members


def everyone() -> tuple[int, ...]:
  """All processes of the job."""
  return tuple(range(jax.process_count()))


def processes_that_compare(mesh: Any) -> tuple[int, ...]:
  """The processes with devices of a mesh, if this is one of several; otherwise none: it has nothing to compare.

  All processes have devices of an abstract mesh.
  """
  if not isinstance(mesh, Mesh):
    members = everyone()
  else:
    owners = {device.process_index for device in mesh.devices.flat}
    members = tuple(process for process in everyone() if process in owners)
  return members if len(members) > 1 and jax.process_index() in members else ()


def check_same_on_every_process(
  subject: str,
  value_text: str,
  *,
  members: tuple[int, ...] | None = None,
  timeout: float = TIMEOUT,
) -> None:
  """Raises on every process unless all of them pass the same text. Does nothing in a single process.

  Args:
    subject: the object that the text describes, for the message.
    value_text: the text to compare; the message shows its lines that differ.
    members: the processes that take part, in order; default: all.
    timeout: seconds to wait for the other processes.

  Raises:
    LayoutError: the texts differ (the message shows the first lines that differ, and on which processes),
      or a process does not arrive in time.

  Example:
    >>> check_same_on_every_process('the layout', Layout({'data': 8}).to_toml())
  """
  members = everyone() if members is None else members
  if len(members) > 1:
    fix = f'{CALLS}, and check which of them is stuck or has exited.'
    texts = exchange('same', f'{subject}\n{value_text}', members, fix=fix, timeout=timeout)
    raise_problems(text_problems(texts))


def text_problems(texts: Sequence[tuple[list[int], str]]) -> list[Problem]:
  """The first lines that differ between texts of several processes; their first line is their subject."""
  return [problem for other in texts[1:] for problem in _lines(texts[0], other)]


def exchange(
  topic: str,
  text: str,
  members: tuple[int, ...] | None = None,
  *,
  fix: str = CALLS,
  timeout: float = TIMEOUT,
) -> list[tuple[list[int], str]]:
  """Exchanges a text between processes. A process that is alone gets its own text.

  Args:
    topic: key of this kind of exchange.
    text: this process's text.
    members: the processes that take part, in order; default: all.
    fix: remedy for the error message if a process does not arrive.
    timeout: seconds to wait for the other processes.

  Returns:
    The distinct texts, each with the processes that passed it. One entry if all agree.

  Raises:
    LayoutError: a member does not arrive in time.
  """
  members = everyone() if members is None else members
  differing = differing_parts(topic, {'all': text}, members, fix=fix, timeout=timeout)
  return differing.get('all', [(list(members), text)])


def differing_parts(
  topic: str,
  parts: Mapping[str, str],
  members: tuple[int, ...] | None = None,
  *,
  fix: str = CALLS,
  timeout: float = TIMEOUT,
  grouped: tuple[str, ...] = (),
) -> dict[str, list[tuple[list[int], str]]]:
  """Exchanges several texts at once, each of them between the processes that pass it.

  The first member collects the digests of all members and publishes which of them differ. Texts are sent
  only if they differ. So each other process makes two requests, however many processes there are, and all of
  them raise if one does not arrive.

  Args:
    topic, members, fix, timeout: as in `exchange`.
    parts: this process's texts, by a name that the processes have agreed on.
    grouped: beginnings of the names of parts that are not sent: the result always has them, with '' as the texts.

  Returns:
    The parts whose texts differ, equal on all members, those that pass no such part included: the distinct
    texts, each with the processes that passed it. Empty if all agree.

  Raises:
    LayoutError: a member does not arrive in time.
    FlaxSpmdError: this is part of a joint call, and a process has failed in it.
  """
  members = everyone() if members is None else members
  if members == (jax.process_index(),):
    return {name: [([*members], '')] for name in parts if name.startswith(grouped)}
  answer_others()
  call = current_call()
  folder = f'{call.folder if call else "flax_spmd"}/{topic}/{_digest(repr(members))}'
  keys = _ExchangeKeys(_service(), folder, members, fix, timeout, call)
  count = next(call.counts((topic, members)) if call else _numbers(topic, members))
  number = f'{count // _KEPT}/{count}'
  digests = {name: _digest(text) for name, text in parts.items()}
  if jax.process_index() == members[0]:
    late, groups = keys.collect_groups(number, digests, grouped)
    keys.set(f'{number}/groups', json.dumps([late, groups]))
    keys.check_arrived(late)
    if count and count % _KEPT == 0:  # all members have finished the previous exchange
      keys.delete(f'{count // _KEPT - 1}')
  else:
    keys.set(f'{number}/{jax.process_index()}', json.dumps(digests))
    groups = keys.received_groups(number)
  names = [name for name in groups if name.startswith(grouped)]
  unsent = {name: [(processes, '') for processes in groups.pop(name)] for name in names}
  keys.send_texts(number, groups, parts)
  return unsent | {
    name: [(processes, keys.received_text(number, name, processes[0])) for processes in each]
    for name, each in groups.items()
  }


@contextlib.contextmanager
def joint(
  kind: str,
  subject: str,
  members: tuple[int, ...] | None = None,
  other_error: type[FlaxSpmdError] = CheckpointError,
) -> Iterator[None]:
  """A block that every process runs, and that all of them leave with an error if one of them does.

  Args:
    kind: name of the block.
    subject: the call, for the errors of the other processes, such as `'The restore of /run/1'`.
    members: the processes that run it, in order; default: all.
    other_error: class of the error for other errors of other processes than those of this package.

  Raises:
    FlaxSpmdError: a process has raised it in the block; or `other_error`, for other errors of other processes.
    LayoutError: a process does not arrive in time.
  """
  members = everyone() if members is None else members
  if members == (jax.process_index(),):
    yield
    return
  call = JointCall(f'{kind} of {ranges(members)}', subject, None, members, other_error)
  with call.entered():
    try:
      yield
      exchange('end', '', members)
    except BaseException as error:
      call.fail(error)
      raise
  call.forget_earlier()


def _numbers(topic: str, members: tuple[int, ...]) -> Iterator[int]:
  """Numbers of the exchanges of a topic, equal on all members as long as they call in the same order."""
  return _counters.setdefault((topic, members), itertools.count())  # in one step, unlike functools.cache


_Groups: TypeAlias = dict[str, list[list[int]]]  # by part: the processes with equal texts, for each text


class _ExchangeKeys(NamedTuple):
  """The keys of one kind of exchange in the coordination service."""

  service: Any
  folder: str
  members: tuple[int, ...]
  fix: str
  timeout: float
  call: JointCall | None = None

  def set(self, key: str, value: str) -> None:
    with _reachable():
      self.service.key_value_set(f'{self.folder}/{key}', value)

  def delete(self, key: str) -> None:
    with _reachable():
      self.service.key_value_delete(f'{self.folder}/{key}')

  def get(self, key: str, seconds: float, *, at_least: float = _MINIMUM_WAIT) -> str | None:
    """The value, or None if it does not arrive in time.

    Raises:
      FlaxSpmdError: another process has failed in the same joint call.
    """
    deadline = time.monotonic() + max(at_least, seconds)
    while True:
      left = deadline - time.monotonic()
      if self.call is None or left <= _LOOK:
        return self._arrived(key, left)
      value = self._arrived(key, _LOOK)
      error = self.call.error() if value is None else None
      if error is not None:
        value = stored(f'{self.folder}/{key}')  # what a process sends before it fails is received
        if value is None:
          raise error
      if value is not None:
        return value

  def _arrived(self, key: str, seconds: float) -> str | None:
    milliseconds = max(1, round(1000 * seconds))
    try:
      with _reachable():
        return self.service.blocking_key_value_get(f'{self.folder}/{key}', milliseconds)
    except TimeoutError:
      return None

  def collect_groups(
    self, number: str, mine: dict[str, str], grouped: tuple[str, ...]
  ) -> tuple[list[int], _Groups]:
    """The processes that did not arrive, and the parts that differ between the others.

    Args:
      mine: the digests of this process, the first.
      grouped: beginnings of the names of parts that are in the result even if they are equal.
    """
    collected = {self.members[0]: mine, **self._collected(number)}
    by_digest: dict[str, dict[str, list[int]]] = {}
    for process, digests in collected.items():
      for name, digest in digests.items():
        by_digest.setdefault(name, {}).setdefault(digest, []).append(process)
    late = [process for process in self.members if process not in collected]
    wanted = {
      name: each for name, each in by_digest.items() if len(each) > 1 or name.startswith(grouped)
    }
    return late, {name: list(each.values()) for name, each in wanted.items()}

  def _collected(self, number: str) -> dict[int, dict[str, str]]:
    """The digests of the other members that arrive in time."""
    deadline = time.monotonic() + self.timeout
    announced, texts = False, {}
    for process in self.members[1:]:
      text = self.get(f'{number}/{process}', _SOON, at_least=0)
      if text is None:
        if not announced:
          self.set(f'{number}/{self.members[0]}', 'waits')
        announced = True
        text = self.get(f'{number}/{process}', deadline - time.monotonic())
      texts[process] = text
    return {process: json.loads(text) for process, text in texts.items() if text is not None}

  def received_groups(self, number: str) -> _Groups:
    """The parts that differ, as published by the first member."""
    first = self.members[0]
    published = self.get(f'{number}/groups', self.timeout)
    if published is None and self.get(f'{number}/{first}', 0):  # it arrived late, and waits for others
      published = self.get(f'{number}/groups', self.timeout)
    late, groups = ([first], {}) if published is None else json.loads(published)
    self.check_arrived(late)
    return groups

  def send_texts(self, number: str, groups: _Groups, parts: Mapping[str, str]) -> None:
    """Sends the texts that this process is the first to have."""
    me = jax.process_index()
    for name, each in groups.items():
      if any(processes[0] == me for processes in each):
        self.set(f'{number}/text/{name}/{me}', parts[name])

  def received_text(self, number: str, name: str, process: int) -> str:
    text = self.get(f'{number}/text/{name}/{process}', self.timeout)
    self.check_arrived([process] if text is None else [])
    return text or ''

  def check_arrived(self, late: list[int]) -> None:
    if late:
      lines = self.call.lines_of(late) if self.call else {}
      where = ''.join(f' Process {process} is in {line}.' for process, line in lines.items())
      raise LayoutError(
        f'{named(late).capitalize()} did not arrive within {self.timeout:g} s; process '
        f'{jax.process_index()} was waiting to compare with {"it" if len(late) == 1 else "them"}.{where}\n'
        f'Fix: {self.fix}'
      )


@contextlib.contextmanager
def _reachable() -> Iterator[None]:
  """Raises the errors of the coordination service as LayoutError, and as TimeoutError if nothing has arrived."""
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if 'DEADLINE_EXCEEDED' in str(error):
      raise TimeoutError from error
    raise LayoutError(
      f'The processes of this job cannot communicate: {str(error).splitlines()[0]}.\n'
      'Fix: check whether process 0, which runs the coordination service of JAX, is alive.'
    ) from error


def _service() -> Any:
  service = coordination_service()
  if service is None:
    raise LayoutError(
      f'The {jax.process_count()} processes of this job cannot communicate: the coordination '
      'service of JAX is not running.\n'
      'Fix: call jax.distributed.initialize() before JAX is first used.'
    )
  return service


def _digest(text: str) -> str:
  return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _lines(one: tuple[list[int], str], other: tuple[list[int], str]) -> list[Problem]:
  """The first lines in which two texts differ; line 0 is their subject."""
  subject = one[1].partition('\n')[0]
  fix = 'create it from the same code, arguments, files and number of devices on every process.'
  problems = [
    problem
    for number, *lines in _changes(one[1].splitlines(), other[1].splitlines())
    for problem in differ(
      f'{subject}, line {number}',
      {p: line for (processes, _), line in zip((one, other), lines, strict=True) for p in processes},
      fix,
    )
  ]
  more = len(problems) - _SHOWN_DIFFERENCES
  if more <= 0:
    return problems
  rest = f'{subject}: {more} more lines differ between {named(one[0])} and {named(other[0])}.'
  return [*problems[:_SHOWN_DIFFERENCES], Problem(rest, fix)]


def _changes(one: list[str], other: list[str]) -> Iterator[tuple[int, str, str]]:
  """The lines that differ: the number in the first text, and both versions."""
  matcher = difflib.SequenceMatcher(None, one, other, autojunk=False)
  for kind, *(begin, end, other_begin, other_end) in matcher.get_opcodes():
    if kind != 'equal':
      lines, other_lines = map(repr, one[begin:end]), map(repr, other[other_begin:other_end])
      pairs = itertools.zip_longest(lines, other_lines, fillvalue='no line')
      yield from ((number, *pair) for number, pair in enumerate(pairs, start=begin))


def differ(where: str, values: Mapping[int, str], fix: str) -> list[Problem]:
  """A problem such as `x: float32 in process 0, int32 in process 1.`, unless all values are equal."""
  by_value: dict[str, list[int]] = {}
  for process, value in sorted(values.items()):
    by_value.setdefault(value, []).append(process)
  if len(by_value) == 1:
    return []
  each = ', '.join(f'{value} in {named(processes)}' for value, processes in by_value.items())
  return [Problem(f'{where}: {each}.', fix)]


def processes_of(shardings: Iterable[Any]) -> tuple[int, ...]:
  """The processes with devices in some shardings, in order."""
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
