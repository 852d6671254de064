"""Programs that run on a GPU of this machine: `python -m tests.gpu.programs NAME FOLDER`."""

import re
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import flax_spmd as spmd
from flax_spmd import checkpoint
from flax_spmd.explore import Estimator, TrainStep, compare

README = (Path(__file__).parents[2] / 'README.md').read_text()
DTYPES = ('float32', 'bfloat16', 'float16', 'float8_e4m3fn', 'int8', 'int32', 'bool', 'complex64')


def readme(folder: Path) -> None:
  """The README's first example."""
  (first, *_) = re.findall(r'```python\n(.*?)```', README, re.DOTALL)
  names: dict = {'__name__': 'readme'}
  exec(compile(first, 'README.md', 'exec'), names)
  assert jax.tree.leaves(names['params'])[0].devices() == {jax.devices()[0]}


def bits():
  """Arrays of all dtypes, some larger than a checksum's block, and random keys."""
  generator = np.random.default_rng(7)
  arrays = {}
  for dtype in DTYPES:
    for size in (5, 3 * 2**20 + 7):
      values = generator.integers(0, 2 if dtype == 'bool' else 7, size)
      arrays[f'{dtype}_{size}'] = jnp.asarray(values).astype(dtype)
  return {**arrays, 'key': jax.random.key(3)}


def host_values(state):
  data = {name: jax.random.key_data(leaf) if name == 'key' else leaf for name, leaf in state.items()}
  return jax.tree.map(np.asarray, data)


def layout_of(*more):
  rules = (*more, ('batch', 'data'), spmd.fsdp('data', min_size=1024))
  return spmd.Layout(spmd.make_mesh({'data': -1}), rules)


def save_all(folder: Path) -> None:
  """Saves arrays of all dtypes; verifies and restores them here."""
  layout = layout_of()
  state = layout.shard(bits())
  checkpoint.save(folder / 'all', state, layout=layout)
  assert checkpoint.verify(folder / 'all') == []
  restore_all(folder)


def restore_all(folder: Path) -> None:
  """Restores what `save_all` saved, perhaps on another platform, bit for bit."""
  layout = layout_of()
  restored = checkpoint.restore(folder / 'all', layout=layout)
  for name, value in host_values(bits()).items():
    found = host_values({name: restored[name]})[name]
    assert found.dtype == value.dtype and found.tobytes() == value.tobytes(), name
  assert checkpoint.verify(folder / 'all') == []


def donated(folder: Path) -> None:
  """Values of an asynchronous save are those before the steps that reuse its arrays."""
  layout = layout_of()
  step = layout.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
  state = layout.shard({str(n): jnp.full((2**24,), float(n)) for n in range(16)})
  saving = checkpoint.save_async(folder / 'donated', state, layout=layout)
  for _ in range(50):
    state = step(state)
  jax.block_until_ready(state)
  saving.result()
  restored = checkpoint.restore(folder / 'donated', layout=layout)
  assert all((np.asarray(leaf) == int(name)).all() for name, leaf in restored.items())


class Block(nn.Module):
  implementation: str = 'xla'

  @nn.compact
  def __call__(self, tokens):
    init = spmd.with_logical_partitioning(nn.initializers.normal(0.02), ('vocab', 'embed'))
    x = nn.Embed(512, 128, embedding_init=init, dtype=jnp.bfloat16)(tokens)
    for _ in range(2):
      q, k, v = (nn.DenseGeneral((2, 64), dtype=jnp.bfloat16)(x) for _ in range(3))
      y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self.implementation)
      x = x + nn.DenseGeneral(128, axis=(-2, -1), dtype=jnp.bfloat16)(y)
      x = x + nn.Dense(128, dtype=jnp.bfloat16)(nn.gelu(nn.Dense(512, dtype=jnp.bfloat16)(x)))
      x = spmd.with_logical_constraint(x, ('batch', None, None))
    return nn.Dense(512, dtype=jnp.float32)(x)


def training(implementation='xla'):
  model = Block(implementation)

  def create():
    params = model.init(jax.random.key(0), jnp.zeros((1, 64), jnp.int32))['params']
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-2))

  def step(state, tokens):
    def loss_fn(params):
      logits = state.apply_fn({'params': params}, tokens[:, :-1])
      return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss

  return TrainStep(step, create, jax.ShapeDtypeStruct((8, 65), jnp.int32))


def losses(layout, made, steps=5):
  state = layout.init(made.create)
  step = layout.jit(made.step, donate_argnums=0)
  tokens = layout.shard(
    np.random.default_rng(0).integers(0, 512, made.batch.shape).astype(np.int32), ('batch', None)
  )
  found = []
  for _ in range(steps):
    state, loss = step(state, tokens)
    found.append(float(loss))
  return found, state


def host_memory(folder: Path) -> None:
  """The optimizer's state in the host's memory: the same losses."""
  made = training()
  plain, _ = losses(layout_of(), made)
  offloaded = layout_of(('^opt_state/', spmd.host(spmd.fsdp('data', min_size=1024))))
  hosted, state = losses(offloaded, made)
  kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.opt_state) if leaf.size > 1024}
  assert kinds == {'pinned_host'}, kinds
  np.testing.assert_allclose(hosted, plain, rtol=1e-2)
  assert plain[-1] < plain[0]
  checkpoint.save(folder / 'hosted', state, layout=offloaded)
  restored = checkpoint.restore(folder / 'hosted', jax.tree.map(lambda leaf: leaf, state))
  for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
    assert one.sharding.memory_kind == other.sharding.memory_kind
    assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def cudnn(folder: Path) -> None:
  """cuDNN's attention under `layout.jit`, beside XLA's."""
  plain, _ = losses(layout_of(), training())
  fused, _ = losses(layout_of(), training('cudnn'))
  np.testing.assert_allclose(fused, plain, rtol=2e-2)


def compilers(folder: Path) -> None:
  """Compilers and the partitioner for absent GPUs, in a process that uses one."""
  made = training()
  _, state = losses(layout_of(), made, 1)
  layouts = {
    'fsdp': spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'), spmd.fsdp('data')))
  }
  outcome = compare(made, layouts, 'h100:8')['fsdp']
  assert outcome.error is None, outcome.error
  estimate = Estimator(made).estimate(layouts['fsdp'], 'h100:8')
  assert estimate.source == 'partitioned'
  assert estimate.counts.flops == outcome.counts.flops
  assert estimate.counts.by_kind() == outcome.counts.by_kind()
  one = layout_of()
  compiled = (
    one.jit(made.step, donate_argnums=0).lower(state, jax.ShapeDtypeStruct((8, 65), jnp.int32)).compile()
  )
  analysis = compiled.memory_analysis()
  absent = compare(
    made, {'one': spmd.Layout(spmd.abstract_mesh({'data': 1}), (('batch', 'data'),))}, 'h100:1'
  )['one']
  assert abs(absent.memory.temporaries / analysis.temp_size_in_bytes - 1) < 0.02


def safetensors(folder: Path) -> None:
  """safetensors to a GPU and back."""
  layout = layout_of()
  state = layout.shard(
    {'w': jnp.arange(2**22, dtype=jnp.float32).reshape(2048, 2048), 'b': jnp.ones(8, jnp.bfloat16)}
  )
  checkpoint.save_safetensors(folder / 'st', state)
  restored = checkpoint.restore(folder / 'st', state)
  for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
    assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


if __name__ == '__main__':
  globals()[sys.argv[1]](Path(sys.argv[2]))
