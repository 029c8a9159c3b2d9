"""A service that owns the tools of workflows: prepares them ahead, hands them out, collects them at the end."""
