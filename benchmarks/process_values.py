"""Cost of comparing values between processes: the demo's state and batches, in two processes, beside a step of the demo.

`layout.check_processes(state, values=...)` reads the arrays that both processes hold. Under the demo's tensor layout that
is the whole state, since its data axis spans the processes; under its FSDP layout, only small arrays. `local_to_global`
with `check='always'` compares structure and common rows of every batch.

Each round runs one step, waits until both processes have finished it, and times one comparison. A figure is the
median over rounds of that time, in percent of the same round's step.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from harness import Figure, at_most, summary
from reporting import report

from tests.processes import run_processes

ROUNDS = 41
TARGETS = {'numbers and a sixteenth': at_most(1)}
SOURCE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import process_values
report(process_values.samples())
"""


def figures() -> list[Figure]:
  results = run_processes(SOURCE, processes=2, devices=4, timeout=900, flags='')
  by_layout = results[0].value
  return [
    summary(f'{layout} layout: {name}', samples, '% of a step', TARGETS.get(name))
    for layout, by_name in by_layout.items()
    for name, samples in by_name.items()
  ]


# -- the functions below run in each process


def samples() -> dict[str, dict[str, list[float]]]:
  """Percent of a step for every comparison, in each round, under each of the demo's layouts."""
  from flax_spmd.demo.run import layouts

  return {name: _of_layout(layout) for name, layout in zip(('tensor', 'fsdp'), layouts(8), strict=True)}


def _of_layout(layout: Any) -> dict[str, list[float]]:
  import jax
  import jax.numpy as jnp
  import numpy as np

  from flax_spmd.demo.model import Transformer
  from flax_spmd.demo.training import TrainingConfig, create_state, optimizer, train_step

  config = TrainingConfig()
  shape = config.batch, config.length + 1
  tokens = np.arange(np.prod(shape), dtype=np.int32).reshape(shape) % 128
  rows, _ = layout.local_indices(jax.ShapeDtypeStruct(shape, np.int32), ('batch', None))
  place = lambda check: layout.local_to_global(tokens[rows], ('batch', None), check=check)
  arguments = jax.random.key(0), jnp.asarray(tokens[:, :-1]), Transformer(), optimizer(config)
  run = _Run(
    layout.jit(train_step, donate_argnums=0), layout.init(create_state, *arguments), place('new')
  )
  comparisons = {
    'every value': lambda: layout.check_processes(run.state, values=True),
    'numbers and a sixteenth': lambda: layout.check_processes(run.state, values='part'),
    'a batch': lambda: place('always'),
  }
  return _measured(run, comparisons)


class _Run:
  """A step and its state, which every call donates and replaces."""

  def __init__(self, step: Any, state: Any, batch: Any):
    self.step, self.state, self.batch = step, state, batch

  def once(self) -> None:
    import jax

    self.state, _ = jax.block_until_ready(self.step(self.state, self.batch))


def _measured(run: _Run, comparisons: Mapping[str, Callable[[], Any]]) -> dict[str, list[float]]:
  from flax_spmd._src.multihost import check_same_on_every_process

  percent: dict[str, list[float]] = {name: [] for name in comparisons}
  for name in _order(comparisons):
    begin = time.perf_counter()
    run.once()
    step = time.perf_counter() - begin
    check_same_on_every_process('the end of a step', '')
    begin = time.perf_counter()
    comparisons[name]()
    percent[name].append(100 * (time.perf_counter() - begin) / step)
  return {name: each[1:] for name, each in percent.items()}  # the first one of each warms up


def _order(comparisons: Mapping[str, Any]) -> Iterator[str]:
  """The comparisons in turns, in the same order on all processes."""
  for _ in range(ROUNDS + 1):
    yield from comparisons


if __name__ == '__main__':
  report('process_values', figures)
