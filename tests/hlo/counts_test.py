"""Counts of compiled steps against theory, for texts of three backends' compilers and for steps compiled by the test."""

import math
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flax_spmd._src.hlo.counts import Counts, count, scaled
from flax_spmd._src.hlo.flops import Window, meetings
from flax_spmd._src.hlo.work import Product

DATA = pathlib.Path(__file__).parent / 'data'
MIB = 2**20


def counted(*lines: str, mesh=None, before: str = '') -> Counts:
  """The counts of an entry computation's lines, on 8 devices."""
  body = '\n'.join(f'  {line}' for line in lines)
  text = f'HloModule m, num_partitions=8\n\n{before}\n\nENTRY %main () -> f32[] {{\n{body}\n}}\n'
  return count(text, mesh or {'data': 2, 'model': 4})


# --- Collectives -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'kind, result, attributes, expected',
  [
    ('all-gather', 'bf16[1024]{0}', 'replica_groups=[2,4]<=[8], use_global_device_ids=true', 512 * 3),
    (
      'reduce-scatter',
      'bf16[64]{0}',
      'replica_groups=[2,4]<=[8], use_global_device_ids=true',
      512 * 3 / 4,
    ),
    (
      'all-reduce',
      'bf16[256]{0}',
      'replica_groups=[2,4]<=[8], use_global_device_ids=true',
      2 * 512 * 3 / 4,
    ),
    ('all-to-all', 'bf16[256]{0}', 'replica_groups=[2,4]<=[8]', 512 * 3 / 4),
    ('collective-broadcast', 'bf16[256]{0}', 'replica_groups=[2,4]<=[8]', 512),
    ('collective-permute', 'bf16[256]{0}', 'source_target_pairs={{0,1},{1,2},{2,3},{3,0}}', 512),
  ],
)
@pytest.mark.parametrize('split', [False, True], ids=['at once', 'start and done'])
def test_wire_of_every_kind(kind, result, attributes, expected, split):
  lines = ['%x = bf16[256]{0} parameter(0)']
  if split:
    lines += [
      f'%s = ((bf16[256]{{0}}), {result}) {kind}-start(%x), channel_id=1, {attributes}',
      f'ROOT %d = {result} {kind}-done(%s)',
    ]
  else:
    lines += [f'ROOT %r = {result} {kind}(%x), channel_id=1, {attributes}']
  (one,) = counted(*lines).collectives
  assert (one.kind, one.axes, one.group, one.bytes, one.times) == (kind, ('model',), 4, 512, 1)
  assert (one.wire, one.dtype) == (expected, 'bf16')


def test_ragged_all_to_all_sends_its_first_operand():
  (one,) = counted(
    '%x = f32[64]{0} parameter(0)',
    '%out = f32[64]{0} parameter(1)',
    '%sizes = s32[4]{0} parameter(2)',
    'ROOT %r = f32[64]{0} ragged-all-to-all(%x, %out, %sizes, %sizes, %sizes, /*index=5*/%sizes), channel_id=1,'
    ' replica_groups={{0,1,2,3},{4,5,6,7}}',
  ).collectives
  assert (one.kind, one.bytes, one.wire) == ('ragged-all-to-all', 256, 192)


def test_wrapped_in_an_asynchronous_computation():
  wrapped = '%wrapped (p: f32[8]) -> f32[16] {\n  %p = f32[8]{0} parameter(0)\n  ROOT %g = f32[16]{0} all-gather(%p),'
  wrapped += (
    ' channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}, use_global_device_ids=true\n}'
  )
  counts = counted(
    '%x = f32[8]{0} parameter(0)',
    '%s = ((f32[8]{0}), f32[16]{0}, u32[]) async-start(%x), calls=%wrapped',
    '%u = ((f32[8]{0}), f32[16]{0}, u32[]) async-update(%s), calls=%wrapped',
    'ROOT %d = f32[16]{0} async-done(%u), calls=%wrapped',
    before=wrapped,
  )
  assert counts.by_axis() == {('data',): 32}
  assert counts.hbm_bytes == 32 + 64


def test_combined_and_sub_byte():
  (one,) = counted(
    '%a = s4[64]{0} parameter(0)',
    '%b = f8e4m3fn[16]{0:T(256)} parameter(1)',
    'ROOT %r = (s4[512]{0}, f8e4m3fn[128]{0:T(256)}) all-gather(%a, %b), channel_id=1, replica_groups={},'
    ' dimensions={0}, use_global_device_ids=true',
  ).collectives
  assert (one.bytes, one.wire, one.dtype, one.axes) == (48, 48 * 7, 's4', ('data', 'model'))


def test_groups_of_one_device_are_not_counted():
  line = '%x = f32[8]{0} parameter(0)'
  for groups in ('{{0},{1},{2},{3},{4},{5},{6},{7}}', '[8,1]<=[8]', "mesh['a'=1,'b'=8] {'a'}"):
    reduced = f'ROOT %r = f32[8]{{0}} all-reduce(%x), channel_id=1, replica_groups={groups}'
    assert counted(line, f'{reduced}, use_global_device_ids=true, to_apply=%add').collectives == ()
  kept = 'ROOT %r = f32[8]{0} collective-permute(%x), channel_id=1, source_target_pairs={{0,0},{1,1}}'
  assert counted(line, kept).collectives == ()


def test_one_replica_over_all_partitions():
  (one,) = counted(
    '%x = f32[8]{0} parameter(0)',
    'ROOT %r = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups={{0}}, to_apply=%add',
  ).collectives
  assert (one.group, one.axes) == (8, ('data', 'model'))


