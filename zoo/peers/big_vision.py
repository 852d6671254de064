"""big_vision: image models under a strategy of regular expressions, with its losses and optimizers."""

from typing import Any

import jax
import numpy as np
import optax
import sources
from case import Case, entry

from flax_spmd import translate

STRATEGY = [
  ('.*', 'fsdp(axis="data", min_size_to_shard_mb=0)')
]  # of its configurations, for small arrays too


def made(module: str, **sizes: Any) -> Case:
  sources.importable('big_vision')
  import importlib

  from big_vision import optax as bv_optax
  from big_vision import sharding, utils
  from ml_collections import ConfigDict

  model = importlib.import_module(f'big_vision.models.{module}').Model(num_classes=8, **sizes)
  config = ConfigDict(
    {
      'optax_name': 'scale_by_adam',
      'lr': 1e-3,
      'wd': 1e-4,
      'grad_clip_norm': 1.0,
      'schedule': {'decay_type': 'cosine', 'warmup_steps': 1},
    }
  )
  image = np.random.default_rng(0).normal(size=(16, 32, 32, 3)).astype('float32')
  batch = {'image': image, 'labels': np.eye(8, dtype='float32')[np.arange(16) % 8]}

  def transformation(params):
    keywords = {'total_steps': 10, 'batch_size': 16, 'data_size': 160}
    return bv_optax.make(config, params, sched_kw=keywords)[0]

  def create(key):
    params = model.init(key, image[:1])['params']
    return {'params': params, 'opt': transformation(params).init(params)}

  def gradients(state, batch):
    key = jax.random.fold_in(jax.random.key(1), bv_optax.get_count(state['opt'], jittable=True))

    def loss_fn(params):
      logits, _ = model.apply({'params': params}, batch['image'], train=True, rngs={'dropout': key})
      return utils.sigmoid_xent(logits=logits, labels=batch['labels'])

    return jax.value_and_grad(loss_fn)(state['params'])

  def update(state, grads):
    params, opt = state['params'], state['opt']
    updates, opt = transformation(params).update(grads, opt, params)
    return {'params': optax.apply_updates(params, updates), 'opt': opt}

  return Case(
    create,
    None,
    batch,
    (jax.random.key(0),),
    rules=translate.from_big_vision(STRATEGY, {'data': 8}),
    halves=(gradients, update),
    partitioner=lambda state, mesh: sharding.infer_sharding(state, STRATEGY, mesh),
  )


@entry(
  'big_vision ViT',
  'big_vision',
  annotated='strategy of regular expressions',
  changes='`translate.from_big_vision(strategy, mesh)`',
)
def vit() -> Case:
  return made('vit', patch_size=(8, 8), width=32, depth=2, mlp_dim=64, num_heads=4, pool_type='map')


@entry(
  'big_vision Mixer',
  'big_vision',
  annotated='strategy of regular expressions',
  changes='`translate.from_big_vision(strategy, mesh)`',
)
def mixer() -> Case:
  return made(
    'mlp_mixer', patch_size=(8, 8), hidden_dim=32, num_blocks=2, tokens_mlp_dim=16, channels_mlp_dim=64
  )
