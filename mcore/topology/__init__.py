"""Ranks, groups, collectives, and how parameters are cut over them."""
