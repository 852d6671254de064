"""Frames: the line of Python that an instruction comes from.

HLO names it in one of two ways. Older texts carry it with the instruction,
`metadata={op_name="jit(step)/dot" source_file="/x/model.py" source_line=31}`; newer ones a number,
`stack_frame_id=19`, into tables at the top of the module that hold whole call stacks. Of a stack the
innermost line of the user's own counts: a matrix product of `nn.Dense` is in Flax's `linear.py`, and what
one wants to know is which Dense.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flax_spmd._src.source_lines import line_text, users

_ROW = re.compile(r'(\d+) (?:"(.*)"|\{(.*)\})$')
_SECTIONS = ('FileNames', 'FunctionNames', 'FileLocations', 'StackFrames')
_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_FILE = re.compile(r'\bsource_file="((?:[^"\\]|\\.)*)"')
_LINE = re.compile(r'\bsource_line=(\d+)')
_FRAME = re.compile(r'\bstack_frame_id=(\d+)')


class Frame(NamedTuple):
  """A line of Python, and the number of the frame that called it (0: none)."""

  file: str
  line: int
  caller: int


Frames = Mapping[int, Frame]


class Origin(NamedTuple):
  """What an instruction says of itself: the name of its operation, and `file.py:line` ('' if it has none)."""

  op: str
  source: str


def read_frames(header: Sequence[str]) -> Frames:
  """The frames in the tables before a module's first computation.

  Example:
    >>> read_frames(['FileNames', '1 "a.py"', '', 'FileLocations', '1 {file_name_id=1 line=7}', '',
    ...              'StackFrames', '1 {file_location_id=1 parent_frame_id=1}'])
    {1: Frame(file='a.py', line=7, caller=0)}
  """
  tables = _tables(header)
  files = {number: text for number, (text, _) in tables['FileNames'].items()}
  places = {number: _fields(row) for number, (_, row) in tables['FileLocations'].items()}
  stack = {number: _fields(row) for number, (_, row) in tables['StackFrames'].items()}
  # Written with the caller's number plus one: the first frame, which has none, then names itself.
  shift = int(any(row.get('parent_frame_id') == number for number, row in stack.items()))
  frames = {}
  for number, row in stack.items():
    place = places.get(row.get('file_location_id', 0), {})
    caller = max(row.get('parent_frame_id', 0) - shift, 0)
    frames[number] = Frame(files.get(place.get('file_name_id', 0), ''), place.get('line', 0), caller)
  return frames


def origin(metadata: str, frames: Frames) -> Origin:
  r"""What an instruction's metadata says.

  Args:
    metadata: the attribute's text.
    frames: of the module.

  Example:
    >>> origin(r'{op_name="jit(f)/a[\"x\"]" source_file="/home/me/model.py" source_line=31}', {})
    Origin(op='jit(f)/a["x"]', source='model.py:31')
  """
  quoted = _without_names(metadata)
  return Origin(_quoted(_NAME, metadata), _source(metadata, quoted, frames))


def _source(metadata: str, bare: str, frames: Frames) -> str:
  """Where it comes from, from the tables or from the metadata itself."""
  number = _FRAME.search(bare)
  if number and (stack := _stack(int(number[1]), frames)):
    frame = stack[users([frame.file for frame in stack])]
    return line_text(frame.file, frame.line)
  line = _LINE.search(bare)
  file = _quoted(_FILE, metadata)
  return line_text(file, int(line[1])) if file and line else ''


def _stack(number: int, frames: Frames) -> list[Frame]:
  """A frame and its callers, innermost first."""
  stack, seen = [], set()
  while number in frames and number not in seen:
    seen.add(number)
    stack.append(frames[number])
    number = frames[number].caller
  return stack


def _tables(header: Sequence[str]) -> dict[str, dict[int, tuple[str, str]]]:
  """The rows of every table by number, as the text in quotes or in braces."""
  tables = {section: {} for section in _SECTIONS}
  rows = {}
  for line in header:
    if line in tables:
      rows = tables[line]
    elif found := _ROW.match(line):
      rows[int(found[1])] = (_unescaped(found[2] or ''), found[3] or '')
  return tables


def _fields(row: str) -> dict[str, int]:
  """`a=1 b=2` as numbers."""
  return {key: int(value) for key, value in re.findall(r'(\w+)=(\d+)', row)}


def _without_names(metadata: str) -> str:
  """The metadata with its strings emptied: a model's name may read `source_line=1`."""
  return re.sub(r'"(?:[^"\\]|\\.)*"', '""', metadata)


def _quoted(pattern: re.Pattern[str], metadata: str) -> str:
  """The string that a pattern finds, its backslashes resolved."""
  found = pattern.search(metadata)
  return _unescaped(found[1]) if found else ''


def _unescaped(text: str) -> str:
  r"""`a\"b` as `a"b`."""
  return re.sub(r'\\(.)', r'\1', text)
