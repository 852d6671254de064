"""Single operations as programs: their collectives are those that JAX's program of the same operation has."""

import math
import os
import shutil
import signal
import sys
import threading
from multiprocessing.connection import Connection

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import flax_spmd as spmd
from flax_spmd._src import worker_process
from flax_spmd._src.compare.partitioner import Partitioner
from flax_spmd._src.compat import partition_program
from flax_spmd._src.estimate import mlir, partitioned_operations, unsure_operations
from flax_spmd._src.estimate.doubts import Bound
from flax_spmd._src.estimate.graph import GraphValue, Op
from flax_spmd._src.estimate.partitioned_operations import (
  Partition,
  PartitionedOperations,
  adopted,
)
from flax_spmd._src.estimate.requirements import Context, Requirement
from flax_spmd._src.estimate.resharding import CollectiveOp
from flax_spmd._src.hlo.counts import count
from flax_spmd._src.hlo.operation_costs import operation_costs
from flax_spmd.explore import Estimator, TrainStep
from tests.estimate.doubts import doubts_of
from tests.estimate.partitioners import replace_partitioner

IN_BOUNDS = lax.GatherScatterMode.PROMISE_IN_BOUNDS
ROWS = lax.GatherDimensionNumbers((2,), (0,), (0,))
ONTO = lax.ScatterDimensionNumbers((2,), (0,), (0,))
BATCH = lax.GatherDimensionNumbers((), (1,), (1,), (0,), (0,))
ADD = lambda table, i, rows: lax.scatter_add(table, i, rows, ONTO, mode=IN_BOUNDS)
CONVOLUTION = lambda x, w: lax.conv_general_dilated(
  x, w, (1,), 'SAME', dimension_numbers=('NWC', 'WIO', 'NWC')
)

F32, I32 = jnp.float32, jnp.int32
# By name: kind in StableHLO, function, and the shapes and dtypes of its arguments.
OPERATIONS = {
  'product': ('dot_general', lambda x, y: x @ y, [((8, 16, 32), F32), ((32, 16), F32)]),
  'batch of products': (
    'dot_general',
    lambda x, y: jnp.einsum('bqd,bkd->bqk', x, y),
    [((8, 16, 32), F32), ((8, 64, 32), F32)],
  ),
  'rows': (
    'gather',
    lambda x, i: lax.gather(x, i, ROWS, (1, 64), mode=IN_BOUNDS),
    [((32, 64), F32), ((16, 8, 1), I32)],
  ),
  'one of each row': (
    'gather',
    lambda x, i: lax.gather(x, i, BATCH, (1, 1), mode=IN_BOUNDS),
    [((16, 64), F32), ((16, 8, 1), I32)],
  ),
  'rows onto a table': ('scatter', ADD, [((32, 64), F32), ((16, 8, 1), I32), ((16, 8, 64), F32)]),
  'concatenation': ('concatenate', lambda x, y: lax.concatenate([x, y], 0), [((8, 16), F32)] * 2),
  'slice': ('slice', lambda x: x[:8], [((16, 8), F32)]),
  'padding': ('pad', lambda x: jnp.pad(x, ((4, 4), (0, 0))), [((16, 8), F32)]),
  'sort': ('sort', lambda x, y: lax.sort((x, y), dimension=0), [((16, 8), F32)] * 2),
  'convolution': ('convolution', CONVOLUTION, [((8, 16, 8), F32), ((3, 8, 16), F32)]),
}
MESHES = ({'a': 8}, {'a': 2, 'b': 4}, {'a': 2, 'b': 2, 'c': 2})


class Partitions:
  """XLA's partitioner for the CPU, which is at hand everywhere."""

  def partition(self, code, shape):
    return partition_program(code, np.array(jax.devices()).reshape(shape))


@pytest.fixture(autouse=True, scope='module')
def partitions():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(partitioned_operations, 'partitioner', lambda platform: Partitions())
    replace_partitioner(patch, can_partition=lambda platform: True)
    yield


def prepared(function, arguments):
  """A module with one operation of interest, and that operation."""
  lowered = jax.jit(function).lower(*(jax.ShapeDtypeStruct(*one) for one in arguments))
  return mlir.prepare(lowered.compiler_ir().operation.get_asm(binary=True), 'cpu')


def operation(module, kind):
  return next(op for op in module.graph.main.ops if op.kind == kind)


@st.composite
def specs(draw, shape, sizes):
  """A sharding of an array, whose dimensions divide."""
  spec = [()] * len(shape)
  for axis in sizes:
    dims = [
      dim
      for dim, size in enumerate(shape)
      if size % (math.prod(sizes[one] for one in spec[dim]) * sizes[axis]) == 0
    ]
    dim = draw(st.sampled_from([None, *dims]))
    if dim is not None:
      spec[dim] += (axis,)
  return tuple(spec)


