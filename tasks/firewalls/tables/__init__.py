"""What TensorRT releases that cannot be asked here support, as JSON made by generate.py."""
