// check_kernels [SET...]: products of all formats and odd shapes, exact and fast, with each of these instruction
// sets, or with all that there are, beside a plain reference in float64. Says what differs and returns 1.
//
// Every buffer ends where a page ends that nobody may touch, begins at an odd address, and is full of NaN before it
// is written. Parts run in a random order on several threads, and again in theirs on one: both must agree bit for bit.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "fast_matmul.h"

using namespace intaglio;

namespace {

constexpr InstructionSet kSets[] = {InstructionSet::kPortable, InstructionSet::kNeon,    InstructionSet::kNeonI8mm,
                                    InstructionSet::kAvx2,     InstructionSet::kAvxVnni, InstructionSet::kAvx512,
                                    InstructionSet::kAvx512Vnni, InstructionSet::kAmx};

std::mt19937 rng(20);

std::size_t random_below(std::size_t end) { return std::uniform_int_distribution<std::size_t>(0, end - 1)(rng); }
float random_normal() { return std::normal_distribution<float>()(rng); }

class Buffer {
   public:
    // Ends at most `slack` bytes before the page that nobody may touch, which alignment may ask for.
    explicit Buffer(std::size_t size, std::size_t alignment = 1) : size_(size) {
        const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
        const std::size_t pages = (size + alignment + kGuard) / page + 1;
        bytes_ = (pages + 1) * page;
        void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) std::abort();
        begin_ = static_cast<unsigned char*>(memory);
        mprotect(begin_ + pages * page, page, PROT_NONE);
        data_ = begin_ + (pages * page - size) / alignment * alignment;
        std::memset(begin_, 0xff, pages * page);
        end_ = begin_ + pages * page;
    }
    ~Buffer() { munmap(begin_, bytes_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    unsigned char* data() const { return data_; }
    void fill() const { std::memset(data_, 0xff, size_); }
    bool is_whole() const {
        const auto is_full = [](unsigned char byte) { return byte == 0xff; };
        return std::all_of(data_ - kGuard, data_, is_full) && std::all_of(data_ + size_, end_, is_full);
    }

   private:
    static constexpr std::size_t kGuard = 128;
    std::size_t size_, bytes_;
    unsigned char *begin_, *data_, *end_;
};

std::size_t size_of(ScaleType type) { return type == ScaleType::kFloat32 ? 4 : 2; }

// A float that float16 and bfloat16 hold, and its bits in either.
struct Scale {
    float value;
    std::uint32_t bits;
};

// Quarters of an integer below 256, times a power of two: exact in every type.
Scale random_scale(ScaleType type) {
    const float value = static_cast<float>(static_cast<int>(random_below(255)) - 127) * 0x1p-9f;
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (type == ScaleType::kFloat32) return {value, bits};
    if (type == ScaleType::kBfloat16) return {value, bits >> 16};
    if (value == 0) return {value, bits >> 16 & 0x8000u};
    const std::uint32_t half = ((bits >> 16) & 0x8000u) | ((bits >> 23 & 255u) - 112u) << 10 | (bits >> 13 & 1023u);
    return {value, half};
}

struct Case {
    std::size_t M, N, K, group_size;
    int bits;
    ScaleType scale_type;
    bool offset_per_group;
    bool is_odd;  // with zeros, denormals, huge and non-finite values in x

    std::string name() const {
        return "M " + std::to_string(M) + " N " + std::to_string(N) + " K " + std::to_string(K) + " group " +
               std::to_string(group_size) + " bits " + std::to_string(bits) + " scales " +
               std::to_string(static_cast<int>(scale_type)) + (offset_per_group ? " offsets" : "") +
               (is_odd ? " odd values" : "");
    }
};

// A case with its data, and the answers: of each output, and the sum of magnitudes that bounds its error.
struct Problem {
    explicit Problem(const Case& described);
    void solve();

    Case c;
    std::size_t groups;
    Buffer x, codes, scales, offsets, y;
    std::vector<float> x_values, scale_values, offset_values;
    std::vector<int> code_values;
    GroupedQuantMatMul product{};
    std::vector<double> exact, exact_size, fast, fast_size;
};

Problem::Problem(const Case& described)
    : c(described),
      groups(c.K / c.group_size),
      x(c.M * c.K * sizeof(float)),
      codes(c.N * c.K * static_cast<std::size_t>(c.bits) / 8),
      scales(c.N * groups * size_of(c.scale_type)),
      offsets((c.offset_per_group ? c.N * groups : 1) * size_of(c.scale_type)),
      y(c.M * c.N * sizeof(float)) {
    for (std::size_t i = 0; i < c.M * c.K; ++i) x_values.push_back(random_normal());
    if (c.is_odd)
        for (std::size_t m = 0; m < c.M; ++m)
            for (std::size_t g = 0; g < groups; ++g) {
                float* values = x_values.data() + m * c.K + g * c.group_size;
                const std::size_t kind = random_below(8);
                for (std::size_t k = 0; k < c.group_size; ++k) {
                    if (kind == 0) values[k] = 0;
                    if (kind == 1) values[k] *= std::numeric_limits<float>::denorm_min() * 100;
                    if (kind == 2) values[k] *= 1e30f;
                    if (kind == 3) values[k] *= 1e-36f;
                }
                constexpr float infinity = std::numeric_limits<float>::infinity();
                if (m % 3 == 1 && g == m % groups)
                    values[random_below(c.group_size)] = m % 2 ? infinity : std::numeric_limits<float>::quiet_NaN();
            }
    if (c.M > 0) std::memcpy(x.data(), x_values.data(), x_values.size() * sizeof(float));

    const std::size_t code_bytes = c.N * c.K * static_cast<std::size_t>(c.bits) / 8;
    for (std::size_t i = 0; i < code_bytes; ++i) {
        codes.data()[i] = static_cast<unsigned char>(random_below(256));
        for (int bit = 0; bit < 8; bit += c.bits)
            code_values.push_back(codes.data()[i] >> bit & ((1 << c.bits) - 1));
    }
    const auto write = [&](const Buffer& to, std::vector<float>& values, std::size_t count) {
        for (std::size_t i = 0; i < count; ++i) {
            const Scale scale = random_scale(c.scale_type);
            std::memcpy(to.data() + i * size_of(c.scale_type), &scale.bits, size_of(c.scale_type));
            values.push_back(scale.value);
        }
    };
    write(scales, scale_values, c.N * groups);
    if (c.offset_per_group) {
        write(offsets, offset_values, c.N * groups);
    } else {
        std::memset(offsets.data(), 0, size_of(c.scale_type));
        offset_values.assign(c.N * groups, 0.0f);
    }
    product.x = x.data();
    product.codes = codes.data();
    product.scales = scales.data();
    product.offsets = offsets.data();
    product.M = c.M;
    product.N = c.N;
    product.K = c.K;
    product.group_size = c.group_size;
    product.bits = c.bits;
    product.zero_point = static_cast<int>(random_below(std::size_t{1} << c.bits));
    product.scale_type = c.scale_type;
    product.offset_per_group = c.offset_per_group;
    // Through memory: y may begin at any byte.
    product.y = reinterpret_cast<float*>(y.data());
    solve();
}

void Problem::solve() {
    for (std::size_t m = 0; m < c.M; ++m) {
        std::vector<double> activation_scales, rounded(c.K);
        const std::size_t piece = activation_group(c.group_size);
        for (std::size_t g = 0; g < c.K / piece; ++g) {
            const float* values = x_values.data() + m * c.K + g * piece;
            float largest = 0;
            bool is_finite = true;
            for (std::size_t k = 0; k < piece; ++k) {
                is_finite = is_finite && std::isfinite(values[k]);
                largest = std::max(largest, std::fabs(values[k]));
            }
            const bool is_zero = largest < 0x1p-120f;
            const float inverse = is_zero ? 0.0f : 127.0f / largest;
            activation_scales.push_back(!is_finite ? std::numeric_limits<double>::quiet_NaN()
                                        : is_zero  ? 0.0
                                                   : static_cast<double>(largest / 127.0f));
            for (std::size_t k = 0; k < piece; ++k)
                rounded[g * piece + k] = is_finite ? std::nearbyint(values[k] * inverse) : 0.0;
        }
        for (std::size_t n = 0; n < c.N; ++n) {
            double exact_sum = 0, exact_all = 0, fast_sum = 0, fast_all = 0;
            for (std::size_t g = 0; g < c.K / piece; ++g) {
                const std::size_t group = n * groups + g * piece / c.group_size;
                const float scale = scale_values[group], offset = offset_values[group];
                double dot = 0, dot_size = 0, sum = 0;
                for (std::size_t k = g * piece; k < (g + 1) * piece; ++k) {
                    const int code = code_values[n * c.K + k] - product.zero_point;
                    const float scaled = static_cast<float>(code) * scale;
                    const double weight = static_cast<double>(scaled + offset);
                    const double term = static_cast<double>(x_values[m * c.K + k]) * weight;
                    exact_sum += term;
                    exact_all += std::fabs(term);
                    dot += code * rounded[k];
                    dot_size += std::fabs(code * rounded[k]);
                    sum += rounded[k];
                }
                const double of_codes = static_cast<double>(scale) * activation_scales[g],
                             of_sum = static_cast<double>(offset) * activation_scales[g];
                fast_sum += dot * of_codes + sum * of_sum;
                fast_all += dot_size * std::fabs(of_codes) + std::fabs(sum * of_sum);
            }
            exact.push_back(exact_sum);
            exact_size.push_back(exact_all);
            fast.push_back(fast_sum);
            fast_size.push_back(fast_all);
        }
    }
}

// Each phase's parts in a random order on `threads` threads, or in their order on this one.
void run(const ParallelWork& work, unsigned threads) {
    const Buffer scratch(work.scratch_bytes(), 64);
    const auto memory = reinterpret_cast<std::byte*>(scratch.data());
    for (std::size_t phase = 0; phase < work.phases(); ++phase) {
        std::vector<std::size_t> order(work.parts(phase));
        std::iota(order.begin(), order.end(), std::size_t{0});
        if (threads > 1) std::shuffle(order.begin(), order.end(), rng);
        std::atomic<std::size_t> next{0};
        const auto take = [&] {
            for (std::size_t i; (i = next.fetch_add(1)) < order.size();) work.compute(phase, order[i], memory);
        };
        std::vector<std::thread> others;
        for (unsigned i = 1; i < threads; ++i) others.emplace_back(take);
        take();
        for (std::thread& thread : others) thread.join();
    }
    if (!scratch.is_whole()) {
        std::printf("wrote beside the scratch memory\n");
        std::exit(1);
    }
}

std::vector<float> result_of(const Problem& problem, const ParallelWork& work, unsigned threads) {
    problem.y.fill();
    run(work, threads);
    std::vector<float> result(problem.c.M * problem.c.N);
    if (!result.empty()) std::memcpy(result.data(), problem.y.data(), result.size() * sizeof(float));
    return result;
}

struct Tally {
    std::size_t products = 0, wrong = 0;
    double worst = 0;
};

void check(const Problem& problem, const std::string& kernel, const ParallelWork& work,
           const std::vector<double>& expected, const std::vector<double>& sizes, Tally& tally) {
    const std::vector<float> one = result_of(problem, work, 1), many = result_of(problem, work, 3);
    std::string fault;
    if (!one.empty() && std::memcmp(one.data(), many.data(), one.size() * sizeof(float)) != 0)
        fault = "depends on threads";
    for (const Buffer* buffer : {&problem.x, &problem.codes, &problem.scales, &problem.offsets, &problem.y})
        if (!buffer->is_whole()) fault = "wrote beside a buffer";
    for (std::size_t i = 0; i < one.size(); ++i) {
        const double y = static_cast<double>(one[i]);
        bool is_right;
        if (std::isnan(expected[i])) {
            is_right = std::isnan(y);
        } else if (std::isinf(expected[i]) || std::fabs(expected[i]) > 3e38) {
            is_right = !std::isfinite(y) || std::fabs(y) > 3e38;
        } else {
            const double error = std::fabs(y - expected[i]);
            // What float32 cannot hold more finely than denormals is off by that.
            is_right = error <= 1e-6 * sizes[i] + 1e-36 * static_cast<double>(problem.c.K);
            if (sizes[i] > 1e-20) tally.worst = std::max(tally.worst, error / sizes[i]);
        }
        if (!is_right && fault.empty())
            fault = "output " + std::to_string(i) + " is " + std::to_string(y) + ", expected " +
                    std::to_string(expected[i]);
    }
    ++tally.products;
    if (fault.empty()) return;
    ++tally.wrong;
    std::printf("%s, %s: %s\n", kernel.c_str(), problem.c.name().c_str(), fault.c_str());
}

std::vector<Case> cases() {
    std::vector<Case> all;
    struct Weight {
        std::size_t group_size, groups;
    };
    // Groups that share a vector, fill it, span several and end in none; rows that end inside one.
    constexpr Weight weights[] = {{16, 1},  {16, 5},  {16, 37},  {32, 3},  {32, 18}, {48, 5},  {64, 9},
                                  {96, 3},  {128, 1}, {128, 7},  {256, 3}, {320, 2}, {100, 1}, {576, 1},
                                  {1000, 1}, {24, 5}, {4096, 2}};
    constexpr std::size_t columns[] = {1, 3, 4, 5, 17, 70};
    std::size_t i = 0;
    // Each weight with a third of the numbers of rows, and each number with a third of the weights.
    for (int bits : {2, 4, 8})
        for (const Weight& weight : weights)
            for (std::size_t M = i++ % 3; M <= 17; M += 3, i += 7)
                all.push_back({M, weight.group_size > 1000 ? 3 : columns[i % 6], weight.group_size * weight.groups,
                               weight.group_size, bits, static_cast<ScaleType>(i / 2 % 3), i % 2 == 0, i % 5 == 0});
    // Parts of their own size, and rows of a weight far apart.
    for (int bits : {2, 4, 8})
        for (std::size_t M : {std::size_t{1}, std::size_t{3}, std::size_t{33}}) {
            all.push_back({M, 301, 1152, 128, bits, ScaleType::kFloat16, false, false});
            all.push_back({M, 301, 1152, 32, bits, ScaleType::kBfloat16, true, M == 3});
            all.push_back({M, 2, 65536, 65536, bits, ScaleType::kFloat32, true, false});
        }
    return all;
}

}  // namespace

int main(int count, char** arguments) {
    std::vector<InstructionSet> sets;
    for (InstructionSet set : kSets) {
        const bool is_asked = std::find_if(arguments + 1, arguments + count, [&](const char* name) {
                                  return std::strcmp(name, name_of(set)) == 0;
                              }) != arguments + count;
        if (count > 1 ? is_asked : has_instruction_set(set)) sets.push_back(set);
    }
    if (count > 1 && sets.size() != static_cast<std::size_t>(count - 1)) {
        std::printf("unknown instruction set\n");
        return 1;
    }
    std::vector<Tally> exact(sets.size()), fast(sets.size());
    for (InstructionSet set : sets)
        if (!has_instruction_set(set)) {
            std::printf("%s is not to be had here\n", name_of(set));
            return 1;
        }
    for (const Case& described : cases()) {
        const Problem problem(described);
        for (std::size_t i = 0; i < sets.size(); ++i) {
            const std::string name = name_of(sets[i]);
            // The exact kernels of ARM are those of kPortable.
            const bool has_exact = sets[i] != InstructionSet::kNeon && sets[i] != InstructionSet::kNeonI8mm;
            if (described.M > 0 && has_exact)
                check(problem, name + " exact", Partition(problem.product, sets[i]), problem.exact, problem.exact_size,
                      exact[i]);
            if (const auto work = make_fast_matmul(problem.product, sets[i]))
                check(problem, name + " fast", *work, problem.fast, problem.fast_size, fast[i]);
        }
    }
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < sets.size(); ++i) {
        std::printf("%s: exact %zu products, error at most %.2g; fast %zu, at most %.2g\n", name_of(sets[i]),
                    exact[i].products, exact[i].worst, fast[i].products, fast[i].worst);
        wrong += exact[i].wrong + fast[i].wrong;
    }
    return wrong != 0;
}
