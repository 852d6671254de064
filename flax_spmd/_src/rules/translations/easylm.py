"""EasyLM's tables: pairs of a regular expression and a PartitionSpec."""

from __future__ import annotations

from collections.abc import Iterable

from jax.sharding import PartitionSpec

from flax_spmd._src.public import public
from flax_spmd._src.rules.clauses.name_rule import is_pair
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.text import value_text
from flax_spmd.errors import Problem, RulesError, raise_problems


@public('flax_spmd.translate')
def from_easylm(rules: Iterable[tuple[str, PartitionSpec]]) -> Rules:
  """The rule table of EasyLM's `match_partition_rules`.

  The first expression that is found in the path of an array decides. An array of one element is replicated. An array
  that no expression matches is an error.

  Args:
    rules: pairs of a regular expression and a PartitionSpec, as `get_partition_rules()` of a model returns.

  Raises:
    RulesError: `rules` is not such a table (lists all wrong pairs), or is empty.

  Example:
    >>> rules = translate.from_easylm([('attention/(wq|wk|wv)/kernel', PartitionSpec('fsdp', 'mp'))])
    >>> layout = Layout({'fsdp': 4, 'mp': 2}, rules)
    >>> layout.spec({'attention': {'wq': {'kernel': jnp.ones((8, 8))}}, 'step': jnp.zeros(())})
    {'attention': {'wq': {'kernel': P('fsdp', 'mp')}}, 'step': P()}
    >>> layout.spec({'norm': {'kernel': jnp.ones(8)}})
    Traceback (most recent call last):
    flax_spmd.errors.UnmatchedNameError: norm/kernel: no rule applies to this array of shape (8,), which has no names.
  """
  pairs = tuple(rules) if isinstance(rules, Iterable) else (rules,)
  raise_problems(
    [
      Problem(
        f'Pair {number} is {value_text(pair)}.',
        'write pairs of a path regex and a PartitionSpec.',
        RulesError,
      )
      for number, pair in enumerate(pairs)
      if not (is_pair(pair) and isinstance(pair[1], PartitionSpec))
    ]
  )
  table = Rules(*pairs, unmatched='error')
  if not table:
    raise RulesError(
      'The table of EasyLM is empty, so it matches no array.\n'
      'Fix: pass the pairs that get_partition_rules() of the model returns.'
    )
  return table
