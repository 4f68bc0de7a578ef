// The part of onnxruntime's C ABI that a custom-op library needs, declared by hand.
//
// OrtApi is a table of function pointers that only ever grows at its end, so a slot number holds for
// every release since the one that added it. 64-bit only. A null status means success.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(_WIN32)
#define INTAGLIO_ORT_CALL __stdcall
#define INTAGLIO_EXPORT __declspec(dllexport)
#else
#define INTAGLIO_ORT_CALL
#define INTAGLIO_EXPORT __attribute__((visibility("default")))
#endif

namespace intaglio::ort {

static_assert(sizeof(void*) == 8, "the offsets below are those of 64-bit builds");

// KernelContext_ParallelFor and the ShapeInferContext functions came with API 17, CreateKernelV2 and
// KernelComputeV2 (which return a status) with API 16; nothing that is used here came later.
constexpr std::uint32_t kApiVersion = 17;

// Never defined: these are only ever pointed at.
struct ApiTable;
struct CustomOpDomain;
struct KernelContext;
struct KernelInfo;
struct SessionOptions;
struct ShapeInferContext;
struct Status;
struct TensorInfo;
struct Value;

enum class ErrorCode : int { kFail = 1, kInvalidArgument = 2, kNotImplemented = 9 };

enum class ElementType : int { kOpen = 0, kFloat = 1, kUint8 = 2, kInt64 = 7, kBool = 9, kFloat16 = 10, kBfloat16 = 16 };

struct ApiBase {
    const ApiTable*(INTAGLIO_ORT_CALL* get_api)(std::uint32_t version);  // null: the runtime is older
    const char*(INTAGLIO_ORT_CALL* get_version_string)();
};

enum class Slot : std::size_t {
    kCreateStatus = 0,
    kGetErrorMessage = 2,
    kCreateCustomOpDomain = 26,
    kCustomOpDomainAdd = 27,
    kAddCustomOpDomain = 28,
    kGetTensorMutableData = 51,
    kCreateTensorInfo = 57,
    kSetDimensions = 59,
    kGetElementType = 60,
    kGetDimensionsCount = 61,
    kGetDimensions = 62,
    kGetSymbolicDimensions = 63,
    kGetTensorInfo = 65,
    kKernelInfoGetFloat = 85,
    kKernelInfoGetInt64 = 86,
    kContextGetInputCount = 88,
    kContextGetOutputCount = 89,
    kContextGetInput = 90,
    kContextGetOutput = 91,
    kReleaseStatus = 93,
    kReleaseTensorInfo = 99,
    kReleaseCustomOpDomain = 101,
    kKernelInfoGetInputCount = 230,
    kKernelInfoGetConstantInput = 249,
    kShapeGetInputCount = 267,
    kShapeGetInput = 268,
    kShapeSetOutput = 270,
    kSetSymbolicDimensions = 271,
    kContextParallelFor = 274,
};

// Typed calls into the table.
class Api {
   public:
    explicit Api(const ApiTable* table) : table_(table) {}

    const ApiTable* table() const { return table_; }

    Status* create_status(ErrorCode code, const char* message) const {
        return call<Status*>(Slot::kCreateStatus, code, message);
    }
    const char* error_message(const Status* status) const {
        return call<const char*>(Slot::kGetErrorMessage, status);
    }
    void release_status(Status* status) const { call<void>(Slot::kReleaseStatus, status); }

    Status* create_domain(const char* name, CustomOpDomain** out) const {
        return call<Status*>(Slot::kCreateCustomOpDomain, name, out);
    }
    Status* domain_add(CustomOpDomain* domain, const struct CustomOp* op) const {
        return call<Status*>(Slot::kCustomOpDomainAdd, domain, op);
    }
    Status* add_domain(SessionOptions* options, CustomOpDomain* domain) const {
        return call<Status*>(Slot::kAddCustomOpDomain, options, domain);
    }
    void release_domain(CustomOpDomain* domain) const { call<void>(Slot::kReleaseCustomOpDomain, domain); }

