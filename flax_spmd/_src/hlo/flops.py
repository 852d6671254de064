"""FLOPs: the multiplications and additions of matrix products and convolutions.

A multiply-add counts as two FLOPs. Padding and dilation holes do not count, and neither do other operations,
which are limited by memory rather than arithmetic. The FLOPs of known library calls (cuBLAS, cuDNN, oneDNN)
follow from their shapes.
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
_CAUSAL = re.compile(r'mask_type\\?":\s*\\?"(?:PADDING_)?CAUSAL')
_WINDOW = re.compile(r'sliding_window_length\\?":\s*(\d+)')
_OF_GROUPS = 'ragged-dot-metadata'  # a kernel of XLA's for TPUs: the first row of each group
_GIVEN_FLOPS = re.compile(r'cost_estimate\\?"\s*:\s*\{[^}]*?flops\\?"\s*:\s*\\?"?(\d+)')
_NEGLIGIBLE = re.compile(r'threefry|rng|TopK|topk|callback|annotate', re.IGNORECASE)
_ANNOTATIONS = re.compile(
  r'AllocateBuffer|ConcatBitcast|AsyncCollective(?:Start|Done)|CreateBuffer|Pin|Unpin'
  r'|Sharding|SPMD(?:FullToShard|ShardToFull)Shape|xla\.sdy\..*|LayoutConstraint'
  r'|annotate_device_placement|SliceId|MoveToHost|MoveToDevice|AssumeGatherIndicesInBound'
)


class Window(NamedTuple):
  """A convolution window along one dimension, as in HLO: `size=3 stride=2 pad=1_1 lhs_dilate=1 ...`."""

  size: int = 1
  stride: int = 1
  pad: int = 0
  lhs_dilate: int = 1
  rhs_dilate: int = 1


def flops(instruction: Instruction, computation: Computation) -> float | None:
  """The FLOPs of one run of an instruction, without called computations; None for an unknown custom call.

  Args:
    instruction: the instruction.
    computation: computation that contains it and its operands.

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
  if is_annotation(instruction) or instruction.name.startswith(_OF_GROUPS):
    return 0
  # The result of a start is a tuple (operands, result, ...).
  results = instruction.shapes[len(arrays) :] if op != instruction.op else instruction.shapes
  if len(arrays) < 2 or not results:
    return None
  if op == 'custom-call':
    return _call_flops(instruction, arrays, results[0])
  if op == 'convolution':
    return _convolution_flops(instruction, arrays[0], arrays[1], results[0])
  return _dot_flops(arrays[0], instruction.attributes.get('lhs_contracting_dims', ''), results[0])


def custom_call_target(instruction: Instruction) -> str:
  """Name of the function that a custom call calls, or ''."""
  return instruction.attributes.get('custom_call_target', '').strip('"')


def is_annotation(instruction: Instruction) -> bool:
  """Whether a custom call is an annotation for the compiler, without any work."""
  if not instruction.op.startswith('custom-call'):
    return False
  return bool(_ANNOTATIONS.fullmatch(custom_call_target(instruction)))


def _dot_flops(lhs: Shape, contracting: str, result: Shape) -> float:
  """Twice the size of the result times the contracted sizes; batch dimensions are part of the result."""
  dims = [int(dim) for dim in re.findall(r'\d+', contracting)]
  return 2 * result.size * math.prod(lhs.dims[dim] for dim in dims)


