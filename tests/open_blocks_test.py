"""Of blocks that overlap in any way, the innermost one that is still open is in force; or it is an error."""

import asyncio
import contextlib
import copy
import gc
import itertools
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from textwrap import dedent

import flax.linen as nn
import jax
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd._src.open_blocks import InForce
from flax_spmd.errors import ContextError, MeshError, RulesError

pytestmark = pytest.mark.usefixtures('new_objects_only')

SIZES = {'data': 2, 'model': 4}
NAMES = ('batch', 'hidden')
TABLES = (
  (('batch', 'data'), ('hidden', 'model')),
  (('batch', 'model'), ('hidden', 'data')),
  (('batch', None), ('hidden', ('data', 'model'))),
)
FORWARD = spmd.make_mesh(SIZES)
REVERSED = spmd.make_mesh(SIZES, devices=jax.devices()[::-1])
LAYOUTS = (
  spmd.Layout(FORWARD, TABLES[0]),
  spmd.Layout(FORWARD, TABLES[1]),
  spmd.Layout(REVERSED, TABLES[2]),
)
NO_MESH = jax.sharding.get_mesh()
X = np.ones((8, 8), np.float32)
ours = jax.jit(partial(spmd.with_logical_constraint, logical_axis_resources=NAMES))
flaxs = jax.jit(partial(nn.with_logical_constraint, logical_axis_resources=NAMES))


def held(context):
  """A generator that holds a block open; for a layout, by its own `with` statement."""
  with context():
    yield


def of_layout(layout):
  with layout:
    yield


class Open:
  """A block of the model: its rules (None: those around it) and its mesh (None: the one around it)."""

  def __init__(self, generator, rules, mesh, is_jaxs=False):
    self.generator, self.rules, self.mesh, self.is_jaxs = generator, rules, mesh, is_jaxs


def of_kind(kind, index):
  table = TABLES[index]
  if kind == 'layout':
    return Open(of_layout(LAYOUTS[index]), table, LAYOUTS[index].mesh)
  if kind == 'rules':
    return Open(held(partial(spmd.logical_axis_rules, table)), table, None)
  if kind == "Flax's rules":
    return Open(held(partial(nn.logical_axis_rules, table)), table, None)
  return Open(
    held(partial(jax.set_mesh, (FORWARD, REVERSED)[index % 2])),
    None,
    (FORWARD, REVERSED)[index % 2],
    True,
  )


class ThreadModel:
  """A thread with its open blocks.

  `mends` if another thread has ended a block of it: it is in order when the next one begins. `knows_mesh` until
  blocks of JAX and ours overlap: JAX's restore the mesh that they found.
  """

  def __init__(self):
    self.executor = ThreadPoolExecutor(1)
    self.blocks = []
    self.mends, self.knows_mesh = False, True

  def run(self, function, *args):
    return self.executor.submit(function, *args).result()

  @property
  def rules(self):
    return next((block.rules for block in reversed(self.blocks) if block.rules is not None), ())

  @property
  def mesh(self):
    return next((block.mesh for block in reversed(self.blocks) if block.mesh is not None), None)

  def close(self, block):
    """Ends a block; an error only where JAX has restored a mesh that is not the one around."""
    try:
      self.run(block.generator.close)
      self.mends = False
    except ContextError:
      assert not self.knows_mesh

  def check(self):
    """The innermost block that is open decides, for functions that are cached since the first example."""
    assert self.run(spmd.get_logical_axis_rules) == self.rules
    assert self.run(nn.get_logical_axis_rules) == self.rules
    if not self.knows_mesh:
      return
    assert self.run(jax.sharding.get_mesh) == (self.mesh or NO_MESH)
    if self.rules and self.mesh is None:
      with pytest.raises(MeshError):
        self.run(ours, X)
    elif self.rules:
      expected = NamedSharding(self.mesh, spmd.logical_to_mesh_axes(NAMES, self.rules))
      for constrained in (ours, flaxs):
        assert self.run(constrained, X).sharding.is_equivalent_to(expected, 2)


