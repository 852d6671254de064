"""Bad input to pipelines: an error before anything is compiled, compared as a whole text."""

from pathlib import Path
from textwrap import dedent
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import flax_spmd as spmd
from flax_spmd._src.pipeline.cut.equations import source_line
from flax_spmd.errors import FlaxSpmdError, LayoutError, PipelineError
from flax_spmd.pipeline import (
  Add,
  Concat,
  DualPipeV,
  Interleaved1F1B,
  Max,
  Mean,
  OneFOneB,
  Schedule,
  accumulate,
  stage_end,
)

FILE = Path(__file__)
LINES = FILE.read_text().splitlines()
W = {f'w{stage}': np.eye(4, dtype=np.float32) for stage in range(4)}
X = np.ones((4, 2, 4), np.float32)  # microbatches, examples, features
FOUR = OneFOneB(4)
KEY = jax.random.key(0)
compilations = []


def _count_compilations(event, *_, **__):
  if 'backend_compile' in event:
    compilations.append(event)


jax.monitoring.register_event_duration_secs_listener(_count_compilations)


def text_of(call, kind=PipelineError):
  """The text of the error that a call raises before compiling anything."""
  before = len(compilations)
  with pytest.raises(FlaxSpmdError) as error:
    call()
  assert type(error.value) is kind
  assert len(compilations) == before
  assert str(error.value).splitlines()[-1].startswith('Fix: ')
  return str(error.value)


def at(marker):
  """`file:line` of the line of this file that ends with a marker."""
  [number] = [number for number, line in enumerate(LINES, 1) if line.endswith(f'  # {marker}')]
  return f'{FILE.name}:{number}'


def layout(*rules, mesh=None):
  return spmd.Layout(mesh or {'stage': 4, 'data': 2}, rules)


def lower(step, *args, on=None, **options):
  """Traces and cuts a step, without compiling it."""
  args = args or (W, X)
  (on or layout(('batch', 'data'))).pipeline_jit(step, **options).lower(*args)


def model(w, x):
  for stage in range(3):
    x = stage_end(jnp.tanh(x @ w[f'w{stage}']))  # end
  return jnp.tanh(x @ w['w3'])


def step_of(model, schedule=FOUR, op=Add, **options):
  """A step that accumulates the gradients of a model."""

  def loss(w, x):
    return jnp.sum(model(w, x))

  def step(w, batch):
    gradients = lambda x: jax.value_and_grad(loss)(w, x)
    return accumulate(gradients, batch, schedule, op, **options)  # loop

  return step


def refused(model):
  """The error for a model with wrong stage ends."""
  return text_of(lambda: lower(step_of(model)))


# -- stages and schedules


def test_too_few_stage_ends():
  def short(w, x):
    x = stage_end(x @ w['w0'])  # only
    return x @ w['w1']

  assert (
    refused(short)
    == dedent(f"""\
    The model has 1 stage end, and OneFOneB(ranks=4) has 4 stages.
      {at('only')}
    Fix: end 3 stages by stage_end (between stages) or 4 (after each), or use a schedule of 1 or 2 stages.""")
  )


def test_too_many_stage_ends():
  def long(w, x):
    x = stage_end(model(w, x))  # fourth
    return stage_end(x)  # fifth

  assert (
    refused(long)
    == dedent(f"""\
    The model has 5 stage ends, and OneFOneB(ranks=4) has 4 stages.
      {at('end')}, 3 times
      {at('fourth')}
      {at('fifth')}
    Fix: end 3 stages by stage_end (between stages) or 4 (after each), or use a schedule of 5 or 6 stages.""")
  )


def test_stage_ends_of_several_calls():
  def shorter(w, x):
    for stage in range(2):
      x = stage_end(x @ w[f'w{stage}'])  # of each call
    return x

  def twice(w, x):
    return shorter(w, x) * shorter(w, 2 * x)

  assert (
    refused(lambda w, x: twice(w, x) * shorter(w, 3 * x))
    == dedent(f"""\
    The model has 6 stage ends, 2 of them one after another, and OneFOneB(ranks=4) has 4 stages.
      {at('of each call')}, 6 times
    Fix: end 3 stages by stage_end (between stages) or 4 (after each), or use a schedule of 2, 3, 6 or 7 stages.""")
  )
  assert (
    text_of(lambda: lower(twice, on=layout(mesh={'stage': 6})))
    == dedent(f"""\
    The model has 4 stage ends, 2 of them one after another, and the mesh axis 'stage' has size 6.
      {at('of each call')}, 4 times
    Fix: end 5 stages by stage_end (between stages) or 6 (after each); or 11 or 12 for two stages on each rank, and so on.""")
  )


def test_a_model_called_on_values_of_its_gradients():
  def loss(w, x):
    return jnp.sum(model(w, x))

  def step(w, batch):
    def of_microbatch(x):
      ascent = jax.grad(loss)(w, x)
      return jax.grad(loss)(jax.tree.map(jnp.add, w, ascent), x)

    return accumulate(of_microbatch, batch, FOUR)

  assert (
    text_of(lambda: lower(step))
    == dedent(f"""\
    The model is called on values that depend on its gradients, and OneFOneB(ranks=4) passes through the stages forwards \
and backwards once:
      {at('end')}, 3 times
    Fix: let a first pipeline_jit return these values, and pass them to a second one, which calls the model on them.""")
  )


