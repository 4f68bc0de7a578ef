#include "fast_panel.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "ceil_div.h"

namespace intaglio {
namespace {

// A product is cut into at least this many parts where it is large enough, so that the threads end together.
constexpr std::size_t kParts = 48, kMinPartRows = 96;

std::size_t round_up(std::size_t a, std::size_t b) { return ceil_div(a, b) * b; }

struct PanelKernel {
    PanelOrder order;
    std::size_t strip_rows, unit;
    bool signed_codes;
    void (*quantize)(const PanelPlan&, std::size_t strip, std::byte* scratch) noexcept;
    MultiplyPanel* multiply;
};

PanelKernel kernel_for(InstructionSet set) {
    constexpr PanelOrder interleaved = PanelOrder::kInterleaved;
    // These have kernels of their own for many rows (fast_neon.h).
    if (set == InstructionSet::kNeon || set == InstructionSet::kNeonI8mm) return {};
#if INTAGLIO_HAS_amx
    if (set == InstructionSet::kAmx)
        return {PanelOrder::kTiles, 32, 64, true, quantize_strip_avx512_vnni, multiply_panel_amx};
#endif
#if INTAGLIO_HAS_avx512_vnni
    if (set >= InstructionSet::kAvx512Vnni)
        return {interleaved, 6, 16, false, quantize_strip_avx512_vnni, multiply_panel_avx512_vnni};
#endif
#if INTAGLIO_HAS_avx_vnni
    if (set == InstructionSet::kAvxVnni)
        return {interleaved, 6, 16, false, quantize_strip_avx_vnni, multiply_panel_avx_vnni};
#endif
#if INTAGLIO_HAS_avx2
    if (set >= InstructionSet::kAvx2) return {interleaved, 4, 16, false, quantize_strip_avx2, multiply_panel_avx2};
#endif
    return {interleaved, 4, 16, false, quantize_strip_portable, multiply_panel_portable};
}

// Which workspaces are in use: as many parts run at the same time as there are threads.
class Workspaces {
   public:
    static constexpr std::size_t kMost = 64;

    explicit Workspaces(std::size_t count) : count_(std::min(count, kMost)) {}
    std::size_t count() const { return count_; }

    std::size_t take() {
        for (;; std::this_thread::yield()) {
            std::uint64_t taken = taken_.load(std::memory_order_relaxed);
            for (std::size_t i = 0; i < count_; ++i)
                if (!(taken >> i & 1) &&
                    taken_.compare_exchange_strong(taken, taken | std::uint64_t{1} << i, std::memory_order_acquire))
                    return i;
        }
    }
    void give_back(std::size_t i) { taken_.fetch_and(~(std::uint64_t{1} << i), std::memory_order_release); }

   private:
    std::size_t count_;
    std::atomic<std::uint64_t> taken_{0};
};

class FastPanel final : public ParallelWork {
   public:
    FastPanel(const GroupedQuantMatMul& product, const PanelKernel& kernel)
        : plan_(product, kernel.order, kernel.strip_rows, kernel.unit, kernel.signed_codes),
          kernel_(kernel),
          columns_(ceil_div(product.N, kPartColumns) * ceil_div(product.M, kFastRows) >= kParts ? kPartColumns
                                                                                               : kFastColumns),
          column_parts_(ceil_div(product.N, columns_)),
          row_parts_(std::clamp<std::size_t>(
              std::max(ceil_div(product.M, kFastRows),
                       std::min(ceil_div(kParts, column_parts_), product.M / kMinPartRows)),
              1, plan_.strips)),
          workspaces_(row_parts_ * column_parts_) {}

