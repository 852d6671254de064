"""The search with a formula as its estimator, so that the best layout is known."""

import functools
import gzip
import html
import json
import math
import random
import signal
import zlib
from textwrap import dedent

import jax
import jax.numpy as jnp
import pytest

import flax_spmd as spmd
from flax_spmd._src.compare.compilation import CompileResult
from flax_spmd._src.compare.costs import cost
from flax_spmd._src.compare.outcome import Memory
from flax_spmd._src.hlo.collectives import Collective
from flax_spmd._src.hlo.counts import Counts
from flax_spmd._src.layout import Layout
from flax_spmd._src.search import search as search_module
from flax_spmd._src.search import trials
from flax_spmd._src.search.trials import expected_seconds
from flax_spmd.errors import EstimatorError, InfeasibleError, LayoutError, SearchError, TargetDeviceError
from flax_spmd.explore import Comparison, Outcome, TrainStep, search
from tests.processes import run_process

SIZES = {'batch': 512, 'embed': 1024, 'mlp': 4096}


def create():
  box = lambda *names: spmd.LogicallyPartitioned(jnp.ones(tuple(SIZES[name] for name in names)), names)
  weights = {'up': box('embed', 'mlp'), 'down': box('mlp', 'embed')}
  return {'params': weights, 'opt_state': {'mu': weights}}


def step(state, x, remat='none'):
  rate = 0.1 if remat == 'none' else 0.2  # another program, so that their estimates are cached apart
  return jax.tree.map(lambda w: w - rate * jnp.sum(x), state)


def data():
  return jax.ShapeDtypeStruct((SIZES['batch'], SIZES['embed']), jnp.float32)


def pieces(layout, *names):
  """The number of shards of an array with these names."""
  sizes = dict(layout.mesh.shape)
  spec = layout.rules.spec(names)
  return math.prod(
    sizes[axis] for entry in spec for axis in ([entry] if isinstance(entry, str) else entry or ())
  )


class Formula:
  """An estimator by formula: products are sharded over batch and mlp, and both need communication."""

  names = {name: (size,) for name, size in SIZES.items()}  # noqa: RUF012
  names_as_axes = frozenset()
  parameter_names = frozenset({'embed', 'mlp'})
  together = frozenset(
    {frozenset({'embed', 'mlp'}), frozenset({'batch', 'mlp'}), frozenset({'batch', 'embed'})}
  )
  batch_names = frozenset({'batch'})
  dtype = 'bf16'
  calls = 0
  interrupt_at = None
  reason = ''

  def __init__(self, train_step, **options):
    if Formula.reason:
      raise EstimatorError(Formula.reason)
    self.remat = is_remat(train_step.step)
    self.state = train_step.create

  def estimate(self, layout, target, *, partition):
    Formula.calls += 1
    if Formula.calls == Formula.interrupt_at:
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


def compiling(train_step, layouts, target, **options):
  """Stands in for `compare`: the same formula, without doubts."""
  hardware = spmd.explore.parse_target(target)
  remat = is_remat(train_step.step)
  outcomes = [
    outcome(layout, hardware, train_step.create, remat, name, '')._replace(doubts=())
    for name, layout in layouts.items()
  ]
  return Comparison(hardware, outcomes)


@pytest.fixture(autouse=True)
def formula(tmp_path, monkeypatch):
  monkeypatch.setenv('FLAX_SPMD_CACHE', str(tmp_path / 'cache'))
  monkeypatch.setattr(trials, 'Estimator', Formula)
  monkeypatch.setattr(trials, 'compare', compiling)
  for name, value in (('calls', 0), ('interrupt_at', None), ('reason', '')):
    monkeypatch.setattr(Formula, name, value)


def run(target='cpu:8', **options):
  return search(TrainStep(step, create, data()), target, **{'candidates': 120, 'top': 3} | options)


def same(one, other):
  strip = lambda result: json.dumps(
    {k: v for k, v in result.record().items() if k != 'notes'}, default=repr
  )
  return strip(one) == strip(other)


# -- the check of the estimates


