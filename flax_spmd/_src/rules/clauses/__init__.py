"""Clauses: the kinds of rules that a table consists of.

    ('hidden', 'model')                    a logical name, over mesh axes
    ('attn/.*kernel$', PartitionSpec(...)) a path, for arrays with or without names
    ('^opt_state/', Rules(...))            a table for one part of the tree
    fsdp('data')                           one open dimension of every array that is left
    optimizer_over('data')                 one dimension of optimizer state, over further axes
    function(leaf) -> PartitionSpec | None any function
    ('@weights', ...)                      values that a program annotates
    host(...)                              around any of these: the arrays are in the host's memory

In a clause, None is a decision (this dimension is replicated) and `PartitionSpec.UNCONSTRAINED` is not: it
leaves the dimension open. `fsdp` may shard it; otherwise a stored array is replicated there, and inside a
program the compiler chooses. In a box, None is a dimension without a name, and open.
"""

from flax_spmd._src.rules.clauses.annotation_rule import AnnotationRule as AnnotationRule
from flax_spmd._src.rules.clauses.base import Clause as Clause
from flax_spmd._src.rules.clauses.base import FillingClause as FillingClause
from flax_spmd._src.rules.clauses.base import Idle as Idle
from flax_spmd._src.rules.clauses.base import Leaf as Leaf
from flax_spmd._src.rules.clauses.base import OwningClause as OwningClause
from flax_spmd._src.rules.clauses.base import RuleTable as RuleTable
from flax_spmd._src.rules.clauses.base import WideningClause as WideningClause
from flax_spmd._src.rules.clauses.fsdp_rule import Fsdp as Fsdp
from flax_spmd._src.rules.clauses.fsdp_rule import fsdp as fsdp
from flax_spmd._src.rules.clauses.function_rule import FunctionRule as FunctionRule
from flax_spmd._src.rules.clauses.host_rule import HOST_MEMORY as HOST_MEMORY
from flax_spmd._src.rules.clauses.host_rule import Host as Host
from flax_spmd._src.rules.clauses.host_rule import host as host
from flax_spmd._src.rules.clauses.host_rule import host_problems as host_problems
from flax_spmd._src.rules.clauses.host_rule import without_host as without_host
from flax_spmd._src.rules.clauses.name_rule import NameRule as NameRule
from flax_spmd._src.rules.clauses.optimizer_over_rule import OptimizerOver as OptimizerOver
from flax_spmd._src.rules.clauses.optimizer_over_rule import optimizer_over as optimizer_over
from flax_spmd._src.rules.clauses.path_rule import PathRule as PathRule
