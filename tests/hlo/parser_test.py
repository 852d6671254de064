"""Parsing HLO text: instructions, types, attributes, and source lines."""

from textwrap import dedent

import jax
import jax.numpy as jnp
import pytest

from flax_spmd._src.hlo.parser import HloModule, parse, shapes
from flax_spmd._src.hlo.source_frames import Frame, origin, read_frames
from flax_spmd._src.hlo.trip_counts import trips


def module(*lines: str) -> HloModule:
  """A module of one computation."""
  return parse(
    '\n'.join(['HloModule m', '', 'ENTRY %main () -> f32[] {', *(f'  {line}' for line in lines), '}'])
  )


def only(*lines: str):
  """The last instruction of such a module."""
  main = module(*lines).main
  return main.instructions[main.root]


@pytest.mark.parametrize(
  'text, expected',
  [
    ('f32[]', 4),
    ('pred[8]{0}', 8),
    ('bf16[4,8]{1,0:T(8,128)(2,1)S(1)}', 64),
    ('s4[7]', 3.5),
    ('u2[8]{0:E(2)}', 2),
    ('s4[8]{0:E(8)}', 8),
    ('f8e4m3fn[16]', 16),
    ('f8e8m0fnu[16]', 16),
    ('f4e2m1fn[16]', 8),
    ('c64[2]', 16),
    ('token[]', 0),
    ('f32[<=8,2]', 64),
    ('f32[0,4]', 0),
    ('(f32[2]{0}, (s8[3], /*index=2*/pred[]), token[])', 12),
  ],
)
def test_bytes_of_types(text, expected):
  assert sum(shape.bytes for shape in shapes(text)) == expected


def test_memory_spaces():
  on_chip, host, gpu, main = shapes(
    '(f32[4]{0:T(128)S(1)}, f32[4]{0:S(5)}, f32[4]{0:S(1)}, f32[4]{0:T(128)})'
  )
  assert [shape.in_main_memory for shape in (on_chip, host, gpu, main)] == [False, False, True, True]


def test_instructions():
  found = only(
    '%x = f32[4]{0} parameter(0)',
    'ROOT %all-gather-start.1 = ((f32[4]{0:T(8,128)(2,1)}), f32[8]{0}) all-gather-start(%x, /*index=1*/%x),'
    ' channel_id=2, replica_groups={{0,1},{2,3}}, dimensions={0}, use_global_device_ids=true,'
    ' metadata={op_name="a, b={" stack_frame_id=1}, backend_config={"x":{"y":[1,2]},"z":"},{"}',
  )
  assert found.op == 'all-gather-start'
  assert found.operands == ('x', 'x')
  assert found.bytes == 48
  assert list(found.attributes) == [
    *(
      'channel_id',
      'replica_groups',
      'dimensions',
      'use_global_device_ids',
      'metadata',
      'backend_config',
    )
  ]
  assert found.attributes['replica_groups'] == '{{0,1},{2,3}}'


def test_names_without_percent_and_operands_with_types():
  main = parse(
    dedent("""
      HloModule m
      ENTRY main.1 {
        p.0 = f32[2]{0} parameter(0)
        constant.1 = f32[2]{0:T(8,128)} constant({1, 2})
        ROOT add.2 = f32[2]{0} add(f32[2]{0} p.0, f32[2]{0:T(8,128)} constant.1)
      }
    """)
  ).main
  assert main.result is not None and main.result.operands == ('p.0', 'constant.1')


def test_names_from_a_model_are_not_parsed():
  name = r'ROOT %evil = f32[9] dot(%a), channel_id=7, calls=%b }\"'
  found = only(
    f'ROOT %x = f32[4] copy(%y), metadata={{op_name="{name}" source_file="/a b/\\"m\\".py" source_line=3}}'
  )
  assert found.attributes.keys() == {'metadata'}
  assert origin(found.attributes['metadata'], {}) == (name.replace('\\"', '"'), '"m".py:3')


