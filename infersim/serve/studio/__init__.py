"""The planner as a page: every answer is a simulation of the YAML that is shown."""
