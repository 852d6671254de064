"""Replica groups in all notations, and the mesh axes that they span."""

import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from flax_spmd._src.hlo.counts import count
from flax_spmd._src.hlo.device_groups import (
  axes_of,
  axes_of_pairs,
  connected,
  read_groups,
  read_pairs,
  stride_of,
)

ALONG_MODEL = [[0, 1, 2, 3], [4, 5, 6, 7]]
ALONG_DATA = [[0, 4], [1, 5], [2, 6], [3, 7]]
MESH = {'data': 2, 'model': 4}


@pytest.mark.parametrize(
  'text, expected',
  [
    ('{{0,1,2,3},{4,5,6,7}}', ALONG_MODEL),
    ('[2,4]<=[8]', ALONG_MODEL),
    ('[4,2]<=[2,4]T(1,0)', ALONG_DATA),
    ('[1,8]<=[8]', [list(range(8))]),
    ('', [list(range(8))]),
    ('{}', [list(range(8))]),
    ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", ALONG_MODEL),
    ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", ALONG_DATA),
    ("mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}", [list(range(8))]),
    ("mesh['a'=1,'b'=8] {'b'}", [list(range(8))]),
    # Parts of axes, (product of the sizes before it)size; jax 0.10 permutes devices instead of axes.
    ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ("mesh['a'=8] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ("mesh['a'=8] {'a':(1)2,'a':(4)2}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ("mesh['a'=4,'b'=2] ([2,4]T(1,0)) {'b'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ("mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'b'}", ALONG_MODEL),
    ("mesh['a'=2,'b'=4], device_ids=(0,4,1,5,2,6,3,7) {'b'}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
  ],
)
def test_notations(text, expected):
  assert sorted(map(sorted, read_groups(text, 8).tolist())) == expected


def test_uneven_lists():
  assert read_groups('{{0,1,2},{3}}', 4).tolist() == [[0, 1, 2], [3, -1, -1]]
  assert axes_of(read_groups('{{0,1,2},{3}}', 4), {'a': 4}) == ()


@pytest.mark.parametrize(
  'groups, expected',
  [
    (ALONG_MODEL, ('model',)),
    (ALONG_DATA, ('data',)),
    ([list(range(8))], ('data', 'model')),
    ([[0, 1], [2, 3], [4, 5], [6, 7]], ('model[2/4]',)),
    ([[0, 2], [1, 3], [4, 6], [5, 7]], ('model[2/4]',)),
    ([[0, 1, 4, 5], [2, 3, 6, 7]], ('data', 'model[2/4]')),
    ([[0], [1], [2], [3], [4], [5], [6], [7]], ()),
    ([[0, 5], [1, 4], [2, 7], [3, 6]], ()),  # diagonals
    ([[0, 1], [2, 6]], ()),  # each along another axis
    ([[0, 8]], ()),  # not of this mesh
  ],
)
def test_axes(groups, expected):
  assert axes_of(np.array(groups), MESH) == expected


@given(st.integers(1, 4), st.integers(1, 4), st.integers(2, 4), st.integers(1, 3))
def test_the_stride_of_a_part_of_an_axis(before, outer, count, stride):
  size = outer * count * stride
  devices = np.arange(before * size * 2).reshape(before * outer, count, stride * 2)
  groups = devices.transpose(0, 2, 1).reshape(-1, count)
  parts = axes_of(groups, {'a': before, 'b': size, 'c': 2})
  expected = stride if parts and parts[0].endswith(']') else 1
  assert stride_of(groups, {'a': before, 'b': size, 'c': 2}) == expected


@pytest.mark.parametrize(
  'text, group, expected',
  [
    ('{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}', 4, ('model',)),
    ('{{0,1},{1,2},{2,3},{4,5},{5,6},{6,7}}', 4, ('model',)),
    ('{{0,2},{2,0},{1,3},{3,1}}', 2, ('model[2/4]',)),
    ('{{0,4},{4,0}}', 2, ('data',)),
    ('{{0,0},{1,4},{4,1}}', 2, ('data', 'model')),
    ('{{0,0},{1,1}}', 0, ()),
    ('{{0,9}}', 2, ()),
  ],
)
def test_pairs(text, group, expected):
  pairs = read_pairs(text)
  assert connected(pairs).shape[1] == group
  assert axes_of_pairs(pairs, MESH) == expected


@st.composite
def meshes(draw):
  """A mesh, and at least one of its axes."""
  sizes = draw(st.lists(st.integers(2, 4), min_size=1, max_size=4))
  chosen = draw(st.sets(st.sampled_from(range(len(sizes))), min_size=1))
  return {f'axis{number}': size for number, size in enumerate(sizes)}, [
    f'axis{number}' for number in sorted(chosen)
  ]


@given(meshes())
def test_all_notations_agree(case):
  mesh, axes = case
  total = math.prod(mesh.values())
  devices = np.arange(total).reshape(list(mesh.values()))
  back = [dim for dim, axis in enumerate(mesh) if axis in axes]
  order = [dim for dim in range(len(mesh)) if dim not in back] + back
  size = math.prod(mesh[axis] for axis in axes)
  groups = devices.transpose(order).reshape(-1, size)
  lists = '{' + ','.join('{' + ','.join(map(str, group)) + '}' for group in groups.tolist()) + '}'
  iota = f'{list(groups.shape)}<={list(mesh.values())}T({",".join(map(str, order))})'.replace(' ', '')
  sizes = ','.join(f"'{axis}'={size}" for axis, size in mesh.items())
  named = f'mesh[{sizes}] {{' + ','.join(f"'{axis}'" for axis in axes) + '}'
  for text in (lists, iota, named):
    assert read_groups(text, total).tolist() == groups.tolist()
  assert axes_of(groups, mesh) == tuple(axes)


@pytest.mark.parametrize(
  'axes', [axes for number in (1, 2, 3) for axes in itertools.combinations('abc', number)], ids='+'.join
)
def test_groups_of_the_installed_jax(axes):
  mesh = jax.make_mesh((2, 2, 2), ('a', 'b', 'c'), axis_types=(jax.sharding.AxisType.Auto,) * 3)
  placed = NamedSharding(mesh, PartitionSpec(axes))
  whole = NamedSharding(mesh, PartitionSpec())
  x = jax.ShapeDtypeStruct((8, 4), 'float32', sharding=placed)
  found = count(
    jax.jit(lambda x: x * 2, out_shardings=whole).lower(x).compile().as_text(), dict(mesh.shape)
  )
  assert found.by_axis() == {axes: 4 * 4 * (8 - 8 // 2 ** len(axes))}
