// onnxruntime's way in: the op GroupedQuantMatMul of the domain intaglio.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "grouped_quant_matmul.h"
#include "ort_abi.h"

namespace intaglio {
namespace {

using Dims = std::vector<std::int64_t>;

constexpr const char* kOpName = "GroupedQuantMatMul";
constexpr const char* kDomain = "intaglio";
constexpr std::size_t kInputs = 4;
constexpr const char* kInputNames[kInputs] = {"x", "codes", "scales", "offsets"};

// A status of onnxruntime's on its way through our own code.
struct OrtFailure {
    ort::Status* status;
};

// Ours: becomes a status with this message, prefixed by the op's name.
struct Mismatch : std::runtime_error {
    using std::runtime_error::runtime_error;
};

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
        case ort::ElementType::kFloat16: return "float16";
        case ort::ElementType::kBfloat16: return "bfloat16";
        default: return "ONNX element type " + text(static_cast<std::int64_t>(type));
    }
}

// No exception may leave for C code: each becomes a status.
template <typename Body>
ort::Status* guarded(const ort::Api& api, Body&& body) noexcept {
    try {
        body();
        return nullptr;
    } catch (const OrtFailure& failure) {
        return failure.status;
    } catch (const Mismatch& mismatch) {
        return api.create_status(ort::ErrorCode::kInvalidArgument, mismatch.what());
    } catch (const std::exception& error) {
        return api.create_status(ort::ErrorCode::kFail, error.what());
    } catch (...) {
        return api.create_status(ort::ErrorCode::kFail, "GroupedQuantMatMul: unknown error");
    }
}

[[noreturn]] void mismatch(const std::string& message) {
    throw Mismatch(std::string(kOpName) + ": " + message);
}

// INTAGLIO_CPU_ISA holds the kernel to less than the machine has, to compare or to rule one out.
InstructionSet chosen_instruction_set() {
    const InstructionSet best = best_instruction_set();
    const char* wanted = std::getenv("INTAGLIO_CPU_ISA");
    if (!wanted || !*wanted) return best;
    for (const auto& [name, set] : {std::pair{"portable", InstructionSet::kPortable},
                                    std::pair{"avx2", InstructionSet::kAvx2},
                                    std::pair{"avx512", InstructionSet::kAvx512}}) {
        if (std::strcmp(wanted, name) != 0) continue;
        if (set > best)
            mismatch("INTAGLIO_CPU_ISA is " + std::string(name) +
                     ", which this machine or this build lacks; unset it");
        return set;
    }
    mismatch("INTAGLIO_CPU_ISA is '" + std::string(wanted) + "', expected portable, avx2 or avx512");
}

struct Tensor {
    const void* data;
    Dims dims;
    ort::ElementType type;
};

class Kernel {
   public:
    Kernel(const ort::Api& api, const ort::KernelInfo* info)
        : api_(api),
          instruction_set_(chosen_instruction_set()),
          bits_(attribute(info, "bits")),
          group_size_(attribute(info, "group_size")),
          zero_point_(attribute(info, "zero_point")) {
        if (bits_ != 2 && bits_ != 4 && bits_ != 8)
            mismatch("bits is " + text(bits_) + ", expected 2, 4 or 8");
        if (group_size_ < 1 || group_size_ % (8 / bits_) != 0)
            mismatch("group_size " + text(group_size_) + " with " + text(bits_) +
                     " bits does not end on a byte; it must be a positive multiple of " + text(8 / bits_));
        if (zero_point_ < 0 || zero_point_ >= std::int64_t{1} << bits_)
            mismatch("zero_point " + text(zero_point_) + " is not a " + text(bits_) + "-bit code");
    }

    const ort::Api& api() const { return api_; }

