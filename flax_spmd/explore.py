"""Exploring: what a training step would do on hardware that is not here, by that hardware's compilers.

    found = spmd.compare(train_step, create_state, batch, {'fsdp': a, 'tensor': b}, 'h100:64')
    print(found)

Nothing is allocated, nothing runs: a program is compiled for each layout, and its text is counted.
"""

from flax_spmd._src.compare.compare import compare as compare
from flax_spmd._src.compare.comparison import Comparison as Comparison
from flax_spmd._src.compare.compilation import clear_cache as clear_cache
from flax_spmd._src.compare.hardware import Chip as Chip
from flax_spmd._src.compare.hardware import Target as Target
from flax_spmd._src.compare.hardware import chips as chips
from flax_spmd._src.compare.hardware import parse as parse
from flax_spmd._src.compare.outcome import Outcome as Outcome
from flax_spmd._src.compare.pipeline_lowering import Pipeline as Pipeline
from flax_spmd._src.compare.train_step import TrainStep as TrainStep
from flax_spmd._src.estimate.estimator import Estimator as Estimator
from flax_spmd._src.search.result import Buy as Buy
from flax_spmd._src.search.result import Found as Found
from flax_spmd._src.search.search import search as search
