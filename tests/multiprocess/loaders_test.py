"""Loaders in a job of several processes: the data shard of each, uneven ends, and positions for other jobs."""

import re
from textwrap import dedent

import pytest

from tests.processes import run_processes

SHARDS = """
import warnings
import jax
from jax.sharding import Mesh, PartitionSpec as P
import flax_spmd as spmd

devices, me = np.array(jax.devices()), jax.process_index()
rules = (('batch', 'data'), ('wide', ('data', 'model')))
layouts = {
  'all': spmd.Layout({'data': 8}, rules[:1]),
  'pairs': spmd.Layout({'data': 2, 'model': 4}, rules),
  'crossed': spmd.Layout(Mesh(devices.reshape(2, 4).T, ('data', 'model')), rules),
  'alike': spmd.Layout(Mesh(devices.reshape(4, 2).T, ('data', 'model')), rules),
}

def part_of(layout, shard, name):
  rows = np.arange(32)[shard.index :: shard.count]  # as a loader shards them
  assert len(rows) == shard.local_size(32)
  whole = layout.gather(layout.local_to_global(rows, (name,), check='always'))
  assert sorted(whole.tolist()) == list(range(32))
  return [shard.index, shard.count, list(shard.processes)]

found = {}
for key, name in [('all', 'batch'), ('pairs', 'batch'), ('pairs', 'wide'), ('alike', 'batch')]:
  layout = layouts[key]
  found[f'{key} {name}'] = part_of(layout, layout.data_shard(name), name)
found['spec'] = part_of(layouts['pairs'], layouts['pairs'].data_shard(P('data')), 'batch')
report(found)
try:
  layouts['crossed'].data_shard(('wide', None))
except spmd.errors.LayoutError as error:
  report(str(error))
try:  # the loader has a shard for each process, and the layout one for each pair
  layouts['pairs'].local_to_global(np.arange(32, dtype='int32')[me::4], ('batch',), check='always')
except spmd.errors.LayoutError as error:
  report(str(error))
with warnings.catch_warnings(record=True) as caught:
  warnings.simplefilter('always')
  batch = np.arange(16) if me < 2 else np.zeros(16, int), np.ones(32, int) if me < 2 else np.arange(32) + me
  layouts['pairs'].local_to_global(batch, (('batch',), ('wide',)))  # processes 0 and 1 hold equal rows of the first
report([str(one.message) for one in caught])
two = spmd.Layout(Mesh(devices[:4], ('data',)), rules[:1])
try:
  report(two.data_shard('batch').index)
except spmd.errors.LayoutError as error:
  report(str(error))

# any order of the devices: a shard is what local_indices gives, or there is none
rng, kinds = np.random.default_rng(0), set()
for _ in range(150):
  shape = [(8,), (2, 4), (4, 2), (2, 2, 2)][rng.integers(4)]
  order = devices.reshape(4, 2)[rng.permutation(4)].reshape(-1) if rng.integers(2) else rng.permutation(devices)
  axes = rng.permutation(['a', 'b', 'c'][: len(shape)]).tolist()
  mesh = Mesh(order.reshape(shape), ('a', 'b', 'c')[: len(shape)])
  layout = spmd.Layout(mesh, (('batch', tuple(axes[: rng.integers(1, len(axes) + 1)])),))
  rows, = layout.local_indices(jax.ShapeDtypeStruct((64,), 'int32'), ('batch',))
  try:
    shard = layout.data_shard('batch')
  except spmd.errors.LayoutError:
    kinds.add('none')
    continue
  size = shard.local_size(64)
  assert rows.tolist() == list(range(shard.index * size, (shard.index + 1) * size)), (mesh, rows, shard)
  kinds.add(shard.count)
report(sorted(map(str, kinds)))
"""


