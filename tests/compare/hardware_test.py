"""Targets, chips, and the time of a step on them."""

import itertools
import math
import os
import subprocess
import sys
import types
from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flax_spmd as spmd
from flax_spmd._src.compare.compile_worker import with_positions
from flax_spmd._src.compare.costs import (
  BANDWIDTH,
  START,
  cost,
  coverage,
  ends,
  local,
  local_seconds,
  peak,
  seconds,
)
from flax_spmd._src.compare.hardware import (
  chips,
  compiler_environment,
  gpu_description,
  parse_target,
  share,
)
from flax_spmd._src.compare.lowering import layout_on_target
from flax_spmd._src.hlo.counts import Collective, Counts
from flax_spmd._src.hlo.work import Product
from flax_spmd._src.mesh import within_slice
from flax_spmd.errors import SearchError, TargetDeviceError
from flax_spmd.explore import Estimator, TrainStep, compare


@pytest.mark.parametrize(
  ('text', 'devices', 'topology'),
  [
    ('cpu:8', 8, (1, 8)),
    ('h100:4', 4, (1, 4)),
    ('h100:64', 64, (8, 8)),
    ('a100:4x4', 16, (4, 4)),
    ('v5e:16x16', 256, (16, 16)),
    ('v5p:4x4x8', 128, (4, 4, 8)),
    ('tpu7x:2x2x1', 8, (2, 2, 1)),  # two devices a chip
    ('gb200:64', 64, (1, 64)),  # one NVLink domain
    ('gb300:144', 144, (2, 72)),
    ('2xv5e:4x4', 32, (4, 4)),  # two slices
    ('3xtpu7x:2x2x1', 24, (2, 2, 1)),
  ],
)
def test_targets(text, devices, topology):
  target = parse_target(text)
  assert (target.devices, target.topology) == (devices, topology)


def test_available_devices():
  assert parse_target('here').devices == 8 and parse_target('here').chip.name == 'cpu'


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    (
      8,
      """\
      There is no target 8.
      Fix: use one of v4, v5e, v5p, v6e, tpu7x, a100, h100, h200, b200, b300, gb200, gb300, l40s, mi300, cpu, as in 'h100:8', or describe the chip in a TOML file.""",
    ),
    (
      'h1000:8',
      """\
      There is no target 'h1000:8'. Did you mean 'h100'?
      Fix: use one of v4, v5e, v5p, v6e, tpu7x, a100, h100, h200, b200, b300, gb200, gb300, l40s, mi300, cpu, as in 'h100:8', or describe the chip in a TOML file.""",
    ),
    (
      'v5e',
      "The target 'v5e' has no number of chips.\n"
      "Fix: write, for example, 'v5e:4x4', or '2xv5e:4x4' for two slices.",
    ),
    (
      'v5e:16',
      "'v5e:16': the torus of v5e has 2 axes.\nFix: give the number of chips along each axis, such as v5e:4x4.",
    ),
    (
      'v6e:8',
      "'v6e:8': the torus of v6e has 2 axes.\nFix: give the number of chips along each axis, such as v6e:2x4.",
    ),
    (
      'v5p:1536',
      "'v5p:1536': the torus of v5p has 3 axes.\nFix: give the number of chips along each axis, such as v5p:8x12x16.",
    ),
    (
      'v5e:1',
      "'v5e:1': the torus of v5e has 2 axes.\nFix: give the number of chips along each axis, such as v5e:1x1.",
    ),
    (
      'v6e:12',
      "'v6e:12': the torus of v6e has 2 axes.\nFix: give the number of chips along each axis, such as v6e:2x6.",
    ),
    (
      'v5p:3x1x5',
      "'v5p:3x1x5': a host of v5p has 2x2 chips, and its hosts make no torus of 3x1x5.\n"
      'Fix: give the first two axes even numbers of chips, or 1, such as v5p:4x1x5.',
    ),
    (
      'h100:12',
      "'h100:12': h100 has 8 chips per node.\n"
      'Fix: give a multiple of that, or nodes and chips per node, such as h100:2x8.',
    ),
    (
      '2xh100:8',
      "'2xh100:8': only TPUs have slices, and h100 has nodes.\n"
      'Fix: give nodes and chips per node, such as h100:2x8.',
    ),
    (
      '2xv5f:4x4',
      "There is no target '2xv5f:4x4'. Did you mean 'v5p'?\n"
      f"Fix: use one of {', '.join(chips())}, as in 'h100:8', or describe the chip in a TOML file.",
    ),
    (
      'v5e:4x4*2',
      "The target 'v5e:4x4*2' has no number of chips.\n"
      "Fix: write, for example, 'v5e:4x4', or '2xv5e:4x4' for two slices.",
    ),
    (
      '2xcpu:8',
      "'2xcpu:8': only TPUs have slices, and cpu has nodes.\n"
      'Fix: give nodes and chips per node, such as cpu:2x8.',
    ),
    ('h100:0', "The target 'h100:0' has no number of chips.\nFix: write, for example, 'h100:8'."),
  ],
)
def test_invalid_targets(text, message):
  with pytest.raises(TargetDeviceError) as caught:
    parse_target(text)
  assert str(caught.value) == dedent(message)


