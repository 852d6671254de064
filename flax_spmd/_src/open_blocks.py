"""Open blocks: the `with layout:` blocks and rule blocks that have begun and not ended.

Of these, the innermost is in force. A block may end before one that began inside it, if two generators
with a block each take turns. So no block restores the state before it: a block that ends is removed, and the
innermost one of the rest is put in force, in all places at once:

* for JAX's caches, per thread: the key of the innermost block, a `jax.make_user_context` value, so a function is
  traced again under other rules instead of running the program of the first rules;
* for JAX, per thread: the mesh of a layout;
* for Flax, per thread: its own rules, so constraints in third-party models follow them too. Blocks of Flax's
  `logical_axis_rules` are blocks like ours, through `compat.py`;
* while any block has a layout's mesh, `compat.py` hands the calls of Flax's boxes to us.

A `ContextVar` holds the blocks of each asyncio task. JAX and Flax keep their state per thread, so if a block
is suspended by `await` while another task enters one, programs would run under the wrong key. That is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, cast

import jax
from jax.sharding import Mesh

from flax_spmd._src import compat
from flax_spmd._src.mesh import MeshLike, current_mesh, describe
from flax_spmd._src.rules.decisions import axis_names
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.shared import shared
from flax_spmd.errors import ContextError, RulesError


@dataclasses.dataclass(frozen=True)
class InForce:
  """What a layout puts in force.

  Attributes:
    mesh: the mesh; None: JAX's current mesh.
    rules: the rules, possibly empty.
    stored: the specs of boxes whose arrays other rules than those for their names have placed, as pairs of a
      box's static part and a PartitionSpec (UNCONSTRAINED: the compiler chooses). Such a box is opened with it.
    strict: whether the layout is strict, so that rules of Flax's functions may not replace its own.
    whole: the layout's mesh, if `mesh` is that of one stage of a pipeline.
  """

  mesh: MeshLike | None
  rules: Rules
  stored: tuple[tuple[Any, Any], ...] = ()
  strict: bool = False
  whole: MeshLike | None = None

  @functools.cached_property
  def key(self) -> CacheKey | None:
    """The part of JAX's cache keys that stands for it; None for nothing."""
    if self == NOTHING:
      return None
    return _key(*[value.content if isinstance(value, Rules) else value for value in self._values()])

  @functools.cached_property
  def flax_rules(self) -> tuple[tuple[str, Any], ...]:
    """The rules for names as Flax reads them. It has no policies, so axes that `missing_axis='drop'` drops are left out."""
    if self.mesh is None or self.rules.policies.missing_axis == 'error':
      return self.rules.pairs
    kept = [(name, axes, _on(self.mesh, axes)) for name, axes in self.rules.pairs]
    return tuple((name, left) for name, axes, left in kept if left is not None or not axis_names(axes))

  def with_rules(self, rules: Rules) -> InForce:
    """Other rules on the same mesh."""
    return dataclasses.replace(self, rules=rules)

  def _values(self) -> tuple[Any, ...]:
    return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

  def __reduce__(self):
    return InForce, self._values()  # without the key, which is one of this process


def _on(mesh: MeshLike, axes: Any) -> Any:
  """The axes of a rule that a mesh has; None for none."""
  kept = tuple(axis for axis in axis_names(axes) if axis in mesh.axis_names)
  if kept == axis_names(axes):
    return axes
  return kept[0] if len(kept) == 1 else (kept or None)


class CacheKey:
  """Stands for an `InForce` in JAX's cache keys: one object for equal ones, compared by identity.

  JAX's caches keep the key, but not the functions among the rules.
  """

  __slots__ = ('__weakref__',)


@shared
def _key(*content: Any) -> CacheKey:
  return CacheKey()


@functools.lru_cache(maxsize=64)
def _remembered(rules: Any) -> Rules:
  """A table of name rules, which are plain data; raises TypeError for one of other rules."""
  table = Rules.of(rules)
  if len(table.pairs) < len(table):
    raise TypeError(rules)
  return table


