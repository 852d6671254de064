"""Strategies: names, rule tables, mesh axes and trees of boxes, as users write them, correctly or not.

Examples suit Flax as well as this library: an example is data, from which a test builds the objects of either.
There are only five logical names and four mesh axes, so that they coincide often.
"""

import dataclasses
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from flax.core import FrozenDict
from hypothesis import settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import flax_spmd as spmd

MESH_AXES = ('w', 'x', 'y', 'z')
LOGICAL_NAMES = ('batch', 'embed', 'heads', 'mlp', 'vocab')


def examples(number: int) -> int:
  """The number of examples of a test that has this one in CI: `nox -s exhaustive` runs four times as many."""
  return number * settings.default.max_examples // 100


mesh_axes = st.sampled_from(MESH_AXES)
logical_names = st.sampled_from(LOGICAL_NAMES)
axis_tuples = st.lists(mesh_axes, max_size=3, unique=True).map(tuple)
unconstrained = st.just(PartitionSpec.UNCONSTRAINED)

# Parts of regular expressions. Joined, some compile, and many are rare.
PATTERN_PIECES = [
  *('a', 'b', '/', '0', '.', '*', '+', '?', '[ab]', '[^a]', '[^]a]', '(', ')', '(?:'),
  *('|', '^', '$', '\\d', '\\w', '\\b', '\\B', '\\A', '\\Z', '{0}', '{2}', '{1,2}', '{2,}', '(a|b)'),
  *('(ab)?', '(?i:A)', '(?-i:a)', 'A', '.*?', '??', '+?', '{1,2}?'),
  *('(?=', '(?!', '(?<=a', '(?<!ab', '(?i)', '(?s)'),
  *('(?m)', '\n', '(a*)*', '(a|ab)*', '[a|b]', '\\.', '\\(', '\\\\', '\\x61', 'ab', '[a\\]b]', '{', '-'),
]

# The target of a rule: None, an axis, several axes, an empty tuple, or UNCONSTRAINED.
rule_targets = st.one_of(st.none(), mesh_axes, axis_tuples, unconstrained)

# A size for every mesh axis, and dimensions that it may or may not divide.
axis_sizes = st.fixed_dictionaries({axis: st.sampled_from([1, 2, 3, 4, 8]) for axis in MESH_AXES})
dimensions = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24])


@st.composite
def rules(draw, max_size=8):
  """A rule table of tuples or lists, with repeated names (fallbacks) and repeated axes (conflicts)."""
  pairs = draw(st.lists(st.tuples(logical_names, rule_targets), max_size=max_size))
  written = draw(st.sampled_from([tuple, list]))
  return written(map(written, pairs))


@st.composite
def names(draw, max_size=5, repeated=False):
  """One array's names, with every allowed kind of entry; `repeated` allows a name twice."""
  entries = draw(
    st.lists(st.one_of(logical_names, st.none(), unconstrained, axis_tuples), max_size=max_size)
  )
  written = draw(st.sampled_from([tuple, list, lambda entries: PartitionSpec(*entries)]))
  if repeated:
    return written(entries)
  return written(without_repeats(written(entries)))  # a spec makes a name 'x' of a tuple ('x',)


@st.composite
def constraint_names(draw, max_size=3):
  """Names for `with_logical_constraint`: without tuples, which it reads as a tree."""
  entries = draw(st.lists(st.one_of(logical_names, st.none(), unconstrained), max_size=max_size))
  return draw(st.sampled_from([tuple, lambda entries: PartitionSpec(*entries)]))(
    without_repeats(entries)
  )


def without_repeats(entries):
  """The entries without repeated strings."""
  return [
    entry for i, entry in enumerate(entries) if not isinstance(entry, str) or entry not in entries[:i]
  ]


# A tree is drawn as a function that builds it with the boxes of a library, Flax or ours.

_named_sizes = st.dictionaries(st.one_of(st.none(), logical_names), st.sampled_from([2, 4]), max_size=3)


