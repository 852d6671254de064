"""Searching: which rule table and mesh are best for a model, a machine and a budget of memory.

    found = search(train_step, create_state, batch, target='h100:64', memory='60GiB')
    found.to_toml('layout.toml')

The step is lowered once and estimated under many layouts (`flax_spmd.explore`), from the presets on, one
change at a time (`descent`). The best of them, those that are doubtful among the good ones, and the best of
each preset are then compiled by the target's own compiler, and what that says decides. Pipelines are searched
beside them (`staging`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from flax_spmd._src.compare.compilation import check_compiler
from flax_spmd._src.compare.hardware import parse
from flax_spmd._src.pipeline.schedules.schedule import Schedule
from flax_spmd._src.public_module import set_module
from flax_spmd._src.search.pipelines import check_pipelines, stagings
from flax_spmd._src.search.result import Found
from flax_spmd._src.search.run import Limits, Search
from flax_spmd._src.search.space import Space
from flax_spmd._src.search.trials import Task, Trials, as_choices, program_of
from flax_spmd._src.search.user_constraints import wishes_of
from flax_spmd.errors import SearchError

_FEW = 24  # candidates, where each has to be compiled


@set_module('flax_spmd')
def search(
  step: Callable[..., Any],
  create: Callable[..., Any],
  batch: Any,
  target: str,
  *,
  memory: int | str | None = None,
  args: Sequence[Any] = (),
  places: Any = None,
  donate: bool = True,
  choices: Mapping[str, Sequence[Any]] | None = None,
  pipelines: Sequence[Schedule] = (),
  mesh: Mapping[str, int] | Mesh | AbstractMesh | None = None,
  pin: Mapping[str, Any] | None = None,
  forbid: Mapping[str, Any] | Sequence[str] = (),
  batch_only: str | Sequence[str] = (),
  tensor: int | None = None,
  candidates: int = 1000,
  time_limit: float | None = None,
  top: int = 8,
  seed: int = 0,
  fresh: bool = False,
  hardware: str | os.PathLike[str] | None = None,
  jobs: int | None = None,
  show: bool = False,
) -> Found:
  """Searches for the layout under which a training step is fastest and fits.

  Nothing is allocated, nothing runs. Estimates are kept beside what was compiled (`FLAX_SPMD_CACHE`), so
  that a search that was killed goes on where it was, and ends with the same answer. Ctrl-C ends it with the
  best so far.

  Args:
    step: `step(state, batch)`; anything that can be jitted.
    create: makes a state, of `args`; is traced only.
    batch: the step's second argument in full size: arrays, or `jax.ShapeDtypeStruct`s.
    target: `'h100:64'`, `'v5e:16x16'`, `'cpu:8'`; see `flax-spmd targets`.
    memory: what a device may need, in bytes or as `'60GiB'`; default: what a program may use there.
    args: arguments of `create`.
    places: where the batch goes, as of `Layout.shard`; default: each first dimension is named `batch`.
    donate: whether the state is donated.
    choices: arguments of the step that are tried too, such as `{'remat': ('none', 'full')}`; `create` gets
      those that it has parameters for.
    pipelines: schedules under which the step is tried as a pipeline too, such as `OneFOneB(ranks=4)`: its
      stages over a mesh axis `stage`, the other axes within a rank. The step takes its gradients in
      `pipeline.accumulate`; a model that ends no stages is cut into equal ones.
    mesh: size per mesh axis, or a mesh, if that is decided; a size may be -1. Of a pipeline, the axes within a rank.
    pin: the mesh axes that names have to lie over; None is nowhere. An axis that is named here is part of
      every mesh.
    forbid: names that are never split; or, per name, the axes that it must not lie over.
    batch_only: mesh axes that nothing but the batch lies over.
    tensor: over how many devices products of matrices may be cut; default: those of a node.
    candidates: how many are estimated, and as many again for each pipeline; a few more come from making
      the best ones simpler.
    time_limit: seconds, for all of it; then the answer depends on how fast this machine is.
    top: how many of the best are compiled, the best of each preset aside, and as many pipelines (of each
      schedule one at least); 0 is nothing.
    seed: of what is random.
    fresh: whether what was estimated before is thrown away.
    hardware: a TOML file with chips of one's own.
    jobs: how many compilers run at once; default: one for two cores.
    show: whether progress is shown.

  Returns:
    The best layout, what its rules buy, the runners-up. It is the best of all that was compiled. Of each
    preset the best mesh was, unless it needs too much memory, or twice the time, by an estimate without
    doubts: so the layout is no worse than the presets.

  Raises:
    SearchError: wishes that cannot be met; names all of them.
    InfeasibleError: no layout that was tried fits; names the nearest, and by how much it misses.
    TargetDeviceError: an unknown target, or one that cannot be compiled for here.
    PipelineError: the step cannot be cut into the stages of a schedule.
    Exception: whatever the step raises when it is traced.

  Example:
    >>> def create():
    ...   return {'w': LogicallyPartitioned(jnp.ones((64, 256)), ('embed', 'mlp'))}
    >>> def step(state, x):
    ...   return jax.tree.map(lambda w: w - 0.1, state), jnp.sum((x @ state['w'].unbox()) ** 2)
    >>> batch = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    >>> found = search(step, create, batch, 'cpu:8', candidates=20, top=1, pin={'batch': 'data'})
    >>> found.layout.rules.pairs[0]
    ('batch', 'data')
  """
  aim = parse(target, hardware)
  tried = {name: tuple(values) for name, values in (choices or {}).items()}
  _check(aim, top, candidates, tried)
  check_pipelines(pipelines, aim)
  task = Task(step, create, batch, aim, args, places, donate, hardware, jobs, fresh)
  first = program_of(task, as_choices(tried))
  wished = functools.partial(
    wishes_of,
    facts=first.facts,
    memory=memory,
    mesh=mesh,
    pin=pin,
    forbid=forbid,
    batch_only=batch_only,
    tensor=tensor,
  )
  space = Space(first.facts, wished(aim), aim, tried)
  trials = Trials(task, space.wishes.memory, first, as_choices(tried))
  staged = stagings(pipelines, trials, space, wished)
  limits = Limits(min(candidates, _FEW) if first.reason else candidates, time_limit, top, seed)
  return Search(space, trials, staged, limits, show).run()


def _check(aim: Any, top: int, candidates: int, choices: Mapping[str, tuple[Any, ...]]) -> None:
  empty = [name for name, values in choices.items() if not values]
  if empty or candidates < 1 or top < 0:
    raise SearchError(
      f'There is nothing to search: candidates={candidates}, top={top}'
      + ''.join(f', choices[{name!r}] is empty' for name in empty)
      + '.\nFix: try at least one candidate, and give every choice a value.'
    )
  if top:
    check_compiler(aim)
