"""Trees that contain themselves, or are as deep as if they did: every function refuses them, and the next call works."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import pytest

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd._src.cycles import outermost_modules

NO_REFERENCE = 'Fix: leave it out: no part of a tree may refer to a part around it.'
LAYOUT = spmd.Layout({'data': 8}, (('batch', 'data'),))


@flax.struct.dataclass
class Node:
  inner: Any


def ring():
  tree: dict[str, Any] = {}
  tree['a'] = tree['b'] = tree
  return tree


class Pair(NamedTuple):
  one: Any
  two: Any


def ring_of_pairs():
  inner: list[Any] = []
  inner.append(Pair(1.0, inner))
  inner.append(inner)
  return {'w': inner}


def ring_of_lists():
  inner: list[Any] = []
  inner.append((inner, inner))
  return {'w': jnp.ones(8), 'inner': inner}


def nested(wrap, depth):
  tree = jnp.ones(8)
  for _ in range(depth):
    tree = wrap(tree)
  return tree


def ring_through_a_dataclass():
  inner: dict[str, Any] = {'a': jnp.ones(8)}
  return {'params': [1.0, inner | {'node': inner}], 'late': inner | {'up': _holding(inner)}}


def _holding(inner):
  inner['node'] = Node((spmd.LogicallyPartitioned(inner, ('batch',)), 2))
  return inner


TREES = {
  'ring': (
    ring,
    f"""\
a is (root) again: the tree contains itself.
b is (root) again: the tree contains itself.
{NO_REFERENCE}""",
  ),
  'ring of lists': (
    ring_of_lists,
    f"""\
inner/0/0 is inner again: the tree contains itself.
inner/0/1 is inner again: the tree contains itself.
{NO_REFERENCE}""",
  ),
  'ring of pairs': (
    ring_of_pairs,
    f"""\
w/0/two is w again: the tree contains itself.
w/1 is w again: the tree contains itself.
{NO_REFERENCE}""",
  ),
  'ring through a dataclass': (
    ring_through_a_dataclass,
    f"""\
