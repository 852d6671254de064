"""Hosts: gather, local_to_global and check_same_on_every_process, in one process and in several."""

import itertools
import time
from collections import OrderedDict
from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd._src.data.gather import gather
from flax_spmd._src.data.global_batches import local_to_global
from flax_spmd._src.multihost import check_same_on_every_process
from flax_spmd.errors import LayoutError
from tests.processes import run_processes


def text_of(error) -> str:
  """The message of the error that a function raises, or None."""
  try:
    error()
  except LayoutError as raised:
    return str(raised)
  return None


def text(indented: str) -> str:
  return dedent(indented).strip()


# -- one process


def test_gather_returns_numpy_arrays_and_keeps_other_leaves(mesh):
  x = np.arange(32, dtype=np.float32).reshape(8, 4)
  one, scalar = np.ones(3), np.float32(3)
  tree = {
    'spread': jax.device_put(x, NamedSharding(mesh, P('data', 'model'))),
    'box': spmd.LogicallyPartitioned(jnp.asarray(x), ('batch', None)),
    'bfloat16': jnp.ones(2, jnp.bfloat16),
    'numpy': one,
    'scalar': scalar,
    'number': 3,
    'text': 'as it is',
    'none': None,
  }
  whole = gather(tree)
  np.testing.assert_array_equal(whole['spread'], x)
  assert type(whole['spread']) is np.ndarray and not whole['spread'].flags.writeable
  assert isinstance(whole['box'], spmd.LogicallyPartitioned) and whole['box'].names == ('batch', None)
  np.testing.assert_array_equal(whole['box'].value, x)
  assert type(whole['box'].value) is np.ndarray
  assert whole['bfloat16'].dtype == jnp.bfloat16
  assert whole['numpy'] is one and whole['scalar'] is scalar
  assert whole['number'] == 3 and whole['text'] == 'as it is' and whole['none'] is None


@pytest.mark.parametrize('impl', ['threefry2x32', 'rbg'])
def test_gather_returns_keys_as_keys(mesh, impl):
  keys = jax.random.split(jax.random.key(3, impl=impl), 8)
  sharded = jax.device_put(keys, NamedSharding(mesh, P('data')))
  whole = gather({'keys': sharded})['keys']
  assert whole.dtype == keys.dtype and whole.shape == (8,)
  np.testing.assert_array_equal(jax.random.key_data(whole), jax.random.key_data(keys))
  assert jax.random.uniform(whole[3]) == jax.random.uniform(keys[3])


def test_gather_inside_a_trace():
  with pytest.raises(LayoutError) as error:
    jax.jit(lambda x: gather({'a': x, 'b': [2 * x, 3]}))(1.0)
  assert str(error.value) == text("""
    a: it is being traced and has no value yet.
    b/0: it is being traced and has no value yet.
    Fix: gather the results of a jitted function.
  """)


@pytest.mark.parametrize('seed', [None, 0, 1])
@pytest.mark.parametrize('spec', [P('data', 'model'), P(('model', 'data')), P(None, 'data'), P()])
def test_local_to_global_of_one_process_is_device_put(seed, spec):
  devices = np.array(jax.devices())
  if seed is not None:
    devices = np.random.default_rng(seed).permutation(devices)
  sharding = NamedSharding(Mesh(devices.reshape(2, 4), ('data', 'model')), spec)
  x = np.arange(64.0).reshape(8, 8)
  for check in ('new', 'always', 'never'):
    there = local_to_global({'x': [x, 7]}, {'x': [sharding, sharding.update(spec=P())]}, check=check)
    assert there['x'][0].sharding == sharding and there['x'][0].dtype == jnp.float32
    np.testing.assert_array_equal(there['x'][0], x)
    assert there['x'][1] == 7


def test_local_to_global_of_keys(mesh):
  keys = jax.random.split(jax.random.key(0), 8)
  there = local_to_global(keys, NamedSharding(mesh, P('data')))
  assert there.sharding.is_equivalent_to(NamedSharding(mesh, P('data')), 1)
  np.testing.assert_array_equal(jax.random.key_data(there), jax.random.key_data(keys))