def test_a_permute_as_send_and_receive():
  pairs = '_xla_send_recv_source_target_pairs={{0,1},{1,2},{2,3},{3,0}}'
  (one,) = counted(
    '%x = f32[8]{0} parameter(0)',
    '%t = token[] after-all()',
    f'%s = (f32[8]{{0}}, u32[], token[]) send(%x, %t), channel_id=1, frontend_attributes={{{pairs},a="b"}}',
    '%h = (f32[8]{0}, u32[], token[]) send(%x, %t), channel_id=2, is_host_transfer=true',
    'ROOT %d = token[] send-done(%s), channel_id=1',
  ).collectives
  assert (one.kind, one.axes, one.wire) == ('collective-permute', ('model',), 32)


@pytest.mark.parametrize(
  'text, kind, axes, group, wire, stride',
  [
    ('ALL_REDUCE {{0,4},{1,5},{2,6},{3,7}}', 'all-reduce', ('data',), 2, 32, 1),
    ('ALL_GATHER {{0,4},{1,5},{2,6},{3,7}}', 'all-gather', ('data',), 2, 32, 1),
    ('REDUCE_SCATTER {{0,2},{1,3},{4,6},{5,7}}', 'reduce-scatter', ('model[2/4]',), 2, 16, 2),
    ('ALL_TO_ALL {{0,4},{1,5},{2,6},{3,7}}', 'all-to-all', ('data',), 2, 16, 1),
    ('ONE_TO_ONE {{0,4},{4,0}}', 'collective-permute', ('data',), 2, 32, 1),
  ],
)
def test_collectives_between_slices_of_tpus(text, kind, axes, group, wire, stride):
  type_, target = text.split()
  attributes = f'_xla_megascale_target={target},_xla_megascale_transfer_type="{type_}",a="b"'
  counts = counted(
    '%x = f32[8]{0} parameter(0)',
    '%y = f32[8]{0} negate(%x), metadata={op_name="jit(step)/dot_general"}',
    '%b = f32[8]{0} bitcast(%y)',
    '%t = token[] after-all()',
    f'%s = (f32[8]{{0}}, u32[], token[]) send(%b, %t), channel_id=1, is_host_transfer=true, frontend_attributes={{{attributes}}}',
    f'%r = (f32[8]{{0}}, u32[], token[]) recv(%t), channel_id=2, is_host_transfer=true, frontend_attributes={{{attributes}}}',
    '%d = token[] send-done(%s), channel_id=1, is_host_transfer=true',
    '%id = u32[] custom-call(), custom_call_target="SliceId"',
    'ROOT %e = (f32[8]{0}, token[]) recv-done(%r), channel_id=2, is_host_transfer=true',
  )
  (one,) = counts.collectives
  assert (one.kind, one.axes, one.group, one.bytes, one.wire) == (kind, axes, group, 32, wire)
  assert (one.dtype, one.op, one.stride) == ('f32', 'jit(step)/dot_general', stride)
  assert counts.opaque == ()


def test_tpu_asynchronous_fusions_count_once_and_slices_of_sums_are_reduce_scatters():
  counts = count((DATA / 'tpu_async.hlo').read_text(), {'data': 2, 'model': 4})
  gather, scatter = sorted(counts.collectives, key=lambda one: one.kind)
  assert (gather.kind, gather.axes, gather.group, gather.wire) == (
    'all-gather',
    ('data',),
    2,
    2 * 64 * 256 * 2,
  )
  operands = (512 * 3 * 2 * 64 + 2 * 64 * 512) * 2
  assert (scatter.kind, scatter.axes, scatter.bytes, scatter.wire) == (
    *('reduce-scatter', ('data',), operands, operands / 2),
  )
  assert counts.opaque == ()
  assert counts.hbm_bytes < 100  # everything stays on the chip


# --- Loops and branches ------------------------------------------------------------------------------------