def test_no_stage_ends():
  assert refused(lambda w, x: x @ w['w0']) == dedent("""\
    The model has no stage ends, and OneFOneB(ranks=4) has 4 stages.
    Fix: end 3 stages by stage_end (between stages) or 4 (after each), or use a schedule of 1 stage.""")
  assert text_of(lambda: lower(lambda w, x: w)) == dedent("""\
    No stage ends in this function.
    Fix: write x = flax_spmd.pipeline.stage_end(x) in the model, between two stages.""")


def test_stage_ends_whose_results_are_dropped():
  def forgetful(w, x):
    for stage in range(4):
      x = x @ w[f'w{stage}']
      stage_end(x)  # dropped
    return x

  assert refused(forgetful) == dedent(f"""\
    The model has no stage ends, and OneFOneB(ranks=4) has 4 stages.
    Stage ends whose results are not used:
      {at('dropped')}, 4 times
    Fix: write x = stage_end(x), and use the new x.
    Fix: end 3 stages by stage_end (between stages) or 4 (after each), or use a schedule of 1 stage.""")


def test_stage_ends_of_a_function_without_a_loop():
  def short(w, x):
    return stage_end(x @ w['w0']) @ w['w1']  # without a loop

  assert (
    text_of(lambda: lower(short))
    == dedent(f"""\
    The model has 1 stage end, and the mesh axis 'stage' has size 4.
      {at('without a loop')}
    Fix: end 3 stages by stage_end (between stages) or 4 (after each); or 7 or 8 for two stages on each rank, and so on.""")
  )
  assert (
    text_of(lambda: lower(short, schedule=FOUR))
    == dedent(f"""\
    The model has 1 stage end, and this pipeline has 4 stages.
      {at('without a loop')}
    Fix: end 3 stages by stage_end (between stages) or 4 (after each), or use a schedule of 1 or 2 stages.""")
  )


def test_ranks_that_differ_from_the_mesh_axis():
  assert text_of(lambda: lower(step_of(model, OneFOneB(2)))) == dedent("""\
    OneFOneB(ranks=2) runs on 2 ranks, but the mesh axis 'stage' has size 4.
    Fix: use a schedule of 4 ranks, or a mesh whose axis has size 2.""")


def test_no_schedule():
  assert text_of(lambda: lower(step_of(model, None))) == dedent(f"""\
    The microbatch loop at {at('loop')} has no schedule.
    Fix: pass one to accumulate, such as schedule=OneFOneB(ranks=4), or to pipeline_jit.""")


def test_a_loop_over_tokens():
  def generate(w, x):
    return lax.fori_loop(0, 3, lambda _, x: model(w, x), x)  # tokens

  assert (
    text_of(lambda: lower(generate, W, X[0]))
    == dedent(f"""\
    The model is called in each pass of the loop at {at('tokens')}, and there is no schedule.
    Fix: for tokens or steps, write a Python loop around the function of one pass.
    Fix: for layers, loop over the stages in Python, with one scan for each, and end stages between the scans.
    Fix: for microbatches, use flax_spmd.pipeline.accumulate, or pass a schedule such as OneFOneB(ranks=4).""")
  )


@pytest.mark.parametrize(('thing', 'text'), [('1F1B', "'1F1B'"), (OneFOneB, 'OneFOneB'), (Mean, 'Mean')])
def test_a_schedule_of_another_type(thing, text):
  fix = (
    'Fix: pass an instance, such as schedule=OneFOneB(ranks=4); op=... sets how results are combined.'
  )
  assert (
    text_of(lambda: accumulate(jnp.sum, X, thing))
    == f'accumulate: schedule={text} is not a schedule.\n{fix}'
  )
  assert (
    text_of(lambda: layout().pipeline_jit(model, schedule=thing))
    == f'pipeline_jit: schedule={text} is not a schedule.\n{fix}'
  )


def two_ranks(written):
  def half(w, x):
    return stage_end(x @ w['w0']) @ w['w1']

  step = step_of(half, Schedule.from_text(dedent(written)))
  return text_of(lambda: lower(step, W, X[:2], on=layout(mesh={'stage': 2, 'data': 4})))


def test_a_schedule_that_deadlocks():
  written = """\
    rank 0: fwd_0__0 bwd_0__0 fwd_0__1 bwd_0__1
    rank 1: fwd_1__0 fwd_1__1 bwd_1__0 bwd_1__1"""
  assert two_ranks(written) == dedent("""\
    TextSchedule(ranks=2) with 2 microbatches is not a legal schedule.
    It deadlocks. Blocked ranks:
    rank 0, task 1: bwd_0__0 waits for bwd_1__0 of rank 1:
      rank 0: fwd_0__0 bwd_0__0 fwd_0__1 bwd_0__1
                       ^^^^^^^^
    rank 1, task 1: fwd_1__1 waits for fwd_0__1 of rank 0:
      rank 1: fwd_1__0 fwd_1__1 bwd_1__0 bwd_1__1
                       ^^^^^^^^
    Fix: on rank 1, put bwd_1__0 before fwd_1__1.""")