@settings(max_examples=60, stateful_step_count=25)
class Interleaved(RuleBasedStateMachine):
  """Blocks of all kinds in two threads, which begin and end in any order."""

  def __init__(self):
    super().__init__()
    self.threads = [ThreadModel(), ThreadModel()]

  @rule(
    thread=st.integers(0, 1),
    kind=st.sampled_from(['layout', 'rules', "Flax's rules", 'mesh']),
    index=st.integers(0, 2),
  )
  def begin(self, thread, kind, index):
    model = self.threads[thread]
    if kind == 'mesh' and (model.mends or not model.knows_mesh):
      return
    block = of_kind(kind, index)
    model.run(next, block.generator)
    model.blocks.append(block)
    model.mends = False

  @precondition(lambda self: any(model.blocks for model in self.threads))
  @rule(data=st.data())
  def end(self, data):
    model = data.draw(st.sampled_from([model for model in self.threads if model.blocks]))
    block = data.draw(st.sampled_from(model.blocks))
    inside = model.blocks[model.blocks.index(block) + 1 :]
    model.blocks.remove(block)
    meshes = [each for each in inside if each.mesh is not None]
    of_jax = list(itertools.takewhile(lambda each: each.is_jaxs, meshes))
    if block.mesh is None or not meshes or not (block.is_jaxs or of_jax):
      model.close(block)
    elif not block.is_jaxs and block.mesh != of_jax[-1].mesh and model.knows_mesh:
      with pytest.raises(ContextError, match='is still in force'):
        model.run(block.generator.close)
      model.knows_mesh = False
    else:  # a mesh of JAX ends before an inner one, or an equal one hides that it is open
      model.knows_mesh = False
      model.close(block)

  @precondition(lambda self: any(model.blocks for model in self.threads))
  @rule(data=st.data())
  def end_in_another_thread(self, data):
    model, other = data.draw(st.permutations(self.threads))
    if not model.blocks or any(block.is_jaxs for block in model.blocks):
      return
    block = data.draw(st.sampled_from(model.blocks))
    with pytest.raises(ContextError, match='in another thread'):
      other.run(block.generator.close)
    model.blocks.remove(block)
    model.mends = True

  @invariant()
  def innermost_is_in_force(self):
    for model in self.threads:
      if not model.mends:
        model.check()

  def teardown(self):
    for model in self.threads:
      for block in reversed(model.blocks):
        model.close(block)
      model.blocks.clear()
      if model.knows_mesh and not model.mends:
        model.check()
      model.executor.shutdown()


TestInterleaved = pytest.mark.slow(Interleaved.TestCase)


def test_two_generators_that_take_turns():
  first, second = of_layout(LAYOUTS[0]), of_layout(LAYOUTS[1])
  next(first), next(second)
  assert ours(X).sharding.spec == P('model', 'data')
  first.close()
  assert spmd.get_logical_axis_rules() == TABLES[1]
  assert ours(X).sharding.spec == flaxs(X).sharding.spec == P('model', 'data')
  second.close()
  assert spmd.get_logical_axis_rules() == nn.get_logical_axis_rules() == ()
  assert jax.sharding.get_mesh() == NO_MESH


def test_a_generator_that_is_dropped_ends_its_block():
  generator = of_layout(LAYOUTS[0])
  next(generator)
  with LAYOUTS[1]:
    del generator
    gc.collect()
    assert ours(X).sharding.spec == P('model', 'data')
  assert spmd.get_logical_axis_rules() == ()


@pytest.mark.parametrize('first_ends', [0, 1, 2])
def test_one_layout_in_two_generators_with_another_between(first_ends):
  """The `with` statement decides which of the two blocks ends."""
  layouts = [LAYOUTS[0], LAYOUTS[1], LAYOUTS[0]]
  generators = list(map(of_layout, layouts))
  for generator in generators:
    next(generator)
  generators.pop(first_ends).close()
  layouts.pop(first_ends)
  while generators:
    assert spmd.get_logical_axis_rules() == layouts[-1].rules.pairs
    generators.pop().close()
    layouts.pop()


def test_blocks_of_an_exit_stack():
  with contextlib.ExitStack() as stack:
    for layout in (LAYOUTS[0], LAYOUTS[1], LAYOUTS[0]):
      stack.enter_context(layout)
    with contextlib.ExitStack() as inner:
      inner.enter_context(LAYOUTS[1])
      assert spmd.get_logical_axis_rules() == TABLES[1]
    assert spmd.get_logical_axis_rules() == TABLES[0]
  assert spmd.get_logical_axis_rules() == ()


def test_an_error_in_one_of_two_generators():
  def failing():
    with LAYOUTS[0]:
      yield
      raise KeyError

  generator = failing()
  next(generator)
  with LAYOUTS[1]:
    with pytest.raises(KeyError):
      next(generator)
    assert ours(X).sharding.spec == P('model', 'data')
  assert spmd.get_logical_axis_rules() == ()


def test_rules_without_a_mesh_of_their_own_lose_it_with_the_layout_around():
  outer, inner = of_layout(LAYOUTS[0]), held(partial(spmd.logical_axis_rules, TABLES[1]))
  next(outer), next(inner)
  assert ours(X).sharding.spec == P('model', 'data')
  outer.close()
  with pytest.raises(MeshError):
    ours(X)
  inner.close()


