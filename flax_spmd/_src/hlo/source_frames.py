"""Source frames: the line of Python that an instruction comes from.

HLO has two notations. Older modules store the line with the instruction, `metadata={op_name="jit(step)/dot"
source_file="/x/model.py" source_line=31}`. Newer ones store a number, `stack_frame_id=19`, which refers to
tables of call stacks at the top of the module. The innermost line of the user's own code is reported: a
matrix product of `nn.Dense` is in Flax's `linear.py`, but the useful line is the one that calls the Dense.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flax_spmd._src.source_lines import line_text, user_frame

_ROW = re.compile(r'(\d+) (?:"(.*)"|\{(.*)\})$')
_SECTIONS = ('FileNames', 'FunctionNames', 'FileLocations', 'StackFrames')
_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_FILE = re.compile(r'\bsource_file="((?:[^"\\]|\\.)*)"')
_LINE = re.compile(r'\bsource_line=(\d+)')
_FRAME = re.compile(r'\bstack_frame_id=(\d+)')


class Frame(NamedTuple):
  """A line of Python.

  Attributes:
    file: path of the file.
    line: line number.
    caller: number of the calling frame; 0 for the outermost frame.
  """

  file: str
  line: int
  caller: int


Frames = Mapping[int, Frame]


class Origin(NamedTuple):
  """The origin of an instruction.

  Attributes:
    op: name of the JAX operation.
    source: `file.py:line`, or '' if unknown.
  """

  op: str
  source: str


def read_frames(header: Sequence[str]) -> Frames:
  """The frames in a module's header, by number.

  Args:
    header: lines before the first computation.

  Example:
    >>> read_frames(['FileNames', '1 "a.py"', '', 'FileLocations', '1 {file_name_id=1 line=7}', '',
    ...              'StackFrames', '1 {file_location_id=1 parent_frame_id=1}'])
    {1: Frame(file='a.py', line=7, caller=0)}
  """
  tables = _tables(header)
  files = {number: text for number, (text, _) in tables['FileNames'].items()}
  locations = {number: _fields(row) for number, (_, row) in tables['FileLocations'].items()}
  stack = {number: _fields(row) for number, (_, row) in tables['StackFrames'].items()}
  # Some XLA versions write the caller's number plus one: then the outermost frame refers to itself.
  shift = int(any(row.get('parent_frame_id') == number for number, row in stack.items()))
  frames = {}
  for number, row in stack.items():
    location = locations.get(row.get('file_location_id', 0), {})
    caller = max(row.get('parent_frame_id', 0) - shift, 0)
    file, line = files.get(location.get('file_name_id', 0), ''), location.get('line', 0)
    frames[number] = Frame(file, line, caller)
  return frames


def origin(metadata: str, frames: Frames) -> Origin:
  r"""The origin in an instruction's metadata.

  Args:
    metadata: text of the attribute.
    frames: frames of the module.

  Example:
    >>> origin(r'{op_name="jit(f)/a[\"x\"]" source_file="/home/me/model.py" source_line=31}', {})
    Origin(op='jit(f)/a["x"]', source='model.py:31')
  """
  quoted = _without_names(metadata)
  return Origin(_quoted(_NAME, metadata), _source(metadata, quoted, frames))


def _source(metadata: str, bare: str, frames: Frames) -> str:
  """The source line, from the module's frames or from the metadata itself."""
  number = _FRAME.search(bare)
  if number and (stack := _stack(int(number[1]), frames)):
    frame = stack[user_frame([frame.file for frame in stack])]
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
  """The rows of each table by number, as (text in quotes, text in braces)."""
  tables = {section: {} for section in _SECTIONS}
  rows = {}
  for line in header:
    if line in tables:
      rows = tables[line]
    elif match := _ROW.match(line):
      rows[int(match[1])] = (_unescaped(match[2] or ''), match[3] or '')
  return tables


def _fields(row: str) -> dict[str, int]:
  """The fields of `a=1 b=2`."""
  return {key: int(value) for key, value in re.findall(r'(\w+)=(\d+)', row)}


def _without_names(metadata: str) -> str:
  """The metadata with empty strings, since a name in the model can contain `source_line=1`."""
  return re.sub(r'"(?:[^"\\]|\\.)*"', '""', metadata)


def _quoted(pattern: re.Pattern[str], metadata: str) -> str:
  """The unescaped string that matches a pattern, or ''."""
  match = pattern.search(metadata)
  return _unescaped(match[1]) if match else ''


def _unescaped(text: str) -> str:
  r"""`a\"b` as `a"b`."""
  return re.sub(r'\\(.)', r'\1', text)
