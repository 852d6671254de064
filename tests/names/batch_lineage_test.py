"""Results are constrained where dimension 0 is the batch, whatever sizes are equal; the oracle is the model with sizes that differ."""

import collections

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import flax_spmd as spmd
from tests.names.layer_outputs_test import constraints
from tests.strategies import examples

WIDTH = 16
LAYOUT = spmd.Layout({'data': 2, 'model': 4}, (('out', 'model'), ('embed', 'data'), ('batch', 'data')))
ORDERED = spmd.Layout(LAYOUT.mesh, (('batch', 'data'), ('out', 'model'), ('embed', 'data')))


# -- parts of models, of values (batch, length, features): functions of a product, a lookup and a value


def product(dense, lookup, x):
  return dense(x)


def pooled(dense, lookup, x):
  return x + dense(x[:, 0] + x.mean(1))[:, None]


def flat(dense, lookup, x):
  return dense(x.reshape(-1, x.shape[-1])).reshape(x.shape)


def positions(dense, lookup, x):
  return x + lookup(jnp.arange(x.shape[1]))[None]


def distances(dense, lookup, x):
  places = jnp.arange(x.shape[1])
  return x + jnp.einsum('tse,bse->bte', lookup(abs(places[:, None] - places[None])), x)


def waves(dense, lookup, x):
  places = jnp.arange(x.shape[1])[:, None] * jnp.arange(WIDTH)[None]
  return x + dense(jnp.sin(places))[None]


def length_first(dense, lookup, x):
  return dense(x.swapaxes(0, 1)).swapaxes(0, 1)


def attended(dense, lookup, x):
  weights = jax.nn.softmax(jnp.einsum('bte,bse->bts', dense(x), x))
  return jnp.einsum('bts,bse->bte', weights, x)


def shifted(dense, lookup, x):
  return dense(jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1])


def by_time(dense, lookup, x):
  last, _ = jax.lax.scan(lambda carry, row: (carry + jnp.tanh(row), None), x[:, 0], x.swapaxes(0, 1))
  return x + dense(last)[:, None]


PARTS = (product, pooled, flat, positions, distances, waves, length_first, attended, shifted, by_time)


class LinenPart(nn.Module):
  part: object

  @nn.compact
  def __call__(self, x):
    return self.part(nn.Dense(WIDTH), nn.Embed(64, WIDTH), x)


class LinenModel(nn.Module):
  parts: tuple

  @nn.compact
  def __call__(self, tokens):
    x = nn.Embed(64, WIDTH)(tokens)
    for part, around in self.parts:
      x = {'': lambda cls: cls, 'remat': nn.remat, 'jit': nn.jit}[around](LinenPart)(part)(x)
    return x


class NNXModel(nnx.Module):
  def __init__(self, parts, rngs):
    self.parts = parts
    self.embed = nnx.Embed(64, WIDTH, rngs=rngs)
    self.denses = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in parts])

  def __call__(self, tokens):
    x = self.embed(tokens)
    for (part, around), dense in zip(self.parts, self.denses, strict=True):
      # the first layer in a program of its own is taken for one of the batch
      own = around == 'remat' and part not in (waves, length_first, flat)
      x = (nnx.remat(part) if own else part)(dense, self.embed, x)
    return x


def step_of(kind, parts):
  """A loss of a model, and its parameters."""
  if kind == 'linen':
    model = LinenModel(parts)
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((2, 3), int))
    return (lambda params, tokens: model.apply(params, tokens).sum()), params
  with nnx.use_eager_sharding(False):
    graph, state = nnx.split(nnx.eval_shape(lambda: NNXModel(parts, nnx.Rngs(0))))
  return (lambda state, tokens: nnx.merge(graph, state)(tokens).sum()), state


parts = st.lists(
  st.tuples(st.sampled_from(PARTS), st.sampled_from(['', 'remat', 'jit'])), min_size=1, max_size=3
).map(tuple)


@pytest.mark.parametrize('kind', ['linen', 'nnx'])
@given(parts, st.booleans())
@settings(max_examples=examples(20))
def test_equal_sizes_change_no_constraint(kind, parts, gradient):
  """Batch, length and features of one size, and rules in which that of the features is before that of the batch."""
  step, params = step_of(kind, parts)
  named = spmd.names_for(jax.grad(step) if gradient else step)

  def specs(layout, batch, length):
    """The specs with their numbers, and the first dimensions of the constrained values."""
    found = constraints(layout, named, params, jax.ShapeDtypeStruct((batch, length), jnp.int32))
    numbers = collections.Counter()
    for (_, spec), number in found.items():
      numbers[spec] += number
    return numbers, {shape[0] for shape, _ in found}

  apart, sizes = specs(ORDERED, 8, 6)
  assert sizes == {8}
  assert specs(LAYOUT, WIDTH, WIDTH)[0] == apart
