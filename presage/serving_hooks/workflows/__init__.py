"""The table of running workflows, and how a workflow is identified."""