def test_a_schedule_with_missing_and_duplicate_tasks():
  written = """\
    rank 0: fwd_0__0 bwd_0__0 fwd_0__1
    rank 1: fwd_1__0 bwd_1__0 fwd_1__1 bwd_1__0 bwd_1__1"""
  assert two_ranks(written) == dedent("""\
    TextSchedule(ranks=2) with 2 microbatches is not a legal schedule.
    rank 1, task 3: bwd_1__0 is a duplicate of task 1.
      rank 1: … bwd_1__0 fwd_1__1 bwd_1__0 bwd_1__1
                                  ^^^^^^^^
    rank 0 is missing bwd_0__1.
    Fix: list every task once.
    Fix: run fwd and bwd of every stage once for each of the 2 microbatches.""")


def test_a_schedule_for_another_number_of_microbatches():
  written = """\
    rank 0: fwd_0__0 bwd_0__0
    rank 1: fwd_1__0 bwd_1__0"""
  assert two_ranks(written) == dedent("""\
    TextSchedule(ranks=2): the text has 1 microbatch, not 2.
    Fix: use 1 microbatch.""")


# -- meshes and rules


def test_a_mesh_without_the_axis():
  assert (
    text_of(lambda: layout(mesh={'stages': 4, 'data': 2}).pipeline_jit(model))
    == dedent("""\
    The mesh {'stages': 4, 'data': 2} has no axis 'stage'. Did you mean 'stages'?
    Fix: make a mesh with an axis for the stages, such as Layout({'stage': 4, ...}, rules), or pass the name of that axis as axis=.""")
  )
  assert text_of(lambda: layout().pipeline_jit(model, axis='0')).startswith(
    "The mesh {'stage': 4, 'data': 2} has no axis '0'.\n"
  )


def test_an_abstract_mesh():
  mesh = spmd.abstract_mesh({'stage': 4, 'data': 2})
  step = layout(mesh=mesh).pipeline_jit(model)
  assert text_of(lambda: step.compile(W, X)) == dedent("""\
    The mesh {'stage': 4, 'data': 2} is abstract: there are no devices to run stages on.
    Fix: use a layout over a concrete mesh.""")


def test_rules_that_use_the_stage_axis():
  rules = (
    ('embed', 'stage'),
    ('mlp', ('data', 'stage')),
    ('stage', 'data'),  # a logical name, not the mesh axis
    ('kernel$', PartitionSpec(None, 'stage')),
    ('^opt_state/', spmd.Rules(('embed', ('stage',)), ('mlp', 'data'))),
    ('@weights', PartitionSpec('stage')),
    spmd.fsdp(('data', 'stage')),
  )
  assert text_of(lambda: layout(*rules).pipeline_jit(model)) == dedent(f"""\
    Rules shard dimensions over 'stage', the axis of the stages, which has size 1 within a stage:
      rule 0 ('embed', 'stage')
      rule 1 ('mlp', ('data', 'stage'))
      rule 3 ('kernel$', {PartitionSpec(None, 'stage')})
      rule 4.0 ('embed', ('stage',))
      rule 5 ('@weights', {PartitionSpec('stage')})
      rule 6 fsdp(('data', 'stage'))
    Fix: shard them over other axes; the stage of an array follows from its use.""")


def over_the_axis(mesh):
  """Ways to shard an array's first dimension over the stage axis."""
  return [
    PartitionSpec('stage'),
    NamedSharding(mesh, PartitionSpec('stage')),
    spmd.fsdp('stage', min_size=1),
    spmd.Rules(('w', PartitionSpec(('stage',)))),
    lambda leaf: PartitionSpec('stage') if leaf.shape else None,
  ]


@pytest.mark.parametrize('way', range(5))
def test_shardings_that_use_the_stage_axis(way):
  on = layout(('batch', 'data'))
  placement = over_the_axis(on.mesh)[way]
  params = {'w0': W['w0'], 'w1': W['w1']}
  fix = 'Fix: shard them over other axes; the stage of an array follows from its use.'
  inputs = text_of(lambda: lower(lambda w, x: w, params, X, on=on, in_rules=(placement, None)))
  outputs = text_of(lambda: lower(lambda w, x: w, params, X, on=on, out_rules=placement))
  for text, noun, names in ((inputs, 'Arguments', ('0/w0', '0/w1')), (outputs, 'Results', ('w0', 'w1'))):
    first, *lines, last = text.splitlines()
    assert (
      first
      == f"{noun} are sharded over 'stage', the axis of the stages, which has size 1 within a stage:"
    )
    assert [line.split(': ')[0].strip() for line in lines] == list(names)
    assert all("'stage'" in line for line in lines) and last == fix


def test_shardings_on_another_mesh():
  sharding = SingleDeviceSharding(jax.devices()[0])
  assert text_of(lambda: lower(model, in_rules=(None, sharding))) == dedent(f"""\
    Arguments are given shardings that are not on the mesh {{'stage': 4, 'data': 2}}:
      1: {sharding}
    Fix: give a PartitionSpec, or a NamedSharding on a mesh with the same axes.""")


