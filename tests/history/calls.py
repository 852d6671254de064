"""Calls as data: a tuple of texts describes one call of the library, with arguments made anew from the description.

result = run(call, World())   # what the call gives, as a value that can be compared and pickled

A `World` keeps the layouts, plans and compiled functions of one process, as a program does between calls. The
arguments do not come from it, so a call means the same in every process.
"""

import functools
import re
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import checkpoint
from tests.history.models import ARRAY_STEPS, MODELS, MODES, STEPS

Call = tuple[str, ...]

_NAMES = (('batch', 'data'), ('hidden', 'model'))
LAYOUTS = {
  'names': lambda: spmd.Layout({'data': 2, 'model': 4}, _NAMES),
  'other names': lambda: spmd.Layout({'data': 2, 'model': 4}, (('batch', 'model'), ('embed', 'data'))),
  'wide': lambda: spmd.Layout({'data': 8}, (('batch', 'data'), ('embed', 'data'))),
  'strict': lambda: spmd.Layout({'data': 2, 'model': 4}, _NAMES, unmatched='error'),
  'paths': lambda: spmd.Layout(
    {'data': 2, 'model': 4}, (('(^|/)w$', P('model', 'data')), ('kernel$', P(None, 'data')), *_NAMES)
  ),
  'fsdp': lambda: spmd.Layout({'data': 2, 'model': 4}, spmd.fsdp('data', min_size=1)),
  'function': lambda: spmd.Layout({'data': 2, 'model': 4}, _last_dimension),
}


def _last_dimension(array):
  return P(*[None] * (len(array.shape) - 1), 'model') if len(array.shape) > 1 else P()


SPECS = {
  'replicated': P(),
  'rows': P('data'),
  'rows spelled': P('data', None),
  'columns': P(None, 'data'),
  'both': P(None, ('data',)),
}
ARRAYS = ('numpy', 'uncommitted', 'weak', 'one device', 'half', *SPECS)
STATES = ('planned', 'unboxed', 'numpy', 'uncommitted', 'elsewhere', *SPECS)
OPTIONS = {
  '': {},
  'donate': {'donate_argnums': 0},
  'in': {'in_rules': (None, P('data'))},
  'constrained': {'in_constraints': (None, P('data'))},
  'out': {'out_rules': P()},
}


class World:
  """The layouts and compiled functions that a process has made so far."""

  def __init__(self) -> None:
    self._made: dict[Any, Any] = {}

  def layout(self, name: str) -> spmd.Layout:
    """The layout of this name."""
    return self._once(name, LAYOUTS[name])

  def jitted(self, layout: str, step: str, option: str) -> Any:
    """The step, compiled under a layout."""
    fn = STEPS.get(step) or ARRAY_STEPS[step]
    return self._once((layout, step, option), lambda: self.layout(layout).jit(fn, **OPTIONS[option]))

  def plan(self, layout: str, model: str, boxed: bool = True) -> spmd.Plan:
    """The plan of a model."""
    make = lambda: self.layout(layout).plan(MODELS[model], boxed=boxed)
    return self._once((layout, model, boxed), make)

  def _once(self, key: Any, make: Callable[[], Any]) -> Any:
    if key not in self._made:
      self._made.setdefault(key, make())
    return self._made[key]


# -- arguments


@functools.cache
def _host_state(model: str) -> Any:
  return jax.device_get(MODELS[model]())


def _state(model: str, kind: str, layout: spmd.Layout) -> Any:
  state = _host_state(model)
  if kind in ('planned', 'unboxed'):
    placed = _put(state, LAYOUTS['names']().sharding(state))
    return spmd.unbox(placed) if kind == 'unboxed' else placed
  if kind == 'elsewhere':
    return _put(state, LAYOUTS['wide']().sharding(state))
  return jax.tree.map(lambda leaf: _placed(leaf, kind, layout), state)


def _put(state: Any, shardings: Any) -> Any:
  leaves, treedef = jax.tree.flatten(state)
  return treedef.unflatten(map(jax.device_put, leaves, jax.tree.leaves(shardings)))


