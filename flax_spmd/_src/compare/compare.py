"""Comparing: the same step under several layouts, on hardware that need not be here.

    found = compare(train_step, create_state, batch, {'fsdp': a, 'tensor': b}, target='h100:64')
    print(found)                          # a row per layout, and what each communicates
    found.to_html('report.html')

Each layout's program is compiled by the target's own compiler, in a process of its own.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax_spmd._src.compare.comparison import Comparison
from flax_spmd._src.compare.compilation import Compiled, Lot, check_compiler, compile_lots
from flax_spmd._src.compare.costs import cost
from flax_spmd._src.compare.hardware import Target, parse
from flax_spmd._src.compare.lowering import Program, lower
from flax_spmd._src.compare.outcome import Memory, Outcome
from flax_spmd._src.compare.pipeline_lowering import Pipeline, Staged, lower_pipeline
from flax_spmd._src.compare.pipeline_outcome import outcome_of
from flax_spmd._src.layout import Layout
from flax_spmd._src.progress import progress
from flax_spmd._src.public_module import set_module
from flax_spmd.errors import FlaxSpmdError, TargetDeviceError


@set_module('flax_spmd')
def compare(
  step: Callable[..., Any],
  create: Callable[..., Any],
  batch: Any,
  layouts: Mapping[str, Layout | Pipeline] | Sequence[Layout | Pipeline],
  target: str,
  *,
  args: Sequence[Any] = (),
  places: Any = None,
  donate: bool = True,
  hardware: str | os.PathLike[str] | None = None,
  jobs: int | None = None,
  show: bool = False,
) -> Comparison:
  """Compiles a training step under each layout for a target, and tells what comes out.

  The target's own compiler does it, on this machine; nothing is allocated, nothing runs. What was
  compiled is kept (`FLAX_SPMD_CACHE`, by default in `~/.cache/flax_spmd`), so asking again is quick.

  Args:
    step: `step(state, batch)`; anything that can be jitted.
    create: makes a state, of `args`; is traced only.
    batch: the step's second argument in full size: arrays, or `jax.ShapeDtypeStruct`s.
    layouts: what to compare, by name: layouts, and `explore.Pipeline`s, which cut the step into stages.
      A mesh counts by its axes only; it has as many devices as the target.
    target: `'h100:64'`, `'v5e:16x16'`, `'cpu:8'`, `'here'`; see `flax-spmd targets`.
    args: arguments of `create`.
    places: where the batch goes, as of `Layout.shard`; default: each first dimension is named `batch`.
    donate: whether the state is donated.
    hardware: a TOML file with chips of one's own.
    jobs: how many compilers run at once; default: one for two cores.
    show: whether progress is shown.

  Returns:
    An outcome per layout. One whose names do not fit, which cannot be cut into stages, whose program
    crashes the compiler, or which needs more memory than there is, says so in its row.

  Raises:
    TargetDeviceError: an unknown target, one that cannot be compiled for here, or a mesh of another size.
    Exception: whatever the step raises when it is traced, if it does so under every layout.

  Example:
    >>> def create():
    ...   return {'w': LogicallyPartitioned(jnp.ones((64, 256)), ('embed', 'mlp'))}
    >>> def step(state, x):
    ...   return jax.tree.map(lambda w: w - 0.1, state), jnp.sum((x @ state['w'].unbox()) ** 2)
    >>> batch = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    >>> layouts = {
    ...   'data': Layout(abstract_mesh({'data': 8}), (('batch', 'data'),)),
    ...   'tensor': Layout(abstract_mesh({'model': 8}), (('mlp', 'model'),)),
    ... }
    >>> found = compare(step, create, batch, layouts, 'cpu:8')
    >>> found['data'].memory.rest, found['tensor'].memory.rest
    (65536, 8192)
  """
  aim = parse(target, hardware)
  named = _named(layouts)
  if any(isinstance(one, Layout) for one in named.values()):
    check_compiler(
      aim
    )  # of a pipeline's stages, which have targets of their own, it is looked for later
  rows, failed = _lowered(named, aim, step, create, batch, args, places, donate)
  jobs = jobs or max(1, (os.cpu_count() or 2) // 2)
  lots = {name: _lots(row, aim, jobs) for name, row in rows.items()}
  total, finished = sum(map(len, lots.values())), itertools.count(1)
  with progress(show, total, f'compiling for {aim.text}') as update:
    every = [lot for each in lots.values() for lot in each]
    compiled = iter(
      compile_lots(every, hardware=hardware, jobs=jobs, done=lambda *_: update(next(finished), ''))
    )
  outcomes = {
    name: _outcome(name, row, [one for _ in lots[name] for one in next(compiled)], aim)
    for name, row in rows.items()
  }
  return Comparison(aim, [outcomes.get(name) or failed[name] for name in named])


def _lots(row: Program | Staged, target: Target, jobs: int) -> list[Lot]:
  """What one process compiles: a program of a whole step, or a share of a pipeline's programs."""
  if isinstance(row, Program):
    return [Lot([row], target)]
  size = -(-len(row.distinct) // jobs)
  return [Lot(row.distinct[at : at + size], row.target) for at in range(0, len(row.distinct), size)]


def _named(
  layouts: Mapping[str, Layout | Pipeline] | Sequence[Layout | Pipeline],
) -> dict[str, Layout | Pipeline]:
  if isinstance(layouts, Mapping):
    return dict(layouts)
  return {f'layout {number}': layout for number, layout in enumerate(layouts)}


def _lowered(
  named: Mapping[str, Layout | Pipeline], target: Target, step, create, batch, args, places, donate
) -> tuple[dict[str, Program | Staged], dict[str, Outcome]]:
  """The programs of the layouts that fit the model, and what is wrong with the others."""
  rows: dict[str, Program | Staged] = {}
  failed: dict[str, Outcome] = {}
  error: Exception | None = None
  for name, given in named.items():
    options = {'args': args, 'places': places, 'donate': donate}
    try:
      if isinstance(given, Pipeline):
        rows[name] = lower_pipeline(step, create, batch, given, target, **options)
      else:
        rows[name] = lower(step, create, batch, given, target, **options)
    except TargetDeviceError:
      raise
    except Exception as wrong:  # this layout's, if others go; JAX's own too, as under explicit axes
      error = wrong
      layout = given.layout if isinstance(given, Pipeline) else given
      kind = '' if isinstance(wrong, FlaxSpmdError) else f'{type(wrong).__name__}: '
      failed[name] = Outcome.failed(name, layout, f'{kind}{wrong}')
  if not rows and error is not None:
    raise error
  return rows, failed


def _outcome(name: str, program: Program | Staged, found: Sequence[Compiled], target: Target) -> Outcome:
  """A row of the comparison."""
  if isinstance(program, Staged):
    return outcome_of(name, program, found, target)
  [compiled] = found
  by_part = {'params': 0, 'opt_state': 0, '': 0}
  for row in program.rows:
    part = next((part for part in row.path.split('/') if part in by_part), '')
    by_part[part] += row.bytes_per_device
  parts = by_part['params'], by_part['opt_state'], by_part[''], program.batch_bytes
  if compiled.counts is None:
    temporaries = compiled.memory.get('temporaries', 0)
    peak = compiled.used or (sum(parts) + temporaries if temporaries else 0)
    return Outcome.failed(name, program.layout, compiled.error or 'not compiled')._replace(
      memory=Memory(*parts, temporaries, peak) if peak else None, program=program, compiled=compiled
    )
  memory = compiled.memory
  arguments = memory['arguments']
  peak = arguments + memory['results'] - memory['shared'] + memory['temporaries']
  if target.chip.platform == 'tpu' and memory['peak']:
    peak = memory['peak']  # there, arguments and temporaries do not add up
  return Outcome(
    name,
    program.layout,
    Memory(*parts, max(0, peak - arguments), peak),
    compiled.counts,
    cost(compiled.counts, target, program.mesh, program.dtype),
    peak <= target.chip.memory,
    None,
    program,
    compiled,
  )
