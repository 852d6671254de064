"""Pipelines in a comparison: memory, transfers and bubbles of their ranks."""

import functools
import json
import sys
from html.parser import HTMLParser
from textwrap import dedent

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import flax_spmd as spmd
from flax_spmd._src.compare import compilation, costs, hardware, pipeline_outcome
from flax_spmd._src.compare.lowering import LoweredStep
from flax_spmd._src.text import size_text
from flax_spmd.errors import PipelineError, TargetDeviceError
from flax_spmd.explore import Pipeline, TrainStep, compare
from flax_spmd.pipeline import Automatic, GPipe, Mean, OneFOneB, ZeroBubbleH1, accumulate, stage_end

WIDTH, ROWS, MICROBATCHES, TARGET = 32, 64, 4, 'cpu:8'
RULES = (('batch', 'data'), ('embed', 'data'))


class Block(nn.Module):
  @nn.compact
  def __call__(self, x):
    def param(name, *names):
      init = spmd.with_logical_partitioning(nn.initializers.normal(), names)
      return spmd.unbox(self.param(name, init, (WIDTH, WIDTH)))

    h = spmd.with_logical_constraint(nn.relu(x @ param('up', 'embed', 'mlp')), ('batch', 'mlp'))
    return x + h @ param('down', 'mlp', 'embed')


class Model(nn.Module):
  marked: bool = True

  @nn.compact
  def __call__(self, x):
    for number in range(4):
      x = Block(name=f'block_{number}')(x)
      x = stage_end(x) if self.marked else x
    return x


OPTIMIZER = optax.adam(1e-3)


def create():
  params = Model().init(jax.random.key(0), jnp.ones((1, WIDTH)))['params']
  return {'params': params, 'opt_state': OPTIMIZER.init(params)}


def step(state, x, microbatches=MICROBATCHES, marked=True, schedule=None):
  def of_microbatch(x):
    return jax.value_and_grad(lambda p: jnp.mean(Model(marked).apply({'params': p}, x) ** 2))(
      state['params']
    )

  loss, grads = accumulate(of_microbatch, x, schedule, Mean, microbatches=microbatches)
  updates, opt_state = OPTIMIZER.update(grads, state['opt_state'], state['params'])
  return {'params': optax.apply_updates(state['params'], updates), 'opt_state': opt_state}, loss


BATCH = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
TRAIN_STEP = TrainStep(step, create, BATCH)


def staged(**axes):
  return spmd.Layout(spmd.abstract_mesh(axes or {'stage': 4, 'data': 2}), RULES)


PLAIN = spmd.Layout(spmd.abstract_mesh({'data': 8}), RULES)


@pytest.fixture(scope='module', autouse=True)
def cache(tmp_path_factory):
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('FLAX_SPMD_CACHE', str(tmp_path_factory.mktemp('cache')))
    yield


@pytest.fixture(scope='module')
def comparison(cache):
  rows = {
    'one program': PLAIN,
    '1F1B': Pipeline(staged(), OneFOneB(4)),
    'ZB-H1': Pipeline(staged(), ZeroBubbleH1(4)),
    'cut for us': Pipeline(
      staged(stage=2, data=4),
      GPipe(2),
      stages=2,
      step=functools.partial(step, microbatches=8, marked=False),
    ),
    'wrong': Pipeline(staged(), OneFOneB(2)),
  }
  return compare(TRAIN_STEP, rows, TARGET)


def concrete(schedule):
  """The same pipeline lowered for emulated devices."""
  layout = spmd.Layout({'stage': 4, 'data': 2}, RULES)
  batch = jax.ShapeDtypeStruct(
    BATCH.shape, BATCH.dtype, sharding=layout.sharding(BATCH, ('batch', None))
  )
  jitted = layout.pipeline_jit(step, schedule=schedule, donate_argnums=0)
  return jitted.lower(layout.abstract(create), batch)


