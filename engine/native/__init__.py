"""The CPU backend in C++: kernels for the instruction set at hand, compiled here and called through ctypes."""
