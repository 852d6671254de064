"""Nests: random modules inside random transformations, built alike from our functions and from Flax's.

    node = Draw(7).nest(depth=3)     # data: shapes, names, axes, collections
    Nest(node, spmd).init(key, x)    # the module with our boxes and constraints
    Nest(node, nn).init(key, x)      # with Flax's

A node maps an array to an array of the same shape, so that nodes can be put inside each other freely. Everything
that a user of Flax may pass to a transformation is drawn, and now and then something that Flax refuses.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import flax_spmd as spmd

MESH = spmd.make_mesh({'data': 2, 'model': 4})
OWN_RULES = (('embed', 'data'), ('batch', 'model'))
COLLECTIONS = ('params', 'batch_stats', 'cache')
STATE = COLLECTIONS[1:]


# -- the two libraries


class RepairedBox:
  """Our deliberate differences from Flax's boxes; `flax_differences_test.py` shows each fault."""

  def add_axis(self, index, params):
    return super().add_axis(
      self.from_front(index, len(self.names) + 1), {nn.PARTITION_NAME: None, **params}
    )

  def remove_axis(self, index, params):
    return super().remove_axis(
      self.from_front(index, len(self.names)), {nn.PARTITION_NAME: None, **params}
    )

  def unbox(self, apply_constraint=True):
    return super().unbox(apply_constraint and len(self.names) <= np.ndim(self.value))

  def from_front(self, index, rank):
    """An axis of the stacked value. Flax inserts a negative one into the names of a single layer."""
    return index if index >= 0 else index + max(np.ndim(self.value), rank)


class RepairedLogicallyPartitioned(RepairedBox, nn.LogicallyPartitioned):
  pass


class RepairedPartitioned(RepairedBox, nn.Partitioned):
  pass


def loops_of_rematerialised_loops(
  target, lengths, policy=None, variable_axes=None, metadata_params=(), **_
):
  """`nn.remat_scan` for boxes, from Flax's `nn.scan` and `nn.remat`."""
  (length, *inner), (metadata, *others) = lengths, metadata_params
  body = target
  if inner:
    rest = loops_of_rematerialised_loops(target, inner, policy, variable_axes, others)
    body = nn.remat(rest, policy=policy, prevent_cse=False)
  scanned = nn.scan(
    lambda module, x: (body(module, x), ()),
    length=length,
    variable_axes=variable_axes,
    split_rngs={True: True},
    metadata_params=metadata,
  )
  return lambda module, x: scanned(module, x)[0]


def _boxing(cls):
  def wrap(init, names, mesh=None, **options):
    return lambda *args: cls(init(*args), names, mesh, **options)

  return wrap


class Flax:
  """Flax's functions."""

  with_logical_partitioning = nn.with_logical_partitioning
  with_partitioning = nn.with_partitioning
  with_logical_constraint = nn.with_logical_constraint
  remat_scan = loops_of_rematerialised_loops


class RepairedFlax(Flax):
  """Flax's functions, with our deliberate differences."""

  with_logical_partitioning = _boxing(RepairedLogicallyPartitioned)
  with_partitioning = _boxing(RepairedPartitioned)


# -- modules


class Nest(nn.Module):
  """The module that a node describes, annotated by `lib`."""

  node: Any
  lib: Any

  @nn.compact
  def __call__(self, x):
    return self.node.run(self, x)

  def step(self, x, given):
    """A step of a loop: the carry, and an output for every iteration."""
    y = self(x if given is None else x + given)
    return y, y

  def other(self, x):
    """A method beside `__call__`."""
    return self(x)


class InSetup(nn.Module):
  """Children made in `setup`, the first of which is called again at the end if `shared`."""

  nodes: Any
  lib: Any
  shared: bool

  def setup(self):
    self.parts = [Nest(node, self.lib) for node in self.nodes]

  def __call__(self, x):
    for part in [*self.parts, *(self.parts[:1] if self.shared else [])]:
      x = part(x)
    return x


