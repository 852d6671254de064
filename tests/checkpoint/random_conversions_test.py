"""Random conversions from one layout to another, several at once: equal to numpy's result; all that is wrong is reported."""

import dataclasses
import math
import re
import shutil
import tempfile
from pathlib import Path

import flax.serialization
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd.checkpoint import Changes
from tests.checkpoint.others import tree_of
from tests.checkpoint.states import LAYOUTS, assert_equal, assert_matches_target
from tests.strategies import examples

DIMENSIONS = {'embed': 8, 'mlp': 16, 'vocab': 12, 'heads': 4, 'layers': 3}
RESIZED = {'embed': 16, 'mlp': 8, 'vocab': 20, 'heads': 2, 'layers': 2}
LAYERED = {
  'up/kernel': ('embed', 'mlp'),
  'up/bias': ('mlp',),
  'down/kernel': ('mlp', 'embed'),
  'attn/q': ('embed', 'heads', 'mlp'),
}
OTHERS = {'table': ('vocab', 'embed'), 'head/kernel': ('embed', 'vocab'), 'tally': ()}
SAVED_NAMES = [*LAYERED, *OTHERS, 'wi/w', 'wi/b', 'wo/w', 'attention/query/k', 'lm_head']
CASTS = [('bfloat16', 'float32'), ('float16', 'float32')]
LOSSY = [('float32', 'bfloat16'), ('float32', 'float16')]
SOURCES = ('flax_spmd', 'flax_spmd', 'flax_spmd', 'orbax', 'msgpack', 'safetensors', 'npz')


@dataclasses.dataclass
class Leaf:
  """A leaf of the model: its names, as saved and in the target, and how they differ.

  Attributes:
    name, saved_name: its path in the model or layer.
    axes: its logical names.
    dtypes: saved and target dtype.
    text: its arrangement.
    split, order, groups: sizes of the parts of the saved dimensions, saved part at each position of the result, and number
      of parts in each saved dimension.
    fate: 'kept', or 'missing', 'unused', 'reshaped'.
  """

  name: str
  saved_name: str
  axes: tuple[str, ...]
  dtypes: tuple[str, str]
  fate: str
  text: str = ''
  split: tuple[int, ...] = ()
  order: tuple[int, ...] = ()
  groups: tuple[int, ...] = ()

  def as_saved(self, array):
    """The array before its arrangement."""
    if not self.text:
      return array
    parts = array.reshape([self.split[part] for part in self.order])
    return np.ascontiguousarray(parts.transpose(np.argsort(self.order)).reshape(self.saved_shape))

  @property
  def saved_shape(self):
    ends = np.cumsum(self.groups)
    return tuple(math.prod(self.split[end - n : end]) for n, end in zip(self.groups, ends, strict=True))