def test_every_leaf_of_a_batch_that_does_not_fit_is_reported(mesh):
  by_data, by_model = NamedSharding(mesh, P('data')), NamedSharding(mesh, P(None, 'model'))
  batch = {
    'long': np.ones((7, 6)),
    'short': np.ones((1, 4)),
    'thin': np.ones(4),
    'id': np.array(['a', 'b']),
    'alone': np.ones(4),
    'spec': np.ones(4),
    'fine': np.ones(4),
  }
  shardings = {
    'long': NamedSharding(mesh, P('data', 'model')),
    'short': by_data,
    'thin': by_model,
    'id': by_data,
    'spec': P('data'),
    'fine': by_data,
    'more': by_data,
  }
  with pytest.raises(LayoutError) as error:
    local_to_global(batch, shardings)
  on = "that the devices of this process hold under {} over {{'data': 2, 'model': 4}}."
  expected = f"""
    alone: it has no sharding.
    id: devices cannot hold arrays of dtype <U1.
    long, dim 0: size 7 is not divisible into the 2 pieces {on.format(P('data', 'model'))}
    long, dim 1: size 6 is not divisible into the 4 pieces {on.format(P('data', 'model'))}
    short, dim 0: size 1 is not divisible into the 2 pieces {on.format(P('data'))}
    spec: {P('data')!r} is not a NamedSharding.
    thin: its spec {P(None, 'model')} has 2 entries, its shape is (4,).
    more: it has a sharding, but is not in the batch.
    Fix: pass one sharding for each leaf of the batch, in a tree of the same structure.
    Fix: leave it out, or encode it as numbers.
    Fix: pad it to 8, or cut it to 6.
    Fix: pad it to 8, or cut it to 4.
    Fix: pad it to 2.
    Fix: pass a spec with at most one entry per dimension.
  """
  assert str(error.value) == text(expected)


def test_an_unknown_check(mesh):
  with pytest.raises(LayoutError) as error:
    local_to_global(np.ones(4), NamedSharding(mesh, P()), check=False)
  assert str(error.value) == text("""
    check=False is not a choice.
    Fix: pass 'new', 'always' or 'never'.
  """)


def test_empty_trees(mesh):
  assert gather({}) == {} and local_to_global({}, {}) == {}


def test_a_single_process_has_nothing_to_compare():
  check_same_on_every_process('the layout', 'text')


HELD = f"that the devices of this process hold under {P('data')} over {{'data': 8}}."


# -- several processes; the functions below run in each of them


def part_of(whole, sharding):
  """A process's part: the union of the slices that JAX assigns to its devices."""
  pieces = sharding.addressable_devices_indices_map(whole.shape).values()
  chosen = [
    sorted({at for piece in pieces for at in range(*piece[dim].indices(size))})
    for dim, size in enumerate(whole.shape)
  ]
  return whole[np.ix_(*chosen)]


def orders(count, rng):
  """Device orders: JAX's, reversed, interleaved, and random."""
  yield np.arange(count)
  yield np.arange(count)[::-1]
  yield np.arange(count).reshape(2, -1).T.ravel()
  yield rng.permutation(count)


def rows_by_any_order():
  """Global and gathered arrays under every device order: the wrong cases, and the number of all cases."""
  wrong, tried = [], 0
  rng, whole = np.random.default_rng(0), np.arange(16 * 8).reshape(16, 8)
  specs = [P('a'), P('a', 'b'), P('b', 'a'), P(('a', 'b')), P(('b', 'a')), P(None, 'a'), P()]
  for order, shape in itertools.product(orders(jax.device_count(), rng), [(8, 1), (2, 4)]):
    mesh = Mesh(np.array(jax.devices())[order].reshape(shape), ('a', 'b'))
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    given = [part_of(whole, sharding) for sharding in shardings]
    there = local_to_global(given, shardings, check='always' if tried else 'new')
    for spec, array, back in zip(specs, there, gather(there), strict=True):
      tried += 1
      pieces = [np.array_equal(piece.data, whole[piece.index]) for piece in array.addressable_shards]
      if array.shape != whole.shape or not all(pieces) or not np.array_equal(back, whole):
        wrong.append([order.tolist(), shape, str(spec)])
  return {'wrong': wrong, 'tried': tried}