def table_of(rules: Any) -> Rules:
  """`Rules.of`, for a table that may be put in force anew at every step."""
  try:
    return rules if isinstance(rules, Rules) else _remembered(rules)
  except TypeError:
    return Rules.of(rules)


NOTHING = InForce(None, Rules())
_jit_key = jax.make_user_context(None)


class OpenBlock:
  """A block that has begun.

  Attributes:
    own: its mesh and rules when it began.
    in_force: its mesh and rules now; None if Flax's functions have set rules that are not a table.
    key: the part of JAX's cache keys for that.
    flax_rules: the rules that Flax reads.
    by_flax: whether Flax's functions have set them.
    mesh: its mesh, if it is one of a layout and JAX's current mesh too.
    sets_devices: whether the mesh in force came with its devices: JAX's current ones are its, or newer ones.
    inherits: whether it has the mesh of the block around it.
    owner: identifies the `with` statement or generator that it belongs to, if its end gets no block.
    has_layout: whether it began with the mesh of a layout.
    is_open: whether it has not ended yet.
  """

  __slots__ = (
    'by_flax',
    'flax_rules',
    'has_layout',
    'in_force',
    'inherits',
    'is_open',
    'key',
    'mesh',
    'own',
    'owner',
    'sets_devices',
  )

  in_force: InForce | None
  key: Any
  flax_rules: Any
  by_flax: bool
  sets_devices: bool

  def __init__(self, own: InForce, mesh: compat.OpenMesh | None = None, owner: int | None = None):
    self.own, self.mesh, self.owner = own, mesh, owner
    self.sets_devices = mesh is not None and mesh.sets_devices
    self.inherits, self.is_open, self.has_layout = False, True, False
    self.change(own)

  @classmethod
  def within(cls, around: OpenBlock, rules: Rules | None = None, owner: int | None = None) -> OpenBlock:
    """A block in another one, with its mesh and, by default, its rules."""
    block = cls(
      (around.in_force or around.own) if rules is None else around.own.with_rules(rules), owner=owner
    )
    block.inherits, block.sets_devices = True, around.sets_devices
    return block

  def move(self, around: OpenBlock) -> None:
    """Gives it the mesh of another block around it, as the former one has ended."""
    self.sets_devices = around.sets_devices
    self.own = around.own.with_rules(self.own.rules)
    if self.in_force is not None:
      flax_rules, by_flax = self.flax_rules, self.by_flax
      self.change(around.own.with_rules(self.in_force.rules))
      self.flax_rules, self.by_flax = flax_rules, by_flax

  def change(self, in_force: InForce) -> None:
    """Puts something else in force."""
    self.in_force, self.key, self.flax_rules = in_force, in_force.key, in_force.flax_rules
    self.by_flax = False

  def change_flax_rules(self, rules: Any) -> None:
    """Puts Flax's rules in force; all of its own rules, if these are its pairs of them."""
    try:
      table = table_of(rules or ())
      is_own = table.pairs in (self.own.rules.pairs, self.own.flax_rules)
      self.change(self.own if is_own else self.own.with_rules(table))
    except (RulesError, TypeError):  # an error when they are read, as in Flax
      self.in_force, self.key = None, object()
    self.flax_rules, self.by_flax = rules, True

  def known(self) -> InForce:
    """What it puts in force; raises `RulesError` if the rules that Flax's functions have set are not a table."""
    if self.in_force is None:
      return self.own.with_rules(Rules.of(self.flax_rules))
    return self.in_force

  def end(self) -> None:
    """Ends it, and forgets the rules: another thread or a suspended task may keep it for long."""
    if self.has_layout:
      compat.under_layouts.end()
    self.is_open, self.owner, self.has_layout = False, None, False
    self.own, self.in_force, self.flax_rules = NOTHING, NOTHING, ()


class _Thread(threading.local):
  """The open blocks of a thread. The first never ends: it holds settings outside of blocks."""

  def __init__(self):
    self.blocks = [OpenBlock(NOTHING)]


