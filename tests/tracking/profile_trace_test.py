"""Planned collectives beside the events of a real profile, read back from the file."""

import gzip
import json
from textwrap import dedent

import jax
import jax.numpy as jnp
import pytest

import flax_spmd as spmd
from flax_spmd import explore, tracking
from flax_spmd.errors import LayoutError

LAYOUT = spmd.Layout({'data': 2, 'model': 4}, (('batch', 'data'), ('mlp', 'model')))


def step(w, x):
  return jnp.sum(x @ w, axis=0)


def other(w, x):
  return jnp.sum(x @ w)


@pytest.fixture(scope='module')
def profiled(tmp_path_factory):
  """The explanation of a step, and the profile of two runs of it and of one of another program."""
  folder = tmp_path_factory.mktemp('profile')
  w = LAYOUT.shard(jnp.ones((8, 16)), ('mlp', None))
  x = LAYOUT.shard(jnp.ones((4, 8)), ('batch', 'mlp'))
  function, another = LAYOUT.jit(step), LAYOUT.jit(other)
  jax.block_until_ready((function(w, x), another(w, x)))
  with jax.profiler.trace(folder):
    for _ in range(2):
      jax.block_until_ready(function(w, x))
    jax.block_until_ready(another(w, x))
  return function.explain(w, x), folder


def events(path):
  with gzip.open(path, 'rt') as file:
    return json.load(file)['traceEvents']


def planned_in(path):
  return [each for each in events(path) if each.get('pid') == 1_000_000_000 and each['ph'] == 'X']


def test_collectives_are_beside_those_of_a_profile(profiled, tmp_path):
  explanation, folder = profiled
  found = tracking.write_trace(explanation, tmp_path / 'step.json.gz', profile=folder)
  names = {one.collective.name for one in explanation.collectives}
  assert names and {*found.seconds} == names and found.missing == ()
  measured = [
    each
    for each in events(tmp_path / 'step.json.gz')
    if each.get('args', {}).get('hlo_module') == 'jit_step'
    and each['args']['hlo_op'] in names
    and each['ph'] == 'X'
  ]
  planned = planned_in(tmp_path / 'step.json.gz')
  key = lambda each: (each['args']['hlo_op'], each['ts'], each['dur'])
  assert sorted(map(key, planned)) == sorted(map(key, measured))
  assert len(planned) == 2 * 8 * len(names)  # runs, devices
  assert sum(found.seconds.values()) == pytest.approx(sum(each['dur'] for each in measured) / 1e6)
  one = max(explanation.collectives, key=lambda one: one.collective.wire)
  found = next(each for each in planned if each['args']['hlo_op'] == one.collective.name)
  assert found['name'].startswith(f'{one.collective.kind} over {"+".join(one.collective.axes)}: ')
  assert (
    found['args']['sent_in_all'] == one.collective.wire
    and 'profile_trace_test.py' in found['args']['source']
  )


def test_a_profile_of_another_program_has_none_of_them(profiled, tmp_path):
  explanation, folder = profiled
  file = next(folder.glob('**/*.trace.json.gz'))
  found = tracking.write_trace(
    explanation._replace(name='third'), tmp_path / 'step.json.gz', profile=file
  )
  assert found.seconds == {} and {*found.missing} == {
    one.collective.name for one in explanation.collectives
  }
  assert planned_in(tmp_path / 'step.json.gz') == []


def test_without_a_profile_they_are_in_a_row(profiled, tmp_path):
  explanation, _ = profiled
  assert tracking.write_trace(explanation, tmp_path / 'step.json.gz') == ({}, ())
  planned = planned_in(tmp_path / 'step.json.gz')
  assert [each['args']['hlo_op'] for each in planned] == [
    one.collective.name for one in explanation.collectives
  ]
  assert [each['ts'] for each in planned] == list(range(len(planned)))


def test_errors(profiled, tmp_path):
  explanation, _ = profiled
  with pytest.raises(LayoutError) as caught:
    tracking.write_trace(explanation, tmp_path / 'step.json.gz', profile=tmp_path)
  assert str(caught.value) == dedent(f"""\
    There is no *.trace.json.gz in {tmp_path}.
    Fix: pass the folder of jax.profiler.trace, after its block has ended.""")
  failed = explore.Outcome.failed('fsdp', LAYOUT, 'no compiler')
  with pytest.raises(LayoutError) as caught:
    tracking.write_trace(failed, tmp_path / 'step.json.gz')
  assert str(caught.value) == dedent("""\
    fsdp has no compiled program, so no instructions with names.
    Fix: pass the result of layout.jit(f).explain(...), or a compiled outcome of explore.compare.""")
  assert not (tmp_path / 'step.json.gz').exists()


@pytest.mark.parametrize(
  'data, problem',
  [
    (b'', 'JSONDecodeError: Expecting value: line 1 column 1 (char 0)'),
    (b'no archive', "BadGzipFile: Not a gzipped file (b'no')"),
    (
      gzip.compress(b'{"traceEvents": []}')[:-9],
      'EOFError: Compressed file ended before the end-of-stream marker was reached',
    ),
    (gzip.compress(b'{}'), "KeyError: 'traceEvents'"),
  ],
  ids=['empty', 'text', 'cut', 'other'],
)
def test_a_damaged_profile(profiled, tmp_path, data, problem):
  explanation, _ = profiled
  file = tmp_path / 'host.trace.json.gz'
  file.write_bytes(data)
  with pytest.raises(LayoutError) as caught:
    tracking.write_trace(explanation, tmp_path / 'step.json.gz', profile=tmp_path)
  assert str(caught.value) == dedent(f"""\
    {file} is no trace of a profile, or a part of one: {problem}
    Fix: profile again, and read it after the block of jax.profiler.trace has ended.""")
  assert not (tmp_path / 'step.json.gz').exists()