def estimating(monkeypatch, wire, temporaries=1.0):
  """Makes the estimator wrong: traffic of gathers is off by a factor, which may depend on the layout."""

  def changed(layout, one):
    factor = wire(layout) if one.kind == 'all-gather' else 1.0
    return one._replace(bytes=one.bytes * factor, wire=one.wire * factor)

  def estimate(self, layout, target, *, partition):
    one = with_lookups(outcome(layout, target, self.state, self.remat))._replace(doubts=())
    counts = one.counts._replace(
      collectives=tuple(changed(layout, each) for each in one.counts.collectives)
    )
    added = int((temporaries - 1) * one.memory.temporaries)
    memory = one.memory._replace(
      temporaries=one.memory.temporaries + added, peak=one.memory.peak + added
    )
    bracket = cost(counts, target, dict(layout.mesh.shape))
    return one._replace(counts=counts, memory=memory, cost=bracket)

  monkeypatch.setattr(Formula, 'estimate', estimate)
  monkeypatch.setattr(
    trials,
    'compare',
    lambda *args, **options: Comparison(
      spmd.explore.parse_target(args[2]), [with_lookups(one) for one in compiling(*args, **options)]
    ),
  )


def with_lookups(one):
  """The gathers of an outcome as traffic of lookups."""
  named = tuple(
    each._replace(op='gather' if each.kind == 'all-gather' else 'dot_general')
    for each in one.counts.collectives
  )
  return one._replace(counts=one.counts._replace(collectives=named))


def test_right_estimates_stay_and_the_result_says_what_they_were_checked_by(monkeypatch):
  estimating(monkeypatch, lambda layout: 1.0)
  result = run()
  assert set(result.check.factors.values()) == {1.0} and not result.check.flagged
  checked = len(result.check.layouts)
  line = f'Estimates checked against {checked} compiled layouts: wire +0 %, memory +0 %.'
  assert str(result.check) == line and line in str(result)
  assert result.record()['check']['wire'] == (0.0,) * checked
  assert [one.doubts for one in result.estimates if one.counts] == [()] * len(result.estimates)


@pytest.mark.parametrize('factor', [0.25, 6.0])
def test_a_class_of_operations_that_is_wrong_by_a_factor_is_corrected(monkeypatch, factor):
  estimating(monkeypatch, lambda layout: 1.0)
  right = run(fresh=True)
  estimating(monkeypatch, lambda layout: factor, temporaries=factor)
  result = run(fresh=True)
  assert result.check.factors['lookups'] == pytest.approx(1 / factor)
  assert result.check.factors['temporaries'] == pytest.approx(1 / factor, rel=1e-3)
  assert not result.check.flagged and max(result.check.within) < 0.01
  assert result.best == right.best
  known = {one.name: one for one in right.estimates}
  for one in result.estimates:
    if one.name in known:
      assert one.memory.peak == pytest.approx(known[one.name].memory.peak, rel=1e-3)
      assert one.cost.high == pytest.approx(known[one.name].cost.high, rel=1e-6)
  assert (
    f'corrected by lookups x {1 / factor:.2g}, temporaries x {1 / factor:.2g}: wire within 0 %, memory within 0 %'
    in str(result.check)
  )


def test_estimates_that_no_factor_corrects_are_in_doubt(monkeypatch):
  estimating(monkeypatch, lambda layout: 0.05 if len(layout.mesh.shape) > 1 else 20.0)
  result = run(top=6)
  reason = result.check.flagged['lookups']
  assert reason.startswith('off by x 0.05 to x 20') and f'not corrected: lookups ({reason})' in str(
    result
  )
  assert result.check.factors['lookups'] == 1.0
  known = [one.counts for one in result.outcomes]
  gathering = [one for one in result.estimates if one.counts.by_kind().get('all-gather')]
  gathering = [one for one in gathering if one.counts not in known]
  doubted = [one for one in gathering if f'lookups: {reason}' in one.doubts]
  assert len(doubted) > len(gathering) / 2
  assert max(result.check.within) > 1


def test_estimates_in_doubt_do_not_spoil_the_check_of_the_others(monkeypatch):
  shards = lambda layout: 'fsdp' in repr(layout.rules)
  estimating(monkeypatch, lambda layout: 3.0 if shards(layout) else 1.0)
  certain = Formula.estimate

  def estimate(self, layout, target, *, partition):
    doubts = ('weights move',) if shards(layout) else ()
    return certain(self, layout, target, partition=partition)._replace(doubts=doubts)

  monkeypatch.setattr(Formula, 'estimate', estimate)
  result = run()
  assert any('fsdp' in one.name for one in result.outcomes)
  assert not any('fsdp' in name for name in result.check.layouts)
  assert not result.check.flagged and result.check.within == (0.0, 0.0)


def test_without_compiled_layouts_the_result_is_unchecked():
  result = run(top=0)
  assert result.check is None and result.record()['check'] is None
  assert 'Unchecked: no estimate was compared with a compiled program.' in str(result)