@pytest.mark.slow
def test_the_data_shard_of_each_process():
  results = [result.reported for result in run_processes(SHARDS, processes=4, devices=2)]
  for me, (found, crossed, disagreeing, warned, two, kinds) in enumerate(results):
    pair = [0, 1] if me < 2 else [2, 3]
    assert found == {
      'all batch': [me, 4, [me]],
      'pairs batch': [me // 2, 2, pair],
      'pairs wide': [me, 4, [me]],
      'alike batch': [0, 1, [0, 1, 2, 3]],
      'spec': [me // 2, 2, pair],
    }
    where = "of every 8, by ('wide', None) as P(('data', 'model'), None) over {'data': 4, 'model': 2}"
    assert (
      crossed
      == dedent(f"""\
      process 0: rows 0, 2 {where}: no single data shard.
      process 2: rows 1, 3 {where}: no single data shard.
      process 1: rows 4, 6 {where}: no single data shard.
      process 3: rows 5, 7 {where}: no single data shard.
      Fix: load the rows of layout.local_indices instead of a shard; or order the devices of the mesh such that every process holds one block of rows, of one size, which is either equal to those of another process or apart from them.""")
    )
    assert (
      re.sub(r'digest \w+', 'digest', disagreeing)
      == dedent("""\
      (root) (int32[16]), rows 0-7: digest in process 0, digest in process 1.
      (root) (int32[16]), rows 8-15: digest in process 2, digest in process 3.
      Fix: load the rows of layout.local_indices on each process; processes that hold the same rows have to load them in the same order, with the same random numbers.""")
    )
    assert (
      two
      == [
        0,
        1,
        *2
        * [
          dedent(f"""\
      Process {me} has no device of the mesh, only processes 0-1, so it has no rows of a batch to load.
      Fix: load data on processes 0-1 only, or use a mesh with devices of all processes.""")
        ],
      ][me]
    )
    assert kinds == ['1', '2', '4', 'none'] and warned == []


UNEVEN = """
import jax
import flax_spmd as spmd

layout = spmd.Layout({'data': 4}, (('batch', 'data'),))
shard = layout.data_shard('batch')
rows = np.arange(1, 14)[shard.index :: shard.count]  # 7 and 6

def batches(size):
  for start in range(0, len(rows), size):
    yield {'x': rows[start : start + size], 'number': 7}

def totals(size, last):
  place = lambda each: layout.local_to_global(tuple(each), ({'x': ('batch',), 'number': None}, ('batch',)))
  ready = spmd.prefetch(spmd.even_batches(batches(size), size, last), place)
  return [[int(batch['x'].sum()), int(mask.sum()), mask.size] for batch, mask in ready]

report([totals(2, 'pad'), totals(6, 'pad'), totals(2, 'drop')])

def failing():
  yield np.ones(2)
  if shard.index:
    raise OSError('the disk is gone')
  yield np.ones(2)

def error_of(made):
  try:
    list(made)
  except Exception as error:
    return f'{type(error).__name__}: {error}'

report(error_of(spmd.even_batches(failing(), 2)))
empty = spmd.even_batches([{'x': np.ones((2, 3), 'int8'), 'number': 7}][: shard.index] * 2, 2)
report([[batch['x'].tolist(), str(batch['x'].dtype), batch['number'], mask.tolist()] for batch, mask in empty])
local = type('Local', (), {})
jax.tree_util.register_pytree_node(local, lambda one: ((one.x,), None), lambda _, x: local())
own = local()
own.x = np.ones(2)
report(error_of(spmd.even_batches([own][: shard.index], 2)))

class Positions:
  'Three batches in process 0, two in process 1.'
  at = 0
  def __iter__(self): return self
  def __next__(self):
    self.at += 1
    if self.at > 3 - shard.index:
      raise StopIteration
    return np.full(2, self.at)
  def get_state(self): return self.at
  def set_state(self, state): self.at = state

resumed = spmd.even_batches(Positions(), 2)
resumed.set_state(2)
report([rows.tolist() for rows, _ in resumed])

import warnings
from jax.sharding import Mesh
alike = spmd.Layout(Mesh(np.array(jax.devices()).reshape(2, 2).T, ('data', 'model')), (('batch', 'data'),))

def warnings_of(batch, placement=('batch',), layout=layout, times=1, **options):
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    for _ in range(times):
      layout.local_to_global(batch, placement, **options)
  return [str(one.message) for one in caught]

tokens = np.arange(16, dtype='int32')
report([
  warnings_of({'tokens': tokens, 'weights': np.ones(16)}, {'tokens': ('batch',), 'weights': ('batch',)}, times=3, check='always'),
  warnings_of(np.zeros(64)),
  warnings_of(tokens[:8]),
  warnings_of({'tokens': tokens, 'noise': shard.index + np.arange(2.0)}, ('batch',)),
  warnings_of(tokens.astype('int8'), ()),
  warnings_of(tokens, layout=alike),
  warnings_of(tokens.astype('uint32'), check='never'),
  warnings_of(np.tile(np.arange(4.0), (8, 1))),
  warnings_of(np.full(32, np.nan)),
])
with warnings.catch_warnings():
  warnings.simplefilter('ignore' if shard.index else 'error')
  refused = error_of(layout.local_to_global(each, ('batch',)) for each in [tokens.astype('uint8').repeat(4)])
  again = layout.local_to_global(tokens.astype('uint8').repeat(4), ('batch',))  # compared already, in both
report([refused and refused.splitlines()[0], again.shape])
"""


@pytest.mark.slow
def test_uneven_ends_of_two_processes():
  results = [result.reported for result in run_processes(UNEVEN, processes=2, devices=2)]
  for me, (totals, failed, empty, unpickled, resumed, warned, strict) in enumerate(results):
    assert totals == [
      [[10, 4, 4], [26, 4, 4], [42, 4, 4], [13, 1, 4]],
      [[78, 12, 12], [13, 1, 12]],
      [[10, 4, 4], [26, 4, 4], [42, 4, 4]],
    ]
    assert (
      failed
      == (
        'LayoutError: The batches of process 1 raised OSError: the disk is gone\n'
        'Fix: mend the batches of that process; its own error has the traceback.',
        'OSError: the disk is gone',
      )[me]
    )
    row = [0, 0, 0] if me == 0 else [1, 1, 1]
    assert empty == 2 * [[[row, row], 'int8', 7, [me == 1, me == 1]]]
    assert unpickled == (
      'LayoutError: process 0: no batch at all, and those of the other processes cannot be sent.\n'
      'Fix: use batches of types that pickle supports.'
    )
    assert resumed == [[[3, 3]], [[0, 0]]][me]
    repeated, *legitimate = warned
    assert legitimate == 8 * [[]]
    assert repeated == [
      'Processes 0-1 loaded equal rows for different parts of a batch (tokens (int32[32])): every row counts several '
      'times.\nFix: give the loader of each process its index and count, shard = layout.data_shard(...); or other '
      'random numbers.'
    ]
    refused = 'UserWarning: Processes 0-1 loaded equal rows for different parts of a batch ((root) (uint8[128])): every row counts'
    assert strict == [[f'{refused} several times.', None][me], [128]]


RESUMED = """
import flax_spmd as spmd

class Strided:
  'Global batches of 8 records, of which this process reads its shard; a position is one of its shard.'
  def __init__(self, shard): self.shard, self.at = shard, 0
  def __iter__(self): return self
  def __next__(self):
    size, self.at = self.shard.local_size(8), self.at + 1
    return (np.arange(800)[self.shard.index :: self.shard.count])[(self.at - 1) * size : self.at * size]
  def get_state(self): return {'batch': self.at, 'of': [self.shard.index, self.shard.count]}
  def set_state(self, state):
    assert state['of'] == [self.shard.index, self.shard.count], state
    self.at = state['batch']

mesh = jax.sharding.Mesh(np.array(jax.devices())[ORDER], ('data',))
layout = spmd.Layout(mesh, (('batch', 'data'),))
shard = layout.data_shard('batch')
data, create = Strided(shard), lambda: {'n': np.zeros(())}
merged = lambda states: states[0] | {'of': [shard.index, shard.count]}
place = lambda rows: layout.local_to_global(rows, ('batch',))
seen = []
with spmd.checkpoint.Manager(ROOT, layout, every=1) as manager:
  start, state = manager.resume(create, data=data, data_from=merged)
  for step, batch in zip(range(start, start + 3), spmd.prefetch(data, place)):
    seen.append(sorted(layout.gather(batch).tolist()))
    manager.save(step + 1, state, data=data)
report(seen)
for rules in (('batch', None),), (('rows', 'data'),):
  with spmd.checkpoint.Manager(ROOT, layout.replace(rules=rules), read_only=True) as manager:
    try:
      manager.resume(create, data=data)
    except spmd.errors.CheckpointError as error:
      report(str(error))
    manager.resume(create, data=data, data_from=merged)
    report(data.at)
"""

_FIX = (
  'Fix: pass data_from=, a function from the list of their positions to the one of this process; lambda states: '
  'states[0] where a position counts global batches.'
)


@pytest.mark.slow
def test_every_process_reads_on_where_the_reader_of_its_rows_ended(tmp_path):
  """The second job gives the rows of each process to the other one; the third has more processes."""
  root = tmp_path / 'run'
  for turn, (processes, order) in enumerate([(2, [0, 1, 2, 3]), (2, [2, 3, 0, 1]), (4, [0, 1, 2, 3])]):
    source = RESUMED.replace('ROOT', repr(str(root))).replace('ORDER', str(order))
    for me, result in enumerate(run_processes(source, processes=processes, devices=4 // processes)):
      seen, *rest = result.reported
      assert seen == [list(range(8 * at, 8 * at + 8)) for at in range(3 * turn, 3 * turn + 3)]
      if turn == 1:
        other = f'Processes read other parts of the data than those that wrote checkpoint {root / "6"}: process {me}'
        wrote = 'process 0 read rows 1/2-1; process 1 read rows 0-1/2'
        mine = f"the rows of devices {('2-3', '0-1')[me]} of {{'data': 4}}"
        assert rest == [
          f'{other} reads rows 0-1; {wrote}.\n{_FIX}',
          6,
          f'{other} reads {mine}; {wrote}.\n{_FIX}',
          6,
        ]


GRAIN = """
import grain
import flax_spmd as spmd

layout = spmd.Layout(AXES, (('batch', 'data'),))
shard = layout.data_shard('batch')
size, source = shard.local_size(16), np.arange(800)
records = grain.MapDataset.source(source).seed(0).shuffle().repeat()
part = records[shard.index :: shard.count].batch(size, drop_remainder=True)
batches, seen = iter(part.to_iter_dataset()), []
place = lambda rows: layout.local_to_global(np.asarray(rows), ('batch',), check='always')
with spmd.checkpoint.Manager(ROOT, layout, every=1) as manager:
  created = lambda: {'n': np.zeros(())}
  start, state = manager.resume(created, data=batches, data_from=lambda states: states[0])
  for step, batch in zip(range(start, start + 3), spmd.prefetch(batches, place)):
    seen.append(sorted(layout.gather(batch).tolist()))
    manager.save(step + 1, state, data=batches)
options = grain.sharding.ShardOptions(shard.index, shard.count, drop_remainder=True)
sampler = grain.samplers.IndexSampler(len(source), options, shuffle=True, num_epochs=1, seed=0)
loader = grain.DataLoader(
  data_source=source, sampler=sampler, operations=[grain.transforms.Batch(size, drop_remainder=True)]
)
epoch = sorted(row for batch in loader for row in layout.gather(place(batch)).tolist())
report([seen, epoch == source.tolist(), [int(records[at]) for at in range(16 * 12)]])
"""


@pytest.mark.exhaustive
def test_a_loader_of_grain_resumes_on_other_numbers_of_processes(tmp_path):
  pytest.importorskip('grain')
  jobs = [
    (2, {'data': 4}),
    (1, {'data': 4}),
    (4, {'data': 2, 'model': 2}),  # two processes hold the same rows
    (4, {'data': 4}),
  ]
  for turn, (processes, axes) in enumerate(jobs):
    source = GRAIN.replace('ROOT', repr(str(tmp_path / 'run'))).replace('AXES', repr(axes))
    for result in run_processes(source, processes=processes, devices=4 // processes):
      seen, whole_epoch, rows = result.value
      assert seen == [sorted(rows[16 * at : 16 * at + 16]) for at in range(3 * turn, 3 * turn + 3)]
      assert whole_epoch