def test_every_chip_has_its_figures_and_sources():
  for chip in chips().values():
    assert chip.memory > 2**30 and chip.bandwidth > 1e9 and chip.link >= chip.network > 0
    assert 0 < chip.efficiency <= 1 and chip.flops['bf16'] > 0 and chip.source
    if chip.platform == 'cuda':
      assert f'device_memory_size: {chip.memory}' in gpu_description(chip)


MINE = dedent("""\
  [x1]
  platform = "cpu"
  memory = 1000
  bandwidth = 1e9
  link = 1e9
  network = 1e8
  per_node = 2
  efficiency = 0.5
  hop = 0.0
  flops = {bf16 = 1e12}
  source = "made up"
""")


def test_user_chips(tmp_path):
  file = tmp_path / 'mine.toml'
  file.write_text(MINE)
  assert parse_target('x1:4', str(file)).topology == (2, 2)
  assert 'h100' in chips(str(file)) and chips(file) == chips(str(file))
  file.write_text(file.read_text().replace('1e12', '2e12'))
  assert chips(file)['x1'].flops == {'bf16': 2e12}


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    (
      '[x\n',
      "mine.toml is not valid TOML: Expected ']' at the end of a table declaration (at line 1, column 3).",
    ),
    (
      '[x]\nplatform = "cpu"\nspeed = 3\n',
      'mine.toml, [x]: memory is missing, bandwidth is missing, link is missing, network is missing, '
      'per_node is missing, efficiency is missing, hop is missing, flops is missing, source is missing, '
      'speed is unknown.',
    ),
  ],
)
def test_mistakes_in_a_user_file(tmp_path, monkeypatch, content, message):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'mine.toml').write_text(content)
  with pytest.raises(TargetDeviceError) as caught:
    parse_target('x:4', 'mine.toml')
  assert str(caught.value).splitlines()[0] == message


