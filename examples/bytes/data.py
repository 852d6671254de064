"""Text as batches of windows, of which every process reads its own rows.

An iterator over them has a position, `get_state` and `set_state`, which the manager saves with a checkpoint.
"""

import pydoc_data.topics

import numpy as np


def read(file=None):
  """The bytes of a file; by default the reference of Python's language, which Python has for `help()`."""
  return file.read_bytes() if file else '\n\n'.join(pydoc_data.topics.topics.values()).encode()


class Windows:
  """The windows of a text, as rows of int32: a source with a length and indices, as loaders take them.

  Args:
    text: bytes, which are the tokens.
    length: bytes of a window.
    held_out: whether these are the windows of the last tenth of the text, which is not for training.
  """

  def __init__(self, text, length, held_out=False):
    first, last = np.split(np.frombuffer(text, np.uint8), [len(text) * 9 // 10])
    whole = last if held_out else first
    self.rows = whole[: len(whole) // length * length].reshape(-1, length).astype(np.int32)

  def __len__(self):
    return len(self.rows)

  def __getitem__(self, index):
    return self.rows[index]


class Batches:
  """Endless batches in random order, epoch after epoch: this process's rows of each.

  A position is the number of batches that were read. So it means the same for any number of processes.

  Args:
    windows: the source.
    size: rows of a batch, over all processes.
    shard: the part that this process reads, from `layout.data_shard`.
  """

  def __init__(self, windows, size, shard):
    self.windows, self.number, self.size = windows, 0, size
    mine = shard.local_size(size)
    self.mine = np.arange(mine) + shard.index * mine

  def __iter__(self):
    return self

  def __next__(self):
    epochs, places = np.divmod(self.number * self.size + self.mine, len(self.windows))
    self.number += 1
    orders = {
      one: np.random.default_rng(one).permutation(len(self.windows)) for one in set(epochs.tolist())
    }
    return self.windows[
      [orders[epoch][place] for epoch, place in zip(epochs.tolist(), places, strict=True)]
    ]

  def get_state(self):
    """The number of batches that were read."""
    return self.number

  def set_state(self, number):
    """Continues after this number of batches."""
    self.number = number


def grain_batches(windows, size, shard):
  """The same with Grain, which reads in threads; its rows are in another order."""
  import grain

  records = grain.MapDataset.source(windows).seed(0).shuffle().repeat()
  return iter(
    records[shard.index :: shard.count]
    .batch(shard.local_size(size), drop_remainder=True)
    .to_iter_dataset()
  )
