#include "op.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace intaglio {
namespace {

// Grown when more is asked for and kept until the thread ends: fresh pages cost more than most products.
class Scratch {
   public:
    std::byte* at_least(std::size_t bytes) {
        if (bytes > size_) {
            block_.reset();
            size_ = 0;
            block_.reset(static_cast<std::byte*>(::operator new(bytes, kAlignment)));
            size_ = bytes;
        }
        return block_.get();
    }

   private:
    static constexpr std::align_val_t kAlignment{64};
    struct Delete {
        void operator()(std::byte* block) const { ::operator delete(block, kAlignment); }
    };
    std::unique_ptr<std::byte, Delete> block_;
    std::size_t size_ = 0;
};

template <typename Release>
auto owned(ort::TensorInfo* info, Release release) {
    return std::unique_ptr<ort::TensorInfo, Release>(info, release);
}

}  // namespace

void check(ort::Status* status) {
    if (status) throw OrtFailure{status};
}

std::string text(std::int64_t value) { return std::to_string(value); }

std::string text(const Dims& dims) {
    std::string result = "[";
    for (std::size_t i = 0; i < dims.size(); ++i) result += (i ? ", " : "") + text(dims[i]);
    return result + "]";
}

std::string text(ort::ElementType type) {
    switch (type) {
        case ort::ElementType::kFloat: return "float32";
        case ort::ElementType::kUint8: return "uint8";
        case ort::ElementType::kInt64: return "int64";
        case ort::ElementType::kBool: return "bool";
        case ort::ElementType::kFloat16: return "float16";
        case ort::ElementType::kBfloat16: return "bfloat16";
        default: return "ONNX element type " + text(static_cast<std::int64_t>(type));
    }
}

ort::Status* status_of_exception(const ort::Api& api, const char* op) noexcept {
    const auto status = [&](ort::ErrorCode code, const char* what) noexcept -> ort::Status* {
        try {
            return api.create_status(code, (std::string(op) + ": " + what).c_str());
        } catch (...) {
            return api.create_status(code, what);
        }
    };
    try {
        throw;
    } catch (const OrtFailure& failure) {
        return failure.status;
    } catch (const Mismatch& mismatch) {
        return status(ort::ErrorCode::kInvalidArgument, mismatch.what());
    } catch (const std::invalid_argument& error) {
        return status(ort::ErrorCode::kInvalidArgument, error.what());
    } catch (const std::exception& error) {
        return status(ort::ErrorCode::kFail, error.what());
    } catch (...) {
        return status(ort::ErrorCode::kFail, "unknown error");
    }
}

std::size_t Tensor::size() const {
    std::size_t count = 1;
    for (std::int64_t dim : dims) count *= static_cast<std::size_t>(dim);
    return count;
}

std::int64_t Attributes::integer(const char* name) const {
    std::int64_t value = 0;
    if (ort::Status* status = api_.info_int64(info_, name, &value)) {
        const std::string reason = api_.error_message(status);
        api_.release_status(status);
        throw Mismatch("the integer attribute " + std::string(name) + " is needed and could not be read: " + reason);
    }
    return value;
}

std::int64_t Attributes::integer(const char* name, std::int64_t missing) const {
    std::int64_t value = 0;
    ort::Status* status = api_.info_int64(info_, name, &value);
    if (!status) return value;
    api_.release_status(status);
    return missing;
}

float Attributes::real(const char* name, float missing) const {
    float value = 0;
    ort::Status* status = api_.info_float(info_, name, &value);
    if (!status) return value;
    api_.release_status(status);
    return missing;
}

bool Attributes::is_constant(std::size_t input) const {
    int constant = 0;
    const ort::Value* value = nullptr;
    check(api_.info_constant_input(info_, input, &constant, &value));
    return constant != 0;
}

std::size_t OpContext::input_count() const {
    std::size_t count = 0;
    check(api_.input_count(context_, &count));
    return count;
}

