"""HBM traffic: the bytes that an instruction reads from and writes to a device's main memory.

An instruction reads its operands and writes its result, with three exceptions: a slice reads only its part
(a scan's body reads one layer of the stacked parameters), an in-place update writes only the updated part,
and values inside a fusion are not written. Arrays in on-chip memory (a TPU's VMEM) cause no traffic. XLA's
own cost analysis has the same rules, so the figure is the compiler's assumption and not a measurement.
"""

from __future__ import annotations

from collections.abc import Sequence

from flax_spmd._src.hlo.flops import is_annotation
from flax_spmd._src.hlo.parser import Computation, HloModule, Instruction, Shape

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


def traffic(instruction: Instruction, computation: Computation, module: HloModule) -> float:
  """The bytes that one run of an instruction reads and writes.

  Of the called computations only fusions are included; the instructions of a loop's body count separately.

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
  if op in _FREE or op.endswith('-update') or is_annotation(instruction):
    return 0
  if called := _called(instruction, module):
    return _fusion(called, module)
  operands = list(dict.fromkeys(computation.operands(instruction)))
  if op.endswith('-done'):
    started = operands and _called(operands[0], module)
    return 0 if started else _held(instruction.shapes)
  reads = _reads(op.removesuffix('-start'), instruction, operands)
  return reads if op.endswith('-start') else reads + _writes(instruction, operands)


def _called(instruction: Instruction, module: HloModule) -> Computation | None:
  """The computation of a fusion, synchronous or asynchronous; None for other instructions."""
  if instruction.op not in ('fusion', 'fusion-start'):
    return None
  return module.computations.get(instruction.computation('calls'))


def _reads(op: str, instruction: Instruction, operands: Sequence[Instruction]) -> float:
  """The bytes that an instruction reads of its operands."""
  if op in _SLICES and operands:
    return _part(operands[0], instruction) + sum(_held(operand.shapes) for operand in operands[1:])
  if op in ('dynamic-update-slice', 'scatter'):
    return sum(_held(operand.shapes) for operand in operands[1:])
  return sum(_held(operand.shapes) for operand in operands)


def _writes(instruction: Instruction, operands: Sequence[Instruction]) -> float:
  """The bytes that an instruction writes: its result, or the updated part."""
  if instruction.op == 'dynamic-update-slice' and len(operands) > 1:
    return _updated(instruction, operands[1])
  if instruction.op == 'scatter' and len(operands) > 2:
    return _updated(instruction, operands[2])
  return _held(_without_workspace(instruction))


def _without_workspace(instruction: Instruction) -> Sequence[Shape]:
  """The results without the scratch memory that is the last result of a library call (cuBLAS, cuDNN)."""
  shapes = instruction.shapes
  scratch = len(shapes) > 1 and shapes[-1].dtype in ('s8', 'u8') and len(shapes[-1].dims) == 1
  return shapes[:-1] if scratch and instruction.op == 'custom-call' else shapes


def _updated(instruction: Instruction, update: Instruction) -> float:
  """The bytes of an update to an array in main memory; 0 for an array elsewhere."""
  return update.bytes if _held(instruction.shapes) else 0


def _part(whole: Instruction, part: Instruction) -> float:
  """The bytes that a slice reads from main memory; its result can be in another memory."""
  sizes = [shape for shape in part.shapes if shape.dims] or part.shapes
  held = _held(whole.shapes)
  return min(held, sizes[-1].bytes) if sizes else held


def _held(shapes: Sequence[Shape]) -> float:
  """The bytes of those arrays that are in main memory."""
  return sum(shape.bytes for shape in shapes if shape.in_main_memory)


def _fusion(fused: Computation, module: HloModule) -> float:
  """The bytes that a fusion reads of its parameters and writes of its results."""
  reads = sum(_used(parameter, fused, module) for parameter in fused.parameters)
  return reads + (_written(fused.result, fused, module) if fused.result else 0)


def _used(parameter: Instruction, fused: Computation, module: HloModule) -> float:
  """The bytes that a fusion reads of one parameter: less than the whole if every user reads a part."""
  whole = _held(parameter.shapes)
  return min(whole, _taken(parameter, fused, module)) if whole else 0


def _taken(source: Instruction, fused: Computation, module: HloModule) -> float:
  """The bytes of a value that its users read, in total."""
  return sum(_taken_by(user, source, fused, module) for user in fused.users.get(source.name, ()))


def _taken_by(user: Instruction, source: Instruction, fused: Computation, module: HloModule) -> float:
  """The bytes of a value that one user reads."""
  first = user.operands[0] == source.name
  if user.op in _VIEWS:
    return _taken(user, fused, module)
  if user.op in _SLICES and first:
    return user.bytes
  if user.op in _BESIDE or (user.op == 'dynamic-update-slice' and first):
    return 0
  if inner := _called(user, module):
    parameters = inner.parameters
    numbers = [number for number, name in enumerate(user.operands) if name == source.name]
    return sum(_taken(parameters[n], inner, module) for n in numbers if n < len(parameters))
  return source.bytes


def _written(result: Instruction, fused: Computation, module: HloModule) -> float:
  """The bytes that a fusion writes for a result; a parameter that is passed through is not written."""
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
