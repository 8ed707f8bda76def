"""Backends that turn one ONNX file into an engine, behind one interface."""
