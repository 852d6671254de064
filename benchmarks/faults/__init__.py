"""Campaigns of `checkpoint_faults.py`: each injects one fault many times, and examines what remains."""