def estimating_wrongly(monkeypatch):
  """Estimates that are off by another factor in every layout make another layout the best; returns the best time."""
  factors = lambda layout: 0.02 if len(layout.mesh.axis_names) > 1 else 8.0
  estimating(monkeypatch, factors)
  best = min(expected_seconds(one) for one in run(candidates=400, top=400).outcomes)
  estimating(monkeypatch, factors)
  return best


def test_compiled_programs_correct_what_no_factor_can(monkeypatch):
  best = estimating_wrongly(monkeypatch)
  result = run(candidates=400, top=3)
  assert expected_seconds(result.best) == pytest.approx(best, rel=0.02)
  assert len(result.outcomes) < 20


@pytest.mark.parametrize('seed', range(3))
def test_the_best_are_compiled_until_no_estimate_is_better(monkeypatch, seed):
  """Estimates of a third of the layouts are far too short; one that is compiled is no longer thought to be better."""
  identity = lambda layout: f'{seed} {dict(layout.mesh.shape)} {layout.rules!r}'.encode()
  estimating(monkeypatch, lambda layout: 0.3 if zlib.crc32(identity(layout)) % 3 else 1.0)
  result = run(candidates=400, top=2)
  compiled = {one.name: one for one in result.outcomes}
  assert len(compiled) < 25
  replaced = [one for one in result.estimates if one.name in compiled]
  assert replaced == [compiled[one.name] for one in replaced]
  others = [one for one in result.estimates if one.name not in compiled]
  assert min(map(expected_seconds, others)) > 0.8 * expected_seconds(result.best)


def test_estimates_that_equal_that_of_a_compiled_layout_have_its_figures(monkeypatch):
  """A rule without an effect makes no other estimate: a layout with it is not faster than the compiled one without it."""
  estimating(monkeypatch, lambda layout: 0.02 if len(layout.mesh.axis_names) > 1 else 1.0)
  estimated, wrong = {}, Formula.estimate

  def estimate(self, layout, target, *, partition):
    one = wrong(self, layout, target, partition=partition)
    estimated[repr(layout)] = repr((one.memory, one.counts))
    return one

  monkeypatch.setattr(Formula, 'estimate', estimate)
  result = run(candidates=400, top=3)
  compiled = {estimated[repr(one.layout)]: one for one in result.outcomes}
  equal = [one for one in result.estimates if estimated[repr(one.layout)] in compiled]
  assert len(equal) > len(result.outcomes)
  for one in equal:
    known = compiled[estimated[repr(one.layout)]]
    assert (one.memory, one.cost, one.doubts) == (known.memory, known.cost, known.doubts)
    assert one.source == (known.source if one.name == known.name else 'estimated')


def partitioning(monkeypatch, seed):
  """As above, but there is a partitioner: whole steps that it partitions have the right traffic."""
  identity = lambda layout: f'{seed} {dict(layout.mesh.shape)} {layout.rules!r}'.encode()
  estimating(monkeypatch, lambda layout: 0.3 if zlib.crc32(identity(layout)) % 3 else 1.0)
  quick = Formula.estimate

  def estimate(self, layout, target, *, partition):
    if not partition:
      return quick(self, layout, target, partition=False)
    right = with_lookups(outcome(layout, target, self.state, self.remat, source='partitioned'))
    return right._replace(doubts=())

  monkeypatch.setattr(Formula, 'estimate', estimate)
  monkeypatch.setattr(trials, 'can_partition', lambda platform: True)


@pytest.mark.parametrize('seed', range(3))
def test_the_best_are_partitioned_until_no_estimate_is_better(monkeypatch, seed):
  estimating(monkeypatch, lambda layout: 1.0)
  right = {one.name: one for one in run(candidates=400, top=0).estimates}
  partitioning(monkeypatch, seed)
  result = run(candidates=400, top=0, fresh=True)
  assert result.best.source == 'partitioned'
  partitioned = [one for one in result.estimates if one.source == 'partitioned']
  assert len(partitioned) < 40 and 'partitioned' in str(result)
  for one in partitioned:
    if one.name in right:
      assert one.cost == right[one.name].cost
  others = [one for one in result.estimates if one.source == 'estimated']
  assert min(map(expected_seconds, others)) > 0.8 * expected_seconds(result.best)


SOFTMAX = """\
HloModule step

ENTRY %step {
  %chances = f32[ROWS,4096]{1,0} parameter(0)
  %sums = f32[ROWS]{0} parameter(1)
  %each = f32[ROWS,4096]{1,0} broadcast(%sums), dimensions={0}
  %quotient = f32[ROWS,4096]{1,0} divide(%chances, %each)
  ROOT %result = bf16[ROWS,4096]{1,0} convert(%quotient)
}
"""