TPU_LOOPS = """
HloModule jit_step, is_scheduled=true, num_partitions=8

%inner_body (wide.param.12: (bf16[1,64,2048], u32[])) -> (bf16[1,64,2048], u32[]) {
  %wide.param.12 = (bf16[1,64,2048]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:T(128)}) parameter(0)
  %constant.763..sunk2 = u32[]{:T(128)} constant(2)
  %get-tuple-element.1014 = bf16[1,64,2048]{2,1,0:T(8,128)(2,1)S(1)} get-tuple-element(%wide.param.12), index=0
  %start.20 = (bf16[1,64,2048]{2,1,0:T(8,128)(2,1)S(1)}, bf16[1,64,2048]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%get-tuple-element.1014), channel_id=3, source_target_pairs={{0,7},{1,0},{2,1},{3,2},{4,3},{5,4},{6,5},{7,6}}, frontend_attributes={is_spmd_generated="true"}, metadata={op_name="jit(step)/jvp()/while/body/dot_general" stack_frame_id=13}
  %get-tuple-element.1017 = u32[]{:T(128)} get-tuple-element(%wide.param.12), index=1
  %add.259 = u32[]{:T(128)} add(%get-tuple-element.1017, %constant.763..sunk2)
  %done.20 = bf16[1,64,2048]{2,1,0:T(8,128)(2,1)S(1)} collective-permute-done(%start.20)
  ROOT %tuple.180 = (bf16[1,64,2048]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:T(128)}) tuple(%done.20, %add.259)
}

%inner_condition (wide.param.19: (bf16[1,64,2048], u32[])) -> pred[] {
  %constant.746 = u32[]{:T(128)} constant(4), metadata={op_name="jit(step)/jvp()/while/body/dot_general" stack_frame_id=13}
  %wide.param.19 = (bf16[1,64,2048]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:T(128)}) parameter(0)
  %get-tuple-element.630 = u32[]{:T(128)} get-tuple-element(%wide.param.19), index=1
  ROOT %compare.26 = pred[]{:T(512)} compare(%get-tuple-element.630, %constant.746), direction=LT
}

%outer_body (wide.param.0: (s32[], bf16[1,64,2048], u32[])) -> (s32[], bf16[1,64,2048], u32[]) {
  %wide.param.0 = (s32[]{:T(128)}, bf16[1,64,2048]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:T(128)}) parameter(0)
  %constant.85.clone.1..sunk = s32[]{:T(128)} constant(1)
  %get-tuple-element.1085 = s32[]{:T(128)} get-tuple-element(%wide.param.0), index=0
  %copy.107 = s32[]{:T(128)S(6)} copy(%get-tuple-element.1085)
  %add.219 = s32[]{:T(128)} add(%copy.107, %constant.85.clone.1..sunk)
  %get-tuple-element.7 = bf16[1,64,2048]{2,1,0:T(8,128)(2,1)S(1)} get-tuple-element(%wide.param.0), index=1
  %get-tuple-element.8 = u32[]{:T(128)} get-tuple-element(%wide.param.0), index=2
  %copy.140 = u32[]{:T(128)} copy(%get-tuple-element.8)
  %tuple.178 = (bf16[1,64,2048]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:T(128)}) tuple(%get-tuple-element.7, %copy.140)
  %while.60 = (bf16[1,64,2048]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:T(128)}) while(%tuple.178), condition=%inner_condition, body=%inner_body
  %get-tuple-element.9 = bf16[1,64,2048]{2,1,0:T(8,128)(2,1)S(1)} get-tuple-element(%while.60), index=0
  ROOT %tuple.186 = (s32[]{:T(128)}, bf16[1,64,2048]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:T(128)}) tuple(%add.219, %get-tuple-element.9, %get-tuple-element.8)
}

%outer_condition (wide.param.5: (s32[], bf16[1,64,2048], u32[])) -> pred[] {
  %constant.88.clone.1 = s32[]{:T(128)} constant(4)
  %wide.param.5 = (s32[]{:T(128)}, bf16[1,64,2048]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:T(128)}) parameter(0)
  %get-tuple-element.651 = s32[]{:T(128)} get-tuple-element(%wide.param.5), index=0
  ROOT %lt.10 = pred[]{:T(512)} compare(%get-tuple-element.651, %constant.88.clone.1), direction=LT
}

ENTRY %main (x: bf16[1,64,2048]) -> (s32[], bf16[1,64,2048], u32[]) {
  %x = bf16[1,64,2048]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  %constant.1 = s32[]{:T(128)} constant(0)
  %constant.2 = u32[]{:T(128)} constant(0)
  %tuple.184 = (s32[]{:T(128)}, bf16[1,64,2048]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:T(128)}) tuple(%constant.1, %x, %constant.2)
  ROOT %while.54 = (s32[]{:T(128)}, bf16[1,64,2048]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:T(128)}) while(%tuple.184), condition=%outer_condition, body=%outer_body
}
"""


def test_tpu_loops_within_loops_by_their_conditions():
  """The inner counter goes in twos, and starts at what the outer loop hands on."""
  counts = count(TPU_LOOPS, {'data': 8})
  assert [one[:3] for one in counts.loops] == [
    ('while.54', 4, 'condition'),
    ('while.60', 2, 'condition'),
  ]
  (one,) = counts.collectives
  assert (one.times, one.wire, one.axes, one.group) == (8, 8 * 64 * 2048 * 2, ('data',), 8)
  assert one.op == 'jit(step)/jvp()/while/body/dot_general'