    void compute(ort::KernelContext* context) const {
        const Tensor x = input(context, 0), codes = input(context, 1), scales = input(context, 2),
                     offsets = input(context, 3);
        GroupedQuantMatMul product = check_inputs(x, codes, scales, offsets);

        Dims y_dims = x.dims;
        y_dims.back() = codes.dims[0];
        ort::Value* y = nullptr;
        check(api_.output(context, 0, y_dims.data(), y_dims.size(), &y));
        void* y_data = nullptr;
        check(api_.tensor_data(y, &y_data));
        product.y = static_cast<float*>(y_data);
        if (product.M == 0) return;

        const Partition partition(product);
        struct Job {
            const Partition& partition;
            InstructionSet set;
        } job{partition, instruction_set_};
        const auto body = [](void* data, std::size_t part) {
            static_cast<Job*>(data)->partition.compute(static_cast<Job*>(data)->set, part);
        };
        if (partition.is_small() || partition.parts() == 1) {
            for (std::size_t part = 0; part < partition.parts(); ++part) body(&job, part);
            return;
        }
        check(api_.parallel_for(context, body, partition.parts(), 0, &job));
    }

   private:
    std::int64_t attribute(const ort::KernelInfo* info, const char* name) const {
        std::int64_t value = 0;
        if (ort::Status* status = api_.info_int64(info, name, &value)) {
            const std::string reason = api_.error_message(status);
            api_.release_status(status);
            mismatch("the integer attribute " + std::string(name) +
                     " is needed and could not be read: " + reason);
        }
        return value;
    }

    Tensor input(const ort::KernelContext* context, std::size_t index) const {
        const ort::Value* value = nullptr;
        check(api_.input(context, index, &value));
        if (!value)
            mismatch("input " + std::string(kInputNames[index]) + " is left out; all four inputs are needed");
        Tensor tensor{};
        void* data = nullptr;
        // There is no reading twin of this call in the API version that is asked for.
        check(api_.tensor_data(const_cast<ort::Value*>(value), &data));
        tensor.data = data;
        ort::TensorInfo* raw = nullptr;
        check(api_.tensor_info(value, &raw));
        const auto release = [this](ort::TensorInfo* info) { api_.release_tensor_info(info); };
        const std::unique_ptr<ort::TensorInfo, decltype(release)> info(raw, release);
        std::size_t rank = 0;
        check(api_.rank(raw, &rank));
        tensor.dims.resize(rank);
        check(api_.dims(raw, tensor.dims.data(), rank));
        check(api_.element_type(raw, &tensor.type));
        return tensor;
    }

    GroupedQuantMatMul check_inputs(const Tensor& x, const Tensor& codes, const Tensor& scales,
                                    const Tensor& offsets) const {
        if (x.type != ort::ElementType::kFloat) mismatch("x is " + text(x.type) + ", expected float32");
        if (codes.type != ort::ElementType::kUint8)
            mismatch("codes are " + text(codes.type) + ", expected uint8");
        if (x.dims.empty()) mismatch("x is a scalar, expected [..., in]");
        if (codes.dims.size() != 2)
            mismatch("codes have shape " + text(codes.dims) + ", expected [out, in * bits / 8]");
        const std::int64_t K = x.dims.back(), N = codes.dims[0];
        if (K < 1 || N < 1)
            mismatch("x " + text(x.dims) + " and codes " + text(codes.dims) + " make a weight of " + text(N) +
                     " x " + text(K) + "; both sizes must be positive");
        if (K % group_size_ != 0)
            mismatch("x has width " + text(K) + ", which is not a multiple of the group size " +
                     text(group_size_));
        // Divided, not multiplied: a width near the end of int64 must not wrap around.
        if (codes.dims[1] != K / (8 / bits_))
            mismatch("codes have shape " + text(codes.dims) + ", expected [out, " + text(K / (8 / bits_)) +
                     "] for x of width " + text(K) + " and " + text(bits_) + " bits");

        const Dims groups = {N, K / group_size_};
        if (scales.dims != groups)
            mismatch("scales have shape " + text(scales.dims) + ", expected " + text(groups));
        if (!offsets.dims.empty() && offsets.dims != groups)
            mismatch("offsets have shape " + text(offsets.dims) + ", expected " + text(groups) +
                     " or a scalar");
        if (scales.type != offsets.type)
            mismatch("scales are " + text(scales.type) + " and offsets " + text(offsets.type) +
                     "; they must be alike");

        GroupedQuantMatMul product{};
        switch (scales.type) {
            case ort::ElementType::kFloat16: product.scale_type = ScaleType::kFloat16; break;
            case ort::ElementType::kBfloat16: product.scale_type = ScaleType::kBfloat16; break;
            case ort::ElementType::kFloat: product.scale_type = ScaleType::kFloat32; break;
            default: mismatch("scales are " + text(scales.type) + ", expected float16, bfloat16 or float32");
        }
        product.M = 1;
        for (std::size_t i = 0; i + 1 < x.dims.size(); ++i) product.M *= static_cast<std::size_t>(x.dims[i]);
        product.N = static_cast<std::size_t>(N);
        product.K = static_cast<std::size_t>(K);
        product.group_size = static_cast<std::size_t>(group_size_);
        product.bits = static_cast<int>(bits_);
        product.zero_point = static_cast<int>(zero_point_);
        product.offset_per_group = !offsets.dims.empty();
        product.x = x.data;
        product.codes = static_cast<const std::uint8_t*>(codes.data);
        product.scales = static_cast<const std::uint8_t*>(scales.data);
        product.offsets = static_cast<const std::uint8_t*>(offsets.data);
        return product;
    }