def one_batch(rows=8, width=4, dtype=np.float32, **others):
  return {'x': np.ones((rows, width), dtype), **others}


def by_rows(mesh, *names):
  return {name: NamedSharding(mesh, P('data')) for name in names}


def two_processes():
  """The results of two processes of four devices each, as JSON."""
  me, devices = jax.process_index(), np.array(jax.devices())
  reported = {'orders': rows_by_any_order()}

  # Process 0 owns rows 0, 1, 4, 5, and passes them in this order.
  apart = Mesh(devices[[1, 0, 4, 6, 3, 2, 7, 5]], ('data',))
  mine = [[0, 1, 4, 5], [2, 3, 6, 7]][me]
  there = local_to_global(np.array(mine), NamedSharding(apart, P('data')))
  reported['apart'] = gather(there).tolist()

  # JAX arrays of this process, key arrays included.
  sharding = NamedSharding(Mesh(devices.reshape(4, 2), ('data', 'model')), P('data'))
  keys = jax.random.split(jax.random.key(5), 8)
  given = {'x': jnp.arange(4) + 4 * me, 'keys': keys[4 * me : 4 * me + 4]}
  there = gather(local_to_global(given, {'x': sharding, 'keys': sharding}))
  reported['jax'] = [there['x'].tolist(), bool((there['keys'] == keys).all())]

  # Six devices, four of them process 0's.
  uneven = NamedSharding(Mesh(devices[:6], ('data',)), P('data'))
  there = local_to_global(np.arange(8) if me == 0 else np.arange(8, 12), uneven)
  reported['uneven'] = gather(there).tolist()

  # A mesh of this process only, and one of another process only.
  own = NamedSharding(Mesh(np.array(jax.local_devices()), ('data',)), P('data'))
  reported['own'] = gather(local_to_global(np.arange(4) + me, own)).tolist()
  other = NamedSharding(Mesh(devices[:4], ('data',)), P('data'))
  reported['no devices'] = text_of(lambda: local_to_global(np.arange(4), other))
  there = jax.make_array_from_callback(
    (4,), other, lambda at: np.arange(4, dtype=np.int32)[at], dtype=np.int32
  )
  reported['out of reach'] = text_of(lambda: gather({'a': [there]}))

  reported['gather'] = gathered(devices, own)
  reported['prefetch'] = prefetched(devices)
  reported['known'] = known_structures(Mesh(devices, ('data',)))
  reported['service'] = without_a_service(Mesh(devices, ('data',)))
  reported['waiting alone'] = waiting_alone(Mesh(devices, ('data',)))
  return reported


def gathered(devices, own):
  """A tree of arrays on two meshes, with keys and a box; gathered while a third mesh is in force."""
  whole, keys = np.arange(64.0).reshape(8, 8), jax.random.split(jax.random.key(1), 8)
  one = Mesh(devices.reshape(4, 2), ('a', 'b'))
  explicit = (AxisType.Explicit, AxisType.Explicit)
  two = Mesh(devices[::-1].reshape(2, 4), ('a', 'b'), axis_types=explicit)

  def on(value, mesh, *spec):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.make_array_from_callback(value.shape, sharding, lambda at: value[at])

  tree = {
    'one': [on(whole, one, 'a', 'b'), on(whole, one, 'a'), on(whole, one)],
    'two': [on(whole, two, 'b', 'a'), on(whole, two, None, 'a')],
    'box': spmd.LogicallyPartitioned(on(whole, one, ('b', 'a')), ('batch', None)),
    'keys': on(keys, one, 'a'),
    'computed': jax.jit(jnp.transpose)(on(whole, one, 'a', 'b')).T,
    'own': jax.device_put(np.full(4, jax.process_index()), own),
    'number': 3,
  }
  with jax.set_mesh(Mesh(devices, ('other',))):
    back = gather(tree)
  arrays = [*back['one'], *back['two'], back['box'].value, back['computed']]
  return {
    'equal': [type(array) is np.ndarray and np.array_equal(array, whole) for array in arrays],
    'keys': bool((jax.random.key_data(back['keys']) == jax.random.key_data(keys)).all()),
    'own': back['own'].tolist(),
    'number': back['number'],
  }


