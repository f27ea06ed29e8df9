"""The step's operations where the device is a CPU and the dtype bfloat16: kernels of our own."""
