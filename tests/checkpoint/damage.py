"""Damage: changes the files of a checkpoint as a disk or a person might, with or without the right digests."""

import json
from pathlib import Path

from flax_spmd._src.checkpoint.storage.manifest import manifest_digest
from flax_spmd._src.checkpoint.storage.record import digest


def head_of(path):
  """The contents of a checkpoint's HEAD."""
  return json.loads((Path(path) / 'HEAD').read_text())


def generation_of(path):
  """The folder of a checkpoint's generation, which Orbax can read; the path itself if it has none."""
  path = Path(path)
  return path / head_of(path)['generation'] if (path / 'HEAD').exists() else path


def edit_json(file, edit):
  """Edits a JSON file, in one step for those who read it."""
  content = json.loads(file.read_text())
  edit(content)
  part = file.with_name(f'.{file.name}.edited')
  part.write_text(json.dumps(content))
  part.replace(file)


def edit_head(path, edit):
  """Edits a checkpoint's HEAD."""
  edit_json(Path(path) / 'HEAD', edit)


def write_manifest(path, data):
  """Replaces a checkpoint's MANIFEST, and puts its digest into HEAD."""
  (generation_of(path) / 'MANIFEST').write_bytes(data)
  edit_head(path, lambda head: head.update(manifest=manifest_digest(data)))


def edit_manifest(path, edit):
  """Edits a checkpoint's MANIFEST, and puts its digest into HEAD."""
  content = json.loads((generation_of(path) / 'MANIFEST').read_text())
  edit(content)
  write_manifest(path, json.dumps(content).encode())


def signed(edit):
  """An edit of a manifest that edits its record, and updates the record's digest."""

  def change(content):
    edit(content['flax_spmd'])
    content['flax_spmd']['digest'] = digest(content['flax_spmd'])

  return change


def largest_file(path):
  """The largest file with arrays of a checkpoint."""
  return max(generation_of(path).rglob('d/*'), key=lambda file: file.stat().st_size)


def flip(file):
  """Changes one bit in the middle of a file."""
  content = bytearray(file.read_bytes())
  content[len(content) // 2] ^= 1
  file.write_bytes(content)
