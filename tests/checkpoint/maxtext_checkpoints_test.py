"""Checkpoints of MaxText, by its own code: of Linen with Orbax v0, and of NNX with Orbax v1."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd.checkpoint import Changes
from tests.checkpoint.others import arrays, assert_bits, extract, flat_of, tree_of

LAYOUT = spmd.Layout(
  {'fsdp': 4, 'tensor': 2}, [('wi_[01]/kernel$', P('fsdp')), ('embedding$', P('fsdp', 'tensor'))]
)
ARCHIVES = ('maxtext', 'maxtext_linen')
LAYERS = ('scanned', 'unscanned')


@pytest.fixture(scope='module')
def there(tmp_path_factory):
  return {name: extract(name, tmp_path_factory.mktemp(name)) for name in ARCHIVES}


@pytest.fixture(params=ARCHIVES)
def archive(request, there):
  return there[request.param]


@pytest.mark.parametrize('layers', LAYERS)
def test_a_step_of_training(archive, layers):
  """The item of the state, beside the position of the loader."""
  saved, path = arrays(archive / layers), archive / layers / 'run' / '5'
  for each in (path, path / 'items'):
    restored = flat_of(checkpoint.restore(each, layout=LAYOUT))
    assert_bits(restored, saved)
  sharded = [leaf.sharding.spec for name, leaf in restored.items() if 'wi_0' in name]
  assert sharded and all(spec[0] == 'fsdp' for spec in sharded)
  assert checkpoint.show(path).record.skipped == ('iter',)


@pytest.mark.parametrize('layers', LAYERS)
def test_into_a_target(archive, layers):
  """Into the arrays of a state on other meshes; numbers of keys into the arrays that MaxText's keys consist of."""
  saved = arrays(archive / layers)
  tree = LAYOUT.abstract(lambda: jax.tree.map(jnp.asarray, tree_of(saved)))
  assert_bits(flat_of(checkpoint.restore(archive / layers / 'run' / '5', tree)), saved)


def test_parameters(archive):
  """For decoding: written beside the steps, below a second `params` of the collection."""
  saved = {
    path: array for path, array in arrays(archive / 'scanned').items() if path.startswith('params/')
  }
  assert_bits(flat_of(checkpoint.restore(archive / 'scanned' / 'params', layout=LAYOUT)), saved)
  inner = {path.removeprefix('params/params/'): array for path, array in saved.items()}
  part = checkpoint.restore(
    archive / 'scanned' / 'params', layout=LAYOUT, changes=Changes(only='params/params')
  )
  assert_bits(flat_of(part), inner)


def test_parameters_of_a_conversion(there):
  """A state with a step and no optimizer; its parameters alone, or the state of a trainer without it."""
  folder = there['maxtext'] / 'unscanned'
  saved = {path: array for path, array in arrays(folder).items() if path.startswith('params/')}
  part = checkpoint.restore(folder / 'converted' / '0', layout=LAYOUT, changes=Changes(only='params'))
  assert_bits({f'params/{path}': leaf for path, leaf in flat_of(part).items()}, saved)

  def create():
    params = tree_of(saved)['params']
    return TrainState.create(
      apply_fn=None, params=jax.tree.map(jnp.zeros_like, params), tx=optax.adam(1e-3)
    )

  target = LAYOUT.init(create)
  restored = checkpoint.restore(
    folder / 'converted' / '0', target, changes=Changes(missing='^opt_state')
  )
  assert_bits({f'params/{path}': leaf for path, leaf in flat_of(restored.params).items()}, saved)
  assert int(restored.opt_state[0].count) == 0 and restored.step == 0


@pytest.mark.parametrize('saved_as', LAYERS)
def test_scanned_and_single_layers(archive, saved_as):
  """MaxText stacks its layers along the second dimension (`param_scan_axis=1`)."""
  other = LAYERS[1 - LAYERS.index(saved_as)]
  saved, target = (
    {path: array for path, array in arrays(archive / name).items() if path.startswith('params/')}
    for name in (saved_as, other)
  )
  if saved_as == 'unscanned':
    expected = {
      path: np.stack([saved[path.replace('/layers/', f'/layers_{n}/')] for n in range(2)], 1)
      if '/layers/' in path
      else saved[path]
      for path in target
    }
  else:
    expected = {path: saved[path] for path in target if '/layers_' not in path}
    for n in range(2):
      single = {path: f'/layers_{n}/' for path in target if f'/layers_{n}/' in path}
      expected |= {path: saved[path.replace(part, '/layers/')][:, n] for path, part in single.items()}
  tree = LAYOUT.abstract(lambda: jax.tree.map(jnp.asarray, tree_of(target)))
  changes = Changes(stacks={'layers': ('layers_{}', 1)}, only='params')
  restored = checkpoint.restore(archive / saved_as / 'run' / '5', tree, changes=changes)
  assert_bits({f'params/{path}': leaf for path, leaf in flat_of(restored).items()}, expected)


def test_the_folder_of_steps(archive):
  with pytest.raises(errors.CheckpointNotFoundError, match=r'; it holds the checkpoints 5\.\nFix: '):
    checkpoint.restore(archive / 'scanned' / 'run', layout=LAYOUT)