@dataclasses.dataclass
class Case:
  """A model that was saved by `source` with layers stacked along `axes[0]`, restored with them along `axes[1]`."""

  leaves: list[Leaf]
  source: str
  axes: tuple[int | None, int | None]
  resized: frozenset[str]
  boxed: bool
  only: bool
  has_optimizer: bool
  layouts: tuple[str, str]
  target: str
  seed: int

  def sizes(self, side):
    return DIMENSIONS | {name: RESIZED[name] for name in self.resized if side}

  def tree(self, side, box, number):
    """The parameters with random values, by path; those of the target with its own."""
    flat = {}
    for leaf in self.leaves:
      if leaf.fate == ('missing', 'unused')[side]:
        continue
      arrays = self.arrays(leaf, side, number)
      for path, array in self.placed(leaf, side, arrays).items():
        flat[path] = box(array, self.names(leaf, side))
    return flat

  def arrays(self, leaf, side, number):
    """The values of all layers, or of the one leaf."""
    sizes = self.sizes(side)
    layers = (sizes['layers'],) if leaf.name in LAYERED else ()
    shape = (*layers, *(sizes[axis] for axis in leaf.axes))
    if side and leaf.fate == 'reshaped':
      shape = (*shape, 5)
    random = np.random.default_rng([self.seed, side, number, *leaf.name.encode()])
    return random.integers(-1000, 1000, shape).astype(jnp.dtype(leaf.dtypes[side]))

  def placed(self, leaf, side, arrays):
    """Arrays by path, stacked or single, before their arrangement if they are the saved ones."""
    name = leaf.name if side else leaf.saved_name
    before = (lambda array: array) if side else leaf.as_saved
    axis = self.axes[side]
    if leaf.name not in LAYERED:
      return {name: before(arrays)}
    if axis is None:
      return {f'block_{n}/{name}': before(array) for n, array in enumerate(arrays)}
    return {f'blocks/{name}': before(np.ascontiguousarray(np.moveaxis(arrays, 0, axis)))}

  def names(self, leaf, side):
    names = leaf.axes
    if leaf.name in LAYERED and self.axes[side] is not None:
      names = (*names[: self.axes[side]], 'layers', *names[self.axes[side] :])
    if side:
      return names if leaf.fate != 'reshaped' else None
    return None if leaf.text else names

  def state(self, side, number=0):
    """A state of one side."""

    def box(array, names):
      boxed = self.boxed and names
      return spmd.LogicallyPartitioned(jnp.asarray(array), names) if boxed else jnp.asarray(array)

    trees = [tree_of(self.tree(side, box, 3 * number + each)) for each in range(3)]
    state = {'params': trees[0], 'other': {'step': jnp.asarray(7 + side, jnp.int32)}}
    if self.has_optimizer:
      adam = optax.ScaleByAdamState(jnp.asarray(3 + side, jnp.int32), trees[1], trees[2])
      moves = self.source == 'flax_spmd' and side
      state['opt_state'] = (optax.EmptyState(), (adam,)) if moves else (adam, optax.EmptyState())
    return state

  def expected(self):
    """The oracle, in numpy alone: flat parameters, and moments if there are any."""
    results = []
    for number in range(3 if self.has_optimizer else 1):
      flat = {}
      for leaf in self.leaves:
        if leaf.fate == 'unused':
          continue
        own = self.arrays(leaf, 1, number)
        if leaf.fate == 'kept':
          saved = self.arrays(leaf, 0, number)
          both = tuple(slice(min(sizes)) for sizes in zip(saved.shape, own.shape, strict=True))
          own[both] = saved[both].astype(own.dtype)
        flat |= self.placed(leaf, 1, own)
      results.append(tree_of(flat))
    return results

  def changes(self):
    def pattern(name):
      return f'(^|/){re.escape(name)}$'

    def any_of(fates):
      found = [
        pattern(name)
        for leaf in self.leaves
        if leaf.fate in fates
        for name in {leaf.name if 'missing' in fates else leaf.saved_name}
      ]
      return '|'.join(found) or None

    renamed = [leaf for leaf in self.leaves if leaf.fate != 'missing']
    casts = {leaf.dtypes for leaf in self.leaves if leaf.fate == 'kept' and len(set(leaf.dtypes)) > 1}
    axis = self.axes[0] if self.axes[1] is None else self.axes[1]
    return Changes(
      renames={pattern(leaf.saved_name): rf'\g<1>{leaf.name}' for leaf in renamed},
      rearranged={pattern(leaf.name): leaf.text for leaf in renamed if leaf.text},
      stacks={'blocks': ('block_{}', axis)} if None in self.axes and axis is not None else None,
      moved='layers' if None not in self.axes else (),
      resized=self.resized,
      dtypes='cast' if casts <= {*CASTS} else dict(casts),
      missing=any_of(('missing', 'reshaped')),
      unused=any_of(('unused', 'reshaped')),
      only='params' if self.only else None,
    )

  def save(self, path, layout):
    state = layout.shard(self.state(0))
    if self.source == 'flax_spmd':
      checkpoint.save(path, state, layout, pack=self.seed % 2 << 20)
      return path
    state = spmd.unbox(state)
    if self.source == 'orbax':
      with ocp.StandardCheckpointer() as saver:
        saver.save(path, state)
      return path
    if self.source == 'msgpack':
      path = path.with_name('checkpoint_3')
      path.write_bytes(flax.serialization.to_bytes(jax.device_get(state)))
      return path
    flat = self.tree(0, lambda array, names: array, 0)
    flat = {f'params/{path}': array for path, array in flat.items()}
    flat['other/step'] = np.asarray(state['other']['step'])
    if self.source == 'npz':
      path = path.with_suffix('.npz')
      np.savez(path, **flat)
      return path
    path = path.with_suffix('.safetensors')
    safetensors.numpy.save_file({name.replace('/', '.'): array for name, array in flat.items()}, path)
    return path


