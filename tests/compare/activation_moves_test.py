"""The finding of `compare` that activations move because parameters are sharded over the axis of the batch."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import flax_spmd as spmd
from flax_spmd.explore import TrainStep, compare

BATCH, LENGTH = 2048, 16


class Model(nn.Module):
  """A model for one batch size, which a parameter has too; its parameters have no names, or those of their dimensions."""

  constrained: bool
  named: bool

  @nn.compact
  def __call__(self, tokens):
    def param(name, shape):
      init, names = nn.initializers.normal(), tuple({32: 'embed'}.get(size) for size in shape)
      return self.param(name, spmd.with_logical_partitioning(init, names) if self.named else init, shape)

    table = param('table', (61, 32))
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))
    x = table[tokens.reshape(BATCH, LENGTH)] + param('positions', (LENGTH, 32))[positions]
    for number in range(2):
      if self.constrained:
        x = spmd.with_logical_constraint(x, ('batch',))
      h = nn.tanh(x @ param(f'up{number}', (32, 64)))
      x = x + h @ param(f'down{number}', (64, 32))
    return x @ table.T + param('bias', (BATCH,)).mean()


def train_step(constrained, named):
  model = Model(constrained, named)

  def step(params, tokens):
    def loss_of(params):
      return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, tokens), tokens).mean()

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss

  create = functools.partial(model.init, jax.random.key(0), jnp.zeros((BATCH, LENGTH), int))
  return TrainStep(step, create, jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32))


def findings(constrained, rules, named=False):
  layouts = {'only': spmd.Layout(spmd.abstract_mesh({'data': 8}), rules)}
  comparison = compare(train_step(constrained, named), layouts, 'cpu:8')
  return [text for text in comparison['only'].program.findings if 'activations' in text]


@pytest.mark.parametrize('named', [False, True])
def test_activations_that_move_are_reported_with_the_line_that_mends_it(named):
  fsdp = (('batch', 'data'), ('embed', 'data') if named else spmd.fsdp('data', min_size=64))
  [found] = findings(False, fsdp, named)
  assert found.startswith('activations move: ')
  assert ' on the wire over data, ' in found
  assert found.endswith(
    ' of the parameters, which are sharded over it as the batch is. '
    "Fix: constrain the batch in each block of the model, x = with_logical_constraint(x, ('batch',))."
  )
  assert findings(True, fsdp, named) == []
  assert findings(False, (('batch', 'data'),), named) == []