_thread = _Thread()
_task: ContextVar[tuple[OpenBlock, ...]] = ContextVar('flax_spmd_open_blocks', default=())
_owned: set[OpenBlock] = set()  # those with an owner, of all threads


def of_task() -> OpenBlock:
  """The innermost open block of this task."""
  for block in reversed(_task.get()):
    if block.is_open:
      return block
  return _thread.blocks[0]


def of_trace() -> OpenBlock:
  """The innermost open block of this task, for a program that becomes part of JAX's caches.

  Raises:
    ContextError: these have the key of another block.
  """
  if _has_ended():
    _remove_ended()
    raise ContextError(_ENDED_ELSEWHERE)
  block = of_task()
  if block.key is not _thread.blocks[-1].key:
    raise ContextError(_OUT_OF_STEP)
  return block


def open_block(in_force: InForce) -> OpenBlock:
  """Begins a block that does not change JAX's current mesh, around a trace: code that no `await` suspends."""
  return _begin(OpenBlock(in_force))


def open_rules(rules: Rules) -> OpenBlock:
  """Begins a block with the mesh of the one around it.

  Raises:
    ContextError: another task of this thread has an open block.
  """
  _check_in_step()
  return _begin(OpenBlock.within(of_task(), rules))


def open_layout(in_force: InForce, owner: int) -> None:
  """Begins a block that makes its mesh JAX's current one; raises as `open_rules`.

  Args:
    in_force: mesh and rules of the layout.
    owner: identifies the `with` statement, for `close_layout`.
  """
  _check_in_step()
  _begin(OpenBlock(in_force, compat.OpenMesh(cast(MeshLike, in_force.mesh)), owner))


def close_layout(in_force: InForce, owner: int) -> None:
  """Ends the block of a layout that the same `with` statement began, or else the innermost one of the layout.

  An `ExitStack` enters and exits from different places.

  Raises:
    ContextError: as for `close`; or there is no such block.
  """
  of_layout = (block for block in _innermost_first() if block.mesh and block.own == in_force)
  innermost = next(of_layout, None)
  if innermost is None:
    raise ContextError(_NOT_OPEN.format(mesh=describe(in_force.mesh or {})))
  if innermost.owner == owner:
    close(innermost)
  else:
    close(next((block for block in of_layout if block.owner == owner), innermost))


def close(block: OpenBlock) -> None:
  """Ends a block, whether or not it is the innermost.

  Raises:
    ContextError: it began in another thread, or a mesh that JAX has set inside it is still in force.
  """
  block.end()
  _owned.discard(block)
  _task.set(_open_in_task())
  if block not in _thread.blocks:
    raise ContextError(_OTHER_THREAD)
  for mesh in _remove_ended():
    inside = compat.concrete_mesh() or current_mesh() or {}
    raise ContextError(_MESH_INSIDE.format(_with_devices(mesh.mesh), _with_devices(inside)))


def set_rules(rules: Rules) -> None:
  """Puts rules in force until the innermost block ends, or from now on if there is none.

  Raises:
    ContextError: another task of this thread has an open block.
  """
  _check_in_step()
  block = _thread.blocks[-1]
  block.change(block.own.with_rules(rules))
  _put_in_force(block)


def _flax_rules_changed(rules: Any, owner: int | None) -> None:
  """One of Flax's functions changes the rules: it sets them, or a block of it begins or ends."""
  if owner is None:
    _check_in_step()
    block = _thread.blocks[-1]
    block.change_flax_rules(rules)
    _put_in_force(block)
    return
  ending = next((each for each in _innermost_first() if each.owner == owner and not each.mesh), None)
  if ending is not None:
    close(ending)
    return
  in_step = _is_in_step()
  block = OpenBlock.within(of_task(), owner=owner)
  block.change_flax_rules(rules)
  _begin(block)
  if not in_step:  # only now, as Flax ends a block that could not begin
    raise ContextError(_OUT_OF_STEP)


compat.watch_flax_rules(_flax_rules_changed)


def _innermost_first() -> Iterator[OpenBlock]:
  """The open blocks of this thread, and then those of others that have an owner."""
  yield from reversed(_thread.blocks)
  yield from tuple(_owned.difference(_thread.blocks))


