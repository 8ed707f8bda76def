"""ONNX graph passes: precision, Q/DQ, BatchNorm folding and naming, on onnx_ir."""
