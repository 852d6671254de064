"""Meshes: hybrid ones over slices, and invalid arguments."""

import math
from textwrap import dedent
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import mesh_utils
from jax.sharding import AxisType

import flax_spmd as spmd
from flax_spmd import errors
from flax_spmd._src.mesh import hybrid_grid
from tests.texts import text_of


def ids(mesh):
  return np.vectorize(lambda device: device.id)(mesh.devices)


def test_slices_of_one_process_are_equal_groups():
  mesh = spmd.make_mesh({'fsdp': -1}, dcn={'replica': 2})
  assert dict(mesh.shape) == {'replica': 2, 'fsdp': 4}
  assert ids(mesh).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_an_axis_within_and_across_slices():
  mesh = spmd.make_mesh({'data': 2, 'model': 2}, dcn={'data': 2})
  assert dict(mesh.shape) == {'data': 4, 'model': 2}
  assert ids(mesh).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
  mesh = spmd.make_mesh({'data': 2, 'model': 2}, dcn={'model': 2})
  assert ids(mesh).tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize('make', [spmd.make_mesh, spmd.abstract_mesh])
def test_a_mesh_that_jax_cannot_count(make):
  with pytest.raises(errors.MeshError) as caught:
    make({'data': 2**20, 'model': 2**11})
  assert str(caught.value) == dedent("""\
    The mesh {'data': 1048576, 'model': 2048} has more than 2147483647 devices, which JAX cannot count.
    Fix: pass smaller sizes.""")