def prefetched(devices):
  """Global batches from a thread, while steps communicate across processes."""
  mesh = Mesh(devices, ('data',))
  sharding = NamedSharding(mesh, P('data'))
  batches = [np.arange(4) + 8 * step + 4 * jax.process_index() for step in range(20)]
  batches.append(np.arange(8))  # a new structure, compared while steps run
  step = jax.jit(jnp.sum)
  ready = spmd_prefetch(batches, lambda part: local_to_global(part, sharding))
  return [int(step(batch)) for batch in ready]


def spmd_prefetch(*args):
  from flax_spmd._src.data.prefetch import prefetch

  return prefetch(*args)


def known_structures(mesh):
  """A process may pass a known structure alone, without a comparison; 'always' compares again."""
  me = jax.process_index()
  for _ in range(1 + 3 * me):
    local_to_global(one_batch(), by_rows(mesh, 'x'))
  local_to_global(one_batch(), by_rows(mesh, 'x'), check='always')
  local_to_global(one_batch(4), by_rows(mesh, 'x'))
  reported = {}
  reported['two known structures'] = text_of(
    lambda: local_to_global(one_batch(4 + 4 * me), by_rows(mesh, 'x'), check='always')
  )
  if me:
    local_to_global(one_batch(16), by_rows(mesh, 'x'), check='never')
    reported['never'] = text_of(lambda: local_to_global(one_batch(6), by_rows(mesh, 'x'), check='never'))
  return reported


def service():
  from jax._src import distributed

  return distributed.global_state.client


def without_a_service(mesh):
  from jax._src import distributed

  client = service()
  distributed.global_state.client = None
  try:
    return text_of(lambda: check_same_on_every_process('it', 'a'))
  finally:
    distributed.global_state.client = client


def waiting_alone(mesh):
  """Each process waits once for the other, which does not arrive."""
  if jax.process_index():
    return text_of(lambda: check_same_on_every_process('it', 'a', timeout=0.5))
  return text_of(lambda: local_to_global(one_batch(24), by_rows(mesh, 'x'), timeout=0.5))


def four_processes():
  """The differences between four processes of two devices each."""
  me, devices = jax.process_index(), np.array(jax.devices())
  mesh = Mesh(devices, ('data',))
  reported = {'orders': rows_by_any_order()}

  def differing(batch, shardings=None, **options):
    return text_of(lambda: local_to_global(batch, shardings or by_rows(mesh, *batch), **options))

  reported['sizes'] = differing(one_batch(4 if me else 2, 4 + (me == 2)))
  reported['dtypes'] = differing(one_batch(dtype=np.int32 if me in (1, 3) else np.float32, y=np.ones(4)))
  reported['trees'] = differing(one_batch(**({} if me == 2 else {'y': np.ones(4)})))
  pair = [('x', np.ones(4)), ('y', np.ones(4))]
  reported['order'] = differing(OrderedDict(pair[::-1] if me == 1 else pair))
  reported['ranks'] = differing({'x': np.ones((4, 1) if me == 3 else 4)})
  reported['problems'] = differing(one_batch(4 - (me != 1), y=np.array(['a'] if me == 2 else [1, 2])))
  other = Mesh(devices[::-1], ('data',)) if me == 3 else mesh
  reported['meshes'] = differing(one_batch(), by_rows(other, 'x'))
  reported['same after all'] = differing(one_batch())

  layout = spmd.Layout(mesh, (('batch', 'data'), ('embed', None)))
  rules = (('batch', None),) if me == 2 else layout.rules
  check_same_on_every_process('the layout', layout.to_toml())
  reported['layouts'] = text_of(
    lambda: check_same_on_every_process('the layout', layout.replace(rules=rules).to_toml())
  )
  reported['topics'] = text_of(lambda: check_same_on_every_process(f'number {me % 2}', 'a'))
  long = '\n'.join(f'{number} {me // 3}' for number in range(100))
  reported['long'] = text_of(lambda: check_same_on_every_process('a list', long))
  if me in (0, 2):
    service().wait_at_barrier('two late', 300_000, [0, 2])
    reported['two late'] = text_of(lambda: check_same_on_every_process('it', 'a', timeout=4))
  return reported


