"""T5X: networks that keep their axis names in `params_axes`, with T5X's TrainState, losses and optimizers."""

from typing import Any
from unittest.mock import MagicMock

import jax
import numpy as np
import sources
from case import Case, entry
from jax.sharding import PartitionSpec

TOKENS = np.random.default_rng(0).integers(1, 64, (16, 16)).astype('int32')
SIZES = {
  'vocab_size': 64,
  'emb_dim': 32,
  'num_heads': 4,
  'head_dim': 8,
  'mlp_dim': 64,
  'dropout_rate': 0.1,
}
DECODER = {'decoder_input_tokens': TOKENS, 'decoder_target_tokens': TOKENS[::-1].copy()}


FACTORED = ('/v_(row|col)$', PartitionSpec())  # T5X replicates them; without this rule they are sharded


def made(model: Any, batch: dict[str, Any], dims: int) -> Case:
  """The case of a T5X model under T5X's standard rules, with `dims` dimensions each sharded."""
  from t5x import partitioning
  from t5x.train_state import FlaxOptimTrainState

  rules = tuple(partitioning.standard_logical_axis_rules(dims, dims))
  shapes = {name: array.shape for name, array in batch.items()}

  def create(key):
    return FlaxOptimTrainState.create(model.optimizer_def, model.get_initial_variables(key, shapes))

  def gradients(state, batch):
    key = jax.random.fold_in(jax.random.key(1), state.step)
    (loss, _), grads = jax.value_and_grad(model.loss_fn, has_aux=True)(state.params, batch, key)
    return loss, grads

  def update(state, grads):
    return state.apply_gradient(grads, 1e-3)

  def partitioner(state, mesh):
    own = partitioning.PjitPartitioner(num_partitions=mesh.shape['model'], logical_axis_rules=rules)
    return own.get_mesh_axes(state)

  return Case(
    create,
    None,
    batch,
    (jax.random.key(0),),
    mesh={'data': 2, 'model': 4},
    rules=(FACTORED, *rules),
    halves=(gradients, update),
    partitioner=partitioner,
  )


def encoder_decoder(network: Any, optimizer: Any, dims: int, **sizes: Any) -> Case:
  from t5x import models

  module = network.Transformer(
    network.T5Config(**SIZES, num_encoder_layers=1, num_decoder_layers=1, **sizes)
  )
  vocabulary = MagicMock()
  model = models.EncoderDecoderModel(module, vocabulary, vocabulary, optimizer)
  return made(model, {'encoder_input_tokens': TOKENS, **DECODER}, dims)


@entry(
  'T5 1.1', 't5x', annotated='`param_with_axes`', changes='a path rule that replicates factored moments'
)
def t5() -> Case:
  sources.importable('t5x')
  from t5x import adafactor
  from t5x.examples.t5 import network

  rules = adafactor.standard_logical_factor_rules()
  optimizer = adafactor.Adafactor(1e-3, logical_factor_rules=rules, min_dim_size_to_factor=16)
  return encoder_decoder(network, optimizer, 1)


@entry('scalable T5', 't5x', annotated='`param_with_axes`, `scan_with_axes`')
def scalable_t5() -> Case:
  sources.importable('t5x')
  from t5x import optimizers
  from t5x.examples.scalable_t5 import network

  return encoder_decoder(network, optimizers.adamw(1e-3), 2, remat_policy='minimal', scan_layers=True)


@entry('T5X decoder', 't5x', annotated='`param_with_axes`')
def decoder_only() -> Case:
  sources.importable('t5x')
  from t5x import models, optimizers
  from t5x.examples.decoder_only import network

  module = network.DecoderWrapper(network.TransformerConfig(**SIZES, num_layers=1))
  return made(models.DecoderOnlyModel(module, MagicMock(), optimizers.lamb(1e-3)), DECODER, 2)
