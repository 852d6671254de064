"""States whose classes check their fields when they are made, such as those of jaxtyping, and let JAX's tree functions pass."""

import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd

RULES = ('batch', 'data'), spmd.fsdp('data', min_size=1)


def is_made_by_jax():
  """Whether a tree function of JAX is on the stack: leaves may then be anything, such as shardings."""
  frames = (frame for frame, _ in traceback.walk_stack(None))
  return any(frame.f_globals['__name__'] == 'jax._src.tree_util' for frame in frames)


@struct.dataclass
class Checked:
  step: jax.Array
  w: jax.Array

  def __post_init__(self):
    wrong = [one for one in (self.step, self.w) if not isinstance(one, jax.Array | np.ndarray)]
    if wrong and not is_made_by_jax():
      raise TypeError(f'{wrong} are no arrays')


def create():
  return Checked(jnp.zeros((), jnp.int32), jnp.ones((8, 16)))


def train_step(state, x):
  loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state.w)
  return state.replace(step=state.step + 1, w=state.w - 0.1 * gradient), loss


@pytest.fixture
def layout():
  return spmd.Layout({'data': 8}, RULES)


def test_the_check_fails_outside_of_jax():
  with pytest.raises(TypeError, match='are no arrays'):
    jax.tree.structure(create()).unflatten([None, None])


def test_a_step(layout):
  state = layout.init(create)
  assert state.w.sharding.spec == P(None, 'data')
  step = layout.jit(train_step, donate_argnums=0)
  for number in range(3):
    state, loss = step(state, np.ones((16, 8), np.float32))
    assert state.step == number + 1 and np.isfinite(loss)
  assert state.w.sharding.spec == P(None, 'data')


@pytest.mark.parametrize(
  'use',
  [
    lambda layout, state, path: layout.shard(state),
    lambda layout, state, path: layout.gather(state),
    lambda layout, state, path: layout.abstract(create),
    lambda layout, state, path: layout.spec(state),
    lambda layout, state, path: layout.sharding(state),
    lambda layout, state, path: layout.reshard(state, spmd.Layout({'x': 2, 'data': 4}, RULES)),
    lambda layout, state, path: layout.check(state),
    lambda layout, state, path: spmd.explain(layout, state),
    lambda layout, state, path: spmd.checkpoint.save(path / '1', state, layout=layout),
  ],
)
def test_other_uses(layout, tmp_path, use):
  use(layout, layout.init(create), tmp_path)
