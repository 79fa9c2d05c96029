"""One class for each kind of device (CPU, CUDA and ROCm, MPS, XPU, TPU, others), with everything specific to it."""
