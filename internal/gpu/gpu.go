// Package gpu reads facts and faults of NVIDIA GPUs by NVML. A machine without the library has no GPUs, which is said once.
package gpu
