"""Prefect flows and the command line: the order of stages, nothing numeric."""
