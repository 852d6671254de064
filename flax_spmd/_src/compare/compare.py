"""Comparison of layouts: the same step compiled under each, for hardware you need not have.

    comparison = compare(TrainStep(train_step, create_state, batch), {'fsdp': a, 'tensor': b}, 'h100:64')
    print(comparison)                     # one row per layout, and its largest collectives
    comparison.to_html('report.html')

The target's own compiler compiles each layout's program, in a separate process.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence

from flax_spmd._src.compare.activation_moves import activation_moves
from flax_spmd._src.compare.comparison import Comparison
from flax_spmd._src.compare.compilation import (
  CompileJob,
  CompileResult,
  check_compiler,
  checked_jobs,
  compile_jobs,
  peak_of,
)
from flax_spmd._src.compare.hardware import Target, parse_target
from flax_spmd._src.compare.lowering import LoweredStep, lower
from flax_spmd._src.compare.outcome import Memory, Outcome
from flax_spmd._src.compare.pipeline_lowering import LoweredPipeline, Pipeline, lower_pipeline
from flax_spmd._src.compare.pipeline_outcome import pipeline_outcome
from flax_spmd._src.compare.step_outcome import argument_bytes, host_bytes, step_outcome
from flax_spmd._src.compare.train_step import TrainStepLike, check_train_step
from flax_spmd._src.jit.batch_constraints import shared_larger_programs
from flax_spmd._src.layout import Layout
from flax_spmd._src.progress import progress
from flax_spmd._src.public import public
from flax_spmd._src.text import with_article
from flax_spmd.errors import ArgumentTypeError, FlaxSpmdError, TargetDeviceError


@public('flax_spmd')
def compare(
  train_step: TrainStepLike,
  layouts: Mapping[str, Layout | Pipeline] | Sequence[Layout | Pipeline],
  target: str,
  *,
  hardware: str | os.PathLike[str] | None = None,
  jobs: int | None = None,
  show: bool = False,
) -> Comparison:
  """Compiles a training step for a target under each layout, and compares memory, traffic and time.

  The target's own compiler runs on this machine; nothing is allocated, and nothing runs. Results are cached
  (in `FLAX_SPMD_CACHE`, by default `~/.cache/flax_spmd`), so a repeated comparison is quick. Calls of Python in a step
  (`jax.debug.print`, `pure_callback`, ...) are left out of its program, which has other numbers in the place of their results.

  Args:
    train_step: the step and its arguments. For a model that holds a mesh, a function that returns it for a
      layout: it is called with each layout, on an abstract mesh of the target's devices.
    layouts: layouts by name, or a sequence of them. An `explore.Pipeline` cuts the step into stages. Of a
      mesh only the axes count, and it must have as many devices as the target.
    target: hardware such as `'h100:64'`, `'v5e:16x16'`, `'cpu:8'` or `'here'`; see `flax-spmd targets`.
    hardware: TOML file with descriptions of further chips.
    jobs: number of compilers that run in parallel. Default: half of the CPU's cores.
    show: whether to show a progress bar.

  Returns:
    One outcome per layout. Its row shows an error if names do not fit the arrays, the step cannot be cut
    into stages, or the compiler crashes. For a program that needs too much memory it shows the excess.

  Raises:
    ArgumentTypeError: the first argument is neither a `TrainStep` nor a function that returns one, its functions take other
      arguments, or the second has no layout or something else.
    MeshError: the step constrains arrays on a mesh of its own, if no layout can be lowered; else a row shows it.
    TargetDeviceError: the target is unknown, cannot be compiled for on this machine, or differs from a mesh
      in its number of devices; or `jobs` is less than 1.
    Exception: any error that the step raises while it is traced, if no layout can be lowered.

  Example:
    >>> def create():
    ...   return {'w': LogicallyPartitioned(jnp.ones((64, 256)), ('embed', 'mlp'))}
    >>> def step(state, x):
    ...   return jax.tree.map(lambda w: w - 0.1, state), jnp.sum((x @ state['w'].unbox()) ** 2)
    >>> train_step = explore.TrainStep(step, create, jax.ShapeDtypeStruct((32, 64), jnp.float32))
    >>> layouts = {
    ...   'data': Layout(abstract_mesh({'data': 8}), (('batch', 'data'),)),
    ...   'tensor': Layout(abstract_mesh({'model': 8}), (('mlp', 'model'),)),
    ... }
    >>> comparison = compare(train_step, layouts, 'cpu:8')
    >>> comparison['data'].memory.parameters, comparison['tensor'].memory.parameters
    (65536, 8192)
  """
  check_train_step(train_step, 'compare')
  parallel = checked_jobs(jobs)
  parsed, rows = parse_target(target, hardware), _named(layouts)
  if any(isinstance(row, Layout) for row in rows.values()):
    check_compiler(parsed)  # before tracing; a pipeline's target, a rank's share, is checked after it
  with shared_larger_programs():
    lowered, failed = _lower_rows(train_step, rows, parsed)
  work = {name: _compile_jobs(one, parsed, parallel) for name, one in lowered.items()}
  every, finished = [job for each in work.values() for job in each], itertools.count(1)
  with progress(show, len(every), f'compiling for {parsed.text}') as update:
    results = iter(
      compile_jobs(
        every, hardware=hardware, parallel=parallel, done=lambda *_: update(next(finished), '')
      )
    )
  outcomes = {
    name: _outcome(name, one, [result for _ in work[name] for result in next(results)], parsed)
    for name, one in lowered.items()
  }
  return Comparison(parsed, [outcomes.get(name) or failed[name] for name in rows])


def _named(
  layouts: Mapping[str, Layout | Pipeline] | Sequence[Layout | Pipeline],
) -> dict[str, Layout | Pipeline]:
  """The layouts by name.

  Raises:
    ArgumentTypeError: there is none, or something else is among them.
  """
  if isinstance(layouts, Mapping):
    rows = dict(layouts)
  elif isinstance(layouts, Sequence) and not isinstance(layouts, str):
    rows = {f'layout {number}': layout for number, layout in enumerate(layouts)}
  else:
    raise ArgumentTypeError(
      f'compare needs layouts by name, or a list of them, not a {type(layouts).__name__}.\n{_FIX}'
    )
  wrong = [(name, row) for name, row in rows.items() if not isinstance(row, (Layout, Pipeline))]
  pipelines = [(name, row) for name, row in rows.items() if isinstance(row, Pipeline)]
  wrong += [
    (f'{name}: layout', row.layout) for name, row in pipelines if not isinstance(row.layout, Layout)
  ]
  if wrong:
    given = '\n'.join(f'  {name}: {with_article(type(row).__name__)}' for name, row in wrong)
    raise ArgumentTypeError(f'compare needs layouts and pipelines, and these are none:\n{given}\n{_FIX}')
  if not rows:
    raise ArgumentTypeError(f'compare needs at least one layout.\n{_FIX}')
  return rows


_FIX = "Fix: pass compare(train_step, {'fsdp': Layout(mesh, rules)}, target)."


def _lower_rows(
  train_step: TrainStepLike, rows: Mapping[str, Layout | Pipeline], target: Target
) -> tuple[dict[str, LoweredStep | LoweredPipeline], dict[str, Outcome]]:
  """The lowered programs of the rows that fit the model, and the failed outcomes of the others."""
  lowered: dict[str, LoweredStep | LoweredPipeline] = {}
  failed: dict[str, Outcome] = {}
  last_error: Exception | None = None
  unfit: dict[str, TargetDeviceError] = {}
  for name, row in rows.items():
    try:
      if isinstance(row, Pipeline):
        lowered[name] = lower_pipeline(train_step, row, target)
      else:
        lowered[name] = lower(train_step, row, target)
    except TargetDeviceError as error:
      if len(rows) == 1:
        raise
      unfit[name] = error
    except Exception as error:  # of one layout, if others succeed; JAX raises its own with explicit axes
      last_error = error
      layout = row.layout if isinstance(row, Pipeline) else row
      kind = '' if isinstance(error, FlaxSpmdError) else f'{type(error).__name__}: '
      failed[name] = Outcome.failed(name, layout, f'{kind}{error}')
  if unfit:
    raise TargetDeviceError('\n'.join(f'{name}: {error}' for name, error in unfit.items()))
  if not lowered and last_error is not None:
    raise last_error
  return lowered, failed


def _compile_jobs(
  lowered: LoweredStep | LoweredPipeline, target: Target, parallel: int
) -> list[CompileJob]:
  """One job for a whole step; one per parallel compiler for the programs of a pipeline."""
  if isinstance(lowered, LoweredStep):
    return [CompileJob([lowered], target)]
  programs = lowered.distinct
  size = -(-len(programs) // parallel)
  return [
    CompileJob(programs[start : start + size], lowered.target) for start in range(0, len(programs), size)
  ]


def _outcome(
  name: str,
  lowered: LoweredStep | LoweredPipeline,
  results: Sequence[CompileResult],
  target: Target,
) -> Outcome:
  if isinstance(lowered, LoweredPipeline):
    return pipeline_outcome(name, lowered, results, target)
  [result] = results
  return _step_outcome(name, lowered, result, target)


def _step_outcome(name: str, lowered: LoweredStep, result: CompileResult, target: Target) -> Outcome:
  if result.counts is None:
    parts = argument_bytes(lowered)
    temporaries = result.memory.get('temporaries', 0)
    peak = result.used or (sum(parts) + temporaries if temporaries else 0)
    return Outcome.failed(name, lowered.layout, result.error or 'not compiled')._replace(
      memory=Memory(*parts, temporaries, peak, host_bytes(lowered)) if peak else None,
      program=lowered,
      compiled=result,
    )
  moves = activation_moves(lowered.unconstrained, lowered.rows, result.counts)
  lowered = lowered._replace(findings=[*moves, *lowered.findings])
  peak = peak_of(result.memory, target)
  outcome = step_outcome(name, lowered, result.counts, peak, peak - result.memory['arguments'], target)
  return outcome._replace(program=lowered, compiled=result)
