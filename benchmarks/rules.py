"""Cost of rules of every kind: applied to 10,000 leaves, at each call of a jitted step, and explained.

The comparison is with Scalax, whose rules are the most similar, and for logical names with Flax. The
shardings of all leaves are compared first, so that the arms do the same work.

Cold means a new table, applied to a tree for the first time: once per program, on every host. Scalax caches
nothing for a tree, so its figure is the same the second time. Its regular expressions are new in each call,
like ours. Warm means a layout that has already planned this tree.

A step is called with a state of 1,000 and of 10,000 leaves that is sharded by `fsdp`: through `layout.jit`
with rules for argument and result, through `layout.jit` of a layout that has the rule, through Scalax's
`sjit` with its rules, and through a bare `jax.jit` with shardings. All four take the same arrays. The mesh
is one device: on eight emulated ones, JAX's work for the shards of each returned array would hide everything
else. The tiny function shows the overhead best.

All other trees are abstract. Absolute times depend on other load on the machine.
"""

import os

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import states
from harness import THREAD, WALL, Figure, at_most, measure, per_item, ratio, summary
from jax.sharding import PartitionSpec as P
from reporting import report
from specs import RULES as NAMES

import flax_spmd as spmd

try:
  from scalax import sharding as scalax
except ImportError:
  scalax = None
  print('Scalax is not installed, so its arms are left out. Fix: pip install scalax', file=sys.stderr)

MESH = spmd.make_mesh({'data': 2, 'model': 4})
LAYERS_OF_STATE = 333  # about 10,000 leaves: parameters and Adam's two moments
LAYERS_OF_PARAMETERS = 1000  # the same number, all of them parameters
COPIES = 4  # jitted functions per arm
_LAYERS = {
  'state': LAYERS_OF_STATE,
  'large state': 10 * LAYERS_OF_STATE,
  'params': LAYERS_OF_PARAMETERS,
}
SMALL = 64  # elements of the arrays of `states.py` that are not sharded


def figures() -> list[Figure]:
  return [
    *rule_figures(),
    *tiny_figures(),
    *call_figures(33),
    *call_figures(LAYERS_OF_STATE),
    *explain_figures(),
  ]


class Case(NamedTuple):
  """A table, the tree that it is applied to, and another library's way to the same shardings.

  `rules` and `theirs` are functions of a number; each number makes a table that differs from the others.
  """

  name: str
  tree: Any
  rules: Callable[[int], Sequence[Any]]
  other: str
  theirs: Callable[[int], Any] | None


def rule_figures() -> list[Figure]:
  cases, numbers = list(_cases()), itertools.count()
  arms = {'floor': functools.partial(jax.tree.map, lambda leaf: None, cases[0].tree)}
  for case in cases:
    ours, warm = _ours(case), spmd.Layout(MESH, case.rules(next(numbers)))
    arms[f'{case.name}, cold'] = lambda ours=ours: ours(next(numbers))
    arms[f'{case.name}, warm'] = functools.partial(warm.sharding, case.tree)
    if case.theirs:
      _check_alike(case, ours(next(numbers)), case.theirs(next(numbers)))
      arms[f'{case.name}, {case.other}'] = lambda theirs=case.theirs: theirs(next(numbers))
  rounds = measure(arms, rounds=21, warm_up=1)
  floor = per_item(
    'floor: jax.tree.map of a constant', rounds, 'floor', len(jax.tree.leaves(cases[0].tree))
  )
  return [floor, *itertools.chain.from_iterable(_figures_of(case, rounds) for case in cases)]


def _figures_of(case: Case, rounds) -> list[Figure]:
  name, leaves = case.name, len(jax.tree.leaves(case.tree))
  cold, warm, theirs = (f'{name}, {arm}' for arm in ('cold', 'warm', case.other))
  result = [
    per_item(cold, rounds, cold, leaves),
    per_item(warm, rounds, warm, leaves, at_most(2.5)),
  ]
  if case.theirs:
    result += [
      per_item(theirs, rounds, theirs, leaves),
      ratio(f'{cold}, over {case.other}', rounds, cold, theirs, at_most(0.5)),
    ]
  return result


def _cases():
  """Every kind of rule on parameters alone; some also on a whole state, where their cost differs."""
  params, state = _tree('params'), _tree('state')
  boxed, flaxs = _tree('params', spmd.LogicallyPartitioned), _tree('params', nn.LogicallyPartitioned)
  yield Case('fsdp', params, _fsdp, 'Scalax', _scalaxs(params, _scalax_fsdp))
  for count in (1, 10, 40):
    theirs = _scalaxs(params, lambda n, count=count: scalax.TreePathShardingRule(*_paths(n, count)))
    rules = functools.partial(_paths, count=count)
    yield Case(f'path rule {count} of {count}', params, rules, 'Scalax', theirs)
  theirs = _scalaxs(params, lambda n: scalax.PolicyShardingRule(lambda name, leaf: P('model')))
  yield Case('a policy', params, _policy, 'Scalax', theirs)
  yield Case('names, 70 rules', boxed, _names, 'Flax', lambda n: _flax_pair(flaxs, _names(n)))
  yield Case('fsdp, whole state', state, _fsdp, 'Scalax', _scalaxs(state, _scalax_fsdp))
  theirs = _scalaxs(state, lambda n: scalax.TreePathShardingRule(*_paths(n, 40)))
  paths = functools.partial(_paths, count=40)
  yield Case('path rule 40 of 40, whole state', state, paths, 'Scalax', theirs)
  theirs = _scalaxs(state, functools.partial(_scalax_scoped, state))
  yield Case('a table in the table, whole state', state, _scoped, 'Scalax', theirs)


