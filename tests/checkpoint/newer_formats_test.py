"""Checkpoints of newer versions: every call names them, and none replaces, removes or skips them."""

import functools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd._src.checkpoint.steps.step_folder import StepFolder
from flax_spmd._src.checkpoint.storage import liveness
from flax_spmd._src.checkpoint.storage.manifest import manifest_digest
from flax_spmd._src.checkpoint.storage.store import as_path, open_store

LAYOUT = spmd.Layout({'data': 8})
STATE = {'w': jnp.arange(8.0)}
FIX = 'Fix: upgrade flax_spmd, or pass another path.'


def edit(store, name, change):
  """Edits a JSON file of any store; returns its new content."""
  content = json.loads(store.read(name)[0])
  change(content)
  data = json.dumps(content).encode()
  store.write(name, data)
  return data


def newer_head(store):
  edit(store, '4/HEAD', lambda head: head.update(format=3, generation=['of', 'another', 'kind']))


def newer_record(store, **others):
  """A record of a newer format, beside other fields of the manifest that this version does not know."""
  generation = json.loads(store.read('4/HEAD')[0])['generation']

  def change(manifest):
    manifest['flax_spmd'].update(format=2, leaves='elsewhere')
    manifest.update(others)

  data = edit(store, f'4/{generation}/MANIFEST', change)
  edit(store, '4/HEAD', lambda head: head.update(manifest=manifest_digest(data)))


def newer_manifest(store):
  newer_record(store, files='elsewhere', saved='today')


def damaged_head(store):
  newer_record(store)
  store.write('4/HEAD', b'{')


def lost_head(store):
  newer_record(store)
  store.remove('4/HEAD', is_file=True)


HEAD = 'HEAD of checkpoint {path} has format 3, but this version reads formats up to 2.\n' + FIX
RECORD = 'The record of checkpoint {path} has format 2, but this version reads formats up to 1.\n' + FIX
NEWER = {newer_head: HEAD, newer_record: RECORD, newer_manifest: RECORD}
UNKNOWN = {damaged_head: RECORD, lost_head: RECORD}


def error_of(call, *arguments, **options):
  with pytest.raises(errors.CheckpointError) as caught:
    call(*arguments, **options)
  assert type(caught.value) is errors.CheckpointError
  return str(caught.value)


def contents(store):
  """Every file of the newer checkpoint."""
  return {name: store.read(f'4/{name}')[0] for name in store.files('4')}


def is_refused(root, text):
  """Each way to replace a checkpoint is refused, and leaves everything as it is."""
  store, path = open_store(as_path(root)), as_path(root) / '4'
  before, beside = contents(store), store.files()
  text = text.format(path=path)
  for save in (checkpoint.save, checkpoint.save_async):
    assert error_of(save, path, STATE, LAYOUT, overwrite=True) == text
  assert store.files() == beside
  assert error_of(StepFolder(as_path(root)).remove, 4) == text
  checkpoint.save(as_path(root) / 'beside', STATE, LAYOUT)
  assert contents(store) == before


@pytest.mark.parametrize('make_newer', [*NEWER, *UNKNOWN])
def test_no_save_and_no_removal_replaces_it(root, make_newer):
  checkpoint.save(as_path(root) / '4', STATE, LAYOUT)
  make_newer(open_store(as_path(root)))
  is_refused(root, {**NEWER, **UNKNOWN}[make_newer])


