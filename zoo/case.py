"""A case: a public model as its authors wrote it, with the layout that its user asks for.

A function that returns a `Case` is entered into `ENTRIES` by the decorator `entry`. It imports its model when it
is called, so that the entries can be listed in any environment.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec

import flax_spmd as spmd
from flax_spmd import pipeline

ROWS = PartitionSpec('data')
FSDP = (('batch', 'data'), spmd.fsdp('data', min_size=1))  # the table for models without names


@dataclasses.dataclass(frozen=True)
class Case:
  """One model with its step.

  Attributes:
    create: `create(*args)`, the state as its authors create it.
    step: `step(state, batch)`, which returns the state and the loss; None if it is given as two halves.
    halves: `gradients(state, batch)`, which returns the loss and the gradients, and `update(state, gradients)`, which returns
      the state. A pipeline accumulates gradients between them. None if the authors' step is one function.
    batch: host arrays.
    args: arguments of `create`.
    mesh: sizes of the mesh axes, over 8 devices.
    rules: the rule table: the authors' own, or `FSDP`.
    policies: the policies of the layout.
    batch_spec: the spec of every array of the batch.
    axis_name: the axis that a pmap-style step reduces over, or ''.
    of_mesh: `of_mesh(mesh)`, which returns `create` and `step`, for a model that holds its mesh; in place of both.
    accumulates: whether its step has a loop over microbatches, which a pipeline takes as it is.
    one_device: whether its step runs on one device. If not, losses are compared with those of the authors' own way.
    partitioner: `partitioner(abstract_state, mesh)`, the authors' own function: a sharding or a spec for each
      leaf of the state. None for models without annotations.
  """

  create: Callable[..., Any] | None
  step: Callable[[Any, Any], tuple[Any, Any]] | None
  batch: Any
  args: tuple[Any, ...] = ()
  mesh: Mapping[str, int] = dataclasses.field(default_factory=lambda: {'data': 8})
  rules: Any = FSDP
  policies: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  batch_spec: PartitionSpec = ROWS
  axis_name: str = ''
  of_mesh: Callable[[Any], tuple[Any, Any]] | None = None
  halves: tuple[Callable[[Any, Any], tuple[Any, Any]], Callable[[Any, Any], Any]] | None = None
  accumulates: bool = False
  one_device: bool = True
  partitioner: Callable[[Any, Any], Any] | None = None

  def functions(self, mesh: Any) -> tuple[Callable[..., Any], Callable[[Any, Any], tuple[Any, Any]]]:
    """`create` and `step` of the model for a mesh."""
    return self.of_mesh(mesh) if self.of_mesh else (self.create, self.step or self.step_of(None))

  def step_of(self, schedule: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
    """The step from its halves, whose gradients are accumulated over microbatches if there is a schedule."""
    gradients, update = self.halves

    def step(state, batch):
      if schedule is None:
        loss, grads = gradients(state, batch)
      else:
        loss, grads = pipeline.accumulate(partial(gradients, state), batch, schedule, pipeline.Mean)
      return update(state, grads), loss

    return step

  def plain(self, step: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[[Any, Any], tuple[Any, Any]]:
    """A step without `axis_name`: the axis has size 1."""
    if not self.axis_name:
      return step
    return jax.vmap(step, in_axes=None, out_axes=None, axis_name=self.axis_name, axis_size=1)


@dataclasses.dataclass(frozen=True)
class Entry:
  """One model of the zoo.

  Attributes:
    name: the model.
    make: returns its case.
    package: the distribution or the source that it comes from.
    environment: where it runs; see `environments.toml`.
    annotated: its authors' means of annotation, or ''.
    changes: lines that a user writes beside `Layout`, `layout.init` and `layout.jit`.
  """

  name: str
  make: Callable[[], Case]
  package: str
  environment: str
  annotated: str
  changes: str


ENTRIES: dict[str, Entry] = {}


def entry(
  name: str, package: str, *, environment: str = 'linen', annotated: str = '', changes: str = ''
):
  """Enters the function that makes a case."""

  def enter(make: Callable[[], Case]) -> Callable[[], Case]:
    ENTRIES[name] = Entry(name, make, package, environment, annotated, changes)
    return make

  return enter
