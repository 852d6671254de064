"""Prefetch: order, how far ahead, errors, leaving early, contexts and the bar."""

import contextvars
import gc
import io
import itertools
import subprocess
import sys
import threading
import time
import traceback
import weakref
from textwrap import dedent

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd._src.data.prefetch import prefetch
from flax_spmd.errors import CheckpointError, LayoutError


class Source:
  """Batches 0, 1, 2, ..., counted in `made` and `closed`; raises at batch `fails`."""

  def __init__(self, count=None, fails=None):
    self.count, self.fails = count, fails
    self.made, self.closed, self.threads = 0, 0, set()

  def __iter__(self):
    try:
      for number in itertools.count() if self.count is None else range(self.count):
        self.threads.add(threading.current_thread().name)
        if number == self.fails:
          raise KeyError(f'batch {number}')
        self.made += 1
        yield number
    finally:
      self.closed += 1


def same(batch):
  return batch


def settle(source, made):
  """Waits until `made` batches were made, and then a little for one too many."""
  deadline = time.monotonic() + 300
  while source.made < made and time.monotonic() < deadline:
    time.sleep(0.001)
  time.sleep(0.02)
  return source.made


@pytest.fixture(autouse=True)
def no_thread_is_left():
  yield
  assert not [thread for thread in threading.enumerate() if thread.name == 'flax_spmd.prefetch']


@pytest.mark.parametrize('size', [1, 2, 7])
@pytest.mark.parametrize('count', [0, 1, 2, 20])
def test_all_batches_in_order(size, count):
  source = Source(count)
  assert list(prefetch(source, lambda batch: batch * 10, size)) == [10 * n for n in range(count)]
  assert source.closed == 1 and source.threads <= {'flax_spmd.prefetch'}


@pytest.mark.parametrize('size', [1, 2, 3])
def test_at_most_size_batches_ahead(size):
  source = Source()
  batches = prefetch(source, same, size)
  time.sleep(0.02)
  assert source.made == 0  # nothing runs before the first `next`
  for taken in range(1, 5):
    next(batches)
    assert settle(source, taken + size) == taken + size
  batches.close()
  assert source.made == 4 + size and source.closed == 1


def test_batches_are_transferred_to_a_mesh(mesh):
  sharding = NamedSharding(mesh, P('data', 'model'))
  batches = (np.full((8, 8), number, np.float32) for number in range(5))
  placed = list(prefetch(batches, lambda batch: jax.device_put(batch, sharding)))
  assert [batch.sharding for batch in placed] == [sharding] * 5
  assert [float(batch.mean()) for batch in placed] == [0, 1, 2, 3, 4]


def test_a_layout_shards_and_its_functions_run(mesh):
  layout = spmd.Layout(mesh, (('batch', 'data'),))
  double = layout.jit(lambda x: spmd.with_logical_constraint(2 * x, ('batch', None)))
  batches = [np.full((8, 2), number, np.float32) for number in range(3)]

  def place(batch):
    return double(layout.shard(batch, ('batch', None)))

  with layout:
    inside = [float(batch[0, 0]) for batch in prefetch(batches, place)]
  assert inside == [float(batch[0, 0]) for batch in prefetch(batches, place)] == [0, 2, 4]


def test_an_error_in_the_iterator_is_raised_at_its_batch():
  source = Source(fails=3)
  batches = prefetch(source, same)
  assert [next(batches) for _ in range(3)] == [0, 1, 2]
  with pytest.raises(KeyError, match='batch 3') as error:
    next(batches)
  assert '__iter__' in [frame.name for frame in traceback.extract_tb(error.value.__traceback__)]
  assert source.closed == 1
  assert list(batches) == []


