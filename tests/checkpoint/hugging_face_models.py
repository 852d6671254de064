"""Linen models with the layouts of LLaMA, GPT-2 and ViT, and the changes that restore Hugging Face's weights into them.

`hugging_face/` holds small checkpoints that `transformers` wrote, with the logits that it computes.
"""

import importlib.util
import sys
from pathlib import Path

import flax.linen as nn
import jax.numpy as jnp

import flax_spmd as spmd
from flax_spmd.checkpoint import Changes

FOLDER = Path(__file__).parent / 'hugging_face'
EXAMPLE = Path(__file__).parent.parent.parent / 'examples' / 'llama' / 'model.py'
TOKENS = jnp.arange(16).reshape(2, 8) * 7 % 32
IMAGES = (jnp.arange(2 * 3 * 16 * 16) % 17 / 17).reshape(2, 3, 16, 16).transpose(0, 2, 3, 1)
HEADS, KV_HEADS = 8, 4


def llama():
  """The example's model, with the sizes of the checkpoint."""
  spec = importlib.util.spec_from_file_location('llama_example', EXAMPLE)
  module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
  if not hasattr(module, 'Llama'):
    spec.loader.exec_module(module)
  sizes = module.Sizes(
    layers=3, embed=32, heads=HEADS, kv_heads=KV_HEADS, head=4, mlp=48, vocab=32, dtype='float32'
  )
  return module.Llama(sizes)


def boxed(*names):
  return spmd.with_logical_partitioning(nn.initializers.normal(0.02), names)


def dense(size, *names, name):
  return nn.Dense(size, kernel_init=boxed(*names), name=name)


def attention(heads, name):
  return nn.MultiHeadDotProductAttention(
    heads,
    kernel_init=boxed('embed', 'heads', 'head'),
    out_kernel_init=boxed('heads', 'head', 'embed'),
    name=name,
  )


class Block(nn.Module):
  """A layer with normalisation first, as in GPT-2 and ViT."""

  causal: bool
  epsilon: float
  mlp: int

  @nn.compact
  def __call__(self, x, _=None):
    y = nn.LayerNorm(self.epsilon, name='norm_attention')(x)
    mask = nn.make_causal_mask(x[..., 0]) if self.causal else None
    x = x + attention(4, 'attention')(y, mask=mask)
    y = nn.LayerNorm(self.epsilon, name='norm_mlp')(x)
    y = nn.gelu(dense(self.mlp, 'embed', 'mlp', name='up')(y), approximate=self.causal)
    return x + dense(x.shape[-1], 'mlp', 'embed', name='down')(y), None


class Gpt2(nn.Module):
  """A decoder with scanned layers, whose logits use the embedding again."""

  @nn.compact
  def __call__(self, tokens):
    embed = nn.Embed(32, 16, embedding_init=boxed('vocab', 'embed'), name='tokens')
    positions = nn.Embed(8, 16, embedding_init=boxed('length', 'embed'), name='positions')
    x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))[None]
    blocks = nn.scan(
      Block,
      length=3,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      metadata_params={nn.PARTITION_NAME: 'layers'},
    )
    x, _ = blocks(causal=True, epsilon=1e-5, mlp=64, name='blocks')(x, None)
    return embed.attend(nn.LayerNorm(1e-5, name='norm')(x))


class Vit(nn.Module):
  """An encoder of image patches with a module for each layer; a class from its first position."""

  @nn.compact
  def __call__(self, images):
    init = boxed('height', 'width', 'channels', 'embed')
    x = nn.Conv(16, (8, 8), (8, 8), kernel_init=init, name='patches')(images)
    x = x.reshape(x.shape[0], -1, x.shape[-1])
    first = self.param('first', nn.initializers.zeros, (1, 1, 16))
    x = jnp.concatenate([jnp.broadcast_to(first, (x.shape[0], 1, 16)), x], 1)
    x = x + self.param('positions', boxed('one', 'length', 'embed'), (1, 5, 16))
    for number in range(2):
      x, _ = Block(causal=False, epsilon=1e-12, mlp=32, name=f'layers_{number}')(x)
    x = nn.LayerNorm(1e-12, name='norm')(x)
    return dense(4, 'embed', 'classes', name='head')(x[:, 0])