class SharedScope(nn.Module):
  """A child whose variables are those of its parent."""

  node: Any
  lib: Any

  def setup(self):
    self.only = Nest(self.node, self.lib)
    nn.share_scope(self, self.only)

  def __call__(self, x):
    return self.only(x)


# -- leaves


class Node:
  """A part of a nest. `repaired`: whether Flax's faults show in it, which `RepairedFlax` has not."""

  repaired = False


@dataclasses.dataclass(frozen=True)
class Array:
  """A parameter or variable: its dimensions, names and kind of box."""

  dims: tuple  # of 'd', the width of the input, or numbers
  names: tuple
  kind: str = 'logical'  # 'mesh': of mesh axes; 'bare': no box; 'flax': Flax's box in both libraries
  own: str = ''  # 'rules', 'mesh', 'both': the box has its own
  dtype: str = 'float32'

  def init(self, lib):
    if self.kind == 'bare':
      return numbers
    box_lib = nn if self.kind == 'flax' else lib
    mesh = MESH if self.own in ('mesh', 'both') else None
    if self.kind == 'mesh':
      return box_lib.with_partitioning(numbers, self.names, mesh)
    rules = {'rules': OWN_RULES} if self.own in ('rules', 'both') else {}
    return box_lib.with_logical_partitioning(numbers, self.names, mesh, **rules)

  def shape(self, width):
    return tuple(width if dim == 'd' else dim for dim in self.dims)

  @property
  def fits(self):
    return self.kind == 'bare' or len(self.names) <= len(self.dims)


def numbers(key, shape, dtype=jnp.float32):
  """An initializer that differs by key, for every dtype."""
  return (jax.random.uniform(key, shape) - 0.5).astype(dtype)


def mix(x, w):
  """`x` with the numbers of `w` in it, in the shape and dtype of `x`."""
  w = w.astype(x.dtype)
  if w.ndim == 2 and w.shape[0] == w.shape[1] == x.shape[-1]:
    return jnp.tanh(x @ w)
  if w.ndim == 1 and w.shape[0] == x.shape[-1]:
    return x * (1 + w.reshape((1,) * (x.ndim - 1) + w.shape))
  return x + jnp.mean(w)


@dataclasses.dataclass(frozen=True)
class Own(Node):
  """Parameters and variables of the module itself, and a constraint."""

  params: tuple = ()
  stats: tuple = ()
  cache: tuple = ()
  constraint: Any = None
  options: tuple = ()

  def run(self, module, x):
    lib = module.lib
    for number, array in enumerate(self.params):
      w = module.param(f'w{number}', array.init(lib), array.shape(x.shape[-1]), jnp.dtype(array.dtype))
      x = mix(x, w)
    for number, array in enumerate(self.stats):
      shape = array.shape(x.shape[-1])
      mean = module.variable(
        'batch_stats',
        f'mean{number}',
        lambda: self.zeros(module, array, shape),  # noqa: B023
      )
      mean.value = 0.5 * mean.value + jnp.mean(x).astype(mean.value.dtype)
      x = mix(x, mean.value)
    for number, array in enumerate(self.cache):
      shape = array.shape(x.shape[-1])
      seen = module.variable('cache', f'seen{number}', lambda: self.zeros(module, array, shape))  # noqa: B023
      x = mix(x, seen.value)
      if not module.is_initializing():
        seen.value = seen.value + jnp.max(x).astype(seen.value.dtype)
    return lib.with_logical_constraint(x, self.constraint, **dict(self.options))

  def zeros(self, module, array, shape):
    return array.init(module.lib)(jax.random.key(0), shape, jnp.dtype(array.dtype))

  @property
  def repaired(self):
    return not all(array.fits for array in (*self.params, *self.stats, *self.cache))