def _fsdp(number: int):
  return spmd.fsdp('model', min_size=1024), *_unused(number)


def _paths(number: int, count: int):
  """`count` new path rules; only the last one matches."""
  idle = tuple((f'nomatch{number}_{i}/.*kernel', P('data', 'model')) for i in range(count - 1))
  return *idle, (f'.*|new{number}', P('model'))


def _policy(number: int):
  return lambda leaf: P('model'), *_unused(number)


def _names(number: int):
  return *NAMES, *_unused(number)


def _scoped(number: int):
  moments = spmd.Rules(spmd.fsdp('data', min_size=1024), *_unused(number))
  return (f'^opt_state/|new{number}', moments), (f'.*|new{number}', P('model'))


def _unused(number: int):
  return ((f'unused_{number}', None),)


def _scalax_fsdp(number: int):
  return scalax.FSDPShardingRule('model', MESH.shape['model'], 1024)


def _scalax_scoped(state, number: int):
  """Scalax has no nested tables, but takes a rule for each part of a tree."""
  moments = scalax.FSDPShardingRule('data', MESH.shape['data'], 1024)
  params = scalax.TreePathShardingRule((f'.*|new{number}', P('model')))
  return state.replace(step=P(), params=params, opt_state=moments)


def _scalaxs(tree, rule: Callable[[int], Any]) -> Callable[[int], Any] | None:
  """Scalax's shardings of a tree, from a new rule for each number."""
  if scalax is None:
    return None
  return lambda number: _helper().match_sharding_rule(rule(number), tree)


@functools.cache
def _helper():
  return scalax.MeshShardingHelper(list(MESH.shape.values()), list(MESH.shape))


def _flax_pair(tree, rules):
  return nn.logical_to_mesh_sharding(nn.get_partition_spec(tree), MESH, rules)


def _ours(case: Case) -> Callable[[int], Any]:
  return lambda number: spmd.Layout(MESH, case.rules(number)).sharding(case.tree)


def _check_alike(case: Case, ours, theirs) -> None:
  """Raises an error if the arms shard the tree differently."""
  shardings = [jax.tree.leaves(tree) for tree in (ours, theirs)]
  leaves = jax.tree.leaves(case.tree)
  different = [
    f'{leaf.shape}: {mine.spec}, not {other.spec}'
    for leaf, mine, other in zip(leaves, *shardings, strict=True)
    if not mine.is_equivalent_to(other, leaf.ndim)
  ]
  if different:
    raise RuntimeError(f'{case.name}: {len(different)} leaves are sharded differently: {different[0]}')


def tiny_figures() -> list[Figure]:
  """One array instead of a state: the overhead of a call, almost without a cost per leaf."""
  calls = _jitted(jnp.zeros(8), lambda x: x + 1, COPIES)
  rounds = measure(calls, rounds=301, calls=100, warm_up=100, clock=WALL)
  return [*_absolute('tiny function', rounds, COPIES), *_over_others('tiny function', rounds)]


def call_figures(layers: int) -> list[Figure]:
  """The same step on the same state, jitted by each arm; it returns the state, or only its step."""
  state = states.train_state(layers, states.unboxed)
  steps = {
    'state': lambda state: state.replace(step=state.step + 1),
    'step': lambda state: state.step + 1,
  }
  result = []
  for returned, step in steps.items():
    small = layers < 100  # a compiled function of 10,000 arguments takes a gigabyte
    copies = COPIES if small else 1
    rounds = measure(_jitted(state, step, copies), rounds=201 if small else 21)
    name = f'{len(jax.tree.leaves(state))} leaves, {returned} returned'
    result += [*_absolute(name, rounds, copies), *_over_others(name, rounds)]
    jax.clear_caches()
  return result


