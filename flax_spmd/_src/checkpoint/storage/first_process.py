"""First process: what one process of a job does for all of them, such as listing a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax

from flax_spmd import errors
from flax_spmd._src.multihost import CALLS, TIMEOUT, exchange
from flax_spmd.errors import CheckpointError


def in_first(call: Callable[[], Any], topic: str = 'checkpoint') -> Any:
  """Calls a function in the first process, and returns its JSON value on every process.

  Args:
    call: function to call.
    topic: the key of this kind of call. Threads that run at the same time need one each.

  Raises:
    CheckpointError: the call failed. Every process raises the error.
  """
  if jax.process_count() == 1:
    return call()
  message: dict[str, Any] = {}
  if jax.process_index() == 0:
    try:
      message = {'value': call()}
    except Exception as error:
      message = {'error': type(error).__name__, 'text': str(error)}
  everyone = tuple(range(jax.process_count()))
  groups = exchange(topic, everyone, json.dumps(message), CALLS, TIMEOUT)
  received = json.loads(next(text for processes, text in groups if 0 in processes))
  if 'error' in received:
    raise getattr(errors, received['error'], CheckpointError)(received['text'])
  return received['value']