@pytest.mark.parametrize(
  'target, rows, is_partitioned',
  [('h100:8', 1024, False), ('h100:8', 1, True), ('h100:8', None, True), ('v5e:2x4', None, False)],
)
def test_what_is_compiled_next_is_partitioned_only_where_that_is_far_quicker(
  monkeypatch, tmp_path, target, rows, is_partitioned
):
  """To fuse a softmax that can decide the memory takes most of a compilation; one of a row cannot."""
  partitioning(monkeypatch, 0)
  monkeypatch.setattr(search_module, 'check_compiler', lambda target: None)
  (file := tmp_path / 'hlo.gz').write_bytes(gzip.compress(SOFTMAX.replace('ROWS', str(rows)).encode()))
  program = CompileResult(None, {}, None, None, [], 0.0, 0.0, 0, False, file if rows else None)
  compared = lambda *args, **options: Comparison(
    spmd.explore.parse_target(target),
    [one._replace(compiled=program) for one in compiling(*args, **options)],
  )
  monkeypatch.setattr(trials, 'compare', compared)
  calls = []
  estimate = Formula.estimate
  monkeypatch.setattr(
    Formula,
    'estimate',
    lambda *args, partition: calls.append(partition) or estimate(*args, partition=partition),
  )
  run(target, candidates=60, top=3)
  assert any(calls) == is_partitioned
  run(target, candidates=60, top=0, fresh=True)
  assert any(calls)


def test_what_is_partitioned_is_kept_for_the_next_search(monkeypatch):
  partitioning(monkeypatch, 0)
  result = run(top=0)
  assert Formula.calls == 0  # those of the class are not counted here
  monkeypatch.setattr(Formula, 'estimate', None)
  assert same(run(top=0), result)


def test_partitioned_layouts_correct_the_others(monkeypatch):
  """Estimates of traffic are off by 4, and temporaries by 2; a partitioned step has the right ones."""
  estimating(monkeypatch, lambda layout: 4.0, temporaries=2.0)
  quick = Formula.estimate

  def right(layout, is_full):
    target = spmd.explore.parse_target('cpu:8')
    return with_lookups(outcome(layout, target, create, is_full, source='partitioned'))

  def estimate(self, layout, target, *, partition):
    if partition:
      return right(layout, self.remat)
    return quick(self, layout, target, partition=False)

  monkeypatch.setattr(Formula, 'estimate', estimate)
  monkeypatch.setattr(trials, 'can_partition', lambda platform: True)
  result = run(top=0)
  assert result.check.factors['lookups'] == pytest.approx(0.25)
  assert result.check.factors['temporaries'] == pytest.approx(0.5)
  assert {'partitioned', 'estimated'} == {one.source for one in result.estimates}
  for one in result.estimates:
    known = right(one.layout, 'full' in one.name)
    assert sum(one.counts.by_kind().values()) == pytest.approx(sum(known.counts.by_kind().values()))
    assert one.memory.peak == pytest.approx(known.memory.peak, rel=1e-3)
  partitioned = [one for one in result.estimates if one.source == 'partitioned']
  assert {one.name for one in partitioned} == set(result.check.layouts)
  assert all(one.counts == right(one.layout, 'full' in one.name).counts for one in partitioned)


def test_the_effect_of_a_rule_is_a_difference_of_estimates(monkeypatch):
  """That between a compiled program and an estimate would contain the error of the estimate."""
  estimating_wrongly(monkeypatch)
  result = run(candidates=400, top=3)
  estimator = trials.Estimator(TrainStep(step, create, data()), platform='cpu')
  seconds = lambda layout: expected_seconds(
    estimator.estimate(layout, spmd.explore.parse_target('cpu:8'), partition=False)
  )
  clauses = result.layout.rules.clauses
  assert len(clauses) == len(result.effects) > 0
  for number, effect in enumerate(result.effects):
    without = result.layout.replace(rules=spmd.Rules(*clauses[:number], *clauses[number + 1 :]))
    assert effect.time == pytest.approx(seconds(without) / seconds(result.layout) - 1)


def test_anchors_are_compiled_once(monkeypatch):
  names = []

  def counting(train_step, layouts, target, **options):
    names.extend(layouts)
    return compiling(train_step, layouts, target, **options)

  monkeypatch.setattr(trials, 'compare', counting)
  result = run()
  assert len(names) == len(set(names)) == len(result.outcomes)


# -- the result


def test_the_best_layout():
  result = run()
  assert result.best is result.outcomes[0] and result.layout == result.best.layout
  assert result.best.source == 'compiled:cpu' and result.notes == []
  best = min(one.cost.expected for one in result.estimates)
  assert result.best.cost.expected == pytest.approx(best)
  assert pieces(result.layout, 'batch', 'mlp') == 8


