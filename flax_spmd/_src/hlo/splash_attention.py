"""Splash attention: the FLOPs of JAX's attention kernels for TPUs, which declare none.

    %splash_mha_fwd_residuals.1 = ... custom-call(%next, %block_mask, %q, %k, %v, ...), custom_call_target="tpu_custom_call"

A kernel computes the scores of those blocks of queries and keys that its mask keeps. The mask is a constant of the
program, with an integer for each block: 0 leaves it out, as most of a causal or a local mask does. The sizes of the blocks are
in the kernel's metadata. Kernels: `jax.experimental.pallas.ops.tpu.splash_attention`.
"""

from __future__ import annotations

import math
import re

from flax_spmd._src.hlo.parser import Computation, HloModule, Instruction
from flax_spmd._src.hlo.trip_counts import THROUGH

_KERNEL = re.compile(r'splash_m[hq]a_(fwd|dq|dkv)')
_COMMENT = re.compile(r'/\*.*?\*/')
_INTEGERS = re.compile(r'[su]\d+\[')
_BLOCKS = {'fwd': ('block_q', 'block_kv'), 'dq': ('block_q_dq', 'block_kv_dq')}
_OF_DKV = ('block_q_dkv', 'block_kv_dkv')
# products with the scores that contract or expand the width of queries and keys, and that of values
_PRODUCTS = {'fwd': (1, 1), 'dq': (2, 1), 'dkv': (2, 2), 'dkv and dq': (3, 2)}


def splash_flops(call: Instruction, inside: Computation, module: HloModule) -> float | None:
  """The FLOPs of a kernel of Splash attention; None for other calls, and if the mask is no constant.

  Args:
    call: a custom call.
    inside: computation that contains it.
    module: module with that computation; its text has large constants.
  """
  kernel = _KERNEL.match(call.name)
  operands = inside.operands(call)
  masks = [one for one in operands[:3] if _INTEGERS.match(one.type)]
  arrays = operands[len(masks) : len(masks) + 3]
  if kernel is None or len(arrays) < 3:
    return None
  queries, keys, values = (one.shapes[0].dims for one in arrays)
  phase = kernel[1]
  if len(masks) < 2:  # a mask that keeps everything
    scores = float(queries[-2] * keys[-2])
  else:
    kept = _kept_blocks(masks[1], inside, module)
    sizes = [_block(call, name) for name in _BLOCKS.get(phase, _OF_DKV)]
    if kept is None or not all(sizes):
      return None
    scores = kept * math.prod(sizes)
  # the gradient of the queries is returned for each block of keys
  has_dq = phase == 'dkv' and any(len(one.dims) > len(queries) for one in call.shapes)
  of_queries, of_values = _PRODUCTS['dkv and dq' if has_dq else phase]
  width = of_queries * queries[-1] + of_values * values[-1]
  return 2.0 * math.prod(queries[:-2]) * scores * width


def _block(call: Instruction, name: str) -> int:
  """The size of a block from the metadata of a kernel, which is JSON in a string of JSON."""
  found = re.search(rf'\\?"{name}\\?": (\d+)', call.rest)
  return int(found[1]) if found else 0


def _kept_blocks(mask: Instruction, inside: Computation, module: HloModule) -> float | None:
  """The number of blocks that a mask keeps of a head, on average; None if it is no constant."""
  constant = _constant(mask, inside, module)
  text = _COMMENT.sub('', constant.inner) if constant else ''
  numbers = re.findall(r'-?\d+', text)
  shape = mask.shapes[0]
  if constant and not constant.shapes[0].dims:  # a mask that is the same for all blocks
    numbers *= shape.size
  if len(numbers) != shape.size:
    return None
  return sum(map(bool, map(int, numbers))) / shape.dims[0]


def _constant(value: Instruction | None, inside: Computation, module: HloModule) -> Instruction | None:
  """The constant that a value is, also if it is an element of the state of loops."""
  while value is not None and value.op in (*THROUGH, 'broadcast'):
    value = next(iter(inside.operands(value)), None)
  if value is None or value.op == 'constant':
    return value
  state = next(iter(inside.operands(value)), None)
  if value.op != 'get-tuple-element' or state is None or state.op != 'parameter':
    return None
  index = int(value.attributes['index'])
  left = inside.operands(inside.result) if inside.result else []
  if index >= len(left) or left[index].attributes.get('index') != str(
    index
  ):  # another mask in the next round
    return None
  for outside in module.computations.values():
    for loop in outside.instructions.values():
      if loop.op == 'while' and loop.computation('body') == inside.name:
        entering = next(iter(outside.operands(loop)), None)
        elements = outside.operands(entering) if entering else []
        return _constant(elements[index], outside, module) if index < len(elements) else None
  return None