def test_an_error_in_place_is_raised_at_its_batch():
  def place(batch):
    if batch == 2:
      raise ZeroDivisionError('so')
    return batch

  source = Source()
  seen = []
  with pytest.raises(ZeroDivisionError, match='so') as error:
    for batch in prefetch(source, place, size=5):
      seen.append(batch)
  assert seen == [0, 1]
  assert 'place' in [frame.name for frame in traceback.extract_tb(error.value.__traceback__)]
  assert source.closed == 1


def test_stop_iteration_in_place_is_an_error():
  def place(batch):
    raise StopIteration

  with pytest.raises(RuntimeError, match='StopIteration'):
    list(prefetch([1], place))


def test_errors_after_leaving_are_not_raised():
  source = Source(fails=2)
  for _ in prefetch(source, same, size=3):
    settle(source, 2)
    break
  assert source.closed == 1


@pytest.mark.parametrize('leave', ['break', 'close', 'drop', 'raise', 'throw'])
def test_leaving_early_ends_the_thread_and_closes_the_source(leave):
  source = Source()
  batches = prefetch(source, same)
  if leave == 'break':
    for _ in prefetch(source, same):
      break
  elif leave == 'close':
    next(batches)
    batches.close()
  elif leave == 'drop':
    next(batches)
    del batches
    gc.collect()
  elif leave == 'throw':
    next(batches)
    with pytest.raises(ValueError):
      batches.throw(ValueError())
  else:
    with pytest.raises(ValueError):
      for _ in prefetch(source, same):
        raise ValueError
    gc.collect()
  assert source.closed == 1


def test_closing_before_the_first_batch():
  source = Source()
  prefetch(source, same).close()
  assert source.made == source.closed == 0


def test_an_iterator_that_cannot_be_closed():
  assert list(prefetch(iter([1, 2]), same)) == [1, 2]
  assert next(prefetch(itertools.count(), same)) == 0


def test_batches_are_not_kept_alive():
  class Batch:
    pass

  alive = weakref.WeakSet()

  def place(_):
    batch = Batch()
    alive.add(batch)
    return batch

  most = 0
  for batch in prefetch(range(50), place, size=2):
    del batch
    most = max(most, len(alive))
  assert most <= 3  # two ahead, and one that is being handed over
  assert not alive


def test_place_sees_the_context_of_the_call():
  number = contextvars.ContextVar('number', default=0)
  number.set(1)
  batches = prefetch(range(3), lambda batch: (batch, number.get(), number.set(5)) and number.get())
  number.set(2)
  assert list(batches) == [5, 5, 5] and number.get() == 2
  batches = prefetch(range(2), lambda batch: number.get())
  number.set(3)
  assert list(batches) == [2, 2]


@pytest.mark.parametrize('size', [0, -1])
def test_an_invalid_size(size):
  with pytest.raises(LayoutError) as error:
    prefetch([1], same, size=size)
  assert str(error.value) == (
    f'prefetch cannot keep {size!r} batches ready.\n'
    'Fix: pass a whole number of 1 or more; with 2, one batch is ready while the next one loads.'
  )


def test_a_size_of_numpy():
  assert list(prefetch([1, 2, 3], same, size=np.int64(2))) == [1, 2, 3]


@pytest.mark.parametrize('batches', [None, 5, lambda: [1]])
@pytest.mark.parametrize('by', ['prefetch', 'even_batches'])
def test_batches_that_are_no_iterable(batches, by):
  with pytest.raises(LayoutError) as error:
    getattr(spmd, by)(batches, same if by == 'prefetch' else 4)
  kind = {None: 'a NoneType', 5: 'an int'}.get(batches, 'a function')
  assert str(error.value) == (
    f'{by} has {kind} in place of batches.\n'
    'Fix: pass an iterable, such as a list, a generator, or a data loader.'
  )


# -- iterators with positions


class Positioned:
  """Batches 0, 1, ... with a position, as those of Grain; `next` changes the state that it has returned."""

  def __init__(self, count=1000):
    self.count, self.state, self.closed = count, {'number': 0}, False

  def __iter__(self):
    return self

  def __next__(self):
    if self.state['number'] == self.count:
      raise StopIteration
    self.state['number'] += 1
    return self.state['number'] - 1

  def get_state(self):
    return self.state

  def set_state(self, state):
    self.state = dict(state)

  def close(self):
    self.closed = True


