"""Attention by JAX's Splash kernels for TPUs: their FLOPs, and those of the operations after them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd.explore import Estimator, TrainStep, compare

BATCH, LENGTH, HEADS, HEAD, EMBED, LAYERS = 4, 512, 4, 128, 512, 2
LAYOUT = spmd.Layout(
  spmd.abstract_mesh({'data': 4, 'model': 2}), (('batch', 'data'), ('heads', 'model'))
)
SIZES = {'block_q': 128, 'block_kv': 256, 'block_kv_compute': 128}
OF_DKV = {'block_q_dkv': 256, 'block_kv_dkv': 128, 'block_kv_dkv_compute': 128}
OF_DQ = {'block_q_dq': 128, 'block_kv_dq': 128}
X = jax.ShapeDtypeStruct((BATCH, LENGTH, EMBED), jnp.bfloat16)


def train_step(mask, is_fused, is_mqa=False):
  """Layers of attention in a scan."""
  kernels = pytest.importorskip('jax.experimental.pallas.ops.tpu.splash_attention')

  def attention(q, k, v):
    masks = kernels.MultiHeadMask([mask(kernels)] * q.shape[1])
    sizes = kernels.BlockSizes(
      **SIZES, **OF_DKV, **({} if is_fused else OF_DQ), use_fused_bwd_kernel=is_fused
    )
    make = kernels.make_splash_mqa_single_device if is_mqa else kernels.make_splash_mha_single_device
    kernel = make(mask=masks, block_sizes=sizes)
    return jax.vmap(kernel)(q, k[:, 0], v[:, 0]) if is_mqa else jax.vmap(kernel)(q, k, v)

  def of(layout):
    spec = P('data', 'model', None, None)
    mapped = {'mesh': layout.mesh, 'in_specs': (spec,) * 3, 'out_specs': spec, 'check_vma': False}

    def layer(x, weights):
      q, k, v = (jnp.einsum('ble,ehd->bhld', x, w.astype(x.dtype)) for w in weights)
      y = jax.shard_map(attention, **mapped)(q, k, v)
      return x + y.transpose(0, 2, 1, 3).reshape(x.shape).astype(x.dtype), None

    def step(weights, x):
      def loss(weights):
        return jnp.mean(jax.lax.scan(layer, x, spmd.unbox(weights))[0].astype(jnp.float32) ** 2)

      value, grads = jax.value_and_grad(loss)(weights)
      return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    weight = spmd.LogicallyPartitioned(
      jnp.ones((LAYERS, EMBED, HEADS, HEAD)), ('layers', 'embed', 'heads')
    )
    return TrainStep(step, lambda: [weight] * 3, X)

  return of


def causal(kernels):
  return kernels.CausalMask((LENGTH, LENGTH))


def local(kernels):
  return kernels.LocalMask((LENGTH, LENGTH), (127, 0), 0)


def full(kernels):
  return kernels.FullMask((LENGTH, LENGTH))


@pytest.mark.parametrize(
  ('mask', 'is_fused', 'is_mqa', 'kept'),
  [  # the parts of the scores in blocks that are kept, forward, for keys and values, and for queries
    (causal, False, False, (6 / 8, 6 / 8, 10 / 16)),
    (causal, True, False, (6 / 8, 6 / 8, 0)),
    (causal, False, True, (6 / 8, 6 / 8, 10 / 16)),
    (local, False, False, (5 / 8, 5 / 8, 7 / 16)),
    (full, False, False, (1, 1, 1)),
  ],
)
def test_flops_of_kernels_are_those_of_their_blocks(mask, is_fused, is_mqa, kept, tpu_compiler):
  of = train_step(mask, is_fused, is_mqa)
  compiled = compare(of, {'tensor': LAYOUT}, 'v5e:2x4')['tensor']
  estimate = Estimator(of, platform='tpu').estimate(LAYOUT, 'v5e:2x4')
  product = 2 * BATCH * HEADS * LENGTH**2 * HEAD / 8
  attention = sum(part * times for part, times in zip(kept, (2, 5 if is_fused else 4, 3))) * product
  projections = (
    9 * 2 * BATCH * LENGTH * EMBED * HEADS * HEAD / 8
  )  # of q, k and v, and two gradients of each
  assert compiled.counts.flops == pytest.approx(LAYERS * (attention + projections))
  assert estimate.counts.flops == compiled.counts.flops and not compiled.counts.opaque
  assert estimate.counts.by_axis() == compiled.counts.by_axis()
  weights = 3 * LAYERS * EMBED * HEADS * HEAD * 2 / 2  # in bf16, on two devices
  over_data = sum(one.wire for one in compiled.counts.collectives if one.axes == ('data',))
  assert over_data == pytest.approx(2 * 3 / 4 * weights)