def _open_in_task() -> tuple[OpenBlock, ...]:
  return tuple([block for block in _task.get() if block.is_open])


def _has_ended() -> bool:
  """Whether another thread has ended a block of this one."""
  # `any` takes three times as long
  for block in _thread.blocks:  # noqa: SIM110
    if not block.is_open:
      return True
  return False


def _is_in_step() -> bool:
  """Whether the innermost block of this thread, if there is one, is of this task."""
  if _has_ended():
    _remove_ended()
  return len(_thread.blocks) == 1 or of_task() is _thread.blocks[-1]


def _check_in_step() -> None:
  if not _is_in_step():
    raise ContextError(_OUT_OF_STEP)


def _begin(block: OpenBlock) -> OpenBlock:
  if block.own.mesh is not None and not block.inherits:
    block.has_layout = True
    compat.under_layouts.begin()
  _thread.blocks.append(block)
  _task.set((*_open_in_task(), block))
  if block.owner is not None:
    _owned.add(block)
  _put_in_force(block)
  return block


def _put_in_force(block: OpenBlock) -> None:
  """Puts a block in force for JAX's caches and for Flax."""
  _jit_key(block.key).__enter__()
  compat.flax_rules.put(block.flax_rules)


def _remove_ended() -> list[compat.OpenMesh]:
  """Removes the blocks of this thread that have ended, and puts the innermost of the others in force.

  Returns:
    The meshes of those that could not be removed: one that JAX has set inside is still in force.
  """
  blocks = _thread.blocks
  ended = [block for block in reversed(blocks) if not block.is_open]
  overlapping = [block.mesh for block in ended if not _remove(block, blocks) and block.mesh]
  _put_in_force(blocks[-1])
  return overlapping


def _remove(ended: OpenBlock, blocks: list[OpenBlock]) -> bool:
  """Removes a block and its mesh; blocks in it are then in the block around it. Returns whether the mesh could be."""
  index = blocks.index(ended)
  del blocks[index]
  inside = blocks[index:]
  for block in itertools.takewhile(lambda block: block.inherits, inside):
    block.move(blocks[index - 1])
  if ended.mesh is None:
    return True
  return ended.mesh.close(next((block.mesh for block in inside if block.mesh), None))


def _with_devices(mesh: Any) -> str:
  """`{'data': 8} (devices 0, 1, 2, 3, ...)`."""
  if not isinstance(mesh, Mesh):
    return describe(mesh)
  ids = [str(device.id) for device in mesh.devices.flat[:5]]
  return f'{describe(mesh)} (devices {", ".join(ids[:4])}{", ..." if len(ids) > 4 else ""})'


_OUT_OF_STEP = (
  "The layout in force in this task differs from the one in JAX's cache key: another task of this "
  'thread is suspended by an `await` inside a `with layout:` block, or this thread was started '
  'inside such a block.\n'
  'Fix: call functions from `layout.jit`, which carry their layout; or close the block '
  'before awaiting; or enter `with layout:` in the thread that runs the function.'
)
_OTHER_THREAD = (
  'A block of a layout or of rules ends in another thread than it began in. In that thread, its mesh and rules '
  'stay in force until another block begins or ends there.\n'
  'Fix: close a generator, or leave its loop, in the thread that advanced it.'
)
_ENDED_ELSEWHERE = (
  "A block of a layout or of rules of this thread was ended by another thread, so JAX's cache key was still that "
  'of the block. It is in order again from now on.\n'
  'Fix: close a generator, or leave its loop, in the thread that advanced it.'
)
_MESH_INSIDE = (
  'The block of a layout with mesh {} ends, but a mesh that was set inside it, {}, is still in force.\n'
  'Fix: write jax.set_mesh(...) as a `with` statement, and let it end before the block around it.'
)
_NOT_OPEN = (
  'The block of a layout with mesh {mesh} ends, but none is open.\n'
  'Fix: use `with layout:` rather than calls of __enter__ and __exit__.'
)