def _jitted(tree, fn, copies: int) -> dict[str, Callable[[], Any]]:
  """Calls of `fn`, jitted by each arm, with a tree that is sharded by `fsdp`.

  With 10,000 leaves, two copies of the same `jax.jit` differ by up to a tenth, because of their memory
  layout. So each arm makes some copies, in turn, and calls all of them.
  """
  fsdp = spmd.fsdp('model', min_size=SMALL)
  layout = spmd.Layout({'data': 1, 'model': 1}, fsdp)
  placed = layout.init(lambda: jax.tree.map(jnp.copy, tree))
  where, result = layout.sharding(placed), layout.sharding(jax.eval_shape(fn, placed))
  makers = {
    'layout.jit with rules': functools.partial(layout.jit, in_rules=fsdp, out_rules=fsdp),
    'layout.jit': layout.jit,
    'jax.jit': functools.partial(jax.jit, in_shardings=(where,), out_shardings=result),
  }
  if scalax:
    rule = scalax.FSDPShardingRule('model', 1, SMALL)
    helper = scalax.MeshShardingHelper([2, 4], ['data', 'model'])
    helper._mesh = layout.mesh  # the default is all devices of the process
    makers['sjit'] = functools.partial(helper.sjit, in_shardings=(rule,), out_shardings=rule)
  jitted = {name: [] for name in makers}
  for turn in range(copies):
    for name in [*makers][turn:] + [*makers][:turn]:
      jitted[name].append(
        makers[name](lambda tree: fn(tree))
      )  # a new lambda each time: JAX shares the cache of one function
      jitted[name][-1](placed)
  return {name: _each(calls, placed) for name, calls in jitted.items()}


def _each(calls, argument):
  return lambda: [call(argument) for call in calls]


def _absolute(name: str, rounds, copies: int) -> list[Figure]:
  return [
    summary(f'{name}, jax.jit', [1e6 / copies * times['jax.jit'] for times in rounds], 'us a call')
  ]


def _over_others(name: str, rounds) -> list[Figure]:
  return [
    ratio(f'{name}, {arm} over {base}', rounds, arm, base, target)
    for base, target in (('sjit', at_most(1.0)), ('jax.jit', None))
    for arm in ('layout.jit with rules', 'layout.jit')
    if base in rounds[0]
  ]


def explain_figures() -> list[Figure]:
  """`explain` on an abstract mesh of 65,536 devices, with a new layout each time."""
  mesh, numbers = spmd.abstract_mesh({'data': 256, 'model': 256}), itertools.count()
  cases = {
    'names': (_names, _tree('state', spmd.LogicallyPartitioned)),
    'fsdp': (_fsdp, _tree('state')),
  }

  def explain(name):
    rules, tree = cases[name]
    return spmd.explain(spmd.Layout(mesh, rules(next(numbers))), tree)

  calls = {name: functools.partial(explain, name) for name in cases}
  texts = {name: functools.partial(str, explain(name)) for name in cases}
  timed = {
    'explain by {}, wall': measure(calls, rounds=11, warm_up=1, clock=WALL),
    'explain by {}, CPU': measure(calls, rounds=11, warm_up=1, clock=THREAD),
    'explain by {}, its text, CPU': measure(texts, rounds=11, warm_up=1, clock=THREAD),
  }
  of_cases = [
    summary(text.format(name), [times[name] for times in rounds], 's', at_most(1))
    for text, rounds in timed.items()
    for name in cases
  ]
  return [*of_cases, *_large_figures(mesh)]


def _large_figures(mesh) -> list[Figure]:
  """Ten times as many leaves, planned and folded; and the text of 10,000 rows of which no two are equal."""
  layout, large = spmd.Layout(mesh, _names(0)), _tree('large state', spmd.LogicallyPartitioned)
  different = {
    f'w{index}': spmd.LogicallyPartitioned(
      jax.ShapeDtypeStruct((256 * index, 256), jnp.float32), ('embed', 'mlp')
    )
    for index in range(1, 10_001)
  }
  paths = 'tree_flatten_with_path of 100,000 leaves'
  arms = {
    'planned and folded': lambda: spmd.explain(layout, large).folded,
    'text': functools.partial(str, spmd.explain(layout, different)),
    paths: functools.partial(jax.tree_util.tree_flatten_with_path, large),
  }
  rounds = measure(arms, rounds=11, warm_up=1, clock=THREAD)
  names = {
    'planned and folded': ('explain of 100,000 leaves, folded, CPU', at_most(2)),
    'text': ('explain, its text of 10,000 different rows, CPU', at_most(1)),
  }
  return [
    *(summary(name, [times[arm] for times in rounds], 's', most) for arm, (name, most) in names.items()),
    ratio(f'explain of 100,000 leaves, folded, over {paths}', rounds, 'planned and folded', paths),
  ]


@functools.cache
def _tree(kind: str, box: states.Box = states.unboxed) -> Any:
  """An abstract tree of 10,000 leaves (a large state: 100,000); every dimension is divisible by 128, most by 256."""
  layers = _LAYERS[kind]
  state = states.train_state(layers, box, functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32))
  large = lambda leaf: jax.ShapeDtypeStruct(tuple(64 * size for size in leaf.shape), leaf.dtype)
  return jax.tree.map(large, state.params if kind == 'params' else state)


if __name__ == '__main__':
  report('rules', figures)
