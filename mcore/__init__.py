"""Megatron-style 3D-parallel pretraining: one small code base, the same numbers at every layout."""
