"""Listing, showing, comparing, verifying and converting checkpoints, in Python and on the command line."""

import json
from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from orbax.checkpoint import v1 as ocp

import flax_spmd as spmd
from flax_spmd import checkpoint, cli, errors
from tests.checkpoint import damage


@pytest.fixture(scope='module')
def layout():
  return spmd.Layout({'data': 2, 'model': 4}, (('embed', 'data'), ('mlp', 'model')))


def create():
  def boxed(*shape, names):
    values = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    return spmd.LogicallyPartitioned(values, names)

  params = {
    'blocks': {'w': boxed(2, 8, 16, names=('layers', 'embed', 'mlp')), 'b': jnp.ones((2, 16))},
    'head': boxed(8, 4, names=('embed', None)),
  }
  return {'params': params, 'opt': optax.adam(1e-3).init(params), 'step': 3}


@pytest.fixture(scope='module')
def folder(layout, tmp_path_factory):
  folder = tmp_path_factory.mktemp('inspected')
  state = {**layout.init(lambda: {k: v for k, v in create().items() if k != 'step'}), 'step': 3}
  checkpoint.save(folder / '10', state, layout=layout)
  state['params']['blocks']['b'] += 1
  checkpoint.save(folder / '9', state, layout=layout)
  return folder


def run(capsys, *arguments):
  code = cli.main(['checkpoint', *map(str, arguments)])
  captured = capsys.readouterr()
  return code, captured.out.splitlines(), captured.err


def test_ls(folder, capsys):
  code, out, _ = run(capsys, 'ls', folder)
  assert code == 0
  assert [line.partition(', saved ')[0] for line in out] == [
    f'{folder}/9: 11 leaves, 3.75 KiB',
    f'{folder}/10: 11 leaves, 3.75 KiB',
  ]
  _, out, _ = run(capsys, 'ls', folder, '--json')
  assert [entry['leaves'] for entry in json.loads('\n'.join(out))] == [11, 11]


def test_ls_of_an_empty_folder(tmp_path, capsys):
  assert run(capsys, 'ls', tmp_path) == (0, [f'There are no checkpoints in {tmp_path}.'], '')
  code, _, err = run(capsys, 'ls', tmp_path / 'no')
  assert code == 2
  assert err == f'There is no folder {tmp_path / "no"}.\nFix: pass a folder that contains checkpoints.\n'


def test_ls_with_an_unreadable_checkpoint(layout, tmp_path, capsys):
  for name in ('1', '2'):
    checkpoint.save(tmp_path / name, {'w': jnp.ones(3)}, layout=layout)
  (tmp_path / '1' / 'HEAD').write_text('{"cut')
  code, out, _ = run(capsys, 'ls', tmp_path)
  assert code == 0 and len(out) == 2
  assert out[0].startswith(f'{tmp_path}/1: cannot be read. Checkpoint {tmp_path}/1 cannot be read')
  assert out[1].startswith(f'{tmp_path}/2: 1 leaf,')


def test_show(folder, layout, capsys):
  code, out, _ = run(capsys, 'show', folder / '10')
  assert code == 0
  text = [' '.join(line.split()) for line in out]
  shown = checkpoint.show(folder / '10')
  checksum = shown.record.leaves['params/blocks/w'].checksum
  assert f'params/blocks/w float32[layers=2, embed=8, mlp=16] (-, data, model) 1 KiB {checksum}' in text
  assert 'step 3 0 B ' + shown.record.leaves['step'].checksum in text
  assert 'opt/0: ScaleByAdamState' in text
  assert '\n'.join(out).endswith(layout.to_toml().rstrip())
  assert str(shown).splitlines()[0] == shown.title == out[0]


def test_show_as_json(folder, layout, capsys):
  _, out, _ = run(capsys, 'show', folder / '10', '--json')
  content = json.loads('\n'.join(out))
  assert content['layout'] == layout.to_toml() and content['kinds']['opt/0'] == 'ScaleByAdamState'
  (head,) = (leaf for leaf in content['leaves'] if leaf['path'] == 'params/head')
  assert (head['shape'], head['names'], head['spec']) == ([8, 4], ['embed', None], ['data', None])


def test_diff(folder, capsys):
  assert run(capsys, 'diff', folder / '9', folder / '9') == (0, ['The checkpoints are equal.'], '')
  assert run(capsys, 'diff', folder / '9', folder / '10') == (
    1,
    ['params/blocks/b: contents differ'],
    '',
  )


def test_diff_of_everything(folder, tmp_path):
  other = spmd.Layout({'data': 8}, (('embed', 'data'),))
  w = spmd.LogicallyPartitioned(np.zeros((8, 4), 'float32'), ('embed', 'vocab'))
  tree = {
    'params': {'head': other.shard(w), 'new': np.zeros(3)},
    'opt': (optax.ScaleByLionState(3, {}),),
    'step': 4,
  }
  checkpoint.save(tmp_path / 'other', tree, layout=other)
  lines = checkpoint.diff(folder / '10', tmp_path / 'other')
  one, two = folder / '10', tmp_path / 'other'
  assert f'params/blocks/w: only in {one}, float32[layers=2, embed=8, mlp=16]' in lines
  assert f'params/new: only in {two}, float64[3]' in lines
  assert 'params/head: float32[embed=8, 4], then float32[embed=8, vocab=4]' in lines
  assert 'step: 3, then 4' in lines
  assert 'opt/0: ScaleByAdamState, then ScaleByLionState' in lines
  assert lines[-1] == 'the layouts differ'


