"""Devices: one table per kind (CPU, CUDA and ROCm, MPS, XPU, TPU, others), which all other code asks."""
