"""Values that processes hold in common, in several real processes: arguments of `init`, states, rows of a batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd._src.data.digests import digests
from flax_spmd.errors import LayoutError
from tests.processes import run_processes

ARGUMENTS = 'Fix: pass equal values on every process: a key of the same seed, arrays of the same file.'
VALUES = 'Fix: restore a checkpoint from before on all processes, and pass equal keys, numbers and common rows on each.'
ROWS = (
  'Fix: load the rows of layout.local_indices on each process; processes that hold the same rows have to load '
  'them in the same order, with the same random numbers.'
)


def text_of(error):
  """The message of the error that a function raises, or None."""
  try:
    error()
  except LayoutError as raised:
    return str(raised)
  return None


# -- the functions below run in each process


def create(key, x=None, scale=1.0, train=False, **others):
  create.calls += 1
  return {'w': spmd.LogicallyPartitioned(scale * jax.random.normal(key, (8, 8)), ('embed', None))}


create.calls = 0


def arguments():
  """The errors of `init` with arguments that differ between processes, and the number of traces."""
  me = jax.process_index()
  layout = spmd.Layout({'data': -1}, (('batch', 'data'), ('embed', 'data')))
  key, large = jax.random.key(0), np.arange(100_000, dtype=np.float32)
  sharded = layout.local_to_global(np.ones((8, 4)), ('batch', None), check='never')
  changed = large + (np.arange(100_000) == 77_777) * np.float32(me)
  of_init = lambda *args, **kwargs: text_of(lambda: layout.init(create, *args, **kwargs))
  reported = {
    'seeds': of_init(jax.random.key(me)),
    'old keys': of_init(jax.random.PRNGKey(me)),
    'numbers': of_init(key, scale=1.0 + me),
    'flags': of_init(key, train=bool(me)),
    'arrays': of_init(key, {'a': [large, changed]}),
    'on a device': of_init(key, jnp.asarray(changed)),
    'shapes': of_init(key, large[: 10 + me]),
    'kinds': of_init(key, large[0] if me else 0.0),
    'missing': of_init(key, **({'more': 3} if me else {})),
    'several': of_init(jax.random.key(me), scale=1.0 + me),
    'traces of these': create.calls,
  }
  equal = {'array': large, 'text': 'a', 'object': object(), 'nothing': None, 'sharded': sharded}
  reported['equal'] = of_init(key, sharded, scale=np.float32(2), train=True, **equal)
  reported['traces of all'] = create.calls
  return reported


def altered(layout, spec, whole, *, on):
  """A global array that has another value at its end on one process."""

  def piece(at):
    part = np.array(whole[at])
    part.reshape(-1)[-1:] += jax.process_index() == on
    return part

  return jax.make_array_from_callback(whole.shape, jax.sharding.NamedSharding(layout.mesh, spec), piece)


def states(on):
  """The errors of `check_processes` for states of which one process holds other values."""
  layout = spmd.Layout({'model': 2, 'data': jax.device_count() // 2}, (('embed', 'data'),))
  whole, me = np.arange(64, dtype=np.float32).reshape(16, 4), jax.process_index()
  array = functools.partial(altered, layout, whole=whole)
  fine = {
    'boxed': spmd.LogicallyPartitioned(array(P('data'), on=None), ('embed', None)),
    'bfloat16': array(P(), whole=whole.astype(jnp.bfloat16), on=None),
    'keys': jax.random.key(0),
    'none': None,
    'own': jax.device_put(me, jax.local_devices()[0]),
    'spread': altered(layout, P(('model', 'data')), whole, on=on),  # nobody else has these rows
    'step': 3,
  }
  check = lambda state, **options: text_of(lambda: layout.check_processes(state, **options))
  reported = {'equal': check(fine, values=True), 'again': check(fine, values=True)}
  one = {
    **fine,
    'boxed': spmd.LogicallyPartitioned(array(P('data'), on=on), ('embed', None)),
    'large': altered(layout, P(), np.zeros((64, 1000), np.float32), on=on),
    'scalar': altered(layout, P(), np.zeros((), np.int32), on=on),
    'step': 3 + (me == on),
    'keys': jax.random.key(me == on),
  }
  reported['values'] = check(one, values=True)
  reported['without values'] = check(one)
  wide = np.zeros((64, 4000), np.float32)
  in_turns = {
    'small': {**fine, 'step': 3 + (me == on)},
    'large': {**fine, 'large': altered(layout, P(), wide, on=on)},
    'on the host': {**fine, 'host': wide + (me == on)},
    'sharded': {**fine, 'sharded': altered(layout, P('data'), wide, on=on)},
  }
  for name, state in in_turns.items():
    reported[f'turns of {name}'] = [check(state, values='part') is not None for _ in range(32)]
  reported['trees'] = check({**fine, **({'more': 1} if me == on else {})}, values=True)
  rules = (('embed', 'data' if me != on else 'model'),)
  reported['layouts'] = text_of(lambda: layout.replace(rules=rules).check_processes(one, values=True))
  return reported


def rows(on):
  """The errors of batches of whose common rows one process has others."""
  layout = spmd.Layout({'model': 2, 'data': jax.device_count() // 2}, (('batch', 'data'),))
  whole = np.arange(32, dtype=np.float32).reshape(8, 4)
  keys = jax.random.split(jax.random.key(0), 8)
  names = {'x': ('batch', None), 'key': ('batch',), 'weight': None}
  mine, _ = layout.local_indices(jax.ShapeDtypeStruct(whole.shape, np.float32), ('batch', None))
  batch = {'x': whole[mine].astype(np.float64), 'key': keys[mine], 'weight': np.ones(3)}
  other = {**batch, 'x': batch['x'] + (jax.process_index() == on) * (np.arange(len(mine)) < 1)[:, None]}
  place = lambda batch, **options: text_of(lambda: layout.local_to_global(batch, names, **options))
  reported = {'new': place(other), 'equal': place(batch), 'known': place(other)}
  reported |= {check: place(other, check=check) for check in ('always', 'never')}
  reported['whole arrays'] = place(
    {**batch, 'weight': np.ones(3) + (jax.process_index() == on)}, check='always'
  )
  reported['equal after all'] = place(batch, check='always')
  return reported


def every_process(on):
  return {'arguments': arguments(), 'states': states(on), 'rows': rows(on)}


# -- in the test


@functools.cache
def run(processes, on):
  source = f'from tests.multiprocess import values_test\nreport(values_test.every_process({on}))'
  return [result.value for result in run_processes(source, processes, 8 // processes)]


def the_same(results):
  """What all processes report alike."""
  assert all(one == results[0] for one in results)
  return results[0]


def digest(array):
  [one] = digests([np.asarray(array)])
  return f'digest {one}'


def digest_of_pieces(pieces):
  return digest(np.frombuffer('\n'.join(map(digest, pieces)).encode(), np.uint8))


@pytest.mark.slow
def test_init_refuses_arguments_that_differ_between_processes():
  reported = the_same([one['arguments'] for one in run(2, on=1)])
  large = np.arange(100_000, dtype=np.float32)
  changed = large + (np.arange(100_000) == 77_777)
  digests_of = f'{digest(large)} in process 0, {digest(changed)} in process 1.'
  expected = {
    'seeds': 'argument 0 (key<fry>[]): [0, 0] in process 0, [0, 1] in process 1.',
    'old keys': 'argument 0 (uint32[2]): [0, 0] in process 0, [0, 1] in process 1.',
    'numbers': 'argument scale (float): 1.0 in process 0, 2.0 in process 1.',
    'flags': 'argument train (bool): False in process 0, True in process 1.',
    'arrays': f'argument 1/a/1 (float32[100000]): {digests_of}',
    'on a device': f'argument 1 (float32[100000]): {digests_of}',
    'shapes': 'argument 1: float32[10] in process 0, float32[11] in process 1.',
    'kinds': 'argument 1: float in process 0, float32[] in process 1.',
    'missing': 'argument more: missing in process 0, int in process 1.',
    'several': (
      'argument 0 (key<fry>[]): [0, 0] in process 0, [0, 1] in process 1.\n'
      'argument scale (float): 1.0 in process 0, 2.0 in process 1.'
    ),
  }
  assert {name: reported[name] for name in expected} == {
    name: f'{problem}\n{ARGUMENTS}' for name, problem in expected.items()
  }


@pytest.mark.slow
def test_arguments_are_compared_before_the_function_is_traced():
  reported = the_same([one['arguments'] for one in run(2, on=1)])
  assert reported['traces of these'] == 0 and reported['equal'] is None and reported['traces of all'] > 0


@pytest.mark.slow
def test_many_processes_are_named_in_one_message():
  reported = the_same([one['arguments'] for one in run(4, on=2)])
  assert reported['flags'] == (
    f'argument train (bool): False in process 0, True in processes 1-3.\n{ARGUMENTS}'
  )


@pytest.mark.slow
@pytest.mark.parametrize(('processes', 'on'), [(2, 1), (4, 2)])
def test_values_of_a_state_are_compared_between_those_that_hold_them(processes, on):
  reported = the_same([one['states'] for one in run(processes, on)])
  assert reported['equal'] is None and reported['again'] is None
  assert reported['without values'] is None
  others = 'process 0' if processes == 2 else 'processes 0-1 and 3'
  assert reported['trees'] == f'more: missing in {others}, int in process {on}.\n{VALUES}'
  first, *_ = reported['layouts'].splitlines()
  assert first.startswith('the layout, line 2: "rule 0')


@pytest.mark.slow
@pytest.mark.parametrize(
  ('processes', 'on', 'rows', 'others'),
  [(2, 1, 4, 'process 0'), (4, 2, 4, 'processes 0-1 and 3')],
)
def test_other_values_in_one_process_are_an_error_on_all(processes, on, rows, others):
  reported = the_same([one['states'] for one in run(processes, on)])
  held = 16 // (processes // 2)  # rows of the boxed array on a process
  pieces = np.arange(held * 4, dtype=np.float32).reshape(-1, rows, 4)
  changed, large, other = (
    pieces.copy(),
    np.zeros((64, 1000), np.float32),
    np.zeros((64, 1000), np.float32),
  )
  changed[:, -1, -1] += 1
  other[-1, -1] = 1
  assert sorted(reported['values'].splitlines()) == sorted(
    [
      f'boxed (float32[16, 4] as {P("data")}), rows 0-{held - 1}: {digest_of_pieces(pieces)} in process 0, '
      f'{digest_of_pieces(changed)} in process {on}.',
      f'keys (key<fry>[]): [0, 0] in {others}, [0, 1] in process {on}.',
      f'large (float32[64, 1000] as {P()}), rows 0-63: {digest(large)} in {others}, '
      f'{digest(other)} in process {on}.',
      f'scalar (int32[] as {P()}): 0 in {others}, 1 in process {on}.',
      f'step (int): 3 in {others}, 4 in process {on}.',
      VALUES,
    ]
  )


@pytest.mark.slow
@pytest.mark.parametrize(('processes', 'on'), [(2, 1), (4, 2)])
def test_a_part_of_the_large_values_is_compared_at_each_call(processes, on):
  reported = the_same([one['states'] for one in run(processes, on)])
  turns = {name: reported[f'turns of {name}'] for name in ('small', 'large', 'on the host', 'sharded')}
  assert all(turns['small'])
  assert sum(turns['large'][:16]) == sum(turns['on the host'][:16]) == 1
  assert sum(turns['sharded'][:16]) == 8 // processes  # shards on a process, each in a turn of its own
  assert all(each[:16] == each[16:] for each in turns.values())


@pytest.mark.slow
@pytest.mark.parametrize(('processes', 'on'), [(2, 1), (4, 2)])
def test_rows_that_two_processes_hold_are_compared(processes, on):
  reported = the_same([one['rows'] for one in run(processes, on)])
  rows = np.arange(8, dtype=np.float32).reshape(2, 4)
  other = rows + np.array([[1], [0]], np.float32)
  message = (
    f'x (float32[8, 4]), rows 0-1: {digest(rows)} in process 0, {digest(other)} in process {on}.\n{ROWS}'
  )
  assert reported['new'] == reported['always'] == message
  others = 'process 0' if processes == 2 else 'processes 0-1 and 3'
  assert reported['whole arrays'] == (
    f'weight (float32[3]), rows 0-2: [1.0, 1.0, 1.0] in {others}, [2.0, 2.0, 2.0] in process {on}.\n{ROWS}'
  )
  assert reported['equal'] is None and reported['equal after all'] is None
  assert reported['known'] is None and reported['never'] is None