def test_environment_of_a_compiler(monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', '--xla_force_host_platform_device_count=8 --xla_dump_to=x')
  assert compiler_environment(parse_target('cpu:64'))['XLA_FLAGS'].split() == [
    '--xla_dump_to=x',
    '--xla_force_host_platform_device_count=64',
  ]
  assert compiler_environment(parse_target('v5e:4x4'))['TPU_ACCELERATOR_TYPE'] == 'v5litepod-16'
  assert compiler_environment(parse_target('v5p:2x2x4'))['TPU_ACCELERATOR_TYPE'] == 'v5p-32'
  assert compiler_environment(parse_target('tpu7x:2x2x2'))['TPU_ACCELERATOR_TYPE'] == 'tpu7x-16'
  assert compiler_environment(parse_target('v5e:4x4'))['ALLOW_MULTIPLE_LIBTPU_LOAD'] == '1'


def test_a_share_of_chips_with_two_devices():
  assert share(parse_target('tpu7x:2x2x2'), 4).text == 'tpu7x:1x1x2'
  assert share(parse_target('tpu7x:2x2x2'), 4).devices == 4


@pytest.mark.parametrize(
  ('whole', 'parts', 'problem'),
  [
    ('v5e:6x6', 4, '4 shares of 9 devices are no torus of whole hosts'),
    ('tpu7x:2x2x2', 16, '16 shares of 1 device are no torus of whole chips'),
  ],
)
def test_shares_that_no_program_is_compiled_for(whole, parts, problem):
  with pytest.raises(TargetDeviceError) as caught:
    share(parse_target(whole), parts)
  assert str(caught.value) == f'{whole}: {problem}.\nFix: use another number of ranks, or another torus.'


@pytest.mark.parametrize('name', [name for name, chip in chips().items() if chip.torus])
def test_the_compiler_has_the_same_topologies(name, tpu_compiler):
  sizes = itertools.product((1, 2, 3, 4), repeat=chips()[name].torus)
  texts = [f'{name}:{"x".join(map(str, one))}' for one in sizes]
  made = subprocess.run(
    [sys.executable, '-c', TOPOLOGIES, *texts],
    env=os.environ
    | compiler_environment(parse_target(f'{name}:{"x".join(["2"] * chips()[name].torus)}')),
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  ).stdout.split()
  assert made == [text for text in texts if _is_target(text)]


TOPOLOGIES = """
import sys
from jax.experimental import topologies
from flax_spmd._src.compare.compile_worker import chips_per_host
for text in sys.argv[1:]:
  bounds = chips_per_host([*map(int, text.partition(':')[2].split('x'))])
  try:
    topologies.get_topology_desc(platform='tpu', topology_name=text, chips_per_host_bounds=bounds)
  except Exception:
    continue
  print(text)
"""


def _is_target(text):
  try:
    return bool(parse_target(text))
  except TargetDeviceError:
    return False


def test_a_chip_without_a_compiler_has_estimates():
  def create():
    return {'w': spmd.LogicallyPartitioned(jnp.ones((64, 256)), ('embed', 'mlp'))}

  def step(state, x):
    return jax.tree.map(lambda w: 0.9 * w, state), jnp.sum(x @ state['w'].unbox())

  train_step = TrainStep(step, create, jax.ShapeDtypeStruct((32, 64), jnp.float32))
  layout = spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'),))
  estimator = Estimator(train_step, platform='rocm')
  assert estimator.estimate(layout, parse_target('mi300:8')).fits
  with pytest.raises(TargetDeviceError) as caught:
    compare(train_step, [layout], 'mi300:8')
  assert str(caught.value) == (
    'Nothing compiles for mi300:8 without a mi300, so there are estimates only.\n'
    'Fix: use search(..., top=0) or Estimator, or a target with a compiler, such as h100:8.'
  )


def collective(kind='all-gather', axes=('data',), group=8, wire=1e9, times=1):
  return Collective(kind, axes, group, 1.0, times, wire, 'bf16', '', '')


@pytest.mark.parametrize(
  ('target', 'mesh', 'axes', 'group', 'speed'),
  [
    ('h100:64', {'data': 8, 'model': 8}, ('model',), 8, 4.5e11),  # in a node
    ('h100:64', {'data': 8, 'model': 8}, ('data',), 8, 5.0e10),  # one GPU of each node: one port
    ('h100:64', {'data': 64}, ('data',), 64, 4.0e11),  # all GPUs of all nodes: eight ports per node
    ('h100:16', {'data': 4, 'model': 4}, ('data',), 4, 1.0e11),  # two per node
    ('h100:16', {'data': 4, 'model': 4}, ('model[2/4]',), 2, 4.5e11),
    ('v5e:4x4', {'data': 4, 'model': 4}, ('model',), 4, 9.0e10),  # one axis of the torus
    ('v5e:4x4', {'data': 16}, ('data',), 16, 1.8e11),  # both
    ('v5p:2x2x4', {'data': 4, 'model': 4}, ('data',), 4, 3.6e11),
    ('tpu7x:2x2x1', {'data': 4, 'model': 2}, ('data',), 4, 2.0e11),
    ('gb200:64', {'data': 8, 'model': 8}, ('data',), 8, 9.0e11),  # one NVLink domain
    ('gb200:144', {'data': 2, 'model': 72}, ('data',), 2, 5.0e10),
    (
      '2xv5e:4x4',
      {'data': 2, 'model': 16},
      ('model',),
      16,
      1.8e11,
    ),  # in a slice, both axes of its torus
    ('2xv5e:4x4', {'data': 2, 'model': 16}, ('data',), 2, 3.125e9),  # between slices: one port
    ('2xv5e:4x4', {'data': 32}, ('data',), 32, 5.0e10),  # all chips of both: 16 ports
    ('2xv5e:4x4', {'data': 8, 'model': 4}, ('model',), 4, 9.0e10),
  ],
)
def test_bandwidth_of_a_group(target, mesh, axes, group, speed):
  parsed = parse_target(target)
  one = collective(axes=axes, group=group)
  assert seconds(one, parsed, mesh) == pytest.approx(1e9 / speed + (group - 1) * parsed.chip.hop)


@pytest.mark.parametrize('target', ['2xv5e:4x4', 'h100:2x16'])
@pytest.mark.parametrize('kind, stride, is_apart', [('all-reduce', 1, False), ('all-reduce', 16, True)])
def test_a_part_of_an_axis_is_within_a_node_or_between_nodes(target, kind, stride, is_apart):
  parsed = parse_target(target)
  one = collective(kind, axes=('data[2/32]',), group=2)._replace(stride=stride)
  speed = parsed.chip.network if is_apart else parsed.chip.link * max(1, parsed.chip.torus)
  assert seconds(one, parsed, {'data': 32}) == pytest.approx(1e9 / speed, rel=1e-2)


@pytest.mark.parametrize('target', ['2xv5e:4x4', 'h100:2x16'])
def test_a_device_that_permutes_between_nodes_has_one_port(target):
  parsed = parse_target(target)
  ring = collective('collective-permute', group=32)
  assert seconds(ring, parsed, {'data': 32}) == pytest.approx(1e9 / parsed.chip.network, rel=1e-2)


@given(
  st.lists(st.integers(1, 6), min_size=1, max_size=4).filter(lambda sizes: math.prod(sizes) > 1),
  st.integers(1, 8),
)
def test_the_part_of_a_mesh_in_a_slice(shape, slices):
  inside = within_slice(shape, slices)
  if math.prod(shape) % slices:
    assert inside is None
  if inside is not None:  # slices are rows of devices, one after the other
    assert math.prod(inside) * slices == math.prod(shape)
    per_slice = np.arange(slices).repeat(math.prod(inside)).reshape(shape)
    outer = tuple(size // part for size, part in zip(shape, inside))
    expected = np.arange(slices).reshape(outer)
    for axis, part in enumerate(inside):
      expected = expected.repeat(part, axis)
    assert (per_slice == expected).all()


@pytest.mark.parametrize(
  'parts, share_of', [(2, '2xv5e:4x4'), (4, 'v5e:4x4'), (8, 'v5e:2x4'), (1, '4xv5e:4x4')]
)
def test_shares_of_slices(parts, share_of):
  assert share(parse_target('4xv5e:4x4'), parts) == parse_target(share_of)


def test_meshes_with_parts_of_slices(tmp_path):
  train_step = TrainStep(lambda state, x: (state, 0.0), lambda: jnp.zeros(8), jnp.zeros((8, 8)))
  odd = spmd.Layout(spmd.abstract_mesh({'data': 3, 'model': 8}), ())
  text = (
    "The first axes of the mesh {'data': 3, 'model': 8} do not divide into the 2 slices of 2xv5e:2x6.\n"
    'Fix: list an axis first whose size is a multiple of 2, or axes whose sizes have that product.'
  )
  for estimate in (
    lambda: Estimator(train_step, platform='tpu').estimate(odd, '2xv5e:2x6', partition=False),
    lambda: layout_on_target(odd, parse_target('2xv5e:2x6')),
  ):
    with pytest.raises(TargetDeviceError) as caught:
      estimate()
    assert str(caught.value) == text
  with pytest.raises(SearchError) as caught:
    spmd.search(train_step, '2xv5e:2x6', mesh={'data': 3, 'model': 8}, top=0)
  assert str(caught.value) == text


def test_a_search_has_meshes_of_whole_slices(tmp_path, monkeypatch):
  monkeypatch.setenv('FLAX_SPMD_CACHE', str(tmp_path))
  w = lambda: spmd.LogicallyPartitioned(jnp.zeros((48, 96)), ('embed', 'mlp'))
  step = lambda state, x: (jax.tree.map(lambda w: w - jnp.sum(x @ w), state), 0.0)
  train_step = TrainStep(step, w, jax.ShapeDtypeStruct((48, 48), jnp.float32))
  result = spmd.search(train_step, '2xv5e:2x6', candidates=30, top=0)
  sizes = {tuple(one.layout.mesh.shape.values()) for one in result.estimates}
  assert len(sizes) > 5 and all(within_slice(shape, 2) for shape in sizes)


def test_a_chip_with_a_name_like_slices(tmp_path):
  file = tmp_path / 'chips.toml'
  figures = chips()['v5e']._asdict()
  lines = [f'{name} = {value!r}' for name, value in figures.items() if isinstance(value, int | float)]
  flops = ', '.join(f'{name} = {value}' for name, value in figures['flops'].items())
  file.write_text(
    '\n'.join(['["2xv5e"]', 'platform = "tpu"', 'source = "none"', *lines, f'flops = {{{flops}}}'])
  )
  assert parse_target('2xv5e:4x4', file).slices == 1


def test_devices_of_slices_as_positions_in_the_mesh():
  ids = [100000, 100001, 100003, 100002, 200000, 200001, 200003, 200002]  # rings of 2 x 2 chips
  devices = np.array([types.SimpleNamespace(id=number) for number in ids]).reshape(2, 4)
  written = {
    '"{1,2}x{0:3}"': '{{0,4},{1,5},{3,7},{2,6}}',
    '"{1:2}x{0,2}"': '{{0,4},{3,7}}',
    '{{100000,200000},{100003,200003}}': '{{0,4},{2,6}}',
    '{{200002->100000},{100002->200000}}': '{{7,0},{3,4}}',
  }
  line = 'send(%x), frontend_attributes={{_xla_megascale_target={},a="{{100000,200000}}"}}, channel_id=100000\n'
  text = ''.join(map(line.format, written))
  assert with_positions(text, devices) == ''.join(map(line.format, written.values()))
  with pytest.raises(ValueError, match='are written in an unknown way: _xla_megascale_target=<=2,4'):
    with_positions('send(%x), frontend_attributes={_xla_megascale_target=<=2,4}', devices)


def test_collectives_between_slices(tpu_compiler):
  """Gradients are reduced over both slices: by half of the shards of one, or by each device's."""
  w = spmd.LogicallyPartitioned(jnp.zeros((1024, 1024)), ('embed', 'mlp'))

  def step(state, x):
    grads = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w.unbox()) ** 2))(state)
    return jax.tree.map(jnp.subtract, state, grads), 0.0

  train_step = TrainStep(step, lambda: w, jax.ShapeDtypeStruct((256, 1024), jnp.float32))
  layouts = {
    'data': spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'),)),
    'fsdp': spmd.Layout(
      spmd.abstract_mesh({'replica': 2, 'fsdp': 4}), (('batch', ('replica', 'fsdp')), ('embed', 'fsdp'))
    ),
    'across': spmd.Layout(spmd.abstract_mesh({'fsdp': 8}), (('batch', 'fsdp'), ('embed', 'fsdp'))),
    'tensor': spmd.Layout(
      spmd.abstract_mesh({'data': 2, 'model': 4}), (('batch', 'data'), ('mlp', 'model'))
    ),
  }
  found = {}
  for name, outcome in zip(layouts, compare(train_step, layouts, '2xv5e:2x2')):
    assert outcome.counts.opaque == ()
    between = [one for one in outcome.counts.collectives if one.group == 2 and one.bytes > 2**16]
    found[name] = {(one.kind, one.axes, one.stride): one.wire for one in between}
  quarter = (
    2.0**20
  )  # bytes of a fourth of the weight, that each device has of it after the sum within a slice
  reduced = lambda axis, stride=1: {('all-reduce', (axis,), stride): pytest.approx(quarter, rel=0.1)}
  assert found['data'] == reduced('data[2/8]', 4)
  assert found['fsdp'] == reduced('replica')
  assert found['tensor'] == reduced('data')
  gathered = found['across'].pop(('all-gather', ('fsdp[2/8]',), 4))
  assert gathered == quarter / 2 and found['across'] == reduced('fsdp[2/8]', 4)


