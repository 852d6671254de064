"""Lowered programs as MLIR, as XLA simplifies them before it propagates shardings."""
