"""Checkpoints that know their names: save under one layout, restore under any other.

    spmd.checkpoint.save(path, state, layout=layout)
    state = spmd.checkpoint.restore(path, other.abstract(create_state, key, x))

Orbax writes and reads the arrays. On disk a state has no boxes, so it is the same whether it was
saved with or without them; beside the arrays lie their logical names, their shapes and the layout.
A restore compares all of that with its target before a byte of the arrays is read.
"""

from flax_spmd._src.checkpoint.convert import convert as convert
from flax_spmd._src.checkpoint.convert import recorded_layout as recorded_layout
from flax_spmd._src.checkpoint.inspection import diff as diff
from flax_spmd._src.checkpoint.inspection import ls as ls
from flax_spmd._src.checkpoint.inspection import show as show
from flax_spmd._src.checkpoint.inspection import verify as verify
from flax_spmd._src.checkpoint.manager import Manager as Manager
from flax_spmd._src.checkpoint.manager import Resumed as Resumed
from flax_spmd._src.checkpoint.preflight import Preflight as Preflight
from flax_spmd._src.checkpoint.restore import preflight as preflight
from flax_spmd._src.checkpoint.restore import restore as restore
from flax_spmd._src.checkpoint.save import save as save
from flax_spmd._src.checkpoint.save import save_async as save_async
from flax_spmd._src.checkpoint.storage.async_save import Saving as Saving
