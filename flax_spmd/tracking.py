"""Layouts in the tools in which people follow their runs: TensorBoard, Weights & Biases, Perfetto and XProf.

    tracking.log_tensorboard(spmd.explain(layout, state), 'runs/1')
    tracking.log_wandb(explore.compare(train_step, layouts, 'h100:64'))
    tracking.write_trace(layout.jit(step).explain(state, batch), 'step.json.gz', profile='profile')

Each is one call with the result of `explain`, `compare` or `search`.
"""

from flax_spmd._src.tracking.profile_trace import TraceMatch as TraceMatch
from flax_spmd._src.tracking.profile_trace import write_trace as write_trace
from flax_spmd._src.tracking.trackers import log_tensorboard as log_tensorboard
from flax_spmd._src.tracking.trackers import log_wandb as log_wandb
