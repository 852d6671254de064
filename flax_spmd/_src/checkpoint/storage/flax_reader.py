"""The reader of the msgpack files of `flax.training.checkpoints`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etils import epath

from flax_spmd._src.checkpoint.storage import skeleton
from flax_spmd._src.checkpoint.storage.record import (
  Record,
  by_path,
  describe,
)
from flax_spmd._src.checkpoint.storage.refused_reads import refusal
from flax_spmd._src.data.host_values import put
from flax_spmd.errors import CheckpointDamagedError


class FlaxReader:
  """Reads a msgpack file of `flax.training.checkpoints`, as a whole.

  Args:
    path: the file.
    content: its content.
  """

  def __init__(self, path: epath.Path, content: Any):
    self.path = self.folder = path
    flat = skeleton.flatten(content)
    self._by_path = by_path(skeleton.paths(flat.skeleton), flat.leaves)
    leaves = {path: describe(leaf) for path, leaf in self._by_path.items()}
    self.record = Record(flat.skeleton, leaves, {}, None, 'flax')

  def read(self, requests: Mapping[str, Any], memory: int | None = None) -> dict[str, Any]:
    """See `CheckpointReader`."""
    del memory  # the file has been read already
    return {
      path: self._by_path[path]
      if request.sharding is None
      else put([self._by_path[path]], [request.sharding])[0]
      for path, request in requests.items()
    }


def flax_tree(path: epath.Path) -> Any:
  from flax import serialization

  try:
    return serialization.msgpack_restore(path.read_bytes())
  except Exception as error:  # msgpack raises a dozen kinds
    raise refusal(error, path) or not_flax(path, error) from error


def not_flax(path: epath.Path, error: Exception) -> CheckpointDamagedError:
  return CheckpointDamagedError(
    f'The file {path} is not a checkpoint of flax.training.checkpoints: {str(error).rstrip(".")}.\n'
    'Fix: pass the folder of a checkpoint, or a file that save_checkpoint wrote.'
  )
