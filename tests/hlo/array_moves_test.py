"""Collectives attributed to arguments and results, in programs written by hand as each backend prints them."""

import pytest

from flax_spmd._src.hlo.aliases import reused_parameters
from flax_spmd._src.hlo.array_moves import array_moves
from flax_spmd._src.hlo.parser import parse

MESH = {'data': 2, 'model': 4}
OVER_MODEL = 'channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}, use_global_device_ids=true'
OVER_DATA = 'channel_id=2, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}, use_global_device_ids=true'


def moves(text):
  """Kind, axes, parameters and results of each collective of a program."""
  module = parse('HloModule jit_f, num_partitions=8\n\n' + text)
  found = array_moves(module, MESH)
  return [(one.collective.kind, *one.collective.axes, one.parameters, one.results) for one in found]


def test_a_gather_of_a_cast_and_sliced_argument():
  assert moves(f"""
ENTRY %main (x: f32[4,8], y: f32[8]) -> f32[16] {{
  %y = f32[8]{{0}} parameter(1)
  %x = f32[4,8]{{1,0}} parameter(0)
  %zero = s32[] constant(0)
  %cast = bf16[4,8]{{1,0}} convert(%x)
  %part = bf16[1,4]{{1,0}} dynamic-slice(%cast, %zero, %zero), dynamic_slice_sizes={{1,4}}
  %flat = bf16[4]{{0}} reshape(%part)
  %all = bf16[16]{{0}} all-gather(%flat), {OVER_MODEL}
  %wide = f32[16]{{0}} convert(%all)
  %two = f32[16]{{0}} concatenate(%y, %y), dimensions={{0}}
  ROOT %sum = f32[16]{{0}} add(%wide, %two)
}}""") == [('all-gather', 'model', (0,), ())]


def test_a_computed_value_is_no_argument():
  """Nor is one that contains an argument and something computed."""
  program = """
ENTRY %main (x: f32[8]) -> f32[64] {{
  %x = f32[8]{{0}} parameter(0)
  %twice = f32[8]{{0}} add(%x, %x)
  %both = f32[16]{{0}} concatenate({operands}), dimensions={{0}}
  ROOT %all = f32[64]{{0}} all-gather(%both), {attributes}
}}"""
  computed = program.format(operands='%x, %twice', attributes=OVER_MODEL)
  assert moves(computed) == [('all-gather', 'model', (), (0,))]
  moved = program.format(operands='%x, %x', attributes=OVER_MODEL)
  assert moves(moved) == [('all-gather', 'model', (0,), (0,))]


def test_one_combined_gather_of_several_arguments_feeds_several_results():
  assert moves(f"""
ENTRY %main (x: f32[4], y: f32[2], z: f32[2]) -> (f32[8], f32[16], f32[2]) {{
  %x = f32[4]{{0}} parameter(0)
  %y = f32[2]{{0}} parameter(1)
  %z = f32[2]{{0}} parameter(2)
  %all = (f32[8]{{0}}, f32[16]{{0}}) all-gather(%y, %x), {OVER_MODEL}
  %first = f32[8]{{0}} get-tuple-element(%all), index=0
  %second = f32[16]{{0}} get-tuple-element(%all), index=1
  ROOT %results = (f32[8]{{0}}, f32[16]{{0}}, f32[2]{{0}}) tuple(%first, %second, %z)
}}""") == [('all-gather', 'model', (0, 1), (0, 1))]


def test_a_gather_in_two_steps_and_in_the_background():
  assert moves(f"""
%move (p: f32[4]) -> f32[4] {{
  %p = f32[4]{{0}} parameter(0)
  ROOT %c = f32[4]{{0}} copy(%p)
}}

ENTRY %main (x: f32[4]) -> f32[32] {{
  %x = f32[4]{{0}} parameter(0)
  %moved = f32[4]{{0}} fusion(%x), kind=kLoop, calls=%move
  %start = (f32[4]{{0}}, f32[16]{{0}}) all-gather-start(%moved), {OVER_MODEL}
  %done = f32[16]{{0}} all-gather-done(%start)
  ROOT %all = f32[32]{{0}} all-gather(%done), {OVER_DATA}
}}""") == [('all-gather', 'data', (0,), (0,)), ('all-gather', 'model', (0,), (0,))]


