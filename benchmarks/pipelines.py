"""Cost of a pipeline: step time, first step, residuals, transfers and idle time.

    step         1F1B on 4 ranks and 8 microbatches, over plain accumulation on one of these devices
    dispatch     48 chunks and 64 microbatches on 8 ranks: thousands of small programs from one thread
    first step   in new processes: the total, and the share of tracing and planning
    microbatches the time to compile the same programs for 256 microbatches, over that for 8
    processes    the step in two and four processes over that in one: by `ppermute` over gloo, by JAX's copies, and
                 with nothing sent, which is the cost of several processes on these cores
    minimum cut  the same step, with the residuals that differentiation would keep by default
    plan         residuals of a stage, programs compiled, bytes moved after the loop, simulated schedules
    sleeping     stages that sleep instead of computing, so that ranks overlap on any number of cores:
                 wall time over simulated time
    equal stages one program for all stages beside a program per stage: see `one_program`
    code         lines of `flax_spmd.pipeline`, without blank lines, comments and docstrings

The devices are emulated on the same cores, so a pipeline is faster than one device only if its programs
use the cores better. The step therefore shows the cost of splitting, sending and dispatching; only the
sleeping stages show a schedule at work. Their backward sleeps twice, once for the gradient of the input and
once for that of the weights. Each sleep must happen once, in its own task. Two tasks have no sleep: with a
split backward the first stage's `bwd` is part of its `wgrad`, because no rank waits for it; and the last
stage's `fwd` is part of its `bwd` if that comes next.

The figures of JaxPP are constants, measured on a similar machine with jax 0.9.2, the last version that it
supports. No run can contain both, so its step times are given for reference only: 79 to 87 ms for the tiny
model and 122 ms for the small one.
"""

import os

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'

import functools
import io
import json
import statistics
import subprocess
import sys
import time
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import one_program
import optax
from flax.training.train_state import TrainState
from harness import WALL, Figure, Target, at_most, equal, exact, measure, ratio, summary
from reporting import report

import flax_spmd as spmd
from flax_spmd import pipeline
from flax_spmd._src.pipeline.cut import residuals
from flax_spmd._src.pipeline.run import assembly, process_transfer
from flax_spmd._src.pipeline.run.call_list import Call, CallList, Send
from tests.processes import JAX_COPIES, run_processes

RANKS, MICROBATCHES = 4, 8
CHUNKED_MS = 1742  # JaxPP's step of 48 chunks x 64 microbatches on 8 ranks: 1,742 to 1,819 (jax 0.9.2)
FIRST_STEP_S = 12  # JaxPP's time to the first step of the small model: 12 to 16 (jax 0.9.2)
RESIDUALS_KIB = 2063  # JaxPP's residuals of a microbatch on a middle stage, without remat (jax 0.9.2)
PROCESSES = 3
SLEEP = 0.03  # seconds; a callback to Python alone takes about a millisecond
SLEEPS = 'fwd', 'bwd', 'wgrad'
PACKAGE = Path(pipeline.__file__).parent / '_src' / 'pipeline'


def figures() -> list[Figure]:
  return [
    *first_step_figures(),  # first, before other programs and threads exist
    *step_figures('tiny', rounds=101),
    *step_figures('small', at_most(1.1), rounds=61),
    *step_figures('mid', at_most(0.9), rounds=31),
    *dispatch_figures(),
    *microbatch_figures(),
    *process_figures(),
    *minimum_cut_figures(),
    *plan_figures(),
    *sharing_figures(),
    *bubble_figures(),
    *sleeping_figures(),
    *one_program.figures(),
    exact('lines of code', code_lines(PACKAGE), 'lines', at_most(3000)),
  ]


# -- a transformer, and steps of it


class Size(NamedTuple):
  """Sizes of a model and its batch, with 4 examples per microbatch."""

  layers: int
  width: int
  tokens: int
  remat: bool = True
  stages: int = RANKS


SIZES = {'tiny': Size(4, 8, 4), 'small': Size(8, 64, 32), 'mid': Size(8, 128, 64)}


