"""Pipelines in a search: their estimates, compiled outcomes and texts."""

import functools
import json
from textwrap import dedent

import jax
import jax.numpy as jnp
import pytest

import flax_spmd as spmd
from flax_spmd import pipeline
from flax_spmd._src.compare.costs import Cost
from flax_spmd._src.compare.outcome import Memory
from flax_spmd._src.search import trials
from flax_spmd._src.search.pipelines import AXIS, DOUBT, rank_cost, rank_memory
from flax_spmd.errors import PipelineError, SearchError
from flax_spmd.explore import Pipeline, TrainStep, compare, search
from flax_spmd.pipeline import Automatic, GPipe, OneFOneB, Schedule, ZeroBubbleH1
from tests.compare.pipelines_test import BATCH, OPTIMIZER, TARGET, Model, create, step

UNMARKED = {'marked': (False,)}
NAME = 'OneFOneB(ranks=4): stage=4,'


@pytest.fixture(scope='module', autouse=True)
def cache(tmp_path_factory):
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('FLAX_SPMD_CACHE', str(tmp_path_factory.mktemp('cache')))
    yield


def run(*pipelines, target=TARGET, **options):
  given = {
    'candidates': 12,
    'top': 1,
    'choices': UNMARKED,
    'mesh': {'data': -1},
    'forbid': ['mlp'],
  } | options
  return search(TrainStep(step, create, BATCH), target, pipelines=pipelines, **given)


@pytest.fixture(scope='module')
def result(cache):
  return run(OneFOneB(4), OneFOneB(4))  # a schedule is tried once


def pipelines_of(outcomes):
  return [one for one in outcomes if one.layout.mesh.axis_names[0] == AXIS]


# -- the result


def test_a_pipeline_is_compiled_beside_the_others(result):
  [pipelined] = pipelines_of(result.outcomes)
  assert pipelined.name.startswith(NAME) and pipelined.source == 'compiled:cpu'
  assert pipelined.pipeline.low.title == 'OneFOneB(ranks=4) with 4 microbatches'
  row = Pipeline(pipelined.layout, OneFOneB(4), stages=4)
  train_step = TrainStep(functools.partial(step, marked=False), create, BATCH)
  own = compare(train_step, [row], TARGET)['layout 0']
  assert (own.memory, own.cost) == (pipelined.memory, pipelined.cost)


def test_pipelines_and_others_are_ranked_together(result):
  assert len(result.outcomes) > len(pipelines_of(result.outcomes))
  times = [one.cost.expected for one in result.outcomes]
  assert times == sorted(times) and not any(one.error for one in result.outcomes)


@pytest.mark.parametrize(('rows', 'is_noted'), [(24, False), (12, True)])
def test_the_devices_of_a_rank_share_a_microbatch(rows, is_noted):
  """All eight devices could share neither; two share six rows, and not three."""
  batch = jax.ShapeDtypeStruct((rows, *BATCH.shape[1:]), BATCH.dtype)
  limits = {'candidates': 12, 'top': 1, 'choices': UNMARKED, 'mesh': {'data': -1}, 'forbid': ['mlp']}
  result = search(TrainStep(step, create, batch), TARGET, pipelines=[OneFOneB(4)], **limits)
  assert result.schedule == OneFOneB(4)
  note = (
    "2 devices cannot share the batch equally, 1 at most: dimensions named 'batch' have 3, 12 elements."
  )
  assert [one for one in result.notes if 'cannot share' in one] == [note] * is_noted


def test_a_winner_that_is_a_pipeline(result):
  assert result.schedule == OneFOneB(4) and result.best is pipelines_of(result.outcomes)[0]
  assert [effect.rule for effect in result.effects] == [*result.layout.rules]
  assert all(effect.time > 0 or effect.memory > 0 for effect in result.effects)


