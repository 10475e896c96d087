// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/shape.hpp>

/// @file
/// The safetensors layout: 8 bytes with the length of the header, little-endian; the header in
/// JSON; the data, row-major tensors without gaps. Pure functions: text in, text out.

namespace joinable { inline namespace v0 { namespace detail {

/// A tensor in a file. Complex numbers are pairs of reals in a last dimension of extent 2; the metadata
/// say which tensors are such.
struct StoredTensor {
    std::string name;
    DType dtype = DType::f32; ///< not complex
    Shape extents;
    std::uint64_t begin = 0; ///< first of its bytes in the data
    std::uint64_t end = 0;
    bool is_complex = false; ///< `extents` end with the 2 parts

    [[nodiscard]] std::size_t numel() const { return joinable::numel(extents); }
};

struct FileHeader {
    std::vector<StoredTensor> tensors; ///< in any order
    std::map<std::string, std::string> metadata;
};

/// The "format" of a file that a Checkpoint wrote.
inline constexpr std::string_view checkpoint_format = "joinable checkpoint";

/// Whether a Checkpoint wrote the file; other tools mark no complex numbers.
[[nodiscard]] inline bool is_ours(FileHeader const& header) {
    auto const format = header.metadata.find("format");
    return format != header.metadata.end() && format->second == checkpoint_format;
}

/// The key of the metadata that says that a tensor is complex.
[[nodiscard]] inline std::string mark_of_complex(std::string_view tensor) {
    return concat("parts of ", tensor);
}

inline constexpr std::size_t length_bytes = 8; ///< before the header
inline constexpr std::uint64_t max_header_bytes =
    100'000'000; ///< the limit of the format's own library

/// Throws ContractViolation about a file.
template <class... Pieces>
[[noreturn]] void refuse_file(std::string_view file, Pieces const&... pieces) {
    throw ContractViolation{concat("checkpoint ", file, ": ", pieces...)};
}

/// "f32 (2, 3)".
[[nodiscard]] inline std::string to_text(StoredTensor const& tensor) {
    return concat(name_of(tensor.dtype), " ", to_text(tensor.extents));
}

/// Places tensors one after another in the data. Those of larger elements come first, so that each
/// is aligned. Their order in the list stays.
inline void place_tensors(std::vector<StoredTensor>& tensors) {
    std::uint64_t next = 0;
    for (std::size_t const element : {8U, 4U, 2U, 1U}) {
        for (StoredTensor& tensor : tensors) {
            if (size_of(tensor.dtype) == element) {
                tensor.begin = next;
                next += tensor.numel() * element;
                tensor.end = next;
            }
        }
    }
}

/// The start of a file: the length and the header, padded with spaces to a multiple of 8 bytes.
/// @throws ContractViolation  a name is not UTF-8, or the header is longer than the format allows.
[[nodiscard]] inline std::string header_text(std::string_view file, FileHeader const& header) {
    using nlohmann::json;
    std::string text;
    try {
        json all = {{"__metadata__", header.metadata}};
        for (StoredTensor const& tensor : header.tensors) {
            json shape = json::array();
            for (std::size_t const extent : tensor.extents) {
                shape.push_back(extent);
            }
            json& entry = all[tensor.name];
            entry["dtype"] = row_of(tensor.dtype).stored;
            entry["shape"] = std::move(shape);
            entry["data_offsets"] = {tensor.begin, tensor.end};
        }
        text = all.dump();
    } catch (json::exception const& error) {
        refuse_file(file, "its header cannot be written: ", error.what());
    }
    text.resize((text.size() + 7) / 8 * 8, ' ');
    if (text.size() > max_header_bytes) {
        refuse_file(
            file, "its header has ", text.size(), " bytes, but may have ", max_header_bytes
        );
    }
    std::string length;
    for (unsigned shift = 0; shift < 64; shift += 8) {
        length += static_cast<char>((std::uint64_t{text.size()} >> shift) & 0xffU);
    }
    return length + text;
}

/// The length of the header of a file of `file_bytes` bytes that begins with `start`.
/// @throws ContractViolation  the file is too short for it, or the header longer than the format
///         allows.
[[nodiscard]] inline std::uint64_t
header_length(std::string_view file, std::string_view start, std::uint64_t file_bytes) {
    if (file_bytes < length_bytes || start.size() < length_bytes) {
        refuse_file(
            file, "it has ", file_bytes, " bytes, but the length of its header alone has 8"
        );
    }
    std::uint64_t length = 0;
    for (std::size_t i = length_bytes; i-- > 0;) {
        length = length << 8U | static_cast<unsigned char>(start[i]);
    }
    std::uint64_t const most = (std::min)(file_bytes - length_bytes, max_header_bytes);
    if (length > most) {
        refuse_file(
            file,
            "its first 8 bytes announce a header of ",
            length,
            " bytes, but it can have at most ",
            most,
            " in a file of ",
            file_bytes
        );
    }
    return length;
}

/// Reads a header and refuses what the format does not allow. `data_bytes` is the size of the data.
class HeaderParser {
public:
    HeaderParser(std::string_view file, std::uint64_t data_bytes)
        : file_{file}, data_bytes_{data_bytes} {}