H100_LOOP = """
%body (p: (s32[], bf16[64,2048], bf16[1024,512])) -> (s32[], bf16[64,2048], bf16[1024,512]) {
  %p = (s32[], bf16[64,2048]{1,0}, bf16[1024,512]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %w = bf16[64,2048]{1,0} get-tuple-element(%p), index=1
  %h = bf16[1024,512]{1,0} get-tuple-element(%p), index=2
  %all-gather-start = ((bf16[64,2048]{1,0}, bf16[64,2048]{1,0}), (bf16[512,2048]{1,0}, bf16[512,2048]{1,0})) all-gather-start(%w, %w), channel_id=2, replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={0}, use_global_device_ids=true, frontend_attributes={is_spmd_generated="true",trivially_pipelineable=""}, metadata={op_name="jit(step)/jvp()/while/body/convert_element_type" scheduling_name="all-gather-start" source_file="/home/me/model.py" source_line=31}, backend_config={"operation_queue_id":"0"}
  %all-gather-done = (bf16[512,2048]{1,0}, bf16[512,2048]{1,0}) all-gather-done(%all-gather-start)
  %wi = bf16[512,2048]{1,0} get-tuple-element(%all-gather-done), index=0
  %custom-call.2 = (bf16[1024,2048]{1,0}, s8[4194304]{0}) custom-call(%h, %wi), custom_call_target="__cublas$lt$matmul", backend_config={"operation_queue_id":"0","gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]},"epilogue":"DEFAULT"}}
  %a = bf16[1024,2048]{1,0} get-tuple-element(%custom-call.2), index=0
  %gemm = bf16[512,2048]{1,0} fusion(%h, %a), kind=kCustom, calls=%fused, backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
  %reduce-scatter-start = ((bf16[512,2048]{1,0}, bf16[512,2048]{1,0}), (bf16[64,2048]{1,0}, bf16[64,2048]{1,0})) reduce-scatter-start(%gemm, %gemm), channel_id=8, replica_groups=mesh['axis_0'=8] {'axis_0'}, use_global_device_ids=true, dimensions={0}, to_apply=%add.clone
  %reduce-scatter-done = (bf16[64,2048]{1,0}, bf16[64,2048]{1,0}) reduce-scatter-done(%reduce-scatter-start)
  %g = bf16[64,2048]{1,0} get-tuple-element(%reduce-scatter-done), index=0
  ROOT %t = (s32[], bf16[64,2048]{1,0}, bf16[1024,512]{1,0}) tuple(%i, %g, %h)
}

%fused (param_0.4: bf16[1024,512], param_1.4: bf16[1024,2048]) -> bf16[512,2048] {
  %param_0.4 = bf16[1024,512]{1,0} parameter(0)
  %param_1.4 = bf16[1024,2048]{1,0} parameter(1)
  ROOT %dot.24 = bf16[512,2048]{1,0} dot(%param_0.4, %param_1.4), lhs_contracting_dims={0}, rhs_contracting_dims={0}
}
"""


def test_h100_fsdp_bytes_and_flops_equal_theory():
  """Two weights of 512 x 2048 in bf16 are gathered and their gradients scattered, in 4 layers over 8 devices."""
  counts = counted(
    '%s = (s32[], bf16[64,2048]{1,0}, bf16[1024,512]{1,0}) parameter(0)',
    'ROOT %while.30 = (s32[], bf16[64,2048]{1,0}, bf16[1024,512]{1,0}) while(%s), condition=%c, body=%body,'
    ' metadata={op_name="w"}, backend_config={"known_trip_count":{"n":"4"},"known_init_step":{"init":"0"}}',
    before=H100_LOOP,
    mesh={'data': 8},
  )
  weight = 512 * 2048 * 2
  assert counts.by_kind() == {
    'all-gather': 4 * 2 * weight * 7 / 8,
    'reduce-scatter': 4 * 2 * weight * 7 / 8,
  }
  assert {one.source for one in counts.collectives} == {'model.py:31', ''}
  assert counts.flops == 4 * 2 * (2 * 1024 * 512 * 2048)
  assert [one[:3] for one in counts.loops] == [('while.30', 4, 'known')]
  moved = {  # the same array given twice is read once
    'gather': weight / 8 + 2 * weight,
    'scatter': weight + 2 * weight / 8,
    'products': 2 * (2**20 + weight + 2**22),
  }
  assert counts.hbm_bytes == 4 * sum(moved.values())
  assert counts.opaque == ()


def test_a_loop_of_unknown_length_counts_once():
  before = '%b (p: (f32[4])) -> (f32[4]) {\n  %p = (f32[4]{0}) parameter(0)\n  %x = f32[4]{0} get-tuple-element(%p),'
  before += ' index=0\n  %y = f32[4]{0} negate(%x)\n  ROOT %t = (f32[4]{0}) tuple(%y)\n}\n\n%c (q: (f32[4])) -> pred[]'
  before += ' {\n  %q = (f32[4]{0}) parameter(0)\n  ROOT %no = pred[] constant(false)\n}'
  counts = counted(
    '%s = (f32[4]{0}) parameter(0)',
    'ROOT %w = (f32[4]{0}) while(%s), condition=%c, body=%b',
    before=before,
  )
  assert [one[:3] for one in counts.loops] == [('w', 1, 'unknown')]
  assert counts.hbm_bytes == 32


@pytest.mark.parametrize(
  'branches',
  ['branch_computations={%small, %large}', 'true_computation=%large, false_computation=%small'],
)
def test_the_larger_branch_counts(branches):
  before = '%small (x: f32[4,4]) -> f32[4,4] {\n  ROOT %x = f32[4,4]{1,0} parameter(0)\n}\n\n'
  before += (
    '%large (y: f32[4,4]) -> f32[4,4] {\n  %y = f32[4,4]{1,0} parameter(0)\n  ROOT %d = f32[4,4]{1,0}'
  )
  before += ' dot(%y, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n}'
  counts = counted(
    '%i = s32[] parameter(0)',
    '%a = f32[4,4]{1,0} parameter(1)',
    f'ROOT %c = f32[4,4]{{1,0}} conditional(%i, %a, %a), {branches}',
    before=before,
  )
  assert (counts.flops, counts.hbm_bytes) == (128, 128)


