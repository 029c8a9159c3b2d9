"""Batches of workflows: one plan over many rows.

`operators` builds a plan's graph, `plan` compiles and optimises it, `prefix_tree` and `schedule` decide in which order
its calls run, and `run` runs it on OpenAI-compatible servers. A plan's file needs only the names here.
"""

from presage.batch.operators import branch, call, function, given, join, loop, map_each, template
from presage.batch.plan import Plan

__all__ = ["Plan", "branch", "call", "function", "given", "join", "loop", "map_each", "template"]
