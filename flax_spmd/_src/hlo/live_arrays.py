"""Live arrays: the arrays of a compiled program that are in memory when it needs most, and where they come from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from flax_spmd._src.hlo.parser import Computation, HloModule, Instruction
from flax_spmd._src.hlo.source_frames import Origin, origin
from flax_spmd._src.text import size_text

_LEAST = 0.005  # share of all bytes; smaller arrays are not listed
_COPIES = 8  # operands in turn to look for a line in


class LiveArray(NamedTuple):
  """Equal arrays, on one device, that are in memory at the peak.

  Attributes:
    number: number of arrays.
    bytes: bytes of all of them.
    array: dtype and shape on a device, such as `bf16[16,4096]`; '' if a compiler's operation has several results.
    op: operation that computes them, in JAX's words, or the compiler's name for it.
    source: line of the model, such as `model.py:31`, or '' if unknown.

  Example:
    >>> str(LiveArray(2, 2**21, 'f32[512,512]', 'jit(step)/dot_general', 'model.py:31'))
    '2 MiB: 2 x f32[512,512], model.py:31'
  """

  number: int
  bytes: int
  array: str
  op: str
  source: str

  def __str__(self) -> str:
    times = f'{self.number} x ' if self.number > 1 else ''
    return f'{size_text(self.bytes)}: {times}{self.array or "arrays"}, {self.source or self.op}'


def live_arrays(buffers: Iterable[tuple[str, int]], module: HloModule) -> tuple[LiveArray, ...]:
  """The arrays in some buffers, equal ones of one line together, largest first; those that hardly count are left out.

  Args:
    buffers: the instruction that defines each buffer, and its bytes.
    module: the program.
  """
  known = {
    name: (one, each) for each in module.computations.values() for name, one in each.instructions.items()
  }
  found: dict[tuple[str, str, str], list[int]] = {}
  for name, size in buffers:
    about = _about(*known[name], size, module) if name in known else ('', name, '')
    found.setdefault(about, []).append(size)
  least = _LEAST * sum(map(sum, found.values()))
  listed = (LiveArray(len(sizes), sum(sizes), *about) for about, sizes in found.items())
  return tuple(sorted((one for one in listed if one.bytes >= least), key=lambda one: -one.bytes))


def _about(
  defining: Instruction, inside: Computation, size: int, module: HloModule
) -> tuple[str, str, str]:
  """The dtype and shape, the operation and the source line of a buffer."""
  op, source = _origin(defining, inside, module)
  return next(_arrays(defining, size), ''), op or defining.op, source


def _origin(one: Instruction, inside: Computation, module: HloModule) -> Origin:
  """The origin of an instruction; for one that the compiler adds, such as a copy, the line of its first operand."""
  found = origin(one.attributes.get('metadata', ''), module.frames)
  operand = one
  for _ in range(_COPIES):
    if found.source or not (operands := inside.operands(operand)):
      break
    operand = operands[0]
    found = Origin(found.op, origin(operand.attributes.get('metadata', ''), module.frames).source)
  return found


def _arrays(defining: Instruction, size: int) -> Iterator[str]:
  """The results of an instruction that can be in a buffer: the only one, or those of the buffer's size."""
  for one in defining.shapes:
    if len(defining.shapes) == 1 or one.bytes == size:
      yield f'{one.dtype}[{",".join(map(str, one.dims))}]'
