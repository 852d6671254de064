"""The text: Python's documentation from `pydoc_data.topics`, as bytes, in windows of fixed length."""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data import topics

import numpy as np

VOCAB = 128


def corpus() -> np.ndarray:
  """All topics, concatenated: uint8, ASCII only (other characters are removed)."""
  text = '\n\n'.join(topics.topics[name] for name in sorted(topics.topics))
  return np.frombuffer(text.encode('ascii', 'ignore'), np.uint8)


def batches(data: np.ndarray, size: int, length: int, *, start: int = 0) -> Iterator[np.ndarray]:
  """An infinite stream of batches of windows at random positions; batch `n` is equal in every run.

  Args:
    data: the text as bytes, uint8.
    size: number of windows per batch.
    length: number of predicted bytes per window; a window has one more.
    start: number of the first batch, to continue a run.

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
