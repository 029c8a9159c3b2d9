"""The profile of an application: its automaton, its expression, and the percentiles of its agents."""
