"""Plans of reshards: the peak of every device against the buffers that exist, the promise about it, and bad input."""

import gc
from collections import Counter
from textwrap import dedent
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import LogicallyPartitioned as Box

FSDP = spmd.Layout({'data': 8}, (('embed', 'data'),))
TENSOR = spmd.Layout({'data': 2, 'model': 4}, (('mlp', 'model'),))
HALF = spmd.Layout(Mesh(np.array(jax.devices()[4:]), ('model',)), (('mlp', 'model'),))
TURNED = spmd.Layout(Mesh(np.array(jax.devices()[::-1]), ('model',)), (('mlp', 'model'),))


def state_of(layout, layers=4):
  rng = np.random.default_rng(0)
  kernels = [Box(rng.normal(size=(64, 128)).astype(np.float32), ('embed', 'mlp')) for _ in range(layers)]
  return layout.shard(
    {'layers': kernels, 'bias': Box(np.ones(128, np.float32), ('mlp',)), 'n': np.int32(1)}
  )


def live_bytes():
  """The bytes of all buffers that exist, by device."""
  buffers = {
    (shard.device, shard.data.unsafe_buffer_pointer()): shard.data.nbytes
    for array in jax.live_arrays()
    if not array.is_deleted()
    for shard in array.addressable_shards
  }
  found = Counter()
  for (device, _), size in buffers.items():
    found[device] += size
  return found


@pytest.mark.parametrize('donate', [False, True])
@pytest.mark.parametrize(
  'to', [TENSOR, HALF, TURNED], ids=['same devices', 'fewer devices', 'another order']
)
def test_the_peak_is_that_of_the_buffers(to, donate):
  state = state_of(FSDP)
  plan = FSDP.plan_reshard(state, to, dtype='bfloat16', donate=donate)
  gc.collect()
  others = live_bytes()
  others.subtract(plan.source_bytes)
  seen, wait = Counter(), jax.block_until_ready

  def sampled(result):
    result = wait(result)
    for device, size in live_bytes().items():
      seen[device] = max(seen[device], size - others[device])
    return result

  with mock.patch.object(jax, 'block_until_ready', sampled):
    after = FSDP.reshard(state, to, dtype='bfloat16', donate=donate)
  kernel, temporary = 64 * 128 * 2 // to.mesh.shape['model'], plan.chunk
  for device, peak in plan.peak_bytes.items():
    assert seen[device] <= peak <= seen[device] + kernel + temporary
  if to is HALF:  # through the host, without temporary memory
    assert dict(seen) == plan.peak_bytes
  held = Counter()
  for leaf in jax.tree.leaves(after):
    held.update({shard.device: shard.data.nbytes for shard in leaf.addressable_shards})
  assert held == plan.target_bytes


@pytest.mark.parametrize('to', [TENSOR, HALF, TURNED])
@pytest.mark.parametrize('dtype', [None, 'bfloat16'])
def test_a_donated_state_needs_a_tenth_more_than_the_larger_side(to, dtype):
  """40 layers of 64 MiB, abstract: their programs are compiled, and nothing runs."""
  kernel = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
  layers = {f'layer_{i}': Box(kernel, ('embed', 'mlp')) for i in range(40)}
  state = jax.tree.map(
    lambda box, sharding: Box(
      jax.ShapeDtypeStruct((4096, 4096), jnp.float32, sharding=sharding), box.names
    ),
    layers,
    FSDP.sharding(layers),
    is_leaf=lambda node: isinstance(node, Box),
  )
  plan = FSDP.plan_reshard(state, to, dtype=dtype, donate=True)
  for device, peak in plan.peak_bytes.items():
    larger = max(plan.source_bytes.get(device, 0), plan.target_bytes.get(device, 0))
    assert peak <= 1.1 * larger
  kept = FSDP.plan_reshard(state, to, dtype=dtype)
  assert max(kept.peak_bytes.values()) >= max(plan.source_bytes.values()) + max(
    plan.target_bytes.values()
  )