    /// @throws ContractViolation  the text names the tensor, the expected and the actual value.
    [[nodiscard]] FileHeader parse(std::string_view text) const {
        Json const all = parse_json(text);
        if (!all.is_object()) {
            refuse("its header is ", all.type_name(), ", but has to be a JSON object");
        }
        FileHeader header;
        for (auto const& [name, entry] : all.items()) {
            if (name == "__metadata__") {
                header.metadata = metadata_of(entry);
            } else {
                header.tensors.push_back(tensor_of(name, entry));
            }
        }
        check_places(header.tensors);
        return header;
    }

private:
    using Json = nlohmann::json;

    template <class... Pieces>
    [[noreturn]] void refuse(Pieces const&... pieces) const {
        refuse_file(file_, pieces...);
    }

    /// JSON allows a name twice; the format does not. Nesting deeper than a header's is refused at
    /// once.
    [[nodiscard]] Json parse_json(std::string_view text) const {
        std::vector<std::set<std::string>> names;
        auto const check = [&](int depth, Json::parse_event_t event, Json& parsed) {
            switch (event) {
            case Json::parse_event_t::object_start: names.emplace_back(); [[fallthrough]];
            case Json::parse_event_t::array_start:
                if (depth > 2) {
                    refuse("its header nests deeper than a header does");
                }
                break;
            case Json::parse_event_t::object_end: names.pop_back(); break;
            case Json::parse_event_t::key:
                if (!names.back().insert(parsed.get<std::string>()).second) {
                    refuse("its header has ", parsed.dump(), " twice");
                }
                break;
            case Json::parse_event_t::array_end:
            case Json::parse_event_t::value: break;
            }
            return true;
        };
        try {
            return Json::parse(text.begin(), text.end(), check);
        } catch (Json::exception const& error) {
            refuse("its header is no JSON: ", error.what());
        }
    }

    [[nodiscard]] std::map<std::string, std::string> metadata_of(Json const& entry) const {
        if (!entry.is_object()) {
            refuse(
                "its __metadata__ is ", entry.type_name(), ", but has to be an object of strings"
            );
        }
        std::map<std::string, std::string> metadata;
        for (auto const& [key, value] : entry.items()) {
            if (!value.is_string()) {
                refuse(
                    "__metadata__ has ",
                    value.type_name(),
                    " as ",
                    key,
                    ", but has to have a string"
                );
            }
            metadata.emplace(key, value.get<std::string>());
        }
        return metadata;
    }

