#include "ceilings.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "instruction_set.h"

namespace intaglio {

// Of those that the build has; see ceilings_loops.cpp.
const CeilingLoop* ceiling_loops_avx2();
const CeilingLoop* ceiling_loops_avx_vnni();
const CeilingLoop* ceiling_loops_avx512();
const CeilingLoop* ceiling_loops_avx512_vnni();
const CeilingLoop* ceiling_loops_amx();
const CeilingLoop* ceiling_loops_neon();
const CeilingLoop* ceiling_loops_neon_i8mm();

namespace {

const CeilingLoop* loops_of(InstructionSet set) {
    switch (set) {
#if INTAGLIO_HAS_avx2
        case InstructionSet::kAvx2: return ceiling_loops_avx2();
#endif
#if INTAGLIO_HAS_avx_vnni
        case InstructionSet::kAvxVnni: return ceiling_loops_avx_vnni();
#endif
#if INTAGLIO_HAS_avx512
        case InstructionSet::kAvx512: return ceiling_loops_avx512();
#endif
#if INTAGLIO_HAS_avx512_vnni
        case InstructionSet::kAvx512Vnni: return ceiling_loops_avx512_vnni();
#endif
#if INTAGLIO_HAS_amx
        case InstructionSet::kAmx: return ceiling_loops_amx();
#endif
#if INTAGLIO_HAS_neon
        case InstructionSet::kNeon: return ceiling_loops_neon();
#endif
#if INTAGLIO_HAS_neon_i8mm
        case InstructionSet::kNeonI8mm: return ceiling_loops_neon_i8mm();
#endif
        default: return nullptr;
    }
}

const CeilingLoop* find_loop(const char* name) {
    for (InstructionSet set : kInstructionSets) {
        const CeilingLoop* loop = has_instruction_set(set) ? loops_of(set) : nullptr;
        for (; loop && loop->name; ++loop)
            if (std::strcmp(loop->name, name) == 0) return loop;
    }
    return nullptr;
}

using Clock = std::chrono::steady_clock;

// Seconds from when all threads are there to when the last one is done with body(thread).
template <typename Body>
double seconds_of(int threads, const Body& body) {
    std::atomic<int> waiting{threads};
    std::vector<Clock::time_point> starts(static_cast<std::size_t>(threads)), ends(starts.size());
    const auto run = [&](std::size_t thread) {
        for (--waiting; waiting > 0;) std::this_thread::yield();
        starts[thread] = Clock::now();
        body(thread);
        ends[thread] = Clock::now();
    };
    std::vector<std::thread> others;
    for (std::size_t thread = 1; thread < starts.size(); ++thread) others.emplace_back(run, thread);
    run(0);
    for (auto& other : others) other.join();
    const auto first = *std::min_element(starts.begin(), starts.end());
    return std::chrono::duration<double>(*std::max_element(ends.begin(), ends.end()) - first).count();
}

// Iterations a second of all threads together, in a run of about `seconds`.
template <typename Run>
double rate_of(const Run& run, int threads, double seconds) {
    std::size_t iterations = 1000;
    // One thread finds out how long an iteration takes, and brings the processor to the clock of this instruction.
    double taken = seconds_of(1, [&](std::size_t) { run(iterations); });
    while (taken < 1e-3) {
        iterations *= 4;
        taken = seconds_of(1, [&](std::size_t) { run(iterations); });
    }
    iterations = std::max<std::size_t>(1, static_cast<std::size_t>(static_cast<double>(iterations) * seconds / taken));
    taken = seconds_of(threads, [&](std::size_t) { run(iterations); });
    return static_cast<double>(iterations) * threads / taken;
}

// Where results go that nobody needs, so that compilers must compute them.
volatile std::uint64_t unread;

// Thirty-two operations, each of which needs the result of the one before. No compiler can join them: what an
// exclusive or does to a sum depends on its carries.
void chain(std::size_t iterations) {
    static volatile std::uint64_t first = 0x9e3779b97f4a7c15u, second = 0x7f4a7c15u;
    const std::uint64_t y = first, z = second;
    std::uint64_t x = y;
    for (std::size_t i = 0; i < iterations; ++i) {
        x = (x ^ y) + z;
        x = (x ^ y) + z;
        x = (x ^ y) + z;
        x = (x ^ y) + z;
        x = (x ^ y) + z;
        x = (x ^ y) + z;
        x = (x ^ y) + z;
        x = (x ^ y) + z;
        x = (x ^ y) + z;
        x = (x ^ y) + z;
        x = (x ^ y) + z;
        x = (x ^ y) + z;
        x = (x ^ y) + z;
        x = (x ^ y) + z;
        x = (x ^ y) + z;
        x = (x ^ y) + z;
    }
    unread = x;
}

constexpr std::size_t kLine = 64;

void prefetch([[maybe_unused]] const unsigned char* address) {
#if defined(__GNUC__)
    __builtin_prefetch(address);
#endif
}

// Reads whole lines as `streams` rows side by side, each `ahead` bytes ahead of where it is used. Processors look
// ahead themselves, but not past a page, and each row has its own.
template <std::size_t streams>
void read(const unsigned char* data, std::size_t bytes, std::size_t ahead) {
    const std::size_t row = bytes / streams / kLine * kLine;
    std::uint64_t sums[kLine / sizeof(std::uint64_t)] = {};
    for (std::size_t at = 0; at < row; at += kLine)
        for (std::size_t stream = 0; stream < streams; ++stream) {
            std::uint64_t line[kLine / sizeof(std::uint64_t)];
            prefetch(data + stream * row + at + ahead);
            std::memcpy(line, data + stream * row + at, kLine);
            for (std::size_t i = 0; i < kLine / sizeof(std::uint64_t); ++i) sums[i] += line[i];
        }
    std::uint64_t sum = 0;
    for (const std::uint64_t part : sums) sum += part;
    unread = sum;
}

}  // namespace
}  // namespace intaglio

extern "C" {

double intaglio_ceiling(const char* name, int threads, double seconds) {
    const intaglio::CeilingLoop* loop = intaglio::find_loop(name);
    if (!loop || threads < 1) return 0;
    return loop->operations * intaglio::rate_of(loop->run, threads, seconds);
}

double intaglio_clock(int threads, double seconds) {
    if (threads < 1) return 0;
    constexpr double operations = 32;
    return operations * intaglio::rate_of(intaglio::chain, threads, seconds) / threads;
}

double intaglio_read_bandwidth(const void* const* buffers, const std::size_t* bytes, std::size_t count, int threads) {
    if (threads < 1) return 0;
    const auto rate = [&](void (*read)(const unsigned char*, std::size_t, std::size_t), std::size_t ahead) {
        double total = 0;
        const double seconds = intaglio::seconds_of(threads, [&](std::size_t thread) {
            for (std::size_t i = 0; i < count; ++i) {
                const std::size_t part = bytes[i] / static_cast<std::size_t>(threads);
                read(static_cast<const unsigned char*>(buffers[i]) + part * thread, part, ahead);
            }
        });
        for (std::size_t i = 0; i < count; ++i) total += static_cast<double>(bytes[i]);
        return total / seconds;
    };
    return std::max({rate(intaglio::read<1>, 2048), rate(intaglio::read<4>, 1024), rate(intaglio::read<8>, 512)});
}
}
