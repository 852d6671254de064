"""HLO text: what a compiler made of a step, as computations of instructions.

Compilers hand their optimised program out as text, the same form from all backends:

    %body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
      ROOT %dot.1 = f32[8,4]{1,0} dot(%x, %y), lhs_contracting_dims={1}, metadata={op_name="jit(f)/dot"}
    }

`parse` reads it in one pass. Of an instruction only its name, type, op and operands are taken apart; its
types and attributes stay text until they are asked for, since most never are. Names that come from the
model (`op_name`, file names) stand in quotes and are never taken for syntax.

An XLA module is one program for every device: shapes are those of one device's part.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from flax_spmd._src.hlo.source_frames import Frames, read_frames

_HEAD = re.compile(r'(ENTRY )?%?([^\s(]+)(?= (?:\(|\{)).*\{$')
_START = re.compile(r'\s+(ROOT )?%?([^\s=]+) = ')
_LEAF = re.compile(r'([a-z]\w*)\[([^\]]*)\](?:\{([^{}]*)\})?')
_OPERAND = re.compile(r'%([^\s,()]+)')
_PARENS = re.compile(r'[()]')
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'|[{}()\[\],]')
_BITS = re.compile(r'[a-z]+(\d+)')


class Shape(NamedTuple):
  """An array's type: `bits` per element as it is stored, and the memory that it lies in (0 is the main one)."""

  dtype: str
  dims: tuple[int, ...]
  bits: int
  space: int
  tiled: bool

  @property
  def size(self) -> int:
    """The number of elements."""
    return math.prod(self.dims)

  @property
  def bytes(self) -> float:
    """The bytes of all elements; of eight int4s, 4."""
    return self.size * self.bits / 8

  @property
  def in_main_memory(self) -> bool:
    """Whether it lies in HBM.

    On TPUs (whose layouts have tiles) space 1 is on the chip; on GPUs it is memory for collectives, in HBM.
    """
    return self.space == 0 or (self.space == 1 and not self.tiled)


class Instruction(NamedTuple):
  """One line of a computation. `type` and `rest` are text; `inner` is what stands between the parentheses."""

  name: str
  op: str
  type: str
  operands: tuple[str, ...]
  inner: str
  rest: str

  @property
  def shapes(self) -> tuple[Shape, ...]:
    """The arrays of its result, of nested tuples one after the other."""
    return shapes(self.type)

  @property
  def bytes(self) -> float:
    """The bytes of its result."""
    return sum(shape.bytes for shape in self.shapes)

  @property
  def attributes(self) -> Mapping[str, str]:
    """Its attributes, each as text: `{'dimensions': '{0}', ...}`."""
    return _attributes(self.rest)

  def computation(self, *keys: str) -> str:
    """The one computation that these attributes name; '' if none does."""
    return next(iter(self.called(*keys)), '')

  def called(self, *keys: str) -> list[str]:
    """The computations that these attributes name."""
    found = [self.attributes.get(key, '') for key in keys]
    return [name.strip(' %') for text in found for name in text.strip('{}').split(',') if name]


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
  """Instructions by name, in the order in which they run, and the name of the last one, whose result counts."""

  name: str
  instructions: Mapping[str, Instruction]
  root: str

  @property
  def result(self) -> Instruction | None:
    """The instruction whose result is the computation's."""
    return self.instructions.get(self.root)

  @functools.cached_property
  def parameters(self) -> list[Instruction]:
    """Its parameters, by number."""
    found = [instruction for instruction in self.instructions.values() if instruction.op == 'parameter']
    return sorted(found, key=lambda parameter: int(parameter.inner))

  @functools.cached_property
  def users(self) -> Mapping[str, list[Instruction]]:
    """The instructions that take a result, by its name."""
    users: dict[str, list[Instruction]] = {}
    for instruction in self.instructions.values():
      for name in dict.fromkeys(instruction.operands):
        users.setdefault(name, []).append(instruction)
    return users

  def operands(self, instruction: Instruction) -> list[Instruction]:
    """The instructions whose results it takes."""
    known = self.instructions
    return [known[name] for name in instruction.operands if name in known]


class Module(NamedTuple):
  """A program: its computations by name, the one that runs, and where its instructions come from."""

  computations: Mapping[str, Computation]
  entry: str
  devices: int
  frames: Frames

  @property
  def main(self) -> Computation:
    """The computation that runs."""
    return self.computations[self.entry]


