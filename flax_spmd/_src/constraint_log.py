"""The constraint log: every sharding constraint that a program asks for, and whether it became part of it.

    with record_constraints() as requests:
      jitted.trace(*args)                 # traced anew, also if JAX has a trace of it

A constraint can have no effect for reasons that only its call knows: there are no rules, or no mesh, or no
rule for a name. So each call reports itself here, and so does each of Flax's.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.context_values import assigned
from flax_spmd._src.source_lines import line_text, user_frame


class ConstraintRequest(NamedTuple):
  """One sharding constraint that a function asks for while it is traced.

  Attributes:
    by: `'flax_spmd'` or `'flax'`.
    names: the logical names, or `'@name'` for an annotation; None for a spec of mesh axes.
    spec: the spec that the names resolve to; None if they were not resolved.
    shape: shape of the array.
    module: the Linen module that was running, such as `'module decoder/layers'`, or ''.
    source: the line of the model, such as `'model.py:31'`.
    dropped: the reason why the constraint has no effect; '' if it has.
    unmatched: the names that no rule matches; their dimensions are replicated.
    hint: a name with a rule that one of them resembles, as a question; '' if there is none.
    times: how often the same constraint was asked for.
  """

  by: str
  names: Any
  spec: PartitionSpec | None
  shape: tuple[int, ...]
  module: str
  source: str
  dropped: str
  unmatched: tuple[str, ...] = ()
  hint: str = ''
  times: int = 1

  def __str__(self) -> str:
    """`('batch', 'mlp') as P('data',) in module mlp, model.py:31`."""
    times = f'{self.times} x ' if self.times > 1 else ''
    flax = "Flax's " if self.by == 'flax' else ''
    named = '' if self.names is None else str(self.names)
    spec = '' if self.spec is None else str(self.spec)
    where = ''.join(f', {part}' for part in (self.module, self.source) if part)
    return f'{times}{flax}{" as ".join(filter(None, (named, spec)))}{where}'


_log: ContextVar[dict[ConstraintRequest, int] | None] = ContextVar(
  'flax_spmd_constraint_log', default=None
)
_trace_key = jax.make_user_context(None)  # part of the key of JAX's caches, so that it traces again


@contextlib.contextmanager
def record_constraints(*, anew: bool = True) -> Iterator[list[ConstraintRequest]]:
  """Records the constraints of the functions that this task traces in a block; complete at its end.

  Args:
    anew: whether functions inside that JAX has a trace of are traced again, as they would be missing.

  Example:
    >>> with record_constraints() as requests:
    ...   _ = jax.eval_shape(lambda x: with_logical_constraint(x, ('batch',)), jnp.ones(8))
    >>> requests[0].names, requests[0].dropped
    (('batch',), 'there are no rules for names')
  """
  log: dict[ConstraintRequest, int] = {}
  around = _log.get()
  requests: list[ConstraintRequest] = []
  traced_again = _trace_key(object()) if anew else contextlib.nullcontext()
  try:
    with assigned(_log, log), traced_again, compat.flax_constraints(_report_flax):
      yield requests
  finally:
    requests += [request._replace(times=times) for request, times in log.items()]
    if around is not None:
      around.update({request: around.get(request, 0) + times for request, times in log.items()})


def report_constraint(
  names: Any,
  spec: PartitionSpec | None,
  shape: Sequence[int],
  dropped: str = '',
  unmatched: Sequence[str] = (),
  by: str = 'flax_spmd',
) -> None:
  """Adds a constraint to the log in force, if there is one."""
  log = _log.get()
  if log is None:
    return
  names = tuple(names) if isinstance(names, (list, tuple)) else names
  module = compat.current_module() or ''
  request = ConstraintRequest(
    by, names, spec, tuple(shape), module, user_line(), dropped, tuple(unmatched)
  )
  log[request] = log.get(request, 0) + 1


def _report_flax(
  names: Any, spec: PartitionSpec | None, shape: Sequence[int], emitted: bool, unmatched: Sequence[str]
) -> None:
  reason = 'there is no mesh' if spec is not None else no_rule(unmatched)
  report_constraint(names, spec, shape, '' if emitted else reason, unmatched, by='flax')


def no_rule(unmatched: Sequence[str]) -> str:
  """The reason for a constraint that is skipped since names have no rule."""
  return f'no rule for {", ".join(map(repr, unmatched))}'


def user_line() -> str:
  """The user's line on the stack, such as `'model.py:31'`."""
  stack, frame = [], sys._getframe(1)
  while frame is not None:
    stack.append((frame.f_code.co_filename, frame.f_lineno))
    frame = frame.f_back
  return line_text(*stack[user_frame([file for file, _ in stack])])