std::size_t OpContext::output_count() const {
    std::size_t count = 0;
    check(api_.output_count(context_, &count));
    return count;
}

namespace {

Tensor tensor_of(const ort::Api& api, const ort::Value* value) {
    Tensor tensor;
    if (!value) return tensor;
    // There is no reading twin of this call in the API version that is asked for.
    check(api.tensor_data(const_cast<ort::Value*>(value), &tensor.data));
    ort::TensorInfo* raw = nullptr;
    check(api.tensor_info(value, &raw));
    const auto info = owned(raw, [&api](ort::TensorInfo* i) { api.release_tensor_info(i); });
    std::size_t rank = 0;
    check(api.rank(raw, &rank));
    tensor.dims.resize(rank);
    check(api.dims(raw, tensor.dims.data(), rank));
    check(api.element_type(raw, &tensor.type));
    // An empty tensor may have no memory, and is not one that was left out.
    static std::byte nothing;
    if (!tensor.data) tensor.data = &nothing;
    return tensor;
}

}  // namespace

std::size_t Attributes::input_count() const {
    std::size_t count = 0;
    check(api_.info_input_count(info_, &count));
    return count;
}

Tensor Attributes::constant_input(std::size_t index) const {
    int is_constant = 0;
    const ort::Value* value = nullptr;
    check(api_.info_constant_input(info_, index, &is_constant, &value));
    return is_constant ? tensor_of(api_, value) : Tensor{};
}

Tensor OpContext::input(std::size_t index) const {
    const ort::Value* value = nullptr;
    check(api_.input(context_, index, &value));
    return tensor_of(api_, value);
}

Tensor OpContext::output(std::size_t index, const Dims& dims) {
    ort::Value* value = nullptr;
    check(api_.output(context_, index, dims.data(), dims.size(), &value));
    Tensor tensor;
    tensor.dims = dims;
    if (value) check(api_.tensor_data(value, &tensor.data));
    return tensor;
}

void OpContext::run(const ParallelWork& work) {
    static thread_local Scratch scratch;
    struct Job {
        const ParallelWork& work;
        std::size_t phase;
        std::byte* memory;
    } job{work, 0, scratch.at_least(work.scratch_bytes())};
    const auto body = [](void* data, std::size_t part) {
        const Job& j = *static_cast<Job*>(data);
        j.work.compute(j.phase, part, j.memory);
    };
    for (job.phase = 0; job.phase < work.phases(); ++job.phase) {
        const std::size_t parts = work.parts(job.phase);
        if (work.is_small() || parts == 1) {
            for (std::size_t part = 0; part < parts; ++part) body(&job, part);
        } else if (parts > 0) {
            // Each part by itself: given 0, onnxruntime would hand every thread its share once and for all, and wait for
            // the one that begins late or is disturbed.
            check(api_.parallel_for(context_, body, parts, parts, &job));
        }
    }
}

void SymbolicShape::copy_dim(std::size_t to, const SymbolicShape& other, std::size_t from) {
    dims[to] = other.dims[from];
    names[to] = other.names[from];
}

