"""Search for the mesh and rule table under which a training step is fastest and fits into memory.

    train_step = explore.TrainStep(step, create_state, batch)
    result = search(train_step, 'h100:64', memory='60GiB')
    result.to_toml('layout.toml')

The step is lowered once and estimated under many layouts, starting from the presets and changing one
thing at a time (`descent`). One or two of the presets are compiled first, and correct the estimates
(`estimate_check`). The best candidates, doubtful ones among them, and the best mesh of each
preset are then compiled by the target's own compiler, and the compiled outcomes decide. Pipelines are
searched alongside (`pipelines`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from flax_spmd._src.compare.compilation import check_compiler, checked_jobs
from flax_spmd._src.compare.hardware import Target, parse_target
from flax_spmd._src.compare.train_step import TrainStepLike, check_train_step
from flax_spmd._src.estimate.walk_workers import WalkWorkers
from flax_spmd._src.jit.arguments import is_hashable
from flax_spmd._src.jit.batch_constraints import shared_larger_programs
from flax_spmd._src.pipeline.schedules.schedule import Schedule
from flax_spmd._src.plan.placement_shardings import TYPO_WARNING
from flax_spmd._src.public import public
from flax_spmd._src.search.pipelines import check_pipelines, pipeline_searches
from flax_spmd._src.search.result import SearchResult
from flax_spmd._src.search.run import SearchLimits, SearchRun
from flax_spmd._src.search.space import Space
from flax_spmd._src.search.trials import SearchTask, Trials, first_choices, lower_variant
from flax_spmd._src.search.user_constraints import axes_named, constraints_of
from flax_spmd._src.text import value_text
from flax_spmd.errors import SearchError

_MAX_COMPILED = 24  # candidates of a search without an estimator
_MAX_WORKERS = 8  # processes that estimate: to prepare what they get takes a tenth of an estimate
_MAX_PARTITIONED = 100  # and of one whose step has to be partitioned for each


@public('flax_spmd')
def search(
  train_step: TrainStepLike,
  target: str,
  *,
  memory: int | str | None = None,
  choices: Mapping[str, Sequence[Any]] | None = None,
  pipelines: Sequence[Schedule] = (),
  mesh: Mapping[str, int] | Mesh | AbstractMesh | None = None,
  pin: Mapping[str, Any] | None = None,
  forbid: Mapping[str, Any] | Sequence[str] = (),
  batch_only: str | Sequence[str] = (),
  tensor: int | None = None,
  host: str | Sequence[str] = (),
  candidates: int = 1000,
  time_limit: float | None = None,
  top: int = 8,
  seed: int = 0,
  fresh: bool = False,
  hardware: str | os.PathLike[str] | None = None,
  jobs: int | None = None,
  show: bool = False,
) -> SearchResult:
  """Searches for the layout under which a training step is fastest and fits into memory.

  Nothing is allocated, and nothing runs. Estimates are cached next to compiled results (in
  `FLAX_SPMD_CACHE`), so a killed search resumes and ends with the same result. Ctrl-C ends a search with
  the best result so far.

  Args:
    train_step: the step and its arguments; for a model that holds a mesh, a function that returns it for a layout.
      If it uses mesh axes by name, pass `mesh` or `pin`, which name the axes of the search.
    target: hardware such as `'h100:64'`, `'v5e:16x16'` or `'cpu:8'`; see `flax-spmd targets`.
    memory: memory budget of a device, in bytes or as `'60GiB'`. Default: all memory available to a
      program.
    choices: values to try for arguments of the step, such as `{'remat': ('none', 'full')}`; they have to be hashable. Parameters
      of `create` with the same names receive them too, and those of a function that returns the step first.
      That function may also choose the batch by them; layouts are then ranked by time per element of the batch.
    pipelines: schedules to try for the step as a pipeline, such as `OneFOneB(ranks=4)`. Ranks are along a
      mesh axis `stage`; the other axes are within a rank. The step must take its gradients in
      `pipeline.accumulate`; a model without stage ends is cut into equal stages.
    mesh: a fixed mesh, or its size per axis; one size may be -1. For a pipeline, the axes within a rank.
    pin: mesh axes that a logical name is sharded over; None replicates it. Every mesh of the search has
      the axes listed here.
    forbid: logical names that are never sharded; as a mapping, the axes that each name is never sharded
      over.
    batch_only: mesh axes that only the batch is sharded over.
    tensor: largest number of devices for tensor parallelism. Default: the devices of one node.
    host: path expressions of arrays that may be in the host's memory between steps, such as `'^opt_state/'`. Each
      is tried with and without `host`. Pipelines keep all arrays on the device.
    candidates: number of layouts to estimate, and again for each pipeline. Simplifying the best ones
      adds a few. If the step uses mesh axes itself, a hundred at most.
    time_limit: seconds for the search, from the time when the step is lowered. Layouts that are being compiled when they are over
      are finished. With a limit, the result depends on the speed of this machine.
    top: number of the best layouts to compile, besides the best of each preset, and number of pipelines
      to compile (at least one per schedule). With 0, nothing is compiled, and estimates are not checked.
    seed: seed of the random number generator.
    fresh: whether to discard cached estimates.
    hardware: TOML file with descriptions of further chips.
    jobs: number of processes that estimate (8 at most), and of compilers, that run in parallel. Default: half of the CPU's cores.
    show: whether to show a progress bar.

  Returns:
    The best layout, the effect of each of its rules, and the runners-up. It is the best of all compiled
    layouts. The best mesh of each preset is compiled too, unless a reliable estimate needs too much
    memory or twice the time; so the result is no worse than the presets.

  Raises:
    SearchError: constraints that cannot be met; lists all of them.
    InfeasibleError: no layout fits; names the smallest, and by how much it exceeds the budget.
    TargetDeviceError: an unknown target, or one without a compiler on this machine; or `jobs` is less than 1.
    PipelineError: the step cannot be cut into the stages of a schedule.
    TypeError: the first argument is neither a `TrainStep` nor a function that returns one.
    Exception: any exception of the step while it is traced.

  Example:
    >>> def create():
    ...   return {'w': LogicallyPartitioned(jnp.ones((64, 256)), ('embed', 'mlp'))}
    >>> def step(state, x):
    ...   return jax.tree.map(lambda w: w - 0.1, state), jnp.sum((x @ state['w'].unbox()) ** 2)
    >>> train_step = explore.TrainStep(step, create, jax.ShapeDtypeStruct((32, 64), jnp.float32))
    >>> result = search(train_step, 'cpu:8', candidates=20, top=1, pin={'batch': 'data'})
    >>> result.layout.rules.pairs[0]
    ('batch', 'data')
  """
  check_train_step(train_step, 'search')
  hardware_target = parse_target(target, hardware)
  _check_types(
    (Mapping, {'choices': choices, 'pin': pin}),
    (Collection, {'pipelines': pipelines, 'forbid': forbid}),
    (Mapping | Mesh | AbstractMesh, {'mesh': mesh}),
  )
  _check_values(choices, mesh, {'pin': pin, 'forbid': forbid, 'batch_only': batch_only})
  values = {name: tuple(values) for name, values in (choices or {}).items()}
  _check(hardware_target, top, candidates, values, tensor, time_limit)
  check_pipelines(pipelines, hardware_target)
  axes = axes_named(mesh, pin, batch_only, hardware_target.devices)
  task = SearchTask(train_step, hardware_target, hardware, checked_jobs(jobs), fresh, axes)
  first = lower_variant(task, first_choices(values))
  constraints_on = functools.partial(
    constraints_of,
    facts=first.facts,
    memory=memory,
    mesh=mesh,
    pin=pin,
    forbid=forbid,
    batch_only=batch_only,
    tensor=tensor,
    host=host,
  )
  constraints = constraints_on(hardware_target)
  workers = WalkWorkers(min(task.jobs, _MAX_WORKERS))
  trials = Trials(task, constraints.memory, first, first_choices(values), workers)
  facts_under = lambda choices: trials.variant(choices).facts
  space = Space(first.facts, constraints, hardware_target, values, facts_under)
  searches = pipeline_searches(pipelines, trials, space, constraints_on)
  most = _MAX_COMPILED if first.reason else _MAX_PARTITIONED if first.partitions_each else candidates
  limit = min(candidates, most)
  run = SearchRun(space, trials, searches, SearchLimits(limit, time_limit, top, seed), show)
  with contextlib.closing(workers), shared_larger_programs(), warnings.catch_warnings():
    # a candidate leaves out names on purpose, also those that resemble others
    warnings.filterwarnings('ignore', TYPO_WARNING)
    return run.run()


def _check_types(*kinds: tuple[Any, Mapping[str, Any]]) -> None:
  """Raises SearchError for the arguments of `search` that are of another type than theirs, or None."""
  wrong = [
    f'{name}={value_text(value)}'
    for kind, values in kinds
    for name, value in values.items()
    if value is not None and not isinstance(value, kind)
  ]
  if wrong:
    raise SearchError(
      f'search does not take {", ".join(wrong)}.\n'
      "Fix: choices and pin are dicts by name, such as pin={'batch': 'data'}; pipelines is a list of schedules, forbid a dict "
      'or a list of names, mesh a mesh or a dict of sizes.'
    )


def _check_values(choices: Any, mesh: Any, axes: Mapping[str, Any]) -> None:
  """Raises SearchError for values of choices, sizes of the mesh and names of axes that are of another type."""
  is_list = lambda one, kind: isinstance(one, kind) and not isinstance(one, str | bytes)
  is_text = lambda one: isinstance(one, str)
  wrong = [
    f'choices[{value_text(name)}]={value_text(values)}'
    for name, values in (choices or {}).items()
    if not is_list(values, Iterable)
  ]
  sizes = mesh.items() if isinstance(mesh, Mapping) else ()
  wrong += [
    f'mesh[{value_text(name)}]={value_text(size)}'
    for name, size in sizes
    if not hasattr(size, '__index__')
  ]
  given = {name: one for name, one in axes.items() if not isinstance(one, Mapping)}
  for argument, one in axes.items():
    if isinstance(one, Mapping):
      given |= {f'{argument}[{value_text(name)}]': each for name, each in one.items()}
  wrong += [
    f'{name}={value_text(one)}'
    for name, one in given.items()
    if not (one is None or is_text(one) or (is_list(one, Collection) and all(map(is_text, one))))
  ]
  if wrong:
    raise SearchError(
      f'search does not take {", ".join(wrong)}.\n'
      "Fix: write choices={'remat': (True, False)}, mesh={'data': 8}, pin={'batch': 'data', 'embed': ('data', 'fsdp')}, "
      "forbid=['length'], batch_only='data'."
    )


def _check(
  target: Target,
  top: int,
  candidates: int,
  choices: Mapping[str, tuple[Any, ...]],
  tensor: int | None,
  time_limit: float | None,
) -> None:
  unhashable = [
    f'\n  {name}: {value_text(value)}, of type {type(value).__name__}'
    for name, values in choices.items()
    for value in values
    if not is_hashable(value)
  ]
  if unhashable:
    raise SearchError(
      f'A search compares choices, so they have to be hashable, and these are not:{"".join(unhashable)}\n'
      "Fix: pass tuples in the place of lists, or texts that the step looks up, such as choices={'policy': ('dots', 'none')}."
    )
  empty = [name for name, values in choices.items() if not values]
  if empty or candidates < 1 or top < 0:
    raise SearchError(
      f'The search is empty: candidates={candidates}, top={top}'
      + ''.join(f', choices[{value_text(name)}] has no values' for name in empty)
      + '.\nFix: pass at least one candidate, a top of 0 or more, and a value for every choice.'
    )
  if (tensor is not None and tensor < 1) or (time_limit or 0) < 0:
    raise SearchError(
      f'No layout can meet tensor={tensor}, time_limit={time_limit}.\n'
      'Fix: pass 1 or more as tensor (1: no tensor parallelism), 0 or more as time_limit, or omit them.'
    )
  if top:
    check_compiler(target)
