"""Searching: the best rule table and mesh for a model, a machine and a budget of memory.

    found = spmd.search(train_step, create_state, batch, 'h100:64', memory='60GiB')
    print(found)

Candidates are estimated; the best of them are compiled by the target's own compiler.
"""

from flax_spmd._src.search.result import Buy as Buy
from flax_spmd._src.search.result import Found as Found
from flax_spmd._src.search.search import search as search