def _array(kind: str, layout: spmd.Layout, shape: tuple[int, ...] = (16, 16)) -> Any:
  values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) % 5
  if kind == 'weak':
    return jnp.broadcast_to(jnp.asarray(2.0), shape)
  if kind == 'half':
    return _placed(values.astype(jnp.bfloat16), 'rows', layout)
  return _placed(values, kind, layout)


def _placed(leaf: Any, kind: str, layout: spmd.Layout) -> Any:
  if kind == 'numpy':
    return leaf
  if kind == 'uncommitted':
    return jnp.asarray(leaf)
  if kind == 'one device':
    return jax.device_put(leaf, jax.devices()[0])
  spec = SPECS[kind] if np.ndim(leaf) == 2 else P()
  return jax.device_put(leaf, NamedSharding(layout.mesh, spec))


# -- calls; each function prepares the arguments, and returns the call itself


def _step(world, layout, step, option, model, state, x):
  layout_ = world.layout(layout)
  jitted, state, x = (
    world.jitted(layout, step, option),
    _state(model, state, layout_),
    _array(x, layout_),
  )
  return lambda: jitted(state, x)


def _keyword(world, layout, step, option, model, state, x):
  layout_ = world.layout(layout)
  jitted, state, x = (
    world.jitted(layout, step, option),
    _state(model, state, layout_),
    _array(x, layout_),
  )
  return lambda: jitted(state, x=x)


def _arrays(world, layout, step, option, a, b):
  layout_ = world.layout(layout)
  jitted, a, b = world.jitted(layout, step, option), _array(a, layout_), _array(b, layout_)
  return lambda: jitted({'w': a}, {'w': b}) if step == 'pair_by_key' else jitted(a, b)


def _mode(world, layout, x, mode):
  jitted, x = world.jitted(layout, 'with_mode', ''), _array(x, world.layout(layout))
  return lambda: jitted(x, MODES[mode])


def _inside(world, layout, step, option, model, state, x):
  """A step inside a function that JAX compiles."""
  layout_ = world.layout(layout)
  jitted, state, x = (
    world.jitted(layout, step, option),
    _state(model, state, layout_),
    _array(x, layout_),
  )
  return lambda: jax.jit(lambda state, x: jitted(state, x))(state, x)


def _abstract_step(world, layout, step, option, model, state, x):
  layout_ = world.layout(layout)
  jitted, state, x = (
    world.jitted(layout, step, option),
    _state(model, state, layout_),
    _array(x, layout_),
  )
  return lambda: jax.tree.leaves(jitted.lower(state, x).compile().output_shardings)


def _program(world, layout, step, option, model, state, x):
  layout_ = world.layout(layout)
  jitted, state, x = (
    world.jitted(layout, step, option),
    _state(model, state, layout_),
    _array(x, layout_),
  )
  return lambda: str(jitted.explain(state, x))


def _init(world, layout, model, boxed):
  return lambda: world.layout(layout).init(MODELS[model], boxed=boxed == 'boxed')


def _plan(world, layout, model, boxed, what):
  plan = lambda: world.plan(layout, model, boxed == 'boxed')
  host = _host_state(model)
  calls = {
    'init': lambda: plan().init(),
    'abstract': lambda: plan().abstract(),
    'names': lambda: plan().names,
    'explain': lambda: str(plan().explain()),
    'shard': lambda: plan().shard(host),
    'shard another': lambda: plan().shard(_host_state('cache')),
    'explain a state': lambda: str(plan().explain(_state(model, 'rows', world.layout(layout)))),
  }
  return calls[what]


PLANNED = ('init', 'abstract', 'names', 'explain', 'shard', 'shard another', 'explain a state')


def _tree(world, layout, what, model, state):
  layout_, tree = world.layout(layout), _state(model, state, world.layout(layout))
  calls = {
    'names': lambda: layout_.names(tree),
    'spec': lambda: jax.tree.leaves(layout_.spec(tree)),
    'check': lambda: str(layout_.check(tree)),
    'rows': lambda: [str(row) for row in layout_.rows(tree)],
    'explain': lambda: str(spmd.explain(layout_, tree)),
    'shard': lambda: layout_.shard(tree),
    'replicate': lambda: layout_.replicate(tree),
    'unbox': lambda: spmd.unbox(tree),
  }
  return calls[what]