class Block(nn.Module):
  """Attention and MLP, each followed by a norm."""

  width: int

  @nn.compact
  def __call__(self, x):
    attention = nn.MultiHeadDotProductAttention(num_heads=4, qkv_features=self.width)
    x = nn.LayerNorm()(x + attention(x))
    hidden = nn.gelu(nn.Dense(4 * self.width)(x))
    return nn.LayerNorm()(x + nn.Dense(self.width)(hidden))


class Model(nn.Module):
  """Blocks, split evenly over stages."""

  size: Size

  @nn.compact
  def __call__(self, x):
    size = self.size
    block = nn.remat(nn.jit(Block)) if size.remat else nn.jit(Block)
    for layer in range(size.layers):
      x = block(size.width, name=f'layer_{layer}')(x)
      if (layer + 1) % (size.layers // size.stages) == 0:
        x = pipeline.stage_end(x)
    return x


def batch_of(size: Size) -> tuple[jax.Array, jax.Array]:
  """Inputs and targets; the first dimension is the microbatches."""
  x = jax.random.normal(jax.random.key(1), (MICROBATCHES, 4, size.tokens, size.width))
  return x, jnp.sin(x)


def state_of(size: Size) -> TrainState:
  """A state of random weights, drawn with numpy, so without a compiled program."""
  random = np.random.default_rng(0)

  def drawn(path, like):
    kernel = like.ndim > 1
    values = random.normal(0, size.width**-0.5, like.shape) if kernel else path[-1].key == 'scale'
    return np.broadcast_to(values, like.shape).astype(like.dtype)

  params = jax.tree_util.tree_map_with_path(drawn, abstract_state(size).params)
  return jax.device_put(created(Model(size), params, optax.adamw(1e-3)))


def abstract_state(size: Size, optimizer: optax.GradientTransformation | None = None) -> TrainState:
  """The shapes and dtypes of a state."""
  model, example = Model(size), jnp.zeros((4, size.tokens, size.width))

  def create():
    params = model.init(jax.random.key(0), example)['params']
    return created(model, params, optimizer or optax.adamw(1e-3))

  return jax.eval_shape(create)


def created(model: Model, params: Any, optimizer: optax.GradientTransformation) -> TrainState:
  return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


def train_step(state: TrainState, batch, schedule: pipeline.Schedule | None):
  def value_and_grad(microbatch):
    x, targets = microbatch
    return jax.value_and_grad(
      lambda params: jnp.mean((state.apply_fn({'params': params}, x) - targets) ** 2)
    )(state.params)

  loss, grads = pipeline.accumulate(value_and_grad, batch, schedule, pipeline.Mean)
  return state.apply_gradients(grads=grads), loss


def layout(ranks: int = RANKS) -> spmd.Layout:
  devices = np.array(jax.devices()[:ranks])
  return spmd.Layout(jax.sharding.Mesh(devices, ('stage',)), ())


def pipelined(schedule: pipeline.Schedule) -> Any:
  """The transformer's step as a pipeline; the state is donated."""
  step = functools.partial(train_step, schedule=schedule)
  return layout(schedule.ranks).pipeline_jit(step, donate_argnums=0)


def _plain() -> Any:
  """The same step by `jax.jit`, without a pipeline."""
  return jax.jit(functools.partial(train_step, schedule=None), donate_argnums=0)


class Run:
  """A step and its state, which every call donates and replaces."""

  def __init__(self, step: Callable[..., Any], state: Any, batch: Any):
    self.step, self.state, self.batch = step, state, batch
    self.loss: Any = None

  def once(self) -> None:
    self.state, self.loss = self.step(self.state, self.batch)
    jax.block_until_ready((self.state, self.loss))


# -- the step, and dispatching


def step_figures(name: str, target: Target | None = None, *, rounds: int) -> list[Figure]:
  size = SIZES[name]
  device, batch = jax.devices()[0], batch_of(size)
  schedule = pipeline.OneFOneB(RANKS)
  runs = {
    'pipeline': Run(pipelined(schedule), state_of(size), batch),
    'one device': Run(_plain(), *jax.device_put((state_of(size), batch), device)),
  }
  times = measure({arm: run.once for arm, run in runs.items()}, rounds=rounds, warm_up=3, clock=WALL)
  losses = [float(run.loss) for run in runs.values()]
  if not np.isclose(*losses, rtol=1e-4):
    raise RuntimeError(f'{name}: losses after as many steps are {losses}')
  return [
    _milliseconds(f'{name}: step of a pipeline', times, 'pipeline'),
    ratio(f'{name}: over one device', times, 'pipeline', 'one device', target),
  ]


def microbatch_figures() -> list[Figure]:
  """Time to trace, plan and compile: the programs are the same for any number of microbatches."""
  size, few, many = SIZES['small'], 8, 256
  shape = 4, size.tokens, size.width

  def phases(microbatches: int) -> dict[str, float]:
    batch = (jax.ShapeDtypeStruct((microbatches, *shape), jnp.float32),) * 2
    return pipelined(pipeline.OneFOneB(RANKS)).lower(abstract_state(size), batch).compile().times

  rounds = [(phases(few), phases(many)) for _ in range(3)]
  compiled = [late['compile'] / early['compile'] for early, late in rounds]
  whole = [sum(late.values()) / sum(early.values()) for early, late in rounds]
  return [
    summary(f'{many} microbatches over {few}: compilation', compiled, 'x', at_most(1.1)),
    summary(f'{many} microbatches over {few}: with trace and plan', whole, 'x'),
  ]


WAYS = {'gloo': '', 'JAX': ', copies by JAX', 'nothing': ', nothing sent'}


def process_figures() -> list[Figure]:
  """Steps of the same four ranks in several processes over those in one, one job after the other.

  Where nothing is sent, ranks compute with arrays at hand instead, and wait for nobody. So that row is the cost of
  several processes on these cores, and the rest of the others is that of transfers and of waiting for them.
  """
  alone = statistics.median(_seconds_of_steps(1, 'gloo'))
  figures = []
  for count in (2, 4):
    for way, words in WAYS.items():
      relative = [one / alone for one in _seconds_of_steps(count, way)]
      target = None if way == 'nothing' else at_most(1.15)
      figures.append(summary(f'{count} processes over one{words}', relative, 'x', target))
  return figures


def _seconds_of_steps(processes: int, way: str) -> list[float]:
  """Seconds of steps, with one of the ways of transfers between processes."""
  lines = ['import sys', f'sys.path.insert(0, {str(Path(__file__).parent)!r})']
  if way == 'JAX':
    lines.append(JAX_COPIES)
  lines += ['jax.devices()', 'import pipelines', f'report(pipelines.steps({way == "nothing"}))']
  source, devices = '\n'.join(lines), RANKS // processes
  return run_processes(source, processes=processes, devices=devices, timeout=300, flags='')[0].value


def steps(nothing_sent: bool) -> list[float]:
  """Runs in each of some processes: seconds of some steps of the middle model."""
  size = SIZES['mid']
  transfer = NothingSent if nothing_sent else assembly.ProcessTransfer
  with mock.patch.object(assembly, 'ProcessTransfer', transfer):
    run = Run(
      pipelined(pipeline.OneFOneB(RANKS)), *map(jax.device_get, (state_of(size), batch_of(size)))
    )
    return [one['step'] for one in measure({'step': run.once}, rounds=21, warm_up=3, clock=WALL)]


class NothingSent(process_transfer.ProcessTransfer):
  """In place of a transfer between processes: the receiver makes zeros, and the sender does nothing."""

  def _run(self, arrays):
    if not self._receives:
      return []
    zeros = map(self._shared.zeros, self._avals, self._target)
    return list(map(jnp.copy, zeros))  # programs may overwrite them


def _kept(lowered: Any) -> dict[int, int]:
  """The bytes that each stage keeps from a microbatch's forward until its backward."""
  producer, kept = lowered.programs.producers(), defaultdict(set)
  for (kind, stage), task in lowered.programs.tasks.items():
    if kind != 'fwd':
      kept[stage].update(one for one in task.inputs if one in producer and producer[one][0] == 'fwd')
  return {stage: sum(one.bytes for one in values) for stage, values in sorted(kept.items())}


def minimum_cut_figures() -> list[Figure]:
  """Bytes and step time with the minimum cut, over those with all residuals of JAX."""
  size = SIZES['small']._replace(remat=False)
  state, batch = state_of(size), batch_of(size)

  def lowered() -> Any:
    return pipelined(pipeline.OneFOneB(RANKS)).lower(state, batch)

  with mock.patch.object(residuals, 'choose', lambda *_: (set(), set())):
    all_kept = lowered()
  steps = {'cut': lowered(), 'all kept': all_kept}
  residual_bytes = {arm: sum(_kept(one).values()) for arm, one in steps.items()}
  runs = {arm: Run(one.compile(), jax.tree.map(jnp.array, state), batch) for arm, one in steps.items()}
  times = measure({arm: run.once for arm, run in runs.items()}, rounds=61, warm_up=3, clock=WALL)
  return [
    exact('minimum cut: bytes kept, over all', residual_bytes['cut'] / residual_bytes['all kept'], 'x'),
    ratio('minimum cut: its step, over all kept', times, 'cut', 'all kept', at_most(1)),
  ]


def dispatch_figures() -> list[Figure]:
  """Step time of tiny programs, which is mostly dispatch."""
  schedule, microbatches, width = pipeline.Interleaved1F1B(8, 6), 64, 8
  names = [f'stage_{stage}' for stage in range(schedule.stages)]
  optimizer = optax.adam(1e-3)

  def step(state, batch):
    params, moments = state

    def loss(params, microbatch):
      x, targets = microbatch
      for name in names:
        x = pipeline.stage_end(jnp.tanh(x @ params[name]))
      return jnp.mean((x - targets) ** 2)

    both = lambda microbatch: jax.value_and_grad(loss)(params, microbatch)
    value, grads = pipeline.accumulate(both, batch, schedule, pipeline.Add)
    updates, moments = optimizer.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), value

  keys = jax.random.split(jax.random.key(0), len(names))
  params = {name: jax.random.normal(key, (width, width)) / 3 for name, key in zip(names, keys)}
  x = jax.random.normal(jax.random.key(1), (microbatches, 4, width))
  state, batch = (params, optimizer.init(params)), (x, jnp.sin(x))
  lowered = layout(8).pipeline_jit(step, donate_argnums=0).lower(state, batch)
  run = Run(lowered.compile(), state, batch)
  times = measure({'step': run.once}, rounds=21, warm_up=3, clock=WALL)
  count = len(lowered.call_list.calls)
  each = [1e6 * one['step'] / count for one in times]
  return [
    _milliseconds('48 chunks x 64 microbatches', times, 'step', at_most(0.4 * CHUNKED_MS)),
    exact('48 chunks: instructions', count, ''),
    summary('48 chunks: of it, an instruction', each, 'us', at_most(60)),
  ]