def test_a_block_that_ends_in_another_thread():
  generator = of_layout(LAYOUTS[0])
  next(generator)
  with ThreadPoolExecutor(1) as executor, pytest.raises(ContextError) as caught:
    executor.submit(generator.close).result()
  assert str(caught.value) == dedent("""\
    A block of a layout or of rules ends in another thread than it began in. In that thread, its mesh and rules stay in force until another block begins or ends there.
    Fix: close a generator, or leave its loop, in the thread that advanced it.""")
  with pytest.raises(ContextError) as caught:
    jax.jit(lambda x: spmd.with_logical_constraint(x + 1, NAMES))(X)
  assert str(caught.value) == dedent("""\
    A block of a layout or of rules of this thread was ended by another thread, so JAX's cache key was still that of the block. It is in order again from now on.
    Fix: close a generator, or leave its loop, in the thread that advanced it.""")
  assert len(jax.jit(lambda x: spmd.with_logical_constraint(x + 1, NAMES))(X).sharding.device_set) == 1


def test_a_block_that_ends_inside_a_mesh_of_jax():
  generator = of_layout(LAYOUTS[0])
  next(generator)
  with pytest.raises(ContextError) as caught, jax.set_mesh(REVERSED):
    generator.close()
  assert str(caught.value) == dedent("""\
    The block of a layout with mesh {'data': 2, 'model': 4} (devices 0, 1, 2, 3, ...) ends, but a mesh that was set inside it, {'data': 2, 'model': 4} (devices 7, 6, 5, 4, ...), is still in force.
    Fix: write jax.set_mesh(...) as a `with` statement, and let it end before the block around it.""")
  jax.set_mesh(None)  # JAX has restored the layout's
  assert spmd.get_logical_axis_rules() == ()


def test_a_block_that_has_not_begun():
  with pytest.raises(ContextError) as caught:
    LAYOUTS[0].__exit__(None, None, None)
  assert str(caught.value) == dedent("""\
    The block of a layout with mesh {'data': 2, 'model': 4} ends, but none is open.
    Fix: use `with layout:` rather than calls of __enter__ and __exit__.""")


def test_an_asynchronous_generator_that_another_task_ends():
  """The event loop closes it in a task of its own."""

  async def batches():
    with LAYOUTS[0]:
      yield 1
      yield 2

  async def main():
    async for _ in batches():
      assert spmd.get_logical_axis_rules() == TABLES[0]
      break
    gc.collect()
    for _ in range(3):
      await asyncio.sleep(0)
    with LAYOUTS[1]:
      assert ours(X).sharding.spec == P('model', 'data')
    return spmd.get_logical_axis_rules()

  assert asyncio.run(main()) == ()


@pytest.mark.parametrize('enter', [spmd.logical_axis_rules, nn.logical_axis_rules])
def test_rules_of_two_tasks_in_one_thread(enter):
  """JAX's cache key and Flax's rules are per thread, so the second task gets an error."""

  async def suspended(entered, release):
    with enter(TABLES[0]):
      entered.set()
      await release.wait()
      assert spmd.get_logical_axis_rules() == nn.get_logical_axis_rules() == TABLES[0]

  async def other(entered, release):
    await entered.wait()
    with pytest.raises(ContextError, match='another task'), enter(TABLES[1]):
      pass
    for set_rules in (spmd.set_logical_axis_rules, nn.set_logical_axis_rules):
      with pytest.raises(ContextError, match='another task'):
        set_rules(TABLES[1])
    release.set()

  async def main():
    entered, release = asyncio.Event(), asyncio.Event()
    await asyncio.gather(suspended(entered, release), other(entered, release))

  asyncio.run(main())
  assert spmd.get_logical_axis_rules() == nn.get_logical_axis_rules() == ()


def test_rules_set_without_a_block_are_for_the_whole_thread():
  """As JAX's caches and Flax keep them: also in tasks that have begun before."""

  async def main():
    task = asyncio.create_task(later())
    spmd.set_logical_axis_rules(TABLES[1])
    return await task

  async def later():
    with jax.set_mesh(FORWARD):
      return ours(X).sharding.spec

  try:
    assert asyncio.run(main()) == P('model', 'data')
  finally:
    spmd.set_logical_axis_rules(())


@pytest.mark.parametrize('set_rules', [spmd.set_logical_axis_rules, nn.set_logical_axis_rules])
def test_rules_set_in_a_block_last_until_its_end(set_rules):
  with LAYOUTS[0]:
    set_rules(TABLES[1])
    assert spmd.get_logical_axis_rules() == nn.get_logical_axis_rules() == TABLES[1]
    assert ours(X).sharding.spec == flaxs(X).sharding.spec == P('model', 'data')
  assert spmd.get_logical_axis_rules() == nn.get_logical_axis_rules() == ()


