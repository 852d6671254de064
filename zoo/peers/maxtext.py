"""MaxText's Linen code: names on parameters and activations, under its own rule table. Its model holds its mesh.

There is a case for each setting of its `base.yml` that concerns layouts.
"""

import importlib
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import sources
from case import Case, entry

import flax_spmd as spmd

SIZES = {
  'base_emb_dim': 64, 'base_num_query_heads': 4, 'base_num_kv_heads': 4, 'base_mlp_dim': 128, 'head_dim': 16,
  'base_num_decoder_layers': 2, 'vocab_size': 256, 'max_target_length': 16, 'per_device_batch_size': 1,
}  # fmt: skip
SWITCHES = {
  'run_name': 'zoo', 'enable_checkpointing': False, 'base_output_directory': 'unused', 'dataset_type': 'synthetic',
  'skip_jax_distributed_system': True, 'hardware': 'cpu', 'attention': 'dot_product', 'enable_nnx': False,
  'pure_nnx': False, 'pure_nnx_decoder': False, 'override_model_config': True, 'dtype': 'float32',
}  # fmt: skip


FSDP = {'fsdp': 8}
MOE = {'decoder_block': 'mixtral', 'num_experts': 4, 'num_experts_per_tok': 2, 'base_moe_mlp_dim': 128,
       'megablox': False, 'sparse_matmul': False}  # fmt: skip
RAGGED = {**MOE, 'sparse_matmul': True}
MLA = {'attention_type': 'mla', 'q_lora_rank': 16, 'kv_lora_rank': 16, 'qk_nope_head_dim': 16, 'qk_rope_head_dim': 16,
       'v_head_dim': 16, 'shared_experts': 1, 'first_num_dense_layers': 1, 'base_num_decoder_layers': 3}  # fmt: skip
STAGES = {'num_layers_per_pipeline_stage': 1, 'num_pipeline_microbatches': 4, 'per_device_batch_size': 4}
# Name, mesh, settings.
SETTINGS: tuple[tuple[str, dict[str, int], dict[str, Any]], ...] = (
  ('llama2', {'data': 2, 'fsdp': 2, 'tensor': 2}, {'decoder_block': 'llama2'}),
  ('gemma2', FSDP, {'decoder_block': 'gemma2'}),
  ('gpt3', FSDP, {'decoder_block': 'gpt3'}),
  ('mixtral', {'fsdp': 2, 'expert': 4}, MOE),
  ('mixtral, capacity_factor', {'fsdp': 2, 'expert': 4}, {**MOE, 'capacity_factor': 1.25}),
  ('mixtral, sparse_matmul', FSDP, RAGGED),
  ('deepseek, MLA', FSDP, {**RAGGED, **MLA, 'decoder_block': 'deepseek'}),
  ('tensor_sequence', {'fsdp': 4, 'tensor_sequence': 2}, {}),
  ('fsdp_transpose', {'fsdp': 4, 'fsdp_transpose': 2}, {}),
  ('context', {'fsdp': 4, 'context': 2}, {'context_parallel_load_balance': False}),
  ('context, load_balance', {'fsdp': 4, 'context': 2}, {'context_parallel_load_balance': True}),
  ('pipeline', {'pipeline': 2, 'fsdp': 4}, STAGES),
  ('pipeline, circular', {'pipeline': 2, 'fsdp': 4}, {**STAGES, 'base_num_decoder_layers': 4}),
  ('scan_layers=false', FSDP, {'scan_layers': False}),
  ('param_scan_axis=0', FSDP, {'param_scan_axis': 0}),
  ('gradient_accumulation', FSDP, {'gradient_accumulation_steps': 2, 'per_device_batch_size': 2}),
  (
    'stages of this package',
    {'fsdp': 4, 'tensor': 2},
    {'gradient_accumulation_steps': 4, 'per_device_batch_size': 1, 'scan_layers': False},
  ),
  (
    'shard_optimizer_over_data',
    {'data': 2, 'fsdp': 2, 'tensor': 2},
    {'shard_optimizer_over_data': True},
  ),
  ('int8 (AQT)', FSDP, {'quantization': 'int8'}),
  ('int8 (qwix)', FSDP, {'quantization': 'int8', 'use_qwix_quantization': True}),
  ('fp8', FSDP, {'quantization': 'fp8'}),
  ('remat minimal', FSDP, {'remat_policy': 'minimal'}),
  ('remat minimal_offloaded', FSDP, {'remat_policy': 'minimal_offloaded'}),
  ('muon', FSDP, {'opt_type': 'muon'}),
  ('sgd', FSDP, {'opt_type': 'sgd'}),
  ('num_vocab_tiling', FSDP, {'num_vocab_tiling': 4}),
)


