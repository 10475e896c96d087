// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <support/folder.hpp>
#include <support/numbers.hpp>

#include <joinable/tensor/any_view.hpp>

namespace joinable_tests {

/// The layout's names of the first DTypes, as its description has them.
inline constexpr std::array<char const*, 10> stored_names{
    "F16", "BF16", "F32", "F64", "I8", "U8", "I32", "U32", "I64", "U64"
};

/// A file of the safetensors layout, read as its description says, by nothing of the library.
class ReadFile {
public:
    explicit ReadFile(std::string contents) : contents_{std::move(contents)} {
        std::uint64_t length = 0;
        std::memcpy(&length, contents_.data(), 8);
        first_ = 8 + length;
        header_ = nlohmann::json::parse(contents_.substr(8, length));
    }

    [[nodiscard]] std::string metadata(std::string const& key) const {
        return header_.at("__metadata__").at(key);
    }
    [[nodiscard]] std::size_t tensor_count() const { return header_.size() - 1; }
    [[nodiscard]] joinable::Shape shape(std::string const& name) const {
        joinable::Shape extents;
        for (std::size_t const extent : header_.at(name).at("shape")) {
            extents.push_back(extent);
        }
        return extents;
    }
    [[nodiscard]] std::vector<std::byte> bytes(std::string const& name) const {
        std::size_t const begin = header_.at(name).at("data_offsets").at(0);
        std::size_t const end = header_.at(name).at("data_offsets").at(1);
        std::vector<std::byte> found(end - begin);
        if (!found.empty()) {
            std::memcpy(found.data(), contents_.data() + first_ + begin, found.size());
        }
        return found;
    }
    [[nodiscard]] Numbers numbers(std::string const& name) const {
        std::string const dtype = header_.at(name).at("dtype");
        auto const k =
            std::find(stored_names.begin(), stored_names.end(), dtype) - stored_names.begin();
        std::vector<std::byte> elements = bytes(name);
        joinable::Shape const extents = shape(name);
        return read(joinable::AnyView{
            elements.data(), static_cast<joinable::DType>(k), extents, row_major_strides(extents)
        });
    }

private:
    std::string contents_;
    std::size_t first_ = 0;
    nlohmann::json header_;
};

inline ReadFile read_checkpoint(std::string const& name) {
    return ReadFile{contents_of(name)};
}

} // namespace joinable_tests
