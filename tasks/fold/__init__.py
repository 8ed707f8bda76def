"""The stage fold: BatchNorms disappear into the layers beside them, and the model stays the same function.

layers      a layer            → its role: a BatchNorm, a layer that can take one up, neither
flow        a module           → the data flow of its computation
plan        that flow          → the folds that cannot change the model, and a reason for every other BatchNorm
apply       the plan           → the folded module (arithmetic: `tasks.batchnorm`)
compare     both modules       → a verdict on real inputs
stage       all of it          → the stage and its report
graph       an ONNX file       → the same for a model that arrives as one
"""

from enginesmith.tasks.fold.graph import FOLD_GRAPH, fold_onnx
from enginesmith.tasks.fold.stage import FOLD, FoldReport, fold_module, fold_weights

__all__ = ["FOLD", "FOLD_GRAPH", "FoldReport", "fold_module", "fold_onnx", "fold_weights"]