    Status* info_int64(const KernelInfo* info, const char* name, std::int64_t* out) const {
        return call<Status*>(Slot::kKernelInfoGetInt64, info, name, out);
    }

    Status* info_float(const KernelInfo* info, const char* name, float* out) const {
        return call<Status*>(Slot::kKernelInfoGetFloat, info, name, out);
    }

    Status* info_input_count(const KernelInfo* info, std::size_t* out) const {
        return call<Status*>(Slot::kKernelInfoGetInputCount, info, out);
    }
    // Not null if the input is a constant of the graph, which keeps the ownership of it.
    Status* info_constant_input(const KernelInfo* info, std::size_t index, int* is_constant, const Value** out) const {
        return call<Status*>(Slot::kKernelInfoGetConstantInput, info, index, is_constant, out);
    }

    Status* input_count(const KernelContext* context, std::size_t* out) const {
        return call<Status*>(Slot::kContextGetInputCount, context, out);
    }
    Status* output_count(const KernelContext* context, std::size_t* out) const {
        return call<Status*>(Slot::kContextGetOutputCount, context, out);
    }
    Status* input(const KernelContext* context, std::size_t index, const Value** out) const {
        return call<Status*>(Slot::kContextGetInput, context, index, out);
    }
    Status* output(KernelContext* context, std::size_t index, const std::int64_t* dims, std::size_t rank,
                   Value** out) const {
        return call<Status*>(Slot::kContextGetOutput, context, index, dims, rank, out);
    }
    Status* tensor_data(Value* value, void** out) const {
        return call<Status*>(Slot::kGetTensorMutableData, value, out);
    }
    // The caller releases the result.
    Status* tensor_info(const Value* value, TensorInfo** out) const {
        return call<Status*>(Slot::kGetTensorInfo, value, out);
    }
    void release_tensor_info(TensorInfo* info) const { call<void>(Slot::kReleaseTensorInfo, info); }
    Status* element_type(const TensorInfo* info, ElementType* out) const {
        return call<Status*>(Slot::kGetElementType, info, out);
    }
    Status* rank(const TensorInfo* info, std::size_t* out) const {
        return call<Status*>(Slot::kGetDimensionsCount, info, out);
    }
    Status* dims(const TensorInfo* info, std::int64_t* out, std::size_t rank) const {
        return call<Status*>(Slot::kGetDimensions, info, out, rank);
    }
    // `total` calls of `body(data, index)` on the session's own thread pool; 0 batches lets it choose.
    Status* parallel_for(const KernelContext* context, void (*body)(void*, std::size_t), std::size_t total,
                         std::size_t batches, void* data) const {
        return call<Status*>(Slot::kContextParallelFor, context, body, total, batches, data);
    }

    Status* shape_input_count(const ShapeInferContext* context, std::size_t* out) const {
        return call<Status*>(Slot::kShapeGetInputCount, context, out);
    }
    // The context keeps the ownership of the result.
    Status* shape_input(const ShapeInferContext* context, std::size_t index, TensorInfo** out) const {
        return call<Status*>(Slot::kShapeGetInput, context, index, out);
    }
    Status* shape_set_output(const ShapeInferContext* context, std::size_t index,
                             const TensorInfo* info) const {
        return call<Status*>(Slot::kShapeSetOutput, context, index, info);
    }
    Status* symbolic_dims(const TensorInfo* info, const char** out, std::size_t rank) const {
        return call<Status*>(Slot::kGetSymbolicDimensions, info, out, rank);
    }
    Status* create_tensor_info(TensorInfo** out) const {
        return call<Status*>(Slot::kCreateTensorInfo, out);
    }
    Status* set_dims(TensorInfo* info, const std::int64_t* dims, std::size_t rank) const {
        return call<Status*>(Slot::kSetDimensions, info, dims, rank);
    }
    Status* set_symbolic_dims(TensorInfo* info, const char** dims, std::size_t rank) const {
        return call<Status*>(Slot::kSetSymbolicDimensions, info, dims, rank);
    }

