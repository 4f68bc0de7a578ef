#include "group_norm.h"

#include "group_norm_piece.h"

namespace intaglio {
namespace {

using PieceFunction = PieceStatistics (*)(const float*, std::size_t) noexcept;

PieceFunction piece_function(InstructionSet set) {
    switch (set) {
#if INTAGLIO_HAS_avx512
        case InstructionSet::kAvx512:
        case InstructionSet::kAvx512Vnni:
        case InstructionSet::kAmx: return &piece_statistics_avx512;
#endif
#if INTAGLIO_HAS_avx2
        case InstructionSet::kAvx2:
        case InstructionSet::kAvxVnni: return &piece_statistics_avx2;
#endif
        default: return &piece_statistics_portable;
    }
}

// A phase for the pieces of all groups, and one that puts them together.
class GroupStatisticsWork : public ParallelWork {
   public:
    GroupStatisticsWork(const float* x, std::size_t groups, std::size_t size, float* mean, float* variance,
                        InstructionSet set)
        : x_(x), groups_(groups), size_(size), mean_(mean), variance_(variance), piece_(piece_function(set)) {}

    std::size_t phases() const override { return 2; }
    std::size_t parts(std::size_t phase) const override {
        return phase == 0 ? (groups_ * pieces() + kBatch - 1) / kBatch : 1;
    }
    bool is_small() const override { return groups_ * size_ <= 2 * kBatch * kGroupPiece; }
    std::size_t scratch_bytes() const override { return groups_ * pieces() * sizeof(PieceStatistics); }
    void compute(std::size_t phase, std::size_t part, std::byte* scratch) const noexcept override {
        auto* statistics = reinterpret_cast<PieceStatistics*>(scratch);
        if (phase == 1) return merge(statistics);
        const std::size_t end = (part + 1) * kBatch < groups_ * pieces() ? (part + 1) * kBatch : groups_ * pieces();
        for (std::size_t i = part * kBatch; i < end; ++i)
            statistics[i] = piece_(x_ + i / pieces() * size_ + i % pieces() * kGroupPiece, count_of(i % pieces()));
    }

   private:
    static constexpr std::size_t kBatch = 8;  // pieces in a part

    std::size_t pieces() const { return (size_ + kGroupPiece - 1) / kGroupPiece; }
    std::size_t count_of(std::size_t piece) const {
        return size_ - piece * kGroupPiece < kGroupPiece ? size_ - piece * kGroupPiece : kGroupPiece;
    }
    void merge(const PieceStatistics* statistics) const noexcept {
        for (std::size_t group = 0; group < groups_; ++group) {
            double mean = 0, squares = 0, count = 0;
            for (std::size_t i = 0; i < pieces(); ++i) {
                const PieceStatistics& piece = statistics[group * pieces() + i];
                const double more = static_cast<double>(count_of(i)), distance = piece.mean - mean;
                mean += distance * (more / (count + more));
                squares += piece.squares + distance * distance * (count * more / (count + more));
                count += more;
            }
            mean_[group] = static_cast<float>(mean);
            variance_[group] = static_cast<float>(squares / count);
        }
    }

    const float* x_;
    std::size_t groups_, size_;
    float *mean_, *variance_;
    PieceFunction piece_;
};

constexpr OpSlot kInputs[] = {{ort::ElementType::kFloat}};
constexpr OpSlot kOutputs[] = {{ort::ElementType::kFloat}, {ort::ElementType::kFloat}};

}  // namespace

const OpSignature GroupStatisticsKernel::kSignature = {"GroupStatistics", kInputs, 1, kOutputs, 2};

GroupStatisticsKernel::GroupStatisticsKernel(const Attributes& attributes)
    : instruction_set_(chosen_instruction_set()), groups_(attributes.integer("num_groups")) {
    if (groups_ < 1) throw Mismatch("num_groups is " + text(groups_) + ", expected a positive number");
}

void GroupStatisticsKernel::compute(OpContext& context) const {
    const Tensor x = context.input(0);
    if (x.dims.size() < 2 || x.dims[1] < 1 || x.dims[1] % groups_ != 0)
        throw Mismatch("x has shape " + text(x.dims) + ", expected [batch, channels, ...] with channels in " +
                       text(groups_) + " groups");
    const Dims dims = {x.dims[0], groups_};
    auto* mean = static_cast<float*>(context.output(0, dims).data);
    auto* variance = static_cast<float*>(context.output(1, dims).data);
    const auto groups = static_cast<std::size_t>(x.dims[0] * groups_);
    if (groups == 0) return;
    if (x.size() == 0) throw Mismatch("x has shape " + text(x.dims) + "; a group without values has no mean");
    context.run(GroupStatisticsWork(x.as<float>(), groups, x.size() / groups, mean, variance, instruction_set_));
}

std::vector<SymbolicShape> GroupStatisticsKernel::infer_shapes(const std::vector<SymbolicShape>&) {
    // The number of groups is an attribute, which is not to be had here.
    return {};
}

}  // namespace intaglio
