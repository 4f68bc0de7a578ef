// onnxruntime's way in: the ops of the domain intaglio.

#include <cstdio>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "attention_op.h"
#include "conv_op.h"
#include "fused_gated_add_op.h"
#include "fused_gather_op.h"
#include "fused_head_norm_op.h"
#include "fused_matmul_op.h"
#include "fused_norm_op.h"
#include "fused_swiglu_op.h"
#include "group_norm.h"
#include "grouped_quant_op.h"
#include "op.h"

namespace intaglio {
namespace {

constexpr const char* kDomain = "intaglio";

std::vector<std::unique_ptr<RegisteredOp>> make_ops(const ort::ApiTable* table) {
    std::vector<std::unique_ptr<RegisteredOp>> ops;
    ops.push_back(std::make_unique<OpOf<GroupedQuantMatMulKernel>>(table));
    ops.push_back(std::make_unique<OpOf<FusedGroupedQuantMatMulKernel>>(table));
    ops.push_back(std::make_unique<OpOf<GroupedQuantGatherKernel>>(table));
    ops.push_back(std::make_unique<OpOf<AdaptiveLayerNormKernel>>(table));
    ops.push_back(std::make_unique<OpOf<GatedAddKernel>>(table));
    ops.push_back(std::make_unique<OpOf<SwiGLUKernel>>(table));
    ops.push_back(std::make_unique<OpOf<HeadRMSNormKernel>>(table));
    ops.push_back(std::make_unique<OpOf<AttentionKernel>>(table));
    ops.push_back(std::make_unique<OpOf<FusedConvKernel>>(table));
    ops.push_back(std::make_unique<OpOf<GroupStatisticsKernel>>(table));
    return ops;
}

// Sessions keep pointers to the domain and its ops without owning them.
struct Domain {
    explicit Domain(const ort::ApiTable* table) : api(table), ops(make_ops(table)) {}
    Domain(const Domain&) = delete;
    Domain& operator=(const Domain&) = delete;
    ~Domain() {
        if (handle) api.release_domain(handle);
    }

    ort::Api api;
    std::vector<std::unique_ptr<RegisteredOp>> ops;
    ort::CustomOpDomain* handle = nullptr;
};

// One domain for each onnxruntime in the process, shared by its sessions and never destroyed: a
// destructor at the end of the process would call into an onnxruntime that may be gone by then.
ort::CustomOpDomain* domain_of(const ort::Api& api) {
    static std::mutex& mutex = *new std::mutex;
    static auto& domains = *new std::vector<std::unique_ptr<Domain>>;
    const std::lock_guard<std::mutex> lock(mutex);
    for (const auto& domain : domains)
        if (domain->api.table() == api.table()) return domain->handle;
    auto domain = std::make_unique<Domain>(api.table());
    check(api.create_domain(kDomain, &domain->handle));
    for (const auto& op : domain->ops) check(api.domain_add(domain->handle, op.get()));
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
    // Without any API there is no status to make: the ops stay unregistered, and this says why.
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
    return guarded(api, kDomain, [&] { check(api.add_domain(options, domain_of(api))); });
}