def test_products_with_their_traffic():
  fused = '%fused (p: f32[4,8], q: f32[8,4]) -> f32[4,4] {\n  %p = f32[4,8]{1,0} parameter(0)\n'
  fused += (
    '  %q = f32[8,4]{1,0} parameter(1)\n  %d = f32[4,4]{1,0} dot(%p, %q), lhs_contracting_dims={1}, '
  )
  fused += 'rhs_contracting_dims={0}\n  ROOT %n = f32[4,4]{1,0} negate(%d)\n}'
  body = (
    '%body (s: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {\n  %s = (s32[], f32[4,4]{1,0}) parameter(0)\n'
  )
  body += (
    '  %i = s32[] get-tuple-element(%s), index=0\n  %x = f32[4,4]{1,0} get-tuple-element(%s), index=1\n'
  )
  body += '  %one = s32[] constant(1)\n  %next = s32[] add(%i, %one)\n  %y = f32[4,4]{1,0} dot(%x, %x), '
  body += 'lhs_contracting_dims={1}, rhs_contracting_dims={0}\n'
  body += '  ROOT %r = (s32[], f32[4,4]{1,0}) tuple(%next, %y)\n}'
  condition = (
    '%condition (t: (s32[], f32[4,4])) -> pred[] {\n  %t = (s32[], f32[4,4]{1,0}) parameter(0)\n'
  )
  condition += '  %j = s32[] get-tuple-element(%t), index=0\n  %end = s32[] constant(5)\n'
  condition += '  ROOT %less = pred[] compare(%j, %end), direction=LT\n}'
  counts = counted(
    '%a = f32[4,8]{1,0} parameter(0)',
    '%b = f32[8,4]{1,0} parameter(1)',
    '%f = f32[4,4]{1,0} fusion(%a, %b), kind=kOutput, calls=%fused',
    '%zero = s32[] constant(0)',
    '%begin = (s32[], f32[4,4]{1,0}) tuple(%zero, %f)',
    '%w = (s32[], f32[4,4]{1,0}) while(%begin), condition=%condition, body=%body',
    'ROOT %g = f32[4,4]{1,0} get-tuple-element(%w), index=1',
    before='\n\n'.join((fused, body, condition)),
  )
  assert counts.products == (
    Product(2 * 4 * 4 * 8, 4 * (32 + 32 + 16), 1),
    Product(2 * 4 * 4 * 4, 4 * (16 + 16), 5),
  )
  assert counts.flops == 2 * 4 * 4 * (8 + 5 * 4)
  halved = scaled(counts, flops=0.5, hbm_bytes=3.0, runs=2.0)
  assert halved.products[0] == (2 * 4 * 4 * 4, 3 * 4 * (32 + 32 + 16), 2)
  assert (halved.flops, halved.hbm_bytes) == (counts.flops, 6 * counts.hbm_bytes)
  assert halved.kernels == 2 * counts.kernels


# --- FLOPs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'target, operands, result, attributes, expected',
  [
    ('__cublas$gemm', ('4,8,16', '4,16,32'), '4,8,32', '["2"]', 2 * 4 * 8 * 16 * 32),
    ('__cublas$lt$matmul$f8', ('16,8', '16,32'), '8,32', '["0"]', 2 * 8 * 16 * 32),
    ('__onednn$matmul', ('8,16', '16,32'), '8,32', None, 2 * 8 * 16 * 32),
  ],
)
def test_library_products(target, operands, result, attributes, expected):
  config = (
    f', backend_config={{"dot":{{"lhs_contracting_dimensions":{attributes}}}}}' if attributes else ''
  )
  counts = counted(
    f'%a = f32[{operands[0]}] parameter(0)',
    f'%b = f32[{operands[1]}] parameter(1)',
    f'ROOT %c = (f32[{result}], s8[64]{{0}}) custom-call(%a, %b), custom_call_target="{target}"{config}',
  )
  assert (counts.flops, counts.opaque) == (expected, ())


@pytest.mark.parametrize(
  'target, operands, result',
  [
    ('Forward', ('2,69,69,3', '64,7,7,3'), '2,32,32,64'),
    ('BackwardFilter', ('2,69,69,3', '2,32,32,64'), '64,7,7,3'),
    ('BackwardInput', ('2,32,32,64', '64,7,7,3'), '2,69,69,3'),
  ],
)
def test_cudnn_convolutions(target, operands, result):
  counts = counted(
    f'%a = f32[{operands[0]}] parameter(0)',
    f'%b = f32[{operands[1]}] parameter(1)',
    f'ROOT %c = (f32[{result}]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%a, %b), window={{size=7x7 stride=2x2}},'
    f' dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv{target}"',
  )
  assert counts.flops == 2 * (2 * 32 * 32 * 64) * (7 * 7 * 3)


@pytest.mark.parametrize('target, products', [('fmhaSoftmax', 2), ('fmhaScaleBiasSoftmaxBackward', 5)])
def test_cudnn_attention(target, products):
  counts = counted(
    '%q = bf16[2,256,8,64]{3,2,1,0} parameter(0)',
    '%k = bf16[2,512,4,64]{3,2,1,0} parameter(1)',
    f'ROOT %o = (bf16[2,256,8,64]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%q, %k, %k), custom_call_target="__cudnn${target}",'
    ' backend_config={"cudnn_fmha_backend_config":{"algorithm":{"algo_id":"0"},"intermediate_tensor_shape":'
    '{"element_type":"BF16","dimensions":["2","8","256","512"],"tuple_shapes":[]}}}',
  )
  assert counts.flops == products * 2 * 2 * 8 * 256 * 512 * 64


