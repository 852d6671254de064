"""HLO parser: the text of a compiled step as computations of instructions.

All backends print their optimised program in the same form:

    %body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
      ROOT %dot.1 = f32[8,4]{1,0} dot(%x, %y), lhs_contracting_dims={1}, metadata={op_name="jit(f)/dot"}
    }

`parse` reads it in one pass. It splits an instruction into name, type, op and operands; shapes and
attributes are parsed on first use, since most are never needed. Names from the model (`op_name`, file names)
are quoted, and quoted text is never parsed as syntax.

An XLA module is one program for all devices: shapes are those of one device's shard.
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
  """An array's type.

  Attributes:
    dtype: HLO's name of the dtype, such as `bf16` or `pred`.
    dims: size of each dimension.
    bits: bits per stored element.
    space: memory space; 0 is main memory.
    tiled: whether the array's memory layout has tiles, as on TPUs.
  """

  dtype: str
  dims: tuple[int, ...]
  bits: int
  space: int
  tiled: bool

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.dims)

  @property
  def bytes(self) -> float:
    """Bytes of all elements: 4 for eight int4s."""
    return self.size * self.bits / 8

  @property
  def in_main_memory(self) -> bool:
    """Whether the array is in HBM.

    Space 1 is on-chip memory on TPUs, whose memory layouts have tiles. On GPUs it is the collectives' part
    of HBM.
    """
    return self.space == 0 or (self.space == 1 and not self.tiled)


class Instruction(NamedTuple):
  """One line of a computation.

  Attributes:
    name: name without `%`.
    op: opcode, such as `dot` or `all-gather-start`.
    type: text of the result's type.
    operands: names of the operands.
    inner: text between the parentheses.
    rest: text after the parentheses: the attributes.
  """

  name: str
  op: str
  type: str
  operands: tuple[str, ...]
  inner: str
  rest: str

  @property
  def shapes(self) -> tuple[Shape, ...]:
    """The arrays of the result, with nested tuples flattened."""
    return shapes(self.type)

  @property
  def bytes(self) -> float:
    """Bytes of the result."""
    return sum(shape.bytes for shape in self.shapes)

  @property
  def attributes(self) -> Mapping[str, str]:
    """Text of each attribute: `{'dimensions': '{0}', ...}`."""
    return _attributes(self.rest)

  def computation(self, *keys: str) -> str:
    """Name of the first computation in these attributes, or ''."""
    return next(iter(self.called(*keys)), '')

  def called(self, *keys: str) -> list[str]:
    """Names of the computations in these attributes."""
    texts = [self.attributes.get(key, '') for key in keys]
    return [name.strip(' %') for text in texts for name in text.strip('{}').split(',') if name]


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
  """A sequence of instructions.

  Attributes:
    name: name without `%`.
    instructions: instructions by name, in execution order.
    root: name of the instruction that computes the result.
  """

  name: str
  instructions: Mapping[str, Instruction]
  root: str

  @property
  def result(self) -> Instruction | None:
    """The root instruction."""
    return self.instructions.get(self.root)

  @functools.cached_property
  def parameters(self) -> list[Instruction]:
    """The parameters, by number."""
    parameters = [one for one in self.instructions.values() if one.op == 'parameter']
    return sorted(parameters, key=lambda parameter: int(parameter.inner))

  @functools.cached_property
  def users(self) -> Mapping[str, list[Instruction]]:
    """The users of each instruction, by its name."""
    users: dict[str, list[Instruction]] = {}
    for instruction in self.instructions.values():
      for name in dict.fromkeys(instruction.operands):
        users.setdefault(name, []).append(instruction)
    return users

  def operands(self, instruction: Instruction) -> list[Instruction]:
    """The operands of an instruction that are in this computation."""
    known = self.instructions
    return [known[name] for name in instruction.operands if name in known]


class HloModule(NamedTuple):
  """A compiled program.

  Attributes:
    computations: computations by name.
    entry: name of the entry computation.
    devices: number of devices that the program runs on.
    frames: Python stack frames of the instructions.
  """

  computations: Mapping[str, Computation]
  entry: str
  devices: int
  frames: Frames

  @property
  def main(self) -> Computation:
    """The entry computation."""
    return self.computations[self.entry]


def parse(text: str) -> HloModule:
  """Parses the text of an HLO module.

  Raises:
    ValueError: the text has no entry computation.

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
    elif line.startswith('}') and _is_end(lines, number):
      computations[name] = _computation(name, body)
      body = None
    elif _START.match(line) or not body:
      body.append(line)
    else:  # the rest of an attribute of several lines
      body[-1] += line
  if entry not in computations:
    raise ValueError('This is not an HLO module: it has no ENTRY computation.')
  header = lines[:first]
  return HloModule(computations, entry, _devices(header), read_frames(header))