def test_called_computations():
  found = only('ROOT %c = f32[] conditional(%i, %a, %b), branch_computations={%one, %two}')
  assert found.called('branch_computations', 'true_computation') == ['one', 'two']
  assert found.computation('body') == ''


def test_ends_of_computations():
  text = dedent("""
    HloModule m, num_partitions=4, replica_count=2

    %inner (p: f32[]) -> f32[] {
      ROOT %p = f32[] parameter(0)
    }, execution_thread="host"

    ENTRY %main (x: (f32[], /*index=1*/f32[2]{0:T(256)})) -> f32[] {
      %x = (f32[], f32[2]{0:T(256)}) parameter(0)
      ROOT %y = f32[] call(%x), to_apply=%inner
    }
  """)
  found = parse(text)
  assert (found.devices, found.entry, list(found.computations)) == (8, 'main', ['inner', 'main'])


@pytest.mark.parametrize('text', ['', 'no module', 'HloModule m\n\n%f (x: f32[]) -> f32[] {\n}'])
def test_text_without_an_entry_computation(text):
  with pytest.raises(ValueError, match=r'^This is not an HLO module: it has no ENTRY computation\.$'):
    parse(text)


TABLES = """
FileNames
1 "/home/me/model.py"
2 "/venv/lib/python3.12/site-packages/flax/linen/linear.py"
3 "/a \\"b\\".py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=22 end_line=22 column=3 end_column=3}
2 {file_name_id=1 function_name_id=1 line=31 end_line=31 column=3 end_column=3}
3 {file_name_id=2 function_name_id=1 line=271 end_line=271 column=3 end_column=3}
4 {file_name_id=3 function_name_id=1 line=5 end_line=5 column=3 end_column=3}

StackFrames
1 {file_location_id=1 parent_frame_id=%d}
2 {file_location_id=2 parent_frame_id=%d}
3 {file_location_id=3 parent_frame_id=%d}
4 {file_location_id=4}
"""


@pytest.mark.parametrize('numbers', [(1, 2, 3), (0, 1, 2)], ids=['from one', 'from zero'])
def test_source_is_the_line_of_the_model(numbers):
  frames = read_frames((TABLES % numbers).splitlines())
  assert frames[3] == Frame('/venv/lib/python3.12/site-packages/flax/linen/linear.py', 271, 2)
  assert origin('{op_name="dot" stack_frame_id=3}', frames) == ('dot', 'model.py:31')
  assert origin('{op_name="dot" stack_frame_id=4}', frames).source == 'a "b".py:5'
  assert origin('{op_name="stack_frame_id=1" source_line=1}', frames) == ('stack_frame_id=1', '')
  assert origin('{op_name="dot" stack_frame_id=9}', frames).source == ''


def test_source_is_a_library_if_the_model_has_no_line():
  frames = {
    1: Frame('/x/site-packages/flax/linear.py', 2, 0),
    2: Frame('/x/site-packages/their_model/a.py', 3, 0),
  }
  assert origin('{stack_frame_id=1}', frames).source == 'linear.py:2'
  assert origin('{stack_frame_id=2}', frames).source == 'a.py:3'


