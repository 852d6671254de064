"""Exploration of layouts for hardware you don't have, with that hardware's own compilers.

    train_step = explore.TrainStep(step, create_state, batch)
    print(explore.compare(train_step, {'fsdp': a, 'tensor': b}, 'h100:64'))

`compare` compiles a training step under several layouts, `search` looks for the best layout, and `Estimator`
estimates a layout without a compiler. Nothing is allocated, and nothing runs.
"""

from flax_spmd._src.compare.calibration import Calibration as Calibration
from flax_spmd._src.compare.calibration import calibrate as calibrate
from flax_spmd._src.compare.compare import compare as compare
from flax_spmd._src.compare.comparison import Comparison as Comparison
from flax_spmd._src.compare.compilation import clear_cache as clear_cache
from flax_spmd._src.compare.hardware import Chip as Chip
from flax_spmd._src.compare.hardware import Target as Target
from flax_spmd._src.compare.hardware import chips as chips
from flax_spmd._src.compare.hardware import parse_target as parse_target
from flax_spmd._src.compare.outcome import Outcome as Outcome
from flax_spmd._src.compare.pipeline_lowering import Pipeline as Pipeline
from flax_spmd._src.compare.train_step import TrainStep as TrainStep
from flax_spmd._src.estimate.estimator import Estimator as Estimator
from flax_spmd._src.search.estimate_check import EstimateCheck as EstimateCheck
from flax_spmd._src.search.result import RuleEffect as RuleEffect
from flax_spmd._src.search.result import SearchResult as SearchResult
from flax_spmd._src.search.search import search as search