@dataclasses.dataclass(frozen=True)
class Layer(Node):
  """A layer of Flax, whose initializers return boxes."""

  kind: str
  names: tuple

  @property
  def repaired(self):
    return self.kind == 'general'

  def run(self, module, x):
    def named(init, names):
      return module.lib.with_logical_partitioning(init, names)

    # A large epsilon, so that rounding is not amplified.
    zeros, width = nn.initializers.zeros, x.shape[-1]
    if self.kind == 'dense':
      return nn.Dense(width, kernel_init=named(numbers, self.names), bias_init=zeros)(x)
    if self.kind == 'norm':
      return nn.LayerNorm(1.0, scale_init=named(nn.initializers.ones, self.names[:1]))(x)
    if self.kind == 'batch norm':
      return nn.BatchNorm(False, epsilon=1.0, scale_init=named(nn.initializers.ones, self.names[:1]))(x)
    fused = nn.DenseGeneral((2, width), kernel_init=named(numbers, (*self.names, 'kv')), use_bias=False)
    return jnp.sum(fused(x), axis=-2)


# -- nodes around others


@dataclasses.dataclass(frozen=True)
class Chain(Node):
  """Children one after the other, compact or in `setup`."""

  nodes: tuple
  place: str  # 'named', 'automatic', 'setup' or 'shared'

  def run(self, module, x):
    if self.place in ('setup', 'shared'):
      return InSetup(self.nodes, module.lib, self.place == 'shared', name='chain')(x)
    for number, node in enumerate(self.nodes):
      named = {'name': f'part{number}'} if self.place == 'named' else {}
      x = Nest(node, module.lib, **named)(x)
    return x


@dataclasses.dataclass(frozen=True)
class Share(Node):
  """`nn.share_scope`."""

  node: Any

  def run(self, module, x):
    return SharedScope(self.node, module.lib, name='shared')(x)


@dataclasses.dataclass(frozen=True)
class Around(Node):
  """A transformation of one child, in one of the forms that Flax has.

  `form` is 'class' (a transformed module class), 'other method' (of such a class), 'function' (of a module), 'inline'
  (a function of the module that calls it) or 'decorator' (a decorated method).
  """

  node: Any
  form: str

  def lift(self, module, transform, method, *args):
    """Calls `method` of the child under `transform`."""
    if self.form == 'class':
      return getattr(transform(Nest, methods=[method])(self.node, module.lib), method)(*args)
    if self.form == 'other method':
      methods = [method] if method != '__call__' else ['other']
      child = transform(Nest, methods=methods)(self.node, module.lib, name='inner')
      return getattr(child, methods[0])(*args)
    if self.form == 'decorator':
      decorated = type('Decorated', (Nest,), {method: transform(getattr(Nest, method))})
      return getattr(decorated(self.node, module.lib, name='inner'), method)(*args)
    if self.form == 'function':
      child = Nest(self.node, module.lib, name='inner')
      return transform(lambda child, *args: getattr(child, method)(*args))(child, *args)
    inline = {'__call__': lambda outer, x: self.node.run(outer, x), 'step': self.inline_step}
    return transform(inline[method])(module, *args)

  def inline_step(self, outer, x, given):
    y = self.node.run(outer, x if given is None else x + given)
    return y, y

  def initialised_child(self, module, x):
    """A child whose variables exist, for transformations that cannot create any."""
    child = Nest(self.node, module.lib, name='inner')
    if module.is_initializing():
      child(x)
    return child


@dataclasses.dataclass(frozen=True)
class Remat(Around):
  policy: str | None = None
  prevent_cse: bool = True

  def run(self, module, x):
    policy = self.policy and getattr(jax.checkpoint_policies, self.policy)
    transform = functools.partial(nn.remat, policy=policy, prevent_cse=self.prevent_cse)
    return self.lift(module, transform, '__call__', x)


@dataclasses.dataclass(frozen=True)
class Jit(Around):
  def run(self, module, x):
    return self.lift(module, nn.jit, '__call__', x)


