#include "instruction_set.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace intaglio {
namespace {

#if defined(__x86_64__)
[[maybe_unused]] bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("fma");
}

// What compilers of ten years do not all know by name is asked of the processor itself.
[[maybe_unused]] bool has_avx2() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned half_precision = 29;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
           (c >> half_precision & 1);
}

[[maybe_unused]] bool has_in_leaf_7_1(unsigned bit) {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> bit & 1);
}
constexpr unsigned kAvxVnniBit = 4, kAvx512Bfloat16Bit = 5;

// Linux gives tiles to processes that ask; asked once, before any thread uses them.
[[maybe_unused]] bool has_amx() {
#if defined(__linux__)
    static const bool has = [] {
        unsigned a = 0, b = 0, c = 0, d = 0;
        // Every processor with tiles has GFNI, which few rows use.
        constexpr unsigned tile = 24, int8 = 25, bfloat16 = 22, gfni = 8;
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(c >> gfni & 1)) return false;
        if (!(d >> tile & 1) || !(d >> int8 & 1) || !(d >> bfloat16 & 1)) return false;
        constexpr long request_permission = 0x1023, tile_data = 18;
        return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
    }();
    return has && has_avx512() && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") &&
           has_in_leaf_7_1(kAvx512Bfloat16Bit);
#else
    return false;
#endif
}
#endif

}  // namespace

const char* name_of(InstructionSet set) {
    switch (set) {
        case InstructionSet::kPortable: return "portable";
        case InstructionSet::kNeon: return "neon";
        case InstructionSet::kNeonI8mm: return "neon_i8mm";
        case InstructionSet::kAvx2: return "avx2";
        case InstructionSet::kAvxVnni: return "avx_vnni";
        case InstructionSet::kAvx512: return "avx512";
        case InstructionSet::kAvx512Vnni: return "avx512_vnni";
        case InstructionSet::kAmx: return "amx";
    }
    return "unknown";
}

bool has_instruction_set(InstructionSet set) {
#if defined(__x86_64__)
    // Usually done by a constructor of the compiler's own library, which not every toolchain links.
    __builtin_cpu_init();
#endif
    switch (set) {
        case InstructionSet::kPortable: return true;
#if INTAGLIO_HAS_avx2
        case InstructionSet::kAvx2: return has_avx2();
#endif
#if INTAGLIO_HAS_avx_vnni
        case InstructionSet::kAvxVnni: return has_avx2() && has_in_leaf_7_1(kAvxVnniBit);
#endif
#if INTAGLIO_HAS_avx512
        case InstructionSet::kAvx512: return has_avx512();
#endif
#if INTAGLIO_HAS_avx512_vnni
        case InstructionSet::kAvx512Vnni: return has_avx512() && __builtin_cpu_supports("avx512vnni");
#endif
#if INTAGLIO_HAS_amx
        case InstructionSet::kAmx: return has_amx();
#endif
#if INTAGLIO_HAS_neon && defined(__linux__)
        // Bits of the kernel's own: dot products, and products of 8-bit matrices.
        case InstructionSet::kNeon: return getauxval(AT_HWCAP) >> 20 & 1;
#endif
#if INTAGLIO_HAS_neon_i8mm && defined(__linux__)
        case InstructionSet::kNeonI8mm: return (getauxval(AT_HWCAP) >> 20 & 1) && (getauxval(AT_HWCAP2) >> 13 & 1);
#endif
#if INTAGLIO_HAS_neon && defined(__APPLE__)
        // Every Mac with such a processor has them.
        case InstructionSet::kNeon: return true;
#endif
        default: return false;
    }
}

InstructionSet chosen_instruction_set() {
    const char* wanted = std::getenv("INTAGLIO_CPU_ISA");
    InstructionSet best = InstructionSet::kPortable;
    std::string known;
    for (InstructionSet set : kInstructionSets) {
        const bool has = has_instruction_set(set);
        if (wanted && std::strcmp(wanted, name_of(set)) == 0) {
            if (has) return set;
            throw std::invalid_argument("INTAGLIO_CPU_ISA is " + std::string(wanted) +
                                        ", which this machine or this build lacks; unset it");
        }
        if (has) best = set;
        known += (known.empty() ? "" : ", ") + std::string(name_of(set));
    }
    if (wanted && *wanted)
        throw std::invalid_argument("INTAGLIO_CPU_ISA is '" + std::string(wanted) + "', expected one of " + known);
    return best;
}

Float32Level float32_level(InstructionSet set) {
    if (set >= InstructionSet::kAvx512) return Float32Level::kAvx512;
    if (set >= InstructionSet::kAvx2) return Float32Level::kAvx2;
    return Float32Level::kPortable;
}

}  // namespace intaglio