def parse(text: str) -> Module:
  """Reads the text of an HLO module.

  Raises:
    ValueError: there is no entry computation in it.

  Example:
    >>> module = parse('''
    ... HloModule jit_f, num_partitions=8
    ...
    ... ENTRY %main (x: f32[4,8]) -> f32[8,4] {
    ...   %x = f32[4,8]{1,0} parameter(0)
    ...   ROOT %t = f32[8,4]{1,0} transpose(%x), dimensions={1,0}
    ... }''')
    >>> root = module.main.result
    >>> root.op, root.bytes, dict(root.attributes)
    ('transpose', 128.0, {'dimensions': '{1,0}'})
  """
  lines = text.splitlines()
  computations, entry, first = {}, '', len(lines)
  name, body = '', None
  for number, line in enumerate(lines):
    if body is None:
      if head := _head(line):
        first = min(first, number)
        name, body = head[2], []
        entry = name if head[1] else entry
    elif line.startswith('}'):
      computations[name] = _computation(name, body)
      body = None
    else:
      body.append(line)
  if entry not in computations:
    raise ValueError('This is no HLO module: it has no ENTRY computation.')
  header = lines[:first]
  return Module(computations, entry, _devices(header), read_frames(header))


@functools.lru_cache(maxsize=4096)
def shapes(text: str) -> tuple[Shape, ...]:
  """The arrays in a type.

  Example:
    >>> [shape.bytes for shape in shapes('(bf16[8,4]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/s4[6]{0:E(4)})')]
    [64.0, 3.0]
  """
  return tuple(_shape(*found) for found in _LEAF.findall(text))


def _shape(dtype: str, dims: str, layout: str) -> Shape:
  """One array; sizes that may vary (`<=8`) count as their bound."""
  sizes = tuple(int(size.strip('<= ')) for size in dims.split(',') if size.strip('<= ').isdigit())
  space = re.search(r'S\((\d+)\)', layout)
  stored = re.search(r'E\((\d+)\)', layout)
  bits = int(stored[1]) if stored else _bits(dtype)
  return Shape(dtype, sizes, bits, int(space[1]) if space else 0, 'T(' in layout)


def _bits(dtype: str) -> int:
  """The bits of one element: the number in the type's name, as in `f8e4m3fn`."""
  if dtype == 'pred':
    return 8
  found = _BITS.match(dtype)
  return int(found[1]) if found else 0


def _head(line: str) -> re.Match[str] | None:
  """The first line of a computation."""
  if not line.endswith('{') or line[:1].isspace() or line.startswith('HloModule'):
    return None
  return _HEAD.match(line)


def _computation(name: str, lines: list[str]) -> Computation:
  """The instructions of a computation's lines."""
  instructions, root = {}, ''
  for line in lines:
    start = _START.match(line)
    if start and (instruction := _instruction(start[2], line, start.end())):
      instructions[start[2]] = instruction
      root = start[2] if start[1] or not root else root
  return Computation(name, instructions, root)


def _instruction(name: str, line: str, start: int) -> Instruction | None:
  """What stands behind `name = `."""
  end = _closing(line, start) if line[start] == '(' else line.find(' ', start)
  opening = line.find('(', end)
  if end < 0 or opening < 0:
    return None
  closing = _closing(line, opening)
  inner = line[opening + 1 : closing - 1]
  op = line[end:opening].strip()
  return Instruction(name, op, line[start:end], _operands(inner), inner, line[closing:])


def _operands(inner: str) -> tuple[str, ...]:
  """The names between the parentheses; shapes may stand before them, and % may be missing."""
  if '%' in inner:
    return tuple(_OPERAND.findall(inner))
  words = re.sub(r'/\*.*?\*/', '', inner).split(', ')
  return tuple(word.split()[-1] for word in words if word.strip())


def _closing(line: str, opening: int) -> int:
  """The place behind the parenthesis that closes the one at `opening`."""
  depth = 0
  for found in _PARENS.finditer(line, opening):
    depth += 1 if found[0] == '(' else -1
    if not depth:
      return found.end()
  return len(line)


@functools.lru_cache(maxsize=256)
def _attributes(rest: str) -> Mapping[str, str]:
  """`, a={1,2}, b="x"` as a dictionary, by the commas that are in no bracket and no quotes."""
  depth, start, parts = 0, 0, []
  for found in _TOKENS.finditer(rest):
    token = found[0]
    if token in '{([':
      depth += 1
    elif token in '})]':
      depth -= 1
    elif token == ',' and not depth:
      parts.append(rest[start : found.start()])
      start = found.end()
  parts.append(rest[start:])
  pairs = (part.strip().partition('=') for part in parts)
  return {key: value for key, equals, value in pairs if equals}


def _devices(header: list[str]) -> int:
  """How many devices the program is for."""
  first = next((line for line in header if line.startswith('HloModule')), '')
  counts = re.findall(r'\b(?:num_partitions|replica_count)=(\d+)', first)
  return math.prod(map(int, counts))