late/node/inner/0/node is late/node again: the tree contains itself.
{NO_REFERENCE}""",
  ),
  'dicts': (
    lambda: nested(lambda tree: {'a': tree}, 3000),
    'The tree is nested more than 500 deep, at a/a/a/a/a/a/a/a/a/a and below.\nFix: pass a flatter one.',
  ),
  'dataclasses': (
    lambda: nested(Node, 501),
    f'The tree is nested more than 500 deep, at {"/".join(["inner"] * 10)} and below.\nFix: pass a flatter one.',
  ),
}
CALLS = {
  'save': lambda tree, tmp: checkpoint.save(tmp / 'a', tree, LAYOUT),
  'save_async': lambda tree, tmp: checkpoint.save_async(tmp / 'a', tree, LAYOUT),
  'save_safetensors': lambda tree, tmp: checkpoint.save_safetensors(tmp / 'a', tree),
  'Manager.save': lambda tree, tmp: checkpoint.Manager(tmp / 'run', LAYOUT, every=1).save(1, tree),
  'restore': lambda tree, tmp: checkpoint.restore(tmp / 'good', tree),
  'preflight': lambda tree, tmp: checkpoint.preflight(tmp / 'good', tree),
  'spec': lambda tree, tmp: LAYOUT.spec(tree),
  'check': lambda tree, tmp: LAYOUT.check(tree),
  'explain': lambda tree, tmp: spmd.explain(LAYOUT, tree),
  'shard': lambda tree, tmp: LAYOUT.shard(tree),
  'shard, placements': lambda tree, tmp: LAYOUT.shard({'a': jnp.ones(8)}, tree),
  'reshard': lambda tree, tmp: LAYOUT.reshard(tree, LAYOUT),
  'gather': lambda tree, tmp: spmd.gather(tree),
  'jit': lambda tree, tmp: LAYOUT.jit(lambda x: x)(tree),
  'jit, result': lambda tree, tmp: LAYOUT.jit(lambda: tree)(),
  'init': lambda tree, tmp: LAYOUT.init(lambda: tree),
  'init, argument': lambda tree, tmp: LAYOUT.init(lambda arg: arg, tree),
  'sharding, placements': lambda tree, tmp: LAYOUT.sharding(tree, None),
  'unbox': lambda tree, tmp: spmd.unbox(tree),
  'replace_boxed': lambda tree, tmp: spmd.replace_boxed(tree, tree),
  'add_axis': lambda tree, tmp: spmd.add_axis(tree, 0, {}),
  'get_partition_spec': lambda tree, tmp: spmd.get_partition_spec(tree),
  'logical_to_mesh': lambda tree, tmp: spmd.logical_to_mesh(tree, LAYOUT.rules),
  'with_names': lambda tree, tmp: spmd.with_names(tree, {'a': None}),
  'with_names, names': lambda tree, tmp: spmd.with_names({'a': jnp.ones(8)}, tree),
  'even_batches': lambda tree, tmp: list(spmd.even_batches([tree], size=8)),
}

ARGUMENTS = {'jit': 'x', 'init, argument': 0}


def of_argument(text, name):
  """The text with the paths of an argument."""
  if 'and below' in text:  # the path is cut after as many keys
    return re.sub(' at [a-z]+', f' at argument {name}', text)
  return re.sub(r'(?m)^(\S+) is (\S+)', rf'argument {name}/\1 is argument {name}/\2', text).replace(
    '/(root)', ''
  )


@pytest.mark.parametrize('tree', TREES)
@pytest.mark.parametrize('call', CALLS)
def test_trees_that_contain_themselves_are_refused_by_every_function(tmp_path, call, tree):
  """JAX would follow them to the end of the stack, and give nothing of it back."""
  if call in ('restore', 'preflight'):
    checkpoint.save(tmp_path / 'good', {'a': jnp.ones(8)}, LAYOUT)
  with pytest.raises(errors.LayoutError) as caught:
    CALLS[call](TREES[tree][0](), tmp_path)
  text = TREES[tree][1]
  if call in ARGUMENTS:
    text = of_argument(text, ARGUMENTS[call])
  assert str(caught.value) == text
  assert not (tmp_path / 'a').exists()
  deep = nested(lambda inner: [inner], 200)
  assert len(jax.tree.leaves(deep, is_leaf=lambda node: node is None)) == 1


@pytest.mark.parametrize('wrap', [Node, lambda tree: {'a': tree}, lambda tree: [tree, {'b': 1.0}]])
def test_deep_trees_are_taken(wrap):
  tree = nested(wrap, 400)
  assert jax.tree.structure(LAYOUT.spec(tree)) == jax.tree.structure(jax.tree.map(str, tree))


def test_a_deep_tree_of_shared_parts_is_refused():
  """No path is followed twice, and the first one to a shared part is short."""
  shared = nested(lambda tree: [tree], 300)
  tree = {'a': shared, 'b': nested(lambda tree: [tree], 300)}
  node = tree['b']
  while isinstance(node[0], list):
    node = node[0]
  node[0] = shared
  with pytest.raises(errors.LayoutError) as caught:
    spmd.unbox(tree)
  assert str(caught.value) == 'The tree is nested more than 500 deep.\nFix: pass a flatter one.'


def test_the_first_references_back_are_listed():
  tree: dict[str, Any] = {f'{n:02}': {} for n in range(20)}
  for child in tree.values():
    child['up'] = tree
  with pytest.raises(errors.LayoutError) as caught:
    spmd.unbox(tree)
  lines = [f'{n:02}/up is (root) again: the tree contains itself.' for n in range(10)]
  assert str(caught.value).splitlines() == [*lines, NO_REFERENCE]


def test_unboxing_searches_a_tree_once(monkeypatch):
  """Not once more in each of its boxes."""
  searched = []
  search = lambda *args: searched.append(args) or outermost_modules(*args)
  monkeypatch.setattr('flax_spmd._src.cycles.outermost_modules', search)
  box = spmd.LogicallyPartitioned(spmd.LogicallyPartitioned(jnp.ones(8), ('batch',)), ('batch',))
  spmd.unbox({'a': box, 'b': [box, box]})
  assert len(searched) == 1


def test_parts_that_are_shared_are_searched_once_a_level():
  tree: Any = jnp.ones(8)
  for _ in range(100):
    tree = {'a': tree, 'b': [tree, tree]}
  assert outermost_modules(tree) == []  # it has 3 ** 100 leaves