    ort::Api api_;
    InstructionSet instruction_set_;
    std::int64_t bits_, group_size_, zero_point_;
};

// y has the dims of x but for the last, which is the first of codes.
void infer_shape(const ort::Api& api, ort::ShapeInferContext* context) {
    ort::TensorInfo *x = nullptr, *codes = nullptr;
    check(api.shape_input(context, 0, &x));
    check(api.shape_input(context, 1, &codes));
    std::size_t rank = 0, codes_rank = 0;
    check(api.rank(x, &rank));
    check(api.rank(codes, &codes_rank));
    // An unknown shape reads as rank 0; what does not fit is reported when the op runs.
    if (rank == 0 || codes_rank != 2) return;
    Dims dims(rank), codes_dims(codes_rank);
    std::vector<const char*> names(rank, ""), codes_names(codes_rank, "");
    check(api.dims(x, dims.data(), rank));
    check(api.symbolic_dims(x, names.data(), rank));
    check(api.dims(codes, codes_dims.data(), codes_rank));
    check(api.symbolic_dims(codes, codes_names.data(), codes_rank));
    dims.back() = codes_dims[0];
    names.back() = codes_names[0];
    for (std::size_t i = 0; i < rank; ++i)
        // Neither a size nor a name: onnxruntime would take -1 for a size.
        if (dims[i] < 0 && (!names[i] || !*names[i])) return;

    ort::TensorInfo* raw = nullptr;
    check(api.create_tensor_info(&raw));
    const auto release = [&api](ort::TensorInfo* info) { api.release_tensor_info(info); };
    const std::unique_ptr<ort::TensorInfo, decltype(release)> y(raw, release);
    check(api.set_dims(raw, dims.data(), rank));
    check(api.set_symbolic_dims(raw, names.data(), rank));
    check(api.shape_set_output(context, 0, raw));
}