LOOP = """
%condition (c: (s32[], f32[4,8], f32[4,8])) -> pred[] {{
  %c = (s32[], f32[4,8]{{1,0}}, f32[4,8]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %limit = s32[] constant(4)
  ROOT %more = pred[] compare(%i, %limit), direction=LT
}}

%body (s: (s32[], f32[4,8], f32[4,8])) -> (s32[], f32[4,8], f32[4,8]) {{
  %s = (s32[], f32[4,8]{{1,0}}, f32[4,8]{{1,0}}) parameter(0)
  %j = s32[] get-tuple-element(%s), index=0
  %stack = f32[4,8]{{1,0}} get-tuple-element(%s), index=1
  %carried = f32[4,8]{{1,0}} get-tuple-element(%s), index=2
  %zero = s32[] constant(0)
  %layer = f32[1,8]{{1,0}} dynamic-slice(%{gathered}, %j, %zero), dynamic_slice_sizes={{1,8}}
  %all = f32[4,8]{{1,0}} all-gather(%layer), {attributes}
  %next = f32[4,8]{{1,0}} {operation}
  %one = s32[] constant(1)
  %k = s32[] add(%j, %one)
  ROOT %state = (s32[], f32[4,8]{{1,0}}, f32[4,8]{{1,0}}) tuple(%k, %stack, %next)
}}

ENTRY %main (x: f32[4,8], y: f32[4,8]) -> f32[4,8] {{
  %x = f32[4,8]{{1,0}} parameter(0)
  %y = f32[4,8]{{1,0}} parameter(1)
  %start = s32[] constant(0)
  %first = (s32[], f32[4,8]{{1,0}}, f32[4,8]{{1,0}}) tuple(%start, %x, %y)
  %loop = (s32[], f32[4,8]{{1,0}}, f32[4,8]{{1,0}}) while(%first), condition=%condition, body=%body
  ROOT %last = f32[4,8]{{1,0}} get-tuple-element(%loop), index=2
}}"""


@pytest.mark.parametrize(
  ('gathered', 'operation', 'parameters', 'results'),
  [
    ('stack', 'add(%carried, %all)', (0,), ()),  # layers of a scan
    ('carried', 'add(%carried, %all)', (), ()),  # computed in every trip but the first
    ('carried', 'copy(%carried)', (1,), ()),
    ('stack', 'copy(%all)', (0,), (0,)),
  ],
)
def test_gathers_in_a_loop(gathered, operation, parameters, results):
  program = LOOP.format(gathered=gathered, operation=operation, attributes=OVER_MODEL)
  assert moves(program) == [('all-gather', 'model', parameters, results)]


def test_arguments_in_one_tuple():
  """TPUs take more than 2,000 arguments as one tuple."""
  assert moves(f"""
ENTRY %main (p: (f32[4], f32[2])) -> f32[8] {{
  %p = (f32[4]{{0}}, f32[2]{{0}}) parameter(0)
  %y = f32[2]{{0}} get-tuple-element(%p), index=1
  ROOT %all = f32[8]{{0}} all-gather(%y), {OVER_MODEL}
}}""") == [('all-gather', 'model', (1,), (0,))]


def test_an_argument_with_many_ways_to_a_gather():
  """Each value has the one before it as both operands: there are 2**2000 ways."""
  chosen = '\n'.join(f'  %x{n + 1} = f32[4]{{0}} select(%p, %x{n}, %x{n})' for n in range(2000))
  assert moves(f"""
ENTRY %main (p: pred[], x: f32[4]) -> f32[16] {{
  %p = pred[] parameter(0)
  %x0 = f32[4]{{0}} parameter(1)
{chosen}
  ROOT %all = f32[16]{{0}} all-gather(%x2000), {OVER_MODEL}
}}""") == [('all-gather', 'model', (1,), (0,))]


def test_reused_parameters():
  header = (
    'HloModule f, input_output_alias={{ {{0}}: ({}, {{}}, may-alias), {{1}}: ({}, {{}}, must-alias) }}'
  )
  assert reused_parameters(header.format(3, 1)) == {1, 3}
  tupled = 'HloModule f, input_output_alias={ {0}: (0, {2}, may-alias) }'
  assert reused_parameters(tupled) == {2}
  assert reused_parameters('HloModule f, num_partitions=8') == frozenset()