@pytest.mark.parametrize(('name', 'schedule'), [('1F1B', OneFOneB(4)), ('ZB-H1', ZeroBubbleH1(4))])
def test_memory_matches_a_pipeline_compiled_to_run(comparison, name, schedule):
  """`compare` compiles with fewer optimizations, so temporaries can differ a little."""
  lowered = concrete(schedule)
  plan, compiled = lowered.offline('cpu'), lowered.compile()
  for unit, executable in compiled.executables.items():
    chosen = [sharding.spec for sharding in executable.compiled.output_shardings]
    assert plan.programs[unit].specs == chosen, unit.name
    arguments = enumerate(jax.tree.leaves(executable.compiled.args_info))
    assert plan.programs[unit].donated == tuple(number for number, one in arguments if one.donated)
  memories = [rank.memory for rank in comparison[name].pipeline.ranks]
  assert [one.peak for one in memories] == pytest.approx(compiled.memory, rel=0.05)
  weights = 2 * WIDTH * WIDTH * 4 // 2  # a block's, over two devices
  assert [one.parameters for one in memories] == 4 * [weights]
  assert [one.optimizer for one in memories] == pytest.approx(4 * [2 * weights], abs=8)
  assert comparison[name].memory == max(memories, key=lambda one: one.peak)


def test_the_bubble_matches_the_schedule(comparison, monkeypatch):
  """With known costs: 1 ms forward, 2 ms backward, nothing outside the loop, and instant transfers."""
  known = {'fwd': 1e-3, 'bwd': 2e-3}

  def program_costs(lowered, results, target):
    seconds = {program: known.get(program.name.split('_')[0], 0.0) for program in results}
    return {program: costs.Cost(one, 0.0, {}, one, one, one, '') for program, one in seconds.items()}

  monkeypatch.setattr(pipeline_outcome, 'program_costs', program_costs)
  monkeypatch.setattr(pipeline_outcome, 'transfers', lambda lowered, target: [])
  row = compare(TRAIN_STEP, {'1F1B': Pipeline(staged(), OneFOneB(4))}, TARGET)['1F1B']

  def cost(task):
    return 0.0 if (task.kind, task.stage) == ('fwd', 3) else 1e3 * known[task.kind]

  simulated = OneFOneB(4).simulate(MICROBATCHES, cost)
  assert row.pipeline.bubble == pytest.approx((simulated.bubble, simulated.bubble))
  assert row.cost.low == row.cost.high == pytest.approx(simulated.makespan / 1e3)
  assert [rank.bubble for rank in row.pipeline.ranks] == pytest.approx(simulated.bubbles)


