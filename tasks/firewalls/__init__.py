"""Rules that turn source, graphs and experiments into findings: shape, control flow, operators, numerics."""
