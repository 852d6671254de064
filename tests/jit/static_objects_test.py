"""Arguments that are neither arrays nor numbers: static, wherever they are in the arguments."""

import dataclasses
import enum

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import errors

LAYOUT = spmd.Layout({'data': 8}, (('batch', 'data'),))
X = np.arange(16.0, dtype=np.float32)


class Mode(enum.Enum):
  TRAIN = 1
  EVAL = 2


class Level(enum.IntEnum):
  LOW = 1
  HIGH = 2


@dataclasses.dataclass(frozen=True)
class Config:
  width: int
  activation: object = jnp.tanh


def test_objects_reach_the_function_as_they_are():
  def fn(x, mode, level, config, activation, name, *, flags):
    assert (mode, level, name, flags) == (Mode.TRAIN, Level.HIGH, 'adam', {'a': (Mode.EVAL, None)})
    assert type(level) is Level and not isinstance(x, np.ndarray)
    return activation(config.activation(x)) * config.width

  result = LAYOUT.jit(fn)(
    X, Mode.TRAIN, Level.HIGH, Config(3), jnp.abs, 'adam', flags={'a': (Mode.EVAL, None)}
  )
  np.testing.assert_allclose(result, np.abs(np.tanh(X)) * 3, rtol=1e-6)


def test_numbers_are_traced_and_other_values_trace_again():
  traces = []

  @LAYOUT.jit
  def fn(x, scale, mode):
    traces.append(mode)
    return x * scale if mode is Mode.TRAIN else x

  for scale in (1, 2, 3):
    np.testing.assert_array_equal(fn(X, scale, Mode.TRAIN), X * scale)
  np.testing.assert_array_equal(fn(X, 2, Mode.EVAL), X)
  np.testing.assert_array_equal(fn(X, 4, Mode.TRAIN), X * 4)
  assert traces == [Mode.TRAIN, Mode.EVAL]


def test_equal_values_of_different_types_are_different():
  fn = LAYOUT.jit(lambda x, kind: x + (1 if isinstance(kind[0], str) else 2))
  assert fn(0, ('a',)) == 1 and fn(0, (b'a',)) == 2


def test_objects_among_arrays_and_with_placements_and_donation():
  def fn(state, x):
    return {'w': state['w'] + x, 'name': jnp.float32(len(state['name']))}

  for options in ({}, {'donate_argnums': 0}, {'in_rules': ({'w': ('batch',), 'name': None}, None)}):
    w = LAYOUT.shard(X, ('batch',))
    result = LAYOUT.jit(fn, **options)({'w': w, 'name': 'abc'}, 1.0)
    assert result['w'].sharding.spec == P('data') and result['name'] == 3
    assert w.is_deleted() == ('donate_argnums' in options)


def test_lowering_and_shapes_take_objects_too():
  fn = LAYOUT.jit(lambda x, mode: x if mode is Mode.EVAL else x[:8])
  assert fn.eval_shape(X, Mode.TRAIN).shape == (8,)
  assert fn.lower(jax.ShapeDtypeStruct((16,), jnp.float32), Mode.EVAL).out_info.shape == (16,)
  assert jax.jit(lambda x: fn(x, Mode.TRAIN))(X).shape == (8,)


def test_objects_that_are_not_hashable_are_named():
  class Table(dict):
    pass

  fn = LAYOUT.jit(lambda x, options, names: x)
  for _ in range(2):
    with pytest.raises(errors.LayoutError) as caught:
      fn(X, {'table': Table(), 'mode': Mode.EVAL}, np.array(['a']))
    assert str(caught.value) == (
      'argument options/table is a Table, which is neither an array nor hashable.\n'
      'argument names is a ndarray, which is neither an array nor hashable.\n'
      'Fix: pass it as arrays, or as a hashable object (a tuple, a frozen dataclass), which is then static.'
    )
