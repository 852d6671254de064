"""Pipelines among what a search tries: what is estimated of them, compiled, and said."""

import functools
import json
from textwrap import dedent

import jax
import jax.numpy as jnp
import pytest

import flax_spmd as spmd
from flax_spmd._src.compare.costs import Cost
from flax_spmd._src.compare.outcome import Memory
from flax_spmd._src.search import pipelines as staging
from flax_spmd._src.search import trials
from flax_spmd.errors import PipelineError, SearchError
from flax_spmd.explore import Pipeline, compare, search
from flax_spmd.pipeline import GPipe, OneFOneB, Schedule, ZeroBubbleH1
from tests.compare.pipelines_test import BATCH, OPTIMIZER, TARGET, Model, create, step

UNMARKED = {'marked': (False,)}
NAME = 'OneFOneB(ranks=4): stage 4, '


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
  return search(step, create, BATCH, target, pipelines=pipelines, **given)


@pytest.fixture(scope='module')
def found(cache):
  return run(OneFOneB(4))


def pipelines_of(outcomes):
  return [one for one in outcomes if one.layout.mesh.axis_names[0] == staging.AXIS]


# -- what it finds


def test_a_pipeline_is_compiled_beside_the_others(found):
  [staged] = pipelines_of(found.outcomes)
  assert staged.name.startswith(NAME) and staged.source == 'compiled:cpu'
  assert staged.stages.low.title == 'OneFOneB(ranks=4) with 4 microbatches'
  row = Pipeline(staged.layout, OneFOneB(4), stages=4)
  own = compare(functools.partial(step, marked=False), create, BATCH, [row], TARGET)['layout 0']
  assert (own.memory, own.cost) == (staged.memory, staged.cost)


def test_all_are_ranked_alike(found):
  assert len(found.outcomes) > len(pipelines_of(found.outcomes))
  times = [one.cost.low * one.cost.high for one in found.outcomes]
  assert times == sorted(times) and not any(one.error for one in found.outcomes)


def test_a_winner_that_is_a_pipeline(found):
  assert found.schedule == OneFOneB(4) and found.best is pipelines_of(found.outcomes)[0]
  assert [buy.rule for buy in found.buys] == [*found.layout.rules]
  assert all(buy.time > 0 or buy.memory > 0 for buy in found.buys)


def test_the_winner_can_be_run(found):
  layout = spmd.Layout.from_toml(found.toml)
  schedule = found.schedule
  jitted = layout.pipeline_jit(
    functools.partial(step, marked=False), schedule=schedule, stages=schedule.stages
  )
  batch = jax.ShapeDtypeStruct(
    BATCH.shape, BATCH.dtype, sharding=layout.sharding(BATCH, ('batch', None))
  )
  assert jitted.lower(layout.abstract(create), batch).schedule == schedule


def test_as_text(found, tmp_path):
  line = '# a pipeline: layout.pipeline_jit(step, schedule=OneFOneB(ranks=4), stages=4)'
  assert line in found.toml.splitlines() and line in str(found).splitlines()
  assert any(text.startswith('rank 3 (stage 3): ') for text in str(found).splitlines())
  assert json.loads(found.to_json())['schedule'] == 'OneFOneB(ranks=4)'
  found.to_html(tmp_path / 'page.html')
  assert line in (tmp_path / 'page.html').read_text()


def test_the_same_question_has_the_same_answer(found, monkeypatch):
  monkeypatch.setattr(trials.Estimator, 'estimate', None)  # all of it was kept
  assert run(OneFOneB(4)).record()['estimates'] == found.record()['estimates']


def test_interrupted_while_pipelines_are_compiled(found, monkeypatch):
  def interrupted(step, create, batch, rows, *arguments, **options):
    if any(isinstance(row, Pipeline) for row in rows.values()):
      raise KeyboardInterrupt
    return compare(step, create, batch, rows, *arguments, **options)

  monkeypatch.setattr(trials, 'compare', interrupted)
  part = run(OneFOneB(4))
  assert part.schedule is None and part.best.name == found.outcomes[1].name
  assert part.notes[0].startswith(f'Interrupted: the best of {len(found.estimates)} candidates')


# -- what is estimated


def test_an_estimate_is_near_what_is_compiled(found):
  [staged] = pipelines_of(found.outcomes)
  [rough] = [one for one in found.estimates if one.name == staged.name]
  assert rough.source == 'estimated' and rough.doubts[-1] == staging._DOUBT
  assert rough.memory[:4] == pytest.approx(staged.memory[:4], abs=8)
  assert rough.memory.peak == pytest.approx(staged.memory.peak, rel=0.5)
  assert rough.cost.low < staged.cost.high