def _milliseconds(name: str, rounds, arm: str, target: Target | None = None) -> Figure:
  return summary(name, [1e3 * times[arm] for times in rounds], 'ms', target)


# -- the first step


def first_step_figures() -> list[Figure]:
  """Time to the first step; each sample is a new process."""
  timings = [_first_step_timings() for _ in range(PROCESSES)]

  def of(name: str, key: str, unit: str, target: Target | None = None) -> Figure:
    return summary(name, [one[key] for one in timings], unit, target)

  return [
    of('small: first call', 'call', 's', at_most(0.6 * FIRST_STEP_S)),
    of('small: of it, trace and plan', 'planned', 'x', at_most(0.1)),
    of('small: of it, trace by jax.jit of the step without a pipeline', 'traced', 'x'),
    of('small: process started to first step', 'process', 's'),
  ]


def _first_step_timings() -> dict[str, float]:
  begin = time.time()
  timings = _in_new_process('first_step')
  traced = _in_new_process('first_trace')['trace'] / timings['call']
  return {**timings, 'process': timings['ended'] - begin, 'traced': traced}


def _in_new_process(function: str) -> dict[str, float]:
  command = [sys.executable, '-c', f'import pipelines; pipelines.{function}()']
  done = subprocess.run(
    command, cwd=Path(__file__).parent, check=True, stdout=subprocess.PIPE, text=True
  )
  return json.loads(done.stdout.splitlines()[-1])


