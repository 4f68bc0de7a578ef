// What the machine can do, for `intaglio bench` to compare kernels with: loops of nothing but one instruction, the
// clock, and reading memory. Measured here, because a loop in Python would measure Python.
#pragma once

#include <cstddef>

#include "ort_abi.h"

namespace intaglio {

struct CeilingLoop {
    const char* name;   // the instruction and the width of its registers: vpdpbusd_zmm
    double operations;  // of one iteration; an operation is one multiplication or one addition
    void (*run)(std::size_t iterations);
};

}  // namespace intaglio

extern "C" {

// Operations a second that `threads` threads reach together in the loop of this name, run for about `seconds`; 0 if
// this build or this machine lacks the instruction.
INTAGLIO_EXPORT double intaglio_ceiling(const char* name, int threads, double seconds);

// Cycles a second that `threads` threads have on average, counted on a chain of operations that take one cycle each.
INTAGLIO_EXPORT double intaglio_clock(int threads, double seconds);

// Bytes a second at which `threads` threads read the `count` buffers once, in the fastest of several ways. Each thread
// reads a part of every buffer.
INTAGLIO_EXPORT double intaglio_read_bandwidth(const void* const* buffers, const std::size_t* bytes,
                                               std::size_t count, int threads);
}
