"""Flax models of Hugging Face's transformers 4, at random weights; their losses are those of its example scripts."""

from typing import Any

import jax
import numpy as np
import optax
from case import Case, entry

DRAW = np.random.default_rng(0)
TOKENS = DRAW.integers(3, 64, (16, 16)).astype('int32')
TEXT = {'input_ids': TOKENS, 'attention_mask': np.ones((16, 16), 'int32'), 'labels': TOKENS}
SIZES = {
  'vocab_size': 64,
  'hidden_size': 32,
  'intermediate_size': 64,
  'num_hidden_layers': 1,
  'num_attention_heads': 4,
}
BART = {'d_model': 32} | {
  f'{side}_{name}': size
  for side in ('encoder', 'decoder')
  for name, size in (('layers', 1), ('ffn_dim', 64), ('attention_heads', 4))
}

IMAGES = {
  'pixel_values': DRAW.normal(size=(16, 3, 32, 32)).astype('float32'),
  'labels': np.arange(16) % 8,
}
# Model, configuration, sizes, batch.
MODELS = (
  ('GPT2LMHeadModel', 'GPT2Config', {'vocab_size': 64, 'n_positions': 16, 'n_embd': 32, 'n_layer': 1, 'n_head': 4}, TEXT),
  ('GPTNeoForCausalLM', 'GPTNeoConfig', {'vocab_size': 64, 'hidden_size': 32, 'num_layers': 2, 'num_heads': 4, 'attention_types': [[['global', 'local'], 1]], 'max_position_embeddings': 16}, TEXT),
  ('GPTJForCausalLM', 'GPTJConfig', {'vocab_size': 64, 'n_positions': 16, 'n_embd': 32, 'n_layer': 1, 'n_head': 4, 'rotary_dim': 4}, TEXT),
  ('LlamaForCausalLM', 'LlamaConfig', {**SIZES, 'max_position_embeddings': 16}, TEXT),
  ('MistralForCausalLM', 'MistralConfig', {**SIZES, 'num_key_value_heads': 2, 'max_position_embeddings': 16}, TEXT),
  ('GemmaForCausalLM', 'GemmaConfig', {**SIZES, 'head_dim': 8, 'num_key_value_heads': 1, 'max_position_embeddings': 16}, TEXT),
  ('BertForMaskedLM', 'BertConfig', SIZES, TEXT),
  ('RobertaForMaskedLM', 'RobertaConfig', {**SIZES, 'max_position_embeddings': 32}, TEXT),
  ('T5ForConditionalGeneration', 'T5Config', {'vocab_size': 64, 'd_model': 32, 'd_kv': 8, 'd_ff': 64, 'num_layers': 2, 'num_heads': 4, 'decoder_start_token_id': 0}, {**TEXT, 'decoder_input_ids': TOKENS}),
  ('BartForConditionalGeneration', 'BartConfig', {'vocab_size': 64, **BART, 'max_position_embeddings': 32}, TEXT),
  ('ViTForImageClassification', 'ViTConfig', {**SIZES, 'image_size': 32, 'patch_size': 8, 'num_labels': 8}, IMAGES),
  ('WhisperForConditionalGeneration', 'WhisperConfig', {'vocab_size': 64, **BART, 'num_mel_bins': 8, 'max_source_positions': 16, 'max_target_positions': 16, 'pad_token_id': 0, 'bos_token_id': 1, 'eos_token_id': 2, 'decoder_start_token_id': 1, 'suppress_tokens': None, 'begin_suppress_tokens': None}, {'input_features': DRAW.normal(size=(16, 8, 32)).astype('float32'), 'decoder_input_ids': TOKENS, 'labels': TOKENS}),
  ('AlbertForMaskedLM', 'AlbertConfig', {**SIZES, 'embedding_size': 16, 'max_position_embeddings': 32}, TEXT),
  ('BlenderbotForConditionalGeneration', 'BlenderbotConfig', {'vocab_size': 64, **BART, 'max_position_embeddings': 32}, TEXT),
  ('BlenderbotSmallForConditionalGeneration', 'BlenderbotSmallConfig', {'vocab_size': 64, **BART, 'max_position_embeddings': 32}, TEXT),
  ('BloomForCausalLM', 'BloomConfig', {'vocab_size': 64, 'hidden_size': 32, 'n_layer': 2, 'n_head': 4}, TEXT),
  ('DistilBertForMaskedLM', 'DistilBertConfig', {'vocab_size': 64, 'dim': 32, 'hidden_dim': 64, 'n_layers': 1, 'n_heads': 4, 'max_position_embeddings': 32}, TEXT),
  ('ElectraForMaskedLM', 'ElectraConfig', {**SIZES, 'embedding_size': 16, 'max_position_embeddings': 32}, TEXT),
  ('MBartForConditionalGeneration', 'MBartConfig', {'vocab_size': 64, **BART, 'max_position_embeddings': 32}, TEXT),
  ('MarianMTModel', 'MarianConfig', {'vocab_size': 64, **BART, 'max_position_embeddings': 32, 'pad_token_id': 1, 'decoder_start_token_id': 1}, {**TEXT, 'decoder_input_ids': TOKENS}),
  ('PegasusForConditionalGeneration', 'PegasusConfig', {'vocab_size': 64, **BART, 'max_position_embeddings': 32}, {**TEXT, 'decoder_input_ids': TOKENS}),
  ('RoFormerForMaskedLM', 'RoFormerConfig', {**SIZES, 'max_position_embeddings': 32}, TEXT),
  ('XGLMForCausalLM', 'XGLMConfig', {'vocab_size': 64, 'd_model': 32, 'ffn_dim': 64, 'num_layers': 1, 'attention_heads': 4, 'max_position_embeddings': 32}, TEXT),
  ('XLMRobertaForMaskedLM', 'XLMRobertaConfig', {**SIZES, 'max_position_embeddings': 32}, TEXT),
  ('MT5ForConditionalGeneration', 'MT5Config', {'vocab_size': 64, 'd_model': 32, 'd_kv': 8, 'd_ff': 64, 'num_layers': 1, 'num_heads': 4, 'decoder_start_token_id': 0}, {**TEXT, 'decoder_input_ids': TOKENS}),
  ('LongT5ForConditionalGeneration', 'LongT5Config', {'vocab_size': 64, 'd_model': 32, 'd_kv': 8, 'd_ff': 64, 'num_layers': 1, 'num_heads': 4, 'local_radius': 3, 'encoder_attention_type': 'transient-global', 'global_block_size': 4, 'decoder_start_token_id': 0}, {**TEXT, 'decoder_input_ids': TOKENS}),
  ('BeitForImageClassification', 'BeitConfig', {**SIZES, 'image_size': 32, 'patch_size': 8, 'num_labels': 8}, IMAGES),
  ('Dinov2ForImageClassification', 'Dinov2Config', {**SIZES, 'image_size': 32, 'patch_size': 8, 'num_labels': 8}, IMAGES),
)  # fmt: skip