def test_the_winner_can_be_run(result):
  layout = spmd.Layout.from_toml(result.toml)
  schedule = result.schedule
  jitted = layout.pipeline_jit(
    functools.partial(step, marked=False), schedule=schedule, stages=schedule.stages
  )
  batch = jax.ShapeDtypeStruct(
    BATCH.shape, BATCH.dtype, sharding=layout.sharding(BATCH, ('batch', None))
  )
  assert jitted.lower(layout.abstract(create), batch).schedule == schedule


def test_as_text(result, tmp_path):
  line = '# pipeline: layout.pipeline_jit(step, schedule=OneFOneB(ranks=4), stages=4)'
  assert line in result.toml.splitlines() and line in str(result).splitlines()
  assert any(text.startswith('rank 3 (stage 3): ') for text in str(result).splitlines())
  assert json.loads(result.to_json())['schedule'] == 'OneFOneB(ranks=4)'
  result.to_html(tmp_path / 'page.html')
  assert line in (tmp_path / 'page.html').read_text()


def test_equal_searches_have_equal_results(result, monkeypatch):
  monkeypatch.setattr(trials.Estimator, 'estimate', None)  # every estimate is cached
  assert run(OneFOneB(4)).record()['estimates'] == result.record()['estimates']


def test_an_interruption_of_the_compilation_of_pipelines(result, monkeypatch):
  def interrupted(train_step, rows, *arguments, **options):
    if any(isinstance(row, Pipeline) for row in rows.values()):
      raise KeyboardInterrupt
    return compare(train_step, rows, *arguments, **options)

  monkeypatch.setattr(trials, 'compare', interrupted)
  part = run(OneFOneB(4))
  assert part.schedule is None and part.best.name == result.outcomes[1].name
  assert part.notes[0].startswith(f'Interrupted after {len(result.estimates)} candidates')


@pytest.mark.exhaustive
@pytest.mark.parametrize(
  'costs', [{'fwd': (1, 1, 1, 2), 'bwd': 1, 'wgrad': 1}, lambda task: 1 + task.stage]
)
def test_an_automatic_schedule(cache, costs):
  """The layout's file has the schedule with its costs, if these are numbers."""
  schedule = Automatic(4, costs)
  found = run(schedule, ZeroBubbleH1(4))
  [automatic, h1] = sorted(pipelines_of(found.outcomes), key=lambda one: one.name)
  assert automatic.name.startswith('Automatic(ranks=4): stage=4') and not automatic.error
  assert automatic.pipeline.low.makespan > 0 and automatic.memory.peak == h1.memory.peak
  json.dumps(found.record())
  if found.schedule == schedule and not callable(costs):
    [line] = [line for line in found.toml.splitlines() if line.startswith('# pipeline: ')]
    text = line.removeprefix('# pipeline: layout.pipeline_jit(step, schedule=').removesuffix(
      ', stages=4)'
    )
    assert eval(text, vars(pipeline)) == schedule


# -- estimates


def test_an_estimate_is_near_the_compiled_outcome():
  """For CPUs, estimates gather weights before the loop, which a pipeline does not have; so none are gathered here."""
  result = run(OneFOneB(4), forbid=['mlp', 'batch'], pin={'embed': 'data'})
  [pipelined] = pipelines_of(result.outcomes)
  [rough] = [one for one in result.estimates if one.name == pipelined.name]
  assert rough.source == 'estimated' and rough.doubts[-1] == DOUBT
  assert rough.memory[:4] == pytest.approx(pipelined.memory[:4], abs=8)
  assert rough.memory.peak == pytest.approx(pipelined.memory.peak, rel=0.5)
  assert rough.cost.low < pipelined.cost.high


def test_a_schedule_that_keeps_more_activations_needs_more_memory():
  result = run(OneFOneB(4), GPipe(4), top=0, choices=UNMARKED | {'microbatches': (8,)})
  pipelined = {one.name: one for one in pipelines_of(result.estimates)}
  pairs = [(one, pipelined.get(name.replace('OneFOneB', 'GPipe'))) for name, one in pipelined.items()]
  pairs = [(one, other) for one, other in pairs if other is not None and one is not other]
  assert pairs and all(one.memory.peak < other.memory.peak for one, other in pairs)
  assert all(one.source == 'estimated' for one in result.outcomes) and pipelines_of(result.outcomes)