def test_names_of_another_rank_than_the_argument():
  names = ('batch', None, None, None)
  assert text_of(lambda: lower(model, in_rules=(None, names)), LayoutError) == dedent("""\
    argument x: 4 names ('batch', None, None, None) for an array of rank 3, shape (4, 2, 4).
    Fix: give at most one name per dimension.""")


# -- batches


def test_microbatches_that_do_not_divide_the_batch():
  assert text_of(lambda: accumulate(jnp.sum, np.ones((12, 4)), microbatches=5)) == dedent("""\
    accumulate: a batch of 12 cannot be split into 5 equal microbatches.
    Fix: use 4 or 6 microbatches, or another batch size.""")
  assert text_of(lambda: accumulate(jnp.sum, np.ones((12, 4)), microbatches=20)) == dedent("""\
    accumulate: a batch of 12 cannot be split into 20 equal microbatches.
    Fix: use 12 microbatches, or another batch size.""")


@pytest.mark.parametrize('count', [0, -1])
def test_microbatches_that_are_not_a_positive_integer(count):
  assert text_of(lambda: accumulate(jnp.sum, X, microbatches=count)) == dedent(f"""\
    accumulate: microbatches is {count!r}.
    Fix: pass a positive integer.""")


def test_microbatches_that_the_schedule_does_not_support():
  schedule = Interleaved1F1B(4)
  assert text_of(lambda: accumulate(jnp.sum, np.ones((9, 2, 4)), schedule)) == dedent("""\
    Interleaved1F1B(ranks=4, chunks=2, fuse='last'): 9 microbatches cannot be split into 2 equal rounds.
    Fix: use 8 or 10 microbatches.""")
  # the suggestion also divides the batch
  assert text_of(lambda: accumulate(jnp.sum, np.ones((36, 4)), schedule, microbatches=9)) == dedent("""\
    Interleaved1F1B(ranks=4, chunks=2, fuse='last'): 9 microbatches cannot be split into 2 equal rounds.
    Fix: use 6 or 12 microbatches, or another batch size.""")
  assert text_of(lambda: accumulate(jnp.sum, X, DualPipeV(4), microbatches=2)) == dedent("""\
    DualPipeV(ranks=4, fuse=False): 2 microbatches are too few: it needs 8, two per rank.
    Fix: use 8 microbatches, and a batch that divides into as many.""")


def test_microbatches_that_the_default_schedule_does_not_support():
  def eight(w, x):
    for _ in range(8):
      x = stage_end(x @ w['w0'])
    return x

  step = step_of(eight, None)
  batch = np.ones((9, 2, 4), np.float32)
  assert text_of(lambda: lower(step, W, batch, schedule=Interleaved1F1B(4))) == dedent("""\
    Interleaved1F1B(ranks=4, chunks=2, fuse='last'): 9 microbatches cannot be split into 2 equal rounds.
    Fix: use 8 or 10 microbatches.""")


def test_batches_of_different_first_dimensions():
  batch = {'x': X, 'y': {'label': np.ones(3, np.int32)}}
  assert (
    text_of(lambda: accumulate(lambda x: 0.0, batch))
    == dedent("""\
    accumulate: the arrays of a batch need the same first dimension, of size 1 or more:
      x: float32[4, 2, 4]
      y/label: int32[3]
    Fix: give every array the same number of microbatches or examples; close over values that are not split.""")
  )


@pytest.mark.parametrize('batch', [{}, None, []])
def test_empty_batches(batch):
  assert text_of(lambda: accumulate(lambda x: 0.0, batch)) == dedent(f"""\
    accumulate: the batch {batch!r} has no arrays.
    Fix: pass the arrays to split into microbatches.""")


def test_batches_of_size_zero():
  assert (
    text_of(lambda: accumulate(lambda x: 0.0, {'x': X[:0]}))
    == dedent("""\
    accumulate: the arrays of a batch need the same first dimension, of size 1 or more:
      x: float32[0, 2, 4]
    Fix: give every array the same number of microbatches or examples; close over values that are not split.""")
  )


def test_scalars_in_a_batch():
  batch = {'x': X, 'scale': 2.0, 'step': np.int32(3)}
  assert text_of(lambda: accumulate(lambda x: 0.0, batch)) == dedent("""\
    accumulate: a batch is split along its first dimension, but these leaves are scalars: scale, step.
    Fix: close over values that are not split into microbatches.""")


def test_objects_in_a_batch():
  batch = {'x': X, 'name': 'train', 'model': nn.Dense}
  assert text_of(lambda: accumulate(lambda x: 0.0, batch)) == dedent("""\
    accumulate: a batch is a tree of arrays, but these leaves are not:
      model: <class 'flax.linen.linear.Dense'> is a type
      name: 'train' is a str
    Fix: close over values that are not split into microbatches.""")


# -- results


def combined(op, fn, batch=X):
  return text_of(lambda: accumulate(fn, batch, op=op))


