// Names of what is compiled once for each instruction set: INTAGLIO_FOR_ISA(multiply) is multiply_avx512 in the
// build for avx512. Such files keep all else in a namespace without a name or, in headers that other files share,
// always inline, and use no templates of the standard library: the linker keeps one copy of each function that several
// files have, and must not keep one that needs more than the machine has.
#pragma once

#define INTAGLIO_JOIN_NAMES(name, isa) name##_##isa
#define INTAGLIO_EXPAND_AND_JOIN(name, isa) INTAGLIO_JOIN_NAMES(name, isa)
#define INTAGLIO_FOR_ISA(name) INTAGLIO_EXPAND_AND_JOIN(name, INTAGLIO_ISA)

#if defined(_MSC_VER) && !defined(__clang__)
#define INTAGLIO_INLINE __forceinline
#else
#define INTAGLIO_INLINE __attribute__((always_inline)) inline
#endif

// Loops over registers: an array of them stays in memory unless every index is a constant.
#if defined(__clang__)
#define INTAGLIO_UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define INTAGLIO_UNROLL _Pragma("GCC unroll 16")
#else
#define INTAGLIO_UNROLL
#endif
