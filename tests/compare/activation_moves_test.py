"""The finding of `compare` that activations move because parameters are sharded over the axis of the batch."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import flax_spmd as spmd
from flax_spmd.explore import TrainStep, compare

BATCH, LENGTH = 2048, 16


class Model(nn.Module):
  """A model without names on its parameters, for one batch size, which a parameter has too."""

  constrained: bool

  @nn.compact
  def __call__(self, tokens):
    def param(name, shape):
      return self.param(name, nn.initializers.normal(), shape)

    table = param('table', (61, 32))
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))
    x = table[tokens.reshape(BATCH, LENGTH)] + param('positions', (LENGTH, 32))[positions]
    for number in range(2):
      if self.constrained:
        x = spmd.with_logical_constraint(x, ('batch',))
      h = nn.tanh(x @ param(f'up{number}', (32, 64)))
      x = x + h @ param(f'down{number}', (64, 32))
    return x @ table.T + param('bias', (BATCH,)).mean()


def train_step(constrained):
  model = Model(constrained)

  def step(params, tokens):
    def loss_of(params):
      return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, tokens), tokens).mean()

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss

  create = functools.partial(model.init, jax.random.key(0), jnp.zeros((BATCH, LENGTH), int))
  return TrainStep(step, create, jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32))


def findings(constrained, rules):
  layouts = {'only': spmd.Layout(spmd.abstract_mesh({'data': 8}), rules)}
  comparison = compare(train_step(constrained), layouts, 'cpu:8')
  return [text for text in comparison['only'].program.findings if 'activations' in text]


def test_activations_that_move_are_reported_with_the_line_that_mends_it():
  fsdp = (('batch', 'data'), spmd.fsdp('data', min_size=64))
  [found] = findings(False, fsdp)
  assert found.startswith('activations move: ')
  assert ' on the wire over data, ' in found
  assert found.endswith(
    ' of the parameters, which are sharded over it as the batch is. '
    "Fix: constrain the batch in each block of the model, x = with_logical_constraint(x, ('batch',))."
  )
  assert findings(True, fsdp) == []
  assert findings(False, (('batch', 'data'),)) == []
