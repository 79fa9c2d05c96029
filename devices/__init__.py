"""One class per kind of device (CPU, CUDA and ROCm, MPS, XPU, TPU, others), for all that differs between kinds."""
