// Mean and variance of groups of channels, as group norms take them (https://arxiv.org/abs/1803.08494).
//
// A group is cut into pieces of a size that depends on nothing else; each has its own mean and sum of squared distances
// from it, and the pieces are put together in order (Chan, Golub and LeVeque, 1983) in double precision.
#pragma once

#include <cstddef>

#include "instruction_set.h"
#include "op.h"
#include "parallel_work.h"

namespace intaglio {

// GroupStatistics(x [B, C, ...]) -> mean [B, G], variance [B, G], float32; attribute num_groups. The variance is
// that of the group itself, divided by the number of its values.
class GroupStatisticsKernel {
   public:
    static const OpSignature kSignature;
    explicit GroupStatisticsKernel(const Attributes& attributes);
    void compute(OpContext& context) const;
    static std::vector<SymbolicShape> infer_shapes(const std::vector<SymbolicShape>& inputs);

   private:
    InstructionSet instruction_set_;
    std::int64_t groups_;
};

}  // namespace intaglio