@functools.lru_cache(maxsize=4096)
def shapes(text: str) -> tuple[Shape, ...]:
  """The arrays in a type.

  Example:
    >>> [shape.bytes for shape in shapes('(bf16[8,4]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/s4[6]{0:E(4)})')]
    [64.0, 3.0]
  """
  return tuple(_shape(*leaf) for leaf in _LEAF.findall(text))


def _shape(dtype: str, dims: str, layout: str) -> Shape:
  """One array; a dynamic size (`<=8`) counts as its bound."""
  sizes = tuple(int(size.strip('<= ')) for size in dims.split(',') if size.strip('<= ').isdigit())
  space = re.search(r'S\((\d+)\)', layout)
  stored = re.search(r'E\((\d+)\)', layout)
  bits = int(stored[1]) if stored else _bits(dtype)
  return Shape(dtype, sizes, bits, int(space[1]) if space else 0, 'T(' in layout)


def _bits(dtype: str) -> int:
  """Bits of one element: the first number in the dtype's name, as in `f8e4m3fn`."""
  if dtype == 'pred':
    return 8
  match = _BITS.match(dtype)
  return int(match[1]) if match else 0


def _head(line: str) -> re.Match[str] | None:
  """The match of a computation's first line, or None."""
  if not line.endswith('{') or line[:1].isspace() or line.startswith('HloModule'):
    return None
  return _HEAD.match(line)


def _is_end(lines: list[str], number: int) -> bool:
  """Whether a line with a brace ends a computation, rather than an attribute of several lines, such as a kernel's metadata."""
  after = lines[number + 1] if number + 1 < len(lines) else ''
  return not after.strip() or bool(_head(after))


def _computation(name: str, lines: list[str]) -> Computation:
  """A computation from the lines of its body."""
  instructions, root = {}, ''
  for line in lines:
    start = _START.match(line)
    if start and (instruction := _instruction(start[2], line, start.end())):
      instructions[start[2]] = instruction
      root = start[2] if start[1] or not root else root
  return Computation(name, instructions, root)


def _instruction(name: str, line: str, start: int) -> Instruction | None:
  """An instruction from the text after `name = `."""
  end = _closing(line, start) if line[start] == '(' else line.find(' ', start)
  opening = line.find('(', end)
  if end < 0 or opening < 0:
    return None
  closing = _closing(line, opening)
  inner = line[opening + 1 : closing - 1]
  op = line[end:opening].strip()
  return Instruction(name, op, line[start:end], _operands(inner), inner, line[closing:])


def _operands(inner: str) -> tuple[str, ...]:
  """Names of the operands. Each may follow its type, and may lack the `%`."""
  if '%' in inner:
    return tuple(_OPERAND.findall(inner))
  words = re.sub(r'/\*.*?\*/', '', inner).split(', ')
  return tuple(word.split()[-1] for word in words if word.strip())


def _closing(line: str, opening: int) -> int:
  """The index after the parenthesis that closes the one at `opening`."""
  depth = 0
  for parenthesis in _PARENS.finditer(line, opening):
    depth += 1 if parenthesis[0] == '(' else -1
    if not depth:
      return parenthesis.end()
  return len(line)


@functools.lru_cache(maxsize=256)
def _attributes(rest: str) -> Mapping[str, str]:
  """`, a={1,2}, b="x"` as a dictionary, split at the commas outside brackets and quotes."""
  depth, start, parts = 0, 0, []
  for match in _TOKENS.finditer(rest):
    token = match[0]
    if token in '{([':
      depth += 1
    elif token in '})]':
      depth -= 1
    elif token == ',' and not depth:
      parts.append(rest[start : match.start()])
      start = match.end()
  parts.append(rest[start:])
  pairs = (part.strip().partition('=') for part in parts)
  return {key: value for key, equals, value in pairs if equals}


def _devices(header: list[str]) -> int:
  """Number of devices that the program runs on: partitions times replicas."""
  first = next((line for line in header if line.startswith('HloModule')), '')
  counts = re.findall(r'\b(?:num_partitions|replica_count)=(\d+)', first)
  return math.prod(map(int, counts))
