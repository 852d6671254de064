"""Profile traces: the collectives of a compiled program as trace events, beside those of a profile, by name.

    with jax.profiler.trace('profile'):
      step(state, batch)
    found = tracking.write_trace(layout.jit(step).explain(state, batch), 'step.json.gz', profile='profile')

The file is in the trace event format of Chrome, which ui.perfetto.dev opens. A profile has an event for every run of an
instruction, with its HLO name, and so has the program; the planned event is drawn at the time of the measured one.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flax_spmd._src.compare.outcome import Outcome
from flax_spmd._src.hlo.collectives import Collective
from flax_spmd._src.jit.program_explanation import ProgramExplanation
from flax_spmd._src.public import public
from flax_spmd._src.text import size_text
from flax_spmd.errors import LayoutError

_PROCESS = 1_000_000_000  # number of the process of planned events; those of a profile are smaller
_ORDER = 1.0  # microseconds of an event whose time is unknown


@public('flax_spmd.tracking')
class TraceMatch(NamedTuple):
  """The planned collectives of a program, and their events in a profile.

  Attributes:
    seconds: measured time of each collective by the name of its instruction, all runs on all devices together.
    missing: names of instructions without an event: another program was profiled, or the profiler omits them.

  Example:
    >>> tracking.TraceMatch({'all-reduce': 0.5}, ('all-gather',)).missing
    ('all-gather',)
  """

  seconds: dict[str, float]
  missing: tuple[str, ...]


@public('flax_spmd.tracking')
def write_trace(
  program: ProgramExplanation | Outcome,
  path: str | os.PathLike[str],
  profile: str | os.PathLike[str] | None = None,
) -> TraceMatch:
  """Writes the collectives of a compiled program as a trace for Perfetto, beside the events of a profile.

  Each event has the kind, mesh axes, bytes, source line, and in an explanation the arrays of a collective.

  Args:
    program: the result of `layout.jit(f).explain(...)`, or an outcome of `explore.compare` that is compiled.
    path: file to write, `.json.gz`.
    profile: folder that `jax.profiler.trace` has written, of which the newest run is read, or its `.trace.json.gz`. All
      of its events are in the file too. None: the collectives one after the other, for as long as `compare` estimates,
      or a microsecond each.

  Returns:
    The measured time of each collective, and those that the profile lacks.

  Raises:
    LayoutError: `program` has no collectives to write because it was not compiled, or there is no trace at `profile`, or a
      damaged one.

  Example:
    >>> layout = Layout({'data': 8}, (('batch', 'data'),))
    >>> x = layout.shard(jnp.ones((8, 4)), ('batch', None))
    >>> explanation = layout.jit(lambda x: x - x.mean(0, keepdims=True)).explain(x)
    >>> tracking.write_trace(explanation, tmp / 'step.json.gz').missing
    ()
  """
  planned = _planned(program)
  if profile is None:
    events, match = list(_in_order(planned)), TraceMatch({}, ())
  else:
    measured = _events(profile)
    by_name = _by_instruction(measured, program)
    events = [*measured, *_beside(planned, by_name)]
    match = _matched(planned, by_name)
  with gzip.open(os.fspath(path), 'wt', encoding='utf-8') as file:
    json.dump({'displayTimeUnit': 'ns', 'traceEvents': [*events, *_titles(planned)]}, file)
  return match


class _Planned(NamedTuple):
  """A collective, its arrays, and its estimated time in microseconds."""

  collective: Collective
  arrays: tuple[str, ...]
  time: float

  @property
  def event(self) -> dict[str, Any]:
    one = self.collective
    return {
      'ph': 'X',
      'pid': _PROCESS,
      'tid': 1,
      'name': f'{one.kind} over {"+".join(one.axes) or "?"}: {size_text(one.wire / max(one.times, 1))}',
      'args': {
        'hlo_op': one.name,
        'axes': '+'.join(one.axes),
        'devices': one.group,
        'bytes': one.bytes,
        'times': one.times,
        'sent_in_all': one.wire,
        'dtype': one.dtype,
        'operation': one.op,
        'source': one.source,
        'arrays': ', '.join(self.arrays),
      },
    }


def _planned(program: ProgramExplanation | Outcome) -> list[_Planned]:
  if isinstance(program, ProgramExplanation):
    return [
      _Planned(one.collective, (*one.arguments, *one.results), _ORDER) for one in program.collectives
    ]
  if not isinstance(program, Outcome) or program.counts is None or program.compiled is None:
    raise LayoutError(
      f'{getattr(program, "name", "") or type(program).__name__} has no compiled program, so no instructions with names.\n'
      'Fix: pass the result of layout.jit(f).explain(...), or a compiled outcome of explore.compare.'
    )
  links = program.cost.links if program.cost else {}
  sent = program.counts.by_axis()
  return [
    _Planned(
      one, (), 1e6 * links.get(one.axes, 0.0) * one.wire / (sent[one.axes] * one.times or 1) or _ORDER
    )
    for one in program.counts.collectives
  ]


def _in_order(planned: Sequence[_Planned]) -> Iterator[dict[str, Any]]:
  start = 0.0
  for one in planned:
    yield one.event | {'ts': start, 'dur': one.time}
    start += one.time


def _beside(
  planned: Sequence[_Planned], measured: Mapping[str, Sequence[Any]]
) -> Iterator[dict[str, Any]]:
  """A planned event for each measured one, at its time, in a row for each device of the profile."""
  threads: dict[Any, int] = {}
  for one in planned:
    for event in measured.get(one.collective.name, ()):
      thread = threads.setdefault((event.get('pid'), event.get('tid')), len(threads) + 1)
      yield one.event | {'tid': thread, 'ts': event['ts'], 'dur': event['dur']}


def _matched(planned: Sequence[_Planned], measured: Mapping[str, Sequence[Any]]) -> TraceMatch:
  names = dict.fromkeys(one.collective.name for one in planned)
  seconds = {
    name: sum(event['dur'] for event in measured[name]) / 1e6 for name in names if name in measured
  }
  return TraceMatch(seconds, tuple(name for name in names if name not in measured))


def _titles(planned: Sequence[_Planned]) -> list[dict[str, Any]]:
  title = f'planned collectives ({len(planned)})'
  return [{'ph': 'M', 'pid': _PROCESS, 'name': 'process_name', 'args': {'name': title}}]


def _by_instruction(
  events: Sequence[Any], program: ProgramExplanation | Outcome
) -> dict[str, list[Any]]:
  """The events of a program that take time, by the HLO name of their instruction.

  Other programs have instructions of the same names. The events of an outcome, which is of one for another machine, have
  to be of a single program.
  """
  found: dict[str, list[Any]] = {}
  modules: set[str] = set()
  for event in events:
    args = event.get('args') or {}
    module = args.get('hlo_module')
    if event.get('ph') == 'X' and (module is None or _is_module(module, program)):
      name = args.get('hlo_op') or event.get('name', '')
      found.setdefault(name, []).append(event | {'dur': event.get('dur', 0.0)})
      modules.update([module] if module else [])
  if isinstance(program, Outcome) and len(modules) > 1:
    raise LayoutError(
      f'The profile is of several programs ({", ".join(sorted(modules))}), and their instructions have equal names.\n'
      'Fix: profile the step only, or pass layout.jit(step).explain(...).'
    )
  return found


def _is_module(name: str, program: ProgramExplanation | Outcome) -> bool:
  """Whether the HLO module `jit_step` is that of a program; JAX replaces characters in the names of functions."""
  if isinstance(program, Outcome):
    return True
  letters = lambda text: re.sub(r'[\W_]', '', text)
  return letters(re.sub(r'\(\d+\)$', '', name)) == letters(f'jit_{program.name}')


def _events(profile: str | os.PathLike[str]) -> list[Any]:
  """The events of a profile, or of the newest run in its folder."""
  path = Path(profile)
  files = (
    [path]
    if path.is_file()
    else sorted(path.glob('**/*trace.json.gz'), key=lambda each: each.stat().st_mtime)
  )
  if not files:
    raise LayoutError(
      f'There is no *.trace.json.gz in {path}.\nFix: pass the folder of jax.profiler.trace, after its block has ended.'
    )
  try:
    with gzip.open(files[-1], 'rt', encoding='utf-8') as file:
      return json.load(file)['traceEvents']
  except (gzip.BadGzipFile, zlib.error, EOFError, ValueError, KeyError, TypeError) as error:
    raise LayoutError(
      f'{files[-1]} is no trace of a profile, or a part of one: {type(error).__name__}: {error}\n'
      'Fix: profile again, and read it after the block of jax.profiler.trace has ended.'
    ) from error
