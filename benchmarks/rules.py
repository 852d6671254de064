"""What rules of every kind cost: applied to 10,000 leaves, at each call of a jitted step, and explained.

Side by side with Scalax, whose rules come closest to these, and for logical names with Flax. Where each
leaf goes is compared first, so that the arms do the same work.

Cold means a table like no other, applied to a tree for the first time: once per program, on every
host. Scalax remembers nothing of a tree, so its figure is the same the second time; its regular
expressions are new in each call too, as ours are. Warm means a layout that has seen this very tree.

A step is called with a state of 1,000 and of 10,000 leaves that lies as `fsdp` says: through `layout.jit`
with the rules given for argument and result, through `layout.jit` of a layout that has the rule, through
Scalax's `sjit` with its rules, and through a bare `jax.jit` with shardings. All four take the same arrays.
The mesh is one device: over eight emulated ones JAX takes many times as long to make the pieces of every
array that is returned, and nothing else would be seen. What is seen best is the tiny function.

Trees are abstract but for those steps. As everywhere, absolute times are as good as the machine is quiet.
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
  print('Scalax is missing, and so are its arms; to measure it too: pip install scalax', file=sys.stderr)

MESH = spmd.make_mesh({'data': 2, 'model': 4})
LAYERS_OF_STATE = 333  # about 10,000 leaves: parameters and Adam's two moments
LAYERS_OF_PARAMETERS = 1000  # the same number, all of them parameters
COPIES = 4  # functions that everyone jits
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
  """A table, the tree that it is applied to, and how somebody else applies the same to the same.

  The table and what the other does are functions of a number, and differ from one to the next.
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
  found = [
    per_item(cold, rounds, cold, leaves),
    per_item(warm, rounds, warm, leaves, at_most(2.5)),
  ]
  if case.theirs:
    found += [
      per_item(theirs, rounds, theirs, leaves),
      ratio(f'{cold}, over {case.other}', rounds, cold, theirs, at_most(0.5)),
    ]
  return found


def _cases():
  """Every kind of rule on parameters alone, and those that a whole state makes a difference to."""
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
  """So many path rules, all of them new, of which the last applies."""
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
  """Scalax has no tables in tables, but takes a rule for each part of a tree."""
  moments = scalax.FSDPShardingRule('data', MESH.shape['data'], 1024)
  params = scalax.TreePathShardingRule((f'.*|new{number}', P('model')))
  return state.replace(step=P(), params=params, opt_state=moments)


def _scalaxs(tree, rule: Callable[[int], Any]) -> Callable[[int], Any] | None:
  """Scalax's shardings of a tree, from a rule that is made for each number."""
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
  """Arms that do not come to the same result are not to be compared."""
  places = [jax.tree.leaves(shardings) for shardings in (ours, theirs)]
  leaves = jax.tree.leaves(case.tree)
  different = [
    f'{leaf.shape}: {mine.spec}, not {other.spec}'
    for leaf, mine, other in zip(leaves, *places, strict=True)
    if not mine.is_equivalent_to(other, leaf.ndim)
  ]
  if different:
    raise RuntimeError(f'{case.name}: {len(different)} leaves go elsewhere, {different[0]}')


def tiny_figures() -> list[Figure]:
  """One array instead of a state: what a call costs beside its leaves, where there is most to see of it."""
  calls = _jitted(jnp.zeros(8), lambda x: x + 1, COPIES)
  rounds = measure(calls, rounds=301, calls=100, warm_up=100, clock=WALL)
  return [*_absolute('tiny function', rounds, COPIES), *_over_others('tiny function', rounds)]


def call_figures(layers: int) -> list[Figure]:
  """The same step on the same state, jitted by everyone; returned is the state, or only its step."""
  state = states.train_state(layers, states.unboxed)
  steps = {
    'state': lambda state: state.replace(step=state.step + 1),
    'step': lambda state: state.step + 1,
  }
  found = []
  for returned, step in steps.items():
    small = layers < 100  # a compiled function of 10,000 arguments takes a gigabyte
    copies = COPIES if small else 1
    rounds = measure(_jitted(state, step, copies), rounds=201 if small else 21)
    name = f'{len(jax.tree.leaves(state))} leaves, {returned} returned'
    found += [*_absolute(name, rounds, copies), *_over_others(name, rounds)]
    jax.clear_caches()
  return found


def _jitted(tree, fn, copies: int) -> dict[str, Callable[[], Any]]:
  """Calls of `fn`, jitted by everyone, with a tree that lies where `fsdp` says.

  One and the same `jax.jit`, made twice, differs from itself by up to a tenth where there are 10,000
  leaves: by where in memory its own things lie. So everyone makes some copies, in turns, and calls each.
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
    helper._mesh = layout.mesh  # it takes all devices of the process otherwise
    makers['sjit'] = functools.partial(helper.sjit, in_shardings=(rule,), out_shardings=rule)
  made = {name: [] for name in makers}
  for turn in range(copies):
    for name in [*makers][turn:] + [*makers][:turn]:
      made[name].append(makers[name](lambda tree: fn(tree)))  # what is the same function, JAX shares
      made[name][-1](placed)
  return {name: _each(calls, placed) for name, calls in made.items()}


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
  """Explained on a mesh of 65,536 devices that do not exist, by layouts that are new each time."""
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
    'explain by {}, its text, CPU': measure(texts, rounds=3, warm_up=0, clock=THREAD),
  }
  return [
    summary(text.format(name), [times[name] for times in rounds], 's', target)
    for (text, rounds), target in zip(timed.items(), (at_most(1), at_most(1), None), strict=True)
    for name in cases
  ]


@functools.cache
def _tree(kind: str, box: states.Box = states.unboxed) -> Any:
  """An abstract tree of 10,000 leaves whose every dimension divides by 128, and most by 256."""
  layers = LAYERS_OF_STATE if kind == 'state' else LAYERS_OF_PARAMETERS
  state = states.train_state(layers, box, functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32))
  large = lambda leaf: jax.ShapeDtypeStruct(tuple(64 * size for size in leaf.shape), leaf.dtype)
  return jax.tree.map(large, state if kind == 'state' else state.params)


if __name__ == '__main__':
  report('rules', figures)
