// Custom ops over onnxruntime's C ABI: what every op of the domain intaglio is made of.
//
// A kernel is a class with
//     static constexpr OpSignature kSignature;      name, inputs and outputs
//     Kernel(const Attributes&);                     throws Mismatch
//     void compute(OpContext&) const;                throws Mismatch
//     static std::vector<SymbolicShape> infer_shapes(const std::vector<SymbolicShape>& inputs);
// and is registered by one line in registry.cpp.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

#include "ort_abi.h"
#include "parallel_work.h"

namespace intaglio {

using Dims = std::vector<std::int64_t>;

// A status of onnxruntime's on its way through our own code.
struct OrtFailure {
    ort::Status* status;
};

// Ours: becomes a status with this message, prefixed by the op's name.
struct Mismatch : std::runtime_error {
    using std::runtime_error::runtime_error;
};

void check(ort::Status* status);

std::string text(std::int64_t value);
std::string text(const Dims& dims);
std::string text(ort::ElementType type);

struct Tensor {
    void* data = nullptr;  // null: an optional input that was left out, or an output that nobody reads
    Dims dims;
    ort::ElementType type = ort::ElementType::kOpen;

    explicit operator bool() const { return data != nullptr; }
    std::size_t size() const;
    template <typename T>
    const T* as() const { return static_cast<const T*>(data); }
};

class Attributes {
   public:
    Attributes(const ort::Api& api, const ort::KernelInfo* info) : api_(api), info_(info) {}
    // Throws Mismatch if the attribute is missing.
    std::int64_t integer(const char* name) const;
    std::int64_t integer(const char* name, std::int64_t missing) const;
    float real(const char* name, float missing) const;
    // Whether an input is a constant of the graph: the same values in every run, at the same address.
    bool is_constant(std::size_t input) const;
    // Such an input, to be checked once; empty if it is none.
    Tensor constant_input(std::size_t index) const;
    std::size_t input_count() const;

   private:
    const ort::Api& api_;
    const ort::KernelInfo* info_;
};

class OpContext {
   public:
    OpContext(const ort::Api& api, ort::KernelContext* context) : api_(api), context_(context) {}

    // Of variadic inputs too.
    std::size_t input_count() const;
    std::size_t output_count() const;
    Tensor input(std::size_t index) const;
    // Of the element type that the signature states.
    Tensor output(std::size_t index, const Dims& dims);
    // Runs the work on the session's own threads.
    void run(const ParallelWork& work);

   private:
    const ort::Api& api_;
    ort::KernelContext* context_;
};

// Dims of which some have a size, some a name and some neither (-1 and empty).
struct SymbolicShape {
    Dims dims;
    std::vector<std::string> names;
    bool is_known = false;  // an unknown shape reads as rank 0

    std::size_t rank() const { return dims.size(); }
    // Takes dim `from` of `other` as dim `to`.
    void copy_dim(std::size_t to, const SymbolicShape& other, std::size_t from);
};

struct OpSlot {
    ort::ElementType type;
    enum Kind : int { kRequired = 0, kOptional = 1, kVariadic = 2 } kind = kRequired;
};

struct OpSignature {
    const char* name;
    const OpSlot* inputs;
    std::size_t input_count;
    const OpSlot* outputs;
    std::size_t output_count;
};

// An op as onnxruntime knows it, with its functions over Kernel.
struct RegisteredOp : ort::CustomOp {
    RegisteredOp(const ort::ApiTable* table, const OpSignature& signature);

    ort::Api api;
    const OpSignature& signature;
    std::vector<SymbolicShape> (*infer)(const std::vector<SymbolicShape>& inputs);
};

// No exception may leave for C code: each becomes a status, prefixed by the op's name.
ort::Status* status_of_exception(const ort::Api& api, const char* op) noexcept;

template <typename Body>
ort::Status* guarded(const ort::Api& api, const char* op, Body&& body) noexcept {
    try {
        body();
        return nullptr;
    } catch (...) {
        return status_of_exception(api, op);
    }
}

template <typename Kernel>
struct OpOf : RegisteredOp {
    struct Instance {
        ort::Api api;
        Kernel kernel;
    };

    explicit OpOf(const ort::ApiTable* table) : RegisteredOp(table, Kernel::kSignature) {
        infer = &Kernel::infer_shapes;
        create_kernel_v2 = [](const ort::CustomOp*, const ort::ApiTable* given, const ort::KernelInfo* info,
                              void** kernel) {
            const ort::Api kernel_api(given);
            return guarded(kernel_api, Kernel::kSignature.name, [&] {
                *kernel = new Instance{kernel_api, Kernel(Attributes(kernel_api, info))};
            });
        };
        compute_v2 = [](void* kernel, ort::KernelContext* raw) {
            const auto* self = static_cast<const Instance*>(kernel);
            return guarded(self->api, Kernel::kSignature.name, [&] {
                OpContext context(self->api, raw);
                self->kernel.compute(context);
            });
        };
        destroy_kernel = [](void* kernel) { delete static_cast<Instance*>(kernel); };
    }
};

}  // namespace intaglio
