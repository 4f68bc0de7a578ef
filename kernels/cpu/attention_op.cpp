#include "attention_op.h"

#include <cmath>
#include <new>

#include "attention_cache.h"
#include "attention_work.h"

namespace intaglio {
namespace {

using ort::ElementType;

constexpr OpSlot kInputs[] = {
    {ElementType::kFloat},                     {ElementType::kFloat},
    {ElementType::kFloat},                     {ElementType::kOpen, OpSlot::kOptional},
    {ElementType::kFloat, OpSlot::kOptional},  {ElementType::kFloat, OpSlot::kOptional},
    {ElementType::kFloat, OpSlot::kOptional},  {ElementType::kFloat, OpSlot::kOptional}};
constexpr OpSlot kOutputs[] = {
    {ElementType::kFloat}, {ElementType::kFloat, OpSlot::kOptional}, {ElementType::kFloat, OpSlot::kOptional}};
enum Input : std::size_t { kQuery, kKey, kValue, kMask, kPastKey, kPastValue, kCos, kSin, kInputCount };

[[noreturn]] void mismatch(const std::string& message) { throw Mismatch(message); }

std::size_t unsigned_of(std::int64_t value) { return static_cast<std::size_t>(value); }

Tensor input_if_given(const OpContext& context, std::size_t index) {
    return index < context.input_count() ? context.input(index) : Tensor{};
}

// Strides of a mask that is broadcast to [B, H, S, T].
AttentionMask checked_mask(const Tensor& mask, const Dims& scores) {
    AttentionMask result;
    if (!mask) return result;
    if (mask.type == ElementType::kBool) result.visible = mask.as<std::uint8_t>();
    else if (mask.type == ElementType::kFloat) result.bias = mask.as<float>();
    else mismatch("mask is " + text(mask.type) + ", expected bool or float32");
    std::size_t* const strides[] = {&result.batch, &result.head, &result.query, &result.key};
    const std::size_t rank = mask.dims.size();
    bool fits = rank <= scores.size();
    std::size_t stride = 1;
    for (std::size_t i = 0; fits && i < rank; ++i) {
        const std::int64_t dim = mask.dims[rank - 1 - i];
        const std::size_t axis = scores.size() - 1 - i;
        fits = dim == 1 || dim == scores[axis];
        *strides[axis] = dim == 1 ? 0 : stride;
        stride *= unsigned_of(dim);
    }
    if (!fits) mismatch("mask has shape " + text(mask.dims) + ", expected one that is broadcast to " + text(scores));
    return result;
}

Rotary checked_rotary(const Tensor& cos, const Tensor& sin, std::int64_t batch, std::int64_t tokens,
                      std::int64_t head_size, bool is_interleaved) {
    Rotary rotary;
    if (!cos && !sin) return rotary;
    if (!cos || !sin) mismatch("one of cos and sin is left out; give both or neither");
    const bool fits = cos.dims == sin.dims && cos.dims.size() == 3 && (cos.dims[0] == batch || cos.dims[0] == 1) &&
                      cos.dims[1] == tokens && 2 * cos.dims[2] <= head_size;
    if (!fits)
        mismatch("cos and sin have shapes " + text(cos.dims) + " and " + text(sin.dims) + ", expected " +
                 text(Dims{batch, tokens, head_size / 2}) + " or less in the last dim");
    rotary.cos = cos.as<float>();
    rotary.sin = sin.as<float>();
    rotary.pairs = unsigned_of(cos.dims[2]);
    rotary.row = rotary.pairs;
    rotary.batch = cos.dims[0] == 1 ? 0 : unsigned_of(tokens) * rotary.row;
    rotary.is_interleaved = is_interleaved;
    return rotary;
}

}  // namespace

const OpSignature AttentionKernel::kSignature = {"FusedAttention", kInputs, kInputCount, kOutputs, 3};

AttentionKernel::Layout::Layout(const Attributes& attributes, const std::string& input, const char* heads_attribute,
                                const char* head_size_attribute)
    : name(input),
      heads(attributes.integer(heads_attribute)),
      head_size(attributes.integer(head_size_attribute, 0)),
      offset(attributes.integer((input + "_offset").c_str(), 0)),
      heads_first(attributes.integer((input + "_heads_first").c_str(), 0) != 0) {
    if (heads < 1) mismatch(std::string(heads_attribute) + " is " + text(heads) + ", expected at least 1");
    if (head_size < 0 || offset < 0) mismatch("sizes and offsets of heads must not be negative");
}

AttentionKernel::AttentionKernel(const Attributes& attributes)
    : instruction_set_(chosen_instruction_set()),
      query_(attributes, "query", "q_num_heads", "head_size"),
      key_(attributes, "key", "kv_num_heads", "head_size"),
      value_(attributes, "value", "kv_num_heads", "value_head_size"),
      scale_(attributes.real("scale", 0)),
      is_causal_(attributes.integer("is_causal", 0) != 0),
      is_interleaved_(attributes.integer("interleaved", 0) != 0),
      output_heads_first_(attributes.integer("output_heads_first", 0) != 0),
      is_fast_(attributes.integer("fast", 0) != 0) {
    if (query_.heads % key_.heads != 0)
        mismatch("q_num_heads " + text(query_.heads) + " is not a multiple of kv_num_heads " + text(key_.heads));
}

AttentionKernel::Heads AttentionKernel::checked_heads(const Layout& layout, const Tensor& tensor) {
    if (!tensor) mismatch(layout.name + " is left out");
    const Dims& dims = tensor.dims;
    const auto fail = [&](const std::string& expected) {
        mismatch(layout.name + " has shape " + text(dims) + ", expected " + expected);
    };
    Heads heads{};
    heads.batch = dims.empty() ? 0 : dims[0];
    if (dims.size() == 3) {
        heads.tokens = dims[1];
        heads.size = layout.head_size ? layout.head_size : dims[2] / layout.heads;
        const std::int64_t end = layout.offset + layout.heads * heads.size;
        if (heads.size < 1 || end > dims[2] || (!layout.head_size && end != dims[2]))
            fail("[batch, tokens, " + text(layout.heads) + " heads]");
        heads.rows.row = unsigned_of(dims[2]);
        heads.rows.head = unsigned_of(heads.size);
        heads.rows.batch = unsigned_of(dims[1]) * heads.rows.row;
    } else if (dims.size() == 4) {
        const std::size_t heads_at = layout.heads_first ? 1 : 2;
        heads.tokens = dims[3 - heads_at];
        heads.size = dims[3];
        if (dims[heads_at] != layout.heads || heads.size < 1)
            fail(std::string(layout.heads_first ? "[batch, heads, tokens, size]" : "[batch, tokens, heads, size]") +
                 " with " + text(layout.heads) + " heads");
        heads.rows.row = unsigned_of(layout.heads_first ? heads.size : layout.heads * heads.size);
        heads.rows.head = unsigned_of(layout.heads_first ? heads.tokens * heads.size : heads.size);
        heads.rows.batch = unsigned_of(layout.heads * heads.tokens * heads.size);
    } else {
        fail("three or four dims");
    }
    heads.rows.data = tensor.as<float>() + layout.offset;
    return heads;
}

void AttentionKernel::compute(OpContext& context) const {
    const Heads query = checked_heads(query_, context.input(kQuery));
    const Heads key = checked_heads(key_, context.input(kKey));
    const Heads value = checked_heads(value_, context.input(kValue));
    const Tensor mask = input_if_given(context, kMask);
    const Tensor past_key = input_if_given(context, kPastKey), past_value = input_if_given(context, kPastValue);
    if (key.batch != query.batch || value.batch != query.batch || key.tokens != value.tokens ||
        key.size != query.size)
        mismatch("query, key and value have " + text(Dims{query.batch, key.batch, value.batch}) + " batches, " +
                 text(Dims{query.tokens, key.tokens, value.tokens}) + " tokens and heads of " +
                 text(Dims{query.size, key.size, value.size}) + ", which do not fit each other");

    Attention a{};
    a.B = unsigned_of(query.batch);
    a.H = unsigned_of(query_.heads);
    a.K = unsigned_of(key_.heads);
    a.S = unsigned_of(query.tokens);
    a.D = unsigned_of(query.size);
    a.E = unsigned_of(value.size);
    a.query = query.rows;
    a.key = key.rows;
    a.value = value.rows;
    a.scale = scale_ != 0 ? scale_ : 1 / std::sqrt(static_cast<float>(query.size));
    const Tensor cos = input_if_given(context, kCos), sin = input_if_given(context, kSin);
    a.query_rotary = checked_rotary(cos, sin, query.batch, query.tokens, query.size, is_interleaved_);
    if (a.query_rotary.cos && key.tokens != query.tokens)
        mismatch("there are " + text(query.tokens) + " queries and " + text(key.tokens) +
                 " keys, which cannot share one rotary embedding");
    a.key_rotary = a.query_rotary;

    const bool mask_has_keys = mask && !mask.dims.empty();
    std::int64_t filled = 0;
    if (past_key || past_value) {
        const std::int64_t room = past_key ? past_key.dims.size() == 4 ? past_key.dims[2] : -1 : -1;
        if (past_key.dims != Dims{query.batch, key_.heads, room, key.size} ||
            past_value.dims != Dims{query.batch, key_.heads, room, value.size})
            mismatch("past_key and past_value have shapes " + text(past_key.dims) + " and " + text(past_value.dims) +
                     ", expected [batch, heads, tokens, size] with " + text(key_.heads) + " heads");
        filled = mask_has_keys ? mask.dims.back() - key.tokens : room;
        if (filled < 0 || filled > room || (filled < room && filled + key.tokens > room))
            mismatch("the mask is for " + text(filled + key.tokens) + " keys, but there are " + text(key.tokens) +
                     " new ones, and the past has room for " + text(room));
    }
    const std::int64_t total = filled + key.tokens;
    a.T = unsigned_of(total);
    a.causal_offset = unsigned_of(filled);
    a.is_causal = is_causal_;
    a.mask = checked_mask(mask, {query.batch, query_.heads, query.tokens, total});

    const std::size_t width = a.H * a.E;
    const auto size = [](std::size_t n) { return static_cast<std::int64_t>(n); };
    a.output_batch = a.S * width;
    a.output_head = output_heads_first_ ? a.S * a.E : a.E;
    a.output_row = output_heads_first_ ? a.E : width;
    a.output = static_cast<float*>(
        context.output(0, output_heads_first_ ? Dims{query.batch, query_.heads, query.tokens, value.size}
                                              : Dims{query.batch, query.tokens, size(width)})
            .data);
    if (context.output_count() > 1) {
        const std::int64_t room = past_key && filled < past_key.dims[2] ? past_key.dims[2] : total;
        const auto part_of = [&](std::size_t output, const Tensor& past, const Heads& fresh) {
            CachePart part{};
            part.D = unsigned_of(fresh.size);
            part.fresh = fresh.rows;
            part.past = past.as<float>();
            part.past_room = past ? unsigned_of(past.dims[2]) : 0;
            part.room = unsigned_of(room);
            part.present = static_cast<float*>(
                context.output(output, {query.batch, key_.heads, room, fresh.size}).data);
            if (!part.present) mismatch("present_key and present_value must both be used, or neither");
            const bool is_in_place = part.past_room > 0 && part.present == part.past;
            if (is_in_place && !mask_has_keys)
                mismatch("the past is appended to in place, which needs a mask with as many keys as will be filled");
            // A broadcast mask would be taken for one that drops the past.
            if (!is_in_place && part.past_room > 0 && mask_has_keys && mask.dims.back() == 1 &&
                fresh.tokens == 1)
                mismatch("the mask has shape " + text(mask.dims) + ", expected one with all " +
                         text(past.dims[2] + fresh.tokens) + " keys in its last dim, which is not broadcast");
            return part;
        };
        CachePart keys = part_of(1, past_key, key), values = part_of(2, past_value, value);
        keys.rotary = a.key_rotary;
        context.run(CacheAppend(keys, values, a.B, a.K, unsigned_of(filled), unsigned_of(key.tokens)));
        a.key_rotary = Rotary{};
        a.key = {keys.present, a.K * keys.room * a.D, keys.room * a.D, a.D};
        a.value = {values.present, a.K * values.room * a.E, values.room * a.E, a.E};
    } else if (past_key) {
        mismatch("present_key and present_value are left out, where keys and values would be joined with the past");
    }
    if (a.B * a.S == 0) return;
    const AttentionWork work(a, instruction_set_, is_fast_);
    context.run(work);
    if (work.ran_out_of_memory()) throw std::bad_alloc();
}

}  // namespace intaglio
