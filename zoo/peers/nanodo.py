"""nanodo: a decoder whose parameters are annotated with mesh axes."""

import jax
import numpy as np
import sources
from case import Case, entry

SIZES = {'D': 32, 'H': 4, 'L': 16, 'N': 2, 'F': 64, 'dtype': 'float32'}
TOKENS = np.random.default_rng(0).integers(1, 64, (16, 16)).astype('int32')


@entry('nanodo', 'nanodo', annotated='`with_partitioning`')
def nanodo() -> Case:
  import flax.linen as nn
  from flax.training.train_state import TrainState

  sources.importable('nanodo')
  from ml_collections import ConfigDict
  from nanodo import model_factory, optimizer, train
  from nanodo.configs import default

  config = default.get_config()
  config.model = ConfigDict(SIZES)
  module, get_loss_fn = model_factory.get_model_and_loss(config, 64)

  def create(key):
    params = module.init(key, TOKENS[:1])['params']
    return TrainState.create(
      apply_fn=module.apply, params=params, tx=optimizer.get_optimizer(config.opt)
    )

  def step(state, batch):
    state, metrics = train._train_step(state, batch, config, get_loss_fn)
    return state, metrics['train_loss']

  return Case(
    create,
    step,
    TOKENS,
    (jax.random.key(0),),
    rules=(),
    partitioner=lambda state, mesh: nn.get_sharding(state, mesh),
  )