@given(st.permutations([1, 2, 2]), st.permutations([1, 1, 2]))
def test_the_device_order_of_hybrid_meshes_is_that_of_jax(inner, outer):
  """Compared with `create_hybrid_device_mesh`, on devices with a slice index."""
  devices = [
    SimpleNamespace(id=i, slice_index=i // 4, process_index=0, platform='cpu', device_kind='cpu')
    for i in range(8)
  ]
  grids = [np.array(devices[i : i + 4], object).reshape(inner) for i in (0, 4)]
  expected = mesh_utils.create_hybrid_device_mesh(inner, outer, devices)
  grid = hybrid_grid(grids, outer)
  assert [d.id for d in grid.flat] == [d.id for d in expected.flat] and grid.shape == expected.shape


def test_physical_axes_may_be_split():
  mesh = spmd.make_mesh({'data': 2, 'model': 4}, split_physical_axes=True)
  assert mesh == spmd.make_mesh({'data': 2, 'model': 4})


def test_more_slices_than_there_are():
  assert text_of(errors.MeshError, spmd.make_mesh, {'fsdp': -1}, dcn={'replica': 3}) == dedent("""\
    The mesh needs 3 slices (dcn={'replica': 3}), but the 8 (cpu) are in 1 slice(s) and 1 process(es).
    Fix: choose dcn sizes whose product is the number of slices, or of processes.""")
  assert (
    text_of(errors.MeshError, spmd.make_mesh, {'fsdp': 8}, dcn={'replica': 2})
    == dedent("""\
    The mesh {'replica': 2, 'fsdp': 8} needs 16 devices, but 8 (cpu) are available.
    Fix: choose sizes whose product is at most 8, emulate devices with jax.config.update('jax_num_cpu_devices', 16) before JAX is first used, or plan without devices: flax_spmd.abstract_mesh({'replica': 2, 'fsdp': 16}).""").replace(
      "'fsdp': 16", "'fsdp': 8"
    )
  )


class SliceDevice:
  """A CPU device that is in a slice."""

  def __init__(self, device, slice_index, process_index=0):
    self.device, self.slice_index, self.process_index = device, slice_index, process_index

  def __getattr__(self, name):
    return getattr(self.device, name)


def devices_in(slices):
  return [SliceDevice(device, n * slices // 8) for n, device in enumerate(jax.devices())]


@given(st.sampled_from([1, 2, 4, 8]), st.permutations([-1, 1, 2]), st.permutations([-1, 1, 2]))
def test_sizes_of_minus_one_within_and_between_slices_as_in_maxtext(slices, inner, outer):
  """One -1 each: the rest of the slices, and the rest of the devices of a slice."""
  names = 'data', 'fsdp', 'tensor'
  axes, dcn = dict(zip(names, inner, strict=True)), dict(zip(names, outer, strict=True))
  if slices == 1 or slices == 8:  # a size of 2 does not fit
    with pytest.raises(errors.MeshError):
      spmd.make_mesh(axes, dcn=dcn, devices=devices_in(slices))
    return
  fill = lambda sizes, total: [total // 2 if size == -1 else size for size in sizes]
  expected = [a * b for a, b in zip(fill(inner, 8 // slices), fill(outer, slices), strict=True)]
  mesh = spmd.make_mesh(axes, dcn=dcn, devices=devices_in(slices))
  assert list(mesh.shape.values()) == expected


class TorusDevice(SliceDevice):
  """A CPU device that is a TPU of a slice, at a position of its torus."""

  platform, device_kind, core_on_chip = 'tpu', 'TPU v4', 0

  def __init__(self, device, slice_index, coords):
    super().__init__(device, slice_index)
    self.coords = coords


def torus(slices, *shape):
  """The TPUs of some slices, each a torus of this shape."""
  places = [(n, (*at, 0)) for n in range(slices) for at in np.ndindex(*shape)]
  return [TorusDevice(device, *place) for device, place in zip(jax.devices(), places)]


SHAPES = st.lists(st.integers(1, 8), min_size=1, max_size=4).filter(
  lambda sizes: 8 % math.prod(sizes) == 0
)


@given(st.sampled_from([(1, 2, 4), (2, 2, 2), (4, 2, 1)]), SHAPES)
def test_slices_are_along_the_first_axes(topology, sizes):
  devices = torus(*topology)
  mesh = spmd.make_mesh({f'axis{n}': size for n, size in enumerate(sizes)}, devices=devices)
  used = math.prod(sizes)
  assert mesh.devices.shape == tuple(sizes)
  assert [one.slice_index for one in mesh.devices.flat] == [one.slice_index for one in devices[:used]]
  assert {one.id for one in mesh.devices.flat} == {one.id for one in devices[:used]}


def test_axes_that_do_not_divide_into_slices():
  devices = torus(2, 3, 1)
  fix = (
    'Fix: list an axis first whose size is a multiple of 2, or give the sizes between slices, such as '
    "make_mesh({'fsdp': -1}, dcn={'replica': 2})."
  )
  assert text_of(errors.MeshError, spmd.make_mesh, {'data': 3, 'model': 2}, devices=devices) == (
    "The first axes of the mesh {'data': 3, 'model': 2} do not divide into the 2 slices of its devices, which have 3 and 3 of them.\n"
    f'{fix}'
  )
  assert text_of(errors.MeshError, spmd.make_mesh, {'data': 6}, devices=torus(2, 2, 2)) == (
    f"The first axes of the mesh {{'data': 6}} do not divide into the 2 slices of its devices, which have 4 and 2 of them.\n{fix}"
  )
  others = [SliceDevice(device, n // 3) for n, device in enumerate(jax.devices()[:6])]
  assert dict(spmd.make_mesh({'data': 3, 'model': 2}, devices=others).shape) == {'data': 3, 'model': 2}


@pytest.mark.parametrize('slices', [1, 2])
def test_an_axis_of_a_torus_is_split_if_the_sizes_require_it(slices):
  devices = torus(slices, 8 // slices, 1)
  sizes = {'replica': slices, 'data': 2, 'model': 4 // slices}
  assert dict(spmd.make_mesh(sizes, devices=devices).shape) == sizes
  assert text_of(
    errors.MeshError, spmd.make_mesh, sizes, devices=devices, split_physical_axes=False
  ) == (
    f'The mesh {sizes} has axes that are no products of those of the torus of its devices, which JAX does not split.\n'
    'Fix: omit split_physical_axes, or choose other sizes.'
  )


def test_minus_one_between_slices_is_one_on_a_single_slice_and_process():
  mesh = spmd.make_mesh({'fsdp': -1}, dcn={'data': -1})
  assert dict(mesh.shape) == {'data': 1, 'fsdp': 8}


def test_processes_count_where_devices_have_no_slices():
  devices = [SliceDevice(device, None, n // 2) for n, device in enumerate(jax.devices())]
  mesh = spmd.make_mesh({'fsdp': -1}, dcn={'data': -1}, devices=devices)
  assert dict(mesh.shape) == {'data': 4, 'fsdp': 2}


def test_minus_one_between_slices_that_cannot_be_computed():
  assert text_of(
    errors.MeshError, spmd.make_mesh, {'fsdp': -1}, dcn={'data': -1, 'replica': 3}, devices=devices_in(4)
  ) == dedent("""\
    The size of axis 'data' of dcn={'data': -1, 'replica': 3} cannot be computed: the 8 (cpu) are in 4 slice(s), which is not divisible by 3.
    Fix: pass a size for 'data', or choose other sizes that divide 4.""")
  assert text_of(
    errors.MeshError, spmd.make_mesh, {'fsdp': -1}, dcn={'data': -1, 'replica': 2}
  ) == dedent("""\
    The size of axis 'data' of dcn={'data': -1, 'replica': 2} cannot be computed: the 8 (cpu) are in 1 process(es), which is not divisible by 2.
    Fix: pass a size for 'data', or choose other sizes that divide 1.""")


def test_invalid_sizes_between_slices():
  assert text_of(
    errors.MeshError, spmd.make_mesh, {'fsdp': -1}, dcn={'data': -1, 'replica': -1}
  ) == dedent("""\
    dcn={'data': -1, 'replica': -1} has more than one size of -1: 'data', 'replica'.
    Fix: pass -1 for one axis only.""")
  assert text_of(
    errors.MeshError, spmd.make_mesh, {'fsdp': -1}, dcn={'data': 0, 'replica': '2'}
  ) == dedent("""\
    dcn={'data': 0, 'replica': '2'} has invalid sizes: 'data', 'replica'.
    Fix: pass positive integers; one size may be -1.""")


@pytest.mark.parametrize('axes', [(2, 4), 8, 'data', None])
def test_a_mesh_without_names(axes):
  fix = "Fix: give every axis a name, as in {'data': 2, 'model': 4}."
  assert (
    text_of(errors.MeshError, spmd.make_mesh, axes)
    == f'The mesh is {axes!r}, where the size of each axis is expected.\n{fix}'
  )
  assert (
    text_of(errors.MeshError, spmd.make_mesh, {}, dcn=axes or 3)
    == f'dcn is {axes or 3!r}, where the size of each axis is expected.\n{fix}'
  )


def test_sizes_may_be_numbers_of_numpy():
  sizes = {'data': np.int64(2), 'model': np.array([4, 2])[0]}
  assert spmd.make_mesh(sizes) == spmd.make_mesh({'data': 2, 'model': 4})
  assert spmd.abstract_mesh(sizes) == spmd.abstract_mesh({'data': 2, 'model': 4})
  assert dict(spmd.make_mesh({'data': 2}, dcn={'replica': np.int32(4)}).shape) == {
    'replica': 4,
    'data': 2,
  }


def test_a_mesh_without_axes():
  layout, x = spmd.Layout({}), np.arange(8.0)
  state = layout.init(lambda x: {'w': jax.numpy.asarray(x)}, x)
  double = layout.jit(lambda state, x: ({'w': 2 * state['w']}, x.sum()), donate_argnums=0)
  np.testing.assert_array_equal(double(state, layout.shard(x))[0]['w'], 2 * x)


def test_hsdp_keeps_parameters_within_a_slice():
  layout = spmd.Layout(
    spmd.make_mesh({'fsdp': 4}, dcn={'replica': 2}), spmd.presets.hybrid_fsdp(min_size=1)
  )
  kernel = layout.shard(np.ones((8, 4)))
  holders = {(s.index[0].start, s.device.id) for s in kernel.addressable_shards}
  assert {device for start, device in holders if start in (0, None)} == {0, 4}
  assert layout.shard(np.ones((8, 4)), ('batch', None)).sharding.spec == jax.P(('replica', 'fsdp'), None)


@pytest.mark.parametrize('make', [spmd.make_mesh, spmd.abstract_mesh])
def test_axis_types_in_order_are_those_of_jax(make):
  types = (AxisType.Auto, AxisType.Explicit)
  expected = jax.make_mesh((2, 4), ('data', 'model'), axis_types=types)
  assert make({'data': 2, 'model': 4}, axis_types=types).axis_types == expected.axis_types


@pytest.mark.parametrize(
  ('types', 'wrong'),
  [
    (AxisType.Manual, f'{AxisType.Manual!r} is neither AxisType.Auto nor Explicit'),
    ('auto', "'auto' is neither AxisType.Auto nor Explicit"),
    (
      {'dta': AxisType.Explicit, 'data': 'explicit'},
      "'dta' is not an axis, 'explicit' is neither AxisType.Auto nor Explicit",
    ),
    ((AxisType.Auto,), '1 type for 2 axes'),
  ],
)
@pytest.mark.parametrize('make', [spmd.make_mesh, spmd.abstract_mesh])
def test_invalid_axis_types(make, types, wrong):
  with pytest.raises(errors.MeshError) as caught:
    make({'data': 2, 'model': 4}, axis_types=types)
  assert str(caught.value) == (
    f"axis_types={types!r} for the mesh {{'data': 2, 'model': 4}}: {wrong}.\n"
    'Fix: pass jax.sharding.AxisType.Auto or Explicit for all axes, one for each in order, or a dict of them by axis name.'
  )
