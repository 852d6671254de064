"""EasyLM: LLaMA under a table of regular expressions, with EasyLM's loss, optimizer and training state."""

import jax
import numpy as np
import sources
from case import Case, entry
from jax.sharding import PartitionSpec

from flax_spmd import translate


@entry(
  'EasyLM LLaMA',
  'EasyLM',
  annotated='table of regular expressions',
  changes='`translate.from_easylm(rules)`',
)
def llama() -> Case:
  from flax.training.train_state import TrainState

  sources.importable('EasyLM')
  from EasyLM.jax_utils import JaxRNG, cross_entropy_loss_and_accuracy, match_partition_rules
  from EasyLM.models.llama.llama_model import FlaxLLaMAForCausalLMModule, LLaMAConfigurator
  from EasyLM.optimizers import OptimizerFactory

  config = LLaMAConfigurator.get_default_config(
    {'base_model': 'debug', 'vocab_size': 64, 'hidden_size': 32}
  )
  config.update({'intermediate_size': 64, 'num_attention_heads': 4, 'num_key_value_heads': 4})
  model = FlaxLLaMAForCausalLMModule(LLaMAConfigurator.finalize_config(config))
  rules = LLaMAConfigurator.get_partition_rules()
  tx, _ = OptimizerFactory.get_optimizer(OptimizerFactory.get_default_config())
  tokens = np.random.default_rng(0).integers(1, 64, (16, 16)).astype('int32')

  def create(key):
    params = model.init(
      input_ids=tokens[:4], position_ids=tokens[:4] * 0, attention_mask=tokens[:4] * 0 + 1,
      rngs=JaxRNG(key)(LLaMAConfigurator.rng_keys()),
    )  # fmt: skip
    return TrainState.create(params=params, tx=tx, apply_fn=None)

  def gradients(state, batch):
    keys = JaxRNG(jax.random.fold_in(jax.random.PRNGKey(1), state.step))(LLaMAConfigurator.rng_keys())

    def loss_fn(params):
      logits = model.apply(params, batch, deterministic=False, rngs=keys).logits
      return cross_entropy_loss_and_accuracy(logits[:, :-1], batch[:, 1:])

    (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return loss, grads

  def update(state, grads):
    return state.apply_gradients(grads=grads)

  return Case(
    create,
    None,
    tokens,
    (jax.random.PRNGKey(0),),
    mesh={'dp': 2, 'fsdp': 2, 'mp': 2},
    rules=translate.from_easylm(rules),
    batch_spec=PartitionSpec(('dp', 'fsdp')),
    halves=(gradients, update),
    partitioner=lambda state, mesh: match_partition_rules(rules, state),
  )
