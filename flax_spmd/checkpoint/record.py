"""The record: what a checkpoint says about its arrays, beside the arrays.

One JSON object in Orbax's custom metadata, under the key `flax_spmd`:

    {"format": 1, "layout": "<TOML>", "leaves": {"params/w": {"shape": [8, 16], "dtype": "float32",
                                                             "names": ["embed", "mlp"]}}}
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp

from flax_spmd.errors import CheckpointError, CheckpointNotFoundError
from flax_spmd.naming import path_string

KEY = 'flax_spmd'
FORMAT = 1


class Leaf(NamedTuple):
  """What is said of one array. `dtype` of a Python number is its type's name."""

  shape: tuple[int, ...]
  dtype: str

  def __str__(self) -> str:
    return f'{self.dtype}[{",".join(map(str, self.shape))}]'


class Record(NamedTuple):
  """What is said of a whole checkpoint."""

  leaves: dict[str, Leaf]
  names: dict[str, list[Any] | None]
  layout: str | None


def as_path(path: str | os.PathLike[str]) -> epath.Path:
  """An absolute path, or a place in cloud storage (`gs://...`), which Orbax reads and writes alike."""
  text = os.fspath(path)
  return epath.Path(text if '://' in text else os.path.abspath(text))


def describe(tree: Any) -> dict[str, Leaf]:
  """Every leaf of a tree without boxes, by path.

  Raises:
    CheckpointError: two leaves have the same path.
  """
  leaves: dict[str, Leaf] = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    name = path_string(path)
    if name in leaves:
      raise CheckpointError(
        f'Two leaves have the path {name}.\nFix: use no "/" in the keys of the state.'
      )
    dtype = str(leaf.dtype) if hasattr(leaf, 'dtype') else type(leaf).__name__
    leaves[name] = Leaf(tuple(np.shape(leaf)), dtype)
  return leaves


def to_json(record: Record) -> dict[str, Any]:
  """The record as Orbax stores it."""
  leaves = {
    path: {'shape': list(leaf.shape), 'dtype': leaf.dtype, 'names': record.names.get(path)}
    for path, leaf in record.leaves.items()
  }
  return {KEY: {'format': FORMAT, 'layout': record.layout, 'leaves': leaves}}


def load(path: epath.Path) -> Record:
  """The record of the checkpoint at `path`.

  Raises:
    CheckpointNotFoundError: there is no checkpoint.
    CheckpointError: it was not written by this package, or by a newer version of it.
  """
  custom = _custom_metadata(path).get(KEY)
  if custom is None:
    raise CheckpointError(
      f'The checkpoint {path} has no record of names: it was not written by flax_spmd.checkpoint.\n'
      'Fix: load it with orbax.checkpoint, and save it again with flax_spmd.checkpoint.save.'
    )
  if custom['format'] > FORMAT:
    raise CheckpointError(
      f'The checkpoint {path} has format {custom["format"]}, this version reads up to {FORMAT}.\n'
      'Fix: upgrade flax_spmd.'
    )
  leaves = custom['leaves']
  return Record(
    {path: Leaf(tuple(leaf['shape']), leaf['dtype']) for path, leaf in leaves.items()},
    {path: leaf['names'] for path, leaf in leaves.items()},
    custom['layout'],
  )


def _custom_metadata(path: epath.Path) -> Mapping[str, Any]:
  if not ocp.is_orbax_checkpoint(path):
    raise CheckpointNotFoundError(
      f'There is no checkpoint at {path}{_nearby(path)}.\nFix: {_NEARBY_FIX}'
    )
  found = ocp.metadata(path).custom_metadata
  return found if isinstance(found, dict) else {}


def _nearby(path: epath.Path) -> str:
  """What there is instead, to find the right path by."""
  if path.is_dir():
    inside = sorted(child.name for child in path.iterdir() if ocp.is_orbax_checkpoint(child))
    return f'; it holds the checkpoints {", ".join(inside)}' if inside else ' (a folder without one)'
  if not path.parent.is_dir():
    return f'; {path.parent} does not exist either'
  beside = sorted(child.name for child in path.parent.iterdir() if ocp.is_orbax_checkpoint(child))
  return f'; beside it are {", ".join(beside)}' if beside else ''


_NEARBY_FIX = 'pass the path that was given to flax_spmd.checkpoint.save.'