def test_latency_dominates_small_transfers():
  parsed = parse_target('h100:8')
  often = collective('all-reduce', wire=8.0, times=1000)
  assert seconds(often, parsed, {'data': 8}) == pytest.approx(1000 * 14 * parsed.chip.hop, rel=1e-3)


def test_a_dtype_without_a_peak():
  h100 = chips()['h100']
  assert peak(h100, 'f8') > peak(h100, 'bf16') == peak(h100, 'f16')
  only = h100._replace(flops={'bf16': 1e12})
  assert [peak(only, dtype) for dtype in ('bf16', 'f32', 'int8', 'f64')] == [1e12] * 4
  assert peak(h100._replace(flops={'bf16': 3.0, 'f32': 1.0}), 'f64') == 1.0


@pytest.mark.parametrize('spread', ['[0.9]', '[1.1, 0.9]', '[0.0, 1.0]'])
def test_a_bracket_that_is_none(tmp_path, spread):
  file = tmp_path / 'mine.toml'
  file.write_text(MINE + f'spread = {spread}\n')
  with pytest.raises(TargetDeviceError) as caught:
    parse_target('x1:4', file)
  assert str(caught.value) == (
    f'{file}, [x1]: spread = {spread} and pace = 1.0 are no bracket.\n'
    'Fix: give spread two factors, the lower one first, and pace one, all larger than 0.'
  )


