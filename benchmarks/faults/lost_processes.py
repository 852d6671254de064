"""Lost processes: one of the two processes of a job is killed during an overwrite; the other one ends with an error in time."""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Iterator

from faults.examinations import expect
from faults.known_states import Size
from faults.places import Place
from faults.tally import Harm, Outcome, Tally
from tests.processes import run_processes

STORES = ('disk', 'gcs', 's3')
RUNS = {'disk': 3, 'gcs': 2, 's3': 2}
LIMIT = 30.0  # seconds for the other one to end
SOURCE = """
import os, signal, sys, threading, time
sys.path.insert(0, os.path.join({root!r}, 'benchmarks'))
import flax_spmd as spmd
from faults.known_states import Size, layout, values
from flax_spmd import checkpoint

def state(number):
  sharding = jax.sharding.NamedSharding(layout().mesh, jax.sharding.PartitionSpec('data', 'model'))
  def placed(array):
    if array.ndim < 2:
      return array
    box = jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    return spmd.LogicallyPartitioned(box, ('rows', 'columns'))
  return {{name: placed(array) for name, array in values(number, Size(*{size})).items()}}

one, two = state(1), state(2)
checkpoint.save({path!r}, one, layout=layout())
report('ready')
if jax.process_index() == {victim}:
  threading.Timer({seconds}, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
time.sleep(0.2)
begin = time.monotonic()
try:
  checkpoint.save({path!r}, two, layout=layout(), overwrite=True)
  report(['saved', time.monotonic() - begin, ''])
except Exception as error:
  report([type(error).__name__, time.monotonic() - begin, str(error)])
if jax.process_index() == {victim}:
  time.sleep(60)
os._exit(0)
"""
_JAX_MESSAGE = (
  'another task died'  # process 0 has the coordination service: without it JAX ends the others
)


def run(place: Place, runs: int) -> Iterator[Outcome]:
  size = Size(4, 1024) if place.store == 'disk' else place.size
  for victim in (1, 0):
    tally = Tally(f'one of two processes killed: process {victim}', place.store)
    drawn = random.Random(victim)
    for _ in range(runs):
      seconds = 0.2 + drawn.uniform(0, 0.5)
      tally.trial(f'after {seconds:.2f} s', functools.partial(_trial, place, victim, seconds, size))
    yield tally.outcome()


def _trial(place: Place, victim: int, seconds: float, size: Size) -> str:
  path = place.new('processes')
  root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
  source = SOURCE.format(root=root, path=path, victim=victim, seconds=seconds, size=tuple(size))
  begin = time.monotonic()
  results = run_processes(source, processes=2, devices=4, timeout=120, grace=60, check=False)
  survivor, took = results[1 - victim], time.monotonic() - begin
  ended_by_jax = not isinstance(survivor.value, list)
  kind, waited, text = ['ended by JAX', took, survivor.stderr] if ended_by_jax else survivor.value
  if waited > LIMIT:
    raise Harm(f'{kind} after {waited:.0f} s: {text[-500:]}')
  if ended_by_jax and _JAX_MESSAGE not in text:
    raise Harm(f'no clear error: {text[-500:]}')
  if kind not in ('CheckpointError', 'saved', 'ended by JAX'):
    raise Harm(f'unexpected error: {kind}: {text}')
  expect(path, size, {1, 2})
  place.clear(path)
  return f'the other: {kind}'