def test_pairs_that_flax_restores_bring_back_the_whole_table():
  """Flax knows only pairs; other rules of the layout apply again with them."""
  layout = spmd.Layout(FORWARD, (*TABLES[0], ('@values', P('model'))))
  annotated = jax.jit(lambda x: spmd.with_sharding_annotation(2 * x, 'values'))
  with layout:
    before = nn.get_logical_axis_rules()
    nn.set_logical_axis_rules(TABLES[1])
    nn.set_logical_axis_rules(before)
    assert annotated(X).sharding.spec == P('model')
    with nn.logical_axis_rules(before):
      assert annotated(X).sharding.spec == P('model')


@pytest.mark.parametrize('rules', [7, {'batch': 'data'}, (('batch', 3),), [['batch', ['data']]]])
def test_rules_of_flax_are_checked_when_they_are_used(rules):
  """Flax's own block accepts anything, as without this library."""
  with jax.set_mesh(FORWARD), nn.logical_axis_rules(rules):
    assert nn.get_logical_axis_rules() is rules
    try:
      spmd.Rules.of(rules)
    except RulesError as expected:
      with pytest.raises(RulesError) as caught:
        spmd.get_logical_axis_rules()
      assert str(caught.value) == str(expected)
    else:
      assert ours(X).sharding.spec == P('data')
  assert spmd.get_logical_axis_rules() == nn.get_logical_axis_rules() == ()


def test_jitted_functions_of_equal_rules_share_a_trace():
  """However the rules are put in force, and although nobody keeps them between the blocks."""
  traces = []

  @jax.jit
  def traced(x):
    traces.append(1)
    return spmd.with_logical_constraint(x, NAMES)

  for _ in range(2):
    for enter in (spmd.logical_axis_rules, nn.logical_axis_rules):
      for rules in (
        TABLES[0],
        tuple(TABLES[0]),
        list(map(list, TABLES[0])),
        spmd.Rules(*TABLES[0]).pairs,
      ):
        with jax.set_mesh(FORWARD), enter(rules):
          traced(X)
      gc.collect()
  assert len(traces) == 1


def test_a_copy_has_the_key_of_the_original():
  """A copy that is made after use, too: the key is an object of this process."""
  original = InForce(None, spmd.Rules(*TABLES[0]))
  for copied in (pickle.loads(pickle.dumps(original)), copy.deepcopy(original)):
    assert copied == original and copied.key is original.key is not None
  assert pickle.loads(pickle.dumps(original)).key is original.key


@pytest.mark.slow
def test_layouts_with_equal_functions_share_a_trace_while_the_function_exists():
  traces = []

  @jax.jit
  def traced(x):
    traces.append(1)
    return spmd.with_logical_constraint(x, NAMES)

  class Policy:
    def rule(self, leaf):
      return None

  policy = Policy()
  for functions in ((by_size,), (policy.rule,), (partial(by_size, least=2),), (lambda leaf: None,)):
    before = len(traces)
    kept = functions[0]
    for _ in range(3):
      with spmd.Layout(FORWARD, (*TABLES[0], kept, ('x/', spmd.Rules(kept)), ('@w', kept))):
        traced(X)
      gc.collect()
    assert len(traces) == before + 1


def by_size(leaf, least=1):
  return P() if leaf.size < least else None


def used_in_a_block(layout):
  with layout:
    ours(X)


def used_by_jit(layout):
  layout.jit(lambda x: spmd.with_logical_constraint(x, NAMES))(X)


def used_by_init(layout):
  variables = layout.init(NAMED.init, jax.random.key(0), X, boxed=False)
  layout.jit(NAMED.apply)(variables, X)
  str(spmd.explain(layout, variables))


def suspended_in_a_generator(layout):
  next(of_layout(layout))


NAMED = nn.Dense(8, kernel_init=spmd.with_logical_partitioning(nn.initializers.ones, NAMES))
USES = [
  lambda layout: layout.spec({'w': X}),
  lambda layout: layout.shard({'w': X}, lambda leaf: P(*layout.mesh.axis_names)),
  used_in_a_block,
  used_by_jit,
  used_by_init,
  suspended_in_a_generator,
]


@pytest.mark.parametrize('use', USES)
def test_what_rules_close_over_is_freed_with_the_layout(use):
  alive = []
  for _ in range(5):
    big = np.ones(1000)
    function = lambda leaf, big=big: None
    layout = spmd.Layout(FORWARD, (*TABLES[0], function, ('x/', spmd.Rules(function)), ('@w', function)))
    use(layout)
    alive.append(weakref.ref(big))
    del big, function, layout
  gc.collect()
  assert [each() for each in alive] == [None] * 5
