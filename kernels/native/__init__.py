"""Multi-step decoding on a CPU in C++, on the tensors that torch holds.

`library.py` fills the structures of `abi.h`; `decoder.cpp` runs the steps; `build.py` compiles the library.
"""