@st.composite
def cases(draw):
  one_of = lambda values: draw(st.sampled_from(values))
  source = one_of(SOURCES)
  boxed = draw(st.booleans())
  axes = one_of([(None, None), (0, 0), (None, 0), (None, 1), (0, None), (1, None), (1, 1)])
  if boxed and source == 'flax_spmd' and draw(st.integers(0, 3)) == 0:
    axes = one_of([(0, 1), (1, 0)])
  is_moved = len({*axes} - {None}) == 2
  names = draw(st.lists(st.sampled_from([*LAYERED, *OTHERS]), min_size=1, max_size=5, unique=True))
  saved_names = draw(st.permutations(SAVED_NAMES)) if draw(st.booleans()) else names
  saved_names = [name for name in saved_names if not _clash(name, saved_names)]
  resizable = [name for name in DIMENSIONS if name != 'layers' or axes[1] is not None]
  resized = draw(st.sets(st.sampled_from(resizable), max_size=2)) if boxed and not is_moved else set()
  leaves, casts = [], [*CASTS, one_of(LOSSY)]
  for name, saved_name in zip(names, saved_names, strict=False):
    of_layer = name in LAYERED
    same = one_of(['float32', 'bfloat16', 'int32', 'uint8'] + ['float8_e4m3fn'] * (source != 'npz'))
    dtypes = one_of(casts) if draw(st.booleans()) else (same, same)
    if source == 'npz':
      dtypes = tuple('float32' if dtype == 'bfloat16' else dtype for dtype in dtypes)
    fate = one_of(['kept'] * 7 + ['missing', 'unused', 'reshaped'])
    leaf = Leaf(name, saved_name, (LAYERED | OTHERS)[name], dtypes, fate)
    if draw(st.booleans()) and fate == 'kept' and leaf.axes and not (is_moved and of_layer):
      sizes = [DIMENSIONS[axis] for axis in leaf.axes]
      if of_layer and axes[0] is not None:
        sizes.insert(axes[0], DIMENSIONS['layers'])
      _arrange(draw, leaf, sizes)
    leaves.append(leaf)
  hypothesis.assume(any(leaf.fate != 'missing' for leaf in leaves))
  hypothesis.assume(any(leaf.fate != 'unused' for leaf in leaves))
  keeps = resized or any(leaf.fate in ('missing', 'reshaped') for leaf in leaves)
  return Case(
    leaves,
    source,
    axes,
    frozenset(resized),
    boxed,
    only=source in ('safetensors', 'npz') or draw(st.booleans()),
    has_optimizer=source not in ('safetensors', 'npz') and draw(st.booleans()),
    layouts=(one_of(list(LAYOUTS)), one_of(list(LAYOUTS))),
    target=one_of(['values', 'host'] if keeps else ['values', 'host', 'abstract', 'plan']),
    seed=draw(st.integers(0, 1000)),
  )


def _clash(name, names):
  return any(other.startswith(f'{name}/') for other in names)