def first_step() -> None:
  """Runs in a new process: prints the time of the small model's first call, and its parts, as JSON."""
  state, batch = _small()
  step = pipelined(pipeline.OneFOneB(RANKS))
  abstract = jax.tree.map(_form, (state, batch))
  begin = WALL()
  jax.block_until_ready(step(state, batch))
  call = WALL() - begin
  ended = time.time()
  times = step.compile(*abstract).times  # from the call above: the result is cached
  planned = (times['trace'] + times['plan']) / call
  print(json.dumps({'call': call, 'planned': planned, 'ended': ended}))


def first_trace() -> None:
  """Runs in a new process: prints the time that `jax.jit` takes to trace the same step without a pipeline, as JSON.

  On the mesh of a stage, as in a pipeline: JAX's traces of its own functions are for one mesh, and the state is
  created without any.
  """
  state, batch = _small()
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ('stage',)).abstract_mesh
  begin = WALL()
  with jax.sharding.use_abstract_mesh(mesh):
    _plain().trace(state, batch)
  print(json.dumps({'trace': WALL() - begin}))


def _small() -> tuple[TrainState, Any]:
  return jax.block_until_ready((state_of(SIZES['small']), batch_of(SIZES['small'])))


def _form(leaf: jax.Array) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.weak_type)


