// Names of what is compiled once for each instruction set: INTAGLIO_FOR_ISA(multiply) is multiply_avx512 in the
// build for avx512. Such files keep all else in a namespace without a name and use no templates of the standard
// library: the linker keeps one copy of each, and must not keep one that needs more than the machine has.
#pragma once

#define INTAGLIO_JOIN_NAMES(name, isa) name##_##isa
#define INTAGLIO_EXPAND_AND_JOIN(name, isa) INTAGLIO_JOIN_NAMES(name, isa)
#define INTAGLIO_FOR_ISA(name) INTAGLIO_EXPAND_AND_JOIN(name, INTAGLIO_ISA)