def _arrange(draw, leaf, sizes):
  """Draws how the dimensions of a leaf were arranged: split into parts, reordered, and merged."""
  parts, mid = [], []
  for size in sizes:
    factor = draw(st.sampled_from([f for f in (1, 2, 4, size) if size % f == 0]))
    split = [size] if factor in (1, size) else [factor, size // factor]
    mid.append(list(range(len(parts), len(parts) + len(split))))
    parts += split
  permuted = draw(st.permutations(range(len(parts))))  # part of the result at each saved position
  cuts = sorted(draw(st.sets(st.integers(1, len(parts) - 1)))) if len(parts) > 1 else []
  ranges = list(zip([0, *cuts], [*cuts, len(parts)], strict=True))
  word = lambda part: f'd{part}={parts[part]}'
  side = lambda groups: ' '.join(f'({" ".join(map(word, group))})' for group in groups)
  leaf.text = f'{side([permuted[begin:end] for begin, end in ranges])} -> {side(mid)}'
  leaf.split = tuple(parts[part] for part in permuted)
  leaf.order = tuple(permuted.index(part) for part in range(len(parts)))
  leaf.groups = tuple(end - begin for begin, end in ranges)


def target_of(case, layout):
  state = case.state(1)
  if case.target == 'plan':
    return layout.plan(lambda: state)
  if case.target == 'abstract':
    return layout.abstract(lambda: state)
  sharded = layout.shard(state)
  return sharded if case.target == 'values' else jax.tree.map(np.asarray, sharded)


def layouts_of(case):
  made = [LAYOUTS[name]() for name in case.layouts]
  return [spmd.Layout(each.mesh, each.rules, indivisible='replicate') for each in made]


def check(case):
  under = layouts_of(case)
  folder = Path(tempfile.mkdtemp())
  try:
    path = case.save(folder / 'a', under[0])
    target = target_of(case, under[1])
    restored = checkpoint.restore(path, target, changes=case.changes())
  finally:
    shutil.rmtree(folder)
  expected = case.expected()
  params = restored if case.only else restored['params']
  assert_equal(params, expected[0])
  if case.target in ('values', 'abstract'):
    assert_matches_target(params, target['params'])
  if case.only:
    return
  assert restored['other']['step'] == 7
  if case.has_optimizer:
    opt_state = restored['opt_state']
    adam = opt_state[1][0] if case.source == 'flax_spmd' else opt_state[0]
    assert_equal((adam.count, adam.mu, adam.nu), (np.int32(3), *expected[1:]))


@settings(max_examples=examples(20))
@given(cases())
@pytest.mark.filterwarnings('ignore:Every device will hold all')
def test_any_conversion_is_what_numpy_computes(case):
  check(case)


def spoiled(leaf, kind):
  """A target leaf that no change bridges."""
  array, names = (
    (leaf.value, leaf.names) if isinstance(leaf, spmd.LogicallyPartitioned) else (leaf, None)
  )
  if kind == 'rank':
    return jnp.stack([array, array])
  if kind == 'dtype':
    array = jnp.zeros(array.shape, 'uint16')
  if kind == 'size':
    array = jnp.zeros((*array.shape[:-1], 7), array.dtype)
  return array if names is None or kind == 'size' else spmd.LogicallyPartitioned(array, names)


@settings(max_examples=examples(20))
@given(case=cases(), data=st.data())
@pytest.mark.filterwarnings('ignore:Every device will hold all')
def test_every_difference_is_reported(case, data):
  """Other dtypes, sizes and ranks, and names that were not saved; and nothing else is."""
  case = dataclasses.replace(case, has_optimizer=False, resized=frozenset(), target='values')
  under = layouts_of(case)
  state = case.state(1)
  flat = {f'params/{path}': leaf for path, leaf in case.tree(1, lambda array, names: array, 0).items()}
  kept = [
    f'params/{path}'
    for leaf in case.leaves
    if leaf.fate == 'kept'
    for path in case.placed(leaf, 1, case.arrays(leaf, 1, 0))
  ]
  hypothesis.assume(kept)
  wrong = data.draw(
    st.dictionaries(
      st.sampled_from(kept), st.sampled_from(['dtype', 'size', 'rank', 'name']), min_size=1, max_size=4
    )
  )
  reported = set()
  for path, kind in wrong.items():
    *folders, name = path.split('/')
    node = state
    for folder in folders:
      node = node[folder]
    if kind == 'name' or (kind == 'size' and not flat[path].shape):
      reported.add(path + '_x')
      node[name + '_x'] = node.pop(name)
    else:
      reported.add(path)
      node[name] = spoiled(node[name], kind)
  folder = Path(tempfile.mkdtemp())
  try:
    path = case.save(folder / 'a', under[0])
    target = under[1].shard(state)
    problems = checkpoint.preflight(path, target, changes=case.changes()).problems
    with pytest.raises(errors.CheckpointMismatchError, match='\nFix: '):
      checkpoint.restore(path, target, changes=case.changes())
  finally:
    shutil.rmtree(folder)
  named = {problem.text.partition(': ')[0] for problem in problems}
  assert reported <= named
  assert not named & (set(flat) - set(wrong))