def at(number):
  return {'number': number}


def wait_until_ahead(source, number):
  deadline = time.monotonic() + 300
  while source.state['number'] < number and time.monotonic() < deadline:
    time.sleep(0.001)
  assert source.state['number'] == number


def test_the_state_is_the_position_after_the_batch_in_use():
  source = Positioned()
  batches = prefetch(source, same, size=3)
  assert batches.get_state() == at(0)
  for number in range(5):
    assert next(batches) == number
    wait_until_ahead(source, number + 4)
    assert batches.get_state() == at(number + 1)
  batches.close()
  assert batches.get_state() == at(5)


@pytest.mark.parametrize('ahead', [False, True])
def test_a_state_that_is_set(ahead):
  source = Positioned()
  batches = prefetch(source, same)
  if ahead:
    assert next(batches) == 0
  batches.set_state(at(7))
  assert batches.get_state() == at(7)
  assert [next(batches), next(batches)] == [7, 8]
  assert batches.get_state() == at(9)
  batches.close()


def test_leaving_early_moves_the_iterator_back_and_leaves_it_open():
  source = Positioned(10)
  taken = [list(zip(range(3), prefetch(source, same), strict=False)) for _ in range(3)]
  assert [batch for part in taken for _, batch in part] == list(range(9))
  assert source.state == at(9) and not source.closed
  assert list(prefetch(source, same)) == [9]
  assert source.state == at(10)


def test_a_batch_that_could_not_be_placed_comes_again():
  def place(batch, failed=[]):  # noqa: B006
    if batch == 2 and not failed:
      failed.append(batch)
      raise ZeroDivisionError
    return batch

  source = Positioned(5)
  batches = prefetch(source, place)
  assert [next(batches), next(batches)] == [0, 1]
  with pytest.raises(ZeroDivisionError):
    next(batches)
  assert list(prefetch(source, place)) == [2, 3, 4]


@pytest.mark.parametrize('count', [3, 1000])
def test_a_data_set_whose_iterators_have_positions(count):
  made = []

  class DataSet:
    def __iter__(self):
      made.append(Positioned(count))
      return made[-1]

  batches = prefetch(DataSet(), same)
  assert [next(batches) for _ in range(3)] == [0, 1, 2]
  assert batches.get_state() == at(3)
  batches.close()
  assert len(made) == 1 and made[0].closed


def test_a_prefetch_over_a_prefetch():
  source = Positioned()
  inner = prefetch(source, lambda batch: batch * 10, size=2)
  outer = prefetch(inner, lambda batch: batch + 1, size=3)
  assert [next(outer), next(outer)] == [1, 11]
  wait_until_ahead(source, 7)
  assert outer.get_state() == at(2)
  outer.set_state(at(5))
  assert next(outer) == 51
  outer.close()
  assert source.state == at(6)


def test_batches_without_a_position():
  for batches in [prefetch(range(3), same), prefetch(prefetch(iter([1]), same), same)]:
    for use in [batches.get_state, lambda batches=batches: batches.set_state(at(0))]:
      with pytest.raises(CheckpointError) as error:
        use()
  assert str(error.value) == (
    'The batches of prefetch have no position: they come from a PrefetchedBatches, which has no get_state and '
    'set_state.\n'
    'Fix: give prefetch an iterator that has both, as those of Grain have, and do all else in place.'
  )


# -- the bar


def recorded():
  from rich.console import Console
  from rich.progress import MofNCompleteColumn, Progress, TextColumn

  console = Console(file=io.StringIO(), force_terminal=True, width=80)
  columns = (
    TextColumn('{task.description}'),
    MofNCompleteColumn(),
    TextColumn('{task.fields[rate]:.0f}/s'),
  )
  return Progress(*columns, console=console, auto_refresh=False)