def test_the_bracket():
  parsed = parse_target('h100:8')
  efficiency, (low, high) = parsed.chip.efficiency, parsed.chip.spread
  flops, moved = 989e12 * efficiency, 3.35e12 * BANDWIDTH  # of a second
  ring = collective(wire=4.5e11 / 4)
  counts = Counts(flops, moved / 4, (ring,), (), ())
  bracket = cost(counts, parsed, {'data': 8})
  assert bracket.compute == pytest.approx(1.0) and bracket.memory == pytest.approx(0.25)
  assert bracket.links[('data',)] == pytest.approx(0.25, rel=1e-3)
  assert bracket.low == pytest.approx(low * 1.5, rel=1e-3)
  assert bracket.high == pytest.approx(high * 1.5, rel=1e-3)
  assert bracket.bound == 'compute' and bracket.expected == pytest.approx(1.5, rel=1e-3)
  slow = cost(counts._replace(collectives=(collective(wire=4.5e12),)), parsed, {'data': 8})
  assert slow.bound == 'data'
  # Longer than any that is published: the rest may be hidden behind it, or nothing.
  assert slow.low == pytest.approx(low * 10, rel=1e-2)
  assert slow.high == pytest.approx(high * 11.25, rel=1e-2)
  waits = cost(counts._replace(hbm_bytes=2 * moved, collectives=()), parsed, {'data': 8})
  assert waits.bound == 'memory' and waits.memory == pytest.approx(2.0)
  assert waits.low == pytest.approx(low * (1 + 0.85 * 2))
  assert waits.high == pytest.approx(high * (1 + 1.2 * 2))
  paced = parsed._replace(chip=parsed.chip._replace(pace=2.0, spread=(0.9, 1.1)))
  assert cost(counts, paced, {'data': 8}).low == pytest.approx(2 * 0.9 / low * bracket.low)