def test_estimates_alone():
  """A schedule that keeps more needs more."""
  found = run(OneFOneB(4), GPipe(4), top=0, choices=UNMARKED | {'microbatches': (8,)})
  staged = {one.name: one for one in pipelines_of(found.estimates)}
  pairs = [(one, staged.get(name.replace('OneFOneB', 'GPipe'))) for name, one in staged.items()]
  pairs = [(one, other) for one, other in pairs if other is not None and one is not other]
  assert pairs and all(one.memory.peak < other.memory.peak for one, other in pairs)
  assert all(one.source == 'estimated' for one in found.outcomes) and pipelines_of(found.outcomes)


def test_memory_of_a_rank():
  plain = Memory(400, 800, 8, 16, 1200, 2424)
  held = staging._memory(plain, OneFOneB(4).simulate(8))
  assert held == (100, 200, 2, 16, 100 + 800, 1218)  # gradients; four of four stages' activations
  assert staging._memory(plain, GPipe(4).simulate(8)).temporaries == 100 + 1600


def test_time_of_a_rank():
  plain = Cost(4.0, 2.0, {('data',): 1.0}, 4.0, 8.0, 'compute')
  assert staging._cost(plain, 4, 0.5) == (1.0, 0.5, {('data',): 0.25}, 2.0, 4.0, 'compute')


def test_choices_that_a_schedule_is_not_made_for():
  """The others are tried all the same."""
  written = Schedule.from_text(OneFOneB(2).to_text(4))
  found = run(written, top=0, choices=UNMARKED | {'microbatches': (8, 4)})
  staged = pipelines_of(found.estimates)
  wrong = [one for one in staged if 'microbatches=8' in one.name]
  assert wrong and all(one.error for one in wrong)
  assert any(one.error is None for one in staged)


def test_models_that_end_their_stages():
  found = run(OneFOneB(4), top=0, choices={})
  assert pipelines_of(found.estimates)
  with pytest.raises(PipelineError) as caught:
    run(ZeroBubbleH1(2), choices={})
  lines = str(caught.value).splitlines()
  assert lines[0] == 'The model has 4 stage ends, and ZeroBubbleH1(ranks=2) has 2 stages.'
  assert lines[-1] == (
    'Fix: end 1 stage by stage_end (between stages) or 2 (after each), or use a schedule of 4 or 5 stages.'
  )


# -- what cannot be searched


def test_ranks_that_cannot_share_the_devices():
  with pytest.raises(SearchError) as caught:
    run(OneFOneB(3))
  assert str(caught.value) == dedent("""\
    pipelines: OneFOneB(ranks=3) cannot share the 8 devices of cpu:8 equally.
    Fix: use one of 2, 4, 8 ranks.""")


def test_what_is_no_schedule():
  with pytest.raises(SearchError) as caught:
    run('1f1b')
  assert str(caught.value) == dedent("""\
    pipelines: '1f1b' is no schedule.
    Fix: pass schedules, such as OneFOneB(ranks=4).""")


def test_a_step_without_a_loop():
  def whole(state, x):
    loss = lambda p: jnp.mean(jnp.square(jnp.asarray(Model(False).apply({'params': p}, x))))
    updates, _ = OPTIMIZER.update(jax.grad(loss)(state['params']), state['opt_state'])
    return updates

  with pytest.raises(PipelineError) as caught:
    search(whole, create, BATCH, TARGET, pipelines=[OneFOneB(4)], donate=False)
  lines = str(caught.value).splitlines()
  assert lines[0] == 'Gradients are taken through stage ends outside of a microbatch loop:'
  assert lines[-1] == (
    'Fix: take them by flax_spmd.pipeline.accumulate, with microbatches=1 if the batch is to stay whole.'
  )


def test_a_step_without_gradients():
  def forward(state, x):
    return Model().apply({'params': state['params']}, x)

  with pytest.raises(PipelineError) as caught:
    search(forward, create, BATCH, TARGET, pipelines=[OneFOneB(4)], donate=False)
  assert str(caught.value) == dedent("""\
    The step has no microbatch loop, whose schedule is what a comparison of pipelines is about.
    Fix: let it take its gradients in flax_spmd.pipeline.accumulate.""")


def test_an_axis_that_is_taken():
  with pytest.raises(SearchError) as caught:
    run(OneFOneB(4), mesh=None, pin={'batch': 'stage'})
  assert str(caught.value) == dedent("""\
    The mesh axis 'stage' is the one that stages of pipelines are laid over.
    Fix: call the axis of your wishes something else.""")