# -- the plan


def plan_figures() -> list[Figure]:
  """Figures of the plan, without a compiler."""
  size = SIZES['small']
  residual_bytes = _kept(_lowered(size._replace(remat=False)))
  clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
  call_list = _lowered(size, clipped).call_list
  middle = max(bytes for stage, bytes in residual_bytes.items() if 0 < stage < size.stages - 1)
  return [
    exact('residuals of a middle stage, no remat', middle / 1024, 'KiB'),
    exact('residuals over JaxPP', middle / 1024 / RESIDUALS_KIB, 'x', at_most(0.45)),
    exact('moved after the loop, clip and adamw', moved_after(call_list) / 1024, 'KiB', at_most(1)),
  ]


def _lowered(size: Size, optimizer: optax.GradientTransformation | None = None) -> Any:
  state = abstract_state(size, optimizer)
  return pipelined(pipeline.OneFOneB(size.stages)).lower(state, batch_of(size))


def moved_after(call_list: CallList) -> int:
  """Bytes sent between ranks for use after the loop: buffers that no task of the loop reads."""
  in_loop = {
    buffer
    for one in call_list.calls
    if isinstance(one, Call) and one.when is not None
    for buffer in one.inputs
  }
  sent = [buffer for one in call_list.calls if isinstance(one, Send) for buffer in one.outputs]
  return sum(buffer.value.bytes for buffer in sent if buffer not in in_loop)


def sharing_figures() -> list[Figure]:
  """32 equal layers over 8 stages: the middle stages share one program on several ranks."""
  size = Size(layers=32, width=64, tokens=32, stages=8)
  executables = _lowered(size).compile().executables.values()
  shared = sum(one.shared for one in executables)
  return [
    exact('32 equal layers: programs', len(executables), ''),
    exact('32 equal layers: compiled', len(executables) - shared, ''),
    exact('32 equal layers: loaded for other ranks', shared, ''),
  ]


# -- simulated schedules


