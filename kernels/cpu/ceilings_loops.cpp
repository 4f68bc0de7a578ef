// The loops of one instruction set. Every accumulator is a variable with a name of its own: compilers keep arrays of
// them in memory. There are more than latency times ports, so that no instruction waits for another one's result.
#include "ceilings.h"
#include "for_isa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif
#if defined(__AMX_INT8__)
#include "amx_tiles.h"
#endif

namespace intaglio {

const CeilingLoop* INTAGLIO_FOR_ISA(ceiling_loops)();

namespace {

#define INTAGLIO_TIMES_8(STEP, first) \
    STEP(first##0) STEP(first##1) STEP(first##2) STEP(first##3) STEP(first##4) STEP(first##5) STEP(first##6) \
    STEP(first##7)
#define INTAGLIO_TIMES_12(STEP) INTAGLIO_TIMES_8(STEP, a) STEP(b0) STEP(b1) STEP(b2) STEP(b3)
#define INTAGLIO_TIMES_24(STEP) INTAGLIO_TIMES_8(STEP, a) INTAGLIO_TIMES_8(STEP, b) INTAGLIO_TIMES_8(STEP, c)

// An instruction in text, which no compiler can fold, move or leave out.
#define INTAGLIO_MAKE(a) auto a = p;
#define INTAGLIO_STEP_X86(a) asm volatile(INTAGLIO_INSTRUCTION " %1, %2, %0" : INTAGLIO_REGISTER(a) : INTAGLIO_SOURCES);
#define INTAGLIO_STEP_ARM(a) asm volatile(INTAGLIO_INSTRUCTION : "+w"(a) : "w"(p), "w"(q));

#if defined(__AMX_INT8__)

void start_tiles() {
    load_tiles();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
}

void amx_int8(std::size_t iterations) {
    start_tiles();
    for (std::size_t i = 0; i < iterations; ++i) {
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
    }
    release_tiles();
}

void amx_bfloat16(std::size_t iterations) {
    start_tiles();
    for (std::size_t i = 0; i < iterations; ++i) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    release_tiles();
}

constexpr CeilingLoop kLoops[] = {{"amx_int8", 4 * 2 * 16 * 16 * 64.0, amx_int8},
                                  {"amx_bfloat16", 4 * 2 * 16 * 16 * 32.0, amx_bfloat16},
                                  {nullptr, 0, nullptr}};

#elif defined(__AVX512VNNI__)

#define INTAGLIO_INSTRUCTION "vpdpbusd"
#define INTAGLIO_REGISTER(a) "+v"(a)
#define INTAGLIO_SOURCES "v"(p), "v"(q)
void vpdpbusd_zmm(std::size_t iterations) {
    const __m512i p = _mm512_set1_epi8(1), q = _mm512_set1_epi8(2);
    INTAGLIO_TIMES_24(INTAGLIO_MAKE)
    for (std::size_t i = 0; i < iterations; ++i) {
        INTAGLIO_TIMES_24(INTAGLIO_STEP_X86)
    }
}

constexpr CeilingLoop kLoops[] = {{"vpdpbusd_zmm", 24 * 2 * 64.0, vpdpbusd_zmm}, {nullptr, 0, nullptr}};

#elif defined(__AVX512F__)

#define INTAGLIO_INSTRUCTION "vfmadd231ps"
#define INTAGLIO_REGISTER(a) "+v"(a)
#define INTAGLIO_SOURCES "v"(p), "v"(q)
void float32_fma_zmm(std::size_t iterations) {
    const __m512 p = _mm512_set1_ps(1), q = _mm512_set1_ps(0.5f);
    INTAGLIO_TIMES_24(INTAGLIO_MAKE)
    for (std::size_t i = 0; i < iterations; ++i) {
        INTAGLIO_TIMES_24(INTAGLIO_STEP_X86)
    }
}

constexpr CeilingLoop kLoops[] = {{"float32_fma_zmm", 24 * 2 * 16.0, float32_fma_zmm}, {nullptr, 0, nullptr}};

#elif defined(__AVXVNNI__)

#define INTAGLIO_INSTRUCTION "%{vex%} vpdpbusd"
#define INTAGLIO_REGISTER(a) "+x"(a)
#define INTAGLIO_SOURCES "x"(p), "x"(q)
void vpdpbusd_ymm(std::size_t iterations) {
    const __m256i p = _mm256_set1_epi8(1), q = _mm256_set1_epi8(2);
    INTAGLIO_TIMES_12(INTAGLIO_MAKE)
    for (std::size_t i = 0; i < iterations; ++i) {
        INTAGLIO_TIMES_12(INTAGLIO_STEP_X86)
    }
}

constexpr CeilingLoop kLoops[] = {{"vpdpbusd_ymm", 12 * 2 * 32.0, vpdpbusd_ymm}, {nullptr, 0, nullptr}};

#elif defined(__FMA__)

#define INTAGLIO_INSTRUCTION "vfmadd231ps"
#define INTAGLIO_REGISTER(a) "+x"(a)
#define INTAGLIO_SOURCES "x"(p), "x"(q)
void float32_fma_ymm(std::size_t iterations) {
    const __m256 p = _mm256_set1_ps(1), q = _mm256_set1_ps(0.5f);
    INTAGLIO_TIMES_12(INTAGLIO_MAKE)
    for (std::size_t i = 0; i < iterations; ++i) {
        INTAGLIO_TIMES_12(INTAGLIO_STEP_X86)
    }
}

constexpr CeilingLoop kLoops[] = {{"float32_fma_ymm", 12 * 2 * 8.0, float32_fma_ymm}, {nullptr, 0, nullptr}};

#elif defined(__ARM_FEATURE_MATMUL_INT8)

#define INTAGLIO_INSTRUCTION "smmla %0.4s, %1.16b, %2.16b"
void smmla(std::size_t iterations) {
    const int8x16_t p = vdupq_n_s8(1), q = vdupq_n_s8(2);
    INTAGLIO_TIMES_24(INTAGLIO_MAKE)
    for (std::size_t i = 0; i < iterations; ++i) {
        INTAGLIO_TIMES_24(INTAGLIO_STEP_ARM)
    }
}

constexpr CeilingLoop kLoops[] = {{"smmla", 24 * 2 * 32.0, smmla}, {nullptr, 0, nullptr}};

#elif defined(__ARM_FEATURE_DOTPROD)

#define INTAGLIO_INSTRUCTION "sdot %0.4s, %1.16b, %2.16b"
void sdot(std::size_t iterations) {
    const int8x16_t p = vdupq_n_s8(1), q = vdupq_n_s8(2);
    INTAGLIO_TIMES_24(INTAGLIO_MAKE)
    for (std::size_t i = 0; i < iterations; ++i) {
        INTAGLIO_TIMES_24(INTAGLIO_STEP_ARM)
    }
}
#undef INTAGLIO_INSTRUCTION
#define INTAGLIO_INSTRUCTION "fmla %0.4s, %1.4s, %2.4s"
void float32_fma_neon(std::size_t iterations) {
    const float32x4_t p = vdupq_n_f32(1), q = vdupq_n_f32(0.5f);
    INTAGLIO_TIMES_24(INTAGLIO_MAKE)
    for (std::size_t i = 0; i < iterations; ++i) {
        INTAGLIO_TIMES_24(INTAGLIO_STEP_ARM)
    }
}

constexpr CeilingLoop kLoops[] = {
    {"sdot", 24 * 2 * 16.0, sdot}, {"float32_fma_neon", 24 * 2 * 4.0, float32_fma_neon}, {nullptr, 0, nullptr}};

#else

constexpr CeilingLoop kLoops[] = {{nullptr, 0, nullptr}};

#endif

}  // namespace

// Up to one without a name.
const CeilingLoop* INTAGLIO_FOR_ISA(ceiling_loops)() { return kLoops; }

}  // namespace intaglio
