"""Drawings: their slices are those that JAX names, and their text and SVG show them."""

import io
import math
from textwrap import dedent
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

import flax_spmd as spmd
from flax_spmd._src.draw.drawing import draw
from flax_spmd.errors import LayoutError

AXES = ('x', 'y', 'z')


class OtherSharding(jax.sharding.Sharding):
  """Not a NamedSharding: it only maps devices to indices."""

  def __init__(self, named):
    self.named = named

  def devices_indices_map(self, global_shape):
    return self.named.devices_indices_map(global_shape)

  def __repr__(self):
    return 'OtherSharding()'


def struct(*shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


def abstract(*spec, axis_types=AxisType.Auto, unreduced=(), **sizes):
  mesh = spmd.abstract_mesh(sizes, axis_types=axis_types)
  return NamedSharding(mesh, P(*spec, unreduced=set(unreduced)))


@st.composite
def laid_out(pick, divisible=False):
  """A shape and a NamedSharding: axes of all sizes in any order, devices in any order."""
  sizes = pick(
    st.lists(st.sampled_from([1, 2, 2, 3, 4, 8]), max_size=3).filter(lambda s: math.prod(s) <= 8)
  )
  devices = pick(st.permutations(jax.devices()))[: math.prod(sizes)]
  mesh = Mesh(np.array(devices).reshape(sizes), AXES[: len(sizes)])

  rank = pick(st.integers(0, 4))
  entries = [[] for _ in range(rank)]
  for axis in pick(st.permutations(mesh.axis_names)):
    dim = pick(st.integers(-1, rank - 1))  # -1: the axis is left out
    if dim >= 0:
      entries[dim].append(axis)
  spec = [tuple(axes) if len(axes) != 1 or pick(st.booleans()) else axes[0] for axes in entries]
  while spec and not spec[-1] and pick(st.booleans()):
    spec.pop()
  parts = [math.prod(mesh.shape[axis] for axis in axes) for axes in entries]
  shape = [pick(st.integers(0, 3)) * count if divisible else pick(st.integers(0, 12)) for count in parts]
  return tuple(shape), tuple(parts), NamedSharding(mesh, P(*(axes or None for axes in spec)))


def slices_by_jax(sharding, shape, padded):
  """JAX's own indices of the padded array, as far as they are in the real one."""
  found = {}
  for device, index in sharding.devices_indices_map(padded).items():
    ranges = [at.indices(size)[:2] for at, size in zip(index, padded)]
    real = tuple((min(start, size), min(stop, size)) for (start, stop), size in zip(ranges, shape))
    found.setdefault(real, []).append(device.id)
  return sorted((ranges, tuple(sorted(ids))) for ranges, ids in found.items())


@given(laid_out())
def test_slices_equal_those_of_jax(case):
  shape, parts, sharding = case
  padded = tuple(-(-size // count) * count for size, count in zip(shape, parts))
  assert list(draw(shape, sharding).slices) == slices_by_jax(sharding, shape, padded)


@given(laid_out(divisible=True))
def test_a_sharding_of_another_kind(case):
  shape, _, sharding = case
  assert draw(shape, OtherSharding(sharding)).slices == draw(shape, sharding).slices


@given(laid_out())
def test_abstract_devices_are_numbered_in_row_major_order(case):
  shape, _, sharding = case
  mesh = sharding.mesh
  if not mesh.axis_names:
    return
  in_order = Mesh(np.array(jax.devices()[: mesh.size]).reshape(mesh.axis_sizes), mesh.axis_names)
  concrete = draw(shape, NamedSharding(in_order, sharding.spec))
  nowhere = draw(shape, NamedSharding(mesh.abstract_mesh, sharding.spec))
  assert nowhere.slices == concrete.slices
  assert str(nowhere) == str(concrete)


JOINS = {'─': 'lr', '│': 'ud', '┌': 'rd', '┬': 'lrd', '┐': 'ld', '├': 'urd', '┼': 'lrud', '┤': 'lud'}
JOINS |= {'└': 'ur', '┴': 'lru', '┘': 'lu'}
STEPS = {'l': (0, -1, 'r'), 'r': (0, 1, 'l'), 'u': (-1, 0, 'd'), 'd': (1, 0, 'u')}


def assert_well_formed(text):
  """Every stroke of the frame is met by its neighbour's."""
  lines = text.splitlines()
  for i, line in enumerate(lines):
    for j, character in enumerate(line):
      for direction in JOINS.get(character, ''):
        down, right, back = STEPS[direction]
        assert back in JOINS[lines[i + down][j + right]], text


def devices_in(cell):
  """The ids in a cell's text: `(0, 4, 5, 6)` for `0, 4-6 (empty)`."""
  runs = [run.split('-') for run in cell.replace(' (empty)', '').split(', ')]
  return tuple(i for run in runs for i in range(int(run[0]), int(run[-1]) + 1))


@given(laid_out(), st.integers(70, 120))
def test_every_text_is_well_formed_and_shows_every_slice(case, width):
  shape, _, sharding = case
  drawing = draw(shape, sharding)
  text = drawing.text(width)
  assert_well_formed(text)
  assert max(map(len, text.splitlines())) <= width
  if '…' not in text:
    rows = [line.split('│')[1:-1] for line in text.splitlines() if '│' in line]
    cells = [devices_in(cell.strip()) for row in rows for cell in row]
    assert cells == [held.devices for held in drawing.slices]


@given(laid_out())
def test_every_svg_has_one_rectangle_per_shown_cell(case):
  shape, _, sharding = case
  drawing = draw(shape, sharding)
  rectangles = ElementTree.fromstring(drawing.svg).findall('.//{*}rect')
  assert len({rect.get('fill') for rect in rectangles}) == len(rectangles)
  if '…' not in str(drawing):
    found = [rect.find('{*}title').text.split(']: ') for rect in rectangles]
    ranges = [', '.join(f'{start}:{stop}' for start, stop in held.ranges) for held in drawing.slices]
    assert [where for where, _ in found] == [f'[{one}' for one in ranges]
    assert [devices_in(ids) for _, ids in found] == [held.devices for held in drawing.slices]


@pytest.mark.parametrize(
  ('x', 'sharding', 'text'),
  [
    (
      struct(8, 16),
      abstract('data', data=2, model=4),
      """\
      float32[8,16] over {'data': 2, 'model': 4} as P('data', None):
        2 slices of float32[4,16], each on 4 devices
      rows: dim 0 over 'data'; columns: dim 1 (whole)
            0:16
          ┌──────┐
      0:4 │ 0-3  │
          ├──────┤
      4:8 │ 4-7  │
          └──────┘""",
    ),
    (
      struct(8, 16, dtype=jnp.bfloat16),
      abstract('model', ('data',), data=2, model=4),
      """\
      bfloat16[8,16] over {'data': 2, 'model': 4} as P('model', 'data'):
        8 slices of bfloat16[2,8], each on 1 device
      rows: dim 0 over 'model'; columns: dim 1 over 'data'
            0:8    8:16
          ┌──────┬──────┐
      0:2 │  0   │  4   │
          ├──────┼──────┤
      2:4 │  1   │  5   │
          ├──────┼──────┤
      4:6 │  2   │  6   │
          ├──────┼──────┤
      6:8 │  3   │  7   │
          └──────┴──────┘""",
    ),
    (
      (16,),
      abstract('model', data=2, model=4),
      """\
      [16] over {'data': 2, 'model': 4} as P('model'): 4 slices of [4], each on 2 devices
      columns: dim 0 over 'model'
         0:4     4:8     8:12   12:16
      ┌───────┬───────┬───────┬───────┐
      │  0, 4 │  1, 5 │  2, 6 │  3, 7 │
      └───────┴───────┴───────┴───────┘""",
    ),
    (
      struct(),
      abstract(data=2),
      """\
      float32[] over {'data': 2} as P(): 1 slice of float32[], on 2 devices
      ┌──────┐
      │ 0, 1 │
      └──────┘""",
    ),
    (
      struct(8, 8, 8, 8),
      abstract(None, 'x', None, ('y', 'z'), x=2, y=1, z=2),
      """\
      float32[8,8,8,8] over {'x': 2, 'y': 1, 'z': 2} as P(None, 'x', None, ('y', 'z')):
        4 slices of float32[8,4,8,4], each on 1 device
      rows: dim 1 over 'x'; columns: dim 3 over 'y' x 'z'; whole: dim 0, dim 2
            0:4   4:8
          ┌─────┬─────┐
      0:4 │  0  │  1  │
          ├─────┼─────┤
      4:8 │  2  │  3  │
          └─────┴─────┘""",
    ),
    (
      struct(8, 4, 2),
      abstract('x', 'y', 'z', x=8, y=2, z=1),
      """\
      float32[8,4,2] over {'x': 8, 'y': 2, 'z': 1} as P('x', 'y', 'z'):
        16 slices of float32[1,2,2], each on 1 device
      rows: dim 0 over 'x'; columns: dim 1 over 'y'; whole: dim 2
            0:2   2:4
          ┌─────┬─────┐
      0:1 │  0  │  1  │
          ├─────┼─────┤
      1:2 │  2  │  3  │
          ├─────┼─────┤
      2:3 │  4  │  5  │
          ├─────┼─────┤
      3:4 │  6  │  7  │
          ├─────┼─────┤
      4:5 │  8  │  9  │
          ├─────┼─────┤
      5:6 │  10 │  11 │
          ├─────┼─────┤
      6:7 │  12 │  13 │
          ├─────┼─────┤
      7:8 │  14 │  15 │
          └─────┴─────┘""",
    ),
    (
      struct(10, 4, 2),
      abstract('x', 'y', 'z', x=5, y=2, z=2),
      """\
      float32[10,4,2] over {'x': 5, 'y': 2, 'z': 2} as P('x', 'y', 'z'):
        20 slices of float32[2,2,1], each on 1 device
      panels: dim 0 over 'x'; rows: dim 1 over 'y'; columns: dim 2 over 'z'

      dim 0 at 0:2
            0:1   1:2
          ┌─────┬─────┐
      0:2 │  0  │  1  │
          ├─────┼─────┤
      2:4 │  2  │  3  │
          └─────┴─────┘

      dim 0 at 2:4
            0:1   1:2
          ┌─────┬─────┐
      0:2 │  4  │  5  │
          ├─────┼─────┤
      2:4 │  6  │  7  │
          └─────┴─────┘

      … 1 more panel

      dim 0 at 6:8
            0:1   1:2
          ┌─────┬─────┐
      0:2 │  12 │  13 │
          ├─────┼─────┤
      2:4 │  14 │  15 │
          └─────┴─────┘

      dim 0 at 8:10
            0:1   1:2
          ┌─────┬─────┐
      0:2 │  16 │  17 │
          ├─────┼─────┤
      2:4 │  18 │  19 │
          └─────┴─────┘""",
    ),
    (
      struct(5, 3),
      abstract(('x', 'y'), P.UNCONSTRAINED, x=2, y=4),
      """\
      float32[5,3] over {'x': 2, 'y': 4} as P(('x', 'y'), UNCONSTRAINED):
        6 slices of up to float32[1,3], each on 1 to 3 devices
      rows: dim 0 over 'x' x 'y'; columns: dim 1 (whole)
                0:3
          ┌─────────────┐
      0:1 │      0      │
          ├─────────────┤
      1:2 │      1      │
          ├─────────────┤
      2:3 │      2      │
          ├─────────────┤
      3:4 │      3      │
          ├─────────────┤
      4:5 │      4      │
          ├─────────────┤
      5:5 │ 5-7 (empty) │
          └─────────────┘
      - dim 0: 5 is not divisible by 8: a program pads it to 8, a concrete array cannot have this sharding
      - dim 1 is UNCONSTRAINED: drawn as replicated, but the compiler may shard it""",
    ),
    (
      struct(4, 4),
      abstract('x', unreduced='y', x=2, y=2, axis_types=AxisType.Explicit),
      """\
      float32[4,4] over {'x': 2, 'y': 2} as P('x', None): 2 slices of float32[2,4], each on 2 devices
      rows: dim 0 over 'x'; columns: dim 1 (whole)
            0:4
          ┌──────┐
      0:2 │ 0, 1 │
          ├──────┤
      2:4 │ 2, 3 │
          └──────┘
      - unreduced over 'y': devices of one cell hold partial results, not copies""",
    ),
  ],
)
def test_text(x, sharding, text):
  assert str(draw(x, sharding)) == dedent(text)


def test_text_of_a_sharding_of_another_kind(mesh):
  sharding = OtherSharding(NamedSharding(mesh, P(None, 'data')))
  assert str(draw(struct(8, 16), sharding)) == dedent("""\
    float32[8,16] as OtherSharding(): 2 slices of float32[8,8], each on 4 devices
    rows: dim 0 (whole); columns: dim 1 (2 pieces)
          0:8    8:16
        ┌──────┬──────┐
    0:8 │ 0-3  │ 4-7  │
        └──────┴──────┘""")


def test_65536_devices():
  sharding = abstract('data', 'model', data=256, model=256)
  drawing = draw(struct(65536, 1024), sharding)
  text, svg, slices = str(drawing), drawing.svg, drawing.slices
  assert len(slices) == 65536
  assert slices[-1] == (((65280, 65536), (1020, 1024)), (65535,))
  assert len(ElementTree.fromstring(svg).findall('.//{*}rect')) == 8 * 6
  assert text == dedent("""\
    float32[65536,1024] over {'data': 256, 'model': 256} as P('data', 'model'):
      65536 slices of float32[256,4], each on 1 device
    rows: dim 0 over 'data'; columns: dim 1 over 'model'
                     0:4         4:8         8:12     …   1012:1016   1016:1020   1020:1024
                ┌───────────┬───────────┬───────────┬───┬───────────┬───────────┬───────────┐
          0:256 │     0     │     1     │     2     │ … │    253    │    254    │    255    │
                ├───────────┼───────────┼───────────┼───┼───────────┼───────────┼───────────┤
        256:512 │    256    │    257    │    258    │ … │    509    │    510    │    511    │
                ├───────────┼───────────┼───────────┼───┼───────────┼───────────┼───────────┤
        512:768 │    512    │    513    │    514    │ … │    765    │    766    │    767    │
                ├───────────┼───────────┼───────────┼───┼───────────┼───────────┼───────────┤
       768:1024 │    768    │    769    │    770    │ … │    1021   │    1022   │    1023   │
                ├───────────┼───────────┼───────────┼───┼───────────┼───────────┼───────────┤
              … │     …     │     …     │     …     │ … │     …     │     …     │     …     │
                ├───────────┼───────────┼───────────┼───┼───────────┼───────────┼───────────┤
    64512:64768 │   64512   │   64513   │   64514   │ … │   64765   │   64766   │   64767   │
                ├───────────┼───────────┼───────────┼───┼───────────┼───────────┼───────────┤
    64768:65024 │   64768   │   64769   │   64770   │ … │   65021   │   65022   │   65023   │
                ├───────────┼───────────┼───────────┼───┼───────────┼───────────┼───────────┤
    65024:65280 │   65024   │   65025   │   65026   │ … │   65277   │   65278   │   65279   │
                ├───────────┼───────────┼───────────┼───┼───────────┼───────────┼───────────┤
    65280:65536 │   65280   │   65281   │   65282   │ … │   65533   │   65534   │   65535   │
                └───────────┴───────────┴───────────┴───┴───────────┴───────────┴───────────┘""")


def test_long_device_lists_are_shortened():
  drawing = draw(struct(512, 4), abstract(None, 'model', data=1024, model=4))
  assert drawing.text(80) == dedent("""\
    float32[512,4] over {'data': 1024, 'model': 4} as P(None, 'model'):
      4 slices of float32[512,1], each on 1024 devices
    rows: dim 0 (whole); columns: dim 1 over 'model'
                     0:1             …            3:4
          ┌────────────────────────┬───┬────────────────────────┐
    0:512 │ 0, 4, … (1024 devices) │ … │ 3, 7, … (1024 devices) │
          └────────────────────────┴───┴────────────────────────┘""")
  assert len(drawing.slices[0].devices) == 1024


def test_a_narrow_terminal():
  drawing = draw(struct(8, 64), abstract(None, 'model', data=2, model=8))
  assert drawing.text(width=40) == dedent("""\
    float32[8,64] over {'data': 2, 'model':
      8} as P(None, 'model'):
      8 slices of float32[8,8], each on 2
      devices
    rows: dim 0 (whole); columns: dim 1 over
      'model'
           0:8     8:16   …   56:64
        ┌───────┬───────┬───┬───────┐
    0:8 │  0, 8 │  1, 9 │ … │ 7, 15 │
        └───────┴───────┴───┴───────┘""")


def test_objects_with_a_shape(mesh):
  sharding = NamedSharding(mesh, P('data'))
  placed = jax.device_put(jnp.ones((8, 16)), sharding)
  expected = draw(struct(8, 16), sharding)
  for x in [placed, jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=sharding)]:
    boxed = spmd.LogicallyPartitioned(x, ('batch', 'embed'))
    assert str(draw(x)) == str(draw(boxed)) == str(expected)
  assert str(draw(np.ones((8, 16), np.float32), sharding)) == str(expected)
  assert draw([8, np.int64(16)], sharding).slices == expected.slices

  other = draw(placed, NamedSharding(mesh, P('model')))
  assert len(other.slices) == 4
  alone = draw(jnp.ones(3), SingleDeviceSharding(jax.devices()[5]))
  assert alone.slices == ((((0, 3),), (5,)),)


def test_svg_and_html():
  mesh = spmd.abstract_mesh({'<a&"b">': 2, 'b': 2})
  drawing = draw(struct(8, 8), NamedSharding(mesh, P('<a&"b">', 'b')))
  root = ElementTree.fromstring(drawing.svg)
  assert [text.text for text in root.findall('{*}text')] == [
    """float32[8,8] over {'<a&"b">': 2, 'b': 2} as P('<a&"b">', 'b'):""",
    '4 slices of float32[4,4], each on 1 device',
    """rows: dim 0 over '<a&"b">'; columns: dim 1 over 'b'""",
    *['0:4', '4:8', '0:4', '0', '1', '4:8', '2', '3'],
  ]
  assert [title.text for title in root.findall('{*}rect/{*}title')] == [
    '[0:4, 0:4]: 0',
    '[0:4, 4:8]: 1',
    '[4:8, 0:4]: 2',
    '[4:8, 4:8]: 3',
  ]
  assert drawing._repr_svg_() == drawing.svg
  assert drawing.svg in drawing._repr_html_()
  right, bottom = (float(root.get(name)) for name in ('width', 'height'))
  for rect in root.findall('{*}rect'):
    assert 0 < float(rect.get('x')) + float(rect.get('width')) < right
    assert 0 < float(rect.get('y')) + float(rect.get('height')) < bottom


def test_rich_prints_the_text_as_wide_as_the_console():
  drawing = draw(struct(8, 64), abstract(None, 'model', data=2, model=8))
  for width in (40, 90):
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(drawing)
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert '\n'.join(lines) == drawing.text(width)
  file = io.StringIO()
  Console(file=file, width=90, color_system='truecolor', force_terminal=True).print(drawing)
  assert file.getvalue().count('\x1b[38;2;17;17;17;48;2;') == 8


@pytest.mark.parametrize(
  ('x', 'sharding', 'text'),
  [
    (
      (8, 16),
      None,
      """\
      [8,16] (tuple) has no sharding, so its devices are unknown.
      Fix: pass one: draw(x, NamedSharding(mesh, PartitionSpec('data'))); the mesh may be abstract.""",
    ),
    (
      struct(8),
      None,
      """\
      float32[8] (ShapeDtypeStruct) has no sharding, so its devices are unknown.
      Fix: pass one: draw(x, NamedSharding(mesh, PartitionSpec('data'))); the mesh may be abstract.""",
    ),
    (
      jax.core.ShapedArray((8,), jnp.float32),  # its sharding is one over an empty mesh
      None,
      """\
      float32[8] (ShapedArray) has no sharding, so its devices are unknown.
      Fix: pass one: draw(x, NamedSharding(mesh, PartitionSpec('data'))); the mesh may be abstract.""",
    ),
    (
      struct(8),
      'data',
      """\
      'data' is not a sharding of float32[8].
      Fix: pass a jax.sharding.Sharding such as NamedSharding(mesh, PartitionSpec('data')).""",
    ),
    (
      struct(8),
      abstract('data', None, data=2),
      """\
      float32[8] is of rank 1, but its spec P('data', None) is of length 2.
      Fix: give the spec at most one entry per dimension.""",
    ),
    (
      'eight',
      None,
      """\
      'eight' has no shape to draw.
      Fix: pass one array, a jax.ShapeDtypeStruct, or a shape such as (8, 16).""",
    ),
    (
      (8, -1),
      abstract(data=2),
      """\
      (8, -1) has no shape to draw.
      Fix: pass one array, a jax.ShapeDtypeStruct, or a shape such as (8, 16).""",
    ),
  ],
)
def test_errors(x, sharding, text):
  with pytest.raises(LayoutError) as error:
    draw(x, sharding)
  assert str(error.value) == dedent(text)


def test_a_shape_that_another_sharding_rejects(mesh):
  named = NamedSharding(mesh, P('data'))
  with pytest.raises(ValueError) as refusal:
    named.devices_indices_map((7,))
  with pytest.raises(LayoutError) as error:
    draw(struct(7), OtherSharding(named))
  assert str(error.value) == (
    f'float32[7] does not fit its sharding OtherSharding(): {refusal.value}\n'
    'Fix: choose a divisible shape, or pass a NamedSharding, which is drawn with padding.'
  )
