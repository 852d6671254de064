"""The dimensions of a result that come from one of an argument; the oracle is the same function of a larger argument."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from flax_spmd._src.operand_dimensions import input_dimensions

SHAPE = (3, 5, 7)


def looped(x):
  body = lambda state: (state[0] + 1, jnp.tanh(state[1]) + x)
  return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1]


def swapped_in_a_loop(x):
  """Carries both orders of two dimensions of one size, so each comes from both."""
  square = jnp.einsum('abc,dbc->ad', x, x)
  return jax.lax.scan(lambda carry, _: (carry.T, None), square, None, 3)[0]


def sums_so_far(x):
  body = lambda carry, row: (carry + row, carry.sum(-1))
  return jax.lax.scan(body, jnp.zeros(x.shape[1:]), x)[1]


def convolved(x):
  kernel, places = jnp.ones((2, x.shape[2], 4)), ('NWC', 'WIO', 'NWC')
  return jax.lax.conv_general_dilated(x, kernel, (1,), 'VALID', dimension_numbers=places)


FUNCTIONS = {
  'by element': lambda x: jnp.where(x > 0, x, jax.nn.gelu(x) * 2),
  'broadcast': lambda x: x[:, None, :, 0, None] * jnp.ones((1, 1, 1, 4)),
  'transpose': lambda x: x.transpose(1, 2, 0),
  'merged': lambda x: x.reshape(3, -1) if x.shape[0] == 3 else x.reshape(x.shape[0], -1),
  'sums': lambda x: x.sum(1) + x.max(1) + x.argmin(1),
  'squeeze': lambda x: x[:, :, :1].squeeze(-1).cumsum(0),
  'product': lambda x: jnp.einsum('abc,ce->eab', x, jnp.ones((x.shape[2], 4))),
  'batched product': lambda x: jnp.einsum('abc,dbc->bad', x, x),
  'lookup': lambda x: jnp.take(jnp.ones((9, 2)), x.astype(int), axis=0),
  'rows': lambda x: x[:, jnp.array([0, 1, 1])],
  'along': lambda x: jnp.take_along_axis(x, x.argmax(1, keepdims=True), 1),
  'parts': lambda x: jnp.concatenate([x[:, 1:], jnp.pad(x, ((0, 0), (1, 0), (0, 0)))], 1),
  'sorted': lambda x: jnp.sort(x, 1) + jax.lax.top_k(x, 1)[0],
  'window': lambda x: jax.lax.conv_general_dilated(
    x, jnp.ones((2, x.shape[2], 4)), (1,), 'VALID', dimension_numbers=('NWC', 'WIO', 'NWC')
  )[:, 0],
  'scan': lambda x: jax.lax.scan(
    lambda carry, row: (carry + row, carry.sum(-1)), jnp.zeros(x.shape[1:]), x
  )[1],
  'carry': lambda x: jax.lax.scan(lambda carry, row: (carry + row, None), x[0], x)[0],
  'while': looped,
  'swapped': swapped_in_a_loop,
  'cond': lambda x: jax.lax.cond(x.sum() > 0, lambda x: x.mean(1), lambda x: x[:, 0], x),
  'layers': jax.checkpoint(lambda x: jax.nn.softmax(jax.nn.relu(x))),
  'gradient': jax.grad(lambda x: nn.gelu(jax.nn.logsumexp(x, 1)).sum()),
  'numbers': lambda x: jax.random.normal(jax.random.key(0), (4, 2)) + jnp.arange(2)[None],
  'constant': lambda x: jnp.ones(()),
}


@pytest.mark.parametrize('name', FUNCTIONS)
def test_a_dimension_comes_from_those_that_change_its_size(name):
  fn = FUNCTIONS[name]
  trace = lambda shape: jax.make_jaxpr(fn)(jax.ShapeDtypeStruct(shape, jnp.float32))
  program = trace(SHAPE)
  rank = len(program.out_avals[0].shape)
  found = {(e, d) for d in range(rank) for number, e in input_dimensions(program, 0, d) if number == 0}
  expected = set()
  for e, size in enumerate(SHAPE):
    shape = trace((*SHAPE[:e], 2 * size, *SHAPE[e + 1 :])).out_avals[0].shape
    expected |= {(e, d) for d in range(rank) if shape[d] != program.out_avals[0].shape[d]}
  if name == 'merged':  # of the second dimension, the leading part
    expected.remove((2, 1))
  assert found == expected
