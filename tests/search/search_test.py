"""The search: with an estimator that is a formula, so that what it should find is known."""

import functools
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import jax
import jax.numpy as jnp
import pytest

import flax_spmd as spmd
from flax_spmd._src.compare.costs import cost
from flax_spmd._src.compare.outcome import Memory
from flax_spmd._src.hlo.collectives import Collective
from flax_spmd._src.hlo.counts import Counts
from flax_spmd._src.layout import Layout
from flax_spmd._src.search import trials
from flax_spmd._src.search.estimate_cache import open_kept
from flax_spmd.errors import EstimatorError, InfeasibleError, LayoutError, SearchError, TargetDeviceError
from flax_spmd.explore import Comparison, Outcome, search

SIZES = {'batch': 512, 'embed': 1024, 'mlp': 4096}


def create():
  box = lambda *names: spmd.LogicallyPartitioned(jnp.ones(tuple(SIZES[name] for name in names)), names)
  weights = {'up': box('embed', 'mlp'), 'down': box('mlp', 'embed')}
  return {'params': weights, 'opt_state': {'mu': weights}}


def step(state, x, remat='none'):
  return jax.tree.map(lambda w: w - 0.1 * jnp.sum(x), state)


def data():
  return jax.ShapeDtypeStruct((SIZES['batch'], SIZES['embed']), jnp.float32)


def pieces(layout, *names):
  """Into how many pieces a table cuts an array with these names, if it may."""
  sizes = dict(layout.mesh.shape)
  spec = layout.rules.spec(names)
  return math.prod(
    sizes[axis] for entry in spec for axis in ([entry] if isinstance(entry, str) else entry or ())
  )


class Formula:
  """Estimates by hand: products are cut by batch and mlp, and both cuts cost something on the links."""

  names = {name: (size,) for name, size in SIZES.items()}  # noqa: RUF012
  parameter_names = frozenset({'embed', 'mlp'})
  together = frozenset(
    {frozenset({'embed', 'mlp'}), frozenset({'batch', 'mlp'}), frozenset({'batch', 'embed'})}
  )
  asked = 0
  ends_after = None
  reason = ''

  def __init__(self, step, create, batch, **options):
    if Formula.reason:
      raise EstimatorError(Formula.reason)
    self.remat = is_remat(step)
    self.state = create

  def estimate(self, layout, target):
    Formula.asked += 1
    if Formula.asked == Formula.ends_after:
      raise KeyboardInterrupt
    return outcome(layout, target, self.state, self.remat)


@functools.cache
def shapes_of(create):
  return jax.eval_shape(create)


def is_remat(step):
  return getattr(step, 'keywords', {}).get('remat') == 'full'


def outcome(layout, target, create, remat=False, name='', source='estimated'):
  rows = layout.rows(shapes_of(create))
  parts = [
    sum(row.bytes_per_device for row in rows if row.path.startswith(part))
    for part in ('params', 'opt_state')
  ]
  tokens = SIZES['batch'] / pieces(layout, 'batch')
  activations = int(
    4 * SIZES['mlp'] * SIZES['batch'] / pieces(layout, 'batch', 'mlp') * (1 if remat else 8)
  )
  links = [
    (
      'all-reduce',
      8e7 * (layout.mesh.size > pieces(layout, 'batch', 'mlp') or pieces(layout, 'batch') > 1),
    ),
    ('all-gather', 2 * (8 * SIZES['embed'] * SIZES['mlp'] / pieces(layout, 'mlp') - parts[0])),
    ('reduce-scatter', tokens * SIZES['embed'] * (pieces(layout, 'mlp') - 1) * 64),
  ]
  collectives = tuple(
    Collective(kind, (layout.mesh.axis_names[-1],), 8, wire, 1, wire, 'f32', '', '')
    for kind, wire in links
    if wire
  )
  work = 4e9 / pieces(layout, 'batch', 'mlp') * (1.3 if remat else 1)
  counts = Counts(work, 1e6, collectives, (), ())
  memory = Memory(*parts, 0, 0, activations, sum(parts) + activations)
  bracket = cost(counts, target, dict(layout.mesh.shape))
  doubts = ('embed is cut twice',) if 'embed' in repr(layout.rules) else ()
  return Outcome(name, layout, memory, counts, bracket, True, None, None, None, source, doubts)


def compiling(step, create, batch, layouts, target, **options):
  """In the place of `compare`: the same formula, a little off."""
  aim = spmd.explore.parse(target)
  found = [
    outcome(layout, aim, create, is_remat(step), name, '')._replace(doubts=())
    for name, layout in layouts.items()
  ]
  return Comparison(aim, found)