LLAMA_CHANGES = Changes(
  renames={
    '^model/embed_tokens/weight$': 'params/embedding',
    '^model/norm/weight$': 'params/norm',
    '^lm_head/weight$': 'params/logits',
    r'^model/layers/(\d+)/self_attn/([qkv])_proj/weight$': r'params/blocks/\1/\2',
    r'^model/layers/(\d+)/self_attn/o_proj/weight$': r'params/blocks/\1/out',
    r'^model/layers/(\d+)/mlp/(\w+)_proj/weight$': r'params/blocks/\1/\2',
    r'^model/layers/(\d+)/input_layernorm/weight$': r'params/blocks/\1/norm_attention',
    r'^model/layers/(\d+)/post_attention_layernorm/weight$': r'params/blocks/\1/norm_mlp',
  },
  rearranged={
    '/q$': f'(heads={HEADS} head) embed -> embed heads head',
    '/[kv]$': f'(heads={KV_HEADS} head) embed -> embed heads head',
    '/out$': f'embed (heads={HEADS} head) -> heads head embed',
    '/(gate|up|down|logits)$': 'out in -> in out',
  },
  stacks={'params/blocks': 'params/blocks/{}'},
)
GPT2_CHANGES = Changes(
  renames={
    '^transformer/wte/weight$': 'params/tokens/embedding',
    '^transformer/wpe/weight$': 'params/positions/embedding',
    '^transformer/ln_f/weight$': 'params/norm/scale',
    '^transformer/ln_f/bias$': 'params/norm/bias',
    r'^transformer/h/(\d+)/ln_1/weight$': r'params/blocks/\1/norm_attention/scale',
    r'^transformer/h/(\d+)/ln_1/bias$': r'params/blocks/\1/norm_attention/bias',
    r'^transformer/h/(\d+)/ln_2/weight$': r'params/blocks/\1/norm_mlp/scale',
    r'^transformer/h/(\d+)/ln_2/bias$': r'params/blocks/\1/norm_mlp/bias',
    r'^transformer/h/(\d+)/attn/c_attn/weight$': r'params/blocks/\1/attention/qkv/kernel',
    r'^transformer/h/(\d+)/attn/c_attn/bias$': r'params/blocks/\1/attention/qkv/bias',
    r'^transformer/h/(\d+)/attn/c_proj/weight$': r'params/blocks/\1/attention/out/kernel',
    r'^transformer/h/(\d+)/attn/c_proj/bias$': r'params/blocks/\1/attention/out/bias',
    r'^transformer/h/(\d+)/mlp/c_fc/weight$': r'params/blocks/\1/up/kernel',
    r'^transformer/h/(\d+)/mlp/c_fc/bias$': r'params/blocks/\1/up/bias',
    r'^transformer/h/(\d+)/mlp/c_proj/weight$': r'params/blocks/\1/down/kernel',
    r'^transformer/h/(\d+)/mlp/c_proj/bias$': r'params/blocks/\1/down/bias',
  },
  rearranged={
    'qkv/kernel$': 'embed (parts=3 heads=4 head) -> parts embed heads head',
    'qkv/bias$': '(parts=3 heads=4 head) -> parts heads head',
    'out/kernel$': '(heads=4 head) embed -> heads head embed',
  },
  stacks={'attention/qkv': 'attention/{query,key,value}', 'params/blocks': 'params/blocks/{}'},
)
VIT_CHANGES = Changes(
  renames={
    '^vit/embeddings/cls_token$': 'params/first',
    '^vit/embeddings/position_embeddings$': 'params/positions',
    '^vit/embeddings/patch_embeddings/projection/weight$': 'params/patches/kernel',
    '^vit/embeddings/patch_embeddings/projection/bias$': 'params/patches/bias',
    '^vit/layernorm/weight$': 'params/norm/scale',
    '^vit/layernorm/bias$': 'params/norm/bias',
    '^classifier/weight$': 'params/head/kernel',
    '^classifier/bias$': 'params/head/bias',
    r'^vit/encoder/layer/(\d+)/layernorm_before/weight$': r'params/layers_\1/norm_attention/scale',
    r'^vit/encoder/layer/(\d+)/layernorm_before/bias$': r'params/layers_\1/norm_attention/bias',
    r'^vit/encoder/layer/(\d+)/layernorm_after/weight$': r'params/layers_\1/norm_mlp/scale',
    r'^vit/encoder/layer/(\d+)/layernorm_after/bias$': r'params/layers_\1/norm_mlp/bias',
    r'^vit/encoder/layer/(\d+)/attention/attention/(\w+)/weight$': r'params/layers_\1/attention/\2/kernel',
    r'^vit/encoder/layer/(\d+)/attention/attention/(\w+)/bias$': r'params/layers_\1/attention/\2/bias',
    r'^vit/encoder/layer/(\d+)/attention/output/dense/weight$': r'params/layers_\1/attention/out/kernel',
    r'^vit/encoder/layer/(\d+)/attention/output/dense/bias$': r'params/layers_\1/attention/out/bias',
    r'^vit/encoder/layer/(\d+)/intermediate/dense/weight$': r'params/layers_\1/up/kernel',
    r'^vit/encoder/layer/(\d+)/intermediate/dense/bias$': r'params/layers_\1/up/bias',
    r'^vit/encoder/layer/(\d+)/output/dense/weight$': r'params/layers_\1/down/kernel',
    r'^vit/encoder/layer/(\d+)/output/dense/bias$': r'params/layers_\1/down/bias',
  },
  rearranged={
    '(query|key|value)/kernel$': '(heads=4 head) embed -> embed heads head',
    '(query|key|value)/bias$': '(heads=4 head) -> heads head',
    'out/kernel$': 'embed (heads=4 head) -> heads head embed',
    'patches/kernel$': 'out in height width -> height width in out',
    '(up|down|head)/kernel$': 'out in -> in out',
  },
)
MODELS = {
  'llama': (llama, TOKENS, LLAMA_CHANGES),
  'gpt2': (Gpt2, TOKENS, GPT2_CHANGES),
  'vit': (Vit, IMAGES, VIT_CHANGES),
}