LOOP = """
HloModule m

%%less (a: s32[], b: s32[]) -> pred[] {
  %%a = s32[] parameter(0)
  %%b = s32[] parameter(1)
  ROOT %%c = pred[] compare(%%a, %%b), direction=%(direction)s
}

%%condition (p: (s32[], s32[])) -> pred[] {
  %%p = (s32[], s32[]) parameter(0)
  %%i = s32[] get-tuple-element(%%p), index=0
  %%n = s32[] get-tuple-element(%%p), index=1
  ROOT %%f = pred[] fusion(%(order)s), kind=kLoop, calls=%%less
}

%%body (q: (s32[], s32[])) -> (s32[], s32[]) {
  %%q = (s32[], s32[]) parameter(0)
  %%j = s32[] get-tuple-element(%%q), index=0
  %%jj = s32[]{:S(6)} copy(%%j)
  %%m = s32[] get-tuple-element(%%q), index=1
  %%step = s32[] constant(%(step)d)
  %%k = s32[] %(op)s(%%jj, %%step)
  ROOT %%s = (s32[], s32[]) tuple(%%k, %%m)
}

ENTRY %%main () -> (s32[], s32[]) {
  %%zero = s32[] constant(%(start)d)
  %%limit = s32[] constant(%(limit)d)
  %%t = (s32[], s32[]) tuple(%%zero, %%limit)
  ROOT %%loop = (s32[], s32[]) while(%%t), condition=%%condition, body=%%body
}
"""


@pytest.mark.parametrize(
  'direction, order, op, start, step, limit, expected',
  [
    ('LT', '%i, %n', 'add', 0, 1, 10, 10),
    ('LT', '%i, %n', 'add', 0, 3, 10, 4),
    ('LE', '%i, %n', 'add', 2, 2, 10, 5),
    ('GT', '%n, %i', 'add', 0, 1, 10, 10),
    ('GE', '%i, %n', 'subtract', 9, 1, 0, 10),
    ('GT', '%i, %n', 'add', 9, -3, 0, 3),
    ('NE', '%i, %n', 'add', 0, 1, 4, 4),
    ('LT', '%i, %n', 'add', 10, 1, 10, 0),
    ('LT', '%i, %n', 'subtract', 0, 1, 10, None),
    ('LT', '%i, %n', 'multiply', 1, 2, 10, None),
    ('EQ', '%i, %n', 'add', 0, 1, 10, 0),
    ('EQ', '%i, %n', 'add', 10, 1, 10, 1),
  ],
)
def test_trips_from_conditions(direction, order, op, start, step, limit, expected):
  found = parse(
    LOOP % dict(direction=direction, order=order, op=op, start=start, step=step, limit=limit)
  )
  loop = trips(found.main.instructions['loop'], found.main, found, {})
  assert loop == ((1, 'unknown') if expected is None else (expected, 'condition'))


def test_text_of_the_installed_jax():
  compiled = jax.jit(lambda x: jax.lax.fori_loop(0, 7, lambda _, y: jnp.tanh(y @ y), x)).lower(
    jnp.ones((4, 4))
  )
  found = parse(compiled.compile().as_text())
  loops = [
    one
    for part in found.computations.values()
    for one in part.instructions.values()
    if one.op == 'while'
  ]
  assert [trips(one, found.main, found, {}).number for one in loops] == [7]
  every = [one for part in found.computations.values() for one in part.instructions.values()]
  assert any(
    origin(one.attributes.get('metadata', ''), found.frames).source.startswith('parser_test.py:')
    for one in every
  )


def test_an_attribute_of_several_lines_does_not_end_a_computation():
  """As the metadata of a kernel of Pallas, in JSON."""
  text = dedent("""\
    HloModule m, num_partitions=2

    %inner (p: f32[4]) -> f32[4] {
      ROOT %p = f32[4] parameter(0)
    }
    ENTRY %main (x: f32[4]) -> f32[4] {
      %x = f32[4]{0} parameter(0)
      %kernel = f32[4]{0} custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
    "xprof_metadata":"{\\"block_q\\": 128}",
      "more": {
    }
    }}, metadata={op_name="jit(f)/kernel"}
      ROOT %sum = f32[4]{0} all-reduce(%kernel), replica_groups={{0,1}}, to_apply=%inner
    }
    """)
  main = parse(text).main
  assert list(main.instructions) == ['x', 'kernel', 'sum'] and main.root == 'sum'
  kernel = main.instructions['kernel'].attributes
  assert kernel['metadata'] == '{op_name="jit(f)/kernel"}' and '128' in kernel['frontend_attributes']