def bubble_figures() -> list[Figure]:
  """Idle fractions for F = B = W = 1, against the papers' formulas in the docstrings of the classes."""
  p, m = RANKS, MICROBATCHES
  whole, chunked = (p - 1) / (m + p - 1), (p - 1) / (2 * m + p - 1)
  known = {
    pipeline.GPipe(p): whole,
    pipeline.InterleavedGPipe(p): chunked,
    pipeline.OneFOneB(p): whole,
    pipeline.Eager1F1B(p): whole,
    pipeline.Interleaved1F1B(p): chunked,
    pipeline.KimiK2(p): None,
    pipeline.ZeroBubbleH1(p): (p - 1) / (3 * m + p - 1),
    pipeline.ZeroBubbleV(p): (p - 1) / (6 * m + p - 1),
    pipeline.DualPipeV(p): None,
    pipeline.DualPipeV(p, fuse=True): 2 * (p - 1) / (6 * m + 2 * (p - 1)),  # F&B + B - 3 W = 2
  }
  bubbles = [
    exact(f'bubble: {schedule}', 100 * schedule.simulate(m).bubble, '%', _exactly(theory))
    for schedule, theory in known.items()
  ]
  # JaxPP's best, its DualPipeV
  best = 100 * pipeline.ZeroBubbleV(p).simulate(m).bubble
  return [*bubbles, exact("bubble: ZeroBubbleV, below JaxPP's best", best, '%', at_most(9.4))]


def _exactly(theory: float | None) -> Target | None:
  return None if theory is None else equal(100 * theory, 1e-9)


# -- schedules at work


def sleeping_figures() -> list[Figure]:
  schedules = (
    pipeline.GPipe(RANKS),
    pipeline.OneFOneB(RANKS),
    pipeline.Interleaved1F1B(RANKS),
    pipeline.ZeroBubbleH1(RANKS),
    pipeline.ZeroBubbleV(RANKS),
  )
  sleepers = {type(schedule).__name__: Sleeper(schedule) for schedule in schedules}
  arms = {name: sleeper.once for name, sleeper in sleepers.items()}
  times = measure({**arms, 'a bare program': _bare()}, rounds=11, warm_up=2, clock=WALL)
  ratios = [
    summary(
      f'sleeping: {name}, wall over simulated',
      [one[name] / sleeper.makespan for one in times],
      'x',
      at_most(1.1),
    )
    for name, sleeper in sleepers.items()
  ]
  moved = sum(sleeper.moved for sleeper in sleepers.values())
  miscounted = sum(sleeper.miscounted for sleeper in sleepers.values())
  return [
    *ratios,
    _floor([one['a bare program'] for one in times]),
    exact('sleeping: tasks with other sleeps than theirs', moved, 'tasks', at_most(0)),
    exact('sleeping: sleeps done too often or too rarely', miscounted, 'sleeps', at_most(0)),
  ]


def _floor(seconds: Sequence[float]) -> Figure:
  """The part of the ratio that is due to JAX's callback and to oversleeping."""
  return summary('sleeping: a bare jax.jit of one sleep', [each / SLEEP for each in seconds], 'x')


def _bare() -> Callable[[], Any]:
  """A call of a program that sleeps once."""
  slow = jax.jit(functools.partial(slowly, lambda: None))
  x = jnp.ones((2, 4))
  return lambda: jax.block_until_ready(slow(x))


def slowly(note: Callable[[], Any], x: jax.Array) -> jax.Array:
  """Returns the array after a sleep, having called `note`."""

  def sleep(_):
    note()
    time.sleep(SLEEP)
    return np.float32(0)

  return x + jax.pure_callback(sleep, jax.ShapeDtypeStruct((), jnp.float32), x[0, 0])