def test_the_table():
  plan = FSDP.plan_reshard(state_of(FSDP), HALF, dtype='bfloat16')
  assert str(plan) == dedent("""\
    ┏━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━┳━━━━━━━━━━━━━┳━━━━━━━━━━━━┓
    ┃ array                        ┃ from                              ┃ to                                ┃ way    ┃ on the wire ┃ per device ┃
    ┡━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━╇━━━━━━━━━━━━━╇━━━━━━━━━━━━┩
    │ layers/*[64, 128] (4 arrays) │ float32 P('data', None) on        │ bfloat16 P(None, 'model') on      │ host   │ 192 KiB     │     16 KiB │
    │                              │ {'data': 8}                       │ {'model': 4}                      │        │             │            │
    │ bias[128]                    │ float32 P(None,) on {'data': 8}   │ bfloat16 P('model',) on {'model': │ host   │ 768 B       │       64 B │
    │                              │                                   │ 4}                                │        │             │            │
    │ n[]                          │ int32 P() on {'data': 8}          │ int32 P() on {'model': 4}         │ copied │ 0 B         │        4 B │
    └──────────────────────────────┴───────────────────────────────────┴───────────────────────────────────┴────────┴─────────────┴────────────┘
    193 KiB on the wire.
    Peak of 32.6 KiB on device 4: state 16.5 KiB (kept), result 16.1 KiB.""")


def test_a_lack_of_memory_is_an_error_before_anything_moves():
  state = state_of(FSDP)
  plan = FSDP.plan_reshard(state, HALF, limit=40_000)
  text = (
    'The reshard needs 48.6 KiB on device 4, which has 39.1 KiB for it: 16.5 KiB of the state, 32.1 KiB of the result. '
    'Largest arrays of the result: layers/0 8 KiB, layers/1 8 KiB, layers/2 8 KiB, layers/3 8 KiB, bias 128 B.'
  )
  fix = 'use a mesh of more devices, rules that shard more, or a narrower dtype=.'
  with pytest.raises(spmd.errors.LayoutError) as caught:
    FSDP.reshard(state, HALF, limit=40_000)
  assert str(caught.value) == f'{text}\nFix: free the state on the way with donate=True; or {fix}'
  assert [problem.text for problem in plan.problems] == [text]
  with pytest.raises(spmd.errors.LayoutError) as caught:
    FSDP.reshard(state, HALF, limit=30_000, donate=True)
  assert str(caught.value).splitlines()[1] == f'Fix: {fix}'
  assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
  assert FSDP.reshard(state, HALF, limit=40_000, donate=True)['n'] == 1


def test_states_that_are_not_the_plan_s():
  create = lambda: {'w': Box(jnp.ones((8, 16)), ('embed', 'mlp')), 'b': jnp.ones(16)}
  plan, state = HALF.plan(create, boxed=False), FSDP.init(create, boxed=False)
  served = FSDP.reshard(state, plan)
  assert served['w'].sharding.spec == P(None, 'model')
  for wrong, dtype, text in (
    ({'w': state['w']}, None, 'b: planned, but not in the tree.\nFix: pass a state of this plan, or plan the function '
      'that created this one.'),
    (state, 'bfloat16', 'b: bfloat16 as the result, but float32 in the plan.\n'
      'w: bfloat16 as the result, but float32 in the plan.\n'
      'Fix: pass the dtype= of the plan, or plan the state in its own dtype.'),
  ):  # fmt: skip
    with pytest.raises(spmd.errors.LayoutError) as caught:
      FSDP.reshard(wrong, plan, dtype=dtype)
    assert str(caught.value) == text