def test_memory_of_a_rank():
  plain = Memory(400, 800, 8, 16, 1200, 2424, host=40)
  memory = rank_memory(plain, OneFOneB(4).simulate(8))
  assert memory == (
    100,
    200,
    2,
    16,
    100 + 800,
    1218,
    10,
  )  # gradients, and activations of four microbatches
  assert rank_memory(plain, GPipe(4).simulate(8)).temporaries == 100 + 1600


def test_time_of_a_rank():
  plain = Cost(4.0, 2.0, {('data',): 1.0}, 4.0, 7.0, 8.0, 'compute')
  assert rank_cost(plain, 4, 0.5) == (1.0, 0.5, {('data',): 0.25}, 2.0, 3.5, 4.0, 'compute')


def test_choices_that_a_schedule_does_not_support():
  """The other choices are still tried."""
  written = Schedule.from_text(OneFOneB(2).to_text(4))
  result = run(written, top=0, choices=UNMARKED | {'microbatches': (8, 4)})
  pipelined = pipelines_of(result.estimates)
  wrong = [one for one in pipelined if 'microbatches=8' in one.name]
  assert wrong and all(one.error for one in wrong)
  assert any(one.error is None for one in pipelined)


def test_models_that_end_their_stages():
  result = run(OneFOneB(4), top=0, choices={})
  assert pipelines_of(result.estimates)
  with pytest.raises(PipelineError) as caught:
    run(ZeroBubbleH1(2), choices={})
  lines = str(caught.value).splitlines()
  assert lines[0] == 'The model has 4 stage ends, and ZeroBubbleH1(ranks=2) has 2 stages.'
  assert lines[-1] == (
    'Fix: end 1 stage by stage_end (between stages) or 2 (after each), or use a schedule of 4 or 5 stages.'
  )


# -- errors


def test_ranks_that_cannot_share_the_devices():
  with pytest.raises(SearchError) as caught:
    run(OneFOneB(3))
  assert str(caught.value) == dedent("""\
    pipelines: OneFOneB(ranks=3) cannot share the 8 devices of cpu:8 equally.
    Fix: use one of 2, 4, 8 ranks.""")


def test_text_in_place_of_a_schedule():
  with pytest.raises(SearchError) as caught:
    run('1f1b')
  assert str(caught.value) == dedent("""\
    pipelines: '1f1b' is not a schedule.
    Fix: pass schedules, such as OneFOneB(ranks=4).""")


def test_a_step_without_a_loop():
  def whole(state, x):
    loss = lambda p: jnp.mean(jnp.square(jnp.asarray(Model(False).apply({'params': p}, x))))
    updates, _ = OPTIMIZER.update(jax.grad(loss)(state['params']), state['opt_state'])
    return updates

  with pytest.raises(PipelineError) as caught:
    search(TrainStep(whole, create, BATCH, donate=False), TARGET, pipelines=[OneFOneB(4)])
  lines = str(caught.value).splitlines()
  assert lines[0] == 'Gradients are taken outside a microbatch loop.'
  assert lines[-1] == (
    'Fix: take them inside flax_spmd.pipeline.accumulate, with microbatches=1 to keep the batch whole.'
  )


def test_a_step_without_gradients():
  def forward(state, x):
    return Model().apply({'params': state['params']}, x)

  with pytest.raises(PipelineError) as caught:
    search(TrainStep(forward, create, BATCH, donate=False), TARGET, pipelines=[OneFOneB(4)])
  assert str(caught.value) == dedent("""\
    The step has no microbatch loop, so there is no schedule to compare.
    Fix: compute its gradients in flax_spmd.pipeline.accumulate.""")


def test_the_reserved_axis():
  with pytest.raises(SearchError) as caught:
    run(OneFOneB(4), mesh=None, pin={'batch': 'stage'})
  assert str(caught.value) == dedent("""\
    The mesh axis 'stage' is reserved for the stages of pipelines.
    Fix: rename this axis in mesh, pin, forbid or batch_only.""")