@dataclasses.dataclass(frozen=True)
class MapVariables(Around):
  collection: str = 'params'
  mapping: str = 'identity'

  def run(self, module, x):
    into, out = {
      'identity': (lambda tree: tree, lambda tree: tree),
      'scaled': (each(lambda w: w * 2), each(lambda w: w / 2)),
      'transposed': (each(jnp.transpose), each(jnp.transpose)),
    }[self.mapping]
    transform = functools.partial(
      nn.map_variables,
      mapped_collections=self.collection,
      trans_in_fn=into,
      trans_out_fn=out,
      init=module.is_initializing(),
      mutable=self.collection != 'params',
    )
    return self.lift(module, transform, '__call__', x)


def each(fn):
  return lambda tree: jax.tree.map(fn, tree)


@dataclasses.dataclass(frozen=True)
class Axes:
  """What `nn.scan` and `nn.vmap` do with collections and keys."""

  axes: tuple  # per collection: a number, or None for none
  broadcast: tuple = ()  # collections
  split: bool = True
  metadata: tuple = ()  # (), or the name of the axis
  metadata_at_apply: tuple | None = None
  shift_at_apply: int = 0

  @property
  def repaired(self):
    numbers = [axis for axis in self.axes if axis is not None]
    negative = min(numbers) + min(0, self.shift_at_apply) < 0
    return negative or () in (self.metadata, self.metadata_at_apply)

  def variable_axes(self, module):
    shift = 0 if module.is_initializing() else self.shift_at_apply
    return {
      collection: axis + shift
      for collection, axis in zip(COLLECTIONS, self.axes)
      if axis is not None and collection not in self.broadcast
    }

  def metadata_params(self, module):
    if module.is_initializing() or self.metadata_at_apply is None:
      return as_params(self.metadata)
    return as_params(self.metadata_at_apply)


def as_params(metadata):
  return dict.fromkeys([nn.PARTITION_NAME], *metadata) if metadata else {}


@dataclasses.dataclass(frozen=True)
class Scan(Around):
  axes: Axes = Axes((0, 0, 0))
  length: int = 2
  in_axis: int | None = None
  out_axis: int = 0
  reverse: bool = False
  unroll: int = 1

  @property
  def repaired(self):
    return self.axes.repaired

  def run(self, module, x):
    transform = functools.partial(
      nn.scan,
      variable_axes=self.axes.variable_axes(module),
      variable_broadcast=list(self.axes.broadcast) or False,
      split_rngs={'params': self.axes.split},
      in_axes=nn.broadcast if self.in_axis is None else self.in_axis,
      out_axes=self.out_axis,
      length=self.length,
      reverse=self.reverse,
      unroll=self.unroll,
      metadata_params=self.axes.metadata_params(module),
    )
    given = None if self.in_axis is None else stacked(x, self.length, self.in_axis)
    carry, outputs = self.lift(module, transform, 'step', x, given)
    return carry + jnp.sum(outputs, axis=self.out_axis)


def stacked(x, length, axis):
  return jnp.stack([x * 0.1 * number for number in range(length)], axis=axis)


@dataclasses.dataclass(frozen=True)
class Vmap(Around):
  axes: Axes = Axes((0, 0, 0))
  size: int = 2
  in_axis: int | None = None  # an axis of the input; None: all get the same
  out_axis: int = 0

  @property
  def repaired(self):
    return self.axes.repaired

  def run(self, module, x):
    over_input = self.in_axis is not None and x.ndim > 1
    in_axis = self.in_axis if over_input else None
    mapped = self.axes.variable_axes(module)
    transform = functools.partial(
      nn.vmap,
      variable_axes={**mapped, **dict.fromkeys(self.axes.broadcast)},
      split_rngs={'params': self.axes.split},
      in_axes=in_axis,
      out_axes=in_axis if over_input else self.out_axis,
      axis_size=x.shape[in_axis] if over_input else self.size,
      metadata_params=self.axes.metadata_params(module),
    )
    y = self.lift(module, transform, '__call__', x)
    return y if over_input else jnp.sum(y, axis=self.out_axis)