    std::size_t phases() const override { return 2; }
    std::size_t parts(std::size_t phase) const override {
        return phase == 0 ? plan_.strips : row_parts_ * column_parts_;
    }
    std::size_t scratch_bytes() const override {
        return round_up(plan_.scratch_bytes(), 64) + workspaces_.count() * kWorkspaceBytes;
    }
    void compute(std::size_t phase, std::size_t part, std::byte* scratch) const noexcept override {
        if (phase == 0) return kernel_.quantize(plan_, part, scratch);
        const std::size_t row_part = part / column_parts_, column = part % column_parts_ * columns_;
        const FastBlock block{plan_.strips * row_part / row_parts_, plan_.strips * (row_part + 1) / row_parts_, column,
                              std::min(column + columns_, plan_.product.N)};
        const std::size_t workspace = workspaces_.take();
        kernel_.multiply(plan_, block, scratch,
                         scratch + round_up(plan_.scratch_bytes(), 64) + workspace * kWorkspaceBytes);
        workspaces_.give_back(workspace);
    }

   private:
    PanelPlan plan_;
    PanelKernel kernel_;
    std::size_t columns_, column_parts_, row_parts_;
    mutable Workspaces workspaces_;
};

}  // namespace

PanelPlan::PanelPlan(const GroupedQuantMatMul& p, PanelOrder given_order, std::size_t most_rows, std::size_t given_unit,
                     bool signed_codes)
    : product(p), order(given_order), strip_rows(most_rows), unit(given_unit) {
    base = !signed_codes ? 0 : p.bits == 8 ? 128 : p.zero_point;
    strips = ceil_div(p.M, strip_rows);
    rows = order == PanelOrder::kTiles ? round_up(p.M, kTileRows) : p.M;
    groups = p.K / p.group_size;
    pieces = ceil_div(p.group_size, kPanelBlock);
    piece = pieces == 1 ? p.group_size : round_up(ceil_div(p.group_size, pieces), 64);
    group_length = round_up(p.group_size, unit);
    segments = groups * pieces;
    block_segments = pieces == 1 ? std::max<std::size_t>(kPanelBlock / group_length, 1) : 1;
    blocks = ceil_div(segments, block_segments);
}

PanelPlan::Segment PanelPlan::segment(std::size_t index) const {
    Segment s{};
    s.group = index / pieces;
    const std::size_t start = index % pieces * piece;
    s.input = s.group * product.group_size + start;
    s.inputs = std::min(piece, product.group_size - start);
    s.starts_group = start == 0;
    s.position = s.group * group_length + start;
    s.length = round_up(s.inputs, unit);
    return s;
}

PanelPlan::Block PanelPlan::block(std::size_t index) const {
    Block b{};
    b.segment = index * block_segments;
    b.segments = std::min(block_segments, segments - b.segment);
    const Segment last = segment(b.segment + b.segments - 1);
    b.position = segment(b.segment).position;
    b.length = last.position + last.length - b.position;
    return b;
}

std::size_t PanelPlan::strip_begin(std::size_t strip) const {
    return order == PanelOrder::kTiles ? std::min(strip * strip_rows, rows) : product.M * strip / strips;
}

std::int8_t* PanelPlan::x_of(std::byte* scratch, const Block& block, std::size_t strip) const {
    return reinterpret_cast<std::int8_t*>(scratch) + block.position * rows + strip_begin(strip) * block.length;
}

PanelPlan::Factors PanelPlan::factors_of(std::byte* scratch, const Block& block, std::size_t strip) const {
    const std::size_t x_bytes = round_up(rows * groups * group_length, 64), all = rows * segments;
    float* scales =
        reinterpret_cast<float*>(scratch + x_bytes) + block.segment * rows + strip_begin(strip) * block.segments;
    return {scales, reinterpret_cast<std::int32_t*>(scales + all), scales + 2 * all};
}

std::size_t PanelPlan::scratch_bytes() const {
    return round_up(rows * groups * group_length, 64) + 3 * sizeof(float) * rows * segments;
}

std::unique_ptr<ParallelWork> make_fast_panel(const GroupedQuantMatMul& product, InstructionSet set) {
    const PanelKernel kernel = kernel_for(set);
    if (!kernel.multiply) return nullptr;
    return std::make_unique<FastPanel>(product, kernel);
}

}  // namespace intaglio