def test_a_bar_in_the_progress_of_the_caller():
  with recorded() as bars:
    for number, _ in enumerate(prefetch([1, 2, 3], same, progress=bars)):
      (task,) = bars.tasks
      assert (task.description, task.completed, task.total) == ('batches', number + 1, 3)
      assert (task.fields['rate'] > 0) == (number > 0)
      if number == 1:
        break
    assert bars.live.is_started  # it is the caller's to stop
  assert task.completed == 2


@pytest.mark.parametrize(
  'batches, total, shown',
  [
    ([1, 2, 3], None, 3),
    (iter([1, 2, 3]), None, 3),  # an iterator over a list knows what is left
    ((number for number in range(3)), None, None),
    ((number for number in range(3)), 3, 3),
    ([1, 2, 3], 2, 2),
  ],
)
def test_totals(batches, total, shown):
  bars = recorded()
  list(prefetch(batches, same, progress=bars, total=total))
  assert bars.tasks[0].total == shown and bars.tasks[0].completed == 3


@pytest.mark.parametrize('progress, title', [(True, 'batches'), ('training', 'training')])
@pytest.mark.parametrize('leave', [False, True])
def test_its_own_bar_is_closed(progress, title, leave, capsys, monkeypatch):
  monkeypatch.setenv('COLUMNS', '100')
  for number in prefetch(range(4), same, progress=progress):
    if leave and number == 1:
      break
  shown = capsys.readouterr().err
  assert title in shown and ('2/4' if leave else '4/4') in shown and shown.endswith('\n')
  with recorded():  # another one can be live
    pass


def test_its_own_bar_is_closed_after_an_error(capsys):
  with pytest.raises(KeyError):
    list(prefetch(Source(fails=2), same, progress=True))
  with recorded():
    pass
  assert '2/?' in capsys.readouterr().err


# -- in a process of its own


def run(source):
  return subprocess.run(
    [sys.executable, '-W', 'error', '-c', dedent(source)], capture_output=True, text=True, timeout=300
  )


def test_rich_is_imported_only_for_a_bar():
  done = run("""
    import sys
    from flax_spmd import prefetch
    print(list(prefetch([1], lambda batch: batch)), 'rich.progress' in sys.modules)
    list(prefetch([1], lambda batch: batch, progress=True))
    print('rich.progress' in sys.modules)
  """)
  assert done.stdout.startswith('[1] False\n') and done.stdout.endswith('True\n'), done.stderr


@pytest.mark.parametrize(
  'source', ['itertools.count()', 'map(time.sleep, itertools.chain([0], [1000]))']
)
@pytest.mark.parametrize('progress', [None, True])
def test_a_program_with_an_open_generator_exits(source, progress):
  done = run(f"""
    import itertools, time
    import jax
    from flax_spmd import prefetch
    batches = prefetch({source}, lambda batch: jax.device_put(1), progress={progress})
    print(next(batches))
  """)
  assert (done.returncode, done.stdout) == (0, '1\n')
  bar = done.stderr.splitlines()
  assert len(bar) == bool(progress) and all(line.startswith('batches ') for line in bar)


def test_a_program_exits_while_other_threads_are_inside_of_generators():
  """A loop in a daemon thread, and an outer `prefetch`, whose thread reads from the inner one."""
  done = run("""
    import itertools, threading, time
    import jax
    from flax_spmd import prefetch
    def place(batch):
      time.sleep(0.01)
      return jax.device_put(1)
    in_thread = prefetch(itertools.count(), place)
    threading.Thread(target=list, args=(map(lambda batch: None, in_thread),), daemon=True).start()
    inner = prefetch(itertools.count(), place)
    outer = prefetch(inner, lambda batch: batch)
    print(next(outer))
  """)
  assert (done.returncode, done.stdout, done.stderr) == (0, '1\n', '')