def made(model_name: str, config_name: str, sizes: dict[str, Any], batch: dict[str, Any]) -> Case:
  import transformers
  from flax.training.train_state import TrainState

  shape = np.shape(next(iter(batch.values())))
  if 'pixel_values' in batch:
    shape = (1, shape[2], shape[3], shape[1])
  config = getattr(transformers, config_name)(**sizes)
  model = getattr(transformers, f'Flax{model_name}')(config, input_shape=shape, _do_init=False)

  def create(key):
    return TrainState.create(apply_fn=None, params=model.init_weights(key, shape), tx=optax.adamw(1e-3))

  def gradients(state, batch):
    key = jax.random.fold_in(jax.random.key(1), state.step)
    inputs = {name: value for name, value in batch.items() if name != 'labels'}

    def loss_fn(params):
      logits = model(**inputs, params=params, dropout_rng=key, train=True).logits
      labels = batch['labels']
      if 'Causal' in model_name or 'LMHead' in model_name:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
      return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return jax.value_and_grad(loss_fn)(state.params)

  def update(state, grads):
    return state.apply_gradients(grads=grads)

  return Case(create, None, batch, (jax.random.key(0),), halves=(gradients, update))


for _model in MODELS:
  entry(f'Flax{_model[0]}', 'transformers')(lambda _model=_model: made(*_model))
