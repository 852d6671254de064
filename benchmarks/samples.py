"""Samples: random layouts of a training step, each estimated and compiled.

Layouts are drawn as in a search: from the starting points, by random changes. A seed gives the same sample again.
"""

import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flax_spmd._src.compare.partitioner import partitioner
from flax_spmd._src.search.candidate import Candidate, layout_of, text_of
from flax_spmd._src.search.model_facts import ModelFacts, facts_of
from flax_spmd._src.search.space import Space
from flax_spmd._src.search.starts import starting_points
from flax_spmd._src.search.trials import expected_seconds
from flax_spmd._src.search.user_constraints import constraints_of
from flax_spmd.errors import LayoutError
from flax_spmd.explore import Estimator, Outcome, TrainStep, compare, parse_target

CHANGES = 6  # at most, from a starting point to a candidate of the sample
TIMED = 6  # candidates whose estimates are only timed
ATTEMPTS = 50  # draws for each candidate; a small space has few of them


def draw(space: Space, count: int, seed: Any) -> list[Candidate]:
  """Candidates as in a search: starting points, each with some random changes."""
  rng, starts = random.Random(seed), [start.candidate for start in starting_points(space, 10**6)]
  drawn: dict[Candidate, None] = {}
  for _ in range(ATTEMPTS * count):
    candidate = rng.choice(starts)
    for _ in range(rng.randint(0, CHANGES)):
      candidate = rng.choice(rng.choice([*filter(None, space.coordinates(candidate))]))
    drawn[candidate] = None
    if len(drawn) == count:
      break
  return list(drawn)


class Pair(NamedTuple):
  """The estimated and the compiled outcome of a candidate."""

  name: str
  estimated: Outcome
  compiled: Outcome

  @property
  def wire(self) -> float:
    """Error of the estimated bytes on the wire, in percent."""
    return off(*(sum(one.counts.by_axis().values()) for one in self[1:]))

  @property
  def memory(self) -> float:
    return off(*(one.memory.peak for one in self[1:]))

  @property
  def flops(self) -> float:
    return off(*(one.counts.flops for one in self[1:]))

  @property
  def time(self) -> float:
    """Error of the estimated seconds; the compiled ones are an estimate too, from the compiler's counts."""
    return 100 * (expected_seconds(self.estimated) / expected_seconds(self.compiled) - 1)

  @property
  def doubted(self) -> bool:
    return bool(self.estimated.doubts)

  def record(self) -> dict[str, Any]:
    figures = {
      source: {
        'wire': sum(one.counts.by_axis().values()),
        'memory': one.memory.peak,
        'flops': one.counts.flops,
        'seconds': expected_seconds(one),
      }
      for source, one in (('estimated', self.estimated), ('compiled', self.compiled))
    }
    return {'name': self.name, 'doubts': self.estimated.doubts, **figures}


def off(estimated: float, compiled: float) -> float:
  """The error in percent; values below one MiB count as one MiB."""
  return 100 * (max(estimated, 2**20) / max(compiled, 2**20) - 1)


class Sample(NamedTuple):
  """The pairs of a step and a target, and the CPU time of its estimates.

  Attributes:
    pairs: the candidates with both outcomes; their whole step is partitioned where that is possible.
    quick: the same candidates with estimates for which it is not partitioned, as a search makes of most.
    failed: the candidates without an outcome, with the error.
    seconds: CPU time of a quick estimate, measured after those of the pairs, as a search makes tens of them.
    partitioned_seconds: CPU time of one of the others.
  """

  pairs: list[Pair]
  quick: list[Pair]
  failed: list[tuple[str, str]]
  seconds: float
  partitioned_seconds: float


def sample(train_step: TrainStep, target: str, count: int, seed: Any, jobs: int) -> Sample:
  """A sample of a step's layouts."""
  estimator, facts, drawn = drawn_for(train_step, target, count + TIMED, seed)
  drawn, others = drawn[:count], drawn[count:] or drawn
  quick = estimates(estimator, facts, drawn, target, partition=False)
  _, seconds = _timed(lambda: estimates(estimator, facts, others, target, partition=False))
  estimated, partitioned_seconds = _timed(lambda: estimates(estimator, facts, drawn, target))
  layouts = {name: one.layout for name, one in estimated.items() if one.counts}
  compiled = compare(train_step, layouts, target, jobs=jobs) if layouts else {}
  failed = [(name, one.error or '') for name, one in estimated.items() if not one.counts]
  failed += [(name, compiled[name].error or '') for name in layouts if not compiled[name].counts]
  usable = [name for name in layouts if compiled[name].counts]
  both = ([Pair(name, every[name], compiled[name]) for name in usable] for every in (estimated, quick))
  return Sample(*both, failed, seconds / len(others), partitioned_seconds / len(drawn))


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
  """The result of a call, and the CPU seconds that it took."""
  begin = _cpu_seconds()
  return call(), _cpu_seconds() - begin


def _cpu_seconds() -> float:
  """CPU time of this process, and of that which partitions."""
  process = partitioner('cuda').process
  if process is None:
    return time.process_time()
  user, system = Path(f'/proc/{process.pid}/stat').read_text().rpartition(')')[2].split()[11:13]
  return time.process_time() + (int(user) + int(system)) / os.sysconf('SC_CLK_TCK')


def drawn_for(
  train_step: TrainStep, target: str, count: int, seed: Any
) -> tuple[Estimator, ModelFacts, list[Candidate]]:
  """Candidates for a target."""
  aim = parse_target(target)
  estimator = Estimator(train_step, platform=aim.chip.platform)
  found = estimator.names, estimator.parameter_names, estimator.together
  facts = facts_of(train_step, {}, *found)
  space = Space(facts, constraints_of(aim, facts, None, None, None, (), (), None), aim)
  return estimator, facts, draw(space, count, seed)


def estimates(
  estimator: Estimator,
  facts: ModelFacts,
  drawn: Sequence[Candidate],
  target: str,
  partition: bool = True,
) -> dict[str, Outcome]:
  """The estimated outcomes by name; failed ones of layouts that do not fit the model."""
  aim, outcomes = parse_target(target), {}
  for candidate in drawn:
    name, layout = text_of(candidate, facts.batch), layout_of(candidate, facts.batch)
    try:
      outcomes[name] = estimator.estimate(layout, aim, partition=partition)
    except LayoutError as error:
      outcomes[name] = Outcome.failed(name, layout, str(error))
  return outcomes


def regret(pairs: Sequence[Pair], top: int) -> float:
  """How much slower the best of the `top` estimates is than the best of all when compiled, in percent."""
  ranked = sorted(pairs, key=lambda pair: expected_seconds(pair.estimated))
  best = min(expected_seconds(pair.compiled) for pair in pairs)
  return 100 * (min(expected_seconds(pair.compiled) for pair in ranked[:top]) / best - 1)
