"""Translations: rule tables from the sharding tables of other libraries.

    layout = Layout(mesh, translate.from_easylm(LLaMAConfig.get_partition_rules()))

The tables of Flax, T5X and MaxText need none: a list of `('name', 'axis')` pairs is a rule table.
"""

from flax_spmd._src.rules.translations.big_vision import from_big_vision as from_big_vision
from flax_spmd._src.rules.translations.easylm import from_easylm as from_easylm
from flax_spmd._src.rules.translations.praxis import from_praxis as from_praxis