def test_results_that_an_op_cannot_combine():
  def results(x):
    return {'key': KEY, 'mask': x > 0, 'n': np.int32(1), 'x': x, 'z': x.astype(complex)}

  fix = 'Fix: choose an op that supports each result, or cast the result inside the function.'
  assert combined(Add, results) == dedent(f"""\
    accumulate: results that cannot be combined:
      result key: Add combines numbers, not key<fry>[].
      result mask: Add combines numbers, not bool[2, 4].
    {fix}""")
  assert combined(Mean, results) == dedent(f"""\
    accumulate: results that cannot be combined:
      result key: Mean combines floating-point and complex numbers, not key<fry>[].
      result mask: Mean combines floating-point and complex numbers, not bool[2, 4].
      result n: Mean combines floating-point and complex numbers, not int32[].
    {fix}""")
  assert combined(Max, results) == dedent(f"""\
    accumulate: results that cannot be combined:
      result key: Max combines integers, floating-point numbers and booleans, not key<fry>[].
      result z: Max combines integers, floating-point numbers and booleans, not complex64[2, 4].
    {fix}""")
  assert combined(Mean, lambda x: np.int32(1)) == dedent(f"""\
    accumulate: results that cannot be combined:
      the result: Mean combines floating-point and complex numbers, not int32[].
    {fix}""")


def test_concat_along_a_missing_axis():
  ops = {'a': Concat(2), 'b': Concat(-3), 'c': Concat(1)}
  assert combined(ops, lambda x: {'a': x, 'b': x, 'c': jnp.sum(x)}) == dedent("""\
    accumulate: results that cannot be combined:
      result a: float32[2, 4] has no axis 2 to Concat along.
      result b: float32[2, 4] has no axis -3 to Concat along.
      result c: float32[] has no axis 1 to Concat along.
    Fix: choose an op that supports each result, or cast the result inside the function.""")


def test_objects_that_are_not_ops():
  ops = {'a': 'sum', 'b': jnp.add, 'c': None, 'd': np.ones(2), 'e': Mean}
  assert combined(ops, lambda x: dict.fromkeys('abcde', x)) == dedent("""\
    accumulate: results that cannot be combined:
      result a: 'sum' is not an op; the ops are Add, Mean, Max, Stack, Concat, and objects with methods state and update.
      result b: add is not an op; the ops are Add, Mean, Max, Stack, Concat, and objects with methods state and update.
      result c: None is not an op; the ops are Add, Mean, Max, Stack, Concat, and objects with methods state and update.
      result d: array([1., 1.]) is not an op; the ops are Add, Mean, Max, Stack, Concat, and objects with methods state and update.
    Fix: choose an op that supports each result, or cast the result inside the function.""")


def test_ops_of_another_tree_structure():
  assert combined({'y': Add}, lambda x: {'x': x}) == dedent("""\
    accumulate: op is not a prefix of the tree of results. Dict key mismatch; expected keys: ['y']; present keys: ['x'].
    Fix: pass one op for all results, or a tree of ops with the same structure.""")
  assert combined((Add, Mean), lambda x: {'x': x}).startswith(
    'accumulate: op is not a prefix of the tree of results. Expected tuple, got '
  )


# -- stage ends that cannot be cut at


@pytest.mark.parametrize(('tree', 'text'), [({}, '{}'), (None, 'None'), (((), []), '((), [])')])
def test_a_stage_end_without_arrays(tree, text):
  assert text_of(lambda: stage_end(tree)) == dedent(f"""\
    stage_end({text}): there is no array to cut at.
    Fix: pass the arrays that the next stage uses.""")


def test_a_stage_end_with_objects():
  assert text_of(lambda: stage_end({'x': X, 'name': 'first', 'mode': None, 'n': 3})) == dedent("""\
    stage_end: only arrays and numbers can be sent from stage to stage, and these leaves are neither:
      name: 'first' is a str
    Fix: pass arrays and numbers only; every stage can use the rest as it is.""")


def test_a_stage_end_in_a_scan():
  def scanned(w, x):
    def block(x, w):
      return stage_end(x @ w), None  # in a scan

    return lax.scan(block, x, jnp.stack(list(w.values())))[0]  # scan

  assert refused(scanned) == dedent(f"""\
    A stage ends inside an operation that cannot be cut:
      scan at {at('scan')}, stage end at {at('in a scan')}
    Fix: loop over the stages in Python, with one scan for each, and end stages between the scans.""")


def test_a_stage_end_in_a_while():
  def repeated(w, x):
    def body(carry):
      return carry[0] + 1, stage_end(carry[1] @ w['w0'])  # in a while

    return lax.while_loop(lambda carry: carry[0] < 4, body, (0, x))[1]  # while

  step = lambda w, batch: accumulate(lambda x: repeated(w, x), batch, FOUR)
  assert text_of(lambda: lower(step)) == dedent(f"""\
    A stage ends inside an operation that cannot be cut:
      while at {at('while')}, stage end at {at('in a while')}
    Fix: loop over the stages in Python, and end stages between iterations.
    Fix: for tokens or steps, write a Python loop around the function of one pass.""")