struct Op : ort::CustomOp {
    explicit Op(const ort::ApiTable* table) : ort::CustomOp{}, api(table) {
        version = ort::kApiVersion;
        name = [](const ort::CustomOp*) { return kOpName; };
        execution_provider = [](const ort::CustomOp*) -> const char* { return nullptr; };
        input_count = [](const ort::CustomOp*) { return kInputs; };
        // Scales and offsets are left open: the schema has no "one of three types".
        input_type = [](const ort::CustomOp*, std::size_t i) {
            return i == 0   ? ort::ElementType::kFloat
                   : i == 1 ? ort::ElementType::kUint8
                            : ort::ElementType::kOpen;
        };
        output_count = [](const ort::CustomOp*) { return std::size_t{1}; };
        output_type = [](const ort::CustomOp*, std::size_t) { return ort::ElementType::kFloat; };
        input_characteristic = [](const ort::CustomOp*, std::size_t) { return 0; };
        output_characteristic = [](const ort::CustomOp*, std::size_t) { return 0; };
        input_memory_type = [](const ort::CustomOp*, std::size_t) { return 0; };
        start_version = [](const ort::CustomOp*) { return 1; };
        end_version = [](const ort::CustomOp*) { return 1; };
        create_kernel_v2 = [](const ort::CustomOp*, const ort::ApiTable* given, const ort::KernelInfo* info,
                              void** kernel) {
            const ort::Api kernel_api(given);
            return guarded(kernel_api, [&] { *kernel = new Kernel(kernel_api, info); });
        };
        compute_v2 = [](void* kernel, ort::KernelContext* context) {
            const auto* self = static_cast<const Kernel*>(kernel);
            return guarded(self->api(), [&] { self->compute(context); });
        };
        destroy_kernel = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
        infer_shape = [](const ort::CustomOp* self, ort::ShapeInferContext* context) -> ort::Status* {
            const ort::Api& known = static_cast<const Op*>(self)->api;
            // onnxruntime drops this status without releasing it, and an unknown shape is no error.
            if (ort::Status* status = guarded(known, [&] { intaglio::infer_shape(known, context); }))
                known.release_status(status);
            return nullptr;
        };
    }

    ort::Api api;
};

// Sessions keep pointers to the domain and its op without owning them.
struct Domain {
    explicit Domain(const ort::ApiTable* table) : op(table) {}
    Domain(const Domain&) = delete;
    Domain& operator=(const Domain&) = delete;
    ~Domain() {
        if (handle) op.api.release_domain(handle);
    }

    Op op;
    ort::CustomOpDomain* handle = nullptr;
};

// One domain for each onnxruntime in the process, shared by its sessions and never destroyed: a
// destructor at the end of the process would call into an onnxruntime that may be gone by then.
ort::CustomOpDomain* domain_of(const ort::Api& api) {
    static std::mutex& mutex = *new std::mutex;
    static auto& domains = *new std::vector<std::unique_ptr<Domain>>;
    const std::lock_guard<std::mutex> lock(mutex);
    for (const auto& domain : domains)
        if (domain->op.api.table() == api.table()) return domain->handle;
    auto domain = std::make_unique<Domain>(api.table());
    check(api.create_domain(kDomain, &domain->handle));
    check(api.domain_add(domain->handle, &domain->op));
    domains.push_back(std::move(domain));
    return domains.back()->handle;
}

ort::Status* too_old(const ort::ApiBase* base) noexcept {
    char message[256];
    const char* found = base->get_version_string ? base->get_version_string() : nullptr;
    std::snprintf(message, sizeof message,
                  "intaglio's CPU kernels need onnxruntime 1.%u or newer and found %s; upgrade it with "
                  "`pip install --upgrade onnxruntime`",
                  static_cast<unsigned>(ort::kApiVersion), found ? found : "an unknown version");
    if (const ort::ApiTable* first = base->get_api(1))
        return ort::Api(first).create_status(ort::ErrorCode::kNotImplemented, message);
    // Without any API there is no status to make: the op stays unregistered, and this says why.
    std::fprintf(stderr, "%s\n", message);
    return nullptr;
}

}  // namespace
}  // namespace intaglio

extern "C" INTAGLIO_EXPORT intaglio::ort::Status* INTAGLIO_ORT_CALL
RegisterCustomOps(intaglio::ort::SessionOptions* options, const intaglio::ort::ApiBase* base) {
    using namespace intaglio;
    const ort::ApiTable* table = base->get_api(ort::kApiVersion);
    if (!table) return too_old(base);
    const ort::Api api(table);
    return guarded(api, [&] { check(api.add_domain(options, domain_of(api))); });
}
