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

from flax_spmd.explore.hlo import Computation, Instruction, Shape

_GEMM = re.compile(r'^__(?:cublas|onednn)\$.*(?:gemm|matmul)|^__cudnn\$.*(?:gemm|matmul)|matmul$', re.I)
_CONV = re.compile(r'^__(?:cudnn|onednn|miopen)\$conv', re.I)
_ATTENTION = re.compile(r'fmha|flash_?attention|dot_product_attention', re.I)
_CONTRACTING = re.compile(r'lhs_contracting_dimensions\\?":\s*\[([^\]]*)\]')
_NO_WORK = re.compile(
  r'^(?:AllocateBuffer|ConcatBitcast|AsyncCollective\w+|Sharding|SPMD\w+|annotate_device_placement'
  r'|MoveTo(?:Host|Device)|Pin|Unpin|CreateToken|ShapeBarrier|LayoutConstraint|xla\.sdy\..*'
  r'|shape_assertion|AssumeGatherIndicesInBound|topk_hint|DebugBarrier|\w*[bB]arrier|\$nop)$'
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
    >>> from flax_spmd.explore.hlo import parse
    >>> main = parse('''
    ... ENTRY %main (x: f32[8,16], y: f32[16,4]) -> f32[8,4] {
    ...   %x = f32[8,16]{1,0} parameter(0)
    ...   %y = f32[16,4]{1,0} parameter(1)
    ...   ROOT %dot = f32[8,4]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    ... }''').main
    >>> flops(main.instructions['dot'], main)
    1024
  """
  if instruction.op not in ('dot', 'convolution', 'ragged-dot', 'custom-call'):
    return 0
  arrays = [operand.shapes[0] for operand in computation.operands(instruction) if operand.shapes]
  if instruction.op == 'custom-call':
    return _call_flops(instruction, arrays)
  if len(arrays) < 2:
    return None
  if instruction.op == 'convolution':
    return _convolution_flops(instruction, arrays[0], arrays[1], instruction.shapes[0])
  return _dot_flops(
    arrays[0], instruction.attributes.get('lhs_contracting_dims', ''), instruction.shapes[0]
  )


def target(instruction: Instruction) -> str:
  """What a custom call calls."""
  return instruction.attributes.get('custom_call_target', '').strip('"')


def moves_nothing(instruction: Instruction) -> bool:
  """Whether a custom call only says something to the compiler, and runs nothing."""
  return instruction.op == 'custom-call' and bool(_NO_WORK.match(target(instruction)))


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
    count *= _meetings(lhs.dims[labels[1].index(label)], result.dims[labels[3].index(label)], window)
  return count


def _windows(text: str, rank: int) -> list[Window]:
  """The window per spatial dimension, from `{size=3x3 pad=1_1x0_0}`."""
  windows: list[dict[str, int]] = [{} for _ in range(rank)]
  for key, values in re.findall(r'(\w+)=([\w\-]+)', text):
    if key in Window._fields:
      for window, value in zip(windows, values.split('x')):
        window[key] = int(value.split('_')[0])
  return [Window(**window) for window in windows]


def _meetings(inputs: int, outputs: int, window: Window) -> int:
  """How many (output, kernel) positions along one dimension lie on an input element.

  That is the number of (o, k) with o * stride + k * rhs_dilate - pad = i * lhs_dilate for an input i.

  Example:
    >>> _meetings(8, 8, Window(size=3, pad=1))
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


def _call_flops(instruction: Instruction, arrays: Sequence[Shape]) -> float | None:
  """Of a library call."""
  name, result = target(instruction), instruction.shapes[0] if instruction.shapes else None
  if _NO_WORK.match(name):
    return 0
  if result is None or len(arrays) < 2:
    return None
  if _CONV.match(name):
    return _cudnn_flops(name, instruction, arrays, result)
  if _ATTENTION.search(name):
    return _attention_flops(name, arrays, result)
  if _GEMM.search(name):
    return _gemm_flops(instruction, arrays[0], result)
  return None


def _gemm_flops(instruction: Instruction, lhs: Shape, result: Shape) -> float | None:
  """Of a matrix product by a library; its configuration says what is contracted."""
  found = _CONTRACTING.search(instruction.attributes.get('backend_config', ''))
  return _dot_flops(lhs, found[1] if found else str(len(lhs.dims) - 1), result) if lhs.dims else None


def _cudnn_flops(
  name: str, instruction: Instruction, arrays: Sequence[Shape], result: Shape
) -> float | None:
  """Of a convolution by cuDNN: the gradients cost what the forward pass costs, whose labels they carry.

  The gradient to the input has the input as its result, that to the kernel has the kernel.
  """
  lhs, rhs = arrays[:2]
  if 'BackwardInput' in name:
    return _convolution_flops(instruction, result, rhs, lhs)
  if 'BackwardFilter' in name:
    return _convolution_flops(instruction, lhs, result, rhs)
  return _convolution_flops(instruction, lhs, rhs, result)


def _attention_flops(name: str, arrays: Sequence[Shape], result: Shape) -> float | None:
  """Of attention by cuDNN: 2 products forward, 5 backward (the first is done again); masks save nothing.

  Queries [batch, length, heads, head], keys [batch, length, heads, head] or both with heads before
  lengths; the two differ in which of the middle dimensions is which, and queries and keys agree in heads.
  """
  query, key = arrays[:2]
  if len(query.dims) != 4 or len(key.dims) != 4:
    return None
  products = 5 if 'backward' in name.lower() else 2
  lengths = (
    key.dims[1] if query.dims[2] % key.dims[2] == 0 and _heads_behind(query, key) else key.dims[2]
  )
  return products * 2 * query.size * lengths


def _heads_behind(query: Shape, key: Shape) -> bool:
  """Whether [batch, length, heads, head] is meant; by cuDNN's calls in JAX it is, heads being the fewer."""
  return key.dims[2] <= key.dims[1] or query.dims[1] != key.dims[1]
