"""Flax's own examples: models, losses and training steps of their `train.py`."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import sources
from case import Case, entry

PMAP = "`axis_name='batch'` for `layout.jit`"
SIZES = {'emb_dim': 32, 'num_heads': 4, 'num_layers': 2, 'qkv_dim': 32, 'mlp_dim': 64, 'max_len': 16}
# Replicas draw the same mask for their parts, so masks depend on the number of parts.
WITHOUT_MASKS = {'dropout_rate': 0.0, 'attention_dropout_rate': 0.0}
TOKENS = np.random.default_rng(0).integers(1, 64, (16, 16)).astype('int32')


def train_module(example: str) -> Any:
  """`train.py` of an example."""
  sources.importable('flax', f'examples/{example}')
  return importlib.import_module('train')


def train_state(model: Any, tx: Any, *inputs: Any, **keywords: Any) -> Callable[[Any], Any]:
  """A function that creates a TrainState from a key."""
  from flax.training.train_state import TrainState

  def create(key: Any) -> Any:
    params = model.init(key, *inputs, **keywords)['params']
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

  return create


@entry('lm1b', 'flax', annotated='`with_logical_partitioning`')
def lm1b() -> Case:
  import flax.linen as nn

  train = train_module('lm1b')
  utils = importlib.import_module('utils')
  config = importlib.import_module('configs.default').get_config()
  config.update({'per_device_batch_size': 2, 'max_target_length': 16})
  model = train.models.TransformerConfig(vocab_size=64, output_vocab_size=64, **SIZES)
  learning_rate = train.create_learning_rate_schedule(1e-3, 2)
  tx = optax.adamw(learning_rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=config.weight_decay)
  evaluated = train.models.TransformerLM(model.replace(deterministic=True))

  def step(state, batch):
    state, metrics = train.train_step(state, batch, model, learning_rate, 0.0, jax.random.key(1))
    return state, metrics['loss'] / metrics['denominator']

  rules = tuple(map(tuple, config.logical_axis_rules))
  return Case(
    partial(utils.init_train_state, evaluated, tx, config),
    step,
    {'inputs': TOKENS},
    (jax.random.key(0),),
    mesh={'data': 2, 'fsdp': 2, 'tensor': 2},
    rules=rules,
    partitioner=lambda state, mesh: nn.logical_to_mesh_sharding(
      nn.get_partition_spec(state), mesh, rules
    ),
  )


@entry('wmt', 'flax', changes=PMAP)
def wmt() -> Case:
  train = train_module('wmt')
  model = train.models.TransformerConfig(vocab_size=64, output_vocab_size=64, **SIZES, **WITHOUT_MASKS)
  evaluated = train.models.Transformer(model.replace(deterministic=True))
  learning_rate = train.create_learning_rate_schedule(1e-3, 2)
  inputs = jnp.ones((2, 16), 'float32')

  def create(key):
    params = evaluated.init(key, inputs, inputs)['params']
    return train.TrainState.create(
      apply_fn=evaluated.apply, params=params, tx=optax.adamw(learning_rate, b2=0.98), dynamic_scale=None
    )

  def step(state, batch):
    state, metrics = train.train_step(state, batch, model, learning_rate, 0.1, jax.random.key(1))
    return state, metrics['loss'] / metrics['denominator']

  batch = {'inputs': TOKENS, 'targets': TOKENS[::-1].copy()}
  return Case(create, step, batch, (jax.random.key(0),), axis_name='batch')


@entry('imagenet', 'flax', changes=PMAP)
def imagenet() -> Case:
  train = train_module('imagenet')
  config = importlib.import_module('configs.default').get_config()
  norm = train.models.ResNet18.keywords  # a small one of the same blocks
  model = train.models.ResNet([1, 1], norm['block_cls'], 1000, num_filters=8)
  learning_rate = train.create_learning_rate_fn(config, 0.1, 10)

  def create(key):
    return train.create_train_state(key, config, model, 32, learning_rate)

  def step(state, batch):
    state, metrics = train.train_step(state, batch, learning_rate)
    return state, metrics['loss']

  image = np.random.default_rng(0).normal(size=(16, 32, 32, 3)).astype('float32')
  batch = {'image': image, 'label': np.arange(16)}
  return Case(create, step, batch, (jax.random.key(0),), axis_name='batch')


@entry('vae', 'flax')
def vae() -> Case:
  train = train_module('vae')
  images = (np.random.default_rng(0).random((16, 784)) > 0.5).astype('float32')
  model, key = train.models.model(20), jax.random.key(2)

  def step(state, batch):
    key = jax.random.fold_in(jax.random.key(1), state.step)
    outputs = model.apply({'params': state.params}, batch, key)
    loss = train.compute_metrics(outputs[0], batch, *outputs[1:])['loss']
    return train.train_step(state, batch, key, 20), loss

  return Case(train_state(model, optax.adam(1e-3), images, key), step, images, (jax.random.key(0),))


@entry('seq2seq', 'flax')
def seq2seq() -> Case:
  train = train_module('seq2seq')
  train.FLAGS(['train', '--hidden_size=64'])
  np.random.seed(0)
  table = train.CTable('0123456789+= ', 3)

  def step(state, batch):
    state, metrics = train.train_step(state, batch, jax.random.key(1), table.eos_id)
    return state, metrics['loss']

  def create(key):
    return train.get_train_state(key, table)

  return Case(create, step, table.get_batch(16), (jax.random.key(0),))


@entry('sst2', 'flax')
def sst2() -> Case:
  train = train_module('sst2')
  config = importlib.import_module('configs.default').get_config()
  config.update({'embedding_size': 32, 'hidden_size': 32, 'vocab_size': 64})
  model = train.model_from_config(config)
  keys = {'dropout': jax.random.key(1)}

  def create(key):
    return train.create_train_state(key, config, model)

  def step(state, batch):
    state, metrics = train.train_step(state, batch, keys)
    return state, metrics.loss

  lengths = np.arange(16).astype('int32') % 8 + 8
  batch = {'token_ids': TOKENS, 'length': lengths, 'label': np.arange(16, dtype='float32') % 2}
  return Case(create, step, batch, (jax.random.key(0),))


@entry('nlp_seq', 'flax', changes=PMAP)
def nlp_seq() -> Case:
  train = train_module('nlp_seq')
  model = train.models.Transformer(
    train.models.TransformerConfig(vocab_size=64, output_vocab_size=64, **SIZES, **WITHOUT_MASKS)
  )
  learning_rate = train.create_learning_rate_scheduler(base_learning_rate=0.05, warmup_steps=10)
  tx = optax.adamw(learning_rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=1e-1)

  def step(state, batch):
    state, metrics = train.train_step(state, batch, model, learning_rate, jax.random.key(1))
    return state, jax.lax.pmean(metrics['loss'] / metrics['denominator'], 'batch')

  create = train_state(model, tx, inputs=jnp.ones((16, 1), 'float32'), train=False)
  batch = {'inputs': TOKENS, 'targets': TOKENS[::-1].copy()}
  return Case(create, step, batch, (jax.random.key(0),), axis_name='batch')


@entry('ppo', 'flax')
def ppo() -> Case:
  sources.importable('flax', 'examples/ppo')
  ppo_lib = importlib.import_module('ppo_lib')
  model = importlib.import_module('models').ActorCritic(num_outputs=4)
  draw = np.random.default_rng(0)

  def step(state, batch):
    return ppo_lib.train_step(state, batch, 8, clip_param=0.1, vf_coeff=0.5, entropy_coeff=0.01)

  states = draw.integers(0, 256, (16, 84, 84, 4)).astype('float32')
  floats = (draw.normal(size=16).astype('float32') for _ in range(3))
  batch = (states, draw.integers(0, 4, 16), *floats)
  return Case(train_state(model, optax.adam(2.5e-4), states[:1]), step, batch, (jax.random.key(0),))


@entry('ogbg_molpcba', 'flax')
def ogbg_molpcba() -> Case:
  import jraph
  from jax.sharding import PartitionSpec

  train = train_module('ogbg_molpcba')
  config = importlib.import_module('configs.default').get_config()
  config.update({'latent_size': 32, 'message_passing_steps': 2, 'num_classes': 8})
  draw, keys = np.random.default_rng(0), {'dropout': jax.random.key(1)}
  graph = jraph.GraphsTuple(
    nodes=draw.normal(size=(32, 9)).astype('float32'),
    edges=draw.normal(size=(64, 3)).astype('float32'),
    senders=draw.integers(0, 28, 64),
    receivers=draw.integers(0, 28, 64),
    globals=(draw.random((8, 8)) > 0.5).astype('float32'),
    n_node=np.full(8, 4),
    n_edge=np.full(8, 8),
  )
  from flax.training.train_state import TrainState

  def create(key):
    net = train.create_model(config, deterministic=True)
    params = net.init(key, train.replace_globals(graph))
    apply = train.create_model(config, deterministic=False).apply
    return TrainState.create(apply_fn=apply, params=params, tx=train.create_optimizer(config))

  def step(state, batch):
    state, metrics = train.train_step(state, batch, keys)
    return state, metrics.loss.total

  return Case(create, step, graph, (jax.random.key(0),), batch_spec=PartitionSpec())
