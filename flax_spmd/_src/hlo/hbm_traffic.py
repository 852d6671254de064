"""Traffic: the bytes that an instruction moves from and to a device's main memory (HBM).

What runs reads its operands and writes its result. Three things are less than that: a slice reads what it
takes (a scan's body takes one layer of the stacked parameters), an update of a part writes the part in
place, and inside a fusion nothing is written at all. What lies on the chip (a TPU's VMEM) moves nothing.
The same rules as XLA's own cost analysis has, so the figure is what a compiler would assume, not a measurement.
"""

from __future__ import annotations

from collections.abc import Sequence

from flax_spmd._src.hlo.flops import only_marks
from flax_spmd._src.hlo.parser import Computation, Instruction, Module, Shape

_FREE = {
  *(
    'parameter',
    'tuple',
    'get-tuple-element',
    'bitcast',
    'constant',
    'after-all',
    'opt-barrier',
    'domain',
  ),
  *('while', 'conditional', 'call', 'async-start', 'async-update', 'async-done'),
  *('partition-id', 'replica-id', 'add-dependency'),
}
_SLICES = ('slice', 'dynamic-slice', 'gather')
_VIEWS = ('bitcast', 'get-tuple-element', 'reshape')
_BESIDE = (
  'tuple',
  'custom-call',
  'all-gather',
  'all-reduce',
  'reduce-scatter',
  'all-to-all',
  'collective-permute',
)


def traffic(instruction: Instruction, computation: Computation, module: Module) -> float:
  """The bytes that one instruction reads and writes, run once.

  What it calls is looked into only if it is a fusion: bodies of loops move what their instructions move.

  Example:
    >>> from flax_spmd._src.hlo.parser import parse
    >>> module = parse('''
    ... ENTRY %main (layers: f32[32,8,4], i: s32[]) -> f32[1,8,4] {
    ...   %layers = f32[32,8,4]{2,1,0} parameter(0)
    ...   %i = s32[] parameter(1)
    ...   %zero = s32[] constant(0)
    ...   ROOT %one = f32[1,8,4]{2,1,0} dynamic-slice(%layers, %i, %zero, %zero), dynamic_slice_sizes={1,8,4}
    ... }''')
    >>> traffic(module.main.instructions['one'], module.main, module)
    264.0
  """
  op = instruction.op
  if op in _FREE or op.endswith('-update') or only_marks(instruction):
    return 0
  if called := _called(instruction, module):
    return _fusion(called, module)
  operands = list(dict.fromkeys(computation.operands(instruction)))
  if op.endswith('-done'):
    started = operands and _called(operands[0], module)
    return 0 if started else _held(instruction.shapes)
  reads = _reads(op.removesuffix('-start'), instruction, operands)
  return reads if op.endswith('-start') else reads + _writes(instruction, operands)


def _called(instruction: Instruction, module: Module) -> Computation | None:
  """The fused computation of a fusion, asynchronous or not."""
  if instruction.op not in ('fusion', 'fusion-start'):
    return None
  return module.computations.get(instruction.computation('calls'))


def _reads(op: str, instruction: Instruction, operands: Sequence[Instruction]) -> float:
  """What an instruction reads of its operands."""
  if op in _SLICES and operands:
    return _part(operands[0], instruction) + sum(_held(operand.shapes) for operand in operands[1:])
  if op in ('dynamic-update-slice', 'scatter'):
    return sum(_held(operand.shapes) for operand in operands[1:])
  return sum(_held(operand.shapes) for operand in operands)


def _writes(instruction: Instruction, operands: Sequence[Instruction]) -> float:
  """What an instruction writes: its result, or of an update in place the part."""
  if instruction.op == 'dynamic-update-slice' and len(operands) > 1:
    return _updated(instruction, operands[1])
  if instruction.op == 'scatter' and len(operands) > 2:
    return _updated(instruction, operands[2])
  return _held(_without_workspace(instruction))


def _without_workspace(instruction: Instruction) -> Sequence[Shape]:
  """The results, without the bytes of scratch memory that a library call (cuBLAS, cuDNN) has as its last."""
  shapes = instruction.shapes
  scratch = len(shapes) > 1 and shapes[-1].dtype in ('s8', 'u8') and len(shapes[-1].dims) == 1
  return shapes[:-1] if scratch and instruction.op == 'custom-call' else shapes


def _updated(instruction: Instruction, update: Instruction) -> float:
  """The bytes of an update, if what it updates is in main memory."""
  return update.bytes if _held(instruction.shapes) else 0


def _part(whole: Instruction, part: Instruction) -> float:
  """The bytes that a slice reads of what is in main memory; the result may lie elsewhere."""
  sizes = [shape for shape in part.shapes if shape.dims] or part.shapes
  held = _held(whole.shapes)
  return min(held, sizes[-1].bytes) if sizes else held


def _held(shapes: Sequence[Shape]) -> float:
  """The bytes of the arrays that are in main memory."""
  return sum(shape.bytes for shape in shapes if shape.in_main_memory)


def _fusion(fused: Computation, module: Module) -> float:
  """What a fusion reads of its parameters and writes of its results."""
  reads = sum(_used(parameter, fused, module) for parameter in fused.parameters)
  return reads + (_written(fused.result, fused, module) if fused.result else 0)


def _used(parameter: Instruction, fused: Computation, module: Module) -> float:
  """The bytes that a fusion reads of one parameter: all of it, unless all who use it take parts."""
  whole = _held(parameter.shapes)
  return min(whole, _taken(parameter, fused, module)) if whole else 0


def _taken(source: Instruction, fused: Computation, module: Module) -> float:
  """The bytes that all users of a value take together."""
  return sum(_taken_by(user, source, fused, module) for user in fused.users.get(source.name, ()))


def _taken_by(user: Instruction, source: Instruction, fused: Computation, module: Module) -> float:
  """The bytes that one user takes of a value."""
  first = user.operands[0] == source.name
  if user.op in _VIEWS:
    return _taken(user, fused, module)
  if user.op in _SLICES and first:
    return user.bytes
  if user.op in _BESIDE or (user.op == 'dynamic-update-slice' and first):
    return 0
  if inner := _called(user, module):
    parameters = inner.parameters
    places = [place for place, name in enumerate(user.operands) if name == source.name]
    return sum(_taken(parameters[place], inner, module) for place in places if place < len(parameters))
  return source.bytes


def _written(result: Instruction, fused: Computation, module: Module) -> float:
  """The bytes that a fusion writes for a result; what it hands on as it came is not written."""
  operands = fused.operands(result)
  if result.op == 'tuple':
    return sum(_written(operand, fused, module) for operand in operands)
  if result.op == 'bitcast' and operands:
    return _written(operands[0], fused, module) if _held(result.shapes) else 0
  if result.op == 'parameter' or result.op in _BESIDE:
    return 0
  if (inner := _called(result, module)) and inner.result:
    return _written(inner.result, inner, module) if _held(result.shapes) else 0
  return _writes(result, operands)