@pytest.mark.parametrize(
  'mask, window, queries, keys',
  [
    ('NO_MASK', 0, 256, 512),
    ('PADDING', 0, 64, 64),
    ('CAUSAL', 0, 256, 512),
    ('PADDING_CAUSAL', 0, 512, 256),
    ('CAUSAL', 16, 256, 512),
    ('CAUSAL', 900, 64, 64),
  ],
)
def test_cudnn_skips_what_a_causal_mask_leaves_out(mask, window, queries, keys):
  counts = counted(
    f'%q = bf16[2,{queries},8,64]{{3,2,1,0}} parameter(0)',
    f'%k = bf16[2,{keys},4,64]{{3,2,1,0}} parameter(1)',
    f'ROOT %o = bf16[2,{queries},8,64]{{3,2,1,0}} custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmax",'
    ' backend_config={"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"dimensions":'
    f'["2","8","{queries}","{keys}"]}},"mask_type":"{mask}","sliding_window_length":{window}}}}}',
  )
  query, key = np.arange(queries)[:, None], np.arange(keys)
  attended = (key <= query) & (query - key < (window or queries)) | ('CAUSAL' not in mask)
  assert counts.flops == 2 * 2 * 2 * 8 * 64 * attended.sum()


def test_unknown_calls_are_listed():
  counts = counted(
    '%x = f32[8]{0:T(128)} parameter(0)',
    '%a = f32[8]{0:T(128)} custom-call(), custom_call_target="AllocateBuffer"',
    '%y = f32[8]{0:T(128)} custom-call(%x), custom_call_target="tpu_custom_call"',
    'ROOT %z = f32[8]{0:T(128)} custom-call(%y), custom_call_target="tpu_custom_call"',
  )
  assert counts.opaque == (('tpu_custom_call', 2),)
  assert (counts.flops, counts.hbm_bytes) == (0, 128)


@pytest.mark.parametrize(
  'lhs, rhs, result, window, labels, expected',
  [
    # TPUs have batch dimensions as holes: of 8 x 2 products of matrices, each is taken once.
    ('8,2,256,64', '8,2,256,64', '8,2,256,256', 'size=8x2 stride=7x1 lhs_dilate=8x2', '01bf_01oi->01bf', 16 * 256**2 * 64),
    ('8,128,2,64', '2,64,2048,1', '8,128,2048,1', 'size=2x1', '1b0f_0io1->1bf0', 8 * 128 * 2 * 64 * 2048),
    # A head axis that is a window over a padded one, in reverse.
    ('512,3,2,64,1', '8,256,512,1,1', '3,2,64,8,256', 'size=1x1x8 pad=0_0x0_0x7_7 rhs_reversal=0x0x1', 'f01b2_2oi01->01b2f', 3 * 2 * 64 * 8 * 256 * 512),
    ('128,512', '512,2048', '128,2048', '', 'bf_io->bf', 128 * 512 * 2048),
  ],
)  # fmt: skip
def test_products_as_tpus_write_them(lhs, rhs, result, window, labels, expected):
  counts = counted(
    f'%a = bf16[{lhs}] parameter(0)',
    f'%b = bf16[{rhs}] parameter(1)',
    f'ROOT %c = bf16[{result}] convolution(%a, %b), window={{{window}}}, dim_labels={labels}',
  )
  assert counts.flops == 2 * expected


small = st.integers(1, 6)


@given(st.integers(1, 12), st.integers(1, 12), small, small, st.integers(-6, 6), small, small)
def test_meetings_of_windows(inputs, outputs, size, stride, pad, lhs_dilate, rhs_dilate):
  window = Window(size, stride, pad, lhs_dilate, rhs_dilate)
  positions = [o * stride + k * rhs_dilate - pad for o in range(outputs) for k in range(size)]
  expected = sum(
    position % lhs_dilate == 0 and 0 <= position < (inputs - 1) * lhs_dilate + 1
    for position in positions
  )
  assert meetings(inputs, outputs, window) == expected


# --- HBM ---------------------------------------------------------------------------------------------------

FUSED = """
%fused (layers: f32[32,8,4], i: s32[], stack: f32[32,8,4]) -> f32[32,8,4] {
  %layers = f32[32,8,4]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %stack = f32[32,8,4]{2,1,0} parameter(2)
  %zero = s32[] constant(0)
  %one = f32[1,8,4]{2,1,0} dynamic-slice(%layers, %i, %zero, %zero), dynamic_slice_sizes={1,8,4}
  %two = f32[1,8,4]{2,1,0} negate(%one)
  ROOT %three = f32[32,8,4]{2,1,0} dynamic-update-slice(%stack, %two, %i, %zero, %zero)
}
"""


@pytest.mark.parametrize('op', ['fusion', 'fusion-start'])
def test_a_fusion_reads_one_layer_and_writes_in_place(op):
  lines = [
    '%layers = f32[32,8,4]{2,1,0} parameter(0)',
    '%i = s32[] parameter(1)',
    '%stack = f32[32,8,4]{2,1,0} parameter(2)',
    f'%f = f32[32,8,4]{{2,1,0}} {op}(%layers, %i, %stack), kind=kLoop, calls=%fused',
  ]
  lines += ['ROOT %d = f32[32,8,4]{2,1,0} fusion-done(%f)'] if op == 'fusion-start' else []
  layer, index = 128, 4
  assert counted(*lines, before=FUSED).hbm_bytes == 2 * layer + index


