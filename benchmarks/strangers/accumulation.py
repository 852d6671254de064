"""A vision transformer with gradient accumulation: a scan over microbatches that sums gradients in float32."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

MICROBATCHES = 4
BATCH = {
  'images': jax.ShapeDtypeStruct((256, 224, 224, 3), jnp.float32),
  'labels': jax.ShapeDtypeStruct((256,), jnp.int32),
}


def partitioned(init, *names):
  return nn.with_logical_partitioning(init, names)


class Mlp(nn.Module):
  @nn.compact
  def __call__(self, x):
    init = nn.initializers.xavier_uniform()
    y = nn.Dense(3072, dtype=jnp.bfloat16, kernel_init=partitioned(init, 'embed', 'mlp'))(x)
    y = nn.with_logical_constraint(nn.gelu(y), ('batch', 'patches', 'mlp'))
    return nn.Dense(768, dtype=jnp.bfloat16, kernel_init=partitioned(init, 'mlp', 'embed'))(y)


class Encoder(nn.Module):
  layers: int = 2

  @nn.compact
  def __call__(self, x):
    init = nn.initializers.xavier_uniform()
    for _ in range(self.layers):
      attend = nn.SelfAttention(
        12,
        dtype=jnp.bfloat16,
        kernel_init=partitioned(init, 'embed', 'heads', 'kv'),
        out_kernel_init=partitioned(init, 'heads', 'kv', 'embed'),
      )
      x = x + attend(nn.LayerNorm(dtype=jnp.bfloat16)(x))
      x = x + Mlp()(nn.LayerNorm(dtype=jnp.bfloat16)(x))
    return nn.LayerNorm(dtype=jnp.bfloat16)(x)


class ViT(nn.Module):
  @nn.compact
  def __call__(self, images):
    patch_init = partitioned(nn.initializers.lecun_normal(), None, None, None, 'embed')
    x = nn.Conv(768, (16, 16), (16, 16), kernel_init=patch_init, dtype=jnp.bfloat16)(images)
    x = x.reshape(x.shape[0], -1, x.shape[-1])
    first = self.param('first', nn.initializers.zeros, (1, 1, 768))
    x = jnp.concatenate([jnp.tile(first, (x.shape[0], 1, 1)).astype(x.dtype), x], 1)
    x = x + self.param('positions', nn.initializers.normal(0.02), (1, x.shape[1], 768)).astype(x.dtype)
    x = Encoder()(x)[:, 0]
    init = partitioned(nn.initializers.zeros, 'embed', 'classes')
    return nn.Dense(1000, kernel_init=init)(x)


def create():
  model = ViT()
  params = model.init(jax.random.key(0), jnp.zeros((1, 224, 224, 3)))['params']
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.3))
  return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def step(state, batch):
  def loss_fn(params, images, labels):
    logits = state.apply_fn({'params': params}, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

  def one(carry, microbatch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, *microbatch)
    return (carry[0] + loss, jax.tree.map(jnp.add, carry[1], grads)), None

  split = lambda x: nn.with_logical_constraint(
    x.reshape(MICROBATCHES, -1, *x.shape[1:]), (None, 'batch', *[None] * (x.ndim - 1))
  )
  zeros = jax.tree.map(jnp.zeros_like, state.params)
  parts = split(batch['images']), split(batch['labels'])
  (loss, grads), _ = jax.lax.scan(one, (0.0, zeros), parts)
  grads = jax.tree.map(lambda grad: grad / MICROBATCHES, grads)
  return state.apply_gradients(grads=grads), loss / MICROBATCHES
