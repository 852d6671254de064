"""The checks of a case; each returns its result, 'ok' if everything is equal, or raises at what is otherwise.

They compare with plain Flax on one device, and with the partitioner of the model's authors.
"""

import functools
import tempfile
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from case import Case
from jax.sharding import NamedSharding, PartitionSpec
from render import AS_OWN, NOT_TRIED

import flax_spmd as spmd
from flax_spmd import checkpoint, pipeline

STEPS = 3
MICROBATCHES = 4
RTOL = 1e-4


class Otherwise(Exception):
  """A check found a difference."""


class Trial:
  """A case under its layout and on one device. Later checks use the results of earlier ones."""

  def __init__(self, case: Case):
    self.case = case
    self.layout = spmd.Layout(dict(case.mesh), case.rules, **case.policies)
    self.create, self.step = case.functions(self.layout.mesh)
    self.losses: list[float] = []
    self.state: Any = None

  @functools.cached_property
  def plain(self) -> Any:
    """The state of plain Flax on one device."""
    return jax.jit(self.case.functions(self._on(1).mesh)[0])(*self.case.args)

  @functools.cached_property
  def created(self) -> Any:
    """The state under the layout. The first step donates it."""
    return self.layout.init(self.create, *self.case.args)

  def init(self) -> None:
    """The state is bit-equal to that of plain Flax on one device.

    XLA rounds some functions otherwise on a shard. Then it is bit-equal to that of `jax.jit` with these shardings.
    """
    plain, state = _by_path(self.plain), _by_path(self.created)
    if different := _different(plain, state):
      shardings = {path: leaf.sharding for path, leaf in state.items()}
      create = jax.jit(lambda *args: _by_path(self.create(*args)), out_shardings=shardings)
      _check_equal(create(*self.case.args), state)
      for path in different:
        np.testing.assert_allclose(plain[path], state[path], rtol=1e-6)

  def shardings(self) -> None:
    """Every leaf is sharded as by the authors' own partitioner; a model without one is sharded at all."""
    ours = _by_path(self.layout.abstract(self.create, *self.case.args))
    if self.case.partitioner is None:
      return _check_sharded(ours)
    theirs = self._their_shardings()
    different = [
      f'{path}: {leaf.sharding.spec}, theirs {theirs[path].spec}'
      for path, leaf in ours.items()
      if not leaf.sharding.is_equivalent_to(theirs[path], leaf.ndim)
    ]
    if different:
      raise Otherwise(f'silently {len(different)} of {len(ours)} leaves otherwise: {different[0]}')

  def _their_shardings(self) -> dict[str, NamedSharding]:
    """By path of the state. Theirs may have one for a box; None is replicated."""
    abstract = jax.eval_shape(self.create, *self.case.args)
    tree = self.case.partitioner(abstract, self.layout.mesh)
    known = dict(jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_placement))
    return {
      jax.tree_util.keystr(path): _sharding(_of_prefix(known, path), self.layout.mesh)
      for path, _ in jax.tree_util.tree_leaves_with_path(abstract)
    }

  def steps(self) -> str:
    """Donated steps have the losses of one device, and move nothing."""
    if self.case.one_device:
      self._step_on_one_device()
    before = _specs(self.created)
    state, losses = self._train(self.layout, self.step, self.created, STEPS)
    result = self._agreement(losses, self.losses[:STEPS], self._own_losses)
    if moved := [path for path, spec in _specs(state).items() if spec != before[path]]:
      raise Otherwise(f'{len(moved)} of {len(before)} leaves moved: {moved[0]}')
    self.state = state
    return result

  def _step_on_one_device(self) -> None:
    plain = self.plain
    step = jax.jit(self.case.plain(self.case.functions(self._on(1).mesh)[1]))
    for _ in range(STEPS + 1):
      plain, loss = step(plain, self.case.batch)
      self.losses.append(float(loss))

  def _agreement(self, losses: list[float], one: list[float], own: Callable[[], list[float]]) -> str:
    """'ok' if losses are those of one device; some models have others in their authors' own way too."""
    if _close(losses, one):
      return 'ok'
    if _close(losses, own()):
      return AS_OWN
    raise Otherwise(f'losses {losses}, on one device {one}')

  def _own_losses(self) -> list[float]:
    """Losses on the mesh without this package: by `jax.jit`, under the rules as Flax's."""
    state = self.layout.init(self.create, *self.case.args)
    return self._own_way(self.layout, self.step, state, STEPS)

  def _own_way(self, layout: spmd.Layout, fn: Any, state: Any, count: int) -> list[float]:
    batch, losses = layout.shard(self.case.batch, self.case.batch_spec), []
    pairs = [rule for rule in self.case.rules if isinstance(rule, (tuple, list))]
    with jax.set_mesh(layout.mesh), nn.logical_axis_rules(pairs):
      step = jax.jit(self.case.plain(fn))
      for _ in range(count):
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses

  def _train(self, layout: spmd.Layout, fn: Any, state: Any, count: int) -> tuple[Any, list[float]]:
    options = {'axis_name': self.case.axis_name} if self.case.axis_name else {}
    step = layout.jit(fn, donate_argnums=0, **options)
    batch = layout.shard(self.case.batch, self.case.batch_spec)
    losses = []
    for _ in range(count):
      state, loss = step(state, batch)
      losses.append(float(loss))
    return state, losses

  def restore(self) -> str:
    """A checkpoint is restored onto one device, and onto half of them, where it trains on with the same loss."""
    if self.state is None:
      raise Otherwise('no state: its steps failed')
    with tempfile.TemporaryDirectory() as folder:
      path = Path(folder) / 'checkpoint'
      checkpoint.save(path, self.state, layout=self.layout)
      self._restore(path, self._on(1))
      other = self._on(4)
      step = self.case.functions(other.mesh)[1]
      _, losses = self._train(other, step, self._restore(path, other), 1)
      own = lambda: self._own_way(other, step, self._restore(path, other), 1)
      return self._agreement(losses, self.losses[STEPS:], own)

  def _on(self, devices: int) -> spmd.Layout:
    """The layout on fewer devices."""
    return self.layout.replace(
      mesh=spmd.make_mesh(self._halved(devices), devices=jax.devices()[:devices])
    )

  def _halved(self, devices: int) -> dict[str, int]:
    """The sizes of the mesh axes on fewer devices: they are halved, the largest first."""
    sizes = dict(self.case.mesh)
    while np.prod(list(sizes.values())) > devices:
      largest = max(sizes, key=sizes.__getitem__)
      sizes[largest] //= 2
    return sizes

  def _restore(self, path: Path, other: spmd.Layout) -> Any:
    target = other.abstract(self.case.functions(other.mesh)[0], *self.case.args)
    state = checkpoint.restore(path, target)
    _check_equal(_by_path(self.state), _by_path(state))
    if _specs(state) != _specs(target):
      raise Otherwise(f'other shardings on {other.mesh.size} devices')
    return state

  def compare(self) -> None:
    """`compare` compiles the step."""
    step = self._train_step if self.case.of_mesh else self._train_step(self.layout)
    outcome = spmd.compare(step, {'own': self.layout}, 'cpu:8')['own']
    if outcome.error:
      raise Otherwise(str(outcome.error))

  def _train_step(self, layout: spmd.Layout) -> spmd.explore.TrainStep:
    create, step = self.case.functions(layout.mesh)
    batch = jax.eval_shape(lambda: self.case.batch)
    return spmd.explore.TrainStep(
      self.case.plain(step), create, batch, self.case.args, self.case.batch_spec
    )

  def pipeline(self) -> str:
    """Two stages, which `pipeline_jit` cuts, have parameters each, and the losses of one device with as many microbatches."""
    if not (self.case.halves or self.case.accumulates):
      return NOT_TRIED
    layout = self.layout.replace(mesh=spmd.make_mesh({'rank': 2, **self._halved(4)}))
    schedule = pipeline.OneFOneB(ranks=2)
    options: dict[str, Any] = {'axis': 'rank', 'stages': 2}
    batch = self.case.batch
    if self.case.halves:
      plain = step = self.case.step_of(schedule)
      batch = jax.tree.map(lambda rows: rows.reshape(MICROBATCHES, -1, *rows.shape[1:]), batch)
    else:
      plain, step = (self.case.functions(each.mesh)[1] for each in (self._on(1), layout))
      options['schedule'] = schedule
    staged = layout.pipeline_jit(step, **options)

    def own() -> list[float]:
      mesh = self._on(4).mesh
      rows = PartitionSpec(*[None] * bool(self.case.halves), *self.case.batch_spec)
      sharded = jax.device_put(batch, NamedSharding(mesh, rows))
      with jax.set_mesh(mesh):
        return _losses(jax.jit(plain), self.plain, sharded)[0]

    expected, _ = _losses(jax.jit(plain), self.plain, batch)
    losses, state = _losses(staged, self.plain, batch)
    places = [leaf.sharding.device_set for leaf in jax.tree.leaves(state) if np.ndim(leaf)]
    if not all(any(place <= {*rank.flat} for place in places) for rank in layout.mesh.devices):
      raise Otherwise('one rank has no array of the state to itself')
    return self._agreement(losses, expected, own)


