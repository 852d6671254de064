"""The text: the documentation inside Python's own `pydoc_data.topics`, as bytes, in fixed windows."""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data import topics

import numpy as np

VOCAB = 128


def corpus() -> np.ndarray:
  """All topics one after another: uint8, ASCII only (other characters are left out)."""
  text = '\n\n'.join(topics.topics[name] for name in sorted(topics.topics))
  return np.frombuffer(text.encode('ascii', 'ignore'), np.uint8)


def batches(data: np.ndarray, size: int, length: int, *, start: int = 0) -> Iterator[np.ndarray]:
  """Endless batches of windows at random places; batch `n` is the same in every run.

  Args:
    data: bytes.
    size: windows per batch.
    length: bytes per window that are predicted; a window has one more.
    start: the first batch's number, to go on where a run was stopped.

  Yields:
    int32 arrays of shape (size, length + 1).
  """
  number = start
  while True:
    at = np.random.default_rng(number).integers(0, len(data) - length - 1, size)
    yield data[at[:, None] + np.arange(length + 1)].astype(np.int32)
    number += 1


def decode(tokens: np.ndarray) -> str:
  """Bytes as text."""
  return bytes(np.asarray(tokens, np.uint8)).decode('ascii')
