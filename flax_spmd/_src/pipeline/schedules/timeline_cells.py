"""Cells: what a timeline is made of, in units of time, for whoever draws it.

A cell is a task with its start and its end; a fused task has several, of which the later ones are joined
to the one before. Its name is short: `F2` is the forward of microbatch 2, and where ranks have several
stages, `F₁2` is that of stage 1.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterator
from typing import NamedTuple

from flax_spmd._src.pipeline.schedules.simulation import Simulation
from flax_spmd._src.pipeline.schedules.tasks import Task

LETTERS = {'fwd': 'F', 'bwd': 'B', 'wgrad': 'W'}
WORDS = {'fwd': 'forward', 'bwd': 'backward', 'wgrad': 'gradient of weights'}
_HUES = {'fwd': 0.58, 'bwd': 0.38, 'wgrad': 0.09}
_SUBSCRIPT = str.maketrans('0123456789', '₀₁₂₃₄₅₆₇₈₉')


class Cell(NamedTuple):
  """A task between its start and its end; `joined` if it is one program with the cell before."""

  task: Task
  name: str
  start: float
  end: float
  joined: bool
  colour: str


def cells_of(simulation: Simulation) -> list[list[Cell]]:
  """Per rank, its cells in order."""
  several = len(simulation.owners) > len(simulation.runs)
  return [list(_cells(simulation, rank, several)) for rank in range(len(simulation.runs))]


def heading(simulation: Simulation) -> tuple[str, str]:
  """What is drawn and what was found, and what the names of cells mean."""
  steps = [run.step for runs in simulation.runs for run in runs]
  found = {task.kind for step in steps for task in step.tasks}
  kinds = ', '.join(f'{LETTERS[kind]}: {word}' for kind, word in WORDS.items() if kind in found)
  several = len(simulation.owners) > len(simulation.runs)
  name = 'F₁2 is of stage 1 and microbatch 2' if several else 'F2 is of microbatch 2'
  fused = '; no gap: one program' if any(len(step.tasks) > 1 for step in steps) else ''
  live = ' '.join(map(str, simulation.peaks))
  return f'{str(simulation).splitlines()[0]}, live {live}', f'{kinds}; {name}{fused}'


def ticks(makespan: float, least: float) -> list[float]:
  """Round times from 0 on, at least so far from one another.

  Example:
    >>> ticks(33, 4)
    [0, 5, 10, 15, 20, 25, 30]
  """
  if makespan <= 0 or least <= 0:
    return [0]
  power = 10 ** math.floor(math.log10(least))
  step = next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= least)
  return [round(step * number, 9) for number in range(int(makespan / step + 1e-9) + 1)]


def _cells(simulation: Simulation, rank: int, several: bool) -> Iterator[Cell]:
  own = [stage for stage, owner in enumerate(simulation.owners) if owner == rank]
  for run in simulation.runs[rank]:
    start = run.start
    for task, length in zip(run.step.tasks, run.lengths):
      stage = str(task.stage).translate(_SUBSCRIPT) if several else ''
      name = f'{LETTERS[task.kind]}{stage}{task.microbatch}'
      joined = task != run.step.tasks[0]
      yield Cell(task, name, start, start + length, joined, _colour(task.kind, own.index(task.stage)))
      start += length


def _colour(kind: str, chunk: int) -> str:
  """One hue per kind; a rank's later stages are darker, and dark words stand on all of them."""
  lightness = max(0.56, 0.8 - 0.11 * chunk)
  red, green, blue = colorsys.hls_to_rgb(_HUES[kind], lightness, 0.6)
  return f'#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}'
