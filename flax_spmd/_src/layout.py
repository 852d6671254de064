"""Layout: a mesh and a rule table, and everything derived from the pair.

    layout = Layout({'data': 2, 'model': 4}, rules=(('batch', 'data'), ('hidden', 'model')))
    state  = layout.init(create_state, key, x)         # sharded from the start
    step   = layout.jit(train_step, donate_argnums=0)  # constraints and outputs follow the rules
    batch  = layout.shard(batch, ('batch', None))
    target = layout.abstract(create_state, key, x)     # restore target of a checkpoint

A layout is a value: immutable, hashable, equal by content, and stored as TOML. To try another layout,
create one; the model and the training step do not change.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.active_layout import InForce, check_in_step, scope
from flax_spmd._src.data.gather import gather
from flax_spmd._src.data.global_batches import Check, local_indices, local_to_global
from flax_spmd._src.jit.arguments import Arguments, closed_over
from flax_spmd._src.jit.jitted import Jitted
from flax_spmd._src.mesh import MeshLike, abstract_mesh, axis_sizes, axis_types, describe, make_mesh
from flax_spmd._src.multihost import check_same_on_every_process
from flax_spmd._src.names import box_trees
from flax_spmd._src.names.tree_names import leaf_names
from flax_spmd._src.plan import findings, placement_shardings
from flax_spmd._src.plan.planner import Planner, planner_for
from flax_spmd._src.plan.rows import Row
from flax_spmd._src.plan.unboxed_states import UnboxedStates
from flax_spmd._src.public_module import set_module
from flax_spmd._src.rules import toml_format
from flax_spmd._src.rules.decisions import rule_text
from flax_spmd._src.rules.table import Rules

if TYPE_CHECKING:
  from flax_spmd._src.pipeline.schedules.schedule import Schedule

_NOT_PARTITIONABLE = (
  'jax_threefry_partitionable is off: generating a sharded random array needs communication, or generates '
  "the whole array on every device. Turn it on with jax.config.update('jax_threefry_partitionable', True); "
  'this changes the random numbers.'
)
_ADDRESS = re.compile(' at 0x[0-9a-f]+')  # in the repr of a function; differs between processes
_open_blocks: ContextVar[tuple[ExitStack, ...]] = ContextVar('flax_spmd_open_blocks', default=())


@set_module('flax_spmd')
class Layout:
  """A mesh and a rule table: they determine the sharding of every array of a model.

  `with layout:` puts both in force for a block; `init`, `abstract` and `jit` need no such block.

  Args:
    mesh: a mesh (concrete or abstract), or the size of each axis, for `make_mesh`.
    rules: a rule table: `Rules`, or a sequence of pairs `(logical name, mesh axes)`.
    **policies: `unmatched`, `conflict`, `indivisible`, `missing_axis`; see `Policies`.

  Raises:
    MeshError: the mesh cannot be created.
    RulesError: `rules` is not a rule table.
    MeshAxisError: a rule uses an axis that the mesh lacks.

  Example:
    >>> layout = Layout({'data': 2, 'model': 4}, (('batch', 'data'), ('hidden', 'model')))
    >>> layout
    Layout({'data': 2, 'model': 4}, Rules(('batch', 'data'), ('hidden', 'model')))
    >>> layout.shard(jnp.ones((8, 16)), ('batch', 'hidden')).sharding.spec
    P('data', 'model')
  """

  def __init__(self, mesh: MeshLike | Mapping[str, int], rules: Any = (), **policies: Any):
    self._mesh = mesh if isinstance(mesh, (Mesh, AbstractMesh)) else make_mesh(mesh)
    self._rules = Rules.of(rules, **policies)
    self._rules.check_axes(axis_sizes(self._mesh))
    self._planner = planner_for(self._mesh, self._rules)
    self._unboxed_states = _unboxed_states_of(self._planner)

  @property
  def mesh(self) -> MeshLike:
    """The mesh, concrete or abstract."""
    return self._mesh

  @property
  def rules(self) -> Rules:
    """The rule table."""
    return self._rules

  def replace(self, *, mesh: Any = None, rules: Any = None, **policies: Any) -> Layout:
    """A copy of this layout with another mesh, other rules or other policies.

    A plain tuple of rules keeps this layout's policies; a `Rules` brings its own.

    Example:
      >>> layout = Layout({'data': 2, 'model': 4}, (('hidden', 'model'),))
      >>> layout.replace(mesh={'model': 8}, conflict='error')
      Layout({'model': 8}, Rules(('hidden', 'model'), conflict='error'))
    """
    if rules is None:
      rules = self._rules
    elif not isinstance(rules, Rules):
      rules = Rules.of(rules, **dataclasses.asdict(self._rules.policies))
    return Layout(mesh or self._mesh, rules, **policies)

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, Layout):
      return NotImplemented
    return self._mesh == other._mesh and self._rules == other._rules

  def __hash__(self) -> int:
    return hash((self._mesh, self._rules))

  def __repr__(self) -> str:
    return f'Layout({describe(self._mesh)}, {self._rules!r})'

  # -- planning: allocates nothing, runs nothing

  def spec(self, tree: Any) -> Any:
    """The PartitionSpec of every array: a tree with one spec for each box or bare leaf of `tree`.

    Args:
      tree: any tree, concrete or abstract.

    Raises:
      LayoutError, MeshAxisError, UnmatchedNameError, ConflictError: arrays that do not fit the rules or
        the mesh. The message lists all of them.

    Example:
      >>> layout = Layout({'data': 2, 'model': 4}, (('hidden', 'model'),))
      >>> layout.spec({'w': LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'hidden'))})
      {'w': P(None, 'model')}
    """
    return jax.tree.map(lambda sharding: sharding.spec, self.sharding(tree))

  def sharding(self, tree: Any, placements: Any = None) -> Any:
    """The NamedSharding of every array: `spec` on the layout's mesh, as `jax.jit` accepts it.

    Args:
      tree: any tree, concrete or abstract.
      placements: a placement or a prefix tree of placements, as in `shard`. None: by the rules.

    Raises:
      LayoutError, MeshAxisError, UnmatchedNameError, ConflictError: as for `spec`.

    Example:
      >>> layout = Layout({'data': 2, 'model': 4}, (('hidden', 'model'),))
      >>> w = LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'hidden'))
      >>> jax.device_put(w.value, layout.sharding({'w': w})['w']).addressable_shards[0].data.shape
      (8, 4)
    """
    if placements is not None:
      return jax.tree.structure(tree).unflatten(self._shardings(tree, placements))
    return self._planner.shardings(self._unboxed_states.rebox(tree))

  def names(self, tree: Any, *, logical_only: bool = False) -> list[Any]:
    """The axis names of each leaf, in the order of `jax.tree.leaves(tree)`; None for a leaf without names.

    A state that this layout created with `boxed=False` keeps the names of its boxes.

    Args:
      tree: any tree, concrete or abstract.
      logical_only: whether to omit mesh axes (the names of `Partitioned` boxes).

    Example:
      >>> layout = Layout({'model': 8}, (('hidden', 'model'),))
      >>> w = LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'hidden'))
      >>> layout.names({'b': jnp.ones(16), 'w': w})
      [None, ('embed', 'hidden')]
    """
    return leaf_names(self._unboxed_states.rebox(tree), logical_only=logical_only)

  def check(self, tree: Any) -> findings.Findings:
    """Likely mistakes: misspelt names, idle rules, idle mesh axes, large replicated arrays.

    Args:
      tree: any tree, concrete or abstract.

    Returns:
      Findings; printed one per line, and falsy if empty.

    Raises:
      LayoutError, MeshAxisError, UnmatchedNameError, ConflictError: as for `spec`.

    Example:
      >>> layout = Layout({'model': 8}, (('embed', 'model'),))
      >>> print(layout.check({'w': LogicallyPartitioned(jnp.ones((8,)), ('embd',))}))
      name 'embd' has no rule and is replicated (1 array: w). Did you mean 'embed'?
      mesh axis 'model' (8) is not used by this tree.
    """
    rows = self._planner.checked_rows(self._unboxed_states.rebox(tree))
    return findings.find(self._planner, rows)

  def rows(self, tree: Any) -> list[Row]:
    """One `Row` per array: path, shape, names, spec, decisions and bytes. Never raises.

    Example:
      >>> layout = Layout({'model': 8}, (('hidden', 'model'),))
      >>> w = LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'hidden'))
      >>> [row] = layout.rows({'w': w})
      >>> row.path, row.spec, row.bytes, row.bytes_per_device, row.copies
      ('w', P(None, 'model'), 512, 64, 1)
    """
    return self._planner.rows(self._unboxed_states.rebox(tree))

  def abstract(self, fn: Callable[..., Any], *args: Any, boxed: bool = True, **kwargs: Any) -> Any:
    """The result of `init` as shapes, dtypes and shardings; nothing runs. Used as a restore target.

    Args:
      fn: function that creates a state.
      *args, **kwargs: arguments of `fn`. Arrays may be abstract. Other objects, such as a model or an
        optimizer, are passed through.
      boxed: whether the state keeps its boxes. Without boxes, the layout remembers the names.

    Returns:
      The state, with a `jax.ShapeDtypeStruct` (shape, dtype and sharding) for every array.

    Raises:
      LayoutError, MeshAxisError, UnmatchedNameError, ConflictError: as for `spec`.

    Example:
      >>> layout = Layout(abstract_mesh({'data': 64, 'model': 8}), (('hidden', 'model'),))
      >>> init = with_logical_partitioning(nn.initializers.ones, ('embed', 'hidden'))
      >>> dense = nn.Dense(4096, kernel_init=init)
      >>> state = layout.abstract(dense.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 1024), 'float32'))
      >>> kernel = state['params']['kernel'].value
      >>> kernel.shape, kernel.sharding.spec
      ((1024, 4096), P(None, 'model'))
    """
    fn, arrays = closed_over(fn, args, kwargs)
    with self:
      state = jax.eval_shape(fn, arrays)
    shardings = self._planner.leaf_shardings(state)
    state = self._recorded(state) if boxed else self._unboxed_states.unbox(state)
    leaves, treedef = jax.tree.flatten(state)
    return treedef.unflatten(
      jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=sharding, weak_type=getattr(leaf, 'weak_type', False)
      )
      for leaf, sharding in zip(leaves, shardings, strict=True)
    )

  # -- running

  def init(self, fn: Callable[..., Any], *args: Any, boxed: bool = True, **kwargs: Any) -> Any:
    """Creates a sharded state: runs `fn` such that no device ever holds a whole sharded parameter.

    Args:
      fn: function that creates a state (variables, a TrainState, any tree) from keys and arrays.
      *args, **kwargs: arguments of `fn`. Objects other than arrays and numbers, such as a model or an
        optimizer, are passed through.
      boxed: whether the state keeps its boxes. Without boxes a call has no unboxing cost; the layout
        remembers the names.

    Returns:
      The state, with every array on the layout's mesh. Arrays that no rule applies to are replicated.

    Warns:
      UserWarning: `jax_threefry_partitionable` is off, so random arrays are not generated shard by shard.

    Raises:
      MeshError: the mesh is abstract.
      LayoutError, MeshAxisError, UnmatchedNameError, ConflictError: as for `spec`; raised before anything
        is compiled.

    Example:
      >>> layout = Layout({'data': 2, 'model': 4}, (('hidden', 'model'),))
      >>> init = with_logical_partitioning(nn.initializers.ones, ('embed', 'hidden'))
      >>> variables = layout.init(nn.Dense(16, kernel_init=init).init, jax.random.key(0), jnp.ones((1, 8)))
      >>> variables['params']['kernel'].value.sharding.spec
      P(None, 'model')
    """
    placement_shardings.check_concrete(self._mesh)
    if self._mesh.size > 1 and not compat.threefry_partitionable():
      warnings.warn(_NOT_PARTITIONABLE, stacklevel=2)
    if jax.process_count() > 1:
      self.check_processes(self.abstract(fn, *args, **kwargs))
    fn, arrays = closed_over(fn, args, kwargs)
    finish = self._recorded if boxed else self._unboxed_states.unbox
    return Jitted(fn, self._mesh, self._rules, self._planner.leaf_shardings, {}, finish)(arrays)

  def jit(
    self,
    fn: Callable[..., Any] | None = None,
    *,
    in_rules: Any = None,
    out_rules: Any = None,
    in_constraints: Any = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    inline: bool = False,
    compiler_options: dict[str, Any] | None = None,
  ) -> Any:
    """`jax.jit` under this layout: constraints follow its rules, and states keep its shardings.

    Arguments keep their shardings. Results that are states get the layout's shardings; the compiler chooses
    the shardings of other results. A state contains boxes, or has the structure and shapes of a state that
    `init` or `abstract` planned before the first call. Each element of a tuple is a separate result.

    `in_rules`, `out_rules` and `in_constraints` override this with *placements*. A placement is logical
    names (a tuple), a PartitionSpec of mesh axes, a sharding, a rule table (`Rules`, `fsdp(...)`, a
    function) or None (the behaviour above). A tree of placements may be a prefix of the argument or result.
    A rule table sees paths relative to its part of the tree.

    Args:
      fn: function to compile; if omitted, `jit` returns a decorator. Keep the returned function: every
        call of `jit` compiles again.
      in_rules: one placement for all arguments, a tuple with one per argument, or a dict by parameter
        name, without the static arguments. Host arrays are transferred there; arrays that are committed
        to another sharding are an error.
      out_rules: placement or prefix tree of placements for the result.
      in_constraints: as `in_rules`, but arguments keep their shardings and are resharded inside the
        program.
      donate_argnums, donate_argnames, static_argnums, static_argnames: as in `jax.jit`.
      keep_unused, inline, compiler_options: as in `jax.jit`.

    Returns:
      A function with `.lower`, `.trace` and `.eval_shape`, which accept abstract arguments too. It raises
      `LayoutError` if arguments do not fit their placements, before anything is compiled.

    Example:
      >>> layout = Layout({'data': 8}, (('batch', 'data'),))
      >>> double = layout.jit(lambda x: with_logical_constraint(2 * x, ('batch',)))
      >>> double(jnp.ones(16)).sharding.spec
      P('data',)
      >>> total = layout.jit(lambda w, x: x @ w, in_rules=(fsdp('data', min_size=1), ('batch', None)))
      >>> total(jnp.ones((4, 16)), np.ones((8, 4))).shape
      (8, 16)
    """
    options = {
      'donate_argnums': donate_argnums,
      'donate_argnames': donate_argnames,
      'static_argnums': static_argnums,
      'static_argnames': static_argnames,
      'keep_unused': keep_unused,
      'inline': inline,
      'compiler_options': compiler_options,
    }
    placements = {'in_rules': in_rules, 'out_rules': out_rules, 'in_constraints': in_constraints}
    if fn is None:
      return functools.partial(self.jit, **placements, **options)
    arguments = Arguments.of(fn, options)
    if in_constraints is not None:
      fn = arguments.constrained(fn, in_constraints)
    plan_inputs = None
    if in_rules is not None:
      plan_inputs = functools.partial(self._input_shardings, arguments=arguments, placements=in_rules)
    plan_outputs = functools.partial(self._output_shardings, placements=out_rules)
    return Jitted(fn, self._mesh, self._rules, plan_outputs, options, plan_inputs=plan_inputs)

  def pipeline_jit(
    self,
    fn: Callable[..., Any] | None = None,
    *,
    axis: str = 'stage',
    schedule: Schedule | None = None,
    in_rules: Any = None,
    out_rules: Any = None,
    stages: int | None = None,
    threads: bool = False,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
  ) -> Any:
    """`jit` with pipeline parallelism: the model's stages are distributed over a mesh axis.

    The model marks the end of each stage with `pipeline.stage_end`. The function calls
    `pipeline.accumulate` once and updates its state as usual, or it has neither gradients nor a loop. Each
    stage is compiled as its own program, sharded by the layout's rules over the other mesh axes. Arrays
    that a stage owns are plain `jax.Array`s on the devices of that stage; arguments may be on any devices.

    Args:
      fn: function to compile; if omitted, `pipeline_jit` returns a decorator.
      axis: mesh axis of the stages.
      schedule: the schedule, if `accumulate` has none of its own. In a function without a loop, it only
        assigns stages to ranks.
      in_rules, out_rules: as in `jit`.
      stages: number of stages to cut an unmarked model into, at boundaries between Linen modules, with
        the work balanced as well as these allow. Has to equal the schedule's number of stages.
      threads: whether each rank has its own dispatch thread. Useful if dispatch blocks: small programs on
        CPUs, and programs that call back into Python.
      donate_argnums, donate_argnames, static_argnums, static_argnames: as in `jax.jit`.

    Returns:
      A function with `.trace`, `.lower` and `.compile`, which accept abstract arguments too.

    Raises:
      PipelineError: the mesh lacks the axis, or a rule uses it. A call raises it too, before anything is
        compiled: stages, schedule and mesh do not match, or the function cannot be cut.

    Example:
      >>> layout = Layout({'stage': 2, 'data': 4}, (('batch', 'data'),))
      >>> def step(w, batch):
      ...   def loss(w, x):
      ...     x = pipeline.stage_end(jnp.tanh(x @ w['first']))
      ...     return jnp.mean((x @ w['second']) ** 2)
      ...   grads = pipeline.accumulate(lambda x: jax.grad(loss)(w, x), batch, pipeline.OneFOneB(2))
      ...   return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads)
      >>> w = {'first': jnp.ones((4, 4)), 'second': jnp.ones((4, 4))}
      >>> new = layout.pipeline_jit(step)(w, layout.shard(jnp.ones((3, 8, 4)), (None, 'batch', None)))
      >>> sorted(device.id for device in new['second'].devices())
      [4, 5, 6, 7]
    """
    options = {
      'donate_argnums': donate_argnums,
      'donate_argnames': donate_argnames,
      'static_argnums': static_argnums,
      'static_argnames': static_argnames,
    }
    if fn is None:
      return functools.partial(
        self.pipeline_jit,
        axis=axis,
        schedule=schedule,
        in_rules=in_rules,
        out_rules=out_rules,
        stages=stages,
        threads=threads,
        **options,
      )
    plan_inputs = None
    if in_rules is not None:
      arguments = Arguments.of(fn, options)
      plan_inputs = functools.partial(self._input_shardings, arguments=arguments, placements=in_rules)
    plan_outputs = functools.partial(self._output_shardings, placements=out_rules)
    from flax_spmd._src.pipeline.pipelined import Pipelined  # with SciPy's graphs, 0.4 s to import

    return Pipelined(
      fn, self._mesh, self._rules, axis, schedule, plan_outputs, plan_inputs, threads, stages, options
    )

  def shard(self, tree: Any, placements: Any = None) -> Any:
    """Transfers existing arrays to the mesh, all in one `jax.device_put`.

    Args:
      tree: arrays (numpy or JAX, boxed or not) and numbers.
      placements: a placement for all leaves, or a tree of placements that is a prefix of `tree`. A
        placement is logical names (a tuple), a PartitionSpec of mesh axes, a sharding, or a rule table
        (`Rules`, `fsdp(...)`, a function), which sees paths relative to its part of the tree. None: by the
        layout's rules; arrays that no rule applies to are replicated.

    Returns:
      The tree, with every leaf as a `jax.Array`.

    Warns:
      UserWarning: a name has no rule but resembles a name that has one.

    Raises:
      MeshError: the mesh is abstract.
      LayoutError: a placement does not fit the tree or a leaf's rank, a size is not divisible, or a mesh
        axis is used as a logical name.

    Example:
      >>> layout = Layout({'data': 8}, (('batch', 'data'),))
      >>> batch = layout.shard({'x': np.ones((16, 4)), 'y': np.ones(16)}, {'x': ('batch', None), 'y': ('batch',)})
      >>> batch['x'].sharding.spec
      P('data', None)
    """
    placement_shardings.check_concrete(self._mesh)
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(jax.device_put(leaves, self._shardings(tree, placements)))

  def replicate(self, tree: Any) -> Any:
    """Copies every array of a tree to every device of the mesh, all in one `jax.device_put`.

    Raises:
      MeshError: the mesh is abstract.

    Example:
      >>> Layout({'data': 8}).replicate({'scale': np.ones(3)})['scale'].sharding.spec
      P()
    """
    return self.shard(tree, PartitionSpec())

  def gather(self, tree: Any) -> Any:
    """Every array of a tree as a full numpy array, on every process; see `flax_spmd.gather`.

    Example:
      >>> layout = Layout({'data': 8}, (('batch', 'data'),))
      >>> layout.gather(layout.shard(np.arange(8), ('batch',)))
      array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32)
    """
    return gather(tree)

  def local_to_global(self, tree: Any, placements: Any = None, *, check: Check = 'new') -> Any:
    """Global arrays from the part of a batch that each process has loaded.

    A process's part is the union of the slices on its devices, in the order of the global array, whatever
    the device order of the mesh. `local_indices` computes it.

    Args:
      tree: this process's part: numpy arrays, or JAX arrays of this process.
      placements: logical names, a PartitionSpec of mesh axes, a sharding, or None (replicated); or a tree
        of these that is a prefix of `tree`.
      check: when processes compare paths, shapes, dtypes and shardings: for a batch with a 'new'
        structure, 'always', or 'never'.

    Returns:
      The tree, with a global `jax.Array` for every leaf.

    Raises:
      MeshError: the mesh is abstract.
      LayoutError: a placement does not fit, the batches of two processes differ, or a process does not
        arrive in time. Every process that compares raises it, before anything is transferred.

    Example:
      >>> layout = Layout({'data': 8}, (('batch', 'data'),))
      >>> layout.local_to_global(np.ones((16, 4)), ('batch', None)).sharding.spec
      P('data', None)
    """
    placement_shardings.check_concrete(self._mesh)
    shardings = placement_shardings.shardings_of_parts(tree, placements, self._planner)
    return local_to_global(tree, jax.tree.structure(tree).unflatten(shardings), check=check)

  def local_indices(self, tree: Any, placements: Any = None) -> Any:
    """The part of a batch that this process has to load for `local_to_global`.

    The mesh determines it: two processes may need different rows, the same rows (if a tensor-parallel
    axis spans processes), or overlapping rows.

    Args:
      tree: the global arrays, or `jax.ShapeDtypeStruct`s of their shapes.
      placements: as in `local_to_global`.

    Returns:
      For each array, a tuple with one sorted int64 array of indices per dimension; the part of `x` is
      `x[np.ix_(*indices)]`.

    Raises:
      MeshError: the mesh is abstract.
      LayoutError: a placement does not fit.

    Example:
      >>> layout = Layout({'data': 8}, (('batch', 'data'),))
      >>> rows, columns = layout.local_indices(jax.ShapeDtypeStruct((16, 4), jnp.float32), ('batch', None))
      >>> rows  # all of them, in a job of one process
      array([ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11, 12, 13, 14, 15])
    """
    placement_shardings.check_concrete(self._mesh)
    leaves, treedef = jax.tree.flatten(tree)
    shardings = self._shardings(tree, placements)
    return treedef.unflatten(
      local_indices(leaf.shape, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)
    )

  def check_processes(self, tree: Any = None) -> None:
    """Checks that all processes have the same layout and shard `tree` alike.

    `init` calls it. The processes communicate through the coordination service of `jax.distributed`, not
    through devices. In a job of one process it does nothing.

    Args:
      tree: a tree whose shardings to compare, concrete or abstract; None: only the layout.

    Raises:
      LayoutError: the layouts or shardings differ (the message shows the first lines that differ, and on
        which processes), or a process does not arrive in time. Every process raises it.

    Example:
      >>> Layout({'data': 8}).check_processes({'w': jnp.ones((8, 16))})
    """
    rules = self._rules.all_rules(annotations=True)
    rows = [] if tree is None else self.rows(tree)
    lines = [
      f'mesh {describe(self._mesh)}',
      *(f'rule {rule_text(rule)} {_ADDRESS.sub("", repr(clause))}' for rule, clause in rules),
      repr(self._rules.policies),
      *(f'{row.path}: {row.dtype}{list(row.shape)} as {row.spec}' for row in rows),
    ]
    check_same_on_every_process('the layout', '\n'.join(lines))

  def __enter__(self) -> Self:
    check_in_step()
    with ExitStack() as stack:
      stack.enter_context(compat.mesh_scope(self._mesh))
      stack.enter_context(scope(InForce(self._mesh, self._rules)))
      _open_blocks.set((*_open_blocks.get(), stack.pop_all()))
    return self

  def __exit__(self, *exc_info: Any) -> None:
    *outer, stack = _open_blocks.get()
    _open_blocks.set(tuple(outer))
    stack.__exit__(*exc_info)

  # -- text

  def to_toml(self) -> str:
    """The layout as TOML, for people to edit and for `from_toml` to read.

    Raises:
      RulesError: the table contains a function.

    Example:
      >>> print(Layout({'data': 8}, (('batch', 'data'), ('embed', None))).to_toml())
      format = 1
      <BLANKLINE>
      [mesh]
      data = 8
      <BLANKLINE>
      [rules]
      clauses = [
        ["batch", "data"],
        ["embed", []],
      ]
      <BLANKLINE>
    """
    return toml_format.write(axis_sizes(self._mesh), axis_types(self._mesh), self._rules)

  @classmethod
  def from_toml(cls, text: str, *, mesh: MeshLike | None = None, devices: int | None = None) -> Layout:
    """A layout from the TOML that `to_toml` writes.

    Args:
      text: the TOML text.
      mesh: mesh with the same axes to use instead of one over the available devices.
      devices: number of devices of an abstract mesh to create instead. An axis of size -1 takes the
        remaining factor.

    Raises:
      RulesError: the text is not a layout. The message names the line or the entry.
      MeshError: there are too few devices, the sizes do not fit them, or `mesh` has other axes.

    Example:
      >>> text = Layout({'data': 2, 'model': 4}, (('batch', 'data'), ('hidden', 'model'))).to_toml()
      >>> Layout.from_toml(text)
      Layout({'data': 2, 'model': 4}, Rules(('batch', 'data'), ('hidden', 'model')))
      >>> Layout.from_toml(text, mesh=abstract_mesh({'data': 2, 'model': 4})).mesh.size
      8
      >>> dict(Layout.from_toml(text.replace('data = 2', 'data = -1'), devices=64).mesh.shape)
      {'data': 16, 'model': 4}
    """
    parsed = toml_format.read(text)
    if devices is not None and mesh is None:
      mesh = abstract_mesh(parsed.axes, devices=devices, axis_types=parsed.types)
    elif mesh is None:
      mesh = make_mesh(parsed.axes, axis_types=parsed.types)
    toml_format.check_same_axes(parsed, axis_sizes(mesh))
    return cls(mesh, parsed.rules)

  # -- internals

  def _shardings(self, tree: Any, placements: Any) -> list[Any]:
    """The sharding of each leaf of a tree: by its placement or, without one, by the rules."""
    if placements is None:
      return self._shardings_by_rules(tree)
    return placement_shardings.shardings_by(tree, placements, self._planner, self._shardings_by_rules)

  def _shardings_by_rules(self, tree: Any) -> list[NamedSharding]:
    return self._planner.leaf_shardings(self._unboxed_states.rebox(tree))

  def _input_shardings(self, dynamic: Any, arguments: Arguments, placements: Any) -> list[Any]:
    """The required sharding of each leaf of the arguments; None accepts any."""
    spread = arguments.spread(placements, dynamic)
    return placement_shardings.shardings_by(dynamic, spread, self._planner, _unspecified)

  def _output_shardings(self, result: Any, placements: Any = None) -> list[Any]:
    """The sharding of each leaf of a jitted function's result; None leaves it to the compiler."""
    if placements is None:
      return self._result_shardings(result)
    return placement_shardings.shardings_by(result, placements, self._planner, self._result_shardings)

  def _result_shardings(self, result: Any) -> list[NamedSharding | None]:
    """Shardings for those elements of a result that are states: with boxes, or planned by this layout."""
    result = self._unboxed_states.rebox(result)
    elements = jax.tree.leaves(
      result,
      is_leaf=lambda node: (
        type(node) not in (tuple, list) or self._unboxed_states.shardings_of(node) is not None
      ),
    )
    if self._planner.looks_at_paths:  # path rules match paths within each state
      return [sharding for element in elements for sharding in self._element_shardings(element)]
    in_state: list[bool] = []
    for element in elements:
      is_state = self._unboxed_states.shardings_of(element) is not None or has_boxes(element)
      in_state += [is_state] * len(jax.tree.leaves(element))
    planned = self._planner.leaf_shardings(result)
    return [sharding if pinned else None for sharding, pinned in zip(planned, in_state, strict=True)]

  def _element_shardings(self, element: Any) -> Sequence[NamedSharding | None]:
    """The shardings of one element: as planned before, by its names, or unspecified."""
    recorded = self._unboxed_states.shardings_of(element)
    if recorded is not None:
      return recorded
    return self._planner.leaf_shardings(element) if has_boxes(element) else _unspecified(element)

  def _recorded(self, state: Any) -> Any:
    """Records the shardings of a state if rules apply to arrays without names: it may have no boxes."""
    return self._unboxed_states.record(state) if self._planner.places_unnamed_arrays else state


def _unspecified(tree: Any) -> list[None]:
  return [None] * len(jax.tree.leaves(tree))


def has_boxes(tree: Any) -> bool:
  """Whether a tree contains boxes."""
  is_box = box_trees.is_axis_metadata
  return any(map(is_box, jax.tree.leaves(tree, is_leaf=is_box)))


@functools.lru_cache(maxsize=256)
def _unboxed_states_of(planner: Planner) -> UnboxedStates:
  """Equal layouts share the states that they remember."""
  return UnboxedStates(planner.leaf_shardings)