def test_the_result_is_never_worse_than_a_preset():
  result = run()
  middle = lambda one: one.cost.expected
  presets = [one for one in result.outcomes if one.name in result.presets]
  assert {result.presets[one.name] for one in presets} >= {'data_parallel', 'tensor_parallel'}
  assert all(middle(result.best) <= middle(one) for one in presets)
  assert all(one.source == 'compiled:cpu' for one in result.outcomes)


def test_equal_searches_have_equal_results():
  first = run(seed=1)
  assert Formula.calls >= 120
  assert same(first, run(seed=1, fresh=True))
  Formula.calls = 0
  assert same(first, run(seed=1)) and Formula.calls == 0  # every estimate is cached


def test_the_memory_budget_is_met():
  free = run()
  tight = run(memory=free.best.memory.peak // 4)
  assert tight.best.memory.peak <= free.best.memory.peak // 4
  assert tight.best.cost.high >= free.best.cost.high
  assert all(one.memory.peak <= tight.memory for one in tight.pareto)


@pytest.mark.parametrize('top', [0, 3])
@pytest.mark.parametrize('seed', range(3))
def test_layouts_beyond_the_budget_are_marked_and_no_ties(seed, top):
  every = run(top=top, fresh=True)
  peaks = sorted({one.memory.peak for one in every.estimates if one.memory})
  seen = False
  for budget in random.Random(seed).sample(peaks, 6):
    result = run(top=top, memory=budget - 1 if budget > peaks[0] else budget)
    for one in [*result.outcomes, *result.estimates]:
      assert one.fits == (one.memory.peak <= result.memory), one.name
    over = [one for one in result.outcomes if not one.fits]
    assert not {*result.ties} & {one.name for one in over}
    assert str(result).count(' over the budget') == len(over)
    assert all('no' in str(result.comparison) for _ in over)
    seen = seen or bool(over)
  assert seen


def test_pareto():
  result = run()
  times = [one.cost.expected for one in result.pareto]
  assert not any(one.error for one in result.pareto)
  peaks = [one.memory.peak for one in result.pareto]
  assert times == sorted(times) and peaks == sorted(peaks, reverse=True) and len(result.pareto) > 1


def test_rule_effects():
  result = run(mesh={'data': 4, 'model': 2}, pin={'batch': 'data', 'mlp': 'model'}, forbid=['embed'])
  by_rule = {effect.rule: effect for effect in result.effects}
  assert {*result.layout.rules} == {*by_rule}
  effect = by_rule['batch', 'data']
  assert effect.time > 0.5 and effect.memory > 0
  assert str(effect).startswith("without ('batch', 'data'): +") and str(effect).endswith(' %')


def test_rules_without_effect_are_left_out():
  for effect in run().effects:
    assert effect.time > 0 or effect.memory > 0, effect


@pytest.mark.parametrize('seed', range(4))
def test_rules_without_effect_are_left_out_of_estimates_that_nearly_agree(monkeypatch, seed):
  """Small differences of times make many tables seem the best."""
  plain = Formula.estimate

  def estimate(self, layout, target, *, partition):
    one = plain(self, layout, target, partition=partition)
    factor = 1 + 1e-4 * zlib.crc32(f'{seed} {layout!r}'.encode()) / 2**32
    times = {name: factor * getattr(one.cost, name) for name in ('low', 'expected', 'high')}
    return one._replace(cost=one.cost._replace(**times))

  monkeypatch.setattr(Formula, 'estimate', estimate)
  result = run(top=0, candidates=300)
  assert result.effects
  for effect in result.effects:
    assert result.best.name in result.presets or effect.time > 3e-4, effect


def test_choices_of_the_step():
  result = run(choices={'remat': ('none', 'full')}, candidates=250)
  assert result.choices == {'remat': 'none'} and 'remat=none' in result.best.name
  tight = run(choices={'remat': ('none', 'full')}, candidates=250, memory=result.pareto[-1].memory.peak)
  assert tight.choices == {'remat': 'full'}
  assert "# call the step with remat='full'" in tight.toml


def test_doubtful_candidates_are_compiled_first():
  result = run(top=1)
  first = [one for one in result.outcomes if one.name not in result.presets]
  assert len(first) <= 1


def test_constraints_are_met():
  result = run(pin={'mlp': 'tensor'}, batch_only='rows', forbid=['embed'])
  sizes = dict(result.layout.mesh.shape)
  assert result.layout.rules.spec(('embed', 'mlp')) == jax.sharding.PartitionSpec(None, 'tensor')
  assert {'tensor', 'rows'} <= {*sizes} and 'rows' not in repr(
    [c for c in result.layout.rules if c[0] != 'batch']
  )


def test_estimates_without_compilation():
  result = run(top=0)
  assert result.best.source == 'estimated' and {'data_parallel', 'fsdp'} <= {*result.presets.values()}
  assert result.best.cost.high < run(top=3).outcomes[-1].cost.high


def test_layouts_that_do_not_fit_the_names_are_failed_outcomes(monkeypatch):
  plain = Formula.estimate

  def picky(self, layout, target, *, partition):
    if 'embed' in repr(layout.rules):
      raise LayoutError('embed does not fit.')
    return plain(self, layout, target, partition=partition)

  monkeypatch.setattr(Formula, 'estimate', picky)
  result = run()
  assert (
    any(one.error == 'embed does not fit.' for one in result.estimates) and result.best.error is None
  )


def test_a_layout_that_cannot_be_partitioned_keeps_its_estimate(monkeypatch):
  """It is kept in the cache as well."""
  plain = Formula.estimate

  def estimate(self, layout, target, *, partition):
    if partition and zlib.crc32(repr(layout).encode()) % 3:
      raise LayoutError('this cannot be partitioned.')
    return plain(self, layout, target, partition=False)

  monkeypatch.setattr(Formula, 'estimate', estimate)
  monkeypatch.setattr(trials, 'can_partition', lambda platform: False)
  right = run(top=0, candidates=40)
  monkeypatch.setattr(trials, 'can_partition', lambda platform: True)
  assert any(one.error for one in run(top=0, candidates=40).estimates)
  monkeypatch.setattr(trials, 'can_partition', lambda platform: False)
  assert same(run(top=0, candidates=40), right)


# -- as text


def test_as_text(tmp_path):
  result = run()
  text = str(result)
  title = f'cpu:8: best of {len(result.estimates)} candidates within 16 GiB per device.'
  assert text.splitlines()[0] == title and 120 <= len(result.estimates) < 160
  assert 'Effect of each rule (estimated):\n  without (' in text
  assert 'Layouts, best first' in text and 'Time against memory' in text
  result.to_toml(tmp_path / 'layout.toml')
  assert (
    Layout.from_toml((tmp_path / 'layout.toml').read_text(), mesh=result.layout.mesh) == result.layout
  )
  record = json.loads(result.to_json())
  assert record['best'] == result.best.name and len(record['estimates']) == len(result.estimates)
  text = result.to_html(tmp_path / 'page.html')
  assert text == result.to_html() and html.escape(text) in result._repr_html_()
  page = (tmp_path / 'page.html').read_text()
  assert 'Search for cpu:8' in page and 'Effect of each rule' in page and 'class="grid"' in page
  assert 'class="limit"' not in page  # the budget is far from all layouts
  result.memory = max(one.memory.peak for one in result.estimates if one.memory)
  result.to_html(tmp_path / 'page.html')
  assert 'class="limit"' in (tmp_path / 'page.html').read_text()


# -- interruption and the cache


def test_an_interrupted_search_keeps_the_best(monkeypatch):
  whole = run(fresh=True)
  monkeypatch.setattr(Formula, 'calls', 0)
  monkeypatch.setattr(Formula, 'interrupt_at', 40)
  part = run(fresh=True)
  assert (
    39 <= len(part.estimates) < 50 and len(part.check.layouts) == 2
  )  # those without a rule come last
  assert part.notes == [
    'Interrupted after 39 candidates, 2 of them compiled. Repeat the call to continue.'
  ]
  monkeypatch.setattr(Formula, 'calls', 0)
  monkeypatch.setattr(Formula, 'interrupt_at', None)
  assert same(whole, run())
  assert Formula.calls < len(whole.estimates) + len(whole.effects) - 30


def test_an_interruption_of_the_compilation(monkeypatch):
  calls = []

  def slow(*arguments, **options):
    calls.append(1)
    if len(calls) == 3:
      raise KeyboardInterrupt
    return compiling(*arguments, **options)

  monkeypatch.setattr(trials, 'compare', slow)
  result = run(jobs=1)
  assert len(result.outcomes) == 2 and result.best.source == 'compiled:cpu'
  assert result.notes == [
    f'Interrupted after {len(result.estimates)} candidates, 2 of them compiled. Repeat the call to continue.'
  ]


def test_an_interruption_before_the_first_estimate(monkeypatch):
  monkeypatch.setattr(Formula, 'interrupt_at', 1)
  with pytest.raises(KeyboardInterrupt):
    run()


KILLED = """
import os, signal
from tests.search import search_test as t
t.trials.Estimator, t.trials.compare = t.Formula, t.compiling
plain = t.Formula.estimate
def mortal(self, layout, target, *, partition):
  if t.Formula.calls == 50:
    os.kill(os.getpid(), signal.SIGKILL)
  return plain(self, layout, target, partition=partition)
t.Formula.estimate = mortal
t.run()
"""


def test_a_killed_search_resumes_to_the_same_result(tmp_path, monkeypatch):
  ended = run_process(KILLED, check=False)
  assert ended.returncode == -signal.SIGKILL, ended.stderr
  resumed = run()
  # cached candidates are not estimated again; the effects of the winner's rules are
  assert Formula.calls <= len(resumed.estimates) - 49 + len(resumed.effects)
  monkeypatch.setattr(Formula, 'calls', 0)
  assert same(resumed, run(fresh=True)) and Formula.calls >= 120


def files(tmp_path):
  return list((tmp_path / 'cache').glob('*.search.jsonl'))


def test_a_cache_of_another_version_is_discarded(tmp_path):
  first = run()
  [file] = files(tmp_path)
  head, *lines = file.read_text().splitlines()
  file.write_text(
    '\n'.join([json.dumps(json.loads(head) | {'jaxlib': '0.4.1', 'flax-spmd': '0.0.1'}), *lines])
  )
  Formula.calls = 0
  again = run()
  assert Formula.calls >= 120 and same(first, again)
  text = 'Cached estimates of another version (jaxlib 0.4.1, flax-spmd 0.0.1) are computed again.'
  assert again.notes == [text] and run().notes == []


def test_a_truncated_or_damaged_cache(tmp_path):
  first = run()
  [file] = files(tmp_path)
  head, *lines = file.read_text().splitlines()
  lines[3] = '{"layout": "' + json.loads(lines[3])['layout'] + '", "memory": [1]}'
  file.write_text('\n'.join([head, *lines[:60]])[:-40])
  Formula.calls = 0
  assert same(first, run())
  assert 0 < Formula.calls < 120


def test_an_unwritable_cache(tmp_path, monkeypatch):
  (tmp_path / 'file').write_text('')
  monkeypatch.setenv('FLAX_SPMD_CACHE', str(tmp_path / 'file'))
  with pytest.warns(
    UserWarning, match='Estimates cannot be cached in .*Set FLAX_SPMD_CACHE to another folder'
  ):
    assert run(candidates=10).best.error is None


def test_the_time_limit():
  result = run(time_limit=1e-9, jobs=1)
  assert len(result.estimates) < 10 and len(result.outcomes) == 1


# -- without an estimator, without names, without a layout that fits


def test_without_an_estimator_everything_is_compiled(monkeypatch):
  monkeypatch.setattr(Formula, 'reason', 'jaxlib 9.9 is not known.\nFix: wait.')
  result = run()
  assert len(result.estimates) == 24 and result.effects == [] and Formula.calls == 0
  assert result.best.source == 'compiled:cpu'
  assert result.notes == [
    'No estimates (jaxlib 9.9 is not known.): every candidate is compiled, which takes seconds instead of a '
    'twentieth of a second; the search tries 24.'
  ]


def test_a_model_without_names(monkeypatch):
  monkeypatch.setattr(Formula, 'names', {'batch': (SIZES['batch'],)})
  monkeypatch.setattr(Formula, 'parameter_names', frozenset())
  plain = lambda: jax.tree.map(lambda box: box.unbox(), create(), is_leaf=spmd.is_axis_metadata)
  result = search(TrainStep(step, plain, data()), 'cpu:8', candidates=60, top=0)
  assert result.notes == [
    'The state has no names: the search tries fsdp, and path rules for 2 kinds of arrays.'
  ]
  tables = [repr(one.layout.rules) for one in result.estimates]
  assert any('fsdp(' in table for table in tables) and any('(^|/)down$' in table for table in tables)


def test_nothing_fits():
  with pytest.raises(InfeasibleError) as caught:
    run(memory='1MiB', fresh=True)
  lines = str(caught.value).splitlines()
  smallest = min(one.memory.peak for one in run(top=0).estimates)  # compiled as the last resort
  assert lines[0] == 'None of the 120 layouts fits into 1 MiB per device on cpu:8.'
  assert lines[1].startswith('The smallest needs ')
  assert f'({smallest - 2**20} bytes) over the budget (compiled:cpu): ' in lines[1]
  assert lines[2] == (
    "Fix: use more devices, a smaller batch, host='^opt_state/', or remat (as an argument of the step, passed in choices)."
  )


def test_impossible_searches():
  with pytest.raises(SearchError) as caught:
    run(mesh={'data': 8}, pin={'batch': 'data', 'mlp': 'data'}, forbid={'embed': 'data'}, batch_only=())
  assert 'both occur on one array' in str(caught.value)
  with pytest.raises(SearchError) as caught:
    run('h100:16', pin={'mlp': 'model'}, mesh={'model': 16}, tensor=2, forbid=['batch'], candidates=0)
  assert (
    str(caught.value)
    == dedent("""
    The search is empty: candidates=0, top=3.
    Fix: pass at least one candidate, a top of 0 or more, and a value for every choice.""").strip()
  )
  with pytest.raises(SearchError, match=r"choices\['remat'\] has no values"):
    run(choices={'remat': ()})
  for tensor, limit in ((0, None), (-1, 2.5), (None, -1)):
    with pytest.raises(SearchError) as caught:
      run(tensor=tensor, time_limit=limit)
    assert str(caught.value) == (
      f'No layout can meet tensor={tensor}, time_limit={limit}.\n'
      'Fix: pass 1 or more as tensor (1: no tensor parallelism), 0 or more as time_limit, or omit them.'
    )


def test_layouts_that_are_estimated_and_not_compiled(monkeypatch):
  def failing(train_step, layouts, target, **options):
    failed = [Outcome.failed(name, layout, 'no such torus.\nmore') for name, layout in layouts.items()]
    return Comparison(spmd.explore.parse_target(target), failed)

  monkeypatch.setattr(trials, 'compare', failing)
  with pytest.raises(InfeasibleError) as caught:
    run()
  assert str(caught.value) == (
    'None of the 122 layouts can be used.\nno such torus.\n'
    'Fix: correct the cause of this error, which is that of the first layout.'
  )


def test_choices_that_cannot_be_compared():
  with pytest.raises(SearchError) as caught:
    run(choices={'remat': (['none'], 'full', {'keep': 1})})
  assert (
    str(caught.value)
    == dedent("""
    A search compares choices, so they have to be hashable, and these are not:
      remat: ['none'], of type list
      remat: {'keep': 1}, of type dict
    Fix: pass tuples in the place of lists, or texts that the step looks up, such as choices={'policy': ('dots', 'none')}.""").strip()
  )


def test_constraints_of_other_types():
  with pytest.raises(SearchError) as caught:
    run(
      choices={'remat': True, 'keep': None, 'policy': 'dots'},
      mesh={'data': 'all'},
      pin={'batch': 3, 'mlp': ('model', None), 'embed': None},
      forbid={'embed': 2.5, 'mlp': ('model',)},
      batch_only=[7],
    )
  assert (
    str(caught.value)
    == dedent("""
    search does not take choices['remat']=True, choices['keep']=None, choices['policy']='dots', mesh['data']='all', batch_only=[7], pin['batch']=3, pin['mlp']=('model', None), forbid['embed']=2.5.
    Fix: write choices={'remat': (True, False)}, mesh={'data': 8}, pin={'batch': 'data', 'embed': ('data', 'fsdp')}, forbid=['length'], batch_only='data'.""").strip()
  )
  with pytest.raises(SearchError, match='search does not take batch_only=<list_iterator'):
    run(batch_only=iter(['data']))  # would be read once and then be empty


@pytest.mark.parametrize(('size', 'most'), [(12, 4), (7, 1), (4, 4), (24, 8), (512, 8)])
def test_a_batch_that_the_devices_cannot_share(size, most, monkeypatch):
  monkeypatch.setattr(Formula, 'names', {**Formula.names, 'batch': (size,)})
  note = f"8 devices cannot share the batch equally, {most} at most: dimensions named 'batch' have {size} elements."
  assert (note in run(top=0, candidates=20).notes) == (most < 8)


def test_an_unknown_target():
  with pytest.raises(TargetDeviceError, match="There is no target 'v9:8'"):
    run('v9:8')


def test_progress(capsys):
  run(candidates=10, show=True)
  assert 'estimating' in capsys.readouterr().err


def test_a_function_in_place_of_a_train_step():
  with pytest.raises(TypeError) as caught:
    search(step, 'cpu:8')
  assert (
    str(caught.value)
    == dedent("""\
    The first argument of search is of type function, not a TrainStep.
    Fix: write search(TrainStep(step, create, batch), ...), with TrainStep from flax_spmd.explore; or pass a function that returns one for a layout, lambda layout: TrainStep(...).""")
  )
