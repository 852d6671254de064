"""What bad input gets: one exception tree, and one way to write its texts.

    FlaxSpmdError
    ├── RulesError (ValueError)            a rule table that cannot be read or obeyed
    │   ├── MeshAxisError                  a rule or a spec uses an axis that the mesh lacks
    │   ├── UnmatchedNameError             a logical name has no rule, where one is required
    │   └── ConflictError                  a dimension lost its mesh axis to another dimension
    ├── LayoutError (ValueError)           a leaf does not fit its names, or the mesh
    ├── MeshError (ValueError)             a mesh that cannot be made, or is needed and absent
    ├── TargetDeviceError (ValueError)     hardware that nobody has described, or cannot be compiled for
    ├── EstimatorError (NotImplementedError) a step of which nothing can be estimated, or unknown bindings
    ├── SearchError (ValueError)           a search for something that cannot be
    │   └── InfeasibleError                no layout that was tried fits into the memory
    ├── ContextError (RuntimeError)        a layout in force here is not the one JAX's caches see
    ├── PipelineError (ValueError)         a pipeline schedule that cannot be run, or not as asked
    └── CheckpointError (ValueError)       a checkpoint that cannot be written or read as asked
        ├── CheckpointExistsError (FileExistsError)
        ├── CheckpointNotFoundError (FileNotFoundError)
        ├── CheckpointBusyError            somebody else is writing there
        ├── CheckpointDamagedError         it is not as it was written
        ├── CheckpointMismatchError        file and target differ
        └── TargetError (TypeError)        a restore target that says too little

Every text names its offenders (all of them), one a line, and ends with the fix::

    params/mlp/kernel, dim 1 'mlp': size 10 is not divisible by mesh axis 'model' (4), asked for by rule 1 ('mlp', 'model').
    Fix: pad it to 12, or replicate it with the rule ('mlp', None) before rule 1.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class FlaxSpmdError(Exception):
  """The root of everything that this package raises on purpose.

  Example:
    >>> try:
    ...   Layout({'model': 8}, (('mlp', 'modle'),))
    ... except errors.FlaxSpmdError as error:
    ...   print(type(error).__name__, isinstance(error, ValueError))
    MeshAxisError True
  """


class RulesError(FlaxSpmdError, ValueError):
  """A rule table cannot be read or obeyed."""


class MeshAxisError(RulesError):
  """A rule or a spec uses a mesh axis that the mesh does not have."""


class UnmatchedNameError(RulesError):
  """A logical name has no rule, and the table says `unmatched='error'`."""


class ConflictError(RulesError):
  """A dimension lost its mesh axis to another one, and the table says `conflict='error'`."""


class LayoutError(FlaxSpmdError, ValueError):
  """A leaf does not fit its names (rank, repeated names) or the mesh (divisibility)."""


class MeshError(FlaxSpmdError, ValueError):
  """A mesh cannot be made from the devices at hand, or is needed and absent."""


class TargetDeviceError(FlaxSpmdError, ValueError):
  """Hardware to explore layouts for is unknown, or there is no compiler for it here."""


class EstimatorError(FlaxSpmdError, NotImplementedError):
  """A step cannot be estimated here, and has to be compiled: of an unknown jaxlib, or with `shard_map` in it."""


class SearchError(FlaxSpmdError, ValueError):
  """A search whose wishes cannot be met, or not together."""


class InfeasibleError(SearchError):
  """No layout that a search tried fits into the memory that there is."""


class ContextError(FlaxSpmdError, RuntimeError):
  """The layout in force in this task is not the one that JAX's caches see in this thread."""


class PipelineError(FlaxSpmdError, ValueError):
  """A pipeline schedule cannot be read or run, or not for so many microbatches."""


class CheckpointError(FlaxSpmdError, ValueError):
  """A checkpoint cannot be written or read as asked."""


class CheckpointExistsError(CheckpointError, FileExistsError):
  """Something is already at the path of a save."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
  """There is no checkpoint at the path of a restore."""


class CheckpointBusyError(CheckpointError, BlockingIOError):
  """Another process, or another save of this one, is writing to the same place."""


class CheckpointDamagedError(CheckpointError):
  """A checkpoint is not as it was written: bits have changed, or parts of it are gone."""


class CheckpointMismatchError(CheckpointError):
  """The checkpoint and the restore target differ in tree, shape or dtype."""


class TargetError(CheckpointError, TypeError):
  """A restore target does not say where its leaves go."""


class Problem(NamedTuple):
  """One offender: what is wrong (a whole sentence), how to mend it, and which error it is.

  Example:
    >>> Problem('size 10 is not divisible by 4.', 'pad it to 12.').at('params/w').text
    'params/w: size 10 is not divisible by 4.'
  """

  text: str
  fix: str
  kind: type[FlaxSpmdError] = LayoutError

  def at(self, where: str, joint: str | None = None) -> Problem:
    """The same problem with its place put before it: `params/w, dim 0 'embed': ...`."""
    joint = joint or (', ' if self.text.startswith('dim ') else ': ')
    return self._replace(text=f'{where}{joint}{self.text}')


def problems_text(problems: Iterable[Problem]) -> str:
  """Every offender on a line of its own, then every distinct fix once, in order.

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
  """Raises all problems as one error, of their kind if they share one; nothing if there are none.

  Raises:
    FlaxSpmdError: the problems' common class, or `LayoutError` for a mixture.

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


def did_you_mean(word: str, known: Iterable[str]) -> str:
  """`" Did you mean 'embed'?"` for the closest known word, or `""` when none is close.

  Example:
    >>> did_you_mean('embd', ['embed', 'mlp'])
    " Did you mean 'embed'?"
  """
  close = difflib.get_close_matches(word, sorted(known), 1)
  return f' Did you mean {close[0]!r}?' if close else ''
