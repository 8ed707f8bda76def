"""The stage slim: a training checkpoint becomes weights.safetensors, bit for bit, without anything else it held.

pickled     a pickle           → plain values and inert records; nothing is imported or called
archive     a zip file         → the places of its records
readers     a checkpoint       → its content, with tensors that stay in the mapped file
rules       the name of an entry → the rule that leaves it out: one table, which settings extend
averages    a state dict with its moving average in it → the two
choose      that content       → the one wanted state dict, and what was left out by which rule
numerics    a tensor           → counts of NaN, infinity, subnormals, values beyond FP16
write       the kept tensors   → weights.safetensors, in one pass
stage       all of it          → the stage and its report
"""

from enginesmith.tasks.slim.readers import read_checkpoint
from enginesmith.tasks.slim.stage import SLIM, SlimReport, checkpoint_source, slim_checkpoint

__all__ = ["SLIM", "SlimReport", "checkpoint_source", "read_checkpoint", "slim_checkpoint"]