def compiled(function, arguments, before, after, sizes):
  """The collectives of JAX's own program: kinds and bytes."""
  mesh = Mesh(np.array(jax.devices()).reshape(*sizes.values()), tuple(sizes))
  sharding = lambda spec: NamedSharding(mesh, PartitionSpec(*spec))
  jitted = jax.jit(
    function,
    in_shardings=tuple(map(sharding, before)),
    out_shardings=jax.tree.map(lambda _: sharding(after), jax.eval_shape(function, *arguments)),
  )
  counts = count(jitted.lower(*arguments).compile().as_text(), sizes)
  return sorted((one.kind, one.bytes) for one in counts.collectives), counts.flops


@settings(max_examples=10, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize('name', OPERATIONS)
def test_an_operation_alone_has_the_collectives_of_the_program_that_jax_compiles(name, data):
  kind, function, arguments = OPERATIONS[name]
  sizes = data.draw(st.sampled_from(MESHES))
  module = prepared(function, arguments)
  op = operation(module, kind)
  values, taken = module.graph.values, len(arguments)
  before = [data.draw(specs(values[value].shape, sizes)) for value in op.operands[:taken]]
  after = data.draw(specs(values[op.results[0]].shape, sizes))
  assigned = [((),) * len(value.shape) for value in values]
  for value, spec in (*zip(op.operands, before), *((result, after) for result in op.results)):
    assigned[value] = spec
  partition = PartitionedOperations(module, set(op.operands[taken:])).partition(op, assigned, sizes)
  found = [one for ops in (*partition.operands, partition.result) for one in ops]
  abstract = [jax.ShapeDtypeStruct(*one) for one in arguments]
  expected, flops = compiled(function, abstract, before, after, sizes)
  assert sorted((one.kind, one.bytes) for one in found) == expected
  assert partition.flops == flops


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_resharding_alone_has_the_collectives_of_the_program_that_jax_compiles(data):
  sizes = data.draw(st.sampled_from(MESHES))
  before, after = (data.draw(specs((16, 8, 32), sizes)) for _ in range(2))
  module = prepared(jnp.negative, [((8,), F32)])
  found = PartitionedOperations(module, ()).reshard(GraphValue((16, 8, 32), 'f32'), before, after, sizes)
  expected, _ = compiled(lambda x: x, [jax.ShapeDtypeStruct((16, 8, 32), F32)], [before], after, sizes)
  assert sorted((one.kind, one.bytes) for one in found) == expected


def test_uneven_results_are_not_gathered_to_be_returned():
  module = prepared(lambda x: jnp.pad(x, ((1, 0), (0, 0))), [((16, 64), F32)])
  op = operation(module, 'pad')
  assigned = [(('a',), ()) if len(value.shape) == 2 else () for value in module.graph.values]
  partition = PartitionedOperations(module, {op.operands[1]}).partition(op, assigned, {'a': 8})
  assert {one.kind for one in partition.result if one.bytes > 4} == {'collective-permute'}


def test_invalid_shardings_have_no_partition():
  partitions = PartitionedOperations(prepared(jnp.negative, [((8,), F32)]), ())
  both = (('a',), ('a[2/4]',))
  assert partitions.reshard(GraphValue((8, 8), 'f32'), both, ((), ()), {'a': 4}) is None


def test_coordinates_that_count_are_part_of_the_program():
  """XLA sees that they count, and takes them as a batch; an argument could be anything."""
  module = prepared(lambda x, i: x[jnp.arange(16), i], [((16, 64), F32), ((16,), I32)])
  op = operation(module, 'gather')
  op.attributes['iota_dims'] = ((0, 0),)
  assigned = [((),) * len(value.shape) for value in module.graph.values]
  single = module.single_operation(op, assigned, {'a': 8}, ())
  assert set(single.positions) == {0, 1}  # the table, and the other coordinates
  assert b'iota' in single.code


PRODUCT = Op('dot_general', (0, 1), (2,), {})
VALUES = [GraphValue((8, 16), 'f32'), GraphValue((16, 8), 'f32'), GraphValue((8, 8), 'f32')]
GATHER = CollectiveOp('all-gather', ('a',), 128)
REQUIRED = Requirement(((('a',), ()), ((), ())), (('a',), ()), flops=1024, doubt='an operand that moves')


def context(specs, result):
  return Context(VALUES[:2], specs, VALUES[:2], [False] * 2, VALUES[2], result, {'a': 4}, 'cuda')


def test_the_requirement_stays_where_xla_has_the_same_collectives():
  same = Partition(((), (GATHER,)), (), 1024)
  before = context([(('a',), ()), (('a',), ())], (('a',), ()))
  required, apart = adopted(PRODUCT, REQUIRED, before, same)
  assert required == REQUIRED._replace(doubt='', is_settled=True, exchanges=((), ()))
  assert apart == Bound()


def test_the_collectives_of_xla_take_the_place_of_others_operand_by_operand():
  moved = CollectiveOp('all-to-all', ('a',), 2048)
  other = Partition(((), (moved,)), (CollectiveOp('all-reduce', ('a',), 1024),), 2048)
  before = context([(('a',), ()), (('a',), ())], (('a',), ()))
  required, apart = adopted(PRODUCT, REQUIRED, before, other)
  assert required.operands == ((('a',), ()), None)
  assert required.exchanges == ((), (moved,)) and required.halos == other.result
  assert (required.flops, required.doubt) == (2048, '')
  assert apart == Bound(wire=0.75 * 2048 - 3 * 128 + 1.5 * 1024, flops=1024)


def test_estimates_are_not_in_doubt_where_the_partition_confirms_them(monkeypatch):
  """A lookup whose rows and table are sharded over one axis; without a partitioner it is in doubt."""

  def create():
    return {'w': spmd.LogicallyPartitioned(jnp.ones((512, 256)), ('vocab', 'embed'))}

  def step(state, ids):
    loss = lambda state: jnp.sum(jnp.tanh(state['w'].unbox()[ids]) ** 2)
    return jax.tree.map(jnp.subtract, state, jax.grad(loss)(state)), 0.0

  train_step = TrainStep(step, create, jax.ShapeDtypeStruct((64, 32), I32))
  rules = (('vocab', ()), ('embed', 'a'), ('batch', 'a'))
  layout = spmd.Layout(spmd.abstract_mesh({'a': 4, 'idle': 2}), rules)
  asked = []
  monkeypatch.setattr(
    unsure_operations, 'adopted', lambda op, *rest: asked.append(op.kind) or adopted(op, *rest)
  )
  with_partitions = Estimator(train_step).estimate(layout, 'h100:8')
  replace_partitioner(monkeypatch, can_partition=lambda platform: False)
  without = Estimator(train_step).estimate(layout, 'h100:8')
  assert asked and doubts_of(without)
  assert not any('a lookup' in doubt for doubt in with_partitions.doubts)


def test_collectives_in_a_loop_belong_to_no_operand():
  text = """
HloModule m, num_partitions=4

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %r = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups=[1,4]<=[4], to_apply=%add
  ROOT %t = (s32[], f32[8]{0}) tuple(%i, %r)
}

ENTRY %main (x: (s32[], f32[8])) -> (s32[], f32[8]) {
  %x = (s32[], f32[8]{0}) parameter(0)
  ROOT %w = (s32[], f32[8]{0}) while(%x), condition=%cond, body=%body
}"""
  with pytest.raises(ValueError, match=r'^A loop of this module has collectives\.$'):
    operation_costs(text, {'a': 4}, ())


# -- the process


@pytest.fixture
def alone(gpu_compiler):
  """A partitioner with a process of its own, which needs the compiler for GPUs."""
  partitioner = Partitioner('cuda')
  yield partitioner
  partitioner.close()


def test_a_program_that_cannot_be_partitioned_has_no_text(alone):
  assert alone.partition(b'no program', (4,)) is None
  assert alone.process.poll() is None  # it goes on


def test_a_process_that_has_ended_is_replaced_however_often(alone):
  code = prepared(jnp.negative, [((8,), F32)]).resharding(
    GraphValue((8, 8), 'f32'), (('a',), ()), ((), ()), {'a': 4}
  )
  for _ in range(4):
    assert 'all-gather' in alone.partition(code, (4,))
    process = alone.process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
  assert 'all-gather' in alone.partition(code, (4,))


def test_an_interrupted_request_leaves_no_reply_for_the_next(alone, monkeypatch):
  gathering, moving = (
    prepared(jnp.negative, [((8,), F32)]).resharding(
      GraphValue((8, 8), 'f32'), (('a',), ()), after, {'a': 4}
    )
    for after in (((), ()), ((), ('a',)))
  )
  assert 'all-gather' in alone.partition(gathering, (4,))

  def interrupted(self, timeout):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(Connection, 'poll', interrupted)
    alone.partition(gathering, (4,))
  assert alone.process is None
  text = alone.partition(moving, (4,))
  assert 'all-to-all' in text and 'all-gather' not in text


def test_threads_share_a_process(alone):
  alone.partition(b'', (4,))
  process = alone.process
  threads = [threading.Thread(target=alone.partition, args=(b'', (4,))) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert alone.process is process and process.poll() is None


def test_a_process_ends_when_its_partitioner_is_closed(alone):
  alone.partition(b'', (4,))
  process = alone.process
  alone.close()
  assert process.poll() is not None and alone.process is None


def test_a_process_that_does_not_start_is_started_once(monkeypatch):
  monkeypatch.setattr(sys, 'executable', shutil.which('false'))
  partitioner = Partitioner('cuda')
  assert partitioner.partition(b'', (4,)) is None and partitioner.process is None
  monkeypatch.setattr(worker_process, 'subprocess', None)  # another start would be an error
  assert partitioner.partition(b'', (4,)) is None
