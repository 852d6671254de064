"""Checkpoints that `transformers` wrote: restored into Linen models under any layout, where they compute the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import flax_spmd as spmd
from flax_spmd import checkpoint
from tests.checkpoint.hugging_face_models import FOLDER, HEADS, MODELS

RULES = (
  ('vocab', 'model'),
  ('embed', 'data'),
  ('heads', 'model'),
  ('kv_heads', 'model'),
  ('mlp', 'model'),
  ('batch', 'data'),
)
LAYOUTS = {
  'data 2, model 4': spmd.Layout({'data': 2, 'model': 4}, RULES),
  'data 4, model 2': spmd.Layout({'data': 4, 'model': 2}, RULES),
  'replicated': spmd.Layout({'data': 8}, ()),
  'the head dimension': spmd.Layout({'data': 2, 'model': 4}, (('embed', 'data'), ('head', 'model'))),
}


def restored(name, layout, changes=None):
  make, batch, given = MODELS[name]
  model = make()
  variables = layout.abstract(model.init, jax.random.key(0), batch)
  params = checkpoint.restore(FOLDER / name, variables, changes=changes or given)
  return model, batch, spmd.unbox(params)['params']


def tensors(name):
  """The checkpoint as safetensors' own library reads it."""
  return {
    tensor: array
    for file in (FOLDER / name).glob('*.safetensors')
    for tensor, array in load_file(file).items()
  }


@pytest.mark.parametrize('layout', LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize('name', list(MODELS))
def test_logits_are_those_of_transformers(name, layout):
  model, batch, params = restored(name, layout)
  with layout:
    logits = jax.jit(model.apply)({'params': params}, batch)
  np.testing.assert_allclose(logits, np.load(FOLDER / name / 'logits.npy'), rtol=2e-4, atol=2e-4)


def linear(weight, *shape):
  return weight.T.reshape(*shape)


def test_llama_is_equal_byte_for_byte():
  _, _, params = restored('llama', LAYOUTS['data 2, model 4'])
  saved = tensors('llama')
  assert params['embedding'].sharding.spec == jax.sharding.PartitionSpec('model', 'data')
  assert np.array_equal(params['embedding'], saved['model.embed_tokens.weight'])
  assert np.array_equal(params['logits'], saved['lm_head.weight'].T)
  for number in range(3):
    layer = f'model.layers.{number}.'
    of = {name: array[number] for name, array in params['blocks'].items()}
    query, key = saved[f'{layer}self_attn.q_proj.weight'], saved[f'{layer}self_attn.k_proj.weight']
    assert np.array_equal(of['q'], linear(query, 32, HEADS, 4))
    assert np.array_equal(of['k'], linear(key, 32, 4, 4))
    assert np.array_equal(of['out'], linear(saved[f'{layer}self_attn.o_proj.weight'], HEADS, 4, 32))
    assert np.array_equal(of['down'], saved[f'{layer}mlp.down_proj.weight'].T)
    assert np.array_equal(of['norm_mlp'], saved[f'{layer}post_attention_layernorm.weight'])


def test_gpt2_is_equal_byte_for_byte():
  _, _, params = restored('gpt2', LAYOUTS['data 4, model 2'])
  saved = tensors('gpt2')
  for number in range(3):
    fused = saved[f'transformer.h.{number}.attn.c_attn.weight'].reshape(16, 3, 4, 4)
    bias = saved[f'transformer.h.{number}.attn.c_attn.bias'].reshape(3, 4, 4)
    for part, name in enumerate(('query', 'key', 'value')):
      one = params['blocks']['attention'][name]
      assert np.array_equal(one['kernel'][number], fused[:, part])
      assert np.array_equal(one['bias'][number], bias[part])


def test_vit_is_equal_byte_for_byte():
  _, _, params = restored('vit', LAYOUTS['data 2, model 4'])
  saved = tensors('vit')
  patches = saved['vit.embeddings.patch_embeddings.projection.weight']
  assert np.array_equal(params['patches']['kernel'], patches.transpose(2, 3, 1, 0))
  assert np.array_equal(params['head']['kernel'], saved['classifier.weight'].T)


def test_without_a_target_the_same_arrays():
  layout = LAYOUTS['data 2, model 4']
  for name, (_, _, changes) in MODELS.items():
    _, _, params = restored(name, layout)
    alone = checkpoint.restore(FOLDER / name, layout=layout, changes=changes)['params']
    assert jax.tree.all(jax.tree.map(np.array_equal, alone, params))


def test_a_part_in_another_dtype():
  layout = LAYOUTS['data 2, model 4']
  model, batch, changes = MODELS['llama'][0](), *MODELS['llama'][1:]
  target = layout.abstract(model.init, jax.random.key(0), batch)['params']['embedding']
  half = checkpoint.Changes(
    renames=dict(changes.renames), only='params/embedding', dtypes={'float32': 'bfloat16'}
  )
  abstract = jax.ShapeDtypeStruct((32, 32), jnp.bfloat16, sharding=spmd.unbox(target).sharding)
  embedding = checkpoint.restore(FOLDER / 'llama', abstract, changes=half)
  saved = tensors('llama')['model.embed_tokens.weight']
  assert np.array_equal(embedding, saved.astype(jnp.bfloat16))


def test_tied_weights_go_to_both_places():
  layout = LAYOUTS['data 2, model 4']
  changes = checkpoint.Changes(
    renames={'^transformer/wte/weight$': ['embedding', 'logits']},
    rearranged={'logits': 'vocab embed -> embed vocab'},
    unused='^transformer/(h|ln_f|wpe)',
  )
  target = layout.abstract(
    lambda: {
      'embedding': spmd.LogicallyPartitioned(jnp.zeros((32, 16)), ('vocab', 'embed')),
      'logits': spmd.LogicallyPartitioned(jnp.zeros((16, 32)), ('embed', 'vocab')),
    }
  )
  state = spmd.unbox(checkpoint.restore(FOLDER / 'gpt2', target, changes=changes))
  saved = tensors('gpt2')['transformer.wte.weight']
  assert np.array_equal(state['embedding'], saved) and np.array_equal(state['logits'], saved.T)