namespace {

SymbolicShape read_shape(const ort::Api& api, const ort::ShapeInferContext* context, std::size_t index) {
    SymbolicShape shape;
    ort::TensorInfo* info = nullptr;
    // One that was left out has no shape, and asking for it is an error.
    if (ort::Status* status = api.shape_input(context, index, &info)) {
        api.release_status(status);
        return shape;
    }
    std::size_t rank = 0;
    if (!info) return shape;
    check(api.rank(info, &rank));
    if (rank == 0) return shape;
    std::vector<const char*> names(rank, "");
    shape.dims.resize(rank);
    check(api.dims(info, shape.dims.data(), rank));
    check(api.symbolic_dims(info, names.data(), rank));
    for (const char* name : names) shape.names.emplace_back(name ? name : "");
    shape.is_known = true;
    return shape;
}

void write_shape(const ort::Api& api, ort::ShapeInferContext* context, std::size_t index, const SymbolicShape& shape) {
    if (!shape.is_known) return;
    std::vector<const char*> names;
    for (std::size_t i = 0; i < shape.rank(); ++i) {
        // Neither a size nor a name: onnxruntime would take -1 for a size.
        if (shape.dims[i] < 0 && shape.names[i].empty()) return;
        names.push_back(shape.names[i].c_str());
    }
    ort::TensorInfo* raw = nullptr;
    check(api.create_tensor_info(&raw));
    const auto info = owned(raw, [&api](ort::TensorInfo* i) { api.release_tensor_info(i); });
    check(api.set_dims(raw, shape.dims.data(), shape.rank()));
    check(api.set_symbolic_dims(raw, names.data(), shape.rank()));
    check(api.shape_set_output(context, index, raw));
}

const RegisteredOp& as_op(const ort::CustomOp* op) { return *static_cast<const RegisteredOp*>(op); }

const OpSlot& slot_at(const OpSlot* slots, std::size_t count, std::size_t index) {
    return slots[std::min(index, count - 1)];  // those after a variadic one are like it
}

}  // namespace

RegisteredOp::RegisteredOp(const ort::ApiTable* table, const OpSignature& described)
    : ort::CustomOp{}, api(table), signature(described), infer(nullptr) {
    version = ort::kApiVersion;
    name = [](const ort::CustomOp* self) { return as_op(self).signature.name; };
    execution_provider = [](const ort::CustomOp*) -> const char* { return nullptr; };
    input_count = [](const ort::CustomOp* self) { return as_op(self).signature.input_count; };
    output_count = [](const ort::CustomOp* self) { return as_op(self).signature.output_count; };
    input_type = [](const ort::CustomOp* self, std::size_t i) {
        return slot_at(as_op(self).signature.inputs, as_op(self).signature.input_count, i).type;
    };
    output_type = [](const ort::CustomOp* self, std::size_t i) {
        return slot_at(as_op(self).signature.outputs, as_op(self).signature.output_count, i).type;
    };
    input_characteristic = [](const ort::CustomOp* self, std::size_t i) -> int {
        return slot_at(as_op(self).signature.inputs, as_op(self).signature.input_count, i).kind;
    };
    output_characteristic = [](const ort::CustomOp* self, std::size_t i) -> int {
        return slot_at(as_op(self).signature.outputs, as_op(self).signature.output_count, i).kind;
    };
    input_memory_type = [](const ort::CustomOp*, std::size_t) { return 0; };
    variadic_input_min_arity = [](const ort::CustomOp*) { return 1; };
    variadic_output_min_arity = [](const ort::CustomOp*) { return 1; };
    // Inputs of one variadic slot may differ in type.
    variadic_input_homogeneity = [](const ort::CustomOp*) { return 0; };
    variadic_output_homogeneity = [](const ort::CustomOp*) { return 1; };
    start_version = [](const ort::CustomOp*) { return 1; };
    end_version = [](const ort::CustomOp*) { return 1; };
    infer_shape = [](const ort::CustomOp* raw, ort::ShapeInferContext* context) -> ort::Status* {
        const RegisteredOp& self = as_op(raw);
        // onnxruntime drops this status without releasing it, and an unknown shape is no error.
        if (ort::Status* status = guarded(self.api, self.signature.name, [&] {
                std::size_t count = 0;
                check(self.api.shape_input_count(context, &count));
                std::vector<SymbolicShape> inputs;
                for (std::size_t i = 0; i < count; ++i) inputs.push_back(read_shape(self.api, context, i));
                const std::vector<SymbolicShape> outputs = self.infer(inputs);
                for (std::size_t i = 0; i < outputs.size(); ++i) write_shape(self.api, context, i, outputs[i]);
            }))
            self.api.release_status(status);
        return nullptr;
    };
}

}  // namespace intaglio
