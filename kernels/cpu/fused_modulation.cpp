#include "fused_modulation.h"

#include <algorithm>
#include <string>

namespace intaglio {

std::size_t row_count(const Tensor& tensor) {
    std::size_t count = 1;
    for (std::size_t i = 0; i + 1 < tensor.dims.size(); ++i) count *= static_cast<std::size_t>(tensor.dims[i]);
    return count;
}

std::size_t row_width(const Tensor& tensor) { return static_cast<std::size_t>(tensor.dims.back()); }

void check_rows(const char* name, const Tensor& tensor) {
    if (!tensor) throw Mismatch(std::string(name) + " is left out");
    if (tensor.type != ort::ElementType::kFloat)
        throw Mismatch(std::string(name) + " is " + text(tensor.type) + ", expected float32");
    if (tensor.dims.empty()) throw Mismatch(std::string(name) + " is a scalar, expected rows");
}

Modulation::Modulation(const char* name, const Tensor& tensor, const Tensor& x) {
    check_rows(name, tensor);
    const std::size_t rank = x.dims.size();
    Dims one_for_all(rank, 1);
    one_for_all.back() = x.dims.back();
    Dims one_each = one_for_all;
    one_each.front() = x.dims.front();
    if (tensor.dims != one_for_all && tensor.dims != one_each)
        throw Mismatch(std::string(name) + " has shape " + text(tensor.dims) + ", expected " + text(one_each) +
                       " or " + text(one_for_all) + " for x " + text(x.dims));
    data_ = tensor.as<float>();
    const std::size_t rows = row_count(x);
    const bool is_shared = tensor.dims.front() == 1 || rank == 1;
    rows_ = is_shared ? rows : rows / std::max<std::size_t>(static_cast<std::size_t>(x.dims.front()), 1);
    rows_ = std::max<std::size_t>(rows_, 1);
    stride_ = row_width(x);
}

}  // namespace intaglio