@pytest.mark.parametrize(
  'line, expected',
  [
    ('%r = f32[4]{0} add(%x, %x)', 32),
    ('%r = f32[4]{0} bitcast(%x)', 0),
    ('%r = f32[2]{0} slice(%x), slice={[0:2]}', 16),
    ('%r = (f32[4]{0:T(128)S(1)}, f32[4]{0}, u32[]) copy-start(%x)', 16),
    ('%r = f32[4]{0:T(128)S(1)} copy(%x)', 16),
    ('%r = f32[4]{0:T(128)} copy-done(%y)', 16),
    ('%r = f32[4]{0:S(5)} copy(%x)', 16),
    ('%r = f32[4]{0} dynamic-update-slice(%x, %small, %i)', 4 + 4 + 4),
  ],
)
def test_traffic(line, expected):
  counts = counted(
    '%x = f32[4]{0:T(128)} parameter(0)',
    '%small = f32[1]{0} parameter(1)',
    '%i = s32[] parameter(2)',
    line,
  )
  assert counts.hbm_bytes == expected


# --- Compiled by the test ----------------------------------------------------------------------------------

LAYERS, WIDTH, HIDDEN, BATCH, LENGTH = 4, 64, 256, 16, 32


def mesh_of(**axes: int):
  return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def train_step(mesh, up, down, batch, hidden, remat=False, scanned=True):
  """The compiled text of a gradient step of a residual MLP, and the step's mesh as sizes."""

  def placed(*names):
    return NamedSharding(mesh, PartitionSpec(*names))

  def block(h, weights):
    wi, wo = weights
    a = jax.lax.with_sharding_constraint(jax.nn.relu(h @ wi), placed(*hidden))
    return jax.lax.with_sharding_constraint(h + a @ wo, placed(*batch)), None

  def loss(params, h):
    layer = jax.checkpoint(block) if remat else block
    if scanned:
      return (jax.lax.scan(layer, h, params)[0] ** 2).mean()
    for number in range(LAYERS):
      h, _ = layer(h, jax.tree.map(lambda stacked, at=number: stacked[at], params))
    return (h**2).mean()

  def step(params, h):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, h))

  places = placed(*up), placed(*down)
  params = (
    jax.ShapeDtypeStruct((LAYERS, WIDTH, HIDDEN), jnp.float32, sharding=places[0]),
    jax.ShapeDtypeStruct((LAYERS, HIDDEN, WIDTH), jnp.float32, sharding=places[1]),
  )
  h = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32, sharding=placed(*batch))
  return jax.jit(step, out_shardings=places).lower(params, h).compile().as_text(), dict(mesh.shape)


PRODUCT = 2 * BATCH * LENGTH * WIDTH * HIDDEN  # one of a layer's two, forward
WEIGHT = WIDTH * HIDDEN * 4

LAYOUTS = {
  'data': ({'data': 8}, (), (), ('data',), ('data',)),
  'fsdp': ({'data': 8}, (None, 'data'), (None, None, 'data'), ('data',), ('data',)),
  'tensor': ({'model': 8}, (None, None, 'model'), (None, 'model'), (), (None, None, 'model')),
  'both': ({'data': 2, 'model': 4}, (None, 'data', 'model'), (None, 'model', 'data'), ('data',), ('data', None, 'model')),
}  # fmt: skip


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('remat', [False, True], ids=['saved', 'remat'])
def test_flops_of_a_step_equal_theory(layout, remat):
  axes, *places = LAYOUTS[layout]
  counts = count(*train_step(mesh_of(**axes), *places, remat=remat))
  # Forward 2 products per layer, backward 4; with remat the first one again.
  number = LAYERS * (7 if remat else 6)
  assert counts.flops == number * PRODUCT / 8
  assert {one.flops for one in counts.products} == {PRODUCT / 8}
  assert sum(one.runs for one in counts.products) == number
  assert 0 < sum(one.runs * one.hbm_bytes for one in counts.products) < counts.hbm_bytes
  assert number <= counts.kernels
  assert [(one.trips, one.how) for one in counts.loops] == [(LAYERS, 'known')] * 2
  assert counts.opaque == ()


def test_unrolled_layers_omit_the_first_gradient():
  axes, *places = LAYOUTS['fsdp']
  counts = count(*train_step(mesh_of(**axes), *places, scanned=False))
  assert counts.flops == (LAYERS * 6 - 1) * PRODUCT / 8  # the gradient of the input is unused
  assert counts.loops == ()


def test_fsdp_gathers_weights_and_sums_gradients():
  axes, *places = LAYOUTS['fsdp']
  counts = count(*train_step(mesh_of(**axes), *places))
  kinds = counts.by_kind()
  assert kinds['all-gather'] == LAYERS * 2 * 2 * WEIGHT * 7 / 8  # forward and backward
  assert kinds['all-reduce'] == LAYERS * 2 * 2 * WEIGHT * 7 / 8  # the CPU compiler has no reduce-scatter
  assert set(counts.by_axis()) == {('data',)}
  assert {one.source.partition(':')[0] for one in counts.collectives} == {'counts_test.py'}


def test_tensor_parallel_sums_activations():
  axes, *places = LAYOUTS['tensor']
  counts = count(*train_step(mesh_of(**axes), *places))
  activations = BATCH * LENGTH * WIDTH * 4
  assert counts.by_axis() == {('model',): LAYERS * 2 * 2 * activations * 7 / 8}


def test_two_axes_are_distinguished():
  axes, *places = LAYOUTS['both']
  by_axis = count(*train_step(mesh_of(**axes), *places)).by_axis()
  activations = BATCH // 2 * LENGTH * WIDTH * 4
  assert by_axis['model',] == LAYERS * 2 * 2 * activations * 3 / 4
  gathers, sums = 2 * 2 * (WEIGHT / 8), 2 * 2 * (WEIGHT / 4) / 2
  assert by_axis['data',] == LAYERS * (gathers + sums)