   private:
    template <typename Result, typename... Args>
    Result call(Slot slot, Args... args) const {
        Result(INTAGLIO_ORT_CALL * function)(Args...);
        std::memcpy(&function,
                    reinterpret_cast<const char*>(table_) + static_cast<std::size_t>(slot) * sizeof function,
                    sizeof function);
        return function(args...);
    }

    const ApiTable* table_;
};

// One custom op. Entries that are null are not used, or stand for the default.
struct CustomOp {
    std::uint32_t version;
    void*(INTAGLIO_ORT_CALL* create_kernel)(const CustomOp*, const ApiTable*, const KernelInfo*);
    const char*(INTAGLIO_ORT_CALL* name)(const CustomOp*);
    const char*(INTAGLIO_ORT_CALL* execution_provider)(const CustomOp*);
    ElementType(INTAGLIO_ORT_CALL* input_type)(const CustomOp*, std::size_t);
    std::size_t(INTAGLIO_ORT_CALL* input_count)(const CustomOp*);
    ElementType(INTAGLIO_ORT_CALL* output_type)(const CustomOp*, std::size_t);
    std::size_t(INTAGLIO_ORT_CALL* output_count)(const CustomOp*);
    void(INTAGLIO_ORT_CALL* compute)(void*, KernelContext*);
    void(INTAGLIO_ORT_CALL* destroy_kernel)(void*);
    int(INTAGLIO_ORT_CALL* input_characteristic)(const CustomOp*, std::size_t);
    int(INTAGLIO_ORT_CALL* output_characteristic)(const CustomOp*, std::size_t);
    int(INTAGLIO_ORT_CALL* input_memory_type)(const CustomOp*, std::size_t);
    int(INTAGLIO_ORT_CALL* variadic_input_min_arity)(const CustomOp*);
    int(INTAGLIO_ORT_CALL* variadic_input_homogeneity)(const CustomOp*);
    int(INTAGLIO_ORT_CALL* variadic_output_min_arity)(const CustomOp*);
    int(INTAGLIO_ORT_CALL* variadic_output_homogeneity)(const CustomOp*);
    Status*(INTAGLIO_ORT_CALL* create_kernel_v2)(const CustomOp*, const ApiTable*, const KernelInfo*, void**);
    Status*(INTAGLIO_ORT_CALL* compute_v2)(void*, KernelContext*);
    Status*(INTAGLIO_ORT_CALL* infer_shape)(const CustomOp*, ShapeInferContext*);
    int(INTAGLIO_ORT_CALL* start_version)(const CustomOp*);
    int(INTAGLIO_ORT_CALL* end_version)(const CustomOp*);
    void* may_inplace;
    void* release_may_inplace;
    void* alias_map;
    void* release_alias_map;
};

static_assert(sizeof(CustomOp) == 208);
static_assert(offsetof(CustomOp, version) == 0);
static_assert(offsetof(CustomOp, create_kernel) == 8);
static_assert(offsetof(CustomOp, execution_provider) == 24);
static_assert(offsetof(CustomOp, input_count) == 40);
static_assert(offsetof(CustomOp, output_count) == 56);
static_assert(offsetof(CustomOp, destroy_kernel) == 72);
static_assert(offsetof(CustomOp, output_characteristic) == 88);
static_assert(offsetof(CustomOp, input_memory_type) == 96);
static_assert(offsetof(CustomOp, create_kernel_v2) == 136);
static_assert(offsetof(CustomOp, compute_v2) == 144);
static_assert(offsetof(CustomOp, infer_shape) == 152);
static_assert(offsetof(CustomOp, start_version) == 160);
static_assert(offsetof(CustomOp, release_alias_map) == 200);

}  // namespace intaglio::ort