def test_products_take_the_longer_of_their_flops_and_their_bytes():
  chip = chips()['h100']
  flops, moved = 989e12 * chip.efficiency, 3.35e12 * BANDWIDTH  # of a second
  products = (Product(flops / 4, moved / 8, 3.0), Product(flops / 8, moved / 2, 2.0))
  counts = Counts(flops, moved * 2, (), (), (), products, 1e5)
  compute, memory = local_seconds(counts, chip, 989e12)
  waiting = 2 * (1 / 2 - 1 / 8)  # seconds of the second product beside its FLOPs
  rest = 2 - 3 / 8 - 2 / 2  # of the bytes of other operations
  assert compute == pytest.approx(1)
  assert memory == pytest.approx(waiting + rest + 1e5 * START)
  tpu = chips()['v5e']
  assert local_seconds(Counts(0, 0, (), (), (), (), 1e5), tpu, 1e12) == (0, 0)
  assert local(2.0, 3.0, 'tpu') == 3.0 and local(2.0, 3.0, 'cuda') == 5.0


TIMES = st.floats(1e-6, 1e3)


@given(TIMES, TIMES, TIMES, st.floats(1.0, 3.0), st.sampled_from(['cuda', 'tpu']))
def test_ends_of_brackets_never_become_less_with_more_work(compute, memory, sent, factor, platform):
  low, high = ends(compute, memory, sent, platform)
  assert max(local(compute, 0.85 * memory, platform), sent) <= low * (1 + 1e-9)
  assert low <= local(compute, memory, platform) + sent <= high * (1 + 1e-9)
  for more in ((factor, 1, 1), (1, factor, 1), (1, 1, factor)):
    parts = [part * each for part, each in zip((compute, memory, sent), more)]
    for one, other in zip((low, high), ends(*parts, platform)):
      assert one <= other * (1 + 1e-9)


def test_every_page_says_how_far_brackets_can_be_trusted():
  h100, b200 = chips()['h100'], chips()['b200']
  assert coverage(h100) == (
    'Time brackets: of 52 published or measured steps, 50 lie in their bracket when it is fitted to the others, and none '
    'is faster.'
  )
  assert coverage(b200) == 'Time brackets: a guess, since no published step of b200 was compared.'
  assert coverage(h100._replace(pace=1.25)) == (
    'Time brackets: calibrated by measured steps, which take 1.25 x the expected time.'
  )