@pytest.fixture(autouse=True)
def formula(tmp_path, monkeypatch):
  monkeypatch.setenv('FLAX_SPMD_CACHE', str(tmp_path / 'cache'))
  monkeypatch.setattr(trials, 'Estimator', Formula)
  monkeypatch.setattr(trials, 'compare', compiling)
  for name, value in (('asked', 0), ('ends_after', None), ('reason', '')):
    monkeypatch.setattr(Formula, name, value)


def run(target='cpu:8', **options):
  given = {'candidates': 120, 'top': 3} | options
  return search(step, create, data(), target, **given)


def same(one, other):
  strip = lambda found: json.dumps(
    {k: v for k, v in found.record().items() if k != 'notes'}, default=repr
  )
  return strip(one) == strip(other)


# -- what it finds


def test_the_answer():
  found = run()
  assert found.best is found.outcomes[0] and found.layout == found.best.layout
  assert found.best.source == 'compiled:cpu' and found.notes == []
  best = min(one.cost.low * one.cost.high for one in found.estimates)
  assert found.best.cost.low * found.best.cost.high == pytest.approx(best)
  assert pieces(found.layout, 'batch', 'mlp') == 8


def test_it_is_never_worse_than_a_preset():
  found = run()
  middle = lambda one: one.cost.low * one.cost.high
  presets = [one for one in found.outcomes if one.name in found.presets]
  assert {found.presets[one.name] for one in presets} >= {'data_parallel', 'tensor_parallel'}
  assert all(middle(found.best) <= middle(one) for one in presets)
  assert all(one.source == 'compiled:cpu' for one in found.outcomes)


def test_the_same_question_has_the_same_answer():
  first = run(seed=1)
  assert Formula.asked >= 120
  assert same(first, run(seed=1, fresh=True))
  Formula.asked = 0
  assert same(first, run(seed=1)) and Formula.asked == 0  # all of it was kept


