"""A Mamba: selective state spaces by an associative scan over time, depthwise convolutions, scanned layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

BATCH = {'tokens': jax.ShapeDtypeStruct((64, 257), jnp.int32)}


def named(init, *names):
  return nn.with_logical_partitioning(init, names)


def combine(left, right):
  return left[0] * right[0], right[0] * left[1] + right[1]


class Selective(nn.Module):
  """y = C h, h = exp(dt A) h + dt B x, for inputs (batch, length, inner)."""

  states: int = 16
  rank: int = 64

  @nn.compact
  def __call__(self, x):
    inner = x.shape[-1]
    fill = lambda key, shape: jnp.log(jnp.broadcast_to(jnp.arange(1.0, shape[1] + 1), shape))
    a = -jnp.exp(self.param('a', named(fill, 'inner', 'states'), (inner, self.states)))
    d = self.param('d', named(nn.initializers.ones, 'inner'), (inner,))
    init = nn.initializers.lecun_normal()
    mixed = nn.Dense(
      self.rank + 2 * self.states, use_bias=False, kernel_init=named(init, 'inner', None)
    )(x)
    dt, b, c = jnp.split(mixed, [self.rank, self.rank + self.states], -1)
    dt = nn.softplus(nn.Dense(inner, kernel_init=named(init, None, 'inner'))(dt))
    decay = jnp.exp(dt[..., None] * a)
    fed = (dt * x)[..., None] * b[:, :, None]
    _, h = jax.lax.associative_scan(combine, (decay, fed), axis=1)
    return jnp.einsum('blis,bls->bli', h, c) + d * x


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    inner = 2 * x.shape[-1]
    init = nn.initializers.lecun_normal()
    y = nn.LayerNorm()(x)
    both = nn.Dense(2 * inner, use_bias=False, kernel_init=named(init, 'embed', 'inner'))(y)
    y, gate = jnp.split(both, 2, -1)
    y = nn.Conv(
      inner,
      (4,),
      padding='CAUSAL',
      feature_group_count=inner,
      kernel_init=named(init, None, None, 'inner'),
    )(y)
    y = nn.with_logical_constraint(nn.silu(y), ('batch', 'length', 'inner'))
    y = Selective()(y) * nn.silu(gate)
    y = nn.Dense(x.shape[-1], use_bias=False, kernel_init=named(init, 'inner', 'embed'))(y)
    return nn.with_logical_constraint(x + y, ('batch', 'length', 'embed')), None


class Mamba(nn.Module):
  vocab: int = 50280
  embed: int = 1024
  layers: int = 2

  @nn.compact
  def __call__(self, tokens):
    table = nn.Embed(
      self.vocab, self.embed, embedding_init=named(nn.initializers.normal(0.02), 'vocab', 'embed')
    )
    layers = nn.scan(
      nn.remat(Block),
      variable_axes={'params': 0},
      split_rngs={'params': True},
      length=self.layers,
      metadata_params={nn.PARTITION_NAME: 'layers'},
    )
    x, _ = layers()(table(tokens), None)
    return table.attend(nn.LayerNorm()(x))


def create():
  model = Mamba()
  params = model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))['params']
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(6e-4, b2=0.95, weight_decay=0.1))
  return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def step(state, batch):
  def loss_fn(params):
    logits = state.apply_fn({'params': params}, batch['tokens'][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch['tokens'][:, 1:]).mean()

  loss, grads = jax.value_and_grad(loss_fn)(state.params)
  return state.apply_gradients(grads=grads), loss