@pytest.mark.parametrize('make_newer', NEWER)
def test_a_run_neither_skips_nor_removes_it(root, make_newer):
  for step in (2, 4):
    checkpoint.save(as_path(root) / str(step), STATE, LAYOUT)
  store, path = open_store(as_path(root)), as_path(root) / '4'
  make_newer(store)
  before, text = contents(store), NEWER[make_newer].format(path=path)
  with checkpoint.Manager(root, LAYOUT, every=1, keep=1) as manager:
    assert manager.steps == list(manager.follow(timeout=0))[::-1] == [2, 4]
    assert error_of(manager.resume, lambda: STATE) == error_of(manager.restore) == text
    assert error_of(manager.save, 5, STATE) == text
    assert manager.restore(step=2).step == 2
  with checkpoint.Manager(root, LAYOUT, read_only=True) as reader:
    assert reader.steps == [2, 4] and error_of(reader.restore) == text
  listed = {Path(entry.path).name: entry.error for entry in checkpoint.ls(root)}
  assert listed == {'2': None, '4': text}
  for call in (checkpoint.restore, checkpoint.show, checkpoint.verify, checkpoint.preflight):
    assert error_of(call, path) == text
  assert error_of(checkpoint.restore, path, {'w': STATE['w']}, salvage=True) == text
  assert contents(store) == before


def test_the_manager_of_a_newer_version_keeps_its_root(root):
  with checkpoint.Manager(root, LAYOUT) as manager:
    manager.save(4, STATE, force=True)
  head = {'format': 3}
  open_store(as_path(root)).write('.flax_spmd_manager/HEAD', json.dumps(head).encode())
  path = as_path(root) / '.flax_spmd_manager'
  assert error_of(checkpoint.Manager, root, LAYOUT) == HEAD.format(path=path)
  with checkpoint.Manager(root, LAYOUT, read_only=True) as reader:
    assert reader.restore().step == 4


@pytest.mark.parametrize('format_1', [False, True])
def test_copies_of_generations_and_checkpoints_of_format_1(tmp_path, format_1):
  path = tmp_path / '4'
  if format_1:
    shutil.copytree(Path(__file__).parent / 'format_1' / 'plain', path)
    inner, file = ('custom_metadata',), '_CHECKPOINT_METADATA'
  else:
    checkpoint.save(tmp_path / 'whole', STATE, LAYOUT)
    head = json.loads((tmp_path / 'whole' / 'HEAD').read_bytes())
    shutil.copytree(tmp_path / 'whole' / head['generation'], path)
    inner, file = (), 'MANIFEST'

  def change(content):
    functools.reduce(dict.get, inner, content)['flax_spmd']['format'] = 2

  edit(open_store(as_path(tmp_path)), f'4/{file}', change)
  assert error_of(checkpoint.restore, path) == RECORD.format(path=path)
  is_refused(tmp_path, RECORD)


UNREADABLE = [
  *(b'[]', b'{"holder": 3}', b'\xff', b'[' * 100_000),
  b'{"format": 2, "holder": {"host": "other", "pid": 4711}}',
]


@pytest.mark.parametrize(
  ('root', 'content'),
  [
    pytest.param(root, content, id=f'{root}-{number}', marks=marks)
    for number, content in enumerate(UNREADABLE)
    for root, *marks in (
      ('disk',),
      *((kind, *[pytest.mark.exhaustive] * (number > 0)) for kind in ('gcs', 's3')),
    )
  ],
  indirect=['root'],
)
def test_the_pin_of_a_reader_of_a_newer_version(root, content, monkeypatch):
  """It holds its generation while it changes now and then, like that of a reader on another machine."""
  now = [0.0]
  monkeypatch.setattr(liveness, 'time', SimpleNamespace(monotonic=lambda: now[0]))
  store, path = open_store(as_path(root)), as_path(root) / '4'
  checkpoint.save(path, STATE, LAYOUT)
  generation = json.loads(store.read('4/HEAD')[0])['generation']
  pinned, pin = f'4/{generation}/MANIFEST', f'4/pin-0123456789abcdef-{generation}'
  for beat in range(3):
    store.write(pin, content + b' ' * beat)
    checkpoint.save(path, STATE, LAYOUT, overwrite=True)
    assert store.read(pinned) and store.read(pin)
    now[0] += liveness.LEASE + 1
  checkpoint.save(path, STATE, LAYOUT, overwrite=True)
  assert store.read(pinned) is store.read(pin) is None