class Sleeper:
  """A pipeline whose stages sleep in host callbacks and compute almost nothing."""

  def __init__(self, schedule: pipeline.Schedule):
    self._schedule, self._slept, self._steps = schedule, [], 0
    costs: dict[str, float] = dict.fromkeys(SLEEPS, SLEEP)
    self.makespan = schedule.simulate(MICROBATCHES, costs).makespan
    params = {'shift': jnp.zeros(4), 'weights': [jnp.eye(4)] * schedule.stages}
    self._arguments = params, jnp.ones((MICROBATCHES, 2, 4))
    step = layout().pipeline_jit(self._step, schedule=schedule, threads=True)
    lowered = step.lower(*self._arguments)
    self._tasks, self._compiled = lowered.programs.tasks, lowered.compile()

  def once(self) -> None:
    self._steps += 1
    jax.block_until_ready(self._compiled(*self._arguments))

  @property
  def moved(self) -> int:
    """Number of tasks with a wrong number of callbacks."""
    counts = {
      key: sum(equation.name == 'pure_callback' for equation in task.equations)
      for key, task in self._tasks.items()
    }
    planned = self._planned()
    return sum(counts.get(key, 0) != planned.get(key, 0) for key in {*counts, *planned})

  @property
  def miscounted(self) -> int:
    """Number of sleeps that did not happen exactly once per microbatch and step."""
    slept, expected = Counter(self._slept), self._steps * MICROBATCHES
    sleeps = {(kind, stage) for kind in SLEEPS for stage in range(self._schedule.stages)}
    return sum(slept[key] != expected for key in sleeps | slept.keys())

  def _planned(self) -> Counter[tuple[str, int]]:
    """Number of sleeps per task."""
    last, split = self._schedule.stages - 1, 'wgrad' in self._kinds()
    planned = Counter()
    for stage in range(last + 1):
      planned['fwd' if stage < last or not self._alternates() else 'bwd', stage] += 1
      planned['bwd' if stage > 0 or not split else 'wgrad', stage] += 1
      planned['wgrad' if split else 'bwd', stage] += 1
    return planned

  def _kinds(self, stage: int | None = None) -> list[str]:
    """The kinds of tasks of one stage or of all, in their order on each rank."""
    steps = (step for order in self._schedule.tasks(MICROBATCHES) for step in order)
    tasks = (task for step in steps for task in step.tasks)
    return [task.kind for task in tasks if stage is None or task.stage == stage]

  def _alternates(self) -> bool:
    """Whether the last stage runs the backward of each microbatch right after its forward."""
    kinds = [kind for kind in self._kinds(self._schedule.stages - 1) if kind != 'wgrad']
    return kinds == ['fwd', 'bwd'] * MICROBATCHES

  def _step(self, params, batch):
    def loss(params, x):
      x = x + params['shift']
      for stage, weights in enumerate(params['weights']):
        x = pipeline.stage_end(self._stage(stage)(x, weights))
      return jnp.mean(x**2)

    return pipeline.accumulate(lambda x: jax.value_and_grad(loss)(params, x), batch, op=pipeline.Mean)

  def _stage(self, stage: int) -> Callable[..., Any]:
    """A product with weights that sleeps once forward and twice backward."""
    slow = {
      kind: functools.partial(slowly, functools.partial(self._slept.append, (kind, stage)))
      for kind in SLEEPS
    }

    def forward(x, weights):
      return slow['fwd'](x) @ weights, (x, weights)

    def backward(residuals, gradient):
      x, weights = residuals
      return slow['bwd'](gradient) @ weights.T, x.T @ slow['wgrad'](gradient)

    product = jax.custom_vjp(lambda x, weights: forward(x, weights)[0])
    product.defvjp(forward, backward)
    return product


# -- lines of code


def code_lines(folder: Path) -> int:
  """Number of lines of code, without blank lines, comments and docstrings."""
  return sum(len(_lines_of(path.read_text())) for path in sorted(folder.glob('**/*.py')))


def _lines_of(source: str) -> set[int]:
  """The numbers of the lines with code.

  A statement that is only a string is a docstring.
  """
  lines: set[int] = set()
  statement: list[tokenize.TokenInfo] = []
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    if token.type in _NO_CODE:
      continue
    if token.type not in (tokenize.NEWLINE, tokenize.ENDMARKER):
      statement.append(token)
      continue
    if any(one.type != tokenize.STRING for one in statement):
      lines.update(line for one in statement for line in range(one.start[0], one.end[0] + 1))
    statement = []
  return lines


_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT}


if __name__ == '__main__':
  report('pipelines', figures)
