"""Writes the checkpoints in this folder: three small models of `transformers`, with their logits.

Run with `torch` and `transformers` installed; no test needs them. Written with torch 2.14.1, transformers 5.23.0 and
safetensors 0.8.0.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import (
  GPT2Config,
  GPT2LMHeadModel,
  LlamaConfig,
  LlamaForCausalLM,
  ViTConfig,
  ViTForImageClassification,
)

FOLDER = Path(__file__).parent
TOKENS = torch.arange(16).reshape(2, 8) * 7 % 32
IMAGES = (torch.arange(2 * 3 * 16 * 16) % 17 / 17).reshape(2, 3, 16, 16)

LLAMA = LlamaConfig(
  vocab_size=32,
  hidden_size=32,
  intermediate_size=48,
  num_hidden_layers=3,
  num_attention_heads=8,
  num_key_value_heads=4,
  head_dim=4,
  rms_norm_eps=1e-5,
  rope_parameters={'rope_type': 'default', 'rope_theta': 500000.0},
  tie_word_embeddings=False,
)
GPT2 = GPT2Config(
  vocab_size=32, n_positions=8, n_embd=16, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0
)
VIT = ViTConfig(
  hidden_size=16,
  intermediate_size=32,
  num_hidden_layers=2,
  num_attention_heads=4,
  image_size=16,
  patch_size=8,
  num_labels=4,
)


def write(name, model, batch, **options):
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.normal_(0, 0.3)
    logits = model.eval()(batch).logits
  model.save_pretrained(FOLDER / name, **options)
  np.save(FOLDER / name / 'logits.npy', logits.numpy())


if __name__ == '__main__':
  torch.manual_seed(0)
  write('llama', LlamaForCausalLM(LLAMA), TOKENS, max_shard_size='40KB')
  write('gpt2', GPT2LMHeadModel(GPT2), TOKENS)
  write('vit', ViTForImageClassification(VIT), IMAGES)
