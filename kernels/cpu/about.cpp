// What the library says of itself to callers that are not onnxruntime.

#include <cstdint>
#include <cstring>
#include <exception>

#include "fast_matmul.h"
#include "instruction_set.h"
#include "ort_abi.h"

// Writes the name of the chosen instruction set, or why there is none, into `text` of `size` bytes. Whether there is.
extern "C" INTAGLIO_EXPORT int intaglio_instruction_set(char* text, std::size_t size) {
    const auto write = [&](const char* from) {
        std::strncpy(text, from, size - 1);
        text[size - 1] = '\0';
    };
    try {
        write(intaglio::name_of(intaglio::chosen_instruction_set()));
        return 1;
    } catch (const std::exception& error) {
        write(error.what());
        return 0;
    }
}

// Whether this build and this machine have the set of this name.
extern "C" INTAGLIO_EXPORT int intaglio_has_instruction_set(const char* name) {
    for (intaglio::InstructionSet set : intaglio::kInstructionSets)
        if (std::strcmp(intaglio::name_of(set), name) == 0) return intaglio::has_instruction_set(set);
    return 0;
}

extern "C" INTAGLIO_EXPORT int intaglio_has_fast_matmul(std::int64_t group_size, std::int64_t width) {
    return intaglio::has_fast_matmul(static_cast<std::size_t>(group_size), static_cast<std::size_t>(width));
}