    [[nodiscard]] StoredTensor tensor_of(std::string const& name, Json const& entry) const {
        StoredTensor tensor;
        tensor.name = name;
        Json const& dtype = field(name, entry, "dtype");
        std::string const word = dtype.is_string() ? dtype.get<std::string>() : std::string{};
        auto const* const found = std::find_if( // no complex one, whose parts come first
            std::begin(dtype_table),
            std::end(dtype_table),
            [&](DTypeRow const& row) { return row.stored == word; }
        );
        if (found == std::end(dtype_table)) {
            refuse(
                "tensor ",
                name,
                " is of dtype ",
                dtype.dump(),
                word.starts_with("F8")
                    ? ", but numbers of 8 bits have no DType; store F16 or wider ones"
                    : ", which is none of this library"
            );
        }
        tensor.dtype = static_cast<DType>(found - std::begin(dtype_table));
        auto const shape = numbers(name, entry, "shape");
        if (shape.size() > max_tensor_rank) {
            refuse(
                "tensor ",
                name,
                " has ",
                shape.size(),
                " dimensions, but may have ",
                max_tensor_rank
            );
        }
        for (std::uint64_t const extent : shape) {
            tensor.extents.push_back(extent);
        }
        auto const offsets = numbers(name, entry, "data_offsets");
        if (offsets.size() != 2 || offsets[0] > offsets[1] || offsets[1] > data_bytes_) {
            refuse(
                "tensor ",
                name,
                " has data_offsets ",
                field(name, entry, "data_offsets").dump(),
                ", but expected are a begin and an end within the ",
                data_bytes_,
                " bytes of data"
            );
        }
        tensor.begin = offsets[0];
        tensor.end = offsets[1];
        check_size(tensor);
        return tensor;
    }

    [[nodiscard]] Json const&
    field(std::string const& name, Json const& entry, char const* key) const {
        if (!entry.is_object() || !entry.contains(key)) {
            refuse("tensor ", name, " has no ", key);
        }
        return entry.at(key);
    }
    [[nodiscard]] std::vector<std::uint64_t>
    numbers(std::string const& name, Json const& entry, char const* key) const {
        Json const& list = field(name, entry, key);
        std::vector<std::uint64_t> found;
        for (Json const& number : list) {
            if (!list.is_array() || !number.is_number_unsigned()) {
                refuse(
                    "tensor ",
                    name,
                    " has ",
                    key,
                    " ",
                    list.dump(),
                    ", but expected are whole numbers"
                );
            }
            found.push_back(number.get<std::uint64_t>());
        }
        if (!list.is_array()) {
            refuse("tensor ", name, " has ", key, " ", list.dump(), ", but expected is a list");
        }
        return found;
    }

    void check_size(StoredTensor const& tensor) const {
        std::uint64_t const bytes = tensor.end - tensor.begin;
        std::uint64_t const most = bytes / size_of(tensor.dtype); // elements that the bytes hold
        std::uint64_t count = 1;
        bool fits = true;
        bool const is_empty =
            std::find(tensor.extents.begin(), tensor.extents.end(), 0U) != tensor.extents.end();
        for (std::size_t const extent : tensor.extents) {
            fits = fits && (is_empty || count <= most / extent);
            count *= is_empty || fits ? extent : 0;
        }
        if (!fits || count * size_of(tensor.dtype) != bytes) {
            refuse(
                "tensor ",
                tensor.name,
                " is ",
                to_text(tensor),
                ", but its data_offsets say ",
                bytes,
                " bytes"
            );
        }
    }

    /// Sorts the tensors, and throws unless they fill the data one after another.
    void check_places(std::vector<StoredTensor>& tensors) const {
        std::sort(tensors.begin(), tensors.end(), [](auto const& a, auto const& b) {
            return std::pair{a.begin, a.end} < std::pair{b.begin, b.end};
        });
        std::uint64_t next = 0;
        for (StoredTensor const& tensor : tensors) {
            if (tensor.begin != next) {
                refuse(
                    "tensor ",
                    tensor.name,
                    " begins at byte ",
                    tensor.begin,
                    " of the data, but the one before ends at ",
                    next,
                    tensor.begin < next ? ": they overlap" : ": there is a gap"
                );
            }
            next = tensor.end;
        }
        if (next != data_bytes_) {
            refuse("its tensors have ", next, " bytes, but its data ", data_bytes_);
        }
    }

    std::string_view file_;
    std::uint64_t data_bytes_;
};

}}} // namespace joinable::v0::detail