def _box(inside, named_sizes):
  return lambda lib: lib.LogicallyPartitioned(inside(lib), tuple(named_sizes))


def _array(named_sizes):
  return lambda lib: jax.ShapeDtypeStruct(tuple(named_sizes.values()), jnp.float32)


def _tree(branches):
  return lambda lib: jax.tree.map(lambda build: build(lib), branches)


_bare = st.sampled_from([1, 2.5, None, jax.ShapeDtypeStruct((2, 4), jnp.int32)]).map(
  lambda x: lambda lib: x
)
_boxed_arrays = _named_sizes.map(lambda named_sizes: _box(_array(named_sizes), named_sizes))
_boxed_trees = st.builds(
  _box, st.lists(_boxed_arrays | _named_sizes.map(_array), max_size=2).map(_tree), _named_sizes
)
_nested_boxes = st.builds(_box, _boxed_arrays, _named_sizes)


@dataclasses.dataclass
class WithoutKeys:
  """A node type whose children have neither keys nor indices."""

  children: Any


jax.tree_util.register_pytree_node(
  WithoutKeys, lambda node: (node.children, None), lambda _, children: WithoutKeys(list(children))
)


def _branches(branch):
  dicts = st.dictionaries(st.sampled_from(['params', 'kernel', 'bias']), branch, max_size=3)
  return (dicts | st.lists(branch, max_size=2).map(WithoutKeys)).map(_tree)


boxed_trees = st.recursive(_bare | _boxed_arrays | _boxed_trees | _nested_boxes, _branches, max_leaves=6)


# Trees of all types of nodes, built in or registered, with boxes and leaves in them.


class Pair(NamedTuple):
  first: Any
  second: Any


@flax.struct.dataclass
class Struct:
  first: Any
  second: Any
  static: str = flax.struct.field(pytree_node=False, default='')


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Data:
  first: Any
  second: Any


class WithKeys(list):
  """A node type with a key type of its own."""


class Unregistered(dict):
  """A leaf: JAX does not flatten subclasses of dict."""


@dataclasses.dataclass(frozen=True)
class OwnKey:
  text: str

  def __str__(self):
    return f'<{self.text}>'


class Word(str):
  """A key with different results from `str` and from `format`."""

  def __str__(self):
    return self[1:]

  def __format__(self, _):
    return self[:1]


jax.tree_util.register_pytree_with_keys(
  WithKeys,
  lambda node: ([(OwnKey(str(i)), child) for i, child in enumerate(node)], None),
  lambda _, children: WithKeys(children),
)

_text_keys = st.sampled_from(['params', 'a', 'a/b', '', Word('b'), Word('bc')])
_leaves = st.sampled_from(
  [
    1,
    None,
    jax.ShapeDtypeStruct((2,), jnp.float32),
    Unregistered(a=1),
    spmd.Partitioned(1.0, ('w',)),
    nn.LogicallyPartitioned(1.0, ('embed',)),
  ]
)


def _nodes(child):
  dicts = st.dictionaries(_text_keys, child, max_size=3)
  lists = st.lists(child, max_size=3)
  pairs = [st.builds(kind, child, child) for kind in (Pair, Struct, Data)]
  return st.one_of(
    dicts,
    st.dictionaries(st.integers(0, 20), child, max_size=3),
    *(dicts.map(kind) for kind in (FrozenDict, OrderedDict, lambda items: defaultdict(int, items))),
    lists,
    *(lists.map(kind) for kind in (tuple, WithoutKeys, WithKeys)),
    lists.map(lambda args: jax.tree_util.Partial(print, *args)),
    *pairs,
    st.builds(spmd.LogicallyPartitioned, child, st.just(('embed',))),
  )


def trees_of_all_nodes():
  """Trees of any node types, including those of other libraries."""
  return st.recursive(_leaves, _nodes, max_leaves=12)
