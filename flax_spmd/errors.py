"""Exceptions: one tree for the whole package, and one format for its messages.

    FlaxSpmdError
    ├── ArgumentTypeError (TypeError)         an argument of another type
    ├── RulesError (ValueError)               an invalid rule table
    │   ├── MeshAxisError                     a mesh axis that the mesh lacks
    │   ├── UnmatchedNameError                a logical name without a rule, where one is required
    │   └── ConflictError                     two dimensions of one array with the same mesh axis
    ├── LayoutError (ValueError)              an array that does not fit its names or the mesh
    ├── AxisNameError (NameError)             a reduction over an axis name that nothing binds
    ├── MeshError (ValueError)                an impossible or missing mesh
    ├── TargetDeviceError (ValueError)        unknown hardware, or a missing compiler
    ├── EstimatorError (NotImplementedError)  a step that the estimator cannot analyse
    ├── SearchError (ValueError)              contradictory or impossible search constraints
    │   └── InfeasibleError                   no layout within the memory limit
    ├── ContextError (RuntimeError)           two layouts in force in one thread
    ├── PipelineError (ValueError)            an invalid pipeline, schedule or stage boundary
    └── CheckpointError (ValueError)          a failed save or restore
        ├── CheckpointExistsError (FileExistsError)
        ├── CheckpointNotFoundError (FileNotFoundError)
        ├── CheckpointBusyError (BlockingIOError)
        ├── CheckpointReadOnlyError (PermissionError)
        ├── CheckpointDamagedError            missing files, or a wrong checksum
        ├── CheckpointMismatchError           a checkpoint that differs from the restore target
        └── TargetError (TypeError)           an incomplete restore target

A message lists every offender on a line of its own and ends with the fix::

    params/mlp/kernel, dim 1 'mlp': size 10 is not divisible by mesh axis 'model' (4), required by rule 1 ('mlp', 'model').
    Fix: pad it to 12, or replicate it with the rule ('mlp', None) before rule 1.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class FlaxSpmdError(Exception):
  """Base class of every exception that this package raises on purpose.

  Example:
    >>> try:
    ...   Layout({'model': 8}, (('mlp', 'modle'),))
    ... except errors.FlaxSpmdError as error:
    ...   print(type(error).__name__, isinstance(error, ValueError))
    MeshAxisError True
  """


class ArgumentTypeError(FlaxSpmdError, TypeError):
  """Raised when an argument has another type than its parameter, or a function takes other arguments."""


class RulesError(FlaxSpmdError, ValueError):
  """Raised when a rule table is invalid, or cannot be applied to an array."""


class MeshAxisError(RulesError):
  """Raised when a rule or a spec uses a mesh axis that the mesh lacks."""


class UnmatchedNameError(RulesError):
  """Raised when a logical name has no rule under the policy `unmatched='error'`."""


class ConflictError(RulesError):
  """Raised when other dimensions take all mesh axes of a name's rules under the policy `conflict='error'`."""


class LayoutError(FlaxSpmdError, ValueError):
  """Raised when an array does not fit its names (rank, repeated names) or the mesh (divisibility)."""


class AxisNameError(FlaxSpmdError, NameError):
  """Raised when a function reduces over an axis name that nothing binds, as functions for `jax.pmap` do."""


class MeshError(FlaxSpmdError, ValueError):
  """Raised when a mesh cannot be built, is missing, or is not the one that a program's constraints are on."""


class TargetDeviceError(FlaxSpmdError, ValueError):
  """Raised when target hardware is unknown, cannot run a step, or has no compiler here."""


class EstimatorError(FlaxSpmdError, NotImplementedError):
  """Raised when a step can only be partitioned (`shard_map`, unsupported jaxlib), and nothing here can for the target."""


class SearchError(FlaxSpmdError, ValueError):
  """Raised when the constraints of a search are invalid or contradict each other."""


class InfeasibleError(SearchError):
  """Raised when no layout that a search tried fits into the memory limit."""


class ContextError(FlaxSpmdError, RuntimeError):
  """Raised when the layout in force in this task differs from the one in JAX's cache key for this thread."""


class PipelineError(FlaxSpmdError, ValueError):
  """Raised when a pipeline cannot be cut into stages, or when its schedule is invalid or does not fit."""


class CheckpointError(FlaxSpmdError, ValueError):
  """Raised when a checkpoint cannot be saved or restored as requested."""


class CheckpointExistsError(CheckpointError, FileExistsError):
  """Raised when the path of a save already exists."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
  """Raised when the path of a restore holds no checkpoint."""


class CheckpointBusyError(CheckpointError, BlockingIOError):
  """Raised when another process, or another save of this process, is writing to the same path."""


class CheckpointReadOnlyError(CheckpointError, PermissionError):
  """Raised when nothing may be written to a path: a read-only mount or bucket, or a lack of permission."""


class CheckpointDamagedError(CheckpointError):
  """Raised when a stored checkpoint is damaged: files are missing, or a checksum differs."""


class CheckpointMismatchError(CheckpointError):
  """Raised when a checkpoint and its restore target differ in structure, shape or dtype."""


class TargetError(CheckpointError, TypeError):
  """Raised when a restore target is incomplete, or when it is combined with `mesh=` or `rules=`."""


class Problem(NamedTuple):
  """One offender of an error message.

  Attributes:
    text: the mistake, as a whole sentence.
    fix: the remedy, as the rest of the line "Fix: ...".
    kind: the exception class to raise.

  Example:
    >>> Problem('size 10 is not divisible by 4.', 'pad it to 12.').at('params/w').text
    'params/w: size 10 is not divisible by 4.'
  """

  text: str
  fix: str
  kind: type[FlaxSpmdError] = LayoutError

  def at(self, where: str, separator: str | None = None) -> Problem:
    """The problem with a tree path before its text: `params/w, dim 0 'embed': ...`."""
    separator = separator or (', ' if self.text.startswith('dim ') else ': ')
    return self._replace(text=f'{where}{separator}{self.text}')


def problems_text(problems: Iterable[Problem]) -> str:
  """The message of an error: every offender on its own line, then every distinct fix once, in order.

  Example:
    >>> print(problems_text([Problem('a is 3.', 'use 4.'), Problem('b is 5.', 'use 4.')]))
    a is 3.
    b is 5.
    Fix: use 4.
  """
  problems = list(problems)
  fixes = list(dict.fromkeys(problem.fix for problem in problems))
  lines = [problem.text for problem in problems]
  return '\n'.join(lines + [f'Fix: {fix}' for fix in fixes])


def raise_problems(problems: Sequence[Problem]) -> None:
  """Raises all problems as one exception. Does nothing if there are no problems.

  Raises:
    FlaxSpmdError: the problems' common class, or `LayoutError` if they differ in class.

  Example:
    >>> raise_problems([])
    >>> raise_problems([Problem('a is 3.', 'use 4.', MeshError)])
    Traceback (most recent call last):
    flax_spmd.errors.MeshError: a is 3.
    Fix: use 4.
  """
  if problems:
    kinds = {problem.kind for problem in problems}
    raise (kinds.pop() if len(kinds) == 1 else LayoutError)(problems_text(problems))


def did_you_mean(word: Any, known: Iterable[str]) -> str:
  """A suggestion to append to a message: the closest known word, or `''` when no word is close, or it is no str.

  Example:
    >>> did_you_mean('embd', ['embed', 'mlp'])
    " Did you mean 'embed'?"
  """
  close = difflib.get_close_matches(word, sorted(known), 1) if isinstance(word, str) else []
  return f' Did you mean {close[0]!r}?' if close else ''