def test_everything_in_a_shard_map():
  mesh = mesh_of(data=2, model=4)
  both = PartitionSpec(('data', 'model'))

  def inside(x):
    def body(_, y):
      return jnp.tanh(jax.lax.ppermute(y, 'model', [(i, (i + 1) % 4) for i in range(4)]))

    x = jax.lax.fori_loop(0, 5, body, x)
    gathered = jax.lax.all_gather(x, 'model') * 2
    scattered = jax.lax.psum_scatter(gathered, 'model')
    return jax.lax.psum(scattered, ('data', 'model')), jax.lax.all_to_all(
      x.reshape(4, -1), 'data', 0, 0, tiled=True
    )

  mapped = jax.shard_map(
    inside, mesh=mesh, in_specs=both, out_specs=(PartitionSpec(), both), check_vma=False
  )
  x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=NamedSharding(mesh, both))
  counts = count(jax.jit(mapped).lower(x).compile().as_text(), dict(mesh.shape))
  shard = 8 * 32 * 4
  assert counts.by_kind() == {
    'collective-permute': 5 * shard,
    'all-gather': 3 * shard,
    'reduce-scatter': 4 * shard * 3 / 4,
    'all-reduce': 2 * shard * 7 / 8,
    'all-to-all': shard / 2,
  }
  assert {one.kind: one.axes for one in counts.collectives}['all-to-all'] == ('data',)


@pytest.mark.parametrize('groups, dilation, stride', [(1, 1, 1), (1, 1, 2), (1, 2, 1), (4, 1, 1)])
def test_convolutions(groups, dilation, stride):
  x = jax.ShapeDtypeStruct((2, 12, 12, 8), jnp.float32)
  kernel = jax.ShapeDtypeStruct((3, 3, 8 // groups, 16), jnp.float32)

  def convolve(x, kernel):
    return jax.lax.conv_general_dilated(
      *(x, kernel, (stride, stride), [(1, 1), (1, 1)]),
      rhs_dilation=(dilation, dilation),
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
      feature_group_count=groups,
    )

  counts = count(jax.jit(convolve).lower(x, kernel).compile().as_text(), {})
  ones = np.asarray(
    convolve(jnp.ones(x.shape), jnp.ones(kernel.shape))
  )  # each element counts its products
  assert counts.flops == 2 * ones.sum()


def test_a_loop_that_can_end_early_counts_its_largest_number_of_trips():
  def step(x):
    return jax.lax.while_loop(
      lambda state: (state[0] < 7) & (state[1][0, 0] < 9),
      lambda state: (state[0] + 1, state[1] @ state[1]),
      (0, x),
    )

  counts = count(jax.jit(step).lower(jnp.ones((8, 8))).compile().as_text(), {})
  assert counts.flops == 7 * 2 * 8**3
  assert [loop[1:3] for loop in counts.loops] == [(7, 'at most')]


@pytest.mark.parametrize('dtype', ['f32', 's32'])
def test_a_loop_around_long_sums_is_counted(dtype):
  """Each sum has the one before it as both operands: there are 2**2000 ways through them."""
  sums = '\n'.join(f'  %x{n + 1} = {dtype}[] add(%x{n}, %x{n})' for n in range(2000))
  state = f'(s32[], {dtype}[])'
  text = f"""
HloModule loop

%condition (p: {state}) -> pred[] {{
  %p = {state} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(10)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}}

%body (q: {state}) -> {state} {{
  %q = {state} parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%j, %one)
  %x0 = {dtype}[] constant(0)
{sums}
  ROOT %state = {state} tuple(%next, %x2000)
}}

ENTRY %main () -> {state} {{
  %zero = s32[] constant(0)
  %x = {dtype}[] constant(0)
  %start = {state} tuple(%zero, %x)
  ROOT %loop = {state} while(%start), condition=%condition, body=%body
}}
"""
  assert [loop[1:3] for loop in count(text, {}).loops] == [(10, 'condition')]


# --- As a whole --------------------------------------------------------------------------------------------


def test_largest_first_and_sums():
  x = '%x = f32[8]{0} parameter(0)'
  line = (
    '%r{0} = f32[8]{{0}} all-reduce({2}), channel_id=1, replica_groups={1}, use_global_device_ids=true'
  )
  small, large = '[4,2]<=[2,4]T(1,0)', '[1,8]<=[8]'
  counts = counted(
    x, *(line.format(n, at, '%x, %x' if n else '%x') for n, at in enumerate((small, large, large)))
  )
  wires = [one.wire for one in counts.collectives]
  assert wires == sorted(wires, reverse=True)
  assert counts.by_axis() == {('data', 'model'): 2 * 2 * 64 * 7 / 8, ('data',): 32}
  assert sum(counts.by_kind().values()) == sum(wires)


def test_a_megabyte_takes_less_than_a_second():
  axes, *places = LAYOUTS['fsdp']
  text, mesh = train_step(mesh_of(**axes), *places, scanned=False)
  head, _, body = text.partition('ENTRY')
  unused = ''.join(head.replace('%', f'%n{number}_') for number in range(math.ceil(MIB / len(head))))
  computations = '\n'.join(line for line in unused.splitlines() if not line.startswith('HloModule'))
  start = time.process_time()
  counts = count(
    f'{text[: text.index(chr(10))]}\n{computations}\n{head.partition(chr(10))[2]}ENTRY{body}', mesh
  )
  assert time.process_time() - start < 1
  assert counts == count(text, mesh)
