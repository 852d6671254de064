"""Sent gradients: a warning where each microbatch sends gradients of weights to another rank, as for a global norm to clip by.

The schedule has no task of a stage after the backward pass of all stages. So a gradient that is scaled by a number from
all gradients is scaled, summed and kept on the rank of the last backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from flax_spmd._src.pipeline.cut import residuals
from flax_spmd._src.pipeline.cut.equations import Equation, Value
from flax_spmd._src.pipeline.cut.stage_assignment import StageAssignment
from flax_spmd._src.pipeline.cut.task_programs import SPLIT_FROM, Accumulator, TaskPrograms
from flax_spmd._src.source_lines import warn
from flax_spmd._src.text import first_lines, plural, size_text


def warn_of_sent_gradients(
  name: str, cut: StageAssignment, programs: TaskPrograms, ranks: Sequence[int], reported: set[str]
) -> None:
  """Warns, once, of sums whose terms are gradients of weights from other ranks, with a fix.

  Args:
    name: the pipeline, for the text.
    cut, programs: the body with its marks' operands, and its programs.
    ranks: the rank of each stage.
    reported: the kinds of warnings already issued.
  """
  producers = programs.producers()
  sent: dict[tuple[int, int, str], set[Value]] = defaultdict(set)  # by stages and source line
  for one in programs.accumulators:
    to = one.task[1]
    for value, reader in _terms(one, programs):
      kind, stage = producers.get(value, ('fwd', to))
      if kind != 'fwd' and ranks[stage] != ranks[to] and value not in cut.border:
        sent[stage, to, reader.source_line].add(value)
  if not sent or 'sent gradients' in reported:
    return
  reported.add('sent gradients')
  lines = [
    f'  {plural(len(values), "array")} of stage {stage}, {size_text(sum(one.bytes for one in values))}, '
    f'sent from rank {ranks[stage]} to rank {ranks[to]} for {line}'
    for (stage, to, line), values in sorted(sent.items(), key=lambda item: item[0])
  ]
  warn(
    f'{name}: gradients of several stages are combined in each microbatch. They are sent to one rank, which also keeps '
    'their sums and the weights:\n'
    + first_lines(lines)
    + '\nFix: combine them after accumulate, where sums stay on their ranks: let it return the gradients, and clip '
    'their mean by its global norm.'
  )


def _terms(one: Accumulator, programs: TaskPrograms) -> list[tuple[Value, Equation]]:
  """The large inputs of a task that a carried value combines element by element with no own ones, each with its reader."""
  producer = {
    value: equation for equation in programs.tasks[one.task].equations for value in equation.outputs
  }
  pending, seen, terms = [one.after], {one.after}, []
  while pending:
    equation = producer[pending.pop()]
    if equation.name not in residuals.CHEAP:
      return []  # a gradient of the task's own: the weight is on its rank in any case
    for value in {*equation.values} - seen:
      if value.bytes > SPLIT_FROM and value.aval.size == equation.outputs[0].aval.size:
        seen.add(value)
        if value in producer:
          pending.append(value)
        else:
          terms.append((value, equation))
  return terms