def test_stage_ends_in_the_branches_of_a_cond():
  def branched(w, x):
    one = lambda x: stage_end(x @ w['w0'])  # one
    other = lambda x: stage_end(x)  # other
    return lax.cond(jnp.sum(x) > 0, one, other, x)  # cond

  text = dedent(f"""\
    A stage ends inside an operation that cannot be cut:
      cond at {at('cond')}, stage end at {at('other')}, {at('one')}
    Fix: end the stage outside the branches.""")
  assert refused(branched) == text
  assert text_of(lambda: lower(branched, W, X[0])) == text


def test_remat_around_a_stage_end():
  assert refused(jax.checkpoint(model)) == dedent(f"""\
    Stages end inside nn.remat (jax.checkpoint), which recomputes them for gradients:
      {at('end')}, 3 times
    Fix: put nn.remat inside a stage, not around its end.""")


def test_remat_around_one_stage_end_of_two_stages():
  """A recomputed mark counts twice, and two marks would be legal."""

  @jax.checkpoint
  def half(w, x):
    return jnp.tanh(stage_end(jnp.tanh(x @ w['w0'])) @ w['w1'])  # again

  two = layout(mesh={'stage': 2, 'data': 4})
  assert text_of(lambda: lower(step_of(half, OneFOneB(2)), on=two)) == dedent(f"""\
    Stages end inside nn.remat (jax.checkpoint), which recomputes them for gradients:
      {at('again')}
    Fix: put nn.remat inside a stage, not around its end.""")


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    return stage_end(nn.Dense(4)(x)), None  # block


class Layers(nn.Module):
  @nn.compact
  def __call__(self, x):
    blocks = nn.scan(Block, variable_axes={'params': 0}, split_rngs={'params': True}, length=4)()
    return blocks(x, None)[0]  # layers


class Rematerialised(nn.Module):
  @nn.compact
  def __call__(self, x):
    for _ in range(4):
      x, _ = nn.remat(Block)()(x, None)
    return x


def test_a_stage_end_in_scanned_layers():
  """The error shows the user's lines, not Flax's."""
  variables = jax.eval_shape(Layers().init, jax.random.key(0), X[0])
  step = step_of(lambda w, x: Layers().apply(w, x))
  assert text_of(lambda: lower(step, variables, X)) == dedent(f"""\
    A stage ends inside an operation that cannot be cut:
      scan at {at('layers')}, stage end at {at('block')}
    Fix: loop over the stages in Python, with one scan for each, and end stages between the scans.""")


def test_remat_up_to_a_stage_end_is_fine():
  variables = jax.eval_shape(Rematerialised().init, jax.random.key(0), X[0])
  lower(step_of(lambda w, x: Rematerialised().apply(w, x)), variables, X)


def test_a_stage_end_on_gradients():
  """A dependency of an earlier stage on a later one."""

  def step(w, batch):
    def gradients(x):
      loss, grads = jax.value_and_grad(lambda w: jnp.sum(model(w, x)))(w)
      doubled = {name: 2 * grad for name, grad in grads.items()}  # doubled
      return loss, stage_end(doubled)  # of gradients

    return accumulate(gradients, batch, FOUR)

  assert (
    text_of(lambda: lower(step))
    == dedent(f"""\
    The stage end at {at('of gradients')} uses values computed after it, in a later stage or with gradients:
      {at('doubled')}, 3 times
    Fix: end stages in the order in which the model computes them, and not on gradients; any later stage may use a value, but no earlier one.""")
  )


def test_forward_mode_derivatives():
  """Inside the loop, of the loop, and without a loop."""
  derivative = lambda f, w: jax.jvp(f, (w,), (w,))
  inside = lambda w, batch: accumulate(
    lambda x: derivative(lambda w: jnp.sum(model(w, x)), w), batch, FOUR
  )
  around = lambda w, batch: derivative(
    lambda w: accumulate(lambda x: jnp.sum(model(w, x)), batch, FOUR), w
  )
  without = lambda w, batch: derivative(lambda w: model(w, batch[0]), w)
  for step in (inside, around, without):
    assert text_of(lambda step=step: lower(step)) == dedent(f"""\
      The stage end at {at('end')} is differentiated in forward mode (jax.jvp), and a pipeline runs reverse mode only.
      Fix: take gradients by jax.grad or jax.value_and_grad.""")


def test_gradients_of_gradients():
  def penalised(w, x):
    slope = jax.grad(lambda x: jnp.sum(model(w, x)))(x)
    return jnp.sum(slope**2)

  assert refused(penalised) == dedent(f"""\
    Gradients are taken of gradients through the stage end at {at('end')}.
    Fix: take gradients once, by jax.grad or jax.value_and_grad of the loss.""")


# -- loops


def test_two_loops():
  def step(w, batch):
    first = accumulate(lambda x: jnp.sum(model(w, x)), batch, FOUR)  # first loop
    second = accumulate(lambda x: jnp.sum(model(w, x)), batch, FOUR)  # second loop
    return first, second

  assert text_of(lambda: lower(step)) == dedent(f"""\
    A pipeline has one microbatch loop, and this function has 2:
      {at('first loop')}
      {at('second loop')}
    Fix: call accumulate once, or make a separate pipeline_jit for each loop.""")


