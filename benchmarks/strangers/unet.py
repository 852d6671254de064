"""A U-Net for diffusion: group norm, skip connections by concatenation, resizing, attention at the bottom, an EMA."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

BATCH = (
  jax.ShapeDtypeStruct((64, 32, 32, 4), jnp.float32),  # latents
  jax.ShapeDtypeStruct((64, 32, 32, 4), jnp.float32),  # noise
  jax.ShapeDtypeStruct((64,), jnp.int32),  # times
)


class WithAverage(train_state.TrainState):
  ema: Any


def conv(features, *names, size=3, **options):
  init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), (None, None, *names))
  return nn.Conv(features, (size, size), kernel_init=init, dtype=jnp.bfloat16, **options)


class Residual(nn.Module):
  features: int

  @nn.compact
  def __call__(self, x, time):
    y = conv(self.features, 'in', 'out')(nn.swish(nn.GroupNorm(dtype=jnp.bfloat16)(x)))
    y = y + nn.Dense(self.features, dtype=jnp.bfloat16)(nn.swish(time))[:, None, None]
    y = conv(self.features, 'in', 'out')(nn.swish(nn.GroupNorm(dtype=jnp.bfloat16)(y)))
    if x.shape[-1] != self.features:
      x = conv(self.features, 'in', 'out', size=1)(x)
    return x + y


class UNet(nn.Module):
  widths: tuple = (256, 512)

  @nn.compact
  def __call__(self, x, times):
    angles = times[:, None] * jnp.exp(-jnp.arange(128) / 128 * jnp.log(1e4))
    time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
    time = nn.Dense(1024)(nn.swish(nn.Dense(1024)(time)))
    x, skips = conv(self.widths[0], None, 'out')(x), []
    for width in self.widths:
      x = Residual(width)(x, time)
      skips.append(x)
      x = conv(width, 'in', 'out', strides=2)(x)
    batch, height, wide, features = x.shape
    flat = nn.GroupNorm(dtype=jnp.bfloat16)(x).reshape(batch, height * wide, features)
    flat = nn.MultiHeadDotProductAttention(8, dtype=jnp.bfloat16)(flat)
    x = Residual(features)(x + flat.reshape(x.shape), time)
    for width, skip in zip(self.widths[::-1], skips[::-1]):
      x = jax.image.resize(x, (batch, 2 * x.shape[1], 2 * x.shape[2], x.shape[3]), 'nearest')
      x = Residual(width)(jnp.concatenate([x, skip], -1), time)
    return conv(4, 'in', None)(nn.swish(nn.GroupNorm(dtype=jnp.bfloat16)(x))).astype(jnp.float32)


def create():
  model = UNet()
  params = model.init(jax.random.key(0), jnp.ones((1, 32, 32, 4)), jnp.ones((1,), jnp.int32))['params']
  return WithAverage.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-4), ema=params)


def step(state, batch):
  latents, noise, times = batch
  kept = jnp.cos(0.5 * jnp.pi * times / 1000)[:, None, None, None]
  noisy = kept * latents + jnp.sqrt(1 - kept**2) * noise

  def loss_fn(params):
    return jnp.mean((state.apply_fn({'params': params}, noisy, times) - noise) ** 2)

  loss, grads = jax.value_and_grad(loss_fn)(state.params)
  state = state.apply_gradients(grads=grads)
  return state.replace(ema=optax.incremental_update(state.params, state.ema, 1e-4)), loss