def _convolution_flops(instruction: Instruction, lhs: Shape, rhs: Shape, result: Shape) -> float | None:
  """The FLOPs of a convolution, from the number of positions per dimension where the window meets the input.

  The kernel of a grouped convolution has the input features of one group only, so the number of groups is
  not needed.
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
  """The window of each spatial dimension, from `{size=3x3 pad=1_1x0_0}`."""
  windows: list[dict[str, int]] = [{} for _ in range(rank)]
  for key, values in re.findall(r'(\w+)=([\w\-]+)', text):
    if key in Window._fields:
      for window, value in zip(windows, values.split('x')):
        window[key] = int(value.split('_')[0])
  return [Window(**window) for window in windows]


def meetings(inputs: int, outputs: int, window: Window) -> int:
  """The number of (output, kernel) positions along one dimension that meet an input element.

  That is the number of pairs (o, k) with o * stride + k * rhs_dilate - pad = i * lhs_dilate for an input i.

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
  """The number of n < count for which `start + n * step` is a multiple of `of` within 0..last."""
  low = max(0, -(start // step))  # the first n whose value is not negative
  high = min(count - 1, (last - start) // step)
  common = math.gcd(step, of)
  if high < low or start % common:
    return 0
  period = of // common
  first = (-start // common) * pow(step // common, -1, period) % period if period > 1 else 0
  return max(0, (high - first) // period - (low - 1 - first) // period)


def _call_flops(call: Instruction, arrays: Sequence[Shape], result: Shape) -> float | None:
  """The FLOPs of a library call, or None if it is unknown."""
  name = custom_call_target(call)
  if _CONVOLUTION.match(name):
    return _convolution_call_flops(name, call, arrays, result)
  if _GEMM.match(name):
    return _gemm_flops(call, arrays[0], result)
  return kernel_flops(f'{name} {call.attributes.get("backend_config", "")}', arrays[0].dims)


def _gemm_flops(call: Instruction, lhs: Shape, result: Shape) -> float:
  """The FLOPs of a library's matrix product, with the contracted dimensions from its configuration."""
  match = _CONTRACTING.search(call.attributes.get('backend_config', ''))
  return _dot_flops(lhs, match[1] if match else str(len(lhs.dims) - 1), result)


def _convolution_call_flops(
  name: str, call: Instruction, arrays: Sequence[Shape], result: Shape
) -> float | None:
  """The FLOPs of a library's convolution.

  A gradient costs as much as the forward pass, and has its labels. The result of the gradient with respect
  to the input has the input's shape; the same holds for the kernel.
  """
  lhs, rhs = arrays[:2]
  if 'BackwardInput' in name:
    return _convolution_flops(call, result, rhs, lhs)
  if 'BackwardFilter' in name:
    return _convolution_flops(call, lhs, result, rhs)
  return _convolution_flops(call, lhs, rhs, result)


def kernel_flops(kernel: str, query: Sequence[int]) -> float | None:
  """The FLOPs of a kernel, or None if they are unknown.

  cuDNN's attention has 2 products forward, and 5 backward, which recomputes the scores. It skips what a causal mask or
  a window leaves out. A kernel for TPUs may have the FLOPs that its author has given it.

  Args:
    kernel: target of a custom call, and its configuration.
    query: shape of the first operand.

  Example:
    >>> kernel_flops('tpu_custom_call {"cost_estimate": {"flops": 8192, "bytes_accessed": 64}}', (8, 16))
    8192.0
  """
  name = kernel.partition(' ')[0]
  if name == 'tpu_custom_call':
    given = _GIVEN_FLOPS.search(kernel)
    return float(given[1]) if given else None
  scores = attention_scores(kernel)
  if scores is None:
    return None
  return (5 if 'Backward' in name else 2) * 2.0 * _computed_scores(kernel, scores) * query[-1]


def _computed_scores(kernel: str, scores: tuple[int, ...]) -> int:
  """The number of scores that cuDNN computes: a query attends to keys up to its own, within the window if there is one."""
  *batch, queries, keys = scores
  if not _CAUSAL.search(kernel):
    return math.prod(scores)
  window = _WINDOW.search(kernel)
  most = min(keys, int(window[1]) if window else 0) or keys
  growing = min(queries, most)
  return math.prod(batch) * (growing * (growing + 1) // 2 + (queries - growing) * most)


def attention_scores(kernel: str) -> tuple[int, ...] | None:
  """The shape (batch, heads, length, length) of the scores of cuDNN's attention; None for other kernels."""
  match = _SCORES.search(kernel) if _ATTENTION.match(kernel) else None
  return tuple(map(int, re.findall(r'\d+', match[1]))) if match else None


def is_negligible_call(name: str) -> bool:
  """Whether a custom call is an annotation, or costs next to nothing, as random bits do."""
  return bool(_ANNOTATIONS.fullmatch(name) or _NEGLIGIBLE.search(name))