LOOKS = ('names', 'spec', 'check', 'rows', 'explain', 'shard', 'replicate', 'unbox')
PLACEMENTS = {
  'names': ('batch', 'hidden'),
  'spec': P('data'),
  'unknown': ('nowhere', None),
  'three': P(None, None, 'data'),
  'fsdp': spmd.fsdp('data', min_size=1),
}


def _shard(world, layout, x, placement):
  array = _array(x, world.layout(layout))
  return lambda: world.layout(layout).shard(array, PLACEMENTS[placement])


def _block(world, layout, inner, x):
  """Constraints in the blocks of two layouts, and between them."""
  array = _array(x, world.layout(layout))
  constrained = lambda x: spmd.with_logical_constraint(x * 2, ('batch', 'hidden'))

  def call():
    with world.layout(layout):
      first = jax.jit(constrained)(array)
      with world.layout(inner):
        second = spmd.logical_to_mesh_axes(('batch', 'hidden'))
      return first, str(second), str(spmd.logical_to_mesh_axes(('batch', 'hidden')))

  return call


def _save(world, layout, model, state, target):
  tree = _state(model, state, world.layout(layout))

  def call():
    layout_ = world.layout(layout)
    plan = world.plan(layout, model) if target == 'plan' else None
    into = layout_.abstract(MODELS[model]) if target == 'abstract' else plan
    with tempfile.TemporaryDirectory() as folder:
      checkpoint.save(f'{folder}/state', tree, plan or layout_)
      options = {'layout': layout_} if into is None else {}
      return checkpoint.restore(f'{folder}/state', into, **options)

  return call


_CALLS = {
  'step': _step,
  'keyword': _keyword,
  'arrays': _arrays,
  'mode': _mode,
  'inside': _inside,
  'abstract step': _abstract_step,
  'program': _program,
  'init': _init,
  'plan': _plan,
  'tree': _tree,
  'shard': _shard,
  'block': _block,
  'save': _save,
}


# -- results


class Leaf(NamedTuple):
  """An array of a result, as a value."""

  shape: tuple[int, ...]
  dtype: str
  weak: bool
  sharding: str
  values: bytes


def _leaf(leaf: Any) -> Any:
  if isinstance(leaf, jax.ShapeDtypeStruct):
    return Leaf(leaf.shape, str(leaf.dtype), leaf.weak_type, _sharding_text(leaf.sharding), b'')
  if isinstance(leaf, jax.Array):
    where = f'{_sharding_text(leaf.sharding)} {leaf.committed}'
    return Leaf(leaf.shape, str(leaf.dtype), leaf.weak_type, where, np.asarray(leaf).tobytes())
  return _text(repr(leaf))


def _sharding_text(sharding: Any) -> str:
  if isinstance(sharding, NamedSharding):
    devices = [device.id for device in sharding.mesh.devices.flat]
    return f'{sharding.spec} {sharding.mesh.shape} {devices} {sharding.memory_kind}'
  return str(sharding)


def _text(text: str) -> str:
  text = text.replace(tempfile.gettempdir(), '<tmp>')
  return re.sub(r'0x[0-9a-f]+|tmp[a-z0-9_]{8}', '_', text)


class Outcome(NamedTuple):
  """What a call gave: the structure and leaves of its result, or an error as text."""

  structure: str
  leaves: tuple[Any, ...] = ()
  is_error: bool = False


def prepare(call: Call, world: World) -> Callable[[], Outcome]:
  """Makes the arguments of a call; the function that it returns makes the call."""
  try:
    ready = _CALLS[call[0]](world, *call[1:])
  except Exception as error:
    outcome = _error(error)
    return lambda: outcome

  def outcome_of_call() -> Outcome:
    try:
      leaves, treedef = jax.tree.flatten(ready(), is_leaf=lambda node: isinstance(node, P))
    except Exception as error:
      return _error(error)
    return Outcome(_text(str(treedef)), tuple(map(_leaf, leaves)))

  return outcome_of_call


def _error(error: Exception) -> Outcome:
  return Outcome(f'{type(error).__name__}: {_text(str(error))}', is_error=True)


def run(call: Call, world: World) -> Outcome:
  """Makes a call."""
  return prepare(call, world)()