CHECKS: Mapping[str, Callable[[Trial], str | None]] = {
  'init': Trial.init,
  'shardings': Trial.shardings,
  'steps': Trial.steps,
  'restore': Trial.restore,
  'compare': Trial.compare,
  'pipeline': Trial.pipeline,
}


def results(make: Callable[[], Case], names: Collection[str] = tuple(CHECKS)) -> dict[str, str]:
  """The results of checks. A case that cannot be made fails all of them."""
  try:
    trial = Trial(make())
  except Exception as error:
    return dict.fromkeys(names, _text(error))
  return {name: _result(CHECKS[name], trial) for name in names}


def _result(check: Callable[[Trial], str | None], trial: Trial) -> str:
  try:
    return check(trial) or 'ok'
  except Exception as error:
    return _text(error)


def _text(error: Exception) -> str:
  """An error as one line; others than a difference are printed whole."""
  first = (str(error).strip().splitlines() or [''])[0][:200]
  if isinstance(error, Otherwise):
    return first
  traceback.print_exception(error, limit=-4)
  return f'{type(error).__name__}: {first}'


def _by_path(tree: Any) -> dict[str, Any]:
  return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _specs(tree: Any) -> dict[str, Any]:
  """The part of an array that each device has, by path: equal for equivalent shardings."""
  return {
    path: leaf.sharding.devices_indices_map(leaf.shape)
    for path, leaf in _by_path(tree).items()
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))
  }


