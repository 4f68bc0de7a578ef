// The op FusedAttention: ONNX's Attention with what usually stands around it. Checks its inputs, appends to the
// key-value cache and attends.
//
// Inputs query, key, value, mask, past_key, past_value, cos, sin; those after value are optional. Outputs
// attended, present_key, present_value. All float32, but for a boolean mask.
// - query, key and value are [B, S, width], or of rank 4: [B, heads, S, head] with the attribute
//   query_heads_first (and so on) and [B, S, heads, head] without. A width may be larger than the heads: the
//   attributes query_offset and so on say where they begin, head_size and value_head_size how wide they are.
// - attended is [B, S, H * E], or [B, H, S, E] with output_heads_first.
// - mask, boolean or added to the scores, is broadcast to [B, H, S, T]. is_causal lets a query see the keys up
//   to its own position, counted after the past.
// - cos, sin [B, S, pairs] rotate query and key as ONNX's RotaryEmbedding does, with its attribute interleaved.
// - past_key, past_value [B, K, P, ...] come before key and value; present_key, present_value hold both. With a
//   mask, its keys less the new ones are how much of the past is filled. Where that is less than P, there must
//   be room for the new ones, and present has the shape of past. Such a mask is not broadcast along the keys. A
//   present that is given past's own memory is appended to in place, which needs a mask.
#pragma once

#include "attention.h"
#include "op.h"

namespace intaglio {

class AttentionKernel {
   public:
    static const OpSignature kSignature;
    explicit AttentionKernel(const Attributes& attributes);
    void compute(OpContext& context) const;
    // Layouts are attributes, which are not to be had here: the shapes stand in the graph.
    static std::vector<SymbolicShape> infer_shapes(const std::vector<SymbolicShape>&) { return {}; }

   private:
    // How one of query, key and value lies.
    struct Layout {
        Layout(const Attributes& attributes, const std::string& name, const char* heads_attribute,
               const char* head_size_attribute);
        std::string name;
        std::int64_t heads, head_size, offset;
        bool heads_first;
    };
    // [B, S, head] of a tensor, and its rows.
    struct Heads {
        std::int64_t batch, tokens, size;
        HeadRows rows;
    };
    static Heads checked_heads(const Layout& layout, const Tensor& tensor);

    InstructionSet instruction_set_;
    Layout query_, key_, value_;
    float scale_;
    bool is_causal_, is_interleaved_, output_heads_first_, is_fast_;
};

}  // namespace intaglio