@dataclasses.dataclass(frozen=True)
class RematScan(Around):
  lengths: tuple = (2,)
  metadata: tuple = ((),)
  axis: int = 0

  @property
  def repaired(self):
    return self.axis < 0 or () in self.metadata

  def run(self, module, x):
    child = Nest(self.node, module.lib, name='inner')
    transform = functools.partial(
      module.lib.remat_scan,
      lengths=self.lengths,
      variable_axes={True: self.axis},
      metadata_params=tuple(map(as_params, self.metadata)),
    )
    return transform(lambda child, x: child(x))(child, x)


@dataclasses.dataclass(frozen=True)
class AddMetadataAxis(Around):
  """`nn.add_metadata_axis`: names of an axis that something outside of Flax adds."""

  axis: int = 0
  metadata: tuple = ()

  @property
  def repaired(self):
    return self.axis != 0 or not self.metadata  # past the end of a scalar's names, None is left over

  def run(self, module, x):
    transform = functools.partial(
      nn.add_metadata_axis, variable_axes={'params': self.axis}, metadata_params=as_params(self.metadata)
    )
    child = Nest(self.node, module.lib, name='inner')
    return transform(lambda child, x: child(x))(child, x)


@dataclasses.dataclass(frozen=True)
class Control(Around):
  """`nn.cond`, `nn.switch`, `nn.while_loop`, `nn.scan` with carried variables, or `nn.vjp`."""

  kind: str = 'cond'

  def run(self, module, x):
    child = self.initialised_child(module, x)
    if self.kind == 'vjp':
      y, pull = nn.vjp(lambda child, x: child(x), child, x)
      return y + pull(jnp.ones_like(y))[1]
    if module.is_initializing():
      return x
    return getattr(self, self.kind)(child, x)

  def cond(self, child, x):
    return nn.cond(jnp.sum(x) > 0, lambda child, x: child(x), lambda child, x: x, child, x)

  def switch(self, child, x):
    branches = [lambda child, x: x, lambda child, x: child(x), lambda child, x: 2 * child(x)]
    return nn.switch(jnp.int32(x.ndim % 3), branches, child, x)

  def loop(self, child, x):
    looped = nn.while_loop(
      lambda child, carry: carry[0] < 2,
      lambda child, carry: (carry[0] + 1, child(carry[1])),
      child,
      (0, x),
      carry_variables=list(STATE),
    )
    return x + jax.lax.stop_gradient(looped[1])

  def carried(self, child, x):
    scanned = nn.scan(
      lambda child, x: (child(x), None),
      variable_broadcast='params',
      variable_carry=list(STATE),
      split_rngs={'params': False},
      length=2,
      metadata_params=as_params(('layers',)),
    )
    return scanned(child, x)[0]


# -- drawing

LOGICAL_NAMES = ('embed', 'mlp', 'heads', 'batch')
AXIS_NAMES = ('layers', 'groups', 'experts', None, 'embed', 'data')
RULE_TARGETS = ('data', 'model', ('data', 'model'), None)
FORMS = ('class', 'other method', 'function', 'inline', 'decorator')
POLICIES = (None, 'everything_saveable', 'dots_saveable', 'nothing_saveable')