def made(mesh: dict[str, int], options: dict[str, Any]) -> Case:
  sources.importable('maxtext', 'src')
  pyconfig = importlib.import_module('maxtext.configs.pyconfig')
  utils = importlib.import_module('maxtext.utils.maxtext_utils')
  creation = importlib.import_module('maxtext.utils.model_creation_utils')
  optimizers = importlib.import_module('maxtext.optimizers.optimizers')
  train = importlib.import_module('maxtext.trainers.pre_train.train')
  sharding = importlib.import_module('maxtext.utils.sharding')

  parallelism = {f'ici_{axis}_parallelism': size for axis, size in mesh.items()}
  settings = {**SIZES, **SWITCHES, 'ici_fsdp_parallelism': 1, **parallelism, **options}
  base = sources.checkout('maxtext') / 'src' / 'maxtext' / 'configs' / 'base.yml'
  config = pyconfig.initialize(['', str(base), *(f'{name}={value}' for name, value in settings.items())])
  learning_rate = utils.create_learning_rate_schedule(config)
  key = jax.random.key(0)

  def functions(mesh):
    model = creation.create_model(config, mesh)
    tx = optimizers.get_optimizer(config, learning_rate, model)
    create = partial(utils.init_initial_state, model, tx, config, True)
    params = boxed_shardings(jax.eval_shape(create, key).params, mesh, config.logical_axis_rules)

    def step(state, batch):
      state, metrics = train.train_step(
        model, config, None, params, state, dict(batch), jax.random.key(1)
      )
      return state, metrics['scalar']['learning/loss']

    return create, step

  def partitioner(state, mesh):
    return utils.get_abstract_state(config, mesh, partial(functions(mesh)[0], key))[2]

  own = utils.get_mesh_from_config(config)
  rules = tuple(config.logical_axis_rules)
  if config.shard_optimizer_over_data:
    rules += (spmd.optimizer_over('data', min_size=1, avoid='tensor'),)
  return Case(
    None,
    None,
    batch_of(config),
    (key,),
    mesh=dict(own.shape),
    rules=rules,
    batch_spec=sharding.get_input_data_sharding(config, own).spec,
    partitioner=partitioner,
    of_mesh=functions,
    accumulates=config.gradient_accumulation_steps > 1 and not config.scan_layers,
    one_device='pipeline' not in mesh,
  )


def boxed_shardings(abstract: Any, mesh: Any, rules: Any) -> Any:
  """The shardings of parameters, in their boxes: MaxText's step constrains gradients and parameters to them."""
  shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract), mesh, rules)
  is_box = lambda node: isinstance(node, nn.meta.AxisMetadata)
  boxed = lambda node, sharding: node.replace_boxed(sharding) if is_box(node) else sharding
  return jax.tree.map(boxed, abstract, shardings, is_leaf=is_box)


def batch_of(config: Any) -> dict[str, Any]:
  draw = np.random.default_rng(0)
  rows, length = config.global_batch_size_to_train_on, config.max_target_length
  ints = {
    '': draw.integers(1, config.vocab_size, (rows, length)),
    '_position': np.tile(np.arange(length), (rows, 1)),
    '_segmentation': np.ones((rows, length)),
  }
  return {
    side + name: array.astype('int32') for side in ('inputs', 'targets') for name, array in ints.items()
  }


for _name, _mesh, _options in SETTINGS:
  _over_data = '; `spmd.optimizer_over(...)`' if 'shard_optimizer_over_data' in _options else ''
  entry(
    f'MaxText {_name}',
    'maxtext',
    environment='maxtext',
    annotated='`with_logical_partitioning`',
    changes=f'the model made for `layout.mesh`{_over_data}',
  )(partial(made, _mesh, _options))
