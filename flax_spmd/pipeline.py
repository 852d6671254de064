"""Pipelines: stage boundaries, microbatch loops, and the schedules that order their work.

    schedule = spmd.pipeline.OneFOneB(ranks=4)
    print(schedule.draw(8))                       # a timeline
    schedule.simulate(8, costs).bubble            # the fraction of the time in which ranks are idle
    schedule.validate(8, live=4).peaks            # largest number of live activations, per rank

A schedule is a value: the tasks of every rank, in order. `layout.pipeline_jit` runs it.
"""

from flax_spmd._src.pipeline.accumulate import accumulate as accumulate
from flax_spmd._src.pipeline.cut.stage_marks import place_with as place_with
from flax_spmd._src.pipeline.cut.stage_marks import stage_end as stage_end
from flax_spmd._src.pipeline.reductions import Add as Add
from flax_spmd._src.pipeline.reductions import Concat as Concat
from flax_spmd._src.pipeline.reductions import Max as Max
from flax_spmd._src.pipeline.reductions import Mean as Mean
from flax_spmd._src.pipeline.reductions import Stack as Stack
from flax_spmd._src.pipeline.schedules.automatic import Automatic as Automatic
from flax_spmd._src.pipeline.schedules.classic import Eager1F1B as Eager1F1B
from flax_spmd._src.pipeline.schedules.classic import GPipe as GPipe
from flax_spmd._src.pipeline.schedules.classic import Interleaved1F1B as Interleaved1F1B
from flax_spmd._src.pipeline.schedules.classic import InterleavedGPipe as InterleavedGPipe
from flax_spmd._src.pipeline.schedules.classic import OneFOneB as OneFOneB
from flax_spmd._src.pipeline.schedules.greedy import greedy as greedy
from flax_spmd._src.pipeline.schedules.schedule import Schedule as Schedule
from flax_spmd._src.pipeline.schedules.simulation import Simulation as Simulation
from flax_spmd._src.pipeline.schedules.simulation import TimedStep as TimedStep
from flax_spmd._src.pipeline.schedules.tasks import FusedTask as FusedTask
from flax_spmd._src.pipeline.schedules.tasks import Task as Task
from flax_spmd._src.pipeline.schedules.timeline import Timeline as Timeline
from flax_spmd._src.pipeline.schedules.validation import ScheduleReport as ScheduleReport
from flax_spmd._src.pipeline.schedules.zero_bubble import DualPipeV as DualPipeV
from flax_spmd._src.pipeline.schedules.zero_bubble import KimiK2 as KimiK2
from flax_spmd._src.pipeline.schedules.zero_bubble import ZeroBubbleH1 as ZeroBubbleH1
from flax_spmd._src.pipeline.schedules.zero_bubble import ZeroBubbleV as ZeroBubbleV
from flax_spmd._src.pipeline.stacked import stacked as stacked