def test_a_loop_in_a_loop():
  def step(w, batches):
    return lax.map(lambda batch: step_of(model)(w, batch), batches)  # outer

  assert text_of(lambda: lower(step, W, X[None])) == dedent(f"""\
    The microbatch loop at {at('loop')} is inside another loop, at {at('outer')}.
    Fix: call accumulate at the top level of the step, and loop over steps in Python.""")


def test_a_loop_in_another_operation():
  def step(w, batch):
    run = lambda: step_of(model)(w, batch)[0]
    return lax.cond(jnp.sum(batch) > 0, run, lambda: 0.0)  # around

  assert text_of(lambda: lower(step)) == dedent(f"""\
    The microbatch loop is inside another operation, where it cannot be run as a pipeline:
      cond at {at('around')}
    Fix: call accumulate at the top level of the step, outside branches, loops and remat.""")
  again = jax.checkpoint(step_of(model))
  assert text_of(lambda: lower(lambda w, batch: again(w, batch))) == dedent(f"""\
    The microbatch loop is inside another operation, where it cannot be run as a pipeline:
      remat at {at_call('again(w, batch)')}
    Fix: call accumulate at the top level of the step, outside branches, loops and remat.""")


def at_call(call):
  [number] = [i for i, line in enumerate(LINES, 1) if f': {call})' in line]
  return f'{FILE.name}:{number}'


def test_gradients_without_a_loop():
  def step(w, batch):
    return jax.grad(lambda w: jnp.sum(model(w, batch)))(w)

  assert text_of(lambda: lower(step, W, X[0])) == dedent(f"""\
    Gradients are taken through stage ends outside a microbatch loop:
      {at('end')}, 3 times
    Fix: take them inside flax_spmd.pipeline.accumulate, with microbatches=1 to keep the batch whole.""")


def test_gradients_of_the_loop():
  def step(w, batch):
    def total(w):
      return accumulate(lambda x: jnp.sum(model(w, x)), batch, FOUR)  # of which gradients are taken

    return jax.grad(total)(w)

  assert text_of(lambda: lower(step)) == dedent(f"""\
    Gradients are taken of the microbatch loop at {at('of which gradients are taken')}, and a pipeline takes them inside the loop.
    Fix: pass accumulate a function that takes gradients: jax.value_and_grad(loss).""")


def test_stage_ends_outside_the_loop():
  def step(w, batch):
    return step_of(model)(w, batch), model(w, batch[0])

  assert text_of(lambda: lower(step)) == dedent(f"""\
    Stages end outside the microbatch loop, which is at {at('loop')}:
      {at('end')}, 3 times
    Fix: call the model only inside the function that is passed to accumulate.""")


def scan_step(one, start, **options):
  return lambda w, batch: lax.scan(lambda carry, x: one(carry, x, w), start, batch, **options)  # by hand


def test_a_loop_in_reverse():
  step = scan_step(lambda total, x, w: (total + jnp.sum(model(w, x)), None), np.float32(0), reverse=True)
  assert text_of(lambda: lower(step, schedule=FOUR)) == dedent(f"""\
    The microbatch loop at {at('by hand')} runs in reverse, from the last microbatch to the first.
    Fix: let it run forwards, as accumulate does.""")


def test_parameters_that_every_microbatch_updates():
  def one(carry, x, _):
    n, w = carry
    loss, grads = jax.value_and_grad(lambda w: jnp.sum(model(w, n * x)))(w)
    return (n + loss, jax.tree.map(jnp.subtract, w, grads)), None  # of each microbatch

  step = scan_step(one, (np.float32(0), W))
  assert text_of(lambda: lower(step, schedule=FOUR)) == waits_for(
    *(
      f'float32[4,4] at {at("of each microbatch")}: set by bwd of stage {stage}, read by fwd of stage {stage} and bwd of stage {stage}'
      for stage in range(3)
    ),
  )


def test_a_carried_value_in_another_order_of_microbatches():
  """A sum is none: its order is free."""

  def backwards(rank, microbatches):
    yield from (f'fwd_{rank}__{number}' for number in range(microbatches))
    yield from (f'bwd_{rank}__{number}' for number in reversed(range(microbatches)))

  def one(carry, x, w):
    decayed, total = carry
    loss, grads = jax.value_and_grad(lambda w: jnp.sum(model(w, x)))(w)
    return (decayed / 2 + loss, total + loss), grads  # in another order

  step = scan_step(one, (np.float32(0), np.float32(0)))
  schedule = Schedule.of(backwards, 4)
  assert text_of(lambda: lower(step, schedule=schedule)) == waits_for(
    f'float32[] at {at("in another order")}: set by bwd of stage 3, read by bwd of stage 3',
    schedule='backwards(ranks=4)',
  )


def waits_for(*lines, schedule='OneFOneB(ranks=4)'):
  return '\n'.join(
    [
      f'The microbatch loop at {at("by hand")} carries values to the next microbatch. In {schedule}, tasks that '
      'read them come before the tasks that set them, and ranks would wait for one another:',
      *(f'  {line}' for line in lines),
      'Fix: carry only sums, maxima and values that later stages read; pass the inputs of each microbatch with the '
      'batch, and update parameters after the loop; or use a schedule in which the next microbatch begins later.',
    ]
  )


# -- calls


