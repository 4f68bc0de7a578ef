// Which instructions a kernel may use: what the build knows, what the machine has, what the user allows.
#pragma once

namespace intaglio {

// In the order of preference. kNeon is ARMv8.2 with dot products, kAvx512 has F, BW, DQ and VL.
enum class InstructionSet { kPortable, kNeon, kNeonI8mm, kAvx2, kAvxVnni, kAvx512, kAvx512Vnni, kAmx };

constexpr InstructionSet kInstructionSets[] = {
    InstructionSet::kPortable, InstructionSet::kNeon,   InstructionSet::kNeonI8mm,   InstructionSet::kAvx2,
    InstructionSet::kAvxVnni,  InstructionSet::kAvx512, InstructionSet::kAvx512Vnni, InstructionSet::kAmx};

// As users write it: portable, neon, neon_i8mm, avx2, avx_vnni, avx512, avx512_vnni, amx.
const char* name_of(InstructionSet set);

// Whether this build and this machine have `set`. Those before it on the same machine are not implied:
// there are processors with kAvx512Vnni and without kAvxVnni.
bool has_instruction_set(InstructionSet set);

// The best there is, or the one that the environment variable INTAGLIO_CPU_ISA names, to compare or to rule one
// out. Throws std::invalid_argument if that one is unknown or missing.
InstructionSet chosen_instruction_set();

// What kernels in float32 are compiled for, and which of it serves `set`.
enum class Float32Level { kPortable, kAvx2, kAvx512 };
Float32Level float32_level(InstructionSet set);

}  // namespace intaglio