def test_verify(folder, layout, tmp_path, capsys):
  code, out, _ = run(capsys, 'verify', folder / '10')
  assert code == 0 and out[0].endswith(': undamaged')
  state = {
    'w': layout.shard(np.random.default_rng(0).normal(size=(64, 64)).astype('float32')),
    'v': jnp.ones(3),
  }
  checkpoint.save(tmp_path / 'a', state, layout=layout)
  file = damage.largest_file(tmp_path / 'a')
  damage.flip(file)
  code, out, _ = run(capsys, 'verify', tmp_path / 'a')
  below = str(file.relative_to(tmp_path / 'a'))
  assert (code, out) == (1, [f'{tmp_path / "a"} is damaged:', 'w', below])
  assert checkpoint.verify(tmp_path / 'a') == ['w', below]


def test_verify_without_checksums(tmp_path):
  ocp.save(tmp_path / 'plain', {'w': jnp.ones(8)})
  with pytest.raises(errors.CheckpointError) as caught:
    checkpoint.verify(tmp_path / 'plain')
  assert str(caught.value) == dedent(f"""\
    Checkpoint {tmp_path / 'plain'} has no checksums: orbax wrote it.
    Fix: convert it with flax-spmd checkpoint convert, which adds them.""")


def test_convert_to_single_layers_and_back(folder, tmp_path, capsys):
  single, back = tmp_path / 'single', tmp_path / 'back'
  code, out, err = run(capsys, 'convert', folder / '10', single, '--stack', 'blocks=blocks_{}')
  assert (code, err) == (0, '') and out[-1].startswith(f'{single}: 17 leaves')
  leaves = checkpoint.show(single).record.leaves
  assert leaves['params/blocks_1/w'].names == ('embed', 'mlp')
  assert leaves['opt/0/mu/blocks_1/w'].spec == ('data', 'model')
  run(capsys, 'convert', single, back, '--stack', 'blocks=blocks_{}')
  assert checkpoint.show(back).record.leaves['params/blocks/w'].names == ('blocks', 'embed', 'mlp')
  one, two = checkpoint.restore(folder / '10'), checkpoint.restore(back)
  assert jax.tree.structure(one) == jax.tree.structure(two)
  jax.tree.map(np.testing.assert_array_equal, one, two)


def test_convert_dtype_names_and_layout(folder, tmp_path, capsys):
  file, to = tmp_path / 'layout.toml', tmp_path / 'to'
  many = spmd.Layout(spmd.abstract_mesh({'data': 64, 'model': 8}), (('mlp', 'model'),))
  file.write_text(many.to_toml())
  arguments = [
    '--only',
    'params',
    '--dtype',
    'float32=bfloat16',
    '--rename',
    'head=out',
    '--layout',
    file,
  ]
  code, _, err = run(capsys, 'convert', folder / '10', to, *arguments, '--pack', '4096', '--compress')
  assert (code, err) == (0, '')
  shown = checkpoint.show(to)
  assert set(shown.record.leaves) == {'params/blocks/b', 'params/blocks/w', 'params/out'}
  assert {leaf.dtype for leaf in shown.record.leaves.values()} == {'bfloat16'}
  assert shown.record.layout == many.to_toml()
  assert checkpoint.verify(to) == []


def test_convert_a_checkpoint_of_plain_orbax(tmp_path):
  ocp.save(tmp_path / 'plain', {'w': jnp.arange(8.0), 'n': 3})
  checkpoint.convert(tmp_path / 'plain', tmp_path / 'ours')
  assert checkpoint.verify(tmp_path / 'ours') == []
  layout = spmd.Layout({'data': 8}, (('w', jax.sharding.PartitionSpec('data')),))
  restored = checkpoint.restore(tmp_path / 'ours', layout=layout)
  assert restored['w'].sharding.spec == jax.sharding.PartitionSpec('data') and restored['n'] == 3


def test_bad_arguments(folder, tmp_path, capsys):
  with pytest.raises(SystemExit):
    cli.main(['checkpoint', 'convert', 'a', 'b', '--stack', 'blocks'])
  assert "'blocks' does not have the form OLD=NEW" in capsys.readouterr().err
  code, _, err = run(capsys, 'convert', folder / '10', folder / '9')
  assert code == 2 and err.startswith(f'{folder / "9"} exists already.')
  code, _, err = run(capsys, 'show', tmp_path / 'none')
  assert code == 2 and err.startswith(f'There is no checkpoint at {tmp_path / "none"}')