class Draw(random.Random):
  """Draws nests: the same for the same seed. `one` draws from choices, `rarely` mostly takes the usual one."""

  def one(self, *choices):
    return self.choice(choices)

  def rarely(self, unusual, usual, one_in):
    return unusual if self.randrange(one_in) == 0 else usual

  def names(self, rank, choices):
    """One name per dimension; rarely one more or one less."""
    count = max(0, rank + self.rarely(self.one(-1, 1), 0, 40))
    return tuple(self.sample([*choices, None, None], count))

  def array(self):
    dims = self.one(('d', 'd'), ('d', 'd'), ('d',), ('d', 4, 8), (8, 4), self.rarely((3,), (4,), 4), ())
    kind = self.one(*['logical'] * 8, 'mesh', 'mesh', 'bare', 'bare', 'flax')
    names = self.names(len(dims), ('data', 'model') if kind == 'mesh' else LOGICAL_NAMES)
    own = 'mesh' if kind == 'mesh' else self.one('rules', 'mesh', 'both')
    dtype = self.rarely(self.one('bfloat16', 'float16'), 'float32', 8)
    return Array(dims, names, kind, self.rarely(own, '', 6), dtype)

  def arrays(self, least, most):
    return tuple(self.array() for _ in range(self.randint(least, most)))

  def leaf(self):
    if self.randrange(4) == 0:
      kind = self.one('dense', 'norm', 'batch norm', 'general')
      return Layer(kind, tuple(self.sample([*LOGICAL_NAMES, None], 2)))
    names = self.names(1, LOGICAL_NAMES)
    options = self.rarely((('rules', OWN_RULES), ('mesh', MESH)), (), 12)
    return Own(
      self.arrays(1, 2),
      self.arrays(0, 1),
      self.arrays(0, 1),
      self.one(None, names, PartitionSpec(*names)),
      options,
    )

  def size(self):
    return self.one(2, 4, 4, self.rarely(3, 2, 3))

  def axis_name(self):
    return self.rarely((), (self.one(*AXIS_NAMES),), 12)

  def axes(self):
    params, *states = self.one(0, 0, 0, 0, -1, -1, 1), self.one(0, 0, -1), self.one(0, 0, -1)
    return Axes(
      (params, *(self.rarely(None, axis, 20) for axis in states)),
      self.rarely(self.one(('params',), ('cache',)), (), 8),
      self.rarely(False, True, 8),
      self.axis_name(),
      self.rarely(self.axis_name(), None, 30),
      self.rarely(self.one(1, -1), 0, 40),
    )

  def scan(self, node):
    in_axis, out_axis = self.one(None, 0, 1, -1), self.one(0, 1, -1)
    length, reverse, unroll = self.size(), self.one(True, False), self.one(1, 2)
    return Scan(node, self.one(*FORMS), self.axes(), length, in_axis, out_axis, reverse, unroll)

  def vmap(self, node):
    in_axis, out_axis = self.one(None, 0, 1, -1), self.one(0, 1, -1)
    return Vmap(node, self.one(*FORMS), self.axes(), self.size(), in_axis, out_axis)

  def remat(self, node):
    return Remat(node, self.one(*FORMS), self.one(*POLICIES), self.one(True, False))

  def jit(self, node):
    return Jit(node, self.one(*FORMS))

  def map_variables(self, node):
    collection = self.one('params', 'params', 'batch_stats')
    return MapVariables(node, self.one(*FORMS), collection, self.one('identity', 'scaled', 'transposed'))

  def share_scope(self, node):
    return Share(node)

  def remat_scan(self, node):
    lengths = self.one((2,), (2, 2), (4, 2))
    names = tuple(self.axis_name() for _ in lengths)
    return RematScan(node, 'function', lengths, names, self.one(0, 0, -1, 1))

  def add_metadata_axis(self, node):
    return AddMetadataAxis(node, 'function', self.one(0, 1, -1), self.axis_name())

  def control(self, node):
    return Control(node, 'function', self.one('cond', 'switch', 'loop', 'carried', 'vjp'))

  def chain(self, node):
    return Chain((node, self.nest(1)), self.one('named', 'automatic', 'setup', 'shared'))

  def nest(self, depth):
    """A leaf inside `depth` other nodes."""
    if depth == 0:
      return self.leaf()
    common = [self.scan, self.vmap, self.remat, self.jit, self.map_variables, self.share_scope]
    others = [self.remat_scan, self.add_metadata_axis, self.control, self.chain]
    return self.one(*common * 2, *others)(self.nest(depth - 1))

  def rules(self):
    names = (*LOGICAL_NAMES, 'layers', 'groups', 'experts', 'kv')
    return tuple((self.one(*names), self.one(*RULE_TARGETS)) for _ in range(self.randrange(7)))


def nodes_in(node):
  """A node and all nodes in it."""
  yield node
  for child in getattr(node, 'nodes', ()) or filter(None, [getattr(node, 'node', None)]):
    yield from nodes_in(child)
