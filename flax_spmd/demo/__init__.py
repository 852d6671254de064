"""The demo: one model, two layouts, and a checkpoint that goes from the one to the other.

`flax-spmd demo` trains a small transformer on text that every Python carries, and shows the main job
of this package on the way: swap the rule table, keep the model, restore what the other layout saved.
"""
