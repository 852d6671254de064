"""FLOPs: the multiplications and additions of matrix products and convolutions.

A multiply-add counts as two, padding and holes of dilation count as nothing, and everything else that a
step computes counts as nothing either: beside the products it is limited by memory, not by arithmetic.
Of a compiler's library calls (cuBLAS, cuDNN) the work follows from shapes, as far as it is known here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from flax_spmd._src.hlo.parser import Computation, Instruction, Shape

_GEMM = re.compile(r'__(?:cublas|onednn)\$.*(?:gemm|matmul)')
_CONVOLUTION = re.compile(r'__(?:cudnn|onednn)\$conv')
_ATTENTION = re.compile(r'__cudnn\$fmha')
_CONTRACTING = re.compile(r'lhs_contracting_dimensions\\?":\s*\[([^\]]*)\]')
_SCORES = re.compile(r'intermediate_tensor_shape\\?":\s*\{.*?dimensions\\?":\s*\[([^\]]*)\]')
_MARKS = re.compile(
  r'AllocateBuffer|ConcatBitcast|AsyncCollective(?:Start|Done)|CreateBuffer|Pin|Unpin'
  r'|Sharding|SPMD(?:FullToShard|ShardToFull)Shape|xla\.sdy\..*|LayoutConstraint'
  r'|annotate_device_placement|MoveToHost|MoveToDevice|AssumeGatherIndicesInBound'
)


class Window(NamedTuple):
  """How a convolution goes along one dimension: as in HLO, `size=3 stride=2 pad=1_1 lhs_dilate=1 ...`."""

  size: int = 1
  stride: int = 1
  pad: int = 0
  lhs_dilate: int = 1
  rhs_dilate: int = 1


def flops(instruction: Instruction, computation: Computation) -> float | None:
  """The FLOPs of one instruction, run once; None if it is a call whose work nobody knows.

  Args:
    instruction: in `computation`. What it calls is not looked into.
    computation: has its operands, whose shapes tell.

  Example:
    >>> from flax_spmd._src.hlo.parser import parse
    >>> main = parse('''
    ... ENTRY %main (x: f32[8,16], y: f32[16,4]) -> f32[8,4] {
    ...   %x = f32[8,16]{1,0} parameter(0)
    ...   %y = f32[16,4]{1,0} parameter(1)
    ...   ROOT %dot = f32[8,4]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    ... }''').main
    >>> flops(main.instructions['dot'], main)
    1024
  """
  op = instruction.op.removesuffix('-start')
  if op not in ('dot', 'ragged-dot', 'convolution', 'custom-call'):
    return 0
  arrays = [operand.shapes[0] for operand in computation.operands(instruction) if operand.shapes]
  if only_marks(instruction):
    return 0
  # What starts something has (operands, result, ...) as its own result.
  results = instruction.shapes[len(arrays) :] if op != instruction.op else instruction.shapes
  if len(arrays) < 2 or not results:
    return None
  if op == 'custom-call':
    return _call_flops(instruction, arrays, results[0])
  if op == 'convolution':
    return _convolution_flops(instruction, arrays[0], arrays[1], results[0])
  return _dot_flops(arrays[0], instruction.attributes.get('lhs_contracting_dims', ''), results[0])


def target(instruction: Instruction) -> str:
  """What a custom call calls."""
  return instruction.attributes.get('custom_call_target', '').strip('"')


def only_marks(instruction: Instruction) -> bool:
  """Whether a custom call only says something to the compiler, and runs nothing."""
  return instruction.op.startswith('custom-call') and bool(_MARKS.fullmatch(target(instruction)))


def _dot_flops(lhs: Shape, contracting: str, result: Shape) -> float:
  """Twice the result's elements, times what is contracted; batch dimensions are in the result."""
  dims = [int(dim) for dim in re.findall(r'\d+', contracting)]
  return 2 * result.size * math.prod(lhs.dims[dim] for dim in dims)