def _check_equal(expected: dict[str, Any], found: dict[str, Any]) -> None:
  if different := _different(expected, found):
    raise Otherwise(f'{len(different)} of {len(expected)} leaves differ: {different[0]}')


def _different(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
  """Paths of leaves whose bits differ."""
  if expected.keys() != found.keys():
    raise Otherwise(f'other leaves: {sorted(expected.keys() ^ found.keys())[0]}')
  return [path for path in expected if _bits(expected[path]) != _bits(found[path])]


def _bits(leaf: Any) -> bytes:
  if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    leaf = jax.random.key_data(leaf)
  return np.asarray(leaf).tobytes()


def _close(found: list[float], expected: list[float]) -> bool:
  return len(found) == len(expected) and np.allclose(found, expected, rtol=RTOL, atol=0)


def _losses(step: Any, state: Any, batch: Any) -> tuple[list[float], Any]:
  """The losses of some steps, and the last state."""
  losses = []
  for _ in range(STEPS):
    state, loss = step(state, batch)
    losses.append(float(loss))
  return losses, state


def _check_sharded(leaves: dict[str, Any]) -> None:
  if all(leaf.sharding.is_fully_replicated for leaf in leaves.values()):
    raise Otherwise('every leaf is replicated')


def _of_prefix(known: dict[Any, Any], path: tuple[Any, ...]) -> Any:
  """The value of the longest part of a path that has one."""
  for length in range(len(path), 0, -1):
    if path[:length] in known:
      return known[path[:length]]
  raise Otherwise(f'their partitioner leaves out {jax.tree_util.keystr(path)}')


def _is_placement(value: Any) -> bool:
  return value is None or isinstance(value, (jax.sharding.Sharding, PartitionSpec))


def _sharding(placement: Any, mesh: Any) -> NamedSharding:
  """Their answer as a sharding; None is replicated."""
  if isinstance(placement, NamedSharding):
    return placement
  return NamedSharding(mesh, PartitionSpec() if placement is None else placement)