@pytest.fixture(scope='module')
def of_two():
  source = 'from tests.multiprocess import data_test\nreport(data_test.two_processes())'
  return [result.value for result in run_processes(source, processes=2, devices=4)]


@pytest.fixture(scope='module')
def of_four():
  source = 'from tests.multiprocess import data_test\nreport(data_test.four_processes())'
  return [result.value for result in run_processes(source, processes=4, devices=2)]


@pytest.mark.slow
def test_rows_are_in_order_for_every_device_order(of_two, of_four):
  for reported in of_two + of_four:
    assert reported['orders'] == {'wrong': [], 'tried': 4 * 2 * 7}


@pytest.mark.slow
def test_a_part_is_in_the_global_order(of_two):
  assert [reported['apart'] for reported in of_two] == [[*range(8)]] * 2


@pytest.mark.slow
def test_parts_may_be_jax_arrays_and_keys(of_two):
  assert [reported['jax'] for reported in of_two] == [[[*range(8)], True]] * 2


@pytest.mark.slow
def test_processes_may_have_different_shares_of_a_mesh(of_two):
  assert [reported['uneven'] for reported in of_two] == [[*range(12)]] * 2


@pytest.mark.slow
def test_a_mesh_of_one_process(of_two):
  assert [reported['own'] for reported in of_two] == [[0, 1, 2, 3], [1, 2, 3, 4]]
  assert [reported['no devices'] for reported in of_two] == [
    None,
    text("""
      Process 1 has no device of the mesh, only process 0 has.
      Fix: call local_to_global on process 0 only, or use a mesh with devices of all processes.
    """),
  ]
  assert [reported['out of reach'] for reported in of_two] == [
    None,
    text("""
      a/0: it is only on devices of process 0; process 1 holds no part of it.
      Fix: call gather on process 0 only, or reshard it over a mesh with devices of all processes.
    """),
  ]


@pytest.mark.slow
def test_gather_returns_full_arrays_on_every_process(of_two):
  for process, reported in enumerate(of_two):
    assert reported['gather'] == {'equal': [True] * 7, 'keys': True, 'own': [process] * 4, 'number': 3}


@pytest.mark.slow
def test_prefetching_during_steps(of_two):
  sums = [sum(range(8 * step, 8 * step + 8)) for step in range(20)] + [56]
  assert [reported['prefetch'] for reported in of_two] == [sums] * 2


@pytest.mark.slow
def test_known_structures_are_not_compared_again(of_two):
  sizes = text("""
    x, dim 0: 4 of 8 in process 0, 8 of 16 in process 1.
    Fix: pass on every process as much as its devices hold: pad or drop the remainder at the end.
  """)
  assert [reported['known']['two known structures'] for reported in of_two] == [sizes] * 2
  assert of_two[1]['known']['never'] == text(f"""
    x, dim 0: size 6 is not divisible into the 4 pieces {HELD}
    Fix: pad it to 8, or cut it to 4.
  """)


@pytest.mark.slow
def test_without_a_coordination_service(of_two):
  assert [reported['service'] for reported in of_two] == [
    text("""
      The 2 processes of this job cannot communicate: the coordination service of JAX is not running.
      Fix: call jax.distributed.initialize() before JAX is first used.
    """)
  ] * 2


@pytest.mark.slow
def test_a_process_that_does_not_arrive(of_two, of_four):
  call = 'call it on every process, equally often and in the same order'
  stuck = 'check which of them is stuck or has exited.'
  known = (
    "With check='new', a process that has compared such a batch before does not compare again "
    "(if its data end early, say): pass check='always'"
  )
  assert of_two[0]['waiting alone'] == text(f"""
    Process 1 did not arrive within 0.5 s; process 0 was waiting to compare with it.
    Fix: {call}. {known}. Otherwise {stuck}
  """)
  assert of_two[1]['waiting alone'] == text(f"""
    Process 0 did not arrive within 0.5 s; process 1 was waiting to compare with it.
    Fix: {call}, and {stuck}
  """)
  assert [of_four[process]['two late'] for process in (0, 2)] == [
    text(f"""
      Processes 1 and 3 did not arrive within 4 s; process {process} was waiting to compare with them.
      Fix: {call}, and {stuck}
    """)
    for process in (0, 2)
  ]


