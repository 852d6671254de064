"""Pipelines: in which order the stages of a model work on the microbatches of a batch.

    schedule = spmd.pipeline.OneFOneB(ranks=4)
    print(schedule.draw(8))                       # tasks over time
    schedule.simulate(8, costs).bubble            # the part of the time in which ranks are idle
    schedule.validate(8, live=4).peaks            # activations that are alive at once, per rank

A schedule is a value and runs nothing: it says which tasks there are, who runs them, and in which order.
"""

from flax_spmd.pipeline.accumulating import Add as Add
from flax_spmd.pipeline.accumulating import Concat as Concat
from flax_spmd.pipeline.accumulating import Max as Max
from flax_spmd.pipeline.accumulating import Mean as Mean
from flax_spmd.pipeline.accumulating import accumulate as accumulate
from flax_spmd.pipeline.classic import Eager1F1B as Eager1F1B
from flax_spmd.pipeline.classic import GPipe as GPipe
from flax_spmd.pipeline.classic import Interleaved1F1B as Interleaved1F1B
from flax_spmd.pipeline.classic import InterleavedGPipe as InterleavedGPipe
from flax_spmd.pipeline.classic import OneFOneB as OneFOneB
from flax_spmd.pipeline.marks import stage_end as stage_end
from flax_spmd.pipeline.schedules import Schedule as Schedule
from flax_spmd.pipeline.simulation import Run as Run
from flax_spmd.pipeline.simulation import Simulation as Simulation
from flax_spmd.pipeline.stacked import stacked as stacked
from flax_spmd.pipeline.tasks import FusedTask as FusedTask
from flax_spmd.pipeline.tasks import Task as Task
from flax_spmd.pipeline.timeline import Timeline as Timeline
from flax_spmd.pipeline.validation import Proof as Proof
from flax_spmd.pipeline.zero_bubble import DualPipeV as DualPipeV
from flax_spmd.pipeline.zero_bubble import KimiK2 as KimiK2
from flax_spmd.pipeline.zero_bubble import ZeroBubbleH1 as ZeroBubbleH1
from flax_spmd.pipeline.zero_bubble import ZeroBubbleV as ZeroBubbleV