def test_memory_is_kept_to():
  free = run()
  tight = run(memory=free.best.memory.peak // 4)
  assert tight.best.memory.peak <= free.best.memory.peak // 4
  assert tight.best.cost.high >= free.best.cost.high
  assert all(one.memory.peak <= tight.memory for one in tight.pareto)


def test_pareto():
  found = run()
  times = [one.cost.low * one.cost.high for one in found.pareto]
  assert not any(one.error for one in found.pareto)
  peaks = [one.memory.peak for one in found.pareto]
  assert times == sorted(times) and peaks == sorted(peaks, reverse=True) and len(found.pareto) > 1


def test_what_the_rules_buy():
  found = run(mesh={'data': 4, 'model': 2}, pin={'batch': 'data', 'mlp': 'model'}, forbid=['embed'])
  by_rule = {buy.rule: buy for buy in found.buys}
  assert {*found.layout.rules} == {*by_rule}
  buy = by_rule['batch', 'data']
  assert buy.time > 0.5 and buy.memory > 0
  assert str(buy).startswith("without ('batch', 'data'): +") and str(buy).endswith(' %')


def test_rules_that_buy_nothing_are_left_out():
  for buy in run().buys:
    assert buy.time > 0 or buy.memory > 0, buy


def test_choices_of_the_step():
  found = run(choices={'remat': ('none', 'full')}, candidates=250)
  assert found.choices == {'remat': 'none'} and 'remat=none' in found.best.name
  tight = run(choices={'remat': ('none', 'full')}, candidates=250, memory=found.pareto[-1].memory.peak)
  assert tight.choices == {'remat': 'full'}
  assert "# the step is called with remat='full'" in tight.toml


def test_doubtful_ones_are_compiled_first():
  found = run(top=1)
  first = [one for one in found.outcomes if one.name not in found.presets]
  assert len(first) <= 1


def test_wishes_are_kept():
  found = run(pin={'mlp': 'tensor'}, batch_only='rows', forbid=['embed'])
  sizes = dict(found.layout.mesh.shape)
  assert found.layout.rules.spec(('embed', 'mlp')) == jax.sharding.PartitionSpec(None, 'tensor')
  assert {'tensor', 'rows'} <= {*sizes} and 'rows' not in repr(
    [c for c in found.layout.rules if c[0] != 'batch']
  )


def test_estimates_alone():
  found = run(top=0)
  assert found.best.source == 'estimated' and {'data_parallel', 'fsdp'} <= {*found.presets.values()}
  assert found.best.cost.high < run(top=3).outcomes[-1].cost.high


def test_outcomes_that_do_not_fit_the_names(monkeypatch):
  plain = Formula.estimate

  def picky(self, layout, target):
    if 'embed' in repr(layout.rules):
      raise LayoutError('embed does not fit.')
    return plain(self, layout, target)

  monkeypatch.setattr(Formula, 'estimate', picky)
  found = run()
  assert any(one.error == 'embed does not fit.' for one in found.estimates) and found.best.error is None


# -- as text


def test_as_text(tmp_path):
  found = run()
  text = str(found)
  title = f'cpu:8: of {len(found.estimates)} candidates, the best that needs at most 16 GiB on a device.'
  assert text.splitlines()[0] == title and 120 <= len(found.estimates) < 160
  assert (
    'What each rule buys, estimated:\n  without (' in text and 'Time against memory, estimated' in text
  )
  found.to_toml(tmp_path / 'layout.toml')
  assert Layout.from_toml((tmp_path / 'layout.toml').read_text(), mesh=found.layout.mesh) == found.layout
  record = json.loads(found.to_json())
  assert record['best'] == found.best.name and len(record['estimates']) == len(found.estimates)
  found.to_html(tmp_path / 'page.html')
  page = (tmp_path / 'page.html').read_text()
  assert 'Search for cpu:8' in page and 'What each rule buys' in page and 'class="limit"' in page


# -- interrupted, killed, kept


def test_an_interrupted_search_keeps_the_best(monkeypatch):
  whole = run(fresh=True)
  monkeypatch.setattr(Formula, 'asked', 0)
  monkeypatch.setattr(Formula, 'ends_after', 40)
  part = run(fresh=True)
  assert len(part.estimates) == 39 and part.best.source == 'estimated'
  assert part.notes == [
    'Interrupted: the best of 39 candidates, of which 0 were compiled. The same call goes on from here.'
  ]
  monkeypatch.setattr(Formula, 'asked', 0)
  monkeypatch.setattr(Formula, 'ends_after', None)
  assert same(whole, run())
  assert Formula.asked < len(whole.estimates) + len(whole.buys) - 30


def test_interrupted_while_compiling(monkeypatch):
  calls = []

  def slow(*arguments, **options):
    calls.append(1)
    if len(calls) == 3:
      raise KeyboardInterrupt
    return compiling(*arguments, **options)

  monkeypatch.setattr(trials, 'compare', slow)
  found = run(jobs=1)
  assert len(found.outcomes) == 2 and found.best.source == 'compiled:cpu'
  assert f'of {len(found.estimates)} candidates, of which 2 were compiled.' in found.notes[0]


def test_interrupted_before_anything(monkeypatch):
  monkeypatch.setattr(Formula, 'ends_after', 1)
  with pytest.raises(KeyboardInterrupt):
    run()


KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
from tests.search import search_test as t
t.trials.Estimator, t.trials.compare = t.Formula, t.compiling
plain = t.Formula.estimate
def mortal(self, layout, target):
  if t.Formula.asked == 50:
    os.kill(os.getpid(), signal.SIGKILL)
  return plain(self, layout, target)
t.Formula.estimate = mortal
t.run()
"""


def test_killed_half_way_and_resumed_to_the_same_answer(tmp_path, monkeypatch):
  root = str(Path(__file__).parents[2])
  ended = subprocess.run(
    [sys.executable, '-c', KILLED.format(root=root)],
    env=os.environ | {'PYTHONPATH': root},
    capture_output=True,
  )
  assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
  resumed = run()
  # those that were kept cost nothing; what the winner's rules buy is estimated besides
  assert Formula.asked <= len(resumed.estimates) - 49 + len(resumed.buys)
  monkeypatch.setattr(Formula, 'asked', 0)
  assert same(resumed, run(fresh=True)) and Formula.asked >= 120


def files(tmp_path):
  return list((tmp_path / 'cache').glob('*.search.jsonl'))


def test_a_cache_of_another_version_is_made_anew(tmp_path):
  first = run()
  [file] = files(tmp_path)
  head, *lines = file.read_text().splitlines()
  file.write_text(
    '\n'.join([json.dumps(json.loads(head) | {'jaxlib': '0.4.1', 'flax-spmd': '0.0.1'}), *lines])
  )
  Formula.asked = 0
  again = run()
  assert Formula.asked >= 120 and same(first, again)
  text = 'Estimates that jaxlib 0.4.1, flax-spmd 0.0.1 had made were kept, and have been made anew.'
  assert again.notes == [text] and run().notes == []


def test_a_cache_that_was_cut_off_or_damaged(tmp_path):
  first = run()
  [file] = files(tmp_path)
  head, *lines = file.read_text().splitlines()
  lines[3] = '{"layout": "' + json.loads(lines[3])['layout'] + '", "memory": [1]}'
  file.write_text('\n'.join([head, *lines[:60]])[:-40])
  Formula.asked = 0
  assert same(first, run())
  assert 0 < Formula.asked < 120


def test_what_is_kept_comes_back_as_it_was(tmp_path):
  aim = spmd.explore.parse('h100:8')
  layout = spmd.Layout(
    spmd.abstract_mesh({'data': 4, 'model': 2}), (('batch', 'data'), ('embed', 'model'))
  )
  one = outcome(layout, aim, create, name='a')
  failed = Outcome.failed('b', layout.replace(rules=()), 'no')._replace(source='estimated')
  kept = open_kept('program', aim)
  kept.add(one)
  kept.add(failed)
  again = open_kept('program', aim)
  assert again.get('a', layout) == one and again.get('b', failed.layout) == failed
  assert open_kept('another', aim).get('a', layout) is None
  assert open_kept('program', aim, fresh=True).get('a', layout) is None


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
  (tmp_path / 'file').write_text('')
  monkeypatch.setenv('FLAX_SPMD_CACHE', str(tmp_path / 'file'))
  with pytest.warns(
    UserWarning, match='Estimates cannot be kept in .*Set FLAX_SPMD_CACHE to another folder'
  ):
    assert run(candidates=10).best.error is None


def test_the_time_is_up():
  found = run(time_limit=1e-9, jobs=1)
  assert len(found.estimates) < 10 and len(found.outcomes) == 1


# -- without an estimator, without names, without hope


def test_without_an_estimator_everything_is_compiled(monkeypatch):
  monkeypatch.setattr(Formula, 'reason', 'jaxlib 9.9 is not known.\nFix: wait.')
  found = run()
  assert len(found.estimates) == 24 and found.buys == [] and Formula.asked == 0
  assert found.best.source == 'compiled:cpu'
  assert found.notes == [
    'Without estimates (jaxlib 9.9 is not known.) every candidate is compiled, which takes seconds where an '
    'estimate takes a twentieth of one: 24 candidates are tried.'
  ]


def test_a_model_without_names(monkeypatch):
  monkeypatch.setattr(Formula, 'names', {'batch': (SIZES['batch'],)})
  monkeypatch.setattr(Formula, 'parameter_names', frozenset())
  plain = lambda: jax.tree.map(lambda box: box.unbox(), create(), is_leaf=spmd.is_axis_metadata)
  found = search(step, plain, data(), 'cpu:8', candidates=60, top=0)
  assert found.notes == [
    'The state has no names: fsdp is searched, and rules for the paths of 2 kinds of arrays.'
  ]
  tables = [repr(one.layout.rules) for one in found.estimates]
  assert any('fsdp(' in table for table in tables) and any('(^|/)down$' in table for table in tables)


def test_nothing_fits():
  with pytest.raises(InfeasibleError) as caught:
    run(memory='1MiB', fresh=True)
  lines = str(caught.value).splitlines()
  nearest = min(one.memory.peak for one in run(top=0).estimates)  # of which one is compiled
  assert lines[0] == 'Of 120 layouts, none fits into 1 MiB on cpu:8.'
  assert (
    lines[1].startswith('The nearest needs ')
    and f'({nearest - 2**20} bytes) too much (compiled:cpu): ' in lines[1]
  )
  assert lines[2] == (
    'Fix: use more devices, a smaller batch, or remat (let the step take it as an argument, and pass choices).'
  )


def test_nothing_is_as_wished():
  with pytest.raises(SearchError) as caught:
    run(mesh={'data': 8}, pin={'batch': 'data', 'mlp': 'data'}, forbid={'embed': 'data'}, batch_only=())
  assert 'one array has both' in str(caught.value)
  with pytest.raises(SearchError) as caught:
    run('h100:16', pin={'mlp': 'model'}, mesh={'model': 16}, tensor=2, forbid=['batch'], candidates=0)
  assert (
    str(caught.value)
    == dedent("""
    There is nothing to search: candidates=0, top=3.
    Fix: try at least one candidate, and give every choice a value.""").strip()
  )
  with pytest.raises(SearchError, match=r"choices\['remat'\] is empty"):
    run(choices={'remat': ()})


def test_bad_targets():
  with pytest.raises(TargetDeviceError, match="There is no target 'v9:8'"):
    run('v9:8')


def test_progress(capsys):
  run(candidates=10, show=True)
  assert 'estimating' in capsys.readouterr().out