def test_transfers_between_ranks(comparison):
  """Per microbatch, an activation to the next rank and its gradient back; each of two devices sends half."""
  activation = ROWS // MICROBATCHES * WIDTH * 4 // 2
  ranks = comparison['1F1B'].pipeline.ranks
  assert [rank.sent // activation for rank in ranks] == [4, 8, 8, 4]
  wires = comparison['1F1B'].counts.by_axis()
  assert wires['stage',] in [rank.sent for rank in ranks]


def test_split_backwards_have_smaller_bubbles(comparison):
  assert comparison['ZB-H1'].pipeline.bubble[0] < comparison['1F1B'].pipeline.bubble[0]
  for name in ('1F1B', 'ZB-H1', 'cut for us'):
    pipeline, cost = comparison[name].pipeline, comparison[name].cost
    assert pipeline.low.makespan / 1e3 < cost.low < cost.high


def test_flops_match_a_stage(comparison):
  whole = 3 * 2 * 2 * ROWS * WIDTH * WIDTH * 4
  assert comparison['1F1B'].counts.flops == pytest.approx(whole / 8, rel=0.2)
  assert comparison['one program'].counts.flops == pytest.approx(whole / 8, rel=0.1)
  assert comparison['cut for us'].counts.flops == pytest.approx(whole / 8, rel=0.2)
  assert [rank.stages for rank in comparison['cut for us'].pipeline.ranks] == [(0,), (1,)]
  assert comparison['cut for us'].pipeline.low.title == 'GPipe(ranks=2) with 8 microbatches'


def test_a_pipeline_that_cannot_be_cut_is_a_failed_row(comparison):
  assert comparison['wrong'].error == dedent("""\
    OneFOneB(ranks=2) runs on 2 ranks, but the mesh axis 'stage' has size 4.
    Fix: use a schedule of 4 ranks, or a mesh whose axis has size 2.""")
  assert not comparison['wrong'].fits


def test_the_table(comparison):
  lines = str(comparison).splitlines()
  assert any(line.startswith('  OneFOneB(ranks=4) with 4 microbatches: bubble ') for line in lines)
  ranks = [line for line in lines if line.startswith('  rank 0 (stage 0): ')]
  assert len(ranks) == 3 and all('; idle ' in line and '; sends ' in line for line in ranks)
  assert comparison.best.name in ('one program', '1F1B', 'ZB-H1', 'cut for us')


def test_json_has_the_ranks(comparison):
  rows = {one['name']: one for one in json.loads(comparison.to_json())['layouts']}
  assert rows['one program']['pipeline'] is None
  ranks = rows['ZB-H1']['pipeline']['ranks']
  assert [one['memory']['peak'] for one in ranks] == [
    one.memory.peak for one in comparison['ZB-H1'].pipeline.ranks
  ]
  assert rows['1F1B']['pipeline']['schedule'] == 'OneFOneB(ranks=4) with 4 microbatches'


def test_the_page_shows_the_ranks(comparison, tmp_path):
  comparison.to_html(tmp_path / 'report.html')
  page = Texts()
  page.feed((tmp_path / 'report.html').read_text())
  assert {'1F1B, 0', '1F1B, 3', 'cut for us, 1'} <= set(page.texts)
  assert any(
    text.startswith('ZeroBubbleH1(ranks=4) with 4 microbatches: makespan') for text in page.texts
  )


class Texts(HTMLParser):
  def __init__(self):
    super().__init__()
    self.texts = []

  def handle_data(self, data):
    self.texts.append(data)


def test_a_stage_that_does_not_fit(comparison, tmp_path, monkeypatch):
  """On a chip like the CPU but with little memory; it reuses the results that were cached for the CPU."""
  key, rank = compilation.cache_key, hardware.share(hardware.parse_target(TARGET), 4)
  monkeypatch.setattr(compilation, 'cache_key', lambda program, target: key(program, rank))
  limit = sorted(one.memory.peak for one in comparison['1F1B'].pipeline.ranks)[2]
  chip = spmd.explore.chips()['cpu']._asdict() | {'memory': limit, 'source': 'mine'}
  fields = {name: value for name, value in chip.items() if value and name not in ('name', 'flops')}
  lines = [f'{name} = {json.dumps(value)}' for name, value in fields.items()]
  (tmp_path / 'mine.toml').write_text('\n'.join(['[mine]', *lines, 'flops = {bf16 = 1e12}']))
  rows = {'1F1B': Pipeline(staged(), OneFOneB(4))}
  small = compare(TRAIN_STEP, rows, 'mine:8', hardware=tmp_path / 'mine.toml')
  largest = max(small['1F1B'].pipeline.ranks, key=lambda one: one.memory.peak)
  assert not small['1F1B'].fits and largest.memory.peak > limit
  [line] = [line for line in str(small).splitlines() if ' over; idle ' in line]
  over = size_text(largest.memory.peak - limit)
  assert line.startswith(f'  rank {largest.stages[0]} (stage {largest.stages[0]}): ') and over in line


def test_the_error_names_the_program_that_is_not_compiled(tmp_path, monkeypatch):
  monkeypatch.setenv('FLAX_SPMD_CACHE', str(tmp_path))
  large = {'error': 'Used 20.00G of 15.75G hbm', 'used': 20 * 2**30}
  monkeypatch.setattr(compilation, 'run_workers', lambda job, *rest: [dict(large) for _ in job.programs])
  row = compare(TRAIN_STEP, {'1F1B': Pipeline(staged(), OneFOneB(4))}, TARGET)['1F1B']
  lines = [f'start_{rank} on rank {rank}: Used 20.00G of 15.75G hbm' for rank in range(2)]
  assert row.error.splitlines()[:2] == lines and row.memory.peak == 20 * 2**30 and not row.fits


def test_a_crash_takes_one_program_with_it(tmp_path, monkeypatch):
  """The worker is a script that crashes at the second folder."""
  code = (
    'import pathlib, sys\n'
    'for folder in sys.argv[3:]:\n'
    '  if folder.endswith("1"): raise SystemExit(3)\n'
    '  pathlib.Path(folder, "result.json").write_text("{}")\n'
  )
  (tmp_path / 'worker.py').write_text(code)
  python = tmp_path / 'python'
  python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/worker.py "$@"\n')
  python.chmod(0o755)
  monkeypatch.setattr('sys.executable', str(python))
  program = LoweredStep(b'', '', staged(), 'f32', [], [], 0, [])
  folders = [tmp_path / str(number) for number in range(3)]
  job = compilation.CompileJob([program] * 3, hardware.parse_target(TARGET))
  results = compilation.run_workers(job, None, folders)
  assert results[0] == results[2] == {'warnings': []}
  assert results[1]['error'].startswith('the compiler ended with code 3')


def test_warnings_belong_to_a_program(tmp_path):
  one, two = tmp_path / '1', tmp_path / '10'
  begin = compilation.BEGIN
  log = f'{begin}{one}\nW0 a:1] SPMD one\n{begin}{two}\nW0 a:1] SPMD two\n'
  assert compilation.warnings_in(log, one) == ['SPMD one']
  assert compilation.warnings_in(log, two) == ['SPMD two']


# -- errors


def test_a_step_without_a_microbatch_loop():
  def forward(state, x):
    return Model().apply({'params': state['params']}, x)

  with pytest.raises(PipelineError) as caught:
    compare(TrainStep(forward, create, BATCH), [Pipeline(staged(), OneFOneB(4))], TARGET)
  assert str(caught.value) == dedent("""\
    The step has no microbatch loop, so there is no schedule to compare.
    Fix: compute its gradients in flax_spmd.pipeline.accumulate.""")


def test_a_row_and_a_step_with_different_schedules():
  given = Pipeline(staged(), ZeroBubbleH1(4), step=functools.partial(step, schedule=OneFOneB(4)))
  with pytest.raises(PipelineError) as caught:
    compare(TRAIN_STEP, [given], TARGET)
  assert str(caught.value) == dedent("""\
    The row has the schedule ZeroBubbleH1(ranks=4), but the step's accumulate is given OneFOneB(ranks=4), which takes precedence.
    Fix: pass no schedule to accumulate, or give the row a step of its own.""")


def test_a_row_and_a_step_with_other_costs():
  """The texts of these schedules are equal, so the message has what differs."""
  one, other = (Automatic(4, {'fwd': 1, 'bwd': number}, split=False) for number in (1, 2))
  given = Pipeline(staged(), one, step=functools.partial(step, schedule=other))
  with pytest.raises(PipelineError) as caught:
    compare(TRAIN_STEP, [given], TARGET)
  costs = "costs={'fwd': (1, 1, 1, 1), 'bwd': (%s), 'wgrad': (0, 0, 0, 0)}"
  assert str(caught.value) == (
    f"The row has the schedule Automatic(ranks=4, split=False) with {costs % '1, 1, 1, 1'}, but the step's "
    f'accumulate is given Automatic(ranks=4, split=False) with {costs % "2, 2, 2, 2"}, which takes precedence.\n'
    'Fix: pass no schedule to accumulate, or give the row a step of its own.'
  )


def test_a_mesh_of_another_size():
  with pytest.raises(TargetDeviceError) as caught:
    compare(TRAIN_STEP, [Pipeline(staged(), OneFOneB(4))], 'h100:64')
  assert str(caught.value) == dedent("""\
    The mesh {'stage': 4, 'data': 2} has 8 devices, the target h100:64 64.
    Fix: give the layout a mesh of 64 devices.""")


# -- the devices of a rank


@pytest.mark.parametrize(
  ('whole', 'parts', 'share'),
  [
    ('h100:64', 16, 'h100:1x4'),
    ('h100:24', 2, 'h100:3x4'),
    ('v5e:4x4', 16, 'v5e:1x1'),
    ('v5p:4x4x8', 4, 'v5p:2x4x4'),
    ('v5p:2x2x4', 8, 'v5p:1x1x2'),
  ],
)
def test_a_share_of_a_target(whole, parts, share):
  assert hardware.share(hardware.parse_target(whole), parts) == hardware.parse_target(share)


def test_links_between_ranks():
  h100 = hardware.parse_target('h100:64')
  chip = h100.chip
  outer, inner = {'stage': 8, 'data': 8}, {'data': 8, 'stage': 8}
  assert costs.between(h100, outer, 'stage', 0, 1) == chip.network
  assert costs.between(h100, inner, 'stage', 6, 7) == chip.link
  v5e = hardware.parse_target('v5e:4x4')
  assert costs.between(v5e, {'stage': 4, 'data': 4}, 'stage', 0, 1) == v5e.chip.link
