"""The demo: one model, two layouts, and a checkpoint saved under one and restored under the other.

`flax-spmd demo` trains a small transformer on text from Python's standard library. It shows the main use of
this package: change the rule table, keep the model, restore the checkpoint of the other layout.
"""
