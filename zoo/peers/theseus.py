"""Theseus: decoders with logical names in `with_partitioning`, under the rules of each, with the trainer's own step and optimizer."""

import functools
from typing import Any

import jax
import numpy as np
import sources
from case import Case, entry
from jax.sharding import PartitionSpec

SIZES = {
  'n_layers': 2,
  'n_embd': 32,
  'n_head': 4,
  'n_kv_head': 2,
  'intermediate_size': 64,
  'block_size': 16,
  'vocab_size': 64,
  'dropout': 0.0,
  'attn_dropout': 0.0,
}
MICROBATCHES = 4
TOKENS = np.random.default_rng(0).integers(1, 64, (MICROBATCHES, 8, 17)).astype('int32')
ENTERED: list[Any] = []  # configurations
MODELS = 'GPT', 'LaCT', 'MoEGPT', 'Thoughtbubbles', 'Scratchbubbles', 'Qwen'


def case(name: str) -> Case:
  import flax.linen as nn
  import optax
  from flax.training.train_state import TrainState

  sources.importable('theseus')
  from theseus.model import models
  from theseus.training.base import BaseTrainer

  model = configured(getattr(models, name))
  batch = {'x': TOKENS[..., :-1], 'y': TOKENS[..., 1:], 'padding_mask': TOKENS[..., 1:] > 0}
  rules = tuple(model.sharding)
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

  def create(key):
    params = model.init(key, TOKENS[0, :1, :-1])['params']
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

  def step(state, batch):
    state, loss, *_ = BaseTrainer.train_step(state, batch, jax.random.key(1), MICROBATCHES)
    return state, loss

  def partitioner(state, mesh):
    return nn.logical_to_mesh_sharding(nn.get_partition_spec(state), mesh, rules=rules)

  return Case(
    create,
    step,
    batch,
    (jax.random.key(0),),
    mesh={'batch': 4, 'shard': 2},
    rules=rules,
    batch_spec=PartitionSpec(None, 'batch'),
    partitioner=partitioner,
    accumulates=True,
  )


def configured(model: Any) -> Any:
  """A small model; a module and its parts read their sizes from one configuration."""
  import dataclasses

  from omegaconf import OmegaConf
  from theseus import config as settings

  parts = model.gather()
  config = settings.build(*parts)
  OmegaConf.set_struct(config, False)
  for field in (field for part in parts for field in dataclasses.fields(part)):
    key = field.metadata.get('th_config_field', '').replace('/', '.')
    if key.startswith('architecture.dtype.'):
      OmegaConf.update(config, key, 'float32')
    elif key and field.name in SIZES:
      OmegaConf.update(config, key, SIZES[field.name])
  ENTERED.append(settings.configuration(config))  # parts are configured when they are traced
  ENTERED[-1].__enter__()
  return settings.configure(model)


for each in MODELS:
  entry(f'Theseus {each}', 'theseus', annotated='logical names in `with_partitioning`')(
    functools.partial(case, each)
  )