def test_arguments_that_are_not_arrays():
  step = step_of(model)
  assert (
    text_of(lambda: lower(lambda w, x, mode: step(w, x), {**W, 'name': 'a'}, X, 'train'))
    == dedent("""\
    Arguments are not arrays:
      0/name: 'a' is a str
      2: 'train' is a str
    Fix: pass arrays and numbers, or make these arguments static by static_argnums or static_argnames.""")
  )


def test_a_compiled_pipeline_with_other_arguments():
  step = step_of(model)
  on = layout(('batch', 'data'))
  jitted = on.pipeline_jit(lambda w, x, scale, mode: step(w, scale * x), static_argnames='mode')
  compiled = jitted.compile(W, X, 2.0, mode='train')
  scale = jnp.float32(2)
  others = {'w0': W['w0'][:, :2], 'w1': W['w1'].astype(np.float16), 'w2': W['w2'], 'extra': X}
  batch = on.shard(X, (None, 'batch', None))
  assert text_of(lambda: compiled(others, batch, scale, mode='eval')) == dedent(f"""\
    This pipeline was compiled for other arguments:
      0/w0: float32[4, 2] instead of float32[4, 4]
      0/w1: float16[4, 4] instead of float32[4, 4]
      1: float32[4, 2, 4] over {PartitionSpec(None, 'data')} instead of float32[4, 2, 4]
      static 3: 'eval' instead of 'train'
      0/w3: missing
      0/extra: unexpected
    Fix: call the function that pipeline_jit returned, which compiles anew.""")
  assert text_of(lambda: compiled(list(W.values()), X, 2.0, mode='train')).count('\n') == 9
  for number in (2.0, scale):  # a compiled function of JAX takes numbers of weak and strong type, too
    assert compiled(W, X, number, mode='train')[0].shape == ()


def test_an_unknown_source_line():
  assert source_line(None) == 'an unknown line'


def test_many_offenders_are_counted():
  batch = {f'x{number}': X[: number + 1] for number in range(4)} | dict.fromkeys('abcdefgh', X)
  text = text_of(lambda: accumulate(lambda x: 0.0, batch))
  assert text.splitlines()[-2] == '  … and 4 more'


# -- unusual but legal input


def test_results_that_are_constants():
  """For example the number of sequences in a microbatch, or a zero as a metric."""

  def step(w, batch):
    results = accumulate(lambda x: (jnp.sum(model(w, x)), 1, 0.5), batch, FOUR, (Add, Add, Concat))
    return *results, 3, w['w0']

  expected = jax.jit(step)(W, X)
  actual = layout().pipeline_jit(step)(W, X)
  assert jax.tree.map(np.shape, actual) == jax.tree.map(np.shape, expected)
  for one, other in zip(actual, expected, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-6)


def test_gradients_that_do_not_need_the_last_forward():
  """The loss is linear: only the backward passes the mark after the last stage."""

  def step(w, batch):
    def loss(w, x):
      for stage in range(4):
        x = stage_end(x @ w[f'w{stage}'])
      return jnp.sum(x)

    return accumulate(lambda x: jax.grad(loss)(w, x), batch, FOUR)

  expected = jax.jit(step)(W, X)
  actual = layout().pipeline_jit(step)(W, X)
  jax.tree.map(np.testing.assert_allclose, actual, expected)


def test_a_pipeline_in_a_function_that_jax_traces():
  """It is several programs, which no other program contains."""
  pipelined = layout(('batch', 'data')).pipeline_jit(step_of(model))
  for call in (
    lambda: jax.jit(pipelined)(W, X),
    lambda: layout(('batch', 'data')).jit(pipelined)(W, X),
    lambda: jax.grad(lambda w: pipelined(w, X)[0])(W),
    lambda: jax.vmap(pipelined, in_axes=(None, 0))(W, X[None]),
  ):
    assert text_of(call) == dedent("""\
      pipeline_jit of step is called in a function that JAX traces, such as one of jit, grad or vmap: a pipeline is several programs.
      Fix: call it outside, and move the code around it into the function of pipeline_jit.""")


def test_functions_of_a_microbatch_that_are_none_or_return_other_values():
  number: Any = 3
  assert text_of(lambda: accumulate(number, X, FOUR)) == dedent("""\
    accumulate has an int in place of a function.
    Fix: write accumulate(fn, batch), such as accumulate(lambda x: jax.grad(loss)(params, x), batch).""")
  assert (
    text_of(lambda: accumulate(lambda x: {'loss': x, 'name': 'mse'}, X, FOUR))
    == dedent("""\
    accumulate: results of the function are not arrays:
      name: 'mse' is a str
    Fix: return arrays and numbers; keep values that are the same for all microbatches outside of accumulate.""")
  )


def test_a_number_of_stages_that_is_not_that_of_the_schedule():
  """It is checked for a model that marks its stages, too, where it decides nothing."""
  assert text_of(
    lambda: layout(('batch', 'data')).pipeline_jit(step_of(model), stages=5)(W, X)
  ) == dedent("""\
    stages=5, but OneFOneB(ranks=4) has 4 stages.
    Fix: pass stages=4, or a schedule of 5 stages.""")