WHERE = f"{P('data')} over {{'data': 8}}"
IDS = '0-1, 2048-2049, 4096-4097, 6144-6145'
REVERSED = '6145, 6144, 4097, 4096, 2049, 2048, 1, 0'
DIFFERENT = {
  'sizes': """
    x, dim 0: 2 of 8 in process 0, 4 of 16 in processes 1-3.
    x, dim 1: 4 of 4 in processes 0-1 and 3, 5 of 5 in process 2.
    Fix: pass on every process as much as its devices hold: pad or drop the remainder at the end.
  """,
  'dtypes': """
    x: float32 in processes 0 and 2, int32 in processes 1 and 3.
    Fix: pass arrays of the same dtype on every process.
  """,
  'trees': """
    y: present in processes 0-1 and 3, missing in process 2.
    Fix: pass a batch of the same structure on every process.
  """,
  'order': """
    the order of the arrays: x, y in processes 0 and 2-3, y, x in process 1.
    Fix: pass a batch of the same structure on every process.
  """,
  'ranks': """
    x: rank 1 in processes 0-2, rank 2 in process 3.
    Fix: pass arrays of the same rank on every process.
  """,
  'problems': f"""
    processes 0 and 2-3: x, dim 0: size 3 is not divisible into the 2 pieces {HELD}
    process 2: y: devices cannot hold arrays of dtype <U1.
    Fix: pad it to 4, or cut it to 2.
    Fix: leave it out, or encode it as numbers.
  """,
  'meshes': f"""
    x: {WHERE} (devices {IDS}) in processes 0-2, {WHERE} (devices {REVERSED}) in process 3.
    Fix: create the mesh and the shardings in the same way on every process.
  """,
  'layouts': """
    the layout, line 8: '  ["batch", "data"],' in processes 0-1 and 3, '  ["batch", []],' in process 2.
    the layout, line 9: '  ["embed", []],' in processes 0-1 and 3, no line in process 2.
    Fix: create it from the same code, arguments, files and number of devices on every process.
  """,
  'topics': """
    number 0, line 0: 'number 0' in processes 0 and 2, 'number 1' in processes 1 and 3.
    Fix: create it from the same code, arguments, files and number of devices on every process.
  """,
}


@pytest.mark.slow
@pytest.mark.parametrize('difference', DIFFERENT)
def test_differences_are_reported_on_every_process(of_four, difference):
  assert [results[difference] for results in of_four] == [text(DIFFERENT[difference])] * 4


@pytest.mark.slow
def test_long_differences_are_shortened(of_four):
  assert [reported['long'] for reported in of_four] == [
    text("""
      a list, line 1: '0 0' in processes 0-2, '0 1' in process 3.
      a list, line 2: '1 0' in processes 0-2, '1 1' in process 3.
      a list, line 3: '2 0' in processes 0-2, '2 1' in process 3.
      a list, line 4: '3 0' in processes 0-2, '3 1' in process 3.
      a list, line 5: '4 0' in processes 0-2, '4 1' in process 3.
      a list: 95 more lines differ between processes 0-2 and process 3.
      Fix: create it from the same code, arguments, files and number of devices on every process.
    """)
  ] * 4


@pytest.mark.slow
def test_processes_agree_again_after_an_error(of_four):
  assert [reported['same after all'] for reported in of_four] == [None] * 4


# -- the helper


def test_processes_that_fail_or_hang_are_ended():
  source = dedent("""
    import time
    from jax.experimental.multihost_utils import sync_global_devices
    report(1)
    sync_global_devices('reported')
    if jax.process_index():
      time.sleep(1000)
    raise ValueError('so')
  """)
  begin = time.monotonic()
  results = run_processes(source, processes=2, devices=1, grace=0.5, check=False)
  assert results[0].returncode == 1 and results[1].returncode < 0  # killed by this test or by JAX
  assert [result.reported for result in results] == [[1], [1]]
  assert results[0].stderr.endswith('ValueError: so\n')
  assert time.monotonic() - begin < 300


def test_a_failure_in_a_process_is_shown():
  with pytest.raises(AssertionError, match='ValueError: so'):
    run_processes('raise ValueError("so")', processes=1, devices=1)