def _convolution_flops(instruction: Instruction, lhs: Shape, rhs: Shape, result: Shape) -> float | None:
  """By the places at which the window meets the input, per dimension.

  Of grouped convolutions the kernel has only a group's input features, so that no group has to be known.
  """
  labels = re.match(r'(\w+)_(\w+)->(\w+)', instruction.attributes.get('dim_labels', ''))
  if not labels:
    return None
  spatial = sorted(label for label in labels[3] if label.isdigit())
  count = 2 * rhs.dims[labels[2].index('i')]
  for label, size in zip(labels[3], result.dims):
    count *= 1 if label.isdigit() else size
  windows = _windows(instruction.attributes.get('window', ''), len(spatial))
  for label, window in zip(spatial, windows):
    count *= meetings(lhs.dims[labels[1].index(label)], result.dims[labels[3].index(label)], window)
  return count


def _windows(text: str, rank: int) -> list[Window]:
  """The window per spatial dimension, from `{size=3x3 pad=1_1x0_0}`."""
  windows: list[dict[str, int]] = [{} for _ in range(rank)]
  for key, values in re.findall(r'(\w+)=([\w\-]+)', text):
    if key in Window._fields:
      for window, value in zip(windows, values.split('x')):
        window[key] = int(value.split('_')[0])
  return [Window(**window) for window in windows]


def meetings(inputs: int, outputs: int, window: Window) -> int:
  """How many (output, kernel) positions along one dimension lie on an input element.

  That is the number of (o, k) with o * stride + k * rhs_dilate - pad = i * lhs_dilate for an input i.

  Example:
    >>> meetings(8, 8, Window(size=3, pad=1))
    22
  """
  kernel = (window.size, window.rhs_dilate)
  output = (outputs, window.stride)
  few, many = sorted((kernel, output))
  last = (inputs - 1) * window.lhs_dilate
  return sum(
    _multiples(many[0], many[1], at * few[1] - window.pad, last, window.lhs_dilate)
    for at in range(few[0])
  )


def _multiples(count: int, step: int, start: int, last: int, of: int) -> int:
  """How many of `start + n * step`, n < count, are multiples of `of` within 0..last."""
  low = max(0, -(start // step))  # the first n whose value is not negative
  high = min(count - 1, (last - start) // step)
  common = math.gcd(step, of)
  if high < low or start % common:
    return 0
  period = of // common
  first = (-start // common) * pow(step // common, -1, period) % period if period > 1 else 0
  return max(0, (high - first) // period - (low - 1 - first) // period)


def _call_flops(call: Instruction, arrays: Sequence[Shape], result: Shape) -> float | None:
  """Of a library call."""
  name = target(call)
  if _CONVOLUTION.match(name):
    return _convolution_call_flops(name, call, arrays, result)
  if _ATTENTION.match(name):
    return _attention_flops(name, call, arrays[0])
  return _gemm_flops(call, arrays[0], result) if _GEMM.match(name) else None


def _gemm_flops(call: Instruction, lhs: Shape, result: Shape) -> float:
  """Of a matrix product by a library; its configuration says what is contracted."""
  found = _CONTRACTING.search(call.attributes.get('backend_config', ''))
  return _dot_flops(lhs, found[1] if found else str(len(lhs.dims) - 1), result)


def _convolution_call_flops(
  name: str, call: Instruction, arrays: Sequence[Shape], result: Shape
) -> float | None:
  """Of a convolution by a library: the gradients cost what the forward pass costs, whose labels they carry.

  The gradient to the input has the input as its result, that to the kernel has the kernel.
  """
  lhs, rhs = arrays[:2]
  if 'BackwardInput' in name:
    return _convolution_flops(call, result, rhs, lhs)
  if 'BackwardFilter' in name:
    return _convolution_flops(call, lhs, result, rhs)
  return _convolution_flops(call, lhs, rhs, result)


def _attention_flops(name: str, call: Instruction, query: Shape) -> float | None:
  """Of attention by cuDNN: 2 products forward and 5 backward, where the scores are computed again.

  The configuration has the scores' shape [batch, heads, length, length]; that a mask makes some of
  them superfluous is not taken off, as nowhere else.
  """
  found = _SCORES.search(call.attributes.get('backend_config', ''))
  if not found:
    return None
  scores = math.prod(int(size) for size in re.findall(r'\d+', found[1]))
  return (5 if 'Backward' in name else 2) * 2 * scores * query.dims[-1]