def test_a_state_of_another_layout():
  four = spmd.Layout(Mesh(np.array(jax.devices()[:4]), ('data',)))
  with pytest.raises(spmd.errors.LayoutError) as caught:
    four.reshard(HALF.shard({'w': np.ones(8)}, {'w': P('model')}), FSDP)
  assert str(caught.value) == (
    "w: it is stored as P('model',) on {'model': 4}, on no device of the layout on {'data': 4}.\n"
    'Fix: call reshard of the layout that the state has; the one that it is to have is `to`.'
  )
  with pytest.raises(spmd.errors.MeshError, match='is abstract: there are no devices'):
    four.reshard({'w': np.ones(8)}, spmd.Layout(spmd.abstract_mesh({'data': 8})))


def test_a_state_without_names_that_would_be_replicated():
  state = FSDP.shard({'w': np.ones((8, 16), np.float32)}, {'w': P('data')})
  with pytest.warns(UserWarning) as caught:
    FSDP.reshard(state, HALF)
  assert str(caught[0].message) == (
    'Every device will hold all 512 B of the state, which is sharded now: its arrays have no names, and no rule of the '
    'other layout shards them. To shard them by their names, pass the plan of the state, to=other.plan(create, ...).'
  )
  assert caught[0].filename == __file__


def test_a_sharding_that_is_not_of_names():
  """Those of one device, and of programs that know no names."""
  state = {'w': jax.device_put(np.arange(16.0), jax.devices()[2])}
  after = FSDP.reshard(state, spmd.Layout({'model': 8}, (('^w', P('model')),)))
  assert after['w'].sharding == NamedSharding(after['w'].sharding.mesh, P('model'))
  np.testing.assert_array_equal(after['w'], np.arange(16.0))


def test_leaves_that_cannot_move():
  """Every one is named before anything moves, so that a donated state is whole."""
  gone = jnp.ones(8)
  gone.delete()
  whole = state_of(FSDP)
  state = {'state': whole, 'gone': gone, 'text': 'adam', 'large': 2**40}
  with pytest.raises(spmd.errors.LayoutError) as caught:
    FSDP.reshard(state, HALF, donate=True)
  assert str(caught.value) == dedent("""\
    gone has been deleted, or donated to a jitted function.
    large: 1099511627776 is no array or number of JAX.
    text: 'adam' is no array or number of JAX.
    Fix: pass the state that the step returned, not the one that was donated to it.
    Fix: pass a smaller number or a float, or set jax_enable_x64 before JAX is first used.
    Fix: keep it out of the tree, or make it static, such as by flax.struct.field(pytree_node=False).""")
  assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(whole))
  with pytest.raises(spmd.errors.LayoutError) as caught:
    FSDP.reshard({'w': jax.ShapeDtypeStruct((8,), jnp.float32)}, HALF)
  assert str(caught.value) == (
    'w: it is abstract, and has no values.\nFix: reshard arrays; plan_reshard plans abstract ones.'
  )


def test_calls_that_are_none_of_reshard_s():
  state = {'w': jnp.ones(8)}
  for call, text in (
    (lambda: jax.jit(lambda state: FSDP.reshard(state, HALF))(state),
     'w: it is a value in a function that JAX traces.\n'
     'Fix: call reshard outside of jitted functions; inside, use with_sharding_constraint.'),
    (lambda: FSDP.reshard(state, HALF, dtype='flaot32'),
     "dtype='flaot32' is not a dtype.\nFix: pass a floating-point dtype, such as bfloat16."),
    (lambda: FSDP.reshard(state, HALF, dtype='int8'),
     "dtype='int8' has no floating-point numbers, which the arrays have.\n"
     'Fix: pass a floating-point dtype, such as bfloat16; quantize the state in a function of its own.'),
    (lambda: FSDP.reshard(state, HALF.mesh),
     'A Mesh is no layout.\nFix: pass a Layout, or a plan of one, as `to`.'),
  ):  # fmt: skip
    with pytest.raises(spmd.errors.LayoutError) as caught:
      call()
    assert str(caught.value) == text
