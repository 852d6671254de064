"""Checkpoints that know their logical names: save under one layout, restore under any other.

    spmd.checkpoint.save(path, state, layout=layout)
    state = spmd.checkpoint.restore(path, other.abstract(create_state, key, x))

Orbax writes and reads the arrays. A state is stored without boxes, so a checkpoint is the same for boxed
and unboxed states; a record beside the arrays holds their logical names, shapes and layout. A restore
compares the record with its target before it reads any array. `Changes` lists the differences to allow.
"""

from flax_spmd._src.checkpoint.convert import convert as convert
from flax_spmd._src.checkpoint.convert import recorded_layout as recorded_layout
from flax_spmd._src.checkpoint.inspection import diff as diff
from flax_spmd._src.checkpoint.inspection import ls as ls
from flax_spmd._src.checkpoint.inspection import show as show
from flax_spmd._src.checkpoint.inspection import verify as verify
from flax_spmd._src.checkpoint.linen_nnx import linen_nnx_changes as linen_nnx_changes
from flax_spmd._src.checkpoint.manager import Manager as Manager
from flax_spmd._src.checkpoint.manager import ResumedState as ResumedState
from flax_spmd._src.checkpoint.matching.allowed_changes import Changes as Changes
from flax_spmd._src.checkpoint.preflight import Preflight as Preflight
from flax_spmd._src.checkpoint.restore import SalvagedState as SalvagedState
from flax_spmd._src.checkpoint.restore import preflight as preflight
from flax_spmd._src.checkpoint.restore import restore as restore
from flax_spmd._src.checkpoint.save import save as save
from flax_spmd._src.checkpoint.save import save_async as save_async
from flax_spmd._src.checkpoint.save_safetensors import save_safetensors as save_safetensors
from flax_spmd._src.checkpoint.saved_program import SavedProgram as SavedProgram
from flax_spmd._src.checkpoint.saved_program import load_program as load_program
from flax_spmd._src.checkpoint.saved_program import save_program as save_program
from flax_spmd._src.checkpoint.storage.async_save import AsyncSave as AsyncSave
